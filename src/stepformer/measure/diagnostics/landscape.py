"""The loss along random directions through the weights, scaled so that models of different size can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from stepformer.measure.diagnostics.hessian import HessianOperator

Normalise = Literal["tensor", "filter"]


def direction(operator: HessianOperator, number: int = 0, *, seed: int = 0, normalise: Normalise = "tensor") -> Tensor:
    """A normal random direction with the scale of the weights: flat, in the order of the operator's parameters.

    tensor: each tensor's part has the norm of that tensor, gains and coefficients included. filter: each row of a
    matrix or table has the norm of that row (one output unit, one token, one position), and tensors of one dimension
    do not move. What is zero does not move either.
    """
    drawn = operator.split(operator.draw("normal", seed, f"curve {number}"))
    return operator.flat(
        [_scaled(part, p.detach(), normalise) for part, p in zip(drawn, operator.parameters, strict=True)]
    )


def _scaled(part: Tensor, weight: Tensor, normalise: Normalise) -> Tensor:
    if normalise == "tensor":
        return part * (weight.norm() / part.norm())
    if weight.ndim < 2:
        return torch.zeros_like(part)
    own, wanted = (t.flatten(1).norm(dim=1).view(-1, *[1] * (t.ndim - 1)) for t in (part, weight))
    return part * (wanted / own)


def grid(points: int, reach: float) -> list[float]:
    """Evenly spaced from -reach to reach, with an exact zero in the middle of an odd number of points."""
    middle = (points - 1) / 2
    return [reach * (i - middle) / middle for i in range(points)]


def loss_at(operator: HessianOperator, along: Sequence[Tensor], by: Sequence[float]) -> float:
    """The loss at theta + by_1 along_1 + by_2 along_2 + ..."""
    total = torch.zeros(operator.size, dtype=operator.dtype, device=operator.device)
    for a, d in zip(by, along, strict=True):
        total.add_(d, alpha=a)
    with operator.moved(total):
        return operator.loss()
