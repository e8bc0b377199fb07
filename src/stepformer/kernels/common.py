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


def code(scalar: Scalar | None) -> int:
    """The range of a scalar as the kernels read it."""
    if scalar is None:
        return -2
    return -1 if scalar.raw is None else CODES[scalar.kind]


@triton.jit
def mapped(raw: Any, constant: Any, KIND: tl.constexpr) -> Any:
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
def slope(raw: Any, constant: Any, KIND: tl.constexpr) -> Any:
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
def quotient(a: Any, b: Any) -> Any:
    """a / b, and 0 where b is 0."""
    return tl.where(b == 0, 0.0, a / tl.where(b == 0, 1.0, b))


@triton.jit
def row_statistics(p: Any, column: Any, eps: Any, CENTRED: tl.constexpr, D: tl.constexpr) -> Any:
    """Mean and reciprocal deviation of each row of a tile (rows, columns); `column` says which columns exist."""
    if CENTRED:
        mean = tl.sum(p, 1) / D
        q = tl.where(column, p - mean[:, None], 0.0)
    else:
        mean = tl.sum(p, 1) * 0
        q = p
    return mean, tl.rsqrt(tl.sum(q * q, 1) / D + eps)


@triton.jit
def row_norm_backward(c: Any, hat: Any, r: Any, CENTRED: tl.constexpr, D: tl.constexpr) -> Any:
    """Gradient of the norm's input from that of `hat`, and mean(c hat) of each row."""
    along = tl.sum(c * hat, 1) / D
    if CENTRED:
        dp = (c - (tl.sum(c, 1) / D)[:, None] - hat * along[:, None]) * r[:, None]
    else:
        dp = (c - hat * along[:, None]) * r[:, None]
    return dp, along


@triton.jit
def load_tile(source: Any, at: Any, mask: Any) -> Any:
    return tl.load(source + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_columns(source: Any, columns: Any, D: tl.constexpr) -> Any:
    return tl.load(source + columns, mask=columns < D, other=0.0).to(tl.float32)


class Tile(NamedTuple):
    """How a kernel is launched: rows at once, warps, stages of its pipeline, programs per multiprocessor."""

    rows: int
    warps: int
    stages: int = 1
    programs: int = 0


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """On the CPU (interpreter) one, so that programs have several rows to go through."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def width(d: int) -> int:
    """Columns of a tile: a power of two."""
    return max(16, triton.next_power_of_2(d))


def persistent(n: int, tile: Tile, device: torch.device) -> tuple[int, int]:
    """Programs of a persistent grid over n rows, and how many tiles each goes through."""
    tiles = max(1, triton.cdiv(n, tile.rows))
    programs = min(tiles, multiprocessors(device) * tile.programs)
    return programs, triton.cdiv(tiles, programs)


def nothing(like: Tensor) -> Tensor:
    """An operator returns tensors only: this one stands for an output that does not exist."""
    return like.new_empty(0)


def like_first(grad: Tensor | None, *inputs: Tensor | None) -> list[Tensor | None]:
    """One gradient for several inputs that were added, in the dtype of each."""
    return [None if grad is None or t is None else grad.to(t.dtype) for t in inputs]
