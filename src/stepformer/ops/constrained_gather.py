"""Triton kernels of constrained attention, forward: what every row gathers at the b that was found for it.

One more pass over the keys, with O = E[V], W = E[(S - m) V] and, for the next call, ln a. Words are those of
`constrained_solve` and `prior_solve`. Without a prior what is left of D - rho, second order in the last step or
rounding, is a step db that is taken without another pass:

    b + db,   O + db W,   m + db Var,   H(b + db) from the moments.

6 d + 12 FLOP per visible pair.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepformer.ops.constrained_solve import (
    EPS,
    LN2,
    LOG2E,
    PLAIN,
    TINY,
    central,
    load_rows,
    load_tile,
    query_block,
    store_tile,
)

LOWEST = tl.constexpr(-6e4)  # what fp16 holds


@triton.jit
def _gather_pass(  # type: ignore[no-untyped-def]
    q, k, v, below, above, rows, keep2, b2, m, c2, kt, vt, pt, pitch, length, full_tiles, last,
    D: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of e x^n, n = 0..3, e V and e x V over x = S - m, e = exp2(b2 x - c2).

    With a prior `below` e = exp2(l + b2 x - c2) = a, there is no sum of e x^3, and ln a goes to `above`, if given.
    """
    zero = tl.zeros_like(b2)
    z, s1, s2, s3 = zero, zero, zero, zero
    o = tl.zeros((rows.shape[0], D), tl.float32)
    w = tl.zeros((rows.shape[0], D), tl.float32)
    for DIAGONAL in tl.static_range(2):
        for n in tl.range(full_tiles if DIAGONAL else 0, last if DIAGONAL else full_tiles, BLOCK_N, num_stages=STAGES):
            keys = n + tl.arange(0, BLOCK_N)
            tile = load_rows(k, keys, kt, length, D, DIAGONAL)
            values = load_rows(v, keys, vt, length, D, DIAGONAL)
            if below is not None:
                prior = keep2 * load_tile(below, rows[:, None], keys[None, :], pt, length, DIAGONAL, CHECK)
            x = tl.dot(q, tl.trans(tile), input_precision=PRECISION) - m[:, None]
            level = b2[:, None] * x - c2[:, None]
            if below is not None:
                level = prior + level
            if above is not None:
                log_a = tl.maximum(level * LN2, LOWEST, propagate_nan=tl.PropagateNan.ALL)
                store_tile(above, log_a, rows[:, None], keys[None, :], pitch, length, DIAGONAL, CHECK)
            e = tl.exp2(level)
            if DIAGONAL:
                e = tl.where(keys[None, :] <= rows[:, None], e, 0.0)
            y = e * x
            z += tl.sum(e, 1)
            s1 += tl.sum(y, 1)
            s2 += tl.sum(y * x, 1)
            if below is None:
                s3 += tl.sum(y * x * x, 1)
            o = tl.dot(e.to(values.dtype), values, o, input_precision=PRECISION)
            w = tl.dot(y.to(values.dtype), values, w, input_precision=PRECISION)
    return z, s1, s2, s3, o, w


@triton.jit(do_not_specialize=PLAIN)
def gather_rows(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, radius_ptr, below, keep_ptr, state_ptr, out_ptr, tilt_ptr, above, rows_ptr,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, rb, rh, rt, pb, ph, pt, pitch, heads, length, total,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out, tilt (B, T, H, D) = O, W; rows (5, B, H, T): b, m, H, Var and 1 where the constraint binds.

    With a prior `below`, whose b needs no correction, c stands for H, rows[5] is lse(l), and above = ln a, if given.
    """
    batch, head, plane, _, rows, inside, full_tiles, last = query_block(heads, length, BLOCK_M, BLOCK_N)
    state = state_ptr + plane + rows
    b = tl.load(state, mask=inside, other=0.0)
    if below is None:
        top = tl.load(state + total, mask=inside, other=0.0)
        m = tl.load(state + 2 * total, mask=inside, other=0.0)
        end = tl.load(state + 3 * total, mask=inside, other=0.0)
        rho = tl.load(radius_ptr + batch * rb + head * rh + rows * rt, mask=inside, other=0.0)
        c2 = b * LOG2E * (top - m)
        keep2 = 0.0
    else:
        m = tl.load(state + total, mask=inside, other=0.0)
        c = tl.load(state + 2 * total, mask=inside, other=0.0)
        lse = tl.load(state + 3 * total, mask=inside, other=0.0)
        active = tl.load(state + 4 * total, mask=inside, other=0.0)
        c2 = c * LOG2E
        keep2 = tl.load(keep_ptr + head) * LOG2E
        below += batch * pb + head * ph
    if above is not None:
        above += plane * pitch
    q = load_rows(q_ptr + batch * qb + head * qh, rows, qt, length, D, True)
    k = k_ptr + batch * kb + head * kh
    v = v_ptr + batch * vb + head * vh
    z, s1, s2, s3, o, w = _gather_pass(
        q, k, v, below, above, rows, keep2, b * LOG2E, m, c2, kt, vt, pt, pitch, length, full_tiles, last,
        D, BLOCK_N, CHECK, PRECISION, STAGES,
    )  # fmt: skip
    z = tl.where(inside, z, 1.0)
    mean, second, third = central(z, s1, s2, s3)
    o = o / z[:, None]
    w = w / z[:, None] - mean[:, None] * o
    exact = m + mean
    if below is None:
        log_z = tl.log(z)  # of sum exp(b (S - top))
        lower = top - m - mean  # top - E[S]
        # the last step, in ln b, by Halley's method on D itself
        t = (rows + 1).to(tl.float32)
        error = tl.log(t) - (log_z + b * lower) - rho
        slope = tl.maximum(b * b * second, TINY)
        wrong = (end > 0) & (tl.abs(error) > (1 + tl.log(t) + slope) * (2 * EPS))
        newton = error / slope
        bend = newton * (1 + 0.5 * b * third / tl.maximum(second, TINY))
        step = newton / (1 - tl.minimum(tl.maximum(bend, -1.0), 0.5))
        step = tl.minimum(tl.maximum(step, -0.1), 0.1)
        db = tl.where(wrong, b * tl.exp(-step) - b, 0.0)
        # a row whose solution turns out to lie at the end or beyond it is held there, and its radius moves nothing
        beyond = wrong & (b + db >= end)
        db = tl.where(beyond, end - b, db)
        active = tl.where(beyond, 0.0, tl.where(end > 0, 1.0, 0.0))
        o += db[:, None] * w
        shift = db * (second + 0.5 * db * third)  # of m
        # ln sum exp((b + db) (S - top)) + (b + db) (top - m)
        c = log_z + db * (0.5 * db * second + db * db * third / 6 - lower) + (b + db) * (lower - shift)
        second = tl.maximum(second + db * third, 0.0)
        b = b + db
        exact += shift
    else:
        c += tl.log(z) - b * (exact - m)

    to = (batch * length + rows[:, None]) * heads * D + head * D + tl.arange(0, D)[None, :]
    tl.store(out_ptr + to, o.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(tilt_ptr + to, w.to(tilt_ptr.dtype.element_ty), mask=inside[:, None])
    rows_ptr += plane + rows
    tl.store(rows_ptr, b, mask=inside)
    tl.store(rows_ptr + total, exact, mask=inside)
    tl.store(rows_ptr + 2 * total, c, mask=inside)
    tl.store(rows_ptr + 3 * total, second, mask=inside)
    tl.store(rows_ptr + 4 * total, active, mask=inside)
    if below is not None:
        tl.store(rows_ptr + 5 * total, lse, mask=inside)


@triton.jit(do_not_specialize=PLAIN)
def write_log_weights(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, rows_ptr, above_ptr, qb, qh, qt, kb, kh, kt, pitch, heads, length, total,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """above = ln a = b (S - m) - c of a call without prior, one tile a program; rows as `gather_rows` left them."""
    start = tl.program_id(0) * BLOCK_M
    first = tl.program_id(1) * BLOCK_N
    if first < start + BLOCK_M:
        batch = (tl.program_id(2) // heads).to(tl.int64)
        head = (tl.program_id(2) % heads).to(tl.int64)
        rows = start + tl.arange(0, BLOCK_M)
        keys = first + tl.arange(0, BLOCK_N)
        inside = rows < length
        plane = tl.program_id(2).to(tl.int64) * length
        b = tl.load(rows_ptr + plane + rows, mask=inside, other=0.0)
        m = tl.load(rows_ptr + total + plane + rows, mask=inside, other=0.0)
        c = tl.load(rows_ptr + 2 * total + plane + rows, mask=inside, other=0.0)
        q = load_rows(q_ptr + batch * qb + head * qh, rows, qt, length, D, True)
        k = load_rows(k_ptr + batch * kb + head * kh, keys, kt, length, D, True)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) - m[:, None]
        log_a = tl.maximum(b[:, None] * x - c[:, None], LOWEST, propagate_nan=tl.PropagateNan.ALL)
        above = above_ptr + plane * pitch
        store_tile(above, log_a, rows[:, None], keys[None, :], pitch, length, True, CHECK)
