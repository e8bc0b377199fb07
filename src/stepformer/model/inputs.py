"""Bad input, refused with a sentence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepformer.base.errors import InputError
from stepformer.model.config import ModelConfig
from stepformer.ops.cross_entropy import IGNORE
from stepformer.ops.tables import check_ids


def check_inputs(
    config: ModelConfig, tokens: Any, targets: Tensor | None = None, lengths: Tensor | None = None, cached: bool = False
) -> None:
    """Refuse what no model can take. Values are looked at on CPU only: no synchronisation on a device."""
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or not _is_integer(tokens):
        is_tensor = isinstance(tokens, Tensor)
        what = f"{tokens.dtype} of shape {tuple(tokens.shape)}" if is_tensor else type(tokens).__name__
        raise InputError(f"Tokens should be a tensor of integers of shape (batch, time), not {what}.")
    batch, time = tokens.shape
    if time == 0:
        raise InputError("There are no tokens: a sequence needs at least one.")
    if not cached and time > config.context:
        raise InputError(f"The sequence has {time} tokens, but the model's context is {config.context}.")
    if targets is not None and targets.shape != tokens.shape:
        raise InputError(f"Targets have shape {tuple(targets.shape)}, tokens {tuple(tokens.shape)}.")
    if lengths is not None and not (isinstance(lengths, Tensor) and _is_integer(lengths)):
        raise InputError("`lengths` should be a tensor of integers, one per row.")
    if lengths is not None and lengths.shape != (batch,):
        raise InputError(f"`lengths` should have one entry per row, {batch}, not shape {tuple(lengths.shape)}.")
    # not fake, not distributed, not inside vmap or grad: a plain tensor on the CPU
    has_values = type(tokens) is Tensor and tokens.device.type == "cpu"
    if has_values and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        check_ids(tokens, config.vocab_size)
        if targets is not None:
            check_ids(targets[targets != IGNORE], config.vocab_size, "target")
        if lengths is not None and not bool(((lengths >= 1) & (lengths <= time)).all()):
            raise InputError(f"`lengths` should lie between 1 and {time}, the width of the tokens.")


def _is_integer(t: Tensor) -> bool:
    return not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool
