"""Constrained softmax rows, for the tests of the solver."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from draws import seeded
from stepformer.ops import constraint

ROWS = 24
FAMILIES = (
    *("gaussian", "uniform", "two clusters", "high outlier", "low outlier", "heavy tails", "near ties"),
    *("scale 1e4", "scale 1e-4", "exponential", "left tail", "integers", "offset ramp"),
)


@torch.no_grad()
def solve(
    scores: Tensor,
    radius: Tensor | float,
    visible: Tensor,
    log_prior: Tensor | None = None,
    *,
    ceiling: float | None = None,
    evaluations: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(beta, active, capped), each (..., T), as in `constrained_softmax`, without gradients.

    active: the constraint binds, so beta depends on the scores. evaluations: of the row statistics, 2 or more.
    """
    s, rho, visible, log_q = constraint._prepare(scores, radius, visible, log_prior)
    return constraint._solve(s, log_q, rho, visible, ceiling, evaluations)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def every(t: int) -> Tensor:
    return torch.ones(t, dtype=torch.bool)


def divergence(weights: Tensor, log_q: Tensor) -> Tensor:
    """KL(a || q) in fp64, from the weights as returned."""
    a = weights.double()
    return (torch.special.xlogy(a, a) - a * log_q).sum(dim=-1)


def family(name: str, t: int, seed: int) -> Tensor:
    """Scores (ROWS, t) of one kind."""
    g = seeded(seed)
    n = torch.randn(ROWS, t, generator=g, dtype=torch.float64)
    u = torch.rand(ROWS, t, generator=g, dtype=torch.float64)
    one = torch.zeros_like(n).scatter_(1, torch.randint(t, (ROWS, 1), generator=g), 1.0)
    kinds: dict[str, Callable[[], Tensor]] = {
        "gaussian": lambda: n,
        "uniform": lambda: u,
        "two clusters": lambda: 8.0 * (u < 0.5) + n,
        "high outlier": lambda: n + 30 * one,
        "low outlier": lambda: n - 300 * one,
        "heavy tails": lambda: torch.tan(math.pi * (u - 0.5)).clamp(-1e6, 1e6),  # Cauchy
        "near ties": lambda: 5.0 * (u < 0.3) + 1e-3 * n,
        "scale 1e4": lambda: 1e4 * n,
        "scale 1e-4": lambda: 1e-4 * n,
        "exponential": lambda: -(u + 1e-12).log(),
        "left tail": lambda: (u + 1e-12).log(),
        "integers": lambda: (4 * u).floor(),
        "offset ramp": lambda: torch.linspace(0, 1, t, dtype=torch.float64) + 1e3 + 0.01 * n,
    }
    return kinds[name]()
