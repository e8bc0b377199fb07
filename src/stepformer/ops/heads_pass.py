"""Queries, keys and values from their joint product, in one pass: QK-norm, rotation, mixing with earlier values.

Forward, for every token and head, on halves (a, b) of a query or key and with the angle t_i of the token's position:

    r = 1 / sqrt(mean(q^2) + eps),  hat = r q                (QK-norm; without it r = 1)
    q' = (hat_a cos t - hat_b sin t, hat_b cos t + hat_a sin t)              (rotation; without it t = 0)
    v' = w_0 v + w_1 v_1                                     (values mixed with those of an earlier call)

q' and k' are written where q and k were, since nobody needs these again; v' is a tensor of its own, since v is needed
for the gradient of w_0. Backward, the rotation is undone, hat is found from q', and all is written into the gradient of
the joint product, in the place of a copy that would join dq, dk and dv:

    c = rotate(dq', -t);  dq = r (c - hat mean(c hat));  dv = w_0 dv';  dv_1 = w_1 dv' + (what arrived for it)
    dw_0 = <dv', v>;  dw_1 = <dv', v_1>

Traffic in d-vectors: forward 2 reads and 2 writes, with values 4 and 3; backward 5 and 3, with values 8 and 4.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepformer.ops import common
from stepformer.ops.operators import operator
from stepformer.ops.rotation import TOKENS, WARPS, angles, sizes, tables


@triton.jit
def heads_forward_kernel(  # type: ignore[no-untyped-def]
    qkv, cosines, sines, weights, earlier, out, scales, n, time, eps,
    H: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, TOKENS: tl.constexpr,
    NORM: tl.constexpr, ROTATE: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = 2 * H * HALF
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.arange(0, HP)[None, :, None]
    column = tl.arange(0, HALF_P)[None, None, :]
    token = tokens.to(tl.int64)[:, None, None]
    mask = (token < n) & (head < H) & (column < HALF)
    at = token * (3 * D) + head * (2 * HALF) + column
    if NORM or ROTATE:
        cos, sin = angles(cosines, sines, tokens, time, column, HALF, ROTATE)
        for part in tl.static_range(2):
            a = tl.load(qkv + at + part * D, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(qkv + at + part * D + HALF, mask=mask, other=0.0).to(tl.float32)
            if NORM:
                r = tl.rsqrt(tl.sum(a * a + b * b, 2, keep_dims=True) / (2 * HALF) + eps)
                where = (token * 2 + part) * H + head
                tl.store(scales + where, r, mask=(token < n) & (head < H))
                a, b = a * r, b * r
            tl.store(qkv + at + part * D, a * cos - b * sin, mask=mask)
            tl.store(qkv + at + part * D + HALF, b * cos + a * sin, mask=mask)
    if MIX:
        own, other = tl.load(weights), tl.load(weights + 1)
        own_at = token * D + head * (2 * HALF) + column
        for half in tl.static_range(2):
            v = tl.load(qkv + at + 2 * D + half * HALF, mask=mask, other=0.0).to(tl.float32)
            w = tl.load(earlier + own_at + half * HALF, mask=mask, other=0.0).to(tl.float32)
            tl.store(out + own_at + half * HALF, own * v + other * w, mask=mask)


@triton.jit
def heads_backward_kernel(  # type: ignore[no-untyped-def]
    dq, dk, dv, dearlier, qkv, cosines, sines, weights, earlier, scales, dqkv, dbefore, partial, n, time,
    H: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, TOKENS: tl.constexpr,
    TILES: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = 2 * H * HALF
    head = tl.arange(0, HP)[None, :, None]
    column = tl.arange(0, HALF_P)[None, None, :]
    if MIX:
        own, other = tl.load(weights), tl.load(weights + 1)
    sum_own = tl.zeros((TOKENS, HP), tl.float32)
    sum_other = tl.zeros((TOKENS, HP), tl.float32)
    for tile in tl.range(0, TILES):
        tokens = (tile * tl.num_programs(0) + tl.program_id(0)) * TOKENS + tl.arange(0, TOKENS)
        token = tokens.to(tl.int64)[:, None, None]
        mask = (token < n) & (head < H) & (column < HALF)
        at = token * (3 * D) + head * (2 * HALF) + column
        own_at = token * D + head * (2 * HALF) + column
        cos, sin = angles(cosines, sines, tokens, time, column, HALF, ROTATE)
        for part in tl.static_range(2):
            source = dq if part == 0 else dk
            if source is not None:
                x = tl.load(source + own_at, mask=mask, other=0.0).to(tl.float32)
                y = tl.load(source + own_at + HALF, mask=mask, other=0.0).to(tl.float32)
                a, b = x * cos + y * sin, y * cos - x * sin
                if NORM:
                    x = tl.load(qkv + at + part * D, mask=mask, other=0.0).to(tl.float32)
                    y = tl.load(qkv + at + part * D + HALF, mask=mask, other=0.0).to(tl.float32)
                    hat_a, hat_b = x * cos + y * sin, y * cos - x * sin
                    where = (token * 2 + part) * H + head
                    r = tl.load(scales + where, mask=(token < n) & (head < H), other=0.0)
                    along = tl.sum(a * hat_a + b * hat_b, 2, keep_dims=True) / (2 * HALF)
                    a, b = r * (a - hat_a * along), r * (b - hat_b * along)
            else:
                a = tl.zeros((TOKENS, HP, HALF_P), tl.float32)
                b = a
            tl.store(dqkv + at + part * D, a, mask=mask)
            tl.store(dqkv + at + part * D + HALF, b, mask=mask)
        for half in tl.static_range(2):
            where = own_at + half * HALF
            if dv is not None:
                g = tl.load(dv + where, mask=mask, other=0.0).to(tl.float32)
            else:
                g = tl.zeros((TOKENS, HP, HALF_P), tl.float32)
            if dearlier is not None:
                more = tl.load(dearlier + where, mask=mask, other=0.0).to(tl.float32)
            else:
                more = tl.zeros((TOKENS, HP, HALF_P), tl.float32)
            if MIX:
                v = tl.load(qkv + at + 2 * D + half * HALF, mask=mask, other=0.0).to(tl.float32)
                w = tl.load(earlier + where, mask=mask, other=0.0).to(tl.float32)
                sum_own += tl.sum(g * v, 2)
                sum_other += tl.sum(g * w, 2)
                tl.store(dqkv + at + 2 * D + half * HALF, own * g, mask=mask)
                if dbefore is not None:
                    tl.store(dbefore + where, other * g + more, mask=mask)
            else:
                tl.store(dqkv + at + 2 * D + half * HALF, g + more, mask=mask)
    if MIX:
        line = partial + tl.program_id(0) * 8
        place = tl.arange(0, 8)
        totals = tl.where(place == 0, tl.sum(sum_own), tl.where(place == 1, tl.sum(sum_other), 0.0))
        tl.store(line + place, totals)


class How:
    """The options of a pass: heads, the eps of QK-norm or None, whether to rotate, whether others mix its values in."""

    def __init__(self, heads: int, eps: float | None, rotary: bool, shares: bool = False) -> None:
        self.heads, self.eps, self.rotary, self.shares = heads, eps, rotary, shares

    def forward(self, qkv: Tensor, weights: Tensor | None, earlier: Tensor | None) -> tuple[Tensor, Tensor]:
        """Change q and k in the contiguous `qkv` (B, T, 3 d); give v' (B, T, d) and the scales of QK-norm."""
        batch, time, d = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        n, width = batch * time, d // self.heads
        v = qkv.new_empty((batch, time, d) if weights is not None else 0)
        scales = qkv.new_empty((n, 2, self.heads) if self.eps is not None else 0, dtype=torch.float32)
        cos, sin = tables(time, width // 2, qkv.device) if self.rotary else (None, None)
        if n and (self.eps is not None or self.rotary or weights is not None):
            heads_forward_kernel[(triton.cdiv(n, TOKENS),)](
                qkv, cos, sin, weights, earlier, v, scales, n, time, self.eps or 0.0,
                **sizes(self.heads, width), TOKENS=TOKENS, NORM=self.eps is not None, ROTATE=self.rotary,
                MIX=weights is not None, num_warps=WARPS,
            )  # fmt: skip
        return v, scales

    def backward(
        self, grads: list[Tensor | None], dearlier: Tensor | None, qkv: Tensor, weights: Tensor | None,
        earlier: Tensor | None, scales: Tensor,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """The gradients of the joint product, of the weights and of the earlier values; `grads` are (B, T, d)."""
        batch, time, d = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        n, width = batch * time, d // self.heads
        dqkv = torch.empty_like(qkv)
        before = None if weights is None or earlier is None else torch.empty_like(earlier)
        tiles = max(1, triton.cdiv(n, TOKENS))
        programs = min(tiles, 8 * common.multiprocessors(qkv.device)) if weights is not None else tiles
        partial = None if weights is None else qkv.new_empty((programs, 8), dtype=torch.float32)
        if partial is not None and not n:
            partial.zero_()
        cos, sin = tables(time, width // 2, qkv.device) if self.rotary else (None, None)
        if n:
            heads_backward_kernel[(programs,)](
                *grads, dearlier, qkv, cos, sin, weights, earlier, scales, dqkv, before, partial, n, time,
                **sizes(self.heads, width), TOKENS=TOKENS, TILES=triton.cdiv(tiles, programs),
                NORM=self.eps is not None, ROTATE=self.rotary, MIX=weights is not None, num_warps=WARPS,
            )  # fmt: skip
        found = None
        if weights is not None and partial is not None:
            found = common.sum_lines(partial)[: weights.numel()].to(weights.dtype)
        return dqkv, found, before


def split(qkv: Tensor, heads: int) -> list[Tensor]:
    """The joint product (B, T, 3 d) as queries, keys and values (B, H, T, width)."""
    return [t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in qkv.chunk(3, dim=-1)]


def _flat(t: Tensor | None) -> Tensor | None:
    """(B, H, T, width) -> (B, T, d), and rows as they are"""
    if t is None or t.ndim == 3:
        return None if t is None else t.contiguous()
    return t.transpose(1, 2).contiguous().flatten(-2)


class _Heads(torch.autograd.Function):
    """q', k', v' and, as an output of its own, what later calls mix in: its gradients are added in this pass."""

    @staticmethod
    def forward(
        ctx: Any, how: How, qkv: Tensor, weights: Tensor | None, earlier: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        flat = _flat(earlier)
        v, scales = how.forward(qkv, weights, flat)
        ctx.how, ctx.in_heads = how, earlier is None or earlier.ndim == 4
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(qkv, weights, flat, scales)
        q, k, own = split(qkv, how.heads)
        if earlier is None:
            # for the layers to come rows of their own, without the queries and keys between them
            shared = own.transpose(1, 2).contiguous().transpose(1, 2) if how.shares else own.view_as(own)
            return q, k, own, shared
        return q, k, v.unflatten(-1, (how.heads, -1)).transpose(1, 2), earlier.view_as(earlier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        qkv, weights, earlier, scales = ctx.saved_tensors
        dq, dk, dv, dearlier = map(_flat, grads)
        dqkv, dweights, before = ctx.how.backward([dq, dk, dv], dearlier, qkv, weights, earlier, scales)
        if before is not None and ctx.in_heads:
            before = before.unflatten(-1, (ctx.how.heads, -1)).transpose(1, 2)
        return None, dqkv, dweights, before


# for compilers: the same without writing into the product


def _fake(
    qkv: Tensor, weights: Tensor | None, earlier: Tensor | None, heads: int, eps: float | None, rotary: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, time, d = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    v = qkv.new_empty((batch, time, d) if weights is not None else 0)
    scales = qkv.new_empty((batch * time, 2, heads) if eps is not None else 0, dtype=torch.float32)
    return torch.empty_like(qkv), v, scales


@operator("heads", fake=_fake)
def _operator(
    qkv: Tensor, weights: Tensor | None, earlier: Tensor | None, heads: int, eps: float | None, rotary: bool
) -> tuple[Tensor, Tensor, Tensor]:
    turned = qkv.clone(memory_format=torch.contiguous_format)
    return turned, *How(heads, eps, rotary).forward(turned, weights, earlier)


def _fake_backward(
    dqkv: Tensor | None, dv: Tensor | None, turned: Tensor, scales: Tensor, weights: Tensor | None,
    earlier: Tensor | None, heads: int, eps: float | None, rotary: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    none = turned.new_empty(0)
    return (
        torch.empty_like(turned),
        none if weights is None else torch.empty_like(weights),
        none.clone() if earlier is None else torch.empty_like(earlier),
    )


@operator("heads_backward", fake=_fake_backward)
def _operator_backward(
    dqkv: Tensor | None, dv: Tensor | None, turned: Tensor, scales: Tensor, weights: Tensor | None,
    earlier: Tensor | None, heads: int, eps: float | None, rotary: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    parts: list[Tensor | None] = [None] * 3
    if dqkv is not None:
        parts = [t.contiguous() for t in dqkv.chunk(3, dim=-1)]
    if weights is not None:
        parts[2] = dv
    found, dweights, before = How(heads, eps, rotary).backward(parts, None, turned, weights, earlier, scales)
    none = turned.new_empty(0)
    return (
        found,
        none if dweights is None else dweights.clone(),
        none.clone() if before is None else before,
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weights, earlier, *ctx.options = inputs
    turned, _, scales = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(turned, scales, weights, earlier)


def _backward(ctx: Any, dturned: Tensor | None, dv: Tensor | None, _: Any) -> Any:
    found = torch.ops.stepformer.heads_backward(dturned, dv, *ctx.saved_tensors, *ctx.options)
    dqkv, dweights, before = found
    mixed = ctx.saved_tensors[2] is not None
    return dqkv, dweights if mixed else None, before if mixed else None, None, None, None


_operator.register_autograd(_backward, setup_context=_setup)


def heads_pass(
    qkv: Tensor, heads: int, *, eps: float | None = None, rotary: bool = False, weights: Tensor | None = None,
    earlier: Tensor | None = None, shares: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values (B, H, T, width) of tokens at positions 0, 1, ..., and what later calls mix in.

    `eps`: of QK-norm; `weights` (2 or more numbers, fp32) of the own values and of `earlier` ones (B, H, T, width), or
    of rows (B, T, d) in their place.
    The last result is the earlier values as they come through this pass; without any, the own values, which somebody
    asks for if this call `shares` them. Outside of a compiler the product is written over.
    """
    qkv = qkv.contiguous()
    if torch.compiler.is_compiling():
        flat = _flat(earlier)
        turned, mixed, _ = torch.ops.stepformer.heads(qkv, weights, flat, heads, eps, rotary)
        q, k, v = split(turned, heads)
        if weights is not None:
            v = mixed.unflatten(-1, (heads, -1)).transpose(1, 2)
        return q, k, v, v if earlier is None else earlier
    found: tuple[Tensor, Tensor, Tensor, Tensor] = _Heads.apply(How(heads, eps, rotary, shares), qkv, weights, earlier)
    return found
