"""Linear layers of tokens, for all oracles: as in plain PyTorch, with better weight gradients where kernels may run."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepformer.ops import kernels
from stepformer.ops.dtypes import product_dtype
from stepformer.ops.sharding import is_sharded


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
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
            from stepformer.ops import linear_kernels

            return linear_kernels.linear(x.to(dtype), weight, bias)
    return F.linear(x, weight, bias)


def trainable_by_kernels(x: Tensor, weight: Tensor) -> bool:
    """Whether kernels may take a layer whose gradients may be asked for; without any there is nothing to gain."""
    return kernels.usable(x, weight) and torch.is_grad_enabled() and not is_sharded(weight)


class Linear(nn.Linear):
    """nn.Linear through `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)


def rounded_weights(*roots: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside, all `Linear` layers of modules have bf16 weights that were rounded at once; nothing where none would be.

    At the size small on an H200, 48 casts of single weights took 0.31 ms and as many launches.
    """
    # the cheapest question first: decoding on a CPU spends its time in Python
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    first = next((p for root in roots for p in root.parameters()), None)
    if first is None or not kernels.usable(first):
        return contextlib.nullcontext()
    device = first.device.type
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != torch.bfloat16:
        return contextlib.nullcontext()
    weights = [m.weight for root in roots for m in root.modules() if isinstance(m, Linear) and m.weight.requires_grad]
    weights = [w for w in weights if w.dtype == torch.float32 and not is_sharded(w)]
    if not weights or not kernels.usable(*weights):
        return contextlib.nullcontext()
    from stepformer.ops.linear_kernels import rounded_together

    return rounded_together(weights, torch.bfloat16)
