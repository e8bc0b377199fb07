"""`stepformer audit`."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stepformer.base.errors import InputError
from stepformer.base.progress import say
from stepformer.base.words import read_toml
from stepformer.catalogue import OTHER_SECTIONS, presets, unlisted_templates
from stepformer.cli.options import JSON, command, given, option
from stepformer.cli.show import console, resolve, title_of
from stepformer.measure.diagnostics.audit import AGAIN, GEOMETRY, IGNORED, OBLIGATIONS, Audit, audit
from stepformer.measure.diagnostics.second_versions import load_transcription
from stepformer.model.config import ModelConfig
from stepformer.present.tables import Table, columns, text
from stepformer.training.config import place

LEGEND = """
1 parameters of the audited copy   2 change of earlier logits by later tokens (fp32, fp64) and by a longer context
3 cached against full logits   4 loss on random tokens, ln V = {chance:.3f}   5 finite, reaching every parameter
6 gradients against finite differences (fd), values and gradients against the transcribed equations (tr)"""


def run_audit(args: argparse.Namespace) -> int:
    overrides = [word for word in args.names if "=" in word]
    names = [word for word in args.names if "=" not in word]
    if args.all and overrides:
        raise InputError("--all audits the presets as they are; name the architectures to change them with key=value.")
    names += [*presets(), *unlisted_templates()] if args.all else []
    if not names:
        raise InputError("Which architecture? Give names, or --all for every preset.")
    if args.steps < 30:
        raise InputError(f"--steps {args.steps} is too short to learn anything from; use at least 30.")
    ignored = ignored_words(names, overrides)
    overrides = [word for word in overrides if place(word.partition("=")[0])[0] == "model"]
    configs: dict[str, ModelConfig] = {}
    for name in names:
        config = resolve(name, overrides)
        if config not in configs.values():
            configs[title_of(config) if overrides or name.endswith(".toml") else name] = config
    transcription = load_transcription(args.transcriptions)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are tiny: threads cost more than they give
    began = time.perf_counter()
    results, interrupted = [], False
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=len(configs) * len(OBLIGATIONS))
            for name, config in configs.items():

                def show(stage: str, name: str = name) -> None:
                    bar.update(task, advance=1, description=f"{name}: {stage}")

                chosen = given(args, "steps", "seed")
                results.append(audit(config, name, transcription=transcription, progress=show, **chosen))
                outcome = "passes" if results[-1].passed else "fails"
                say(f"{name} {outcome}  {len(results)}/{len(configs)}", quiet=sys.stderr.isatty())  # there is a bar
    except KeyboardInterrupt:
        interrupted = True
    finally:
        torch.set_num_threads(threads)
    if args.json:
        print(json.dumps([_as_json(result) for result in results], indent=2))
    else:
        print_results(results, time.perf_counter() - began, args.steps)
    if ignored:
        size = "{n_layer} layers, {n_head} heads, width {d_model}, context {context}, vocabulary {vocab_size}"
        size = size.format(**GEOMETRY)
        print(f"note: ignored: {', '.join(ignored)}. The audited copy has {size}, and --steps.", file=sys.stderr)
    if interrupted:
        print(f"stepformer: interrupted after {len(results)} of {len(configs)} architectures", file=sys.stderr)
        return 130
    return 0 if all(result.passed for result in results) else 1


def ignored_words(names: list[str], overrides: list[str]) -> list[str]:
    """Settings that say something about size or training, which the audit has its own of; of files with their names."""
    found = [word for word in overrides if _is_ignored(*place(word.partition("=")[0]))]
    for name in (name for name in names if name.endswith(".toml")):
        document = {key: section for key, section in read_toml(name).items() if isinstance(section, dict)}
        found += [f"{key} of {name}" for key in document.get("model", {}) if _is_ignored("model", key)]
        found += [f"[{section}] of {name}" for section in document if section in OTHER_SECTIONS]
    return found


def _is_ignored(section: str, key: str) -> bool:
    return section != "model" or key in IGNORED


def _as_json(result: Audit) -> dict[str, Any]:
    checks = [
        {"obligation": c.obligation, "title": OBLIGATIONS[c.obligation], "passed": c.passed, "detail": c.detail}
        for c in result.checks
    ]
    return {"name": result.name, "passed": result.passed, "geometry": GEOMETRY, "checks": checks}


def print_results(results: list[Audit], seconds: float, steps: int) -> None:
    out = console()
    table = Table(columns("architecture", *(f"{number} {title}" for number, title in OBLIGATIONS.items())), [])
    remarks = []
    for result in results:
        cells = [text(result.name, style="" if result.passed else "red")]
        for check in result.checks:
            long = len(check.detail) > 26
            if long or not (check.passed or check.detail == AGAIN):
                remarks.append(f"{result.name}: {check.obligation} {OBLIGATIONS[check.obligation]}: {check.detail}")
            cells.append(text("FAIL" if not check.passed else "ok, see below" if long else check.detail))
        table.rows.append(cells)
    out.print(table)
    for remark in remarks:
        out.print(remark, markup=False, soft_wrap=True)
    out.print(LEGEND.format(chance=math.log(GEOMETRY["vocab_size"])), style="dim")
    failed = [result.name for result in results if not result.passed]
    transcribed = sum("tr " in check.detail for result in results for check in result.checks if check.obligation == 6)
    fewer = "".join(f", {result.name} took {result.steps} of them" for result in results if result.steps < steps)
    out.print(
        f"{len(results) - len(failed)} of {len(results)} pass, {transcribed} against a transcription "
        f"({steps} training steps{fewer}, {seconds:.0f} s, torch {torch.__version__})"
    )
    if failed:
        out.print(f"[red]failed:[/red] {', '.join(failed)}")


add_audit = command(
    run_audit,
    option("names NAME", "presets, templates or config.toml; key=value applies to all", nargs="*"),
    option("--all", "every preset"),
    option("--steps", "training steps of obligation 4, at least 30 (default: 300)", type=int, default=300),
    option("--seed", "seed of weights and tokens (default: 0)", type=int, default=0),
    option("--transcriptions FILE", "Python file with transcribe(model, tokens) -> logits"),
    JSON,
    obligations=lambda: "\n".join(f"  {number}  {title}" for number, title in OBLIGATIONS.items()),
)
