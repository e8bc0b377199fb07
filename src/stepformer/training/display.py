"""What a person sees while a run trains: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Display:
    """Progress of one run; silent on all ranks but the main one."""

    def __init__(self, title: str, *, quiet: bool = False, lines: int = 10) -> None:
        self.title, self.quiet, self.lines = title, quiet, lines
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._steps = 1
        self._last_line = time.monotonic()

    def begin(self, steps: int, done: int) -> None:
        self._steps = steps
        if self.quiet or not sys.stderr.isatty():
            return
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._bar.add_task(self.title, total=steps, completed=done, numbers="")
        self._bar.start()

    def step(self, step: int, loss: float, norm: float, tokens_per_second: float, mfu: float) -> None:
        """A step is done. On a terminal the line is updated, elsewhere about `lines` lines are printed per run."""
        numbers = f"loss {loss:.4f}  |g| {norm:.2f}  {tokens_per_second:,.0f} tok/s  MFU {100 * mfu:.0f} %"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, numbers=numbers)
        elif not self.quiet:
            every = max(1, self._steps // self.lines)
            if step % every == 0 or step == self._steps or time.monotonic() - self._last_line > 60:
                self._last_line = time.monotonic()
                left = f"{self.title}  step {step}/{self._steps}  {numbers}"
                self.console.print(left, markup=False)

    def note(self, text: str) -> None:
        """A line that stays."""
        if not self.quiet:
            self.console.print(text, markup=False)

    def waiting(self, what: str) -> None:
        """Say what takes long between steps."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, numbers=what)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
