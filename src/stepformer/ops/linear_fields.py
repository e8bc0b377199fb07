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
    segmented,
    weighted_sums,
)
from stepformer.ops.operators import Kept, differentiable, operator, shaped_as, unwritten
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
    return unwritten(u), unwritten(u), scores, states


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


_sums = operator("hamiltonian_sums", lambda p, u, y, segment, chunk, keep: _both_fake(u, segment, keep))(_both)
_sums_backward = operator("hamiltonian_sums_backward", shaped_as(3, 3, 3))(_both_backward)


def _token_gradients(needs: Any, kept: Any, constants: Any, f: Tensor | None, g: Tensor | None, *_: Any) -> Any:
    p, u, y, scores, states = kept
    if g is None and f is not None:  # the force of a last layer, whose momentum nobody reads
        return linear_flow._backward(f, p, u, y, scores[:1], states, *constants)
    f, g = (torch.zeros_like(u) if t is None else t for t in (f, g))
    return _sums_backward(f, g, *kept, *constants)


differentiable(_sums, lambda inputs, outputs: ((*inputs[:3], *outputs[2:]), inputs[3:5]), _token_gradients, unused=True)


def _kept(u: Tensor, segment: int) -> bool:
    return torch.is_grad_enabled() and 2 * u.shape[0] * u.shape[1] * segment <= linear_flow.KEPT


def hamiltonian_sums(p: Tensor, u: Tensor, y: Tensor, *, segment: int = 0, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """sum_{j<=i} (p_i.u_j) y_j and sum_{j<=i} (y_i.y_j) u_j for tokens (B, T, d) of one dtype.

    segment: tokens between states; 0: all in one.
    """
    length = u.shape[1]
    segment, missing, (p, u, y) = segmented(segment, p, u, y)
    first, second, _, _ = _sums(p, u, y, segment, chunk, _kept(u, segment))
    return (first[:, :length], second[:, :length]) if missing else (first, second)


def _unwritten_fields(u: Tensor, *others: Any) -> tuple[Tensor, ...]:
    segment, _, keep = others[-3:]
    *fields, scores, states = _both_fake(u, segment, keep)
    return *fields, unwritten(u), unwritten(u), scores, states


@operator("linear_fields", fake=_unwritten_fields)
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


def _unwritten_gradients(f: Tensor, h: Tensor | None, u: Tensor, y: Tensor, a: Tensor, v: Tensor, *others: Any) -> Any:
    dtype, _, _, (for_a, for_v) = others[-4:]
    return unwritten(u), unwritten(u), unwritten(a, for_a, dtype), unwritten(v, for_v, dtype)


@operator("linear_fields_backward", fake=_unwritten_gradients)
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


def _keep_fields(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> Kept:
    u, y, kernel, a, _, v, minus_nu, segment, chunk, _ = inputs
    return (u, y, a, v, minus_nu, *outputs[2:]), (kernel.dtype, segment, chunk)


def _field_gradients(needs: Any, kept: Any, constants: Any, f: Tensor | None, h: Tensor | None, *_: Any) -> Any:
    asked = [needs[2], needs[4] and h is not None]
    f = torch.zeros_like(kept[0]) if f is None else f
    du, dy, da, dv = _fields_backward(f, h, *kept, *constants, asked)
    return du, dy, da, None, dv if asked[1] else None


differentiable(_fields, _keep_fields, _field_gradients, unused=True)


def linear_fields(
    u: Tensor, y: Tensor, kernel: Tensor, value: Tensor, nu: Tensor, *, segment: int = 0, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """sum_{j<=i} (A u_i.u_j) y_j, to be multiplied by nu_i, and V u_i - nu_i A sum_{j<=i} (y_i.y_j) u_j.

    u and y (B, T, d) have one dtype, the weights A (`kernel`) and V (`value`) perhaps a wider one, nu (T,) is fp32.
    """
    length = u.shape[1]
    segment, missing, (u, y) = segmented(segment, u, y)
    minus_nu = F.pad(-nu, (0, missing)) if missing else -nu
    a, v = (maps.rounded_weight(w, u.dtype) for w in (kernel, value))
    found = _fields(u, y, kernel, a, value, v, minus_nu, segment, chunk, _kept(u, segment))
    return (found[0][:, :length], found[1][:, :length]) if missing else (found[0], found[1])


@operator("sum_of_maps", fake=maps.mapped_rows)
def _sum_of_maps(x: Tensor, weight: Tensor, rounded: Tensor, z: Tensor, other: Tensor, other_rounded: Tensor) -> Tensor:
    """The rounded weights are in the dtype of x and z; the weights themselves are there for their gradients."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.mm(x, rounded.t()).addmm_(z, other_rounded.t())


def _unwritten_maps(
    dy: Tensor, x: Tensor, rounded: Tensor, z: Tensor, other_rounded: Tensor, dtype: torch.dtype, asked: Sequence[bool]
) -> tuple[Tensor, ...]:
    tensors, dtypes = (x, rounded, z, other_rounded), (dy.dtype, dtype) * 2
    return tuple(map(unwritten, tensors, asked, dtypes))


@operator("sum_of_maps_backward", fake=_unwritten_maps)
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


def _map_gradients(needs: Any, kept: Any, constants: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    asked = [needs[0], needs[1], needs[3], needs[4]]
    dx, dw, dz, da = _sum_of_maps_backward(dy, *kept, *constants, asked)
    return dx, dw, None, dz, da


# x, the rounded weight, z and the other rounded weight
differentiable(
    _sum_of_maps, lambda inputs, _: ((inputs[0], *inputs[2:4], inputs[5]), (inputs[1].dtype,)), _map_gradients
)


def sum_of_maps(x: Tensor, weight: Tensor, z: Tensor, other: Tensor) -> Tensor:
    """x W^T + z A^T for tokens (..., in) of one dtype; the weights' gradients keep the digits of the weights' dtype."""
    rounded, other_rounded = (maps.rounded_weight(w, x.dtype) for w in (weight, other))
    out: Tensor = _sum_of_maps(x.flatten(0, -2), weight, rounded, z.flatten(0, -2), other, other_rounded)
    return out.view(*x.shape[:-1], weight.shape[0])
