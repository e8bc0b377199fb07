"""Batches as a pure function of the step.

An epoch visits every block of `context` tokens once. Blocks do not overlap; where they begin is shifted by an offset of
the epoch, and their order is a permutation of the epoch, both from the seed alone. Sequence number i of the run is
block i mod n of epoch i div n, and step t takes the sequences t B to (t+1) B - 1: a batch may straddle two epochs.

So nothing has to be saved to continue a run but its step number; ranks and micro-batches are slices of one batch; and
two architectures with one seed see the same tokens.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepformer.base.errors import InputError
from stepformer.data.permutation import key_of, permute


class Tokens(Protocol):
    """A long row of tokens, wherever it is stored."""

    def __len__(self) -> int: ...

    def gather(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """The `length` tokens from each start on, (len(starts), length)."""
        ...


class Batches:
    """`batch(step)`: inputs and targets (B, T) of a step."""

    def __init__(self, tokens: Tokens, context: int, batch: int, seed: int) -> None:
        self.tokens, self.context, self.size, self.seed = tokens, context, batch, seed
        # the same number of blocks for every offset below the context, and one more token for the last target
        self.blocks = (len(tokens) - context) // context
        if self.blocks < 1:
            raise InputError(
                f"The training split has {len(tokens):,} tokens: too few for a context of {context} "
                f"(at least {2 * context:,} are needed)."
            )

    def starts(self, step: int, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Where the sequences `begin` to `end` of a step begin in the split."""
        end = self.size if end is None else end
        numbers = np.arange(step * self.size + begin, step * self.size + end, dtype=np.int64)
        epochs, positions = np.divmod(numbers, self.blocks)
        found = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            order = permute(positions[chosen], self.blocks, key_of("order", self.seed, epoch))
            found[chosen] = key_of("offset", self.seed, epoch) % self.context + self.context * order
        return found

    def rows(self, step: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some sequences of a step, int64 (end - begin, T)."""
        window = torch.from_numpy(self.tokens.gather(self.starts(step, begin, end), self.context + 1))
        return window[:, :-1], window[:, 1:]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a whole step, int64 (B, T)."""
        return self.rows(step, 0, self.size)

    def epochs(self, steps: int) -> float:
        """How often a run of so many steps sees the data."""
        return steps * self.size / self.blocks
