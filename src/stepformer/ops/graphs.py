"""Work on the GPU as a CUDA graph: captured once, then replayed by a single launch."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stepformer.ops import kernels
from stepformer.ops.sharding import is_sharded

T = TypeVar("T")
WARM_UP = 2  # runs before a recording
MOST = 16  # captures of an optimizer; where memory moves more often, another one would cost more than it saves


class Recorder:
    """Work on the GPU as CUDA graphs in one memory pool. `generator`: what it draws from, beside the device's own."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator
        self.pool: Any = None

    def record(
        self, work: Callable[[], T], warm_up: int = 0, before: Callable[[], None] = lambda: None
    ) -> tuple[Callable[[], None], T]:
        """What launches the work again, and what it returned; it has not run yet.

        It runs `warm_up` times first, on a stream of its own: libraries choose their algorithms and Triton compiles,
        which may not be recorded. `before` prepares each of these runs, and the recording.

        Work that cannot be captured, for example because it asks for a value on the host, raises its own error and has
        not run; everything after it goes on as if nobody had tried. What comes next has another pool.
        """
        stream = torch.cuda.current_stream()
        if warm_up:
            side = torch.cuda.Stream()
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                for _ in range(warm_up):
                    before()
                    work()
            stream.wait_stream(side)
        before()
        pool = self.pool = self.pool if self.pool is not None else torch.cuda.graph_pool_handle()
        graph, cause = self._graph(), None
        try:
            # other threads may go on using the device meanwhile
            with _no_collection(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                try:
                    return graph.replay, work()
                except BaseException as error:
                    cause = error
                    raise
        except BaseException as error:
            self.pool = None
            with contextlib.suppress(RuntimeError):  # a device that is lost says so again at its next use
                # PyTorch tells a graph's generators their seed on the capture's stream: what is not finished when the
                # graph goes would be written into memory that belongs to somebody else by then
                torch.cuda.synchronize()
                del graph
                self._recover(stream, pool)
            raise (cause or error) from None

    def _graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if self.generator is not None:
            graph.register_generator_state(self.generator)
        return graph

    def _recover(self, stream: torch.cuda.Stream, pool: Any) -> None:
        """Undo what a failed capture leaves behind.

        PyTorch (2.11) ends a capture by one call, and leaves three things as they are when that call fails: the stream
        stays current, the allocator keeps the pool and gives nothing back to the device, and the generators refuse
        every draw. There are functions for the first two; the generators are freed by a capture that succeeds.
        """
        torch.cuda.set_stream(stream)
        with contextlib.suppress(RuntimeError, AttributeError):  # it ended properly, or a later PyTorch needs no help
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            torch._C._cuda_releasePool(stream.device_index, pool)
        graph, nothing = self._graph(), torch.empty(1, device=stream.device)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            nothing.zero_()
        torch.cuda.synchronize()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's collector of cycles: a graph that it finds and destroys during a capture ends the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CudaGraphs:
    """An optimizer's work on memory that stays where it is, under names, as graphs in one memory pool.

    A step is some two hundred short kernels, and Python needs longer to launch them than the GPU to run them. A graph
    runs the same kernels on the same memory in the same order, so the results are the same to the bit. Work leaves its
    results in memory from outside: all of the pool belongs to whatever is replayed next.
    """

    def __init__(self) -> None:
        self.keys: dict[str, Hashable] = {}  # what the work depended on when it last ran
        self.captured: dict[str, Callable[[], None] | None] = {}  # None: it could not be
        self.count = 0
        self.recorder = Recorder()

    def __reduce__(self) -> tuple[type[CudaGraphs], tuple[()]]:
        return CudaGraphs, ()  # a copy of an optimizer has other memory

    def run(self, name: str, key: Hashable, work: Callable[[], object], on: Tensor) -> None:
        """Do the work, which is the same as last time if the key is: same operations, constants and addresses."""
        replay = None
        if capturable(on):
            if self.keys.get(name) != key:
                # the first time is an ordinary one: libraries choose their algorithms, which may not be captured
                self.keys[name] = key
                self.captured.pop(name, None)
            elif name not in self.captured:
                self.captured[name] = self._capture(work)
            replay = self.captured.get(name)
        (replay or work)()

    def _capture(self, work: Callable[[], object]) -> Callable[[], None] | None:
        if self.count >= MOST:
            return None
        self.count += 1
        try:
            return self.recorder.record(work)[0]
        except RuntimeError:  # memory is short, or another thread captures: nothing has run; it is done plainly
            return None


def capturable(tensor: Tensor) -> bool:
    """Whether work on such tensors may be captured: on a GPU, by one process, and not inside another capture."""
    if not kernels.switched_on() or not tensor.is_cuda or not alone(tensor):
        return False
    return not torch.cuda.is_current_stream_capturing()


def alone(tensor: Tensor) -> bool:
    """Whether this process has all of the model to itself."""
    return not is_sharded(tensor) and not (dist.is_initialized() and dist.get_world_size() > 1)
