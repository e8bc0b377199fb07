"""Kernels of hyper-connections (connections.py): a token's weights of its n streams, and the gradients of these.

    P = sum_i H_i F_i, and the streams' squares         each row is read once (printed by connection_printing.py)
    pre, post, R from P                                 a warp has several tokens, a thread few numbers of a matrix
    and back: the gradient of P, then of all streams    printed too: what arrives for them is added on the way

Nothing between P and R is kept: the backward pass computes it again, and leaves the sums by which it has divided in
memory, from which it finds its way back, M before = M after times its sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepformer.ops.scalar_functions import tanh


@triton.jit
def project(  # type: ignore[no-untyped-def]
    h, maps, sums, total, square, n, D: tl.constexpr, STRIDE: tl.constexpr, LINES: tl.constexpr, WIDE: tl.constexpr,
    CENTRED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The products of some tokens of a stream with its maps, and its squares by column, added to `total` and `square`.

    Of a CENTRED stream, whose last map is of ones, they are those of the differences from its mean, (h - mean) . w =
    h . w - mean sum(w), and the mean is behind them. Its squares are those of differences from the first number, since
    sums of squares of numbers themselves would cancel where the mean is large; fp32 has the digits for such differences
    in products too. `sums` are those of the maps.
    """
    m, o, k = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, WIDE), tl.arange(0, BLOCK_K)
    if CENTRED:
        near = tl.load(h + m.to(tl.int64) * D, mask=m < n, other=0.0).to(tl.float32)
    for begin in range(0, D, BLOCK_K):
        at = (begin + k)[None, :]
        row = tl.load(h + m[:, None].to(tl.int64) * D + at, mask=(m < n)[:, None] & (at < D), other=0.0)
        tile = tl.load(maps + o[:, None] * STRIDE + at, mask=(o < LINES)[:, None] & (at < D), other=0.0)
        wide = row.to(tl.float32)
        if CENTRED:
            wide = wide - near[:, None]
            if D % BLOCK_K > 0:
                wide = tl.where(at < D, wide, 0.0)
            if row.dtype == tl.float32:
                row = wide
        total = tl.dot(row, tl.trans(tile), total, input_precision=PRECISION)
        square += tl.sum(tl.reshape(wide * wide, (BLOCK_M, BLOCK_K // 8, 8)), 2)
    if CENTRED:
        last = (o == LINES - 1)[None, :]
        of_ones = tl.sum(tl.where(last, total, 0.0), 1) / D  # the mean, or its difference from `near`
        mean, apart = of_ones, of_ones - near
        if h.dtype.element_ty == tl.float32:
            mean, apart = of_ones + near, of_ones
        square -= (apart * apart * (8 * D / BLOCK_K))[:, None]
        of_maps = tl.load(sums + o, mask=o < LINES, other=0.0)
        total = tl.where(last, mean[:, None], total - of_ones[:, None] * of_maps[None, :])
    return total, square


@triton.jit
def store_products(out, squares, total, square, n, WIDE: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    m, o = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, WIDE)
    tl.store(out + m[:, None] * WIDE + o[None, :], total, mask=(m < n)[:, None])
    tl.store(squares + m, tl.maximum(tl.sum(square, 1), 0.0), mask=m < n)


@triton.jit
def gated(products, line, r, m, at, FIRST: tl.constexpr, GATE: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some outputs P and their logits a r P + b, those from FIRST on, of tokens m."""
    p = tl.load(products + m * WIDE + FIRST + at)
    return p, tl.load(line + GATE) * (r * p) + tl.load(line + 3 + FIRST + at)


@triton.jit
def pull_gated(  # type: ignore[no-untyped-def]
    dy, p, line, changed, partial, r, m, at, inside, real, FIRST: tl.constexpr, GATE: tl.constexpr, WIDE: tl.constexpr
):
    """From the gradient of these logits to those of P, of the line's numbers, and, which is returned, r's terms."""
    dy = tl.where(inside & real, dy, 0.0)
    dz = tl.load(line + GATE) * dy
    tl.store(changed + m * WIDE + FIRST + at, dz * r, mask=inside & real)
    tl.store(partial + 3 + FIRST + at, tl.sum(dy, 0, keep_dims=True), mask=inside)
    tl.store(partial + GATE, tl.sum(dy * p * r))
    return dz * p


@triton.jit
def sums_over(a, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the columns (1) or rows (2) of matrices (tokens, N, N); 1 for one that is not there."""
    total = tl.sum(a, AXIS, keep_dims=True)
    return tl.where(total > 0, total, 1.0)


@triton.jit
def exponentials(y, inside):  # type: ignore[no-untyped-def]
    """Of matrices, the largest of each column 1."""
    y = tl.where(inside, y, float("-inf"))
    top = tl.max(y, 1, keep_dims=True)
    return tl.where(inside, tl.exp(y - tl.where(top > float("-inf"), top, 0.0)), 0.0)


@triton.jit
def softmax(y, inside):  # type: ignore[no-untyped-def]
    y = tl.where(inside, y, float("-inf"))
    e = tl.exp(y - tl.max(y, 1, keep_dims=True))
    return e / tl.sum(e, 1, keep_dims=True)


@triton.jit
def permutation_table(table, N: tl.constexpr, LAST: tl.constexpr, LP: tl.constexpr, EP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where permutation k has a one. It selects: Triton makes a product that is summed a dot, with tf32's digits."""
    k, e = tl.arange(0, LP)[:, None], tl.arange(0, EP)[None, :]
    return (tl.load(table + k * (N * N) + e, mask=(k < LAST) & (e < N * N), other=0.0) > 0)[None, :, :]


@triton.jit
def weights_kernel(  # type: ignore[no-untyped-def]
    products, squares, line, table, stats, count, eps, D: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr,
    STEPS: tl.constexpr, LAST: tl.constexpr, NP: tl.constexpr, LP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lines of `stats`: pre, post and R of all tokens. STEPS 0: R is a mean of LAST permutations, those of `table`."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.where(token < count, token, 0)
    r = tl.rsqrt(tl.load(squares + m) / (N * D) + eps)
    real, m1, r1, i = (token < count)[:, None], m[:, None], r[:, None], tl.arange(0, NP)[None, :]
    at = tl.where(i < N, i, 0)
    _, y = gated(products, line, r1, m1, at, 0, 0, WIDE)
    tl.store(stats + at * count + m1, tl.sigmoid(y), mask=real & (i < N))
    _, y = gated(products, line, r1, m1, at, N, 1, WIDE)
    tl.store(stats + (N + at) * count + m1, 2.0 * tl.sigmoid(y), mask=real & (i < N))
    if STEPS > 0:
        row, column = tl.arange(0, NP)[None, :, None], tl.arange(0, NP)[None, None, :]
        inside = (row < N) & (column < N)
        at2 = tl.where(inside, row * N + column, 0)
        _, y = gated(products, line, r1[:, :, None], m1[:, :, None], at2, 2 * N, 2, WIDE)
        mixing = exponentials(y, inside)
        for _step in range(STEPS):
            mixing = mixing / sums_over(mixing, 1)
            mixing = mixing / sums_over(mixing, 2)
        tl.store(stats + (2 * N + at2) * count + m1[:, :, None], mixing, mask=inside & real[:, :, None])
    else:
        k, e = tl.arange(0, LP)[None, :], tl.arange(0, NP * NP)[None, :]
        _, y = gated(products, line, r1, m1, tl.where(k < LAST, k, 0), 2 * N, 2, WIDE)
        share = softmax(y, k < LAST)
        mixed = tl.sum(tl.where(permutation_table(table, N, LAST, LP, NP * NP), share[:, :, None], 0.0), 1)
        tl.store(stats + (2 * N + e) * count + m1, mixed, mask=real & (e < N * N))


@triton.jit
def weights_backward_kernel(  # type: ignore[no-untyped-def]
    products, squares, line, table, grads, changed, factor, partial, scratch, count, eps,
    D: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, LAST: tl.constexpr,
    NP: tl.constexpr, LP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the lines of `grads` to the gradients of P (`changed`), of the numbers (a line of `partial` a program), and
    the number by which a token's streams enter their own gradients, since their squares are part of r (`factor`)."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.where(token < count, token, 0)
    r = tl.rsqrt(tl.load(squares + m) / (N * D) + eps)
    partial += tl.program_id(0) * WIDTH
    real, m1, r1, i = (token < count)[:, None], m[:, None], r[:, None], tl.arange(0, NP)[None, :]
    at = tl.where(i < N, i, 0)
    p, y = gated(products, line, r1, m1, at, 0, 0, WIDE)
    s = tl.sigmoid(y)
    dy = tl.load(grads + at * count + m1) * s * (1.0 - s)
    dr = tl.sum(pull_gated(dy, p, line, changed, partial, r1, m1, at, i < N, real, 0, 0, WIDE), 1)
    p, y = gated(products, line, r1, m1, at, N, 1, WIDE)
    s = tl.sigmoid(y)
    dy = tl.load(grads + (N + at) * count + m1) * 2.0 * s * (1.0 - s)
    dr += tl.sum(pull_gated(dy, p, line, changed, partial, r1, m1, at, i < N, real, N, 1, WIDE), 1)
    if STEPS > 0:
        row, column = tl.arange(0, NP)[None, :, None], tl.arange(0, NP)[None, None, :]
        inside = (row < N) & (column < N)
        at2, m2, r2 = tl.where(inside, row * N + column, 0), m1[:, :, None], r1[:, :, None]
        p2, y2 = gated(products, line, r2, m2, at2, 2 * N, 2, WIDE)
        mixing = exponentials(y2, inside)
        kept = scratch + tl.program_id(0).to(tl.int64) * (2 * STEPS * NP * BLOCK) + tl.arange(0, BLOCK)[:, None, None]
        for step in range(STEPS):
            total = sums_over(mixing, 1)
            tl.store(kept + (2 * step * NP + column) * BLOCK, total)
            mixing = mixing / total
            total = sums_over(mixing, 2)
            tl.store(kept + ((2 * step + 1) * NP + row) * BLOCK, total)
            mixing = mixing / total
        tl.debug_barrier()  # other threads may have written what one reads
        back = tl.load(grads + (2 * N + at2) * count + m2)
        for turn in range(STEPS):
            step = STEPS - 1 - turn
            total = tl.load(kept + ((2 * step + 1) * NP + row) * BLOCK)
            back = (back - tl.sum(back * mixing, 2, keep_dims=True)) / total
            mixing = mixing * total
            total = tl.load(kept + (2 * step * NP + column) * BLOCK)
            back = (back - tl.sum(back * mixing, 1, keep_dims=True)) / total
            mixing = mixing * total
        terms = pull_gated(
            back * mixing, p2, line, changed, partial, r2, m2, at2, inside, real[:, :, None], 2 * N, 2, WIDE
        )
        dr += tl.sum(tl.sum(terms, 2), 1)
    else:
        k, e = tl.arange(0, LP)[None, :], tl.arange(0, NP * NP)[None, :]
        at3 = tl.where(k < LAST, k, 0)
        p3, y3 = gated(products, line, r1, m1, at3, 2 * N, 2, WIDE)
        share = softmax(y3, k < LAST)
        arrived = tl.load(grads + (2 * N + e) * count + m1, mask=e < N * N, other=0.0)
        back = tl.sum(tl.where(permutation_table(table, N, LAST, LP, NP * NP), arrived[:, None, :], 0.0), 2)
        dy = share * (back - tl.sum(share * back, 1, keep_dims=True))
        dr += tl.sum(pull_gated(dy, p3, line, changed, partial, r1, m1, at3, k < LAST, real, 2 * N, 2, WIDE), 1)
    tl.store(factor + m, -dr * r * r * r / (N * D), mask=token < count)


@triton.jit
def along_of(  # type: ignore[no-untyped-def]
    products, squares, stream, m, k, count, eps, D: tl.constexpr, EACH: tl.constexpr, WIDE: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """The products of a stream's tokens with its maps, their means (behind the products), and r of the norm."""
    p = tl.load(products + (stream * count + m[:, None]) * WIDE + k, mask=(m < count)[:, None], other=0.0)
    mean = tl.zeros(m.shape, tl.float32)
    if CENTRED:
        mean = tl.sum(tl.where(k == EACH, p, 0.0), 1)
    return p, mean, tl.rsqrt(tl.load(squares + stream * count + m, mask=m < count, other=1.0) / D + eps)


@triton.jit
def along_kernel(  # type: ignore[no-untyped-def]
    products, squares, line, stats, count, eps, D: tl.constexpr, EACH: tl.constexpr, WIDE: tl.constexpr,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lines of `stats`, start + scale tanh(r p), of some tokens of a stream."""
    m, k, stream = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)[None, :], tl.program_id(1)
    p, _, r = along_of(products, squares, stream, m, k, count, eps, D, EACH, WIDE, CENTRED)
    start = tl.load(line + 2 + stream * EACH + k, mask=k < EACH, other=0.0)
    found = start + tl.load(line + tl.where(k == 1, 1, 0)) * tanh(r[:, None] * p)
    tl.store(stats + (stream * EACH + k) * count + m[:, None], found, mask=(m < count)[:, None] & (k < EACH))


@triton.jit
def along_backward_kernel(  # type: ignore[no-untyped-def]
    products, squares, sums, line, grads, changed, factor, partial, count, eps, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, EACH: tl.constexpr, WIDE: tl.constexpr,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `weights_backward_kernel`. Of a CENTRED stream r changes with h by factor (h - mean) and a product by w - mean
    of w: what does not depend on the column is the gradient of one more product, that with a map of ones."""
    m, k, stream = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)[None, :], tl.program_id(1)
    real = m < count
    p, mean, r = along_of(products, squares, stream, m, k, count, eps, D, EACH, WIDE, CENTRED)
    t = tanh(r[:, None] * p)
    arrived = tl.load(grads + (stream * EACH + k) * count + m[:, None], mask=real[:, None] & (k < EACH), other=0.0)
    dz = arrived * tl.load(line + tl.where(k == 1, 1, 0)) * (1.0 - t * t)
    by_r = -tl.sum(dz * p, 1) * r * r * r / D
    dp = dz * r[:, None]
    if CENTRED:
        apart = by_r * mean + tl.sum(dp * tl.load(sums + k, mask=k < EACH, other=0.0), 1) / D
        dp = tl.where(k == EACH, -apart[:, None], dp)
    own = EACH + 1 if CENTRED else EACH
    tl.store(changed + m[:, None] * WHOLE + stream * own + k, dp, mask=real[:, None] & (k < own))
    tl.store(factor + stream * count + m, by_r, mask=real)
    found = partial + (stream * tl.num_programs(0) + tl.program_id(0)) * WIDTH
    of_others = tl.arange(0, PADDED)
    tl.store(found + of_others, tl.zeros((PADDED,), tl.float32), mask=of_others < WIDTH)
    tl.debug_barrier()  # before other threads write some of them
    of_scales = tl.sum(arrived * t, 0, keep_dims=True)
    tl.store(found, tl.sum(tl.where(k == 1, 0.0, of_scales)))
    tl.store(found + 1, tl.sum(tl.where(k == 1, of_scales, 0.0)))
    tl.store(found + 2 + stream * EACH + k, tl.sum(arrived, 0, keep_dims=True), mask=k < EACH)


@triton.jit
def per_token(pairs, m, count):  # type: ignore[no-untyped-def]
    """Two numbers of each token beside its row."""
    both = tl.load(pairs + m, mask=m < count, other=0)
    first = (both & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return first[:, None], (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def rounded_kernel(maps, rounded, sums, count, D: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A map in another precision, or behind the last one a map of ones, and the sum of what it is then."""
    line, at = tl.program_id(0), tl.arange(0, COLUMNS)
    found = tl.load(maps + line * D + at, mask=(at < D) & (line < count), other=1.0).to(rounded.dtype.element_ty)
    tl.store(rounded + line * D + at, found, mask=at < D)
    tl.store(sums + line, tl.sum(tl.where(at < D, found.to(tl.float32), 0.0)))


@triton.jit
def centred_sum_kernel(  # type: ignore[no-untyped-def]
    lines, total, count, WIDTH: tl.constexpr, D: tl.constexpr, TURNS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """As common.sum_lines_kernel, of one map, without its mean."""
    at, rows = tl.arange(0, COLUMNS)[None, :], tl.arange(0, ROWS)[:, None]
    added = tl.zeros((ROWS, COLUMNS), tl.float32)
    for turn in tl.static_range(TURNS):
        line = turn * ROWS + rows
        place = lines + line * WIDTH + tl.program_id(0) * D + at
        added += tl.load(place, mask=(line < count) & (at < D), other=0.0)
    found = tl.sum(added, 0, keep_dims=True)
    tl.store(total + tl.program_id(0) * D + at, found - tl.sum(found) / D, mask=at < D)
