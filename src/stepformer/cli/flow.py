"""`stepformer flow`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from stepformer.base.errors import InputError, StepformerError, suggestion
from stepformer.base.files import write_text
from stepformer.base.version import __version__
from stepformer.cli.options import command, option
from stepformer.cli.show import console
from stepformer.measure.flows import EXPERIMENTS, Result, Tell
from stepformer.measure.flows.plots import draw
from stepformer.present.tables import of_texts

FEWEST, MOST = 8, 2048  # a covariance needs some tokens; kernels are N x N


def run_flow(args: argparse.Namespace) -> int:
    for name in args.names:
        if name not in EXPERIMENTS:
            raise InputError(
                f"There is no experiment '{name}'.{suggestion(name, EXPERIMENTS)} Known: {', '.join(EXPERIMENTS)}."
            )
    if not FEWEST <= args.particles <= MOST:
        raise InputError(f"--particles {args.particles} should be between {FEWEST} and {MOST}.")
    if not 0 <= args.seed < 2**62:
        raise InputError(f"--seed {args.seed} should be between 0 and 2^62.")
    names = list(dict.fromkeys(args.names)) or list(EXPERIMENTS)
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise InputError(f"--out '{out}' is a file, not a folder.")
    results: dict[str, Result] = {}
    for place, name in enumerate(names, start=1):
        begun = time.monotonic()
        with progress(f"{name} ({place} of {len(names)})") as tell:
            results[name] = EXPERIMENTS[name](args.seed, args.particles, tell)
        if not args.json:
            show(name, results[name], time.monotonic() - begun)
    text = json_text(results, args.seed, args.particles)
    write_text(out / "flow.json", text)
    made = ["flow.json"]
    try:
        for name, result in results.items():
            draw(name, result, out / f"{name}.png")
            made.append(f"{name}.png")
    except StepformerError as error:
        print(f"note: no pictures: {error}", file=sys.stderr)
    if args.json:
        print(text, end="")
    else:
        print(f"written to {out}: {', '.join(made)}")
    return 0


@contextmanager
def progress(title: str) -> Iterator[Tell]:
    """A line on standard error that says what is being computed, or nothing where that is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with Console(stderr=True).status(title) as status:
        yield lambda text: status.update(f"{title}: {text}")


def show(name: str, result: Result, seconds: float) -> None:
    words = {key for row in result.rows for key, value in row.items() if isinstance(value, str)}
    rows = [[cell(column, value) for column, value in row.items()] for row in result.rows]
    table = of_texts(list(result.rows[0]), rows, words=words)
    terminal = console()
    terminal.print(f"[bold]{name}[/bold]  {result.question}  ({seconds:.1f} s)", soft_wrap=True)
    terminal.print(table)
    terminal.print(f"{result.note}\n", soft_wrap=True, markup=False)


def cell(column: str, value: str | int | float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}" if column == "fitted order" else f"{value:.3g}"
    return str(value)


def json_text(results: dict[str, Result], seed: int, particles: int) -> str:
    """Everything that was computed, one row or list of numbers per line.

    Six significant digits; null for what is no number any more.
    """
    exact = json.dumps({name: dataclasses.asdict(result) for name, result in results.items()})
    experiments = json.loads(exact, parse_float=lambda x: float(f"{float(x):.6g}"), parse_constant=lambda x: None)
    record = {"stepformer": __version__, "seed": seed, "particles": particles, "experiments": experiments}
    text = json.dumps(record, indent=1, allow_nan=False)
    flat = re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    return flat + "\n"


add_flow = command(
    run_flow,
    option("names EXPERIMENT", f"{', '.join(EXPERIMENTS)} (default: all)", nargs="*"),
    option("--out DIR", "folder of flow.json and PNGs (runs/flow)", default="runs/flow"),
    option("--seed N", "of matrices and tokens (0)", type=int, default=0),
    option("--particles N", f"number of tokens, {FEWEST} to {MOST} (64)", type=int, default=64),
    option("--json", "print the numbers as JSON instead of tables"),
)
