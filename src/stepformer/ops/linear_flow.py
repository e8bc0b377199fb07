"""Causal sums of linear attention, in matrix products of the vendor's library.

    o_i = sum_{j<=i} (q_i.k_j) v_j        for tokens (B, T, d)

Within a segment of L tokens the masked scores S = tril(q k^T) are formed, in stretches of `chunk` queries that meet
only the keys up to their end; nothing but the blocks on the diagonal needs a mask. Between segments runs the state:

    o = S v + q C,   C_s = sum_{s' < s} k_s'^T v_s'           (d x d per segment, summed in fp32)

Backward, with g = dL/do and D_s = sum_{s' > s} q_s'^T g_s':

    dS = tril(g v^T);  dq = dS k + g C^T;  dk = dS^T q + v D^T;  dv = S^T g + k D

The linear Hamiltonian attention (q = A u, k = u, v = y) also needs sum_{j<=i} (v_i.v_j) k_j, whose state is C^T. Both
together, with Q = tril(v v^T), h = dL/d(second) and D_s = sum_{s' > s} (q_s'^T g_s' + h_s'^T v_s') for both at once:

    second = Q k + v C^T;   dQ = tril(h k^T)
    dk = dS^T q + Q^T h + v D^T;   dv = dQ v + dQ^T v + S^T g + h C + k D

All segments at once: no loop over them, and the sums over s are one small kernel. Key-side products (dS^T q, S^T g) run
over stretches of keys and all later queries, so each gradient is written once. Operands are bf16 or fp32 as given,
sums are fp32; S and C are rounded to the operands' dtype once (relative 2^-9 in bf16, before another sum).

FLOPs per token, forward: 4 d (f L + d), f = (1 + chunk/L) / 2, and 4 d f T without segments; backward twice that.
Bytes per token for the states: 12 d^2 / L forward. With d = 768 one segment is best up to about 2 d tokens. Two sums
of their own and both together, with r = f of the squares computed:

    forward     8 d r L + 8 d^2       8 d r L + 6 d^2
    backward   16 d r L + 16 d^2     16 d r L + 12 d^2

and without segments 24 d r T either way. d = 768, L = 1024, chunk = 256: 26.0 and 22.4 MFLOP. In bf16 the scans move
10 d^2 bytes a segment forward and 18 d^2 backward instead of 20 and 20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from stepformer.ops.operators import differentiable, operator, shaped_as, unwritten

CHUNK = 256  # queries at a time: at 1024 tokens 5/8 of the square, in products large enough to fill the device
KEPT = 2**26  # scores that the forward pass keeps for the backward, per call; beyond, they are computed again
ALIGNED = 8  # rows of score matrices begin at multiples of 16 bytes, whatever the number of keys


def stretches(length: int, chunk: int) -> list[tuple[int, int]]:
    """Begin and end of consecutive parts."""
    return [(begin, min(begin + chunk, length)) for begin in range(0, length, chunk)]


def padded(columns: int) -> int:
    """Columns that a row of a score matrix has room for."""
    return -(-columns // ALIGNED) * ALIGNED


def fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """Batched a @ b, added up and returned in fp32."""
    return torch.bmm(a, b) if a.dtype == torch.float32 else torch.bmm(a, b, out_dtype=torch.float32)


def add_product(out: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """out = a @ b, or out += a @ b."""
    if fresh:
        torch.bmm(a, b, out=out)
    else:
        out.baddbmm_(a, b)


def from_earlier(weights: Tensor, sources: Tensor, out: Tensor, chunk: int, fresh: bool) -> None:
    """out_i = (or +=) sum_{j<=i} weights_ij sources_j; weights (B, T, T) hold zeros in the chunks on the diagonal."""
    for begin, end in stretches(out.shape[1], chunk):
        add_product(out[:, begin:end], weights[:, begin:end, :end], sources[:, :end], fresh)


def from_later(weights: Tensor, sources: Tensor, out: Tensor, chunk: int, fresh: bool) -> None:
    """out_j = (or +=) sum_{i>=j} weights_ij sources_i; weights (B, T, T) hold zeros in the chunks on the diagonal."""
    for begin, end in stretches(out.shape[1], chunk):
        add_product(out[:, begin:end], weights[:, begin:, begin:end].mT, sources[:, begin:], fresh)


@triton.jit
def _clear_kernel(  # type: ignore[no-untyped-def]
    scores, rows, width, matrix_stride, row_stride, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    first = row // CHUNK * CHUNK
    column = first + tl.arange(0, COLUMNS)[None, :]
    # whole groups of 8, with what stands before the diagonal as it was: single stores would be 8 times as many
    touched = (row < rows) & (column // 8 * 8 + 7 > row) & (column < first + CHUNK) & (column < width)
    where = scores + (tl.program_id(0).to(tl.int64) * matrix_stride + row.to(tl.int64) * row_stride + column)
    held = tl.load(where, mask=touched, other=0.0)
    tl.store(where, tl.where(column > row, 0.0, held), mask=touched)


def clear_later(scores: Tensor, chunk: int) -> None:
    """Write zeros above the diagonal of matrices (B, L, >= L), in the chunks on it; nobody reads beyond those."""
    matrices, rows, width = scores.shape
    chunk = min(chunk, rows)
    columns = triton.next_power_of_2(chunk)
    tile = max(1, 4096 // columns)
    _clear_kernel[(matrices, triton.cdiv(rows, tile))](
        *(scores, rows, width, *scores.stride()[:2]), CHUNK=chunk, COLUMNS=columns, ROWS=tile, num_warps=4
    )


def masked_scores(
    pairs: Sequence[tuple[Tensor, Tensor]], out: Tensor, chunk: int, begin: int = 0, end: int = 0
) -> None:
    """Scores of some queries (all by default) of each pair (q, k) with the keys up to their chunk's end, masked.

    out: (pairs, B, queries, keys).
    """
    length = pairs[0][0].shape[1]
    end = end or length
    for (q, k), room in zip(pairs, out, strict=True):
        for first, last in stretches(length, chunk):
            if begin <= first < end:
                torch.bmm(q[:, first:last], k[:, :last].mT, out=room[:, first - begin : last - begin, :last])
    clear_later(out.flatten(0, 1)[:, : end - begin, begin:], chunk)


def weighted_sums(
    pairs: Sequence[tuple[Tensor, Tensor]],
    values: Sequence[Tensor],
    outs: Sequence[Tensor],
    chunk: int,
    keep: bool,
    fresh: bool,
) -> Tensor:
    """out_i = (or +=) sum_{j<=i} (q_i.k_j) v_j for each pair (q, k); the scores, or nothing unless they are kept."""
    q, _ = pairs[0]
    batch, length, _ = q.shape
    rows = length if keep else min(chunk, length)
    scores = q.new_empty(len(pairs), batch, rows, padded(length))
    if keep:
        masked_scores(pairs, scores, chunk)
        for room, v, out in zip(scores, values, outs, strict=True):
            from_earlier(room, v, out, chunk, fresh)
        return scores
    for begin, end in stretches(length, chunk):
        masked_scores(pairs, scores, chunk, begin, end)
        for room, v, out in zip(scores, values, outs, strict=True):
            add_product(out[:, begin:end], room[:, : end - begin, :end], v[:, :end], fresh)
    return q.new_empty(0)


@triton.jit
def _running_kernel(  # type: ignore[no-untyped-def]
    states, more, out, size, SEGMENTS: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64) * SEGMENTS
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(SEGMENTS):
        segment = SEGMENTS - 1 - step if REVERSE else step
        where = (row + segment) * size + at
        tl.store(out + where, total, mask=live)
        total += tl.load(states + where, mask=live, other=0.0)
        if more is not None:
            total += tl.load(more + where, mask=live, other=0.0)


def running(
    states: Tensor, segments: int, dtype: torch.dtype, reverse: bool = False, more: Tensor | None = None
) -> Tensor:
    """Sums of (B * segments, d, d) over all earlier segments of the same row, or over all later ones, in `dtype`.

    more: something of the same shape that is added to the states.
    """
    out = torch.empty_like(states, dtype=dtype)
    size, block = states[0].numel(), 1024
    grid = (triton.cdiv(size, block), states.shape[0] // segments)
    _running_kernel[grid](states, more, out, size, SEGMENTS=segments, REVERSE=reverse, BLOCK=block, num_warps=4)
    return out


def unwritten_sums(
    q: Tensor, k: Tensor, v: Tensor, segment: int, chunk: int, keep: bool, both: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, n = q.shape[0], q.shape[1] // segment
    scores = q.new_empty(1 + both, batch * n, segment, padded(segment)) if keep else q.new_empty(0)
    states = q.new_empty(batch * n, k.shape[-1], v.shape[-1]) if n > 1 else q.new_empty(0)
    return unwritten(v), unwritten(k, both), scores, states


def sums(
    q: Tensor, k: Tensor, v: Tensor, segment: int, chunk: int, keep: bool, both: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum, the second one, scores (1 or 2, B, L, L) and states.

    The second is empty unless `both` are wanted, the scores unless they are to be kept, the states for one segment.
    """
    shapes, n = (v.shape, k.shape), q.shape[1] // segment
    q, k, v = (t.reshape(-1, segment, t.shape[-1]) for t in (q, k, v))
    pairs, values = [(q, k), (v, v)][: 1 + both], [v, k][: 1 + both]
    outs = [unwritten(t) for t in values]
    states = q.new_empty(0)
    if n > 1:
        states = running(fp32_product(k.mT, v), n, q.dtype)
        torch.bmm(q, states, out=outs[0])
        if both:
            torch.bmm(v, states.mT, out=outs[1])
    scores = weighted_sums(pairs, values, outs, chunk, keep, fresh=n == 1)
    return outs[0].view(shapes[0]), outs[1].view(shapes[1]) if both else k.new_empty(0), scores, states


def scores_again(pairs: Sequence[tuple[Tensor, Tensor]], like: Tensor, chunk: int) -> Tensor:
    scores = torch.empty_like(like)
    masked_scores(pairs, scores, chunk)
    return scores


def sums_backward(
    g: Tensor,
    h: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Tensor,
    states: Tensor,
    segment: int,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; without h where there is no second sum, or nobody reads it (the momentum after the last layer)."""
    shapes, n = (q.shape, k.shape, v.shape), q.shape[1] // segment
    g, q, k, v = (t.reshape(-1, segment, t.shape[-1]) for t in (g, q, k, v))
    dq, dk, dv = unwritten(q), unwritten(k), unwritten(v)
    pairs, slopes_of, values, outs = [(q, k)], [(g, v)], [k], [dq]
    if h is not None:
        h = h.reshape(k.shape)
        pairs, slopes_of, values, outs = [*pairs, (v, v)], [*slopes_of, (h, k)], [k, v], [dq, dv]
    if n > 1:
        more = None if h is None else fp32_product(h.mT, v)
        later = running(fp32_product(q.mT, g), n, q.dtype, reverse=True, more=more)
        torch.bmm(g, states.mT, out=dq)
        torch.bmm(v, later.mT, out=dk)
        torch.bmm(k, later, out=dv)
        if h is not None:
            dv.baddbmm_(h, states)
    slopes = weighted_sums(slopes_of, values, outs, chunk, keep=True, fresh=n == 1)
    scores = scores if scores.numel() else scores_again(pairs, slopes, chunk)
    from_later(slopes[0], q, dk, chunk, fresh=n == 1)
    if h is not None:
        from_later(scores[1], h, dk, chunk, fresh=False)
        from_later(slopes[1], v, dv, chunk, fresh=False)
    from_later(scores[0], g, dv, chunk, fresh=n == 1 and h is None)
    return dq.view(shapes[0]), dk.view(shapes[1]), dv.view(shapes[2])


_sums = operator("causal_sums", unwritten_sums)(sums)
_sums_backward = operator("causal_sums_backward", shaped_as(2, 3, 4))(sums_backward)


def _gradients(needs: Any, kept: Any, constants: Any, g: Tensor | None, h: Tensor | None, *_: Any) -> Any:
    return _sums_backward(torch.zeros_like(kept[2]) if g is None else g, h, *kept, *constants)


differentiable(_sums, lambda inputs, outputs: ((*inputs[:3], *outputs[2:]), inputs[3:5]), _gradients, unused=True)


def segmented(segment: int, *tokens: Tensor) -> tuple[int, int, list[Tensor]]:
    """How many tokens a segment has (all for 0), how many the last one lacks, and the tokens (B, T, d) with those."""
    length = tokens[0].shape[1]
    segment = min(segment or length, length)
    missing = -length % segment
    return segment, missing, [F.pad(t, (0, 0, 0, missing)) if missing else t for t in tokens]


def keeps(tokens: Tensor, segment: int, both: bool) -> bool:
    """Whether the scores are kept for a backward pass."""
    return torch.is_grad_enabled() and (1 + both) * tokens.shape[0] * tokens.shape[1] * segment <= KEPT


def _found(both: bool, segment: int, chunk: int, *tokens: Tensor) -> list[Tensor]:
    length = tokens[0].shape[1]
    segment, missing, (q, k, v) = segmented(segment, *tokens)
    found = _sums(q, k, v, segment, chunk, keeps(q, segment, both), both)[: 1 + both]
    return [t[:, :length] if missing else t for t in found]


def causal_sum(q: Tensor, k: Tensor, v: Tensor, *, segment: int = 0, chunk: int = CHUNK) -> Tensor:
    """sum_{j<=i} (q_i.k_j) v_j for tokens (B, T, d) of one dtype; `segment` = 0: all tokens in one."""
    return _found(False, segment, chunk, q, k, v)[0]


def hamiltonian_sums(p: Tensor, u: Tensor, y: Tensor, *, segment: int = 0, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """sum_{j<=i} (p_i.u_j) y_j and sum_{j<=i} (y_i.y_j) u_j for tokens (B, T, d) of one dtype."""
    first, second = _found(True, segment, chunk, p, u, y)
    return first, second
