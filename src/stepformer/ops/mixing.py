"""A sum of two tensors with two learned weights, in one pass forward and one backward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stepformer.ops import kernels
from stepformer.ops.row_programs import Program, extract
from stepformer.ops.symbols import leaf


def _program() -> Program:
    own, other = leaf("num", "own"), leaf("num", "other")
    return extract([own * leaf("row", "a") + other * leaf("row", "b")], [], lambda n: False).program


PROGRAM = _program()


def mix(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """weights[0] a + weights[1] b in the dtype of a; weights are in fp32, four numbers at an address of 16 bytes."""
    if kernels.usable(a, b, weights) and len(weights) == 4:
        from stepformer.ops.row_passes import row_pass

        return row_pass(PROGRAM, [a, b, weights], a.dtype, a.dtype)[0][0]
    return (weights[0] * a + weights[1] * b).to(a.dtype)


def like_values(rows: Tensor, v: Tensor) -> Tensor:
    """Rows (B, T, d) in the shape of values, which may be that of heads (B, H, T, head_dim)."""
    if not isinstance(v, Tensor) or rows.ndim == v.ndim:
        return rows
    return rows.unflatten(-1, (v.shape[1], -1)).transpose(1, 2)


@dataclass
class Mixed:
    """What a plan makes of an attention's values: weights[0] v + weights[1] `earlier`, those of another call or rows.

    Without weights they stay as they are, and become the earlier ones of later calls.
    """

    weights: Tensor | None = None
    earlier: Tensor | None = None

    def __call__(self, v: Tensor) -> Tensor:
        if self.weights is None:
            self.earlier = v
            return v
        assert self.earlier is not None
        return mix(v, like_values(self.earlier, v), self.weights)
