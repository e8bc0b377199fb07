"""Stopping well: on a signal or after a time the step is finished, the run saved, and the exit status says why."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
import warnings
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from stepformer.base.errors import StepformerError, StepformerWarning

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # the last one is submitit's


class Stopped(Exception):  # noqa: N818  (it is no error: the run was asked to stop and did)
    """The run has been saved and should end with exit status 128 + signal; time over counts as SIGALRM."""

    def __init__(self, number: int, step: int | None, folder: Path) -> None:
        why = "out of time" if number == signal.SIGALRM else f"stopped by {signal.Signals(number).name}"
        super().__init__(why if step is None else f"{why} after step {step}")
        self.number, self.step, self.folder = number, step, folder

    @property
    def command(self) -> str:
        """What continues the run, on as many ranks as now."""
        return resume_command(self.folder)

    @property
    def status(self) -> int:
        return 128 + self.number


def resume_command(folder: Path) -> str:
    """What continues a run, on as many ranks as now."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    start = "stepformer"
    if ranks > 1:
        nodes = f"--nnodes {ranks // local} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if ranks > local else ""
        start = f"torchrun {nodes}--nproc-per-node {local} -m stepformer"
    return f"{start} resume {shlex.quote(str(folder))}"


class Watch:
    """Remembers signals and the time limit until the loop asks; a second Ctrl-C interrupts at once."""

    def __init__(self, max_seconds: float | None = None) -> None:
        self.deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self.number = 0
        self._before: dict[int, Any] = {}
        self._depth = 0

    def __enter__(self) -> Watch:
        """May be entered again while it is held: a study holds it around runs that hold it themselves."""
        self._depth += 1
        if self._depth > 1:
            return self
        for number in SIGNALS:
            try:
                self._before[number] = signal.signal(number, self._receive)
            except ValueError:  # not the main thread: whoever owns it deals with signals
                break
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth == 0:
            for number, handler in self._before.items():
                signal.signal(number, handler if kind is None else when_leaving(number, handler))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.number == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.number = number

    def asked(self) -> int:
        """The number of the signal that asked to stop, 0 if none did."""
        if not self.number and self.deadline is not None and time.monotonic() >= self.deadline:
            return int(signal.SIGALRM)
        return int(self.number)


def when_leaving(number: int, handler: Any) -> Any:
    """What one of several ranks does on a signal while it ends with an error, instead of `handler`.

    torchrun sends SIGTERM to the ranks that leave a moment after the first one; they are not to die of it.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return signal.SIG_IGN if several and (number, handler) == (signal.SIGTERM, signal.SIG_DFL) else handler


def seconds(text: str) -> float:
    """A time such as 90, 90s, 15m, 2h or 1h30m, in seconds."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
    word = text.strip().lower()
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", word)
    if not parts or "".join(number + unit for number, unit in parts) != word:
        raise StepformerError(f"'{text}' is not a time: write 90, 90s, 15m, 2h or 1h30m.")
    return sum(float(number) * units[unit] for number, unit in parts)


def warn_of_torchrun(step: int) -> None:
    """Tell somebody who waits for a stop about torchrun's patience."""
    patience = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    warnings.warn(
        f"Saving step {step} takes long. If torchrun was told to end, it kills its ranks {patience} s later, "
        "and the run goes on from the checkpoint before: `torchrun --shutdown-timeout SECONDS` (torch 2.12 or "
        "later) gives them more time, and so does a signal to a rank instead of to torchrun.",
        StepformerWarning,
        stacklevel=1,
    )
