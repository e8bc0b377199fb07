"""How far long work has come."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextlib.contextmanager
def counting(title: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, a line every half minute elsewhere; call what it yields with the amount done."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if quiet:
        yield lambda amount: None
        return
    if sys.stderr.isatty():
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:.0f} %"),
        )
        with Progress(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task(title, total=total)
            yield lambda amount: bar.advance(task, amount)
        return
    done, last = 0, time.monotonic()

    def count(amount: int) -> None:
        nonlocal done, last
        done += amount
        if time.monotonic() - last > 30:
            last = time.monotonic()
            console.print(f"{title}  {done:,}/{total:,}", markup=False)

    yield count


def say(text: str, *, quiet: bool = False) -> None:
    """A line about long work, as it is written."""
    if not quiet:
        Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)
