"""`stepformer bench`."""

from __future__ import annotations

import argparse
from typing import Any

from rich.markup import escape
from rich.table import Table as RichTable

from stepformer.benchmark.table import Table
from stepformer.cli.show import console


def add_bench(commands: Any, common: argparse.ArgumentParser) -> None:
    from stepformer.benchmark.command import DESCRIPTION, EPILOG, add_arguments

    sub = commands.add_parser(
        "bench",
        parents=[common],
        help="how fast are architectures here? throughput, memory, decoding, each against vanilla",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(sub)
    sub.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    from stepformer.benchmark.command import run

    return run(args, show)


def show(table: Table) -> None:
    """A table in the terminal's own colours; what failed or was not reached stands out."""
    drawn = RichTable(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(table.header):
        drawn.add_column(escape(name), justify="left" if i < table.left else "right", no_wrap=i > 0, overflow="fold")
    for row in table.rows:
        style = "red" if "failed" in row or "NOT reached" in row else None
        drawn.add_row(*map(escape, row), style=style)
    out = console()
    out.print(drawn)
    for note in table.notes:
        out.print(note, markup=False, soft_wrap=True, style="dim")
