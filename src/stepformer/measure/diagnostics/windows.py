"""The text that a diagnostic looks at: windows of a split drawn once from a seed, the same for every run."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepformer.base.errors import InputError
from stepformer.data.corpus import TokenSplit
from stepformer.training.run import LoadedRun, corpus_of


def fixed_windows(split: TokenSplit, count: int, context: int, seed: int = 0) -> Tensor:
    """`count` windows of context + 1 tokens at random places, (count, context + 1): inputs and targets overlap.

    The places depend on the seed, the split's length and the context only, so that runs are compared on one text.
    """
    room = len(split) - context
    if room < 1:
        raise InputError(f"The split has {len(split):,} tokens: too few for a window of {context} and its targets.")
    starts = np.random.Generator(np.random.PCG64(seed)).integers(0, room, size=count)
    return torch.from_numpy(split.gather(starts.astype(np.int64), context + 1))


def windows_of(run: LoadedRun, settings: Any) -> tuple[Tensor, dict[str, Any]]:
    """The windows of a run's validation split that settings ask for, and what a journal of them is about."""
    longest = run.config.model.context
    context = settings.context or longest
    if context > longest:
        raise InputError(f"context = {context} is longer than the model's context, {longest}.")
    windows = fixed_windows(corpus_of(run, settings.corpus).split("val"), settings.windows, context, settings.seed)
    digest = hashlib.sha256(windows.numpy().tobytes()).hexdigest()[:16]
    same = {"run": run.record.get("id"), "step": run.step, "settings": settings.to_dict(), "windows_hash": digest}
    return windows, same
