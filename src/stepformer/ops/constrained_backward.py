"""Triton kernels of constrained attention, backward: like FlashAttention's, with one more term in every row.

With g_j = dO.v_j, x_j = S_j - m and, where the constraint binds, r = c / Var with c = Cov_a(g, S) = dO.W (0 elsewhere):

    dS_j = b a_j (g_j - dO.O - r x_j),   dQ_i = sum_j dS_ij k_j,   dK_j = sum_i dS_ij q_i,   dV_j = sum_i a_ij dO_i,
    drho = c / (b Var),                  a_j = exp(b x_j - H).

The first kernel goes by blocks of queries: it computes dO.O, r and drho of its rows and dQ. The second, by blocks of
keys, reads them for dK and dV. 6 d and 8 d FLOP per visible pair and some 10 more, one of them exp2. No atomics.

A short row has few directions left: t = 2 none at all, its dS is zero. There g - dO.O - r x is a difference that nearly
vanishes, while b may be large, and O, W, rounded, are not good enough. Rows below EXACT therefore have a pass of their
own, 4 d FLOP, that sums z = sum a, m, Var, dO.O and c from the same a, g, x that make dS.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepformer.ops.constrained_forward import EPS, LOG2E, PLAIN, load_rows

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _sums_pass(  # type: ignore[no-untyped-def]
    q, k, v, grad, rows, b2, mean, entropy, z, s1, s2, g0, g1, kt, vt, length, stop,
    D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of a, a x, a x^2, a g and a x g."""
    for n in range(0, stop, BLOCK_N):
        keys = n + tl.arange(0, BLOCK_N)
        tile = load_rows(k, keys, kt, length, D, True)
        values = load_rows(v, keys, vt, length, D, True)
        x = tl.dot(q, tl.trans(tile), input_precision=PRECISION) - mean[:, None]
        g = tl.dot(grad, tl.trans(values), input_precision=PRECISION)
        a = tl.exp2(b2[:, None] * x - entropy[:, None])
        a = tl.where(keys[None, :] <= rows[:, None], a, 0.0)
        z += tl.sum(a, 1)
        g0 += tl.sum(a * g, 1)
        a = a * x
        s1 += tl.sum(a, 1)
        s2 += tl.sum(a * x, 1)
        g1 += tl.sum(a * g, 1)
    return z, s1, s2, g0, g1


@triton.jit
def _query_pass(  # type: ignore[no-untyped-def]
    q, k, v, grad, rows, b2, mean, entropy, gain, ratio, dq, kt, vt, length, begin, stop,
    D: tl.constexpr, BLOCK_N: tl.constexpr, DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for n in range(begin, stop, BLOCK_N):
        keys = n + tl.arange(0, BLOCK_N)
        tile = load_rows(k, keys, kt, length, D, DIAGONAL)
        values = load_rows(v, keys, vt, length, D, DIAGONAL)
        x = tl.dot(q, tl.trans(tile), input_precision=PRECISION) - mean[:, None]
        g = tl.dot(grad, tl.trans(values), input_precision=PRECISION)
        a = tl.exp2(b2[:, None] * x - entropy[:, None])
        if DIAGONAL:
            a = tl.where(keys[None, :] <= rows[:, None], a, 0.0)
        ds = a * (g - gain[:, None] - ratio[:, None] * x)
        dq = tl.dot(ds.to(tile.dtype), tile, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=PLAIN)
def query_gradient(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, tilt_ptr, grad_ptr, rows_ptr, dq_ptr, dradius_ptr, lines_ptr,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, gb, gh, gt, heads, length, total,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq (B, T, H, D), dradius (B, H, T) and, for the other kernel, lines (5, B, H, T): b / ln 2, H / ln 2, m, dO.O, r.

    m stays apart from H + b m, which is large where two scores are close: its rounding would be an error of a.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    start = block * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)
    inside = rows < length
    last = tl.minimum(start + BLOCK_M, length)
    full_tiles = start // BLOCK_N * BLOCK_N
    at = tl.program_id(1).to(tl.int64) * length + rows
    b = tl.load(rows_ptr + at, mask=inside, other=0.0)
    mean = tl.load(rows_ptr + total + at, mask=inside, other=0.0)
    entropy = tl.load(rows_ptr + 2 * total + at, mask=inside, other=0.0) * LOG2E
    variance = tl.load(rows_ptr + 3 * total + at, mask=inside, other=0.0)
    active = tl.load(rows_ptr + 4 * total + at, mask=inside, other=0.0)

    grad = load_rows(grad_ptr + batch * gb + head * gh, rows, gt, length, D, True)
    to = (batch * length + rows[:, None]) * heads * D + head * D + tl.arange(0, D)[None, :]
    out = tl.load(out_ptr + to, mask=inside[:, None], other=0.0).to(tl.float32)
    tilt = tl.load(tilt_ptr + to, mask=inside[:, None], other=0.0).to(tl.float32)
    gain = tl.sum(grad.to(tl.float32) * out, 1)
    along = tl.sum(grad.to(tl.float32) * tilt, 1)
    b2 = b * LOG2E
    q = load_rows(q_ptr + batch * qb + head * qh, rows, qt, length, D, True)
    k = k_ptr + batch * kb + head * kh
    v = v_ptr + batch * vb + head * vh
    off = tl.zeros((BLOCK_M,), tl.float32)  # E[x]: how far `mean` is from m
    if start < EXACT:
        zero = tl.zeros((BLOCK_M,), tl.float32)
        z, s1, s2, g0, g1 = _sums_pass(
            q, k, v, grad, rows, b2, mean, entropy, zero, zero, zero, zero, zero, kt, vt, length, last,
            D, BLOCK_N, PRECISION,
        )  # fmt: skip
        off = s1 / z
        gain = g0 / z
        along = g1 / z - gain * off
        variance = tl.maximum(s2 / z - off * off, 0.0)
        entropy += tl.log2(z)
    # one-hot to rounding: the quotients have no digits left, send zero
    safe = (active > 0) & (b * b * variance > EPS)
    ratio = tl.where(safe, along / tl.where(safe, variance, 1.0), 0.0)
    gain -= ratio * off  # rather than another rounding of `mean`
    dradius = tl.where(safe, ratio / tl.where(safe, b, 1.0), 0.0)
    tl.store(lines_ptr + at, b2, mask=inside)
    tl.store(lines_ptr + total + at, entropy, mask=inside)
    tl.store(lines_ptr + 2 * total + at, mean, mask=inside)
    tl.store(lines_ptr + 3 * total + at, gain, mask=inside)
    tl.store(lines_ptr + 4 * total + at, ratio, mask=inside)
    tl.store(dradius_ptr + at, dradius, mask=inside)

    dq = tl.zeros((BLOCK_M, D), tl.float32)
    dq = _query_pass(
        q, k, v, grad, rows, b2, mean, entropy, gain, ratio, dq, kt, vt, length, 0, full_tiles,
        D, BLOCK_N, False, PRECISION,
    )  # fmt: skip
    dq = _query_pass(
        q, k, v, grad, rows, b2, mean, entropy, gain, ratio, dq, kt, vt, length, full_tiles, last,
        D, BLOCK_N, True, PRECISION,
    )  # fmt: skip
    tl.store(dq_ptr + to, (dq * b[:, None]).to(dq_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _key_pass(  # type: ignore[no-untyped-def]
    q, k, v, grads, lines_ptr, keys, dk, dv, qt, gt, length, total, begin, stop,
    D: tl.constexpr, BLOCK_M: tl.constexpr, DIAGONAL: tl.constexpr, CHECK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles are (keys, queries) here, so that dK and dV are products without a transposition of the weights."""
    for m in range(begin, stop, BLOCK_M):
        rows = m + tl.arange(0, BLOCK_M)
        queries = load_rows(q, rows, qt, length, D, CHECK)
        grad = load_rows(grads, rows, gt, length, D, CHECK)
        if CHECK:
            inside = rows < length
            b2 = tl.load(lines_ptr + rows, mask=inside, other=0.0)
            entropy = tl.load(lines_ptr + total + rows, mask=inside, other=1e30)  # no weight
            mean = tl.load(lines_ptr + 2 * total + rows, mask=inside, other=0.0)
            gain = tl.load(lines_ptr + 3 * total + rows, mask=inside, other=0.0)
            ratio = tl.load(lines_ptr + 4 * total + rows, mask=inside, other=0.0)
        else:
            b2 = tl.load(lines_ptr + rows)
            entropy = tl.load(lines_ptr + total + rows)
            mean = tl.load(lines_ptr + 2 * total + rows)
            gain = tl.load(lines_ptr + 3 * total + rows)
            ratio = tl.load(lines_ptr + 4 * total + rows)
        x = tl.dot(k, tl.trans(queries), input_precision=PRECISION) - mean[None, :]
        g = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        a = tl.exp2(b2[None, :] * x - entropy[None, :])
        if DIAGONAL:
            a = tl.where(keys[:, None] <= rows[None, :], a, 0.0)
        dv = tl.dot(a.to(grad.dtype), grad, dv, input_precision=PRECISION)
        ds = a * (g - gain[None, :] - ratio[None, :] * x) * (b2 * LN2)[None, :]
        dk = tl.dot(ds.to(queries.dtype), queries, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=PLAIN)
def key_gradient(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, grad_ptr, lines_ptr, dk_ptr, dv_ptr, qb, qh, qt, kb, kh, kt, vb, vh, vt, gb, gh, gt,
    heads, length, total,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv (B, T, H, D). CHECK: the length is no multiple of BLOCK_M. The first keys have most to do and go first."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    start = tl.program_id(0) * BLOCK_N
    keys = start + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr + batch * kb + head * kh, keys, kt, length, D, True)
    v = load_rows(v_ptr + batch * vb + head * vh, keys, vt, length, D, True)
    q = q_ptr + batch * qb + head * qh
    grads = grad_ptr + batch * gb + head * gh
    lines_ptr += tl.program_id(1).to(tl.int64) * length
    first = start // BLOCK_M * BLOCK_M
    crossed = tl.minimum(tl.cdiv(start + BLOCK_N, BLOCK_M) * BLOCK_M, length)  # from there on rows see all keys here
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    dk, dv = _key_pass(
        q, k, v, grads, lines_ptr, keys, dk, dv, qt, gt, length, total, first, crossed,
        D, BLOCK_M, True, CHECK, PRECISION,
    )  # fmt: skip
    dk, dv = _key_pass(
        q, k, v, grads, lines_ptr, keys, dk, dv, qt, gt, length, total, crossed, length,
        D, BLOCK_M, False, CHECK, PRECISION,
    )  # fmt: skip
    to = (batch * length + keys[:, None]) * heads * D + head * D + tl.arange(0, D)[None, :]
    tl.store(dk_ptr + to, dk.to(dk_ptr.dtype.element_ty), mask=keys[:, None] < length)
    tl.store(dv_ptr + to, dv.to(dv_ptr.dtype.element_ty), mask=keys[:, None] < length)
