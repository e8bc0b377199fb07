"""What diagnostics of a run share: the windows they look at, a twin of the model, where results go, how they read."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stepformer.base.errors import InputError
from stepformer.data.corpus import TokenSplit
from stepformer.measure import measured
from stepformer.model import Model
from stepformer.training.loading import LoadedRun, corpus_of

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


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
    return windows, same | measured.variant_of(run.model)


def generator_of(*names: object) -> torch.Generator:
    """Its own random numbers for everything that has a name, so that a continued measurement draws what a whole one
    would, and two architectures draw alike for what they share.
    """
    digest = hashlib.sha256("/".join(map(str, names)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def kept(run: LoadedRun, settings: Any, result: dict[str, Any]) -> dict[str, Any]:
    """Keep a result beside its run, and only then let its journal go, which nothing else shares; returns the result."""
    kind, asked = measured.kind_of(settings.section, run.model), settings.to_dict() | measured.variant_of(run.model)
    path = measured.save(run.folder.path, kind, step=run.step, settings=asked, result=result)
    path.with_suffix(".jsonl").unlink(missing_ok=True)
    return result


def twin(model: Model, dtype: torch.dtype, *, frozen: bool = False) -> Model:
    """The same function in evaluation mode with every gradient flowing, in memory shared where the dtype allows.

    Some architectures stop gradients on purpose in training; Hessians and Jacobians are those of the function all the
    same. In evaluation mode there is no activation checkpointing. `frozen`: no parameter asks for a gradient.
    """
    own = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad and not frozen) for p in model.parameters()}
    copied = copy.deepcopy(model, own)
    for block in copied.blocks:
        for part in (block.template, block.splitting, block.attn, block.mlp):
            for name, value in getattr(part, "exact_gradient", {}).items():  # one of your own may not say
                setattr(part, name, value)
    return copied.to(dtype).eval()


def measured_on(result: dict[str, Any]) -> str:
    """The text behind a result, in words."""
    batches = f" in {result['batches']} batches" if "batches" in result else ""
    windows = f", windows {result['windows_hash']}" if "windows_hash" in result else ""
    return f"{result['tokens']:,} tokens{batches}{windows}"


def digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
