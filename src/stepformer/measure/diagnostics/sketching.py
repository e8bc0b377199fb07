"""Large singular values and norms of a linear map that is known by its products with vectors alone.

Vectors are rows: J applied to v (n, columns) gives (n, rows). With p = rank + oversampling random directions Omega,

    Q = orth(J Omega),   then `iterations` times   W = orth(J^T Q),  Q <- orth[Q, J W],

the singular values of Q^T J are those of J from below (Halko, Martinsson and Tropp 2011, section 4). Q keeps the
directions of all rounds, which costs memory and no further product, and is far more accurate than the last ones alone
where singular values fall slowly, as those of layers do (Musco and Musco 2015). Each round gives an estimate, so that
its changes say how far it has settled. The Frobenius norm is exact on Q and estimated by random signs z beside it:

    ||J||_F^2 = ||Q^T J||_F^2 + E |(I - Q Q^T) J z|^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from stepformer.base.errors import StepformerError

SETTLED = 0.01  # relative error that is left, as the last changes tell
TINY = 1e-300


class Operator(Protocol):
    """A linear map by its products; `shape` is (rows, columns), the dimensions of what comes out and what goes in."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def push(self, v: Tensor) -> Tensor:
        """J v for each row of v, (n, columns) to (n, rows)."""

    def pull(self, u: Tensor) -> Tensor:
        """J^T u for each row of u, (n, rows) to (n, columns)."""


@dataclass(frozen=True)
class Spectrum:
    """What a sketch finds.

    change: the largest relative change of the values in the last round; error: what may be left if the next changes
    fall as the last two did, from one to ten times the change.
    """

    values: tuple[float, ...]  # singular values, the largest first
    change: float | None
    change_of_largest: float | None
    error: float | None
    frobenius_squared: float
    frobenius_squared_error: float | None  # standard error over the probes
    dimension: int  # of what goes in
    rounds: int = 0

    @property
    def spread(self) -> float | None:
        """sigma_1 / sigma_k; None where sigma_k is zero to rounding."""
        return self.values[0] / self.values[-1] if self.values[-1] > 1e-7 * self.values[0] else None

    @property
    def frobenius(self) -> float:
        return math.sqrt(self.frobenius_squared)

    @property
    def frobenius_error(self) -> float | None:
        """Of the root, to first order."""
        if self.frobenius_squared_error is None or self.frobenius_squared == 0:
            return None
        return self.frobenius_squared_error / (2 * self.frobenius)

    @property
    def stable_rank(self) -> float | None:
        return self.frobenius_squared / self.values[0] ** 2 if self.values[0] > 0 else None

    @property
    def rms_gain(self) -> float:
        """How much longer J makes a random direction, in the mean square."""
        return math.sqrt(self.frobenius_squared / self.dimension)

    @property
    def settled(self) -> bool | None:
        """Whether all values are right to 1 %, as far as the changes tell; None without a round to compare with."""
        return None if self.error is None else self.error <= SETTLED


class Sketch(NamedTuple):
    """`rounds`: estimates of the singular values after each round, the largest first; `basis`: Q, as rows."""

    rounds: list[Tensor]
    basis: Tensor
    inside: float  # ||Q^T J||_F^2


def spectrum(
    operator: Operator,
    *,
    rank: int,
    oversampling: int,
    iterations: int,
    probes: int,
    generator: Generator,
    tolerance: float = 0.0,
) -> Spectrum:
    """Singular values and norms of a linear map; `generator` is a CPU one, so that all devices draw the same."""
    sketch = singular_values(operator, rank, oversampling, iterations, generator, tolerance)
    square, square_error = frobenius_squared(operator, probes, generator, sketch)
    changes = _changes(sketch.rounds)
    return Spectrum(
        values=tuple(sketch.rounds[-1].tolist()),
        change=changes[-1].max().item() if changes else None,
        change_of_largest=changes[-1][0].item() if changes else None,
        error=_error(changes),
        frobenius_squared=square,
        frobenius_squared_error=square_error,
        dimension=operator.shape[1],
        rounds=len(changes),
    )


def _changes(rounds: list[Tensor]) -> list[Tensor]:
    """Relative changes of the values from round to round; one that is zero to rounding has none."""
    floor = (1e-6 * rounds[-1][0]).clamp_min(TINY)
    return [(new - old).abs() / new.clamp_min(floor) for old, new in pairwise(rounds)]


def _error(changes: list[Tensor]) -> float | None:
    """What may be left: c r + c r^2 + ... = c r / (1 - r) if the largest change c goes on shrinking by r.

    At least c, since a first r promises too much, and at most 10 c. On spectra from flat to four decades the truth was
    at most 1.3 times as large (tests). A single change tells nothing about r; then it is c.
    """
    sizes = [change.max().item() for change in changes]
    if len(sizes) < 2:
        return sizes[0] if sizes else None
    r = min(sizes[-1] / max(sizes[-2], TINY), 10 / 11)
    return sizes[-1] * max(1.0, r / (1 - r))


def singular_values(
    operator: Operator, rank: int, oversampling: int, iterations: int, generator: Generator, tolerance: float = 0.0
) -> Sketch:
    """The `rank` largest singular values, or all where there are fewer.

    There are `iterations` rounds, fewer if nothing new is found, or once three estimates tell that all values are
    right to `tolerance`.
    """
    rows, columns = operator.shape
    size = min(rank + oversampling, rows, columns)
    keep = min(rank, size)
    along = torch.randn(size, columns, generator=generator, dtype=operator.dtype).to(operator.device)
    left, right = along.new_zeros(0, rows), along.new_zeros(0, columns)
    inner = torch.zeros(0, 0, dtype=torch.float64)  # Q^T J W: W spans the rows of Q^T J, so it has all their values
    found: list[Tensor] = []
    for done in range(iterations + 1):
        fresh = new_directions(operator.push(along), left) if len(along) else left[:0]
        if len(fresh):
            back = operator.pull(fresh)
            left = torch.cat([left, fresh])
            along = new_directions(back, right)
            right = torch.cat([right, along])
            inner = F.pad(inner, (0, len(along), 0, len(fresh)))
            inner[-len(fresh) :] = (back @ right.mT).double().cpu()
        values = torch.linalg.svdvals(inner).sort(descending=True).values[:keep]
        found.append(F.pad(values, (0, keep - len(values))))
        error = _error(_changes(found))
        if not len(fresh) or (done > 1 and error is not None and error <= tolerance):
            break
    return Sketch(found, left, inner.square().sum().item())


def frobenius_squared(
    operator: Operator, probes: int, generator: Generator, sketch: Sketch | None = None
) -> tuple[float, float | None]:
    """||J||_F^2 = E |J z|^2 over random signs z, outside the sketch if there is one, and its standard error."""
    squares = []
    for _ in range(probes):  # one by one: their number is not bounded by memory
        signs = 2 * torch.randint(2, (1, operator.shape[1]), generator=generator, dtype=torch.int8) - 1
        image = operator.push(signs.to(operator.device, operator.dtype))
        if sketch is not None:
            image = image - (image @ sketch.basis.mT) @ sketch.basis
        squares.append(image.double().square().sum().item() + (sketch.inside if sketch is not None else 0.0))
    mean = math.fsum(squares) / probes
    spread = math.fsum((square - mean) ** 2 for square in squares)
    return mean, math.sqrt(spread / (probes - 1) / probes) if probes > 1 else None


def new_directions(rows: Tensor, basis: Tensor) -> Tensor:
    """An orthonormal basis, as rows, of what the given rows add to the span of an orthonormal basis."""
    if not bool(rows.isfinite().all()):
        raise StepformerError("The derivatives are not finite here: there are no singular values to find.")
    if not len(rows):
        return rows
    lengths = rows.norm(dim=1).max()
    for _ in range(2):  # once leaves the rounding of the first subtraction
        rows = rows - (rows @ basis.mT) @ basis
    q, r = torch.linalg.qr(rows.mT)
    real = r.diagonal().abs() > 100 * torch.finfo(rows.dtype).eps * lengths  # the others are rounding
    q = q.mT[real]
    q = q - (q @ basis.mT) @ basis  # short remainders have grown their rounding
    return torch.linalg.qr(q.mT).Q.mT
