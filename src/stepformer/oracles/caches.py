"""Memory of past tokens for incremental decoding.

Streams live along depth and belong to one token each, so nothing but the attention's own memory has to be kept.
Every attention *call* owns a slot: a block that asks its attention twice, at two points, has two.

Rows of a batch may have different lengths. Prompts are padded on the right; a row's next token is written at that
row's own position, over the padding, and keys beyond a query's position are never visible. So positions are
natural, and padding can neither be seen nor shift anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stepformer.errors import InputError


class Slot(Protocol):
    """What one attention call remembers; each attention defines its own."""

    def select(self, rows: Tensor) -> None: ...


class KeyValueSlot:
    """Keys and values of one attention call, (B, H, capacity, head_dim)."""

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> None:
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)

    def extend(self, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Store new keys and values (B, H, T, head_dim) at their positions; return all that may be visible."""
        if call.uniform:
            self.k[:, :, call.start : call.end] = k
            self.v[:, :, call.start : call.end] = v
        else:
            rows = torch.arange(k.shape[0], device=k.device)[:, None]
            self.k[rows, :, call.positions] = k.transpose(1, 2)
            self.v[rows, :, call.positions] = v.transpose(1, 2)
        # .to(): a cache made under autocast may be read outside it
        return self.k[:, :, : call.end].to(k.dtype), self.v[:, :, : call.end].to(v.dtype)

    def select(self, rows: Tensor) -> None:
        self.k, self.v = self.k[rows], self.v[rows]


@dataclass
class Call:
    """Where the tokens of this forward pass stand; what an attention needs to know besides its input.

    positions: (T,) or, when rows differ, (B, T). mask: (B, 1, T, end), True where a key is visible; None means
    plain causal attention among the new tokens (or, for one new token on rows of equal length, all keys).
    lengths: (B,), how many of each row's tokens are real, when prompts are padded on the right.
    """

    positions: Tensor
    mask: Tensor | None = None
    start: int = 0
    end: int = 0
    uniform: bool = True
    lengths: Tensor | None = None
    slots: Sequence[Slot] | None = None
    used: int = 0

    def next_slot(self) -> Slot | None:
        """The cache of the attention call that is about to happen, in execution order within a block."""
        if self.slots is None:
            return None
        self.used += 1
        return self.slots[self.used - 1]


class Cache:
    """All slots of a model, and how many tokens each row has stored."""

    def __init__(self, slots: Sequence[Sequence[Slot]], batch: int, capacity: int, device: torch.device) -> None:
        self.slots = slots
        self.capacity = capacity
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.longest = 0  # a Python bound on `lengths`, so that no step asks the device
        self.uniform = True

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    def call(self, tokens: Tensor, lengths: Tensor | None = None) -> Call:
        """How a forward pass over `tokens` (B, T) sees this cache."""
        batch, width = tokens.shape
        if batch != self.batch:
            raise InputError(f"The cache holds {self.batch} rows, but {batch} rows of tokens were given.")
        start, end = self.longest, self.longest + width
        if end > self.capacity:
            raise InputError(
                f"The cache is full: {start} tokens stored, {width} more would exceed its capacity {self.capacity}."
            )
        steps = torch.arange(width, device=tokens.device)
        if self.uniform:
            positions = start + steps
            mask = None
            if start > 0 and width > 1:
                mask = (torch.arange(end, device=tokens.device) <= positions[:, None])[None, None]
        else:
            positions = self.lengths[:, None] + steps
            mask = (torch.arange(end, device=tokens.device) <= positions[..., None])[:, None]
        return Call(positions, mask, start, end, self.uniform, lengths)

    def advance(self, width: int, lengths: Tensor | None = None) -> None:
        """Count the tokens just written: `width` in every row, or `lengths[b]` real ones in row b."""
        if lengths is None:
            self.lengths += width
        else:
            self.lengths += lengths.to(self.lengths.device)
            self.uniform = self.uniform and bool((lengths == width).all())
        self.longest += width
        if not self.uniform and lengths is not None:
            self.longest = int(self.lengths.max())

    def select(self, rows: Tensor) -> None:
        """Keep some rows, in this order (beam search, finished prompts)."""
        self.lengths = self.lengths[rows]
        self.longest = int(self.lengths.max())
        self.uniform = bool((self.lengths == self.longest).all())
        for layer in self.slots:
            for slot in layer:
                slot.select(rows)
