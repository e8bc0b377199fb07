"""The phi functions of exponential integrators, which divide differences of e^-s by powers of s."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from stepformer.ops.symbols import Symbol, function

SERIES_BELOW = 0.1  # ten terms of the series are exact to fp64 there, while (s - 1 + e^-s)/s^2 loses two digits


def phi1(s: Tensor) -> Tensor:
    """(1 - e^-s) / s = sum_k (-s)^k / (k+1)!, in fp64 and smooth through s = 0."""
    return _phi(s, 1, lambda s: -torch.expm1(-s) / s)


def phi2(s: Tensor) -> Tensor:
    """(s - 1 + e^-s) / s^2 = sum_k (-s)^k / (k+2)!, in fp64: fp32 would lose 5 % at s = 1e-3."""
    return _phi(s, 2, lambda s: (s + torch.expm1(-s)) / s.square())


def _phi(s: Tensor, order: int, quotient: Callable[[Tensor], Tensor]) -> Tensor:
    if isinstance(s, Symbol):
        return function("phi", s, order)
    wide = s.double()
    near_zero = wide.abs() < SERIES_BELOW
    series = torch.zeros_like(wide)
    for k in reversed(range(10)):
        series = 1 / math.factorial(k + order) - wide * series
    away = quotient(torch.where(near_zero, 1.0, wide))  # never 0/0, so that no gradient is NaN
    return torch.where(near_zero, series, away).to(s.dtype)
