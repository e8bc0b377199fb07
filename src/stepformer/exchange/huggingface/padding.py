"""Batches padded as `transformers` likes it, on the left, on the right or anywhere, and back.

Stepformer counts positions from a row's first real token and pads on the right. So real tokens move to the front, in
order, and their logits move back to where the tokens stood.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stepformer.base.errors import InputError


@dataclass(frozen=True)
class Rows:
    """Tokens (B, T) for a stepformer model; `lengths` is None when all of them are real."""

    tokens: Tensor
    lengths: Tensor | None = None
    real: Tensor | None = None  # (B, columns), True where the given tokens are real

    def unpacked(self, logits: Tensor) -> Tensor:
        """Logits (B, T, V) where the tokens stood, (B, columns, V); zero, so without any gradient, at padding.

        A padded column must not keep what stands there after packing: that has seen the whole row.
        """
        if self.real is None:
            return logits
        places = (self.real.cumsum(dim=1) - 1).clamp(min=0)
        rows = torch.arange(len(logits), device=logits.device)[:, None]
        return logits[rows, places].masked_fill(~self.real[..., None], 0.0)


def packed(input_ids: Tensor, attention_mask: Tensor | None, *, cached: bool) -> Rows:
    """The real tokens of every row at its beginning. A mask that also covers a cache ends with the new tokens."""
    if attention_mask is None:
        return Rows(input_ids)
    width = input_ids.shape[1]
    fits = attention_mask.ndim == 2 and len(attention_mask) == len(input_ids)
    if not fits or attention_mask.shape[1] < width or (attention_mask.shape[1] > width and not cached):
        raise InputError(
            f"attention_mask should have one column for each token, (batch, time); it has shape "
            f"{tuple(attention_mask.shape)}, the tokens {tuple(input_ids.shape)}."
        )
    real = attention_mask[:, attention_mask.shape[1] - width :].to(input_ids.device) != 0
    if bool(real.all()):
        return Rows(input_ids)
    lengths = real.sum(dim=1)
    if cached and bool((lengths == 0).any()):
        raise InputError("A row of this batch is padding only: with a cache every row needs at least one real token.")
    order = torch.argsort(real.logical_not().long(), dim=1, stable=True)[:, : max(1, int(lengths.max()))]
    tokens = input_ids.gather(1, order).masked_fill(~real.gather(1, order), 0)  # a padding id need not exist
    return Rows(tokens, lengths.clamp(min=1), real)
