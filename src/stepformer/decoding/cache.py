"""What a model remembers of the tokens it has seen, for incremental decoding: the slots of all its attention calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepformer.base.errors import InputError
from stepformer.ops.slots import Slot
from stepformer.oracles.caches import Call


class Cache:
    """All slots of a model, and how many tokens each row has stored."""

    def __init__(self, slots: Sequence[Sequence[Slot]], batch: int, capacity: int, device: torch.device) -> None:
        self.slots = slots
        self.capacity = capacity
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.origins = torch.zeros_like(self.lengths)  # where each row's current document began
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
        positions = (start if self.uniform else self.lengths[:, None]) + torch.arange(width, device=tokens.device)
        mask = None
        if not self.uniform or (start > 0 and width > 1):
            visible = torch.arange(end, device=tokens.device) <= positions[..., None]  # (T, end) or (B, T, end)
            mask = visible.view(-1, 1, width, end)
        return Call(positions, mask, start, end, self.uniform, lengths)

    def advance(self, call: Call, width: int) -> None:
        """Count the tokens just written: `width` in every row, or `lengths[b]` real ones in row b."""
        lengths = call.lengths
        if call.origins is not None:
            ends = torch.full_like(self.lengths, width) if lengths is None else lengths.to(self.lengths.device)
            self.origins = call.origins.gather(1, ends[:, None] - 1)[:, 0]
        self.longest += width
        if lengths is None:
            self.lengths += width
            return
        self.lengths += lengths.to(self.lengths.device)
        self.uniform = self.uniform and bool((lengths == width).all())
        if not self.uniform:
            self.longest = int(self.lengths.max())

    def select(self, rows: Tensor) -> None:
        """Keep some rows, in this order (beam search, finished prompts)."""
        self.lengths, self.origins = self.lengths[rows], self.origins[rows]
        self.longest = int(self.lengths.max())
        self.uniform = bool((self.lengths == self.longest).all())
        for layer in self.slots:
            for slot in layer:
                slot.select(rows)
