"""Eigenvalues of operators with a known spectrum: Lanczos and power iteration."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draws import fixed, seeded
from stepformer.measure.diagnostics.curvature import (
    lanczos,
    power,
)
from stepformer.measure.diagnostics.lanczos import by_magnitude

# eigenvalues of operators with a known spectrum


def known(values: list[float], seed: int = 0) -> tuple[Tensor, Callable[[Tensor], Tensor], Callable[[int], Tensor]]:
    generator = seeded(seed)
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))
    matrix = basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.mT

    def draw(number: int) -> Tensor:
        own = seeded(seed + 100 + number)
        return torch.randn(len(values), generator=own, dtype=torch.float64)

    return matrix, lambda v: matrix @ v, draw


BULK = torch.linspace(-1, 1, 90, dtype=torch.float64).tolist()


@pytest.mark.parametrize(
    "top",
    [
        [-50.0, 30.0, -20.0, 10.0],  # dominant and negative
        [10.0, 10.0 - 1e-6, 9.999, -9.998],  # clustered, and nearly as large on the other side
        [1e6, 1e3, -1.0 - 1e-1, 1.05],  # six orders of magnitude
    ],
)
def test_lanczos_on_a_known_spectrum(top: list[float]) -> None:
    _, product, draw = known([*top, *BULK])
    found, steps = lanczos(product, draw, count=4, iterations=94, tolerance=1e-10)
    assert [pair.value for pair in found] == pytest.approx(top, rel=1e-9)
    assert steps <= 94
    for pair in found:
        assert float(pair.vector.norm()) == pytest.approx(1.0, abs=1e-12)
        assert pair.residual == pytest.approx(float((product(pair.vector) - pair.value * pair.vector).norm()), abs=1e-9)


def test_lanczos_says_when_it_has_not_converged() -> None:
    _, product, draw = known([*[10.0 - 0.01 * i for i in range(30)], *BULK])
    found, steps = lanczos(product, draw, count=3, iterations=8, tolerance=1e-6)
    assert steps == 8
    assert not found[2].converged(1e-6)
    for pair in found:  # the bound holds all the same: an eigenvalue lies within the residual
        distances = [abs(pair.value - value) for value in [10.0 - 0.01 * i for i in range(30)] + BULK]
        assert min(distances) <= pair.residual + 1e-12


def test_lanczos_stops_early_when_it_may() -> None:
    _, product, draw = known([100.0, -50.0, *BULK])
    asked: list[int] = []
    found, steps = lanczos(product, draw, count=2, iterations=90, tolerance=1e-6, progress=asked.append)
    assert steps == sum(asked) < 20
    assert all(pair.converged(2e-6) for pair in found)


def test_lanczos_goes_on_where_the_space_ends() -> None:
    """Three different eigenvalues exhaust the directions after three steps; the rest is found in new ones."""
    _, product, draw = known([5.0, 5.0, -3.0, -3.0, 1.0, 1.0])
    found, _ = lanczos(product, draw, count=6, iterations=50, tolerance=1e-12)
    assert [pair.value for pair in found] == pytest.approx([5, 5, -3, -3, 1, 1], abs=1e-10)


def test_lanczos_finds_no_eigenvalue_twice() -> None:
    """In fp32, without reorthogonalisation, 90 steps on such a spectrum return the largest several times."""
    matrix, _, draw = known([1000.0, 100.0, -10.0, *BULK])
    single = matrix.float()
    found, _ = lanczos(lambda v: single @ v, lambda i: draw(i).float(), count=4, iterations=93, tolerance=1e-30)
    # Rounding of fp32 is 6e-8 of the largest eigenvalue, 6e-5, for each of some 90 terms; the ends of the bulk, +1 and
    # -1, differ by no more than that, and the positive one comes first.
    assert [pair.value for pair in found] == pytest.approx([1000.0, 100.0, -10.0, 1.0], rel=1e-3)


def test_opposite_eigenvalues_have_an_order() -> None:
    """Which of +a and -a is larger by rounding depends on the machine; what is found first must not."""
    off = 2e-13  # a unit in the last place of 1000
    for values in ([1000, 3, -3 - off, 2], [1000, 3, -3, 2], [1000, 3 + off, -3, 2]):
        assert by_magnitude(values, torch.float64) == [0, 1, 2, 3]
        assert by_magnitude([values[i] for i in (3, 2, 1, 0)], torch.float64) == [3, 2, 1, 0]
    assert by_magnitude([3, -3.001, 0.0], torch.float64) == [1, 0, 2]
    assert by_magnitude([-2.0], torch.float32) == [0]
    for seed in range(8):
        _, product, draw = known([5.0, -5.0, 3.0, -3.0, *BULK], seed=seed)
        found, _ = lanczos(product, draw, count=3, iterations=90, tolerance=1e-10)
        assert [pair.value for pair in found] == pytest.approx([5, -5, 3], rel=1e-9)


def test_power_iteration() -> None:
    _, product, draw = known([-50.0, 30.0, 10.0, *BULK], seed=fixed(0))  # a start that is not nearly at right angles
    found, steps = power(product, draw, count=2, iterations=200, tolerance=1e-12)
    assert [pair.value for pair in found] == pytest.approx([-50.0, 30.0], rel=1e-6)
    assert steps < 400
    once, steps = power(product, draw, count=1, iterations=15, tolerance=1e-3)
    assert steps <= 15
    assert once[0].value == pytest.approx(-50, rel=1e-2)


def test_power_iteration_may_stop_before_it_has_converged() -> None:
    """Two eigenvalues of nearly one size: the change is small although the vector is none of theirs."""
    _, product, draw = known([10.0, 9.99, 9.98, *BULK])
    found, steps = power(product, draw, count=1, iterations=50, tolerance=1e-3)
    assert steps < 50
    assert not found[0].converged(1e-3 / 10)
    sharp, _ = lanczos(product, draw, count=1, iterations=50, tolerance=1e-8)
    assert sharp[0].value == pytest.approx(10.0, rel=1e-8)


def test_an_operator_that_is_zero() -> None:
    def product(v: Tensor) -> Tensor:
        return torch.zeros_like(v)

    def draw(number: int) -> Tensor:
        return known([1.0] * 5)[2](number)

    for method in (lanczos, power):
        found, _ = method(product, draw, count=2, iterations=5, tolerance=1e-3)
        assert [pair.value for pair in found] == [0.0, 0.0]
