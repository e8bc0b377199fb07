"""What attention calls remember of past tokens, for incremental decoding: tensors by position, or a running sum."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Place(Protocol):
    """Where new tokens stand (`oracles.Call`): from `start` to `end` in all rows if `uniform`, else by `positions`."""

    positions: Tensor
    start: int
    end: int
    uniform: bool


class Slot(Protocol):
    """What one attention call remembers; each attention defines its own."""

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be there several times (beams)."""

    def tensors(self) -> list[Tensor]:
        """All that it stores."""


class TokenSlot:
    """Something of every past token, by name: keys and values, or whatever an attention looks up again.

    `k=(heads, width, dtype)` declares a tensor (B, heads, capacity, width).
    """

    def __init__(self, batch: int, capacity: int, device: torch.device, **kinds: tuple[int, int, torch.dtype]) -> None:
        self.stored = {
            name: torch.zeros(batch, heads, capacity, width, device=device, dtype=dtype)
            for name, (heads, width, dtype) in kinds.items()
        }

    def extend(self, call: Place, **new: Tensor) -> tuple[Tensor, ...]:
        """Store new tensors (B, heads, T, width) at their positions; return all that may be visible."""
        for name, value in new.items():
            stored = self.stored[name]
            if call.uniform:
                stored[:, :, call.start : call.end] = value
            else:
                rows = torch.arange(value.shape[0], device=value.device)[:, None]
                stored[rows, :, call.positions] = value.transpose(1, 2).to(stored.dtype)
        # .to(): a cache made under autocast may be read outside it
        return tuple(self.stored[name][:, :, : call.end].to(value.dtype) for name, value in new.items())

    def select(self, rows: Tensor) -> None:
        self.stored = {name: tensor[rows] for name, tensor in self.stored.items()}

    def tensors(self) -> list[Tensor]:
        return list(self.stored.values())


class StateSlot:
    """The running sum of a linear attention call, (B, d, d): the same size however long the text."""

    def __init__(self, batch: int, width: int, device: torch.device, dtype: torch.dtype, moved: bool = False) -> None:
        wide = torch.promote_types(dtype, torch.float32)  # a sum over all tokens needs the digits
        self.state = torch.zeros(batch, width, width, device=device, dtype=wide)
        # the same with newer momenta, where an integrator moves with them
        self.moved = torch.zeros_like(self.state) if moved else None

    def select(self, rows: Tensor) -> None:
        self.state = self.state[rows]
        self.moved = None if self.moved is None else self.moved[rows]

    def tensors(self) -> list[Tensor]:
        return [self.state] if self.moved is None else [self.state, self.moved]

    def keep(self, tensors: list[Tensor]) -> None:
        """Hold what is held now in these tensors, the ones of an earlier `tensors`: for steps at fixed addresses."""
        for kept, new in zip(tensors, self.tensors(), strict=True):
            if kept is not new:
                kept.copy_(new)
        self.state, self.moved = tensors[0], tensors[1] if len(tensors) > 1 else None
