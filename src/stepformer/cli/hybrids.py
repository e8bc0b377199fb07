"""Hybrid inference on the command line: momentum in some layers of a trained model, and a table over choices."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

from stepformer.base.errors import InputError
from stepformer.cli.options import group, option
from stepformer.measure import measured
from stepformer.measure.evaluation.scoring import about_run
from stepformer.present.tables import Table, of_texts
from stepformer.training.loading import LoadedRun

KIND = "hybrid"
ASKED = ("corpus", "tokens", "on", "stride", "ood", "random", "field", "document", "split", "tasks", "shots", "limit")

HYBRID = group(
    "hybrid inference (plain residual blocks in the other layers)",
    option("--cutoff C", "momentum in the layers before C alone; eval: several by commas, or all"),
    option("--layers L,L", "momentum in these alone; eval: may be repeated", action="append", default=[]),
)


def hybrids(args: argparse.Namespace, run: LoadedRun) -> list[LoadedRun]:
    """The run with momentum in some layers only, for each choice that the options make."""
    last = run.config.model.n_layer
    cutoffs = [str(c) for c in range(last + 1)] if args.cutoff == "all" else (args.cutoff or "").split(",")
    found = [run.hybrid(cutoff=c) for c in _numbers("--cutoff", cutoffs if args.cutoff is not None else [])]
    for words in args.layers:
        found.append(run.hybrid(layers=set(_numbers("--layers", [] if words == "none" else words.split(",")))))
    return found


def hybrid_of(args: argparse.Namespace, run: LoadedRun) -> LoadedRun:
    """The run as it is asked for, where only one is."""
    found = hybrids(args, run)
    if len(found) > 1:
        raise InputError("Give one --cutoff or one --layers here; `stepformer eval` makes a table of several.")
    return found[0] if found else run


def _numbers(name: str, words: Sequence[str]) -> list[int]:
    try:
        return [int(word) for word in words]
    except ValueError:
        example = "--cutoff 6, --cutoff 0,6,12 or --cutoff all" if name == "--cutoff" else "--layers 0,11 or none"
        raise InputError(f"{name} {','.join(words)} should be numbers of layers: {example}.") from None


Row = dict[str, Any]


def over_hybrids(args: argparse.Namespace, run: LoadedRun, measure: Callable[[LoadedRun], Row]) -> list[Row]:
    """A row of numbers for the run and for each of its hybrids, kept in RUN/measured/hybrid.json.

    Finished rows survive Ctrl-C: the same command continues.
    """
    about = about_run(run) | {"asked": {name: getattr(args, name) for name in ASKED}}
    journal = measured.journal(run.folder.path, KIND, about, quiet=args.quiet or args.json)
    named = {measured.called(each.model): each for each in (run, *hybrids(args, run))}
    rows = [
        {"momentum in": name or "all layers", **journal.get(name, functools.partial(measure, each))}
        for name, each in named.items()
    ]
    for row in rows:
        if "loss" in row:
            row["difference"] = row["loss"] - rows[0]["loss"]
    path = measured.save(run.folder.path, KIND, step=run.step, settings=about, result={"rows": rows})
    path.with_suffix(".jsonl").unlink(missing_ok=True)
    return rows


def as_table(rows: Sequence[Row]) -> Table:
    """A line for each choice of layers."""
    digits = {"tokens": ",", "loss": ".4f", "difference": "+.4f"}
    cells = [[v if isinstance(v, str) else format(v, digits.get(k, ".2f")) for k, v in row.items()] for row in rows]
    return of_texts(list(rows[0]), cells, words=("split",))
