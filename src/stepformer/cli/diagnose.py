"""`stepformer diagnose`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from stepformer.base.errors import ConfigError, InputError, suggestion
from stepformer.base.settings import Settings
from stepformer.base.words import parse_overrides
from stepformer.cli.hybrids import HYBRID, hybrid_of
from stepformer.cli.options import CHECKPOINT, DEVICE, QUIET, RUN, command, drawn, option
from stepformer.cli.show import console
from stepformer.measure import measured
from stepformer.training import load_run

# Each has SETTINGS (a Settings class), measure(run, settings, quiet=), text(result) and plot(result, path).
KINDS = {
    "hessian": ("curvature", "sharpness: eigenvalues and trace of the Hessian, loss curve"),
    "jacobian": ("jacobian", "how perturbations travel through depth: singular values by layer"),
    "depth": ("depth", "inside the network: coefficients, stream norms, attention entropy, ..."),
    "balance": ("balance", "second moments of the oracles: how far a diagonal preconditioner is from a scalar"),
    "steps": ("steps", "what the optimizer's next step does: change of attention and streams, predicted and measured"),
}


def _module(kind: str) -> Any:
    return importlib.import_module(f"stepformer.measure.diagnostics.{KINDS[kind][0]}")


def _settings(kinds: list[str], words: list[str]) -> dict[str, Settings]:
    """The settings of every kind asked for; a word without a kind goes to all kinds that know its key."""
    values: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    problems: list[str] = []
    for key, value in parse_overrides(words, problems):
        kind, dot, name = key.partition(".")
        owners = [kind] if dot else [k for k in kinds if key in _module(k).SETTINGS.field_names()]
        if not owners or owners[0] not in kinds:
            known = [name for k in kinds for name in _module(k).SETTINGS.field_names()]
            other = f" Add --{kind}." if dot and kind in KINDS else suggestion(key, known)
            problems.append(f"'{key}' is no setting of {' or '.join(f'--{k}' for k in kinds)}.{other}")
            continue
        for owner in owners:
            values[owner][name if dot else key] = value
    made = {}
    for kind in kinds:
        try:
            made[kind] = _module(kind).SETTINGS.from_dict(values[kind])
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return made


def run_diagnose(args: argparse.Namespace) -> int:
    kinds = [kind for kind in KINDS if getattr(args, kind)]
    if not kinds:
        raise InputError(f"Say what to measure: {', '.join(f'--{kind}' for kind in KINDS)}.")
    settings = _settings(kinds, args.overrides)
    run = hybrid_of(args, load_run(args.folder, args.checkpoint, args.device))
    found = {}
    for kind in kinds:
        module = _module(kind)
        try:
            found[kind] = module.measure(run, settings[kind], quiet=args.quiet or args.json)
        except KeyboardInterrupt:
            print("stepformer: interrupted; finished parts are kept, the same command continues", file=sys.stderr)
            return 130
        path = measured.file(run.folder.path, measured.kind_of(kind, run.model))
        made = [path, *drawn(module.plot, found[kind], path.with_suffix(".png"))]
        if not args.json:
            console().print(module.text(found[kind]))
            print(f"written: {', '.join(map(str, made))}")
    if args.json:
        print(
            json.dumps(
                {"run": str(Path(args.folder)), "step": run.known_step, **measured.variant_of(run.model), **found}
            )
        )
    return 0


def _settings_help() -> str:
    lines = []
    for kind in KINDS:
        lines.append(f"settings of --{kind}:")
        for field in dataclasses.fields(_module(kind).SETTINGS):
            default = "" if field.default is None else f"={field.default}"
            lines.append(f"  {field.name}{default}".ljust(33) + field.metadata["help"])
    return "\n".join(lines)


def add_diagnose(commands: Any, common: argparse.ArgumentParser) -> None:
    command(
        run_diagnose,
        RUN,
        option("overrides key=value", "settings to change (kind.key=value for one)", nargs="*"),
        *(option(f"--{kind}", help) for kind, (_, help) in KINDS.items()),
        HYBRID,
        CHECKPOINT,
        DEVICE,
        option("--json", "print the results as JSON"),
        QUIET,
        settings=_settings_help,
    )(commands, common)
