"""Work on memory that stays where it is, recorded as CUDA graphs and repeated by one launch each.

An optimizer step is some two hundred short kernels, and Python needs longer to launch them than the GPU to run them. A
graph runs the same kernels on the same memory in the same order, so the results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepformer.ops import kernels
from stepformer.ops.graphs import capture
from stepformer.ops.sharding import is_sharded

MOST = 16  # recordings; where memory moves more often than that, recording it would cost more than it saves


@dataclass
class Recording:
    """`key`: what the work depends on; no graph yet: it has run once, or could not be recorded."""

    key: Hashable
    graph: torch.cuda.CUDAGraph | None = None
    refused: bool = False


class Recordings:
    """The recorded work of one optimizer, under names, in one memory pool.

    Work leaves its results in memory from outside: all of the pool belongs to whatever is repeated next.
    """

    def __init__(self) -> None:
        self.known: dict[str, Recording] = {}
        self.count = 0
        self.pool: Any = None

    def __reduce__(self) -> tuple[type[Recordings], tuple[()]]:
        return Recordings, ()  # a copy of an optimizer has other memory

    def run(self, name: str, key: Hashable, work: Callable[[], object], on: Tensor) -> None:
        """Do the work, which is the same as last time if the key is: same operations, constants and addresses."""
        if not recordable(on):
            work()
            return
        known = self.known.get(name)
        if known is None or known.key != key:
            # the first time is an ordinary one: libraries choose their algorithms, which may not be recorded
            self.known[name] = Recording(key)
            work()
            return
        if known.graph is None and not known.refused:
            known.graph = self._record(work)
            known.refused = known.graph is None
        if known.graph is None:
            work()
        else:
            known.graph.replay()

    def _record(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
        if self.count >= MOST:
            return None
        self.count += 1
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        try:
            return capture(work, self.pool)[0]
        except RuntimeError:  # memory is short, or another thread captures: nothing has run; it is done plainly
            self.pool = None
            return None


def recordable(tensor: Tensor) -> bool:
    """Whether work on such tensors may be recorded: on a GPU, by one process, and not inside another recording."""
    if not kernels.switched_on() or not tensor.is_cuda or not alone(tensor):
        return False
    return not torch.cuda.is_current_stream_capturing()


def alone(tensor: Tensor) -> bool:
    """Whether this process has all of the model to itself."""
    return not is_sharded(tensor) and not (dist.is_initialized() and dist.get_world_size() > 1)
