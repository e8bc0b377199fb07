"""Stopping well: on a signal or after a time the step is finished, the run saved, and the exit status says why.

Ranks end together: one that cannot go on tells the others, and none leaves before the last save is on disk. A rank that
raises an error leaves the others waiting for it inside a collective, where no exception reaches them, until a time-out
of half an hour. So each rank has a thread that looks into the store in which the ranks met. The main rank hears of the
error there, finishes its last save, prints the reason and gives leave to go. Nobody goes before that: torchrun kills
the ranks that are left 30 seconds after the first has gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from stepformer.base.errors import DivergedError, StepformerError, StepformerWarning

GRACE = 5.0  # seconds in which a rank may come to its own end: what is wrong with a setting, all of them find
EVERY = 0.5  # seconds between looks into the store
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
        if self._depth == 1:
            with contextlib.suppress(ValueError):  # not the main thread: whoever owns it deals with signals
                for number in SIGNALS:
                    self._before[number] = signal.signal(number, self._receive)
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


class LostRankError(StepformerError):
    """Another rank is gone, or does not answer any more."""


@dataclass(frozen=True)
class Reason:
    """Why a rank ends, as the others are told it."""

    rank: int
    sentence: str
    status: int
    lasting: bool = False  # it would end so again

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Reason:
        if isinstance(error, Stopped):
            return cls(rank, str(error), error.status)
        if isinstance(error, StepformerError):
            return cls(rank, str(error), 2, lasting=not isinstance(error, LostRankError))
        if isinstance(error, KeyboardInterrupt):
            return cls(rank, "interrupted", 130)
        words = (str(error).strip().splitlines() or [""])[0]  # the rank itself shows all of it
        return cls(rank, f"Rank {rank} failed with {type(error).__name__}: {words}", 1)


class Ending:
    """This rank's part in it; `store` is a store of torch.distributed that is used for nothing else."""

    def __init__(self, rank: int, size: int, store: Any, patience: float) -> None:
        self.rank, self.size, self.store, self.patience = rank, size, store, patience
        self.before: Callable[[Reason], None] = lambda reason: None  # done by the main rank when it leaves for another
        self._leaving, self._going = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ending", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """The work is done, and nobody need be told anything."""
        self._leaving.set()

    def leave(self, error: BaseException) -> None:
        """This rank ends with an error: tell the others, and wait for the main rank, which goes last."""
        self._leaving.set()
        if self._going.is_set():  # said already: what was waited for has failed only because the other rank has gone
            self._watcher.join()  # until it ends the process
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, when_leaving(signal.SIGTERM, signal.getsignal(signal.SIGTERM)))
        told, lost = False, isinstance(error, LostRankError)
        with contextlib.suppress(RuntimeError):  # the store is gone with the rank that held it
            reason = Reason.of(error, self.rank)
            if self.rank == 0:
                self._end(reason, 2 * EVERY if lost else GRACE + 4 * EVERY)
            else:
                first = reason
                if not isinstance(error, Stopped | DivergedError):  # which all ranks raise together
                    first = Reason(**json.loads(self.store.compare_set("failed", "", json.dumps(asdict(reason)))))
                # which may be the one that is lost
                told = self._until(lambda: bool(self.store.check(["ended"])), GRACE if lost else self.patience)
                told = told or first.rank != self.rank
                self.store.add("left", 1)
        if isinstance(error, StepformerError):
            error.told = told

    def _end(self, reason: Reason, patience: float) -> None:
        """The main rank gives leave to go, and waits until the others have gone: it may hold the store."""
        self.store.set("ended", json.dumps(asdict(reason)))
        self._until(lambda: int(self.store.add("left", 0)) >= self.size - 1, patience)

    def _until(self, reached: Callable[[], bool], patience: float) -> bool:
        deadline = time.monotonic() + patience
        while not reached():
            if time.monotonic() > deadline:
                return False
            time.sleep(EVERY / 10)
        return True

    def _watch(self) -> None:
        key = "failed" if self.rank == 0 else "ended"
        with contextlib.suppress(RuntimeError):  # the store is gone
            while not self._leaving.wait(EVERY):
                if self.store.check([key]):
                    reason = Reason(**json.loads(self.store.get(key)))
                    if not self._leaving.wait(GRACE):
                        self._go(reason)

    def _go(self, reason: Reason) -> None:
        """End the process: its main thread waits in a collective for a rank that will not come."""
        self._going.set()
        try:
            if self.rank == 0:
                try:
                    self.before(reason)
                finally:
                    print(f"stepformer: {reason.sentence}", file=sys.stderr, flush=True)
                self._end(reason, GRACE + 4 * EVERY)
            else:
                self.store.add("left", 1)
        finally:
            os._exit(reason.status)
