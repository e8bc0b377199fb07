"""`stepformer bench`."""

from __future__ import annotations

import argparse
import sys
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
    out = console()
    if sys.stdout.isatty():
        table = table.fitting(out.width)
    else:  # a file takes any width
        out.width = max(out.width, sum(table.widths()) + 2 * len(table.header))
    drawn = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate(table.header):
        drawn.add_column(escape(name), justify="left" if i < table.left else "right", no_wrap=i > 0, overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(escape, row), style="red" if "failed" in row or "NOT reached" in row else None)
    out.print(drawn)
    for note in table.notes:
        out.print(note, markup=False, soft_wrap=True, style="dim")
