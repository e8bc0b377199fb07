"""The README.md of an exported model: what it is, what it was trained on, what was measured, how to load it."""

from __future__ import annotations

import importlib
import json
import math
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml  # type: ignore[import-untyped, unused-ignore]

from stepformer.base import documents
from stepformer.base.errors import StepformerWarning, command_line
from stepformer.catalogue import citations, preset_of
from stepformer.catalogue.references import BIBTEX
from stepformer.data.tokenizers import valid
from stepformer.measure import measured
from stepformer.measure.evaluation.harness import other_metrics, with_error
from stepformer.measure.evaluation.perplexity import SEEN, marked_name
from stepformer.model.config import ModelConfig
from stepformer.oracles import attentions, mlps
from stepformer.present.tables import Cell, markdown_block, markdown_cell, markdown_code, markdown_text, on_one_line
from stepformer.rules import splittings, templates
from stepformer.training.loading import LoadedRun
from stepformer.training.metrics import read_metrics


def validation(run: LoadedRun) -> dict[str, Any]:
    """The validation loss of the loaded checkpoint with its token count and split hash, if the run has it."""
    path = run.folder.metrics
    if not path.is_file() and not run.record.get("imported"):
        warnings.warn(f"There is no metrics file '{path}': the card has no loss.", StepformerWarning, stacklevel=2)
    for line in read_metrics(path) if path.is_file() else ():
        if line.get("kind") == "eval" and line["step"] == run.step:
            return {key: line[key] for key in ("val_loss", "val_tokens", "val_hash", "tokens")}
    imported = run.record.get("imported", {})
    return {key: imported[key] for key in ("val_loss", "val_tokens", "val_hash") if imported.get(key) is not None}


def model_card(run: LoadedRun, *, gpt2: bool = False) -> str:
    """The whole card in Markdown with its YAML header; the licence is for the user to fill in.

    A run's folder may come from anybody: its words are shown as words, whatever they are made of.
    """
    config = run.config.model
    title = run.config.title
    sections = [
        header(config, gpt2),
        f"# {markdown_text(title)}\n\n"
        "A language model made with stepformer, in which a layer is one step of an optimizer. "
        f"These are the weights {'as they were imported' if run.known_step is None else f'after step {run.step:,}'}.",
        architecture(config, run.model.num_parameters(), run.model.num_parameters("non-embedding")),
        loading(title, run.tokenizer.name, gpt2, own_modules(run), [name for name, _ in run.folder.sources()]),
        training(run),
        results(run),
        environment(run),
        cite(config, "" if run.record.get("imported") else run.config.optim.name),
    ]
    return valid("\n\n".join(section for section in sections if section) + "\n")


def header(config: ModelConfig, gpt2: bool) -> str:
    row = preset_of(config)
    tags = dict.fromkeys(["stepformer", *([row.name] if row else []), config.template, config.attention])
    # between quotation marks the end of a line is \n: no line of a name can end the header
    listed = yaml.safe_dump(list(tags), default_style='"', width=math.inf, allow_unicode=True).rstrip()
    return f"""\
---
library_name: {"transformers" if gpt2 else "stepformer"}
pipeline_tag: text-generation
# license: fill in, e.g. apache-2.0, after looking at the licence of the training data
tags:
{listed}
---"""


def architecture(config: ModelConfig, parameters: int, without_tables: int) -> str:
    row = preset_of(config)
    splitting = splittings[config.splitting].component(**config.options_of("splitting"))
    equations = {
        "layer": row.equation if row else "",
        f"template {config.template}": templates[config.template].equation,
        f"splitting {config.splitting}": splitting.describe(),
        f"attention {config.attention}": attentions[config.attention].equation,
        f"MLP {config.mlp}": mlps[config.mlp].equation,
    }
    named = f"Preset {markdown_code(row.name)}." if row else "Not a named preset: a combination of its own."
    lines = "\n".join(f"{name}: {equation}" for name, equation in equations.items() if equation)
    return f"""\
## Architecture

{named}

{markdown_block(lines)}

{parameters:,} parameters, {without_tables:,} without token and position tables. Config `{config.hash}`:

{markdown_block(json.dumps(config.to_dict(), indent=2), "json")}"""


def own_modules(run: LoadedRun) -> list[str]:
    """What has to be imported before the model, as it was called when the run was made: its plug-ins, or the files of
    rules that a program imported.
    """
    record = run.folder.read()
    files = [file for files in record.get("code", {}).values() for file in files if file.endswith(".py")]
    return [Path(where).name for where in record.get("plugins", [])] or list(dict.fromkeys(files))


def loading(title: str, tokenizer: str, gpt2: bool, modules: Sequence[str] = (), sources: Sequence[str] = ()) -> str:
    run, first, imports = f"runs/{on_one_line(title)}", "", ""
    plugged = [word for name in modules for word in ("--plugin", on_one_line(name))]
    commands = command_line("import", "FOLDER", "--out", run, *plugged)
    commands += f"\n{command_line('generate', run, 'Once upon a time')}"
    needs = "With transformers (`pip install transformers`)"
    if not gpt2:
        needs = "With transformers and stepformer (`pip install -e '.[hub]'` in a clone of its repository)"
    if modules:
        names, beside = (", ".join(map(markdown_code, found)) for found in (modules, sources))
        first = f"The architecture has rules of its own, from {names}: import that before loading the model.\n\n"
        if sources:
            first = f"{first.rstrip()} Its source is in this folder, to be read and saved without .txt: {beside}.\n\n"
        imports = "".join(f"{import_line(name)}  # the rule, before the model\n" for name in modules)
    imports += "" if gpt2 else "import stepformer.exchange.huggingface  # or pass trust_remote_code=True below\n"
    code = f"""\
{imports}from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER")
prompt = tokenizer(tokenizer.bos_token + "Once upon a time", return_tensors="pt")  # a new document
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=40)[0]))"""
    return f"""\
## Use

{first}{needs}, FOLDER being this folder or its name on the Hub:

{markdown_block(code, "python")}

With stepformer, as a run to generate from, evaluate, diagnose and train on:

{markdown_block(commands, "bash")}

The tokenizer is {markdown_code(tokenizer)}; documents are separated by its end-of-text token."""


def import_line(name: str) -> str:
    """The line of Python that imports a plug-in, whatever it is called."""
    module = name.removesuffix(".py")
    if all(part.isidentifier() for part in module.split(".")):
        return f"import {module}"
    return f"import stepformer.base.plugins; stepformer.base.plugins.load_plugin({json.dumps(on_one_line(name))})"


def training(run: LoadedRun) -> str:
    config, imported = run.config, run.record.get("imported")
    if imported:
        known = {key: value for key, value in imported.items() if value is not None and key not in ("files", "corpus")}
        known |= {f"sha256 of {name}": checksum for name, checksum in imported.get("files", {}).items()}
        return "## Origin\n\nImported by stepformer; how it was trained is not recorded.\n\n" + markdown(
            ("", ""), [*known.items()]
        )
    corpus = run.record.get("corpus", {})
    splits, start = corpus.get("splits", {}), run.record.get("init")
    facts: dict[str, Any] = {
        "corpus": Path(corpus.get("folder", config.data.corpus)).name,
        **{f"{name} split": f"{split['tokens']:,} tokens, hash {split['hash']}" for name, split in splits.items()},
        "tokenizer": f"{run.tokenizer.name}, fingerprint {run.tokenizer.fingerprint}",
        "tokens seen": f"{run.step * config.step_tokens:,}",
        "steps": f"{run.step:,} of {config.train.steps:,}",
        "batch": f"{config.train.batch} sequences of {config.model.context} tokens",
        "optimizer": config.optim.name,
        "seed": config.train.seed,
        "precision": run.record.get("precision", config.train.precision),
        "recipe": config.recipe or "none",
        "initial weights": f"run {start['id']}, step {start['step']:,}" if start else "random",
        "config hash": config.hash,
    }
    path = run.folder.result
    result = documents.read(path, documents.RESULT) if path.is_file() else {}
    if result.get("train_seconds"):
        facts["training time"] = (
            f"{result['train_seconds']:,.0f} s on {result.get('ranks', 1)} x {result.get('device', 'cpu')}"
        )
    return "## Training\n\n" + markdown(("", ""), [*facts.items()])


def results(run: LoadedRun) -> str:
    found, parts = validation(run), []
    if "val_loss" in found:
        known = "val_tokens" in found
        where = f" on {found['val_tokens']:,} tokens of the split {markdown_code(found['val_hash'])}" if known else ""
        loss = f"Validation loss {found['val_loss']:.4f} nats per token{where}."
        parts.append(f"{loss} Only losses on the same tokens may be compared.")
    if next(run.model.parameters()).dtype == torch.bfloat16:
        parts.append("Numbers are of the weights before they were rounded to bf16.")
    kinds = [path.stem for path in sorted((run.folder.path / measured.FOLDER).glob("*.json"))]
    stored = {kind: measured.load(run.folder.path, kind) for kind in kinds}
    shown = {kind: section(kind, measurement) for kind, measurement in stored.items() if measurement is not None}
    parts += filter(None, shown.values())
    others = [kind for kind, text in shown.items() if not text]
    if others:
        parts.append(f"Also measured, in the run's own files: {markdown_text(', '.join(others))}.")
    return "\n\n".join(["## Results", *parts]) if parts else ""


def environment(run: LoadedRun) -> str:
    path = run.folder.path / "environment.json"
    if not path.is_file() or run.record.get("imported"):
        return ""
    known = documents.read(path, documents.ENVIRONMENT)
    versions, device, git = (known.get(key) or {} for key in ("versions", "device", "git"))
    facts = {**versions, **device, "platform": known.get("platform", "")}
    if git.get("revision"):
        facts["revision of stepformer"] = f"{git['revision']}{' with changes' if git.get('changed') else ''}"
    return "## Environment\n\n" + markdown(("", ""), [*facts.items()])


def cite(config: ModelConfig, optimizer: str) -> str:
    entries = [BIBTEX[key] for key in citations(config, optimizer) if key in BIBTEX]
    return "## References\n\n```bibtex\n" + "\n\n".join(entries) + "\n```" if entries else ""


# What was measured of a run: a small table for each kind, and the command that makes it. Numbers by layer and by token
# are for the report. Commands are made from the settings, not copied: what was typed may name places on the machine.

MOST_ROWS = 8  # of a table with a line for each text or task
MODULES = {"hessian": "curvature", "jacobian": "jacobian", "depth": "depth"}
Row = Sequence[Any]
Values = Mapping[str, Any]


def section(kind: str, measurement: Values) -> str:
    """The heading, the command, the table and what to know about it; empty where there is nothing to show."""
    if kind not in KINDS:
        return ""
    title, read = KINDS[kind]
    try:
        titles, rows, command, notes = read(kind, measurement["settings"], measurement["result"])
        step = f", weights of step {measurement['step']:,}" if measurement["step"] else ""
    except (KeyError, TypeError, ValueError, AttributeError):  # of another version, or written by hand
        return ""
    if not rows:
        return ""
    if len(rows) > MOST_ROWS:
        notes = [*notes, f"{len(rows) - MOST_ROWS} more are in the run's own file."]
    made = f"{markdown_code(command)}{step}. {markdown_text(' '.join(notes))}".rstrip()
    return "\n".join([f"### {title}", "", made, "", markdown(titles, rows[:MOST_ROWS])])


Read = tuple[Row, list[Row], str, list[str]]  # titles, rows, the command, notes


def hessian(kind: str, settings: Values, result: Values) -> Read:
    trace, curve = result.get("trace") or {}, result.get("curve") or {}
    values = [f"{entry['value']:.4g}{'' if entry['converged'] else '?'}" for entry in result.get("eigenvalues") or ()]
    rows = [
        ("loss, nats per token", digits(result.get("loss"))),
        ("largest eigenvalues", ", ".join(values)),
        ("trace", with_error({"mean": trace.get("mean"), "mean_stderr": trace.get("standard_error")}, "mean", 1)),
        ("trace per parameter", digits(result.get("trace_per_parameter"))),
        ("range of the loss curve", digits(curve.get("range"))),
        ("tokens", f"{result['tokens']:,}"),
    ]
    notes = ["± is one standard error."] if trace else []
    notes += ["An eigenvalue with ? had not converged."] if any(value.endswith("?") for value in values) else []
    return ("", ""), [row for row in rows if row[1]], diagnosing(kind, settings), notes


def jacobian(kind: str, settings: Values, result: Values) -> Read:
    titles = ("of a layer", "persistence", "sum of log rms gain", "mean spread")
    keys = ("persistence", "sum_log_rms_gain", "mean_spread")
    rows: list[Row] = [
        (name, *(digits(result["summary"][name].get(key)) for key in keys))
        for name in ("block", "oracle", "joint")
        if name in result["summary"]
    ]
    ranks = sorted({part["k"] for layer in result["layers"] for part in layer.values() if isinstance(part, Mapping)})
    k = " or ".join(map(str, ranks))
    notes = [
        f"Persistence is the sum over layers of the logarithm of singular value {k}, spread the largest over that one.",
        f"{result['tokens']:,} tokens.",
    ]
    return titles, rows, diagnosing(kind, settings), notes


def depth(kind: str, settings: Values, result: Values) -> Read:
    heads = [fmean(layer["entropy"]) for layer in result["layers"] if layer.get("entropy")]
    shares = {key: [layer[key] for layer in result["layers"] if layer.get(key) is not None] for key in SHARES}
    rows = [("mean attention entropy, nats", digits(fmean(heads)))] if heads else []
    rows += [(SHARES[key], f"{100 * fmean(found):.2f} %") for key, found in shares.items() if any(found)]
    rows += [("layers", f"{len(result['layers'])}"), ("tokens", f"{result['tokens']:,}")] if rows else []
    return ("", ""), list(rows), diagnosing(kind, settings), []


SHARES = {"capped_rows": "capped rows, mean over layers", "bounded_scores": "bounded scores, mean over layers"}


def tasks(kind: str, settings: Values, result: Values) -> Read:
    entries = sorted(result["tasks"].values(), key=lambda entry: (entry["task"], entry["shots"] or 0))
    other = [", ".join(f"{name} {with_error(entry, name, 1)}" for name in other_metrics(entry)) for entry in entries]
    rows: list[Row] = []
    for entry, rest in zip(entries, other, strict=True):
        items = "" if entry["items"] is None else f"{entry['items']:,}"
        if entry["items"] != entry["of"]:
            items += f" of {entry['of']:,}"
        shots = "" if entry["shots"] is None else entry["shots"]
        accuracies = [with_error(entry, name, 100) for name in ("acc", "acc_norm")]
        rows.append((Path(entry["task"]).name, shots, items, *accuracies, *([rest] if any(other) else [])))
    titles = ("task", "shots", "items", "acc %", "acc_norm %", *(["other"] if any(other) else []))
    words = ["--tasks", ",".join(dict.fromkeys(row[0] for row in rows))]
    shown = sorted({entry["shots"] for entry in entries if entry["shots"] is not None})
    words += ["--shots", ",".join(map(str, shown))] if shown else []
    notes = ["± is one standard error.", f"lm_eval {settings['lm_eval']}." if "lm_eval" in settings else ""]
    return titles, rows, f"stepformer eval RUN {shlex.join(words)}", [note for note in notes if note]


def perplexity(kind: str, settings: Values, result: Values) -> Read:
    titles = ("text", "read in", "nats per token", "perplexity", "bits per byte", "tokens", "hash")
    rows: list[Row] = []
    for entry in result["texts"]:
        mode = entry["mode"] if entry["stride"] is None else f"{entry['mode']} {entry['stride']}"
        numbers = (f"{entry['nats']:.4f}", digits(entry["perplexity"]), digits(entry["bits_per_byte"]))
        rows.append((marked_name(entry), mode, *numbers, f"{entry['tokens']:,}", Cell(str(entry["hash"]), code=True)))
    notes = ["Only numbers with the same tokens and hash may be compared."]
    notes += [SEEN] if any(entry.get("seen") is True for entry in result["texts"][:MOST_ROWS]) else []
    command = "stepformer eval RUN --on TEXT"
    if "mean_perplexity" in result:
        command += " --ood --data DIR"
        notes.append(f"Mean perplexity {digits(result['mean_perplexity'])} ({result['protocol']}).")
    return titles, rows, command, notes


KINDS = {
    "hessian": ("Hessian of the loss", hessian),
    "jacobian": ("Jacobians of the layers", jacobian),
    "depth": ("Inside the network", depth),
    "tasks": ("Downstream tasks", tasks),
    "perplexity": ("Perplexity", perplexity),
}


def diagnosing(kind: str, settings: Values) -> str:
    """The command with the settings that are not the default; of a folder only its name."""
    defaults = importlib.import_module(f"stepformer.measure.diagnostics.{MODULES[kind]}").SETTINGS().to_dict()
    changed = {key: value for key, value in settings.items() if value != defaults.get(key)}
    words = [shlex.quote(f"{k}={Path(v).name if k == 'corpus' else v}") for k, v in changed.items()]
    return " ".join(["stepformer diagnose RUN", f"--{kind}", *words])


def digits(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def markdown(titles: Row, rows: Sequence[Row]) -> str:
    cells = [[value if isinstance(value, Cell) else Cell(str(value)) for value in line] for line in (titles, *rows)]
    head, *body = (" | ".join(map(markdown_cell, line)) for line in cells)
    return "\n".join(f"| {line} |" for line in (head, " | ".join(["---"] * len(titles)), *body))
