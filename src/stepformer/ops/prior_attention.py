"""Constrained attention with a prior: the operator around the kernels that solve, gather and differentiate.

For every head and query i over the keys j <= i, with scores s_j = q_i.k_j / sqrt(d), a radius rho_i and the weights
a_below of the call before,

    a = softmax(ln p + beta s),   KL(a || p) = rho,   p ~ a_below^keep,   O_i = sum_j a_j v_j,

and ln a is an output, too, for the next call: dO, dln a -> dq, dk, dv, drho, dln a_below, dkeep. The first call has no
prior: it runs the kernels of `constrained`, and one more that writes ln a. The equations stand in `prior_forward` and
`prior_backward`; precision and twin are those of `constrained`.

ln a is (B, H, T, T), hence T <= 2048. It is stored in fp16, relative error 5e-4, since bf16 would err by 6 % in a; its
gradient in bf16, since it would vanish in fp16. Autograd gives a gradient the dtype of its tensor. So the tensor that
travels from call to call is declared bf16, but its bits are fp16: `unpack` makes numbers of them. Entries above the
diagonal, of it and of its gradient, are not written and not read.

Saved for the backward: q, k, v, O, W, six numbers per row, and ln a_below.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from stepformer.ops import constrained
from stepformer.ops.constrained import Tile, Tiles, _precision, _rows, _wider, by_token
from stepformer.ops.constraint import BETA_MAX, EVALUATIONS_WITH_PRIOR, PACKED, UNSOLVED
from stepformer.ops.operators import Kept, differentiable, operator
from stepformer.ops.prior_backward import prior_key_gradient, prior_query_gradient
from stepformer.ops.prior_forward import gather_prior_rows, solve_prior_rows, write_log_weights

LONGEST = 2048
PASSES = EVALUATIONS_WITH_PRIOR[torch.float32]
# As in `constrained`, but no pass corrects what is left: the cube of it in D, the fourth power in ln a.
CLOSE = {torch.float32: 0.005, torch.bfloat16: 0.05}
EXACT = {torch.float32: 2**30, torch.bfloat16: 64}  # as there; radii from a prior are small, so fewer rows need it


def tiles(like: Tensor) -> Tiles:
    """The cut for queries (B, H, T, d); the last number, of a subset, is not used."""
    if like.device.type == "cpu":
        return constrained.INTERPRETED
    wide = like.shape[-1] > 64
    if like.dtype == torch.float32:
        return Tiles(*2 * (Tile(32, 32, 4, 1),), *2 * (Tile(32, 32, 8, 1),)) if wide else Tiles(*4 * (Tile(32, 32),))
    if wide:
        return Tiles(Tile(64, 32), Tile(64, 64, 8), Tile(64, 32, 8), Tile(32, 64, 8))
    return Tiles(Tile(64, 32, 4, 3, 168), Tile(64, 32, 4, 3, 168), Tile(64, 32), Tile(32, 64, 4, 2, 168))


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels know these shapes: as many keys as queries, not too many, a power of two wide."""
    return constrained.takes(q, k, v) and q.shape[2] <= LONGEST


def prior_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    radius: Tensor,
    below: Tensor | None,
    keep: Tensor | None = None,
    *,
    packed: bool = True,
) -> tuple[Tensor, Tensor]:
    """(O (B, H, T, d), ln a (B, H, T, T)) of causal attention at the radius, (B, H, T) and fp32.

    below: ln a of the call before, packed or fp32; None: the prior is uniform. keep: (H,), 1 if None. packed: whether
    ln a leaves packed, or in fp32.
    """
    if below is None:
        keep = None
    elif keep is None:
        keep = torch.ones(q.shape[1], device=q.device)
    else:
        keep = keep.float().contiguous()
    out, log_a, _, _ = _forward(q, k, v, radius, below, keep, packed)
    return out.transpose(1, 2), log_a


def _bits(log_a: Tensor) -> Tensor:
    """What a kernel sees of it."""
    log_a = log_a.contiguous()
    return log_a.view(torch.float16) if log_a.dtype == PACKED else log_a


def _uneven(length: int, tile: Tile) -> bool:
    return length % max(tile.queries, tile.keys) != 0


def solve(q: Tensor, k: Tensor, radius: Tensor, below: Tensor, keep: Tensor, *, count: bool = False) -> Tensor:
    """(5, B, H, T): what `solve_prior_rows` finds, the number of passes in the last place if asked for."""
    batch, heads, length, d = q.shape
    tile = tiles(q).solve
    state = torch.empty(5, batch, heads, length, dtype=torch.float32, device=q.device)
    solve_prior_rows[(triton.cdiv(length, tile.queries), batch * heads)](
        q, k, _bits(below), keep, radius, state,
        *q.stride()[:3], *k.stride()[:3], *radius.stride(), length, heads, length, state[0].numel(),
        D=d, BLOCK_M=tile.queries, BLOCK_N=tile.keys, CHECK=_uneven(length, tile), PASSES=PASSES,
        CLOSE=CLOSE[q.dtype], BETA_MAX=BETA_MAX, UNSOLVED=UNSOLVED, PRECISION=_precision(q), STAGES=tile.stages,
        COUNT=count, **tile.options(),
    )  # fmt: skip
    return state


def _log_weights(q: Tensor, packed: bool) -> Tensor:
    return q.new_empty(*q.shape[:3], q.shape[2], dtype=PACKED if packed else torch.float32)


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, radius: Tensor, below: Tensor | None, keep: Tensor | None, packed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unwritten memory for O, ln a, W and the numbers of the rows."""
    out, tilt = by_token(v, v)
    return out, _log_weights(q, packed), tilt, q.new_empty(5 if below is None else 6, *q.shape[:3], dtype=torch.float32)


@operator("prior_attention", fake=_outputs)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, radius: Tensor, below: Tensor | None, keep: Tensor | None, packed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = _rows(q), _rows(k), _rows(v)
    batch, heads, length, d = q.shape
    tile = tiles(_wider(q, v)).gather
    precision = _precision(_wider(q, v))
    if below is None:
        log_a = _log_weights(q, packed)
        out, tilt, rows = constrained._forward(q, k, v, radius, math.inf)
        write_log_weights[(triton.cdiv(length, tile.queries), triton.cdiv(length, tile.keys), batch * heads)](
            q, k, rows, _bits(log_a), *q.stride()[:3], *k.stride()[:3], length, heads, length, rows[0].numel(),
            D=d, BLOCK_M=tile.queries, BLOCK_N=tile.keys, CHECK=_uneven(length, tile), PRECISION=precision,
            num_warps=tile.warps,
        )  # fmt: skip
        return out, log_a, tilt, rows
    assert keep is not None
    state = solve(q, k, radius, below, keep)
    out, log_a, tilt, rows = _outputs(q, k, v, radius, below, keep, packed)
    gather_prior_rows[(triton.cdiv(length, tile.queries), batch * heads)](
        q, k, v, _bits(below), keep, state, out, tilt, _bits(log_a), rows,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], length, heads, length, rows[0].numel(),
        D=d, BLOCK_M=tile.queries, BLOCK_N=tile.keys, CHECK=_uneven(length, tile), PRECISION=precision,
        STAGES=tile.stages, **tile.options(),
    )  # fmt: skip
    return out, log_a, tilt, rows


def _gradients(
    grad: Tensor, given: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, tilt: Tensor, rows: Tensor,
    below: Tensor | None, keep: Tensor | None, send: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Unwritten memory for dq, dk, dv, drho, dln a_below and dkeep."""
    sent = below.new_empty(below.shape) if below is not None and send else rows.new_empty(0)
    return *by_token(q, k, v), rows.new_empty(q.shape[:3]), sent, rows.new_empty(0 if keep is None else q.shape[1])


@operator("prior_attention_backward", fake=_gradients)
def _backward(
    grad: Tensor, given: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, tilt: Tensor, rows: Tensor,
    below: Tensor | None, keep: Tensor | None, send: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grad, q, k, v = _rows(grad), _rows(q), _rows(k), _rows(v)
    batch, heads, length, d = q.shape
    dq, dk, dv = (torch.empty(batch, length, heads, d, dtype=x.dtype, device=q.device) for x in (q, k, v))
    lines = rows.new_empty(5, batch, heads, length)
    dradius, dkeep = rows.new_empty(2, batch, heads, length).unbind()
    sent = torch.empty_like(below, memory_format=torch.contiguous_format) if below is not None and send else None
    wider = _wider(q, v)
    by_query, by_key = tiles(wider).query, tiles(wider).key
    g = grad.stride()  # (B, T, H, d)
    strides = (
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], g[0], g[2], g[1], length, heads, length, rows[0].numel(),
    )  # fmt: skip
    # a pointer must point somewhere
    below_, keep_ = (lines, lines) if below is None else (_bits(below), keep)
    given_ = lines if given is None else given.contiguous()
    kinds = {"PRIOR": below is not None, "GIVEN": given is not None, "PRECISION": _precision(wider)}
    prior_query_gradient[(triton.cdiv(length, by_query.queries), batch * heads)](
        q, k, v, out, tilt, grad, rows, below_, keep_, given_, dq, dradius, dkeep, lines if sent is None else sent,
        lines, *strides,
        D=d, BLOCK_M=by_query.queries, BLOCK_N=by_query.keys, EXACT=EXACT[wider.dtype],
        CHECK=_uneven(length, by_query), SEND=sent is not None, STAGES=by_query.stages, **kinds,
        **by_query.options(),
    )  # fmt: skip
    prior_key_gradient[(triton.cdiv(length, by_key.keys), batch * heads)](
        q, k, v, grad, lines, below_, keep_, given_, dk, dv, *strides,
        D=d, BLOCK_M=by_key.queries, BLOCK_N=by_key.keys, CHECK=_uneven(length, by_key),
        STAGES=by_key.stages, **kinds, **by_key.options(),
    )  # fmt: skip
    nothing = rows.new_empty(0)
    total = nothing if keep is None else dkeep.sum((0, 2))
    return dq, dk, dv, dradius.clone(), nothing.clone() if sent is None else sent, total


def _keep(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> Kept:
    q, k, v, radius, below, keep, _ = inputs
    out, _, tilt, rows = outputs
    return (q, k, v, out, tilt, rows, below, keep), (radius.dtype,)


def _differentiate(needs: Any, kept: Any, constants: Any, grad: Any, given: Any, *_: Any) -> tuple[Tensor, ...]:
    if grad is None and given is None:
        return ()
    grad = torch.zeros_like(kept[3]) if grad is None else grad
    dq, dk, dv, dradius, sent, dkeep = _backward(grad, given, *kept, needs[4])
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), dradius.to(*constants), sent, dkeep


differentiable(_forward, _keep, _differentiate, unused=True)
