"""What a model in training says about itself, on the beginning of the validation split."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stepformer.data.corpus import TokenSplit
from stepformer.model import Model
from stepformer.training.evaluation import autocasting
from stepformer.training.parallel import ParallelModel

NORM_WINDOWS = 8  # that norms of streams are taken on


def _windows(model: Model, split: TokenSplit, count: int) -> Tensor:
    context = model.config.context
    starts = np.arange(min(count, len(split) // context), dtype=np.int64) * context
    return torch.from_numpy(split.gather(starts, context)).to(model.device)


def stream_norms(model: Model, split: TokenSplit) -> list[dict[str, float]]:
    """Of the streams by layer."""
    return model.stream_norms(_windows(model, split, NORM_WINDOWS))


def reported(
    model: Model, split: TokenSplit, parallel: ParallelModel, autocast: torch.dtype | None
) -> dict[str, float]:
    """What the oracles say about themselves on the first block, as means over the layers.

    Shares of rows that miss their target and of scores beyond their bound (`Model.observe`). Sharded models are
    left out: outside its forward pass a rank holds only a part of the weights.
    """
    if parallel.sharded or not any(block.attn.reports for block in model.blocks):
        return {}
    with autocasting(model.device, autocast):
        layers = model.observe(_windows(model, split, 1), rows=False)
    shares: dict[str, list[float]] = {}
    for layer in layers:
        for name, values in layer.items():
            shares.setdefault(name, []).extend(v.item() for v in values if v.ndim == 0)
    return {name: sum(values) / len(values) for name, values in shares.items() if values}
