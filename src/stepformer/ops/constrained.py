"""Constrained attention: the operator around the kernels that solve, gather and differentiate.

For every head and query i over the keys j <= i, with scores s_j = q_i.k_j / sqrt(d) and a radius rho_i,

    a = softmax(beta s),   KL(a || uniform) = rho,   O_i = sum_j a_j v_j;      dO -> dq, dk, dv, drho,

and in a chain of calls, with the weights a_below of the call before,

    a = softmax(ln p + beta s),   KL(a || p) = rho,   p ~ a_below^keep;        dO, dln a -> also dln a_below, dkeep,

where ln a is an output, too, for the next call. The first call of a chain has no prior: one kernel more writes ln a. A
learned prior ln p = c_{i-j} is a table (H, T), read by the same kernels as a matrix whose rows are one apart, backward.

The twin is `ops.constraint.constrained_softmax`, whose conventions hold here: rho <= 0 and equal scores give
beta = 0 (or the ceiling), unreachable rows beta_max; no gradient passes through beta in these. Two kernels forward
(`constrained_solve` or `prior_solve`, `constrained_gather`), two backward (`constrained_backward`); the equations
stand there. Scores are products of the
inputs as they are, summed in fp32: bf16 is exact up to the order of the sum; fp32 uses three tf32 products, relative
error some 1e-6. As in other fused attentions a and its gradient are rounded to the dtype of v, q before they multiply.
Scores should lie between 1e-15 and 1e15 in size, since their squares are summed.

ln a is (B, H, T, T), hence T <= 2048. It is stored in fp16, relative error 5e-4, since bf16 would err by 6 % in a; its
gradient in bf16, since it would vanish in fp16. Autograd gives a gradient the dtype of its tensor. So the tensor that
travels from call to call is declared bf16, but its bits are fp16: `unpacked` makes numbers of them. Entries above the
diagonal, of it and of its gradient, are not written and not read.

Saved for the backward: q, k, v, O, W (as O), five numbers per row or six, and ln a_below. The gradient of a table is
summed over (B, H, T, T) entries in the dtype of q, hence T <= 2048 here, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from stepformer.ops.constrained_backward import key_gradient, query_gradient
from stepformer.ops.constrained_gather import gather_rows, write_log_weights
from stepformer.ops.constrained_solve import solve_rows
from stepformer.ops.constraint import BETA_MAX, EVALUATIONS_WITH_PRIOR, PACKED, UNSOLVED
from stepformer.ops.operators import Kept, differentiable, operator
from stepformer.ops.prior_solve import solve_prior_rows

HEAD_DIMS = (16, 32, 64, 128)
LONGEST = 2048  # tokens where there is a prior
PASSES = 12  # over the keys at most; blocks of hard scores took 4 to 7, one 10
# A step of ln b below it, times max(1, b std_a(S)), is not looked at again: what is left of it, about its cube, is
# corrected to first order in O by the gathering pass. W is not: dq and dk err by up to 8e-4 at 0.1, far below bf16.
CLOSE = {torch.float32: 0.005, torch.bfloat16: 0.1}
# Rows below it sum dO.O and c once more in the backward, in fp32 from what they are used with. All of them: at radii
# near ln t the gradient almost vanishes, and with the first 64 rows alone dq was 1e-2 off in bf16, 3e-3 with all.
EXACT = {torch.float32: 2**30, torch.bfloat16: 2**30}
# Both in a chain. No pass corrects what is left there: the cube of it in D, the fourth power in ln a. Radii from a
# prior are small, so fewer rows need to be summed once more.
CHAINED_CLOSE = {torch.float32: 0.005, torch.bfloat16: 0.05}
CHAINED_EXACT = {torch.float32: 2**30, torch.bfloat16: 64}
STEPS = 2  # on the subset: its solution is only a start


class Tile(NamedTuple):
    """How one kernel is cut: queries and keys of a block, warps, stages of the pipeline, registers (None: any)."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2
    registers: int | None = None

    def options(self) -> dict[str, Any]:
        sizes = {"BLOCK_M": self.queries, "BLOCK_N": self.keys}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}

    def divides(self, length: int) -> bool:
        return length % max(self.queries, self.keys) == 0


class Tiles(NamedTuple):
    solve: Tile
    gather: Tile
    query: Tile
    key: Tile
    subset: int = 128


INTERPRETED = Tiles(Tile(16, 16), Tile(16, 16), Tile(16, 16), Tile(16, 16), 16)


def tiles(like: Tensor, chained: bool = False) -> Tiles:
    """The cut for queries (B, H, T, d); of a subset nobody asks in a chain."""
    if like.device.type == "cpu":
        return INTERPRETED
    wide = like.shape[-1] > 64
    if like.dtype == torch.float32 and wide:
        return Tiles(*2 * (Tile(32, 32, 4, 1),), *2 * (Tile(32, 32, 8, 1),), 32)
    if like.dtype == torch.float32:
        return Tiles(*4 * (Tile(32, 32),)) if chained else Tiles(*3 * (Tile(64, 32),), Tile(32, 32), 64)
    if wide:
        narrow = 32 if chained else 64
        return Tiles(Tile(64, narrow), Tile(64, 64, 8), Tile(64, narrow, 8), Tile(32, 64, 8), 64)
    solve, gather, key = Tile(64, 32 if chained else 64, 4, 3, 168), Tile(64, 32, 4, 3, 168), Tile(32, 64, 4, 2, 168)
    # the fastest of seven each, measured on an H200 at (32, 12, 1024, 64): 0.81, 0.28, 0.24 and 0.43 ms
    return Tiles(solve, gather, Tile(64, 32) if chained else Tile(64, 32, 4, 3), key, 64)


def takes(q: Tensor, k: Tensor, v: Tensor, *, square: bool = False) -> bool:
    """Whether the kernels know these shapes: as many keys as queries, a power of two wide; with `square`, where all
    pairs of tokens have an entry in memory, not too many.
    """
    same = q.shape == k.shape == v.shape and q.dtype == k.dtype
    return same and q.shape[-1] in HEAD_DIMS and 0 < q.shape[2] <= (LONGEST if square else math.inf)


def constrained_attention(q: Tensor, k: Tensor, v: Tensor, radius: Tensor, ceiling: float | None) -> Tensor:
    """O (B, H, T, d) of causal attention at the radius, (B, H, T) and fp32; beta <= ceiling."""
    out, *_ = _forward(q, k, v, radius, None, None, math.inf if ceiling is None else ceiling, None)
    return out.transpose(1, 2)


def prior_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    radius: Tensor,
    below: Tensor | None,
    keep: Tensor | None = None,
    ceiling: float | None = None,
    *,
    packed: bool = True,
) -> tuple[Tensor, Tensor]:
    """(O (B, H, T, d), ln a (B, H, T, T)) of causal attention at the radius, (B, H, T) and fp32; beta <= ceiling.

    below: ln a of the call before, packed or fp32; None: the prior is uniform. keep: (H,), 1 if None. packed: whether
    ln a leaves packed, or in fp32.
    """
    if below is None:
        keep = None
    else:
        keep = torch.ones(q.shape[1], device=q.device) if keep is None else keep.float().contiguous()
    largest = math.inf if ceiling is None else ceiling
    out, _, _, log_a = _forward(q, k, v, radius, below, keep, largest, PACKED if packed else torch.float32)
    return out.transpose(1, 2), log_a


def table_attention(
    q: Tensor, k: Tensor, v: Tensor, radius: Tensor, table: Tensor, ceiling: float | None = None
) -> Tensor:
    """O (B, H, T, d) from the prior softmax(c_{i-j}) with the table c (H, T or more); beta <= ceiling."""
    below, ones = table[:, : q.shape[2]].float(), torch.ones(q.shape[1], device=q.device)
    out, *_ = _forward(q, k, v, radius, below, ones, math.inf if ceiling is None else ceiling, None)
    return out.transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """The same tensor with its last dimension dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _wider(q: Tensor, v: Tensor) -> Tensor:
    return q if q.dtype == torch.float32 else v


def _precision(x: Tensor) -> str:
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def _bits(log_a: Tensor | None) -> Tensor | None:
    """What a kernel sees of it."""
    if log_a is None:
        return None
    log_a = log_a.contiguous()
    return log_a.view(torch.float16) if log_a.dtype == PACKED else log_a


def _prior(below: Tensor | None, length: int) -> tuple[Any, ...]:
    """A prior as kernels see it, and how far its batches, heads and rows lie apart; keys lie side by side."""
    if below is None:
        return None, None, None, None
    if below.ndim == 4:
        return _bits(below), *below.contiguous().stride()[:3]
    # c_{i-j} at place T - 1 - i + j; zeros behind, since keys that a row does not see may be read, too
    line = torch.cat([below.flip(1), torch.zeros_like(below)], dim=1)
    return line[:, length - 1 :], 0, 2 * length, -1


def solve(q: Tensor, k: Tensor, radius: Tensor, ceiling: float = math.inf, *, count: bool = False) -> Tensor:
    """(4, B, H, T): what `solve_rows` finds, the number of passes in the third place if asked for."""
    batch, heads, length, d = q.shape
    tile, subset = tiles(q).solve, tiles(q).subset
    state = torch.empty(4, batch, heads, length, dtype=torch.float32, device=q.device)
    limit = ceiling / math.sqrt(d)
    solve_rows[(triton.cdiv(length, tile.queries), batch * heads)](
        q, k, radius, state, *q.stride()[:3], *k.stride()[:3], *radius.stride(), heads, length, state[0].numel(), limit,
        D=d, SUBSET=subset, STEPS=STEPS, PASSES=PASSES, CLOSE=CLOSE[q.dtype], LIMITED=math.isfinite(ceiling),
        BETA_MAX=BETA_MAX, PRECISION=_precision(q), COUNT=count, **tile.options(),
    )  # fmt: skip
    return state


def solve_with_prior(
    q: Tensor, k: Tensor, radius: Tensor, below: Tensor, keep: Tensor | None, ceiling: float = math.inf, *,
    count: bool = False,
) -> Tensor:  # fmt: skip
    """(5, B, H, T): what `solve_prior_rows` finds, the number of passes in the last place if asked for."""
    batch, heads, length, d = q.shape
    tile = tiles(q, chained=True).solve
    state = torch.empty(5, batch, heads, length, dtype=torch.float32, device=q.device)
    prior, *apart = _prior(below, length)
    solve_prior_rows[(triton.cdiv(length, tile.queries), batch * heads)](
        q, k, prior, keep, radius, state, *q.stride()[:3], *k.stride()[:3], *radius.stride(), *apart,
        heads, length, state[0].numel(), ceiling / math.sqrt(d),
        D=d, CHECK=not tile.divides(length), PASSES=EVALUATIONS_WITH_PRIOR[torch.float32], CLOSE=CHAINED_CLOSE[q.dtype],
        LIMITED=math.isfinite(ceiling), BETA_MAX=BETA_MAX, UNSOLVED=UNSOLVED, PRECISION=_precision(q),
        STAGES=tile.stages, COUNT=count, **tile.options(),
    )  # fmt: skip
    return state


def by_token(*heads: Tensor) -> Iterator[Tensor]:
    """Unwritten memory (B, T, H, d) for each of some (B, H, T, d)."""
    for like in heads:
        batch, n_head, length, d = like.shape
        yield like.new_empty(batch, length, n_head, d)


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, radius: Tensor, below: Tensor | None, keep: Tensor | None, ceiling: float,
    chain: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Unwritten memory for O, W, the numbers of the rows and ln a."""
    out, tilt = by_token(v, v)
    rows = q.new_empty(5 if below is None else 6, *q.shape[:3], dtype=torch.float32)
    return out, tilt, rows, q.new_empty((*q.shape[:3], q.shape[2]) if chain else 0, dtype=chain)


@operator("constrained_attention", fake=_outputs)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, radius: Tensor, below: Tensor | None, keep: Tensor | None, ceiling: float,
    chain: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """below: ln a of a chain, (B, H, T, T), or a table (H, T). chain: the dtype of the new ln a, in a chain."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    (batch, heads, length, d), prior, wider = q.shape, below is not None, _wider(q, v)
    out, tilt, rows, log_a = _outputs(q, k, v, radius, below, keep, ceiling, chain)
    if below is None:
        state = solve(q, k, radius, ceiling)
    else:
        state = solve_with_prior(q, k, radius, below, keep, ceiling)
    total, precision, above = rows[0].numel(), _precision(wider), _bits(log_a) if chain else None
    bits, *apart = _prior(below, length)
    tile = tiles(wider, chained=prior).gather
    gather_rows[(triton.cdiv(length, tile.queries), batch * heads)](
        q, k, v, radius, bits, keep, state, out, tilt, above if prior else None, rows,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *radius.stride(), *apart, length if prior else None,
        heads, length, total, D=d, CHECK=prior and not tile.divides(length), PRECISION=precision,
        STAGES=tile.stages if prior else None, **tile.options(),
    )  # fmt: skip
    if chain and not prior:
        tile = tiles(wider, chained=True).gather
        write_log_weights[(triton.cdiv(length, tile.queries), triton.cdiv(length, tile.keys), batch * heads)](
            q, k, rows, above, *q.stride()[:3], *k.stride()[:3], length, heads, length, total,
            D=d, BLOCK_M=tile.queries, BLOCK_N=tile.keys, CHECK=not tile.divides(length), PRECISION=precision,
            num_warps=tile.warps,
        )  # fmt: skip
    return out, tilt, rows, log_a


def _gradients(
    grad: Tensor, given: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, tilt: Tensor, rows: Tensor,
    below: Tensor | None, keep: Tensor | None, chained: bool, send: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Unwritten memory for dq, dk, dv, drho, dln a_below (or that of a table) and dkeep."""
    sent = below.new_empty(below.shape) if below is not None and send else rows.new_empty(0)
    return *by_token(q, k, v), rows.new_empty(q.shape[:3]), sent, rows.new_empty(0 if keep is None else q.shape[1])


@operator("constrained_attention_backward", fake=_gradients)
def _backward(
    grad: Tensor, given: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, tilt: Tensor, rows: Tensor,
    below: Tensor | None, keep: Tensor | None, chained: bool, send: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grad, q, k, v = _rows(grad), _rows(q), _rows(k), _rows(v)
    (batch, heads, length, d), wider = q.shape, _wider(q, v)
    dq, dk, dv, dradius, sent, total = _gradients(grad, given, q, k, v, out, tilt, rows, below, keep, chained, send)
    lines = rows.new_empty(5, batch, heads, length)
    dkeep = None if below is None else torch.empty_like(dradius)
    by_query, by_key = tiles(wider, chained).query, tiles(wider, chained).key
    g = grad.stride()  # (B, T, H, d)
    bits, *apart = _prior(below, length)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], g[0], g[2], g[1], *apart)
    sizes = (length if chained else None, heads, length, rows[0].numel())
    given = None if given is None else given.contiguous()
    table = below is not None and below.ndim == 2 and send
    by_distance = q.new_zeros(*q.shape[:3], length) if table else sent
    query_gradient[(triton.cdiv(length, by_query.queries), batch * heads)](
        q, k, v, out, tilt, grad, rows, bits, keep, given, dq, dradius, dkeep,
        by_distance if by_distance.numel() else None, lines,
        *strides, *sizes, D=d, EXACT=(CHAINED_EXACT if chained else EXACT)[wider.dtype],
        CHECK=chained and not by_query.divides(length), TABLE=table, PRECISION=_precision(wider),
        STAGES=by_query.stages if chained else None, **by_query.options(),
    )  # fmt: skip
    check = not by_key.divides(length) if chained else length % by_key.queries != 0
    key_gradient[(triton.cdiv(length, by_key.keys), batch * heads)](
        q, k, v, grad, lines, bits, keep, given, dk, dv, *strides, *sizes, D=d, CHECK=check,
        PRECISION=_precision(wider), STAGES=by_key.stages if chained else None, **by_key.options(),
    )  # fmt: skip
    if table:
        torch.sum(by_distance, (0, 2), dtype=sent.dtype, out=sent)
    return dq, dk, dv, dradius, sent, total if dkeep is None else dkeep.sum((0, 2))


def _keep(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> Kept:
    q, k, v, radius, below, keep, _, chain = inputs
    return (q, k, v, *outputs[:3], below, keep), (radius.dtype, chain is not None or below is not None)


def _differentiate(needs: Any, kept: Any, constants: Any, grad: Any, *others: Any) -> tuple[Tensor, ...]:
    given = others[-1]
    if grad is None and given is None:
        return ()
    grad = torch.zeros_like(kept[3]) if grad is None else grad
    dtype, chained = constants
    dq, dk, dv, dradius, sent, dkeep = _backward(grad, given, *kept, chained, needs[4])
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), dradius.to(dtype), sent, dkeep


differentiable(_forward, _keep, _differentiate, unused=True)
