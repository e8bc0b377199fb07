"""One process or many: ranks from torchrun, their batches, DDP, FSDP2, and the few collectives that training needs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from stepformer.base.errors import InputError, StepformerError
from stepformer.data.batches import Batches
from stepformer.model import Model
from stepformer.ops import kernels
from stepformer.training.stopping import Ending, LostRankError

T = TypeVar("T")
BUCKET = 64 * 2**20  # bytes of gradients that ranks exchange at once
TIMEOUT = 1800  # seconds that a rank waits for the others, if `collective_timeout` does not say
_joined: list[Ending] = []  # of the ranks that this process is one of, as long as it is
_times = 0  # that it has joined others: each time they speak under another name
# The last group, kept beyond its end: if DDP were the last to hold it, gloo's threads would be waited for with Python's
# lock held, which such a thread may want to let go of a tensor; then the process never ends.
_kept: Any = None


@dataclass(frozen=True)
class World:
    """The processes of a run, this one among them."""

    rank: int
    size: int
    device: torch.device
    ending: Ending | None = field(default=None, compare=False)  # how several ranks end together

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all; through CPU memory, so that no queue of a device has to empty."""
        self.largest(0)

    def largest(self, number: int) -> int:
        """The largest of every rank's number, on every rank; on the CPU, so that no device has to wait."""
        if self.size == 1:
            return number
        value = torch.tensor(number)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over ranks of a small tensor, on every rank."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def on_main(self, work: Callable[[], T]) -> T:
        """What the main rank finds, on every rank: two looks at one folder may differ. If it fails there, all fail."""
        if self.size == 1:
            return work()
        held: list[Any] = [None, ""]
        if self.is_main:
            try:
                held[0] = work()
            except StepformerError as error:
                held[1] = str(error)
        dist.broadcast_object_list(held, src=0, device=torch.device("cpu"))
        if held[1]:
            raise InputError(held[1])
        return cast(T, held[0])


ALONE = World(0, 1, torch.device("cpu"))


def choose_device(choice: str) -> torch.device:
    """The device of this process: the local rank's GPU, or the CPU."""
    if choice == "cuda" and not torch.cuda.is_available():
        raise InputError("device = 'cuda' was asked for, but this torch sees no CUDA device.")
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        error = InputError(
            f"This machine has {count} GPU{'s' if count > 1 else ''}, but torchrun started local rank {local}: "
            f"use --nproc_per_node {count} or fewer. A checkpoint resumes on any number of ranks."
        )
        error.told = local > count  # by the first rank that has no GPU: those before it know of nothing
        raise error
    return torch.device("cuda", local)


@contextlib.contextmanager
def joined_world(choice: str, timeout: int | None = None) -> Iterator[World]:
    """This process's place among the ranks that torchrun started, or alone.

    An error that ends one of several ranks ends all of them, by force where one does not hear of it otherwise.
    """
    # cuBLAS reads this when it starts; without it deterministic runs are refused by torch
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = choose_device(choice)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    begun = dist.is_initialized()
    if not begun:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            yield World(0, 1, device)
            return
        # gloo beside nccl: flags and objects travel through CPU memory without a device having to wait
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        wait = timedelta(seconds=timeout or TIMEOUT)
        store, rank, size = next(dist.rendezvous("env://", timeout=wait))
        store = dist.PrefixStore(f"group/{_times}", store)  # addresses of the group before may still be in it
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
        global _kept
        _kept = dist.group.WORLD
    try:
        with _ending_together(device, timeout or TIMEOUT) as world:
            yield world
    finally:
        if not begun:
            dist.destroy_process_group()


@contextlib.contextmanager
def _ending_together(device: torch.device, timeout: int) -> Iterator[World]:
    global _times
    rank, size = dist.get_rank(), dist.get_world_size()
    if _joined or size == 1:  # a run that another one is extended to is in its world already
        yield World(rank, size, device, _joined[-1] if _joined else None)
        return
    _times += 1
    store = dist.distributed_c10d._get_default_store()  # in which the ranks met
    store = store.clone() if hasattr(store, "clone") else store  # a connection that nobody else waits on
    ending = Ending(rank, size, dist.PrefixStore(f"stepformer/{_times}", store), timeout)
    _joined.append(ending)
    try:
        yield World(rank, size, device, ending)
    except BaseException as error:
        found = lost_rank(error, timeout)
        ending.leave(found or error)
        if found is not None:
            raise found from None
        raise
    finally:
        ending.close()
        _joined.pop()


LOST = "connection (was )?(closed|reset|refused)|got 0 bytes|remote process|broken pipe|socket|peer|abort"


def lost_rank(error: BaseException, timeout: int) -> LostRankError | None:
    """A sentence for the error of a collective that another rank did not take part in; None for other errors."""
    text = str(error)
    if not isinstance(error, RuntimeError) or not re.search("gloo|nccl|TCPStore", text, re.IGNORECASE):
        return None
    if re.search("timed? ?out", text, re.IGNORECASE):
        return LostRankError(
            f"Another rank did not answer for {timeout} s: it hangs or is much slower than this one; if it only needs "
            "more time, say collective_timeout=SECONDS."
        )
    if not re.search(LOST, text, re.IGNORECASE):
        return None
    return LostRankError(
        "Another rank was lost (killed, or its machine is gone), so this one ends too; the last checkpoint stands, and "
        "`resume` continues from it."
    )


def prepare_compiler(model: Model, device: torch.device) -> None:
    """What `torch.compile` has to know about our models."""
    if device.type == "cuda":
        kernels.prepare_compiler(narrow=model.config.d_model <= 128)


class ParallelModel:
    """A model as its ranks run it: plain, compiled, replicated or sharded; `model` is the module with the weights.

    Evaluation runs `model`, without the wrapper that compiles or replicates it. (Sharded models are compiled block by
    block in place; their evaluation is compiled too.) Ranks that `replay` a recorded pass have no wrapper either: they
    exchange gradients after it (`average`).
    """

    def __init__(self, model: Model, world: World, kind: str, compiled: bool, replay: bool = False) -> None:
        self.model, self.world = model, world
        self.sharded = world.size > 1 and kind == "fsdp"
        self.run: Any = model
        if compiled:
            prepare_compiler(model, world.device)
        if self.sharded:
            from torch.distributed.device_mesh import init_device_mesh  # slow to load, and seldom needed
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(world.device.type, (world.size,))
            for block in model.blocks:
                if compiled:
                    block.compile()
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            self.run = torch.compile(model) if compiled else model
            if not replay:
                self.replicate()

    def replicate(self) -> None:
        """Let DDP exchange gradients during the backward pass."""
        if self.world.size > 1:
            devices = [self.world.device] if self.world.device.type == "cuda" else None
            self.run = DistributedDataParallel(self.run, device_ids=devices)

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its mean over the ranks, in flat buckets; nothing without a process group."""
        if not dist.is_initialized():
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        waiting: list[tuple[list[Tensor], Tensor, Any]] = []
        for bucket in _take_tensors(gradients, BUCKET):
            flat = _flatten_dense_tensors(bucket)
            waiting.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        for bucket, flat, work in waiting:
            work.wait()
            torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat.div_(self.world.size), bucket)))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.run(inputs, targets, loss_only=True).loss
        assert isinstance(loss, Tensor)
        return loss

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients are exchanged once a step, with its last micro-batch."""
        if self.sharded:
            self.run.set_requires_gradient_sync(last)
        alone = isinstance(self.run, DistributedDataParallel) and not last
        return self.run.no_sync() if alone else contextlib.nullcontext()


class LocalBatches:
    """`at(t)`: inputs and targets of this rank's share of step t, on its device, the next step's read meanwhile."""

    def __init__(self, batches: Batches, world: World, steps: int) -> None:
        self.batches, self.world, self.steps = batches, world, steps
        self.loader = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.next: dict[int, Future[tuple[Tensor, Tensor]]] = {}

    def at(self, t: int) -> tuple[Tensor, Tensor]:
        """A step that is asked for twice in a row (SAM) is read once."""
        steps = range(t, min(t + 2, self.steps))
        self.next = {step: self.next.get(step) or self.loader.submit(self.read, step) for step in steps}
        inputs, targets = self.next[t].result()
        device = self.world.device
        return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    def first(self, t: int, tokens: int) -> tuple[Tensor, Tensor]:
        """The first sequences of step t's whole batch, about so many tokens, the same on every rank."""
        count = max(1, min(self.batches.size, tokens // self.batches.context))
        inputs, targets = self.batches.rows(t, 0, count)
        return inputs.to(self.world.device), targets.to(self.world.device)

    def read(self, t: int) -> tuple[Tensor, Tensor]:
        share = self.batches.size // self.world.size
        inputs, targets = self.batches.rows(t, self.world.rank * share, (self.world.rank + 1) * share)
        if self.world.device.type != "cuda":
            return inputs, targets
        return inputs.contiguous().pin_memory(), targets.contiguous().pin_memory()

    def close(self) -> None:
        self.loader.shutdown(wait=False, cancel_futures=True)
