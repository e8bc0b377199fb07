"""The batches of a run as one rank reads them: its own rows, on its device, the next step's read meanwhile."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from stepformer.data.batches import Batches
from stepformer.training.parallel import World


class LocalBatches:
    """`at(t)`: inputs and targets of this rank's share of step t."""

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

    def read(self, t: int) -> tuple[Tensor, Tensor]:
        share = self.batches.size // self.world.size
        inputs, targets = self.batches.rows(t, self.world.rank * share, (self.world.rank + 1) * share)
        if self.world.device.type != "cuda":
            return inputs, targets
        return inputs.contiguous().pin_memory(), targets.contiguous().pin_memory()

    def close(self) -> None:
        self.loader.shutdown(wait=False, cancel_futures=True)
