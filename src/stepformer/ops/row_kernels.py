"""Decoding kernels: products of whole weight matrices with one or few vectors, and attention of one new token.

For one new token per row every kernel is short, so their number counts. These leave five per layer of a GPT:

    qkv = W_qkv u                    u from the pass between two oracles, which every program computes for itself
    attention over stretches of keys, the new key and value written to the cache
    g   = W_out (merged stretches)
    h   = act(W_up u)                u as above
    g   = W_down h

The pass is printed in front of a product from the rule's own equations (rows.py); program 0 of a row stores what later
passes read, in other memory than it read: nobody waits for it. For many rows (`many_rows_kernel`) the pass is a kernel
of its own and the product is one of matrices, on tensor cores.

Traffic: the weights once, 2 bytes a number in bf16; streams and sums are fp32 and stay in the cache of the chip. All
sums are fp32. Tokens and positions come from the device unseen: kernels confine them to their tables and caches, and
logits that are not numbers never win. So whatever goes wrong, no address does.

Overlap (`OVERLAP`, programmatic dependent launch): a kernel starts while the one before it still runs, asks for its
weights, and waits for the others' results only then. The embedding alone begins after all that came before, so what
lay in memory when a step began may be read before the wait: weights, numbers, positions, the keys, values and states of
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
def await_others(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Nothing that a kernel before this one wrote may be read, and nothing written, above this line."""
    if OVERLAP == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if OVERLAP > 0:
        tl.extra.cuda.gdc_wait()
    if OVERLAP == 1:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def ask_weights(  # type: ignore[no-untyped-def]
    weight, bias, apart, n, k, N: tl.constexpr, K: tl.constexpr, FIRST: tl.constexpr, ACT: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Rows n of a weight and its bias, asked for before the vector is ready, which takes as long as the memory does.

    FIRST: after so many rows the matrix goes on in another tensor, `apart` numbers after its own end. For "swiglu" the
    second tile has the rows that the gate multiplies, N after those of the gate.
    """
    here = n < N
    at = n[:, None].to(tl.int64) * K + k[None, :]
    if FIRST < N:
        at += tl.where(n >= FIRST, apart, 0)[:, None]
    inside = here[:, None] & (k < K)[None, :]
    tile = tl.load(weight + at, mask=inside, other=0.0)
    second = tile
    if ACT == 3:
        second = tl.load(weight + N * K + at, mask=inside, other=0.0)
    offset = tl.zeros((n.shape[0],), tl.float32)
    second_offset = offset
    if BIAS:
        offset = tl.load(bias + n, mask=here, other=0.0).to(tl.float32)
        if ACT == 3:
            second_offset = tl.load(bias + N + n, mask=here, other=0.0).to(tl.float32)
    return tile, second, offset, second_offset


@triton.jit
def activated(y, gated, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """What stands behind a product: nothing, gelu, its tanh form, swiglu, a sigmoid or relu^2."""
    if ACT == 1:
        y = 0.5 * y * (1.0 + tl.math.erf(y * 0.7071067811865476))
    elif ACT == 2:
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))  # 0.5 (1 + tanh z) = sigmoid(2 z)
    elif ACT == 3:
        y = y * tl.sigmoid(y) * gated
    elif ACT == 4:
        y = tl.sigmoid(y)
    elif ACT == 5:
        y = tl.where(y < 0, 0.0, y * y)
    return y


@triton.jit
def finish_product(  # type: ignore[no-untyped-def]
    tile, second, offset, second_offset, u, out, row, n, N: tl.constexpr, ACT: tl.constexpr
):
    """act(W u + bias) for the vector u of a row and the weights asked for, stored."""
    y = tl.sum(tile.to(tl.float32) * u[None, :], axis=1) + offset
    gated = y
    if ACT == 3:
        gated = tl.sum(second.to(tl.float32) * u[None, :], axis=1) + second_offset
    tl.store(out + row * N + n, activated(y, gated, ACT), mask=n < N)


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
def _ranked(y, n, here, REAL: tl.constexpr, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest of some logits, where it is, and NaN if one of them is not finite."""
    ranked = tl.where((n < REAL) & (y == y), y, float("-inf"))  # among NaN an argmax may point beyond all of them
    return tl.max(ranked, axis=AXIS), tl.argmax(ranked, axis=AXIS), tl.sum(tl.where(here, y * 0.0, 0.0), axis=AXIS)


@triton.jit
def linear_kernel(  # type: ignore[no-untyped-def]
    weight, bias, out, source, tops, sums, best, where, bad, cap,
    N: tl.constexpr, K: tl.constexpr, HEAD: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr,
    CAP: tl.constexpr, REAL: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Some outputs of one row: program (i, row) takes those from i BLOCK_N on. REAL > 0: also their largest.

    SPLIT > 0: the vector is merged from stretches of keys.
    """
    pid, row = tl.program_id(0), tl.program_id(1)
    n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    here = n < N
    tile, second, offset, second_offset = ask_weights(weight, bias, 0, n, k, N, K, N, ACT, BIAS)
    await_others(OVERLAP)
    if SPLIT > 0:
        u = _merged(row, k, source, tops, sums, K, HEAD, SPLIT)
    else:
        u = tl.load(source + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    products = tile.to(tl.float32) * u[None, :]
    gated = second.to(tl.float32) * u[None, :]
    for begin in tl.static_range(BLOCK_K, K, BLOCK_K):  # long vectors are plain ones
        inside = begin + k < K
        at = begin + n[:, None].to(tl.int64) * K + k[None, :]
        u = tl.load(source + row * K + begin + k, mask=inside, other=0.0).to(tl.float32)
        more = tl.load(weight + at, mask=here[:, None] & inside[None, :], other=0.0)
        products += more.to(tl.float32) * u[None, :]
        if ACT == 3:
            more = tl.load(weight + N * K + at, mask=here[:, None] & inside[None, :], other=0.0)
            gated += more.to(tl.float32) * u[None, :]
    y = activated(tl.sum(products, axis=1) + offset, tl.sum(gated, axis=1) + second_offset, ACT)
    if CAP:
        y = cap * (2.0 * tl.sigmoid(2.0 * y / cap) - 1.0)
    tl.store(out + row * N + n, y, mask=here)
    if REAL > 0:
        place = row * tl.num_programs(0) + pid
        top, at, wrong = _ranked(y, n, here, REAL, 0)
        tl.store(best + place, top)
        tl.store(where + place, pid * BLOCK_N + at)
        tl.store(bad + place, wrong)


@triton.jit
def many_rows_kernel(  # type: ignore[no-untyped-def]
    weight, bias, out, source, apart, best, where, bad, cap, rows,
    N: tl.constexpr, K: tl.constexpr, FIRST: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, CAP: tl.constexpr,
    REAL: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `linear_kernel`, the outputs of all rows at once; the weights stream through shared memory."""
    pid = tl.program_id(0)
    n, k, m = pid * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_M)
    here = (m < rows)[:, None] & (n < N)[None, :]
    first = n[:, None].to(tl.int64) * K
    if FIRST < N:
        first += tl.where(n >= FIRST, apart, 0)[:, None]
    offset = tl.zeros((BLOCK_N,), tl.float32)
    second_offset = offset
    if BIAS:
        offset = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        if ACT == 3:
            second_offset = tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
    await_others(OVERLAP)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    gated = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        columns = (begin + k)[None, :]
        inside = (n < N)[:, None] & (columns < K)
        tile = tl.load(weight + first + columns, mask=inside, other=0.0)
        u = tl.load(source + m[:, None] * K + columns, mask=(m < rows)[:, None] & (columns < K), other=0.0)
        u = u.to(weight.dtype.element_ty)
        total = tl.dot(u, tl.trans(tile), total, input_precision=PRECISION)
        if ACT == 3:
            second = tl.load(weight + N * K + first + columns, mask=inside, other=0.0)
            gated = tl.dot(u, tl.trans(second), gated, input_precision=PRECISION)
    y = activated(total + offset[None, :], gated + second_offset[None, :], ACT)
    if CAP:
        y = cap * (2.0 * tl.sigmoid(2.0 * y / cap) - 1.0)
    tl.store(out + m[:, None] * N + n[None, :], y, mask=here)
    if REAL > 0:
        place = m * tl.num_programs(0) + pid
        top, at, wrong = _ranked(y, n[None, :], here, REAL, 1)
        tl.store(best + place, top, mask=m < rows)
        tl.store(where + place, (pid * BLOCK_N + at).to(tl.int64), mask=m < rows)
        tl.store(bad + place, wrong, mask=m < rows)


@triton.jit
def place_of(positions, origins, row, CAPACITY: tl.constexpr, DOCUMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a row's new token stands, and the first token that it sees; origins are known after the wait."""
    p = tl.minimum(tl.maximum(tl.load(positions + row, cache_modifier=".cg"), 0), CAPACITY - 1)
    if DOCUMENTS:
        return p, tl.minimum(tl.maximum(tl.load(origins + row, cache_modifier=".cg"), 0), p)
    return p, p * 0


@triton.jit
def new_heads(  # type: ignore[no-untyped-def]
    qkv, cosines, sines, earlier, mix, row, head, p, scale, eps, apart,
    H: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, QK_NORM: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Query times `scale`, key and value of a row's new token in one head, (D,) each, as the options want them.

    `earlier`: values that are mixed in, the rows of which lie `apart` from each other; `mix`: both weights.
    """
    d = tl.arange(0, D)
    base = qkv + row * (3 * H * D) + head * D
    q, k, v = tl.load(base + d), tl.load(base + H * D + d), tl.load(base + 2 * H * D + d)
    q_scale, k_scale = scale, 1.0
    if QK_NORM:
        q_scale = scale * tl.rsqrt(tl.sum(q * q) / D + eps)
        k_scale = tl.rsqrt(tl.sum(k * k) / D + eps)
    if ROTARY:
        half: tl.constexpr = D // 2
        pair = p * half + d % half
        cosine, sine = tl.load(cosines + pair), tl.load(sines + pair)
        sine = tl.where(d < half, -sine, sine)
        other = (d + half) % D
        q = q * cosine + tl.load(base + other) * sine
        k = k * cosine + tl.load(base + H * D + other) * sine
    if MIXED:
        v = tl.load(mix) * v + tl.load(mix + 1) * tl.load(earlier + row * apart + head * D + d)
    return q * q_scale, k * k_scale, v


@triton.jit
def attend_kernel(  # type: ignore[no-untyped-def]
    qkv, keys, values, positions, origins, cosines, sines, earlier, mix, parts, tops, sums, scale, eps, apart,
    H: tl.constexpr, D: tl.constexpr, CAPACITY: tl.constexpr, ROTARY: tl.constexpr, QK_NORM: tl.constexpr,
    MIXED: tl.constexpr, DOCUMENTS: tl.constexpr, OVERLAP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program (s, row and head): one query over the s-th stretch of its keys; the stretch of the new key stores it."""
    stretch, row_head = tl.program_id(0), tl.program_id(1)
    row, head = row_head // H, row_head % H
    d = tl.arange(0, D)
    # the position and the keys of earlier steps lay in memory when this step began: past the first-level caches, which
    # may be older, they are read while the product of the queries still runs
    p, _ = place_of(positions, origins, row, CAPACITY, False)
    first = stretch * (BLOCK * BLOCKS)
    t = first + tl.arange(0, BLOCK)
    at = (row_head.to(tl.int64) * CAPACITY + t)[:, None] * D + d[None, :]
    past = (t < p)[:, None] & (d >= 0)[None, :]
    some_k = tl.load(keys + at, mask=past, other=0.0, cache_modifier=".cg")
    some_v = tl.load(values + at, mask=past, other=0.0, cache_modifier=".cg")
    await_others(OVERLAP)
    p, origin = place_of(positions, origins, row, CAPACITY, DOCUMENTS)
    q, k, v = new_heads(
        qkv, cosines, sines, earlier, mix, row, head, p, scale, eps, apart, H, D, ROTARY, QK_NORM, MIXED
    )
    stored_k = k.to(keys.dtype.element_ty)
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
        seen = (t <= p) & (t >= origin)
        scores = tl.where(seen, tl.sum(these_k * q[None, :], axis=1), float("-inf"))
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
def attend_all_kernel(  # type: ignore[no-untyped-def]
    qkv, keys, values, positions, origins, cosines, sines, earlier, mix, out, scale, eps, apart,
    H: tl.constexpr, D: tl.constexpr, CAPACITY: tl.constexpr, ROTARY: tl.constexpr, QK_NORM: tl.constexpr,
    MIXED: tl.constexpr, DOCUMENTS: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program (row and head): one query over all of its keys, as products of matrices with 16 equal rows.

    For many rows, where there are programs enough: sums inside a tile of keys would take longer than these products.
    """
    row_head = tl.program_id(0)
    row, head = row_head // H, row_head % H
    d = tl.arange(0, D)
    await_others(OVERLAP)
    p, origin = place_of(positions, origins, row, CAPACITY, DOCUMENTS)
    q, k, v = new_heads(
        qkv, cosines, sines, earlier, mix, row, head, p, scale, eps, apart, H, D, ROTARY, QK_NORM, MIXED
    )
    stored_k, stored_v = k.to(keys.dtype.element_ty), v.to(values.dtype.element_ty)
    begin = row_head.to(tl.int64) * CAPACITY
    tl.store(keys + (begin + p) * D + d, stored_k)
    tl.store(values + (begin + p) * D + d, stored_v)
    # the new key comes first, from the registers
    alike = tl.zeros((16, D), tl.float32)
    top = tl.zeros((16,), tl.float32) + tl.sum(q * stored_k.to(tl.float32))
    total = tl.zeros((16,), tl.float32) + 1.0
    found = alike + stored_v.to(tl.float32)[None, :]
    queries = (alike + q[None, :]).to(keys.dtype.element_ty)
    for first in tl.range(origin // BLOCK * BLOCK, p, BLOCK, num_stages=STAGES):
        t = first + tl.arange(0, BLOCK)
        past = (t < p) & (t >= origin)
        at = (begin + t)[:, None] * D + d[None, :]
        some_k = tl.load(keys + at, mask=past[:, None], other=0.0)
        some_v = tl.load(values + at, mask=past[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(some_k), input_precision=PRECISION)
        scores = tl.where(past[None, :], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - highest[:, None])
        kept = tl.exp(top - highest)
        total = total * kept + tl.sum(weights, axis=1)
        found = found * kept[:, None]
        found = tl.dot(weights.to(values.dtype.element_ty), some_v, found, input_precision=PRECISION)
        top = highest
    one = (tl.arange(0, 16) == 0)[:, None] & (d >= 0)[None, :]
    where = out + row_head * D + tl.zeros((16, 1), tl.int32) + d[None, :]
    tl.store(where, found / total[:, None], mask=one)


@triton.jit
def embed_kernel(  # type: ignore[no-untyped-def]
    tokens, positions, origins, given, lengths, tok, pos, out, good,
    K: tl.constexpr, VOCABULARY: tl.constexpr, CONTEXT: tl.constexpr, GIVEN: tl.constexpr, LEARNED: tl.constexpr,
    SEPARATOR: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A row's token is the one given for its position, as long as there are such, then the last one chosen.

    Where it is the SEPARATOR (if that is not negative), a document begins. `good`: a flag that is set.
    """
    row, k = tl.program_id(0), tl.arange(0, BLOCK_K)
    inside = k < K
    if OVERLAP > 0:  # launched as any kernel is, so there is nothing to wait for
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(good, (row * 0 + 1).to(tl.int64))
    position = tl.maximum(tl.load(positions + row), 0)
    token = tl.load(tokens + row)
    known = (position < tl.load(lengths + row)) & (position < GIVEN)
    token = tl.where(known, tl.load(given + row * GIVEN + position, mask=known, other=0), token)
    if SEPARATOR >= 0:
        tl.store(origins + row, position, mask=token == SEPARATOR)
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
    """The likeliest token of a row from the best ones of all programs, and its next position."""
    i, row = tl.arange(0, BLOCK), tl.program_id(0)
    inside = i < PARTS
    await_others(OVERLAP)
    ranked = tl.load(best + row * PARTS + i, mask=inside, other=float("-inf"))
    wrong = tl.load(bad + row * PARTS + i, mask=inside, other=0.0)
    token = tl.load(where + row * PARTS + tl.minimum(tl.argmax(ranked, axis=0), PARTS - 1))
    tl.store(tokens + row, token)
    tl.store(out + row, token)
    tl.store(positions + row, tl.load(positions + row) + 1)
    tl.atomic_min(out + ROWS, (tl.sum(wrong) == 0.0).to(tl.int64))  # of whole numbers: in any order the same
