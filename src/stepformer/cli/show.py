"""`stepformer list` and `stepformer show`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from stepformer.catalogue import SIZES, Preset, citations, load_config, model_config, preset, presets
from stepformer.config import ModelConfig, merge
from stepformer.errors import InputError
from stepformer.model import Model
from stepformer.oracles import attentions, mlps
from stepformer.references import BIBTEX
from stepformer.schemes import splittings, templates

COUNTS = ("total", "non-positional", "non-embedding")


def add_list(commands: Any, common: argparse.ArgumentParser) -> None:
    sub = commands.add_parser(
        "list",
        parents=[common],
        help="list presets",
        description="List the presets whose name or alias matches PATTERN: shell wildcards, or part of a name.",
    )
    sub.add_argument("pattern", nargs="?", default="*", metavar="PATTERN", help="e.g. 'imex-*' or nesterov")
    sub.add_argument("--json", action="store_true", help="machine-readable output")
    sub.set_defaults(run=run_list)


def add_show(commands: Any, common: argparse.ArgumentParser) -> None:
    sub = commands.add_parser(
        "show",
        parents=[common],
        help="equations, streams, coefficients and parameter counts of one architecture",
        description="Show an architecture: a preset, the name of a template, or a TOML file with a [model] table.",
        epilog="examples:\n  stepformer show adam size=medium\n  stepformer show tmm splitting=imex k=2 order=mam\n"
        "  stepformer show vanilla --cite",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.add_argument("name", metavar="NAME", help="preset, template or config.toml")
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="config keys to change")
    sub.add_argument("--size", choices=list(SIZES), help="named size (default: small)")
    sub.add_argument("--cite", action="store_true", help="print BibTeX for everything this architecture uses")
    sub.add_argument("--json", action="store_true", help="machine-readable output")
    sub.set_defaults(run=run_show)


def resolve(name: str, overrides: list[str], size: str | None = None) -> tuple[ModelConfig, Preset | None]:
    """The config behind a NAME with `key=value` words, and its preset unless NAME is a file."""
    if name.endswith(".toml"):
        words = [*([f"size={size}"] if size else []), *overrides]
        return load_config(name, words), None
    values = merge({"size": size or "small"}, overrides, "model")
    if "preset" in values:
        raise InputError("`preset` is the NAME itself: write `stepformer show NAME key=value ...`.")
    return model_config(name, **values), preset(name)


def run_list(args: argparse.Namespace) -> int:
    rows = [preset(name) for name in presets(args.pattern)]
    if args.json:
        print(json.dumps([_row(row) for row in rows], indent=2))
        return 0
    if not rows:
        raise InputError(f"No preset matches '{args.pattern}'. `stepformer list` shows all of them.")
    console = Console(highlight=False)
    names = [", ".join((row.name, *row.aliases)) for row in rows]
    width = max(map(len, names))
    for row, name in zip(rows, names, strict=True):
        calls = _calls(row.config)
        what = f"{row.config.template} x {row.config.splitting}, {calls['attn']}+{calls['mlp']} oracle calls"
        console.print(f"[bold]{name:<{width}}[/bold]  {what}", soft_wrap=True)
        console.print(f"    {row.equation}", soft_wrap=True, markup=False)
    return 0


def _row(row: Preset) -> dict[str, Any]:
    calls = _calls(row.config)
    return {
        "name": row.name,
        "aliases": list(row.aliases),
        "template": row.config.template,
        "splitting": row.config.splitting,
        "settings": dict(row.settings),
        "equation": row.equation,
        "calls": calls,
        "cite": row.cite,
        "published": row.published,
    }


def _calls(config: ModelConfig) -> dict[str, int]:
    return splittings[config.splitting].component(**config.options_of("splitting")).calls()


def describe(config: ModelConfig, row: Preset | None) -> dict[str, Any]:
    """Everything `show` prints, as plain data."""
    model = Model(config, device="meta")
    block = model.blocks[0]
    coefficients = [
        {"name": key, "range": spec.interval, "start": spec.start, "kind": spec.kind}
        for key, spec in block.coefficients.specs.items()
    ]
    streams = {
        name: {"start": _start(config, stream.start), "meaning": stream.meaning}
        for name, stream in block.template.streams.items()
    }
    return {
        "name": row.name if row else "",
        "aliases": list(row.aliases) if row else [],
        "equations": {
            "layer": row.equation if row and _is_preset(config, row) else "",
            "template": templates[config.template].equation,
            "splitting": splittings[config.splitting].equation,
            "attention": attentions[config.attention].equation,
            "mlp": mlps[config.mlp].equation,
        },
        "config": config.to_dict(),
        "hash": config.hash,
        "streams": streams,
        "coefficients_per_layer": coefficients,
        "aux_norms_per_layer": list(block.aux_norms),
        "calls": block.splitting.calls(),
        "parameters": {c: model.num_parameters(c) for c in COUNTS},  # type: ignore[arg-type]
        "unused_parameters": sum(p.numel() for p in model.parameters() if not p.requires_grad),
        "published": row.published if row else "",
        "cite": citations(config, row.cite if row else ""),
    }


def _is_preset(config: ModelConfig, row: Preset) -> bool:
    return config.replace(**SIZES["small"]) == row.config


def _start(config: ModelConfig, start: str) -> str:
    if start == "embed":
        return "zero" if config.aux_init == "zero" else "own token and position tables"
    return {"ones": "all ones", "identity": "identity matrices"}[start]


def run_show(args: argparse.Namespace) -> int:
    config, row = resolve(args.name, args.overrides, args.size)
    facts = describe(config, row)
    if args.cite:
        print("\n\n".join(BIBTEX.get(key, f"% {key}: no entry in stepformer.references") for key in facts["cite"]))
        return 0
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    console = Console(highlight=False)
    print_facts(console, config, facts)
    return 0


def print_facts(console: Console, config: ModelConfig, facts: dict[str, Any]) -> None:
    title = ", ".join((facts["name"], *facts["aliases"])) if facts["name"] else "model"
    console.print(f"[bold]{title}[/bold]   config {facts['hash']}")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    equations = facts["equations"]
    if equations["layer"]:
        table.add_row("layer", equations["layer"])
    table.add_row(f"template {config.template}", equations["template"])
    table.add_row(f"splitting {config.splitting}", equations["splitting"])
    table.add_row(f"attention {config.attention}", f"{equations['attention']};  u = LN(point)")
    table.add_row(f"MLP {config.mlp}", f"{equations['mlp']};  u = LN(point)")
    calls = facts["calls"]
    table.add_row("oracle calls", f"{calls['attn']} attention + {calls['mlp']} MLP per layer")
    for name, stream in facts["streams"].items():
        table.add_row(f"stream {name}", f"{stream['meaning']}; starts from {stream['start']}")
    if not facts["streams"]:
        table.add_row("streams", "x alone")
    norms = facts["aux_norms_per_layer"]
    if norms:
        table.add_row("auxiliary norms", f"{len(norms)} per layer ({', '.join(norms)}), gain {config.aux_norm_gain:g}")
    console.print(table)
    if facts["coefficients_per_layer"]:
        console.print()
        learned = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("coefficient (one per layer)", "range", "starts at", "role"):
            learned.add_column(column, no_wrap=True)
        for c in facts["coefficients_per_layer"]:
            learned.add_row(c["name"], c["range"], f"{c['start']:.6g}", c["kind"])
        console.print(learned)
    console.print()
    size = f"{config.n_layer} layers, {config.n_head} heads, width {config.d_model}, context {config.context}"
    console.print(f"[bold]parameters[/bold] at {size}, vocabulary {config.vocab_size}")
    for convention, count in facts["parameters"].items():
        console.print(f"  {convention:<16}{count:>14,}")
    if facts["unused_parameters"]:
        console.print(f"  {'declared unused':<16}{facts['unused_parameters']:>14,}  (in the total, never trained)")
    if facts["published"]:
        console.print(f"[bold]published[/bold]  {facts['published']}")
    console.print(f"[bold]cite[/bold]  {', '.join(facts['cite'])}   (--cite prints BibTeX)")
