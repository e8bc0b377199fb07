"""`stepformer train`, `resume` and `recipes`."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import typing
from collections.abc import Callable
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from stepformer.base.errors import InputError, command_line
from stepformer.base.settings import type_hints
from stepformer.catalogue.recipes import load_recipe, recipe_names
from stepformer.cli.show import console
from stepformer.model import Model
from stepformer.present.tables import of_texts
from stepformer.training import RunConfig, Stopped, resume, run_config, train
from stepformer.training.choices import micro_batch_of, precision_of
from stepformer.training.config import SECTIONS
from stepformer.training.corpora import open_corpus
from stepformer.training.forecast import forecast
from stepformer.training.memory import estimate_memory
from stepformer.training.parallel import World, choose_device
from stepformer.training.shortage import optimizer_copies
from stepformer.training.stopping import seconds


def settings_help() -> str:
    """Every key of the run's sections with its default, for `--help`."""
    text = []
    for name, kind in SECTIONS.items():
        text.append(f"[{name}]")
        for f in dataclasses.fields(kind):
            value = str(f.default).lower() if isinstance(f.default, bool) else f.default
            default = "" if f.default is None else f" ({value})"
            text.append(f"  {f.name:<20} {f.metadata['help']}{choices(kind, f.name)}{default}")
    return "\n".join(text)


def choices(kind: type, name: str) -> str:
    """The words a key may be, in braces; nothing for other types."""
    hint = type_hints(kind)[name]
    for part in (hint, *typing.get_args(hint)):
        if typing.get_origin(part) is typing.Literal:
            return f" {{{','.join(map(str, typing.get_args(part)))}}}"
    return ""


def add_train(commands: Any, common: argparse.ArgumentParser) -> None:
    sub = commands.add_parser(
        "train",
        parents=[common],
        description="Train a preset, a recipe of a paper (`stepformer recipes`) or a TOML file. A preset alone trains "
        "the tiny size on the embedded tales: something for a laptop.",
        epilog="examples:\n"
        "  stepformer train yurii steps=500                      tiny, on tales\n"
        "  stepformer train tmm size=small corpus=data/tinystories-gpt2 batch=480 compile=true\n"
        "  stepformer train yuriiformer-tinystories preset=vanilla --dry-run\n"
        "  stepformer train yurii optim.name=adamw lr=1e-3 --out runs/adamw\n"
        "  torchrun --nproc_per_node 8 -m stepformer train tmm size=small parallel=fsdp\n\n"
        "keys (key=value or section.key=value)\n[model]\n  preset, size {tiny,small,medium}, and all that "
        "`stepformer show NAME` lists\n" + settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.add_argument("name", metavar="PRESET|RECIPE|FILE.toml", help="what to train")
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    sub.add_argument("--set", action="append", default=[], metavar="key=value", dest="more", help="the same, as option")
    sub.add_argument("--out", metavar="DIR", help="run folder (default: runs/NAME)")
    sub.add_argument("--label", default="", metavar="WORD", help="what the run is called in tables (its architecture)")
    sub.add_argument("--dry-run", action="store_true", help="counts, memory, steps and time, without training")
    _limits(sub)
    sub.set_defaults(run=run_train)


def add_resume(commands: Any, common: argparse.ArgumentParser) -> None:
    sub = commands.add_parser(
        "resume",
        parents=[common],
        description="Continue a run that was stopped, killed or ran out of time. It ends with the same weights as if "
        "nothing had happened. The number of ranks may differ from before.",
        epilog="examples:\n  stepformer resume runs/yurii-tales-bpe-1024-s42\n"
        "  torchrun --nproc_per_node 2 -m stepformer resume runs/big micro_batch=4",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.add_argument("name", metavar="RUN", help="run folder")
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="micro_batch, device, keep, save_every, ...")
    sub.add_argument(
        "--restart", action="store_true", help="go on from an earlier checkpoint if the newest that was saved is gone"
    )
    _limits(sub)
    sub.set_defaults(run=run_resume)


def _limits(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--max-time", metavar="TIME", help="save and stop after e.g. 90s, 15m, 1h30m (exit status 142)")
    sub.add_argument("--quiet", action="store_true", help="no progress display")


def add_extend(commands: Any, common: argparse.ArgumentParser) -> None:
    sub = commands.add_parser(
        "extend",
        parents=[common],
        description="Continue a run under another length or schedule from the last checkpoint that both schedules "
        "agree on: the end of a run with schedule=constant, the begin of the decay with schedule=wsd. The old run "
        "stays as it is; the new one records it as its parent.",
        epilog="examples:\n"
        "  stepformer extend runs/a steps=4000 --out runs/a-longer\n"
        "  stepformer extend runs/a steps=2400 decay_start=2000 --out runs/a-short-decay --at 2000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.add_argument("name", metavar="RUN", help="folder of the run")
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="steps, schedule, decay_start, floor, sam, rho")
    sub.add_argument("--out", required=True, metavar="DIR", help="folder of the new run")
    sub.add_argument("--label", metavar="NAME", help="name of the new run in tables (default: its folder's)")
    sub.add_argument("--at", type=int, metavar="STEP", help="the checkpoint to begin with (default: the last possible)")
    sub.add_argument("--quiet", action="store_true", help="no progress display")
    sub.set_defaults(run=run_extend)


def add_recipes(commands: Any, common: argparse.ArgumentParser) -> None:
    sub = commands.add_parser(
        "recipes",
        parents=[common],
        description="List the recipes, or show one: architectures, parameter counts, published values, settings. "
        "`stepformer train RECIPE preset=NAME` trains one of its architectures.",
    )
    sub.add_argument("name", nargs="?", metavar="RECIPE", help="show one: its settings and published values")
    sub.set_defaults(run=run_recipes)


def run_train(args: argparse.Namespace) -> int:
    config = run_config(args.name, [*args.overrides, *args.more])
    if args.dry_run:
        return dry_run(config)
    limit = None if args.max_time is None else seconds(args.max_time)
    return _supervised(
        lambda: train(config, args.out, max_seconds=limit, quiet=args.quiet, label=args.label, plugins=args.plugin)
    )


def run_resume(args: argparse.Namespace) -> int:
    from stepformer.base.words import parse_overrides

    changes = {key.removeprefix("train."): value for key, value in parse_overrides(args.overrides)}
    limit = None if args.max_time is None else seconds(args.max_time)
    return _supervised(lambda: resume(args.name, max_seconds=limit, quiet=args.quiet, restart=args.restart, **changes))


def run_extend(args: argparse.Namespace) -> int:
    from stepformer.base.words import parse_overrides
    from stepformer.training.extending import extend

    changes = dict(parse_overrides(args.overrides))
    return _supervised(lambda: extend(args.name, args.out, at=args.at, label=args.label, quiet=args.quiet, **changes))


def _supervised(work: Callable[[], dict[str, Any]]) -> int:
    """Run it, print the result, or how to go on after a stop."""
    main = int(os.environ.get("RANK", "0")) == 0
    try:
        result = work()
    except Stopped as stopped:
        if main:
            print(f"stepformer: {stopped}; saved. Continue with:\n  {stopped.command}", file=sys.stderr)
        return stopped.status
    if main:
        print_result(result)
    return 0


def print_result(result: dict[str, Any]) -> None:
    """The numbers of a finished run."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row(
        "validation loss", f"{result['val_loss']:.4f} nats/token (perplexity {math.exp(result['val_loss']):.2f})"
    )
    table.add_row("", f"on {result['val_tokens']:,} tokens of the split {result['val_hash']}")
    if result["best_step"] != result["steps"]:
        table.add_row("best", f"{result['best_val_loss']:.4f} after step {result['best_step']:,}")
    if result["unigram_entropy"]:
        table.add_row("unigram entropy", f"{result['unigram_entropy']:.4f} (what counting single tokens would reach)")
    table.add_row(
        "trained on",
        f"{result['tokens']:,} tokens in {duration(result['train_seconds'])}, "
        f"{result['tokens_per_second']:,.0f} tokens/s",
    )
    table.add_row("weights", f"sha256 {result['weights_sha256'][:16]}")
    table.add_row("folder", escape(result["folder"]))
    console().print(table)
    print(f"{'try':<17}{command_line('generate', result['folder'], 'Once upon a time')}")  # on one line, to be copied


def duration(took: float) -> str:
    """Seconds as people say them."""
    if took < 120:
        return f"{took:.1f} s"
    if took < 7200:
        return f"{took / 60:.1f} min"
    return f"{took / 3600:.1f} h" if took < 172_800 else f"{took / 86_400:.1f} days"


def dry_run(config: RunConfig) -> int:
    """What a run would be, from one micro-batch of it."""
    alone = World(0, 1, choose_device(config.train.device))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    world = World(0, ranks, alone.device)
    notes = []
    asked = config
    try:
        corpus = open_corpus(config.data, alone, quiet=True)
        config = config.for_vocabulary(corpus.vocab_size)
        tokens = len(corpus.split("train"))
        blocks = (tokens - config.model.context) // config.model.context
        epochs = config.train.steps * config.train.batch / blocks
        data = f"{corpus.folder}: {tokens:,} training tokens, {epochs:.2f} epochs"
    except InputError as error:
        data = f"{config.data.corpus} (not prepared)"
        notes.append(str(error))
    train_, micro = config.train, micro_batch_of(config, world)
    precision = precision_of(config, alone.device)
    dtype = torch.bfloat16 if precision == "bf16" else None
    meta = Model(config.model, device="meta")
    memory = estimate_memory(config.model, micro, autocast=dtype, optimizer_copies=optimizer_copies(meta, config.optim))
    expected = forecast(config, alone.device, ranks)
    rows = [
        (
            "architecture",
            f"{config.title}, {config.model.n_layer} layers of width {config.model.d_model}, "
            f"context {config.model.context}, config {config.model.hash}",
        ),
        ("parameters", f"{meta.num_parameters():,} ({meta.num_parameters('non-embedding'):,} without tables)"),
        ("data", data),
        ("optimizer", f"{config.optim.name}, {config.optim.schedule}: {config.optim.rates_text()}"),
        ("steps", f"{train_.steps:,} x {config.step_tokens:,} tokens = {train_.steps * config.step_tokens:,} tokens"),
        (
            "a step",
            f"{ranks} rank{'s' if ranks > 1 else ''} x {train_.batch // ranks // micro} micro-batches x {micro} "
            f"sequences, {precision} on {alone.device.type}",
        ),
        ("memory", f"{memory} per rank"),
        ("time", f"{duration(expected.run)} ({config.step_tokens / expected.step:,.0f} tokens/s, {expected.how})"),
    ]
    if config.recipe:
        recipe = load_recipe(config.recipe)
        published = recipe.runs.get(config.base, {}).get("published")
        if published is not None and asked.hash == run_config(config.recipe, [f"model.preset={config.base}"]).hash:
            rows.append(("published", f"{published} ({recipe.about.get('figure', '')})"))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in rows:
        table.add_row(key, value)
    console().print(table)
    for note in notes:
        print(f"note: {note}")
    return 0


def run_recipes(args: argparse.Namespace) -> int:
    out = console()
    if args.name:
        recipe = load_recipe(args.name)
        out.print(f"[bold]{recipe.name}[/bold]  {recipe.about.get('about', '')}")
        out.print(f"{recipe.about.get('paper', '')}: {recipe.about.get('figure', '')}", markup=False)
        out.print(f"published: {recipe.about.get('published_what', '')}", markup=False)
        runs = [
            (name, f"{facts['parameters']:,}", str(facts.get("published", "")), facts.get("note", ""))
            for name, facts in recipe.runs.items()
        ]
        out.print(of_texts(("architecture", "parameters", "published", "note"), runs, words=("published", "note")))
        for section, values in recipe.document.items():
            out.print(f"[bold]\\[{section}][/bold] " + ", ".join(f"{k} = {v}" for k, v in values.items()))
        return 0
    recipes = map(load_recipe, recipe_names())
    rows = [(recipe.name, str(len(recipe.runs)), recipe.about.get("about", "")) for recipe in recipes]
    out.print(of_texts(("recipe", "runs", "what"), rows, words=("what",)))
    return 0
