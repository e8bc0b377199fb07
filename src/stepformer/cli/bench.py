"""`stepformer bench`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from stepformer.cli.options import command
from stepformer.cli.show import console
from stepformer.present.tables import GAP, Table


def add_bench(commands: Any, common: argparse.ArgumentParser) -> None:
    from stepformer.measure.benchmark.command import DESCRIPTION, EPILOG, add_arguments

    command(run_bench, add_arguments, about=lambda: DESCRIPTION, more=lambda: EPILOG)(commands, common)


def run_bench(args: argparse.Namespace) -> int:
    from stepformer.measure.benchmark.command import run

    return run(args, show)


def show(table: Table) -> None:
    """A table in the terminal's own colours; a file takes any width."""
    out = console()
    if not sys.stdout.isatty():
        out.width = max(out.width, sum(table.widths()) + GAP * len(table.columns))
    out.print(table.rich(out.width, rule=False))
