"""A weighted sum of two streams with weights that are learned: one pass forward, one backward.

    out = w_0 a + w_1 b;    da = w_0 dout,  db = w_1 dout,  dw_0 = <dout, a>,  dw_1 = <dout, b>

Traffic in tensors: 2 reads and 1 write, backward 3 and 2. Plain PyTorch needs three passes forward and eight backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepformer.ops import common
from stepformer.ops.operators import differentiable, operator, shaped_as, unwritten

BLOCK = 4096


@triton.jit
def _mix(a, b, weights, out, total, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < total
    mixed = tl.load(weights) * tl.load(a + at, mask=live).to(tl.float32)
    mixed += tl.load(weights + 1) * tl.load(b + at, mask=live).to(tl.float32)
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=live)


@triton.jit
def _mix_backward(  # type: ignore[no-untyped-def]
    grad, a, b, weights, da, db, partial, total, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < total
    g = tl.load(grad + at, mask=live, other=0.0).to(tl.float32)
    first = tl.sum(g * tl.load(a + at, mask=live, other=0.0).to(tl.float32))
    second = tl.sum(g * tl.load(b + at, mask=live, other=0.0).to(tl.float32))
    tl.store(da + at, (tl.load(weights) * g).to(da.dtype.element_ty), mask=live)
    tl.store(db + at, (tl.load(weights + 1) * g).to(db.dtype.element_ty), mask=live)
    place = tl.arange(0, WIDTH)
    line = tl.where(place == 0, first, tl.where(place == 1, second, 0.0))
    tl.store(partial + tl.program_id(0) * WIDTH + place, line)


@operator("mix", fake=lambda a, b, weights: unwritten(a))
def _forward(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty_like(a)
    _mix[(max(1, triton.cdiv(a.numel(), BLOCK)),)](a, b, weights, out, a.numel(), BLOCK=BLOCK, num_warps=8)
    return out


@operator("mix_backward", fake=shaped_as(1, 2, 3))
def _backward(grad: Tensor, a: Tensor, b: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad, a, b = grad.contiguous(), a.contiguous(), b.contiguous()
    da, db = torch.empty_like(a), torch.empty_like(b)
    programs = max(1, triton.cdiv(a.numel(), BLOCK))
    partial = weights.new_empty((programs, 8))
    _mix_backward[(programs,)](grad, a, b, weights, da, db, partial, a.numel(), BLOCK=BLOCK, WIDTH=8, num_warps=8)
    return da, db, common.sum_lines(partial)[:2].clone()


differentiable(_forward, lambda inputs, _: (inputs, ()), lambda needs, kept, constants, grad: _backward(grad, *kept))


def mix(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """weights[0] a + weights[1] b in the dtype of a, for tensors of one shape and two fp32 weights."""
    return torch.ops.stepformer.mix(a, b, weights)
