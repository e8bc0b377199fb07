"""Triton kernel of constrained attention that finds the inverse temperature of every row, and what others share.

Scores are S_j = q.k_j, without the 1 / sqrt(head_dim), which belongs to b = beta / sqrt(head_dim). A row sees the keys
j <= i, t of them; E and Var are those of its weights a ~ exp(b S). Sought is b with D(b) = ln t - H(a) = rho, where

    H = ln sum_j exp(b (S_j - m)),   m = E[S],      dD / d ln b = b^2 Var(S).

`solve_rows`: (1) the same problem on at most SUBSET of the keys, held in registers: every n-th key stands for n, the
first for itself, since it may be a sink; (2) one pass over all keys at that b, which also finds the largest and
smallest score, the variance and the ties at the top; (3) more passes while a row of the block is not there yet.
Passes on average 3 to 4 of a block of 64 rows with Gaussian scores at h = 0.5 ln t, 2 at rho = 0.1 ln t.
Each costs 2 d FLOP for its products and some 12 more, one of them exp2, per pair.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
EPS = tl.constexpr(1.1920929e-07)
LN2 = tl.constexpr(0.6931471805599453)
TINY = tl.constexpr(1e-37)
HIDDEN = tl.constexpr(-1e18)  # a score whose exponential is 0; finite, so that 0 times it is 0

# arguments of which no variants are compiled
PLAIN = ("heads", "length", "total", "limit", "rb", "rh", "rt")


@triton.jit
def load_rows(pointer, rows, stride, length, D: tl.constexpr, CHECK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows (N, D) of a matrix; zeros from `length` on, if CHECK."""
    at = pointer + rows[:, None] * stride + tl.arange(0, D)[None, :]
    if CHECK:
        return tl.load(at, mask=rows[:, None] < length, other=0.0)
    return tl.load(at)


@triton.jit
def query_block(heads, length, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a program stands that goes by blocks of queries, the long rows first.

    Its batch, its head and where that begins in (B, H, T); its first query, all of them, and which of them exist; how
    many keys, in whole tiles, all of them see, and where the keys end that any of them sees.
    """
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64) * length
    last = tl.minimum(start + BLOCK_M, length)
    return batch, head, plane, start, rows, rows < length, start // BLOCK_N * BLOCK_N, last


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]
    pointer, rows, keys, pitch, length, DIAGONAL: tl.constexpr, CHECK: tl.constexpr
):
    """Entries of a (T, T) matrix as fp32, rows and keys given as (N, 1) and (1, N); 0 where a row does not see a key.

    DIAGONAL: some keys may be hidden from some rows. CHECK: some may lie beyond the length. Without it, loads are wide.
    """
    at = pointer + rows * pitch + keys
    if CHECK and DIAGONAL:
        return tl.load(at, mask=(keys <= rows) & (rows < length), other=0.0).to(tl.float32)
    if CHECK:
        return tl.load(at, mask=rows < length, other=0.0).to(tl.float32)
    value = tl.load(at).to(tl.float32)
    if DIAGONAL:
        value = tl.where(keys <= rows, value, 0.0)  # above the diagonal is anything
    return value


@triton.jit
def store_tile(  # type: ignore[no-untyped-def]
    pointer, value, rows, keys, pitch, length, DIAGONAL: tl.constexpr, CHECK: tl.constexpr
):
    """The reverse; without CHECK entries above the diagonal are overwritten, too."""
    at = pointer + rows * pitch + keys
    value = value.to(pointer.dtype.element_ty)
    if CHECK and DIAGONAL:
        tl.store(at, value, mask=(keys <= rows) & (rows < length))
    elif CHECK:
        tl.store(at, value, mask=rows < length)
    else:
        tl.store(at, value)


@triton.jit
def central(z, s1, s2, s3):  # type: ignore[no-untyped-def]
    """(mean, variance, third central moment) from sums of weights times powers."""
    mean, square, cube = s1 / z, s2 / z, s3 / z
    return mean, tl.maximum(square - mean * mean, 0.0), cube - 3 * mean * square + 2 * mean * mean * mean


@triton.jit
def halley(b, low, high, end, missing, second, third, full, rho):  # type: ignore[no-untyped-def]
    """Halley's method in ln b on logit(D / D(inf)), inside a bracket, at most to `end`; missing = D(inf) - D(b).

    Returns (new b, low, high, step, error = D - rho, slope = dD / d ln b, whether the step was taken as it is).
    `high` is infinite until a b with D > rho was seen, so that `end` itself can be tried.
    """
    goal = full - rho
    error = goal - missing
    slope = tl.maximum(b * b * second, TINY)
    low = tl.where(error < 0, tl.maximum(b, low), low)
    high = tl.where(error < 0, high, tl.minimum(b, high))
    gained = tl.maximum(full - missing, full * EPS)
    left = tl.maximum(missing, 1e-7)
    newton = (tl.log(gained / left) - tl.log(rho / goal)) * (gained / full) * (left / slope)
    curvature = 1 + 0.5 * b * third / tl.maximum(second, TINY) + 0.5 * slope * (1 / left - 1 / gained)
    step = newton / (1 - tl.minimum(tl.maximum(newton * curvature, -1.0), 0.5))
    new = tl.minimum(b * tl.exp(-tl.minimum(tl.maximum(step, -3.0), 3.0)), end)
    # what is missing is known to 1e-7: below 1e-6, far from nearly every goal, halve the bracket
    taken = (new > low) & (new < high) & (missing > 1e-6)
    new = tl.where(taken, new, tl.sqrt(low * tl.minimum(high, end)))
    return new, low, high, step, error, slope, taken


@triton.jit
def _start(  # type: ignore[no-untyped-def]
    q, k, rows, rho, limit, stride, length, last,
    D: tl.constexpr, SUBSET: tl.constexpr, STEPS: tl.constexpr, BETA_MAX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(b that solves the row on a subset of its keys, the largest score among them)."""
    every = tl.cdiv(last, SUBSET)
    column = tl.arange(0, SUBSET)
    keys = column * every
    s = tl.dot(q, tl.trans(load_rows(k, keys, stride, length, D, True)), input_precision=PRECISION)
    seen = keys[None, :] <= rows[:, None]
    top = tl.max(tl.where(seen, s, HIDDEN), 1)
    first = tl.sum(tl.where(column[None, :] == 0, s, 0.0), 1) - top
    seen = seen & (column[None, :] > 0)
    x = tl.where(seen, s - top[:, None], HIDDEN)  # at most 0, as `first` is
    others = tl.maximum(rows // every, 1).to(tl.float32)
    t = (rows + 1).to(tl.float32)
    weight = rows.to(tl.float32) / others
    mean = (first + weight * tl.sum(tl.where(seen, x, 0.0), 1)) / t
    square = (first * first + weight * tl.sum(tl.where(seen, x * x, 0.0), 1)) / t
    spread = -tl.minimum(first, tl.min(tl.where(seen, x, 0.0), 1))
    variance = tl.maximum(square - mean * mean, TINY)
    ties = tl.where(first == 0, 1.0, 0.0) + weight * tl.sum(tl.where(x == 0, 1.0, 0.0), 1)
    base = tl.log(tl.maximum(ties, 1.0))
    full = tl.maximum(tl.log(t) - base, 2e-6)
    rho = tl.maximum(tl.minimum(rho, 0.97 * full), 1e-6)
    end = tl.minimum(BETA_MAX / tl.sqrt(variance), limit)
    low = tl.minimum(tl.sqrt(8 * rho) / tl.maximum(spread, TINY), end)
    high = tl.full(rho.shape, float("inf"), tl.float32)
    b = tl.minimum(tl.sqrt(2 * rho / variance), (full + rho) / tl.maximum(-mean, TINY))
    b = tl.maximum(tl.minimum(b, end), low)
    for _ in range(STEPS):
        e = tl.exp2((b * LOG2E)[:, None] * x)
        e0 = tl.exp2(b * LOG2E * first)
        z = e0 + weight * tl.sum(e, 1)
        e = e * x
        s1 = e0 * first + weight * tl.sum(e, 1)
        e = e * x
        s2 = e0 * first * first + weight * tl.sum(e, 1)
        s3 = e0 * first * first * first + weight * tl.sum(e * x, 1)
        mean, second, third = central(z, s1, s2, s3)
        missing = tl.log(z) - b * mean - base
        new, low, high, step, _, _, _ = halley(b, low, high, end, missing, second, third, full, rho)
        b = tl.where(tl.abs(step) < 1e-3, b, new)
    # a constant subset says nothing: a b so small that the bracket of all keys takes over
    return tl.where(spread > 0, b, 1e-30), top


@triton.jit
def _first_pass(  # type: ignore[no-untyped-def]
    q, k, rows, origin, b, stride, length, full_tiles, last,
    D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of exp(b (d - top)) d^n, n = 0..3, and of d, d^2, over d = S - origin; top, bottom = max, min of d."""
    b2 = b * LOG2E
    zero = tl.zeros_like(b)
    z, s1, s2, s3 = zero, zero, zero, zero
    top, bottom, ties, p1, p2 = zero + HIDDEN, zero - HIDDEN, zero, zero, zero
    for DIAGONAL in tl.static_range(2):
        for n in range(full_tiles if DIAGONAL else 0, last if DIAGONAL else full_tiles, BLOCK_N):
            keys = n + tl.arange(0, BLOCK_N)
            tile = load_rows(k, keys, stride, length, D, DIAGONAL)
            d = tl.dot(q, tl.trans(tile), input_precision=PRECISION) - origin[:, None]
            if DIAGONAL:
                seen = keys[None, :] <= rows[:, None]
                plain = tl.where(seen, d, 0.0)
                bottom = tl.minimum(bottom, tl.min(tl.where(seen, d, -HIDDEN), 1))
                d = tl.where(seen, d, HIDDEN)
            else:
                plain = d
                bottom = tl.minimum(bottom, tl.min(d, 1))
            p1 += tl.sum(plain, 1)
            p2 += tl.sum(plain * plain, 1)
            above = tl.maximum(top, tl.max(d, 1))
            ties = tl.where(above > top, 0.0, ties) + tl.sum(tl.where(d == above[:, None], 1.0, 0.0), 1)
            fade = tl.exp2(b2 * (top - above))
            top = above
            e = tl.exp2(b2[:, None] * d - (b2 * top)[:, None])
            if DIAGONAL:
                e = tl.where(seen, e, 0.0)  # b may be as good as nothing
            z = z * fade + tl.sum(e, 1)
            e = e * d
            s1 = s1 * fade + tl.sum(e, 1)
            e = e * d
            s2 = s2 * fade + tl.sum(e, 1)
            s3 = s3 * fade + tl.sum(e * d, 1)
    return z, s1, s2, s3, top, bottom, ties, p1, p2


@triton.jit
def moments_pass(  # type: ignore[no-untyped-def]
    q, k, below, rows, origin, keep2, b2, shift, kt, pitch, length, full_tiles, last,
    D: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of 2^(b2 d - shift) d^n, n = 0..3, over d = S - origin; with a prior of 2^(l + b2 d - shift) d^n.

    The shift is the largest exponent: known without a prior, found on the way with one, beginning from what is given.
    """
    zero = tl.zeros_like(origin)
    z, s1, s2, s3 = zero, zero, zero, zero
    for DIAGONAL in tl.static_range(2):
        for n in tl.range(full_tiles if DIAGONAL else 0, last if DIAGONAL else full_tiles, BLOCK_N, num_stages=STAGES):
            keys = n + tl.arange(0, BLOCK_N)
            tile = load_rows(k, keys, kt, length, D, DIAGONAL)
            if below is not None:
                prior = keep2 * load_tile(below, rows[:, None], keys[None, :], pitch, length, DIAGONAL, CHECK)
            d = tl.dot(q, tl.trans(tile), input_precision=PRECISION) - origin[:, None]
            if below is None:
                e = tl.exp2(b2[:, None] * d - shift[:, None])
                if DIAGONAL:
                    e = tl.where(keys[None, :] <= rows[:, None], e, 0.0)
            else:
                level = prior + b2[:, None] * d
                if DIAGONAL:
                    level = tl.where(keys[None, :] <= rows[:, None], level, HIDDEN)
                higher = tl.maximum(shift, tl.max(level, 1))
                fade = tl.exp2(shift - higher)
                shift = higher
                e = tl.exp2(level - shift[:, None])
                z, s1, s2, s3 = z * fade, s1 * fade, s2 * fade, s3 * fade
            z += tl.sum(e, 1)
            e = e * d
            s1 += tl.sum(e, 1)
            e = e * d
            s2 += tl.sum(e, 1)
            s3 += tl.sum(e * d, 1)
    return z, shift, s1, s2, s3


@triton.jit(do_not_specialize=PLAIN)
def solve_rows(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, radius_ptr, state_ptr, qb, qh, qt, kb, kh, kt, rb, rh, rt, heads, length, total, limit,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBSET: tl.constexpr, STEPS: tl.constexpr,
    PASSES: tl.constexpr, CLOSE: tl.constexpr, LIMITED: tl.constexpr, BETA_MAX: tl.constexpr,
    PRECISION: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """state (4, B, H, T): b, the largest score, m predicted at b, the largest b where the constraint binds (else 0).

    limit: the largest b, if LIMITED. CLOSE: how small a step, in units where b std_a(S) changes by as much, need not be
    checked by another pass. With COUNT the third row of the state holds the number of passes instead.
    """
    batch, head, plane, _, rows, inside, full_tiles, last = query_block(heads, length, BLOCK_M, BLOCK_N)
    k = k_ptr + batch * kb + head * kh
    q = load_rows(q_ptr + batch * qb + head * qh, rows, qt, length, D, True)
    rho = tl.load(radius_ptr + batch * rb + head * rh + rows * rt, mask=inside, other=0.0)
    t = (rows + 1).to(tl.float32)

    # a subset first; its largest score is the origin of all sums that follow
    b, origin = _start(q, k, rows, rho, limit, kt, length, last, D, SUBSET, STEPS, BETA_MAX, PRECISION)
    z, s1, s2, s3, top, bottom, ties, p1, p2 = _first_pass(
        q, k, rows, origin, b, kt, length, full_tiles, last, D, BLOCK_N, PRECISION
    )

    # what the rows are: as in the twin
    variance = tl.maximum(p2 / t - (p1 / t) * (p1 / t), TINY)
    constant = top - bottom <= 1.2e-30
    cap = BETA_MAX / tl.sqrt(variance)
    end = tl.minimum(cap, limit)
    base = tl.log(tl.maximum(ties, 1.0))
    full = tl.log(t) - base
    free = (rho > 0) & (constant == 0)
    solvable = free & (full - rho > 4 * full * EPS)
    # the other rows are carried along with a harmless target
    full_ = tl.maximum(full, 1e-3)
    rho_ = tl.where(solvable, rho, 0.5 * full_)
    low = tl.minimum(tl.sqrt(8 * rho_) / tl.maximum(top - bottom, TINY), end)
    high = tl.full((BLOCK_M,), float("inf"), tl.float32)

    done = solvable == 0
    ended = done
    expected = tl.zeros((BLOCK_M,), tl.float32)  # m - origin at the b chosen last
    passes = 1
    pending = 1
    while pending > 0:
        mean, second, third = central(z, s1, s2, s3)
        missing = tl.log(z) + b * (top - mean) - base
        new, low, high, step, error, slope, taken = halley(b, low, high, end, missing, second, third, full_, rho_)
        at_end = (error <= 0) & (b >= end)
        exact = tl.abs(error) <= (1 + full_ + slope) * (2 * EPS)
        # near saturation all steps are short: there the error has to be small, too; whether the end is enough, a pass
        # at the end must tell
        close = taken & (new < end) & (tl.abs(step) * tl.maximum(tl.sqrt(slope), 1.0) < CLOSE)
        close = close & (tl.abs(error) < 0.3 * tl.minimum(full_ - rho_, 1.0))
        new = tl.where(at_end | exact, b, new)
        move = new - b
        near = tl.where(close, mean + move * second + 0.5 * move * move * third, mean)
        expected = tl.where(done, expected, near)
        b = tl.where(done, b, new)
        ended = ended | (at_end & (done == 0))
        done = done | at_end | exact | close
        pending = tl.where(passes < PASSES, 1 - tl.min(done.to(tl.int32), 0), 0)
        if pending > 0:
            shift = b * LOG2E * top
            z, shift, s1, s2, s3 = moments_pass(
                q, k, None, rows, origin, None, b * LOG2E, shift, kt, None, length, full_tiles, last,
                D, BLOCK_N, False, PRECISION, None,
            )  # fmt: skip
            passes += 1

    b = tl.where(ended, end, b)
    active = (ended == 0) & (b < end)
    if LIMITED:
        b = tl.where(constant, limit, b)
        b = tl.where(rho > 0, b, 0.0)
    else:
        b = tl.where(free, b, 0.0)
    b = tl.where(rho == rho, b, rho)
    at = plane + rows
    tl.store(state_ptr + at, b, mask=inside)
    tl.store(state_ptr + total + at, origin + top, mask=inside)
    if COUNT:
        expected = tl.zeros((BLOCK_M,), tl.float32) + passes
    else:
        expected = tl.where(active, expected, top) + origin
    tl.store(state_ptr + 2 * total + at, expected, mask=inside)
    tl.store(state_ptr + 3 * total + at, tl.where(active, end, 0.0), mask=inside)
