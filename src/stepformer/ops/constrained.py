"""Constrained attention with a uniform prior: the operator around the kernels that solve, gather and differentiate.

For every head and query i over the keys j <= i, with scores s_j = q_i.k_j / sqrt(d) and a radius rho_i,

    a = softmax(beta s),   KL(a || uniform) = rho,   O_i = sum_j a_j v_j;      dO -> dq, dk, dv, drho.

The twin is `oracles.constraint.constrained_softmax`, whose conventions hold here: rho <= 0 and equal scores give
beta = 0 (or the ceiling), unreachable rows beta_max; no gradient passes through beta in these. Two kernels forward
(`constrained_forward`), two backward (`constrained_backward`); the equations stand there. Scores are products of the
inputs as they are, summed in fp32: bf16 is exact up to the order of the sum; fp32 uses three tf32 products, relative
error some 1e-6. As in other fused attentions a and its gradient are rounded to the dtype of v, q before they multiply.
Scores should lie between 1e-15 and 1e15 in size, since their squares are summed.

Saved for the backward: q, k, v, O, W (as O) and five numbers per row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from stepformer.ops.constrained_backward import key_gradient, query_gradient
from stepformer.ops.constrained_forward import gather_rows, solve_rows
from stepformer.ops.constraint import BETA_MAX
from stepformer.ops.operators import differentiable, operator

HEAD_DIMS = (16, 32, 64, 128)
PASSES = 12  # over the keys at most; blocks of hard scores took 4 to 7, one 10
# A step of ln b below it, times max(1, b std_a(S)), is not looked at again: what is left of it, about its cube, is
# corrected to first order in O by the gathering pass. W is not: dq and dk err by up to 8e-4 at 0.1, far below bf16.
CLOSE = {torch.float32: 0.005, torch.bfloat16: 0.1}
# Rows below it sum dO.O and c once more in the backward, in fp32 from what they are used with. All of them: at radii
# near ln t the gradient almost vanishes, and with the first 64 rows alone dq was 1e-2 off in bf16, 3e-3 with all.
EXACT = {torch.float32: 2**30, torch.bfloat16: 2**30}
STEPS = 2  # on the subset: its solution is only a start


class Tile(NamedTuple):
    """How one kernel is cut: queries and keys of a block, warps, stages of the pipeline, registers (None: any)."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2
    registers: int | None = None

    def options(self) -> dict[str, Any]:
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


class Tiles(NamedTuple):
    solve: Tile
    gather: Tile
    query: Tile
    key: Tile
    subset: int = 128


INTERPRETED = Tiles(Tile(16, 16), Tile(16, 16), Tile(16, 16), Tile(16, 16), 16)


def tiles(like: Tensor) -> Tiles:
    """The cut for queries (B, H, T, d)."""
    if like.device.type == "cpu":
        return INTERPRETED
    wide = like.shape[-1] > 64
    if like.dtype == torch.float32:
        if wide:
            return Tiles(*2 * (Tile(32, 32, 4, 1),), *2 * (Tile(32, 32, 8, 1),), 32)
        return Tiles(*3 * (Tile(64, 32),), Tile(32, 32), 64)
    if wide:
        return Tiles(Tile(64, 64), Tile(64, 64, 8), Tile(64, 64, 8), Tile(32, 64, 8), 64)
    # the fastest of seven each, measured on an H200 at (32, 12, 1024, 64): 0.81, 0.28, 0.24 and 0.43 ms
    return Tiles(Tile(64, 64, 4, 3, 168), Tile(64, 32, 4, 3, 168), Tile(64, 32, 4, 3), Tile(32, 64, 4, 2, 168), 64)


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels know these shapes: as many keys as queries, a power of two wide."""
    same = q.shape == k.shape == v.shape and q.dtype == k.dtype
    return same and q.shape[-1] in HEAD_DIMS and q.shape[2] > 0


def constrained_attention(q: Tensor, k: Tensor, v: Tensor, radius: Tensor, ceiling: float | None) -> Tensor:
    """O (B, H, T, d) of causal attention at the radius, (B, H, T) and fp32; beta <= ceiling."""
    out, _, _ = _forward(q, k, v, radius, math.inf if ceiling is None else ceiling)
    return out.transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """The same tensor with its last dimension dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _wider(q: Tensor, v: Tensor) -> Tensor:
    return q if q.dtype == torch.float32 else v


def _precision(x: Tensor) -> str:
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def solve(q: Tensor, k: Tensor, radius: Tensor, ceiling: float = math.inf, *, count: bool = False) -> Tensor:
    """(4, B, H, T): what `solve_rows` finds, the number of passes in the third place if asked for."""
    batch, heads, length, d = q.shape
    tile, subset = tiles(q).solve, tiles(q).subset
    state = torch.empty(4, batch, heads, length, dtype=torch.float32, device=q.device)
    limit = ceiling / math.sqrt(d)
    solve_rows[(triton.cdiv(length, tile.queries), batch * heads)](
        q, k, radius, state, *q.stride()[:3], *k.stride()[:3], *radius.stride(), heads, length, state[0].numel(), limit,
        D=d, BLOCK_M=tile.queries, BLOCK_N=tile.keys, SUBSET=subset, STEPS=STEPS, PASSES=PASSES, CLOSE=CLOSE[q.dtype],
        LIMITED=math.isfinite(ceiling), BETA_MAX=BETA_MAX, PRECISION=_precision(q), COUNT=count,
        **tile.options(),
    )  # fmt: skip
    return state


def by_token(*heads: Tensor) -> Iterator[Tensor]:
    """Unwritten memory (B, T, H, d) for each of some (B, H, T, d)."""
    for like in heads:
        batch, n_head, length, d = like.shape
        yield like.new_empty(batch, length, n_head, d)


def _outputs(q: Tensor, k: Tensor, v: Tensor, radius: Tensor, ceiling: float) -> tuple[Tensor, Tensor, Tensor]:
    out, tilt = by_token(v, v)
    return out, tilt, q.new_empty(5, *q.shape[:3], dtype=torch.float32)


@operator("constrained_attention", fake=_outputs)
def _forward(q: Tensor, k: Tensor, v: Tensor, radius: Tensor, ceiling: float) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _rows(q), _rows(k), _rows(v)
    batch, heads, length, d = q.shape
    state = solve(q, k, radius, ceiling)
    out, tilt, rows = _outputs(q, k, v, radius, ceiling)
    tile = tiles(_wider(q, v)).gather
    gather_rows[(triton.cdiv(length, tile.queries), batch * heads)](
        q, k, v, radius, state, out, tilt, rows,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *radius.stride(), heads, length, state[0].numel(),
        D=d, BLOCK_M=tile.queries, BLOCK_N=tile.keys, PRECISION=_precision(_wider(q, v)),
        **tile.options(),
    )  # fmt: skip
    return out, tilt, rows


def _gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    return *by_token(q, k, v), others[-1].new_empty(q.shape[:3])


@operator("constrained_attention_backward", fake=_gradients)
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, tilt: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, q, k, v = _rows(grad), _rows(q), _rows(k), _rows(v)
    batch, heads, length, d = q.shape
    dq, dk, dv, dradius = _gradients(grad, q, k, v, rows)
    lines = torch.empty_like(rows)
    by_query, by_key = tiles(_wider(q, v)).query, tiles(_wider(q, v)).key
    g = grad.stride()  # (B, T, H, d)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], g[0], g[2], g[1], heads, length, rows[0].numel())
    query_gradient[(triton.cdiv(length, by_query.queries), batch * heads)](
        q, k, v, out, tilt, grad, rows, dq, dradius, lines, *strides,
        D=d, BLOCK_M=by_query.queries, BLOCK_N=by_query.keys, EXACT=EXACT[_wider(q, v).dtype],
        PRECISION=_precision(_wider(q, v)), **by_query.options(),
    )  # fmt: skip
    key_gradient[(triton.cdiv(length, by_key.keys), batch * heads)](
        q, k, v, grad, lines, dk, dv, *strides,
        D=d, BLOCK_M=by_key.queries, BLOCK_N=by_key.keys, CHECK=length % by_key.queries != 0,
        PRECISION=_precision(_wider(q, v)), **by_key.options(),
    )  # fmt: skip
    return dq, dk, dv, dradius


def _differentiate(needs: Any, kept: Any, constants: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    if grad is None:
        return ()
    dq, dk, dv, dradius = _backward(grad, *kept)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), dradius.to(*constants)


differentiable(
    _forward,
    keep=lambda inputs, outputs: ((*inputs[:3], *outputs), (inputs[3].dtype,)),
    gradients=_differentiate,
    unused=True,
)
