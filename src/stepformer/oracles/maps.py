"""Linear maps of tokens, for all oracles: as in plain PyTorch, with better weight gradients where kernels may run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepformer import kernels
from stepformer.oracles.attention import product_dtype
from stepformer.sharding import is_sharded


def linear_map(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b. Where kernels may run under bf16 autocast, dW is in fp32 as it was summed, not rounded to bf16."""
    # the cheapest question first: on a CPU a small model spends its time in Python
    if (
        torch.is_grad_enabled()
        and weight.requires_grad
        and weight.dtype == torch.float32
        and trainable_by_kernels(x, weight)
    ):
        dtype = product_dtype(x, weight)
        if dtype == torch.bfloat16:
            from stepformer.kernels import maps

            return maps.linear(x.to(dtype), weight, bias)
    return F.linear(x, weight, bias)


def trainable_by_kernels(x: Tensor, weight: Tensor) -> bool:
    """Whether kernels may take a map whose gradients may be asked for; without any there is nothing to gain."""
    return kernels.usable(x, weight) and torch.is_grad_enabled() and not is_sharded(weight)


class Linear(nn.Linear):
    """nn.Linear through `linear_map`."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        return linear_map(x, self.weight, self.bias)
