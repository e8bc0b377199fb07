"""Triton kernels of constrained attention, backward: like FlashAttention's, with one more term in every row.

With g_j = dO.v_j, x_j = S_j - m and, where the constraint binds, r = C / Var with C = Cov_a(g, S) = dO.W (0 elsewhere):

    dS_j = b a_j (g_j - dO.O - r x_j),   dQ_i = sum_j dS_ij k_j,   dK_j = sum_i dS_ij q_i,   dV_j = sum_i a_ij dO_i,
    drho = C / (b Var),                  a_j = exp(b x_j - H).

In a chain of priors the call above sends a gradient h_j of the loss for ln a_j. With l, q, c as in `prior_solve`, so
that ln a_j = l_j + b x_j - c, the gradient for the logits at a fixed b is

    u_j = a_j (g_j - dO.O - sum h) + h_j.

Where the constraint binds, b moves with S, l and rho; with C = sum_j u_j x_j, r = C / Var, R = r / b (0 elsewhere)

    dS_j = b (u_j - r a_j x_j),    drho = R,    dl_j = u_j - r a_j x_j + R (a_j - q_j),
    d ln a_below_j = keep dl_j,    dkeep = sum_ij dl_ij ln a_below_ij,

where q_j stands for the normalisation of the prior. The first kernel goes by blocks of queries: one pass for C and
sum h, if there is an h, another for dQ, dl. The second, by blocks of keys, makes dK and dV. 6 d and 8 d FLOP per
visible pair (8 d and 8 d with an h) and some 10 more, one of them exp2. Both passes by query read T^2 entries of h a
head, halved, and one of them ln a_below, as does the pass by key. No atomics.

A short row has few directions left: t = 2 none at all, its dS is zero. There g - dO.O - r x is a difference that nearly
vanishes, while b may be large, and O, W, rounded, are not good enough. Rows below EXACT therefore have a pass of their
own, 4 d FLOP, that sums z = sum a, m, Var, dO.O and C from the same a, g, x that make dS.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepformer.ops.constrained_solve import EPS, LN2, LOG2E, PLAIN, load_rows, load_tile, query_block, store_tile


@triton.jit
def _given_pass(  # type: ignore[no-untyped-def]
    q, k, given, rows, mean, kt, pitch, length, full_tiles, last,
    D: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of h and h x."""
    h0, h1 = tl.zeros_like(mean), tl.zeros_like(mean)
    for DIAGONAL in tl.static_range(2):
        for n in tl.range(full_tiles if DIAGONAL else 0, last if DIAGONAL else full_tiles, BLOCK_N, num_stages=STAGES):
            keys = n + tl.arange(0, BLOCK_N)
            tile = load_rows(k, keys, kt, length, D, DIAGONAL)
            h = load_tile(given, rows[:, None], keys[None, :], pitch, length, DIAGONAL, CHECK)
            x = tl.dot(q, tl.trans(tile), input_precision=PRECISION) - mean[:, None]
            h0 += tl.sum(h, 1)
            h1 += tl.sum(h * x, 1)
    return h0, h1


@triton.jit
def _sums_pass(  # type: ignore[no-untyped-def]
    q, k, v, grad, below, rows, keep2, b2, mean, c2, kt, vt, pt, length, last,
    D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of a, a x, a x^2, a g and a x g."""
    zero = tl.zeros_like(mean)
    z, s1, s2, g0, g1 = zero, zero, zero, zero, zero
    for n in range(0, last, BLOCK_N):
        keys = n + tl.arange(0, BLOCK_N)
        tile = load_rows(k, keys, kt, length, D, True)
        values = load_rows(v, keys, vt, length, D, True)
        x = tl.dot(q, tl.trans(tile), input_precision=PRECISION) - mean[:, None]
        g = tl.dot(grad, tl.trans(values), input_precision=PRECISION)
        level = b2[:, None] * x - c2[:, None]
        if below is not None:
            level += keep2 * load_tile(below, rows[:, None], keys[None, :], pt, length, True, True)
        a = tl.where(keys[None, :] <= rows[:, None], tl.exp2(level), 0.0)
        z += tl.sum(a, 1)
        g0 += tl.sum(a * g, 1)
        a = a * x
        s1 += tl.sum(a, 1)
        s2 += tl.sum(a * x, 1)
        g1 += tl.sum(a * g, 1)
    return z, s1, s2, g0, g1


@triton.jit
def _query_pass(  # type: ignore[no-untyped-def]
    q, k, v, grad, below, given, sent, rows, keep2, b2, mean, c2, lse2, gain, ratio, dradius,
    kt, vt, pt, pitch, length, full_tiles, last,
    D: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr, TABLE: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dq, without its factor b, and dkeep; dl goes to `sent`, if given, with a TABLE to the columns i - j."""
    dq = tl.zeros((rows.shape[0], D), tl.float32)
    dkeep = tl.zeros_like(mean)
    for DIAGONAL in tl.static_range(2):
        for n in tl.range(full_tiles if DIAGONAL else 0, last if DIAGONAL else full_tiles, BLOCK_N, num_stages=STAGES):
            keys = n + tl.arange(0, BLOCK_N)
            tile = load_rows(k, keys, kt, length, D, DIAGONAL)
            values = load_rows(v, keys, vt, length, D, DIAGONAL)
            x = tl.dot(q, tl.trans(tile), input_precision=PRECISION) - mean[:, None]
            g = tl.dot(grad, tl.trans(values), input_precision=PRECISION)
            level = b2[:, None] * x - c2[:, None]
            if below is not None:
                log_below = load_tile(below, rows[:, None], keys[None, :], pt, length, DIAGONAL, CHECK)
                level += keep2 * log_below
            a = tl.exp2(level)
            if DIAGONAL:
                a = tl.where(keys[None, :] <= rows[:, None], a, 0.0)
            ds = a * (g - gain[:, None] - ratio[:, None] * x)
            if given is not None:
                ds += load_tile(given, rows[:, None], keys[None, :], pitch, length, DIAGONAL, CHECK)
            dq = tl.dot(ds.to(tile.dtype), tile, dq, input_precision=PRECISION)
            if below is not None:
                p = tl.exp2(keep2 * log_below - lse2[:, None])
                if DIAGONAL:
                    p = tl.where(keys[None, :] <= rows[:, None], p, 0.0)
                dl = ds + dradius[:, None] * (a - p)
                dkeep += tl.sum(dl * log_below, 1)
                if TABLE:
                    at = sent + (rows[:, None] * pitch + rows[:, None] - keys[None, :])
                    seen = (keys[None, :] <= rows[:, None]) & (rows[:, None] < length)
                    tl.store(at, dl.to(sent.dtype.element_ty), mask=seen)
                elif sent is not None:
                    dl = dl * (keep2 * LN2)
                    store_tile(sent, dl, rows[:, None], keys[None, :], pitch, length, DIAGONAL, CHECK)
    return dq, dkeep


@triton.jit(do_not_specialize=PLAIN)
def query_gradient(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, tilt_ptr, grad_ptr, rows_ptr, below, keep_ptr, given,
    dq_ptr, dradius_ptr, dkeep_ptr, sent, lines_ptr, qb, qh, qt, kb, kh, kt, vb, vh, vt, gb, gh, gt, pb, ph, pt, pitch,
    heads, length, total,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr, CHECK: tl.constexpr,
    TABLE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq (B, T, H, D), dradius (B, H, T) and, for the other kernel, lines (5, B, H, T): b / ln 2, H / ln 2, m, dO.O, r.

    With a prior `below` also dkeep (B, H, T) and, if asked for, sent = d ln a_below (of a TABLE in the order of i - j);
    rows[5] is its lse, and c stands for H. given: h, if there is one. m stays apart from H + b m, which is large where
    two scores are close: its rounding would be an error of a.
    """
    batch, head, plane, start, rows, inside, full_tiles, last = query_block(heads, length, BLOCK_M, BLOCK_N)
    if given is not None:
        given += plane * pitch
    if sent is not None:
        sent += plane * pitch
    at = plane + rows
    b = tl.load(rows_ptr + at, mask=inside, other=0.0)
    mean = tl.load(rows_ptr + total + at, mask=inside, other=0.0)
    c2 = tl.load(rows_ptr + 2 * total + at, mask=inside, other=0.0) * LOG2E
    variance = tl.load(rows_ptr + 3 * total + at, mask=inside, other=0.0)
    active = tl.load(rows_ptr + 4 * total + at, mask=inside, other=0.0)
    zero = tl.zeros((BLOCK_M,), tl.float32)
    lse2 = zero
    keep2 = 0.0
    if below is not None:
        below += batch * pb + head * ph
        lse2 = tl.load(rows_ptr + 5 * total + at, mask=inside, other=0.0) * LOG2E
        keep2 = tl.load(keep_ptr + head) * LOG2E

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
    off = zero  # E[x]: how far `mean` is from m
    if start < EXACT:
        z, s1, s2, g0, g1 = _sums_pass(
            q, k, v, grad, below, rows, keep2, b2, mean, c2, kt, vt, pt, length, last, D, BLOCK_N, PRECISION
        )
        off = s1 / z
        gain = g0 / z
        along = g1 / z - gain * off
        variance = tl.maximum(s2 / z - off * off, 0.0)
        c2 += tl.log2(z)
    if given is not None:
        h0, h1 = _given_pass(
            q, k, given, rows, mean, kt, pitch, length, full_tiles, last, D, BLOCK_N, CHECK, PRECISION, STAGES
        )
        along += h1 - h0 * off
        gain += h0
    # one-hot to rounding: the quotients have no digits left, send zero
    safe = (active > 0) & (b * b * variance > EPS)
    ratio = tl.where(safe, along / tl.where(safe, variance, 1.0), 0.0)
    gain -= ratio * off  # rather than another rounding of `mean`
    dradius = tl.where(safe, ratio / tl.where(safe, b, 1.0), 0.0)
    tl.store(lines_ptr + at, b2, mask=inside)
    tl.store(lines_ptr + total + at, c2, mask=inside)
    tl.store(lines_ptr + 2 * total + at, mean, mask=inside)
    tl.store(lines_ptr + 3 * total + at, gain, mask=inside)
    tl.store(lines_ptr + 4 * total + at, ratio, mask=inside)
    tl.store(dradius_ptr + at, dradius, mask=inside)

    dq, dkeep = _query_pass(
        q, k, v, grad, below, given, sent, rows, keep2, b2, mean, c2, lse2, gain, ratio, dradius,
        kt, vt, pt, pitch, length, full_tiles, last, D, BLOCK_N, CHECK, TABLE, PRECISION, STAGES,
    )  # fmt: skip
    tl.store(dq_ptr + to, (dq * b[:, None]).to(dq_ptr.dtype.element_ty), mask=inside[:, None])
    if below is not None:
        tl.store(dkeep_ptr + at, dkeep, mask=inside)


@triton.jit
def _line(pointer, rows, length, other, CHECK: tl.constexpr):  # type: ignore[no-untyped-def]
    if CHECK:
        return tl.load(pointer + rows, mask=rows < length, other=other)
    return tl.load(pointer + rows)


@triton.jit(do_not_specialize=PLAIN)
def key_gradient(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, grad_ptr, lines_ptr, below, keep_ptr, given, dk_ptr, dv_ptr,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, gb, gh, gt, pb, ph, pt, pitch, heads, length, total,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dk, dv (B, T, H, D). CHECK: the length is no multiple of the blocks. The first keys have most to do: first.

    Tiles are (keys, queries) here, so that dK and dV are products without a transposition of the weights.
    """
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    start = tl.program_id(0) * BLOCK_N
    keys = start + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr + batch * kb + head * kh, keys, kt, length, D, True)
    v = load_rows(v_ptr + batch * vb + head * vh, keys, vt, length, D, True)
    q = q_ptr + batch * qb + head * qh
    grads = grad_ptr + batch * gb + head * gh
    plane = tl.program_id(1).to(tl.int64) * length
    lines_ptr += plane
    keep2 = 0.0
    if below is not None:
        below += batch * pb + head * ph
        keep2 = tl.load(keep_ptr + head) * LOG2E
    if given is not None:
        given += plane * pitch
    first = start // BLOCK_M * BLOCK_M
    crossed = tl.minimum(tl.cdiv(start + BLOCK_N, BLOCK_M) * BLOCK_M, length)  # from there on rows see all keys here
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    for BEYOND in tl.static_range(2):
        for m in tl.range(crossed if BEYOND else first, length if BEYOND else crossed, BLOCK_M, num_stages=STAGES):
            rows = m + tl.arange(0, BLOCK_M)
            queries = load_rows(q, rows, qt, length, D, CHECK)
            grad = load_rows(grads, rows, gt, length, D, CHECK)
            b2 = _line(lines_ptr, rows, length, 0.0, CHECK)
            c2 = _line(lines_ptr + total, rows, length, 1e30, CHECK)  # no weight
            mean = _line(lines_ptr + 2 * total, rows, length, 0.0, CHECK)
            gain = _line(lines_ptr + 3 * total, rows, length, 0.0, CHECK)
            ratio = _line(lines_ptr + 4 * total, rows, length, 0.0, CHECK)
            x = tl.dot(k, tl.trans(queries), input_precision=PRECISION) - mean[None, :]
            g = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
            level = b2[None, :] * x - c2[None, :]
            if below is not None:
                level += keep2 * load_tile(below, rows[None, :], keys[:, None], pt, length, not BEYOND, CHECK)
            a = tl.exp2(level)
            if not BEYOND:
                a = tl.where(keys[:, None] <= rows[None, :], a, 0.0)
            dv = tl.dot(a.to(grad.dtype), grad, dv, input_precision=PRECISION)
            ds = a * (g - gain[None, :] - ratio[None, :] * x)
            if given is not None:
                ds += load_tile(given, rows[None, :], keys[:, None], pitch, length, not BEYOND, CHECK)
            ds = ds * (b2 * LN2)[None, :]
            dk = tl.dot(ds.to(queries.dtype), queries, dk, input_precision=PRECISION)
    to = (batch * length + keys[:, None]) * heads * D + head * D + tl.arange(0, D)[None, :]
    tl.store(dk_ptr + to, dk.to(dk_ptr.dtype.element_ty), mask=keys[:, None] < length)
    tl.store(dv_ptr + to, dv.to(dv_ptr.dtype.element_ty), mask=keys[:, None] < length)
