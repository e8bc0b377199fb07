"""Parameter optimizers written out naively in fp64, one parameter at a time, from the mathematics alone.

Nothing here is batched, fused or in place; every polar factor goes through an SVD, so that an iteration is stated by
what it does to singular values: M = U diag(s) V^T becomes U diag(p(s / |s|)) V^T, or p(s / 1e-7) where |s| is smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Quintics = Sequence[tuple[float, float, float]]
JORDAN: Quintics = ((3.4445, -4.7750, 2.0315),) * 5
EPS = 1e-7  # Muon's: the smallest norm that an iteration divides by


def compose(quintics: Quintics, x: Tensor) -> Tensor:
    """x -> a x + b x^3 + c x^5, one after the other."""
    for a, b, c in quintics:
        x = a * x + b * x**3 + c * x**5
    return x


def polar_by_svd(matrix: Tensor, quintics: Quintics | None = None, tiny: float = 1e-12) -> Tensor:
    """The polar factor of one matrix (null directions left out), or what composed odd quintics make of it."""
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    if s[0] == 0:
        return torch.zeros_like(matrix)
    if quintics is None:
        image = (s > tiny * s[0]).to(s.dtype)
    else:
        image = compose(quintics, s / max(float(s.square().sum().sqrt()), EPS))
    return u @ torch.diag(image) @ vt


def scale_of(scaling: str, rows: int, cols: int) -> float:
    if scaling == "jordan":
        return math.sqrt(max(1.0, rows / cols))
    if scaling == "rms":
        return 0.2 * math.sqrt(max(rows, cols))
    if scaling == "spectral":
        return math.sqrt(rows / cols)
    assert scaling == "none"
    return 1.0


@dataclass
class Recipe:
    """Plain numbers; no default here is taken from the library."""

    name: str
    lr: dict[str, float]
    wd: dict[str, float]
    steps: int
    warmup: int
    schedule: str = "cosine"
    floor: float = 0.1
    decay_start: int = 0
    momentum: float = 0.95
    momentum_start: float = 0.85
    momentum_warmup: int = 0
    nesterov: bool = True
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    quintics: Quintics | None = None
    scaling: str = "jordan"
    split: bool = False
    table: str = "row"
    radius: float | None = None
    clip: float = 1.0
    clip_coefficients: bool = True


def factor(recipe: Recipe, t: int) -> float:
    """f(t) of section 2, with the warm-up that does not lose its first step."""
    W, S, D = recipe.warmup, recipe.steps, recipe.decay_start
    if t < W:
        return (t + 1) / W
    if recipe.schedule == "cosine":
        return recipe.floor + (1 - recipe.floor) * 0.5 * (1 + math.cos(math.pi * (t - W) / (S - W)))
    if recipe.schedule == "wsd":
        return 1.0 if t < D else 1 - (1 - recipe.floor) * (t - D) / (S - D)
    assert recipe.schedule == "constant"
    return 1.0


def momentum_at(recipe: Recipe, t: int) -> float:
    if t >= recipe.momentum_warmup:
        return recipe.momentum
    return recipe.momentum_start + (recipe.momentum - recipe.momentum_start) * t / recipe.momentum_warmup


def norm_of(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(x) ** 2 for tensor in tensors for x in tensor.flatten().tolist()))


def clipped(recipe: Recipe, grads: Mapping[str, Tensor], roles: Mapping[str, str]) -> tuple[dict[str, Tensor], float]:
    """Gradients after clipping, and the norm that decided it."""
    counted = [name for name in grads if recipe.clip_coefficients or roles[name] != "coefficient"]
    norm = norm_of([grads[name] for name in counted])
    shrink = min(1.0, recipe.clip / (norm + 1e-6)) if recipe.clip > 0 else 1.0
    return {name: g * shrink if name in counted else g.clone() for name, g in grads.items()}, norm


def sam_point(weights: Mapping[str, Tensor], grads: Mapping[str, Tensor], rho: float) -> dict[str, Tensor]:
    """w + rho g / (|g| + 1e-12), one norm for everything."""
    norm = norm_of(list(grads.values()))
    return {name: w + rho * grads[name] / (norm + 1e-12) for name, w in weights.items()}


def parts_of(matrix: Tensor, count: int) -> list[Tensor]:
    rows = matrix.shape[0] // count
    return [matrix[i * rows : (i + 1) * rows] for i in range(count)]


@dataclass
class Naive:
    """Weights as a dictionary of tensors that `step` replaces."""

    recipe: Recipe
    roles: Mapping[str, str]
    stacked: Mapping[str, int]
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0

    def step(self, t: int, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.count += 1
        return {name: self._moved(t, name, w, grads[name]) for name, w in weights.items()}

    def _moved(self, t: int, name: str, w: Tensor, g: Tensor) -> Tensor:
        recipe, role = self.recipe, self.roles[name]
        lr, wd = recipe.lr[role] * factor(recipe, t), recipe.wd[role]
        if recipe.name == "adamw" or (recipe.name != "scion" and role != "matrix"):
            return w - lr * wd * w - lr * self._adam_direction(name, g)

        m = momentum_at(recipe, t)
        buffer = m * self.first.get(name, torch.zeros_like(g)) + (1 - m) * g
        self.first[name] = buffer
        look_ahead = recipe.nesterov and recipe.name != "scion"
        u = (1 - m) * g + m * buffer if look_ahead else buffer
        if role == "matrix":
            if recipe.name == "scion" and recipe.radius is not None:
                wd = 1 / recipe.radius
            count = self.stacked.get(name, 1) if recipe.split else 1
            direction = torch.cat([self._matrix_direction(part) for part in parts_of(u, count)])
        elif role == "embedding" and recipe.table == "row":
            direction = torch.stack([row / row.square().mean().sqrt() if row.any() else row for row in u])
        else:
            direction = torch.sign(u)
        return (1 - lr * wd) * w - lr * direction

    def _matrix_direction(self, u: Tensor) -> Tensor:
        orthogonal = polar_by_svd(u, self.recipe.quintics)
        nuclear = float((u * orthogonal).sum()) if self.recipe.name == "polargrad" else 1.0
        return scale_of(self.recipe.scaling, u.shape[0], u.shape[1]) * nuclear * orthogonal

    def _adam_direction(self, name: str, g: Tensor) -> Tensor:
        b1, b2 = self.recipe.betas
        self.first[name] = b1 * self.first.get(name, torch.zeros_like(g)) + (1 - b1) * g
        self.second[name] = b2 * self.second.get(name, torch.zeros_like(g)) + (1 - b2) * g * g
        mean = self.first[name] / (1 - b1**self.count)
        square = self.second[name] / (1 - b2**self.count)
        return mean / (square.sqrt() + self.recipe.eps)


def gradients(loss: Callable[[Mapping[str, Tensor]], Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    leaves = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    return dict(zip(leaves, torch.autograd.grad(loss(leaves), list(leaves.values())), strict=True))


def extremes(quintic: tuple[float, float, float], low: float, high: float, points: int = 200_001) -> list[float]:
    """Values of p(x) - 1 at its alternating local extremes on [low, high], from a dense logarithmic grid.

    {x, x^3, x^5} is a Chebyshev system there, so p is the best approximation of 1 exactly if four of them alternate
    in sign with equal size; if they only alternate, the smallest bounds what any other quintic can reach from below
    (de la Vallee-Poussin).
    """
    x = torch.logspace(math.log10(low), math.log10(high), points, dtype=torch.float64)
    x[0], x[-1] = low, high
    error = compose([quintic], x) - 1
    result: list[float] = []
    for value in error.tolist():
        if result and (value > 0) == (result[-1] > 0):
            if abs(value) > abs(result[-1]):
                result[-1] = value
        else:
            result.append(value)
    return result
