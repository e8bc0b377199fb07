"""Work on memory that stays where it is, captured as CUDA graphs and replayed by one launch each.

An optimizer step is some two hundred short kernels, and Python needs longer to launch them than the GPU to run them. A
graph runs the same kernels on the same memory in the same order, so the results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepformer.ops import kernels
from stepformer.ops.graphs import capture
from stepformer.ops.sharding import is_sharded

MOST = 16  # captures; where memory moves more often than that, another one would cost more than it saves


class CudaGraphs:
    """The graphs of one optimizer's work, under names, in one memory pool.

    Work leaves its results in memory from outside: all of the pool belongs to whatever is replayed next.
    """

    def __init__(self) -> None:
        self.keys: dict[str, Hashable] = {}  # what the work depended on when it last ran
        self.captured: dict[str, torch.cuda.CUDAGraph | None] = {}  # None: it could not be
        self.count = 0
        self.pool: Any = None

    def __reduce__(self) -> tuple[type[CudaGraphs], tuple[()]]:
        return CudaGraphs, ()  # a copy of an optimizer has other memory

    def run(self, name: str, key: Hashable, work: Callable[[], object], on: Tensor) -> None:
        """Do the work, which is the same as last time if the key is: same operations, constants and addresses."""
        graph = None
        if capturable(on):
            if self.keys.get(name) != key:
                # the first time is an ordinary one: libraries choose their algorithms, which may not be captured
                self.keys[name] = key
                self.captured.pop(name, None)
            elif name not in self.captured:
                self.captured[name] = self._capture(work)
            graph = self.captured.get(name)
        if graph is None:
            work()
        else:
            graph.replay()

    def _capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
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


def capturable(tensor: Tensor) -> bool:
    """Whether work on such tensors may be captured: on a GPU, by one process, and not inside another capture."""
    if not kernels.switched_on() or not tensor.is_cuda or not alone(tensor):
        return False
    return not torch.cuda.is_current_stream_capturing()


def alone(tensor: Tensor) -> bool:
    """Whether this process has all of the model to itself."""
    return not is_sharded(tensor) and not (dist.is_initialized() and dist.get_world_size() > 1)
