"""`stepformer train`, `resume` and `recipes`."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.markup import escape

from stepformer.base.errors import InputError, command_line
from stepformer.base.units import duration
from stepformer.base.words import parse_overrides
from stepformer.catalogue import presets
from stepformer.catalogue.recipes import Recipe, load_recipe, recipe_names
from stepformer.cli.main import first_rank
from stepformer.cli.options import (
    MAX_TIME,
    NO_DISPLAY,
    SETTINGS,
    command,
    fields_help,
    option,
    pairs,
    tell_faults,
    tell_idle,
)
from stepformer.cli.show import console
from stepformer.data.batches import Batches
from stepformer.model import Model
from stepformer.present.tables import Table, of_texts
from stepformer.training import RunConfig, Stopped, resume, run_config, train
from stepformer.training.config import SECTIONS
from stepformer.training.corpora import NotPreparedError, open_corpus
from stepformer.training.evaluation import check_blocks
from stepformer.training.memory import GIB, free_memory, run_memory
from stepformer.training.parallel import World, choose_device
from stepformer.training.runs import RunFolder
from stepformer.training.speed import forecast
from stepformer.training.stopping import seconds


def run_train(args: argparse.Namespace) -> int:
    more = [word for word in args.overrides if "=" not in word and presets(word)]
    if more and "=" in args.name:
        ordered = command_line("train", more[0], args.name)
        raise InputError(f"'{args.name}' is a setting: the architecture comes first, `{ordered}`.")
    if more:
        several = command_line("compare", args.name, *more)
        raise InputError(f"`stepformer train` trains one architecture; `{several}` trains several side by side.")
    config = run_config(args.name, [*args.overrides, *args.more])
    tell_idle(config.model, [*args.overrides, *args.more])
    if args.dry_run:
        return dry_run(config)
    tell_faults(args.name, config.model)
    limit = None if args.max_time is None else seconds(args.max_time)
    return _supervised(
        lambda: train(config, args.out, max_seconds=limit, quiet=args.quiet, label=args.label, plugins=args.plugin)
    )


def run_resume(args: argparse.Namespace) -> int:
    changes = {key.removeprefix("train."): value for key, value in parse_overrides(args.overrides)}
    limit = None if args.max_time is None else seconds(args.max_time)
    finished = os.path.isfile(RunFolder(Path(args.name)).result) and not args.restart
    status = _supervised(
        lambda: resume(args.name, max_seconds=limit, quiet=args.quiet, restart=args.restart, **changes),
        "".join(f" --plugin {shlex.quote(place)}" for place in args.plugin),  # the run remembers its first place
    )
    if finished and not args.quiet and first_rank():
        schedule = RunFolder(Path(args.name)).config().optim.schedule
        longer = "`stepformer extend` makes a longer one of it"
        if schedule == "cosine":  # which has fallen
            longer = f"a new run begins with its weights by `train ... init={args.name}`"
        print(f"note: this run was finished already, so nothing was trained; {longer}.", file=sys.stderr)
    return status


def run_extend(args: argparse.Namespace) -> int:
    from stepformer.training.extending import extend

    changes = dict(parse_overrides(args.overrides))
    return _supervised(lambda: extend(args.name, args.out, at=args.at, label=args.label, quiet=args.quiet, **changes))


def _supervised(work: Callable[[], dict[str, Any]], more: str = "") -> int:
    """Run it, print the result, or how to go on after a stop, with these words `more`."""
    begun = time.monotonic()
    try:
        result = work()
    except Stopped as stopped:
        if first_rank():
            print(f"stepformer: {stopped}; saved. Continue with:\n  {stopped.command}{more}", file=sys.stderr)
        return stopped.status
    print_result(result, time.monotonic() - begun)
    return 0


OVERFITTING = 0.05  # nats above the best loss


def print_result(result: dict[str, Any], whole: float = 0.0) -> None:
    """The numbers of a finished run; `whole` is how many seconds the command took."""
    loss, took = result["val_loss"], duration(result["train_seconds"])
    rows = [
        ("validation loss", f"{loss:.4f} nats/token (perplexity {math.exp(loss):.2f})"),
        ("", f"on {result['val_tokens']:,} tokens of the split {result['val_hash']}"),
        *(("", f"{some:.4f} on its first {int(tokens):,} tokens") for tokens, some in result.get("first", {}).items()),
    ]
    if result["best_step"] != result["steps"]:
        best = result["best_val_loss"]
        kept = "its weights are kept, and `generate` and `eval` take them"
        rows.append(("best", f"{best:.4f} after step {result['best_step']:,}: {kept}"))
        if loss - best > OVERFITTING and result.get("train_loss", math.inf) < best:
            rose = f"risen by {loss - best:.2f} since, while that of training text fell (overfitting)"
            rows.append(("", f"{rose}: more text or fewer steps help"))
    if "train_loss" in result:
        rows.append(
            ("training loss", f"{result['train_loss']:.4f} on {result['train_tokens']:,} fixed training tokens")
        )
    if result["unigram_entropy"]:
        rows.append(("unigram entropy", f"{result['unigram_entropy']:.4f} (the loss of token frequencies alone)"))
    long = whole > 1.2 * result["train_seconds"] + 2
    rows += [
        ("trained on", f"{result['tokens']:,} tokens in {took}, {result['tokens_per_second']:,.0f} tokens/s"),
        *([("in all", f"{duration(whole)}, with starting, evaluating and saving")] if long else []),
        ("weights", f"sha256 {result['weights_sha256'][:16]}"),
        ("folder", escape(result["folder"])),
    ]
    console().print(pairs(rows, overflow="ellipsis"))
    print(f"{'try':<17}{command_line('generate', result['folder'], 'Once upon a time')}")  # on one line, to be copied


def dry_run(config: RunConfig) -> int:
    """What a run would be, from one micro-batch of it."""
    device, ranks = choose_device(config.train.device), int(os.environ.get("WORLD_SIZE", "1"))
    notes, asked, evaluated = [], config, config.train.eval_tokens
    try:
        corpus = open_corpus(config.data, World(0, 1, device), quiet=True)
        config = config.for_vocabulary(corpus.vocab_size)
        batches = Batches(corpus.split("train"), config.model.context, config.train.batch, config.train.seed)
        epochs = config.train.steps * config.train.batch / batches.blocks
        data = f"{corpus.folder}: {len(batches.tokens):,} training tokens, {epochs:.2f} epochs"
        val = corpus.split("val").half(config.train.eval_half)
        evaluated = config.model.context * check_blocks(val, config.model.context, evaluated)
    except NotPreparedError as error:
        data, evaluated = f"{config.data.corpus} (not prepared)", 0
        config = config.for_vocabulary(error.ids) if error.ids else config
        notes.append(str(error))
    train_, model, micro = config.train, config.model, config.micro_batch(World(0, ranks, device))
    meta, expected = Model(model, device="meta"), forecast(config, device, ranks, eval_tokens=evaluated)
    memory = run_memory(config, device, micro)
    size = f"{model.n_layer} layers of width {model.d_model}, context {model.context}"
    pieces = f"{train_.batch // ranks // micro} micro-batches x {micro} sequences"
    rest = expected.run - expected.step * train_.steps
    took = duration(expected.run) + f", {duration(rest)} of it for evaluations" * (rest > expected.run / 4)
    took += " without evaluations" * (evaluated == 0)
    rows = [
        ("architecture", f"{config.title}, {size}, config {model.hash}"),
        ("parameters", f"{meta.num_parameters():,} ({meta.num_parameters('non-embedding'):,} without tables)"),
        ("data", data),
        ("optimizer", f"{config.optim.name}, {config.optim.schedule}: {config.optim.rates_text()}"),
        ("steps", f"{train_.steps:,} x {config.step_tokens:,} tokens = {train_.steps * config.step_tokens:,} tokens"),
        (
            "a step",
            f"{ranks} rank{'s' * (ranks > 1)} x {pieces}, {config.precision_on(device)} on {device.type}",
        ),
        ("memory", f"{memory} per rank"),
        ("time", f"{took} ({config.step_tokens / expected.step:,.0f} tokens/s, {expected.how})"),
    ]
    if config.recipe:
        recipe = load_recipe(config.recipe)
        published = recipe.runs.get(config.base, {}).get("published")
        if published is not None and asked.hash == run_config(config.recipe, [f"model.preset={config.base}"]).hash:
            rows.append(("published", f"{published} ({recipe.about.get('figure', '')})"))
    if device.type == "cpu" and memory.training * ranks > (free := free_memory(device)):
        notes.append(f"this machine has {free / GIB:.1f} GiB of memory free: fewer sequences at a time, micro_batch=N.")
    console().print(pairs(rows))
    for note in notes:
        print(f"note: {note}")
    return 0


def run_recipes(args: argparse.Namespace) -> int:
    out = console()
    if args.name:
        recipe = load_recipe(args.name)
        out.print(f"[bold]{recipe.name}[/bold]  {recipe.about.get('about', '')}")
        out.print(f"{recipe.about.get('paper', '')}: {recipe.about.get('figure', '')}", markup=False)
        tokens = recipe.about.get("published_tokens")
        on = f"; validation losses are of {tokens:,} tokens" if tokens else ""
        out.print(f"published: {recipe.about.get('published_what', '')}{on}", markup=False)
        titles = ("published", "published_final", "published_train", "published_tokens", "note")
        keys = [key for key in titles if any(key in facts for facts in recipe.runs.values())]
        runs = [
            (name, f"{facts['parameters']:,}", *(_shown(facts.get(key, "")) for key in keys))
            for name, facts in recipe.runs.items()
        ]
        header = ("architecture", "parameters", *(key.removeprefix("published_") for key in keys))
        out.print(of_texts(header, runs, words=("published", "note")))
        if recipe.measured:
            out.print(f"also published: {recipe.about.get('measured_what', '')}", markup=False)
            out.print(measured_table(recipe))
        for section, values in recipe.document.items():
            out.print(f"[bold]\\[{section}][/bold] " + ", ".join(f"{k} = {v}" for k, v in values.items()))
        return 0
    recipes = map(load_recipe, recipe_names())
    rows = [(recipe.name, str(len(recipe.runs)), recipe.about.get("about", "")) for recipe in recipes]
    out.print(of_texts(("recipe", "runs", "what"), rows, words=("what",)))
    return 0


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def measured_table(recipe: Recipe) -> Table:
    """What else was published about the trained models, and what we recomputed."""
    rows = []
    for source, of in (("", recipe.measured), (", recomputed by us", recipe.recomputed)):
        for name in dict.fromkeys(name for found in of.values() for name in found):
            error = "" if recipe.error(name) is None else f" ± {recipe.error(name):g}"
            found = (of.get(run, {}).get(name) for run in recipe.measured)
            rows.append([f"{name}{source}", *("" if value is None else f"{value:g}{error}" for value in found)])
    return of_texts(("quantity", *recipe.measured), rows)


LIMITS = (MAX_TIME, NO_DISPLAY)

add_train = command(
    run_train,
    option("name PRESET|RECIPE|FILE.toml", "what to train"),
    SETTINGS,
    option("--set key=value", "the same, as option", action="append", default=[], dest="more"),
    option("--out DIR", "run folder (default: runs/NAME)"),
    option("--label WORD", "what the run is called in tables (its architecture)", default=""),
    option("--dry-run", "counts, memory, steps and time, without training"),
    *LIMITS,
    settings=lambda: "\n".join(f"[{name}]\n{fields_help(kind, 20)}" for name, kind in SECTIONS.items()),
)

add_resume = command(
    run_resume,
    option("name RUN", "run folder"),
    option("overrides key=value", "micro_batch, device, keep, save_every, ...", nargs="*"),
    option("--restart", "go on from an earlier checkpoint if the newest that was saved is gone"),
    *LIMITS,
)

add_extend = command(
    run_extend,
    option("name RUN", "folder of the run"),
    option("overrides key=value", "steps, schedule, decay_start, floor, sam, rho", nargs="*"),
    option("--out DIR", "folder of the new run", required=True),
    option("--label NAME", "name of the new run in tables (default: its folder's)"),
    option("--at STEP", "the checkpoint to begin with (default: the last possible)", type=int),
    NO_DISPLAY,
)

add_recipes = command(run_recipes, option("name RECIPE", "show one: its settings and published values", nargs="?"))
