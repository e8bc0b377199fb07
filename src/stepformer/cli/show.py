"""`stepformer list` and `stepformer show`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from stepformer import catalogue
from stepformer.base.errors import InputError, command_line, suggestion
from stepformer.base.plugins import is_ours
from stepformer.base.words import merge
from stepformer.catalogue.recipes import recipe_names
from stepformer.catalogue.references import bibtex
from stepformer.cli.options import JSON, command, group, option, pairs, tell_idle
from stepformer.extras import chosen
from stepformer.measure.diagnostics.audit import small_copy
from stepformer.model import Model, engines
from stepformer.model.config import ModelConfig, declared_options, selected
from stepformer.oracles import attentions, mlps
from stepformer.present.tables import of_texts
from stepformer.rules import Coefficient, splittings, templates
from stepformer.rules.hamiltonian import HamiltonianStep
from stepformer.training.config import DataConfig, OptimConfig, RunConfig, TrainConfig, run_config
from stepformer.training.memory import estimate_memory
from stepformer.training.runs import RunFolder

COUNTS = ("total", "non-positional", "non-embedding")


def console() -> Console:
    """Standard output; 120 columns when it is not a terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def resolve(name: str, overrides: list[str], size: str | None = None) -> ModelConfig:
    """The config behind a NAME (preset, template or TOML file) with `key=value` words."""
    values = merge({}, overrides, "model")
    if size and values.get("size", size) != size:
        raise InputError(f"Two sizes were given: --size {size} and size={values['size']}.")
    if name.endswith(".toml"):
        config = catalogue.load_config(name, _sized(overrides, size))
    elif "preset" in values:
        raise InputError("`preset` is the NAME itself: write `stepformer show NAME key=value ...`.")
    else:
        config = catalogue.model_config(name, **merge({}, _sized(overrides, size), "model"))
    return RunConfig(config).model  # what no run could be made of is refused here, too


def _sized(overrides: list[str], size: str | None) -> list[str]:
    return [*([f"size={size}"] if size else []), *overrides]


def title_of(config: ModelConfig) -> str:
    """A preset's name and aliases, or the combination it is: `nesterov x strang, order=mam`."""
    if row := catalogue.preset_of(config):
        return ", ".join((row.name, *row.aliases))
    settings = {
        k: v for k, v in config.to_dict().items() if k not in ("template", "splitting", *catalogue.SIZES["small"])
    }
    plain = (("attention", "softmax"), ("mlp", "gelu"))
    settings = {key: json.dumps(v) if isinstance(v, tuple) else v for key, v in settings.items()}
    extra = "".join(f", {key}={value}" for key, value in settings.items() if (key, value) not in plain)
    return f"{config.template} x {config.splitting}{extra}"


def run_list(args: argparse.Namespace) -> int:
    rows = [catalogue.preset(name) for name in catalogue.presets(args.pattern)]
    rows += [catalogue.preset(name) for name in catalogue.unlisted_templates() if args.pattern.strip("*") in name]
    if args.json:
        print(json.dumps([_row(row) for row in rows], indent=2))
        return 0
    if not rows:
        near = suggestion(args.pattern, catalogue.known_names())
        raise InputError(f"No preset matches '{args.pattern}'.{near} `stepformer list` shows all of them.")
    out = console()
    names = [", ".join((row.name, *row.aliases)) for row in rows]
    width = max(map(len, names))
    for row, name in zip(rows, names, strict=True):
        calls = _calls(row.config)
        attention = f" x {row.config.attention}" if row.config.attention != "softmax" else ""
        what = f"{row.config.template} x {row.config.splitting}{attention}, {calls['attn']}+{calls['mlp']} oracle calls"
        out.print(f"[bold]{name:<{width}}[/bold]  {what}", soft_wrap=True)
        out.print(f"    {row.equation}", soft_wrap=True, markup=False)
    return 0


def _row(row: catalogue.Preset) -> dict[str, Any]:
    return {
        "name": row.name,
        "aliases": list(row.aliases),
        "template": row.config.template,
        "splitting": row.config.splitting,
        "attention": row.config.attention,
        "settings": dict(row.settings),
        "equation": row.equation,
        "calls": _calls(row.config),
        "cite": row.cite,
        "published": row.published,
    }


def _calls(config: ModelConfig) -> dict[str, int]:
    return splittings[config.splitting].component(**config.options_of("splitting")).calls()


def describe(config: ModelConfig) -> dict[str, Any]:
    """Everything `show` prints, as plain data."""
    if not all(map(is_ours, config.components().values())):  # one that cannot run is told
        Model(small_copy(config))(torch.zeros(2, 3, dtype=torch.long))
    model = Model(config, device="meta")
    block = model.blocks[0]
    rule = block.template
    row = catalogue.preset_of(config)
    coefficients = [
        {"name": name + _several(c, config.d_model), "range": c.interval, "start": c.start, "kind": c.kind}
        for bank in block.banks()
        for name, c in bank.specs.items()
    ]
    streams = {
        name: {"start": _start(config, stream.start), "meaning": stream.meaning}
        for name, stream in rule.streams.items()
    }
    options = {
        name: {"value": config.option(name), "of": kind, "values": option.values, "help": option.help}
        for name, (kind, option) in declared_options(config).items()
    }
    small = all(getattr(config, key) == value for key, value in catalogue.SIZES["small"].items())
    return {
        "title": title_of(config),
        "name": row.name if row else "",
        "aliases": list(row.aliases) if row else [],
        "equations": {
            "layer": row.equation if row else catalogue.layer_equation(config),
            "template": rule.moves() if isinstance(rule, HamiltonianStep) else templates[config.template].equation,
            "splitting": block.splitting.describe(),
            "attention": attentions[config.attention].equation,
            "mlp": mlps[config.mlp].equation,
        },
        "config": config.to_dict(),
        "extras": {part.name: part.describe() for part in chosen(config)},
        "engines": engines.describe(model),
        "options": options,
        "hash": config.hash,
        "streams": streams,
        "coefficients_per_layer": coefficients,
        "arrays": [f"{name} ({' x '.join(map(str, a.size))})" for name, a in block.arrays.specs.items()],
        "aux_norms_per_layer": list(block.aux_norms),
        "calls": block.calls(),
        "parameters": {c: model.num_parameters(c) for c in COUNTS},  # type: ignore[arg-type]
        "unused_parameters": sum(p.numel() for p in model.parameters() if not p.requires_grad),
        **_trained_by(config),
        "published": row.published if row and small else "",
    }


def _trained_by(config: ModelConfig, file: str = "", words: Sequence[str] = ()) -> dict[str, Any]:
    """The optimizer of a run, as its file says it, with rates that follow length and size where nothing does, and what
    to cite.
    """
    run = run_config(file, words) if file else RunConfig(config, DataConfig(), OptimConfig(), TrainConfig())
    steps = f"{run.train.steps:,} steps of {run.train.batch} sequences"
    told = f"{run.optim.name} for {steps}: {run.optim.rates_text()}"
    return {"training": told, "cite": catalogue.citations(config, run.optim.name)}


def _start(config: ModelConfig, start: str | float) -> str:
    if isinstance(start, float):
        return f"{start:g}, one number for all tokens"
    if start == "embed":
        return "zero" if config.aux_init == "zero" else "own token and position tables"
    words = {"ones": "all ones", "identity": "identity matrices", "copy": "the embedding", "later": "its own layer on"}
    return words.get(start, start)


def _several(c: Coefficient, width: int) -> str:
    """How many of a coefficient there are, if not one."""
    if c.size == 1:
        return ""
    return f" ({c.size} numbers)" if isinstance(c.start, tuple) else " (a vector)" if c.size == width else " (per head)"


def _number(start: float | tuple[float, ...]) -> str:
    return ", ".join(f"{value:.6g}" for value in start) if isinstance(start, tuple) else f"{start:.6g}"


def run_show(args: argparse.Namespace) -> int:
    if others := [word for word in args.overrides if catalogue.is_preset(word)]:
        raise InputError(f"`show` shows one architecture, and '{others[0]}' is another: ask for each on its own.")
    untrained = False
    if (file := Path(args.name, "config.toml")).is_file():  # a run
        folder = RunFolder(Path(args.name))
        record = folder.read() if folder.exists else {}
        if record.get("plugins"):
            folder.opened()  # imports them
        args.name, untrained = str(file), bool(record.get("imported"))
    if args.name in recipe_names():
        raise InputError(f"'{args.name}' is a recipe: `{command_line('recipes', args.name)}` shows it.")
    config = resolve(args.name, args.overrides, args.size)
    tell_idle(config, args.overrides)
    facts = describe(config)
    if untrained:
        facts |= {"training": "not recorded: these are weights alone", "cite": catalogue.citations(config, "")}
    elif args.name.endswith(".toml"):
        facts |= _trained_by(config, args.name, _sized(args.overrides, args.size))
    if args.cite:
        print(bibtex(facts["cite"]))
        return 0
    if args.batch is not None:
        estimate = estimate_memory(config, args.batch, autocast=torch.bfloat16)
        facts["memory"] = {"batch": args.batch, **vars(estimate), "training": estimate.training}
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    print_facts(console(), config, facts)
    if not all(is_ours(part) for _, _, part in selected(config)):
        checked = "`stepformer audit` checks causality, decoding and gradients, not that the code is the equation"
        print(f"Parts of your own are shown as they say of themselves: {checked} (docs/audit.md).")
    if args.batch is not None:
        print(f"memory at batch {args.batch}, eager step under bf16 autocast with AdamW: {estimate}")
    return 0


def _streams(streams: dict[str, dict[str, str]]) -> list[tuple[str, str]]:
    """A line for each, or for the first and the last of several that differ in their names alone."""
    found = []
    words = {name: f"{s['meaning']}; starts from {s['start']}" for name, s in streams.items()}
    for meaning, (first, *others) in groupby(streams, words.__getitem__):
        found.append((f"streams {first} .. {others[-1]}" if others else f"stream {first}", meaning))
    return found


def print_facts(out: Console, config: ModelConfig, facts: dict[str, Any]) -> None:
    out.print(f"[bold]{facts['title']}[/bold]   config {facts['hash']}")
    equations, calls, norms = facts["equations"], facts["calls"], facts["aux_norms_per_layer"]
    recombined = splittings[config.splitting].component.needs_velocity
    own = "  (its step alone; this splitting recombines it)" if recombined else ""
    point = f";  u = {'LN' if config.norm == 'layernorm' else 'RMSNorm'}(point)"
    which = "shared by both oracles" if norms == ["both"] else f"one each for {', '.join(norms)}"
    auxiliary = f"{len(norms)} per layer, {which}; initial gain {config.aux_norm_gain:g}"
    rows = [
        *([("layer", equations["layer"])] if equations["layer"] else []),
        (f"template {config.template}", f"{equations['template']}{own}"),
        (f"splitting {config.splitting}", equations["splitting"]),
        (f"attention {config.attention}", f"{equations['attention']}{point}"),
        (f"MLP {config.mlp}", f"{equations['mlp']}{point}"),
        ("oracle calls", f"{calls['attn']} attention + {calls['mlp']} MLP per layer"),
        *_streams(facts["streams"]),
        *([] if facts["streams"] else [("streams", "x alone")]),
        *([("auxiliary norms", auxiliary)] if norms else []),
        *([("arrays", f"{', '.join(facts['arrays'])} in every layer")] if facts["arrays"] else []),
        *([("head", "weights of its own, not the token table")] if config.head == "untied" else []),
        *([("output layers", "start at zero")] if config.output_init == "zero" else []),
        *((f"extra {name}", equation) for name, equation in facts["extras"].items()),
        *((f"option {name}", f"{o['value']}  ({o['values']}: {o['help']})") for name, o in facts["options"].items()),
        *((f"{work} on a GPU", how) for work, how in facts["engines"].items()),
    ]
    out.print(pairs((word, escape(meaning)) for word, meaning in rows))
    if facts["coefficients_per_layer"]:
        out.print()
        titles = ("coefficient (one per layer)", "range", "starts at", "kind")
        learned = [(c["name"], c["range"], _number(c["start"]), c["kind"]) for c in facts["coefficients_per_layer"]]
        out.print(of_texts(titles, learned, words=titles))
    out.print()
    size = f"{config.n_layer} layers, {config.n_head} heads, width {config.d_model}, context {config.context}"
    out.print(f"[bold]parameters[/bold] at {size}, vocabulary {config.vocab_size}")
    for convention, count in facts["parameters"].items():
        out.print(f"  {convention:<16}{count:>14,}")
    if facts["unused_parameters"]:
        out.print(f"  {'declared unused':<16}{facts['unused_parameters']:>14,}  (in the total, never trained)")
    out.print(f"[bold]training[/bold]  {facts['training']}", highlight=False)
    if facts["published"]:
        out.print(f"[bold]published[/bold]  {facts['published']} (its paper's figure, not measured here)")
    out.print(f"[bold]cite[/bold]  {', '.join(facts['cite'])}   (--cite prints BibTeX)")


add_list = command(
    run_list,
    option("pattern PATTERN", "e.g. 'imex-*' or nesterov", nargs="?", default="*"),
    JSON,
)

add_show = command(
    run_show,
    option("name NAME", "preset, template, config.toml or the folder of a run"),
    option("overrides key=value", "config keys and options to change", nargs="*"),
    option("--size", "named size (default: small)", choices=list(catalogue.SIZES)),
    option("--batch N", "estimate the memory of training on N sequences (bf16)", type=int),
    group("", option("--cite", "print BibTeX for everything this architecture and its optimizer use"), JSON),
)
