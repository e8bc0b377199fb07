"""Extreme eigenvalues of a symmetric operator that is known only by its products with vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
Draw = Callable[[int], Tensor]
"""Random vectors by number, so that what one method draws does not depend on what another has drawn."""
Progress = Callable[[int], None]

PIECE = 1 << 22  # numbers summed in fp64 at a time
ROUNDING = 10  # units in the last place


@dataclass(frozen=True)
class Eigenpair:
    """A unit vector v with its Rayleigh quotient: `residual` = |A v - value v|, and an eigenvalue lies within it."""

    value: float
    residual: float
    vector: Tensor

    def converged(self, tolerance: float) -> bool:
        return self.residual <= tolerance * abs(self.value)


def dot(a: Tensor, b: Tensor) -> float:
    """The inner product of two flat vectors, summed in fp64: a hundred million terms leave fp32 few digits."""
    pieces = zip(a.split(PIECE), b.split(PIECE), strict=True)
    return float(sum((p.double() * q.double()).sum() for p, q in pieces))


def norm(a: Tensor) -> float:
    return dot(a, a) ** 0.5


def by_magnitude(values: Sequence[float], dtype: torch.dtype) -> list[int]:
    """Which value comes first: the larger magnitude, and of +a and -a the positive one.

    Magnitudes that differ by no more than `ROUNDING` (units of `dtype` in the largest) count as equal; otherwise the
    machine's way of summing would decide between opposite values.
    """
    slack = ROUNDING * torch.finfo(dtype).eps * max(map(abs, values))
    order = sorted(range(len(values)), key=lambda i: -abs(values[i]))
    group = dict.fromkeys(order[:1], 0)
    for before, i in pairwise(order):
        group[i] = group[before] + (abs(values[before]) - abs(values[i]) > slack)
    return sorted(order, key=lambda i: (group[i], values[i] < 0))


def lanczos(
    product: Product, draw: Draw, *, count: int, iterations: int, tolerance: float, progress: Progress = lambda _: None
) -> tuple[list[Eigenpair], int]:
    """The `count` eigenvalues of largest magnitude, largest first (`by_magnitude`), and the number of steps taken.

    Every new direction is made orthogonal to all earlier ones, twice: without that, rounding brings found eigenvectors
    back and counts them again. So `iterations` + 1 vectors are kept. It stops early once all wanted residuals are below
    `tolerance` times their eigenvalue. An eigenvalue that is repeated exactly is found once.
    """
    v = draw(0)
    most = min(iterations, v.numel())
    basis = v.new_empty(most, v.numel())
    basis[0] = v / norm(v)
    tridiagonal = torch.zeros(most, most, dtype=torch.float64)
    for steps in range(1, most + 1):
        k, known = steps - 1, basis[:steps]
        w = product(basis[k])
        tridiagonal[k, k] = dot(basis[k], w)
        w = _orthogonal(w, known)
        beta = norm(w)
        progress(1)
        values, vectors = torch.linalg.eigh(tridiagonal[:steps, :steps])
        wanted = by_magnitude(values.tolist(), v.dtype)[:count]
        residuals = beta * vectors[-1, wanted].abs()
        if steps == most or (steps >= count and bool((residuals <= tolerance * values[wanted].abs()).all())):
            break
        if beta <= ROUNDING * torch.finfo(v.dtype).eps * float(values.abs().max()):
            # the directions so far already hold the image of each of them: go on in a new one
            beta, w = 0.0, _orthogonal(draw(steps), known)
        basis[steps] = w / (beta or norm(w))
        tridiagonal[k, steps] = tridiagonal[steps, k] = beta
    weights = vectors[:, wanted].to(basis)
    sought = (basis[:steps].mT @ weights[:, i] for i in range(weights.shape[1]))
    found = [_eigenpair(unit, product(unit)) for unit in (v / norm(v) for v in sought)]
    return [found[i] for i in by_magnitude([pair.value for pair in found], v.dtype)], steps


def power(
    product: Product, draw: Draw, *, count: int, iterations: int, tolerance: float, progress: Progress = lambda _: None
) -> tuple[list[Eigenpair], int]:
    """The same by power iteration: v <- A v / |A v| until the Rayleigh quotient changes by less than `tolerance`.

    The change may be small long before the residual is. Further eigenvalues are sought at right angles to those found.
    """
    found: list[Eigenpair] = []
    steps = 0
    while len(found) < count:
        known = torch.stack([pair.vector for pair in found]) if found else None
        v = draw(len(found))
        v = v if known is None else _orthogonal(v, known)
        v = v / norm(v)
        before = None
        for _ in range(iterations):
            w = product(v)
            steps += 1
            progress(1)
            pair = _eigenpair(v, w)
            w = w if known is None else _orthogonal(w, known)
            size = norm(w)
            if size == 0 or (before is not None and abs(pair.value - before) < tolerance * abs(before)):
                break
            before, v = pair.value, w / size
        found.append(pair)
        if v.numel() == len(found):
            break
    return [found[i] for i in by_magnitude([pair.value for pair in found], v.dtype)], steps


def _orthogonal(w: Tensor, known: Tensor) -> Tensor:
    """w without its parts along the rows of `known`; once is not enough in floating point, twice is."""
    for _ in range(2):
        w = w - known.mT @ (known @ w)
    return w


def _eigenpair(v: Tensor, w: Tensor) -> Eigenpair:
    """A unit vector and A v."""
    value = dot(v, w)
    return Eigenpair(value, norm(w - value * v), v)
