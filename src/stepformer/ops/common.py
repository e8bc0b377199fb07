"""What the stream passes share: learned scalars mapped inside a kernel, norms of rows, tiles and column sums.

A scalar reaches a kernel as its raw parameter (shape (1,)), a range and a constant factor,

    value = constant * map(raw),   map = identity (free), sigmoid (unit), softplus (positive),

so that no tiny kernel maps it before; the backward returns the gradient of the raw parameter. Norms of a row p:

    hat = (p - mean) r,  r = 1 / sqrt(mean((p - mean)^2) + eps)        (LayerNorm; RMSNorm: mean = 0)
    dp = r (c - mean(c) - hat mean(c hat)),  c = dL/dhat               (RMSNorm: without mean(c))

Gradients of parameters: every program of a persistent grid adds up its rows in registers and writes one line of a
(programs, width) buffer; one sum over the lines follows. No atomics, so the same inputs give the same bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

Range = Literal["free", "unit", "positive"]
Norms = tuple[tuple[Tensor | None, Tensor | None], ...]

ABSENT = tl.constexpr(-2)  # the term with this scalar is not there at all
CONSTANT = tl.constexpr(-1)  # only the constant factor, nothing learned
UNIT = tl.constexpr(1)
POSITIVE = tl.constexpr(2)
CODES: dict[str, int] = {"free": 0, "unit": 1, "positive": 2}


class Scalar(NamedTuple):
    """A coefficient as a kernel takes it: `constant * map(raw)`, or just `constant` without a raw parameter."""

    raw: Tensor | None = None
    kind: Range = "free"
    constant: float = 1.0

    def value(self) -> Tensor | float:
        if self.raw is None:
            return self.constant
        mapped = self.raw
        if self.kind != "free":
            mapped = torch.sigmoid(self.raw) if self.kind == "unit" else F.softplus(self.raw)
        return mapped if self.constant == 1.0 else self.constant * mapped

    def times(self, factor: float) -> Scalar:
        return Scalar(self.raw, self.kind, factor * self.constant)


ONE = Scalar()


def code(scalar: Scalar | None) -> int:
    """The range of a scalar as the kernels read it."""
    if scalar is None:
        return -2
    return -1 if scalar.raw is None else CODES[scalar.kind]


def taken_apart(scalars: tuple[Scalar | None, ...]) -> tuple[Any, ...]:
    """Scalars as operators take them: each raw parameter, the list of ranges and that of constants."""
    raws = (None if s is None else s.raw for s in scalars)
    return *raws, [code(s) for s in scalars], [1.0 if s is None else s.constant for s in scalars]


def next_step(beta: Scalar | None, gamma: Scalar | None, scale: float) -> Scalar | None:
    """scale * gamma of the pass that will consume a velocity; nothing without the beta that it goes with."""
    return None if beta is None else (gamma or ONE).times(scale)


@triton.jit
def mapped(raw, constant, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The value of a scalar; `raw` points to its parameter."""
    if KIND < 0:
        value = constant
    else:
        y = tl.load(raw).to(tl.float32)
        if KIND == UNIT:
            y = 1 / (1 + tl.exp(-y))
        elif KIND == POSITIVE:
            # log(1 + e) loses the digits of a small e; log(1 + e) / ((1 + e) - 1) loses the same ones (Kahan)
            e = tl.exp(-tl.abs(y))
            one_more = 1 + e
            lost = tl.where(one_more == 1, 1.0, one_more - 1)
            y = tl.maximum(y, 0.0) + tl.where(one_more == 1, e, tl.log(one_more) * (e / lost))
        value = y * constant
    return value


@triton.jit
def slope(raw, constant, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """d value / d raw."""
    y = tl.load(raw).to(tl.float32)
    if KIND == UNIT:
        e = 1 / (1 + tl.exp(-y))
        result = constant * e * (1 - e)
    elif KIND == POSITIVE:
        result = constant / (1 + tl.exp(-y))
    else:
        result = y * 0 + constant
    return result


@triton.jit
def quotient(a, b):  # type: ignore[no-untyped-def]
    """a / b, and 0 where b is 0."""
    return tl.where(b == 0, 0.0, a / tl.where(b == 0, 1.0, b))


@triton.jit
def tile_columns(CHUNKS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The columns of a tile (chunks, rows, columns of a chunk), shape (CHUNKS, 1, CHUNK).

    With rows in the middle, Triton gives a row of CHUNK <= 256 numbers to one warp (8 per thread) and the chunks to
    registers, if the program has one warp or one chunk: sums over a row need no barrier, and a chunk beyond the width
    of the tensor (the fourth of 768) is known to be empty at compile time. With several warps and rows triton 3.7 gives
    the rows to the warps, but 3.6 the chunks, and then sums go through shared memory.
    """
    return (tl.arange(0, CHUNKS) * CHUNK)[:, None, None] + tl.arange(0, CHUNK)[None, None, :]


@triton.jit
def row_sum(a):  # type: ignore[no-untyped-def]
    """(CHUNKS, ROWS, CHUNK) -> (ROWS,)"""
    return tl.sum(tl.sum(a, 0), 1)


@triton.jit
def row_sums(a, b):  # type: ignore[no-untyped-def]
    """Two of them at the price of one: warps meet once."""
    return tl.split(tl.sum(tl.sum(tl.join(a, b), 0), 1))


@triton.jit
def over_row(a):  # type: ignore[no-untyped-def]
    """(ROWS,) -> (1, ROWS, 1)"""
    return a[None, :, None]


@triton.jit
def thread_sums(a):  # type: ignore[no-untyped-def]
    """Sums of the numbers that one thread holds: what is added up to a scalar at the very end stays this small."""
    a = tl.sum(a, 0)
    return tl.sum(tl.reshape(a, (a.shape[0], a.shape[1] // 8, 8)), 2)


@triton.jit
def row_statistics(p, column, eps, CENTRED: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mean and reciprocal deviation of each row of a tile; `column` says which columns exist."""
    if CENTRED:
        mean = row_sum(p) / D
        q = tl.where(column, p - over_row(mean), 0.0)
        square = row_sum(q * q)
    else:
        square = row_sum(p * p)
        mean = square * 0
    return mean, tl.rsqrt(square / D + eps)


@triton.jit
def standardised(p, mean, r):  # type: ignore[no-untyped-def]
    """(p - mean) r, as one multiplication and addition."""
    return p * over_row(r) - over_row(mean * r)


@triton.jit
def row_norm_backward(c, hat, r, CENTRED: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gradient of the norm's input from that of `hat`, and mean(c hat) of each row."""
    if CENTRED:
        total, along = row_sums(c, c * hat)
        dp = c * over_row(r) - over_row(total / D * r) - hat * over_row(along / D * r)
    else:
        along = row_sum(c * hat)
        dp = c * over_row(r) - hat * over_row(along / D * r)
    return dp, along / D


@triton.jit
def load_tile(source, at, mask):  # type: ignore[no-untyped-def]
    return tl.load(source + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_stored(  # type: ignore[no-untyped-def]
    source, rows, n, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr
):
    """A tile of rows as it lies in memory, and 0 where there is no tensor: cheap to hold until it is needed.

    A tensor of int32 holds two numbers of bf16 in each: single ones would take a register each.
    """
    if source is None:
        tile = 0
    else:
        PACK: tl.constexpr = 2 if source.dtype.element_ty == tl.int32 else 1
        columns = tile_columns(CHUNKS, CHUNK // PACK)
        at = over_row(rows.to(tl.int64)) * (D // PACK) + columns
        tile = tl.load(source + at, mask=over_row(rows < n) & (columns < D // PACK), other=0)
    return tile


@triton.jit
def load_four(  # type: ignore[no-untyped-def]
    a, b, c, d, rows, n, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr
):
    """The same rows of four tensors as they are stored."""
    return (
        load_stored(a, rows, n, D, CHUNKS, CHUNK),
        load_stored(b, rows, n, D, CHUNKS, CHUNK),
        load_stored(c, rows, n, D, CHUNKS, CHUNK),
        load_stored(d, rows, n, D, CHUNKS, CHUNK),
    )


@triton.jit
def numbers(stored):  # type: ignore[no-untyped-def]
    """What `load_stored` gave, in fp32. The upper half of an fp32 number is a bf16 number."""
    if stored.dtype == tl.int32:
        low = (stored << 16).to(tl.float32, bitcast=True)
        high = (stored & -65536).to(tl.float32, bitcast=True)
        result = tl.reshape(tl.join(low, high), (stored.shape[0], stored.shape[1], 2 * stored.shape[2]))
    else:
        result = stored.to(tl.float32)
    return result


@triton.jit
def load_columns(source, columns, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """A gain or bias in the shape of `columns`, so that it lies in the threads where it is needed."""
    return tl.load(source + columns, mask=columns < D, other=0.0).to(tl.float32)


@triton.jit
def load_gain(source, columns, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """A gain by which something is divided later: one that is exactly 0 counts as 1e-20, and can learn."""
    gain = load_columns(source, columns, D)
    return tl.where((gain == 0) & (columns < D), 1e-20, gain)


@triton.jit
def store_columns(line, columns, total, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows' sums of a tile, added up, into a line of partial sums."""
    tl.store(line + columns, tl.sum(total, 1, keep_dims=True), mask=columns < D)


@triton.jit
def store_normalised(u, at, mask, hat, gain, bias, columns, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """u = gain hat + bias."""
    if gain is not None:
        hat = hat * load_columns(gain, columns, D)
    if bias is not None:
        hat = hat + load_columns(bias, columns, D)
    tl.store(u + at, hat, mask=mask)


@triton.jit
def held_columns(source, columns, D: tl.constexpr, HOLD: tl.constexpr):  # type: ignore[no-untyped-def]
    """A gain to keep in registers, or nothing."""
    if HOLD and source is not None:
        held = load_columns(source, columns, D)
    else:
        held = 0.0
    return held


@triton.jit
def hat_gradient(  # type: ignore[no-untyped-def]
    du, hat, gain, bias, sum_gain, sum_bias, held, columns, D: tl.constexpr, HOLD: tl.constexpr
):
    """What u = gain hat + bias hands back: dL/dhat, and the running sums of the gradients of gain and bias."""
    if bias is not None:
        sum_bias += du
    if gain is not None:
        sum_gain += du * hat
        du = du * (held if HOLD else load_columns(gain, columns, D))
    return du, sum_gain, sum_bias


@triton.jit
def store_vector_sums(line, columns, gain, bias, sum_gain, sum_bias, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write those of the two sums that belong to a parameter; where the next one goes."""
    if gain is not None:
        store_columns(line, columns, sum_gain, D)
        line += D
    if bias is not None:
        store_columns(line, columns, sum_bias, D)
        line += D
    return line


@triton.jit
def sum_lines_kernel(  # type: ignore[no-untyped-def]
    lines, total, count, WIDTH: tl.constexpr, TURNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The sum over the lines of (count, WIDTH); a program has COLUMNS of them, and its loads do not wait in line."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    rows = tl.arange(0, ROWS)[:, None]
    added = tl.zeros((ROWS, COLUMNS), tl.float32)
    for turn in tl.static_range(TURNS):
        line = turn * ROWS + rows
        added += tl.load(lines + line * WIDTH + columns, mask=(line < count) & (columns < WIDTH), other=0.0)
    tl.store(total + columns, tl.sum(added, 0, keep_dims=True), mask=columns < WIDTH)


class Tile(NamedTuple):
    """How a kernel is launched: columns of a chunk, rows at once, warps, and for a persistent grid pipeline stages,
    programs per multiprocessor, the most registers a thread may take, whether the next tile is loaded into registers
    before this one is computed, and whether gains stay in registers."""

    chunk: int
    rows: int
    warps: int
    stages: int = 1
    programs: int = 0
    registers: int | None = None
    ahead: bool = False
    hold: bool = False

    def options(self, d: int) -> dict[str, int]:
        """Of a launch for rows of d numbers."""
        sizes = {"D": d, "CHUNKS": chunks(d, self), "CHUNK": self.chunk, "ROWS": self.rows, "num_warps": self.warps}
        return {**sizes, "maxnreg": self.registers} if self.registers else sizes


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """On the CPU (interpreter) one, so that programs have several rows to go through."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def row_tile(d: int, rows: int = 4, programs: int = 0) -> Tile:
    """A warp per row, and more of them when a thread would hold more than 24 numbers of it.

    `programs` is how many fit on a multiprocessor when each is one warp.
    """
    warps = triton.next_power_of_2(triton.cdiv(d, 768))
    chunk = min(256 * warps, max(16, triton.next_power_of_2(d)))
    return Tile(chunk, rows if d <= 256 else 1, warps, programs=max(1, programs // warps))


SHARED = 224 * 1024  # bytes of shared memory of a multiprocessor that programs may take together
STAGES = 3  # two copies of a row under way: with fewer the copy would only start when the row before is done


def column_bytes(*tensors: Tensor | None) -> int:
    return sum(t.element_size() for t in tensors if t is not None)


def buffered(tile: Tile, d: int, width: int) -> Tile:
    """`tile` with rows on their way through shared memory, and as many programs as it has room for.

    The gains stay in registers then: whatever a pipelined loop loads is copied, and they would be for each row.
    """
    each = (STAGES - 1) * width * chunks(d, tile) * tile.chunk + 2048
    programs = min(tile.programs, SHARED // each)
    return tile._replace(stages=STAGES, hold=True, programs=programs) if programs else tile


def chunks(d: int, tile: Tile) -> int:
    return triton.next_power_of_2(triton.cdiv(d, tile.chunk))


def persistent(n: int, tile: Tile, device: torch.device) -> tuple[int, int]:
    """Programs of a persistent grid over n rows, and how many tiles each goes through."""
    tiles = max(1, triton.cdiv(n, tile.rows))
    programs = min(tiles, multiprocessors(device) * tile.programs)
    return programs, triton.cdiv(tiles, programs)


def dense(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def packed(t: Tensor | None) -> Tensor | None:
    """`dense`, and bf16 of an even width as pairs in int32, the form in which `load_stored` holds them."""
    t = dense(t)
    if t is None or t.dtype != torch.bfloat16 or t.shape[-1] % 2 or t.storage_offset() % 2:
        return t
    return t.view(torch.int32)


def columns(vectors: tuple[Tensor | None, ...], d: int, scalars: int) -> int:
    """Width of a line of partial sums: the vectors that exist, then all scalars, up to whole sectors of 32 bytes."""
    return -(-(sum(v is not None for v in vectors) * d + scalars) // 8) * 8


SUM = (128, 16, 8)  # lines at once, columns and warps of a program of the sum


def sum_lines(lines: Tensor) -> Tensor:
    """`lines.sum(0)`, for some hundreds of lines of some thousand numbers that lie in the cache: all of the
    multiprocessors at once, with every load under way before the first is needed."""
    count, width = lines.shape
    total = lines.new_empty(width)
    rows, columns_, warps = SUM
    sum_lines_kernel[(triton.cdiv(width, columns_),)](
        lines, total, count, WIDTH=width, TURNS=triton.cdiv(count, rows), ROWS=rows, COLUMNS=columns_, num_warps=warps
    )
    return total


def split_sums(sums: Tensor, vectors: tuple[Tensor | None, ...], raws: tuple[Tensor | None, ...], d: int) -> list[Any]:
    """A line of sums as gradients of the vectors and the raw scalars, None where there is no such parameter."""
    grads: list[Tensor | None] = []
    start = 0
    for vector in vectors:
        grads.append(None if vector is None else sums[start : start + d].to(vector.dtype))
        start += 0 if vector is None else d
    for k, raw in enumerate(raws):
        grads.append(None if raw is None else sums[start + k : start + k + 1].to(raw.dtype).view(raw.shape))
    return grads
