"""What kernels of rows share: norms of rows, tiles and column sums.

Gradients of parameters: every program of a persistent grid adds up its rows in registers and writes one line of a
(programs, width) buffer; one sum over the lines follows. No atomics, so the same inputs give the same bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


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
def four_row_sums(a, b, c, d):  # type: ignore[no-untyped-def]
    """Four of them at the price of one."""
    ac, bd = tl.split(tl.sum(tl.sum(tl.join(tl.join(a, c), tl.join(b, d)), 0), 1))
    a, c = tl.split(ac)
    b, d = tl.split(bd)
    return a, b, c, d


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
def _both(n, mean, square, m, other, more):  # type: ignore[no-untyped-def]
    """Number, mean and sum of squared deviations of two parts of a row together (Chan, Golub and LeVeque)."""
    share = m / tl.maximum(n + m, 1.0)
    apart = other - mean
    return n + m, mean + apart * share, square + more + apart * apart * n * share


@triton.jit
def row_statistics_at_once(p, column, eps, CENTRED: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same for a tile of one chunk, in one pass, which waits for the other warps once.

    Sums of numbers and of their squares would lose the variance by cancellation where the mean is large.
    """
    if CENTRED:
        _, mean, square = tl.reduce((column.to(tl.float32) + tl.zeros_like(p), p, tl.zeros_like(p)), 2, _both)
        mean, square = tl.sum(mean, 0), tl.sum(square, 0)
    else:
        square = row_sum(p * p)
        mean = square * 0
    return mean, tl.rsqrt(square / D + eps)


@triton.jit
def standardised(p, mean, r):  # type: ignore[no-untyped-def]
    """(p - mean) r, as one multiplication and addition."""
    return p * over_row(r) - over_row(mean * r)


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


ROOM = 227 * 1024  # bytes of shared memory that a program may take on an H200


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may take; on the CPU (interpreter) those of an H200."""
    if device.type != "cuda":
        return ROOM
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 101_376))


STAGES = 3  # two copies of a row under way: with fewer the copy would only start when the row before is done


def column_bytes(*tensors: Tensor | None) -> int:
    return sum(t.element_size() for t in tensors if t is not None)


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
