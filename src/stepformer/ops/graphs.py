"""Work on the GPU as a CUDA graph: captured once, then replayed by a single launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stepformer.ops import kernels
from stepformer.ops.sharding import is_sharded

T = TypeVar("T")
MOST = 16  # captures of an optimizer; where memory moves more often, another one would cost more than it saves


def capture(
    work: Callable[[], T], pool: Any = None, generator: torch.Generator | None = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """The graph of what `work` launches, in a memory pool, and what it returns.

    `generator`: one that it draws from, beside the device's own. Work that cannot be captured, for example because it
    asks for a value on the host, raises its own error and has not run; everything after it goes on as if nobody had
    tried, except that the pool takes no other capture.
    """
    graph, pool = torch.cuda.CUDAGraph(), pool if pool is not None else torch.cuda.graph_pool_handle()
    stream, cause = torch.cuda.current_stream(), None
    if generator is not None:
        graph.register_generator_state(generator)
    try:
        # other threads may go on using the device meanwhile
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            try:
                return graph, work()
            except BaseException as error:
                cause = error
                raise
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # a device that is lost says so again at its next use
            # PyTorch tells a graph's generators their seed on the capture's stream: what is not finished when the
            # graph goes would be written into memory that belongs to somebody else by then
            torch.cuda.synchronize()
            del graph
            _recover(stream, pool, generator)
        raise (cause or error) from None


def _recover(stream: torch.cuda.Stream, pool: Any, generator: torch.Generator | None) -> None:
    """Undo what a failed capture leaves behind.

    PyTorch (2.11) ends a capture by one call, and leaves three things as they are when that call fails: the stream
    stays current, the allocator keeps the pool and gives nothing back to the device, and the generators refuse every
    draw. There are functions for the first two; the generators are freed by a capture that succeeds.
    """
    torch.cuda.set_stream(stream)
    with contextlib.suppress(RuntimeError, AttributeError):  # it ended properly, or a later PyTorch needs no help
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        torch._C._cuda_releasePool(stream.device_index, pool)
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    nothing = torch.empty(1, device=stream.device)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        nothing.zero_()
    torch.cuda.synchronize()


class CudaGraphs:
    """An optimizer's work on memory that stays where it is, under names, as graphs in one memory pool.

    A step is some two hundred short kernels, and Python needs longer to launch them than the GPU to run them. A graph
    runs the same kernels on the same memory in the same order, so the results are the same to the bit. Work leaves its
    results in memory from outside: all of the pool belongs to whatever is replayed next.
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
