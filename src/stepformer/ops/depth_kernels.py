"""Attention over depth in one kernel a call and direction: each of n sources is read once.

Forward, for the sources v_i of a token, i = 1 .. n, and the call's vector w, by the online softmax:

    s_i = w . v_i r_i,  r_i = 1 / rms(v_i),    h = n sum_i c_i v_i,  c_i = e^(s_i) / sum_j e^(s_j) = e^(s_i - l) / n

and l of each token is left behind. Backward, with D = <dh, h> / n: ds_i = e^(s_i - l) (<dh, v_i> - D). A source that m
calls read would have its gradient read and written m times if every call added to it. Here the calls leave dh and D
behind, and the gradient of a source is gathered, when it is asked for, from those of all calls that have read it:

    dv = sum over calls of e^(s - l) dh + ds (r w - s r^2 / d v)

so that a source costs one read in each call that uses it, forward and backward. What is left for the vectors w is
dw = sum over tokens and sources of (ds r) v: a product of matrices, `weight_kernel`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepformer.ops.common import (
    load_columns,
    load_tile,
    multiprocessors,
    over_row,
    row_sum,
    row_sums,
    row_tile,
    sum_lines,
    tile_columns,
)


@triton.jit
def score(v, w, eps, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """w . v / rms(v) of each row."""
    dot, square = row_sums(v * w, v * v)
    return dot * tl.rsqrt(square / D + eps)


@triton.jit(do_not_specialize=["count"])
def mix_kernel(  # type: ignore[no-untyped-def]
    stack, newest, kept, w, h, levels, n, step, count, eps,
    D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """h and l from `count` sources of a stack, `step` numbers apart, and the newest, which is written to `kept`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tile_columns(CHUNKS, CHUNK)
    mask = over_row(rows < n) & (columns < D)
    at = over_row(rows.to(tl.int64)) * D + columns
    weight = load_columns(w, columns, D)
    mixed = load_tile(newest, at, mask)
    if kept is not None:
        tl.store(kept + at, mixed, mask=mask)
    top = score(mixed, weight, eps, D)
    total = top * 0 + 1.0
    for _ in range(count):
        v = load_tile(stack, at, mask)
        stack += step
        s = score(v, weight, eps, D)
        higher = tl.maximum(top, s)
        old, new = tl.exp(top - higher), tl.exp(s - higher)
        mixed = mixed * over_row(old) + v * over_row(new)
        total = total * old + new
        top = higher
    tl.store(h + at, mixed * over_row((count + 1) / total), mask=mask)
    if levels is not None:
        tl.store(levels + rows, top + tl.log(total / (count + 1)), mask=rows < n)


@triton.jit
def term(g, v, w, r, level, mean):  # type: ignore[no-untyped-def]
    """What a call whose h has the gradient g gives to a source v: e^(s - l), ds r, and ds s."""
    dot, s = row_sums(g * v, w * v)
    s *= r
    share = tl.exp(s - level)
    ds = share * (dot - mean)
    return share, ds * r, ds * s


@triton.jit(do_not_specialize=["calls", "sources"])
def gather_kernel(  # type: ignore[no-untyped-def]
    source, handed, own, h, left, grads, weights, levels, means, slopes, gradient, n, step, calls, sources, eps,
    D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of a source from those of the calls that have read it, and from what was `handed` to it.

    `own` is that of the call which runs backward now, with its result `h` of so many `sources`: it is `left` behind for
    older ones. Those of `calls` later ones lie in `grads`, `step` numbers apart. `weights`, a line of D for each call,
    and `levels` (l), `means` (D of the text), `slopes` (ds r, written), a line of n, begin with the own call, if any.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tile_columns(CHUNKS, CHUNK)
    inside = rows < n
    mask = over_row(inside) & (columns < D)
    at = over_row(rows.to(tl.int64)) * D + columns
    v = load_tile(source, at, mask)
    r = tl.rsqrt(row_sum(v * v) / D + eps)
    found = v * 0
    along = r * 0
    if handed is not None:
        found += load_tile(handed, at, mask)
    if own is not None:
        g = load_tile(own, at, mask)
        tl.store(left + at, g, mask=mask)
        mean = row_sum(g * load_tile(h, at, mask)) / sources
        tl.store(means + rows, mean, mask=inside)
        w = load_columns(weights, columns, D)
        share, slope, more = term(g, v, w, r, tl.load(levels + rows, mask=inside, other=0.0), mean)
        tl.store(slopes + rows, slope, mask=inside)
        found += over_row(share) * g + over_row(slope) * w
        along += more
        weights += D
        levels += n
        means += n
        slopes += n
    for _ in range(calls):
        g = load_tile(grads, at, mask)
        w = load_columns(weights, columns, D)
        level = tl.load(levels + rows, mask=inside, other=0.0)
        share, slope, more = term(g, v, w, r, level, tl.load(means + rows, mask=inside, other=0.0))
        tl.store(slopes + rows, slope, mask=inside)
        found += over_row(share) * g + over_row(slope) * w
        along += more
        grads += step
        weights += D
        levels += n
        means += n
        slopes += n
    tl.store(gradient + at, found - v * over_row(along * r * r / D), mask=mask)


@triton.jit(do_not_specialize=["calls", "turns"])
def weight_kernel(  # type: ignore[no-untyped-def]
    slopes, source, lines, n, calls, turns,
    D: tl.constexpr, CALLS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """slopes (calls, n) times a source (n, D): a program has some columns, and a share of the rows for its line."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    lines_of = tl.program_id(2) * CALLS + tl.arange(0, CALLS)
    total = tl.zeros((CALLS, COLUMNS), tl.float32)
    for turn in range(turns):
        rows = (tl.program_id(1) * turns + turn) * ROWS + tl.arange(0, ROWS)
        wanted = (lines_of < calls)[:, None] & (rows < n)[None, :]
        a = tl.load(slopes + lines_of[:, None] * n + rows[None, :], mask=wanted, other=0.0)
        at = rows.to(tl.int64)[:, None] * D + columns[None, :]
        v = tl.load(source + at, mask=(rows < n)[:, None] & (columns < D)[None, :], other=0.0).to(tl.float32)
        total += tl.dot(a, v, input_precision="ieee" if EXACT else "tf32")
    line = lines + (tl.program_id(1) * calls + lines_of[:, None]) * D + columns[None, :]
    tl.store(line, total, mask=(lines_of < calls)[:, None] & (columns < D)[None, :])


def mix(
    stack: Tensor, count: int, newest: Tensor, kept: Tensor | None, w: Tensor, h: Tensor, levels: Tensor | None,
    eps: float,
) -> None:  # fmt: skip
    """Launch `mix_kernel`: the newest source is written to `kept`, the result to `h`."""
    d = newest.shape[-1]
    n, tile = newest.numel() // d, row_tile(d)
    mix_kernel[(triton.cdiv(n, tile.rows),)](stack, newest, kept, w, h, levels, n, n * d, count, eps, **tile.options(d))


def gather(source: Tensor, gradient: Tensor, later: dict[str, Any], calls: int, sources: int, eps: float) -> None:
    """Launch `gather_kernel`; `later` are its tensors by name."""
    d = source.shape[-1]
    n, tile = source.numel() // d, row_tile(d)
    gather_kernel[(triton.cdiv(n, tile.rows),)](
        source, gradient=gradient, n=n, step=n * d, calls=calls, sources=sources, eps=eps, **later, **tile.options(d)
    )


def weight_gradient(slopes: Tensor, source: Tensor) -> Tensor:
    """slopes (calls, n) times a source (..., d), in fp32."""
    calls, n = slopes.shape
    d = source.shape[-1]
    rows, columns = 64, 64 if d <= 64 else 128
    across, down = triton.cdiv(d, columns), triton.cdiv(calls, 32)
    shares = max(1, min(triton.cdiv(n, rows), 2 * multiprocessors(source.device) // across))
    turns = triton.cdiv(triton.cdiv(n, rows), shares)
    lines = torch.empty(shares, calls * d, dtype=torch.float32, device=source.device)
    weight_kernel[(across, shares, down)](
        slopes, source, lines, n, calls, turns,
        D=d, CALLS=16 if calls <= 16 else 32, ROWS=rows, COLUMNS=columns, EXACT=source.dtype == torch.float32,
    )  # fmt: skip
    return sum_lines(lines).view(calls, d)
