"""What an experiment returns, and the arithmetic that several of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

Tell = Callable[[str], None]
"""Called with what is being computed."""
S = TypeVar("S")
Row = dict[str, str | int | float | None]


@dataclass
class Result:
    """Rows for a table, curves for a picture, and the settings behind them; all of it fits into JSON."""

    question: str
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    curves: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def far(value: Tensor, exact: Tensor) -> float:
    """Largest difference, relative to the largest entry of what should come out."""
    return ((value - exact).abs().max() / exact.abs().max()).item()


def slope(sizes: list[float], errors: list[float]) -> float:
    """The order of accuracy: least-squares slope of log error over log step size."""
    u = torch.tensor(sizes, dtype=torch.float64).log()
    v = torch.tensor(errors, dtype=torch.float64).log()
    u = u - u.mean()
    return ((u @ (v - v.mean())) / (u @ u)).item()


def last(states: Iterable[S]) -> S:
    *_, end = states
    return end
