"""What torchrun does with its ranks, without the seconds in which it starts.

It holds the store in which they meet. When one of them fails it sends the others SIGTERM and, after its patience of 30
seconds, SIGKILL; the same when it is told to end itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist


class Rank(Protocol):
    @property
    def pid(self) -> int: ...

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        ...


class Agent:
    """`ranks` processes that `start` begins, each in the environment that torchrun would give it."""

    def __init__(self, start: Callable[[int, dict[str, str]], Rank], ranks: int = 2, patience: float = 30.0) -> None:
        self.patience = patience
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        shared |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
        self.ranks = [start(n, {**shared, "RANK": str(n), "LOCAL_RANK": str(n)}) for n in range(ranks)]

    def signal(self, number: int, only: int | None = None) -> None:
        for n, rank in enumerate(self.ranks):
            if rank.status is None and only in (None, n):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, number)

    def terminate(self) -> list[int]:
        """SIGTERM to torchrun itself."""
        self._close()
        return self._statuses()

    def wait(self, seconds: float = 200) -> list[int]:
        """Until all have ended: by themselves, or because one has failed."""
        deadline = time.monotonic() + seconds
        while None in (found := [rank.status for rank in self.ranks]) and not any(found):
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                raise TimeoutError(f"the ranks ran for more than {seconds:g} seconds")
            time.sleep(0.05)
        self._close()
        return self._statuses()

    def _close(self) -> None:
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + self.patience
        while any(rank.status is None for rank in self.ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.signal(signal.SIGKILL)

    def _statuses(self) -> list[int]:
        while any(rank.status is None for rank in self.ranks):
            time.sleep(0.05)
        return [int(rank.status or 0) for rank in self.ranks]
