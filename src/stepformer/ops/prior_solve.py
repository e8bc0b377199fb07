"""Triton kernel of constrained attention with a prior that finds the inverse temperature of every row.

As in `constrained_solve`, with l_j added to every logit: keep ln a_j of the call below, or c_{i-j} of a learned table.
Scores are S_j = q.k_j, a row sees the keys j <= i, E and Var are those of its weights a, q = softmax(l) is the prior:

    a ~ exp(l + b S),   D(b) = KL(a || q) = lse(l) - c = rho,   c = ln sum_j exp(l_j + b (S_j - m)),   m = E[S],
    ln a_j = l_j + b (S_j - m) - c,      dD / d ln b = b^2 Var(S),      D(inf) = -ln q(argmax set).

`solve_prior_rows`: one pass over the keys for lse(l), mean and variance of S under q and without it, the largest and
smallest score and the prior's mass at the top; then passes at a b, moments of S around the last mean, until every row
of the block is there. A step short enough is not looked at again: c and m behind it follow from the moments.

Each pass reads the visible half of ln a, stored in fp16: T^2 bytes a head, beside 2 d FLOP and one or two exp2 a pair.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepformer.ops.constrained_solve import (
    EPS,
    HIDDEN,
    LN2,
    LOG2E,
    PLAIN,
    TINY,
    central,
    halley,
    load_rows,
    load_tile,
    moments_pass,
    query_block,
)


@triton.jit
def _prior_pass(  # type: ignore[no-untyped-def]
    q, k, below, rows, origin, keep2, kt, pt, length, full_tiles, last,
    D: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of 2^(l - shift) d^n, n = 0..2, l in bits, and of d, d^2, over d = S - origin; the extremes of S.

    ties: the part of the first sum at the largest score.
    """
    zero = tl.zeros_like(origin)
    z, shift, q1, q2, ties, p1, p2 = zero, zero + HIDDEN, zero, zero, zero, zero, zero
    top, bottom = zero + HIDDEN, zero - HIDDEN
    for DIAGONAL in tl.static_range(2):
        for n in tl.range(full_tiles if DIAGONAL else 0, last if DIAGONAL else full_tiles, BLOCK_N, num_stages=STAGES):
            keys = n + tl.arange(0, BLOCK_N)
            tile = load_rows(k, keys, kt, length, D, DIAGONAL)
            level = keep2 * load_tile(below, rows[:, None], keys[None, :], pt, length, DIAGONAL, CHECK)
            s = tl.dot(q, tl.trans(tile), input_precision=PRECISION)
            d = s - origin[:, None]
            if DIAGONAL:
                seen = keys[None, :] <= rows[:, None]
                level = tl.where(seen, level, HIDDEN)
                bottom = tl.minimum(bottom, tl.min(tl.where(seen, s, -HIDDEN), 1))
                s = tl.where(seen, s, HIDDEN)
                d = tl.where(seen, d, 0.0)
            else:
                bottom = tl.minimum(bottom, tl.min(s, 1))
            p1 += tl.sum(d, 1)
            p2 += tl.sum(d * d, 1)
            higher = tl.maximum(shift, tl.max(level, 1))
            fade = tl.exp2(shift - higher)
            shift = higher
            e = tl.exp2(level - shift[:, None])
            above = tl.maximum(top, tl.max(s, 1))
            ties = tl.where(above > top, 0.0, ties * fade) + tl.sum(tl.where(s == above[:, None], e, 0.0), 1)
            top = above
            z = z * fade + tl.sum(e, 1)
            e = e * d
            q1 = q1 * fade + tl.sum(e, 1)
            q2 = q2 * fade + tl.sum(e * d, 1)
    return z, shift, q1, q2, ties, top, bottom, p1, p2


@triton.jit(do_not_specialize=PLAIN)
def solve_prior_rows(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, below_ptr, keep_ptr, radius_ptr, state_ptr, qb, qh, qt, kb, kh, kt, rb, rh, rt, pb, ph, pt,
    heads, length, total, limit,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr, PASSES: tl.constexpr,
    CLOSE: tl.constexpr, LIMITED: tl.constexpr, BETA_MAX: tl.constexpr, UNSOLVED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """state (5, B, H, T): b, m, c, lse(l), 1 where the constraint binds; below (B, H, T, T), its rows `pt` apart.

    limit, LIMITED, CLOSE as in `solve_rows`. With COUNT the last row of the state holds the number of passes instead.
    """
    batch, head, plane, _, rows, inside, full_tiles, last = query_block(heads, length, BLOCK_M, BLOCK_N)
    k = k_ptr + batch * kb + head * kh
    below = below_ptr + batch * pb + head * ph
    keep2 = tl.load(keep_ptr + head) * LOG2E
    q = load_rows(q_ptr + batch * qb + head * qh, rows, qt, length, D, True)
    rho = tl.load(radius_ptr + batch * rb + head * rh + rows * rt, mask=inside, other=0.0)
    t = (rows + 1).to(tl.float32)

    # any score of the row will do to begin with: that of the query's own key
    own = load_rows(k, rows, kt, length, D, True)
    origin = tl.sum(q.to(tl.float32) * own.to(tl.float32), 1)
    zero = tl.zeros((BLOCK_M,), tl.float32)
    z, shift, q1, q2, ties, top, bottom, p1, p2 = _prior_pass(
        q, k, below, rows, origin, keep2, kt, pt, length, full_tiles, last, D, BLOCK_N, CHECK, PRECISION, STAGES
    )

    # what the rows are: as in the twin
    variance = tl.maximum(p2 / t - (p1 / t) * (p1 / t), TINY)
    constant = top - bottom <= 1.2e-30
    end = tl.minimum(BETA_MAX / tl.sqrt(variance), limit)
    total_mass = shift + tl.log2(z)  # lse(l), in bits
    # Mass at the top that underflows is as good as 1e-37: it makes D(inf) a little too small, and nothing else.
    at_top = shift + tl.log2(tl.maximum(ties, TINY))
    full = tl.maximum((total_mass - at_top) * LN2, 0.0)
    free = (rho > 0) & (constant == 0)
    solvable = free & (full - rho > 4 * full * EPS)
    # the other rows are carried along with a harmless target
    full_ = tl.where(solvable, full, 1.0)
    rho_ = tl.where(solvable, rho, 0.5)
    unit = tl.maximum(full_, 1.0)  # in which D is known to the rounding of 1, as the method below takes it to be
    base = at_top * LN2
    mean = q1 / z
    second = tl.maximum(q2 / z - mean * mean, TINY)
    low = tl.minimum(tl.sqrt(8 * rho_) / tl.maximum(top - bottom, TINY), end)
    high = tl.full((BLOCK_M,), float("inf"), tl.float32)
    b = tl.minimum(tl.sqrt(2 * rho_ / second), (full_ + rho_) / tl.maximum(top - origin - mean, TINY))
    b = tl.maximum(tl.minimum(b, end), low)
    # equal scores under a limit are a softmax at the limit
    b = tl.where(solvable, b, tl.where(rho > 0 if LIMITED else free, end, 0.0))
    origin += mean

    done = tl.zeros((BLOCK_M,), tl.int1)
    ended = done
    found, at, level, off = b, origin, zero, zero
    passes = 0
    pending = 1
    while pending > 0:
        z, shift, s1, s2, s3 = moments_pass(
            q, k, below, rows, origin, keep2, b * LOG2E, zero + HIDDEN, kt, pt, length, full_tiles, last,
            D, BLOCK_N, CHECK, PRECISION, STAGES,
        )  # fmt: skip
        passes += 1
        mean, second, third = central(z, s1, s2, s3)
        log_z = (shift + tl.log2(z)) * LN2
        missing = log_z - b * mean - base
        new, low, high, step, error, slope, taken = halley(
            b, low, high, end, missing / unit, second / unit, third / unit, full_ / unit, rho_ / unit
        )
        error, slope = error * unit, slope * unit
        at_end = solvable & (error <= 0) & (b >= end)
        exact = tl.abs(error) <= (1 + full_ + slope) * (2 * EPS)
        close = taken & (new < end) & (tl.abs(step) * tl.maximum(tl.sqrt(slope), 1.0) < CLOSE)
        # D may be flat here and steep behind the step: its error has to be small, too
        allowed = 3 * CLOSE * tl.minimum(tl.minimum(full_ - rho_, rho_), 1.0)
        close = close & solvable & (tl.abs(error) < allowed)
        # b here, or behind a step that is not looked at: ln z, m and c from the moments
        move = tl.where(close & (exact == 0), new - b, 0.0)
        where = origin + mean + move * (second + 0.5 * move * third)
        log_z += move * (mean + move * (0.5 * second + move * third / 6))
        found = tl.where(done, found, b + move)
        at = tl.where(done, at, where)
        level = tl.where(done, level, log_z - (b + move) * (where - origin))
        off = tl.where(done, off, tl.where(close, 0.0, error))
        ended = ended | (at_end & (done == 0))
        done = done | at_end | exact | close | (solvable == 0)
        b = tl.where(done, b, new)
        origin = tl.where(done, origin, origin + mean)
        pending = tl.where(passes < PASSES, 1 - tl.min(done.to(tl.int32), 0), 0)

    # a row left far from its radius keeps the b it was looked at with, and its radius moves nothing
    active = solvable & (ended == 0) & (tl.abs(off) <= (1 + full_) * UNSOLVED)
    found = tl.where(rho == rho, found, rho)
    to = state_ptr + plane + rows
    tl.store(to, found, mask=inside)
    tl.store(to + total, at, mask=inside)
    tl.store(to + 2 * total, level, mask=inside)
    tl.store(to + 3 * total, total_mass * LN2, mask=inside)
    if COUNT:
        tl.store(to + 4 * total, zero + passes, mask=inside)
    else:
        tl.store(to + 4 * total, tl.where(active, 1.0, 0.0), mask=inside)
