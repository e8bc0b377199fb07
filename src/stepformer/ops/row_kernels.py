"""Decoding kernels: products of whole weight matrices with one or few vectors, and what lies between two of them.

For one new token per row every kernel is short, so their number counts. These leave five per layer:

    qkv = W_qkv u                    u = norm(x' + m v')  computed by every program for itself, from
                                     w = a v + b g,  v' = LN_v(w) or w,  x' = x + c v'   (g: the last oracle's answer)
    attention over stretches of keys, the new key and value written to the cache
    g   = W_out (merged stretches)
    h   = act(W_up u)                u as above
    g   = W_down h

Without a velocity w = b g. Program 0 of a row stores x' and v', in other memory than it read: nobody waits for it.
Traffic: the weights once, 2 bytes a number in bf16; streams and sums are fp32 and stay in the cache of the chip. All
sums are fp32. Tokens and positions come from the device unseen: kernels confine them to their tables and caches, and
logits that are not numbers never win. So whatever goes wrong, no address does.

Overlap (`OVERLAP`, programmatic dependent launch): a kernel starts while the one before it still runs, asks for its
weights, and waits for the others' results only then. The embedding alone begins after all that came before, so what
lay in memory when a step began may be read before the wait: weights, numbers, positions, the keys and values of
earlier steps. What this step computes may not, and nothing is written before it. Every program waits, so the end of
a kernel means the end of all before it. OVERLAP 1: the next kernel starts when all programs of this one have passed
their wait, so two kernels are there at a time; 2: as soon as all of them run, so as many as fit.

Nothing here has a gradient: these kernels run inside a recorded decoding step and nowhere else, so they are plain
launches, not operators.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _await(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Nothing that a kernel before this one wrote may be read, and nothing written, above this line."""
    if OVERLAP == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if OVERLAP > 0:
        tl.extra.cuda.gdc_wait()
    if OVERLAP == 1:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _add_both(a, b, c, d):  # type: ignore[no-untyped-def]
    return a + c, b + d


@triton.jit
def _layer_norm(p, inside, eps, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """AT_ONCE: both sums in one pass, which waits for the other warps once; p is 0 outside.

    The variance then loses digits by cancellation: its relative error is 1e-7 (1 + mean^2 / variance).
    """
    if AT_ONCE:
        total, squares = tl.reduce((p, p * p), 0, _add_both)
        mean = total / WIDTH
        variance = tl.maximum(squares / WIDTH - mean * mean, 0.0)
        centred = tl.where(inside, p - mean, 0.0)
    else:
        centred = tl.where(inside, p - tl.sum(p) / WIDTH, 0.0)
        variance = tl.sum(centred * centred) / WIDTH
    return centred * tl.rsqrt(variance + eps)


@triton.jit
def _next_point(  # type: ignore[no-untyped-def]
    row, k, g, x, v, numbers, v_gain, gain, shift, eps,
    WIDTH: tl.constexpr, PENDING: tl.constexpr, VELOCITY: tl.constexpr, AHEAD: tl.constexpr, V_NORM: tl.constexpr,
    NORM: tl.constexpr, GAIN: tl.constexpr, SHIFT: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """norm(x' + m v') of one row, x' and v'."""
    inside = k < WIDTH
    at = row * WIDTH + k
    if PENDING:
        a, b, c = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
        if V_NORM:
            v_scale = tl.load(v_gain + k, mask=inside, other=0.0).to(tl.float32)
    if AHEAD:
        m = tl.load(numbers + 3)
    if GAIN:
        scale = tl.load(gain + k, mask=inside, other=0.0).to(tl.float32)
    if SHIFT:
        offset = tl.load(shift + k, mask=inside, other=0.0).to(tl.float32)
    _await(OVERLAP)
    # all loads first: each one after a sum would wait for the memory once more
    point = tl.load(x + at, mask=inside, other=0.0)
    if PENDING:
        w = b * tl.load(g + at, mask=inside, other=0.0)
        if VELOCITY:
            w += a * tl.load(v + at, mask=inside, other=0.0)
    if AHEAD and not (PENDING and VELOCITY):
        ahead = tl.load(v + at, mask=inside, other=0.0)
    if PENDING:
        if V_NORM:
            w = _layer_norm(w, inside, eps, WIDTH, AT_ONCE) * v_scale
        point += c * w
        if VELOCITY:
            ahead = w
    moved, velocity = point, point
    if PENDING:
        velocity = w
    if AHEAD:
        point += m * ahead
    if NORM == 1:
        point = _layer_norm(point, inside, eps, WIDTH, AT_ONCE)
        if GAIN:
            point *= scale
        if SHIFT:
            point += offset
    elif NORM == 2:
        point *= tl.rsqrt(tl.sum(point * point) / WIDTH + eps)
    return point, moved, velocity


@triton.jit
def _store_streams(  # type: ignore[no-untyped-def]
    row, k, new_x, new_v, moved, velocity, WIDTH: tl.constexpr, PENDING: tl.constexpr, VELOCITY: tl.constexpr
):
    if PENDING:
        tl.store(new_x + row * WIDTH + k, moved, mask=k < WIDTH)
        if VELOCITY:
            tl.store(new_v + row * WIDTH + k, velocity, mask=k < WIDTH)


@triton.jit
def _merged(  # type: ignore[no-untyped-def]
    row, k, parts, tops, sums, WIDTH: tl.constexpr, HEAD: tl.constexpr, SPLIT: tl.constexpr
):
    """The attention's output of one row, (WIDTH,), from what `SPLIT` programs found about a head each."""
    inside = k < WIDTH
    first = (row * (WIDTH // HEAD) + k // HEAD) * SPLIT
    top = tl.load(tops + first, mask=inside, other=0.0)
    for s in tl.static_range(1, SPLIT):
        top = tl.maximum(top, tl.load(tops + first + s, mask=inside, other=0.0))
    total = tl.zeros_like(top)
    found = tl.zeros_like(top)
    for s in tl.static_range(SPLIT):
        share = tl.exp(tl.load(tops + first + s, mask=inside, other=0.0) - top)
        total += share * tl.load(sums + first + s, mask=inside, other=1.0)
        found += share * tl.load(parts + (first + s) * HEAD + k % HEAD, mask=inside, other=0.0)
    return found / total


@triton.jit
def linear_kernel(  # type: ignore[no-untyped-def]
    weight, bias, out, source, tops, sums, x, v, new_x, new_v, numbers, v_gain, gain, shift, eps, best, where, bad, cap,
    N: tl.constexpr, K: tl.constexpr, HOW: tl.constexpr, HEAD: tl.constexpr, SPLIT: tl.constexpr, PENDING: tl.constexpr,
    VELOCITY: tl.constexpr, AHEAD: tl.constexpr, V_NORM: tl.constexpr, NORM: tl.constexpr, GAIN: tl.constexpr,
    SHIFT: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, CAP: tl.constexpr, REAL: tl.constexpr,
    AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Some outputs of one row: program (i, row) takes those from i BLOCK_N on. REAL > 0: also their largest."""
    pid, row = tl.program_id(0), tl.program_id(1)
    n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    here = n < N
    at = n[:, None] * K + k[None, :]
    # asked for before the vector is ready, which takes as long as the memory does
    tile = tl.load(weight + at, mask=here[:, None] & (k < K)[None, :], other=0.0)
    if ACT == 3:
        second = tl.load(weight + N * K + at, mask=here[:, None] & (k < K)[None, :], other=0.0)
    if BIAS:
        offset = tl.load(bias + n, mask=here, other=0.0).to(tl.float32)
        if ACT == 3:
            second_offset = tl.load(bias + N + n, mask=here, other=0.0).to(tl.float32)
    if HOW == 0:
        _await(OVERLAP)
        u = tl.load(source + row * K + k, mask=k < K, other=0.0)
    elif HOW == 1:
        u, moved, velocity = _next_point(
            row, k, source, x, v, numbers, v_gain, gain, shift, eps,
            K, PENDING, VELOCITY, AHEAD, V_NORM, NORM, GAIN, SHIFT, AT_ONCE, OVERLAP,
        )  # fmt: skip
    else:
        _await(OVERLAP)
        u = _merged(row, k, source, tops, sums, K, HEAD, SPLIT)
    products = tile.to(tl.float32) * u[None, :]
    for begin in tl.static_range(BLOCK_K, K, BLOCK_K):  # long vectors are plain ones
        inside = begin + k < K
        tile = tl.load(weight + begin + at, mask=here[:, None] & inside[None, :], other=0.0)
        products += tile.to(tl.float32) * tl.load(source + row * K + begin + k, mask=inside, other=0.0)[None, :]
    y = tl.sum(products, axis=1)
    if BIAS:
        y += offset
    if ACT == 1:
        y = 0.5 * y * (1.0 + tl.math.erf(y * 0.7071067811865476))
    elif ACT == 2:
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))  # 0.5 (1 + tanh z) = sigmoid(2 z)
    elif ACT == 3:
        value = tl.sum(second.to(tl.float32) * u[None, :], axis=1)
        if BIAS:
            value += second_offset
        y = y * tl.sigmoid(y) * value
    if CAP:
        y = cap * (2.0 * tl.sigmoid(2.0 * y / cap) - 1.0)
    tl.store(out + row * N + n, y, mask=here)
    if PENDING:  # noqa: SIM102 (known when it is compiled)
        if pid == 0:  # after its outputs, for which everybody waits
            _store_streams(row, k, new_x, new_v, moved, velocity, K, PENDING, VELOCITY)
    if REAL > 0:
        place = row * tl.num_programs(0) + pid
        ranked = tl.where((n < REAL) & (y == y), y, float("-inf"))  # among NaN an argmax may point beyond all of them
        tl.store(best + place, tl.max(ranked))
        tl.store(where + place, pid * BLOCK_N + tl.argmax(ranked, axis=0))
        tl.store(bad + place, tl.sum(tl.where(here, y * 0.0, 0.0)))  # NaN if anything is not finite


@triton.jit
def point_kernel(  # type: ignore[no-untyped-def]
    g, x, v, new_x, new_v, u, numbers, v_gain, gain, shift, eps,
    K: tl.constexpr, PENDING: tl.constexpr, VELOCITY: tl.constexpr, AHEAD: tl.constexpr, V_NORM: tl.constexpr,
    NORM: tl.constexpr, GAIN: tl.constexpr, SHIFT: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The next point of a row by itself, for those who need it often."""
    row, k = tl.program_id(0), tl.arange(0, BLOCK_K)
    found, moved, velocity = _next_point(
        row, k, g, x, v, numbers, v_gain, gain, shift, eps,
        K, PENDING, VELOCITY, AHEAD, V_NORM, NORM, GAIN, SHIFT, AT_ONCE, OVERLAP,
    )  # fmt: skip
    tl.store(u + row * K + k, found, mask=k < K)
    _store_streams(row, k, new_x, new_v, moved, velocity, K, PENDING, VELOCITY)


@triton.jit
def attend_kernel(  # type: ignore[no-untyped-def]
    qkv, keys, values, positions, cosines, sines, parts, tops, sums, scale, eps,
    H: tl.constexpr, D: tl.constexpr, CAPACITY: tl.constexpr, ROTARY: tl.constexpr, QK_NORM: tl.constexpr,
    OVERLAP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program (s, row and head): one query over the s-th stretch of its keys; the stretch of the new key stores it."""
    stretch, row_head = tl.program_id(0), tl.program_id(1)
    row, head = row_head // H, row_head % H
    d = tl.arange(0, D)
    # the position and the keys of earlier steps lay in memory when this step began: past the first-level caches, which
    # may be older, they are read while the product of the queries still runs
    p = tl.minimum(tl.maximum(tl.load(positions + row, cache_modifier=".cg"), 0), CAPACITY - 1)
    first = stretch * (BLOCK * BLOCKS)
    t = first + tl.arange(0, BLOCK)
    at = (row_head.to(tl.int64) * CAPACITY + t)[:, None] * D + d[None, :]
    past = (t < p)[:, None] & (d >= 0)[None, :]
    some_k = tl.load(keys + at, mask=past, other=0.0, cache_modifier=".cg")
    some_v = tl.load(values + at, mask=past, other=0.0, cache_modifier=".cg")
    if ROTARY:
        half: tl.constexpr = D // 2
        pair = p * half + d % half
        cosine, sine = tl.load(cosines + pair), tl.load(sines + pair)
    _await(OVERLAP)
    base = qkv + row * (3 * H * D) + head * D
    q, k, v = tl.load(base + d), tl.load(base + H * D + d), tl.load(base + 2 * H * D + d)
    q_scale, k_scale = scale, 1.0
    if QK_NORM:
        q_scale = scale * tl.rsqrt(tl.sum(q * q) / D + eps)
        k_scale = tl.rsqrt(tl.sum(k * k) / D + eps)
    if ROTARY:
        sine = tl.where(d < half, -sine, sine)
        other = (d + half) % D
        q = q * cosine + tl.load(base + other) * sine
        k = k * cosine + tl.load(base + H * D + other) * sine
    q *= q_scale
    stored_k = (k * k_scale).to(keys.dtype.element_ty)
    stored_v = v.to(values.dtype.element_ty)
    owns = (p >= first) & (p < first + BLOCK * BLOCKS)
    new = (row_head.to(tl.int64) * CAPACITY + p) * D + d
    tl.store(keys + new, stored_k, mask=owns & (d >= 0))
    tl.store(values + new, stored_v, mask=owns & (d >= 0))

    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    found = tl.zeros((D,), tl.float32)
    for block in tl.static_range(BLOCKS):
        if block > 0:
            t = first + block * BLOCK + tl.arange(0, BLOCK)
            at = (row_head.to(tl.int64) * CAPACITY + t)[:, None] * D + d[None, :]
            past = (t < p)[:, None] & (d >= 0)[None, :]
            some_k = tl.load(keys + at, mask=past, other=0.0, cache_modifier=".cg")
            some_v = tl.load(values + at, mask=past, other=0.0, cache_modifier=".cg")
        is_new = (t == p)[:, None]
        these_k = tl.where(is_new, stored_k[None, :], some_k).to(tl.float32)
        these_v = tl.where(is_new, stored_v[None, :], some_v).to(tl.float32)
        scores = tl.where(t <= p, tl.sum(these_k * q[None, :], axis=1), float("-inf"))
        highest = tl.maximum(top, tl.max(scores))
        level = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp(scores - level)
        kept = tl.exp(top - level)
        total = total * kept + tl.sum(weights)
        found = found * kept + tl.sum(weights[:, None] * these_v, axis=0)
        top = highest
    place = row_head * tl.num_programs(0) + stretch
    tl.store(parts + place * D + d, found)
    tl.store(tops + place, top)
    tl.store(sums + place, total)


@triton.jit
def embed_kernel(  # type: ignore[no-untyped-def]
    tokens, positions, given, lengths, tok, pos, out,
    K: tl.constexpr, VOCABULARY: tl.constexpr, CONTEXT: tl.constexpr, GIVEN: tl.constexpr, LEARNED: tl.constexpr,
    OVERLAP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A row's token is the one given for its position, as long as there are such, then the last one chosen."""
    row, k = tl.program_id(0), tl.arange(0, BLOCK_K)
    inside = k < K
    if OVERLAP > 0:  # launched as any kernel is, so there is nothing to wait for
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.maximum(tl.load(positions + row), 0)
    token = tl.load(tokens + row)
    known = (position < tl.load(lengths + row)) & (position < GIVEN)
    token = tl.where(known, tl.load(given + row * GIVEN + position, mask=known, other=0), token)
    token = tl.minimum(tl.maximum(token, 0), VOCABULARY - 1)
    x = tl.load(tok + token * K + k, mask=inside, other=0.0).to(tl.float32)
    if LEARNED:
        x += tl.load(pos + tl.minimum(position, CONTEXT - 1) * K + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * K + k, x, mask=inside)


@triton.jit
def finish_kernel(  # type: ignore[no-untyped-def]
    best, where, bad, tokens, positions, out,
    ROWS: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The likeliest token of every row from the best ones of all programs, and the next positions."""
    i = tl.arange(0, BLOCK)
    inside = i < PARTS
    _await(OVERLAP)
    wrong = tl.zeros((BLOCK,), tl.float32)
    for row in tl.static_range(ROWS):
        ranked = tl.load(best + row * PARTS + i, mask=inside, other=float("-inf"))
        wrong += tl.load(bad + row * PARTS + i, mask=inside, other=0.0)
        token = tl.load(where + row * PARTS + tl.minimum(tl.argmax(ranked, axis=0), PARTS - 1))
        tl.store(tokens + row, token)
        tl.store(out + row, token)
        tl.store(positions + row, tl.load(positions + row) + 1)
    tl.store(out + ROWS, (tl.sum(wrong) == 0.0).to(tl.int64))
