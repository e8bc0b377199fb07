"""Initial weights: every parameter has its own random stream, keyed by seed and name."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from numbers import Integral

import torch
from torch import nn

from stepformer.base.errors import InputError, StepformerError
from stepformer.model.roles import Role, named_roles

INIT_STD = 0.02


@torch.no_grad()
def draw_parameters(
    model: nn.Module, seed: int | None, deep: Collection[str], n_layer: int, *, zero: bool = False
) -> None:
    """Draw N(0, 0.02^2), and the weights named in `deep` with std 0.02 / sqrt(2 n_layer); with `zero` these are zero,
    and so is an output head of its own.

    Two architectures built from one seed agree on all parameters they share, whatever else they have. Without a seed
    one is drawn from torch's global generator. Afterwards every module that has a method `initialise` sets what
    starts otherwise.
    """
    if seed is None:
        seed = int(torch.randint(2**62, ()).item())
    elif isinstance(seed, bool) or not isinstance(seed, Integral):
        raise InputError(f"seed = {seed!r} should be an integer.")
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)  # memory fresh from to_empty; whatever is forgotten below shows
    for name, parameter, role in named_roles(model):
        if role is Role.NORM:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif zero and (name in deep or role is Role.HEAD):
            parameter.zero_()
        elif role not in (Role.COEFFICIENT, Role.ARRAY):
            std = INIT_STD / math.sqrt(2 * n_layer) if name in deep else INIT_STD
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            draw = torch.empty(parameter.shape, dtype=dtype, device="cpu").normal_(0.0, std, generator=generator)
            parameter.copy_(draw)
    for module in model.modules():
        getattr(module, "initialise", lambda: None)()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise StepformerError(f"'{name}' has no initial value: its module should set it in `initialise`.")
