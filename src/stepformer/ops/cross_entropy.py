"""The loss: cross-entropy of the head's logits, from some rows of them at a time where kernels may run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stepformer.ops import kernels
from stepformer.ops.sharding import is_sharded

IGNORE = -100  # target id that the loss skips


def wide(logits: Tensor) -> Tensor:
    """Logits in fp32 at least: under bf16 autocast the head is bf16, the softmax and a cap must not be."""
    return logits if logits.dtype == torch.float64 else logits.float()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the targets (B, T) of -ln softmax(logits), in nats."""
    return F.cross_entropy(wide(logits).flatten(0, 1), targets.long().flatten(), ignore_index=IGNORE)


def linear_cross_entropy(h: Tensor, table: Tensor, targets: Tensor, cap: float | None) -> Tensor | None:
    """The same of logits = h table^T, capped at `cap`, which never exist as a whole; None where no kernel may run."""
    kind = h.device.type
    if torch.is_autocast_enabled(kind):
        h = h.to(torch.get_autocast_dtype(kind))  # as F.linear would
    if not kernels.usable(h, table) or is_sharded(table):
        return None
    from stepformer.ops import loss

    return loss.linear_cross_entropy(h.flatten(0, 1), table, targets.flatten(), cap)
