"""Small operators on rows of tokens (..., d), one pass over memory each.

    row_dot:     o_i = c <a_i, b_i>           da_i = c do_i b_i,   db_i = c do_i a_i
    scale_rows:  o_i = s_i x_i                dx_i = s_i do_i,     ds_i = <do_i, x_i>

c is a constant, s an fp32 factor per row. Numbers are read as they are stored (bf16 or fp32), computed in fp32 and
rounded once when written. No atomics: the same inputs give the same bits.

Traffic in numbers per entry of a row: row_dot 2 reads, backward 2 reads and 2 writes; scale_rows 1 read and 1 write,
backward the same, and 1 read more for ds, which is computed only where s requires a gradient. x is kept for that
alone. A factor that is the same for several rows comes as an expanded view (stride 0) and is not copied.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepformer.ops import common
from stepformer.ops.common import load_tile, nothing, over_row, row_sum, tile_columns


@triton.jit
def _place(n: tl.tensor, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """This program's rows, where their entries lie, and which of those exist."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tile_columns(CHUNKS, CHUNK)
    return rows, over_row(rows.to(tl.int64)) * D + columns, over_row(rows < n) & (columns < D)


@triton.jit
def _dot_kernel(
    a: tl.tensor, b: tl.tensor, out: tl.tensor, n: tl.tensor, constant: tl.tensor,
    D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    rows, at, mask = _place(n, D, CHUNKS, CHUNK, ROWS)
    total = row_sum(load_tile(a, at, mask) * load_tile(b, at, mask))
    tl.store(out + rows, total * constant, mask=rows < n)


@triton.jit
def _dot_backward_kernel(
    grad: tl.tensor, a: tl.tensor, b: tl.tensor, da: tl.tensor, db: tl.tensor, n: tl.tensor, constant: tl.tensor,
    D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    rows, at, mask = _place(n, D, CHUNKS, CHUNK, ROWS)
    d = over_row(tl.load(grad + rows, mask=rows < n, other=0.0) * constant)
    a_rows, b_rows = load_tile(a, at, mask), load_tile(b, at, mask)
    tl.store(da + at, d * b_rows, mask=mask)
    tl.store(db + at, d * a_rows, mask=mask)


@triton.jit
def _factors(
    s: tl.tensor, rows: tl.tensor, n: tl.tensor, length: tl.tensor, outer: tl.tensor, inner: tl.tensor
) -> tl.tensor:
    """s of shape (n / length, length) with these strides, one number per row."""
    return over_row(tl.load(s + rows // length * outer + rows % length * inner, mask=rows < n, other=0.0))


@triton.jit
def _scale_kernel(
    x: tl.tensor, s: tl.tensor, out: tl.tensor, n: tl.tensor, length: tl.tensor, outer: tl.tensor, inner: tl.tensor,
    D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    rows, at, mask = _place(n, D, CHUNKS, CHUNK, ROWS)
    tl.store(out + at, load_tile(x, at, mask) * _factors(s, rows, n, length, outer, inner), mask=mask)


@triton.jit
def _scale_backward_kernel(
    grad: tl.tensor, s: tl.tensor, x: tl.tensor, dx: tl.tensor, ds: tl.tensor, n: tl.tensor,
    length: tl.tensor, outer: tl.tensor, inner: tl.tensor,
    D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """ds only where there is room for it."""
    rows, at, mask = _place(n, D, CHUNKS, CHUNK, ROWS)
    g = load_tile(grad, at, mask)
    tl.store(dx + at, g * _factors(s, rows, n, length, outer, inner), mask=mask)
    if ds is not None:
        tl.store(ds + rows, row_sum(g * load_tile(x, at, mask)), mask=rows < n)


def _launch(kernel: Any, like: Tensor, *arguments: Any) -> None:
    """For all rows of `like`.

    Not four rows and four warps in a program: triton 3.6 gives the chunks to the warps then, not the rows, and sums
    meet in shared memory, one column at a time (365 us for 32,768 rows of 768, where the traffic is worth 24).
    """
    width = like.shape[-1]
    n = like.numel() // width if width else 0
    tile = common.row_tile(max(1, width))
    sizes = {"D": width, "CHUNKS": common.chunks(width, tile), "CHUNK": tile.chunk, "ROWS": tile.rows}
    if n:
        places = (n if a is Ellipsis else a for a in arguments)
        kernel[(triton.cdiv(n, tile.rows),)](*places, **sizes, **tile.options())


@torch.library.custom_op("stepformer::row_dot", mutates_args=())
def _dot(a: Tensor, b: Tensor, constant: float) -> Tensor:
    out = torch.empty(a.shape[:-1], dtype=torch.float32, device=a.device)
    _launch(_dot_kernel, a, a.contiguous(), b.contiguous(), out, ..., constant)
    return out


@_dot.register_fake
def _(a: Tensor, b: Tensor, constant: float) -> Tensor:
    return a.new_empty(a.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("stepformer::row_dot_backward", mutates_args=())
def _dot_backward(grad: Tensor, a: Tensor, b: Tensor, constant: float) -> tuple[Tensor, Tensor]:
    da, db = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (a, b))
    _launch(_dot_backward_kernel, a, grad.contiguous(), a.contiguous(), b.contiguous(), da, db, ..., constant)
    return da, db


@_dot_backward.register_fake
def _(grad: Tensor, a: Tensor, b: Tensor, constant: float) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape), b.new_empty(b.shape)


def _keep_factors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, ctx.constant = inputs
    ctx.save_for_backward(a, b)


def _dot_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return (*_dot_backward(grad, *ctx.saved_tensors, ctx.constant), None)


_dot.register_autograd(_dot_gradients, setup_context=_keep_factors)


def row_dot(a: Tensor, b: Tensor, constant: float = 1.0) -> Tensor:
    """constant * (a * b).sum(-1) in fp32, for rows (..., d) of bf16 or fp32, which may differ."""
    out: Tensor = _dot(a, b, constant)
    return out


def _strided(s: Tensor) -> tuple[Tensor, int, int, int]:
    """A factor per row with two dimensions' sizes and strides, as the kernels find it."""
    s = s.flatten(0, -2) if s.ndim > 2 else torch.atleast_2d(s)
    return s, s.shape[1], *s.stride()


@torch.library.custom_op("stepformer::scale_rows", mutates_args=())
def _scale(x: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    s, *place = _strided(s)
    _launch(_scale_kernel, x, x.contiguous(), s, out, ..., *place)
    return out


@_scale.register_fake
def _(x: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("stepformer::scale_rows_backward", mutates_args=())
def _scale_backward(grad: Tensor, s: Tensor, x: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dx in `dtype`, and ds where x is there."""
    dx = torch.empty(grad.shape, dtype=dtype, device=grad.device)
    ds = nothing(s) if x is None else torch.empty(s.shape, dtype=s.dtype, device=s.device)
    s, *place = _strided(s)
    kept = (None, None) if x is None else (x.contiguous(), ds)
    _launch(_scale_backward_kernel, grad, grad.contiguous(), s, kept[0], dx, kept[1], ..., *place)
    return dx, ds


@_scale_backward.register_fake
def _(grad: Tensor, s: Tensor, x: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape, dtype=dtype), nothing(s) if x is None else s.new_empty(s.shape)


def _keep_scale(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, s, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(s, x if ctx.needs_input_grad[1] else None)


def _scale_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    dx, ds = _scale_backward(grad, *ctx.saved_tensors, ctx.dtype)
    return dx, ds if ctx.needs_input_grad[1] else None, None


_scale.register_autograd(_scale_gradients, setup_context=_keep_scale)


def scale_rows(x: Tensor, s: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x * s[..., None] in the dtype of x, or in `dtype`; s in fp32, of shape x.shape[:-1] or one that expands to it."""
    out: Tensor = _scale(x, s.expand(x.shape[:-1]), dtype or x.dtype)
    return out
