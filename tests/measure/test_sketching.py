"""Sketches of linear maps on matrices that are known, and what is made of them over batches and layers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from draws import seeded
from stepformer.base.errors import StepformerError
from stepformer.measure.diagnostics.jacobian import over_batches, over_layers
from stepformer.measure.diagnostics.sketching import Spectrum, frobenius_squared, singular_values, spectrum


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


class Matrix:
    """A matrix as an operator that is known by its products."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.shape, self.dtype, self.device = (matrix.shape[0], matrix.shape[1]), matrix.dtype, matrix.device

    def push(self, v: Tensor) -> Tensor:
        return v @ self.matrix.mT

    def pull(self, u: Tensor) -> Tensor:
        return u @ self.matrix


@pytest.mark.parametrize(("rows", "columns"), [(300, 300), (300, 120), (120, 300)])
def test_singular_values_come_in_descending_order_and_are_right(rows: int, columns: int) -> None:
    """Published tables of this measurement were sorted the other way, so that their 64th value is the 11th."""
    size = min(rows, columns)
    truth = torch.logspace(2, -2, size, dtype=torch.float64)
    u, v = torch.linalg.qr(normal(rows, size)).Q, torch.linalg.qr(normal(columns, size, seed=1)).Q
    found = spectrum(Matrix(u * truth @ v.mT), rank=20, oversampling=10, iterations=3, probes=8, generator=seeded())
    assert list(found.values) == sorted(found.values, reverse=True)
    # four decades over at least 120 values: 120 directions leave less than 1e-4 at the 20th
    assert torch.allclose(torch.tensor(found.values, dtype=torch.float64), truth[:20], rtol=1e-3)
    assert found.values[0] == pytest.approx(100, rel=1e-6)
    assert found.dimension == columns
    assert found.error is not None
    assert found.error < 0.01
    assert found.settled


def test_more_rounds_are_more_accurate_and_the_change_tells() -> None:
    """Nearly flat values are the hard case: what changes in a round bounds what is still missing there."""
    truth = torch.linspace(2, 1, 400, dtype=torch.float64)
    q = torch.linalg.qr(normal(400, 400)).Q
    rounds = singular_values(Matrix(q * truth @ q.mT), 20, 10, 5, seeded()).rounds
    errors = [((truth[:20] - values) / truth[:20]).max().item() for values in rounds]
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))
    assert errors[0] > 0.1
    assert errors[-1] < 0.02
    assert all((later >= earlier - 1e-12).all() for earlier, later in itertools.pairwise(rounds))


def test_the_error_does_not_claim_too_much() -> None:
    """On slowly falling values changes shrink slowly: what is left is more than the last change."""
    truth = torch.linspace(2, 1, 600, dtype=torch.float64)
    truth[:3] = torch.tensor([30.0, 20.0, 10.0])
    q = torch.linalg.qr(normal(600, 600)).Q
    for iterations in (1, 2, 3, 4, 5):
        found = spectrum(
            Matrix(q * truth @ q.mT), rank=20, oversampling=10, iterations=iterations, probes=2, generator=seeded()
        )
        missing = (truth[:20] - torch.tensor(found.values, dtype=torch.float64)) / truth[:20]
        assert found.error is not None
        # margin: 1.25 to 1.3 for every draw, by the law of the changes, which are no geometric series
        assert missing.max() < 1.5 * found.error


def test_rounds_stop_at_the_tolerance() -> None:
    truth = torch.logspace(1, -1, 900, dtype=torch.float64)
    q = torch.linalg.qr(normal(900, 900)).Q
    sizes: dict[str, Any] = {"rank": 20, "oversampling": 10, "iterations": 25, "probes": 2}
    found = spectrum(Matrix(q * truth @ q.mT), **sizes, tolerance=0.01, generator=seeded())
    assert 2 <= found.rounds < 10
    assert found.settled
    missing = (truth[:20] - torch.tensor(found.values, dtype=torch.float64)) / truth[:20]
    # the changes tell the error within a factor of about two
    assert -1e-9 < missing.max() < 0.02
    loose = spectrum(Matrix(q * truth @ q.mT), **sizes, tolerance=0.2, generator=seeded())
    assert loose.rounds < found.rounds
    everything = spectrum(Matrix(normal(40, 40)), **sizes, generator=seeded())
    assert everything.rounds == 2  # 60 directions span 40 dimensions, and the third round finds nothing new
    assert everything.error == 0


def test_a_rank_beyond_the_map() -> None:
    """Rank 3 in 40 dimensions: three values and zeros; k is cut to the dimension; a zero map has no spread."""
    three = normal(40, 3) @ normal(3, 40, seed=1)
    found = spectrum(Matrix(three), rank=64, oversampling=10, iterations=2, probes=4, generator=seeded())
    assert len(found.values) == 40
    assert torch.allclose(torch.tensor(found.values[:3], dtype=torch.float64), torch.linalg.svdvals(three)[:3])
    assert max(found.values[3:]) < 1e-10
    assert found.spread is None
    # the sketch spans all of the map, so that the Frobenius norm is exact and its error rounding
    assert found.frobenius_squared == pytest.approx(three.square().sum().item(), rel=1e-12)
    nothing = spectrum(Matrix(torch.zeros(9, 9)), rank=4, oversampling=2, iterations=2, probes=2, generator=seeded())
    assert nothing.values == (0.0, 0.0, 0.0, 0.0)
    assert nothing.stable_rank is None
    assert nothing.rms_gain == 0


def test_frobenius_norm_and_its_standard_error() -> None:
    """The estimate is unbiased, its error the one it states, and the sketch makes it smaller."""
    matrix = normal(200, 200) * torch.logspace(1.5, -1.5, 200, dtype=torch.float64)
    operator, truth = Matrix(matrix), matrix.square().sum().item()
    scores, with_sketch, without = [], [], []
    for seed in range(60):
        sketch = singular_values(operator, 20, 5, 1, seeded(seed))
        mean, error = frobenius_squared(operator, 16, seeded(1000 + seed), sketch)
        assert error is not None
        scores.append((mean - truth) / error)
        with_sketch.append(abs(mean - truth))
        without.append(abs(frobenius_squared(operator, 16, seeded(1000 + seed))[0] - truth))
    # 60 studentised errors with 15 degrees of freedom: mean within 4 standard errors, spread about 1.07
    assert abs(sum(scores) / 60) < 4 * 1.07 / math.sqrt(60)
    assert 0.7 < torch.tensor(scores).std().item() < 1.5
    assert sum(with_sketch) < 0.5 * sum(without)
    assert frobenius_squared(operator, 1, seeded())[1] is None


def test_derivatives_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(StepformerError, match="not finite"):
        singular_values(Matrix(torch.full((5, 5), torch.nan)), 2, 1, 0, seeded())


# what is made of them


def spectrum_of(*values: float, square: float = 30.0, change: float | None = 0.001) -> Spectrum:
    return Spectrum(values, change, change, change, square, 2.0, 10)


def test_means_over_batches_and_sums_over_layers() -> None:
    found = over_batches([spectrum_of(4.0, 2.0, square=16.0), spectrum_of(8.0, 1.0, square=64.0, change=0.2)])
    assert found is not None
    assert found["singular_values"] == [6.0, 1.5]
    assert (found["sigma_max"], found["sigma_k"], found["k"], found["dimension"]) == (6.0, 1.5, 2, 10)
    assert found["spread"] == pytest.approx((4 / 2 + 8 / 1) / 2)  # of each batch, then the mean
    assert found["stable_rank"] == pytest.approx((16 / 16 + 64 / 64) / 2)
    assert found["rms_gain"] == pytest.approx((math.sqrt(1.6) + math.sqrt(6.4)) / 2)
    assert found["frobenius"] == pytest.approx((4 + 8) / 2)
    assert found["frobenius_standard_error"] == pytest.approx(math.hypot(2 / (2 * 4), 2 / (2 * 8)) / 2)
    assert found["converged"] is False
    assert found["change"] == found["error"] == 0.2
    assert "legacy" not in found
    other = over_batches([spectrum_of(3.0, 0.5, square=90.0)])
    assert other is not None
    summary = over_layers([found, other, None])
    assert summary is not None
    assert summary["persistence"] == pytest.approx(math.log(1.5) + math.log(0.5))
    assert summary["sum_log_rms_gain"] == pytest.approx(math.log(found["rms_gain"]) + math.log(3))
    assert summary["mean_spread"] == pytest.approx((5 + 6) / 2)
    assert summary["max_spread"] == 6
    assert summary["mean_sigma_max"] == 4.5
    assert summary["mean_stable_rank"] == pytest.approx((1 + 10) / 2)
    assert over_layers([None]) is None
    assert over_batches([]) is None


def test_the_legacy_number_is_the_eleventh() -> None:
    values = [float(v) for v in range(20, 4, -1)]  # 20, 19, ..., 5
    found = over_batches([spectrum_of(*values)])
    assert found is not None
    assert found["sigma_k"] == 5
    assert found["legacy"] == {"sigma_11": 10.0, "spread": 2.0}
    summary = over_layers([found, found])
    assert summary is not None
    assert summary["persistence"] == pytest.approx(2 * math.log(5))
    assert summary["legacy"]["persistence"] == pytest.approx(2 * math.log(10))


def test_a_value_of_zero_has_no_logarithm() -> None:
    zero = over_batches([spectrum_of(2.0, 0.0)])
    assert zero is not None
    assert zero["spread"] is None
    summary = over_layers([zero])
    assert summary is not None
    assert summary["persistence"] is None
    assert summary["max_spread"] is None
