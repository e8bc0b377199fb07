"""Ranks that end together: one that cannot go on tells the others, and none leaves before the last save is on disk.

A rank that raises an error leaves the others waiting for it inside a collective, where no exception reaches them, until
a time-out of half an hour. So each rank has a thread that looks into the store in which the ranks met. The main rank
hears of the error there, finishes its last save, prints the reason and gives leave to go. Nobody goes before that:
torchrun kills the ranks that are left 30 seconds after the first has gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from stepformer.base.errors import DivergedError, StepformerError
from stepformer.training.stopping import Stopped, when_leaving

GRACE = 5.0  # seconds in which a rank may come to its own end: what is wrong with a setting, all of them find
EVERY = 0.5  # seconds between looks into the store


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
        self.before: Callable[[Reason], None] | None = None  # what the main rank does before it leaves for another
        self._leaving = threading.Event()
        threading.Thread(target=self._watch, name="ending", daemon=True).start()

    def close(self) -> None:
        """The work is done, and nobody need be told anything."""
        self._leaving.set()

    def leave(self, error: BaseException) -> None:
        """This rank ends with an error: tell the others, and wait for the main rank, which goes last."""
        self._leaving.set()
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
                told = self._until(lambda: self._found("ended") is not None, GRACE if lost else self.patience)
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

    def _found(self, key: str) -> Reason | None:
        return Reason(**json.loads(self.store.get(key))) if self.store.check([key]) else None

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            while not self._leaving.wait(EVERY):
                reason = self._found("failed" if self.rank == 0 else "ended")
                if reason is not None and not self._leaving.wait(GRACE):
                    self._go(reason)

    def _go(self, reason: Reason) -> None:
        """End the process: its main thread waits in a collective for a rank that will not come."""
        try:
            if self.rank == 0:
                self._say(reason)
                self._end(reason, GRACE + 4 * EVERY)
            else:
                self.store.add("left", 1)
        finally:
            os._exit(reason.status)

    def _say(self, reason: Reason) -> None:
        try:
            if self.before is not None:
                self.before(reason)
        finally:
            print(f"stepformer: {reason.sentence}", file=sys.stderr, flush=True)
