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
sums are fp32. Nothing here has a gradient: these kernels run inside a recorded decoding step and nowhere else, so they
are plain launches, not operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

ACTIVATIONS = {"": 0, "gelu": 1, "gelu-tanh": 2, "swiglu": 3}
TILE = 8192  # numbers of a weight that one program of 128 threads holds at once
KEYS = 128  # keys that one program looks at
STRETCHES = 16  # at most so many programs share a row's keys


@triton.jit
def _layer_norm(p: Any, inside: Any, eps: Any, WIDTH: tl.constexpr) -> Any:
    centred = tl.where(inside, p - tl.sum(p) / WIDTH, 0.0)
    return centred * tl.rsqrt(tl.sum(centred * centred) / WIDTH + eps)


@triton.jit
def _next_point(
    row: Any,
    k: Any,
    g: Any,
    x: Any,
    v: Any,
    new_x: Any,
    new_v: Any,
    numbers: Any,
    v_gain: Any,
    gain: Any,
    shift: Any,
    eps: Any,
    stores: Any,
    WIDTH: tl.constexpr,
    PENDING: tl.constexpr,
    VELOCITY: tl.constexpr,
    AHEAD: tl.constexpr,
    V_NORM: tl.constexpr,
    NORM: tl.constexpr,
    GAIN: tl.constexpr,
    SHIFT: tl.constexpr,
) -> Any:
    """norm(x' + m v') of one row; stores x' and v' where `stores`."""
    inside = k < WIDTH
    at = row * WIDTH + k
    point = tl.load(x + at, mask=inside, other=0.0)
    w = point
    if PENDING:
        w = tl.load(numbers + 1) * tl.load(g + at, mask=inside, other=0.0)
        if VELOCITY:
            w += tl.load(numbers) * tl.load(v + at, mask=inside, other=0.0)
        if V_NORM:
            w = _layer_norm(w, inside, eps, WIDTH) * tl.load(v_gain + k, mask=inside, other=0.0).to(tl.float32)
        point += tl.load(numbers + 2) * w
        tl.store(new_x + at, point, mask=inside & stores)
        if VELOCITY:
            tl.store(new_v + at, w, mask=inside & stores)
    elif AHEAD:
        w = tl.load(v + at, mask=inside, other=0.0)
    if AHEAD:
        point += tl.load(numbers + 3) * w
    if NORM == 1:
        point = _layer_norm(point, inside, eps, WIDTH)
        if GAIN:
            point *= tl.load(gain + k, mask=inside, other=0.0).to(tl.float32)
        if SHIFT:
            point += tl.load(shift + k, mask=inside, other=0.0).to(tl.float32)
    elif NORM == 2:
        point *= tl.rsqrt(tl.sum(point * point) / WIDTH + eps)
    return point


@triton.jit
def _merged(
    row: Any, k: Any, parts: Any, tops: Any, sums: Any, WIDTH: tl.constexpr, HEAD: tl.constexpr, SPLIT: tl.constexpr
) -> Any:
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
def _linear(
    weight: Any,
    bias: Any,
    out: Any,
    source: Any,
    tops: Any,
    sums: Any,
    x: Any,
    v: Any,
    new_x: Any,
    new_v: Any,
    numbers: Any,
    v_gain: Any,
    gain: Any,
    shift: Any,
    eps: Any,
    best: Any,
    where: Any,
    bad: Any,
    cap: Any,
    N: tl.constexpr,
    K: tl.constexpr,
    HOW: tl.constexpr,
    HEAD: tl.constexpr,
    SPLIT: tl.constexpr,
    PENDING: tl.constexpr,
    VELOCITY: tl.constexpr,
    AHEAD: tl.constexpr,
    V_NORM: tl.constexpr,
    NORM: tl.constexpr,
    GAIN: tl.constexpr,
    SHIFT: tl.constexpr,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,
    CAP: tl.constexpr,
    REAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
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
    if HOW == 0:
        u = tl.load(source + row * K + k, mask=k < K, other=0.0)
    elif HOW == 1:
        u = _next_point(
            row, k, source, x, v, new_x, new_v, numbers, v_gain, gain, shift, eps, pid == 0,
            K, PENDING, VELOCITY, AHEAD, V_NORM, NORM, GAIN, SHIFT,
        )  # fmt: skip
    else:
        u = _merged(row, k, source, tops, sums, K, HEAD, SPLIT)
    products = tile.to(tl.float32) * u[None, :]
    for begin in tl.static_range(BLOCK_K, K, BLOCK_K):  # long vectors are plain ones
        inside = begin + k < K
        tile = tl.load(weight + begin + at, mask=here[:, None] & inside[None, :], other=0.0)
        products += tile.to(tl.float32) * tl.load(source + row * K + begin + k, mask=inside, other=0.0)[None, :]
    y = tl.sum(products, axis=1)
    if BIAS:
        y += tl.load(bias + n, mask=here, other=0.0).to(tl.float32)
    if ACT == 1:
        y = 0.5 * y * (1.0 + tl.math.erf(y * 0.7071067811865476))
    elif ACT == 2:
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))  # 0.5 (1 + tanh z) = sigmoid(2 z)
    elif ACT == 3:
        value = tl.sum(second.to(tl.float32) * u[None, :], axis=1)
        if BIAS:
            value += tl.load(bias + N + n, mask=here, other=0.0).to(tl.float32)
        y = y * tl.sigmoid(y) * value
    if CAP:
        y = cap * (2.0 * tl.sigmoid(2.0 * y / cap) - 1.0)
    tl.store(out + row * N + n, y, mask=here)
    if REAL > 0:
        place = row * tl.num_programs(0) + pid
        ranked = tl.where(n < REAL, y, float("-inf"))
        tl.store(best + place, tl.max(ranked))
        tl.store(where + place, pid * BLOCK_N + tl.argmax(ranked, axis=0))
        tl.store(bad + place, tl.sum(tl.where(here, y * 0.0, 0.0)))  # NaN if anything is not finite


@triton.jit
def _point(
    g: Any,
    x: Any,
    v: Any,
    new_x: Any,
    new_v: Any,
    u: Any,
    numbers: Any,
    v_gain: Any,
    gain: Any,
    shift: Any,
    eps: Any,
    K: tl.constexpr,
    PENDING: tl.constexpr,
    VELOCITY: tl.constexpr,
    AHEAD: tl.constexpr,
    V_NORM: tl.constexpr,
    NORM: tl.constexpr,
    GAIN: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """The next point of a row by itself, for those who need it often."""
    row, k = tl.program_id(0), tl.arange(0, BLOCK_K)
    found = _next_point(
        row, k, g, x, v, new_x, new_v, numbers, v_gain, gain, shift, eps, row >= 0,
        K, PENDING, VELOCITY, AHEAD, V_NORM, NORM, GAIN, SHIFT,
    )  # fmt: skip
    tl.store(u + row * K + k, found, mask=k < K)


@triton.jit
def _attend(
    qkv: Any,
    keys: Any,
    values: Any,
    positions: Any,
    cosines: Any,
    sines: Any,
    parts: Any,
    tops: Any,
    sums: Any,
    scale: Any,
    eps: Any,
    H: tl.constexpr,
    D: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROTARY: tl.constexpr,
    QK_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Program (s, row and head): one query over the s-th stretch of its keys; the stretch of the new key stores it."""
    stretch, row_head = tl.program_id(0), tl.program_id(1)
    row, head = row_head // H, row_head % H
    d = tl.arange(0, D)
    p = tl.load(positions + row)
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
    q *= q_scale
    stored_k = (k * k_scale).to(keys.dtype.element_ty)
    stored_v = v.to(values.dtype.element_ty)
    first = stretch * (BLOCK * BLOCKS)
    owns = (p >= first) & (p < first + BLOCK * BLOCKS)
    new = (row_head.to(tl.int64) * CAPACITY + p) * D + d
    tl.store(keys + new, stored_k, mask=owns & (d >= 0))
    tl.store(values + new, stored_v, mask=owns & (d >= 0))

    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    found = tl.zeros((D,), tl.float32)
    for block in tl.static_range(BLOCKS):
        t = first + block * BLOCK + tl.arange(0, BLOCK)
        at = (row_head.to(tl.int64) * CAPACITY + t)[:, None] * D + d[None, :]
        past = (t < p)[:, None] & (d >= 0)[None, :]
        is_new = (t == p)[:, None]
        some_k = tl.where(is_new, stored_k[None, :], tl.load(keys + at, mask=past, other=0.0)).to(tl.float32)
        some_v = tl.where(is_new, stored_v[None, :], tl.load(values + at, mask=past, other=0.0)).to(tl.float32)
        scores = tl.where(t <= p, tl.sum(some_k * q[None, :], axis=1), float("-inf"))
        highest = tl.maximum(top, tl.max(scores))
        level = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp(scores - level)
        kept = tl.exp(top - level)
        total = total * kept + tl.sum(weights)
        found = found * kept + tl.sum(weights[:, None] * some_v, axis=0)
        top = highest
    place = row_head * tl.num_programs(0) + stretch
    tl.store(parts + place * D + d, found)
    tl.store(tops + place, top)
    tl.store(sums + place, total)


@triton.jit
def _embed(
    tokens: Any,
    positions: Any,
    tok: Any,
    pos: Any,
    out: Any,
    K: tl.constexpr,
    LEARNED: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    row, k = tl.program_id(0), tl.arange(0, BLOCK_K)
    inside = k < K
    x = tl.load(tok + tl.load(tokens + row) * K + k, mask=inside, other=0.0).to(tl.float32)
    if LEARNED:
        x += tl.load(pos + tl.load(positions + row) * K + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * K + k, x, mask=inside)


@triton.jit
def _finish(
    best: Any,
    where: Any,
    bad: Any,
    tokens: Any,
    positions: Any,
    out: Any,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The likeliest token of every row from the best ones of all programs, and the next positions."""
    i = tl.arange(0, BLOCK)
    inside = i < PARTS
    wrong = tl.zeros((BLOCK,), tl.float32)
    for row in tl.static_range(ROWS):
        ranked = tl.load(best + row * PARTS + i, mask=inside, other=float("-inf"))
        wrong += tl.load(bad + row * PARTS + i, mask=inside, other=0.0)
        token = tl.load(where + row * PARTS + tl.argmax(ranked, axis=0))
        tl.store(tokens + row, token)
        tl.store(out + row, token)
        tl.store(positions + row, tl.load(positions + row) + 1)
    tl.store(out + ROWS, (tl.sum(wrong) == 0.0).to(tl.int64))


@dataclass
class Point:
    """Where an oracle looks: norm(x' + m v'), with x' and v' as at the top of this file.

    x (B, d); v, or None without look-ahead and without velocity in the update; g and new_x where an update is pending,
    new_v where it is one of the velocity; numbers: (4,) a, b, c, m; v_gain: that of LN_v; norm: LayerNorm, RMSNorm or
    None. Streams are fp32.
    """

    x: Tensor
    numbers: Tensor
    norm: nn.Module | None
    v: Tensor | None = None
    ahead: bool = False
    g: Tensor | None = None
    new_x: Tensor | None = None
    new_v: Tensor | None = None
    v_gain: Tensor | None = None
    v_eps: float | None = None

    def arguments(self) -> dict[str, Any]:
        x, norm = self.x, self.norm
        gain, shift = (getattr(norm, name, None) for name in ("weight", "bias"))
        eps = self.v_eps if norm is None else norm.eps
        return {
            "x": x,
            "v": x if self.v is None else self.v,
            "new_x": x if self.new_x is None else self.new_x,
            "new_v": x if self.new_v is None else self.new_v,
            "numbers": self.numbers,
            "v_gain": x if self.v_gain is None else self.v_gain,
            "gain": x if gain is None else gain,
            "shift": x if shift is None else shift,
            "eps": 1e-5 if eps is None else eps,
            "PENDING": self.g is not None,
            "VELOCITY": self.new_v is not None,
            "AHEAD": self.ahead,
            "V_NORM": self.v_gain is not None,
            "NORM": 0 if norm is None else 1 if isinstance(norm, nn.LayerNorm) else 2,
            "GAIN": gain is not None,
            "SHIFT": shift is not None,
        }


@dataclass
class Stretches:
    """What the programs of `attend` found: sums of values (B, H, S, head_dim), their largest scores and weights."""

    parts: Tensor
    tops: Tensor
    sums: Tensor


NOWHERE: dict[str, Any] = {
    **dict.fromkeys(("PENDING", "VELOCITY", "AHEAD", "V_NORM", "GAIN", "SHIFT"), False),
    "NORM": 0,
    "eps": 0.0,
}


def linear(
    source: Tensor | Point | Stretches,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "",
    cap: float | None = None,
    real: int = 0,
    block: int | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """act(W u + bias) for the u of few rows, (B, N) in fp32; for "swiglu" W holds the gate's rows, then the others.

    cap: the soft cap of the logits. real > 0: also each program's best of the first `real` outputs, where it is, and
    NaN if an output is not finite, each (B, programs). block: outputs per program, chosen by the shape if None.
    """
    act = ACTIVATIONS[activation]
    n, k = weight.shape[0] // (2 if act == 3 else 1), weight.shape[1]
    whole = triton.next_power_of_2(k)
    block_k = whole if not isinstance(source, Tensor) else min(whole, 1024)
    block_n = block or outputs_per_program(n, block_k)
    like = source if isinstance(source, Tensor) else source.x if isinstance(source, Point) else source.parts
    rows, programs = like.shape[0], triton.cdiv(n, block_n)
    out = torch.empty(rows, n, dtype=torch.float32, device=weight.device)
    arguments: dict[str, Any] = {name: out for name in ("x", "v", "new_x", "new_v", "numbers", "v_gain", "gain", "shift")}
    arguments |= {**NOWHERE, "source": like, "tops": out, "sums": out, "HOW": 0, "HEAD": 1, "SPLIT": 1}
    if isinstance(source, Point):
        arguments |= source.arguments() | {"source": like if source.g is None else source.g, "HOW": 1}
    elif isinstance(source, Stretches):
        split, head = source.parts.shape[-2:]
        arguments |= {"tops": source.tops, "sums": source.sums, "HOW": 2, "HEAD": head, "SPLIT": split}
    best, bad = (torch.empty(rows, programs, dtype=torch.float32, device=out.device) for _ in range(2))
    where = torch.empty(rows, programs, dtype=torch.long, device=out.device)
    _linear[(programs, rows)](
        weight,
        out if bias is None else bias,
        out,
        best=best,
        where=where,
        bad=bad,
        cap=cap or 1.0,
        N=n,
        K=k,
        BIAS=bias is not None,
        ACT=act,
        CAP=cap is not None,
        REAL=real,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        **arguments,
    )
    return (out, best, where, bad) if real else out


def outputs_per_program(n: int, block_k: int) -> int:
    """As few as keep some hundred programs busy, as many as the registers hold: 4, 8 or 16 at width 768."""
    wanted = 4 if n <= 1536 else 8 if n <= 16_384 else 16
    return max(1, min(wanted, 2 * TILE // block_k if wanted == 16 else TILE // block_k))


def point(source: Point) -> Tensor:
    """The next point of the streams, (B, d), stored by itself; the update is stored as well."""
    u = torch.empty_like(source.x)
    rows, k = u.shape
    g = source.x if source.g is None else source.g
    _point[(rows,)](g, u=u, K=k, BLOCK_K=triton.next_power_of_2(k), num_warps=4, **source.arguments())
    return u


def attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    turns: tuple[Tensor, Tensor] | None = None,
    qk_eps: float | None = None,
) -> Stretches:
    """Attention of one new token per row over its past; its key and value are written to the cache.

    qkv (B, 3 d) fp32; keys and values (B, H, capacity, head_dim); positions (B, 1): where the new tokens stand. turns:
    cosines and sines of rotary positions, (capacity, head_dim / 2); qk_eps: of the norm of queries and keys, if any.
    """
    rows, heads, capacity, head_dim = keys.shape
    blocks = triton.cdiv(triton.cdiv(capacity, KEYS), STRETCHES)
    split = triton.cdiv(capacity, KEYS * blocks)
    parts = torch.empty(rows, heads, split, head_dim, dtype=torch.float32, device=qkv.device)
    tops, sums = (torch.empty(rows, heads, split, dtype=torch.float32, device=qkv.device) for _ in range(2))
    cosines, sines = (qkv, qkv) if turns is None else turns
    _attend[(split, rows * heads)](
        qkv,
        keys,
        values,
        positions,
        cosines,
        sines,
        parts,
        tops,
        sums,
        head_dim**-0.5,
        qk_eps or 0.0,
        H=heads,
        D=head_dim,
        CAPACITY=capacity,
        ROTARY=turns is not None,
        QK_NORM=qk_eps is not None,
        BLOCK=min(KEYS, triton.next_power_of_2(capacity)),
        BLOCKS=blocks,
        num_warps=4,
    )
    return Stretches(parts, tops, sums)


def embed(tokens: Tensor, positions: Tensor, tok: Tensor, pos: Tensor | None) -> Tensor:
    """The sum of a token table's and a position table's rows, (B, d) in fp32."""
    rows, k = tokens.shape[0], tok.shape[1]
    out = torch.empty(rows, k, dtype=torch.float32, device=tok.device)
    learned = pos is not None
    _embed[(rows,)](
        tokens, positions, tok, pos if learned else tok, out, K=k, LEARNED=learned, BLOCK_K=triton.next_power_of_2(k)
    )
    return out


def finish(best: Tensor, where: Tensor, bad: Tensor, tokens: Tensor, positions: Tensor, out: Tensor) -> None:
    """Greedy choice from the last three results of `linear`: tokens, positions and `out` (B + 1,) as a decoder has them."""
    rows, parts = best.shape
    block = triton.next_power_of_2(parts)
    _finish[(1,)](best, where, bad, tokens, positions, out, ROWS=rows, PARTS=parts, BLOCK=block, num_warps=8)
