"""The README.md of an exported model: what it is, what it was trained on, what was measured, how to load it."""

from __future__ import annotations

import json
import math
import shlex
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped, unused-ignore]

from stepformer.base import documents
from stepformer.base.errors import StepformerWarning
from stepformer.catalogue import citations, preset_of
from stepformer.catalogue.references import BIBTEX
from stepformer.data.tokenizers import valid
from stepformer.exchange.huggingface.card_results import markdown, section
from stepformer.measure import measured
from stepformer.model.config import ModelConfig
from stepformer.oracles import attentions, mlps
from stepformer.present.tables import markdown_block, markdown_code, markdown_text, on_one_line
from stepformer.rules import splittings, templates
from stepformer.training.metrics import read_metrics
from stepformer.training.run import LoadedRun


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
        f"These are the weights after step {run.step:,}.",
        architecture(config, run.model.num_parameters(), run.model.num_parameters("non-embedding")),
        loading(title, run.tokenizer.name, gpt2),
        training(run),
        results(run),
        environment(run),
        cite(config),
    ]
    return valid("\n\n".join(section for section in sections if section) + "\n")


def header(config: ModelConfig, gpt2: bool) -> str:
    row = preset_of(config)
    tags = ["stepformer", *([row.name] if row else []), config.template, config.attention]
    lines = [
        "---",
        f"library_name: {'transformers' if gpt2 else 'stepformer'}",
        "pipeline_tag: text-generation",
        "# license: fill in, e.g. apache-2.0, after looking at the licence of the training data",
        "tags:",
        # between quotation marks the end of a line is \n: no line of a name can end the header
        yaml.safe_dump(list(dict.fromkeys(tags)), default_style='"', width=math.inf, allow_unicode=True).rstrip(),
        "---",
    ]
    return "\n".join(lines)


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
    settings = config.to_dict()
    lines = [
        "## Architecture",
        "",
        f"Preset {markdown_code(row.name)}." if row else "Not a named preset: a combination of its own.",
        "",
        markdown_block("\n".join(f"{name}: {equation}" for name, equation in equations.items() if equation)),
        "",
        f"{parameters:,} parameters, {without_tables:,} without token and position tables. Config `{config.hash}`:",
        "",
        markdown_block(json.dumps(settings, indent=2), "json"),
    ]
    return "\n".join(lines)


def loading(title: str, tokenizer: str, gpt2: bool) -> str:
    run = shlex.quote(f"runs/{on_one_line(title)}")
    commands = f'stepformer import FOLDER --out {run}\nstepformer generate {run} "Once upon a time"'
    needs = "transformers" if gpt2 else "'stepformer[hub]'"
    imports = "" if gpt2 else "import stepformer.exchange.huggingface  # or pass trust_remote_code=True below\n"
    return f"""\
## Use

With transformers (`pip install {needs}`), FOLDER being this folder or its name on the Hub:

```python
{imports}from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER")
prompt = tokenizer(tokenizer.bos_token + "Once upon a time", return_tensors="pt")  # a new document
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=40)[0]))
```

With stepformer, as a run to generate from, evaluate, diagnose and train on:

{markdown_block(commands, "bash")}

The tokenizer is {markdown_code(tokenizer)}; documents are separated by its end-of-text token."""


def training(run: LoadedRun) -> str:
    config, imported = run.config, run.record.get("imported")
    if imported:
        known = {key: value for key, value in imported.items() if value is not None and key not in ("files", "corpus")}
        known |= {f"sha256 of {name}": checksum for name, checksum in imported.get("files", {}).items()}
        return "## Origin\n\nImported by stepformer; how it was trained is not recorded.\n\n" + table(known)
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
    text = "## Training\n\n" + table(facts)
    if run.record.get("plugins"):
        names = ", ".join(markdown_code(Path(plugin).name) for plugin in run.record["plugins"])
        text += f"\n\nThe architecture has rules of its own, from {names}: import that before loading the model."
    return text


def results(run: LoadedRun) -> str:
    found = validation(run)
    lines = ["## Results", ""]
    if "val_loss" in found:
        where = ""
        if "val_tokens" in found:
            where = f" on {found['val_tokens']:,} tokens of the split {markdown_code(found['val_hash'])}"
        lines.append(
            f"Validation loss {found['val_loss']:.4f} nats per token{where}. Only losses on the same tokens may be "
            "compared."
        )
    if next(run.model.parameters()).dtype == torch.bfloat16:
        lines += ["", "Numbers are of the weights before they were rounded to bf16."]
    folder = run.folder.path / measured.FOLDER
    others = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        measurement = measured.load(run.folder.path, path.stem)
        if measurement is not None:
            shown = section(path.stem, measurement)
            lines += ["", shown] if shown else []
            others += [] if shown else [path.stem]
    if others:
        lines += ["", f"Also measured, in the run's own files: {markdown_text(', '.join(others))}."]
    return "\n".join(lines) if len(lines) > 2 else ""


def environment(run: LoadedRun) -> str:
    path = run.folder.path / "environment.json"
    if not path.is_file() or run.record.get("imported"):
        return ""
    known = documents.read(path, documents.ENVIRONMENT)
    versions, device, git = (known.get(key) or {} for key in ("versions", "device", "git"))
    facts = {**versions, **device, "platform": known.get("platform", "")}
    if git.get("revision"):
        facts["revision of stepformer"] = f"{git['revision']}{' with changes' if git.get('changed') else ''}"
    return "## Environment\n\n" + table(facts)


def cite(config: ModelConfig) -> str:
    entries = [BIBTEX[key] for key in citations(config) if key in BIBTEX]
    return "## References\n\n```bibtex\n" + "\n\n".join(entries) + "\n```" if entries else ""


def table(facts: Mapping[str, Any]) -> str:
    return markdown(("", ""), list(facts.items()))
