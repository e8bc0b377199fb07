"""Softmax attention inside documents, forward and backward, by Triton kernels whose work shrinks with the documents.

For every head, with c = 1 / sqrt(d), o_i where the document of i begins and e_j where that of j is over,

    S_ij = c q_i.k_j,   a_ij = exp(S_ij - L_i),   L_i = ln sum_j exp(S_ij),   O_i = sum_j a_ij v_j,   o_i <= j <= i;
    D_i = dO_i.O_i,   dS_ij = a_ij (dO_i.v_j - D_i),
    dQ_i = c sum_j dS_ij k_j,   dK_j = c sum_i dS_ij q_i,   dV_j = sum_i a_ij dO_i,   j <= i < e_j.

o and e never decrease. So a block of queries needs keys from the origin of its first row on, a block of keys queries up
to the end of its last one, and other tiles are not looked at. Those that lie inside one document and below the diagonal
need no mask and have a loop of their own, the first; a second one goes through those before and after them.

Sums, L and D are fp32; a and dS are rounded to the dtype of the inputs before they multiply. 4 d FLOP per pair forward,
6 d backward by query (dQ, and D for the other kernel) and 8 d by key (dK, dV). No atomics. The twin is
`scaled_dot_product_attention` with the mask.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepformer.ops.constrained import Tile, by_token
from stepformer.ops.constrained_solve import LOG2E, load_rows, query_block
from stepformer.ops.operators import differentiable, operator

LOWEST = tl.constexpr(-1e30)  # below all scores, but finite: its difference to -inf, a hidden key's, is not NaN
PLAIN = ("heads", "length")  # arguments of which no variants are compiled


Tiles = tuple[Tile, Tile, Tile]  # of the kernels forward, backward by query and backward by key
INTERPRETED: Tiles = (Tile(32, 32), Tile(32, 32), Tile(32, 32))
TILES: dict[int, Tiles] = {  # by the width of a head
    16: (Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 128, 4, 3)),
    32: (Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 128, 8, 3)),
    64: (Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(32, 64, 4, 3)),  # the best of eight each on an H200
    128: (Tile(128, 64, 8, 3), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
}


def tiles(like: Tensor) -> Tiles:
    return INTERPRETED if like.device.type == "cpu" else TILES[like.shape[-1]]


@triton.jit
def _seen(origins, start, rows, inside, diagonal, last, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where queries begin to see keys, where the first of them does and where tiles that all see whole begin."""
    own = tl.load(origins + rows, mask=inside, other=0).to(tl.int32)
    first = tl.load(origins + start).to(tl.int32) // BLOCK_N * BLOCK_N
    border = tl.cdiv(tl.load(origins + last - 1).to(tl.int32), BLOCK_N) * BLOCK_N
    return own[:, None], first, tl.maximum(first, tl.minimum(border, diagonal))


@triton.jit
def _tile(turn, first, whole, beyond, BLOCK: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a tile begins: of the whole ones, [whole, beyond), or of those before and after them."""
    if MASKED:
        begin = first + turn * BLOCK
        begin += tl.where(begin < whole, 0, beyond - whole)
    else:
        begin = whole + turn * BLOCK
    return begin


@triton.jit
def _count(first, whole, beyond, last, BLOCK: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many tiles a loop has."""
    if MASKED:
        return (whole - first) // BLOCK + tl.cdiv(tl.maximum(last - beyond, 0), BLOCK)
    return (beyond - whole) // BLOCK


@triton.jit
def _line(pointer, rows, length, CHECK: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(pointer + rows, mask=rows < length, other=0.0) if CHECK else tl.load(pointer + rows)


@triton.jit
def _to(batch, head, rows, heads, length, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Places of rows of a head in (B, T, H, D)."""
    return (batch * length + rows[:, None]) * heads * D + head * D + tl.arange(0, D)[None, :]


@triton.jit(do_not_specialize=PLAIN)
def attend_rows(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, origins, out_ptr, lse_ptr, qb, qh, qt, kb, kh, kt, vb, vh, vt, heads, length, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """out (B, T, H, D) = O; lse (B, H, T) = L / ln 2. CHECK: the length is no multiple of the blocks."""
    batch, head, plane, start, rows, inside, diagonal, last = query_block(heads, length, BLOCK_M, BLOCK_N)
    own, first, whole = _seen(origins + batch * length, start, rows, inside, diagonal, last, BLOCK_N)
    scale2 = scale * LOG2E
    q = load_rows(q_ptr + batch * qb + head * qh, rows, qt, length, D, CHECK)
    k = k_ptr + batch * kb + head * kh
    v = v_ptr + batch * vb + head * vh
    top = tl.full((BLOCK_M,), LOWEST, tl.float32)
    z = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, D), tl.float32)
    for MASKED in tl.static_range(2):
        for turn in tl.range(0, _count(first, whole, diagonal, last, BLOCK_N, MASKED)):
            keys = _tile(turn, first, whole, diagonal, BLOCK_N, MASKED) + tl.arange(0, BLOCK_N)
            tile = load_rows(k, keys, kt, length, D, CHECK and MASKED)
            values = load_rows(v, keys, vt, length, D, CHECK and MASKED)
            s = tl.dot(q, tl.trans(tile))
            if MASKED:
                s = tl.where((keys[None, :] <= rows[:, None]) & (keys[None, :] >= own), s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1) * scale2)
            e = tl.exp2(s * scale2 - higher[:, None])
            fade = tl.exp2(top - higher)
            z = z * fade + tl.sum(e, 1)
            out = tl.dot(e.to(values.dtype), values, out * fade[:, None])
            top = higher
    to = _to(batch, head, rows, heads, length, D)
    tl.store(out_ptr + to, (out / z[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(lse_ptr + plane + rows, top + tl.log2(z), mask=inside)


@triton.jit(do_not_specialize=PLAIN)
def query_gradient(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, grad_ptr, lse_ptr, origins, dq_ptr, delta_ptr,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, gb, gh, gt, heads, length, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """dq (B, T, H, D) and, for the other kernel, delta (B, H, T) = D."""
    batch, head, plane, start, rows, inside, diagonal, last = query_block(heads, length, BLOCK_M, BLOCK_N)
    own, first, whole = _seen(origins + batch * length, start, rows, inside, diagonal, last, BLOCK_N)
    scale2 = scale * LOG2E
    q = load_rows(q_ptr + batch * qb + head * qh, rows, qt, length, D, CHECK)
    grad = load_rows(grad_ptr + batch * gb + head * gh, rows, gt, length, D, CHECK)
    to = _to(batch, head, rows, heads, length, D)
    out = tl.load(out_ptr + to, mask=inside[:, None], other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + plane + rows, delta, mask=inside)
    lse = tl.load(lse_ptr + plane + rows, mask=inside, other=0.0)
    k = k_ptr + batch * kb + head * kh
    v = v_ptr + batch * vb + head * vh
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    for MASKED in tl.static_range(2):
        for turn in tl.range(0, _count(first, whole, diagonal, last, BLOCK_N, MASKED)):
            keys = _tile(turn, first, whole, diagonal, BLOCK_N, MASKED) + tl.arange(0, BLOCK_N)
            tile = load_rows(k, keys, kt, length, D, CHECK and MASKED)
            values = load_rows(v, keys, vt, length, D, CHECK and MASKED)
            a = tl.exp2(tl.dot(q, tl.trans(tile)) * scale2 - lse[:, None])
            if MASKED:
                a = tl.where((keys[None, :] <= rows[:, None]) & (keys[None, :] >= own), a, 0.0)
            ds = a * (tl.dot(grad, tl.trans(values)) - delta[:, None])
            dq = tl.dot(ds.to(tile.dtype), tile, dq)
    tl.store(dq_ptr + to, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=PLAIN)
def key_gradient(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, ends, dk_ptr, dv_ptr,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, gb, gh, gt, heads, length, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """dk, dv (B, T, H, D). Tiles are (keys, queries), so that both are products without a transposition of weights."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    start = tl.program_id(0) * BLOCK_N
    keys = start + tl.arange(0, BLOCK_N)
    inside = keys < length
    ends += batch * length
    own = tl.load(ends + keys, mask=inside, other=0)[:, None]
    last = tl.load(ends + tl.minimum(start + BLOCK_N, length) - 1)
    first = start // BLOCK_M * BLOCK_M
    whole = tl.cdiv(start + BLOCK_N, BLOCK_M) * BLOCK_M  # from there on queries see all keys here, up to the end
    beyond = tl.maximum(whole, tl.load(ends + start) // BLOCK_M * BLOCK_M)
    scale2 = scale * LOG2E
    k = load_rows(k_ptr + batch * kb + head * kh, keys, kt, length, D, CHECK)
    v = load_rows(v_ptr + batch * vb + head * vh, keys, vt, length, D, CHECK)
    q = q_ptr + batch * qb + head * qh
    grads = grad_ptr + batch * gb + head * gh
    lse_ptr += tl.program_id(1).to(tl.int64) * length
    delta_ptr += tl.program_id(1).to(tl.int64) * length
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    for MASKED in tl.static_range(2):
        for turn in tl.range(0, _count(first, whole, beyond, last, BLOCK_M, MASKED)):
            rows = _tile(turn, first, whole, beyond, BLOCK_M, MASKED) + tl.arange(0, BLOCK_M)
            queries = load_rows(q, rows, qt, length, D, CHECK and MASKED)
            grad = load_rows(grads, rows, gt, length, D, CHECK and MASKED)
            lse = _line(lse_ptr, rows, length, CHECK and MASKED)
            delta = _line(delta_ptr, rows, length, CHECK and MASKED)
            a = tl.exp2(tl.dot(k, tl.trans(queries)) * scale2 - lse[None, :])
            if MASKED:
                a = tl.where((keys[:, None] <= rows[None, :]) & (rows[None, :] < own), a, 0.0)
            dv = tl.dot(a.to(grad.dtype), grad, dv)
            ds = a * (tl.dot(v, tl.trans(grad)) - delta[None, :])
            dk = tl.dot(ds.to(queries.dtype), queries, dk)
    to = _to(batch, head, keys, heads, length, D)
    tl.store(dk_ptr + to, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(dv_ptr + to, dv.to(dv_ptr.dtype.element_ty), mask=inside[:, None])


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels know these heads (B, H, T, d): as many keys as queries, bf16 (interpreted: fp32)."""
    same = q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype
    return same and q.shape[-1] in TILES and q.dtype == (torch.bfloat16 if q.is_cuda else torch.float32)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _heads(*heads: Tensor) -> tuple[Tensor, ...]:
    """Unwritten memory (B, T, H, d) seen as (B, H, T, d): who joins the heads of a token need not move them."""
    return tuple(t.transpose(1, 2) for t in by_token(*heads))


@operator("document_attention", fake=lambda q, *_: (*_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)))
def _attention(q: Tensor, k: Tensor, v: Tensor, origins: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, (batch, heads, length, d), tile = _rows(q), _rows(k), _rows(v), q.shape, tiles(q)[0]
    (out,), lse = _heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    if q.numel():
        attend_rows[(triton.cdiv(length, tile.queries), batch * heads)](
            q, k, v, origins.contiguous(), out, lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], heads, length,
            1 / math.sqrt(d), D=d, CHECK=not tile.divides(length), **tile.options(),
        )  # fmt: skip
    return out, lse


@operator("document_attention_backward", fake=lambda grad, q, k, v, *_: _heads(q, k, v))
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, origins: Tensor, ends: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, (batch, heads, length, d) = _rows(grad), _rows(q), _rows(k), _rows(v), q.shape
    (dq, dk, dv), delta, (_, query, key) = _heads(q, k, v), torch.empty_like(lse), tiles(q)
    given = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3], heads, length, 1 / math.sqrt(d))
    if q.numel():
        query_gradient[(triton.cdiv(length, query.queries), batch * heads)](
            q, k, v, out, grad, lse, origins.contiguous(), dq, delta, *given,
            D=d, CHECK=not query.divides(length), **query.options(),
        )  # fmt: skip
        key_gradient[(triton.cdiv(length, key.keys), batch * heads)](
            q, k, v, grad, lse, delta, ends.contiguous(), dk, dv, *given,
            D=d, CHECK=not key.divides(length), **key.options(),
        )  # fmt: skip
    return dq, dk, dv


differentiable(
    _attention,
    keep=lambda inputs, outputs: ((*inputs, *outputs), ()),
    gradients=lambda needs, kept, _, grad, lse: () if grad is None else _backward(grad, *kept),
    unused=True,
)


def document_attention(q: Tensor, k: Tensor, v: Tensor, origins: Tensor, ends: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v over the keys from each query's origin to itself, (B, H, T, d).

    origins, ends: (B, T), where each token's document begins, and the position after its last token.
    """
    out: Tensor = torch.ops.stepformer.document_attention(q, k, v, origins, ends)[0]
    return out
