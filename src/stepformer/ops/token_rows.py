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
from stepformer.ops.common import load_tile, over_row, row_sum, tile_columns
from stepformer.ops.operators import differentiable, operator, shaped_as, unwritten


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    n, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr
):
    """This program's rows, where their entries lie, and which of those exist."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tile_columns(CHUNKS, CHUNK)
    return rows, over_row(rows.to(tl.int64)) * D + columns, over_row(rows < n) & (columns < D)


@triton.jit
def _dot_kernel(  # type: ignore[no-untyped-def]
    a, b, out, n, constant, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr
):
    rows, at, mask = _place(n, D, CHUNKS, CHUNK, ROWS)
    total = row_sum(load_tile(a, at, mask) * load_tile(b, at, mask))
    tl.store(out + rows, total * constant, mask=rows < n)


@triton.jit
def _dot_backward_kernel(  # type: ignore[no-untyped-def]
    grad, a, b, da, db, n, constant, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr
):
    rows, at, mask = _place(n, D, CHUNKS, CHUNK, ROWS)
    d = over_row(tl.load(grad + rows, mask=rows < n, other=0.0) * constant)
    a_rows, b_rows = load_tile(a, at, mask), load_tile(b, at, mask)
    tl.store(da + at, d * b_rows, mask=mask)
    tl.store(db + at, d * a_rows, mask=mask)


@triton.jit
def _factors(s, rows, n, length, outer, inner):  # type: ignore[no-untyped-def]
    """s of shape (n / length, length) with these strides, one number per row."""
    return over_row(tl.load(s + rows // length * outer + rows % length * inner, mask=rows < n, other=0.0))


@triton.jit
def _scale_kernel(  # type: ignore[no-untyped-def]
    x, s, out, n, length, outer, inner, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr
):
    rows, at, mask = _place(n, D, CHUNKS, CHUNK, ROWS)
    tl.store(out + at, load_tile(x, at, mask) * _factors(s, rows, n, length, outer, inner), mask=mask)


@triton.jit
def _scale_backward_kernel(  # type: ignore[no-untyped-def]
    grad, s, x, dx, ds, n, length, outer, inner,
    D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
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
    if n:
        places = (n if a is Ellipsis else a for a in arguments)
        kernel[(triton.cdiv(n, tile.rows),)](*places, **tile.options(width))


@operator("row_dot", fake=lambda a, b, constant: a.new_empty(a.shape[:-1], dtype=torch.float32))
def _dot(a: Tensor, b: Tensor, constant: float) -> Tensor:
    out = torch.empty(a.shape[:-1], dtype=torch.float32, device=a.device)
    _launch(_dot_kernel, a, a.contiguous(), b.contiguous(), out, ..., constant)
    return out


@operator("row_dot_backward", fake=shaped_as(1, 2))
def _dot_backward(grad: Tensor, a: Tensor, b: Tensor, constant: float) -> tuple[Tensor, Tensor]:
    da, db = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (a, b))
    _launch(_dot_backward_kernel, a, grad.contiguous(), a.contiguous(), b.contiguous(), da, db, ..., constant)
    return da, db


differentiable(
    _dot,
    keep=lambda inputs, _: (inputs[:2], inputs[2:]),
    gradients=lambda needs, kept, constants, grad: _dot_backward(grad, *kept, *constants),
)


def row_dot(a: Tensor, b: Tensor, constant: float = 1.0) -> Tensor:
    """constant * (a * b).sum(-1) in fp32, for rows (..., d) of bf16 or fp32, which may differ."""
    out: Tensor = _dot(a, b, constant)
    return out


def _strided(s: Tensor) -> tuple[Tensor, int, int, int]:
    """A factor per row with two dimensions' sizes and strides, as the kernels find it."""
    s = s.flatten(0, -2) if s.ndim > 2 else torch.atleast_2d(s)
    return s, s.shape[1], *s.stride()


@operator("scale_rows", fake=lambda x, s, dtype: unwritten(x, dtype=dtype))
def _scale(x: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    s, *place = _strided(s)
    _launch(_scale_kernel, x, x.contiguous(), s, out, ..., *place)
    return out


def _scale_gradients(grad: Tensor, s: Tensor, x: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return unwritten(grad, dtype=dtype), unwritten(s, x is not None)


@operator("scale_rows_backward", fake=_scale_gradients)
def _scale_backward(grad: Tensor, s: Tensor, x: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dx in `dtype`, and ds where x is there."""
    dx, ds = _scale_gradients(grad, s, x, dtype)
    s, *place = _strided(s)
    kept = (None, None) if x is None else (x.contiguous(), ds)
    _launch(_scale_backward_kernel, grad, grad.contiguous(), s, kept[0], dx, kept[1], ..., *place)
    return dx, ds


def _keep_scale(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, s, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(s, x if ctx.needs_input_grad[1] else None)


def _differentiate_scale(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    dx, ds = _scale_backward(grad, *ctx.saved_tensors, ctx.dtype)
    return dx, ds if ctx.needs_input_grad[1] else None, None


_scale.register_autograd(_differentiate_scale, setup_context=_keep_scale)


def scale_rows(x: Tensor, s: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x * s[..., None] in the dtype of x, or in `dtype`; s in fp32, of shape x.shape[:-1] or one that expands to it."""
    out: Tensor = _scale(x, s.expand(x.shape[:-1]), dtype or x.dtype)
    return out
