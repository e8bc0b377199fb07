"""Both fields of the linear Hamiltonian attention together, in matrix products of the vendor's library.

For tokens p = A u, u and y (B, T, d):

    F_i = sum_{j<=i} (p_i.u_j) y_j,      G_i = sum_{j<=i} (y_i.y_j) u_j

Each is a causal sum (linear_flow.py), and the states of the two are one matrix and its transpose. In segments of L
tokens, with P = tril(p u^T), Q = tril(y y^T) inside a segment and C_s = sum_{s' < s} u_s'^T y_s' before it:

    F = P y + p C,      G = Q u + y C^T

Backward, with f = dL/dF, g = dL/dG, and D_s = sum_{s' > s} (p_s'^T f_s' + g_s'^T y_s') for both at once:

    dP = tril(f y^T);   dQ = tril(g u^T)
    dp = dP u + f C^T
    du = dP^T p + Q^T g + y D^T
    dy = dQ y + dQ^T y + P^T f + g C + u D

Operands are bf16 or fp32 as given, sums are fp32; scores and states are rounded to the operands' dtype once. The terms
of du and dy are added to each other in their own dtype, as autograd would add them.

FLOPs per token, with r = (1 + chunk/L) / 2 of the squares computed, as two causal sums and together:

    forward     8 d r L + 8 d^2       8 d r L + 6 d^2
    backward   16 d r L + 16 d^2     16 d r L + 12 d^2

and without segments 24 d r T either way. d = 768, L = 1024, chunk = 256: 26.0 and 22.4 MFLOP. In bf16 the scans move
10 d^2 bytes a segment forward and 18 d^2 backward instead of 20 and 20.

`linear_fields` is all of it as one operator: with z = -G / n from one pass over G, and h = dL/d(force),

    p = u A^T;   force = u V^T + z A^T
    dz = h A,   g = -dz / n,   du += h V + dp A,   dV = h^T u,   dA = dp^T u + h^T z

Products are added where their sum is to stand, so that nobody adds tensors afterwards: three times one pass over 3
tensors of tokens less than with operators of their own. Gradients of weights are in the weights' dtype. Where the
sums cannot be shared, `sum_of_maps` is the force alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stepformer.ops import linear_flow
from stepformer.ops import linear_kernels as maps
from stepformer.ops.linear_flow import (
    CHUNK,
    fp32_product,
    from_later,
    masked_scores,
    padded,
    running,
    weighted_sums,
)
from stepformer.ops.token_rows import scale_rows


def _both(
    p: Tensor, u: Tensor, y: Tensor, segment: int, chunk: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """F, G, both scores (2, B, L, L) (empty unless they are to be kept) and the states (empty for one segment)."""
    shape, n = u.shape, u.shape[1] // segment
    p, u, y = (t.reshape(-1, segment, t.shape[-1]) for t in (p, u, y))
    first, second = (torch.empty(u.shape, dtype=u.dtype, device=u.device) for _ in range(2))
    states = u.new_empty(0)
    if n > 1:
        states = running(fp32_product(u.mT, y), n, u.dtype)
        torch.bmm(p, states, out=first)
        torch.bmm(y, states.mT, out=second)
    scores = weighted_sums([(p, u), (y, y)], [y, u], [first, second], chunk, keep, fresh=n == 1)
    return first.view(shape), second.view(shape), scores, states


def _both_fake(u: Tensor, segment: int, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, n, width = u.shape[0], u.shape[1] // segment, u.shape[2]
    scores = u.new_empty(2, batch * n, segment, padded(segment)) if keep else u.new_empty(0)
    states = u.new_empty(batch * n, width, width) if n > 1 else u.new_empty(0)
    return u.new_empty(u.shape), u.new_empty(u.shape), scores, states


def _both_backward(
    f: Tensor, g: Tensor, p: Tensor, u: Tensor, y: Tensor, scores: Tensor, states: Tensor, segment: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """dp, du, dy."""
    shape, n = u.shape, u.shape[1] // segment
    f, g, p, u, y = (t.reshape(-1, segment, t.shape[-1]) for t in (f, g, p, u, y))
    dp, du, dy = (torch.empty(u.shape, dtype=u.dtype, device=u.device) for _ in range(3))
    fresh = n == 1
    if not fresh:
        later = running(fp32_product(p.mT, f), n, u.dtype, reverse=True, more=fp32_product(g.mT, y))
        torch.bmm(f, states.mT, out=dp)
        torch.bmm(y, later.mT, out=du)
        torch.bmm(u, later, out=dy)
        dy.baddbmm_(g, states)
    slopes = weighted_sums([(f, y), (g, u)], [u, y], [dp, dy], chunk, keep=True, fresh=fresh)
    if scores.numel() == 0:
        scores = torch.empty_like(slopes)
        masked_scores([(p, u), (y, y)], scores, chunk)
    from_later(slopes[0], p, du, chunk, fresh=fresh)
    from_later(scores[1], g, du, chunk, fresh=False)
    from_later(slopes[1], y, dy, chunk, fresh=False)
    from_later(scores[0], f, dy, chunk, fresh=False)
    return dp.view(shape), du.view(shape), dy.view(shape)


@torch.library.custom_op("stepformer::hamiltonian_sums", mutates_args=())
def _sums(
    p: Tensor, u: Tensor, y: Tensor, segment: int, chunk: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _both(p, u, y, segment, chunk, keep)


@_sums.register_fake
def _(p: Tensor, u: Tensor, y: Tensor, segment: int, chunk: int, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _both_fake(u, segment, keep)


@torch.library.custom_op("stepformer::hamiltonian_sums_backward", mutates_args=())
def _sums_backward(
    f: Tensor, g: Tensor, p: Tensor, u: Tensor, y: Tensor, scores: Tensor, states: Tensor, segment: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _both_backward(f, g, p, u, y, scores, states, segment, chunk)


@_sums_backward.register_fake
def _(
    f: Tensor, g: Tensor, p: Tensor, u: Tensor, y: Tensor, scores: Tensor, states: Tensor, segment: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    return u.new_empty(u.shape), u.new_empty(u.shape), u.new_empty(u.shape)


def _keep_tokens(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    p, u, y, ctx.segment, ctx.chunk, _ = inputs
    ctx.save_for_backward(p, u, y, *output[2:])
    ctx.set_materialize_grads(False)


def _token_gradients(ctx: Any, f: Tensor | None, g: Tensor | None, *_: Any) -> tuple[Any, ...]:
    p, u, y, scores, states = ctx.saved_tensors
    if g is None and f is not None:  # the force of a last layer, whose momentum nobody reads
        found = linear_flow._backward(f, p, u, y, scores[:1], states, ctx.segment, ctx.chunk)
    else:
        f, g = (torch.zeros_like(u) if t is None else t for t in (f, g))
        found = _sums_backward(f, g, p, u, y, scores, states, ctx.segment, ctx.chunk)
    return (*found, None, None, None)


_sums.register_autograd(_token_gradients, setup_context=_keep_tokens)


def _split(length: int, segment: int) -> tuple[int, int]:
    """Tokens of a segment, and how many are missing in the last one."""
    segment = min(segment or length, length)
    return segment, -length % segment


def _kept(u: Tensor, segment: int) -> bool:
    return torch.is_grad_enabled() and 2 * u.shape[0] * u.shape[1] * segment <= linear_flow.KEPT


def hamiltonian_sums(p: Tensor, u: Tensor, y: Tensor, *, segment: int = 0, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """sum_{j<=i} (p_i.u_j) y_j and sum_{j<=i} (y_i.y_j) u_j for tokens (B, T, d) of one dtype.

    segment: tokens between states; 0: all in one.
    """
    length = u.shape[1]
    segment, missing = _split(length, segment)
    if missing:
        p, u, y = (F.pad(t, (0, 0, 0, missing)) for t in (p, u, y))
    first, second, _, _ = _sums(p, u, y, segment, chunk, _kept(u, segment))
    return (first[:, :length], second[:, :length]) if missing else (first, second)


@torch.library.custom_op("stepformer::linear_fields", mutates_args=())
def _fields(
    u: Tensor, y: Tensor, kernel: Tensor, a: Tensor, value: Tensor, v: Tensor, minus_nu: Tensor,
    segment: int, chunk: int, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """F before the division, the force, p, z, scores and states.

    a and v are the weights in the dtype of u; the weights themselves are there for their gradients.
    """
    with torch.autocast(u.device.type, enabled=False):
        p = F.linear(u, a)
        first, second, scores, states = _both(p, u, y, segment, chunk, keep)
        z = scale_rows(second, minus_nu)
        force = torch.mm(u.flatten(0, -2), v.t()).addmm_(z.flatten(0, -2), a.t())
        return first, force.view(u.shape), p, z, scores, states


@_fields.register_fake
def _(
    u: Tensor, y: Tensor, kernel: Tensor, a: Tensor, value: Tensor, v: Tensor, minus_nu: Tensor,
    segment: int, chunk: int, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    first, second, scores, states = _both_fake(u, segment, keep)
    return first, second, u.new_empty(u.shape), u.new_empty(u.shape), scores, states


@torch.library.custom_op("stepformer::linear_fields_backward", mutates_args=())
def _fields_backward(
    f: Tensor, h: Tensor | None, u: Tensor, y: Tensor, a: Tensor, v: Tensor, minus_nu: Tensor, p: Tensor, z: Tensor,
    scores: Tensor, states: Tensor, dtype: torch.dtype, segment: int, chunk: int, asked: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """du, dy, dA and dV, the last two where they are asked for. No h: nobody has used the force."""
    with torch.autocast(u.device.type, enabled=False):
        rows = u.flatten(0, -2)
        empty = u.new_empty(0, dtype=dtype)
        da, dv = empty, torch.empty_like(empty)
        if h is None:
            dp, du, dy = linear_flow._backward(f, p, u, y, scores[:1], states, segment, chunk)
        else:
            h = h.flatten(0, -2).contiguous()
            g = scale_rows(torch.mm(h, a).view(u.shape), minus_nu)
            dp, du, dy = _both_backward(f, g, p, u, y, scores, states, segment, chunk)
            du.view(rows.shape).addmm_(h, v)
            if asked[1]:
                dv = maps.product(h.t(), rows, dtype)
        dp = dp.view(rows.shape)
        du.view(rows.shape).addmm_(dp, a)
        if asked[0]:
            da = maps.product(dp.t(), rows, dtype)
            if h is not None:
                da += maps.product(h.t(), z.flatten(0, -2), dtype)
        return du, dy, da, dv


@_fields_backward.register_fake
def _(
    f: Tensor, h: Tensor | None, u: Tensor, y: Tensor, a: Tensor, v: Tensor, minus_nu: Tensor, p: Tensor, z: Tensor,
    scores: Tensor, states: Tensor, dtype: torch.dtype, segment: int, chunk: int, asked: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    da, dv = (u.new_empty(w.shape if wanted else (0,), dtype=dtype) for w, wanted in zip((a, v), asked, strict=True))
    return u.new_empty(u.shape), u.new_empty(u.shape), da, dv


def _keep_fields(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    u, y, kernel, a, _, v, minus_nu, ctx.segment, ctx.chunk, _ = inputs
    ctx.save_for_backward(u, y, a, v, minus_nu, *output[2:])
    ctx.set_materialize_grads(False)
    ctx.dtype = kernel.dtype


def _field_gradients(ctx: Any, f: Tensor | None, h: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    asked = [ctx.needs_input_grad[2], ctx.needs_input_grad[4] and h is not None]
    f = torch.zeros_like(saved[0]) if f is None else f
    du, dy, da, dv = _fields_backward(f, h, *saved, ctx.dtype, ctx.segment, ctx.chunk, asked)
    return du, dy, da if asked[0] else None, None, dv if asked[1] else None, None, *(None,) * 4


_fields.register_autograd(_field_gradients, setup_context=_keep_fields)


def linear_fields(
    u: Tensor, y: Tensor, kernel: Tensor, value: Tensor, nu: Tensor, *, segment: int = 0, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """sum_{j<=i} (A u_i.u_j) y_j, to be multiplied by nu_i, and V u_i - nu_i A sum_{j<=i} (y_i.y_j) u_j.

    u and y (B, T, d) have one dtype, the weights A (`kernel`) and V (`value`) perhaps a wider one, nu (T,) is fp32.
    """
    length = u.shape[1]
    segment, missing = _split(length, segment)
    minus_nu = -nu
    if missing:
        u, y, minus_nu = F.pad(u, (0, 0, 0, missing)), F.pad(y, (0, 0, 0, missing)), F.pad(minus_nu, (0, missing))
    a, v = (maps.rounded_weight(w, u.dtype) for w in (kernel, value))
    found = _fields(u, y, kernel, a, value, v, minus_nu, segment, chunk, _kept(u, segment))
    return (found[0][:, :length], found[1][:, :length]) if missing else (found[0], found[1])


@torch.library.custom_op("stepformer::sum_of_maps", mutates_args=())
def _sum_of_maps(x: Tensor, weight: Tensor, rounded: Tensor, z: Tensor, other: Tensor, other_rounded: Tensor) -> Tensor:
    """The rounded weights are in the dtype of x and z; the weights themselves are there for their gradients."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.mm(x, rounded.t()).addmm_(z, other_rounded.t())


@_sum_of_maps.register_fake
def _(x: Tensor, weight: Tensor, rounded: Tensor, z: Tensor, other: Tensor, other_rounded: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("stepformer::sum_of_maps_backward", mutates_args=())
def _sum_of_maps_backward(
    dy: Tensor, x: Tensor, rounded: Tensor, z: Tensor, other_rounded: Tensor, dtype: torch.dtype, asked: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dW, dz, dA; empty where not asked for."""
    dy = dy.contiguous()
    empty, empty_weight = dy.new_empty(0), dy.new_empty(0, dtype=dtype)
    with torch.autocast(dy.device.type, enabled=False):
        return (
            torch.mm(dy, rounded) if asked[0] else empty,
            maps.product(dy.t(), x, dtype) if asked[1] else empty_weight,
            torch.mm(dy, other_rounded) if asked[2] else torch.empty_like(empty),
            maps.product(dy.t(), z, dtype) if asked[3] else torch.empty_like(empty_weight),
        )


@_sum_of_maps_backward.register_fake
def _(
    dy: Tensor, x: Tensor, rounded: Tensor, z: Tensor, other_rounded: Tensor, dtype: torch.dtype, asked: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        dy.new_empty(x.shape if asked[0] else (0,)),
        dy.new_empty(rounded.shape if asked[1] else (0,), dtype=dtype),
        dy.new_empty(z.shape if asked[2] else (0,)),
        dy.new_empty(other_rounded.shape if asked[3] else (0,), dtype=dtype),
    )


def _keep_maps(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, rounded, z, _, other_rounded = inputs
    ctx.save_for_backward(x, rounded, z, other_rounded)
    ctx.dtype = weight.dtype


def _map_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    asked = [needs[0], needs[1], needs[3], needs[4]]
    found = _sum_of_maps_backward(dy, *ctx.saved_tensors, ctx.dtype, asked)
    dx, dw, dz, da = (t if wanted else None for t, wanted in zip(found, asked, strict=True))
    return dx, dw, None, dz, da, None


_sum_of_maps.register_autograd(_map_gradients, setup_context=_keep_maps)


def sum_of_maps(x: Tensor, weight: Tensor, z: Tensor, other: Tensor) -> Tensor:
    """x W^T + z A^T for tokens (..., in) of one dtype; the weights' gradients keep the digits of the weights' dtype."""
    rounded, other_rounded = (maps.rounded_weight(w, x.dtype) for w in (weight, other))
    out: Tensor = _sum_of_maps(x.flatten(0, -2), weight, rounded, z.flatten(0, -2), other, other_rounded)
    return out.view(*x.shape[:-1], weight.shape[0])
