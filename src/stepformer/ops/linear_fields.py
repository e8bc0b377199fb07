"""Both fields of the linear Hamiltonian attention as one operator, in matrix products of the vendor's library.

For tokens u and y (B, T, d), p = A u, and both causal sums together (linear_flow.py):

    F_i = sum_{j<=i} (p_i.u_j) y_j,   G_i = sum_{j<=i} (y_i.y_j) u_j,   z = -G / n,   force = u V^T + z A^T

with z from one pass over G. Backward, with f = dL/dF and h = dL/d(force):

    dz = h A,   g = dL/dG = -dz / n,   du += h V + dp A,   dV = h^T u,   dA = dp^T u + h^T z

Operands are bf16 or fp32 as given, sums are fp32; scores and states are rounded to the operands' dtype once. The terms
of du and dy are added to each other in their own dtype, as autograd would add them. Products are added where their sum
is to stand, so that nobody adds tensors afterwards: three times one pass over 3 tensors of tokens less than with
operators of their own. Gradients of weights are in the weights' dtype. Where the sums cannot be shared,
`sum_of_linear_layers` is the force alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stepformer.ops.linear_flow import CHUNK, keeps, segmented, sums, sums_backward, unwritten_sums
from stepformer.ops.linear_kernels import product, rounded_weight, unwritten_rows
from stepformer.ops.operators import Kept, differentiable, operator, unwritten
from stepformer.ops.token_rows import scale_rows


def _unwritten_fields(u: Tensor, *others: Any) -> tuple[Tensor, ...]:
    segment, chunk, keep = others[-3:]
    *fields, scores, states = unwritten_sums(u, u, u, segment, chunk, keep, both=True)
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
        first, second, scores, states = sums(p, u, y, segment, chunk, keep, both=True)
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
        g = None
        if h is not None:
            h = h.flatten(0, -2).contiguous()
            g = scale_rows(torch.mm(h, a).view(u.shape), minus_nu)
        dp, du, dy = sums_backward(f, g, p, u, y, scores, states, segment, chunk)
        if h is not None:
            du.view(rows.shape).addmm_(h, v)
            if asked[1]:
                dv = product(h.t(), rows, dtype)
        dp = dp.view(rows.shape)
        du.view(rows.shape).addmm_(dp, a)
        if asked[0]:
            da = product(dp.t(), rows, dtype)
            if h is not None:
                da += product(h.t(), z.flatten(0, -2), dtype)
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
    a, v = (rounded_weight(w, u.dtype) for w in (kernel, value))
    found = _fields(u, y, kernel, a, value, v, minus_nu, segment, chunk, keeps(u, segment, both=True))
    return (found[0][:, :length], found[1][:, :length]) if missing else (found[0], found[1])


@operator("sum_of_linear_layers", fake=unwritten_rows)
def _sum(x: Tensor, weight: Tensor, rounded: Tensor, z: Tensor, other: Tensor, other_rounded: Tensor) -> Tensor:
    """The rounded weights are in the dtype of x and z; the weights themselves are there for their gradients."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.mm(x, rounded.t()).addmm_(z, other_rounded.t())


def _unwritten_terms(
    dy: Tensor, x: Tensor, rounded: Tensor, z: Tensor, other_rounded: Tensor, dtype: torch.dtype, asked: Sequence[bool]
) -> tuple[Tensor, ...]:
    return tuple(map(unwritten, (x, rounded, z, other_rounded), asked, (dy.dtype, dtype) * 2))


@operator("sum_of_linear_layers_backward", fake=_unwritten_terms)
def _sum_backward(
    dy: Tensor, x: Tensor, rounded: Tensor, z: Tensor, other_rounded: Tensor, dtype: torch.dtype, asked: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dW, dz, dA; empty where not asked for."""
    dy = dy.contiguous()
    with torch.autocast(dy.device.type, enabled=False):
        return (
            torch.mm(dy, rounded) if asked[0] else dy.new_empty(0),
            product(dy.t(), x, dtype) if asked[1] else dy.new_empty(0, dtype=dtype),
            torch.mm(dy, other_rounded) if asked[2] else dy.new_empty(0),
            product(dy.t(), z, dtype) if asked[3] else dy.new_empty(0, dtype=dtype),
        )


def _sum_gradients(needs: Any, kept: Any, constants: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw, dz, da = _sum_backward(dy, *kept, *constants, [needs[0], needs[1], needs[3], needs[4]])
    return dx, dw, None, dz, da


# x, the rounded weight, z and the other rounded weight
differentiable(_sum, lambda inputs, _: ((inputs[0], *inputs[2:4], inputs[5]), (inputs[1].dtype,)), _sum_gradients)


def sum_of_linear_layers(x: Tensor, weight: Tensor, z: Tensor, other: Tensor) -> Tensor:
    """x W^T + z A^T for tokens (..., in) of one dtype; the weights' gradients keep the digits of the weights' dtype."""
    rounded, other_rounded = (rounded_weight(w, x.dtype) for w in (weight, other))
    out: Tensor = _sum(x.flatten(0, -2), weight, rounded, z.flatten(0, -2), other, other_rounded)
    return out.view(*x.shape[:-1], weight.shape[0])
