"""A model to differentiate at will, while the measured one stays as it is."""

from __future__ import annotations

import copy

import torch
from torch import nn

from stepformer.model import Model


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
