"""Work on the GPU as a CUDA graph: captured once, then replayed by a single launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


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
