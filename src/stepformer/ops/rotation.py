"""Rotary positions by one pass over memory: every pair (i, i + width / 2) of a vector is turned by its token's angle.

The gradient is turned back by the same kernel. Traffic: one read and one write of each vector, forward and backward.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepformer.ops.operators import differentiable, operator, shaped_as
from stepformer.ops.scores import angles_of

TOKENS = 4  # of a program
WARPS = 4


@triton.jit
def angles(cosines, sines, tokens, time, column, HALF: tl.constexpr, ROTATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """cos and sin (TOKENS, 1, HALF) of the tokens' positions."""
    if ROTATE:
        at = (tokens % time)[:, None, None] * HALF + column
        inside = column < HALF
        cos = tl.load(cosines + at, mask=inside, other=0.0)
        sin = tl.load(sines + at, mask=inside, other=0.0)
    else:
        cos, sin = 1.0, 0.0
    return cos, sin


@triton.jit
def _rotate_kernel(  # type: ignore[no-untyped-def]
    x, cosines, sines, out, n, time,
    H: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, TOKENS: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head, column = tl.arange(0, HP)[None, :, None], tl.arange(0, HALF_P)[None, None, :]
    token = tokens.to(tl.int64)[:, None, None]
    mask = (token < n) & (head < H) & (column < HALF)
    at = (token * H + head) * (2 * HALF) + column
    cos, sin = angles(cosines, sines, tokens, time, column, HALF, True)
    if BACK:
        sin = -sin
    a = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, a * cos - b * sin, mask=mask)
    tl.store(out + at + HALF, b * cos + a * sin, mask=mask)


@lru_cache(maxsize=32)
def tables(time: int, half: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles at positions 0, 1, ..., (time, half) in fp32."""
    with torch.inference_mode(False):
        cos, sin = angles_of(torch.arange(time, device=device), half, torch.float32)
    return cos.contiguous(), sin.contiguous()


def sizes(heads: int, width: int) -> dict[str, int]:
    padded = triton.next_power_of_2(heads), triton.next_power_of_2(width // 2)
    return {"H": heads, "HP": padded[0], "HALF": width // 2, "HALF_P": padded[1]}


@operator("rotate", fake=lambda x, back: shaped_as(0)(x)[0])
def _rotate(x: Tensor, back: bool) -> Tensor:
    """x (B, T, H, width), contiguous."""
    batch, time, heads, width = x.shape
    out, n = torch.empty_like(x), batch * time
    if n:
        places = tables(time, width // 2, x.device)
        _rotate_kernel[(triton.cdiv(n, TOKENS),)](
            x, *places, out, n, time, **sizes(heads, width), TOKENS=TOKENS, BACK=back, num_warps=WARPS
        )
    return out


differentiable(
    _rotate,
    keep=lambda inputs, _: ((), inputs[1:]),
    gradients=lambda needs, kept, constants, grad: (_rotate(grad.contiguous(), not constants[0]),),
)


def rotated(t: Tensor, back: bool = False) -> Tensor:
    """`scores.rotate` of vectors (B, H, T, width) at positions 0, 1, ..., or the reverse of it."""
    out: Tensor = _rotate(t.transpose(1, 2).contiguous(), back)
    return out.transpose(1, 2)
