"""Batches as a pure function of the step.

An epoch visits every block of `context` tokens once. Blocks do not overlap; where they begin is shifted by an offset of
the epoch, and their order is a permutation of the epoch, both from the seed alone. Sequence number i of the run is
block i mod n of epoch i div n, and step t takes the sequences t B to (t+1) B - 1: a batch may straddle two epochs.

So nothing has to be saved to continue a run but its step number; ranks and micro-batches are slices of one batch; and
two architectures with one seed see the same tokens.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepformer.base.arguments import checks
from stepformer.base.errors import InputError

ROUNDS = 6
_WORD = NDArray[np.uint64]


class Tokens(Protocol):
    """A long row of tokens, wherever it is stored."""

    def __len__(self) -> int: ...

    def gather(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """The `length` tokens from each start on, (len(starts), length)."""
        ...


class Batches:
    """`batch(step)`: inputs and targets (B, T) of a step, from 0 on, as training has them.

    Args:
        tokens: A split of a corpus, `corpus.split("train")`.
        context: T, tokens of a sequence.
        batch: B, sequences of a step.
        seed: Decides where sequences begin and in which order they come.
    """

    @checks(context=1)
    def __init__(self, tokens: Tokens, context: int, batch: int, seed: int) -> None:
        if isinstance(tokens, torch.Tensor) or not hasattr(tokens, "gather"):
            kind = type(tokens).__name__
            raise InputError(f"`Batches` takes a split such as corpus.split('train'), not something of type {kind}.")
        if batch < 1:
            raise InputError(f"A step needs at least 1 sequence, not batch = {batch}.")
        self.tokens, self.context, self.size, self.seed = tokens, context, batch, seed
        # the same number of blocks for every offset below the context, and one more token for the last target
        self.blocks = (len(tokens) - context) // context
        if self.blocks < 1:
            raise InputError(
                f"The training split has {len(tokens):,} tokens: too few for a context of {context} "
                f"(at least {2 * context:,} are needed). Give it more text or a smaller context."
            )

    def starts(self, step: int, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Where the sequences `begin` to `end` of a step begin in the split."""
        if step < 0:
            raise InputError(f"There is no step {step}: the first one is 0.")
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

    @checks()
    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a whole step, int64 (B, T)."""
        return self.rows(step, 0, self.size)

    def epochs(self, steps: int) -> float:
        """How often a run of so many steps sees the data."""
        return steps * self.size / self.blocks


def key_of(*parts: object) -> int:
    """Sixty-four bits that depend on every part, e.g. `key_of("blocks", seed, epoch)`."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big")


def permute(positions: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """The entries at `positions` of the permutation of range(size) that `key` names: a formula, without a table.

    A Feistel network permutes the numbers below the next power of four; numbers that fall outside the wanted range are
    sent through it again until they fall inside (cycle walking). It is our own, so that no library update can reorder
    an old run's data.
    """
    half_bits = max(1, ((max(size, 2) - 1).bit_length() + 1) // 2)
    keys = [np.uint64(key_of(key, r)) for r in range(ROUNDS)]
    found = _feistel(positions.astype(np.uint64), half_bits, keys)
    outside = found >= size
    while outside.any():  # each pass lets at most three quarters stay outside, on average
        found[outside] = _feistel(found[outside], half_bits, keys)
        outside = found >= size
    return found.astype(np.int64)


def _feistel(x: _WORD, half_bits: int, keys: list[np.uint64]) -> _WORD:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(x: _WORD) -> _WORD:
    """A 64-bit finaliser (the constants of splitmix64): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
