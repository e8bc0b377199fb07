"""Products with rows of tokens (..., d) as generated passes: a factor for each row, and the inner product of two rows.

    row_dot:     o_i = c <a_i, b_i>           da_i = c do_i b_i,   db_i = c do_i a_i
    scale_rows:  o_i = s_i x_i                dx_i = s_i do_i,     ds_i = <do_i, x_i>

c is a constant, s an fp32 factor per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepformer.ops.kernels import constant_result
from stepformer.ops.row_passes import row_pass
from stepformer.ops.row_programs import Program, extract
from stepformer.ops.symbols import Symbol, leaf, mul, row_sum


def _program(output: Symbol) -> Program:
    return extract([output], [], lambda n: False).program


SCALED = _program(mul(leaf("stat", "s"), leaf("row", "x")))


@constant_result
def _dot(constant: float) -> Program:
    if constant not in _dots:
        _dots[constant] = _program(mul(constant, row_sum(mul(leaf("row", "a"), leaf("row", "b")))))
    return _dots[constant]


_dots: dict[float, Program] = {}


def row_dot(a: Tensor, b: Tensor, constant: float = 1.0) -> Tensor:
    """constant * (a * b).sum(-1) in fp32, for rows (..., d) of bf16 or fp32, which may differ."""
    return row_pass(_dot(constant), [a, b], torch.float32, torch.float32)[0][0]


def scale_rows(x: Tensor, s: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x * s[..., None] in the dtype of x, or in `dtype`; s in fp32, of shape x.shape[:-1] or one that expands to it."""
    dtype = dtype or x.dtype
    return row_pass(SCALED, [x, s.expand(x.shape[:-1])], dtype, dtype)[0][0]
