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


@triton.jit
def mapped(raw: tl.tensor, constant: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
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
def slope(raw: tl.tensor, constant: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
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
def quotient(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a / b, and 0 where b is 0."""
    return tl.where(b == 0, 0.0, a / tl.where(b == 0, 1.0, b))


@triton.jit
def tile_columns(CHUNKS: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """The columns of a tile (chunks, rows, columns of a chunk), shape (CHUNKS, 1, CHUNK).

    With rows in the middle, Triton gives a row of CHUNK <= 256 numbers to one warp (8 per thread), the rows to the
    warps and the chunks to registers: sums over a row need no barrier, and a chunk beyond the width of the tensor
    (the fourth of 768) is known to be empty at compile time.
    """
    return (tl.arange(0, CHUNKS) * CHUNK)[:, None, None] + tl.arange(0, CHUNK)[None, None, :]


@triton.jit
def row_sum(a: tl.tensor) -> tl.tensor:
    """(CHUNKS, ROWS, CHUNK) -> (ROWS,)"""
    return tl.sum(tl.sum(a, 0), 1)


@triton.jit
def over_row(a: tl.tensor) -> tl.tensor:
    """(ROWS,) -> (1, ROWS, 1)"""
    return a[None, :, None]


@triton.jit
def thread_sums(a: tl.tensor) -> tl.tensor:
    """Sums of the numbers that one thread holds: what is added up to a scalar at the very end stays this small."""
    a = tl.sum(a, 0)
    return tl.sum(tl.reshape(a, (a.shape[0], a.shape[1] // 8, 8)), 2)


@triton.jit
def row_statistics(
    p: tl.tensor, column: tl.tensor, eps: tl.tensor, CENTRED: tl.constexpr, D: tl.constexpr
) -> tl.tensor:
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
def standardised(p: tl.tensor, mean: tl.tensor, r: tl.tensor) -> tl.tensor:
    """(p - mean) r, as one multiplication and addition."""
    return p * over_row(r) - over_row(mean * r)


@triton.jit
def row_norm_backward(c: tl.tensor, hat: tl.tensor, r: tl.tensor, CENTRED: tl.constexpr, D: tl.constexpr) -> tl.tensor:
    """Gradient of the norm's input from that of `hat`, and mean(c hat) of each row."""
    along = row_sum(c * hat) / D
    dp = c * over_row(r) - hat * over_row(along * r)
    if CENTRED:
        dp = c * over_row(r) - over_row(row_sum(c) / D * r) - hat * over_row(along * r)
    return dp, along


@triton.jit
def load_tile(source: tl.tensor, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    return tl.load(source + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_columns(source: tl.tensor, columns: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """A gain or bias in the shape of `columns`, so that it lies in the threads where it is needed."""
    return tl.load(source + columns, mask=columns < D, other=0.0).to(tl.float32)


@triton.jit
def store_columns(line: tl.tensor, columns: tl.tensor, total: tl.tensor, D: tl.constexpr) -> None:
    """The rows' sums of a tile, added up, into a line of partial sums."""
    tl.store(line + columns, tl.sum(total, 1, keep_dims=True), mask=columns < D)


@triton.jit
def store_normalised(
    u: tl.tensor, at: tl.tensor, mask: tl.tensor, hat: tl.tensor, gain: tl.tensor, bias: tl.tensor,
    columns: tl.tensor, D: tl.constexpr,
) -> None:  # fmt: skip
    """u = gain hat + bias."""
    if gain is not None:
        hat = hat * load_columns(gain, columns, D)
    if bias is not None:
        hat = hat + load_columns(bias, columns, D)
    tl.store(u + at, hat, mask=mask)


@triton.jit
def hat_gradient(
    du: tl.tensor, hat: tl.tensor, gain: tl.tensor, bias: tl.tensor, sum_gain: tl.tensor, sum_bias: tl.tensor,
    columns: tl.tensor, D: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What u = gain hat + bias hands back: dL/dhat, and the running sums of the gradients of gain and bias."""
    if bias is not None:
        sum_bias += du
    if gain is not None:
        sum_gain += du * hat
        du = du * load_columns(gain, columns, D)
    return du, sum_gain, sum_bias


@triton.jit
def store_vector_sums(
    line: tl.tensor, columns: tl.tensor, gain: tl.tensor, bias: tl.tensor, sum_gain: tl.tensor, sum_bias: tl.tensor,
    D: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Write those of the two sums that belong to a parameter; where the next one goes."""
    if gain is not None:
        store_columns(line, columns, sum_gain, D)
        line += D
    if bias is not None:
        store_columns(line, columns, sum_bias, D)
        line += D
    return line


class Tile(NamedTuple):
    """How a kernel is launched: columns of a chunk, rows at once, warps, and for a persistent grid pipeline stages,
    programs per multiprocessor and the most registers a thread may take."""

    chunk: int
    rows: int
    warps: int
    stages: int = 1
    programs: int = 0
    registers: int | None = None

    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, **({"maxnreg": self.registers} if self.registers else {})}


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


def chunks(d: int, tile: Tile) -> int:
    return triton.next_power_of_2(triton.cdiv(d, tile.chunk))


def persistent(n: int, tile: Tile, device: torch.device) -> tuple[int, int]:
    """Programs of a persistent grid over n rows, and how many tiles each goes through."""
    tiles = max(1, triton.cdiv(n, tile.rows))
    programs = min(tiles, multiprocessors(device) * tile.programs)
    return programs, triton.cdiv(tiles, programs)


def nothing(like: Tensor) -> Tensor:
    """An operator returns tensors only: this one stands for an output that does not exist."""
    return like.new_empty(0)


def dense(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def columns(vectors: tuple[Tensor | None, ...], d: int, scalars: int) -> int:
    """Width of a line of partial sums: the vectors that exist, then all scalars."""
    return sum(v is not None for v in vectors) * d + scalars


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
