"""The text that a diagnostic looks at: windows of a split drawn once from a seed, the same for every run."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stepformer.base.errors import InputError
from stepformer.training.evaluation import EvaluatedSplit


def fixed_windows(split: EvaluatedSplit, count: int, context: int, seed: int = 0) -> Tensor:
    """`count` windows of context + 1 tokens at random places, (count, context + 1): inputs and targets overlap.

    The places depend on the seed, the split's length and the context only, so that runs are compared on one text.
    """
    room = len(split) - context
    if room < 1:
        raise InputError(f"The split has {len(split):,} tokens: too few for a window of {context} and its targets.")
    starts = np.random.Generator(np.random.PCG64(seed)).integers(0, room, size=count)
    return torch.from_numpy(split.gather(starts.astype(np.int64), context + 1))
