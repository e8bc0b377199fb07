"""Polar factors against the singular value decomposition, steps along them by hand, Muon against torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draws import seeded
from stepformer.base.errors import InputError
from stepformer.optim import LmoOptimizer, polar
from stepformer.optim.polar import quintics
from stepping import METHODS, polar_file
from transcriptions import optimizers as naive

SAFETY = 1.01  # the Polar Express quintics are stored as p(x / 1.01)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def with_values(rows: int, cols: int, values: list[float], seed: int = 0) -> Tensor:
    """A random matrix with these singular values, the rest zero."""
    k = len(values)
    u, v = torch.linalg.qr(normal(rows, k, seed=seed))[0], torch.linalg.qr(normal(cols, k, seed=seed + 1))[0]
    return u @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ v.T


# Polar factors.

CASES: dict[str, Callable[[], Tensor]] = {
    "square": lambda: normal(12, 12),
    "tall": lambda: normal(20, 7),
    "wide": lambda: normal(7, 20),
    "batch": lambda: normal(4, 9, 5),
    "batch of batches": lambda: normal(2, 3, 5, 9),
    "condition 1e4": lambda: with_values(12, 12, torch.logspace(0, -4, 12).tolist()),
    "condition 1e4, wide": lambda: with_values(8, 16, torch.logspace(0, -4, 8).tolist()),
    "rank 3": lambda: with_values(10, 14, [3.0, 2.0, 0.5]),
    "rank 1": lambda: with_values(14, 10, [2.0]),
    "1 x 1": lambda: torch.tensor([[-0.3]], dtype=torch.float64),
    "1 x n": lambda: normal(1, 9),
    "n x 1": lambda: normal(9, 1),
    "large": lambda: 1e6 * normal(6, 8),
    "small": lambda: 1e-6 * normal(6, 8),
    "mixed sizes in a batch": lambda: normal(3, 6, 4) * torch.tensor([1e-5, 1.0, 1e5]).view(3, 1, 1).double(),
}


def each(function: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """One matrix at a time."""
    flat = batch.reshape(-1, *batch.shape[-2:])
    return torch.stack([function(matrix) for matrix in flat]).reshape(batch.shape)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", ["newton-schulz", "polar-express"])
def test_iterations_act_on_singular_values_alone(method: str, case: str) -> None:
    matrix = CASES[case]()
    before = matrix.clone()
    ours = polar(matrix, method, dtype=torch.float64)
    expected = each(lambda m: naive.polar_by_svd(m, quintics(method)), matrix)
    # 5 to 8 fp64 quintics with slopes up to 8.4: a few hundred ulps
    assert (ours - expected).abs().max() < 1e-10
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("case", CASES)
def test_svd_gives_the_polar_factor(case: str) -> None:
    matrix = CASES[case]()
    factor = polar(matrix, "svd", dtype=torch.float64)
    flat, factors = matrix.reshape(-1, *matrix.shape[-2:]), factor.reshape(-1, *matrix.shape[-2:])
    for m, p in zip(flat, factors, strict=True):
        assert (p - naive.polar_by_svd(m)).abs().max() < 1e-10
        values = torch.linalg.svdvals(m)
        if values[-1] > 1e-6 * values[0]:
            gram = p @ p.T if p.shape[0] <= p.shape[1] else p.T @ p
            assert (gram - torch.eye(len(gram), dtype=torch.float64)).abs().max() < 1e-10
        stretch = p.T @ m  # M = P H with H symmetric and positive, trace = nuclear norm
        size = float(values[0])
        assert (stretch - stretch.T).abs().max() < 1e-10 * size
        assert (p @ stretch - m).abs().max() < 1e-10 * size
        assert abs(float(stretch.trace() - values.sum())) < 1e-10 * size * len(values)


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (5, 3), (1, 1), (2, 4, 3)])
@pytest.mark.parametrize("method", METHODS)
def test_polar_of_zero_is_zero(method: str, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(polar(torch.zeros(shape, dtype=dtype), method), torch.zeros(shape, dtype=dtype))


def test_a_zero_in_a_batch_stays_alone() -> None:
    batch = torch.stack([normal(4, 6), torch.zeros(4, 6, dtype=torch.float64), normal(4, 6, seed=1)])
    for method in METHODS:
        factors = polar(batch, method)
        assert torch.equal(factors[1], torch.zeros_like(factors[1]))
        for i in (0, 2):
            assert (factors[i] - polar(batch[i], method)).abs().max() < 1e-12  # batched products may sum in other order


def test_newton_schulz_bounds() -> None:
    assert tuple(quintics("newton-schulz")) == tuple(naive.JORDAN)
    x = torch.logspace(math.log10(3e-3), 0, 100_001, dtype=torch.float64)
    image = naive.compose(quintics("newton-schulz"), x)
    assert image.min() > 0.68
    assert image.max() < 1.21
    # and on a matrix whose Frobenius norm is 1
    values = [0.003, 0.01, 0.1, 0.3]
    values.append(math.sqrt(1 - sum(v * v for v in values)))
    found = torch.linalg.svdvals(polar(with_values(9, 7, values), "newton-schulz"))[:5]
    assert found.min() > 0.68
    assert found.max() < 1.21


def test_polar_express_bounds() -> None:
    x = torch.logspace(-3, 0, 100_001, dtype=torch.float64)
    # margin: the polynomial's own error, 5.9e-6
    assert (naive.compose(quintics("polar-express"), x) - 1).abs().max() < 1e-5
    values = [0.001, 0.003, 0.01, 0.1, 0.3]
    values.append(math.sqrt(1 - sum(v * v for v in values)))
    matrix = with_values(6, 11, values)
    found = polar(matrix, "polar-express")
    assert (torch.linalg.svdvals(found) - 1).abs().max() < 1e-5  # margin: as above
    assert (found - naive.polar_by_svd(matrix)).norm(2) < 1e-5  # margin: as above


def test_polar_express_quintics_are_minimax() -> None:
    """Each is the best odd quintic for 1 on what the ones before it left of [1e-3, 1], before the safety factor.

    Proof by alternation, see `extremes`; a Remez exchange of our own gives the first one again.
    """
    low, high = 1e-3, 1.0
    for i, (a, b, c) in enumerate(quintics("polar-express")):
        best = (a * SAFETY, b * SAFETY**3, c * SAFETY**5)
        if high - low > 1e-3:  # afterwards errors are below 1e-8 and the quintic is the limit (15, -10, 3) / 8
            errors = naive.extremes(best, low, high)
            size = max(map(abs, errors))
            assert len(errors) == 4, i
            # grid of 2e5 points: an extreme is missed by at most curvature * (h/2)^2, 1e-9 of it; 1e-15 is rounding
            assert all(abs(abs(e) - size) < 1e-8 * size + 2e-15 for e in errors), (i, errors)
        else:
            assert torch.allclose(torch.tensor(best), torch.tensor([1.875, -1.25, 0.375]), atol=1e-4)
            size = max(map(abs, naive.extremes(best, low, high)))
        low = float(naive.compose([(a, b, c)], torch.tensor(low, dtype=torch.float64)))
        high = 1 + size
    first = remez(1e-3, 1.0)
    stored = [x * SAFETY**k for x, k in zip(quintics("polar-express")[0], (1, 3, 5), strict=True)]
    assert stored == pytest.approx(first, rel=1e-7)


def remez(low: float, high: float) -> list[float]:
    """Exchange on four points, two of them the ends: solve p(x_i) - 1 = (-1)^(i+1) E, move the inner two to p' = 0."""
    inner = [low + (high - low) / 4, low + 3 * (high - low) / 4]
    a = b = c = 0.0
    for _ in range(60):
        points = torch.tensor([low, *inner, high], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        system = torch.stack([points, points**3, points**5, signs], dim=1)
        a, b, c, _ = torch.linalg.solve(system, torch.ones(4, dtype=torch.float64)).tolist()
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = sorted(math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1))
    return [a, b, c]


@pytest.mark.parametrize("method", METHODS)
def test_polar_dtypes(method: str) -> None:
    matrix = normal(8, 12)
    exact = polar(matrix, method, dtype=torch.float64)
    for given in (torch.float64, torch.float32, torch.bfloat16):
        assert polar(matrix.to(given), method).dtype == given
        assert polar(matrix.to(given), method, dtype=torch.float32).dtype == given
    assert (polar(matrix, method) - exact).abs().max() == 0  # fp64 matrices: fp64 unless told otherwise
    rough = (polar(matrix, method, dtype=torch.float32) - exact).abs().max()
    assert 1e-12 < rough < 3e-5  # really fp32, and fp32 rounding (6e-8) times the slopes of the composition
    assert (polar(matrix.float(), method).double() - exact).abs().max() < 3e-5
    if method != "svd":
        rougher = (polar(matrix.float(), method, dtype=torch.bfloat16).double() - exact).abs().max()
        assert 1e-4 < rougher < 0.1  # bf16 rounds at 4e-3


def test_unknown_polar_method() -> None:
    with pytest.raises(InputError, match="Did you mean 'svd'"):
        polar(torch.eye(2), "svdd")


@pytest.mark.parametrize("method", ["newton-schulz", "polar-express"])
@pytest.mark.parametrize("shape", [(9, 4), (3, 9, 4), (2, 3, 9, 4), (3, 4, 9), (3, 5, 5)])
def test_tall_matrices_from_the_right(monkeypatch: pytest.MonkeyPatch, method: str, shape: tuple[int, ...]) -> None:
    matrix = normal(*shape)
    turned = polar(matrix, method)
    monkeypatch.setattr(polar_file, "stays_tall", lambda matrix: True)
    as_it_is = polar(matrix, method)
    assert as_it_is.is_contiguous()
    assert (as_it_is - turned).abs().max() < 1e-12  # fp64, five or eight steps of a growth of at most 4


# Steps along them.


def test_polar_leaves_no_graph() -> None:
    matrix = nn.Parameter(normal(3, 4))
    opt = LmoOptimizer([{"params": [matrix]}], lr=0.1)
    matrix.grad = normal(3, 4, seed=1)
    opt.step()
    assert matrix.requires_grad
    assert matrix.is_leaf


def test_lmo_geometries_by_hand() -> None:
    grad = torch.tensor([[3.0, -4.0], [0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    rms = math.sqrt(12.5)

    def moved(**group: Any) -> Tensor:
        w = nn.Parameter(torch.zeros_like(grad))
        w.grad = grad.clone()
        LmoOptimizer([{"params": [w], **group}], lr=0.5, momentum=0.0, nesterov=False).step()
        return -w.detach() / 0.5

    row = torch.tensor([[3 / rms, -4 / rms], [0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    assert (moved(geometry="row", scaling="none") - row).abs().max() < 1e-12
    assert torch.equal(moved(geometry="sign", scaling="none"), grad.sign())
    # columns (3, 0, 1) and (-4, 0, 1): Gram matrix [[10, -11], [-11, 17]], nuclear norm sqrt(27 + 2 sqrt(49)) = sqrt 41
    plain, nuclear = moved(scaling="none", method="svd"), moved(scaling="none", method="svd", nuclear=True)
    assert (nuclear - math.sqrt(41) * plain).abs().max() < 1e-12
    assert (moved(scaling="jordan", method="svd") - math.sqrt(1.5) * plain).abs().max() < 1e-12
    assert (moved(scaling="spectral", method="svd") - math.sqrt(1.5) * plain).abs().max() < 1e-12
    assert (moved(scaling="rms", method="svd") - 0.2 * math.sqrt(3) * plain).abs().max() < 1e-12


# Muon against torch.


def precise_newton_schulz(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """In place of torch's bf16 iteration: the same one, right to fp32 rounding."""
    a, b, c = coefficients
    x = grad.double() / max(float(grad.double().norm()), eps)
    for _ in range(steps):
        x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
    return x.to(grad.dtype)


def muon_pair(
    scaling: tuple[str, str], shapes: list[tuple[int, int]], wd: float, nesterov: bool, steps: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(torch's weight, ours, start) after some steps of |W A - C|^2, whose gradients depend on the weights."""
    common: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "nesterov": nesterov, "weight_decay": wd}
    starts = [normal(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate(shapes)]
    # orthogonal: rounding, in bf16 above all, is amplified by small singular values of a gradient
    inputs = [torch.linalg.qr(normal(shape[1], shape[1], seed=50 + i)).Q.float() for i, shape in enumerate(shapes)]
    goals = [normal(*shape, seed=100 + i, dtype=torch.float32) for i, shape in enumerate(shapes)]
    runs = []
    for make in (
        lambda params: torch.optim.Muon(params, adjust_lr_fn=scaling[0], **common),
        lambda params: LmoOptimizer([{"params": params}], scaling=scaling[1], **common),
    ):
        params = [nn.Parameter(start.clone()) for start in starts]
        opt = make(params)
        for _ in range(steps):
            opt.zero_grad()
            sum(((w @ x - y) ** 2).mean() for w, x, y in zip(params, inputs, goals, strict=True)).backward()
            opt.step()
        runs.append([p.detach() for p in params])
    return list(zip(runs[0], runs[1], starts, strict=True))


MUON = [
    (("original", "jordan"), 0.0, True),
    (("original", "jordan"), 0.1, True),
    (("original", "jordan"), 0.1, False),
    (("match_rms_adamw", "rms"), 0.1, True),
    (("match_rms_adamw", "rms"), 0.0, False),
]


@pytest.mark.parametrize(("scaling", "wd", "nesterov"), MUON)
def test_muon_is_torch_muon(
    scaling: tuple[str, str], wd: float, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", precise_newton_schulz)
    for theirs, ours, start in muon_pair(scaling, [(12, 5), (5, 12), (8, 8), (24, 6)], wd, nesterov, steps=8):
        assert (theirs - ours).abs().max() < 1e-5  # fp32 weights of size 3, eight steps
        assert (theirs - start).abs().max() > 0.1


@pytest.mark.parametrize(("scaling", "wd", "nesterov"), MUON[1:4:2])
def test_muon_is_torch_muon_in_bf16(scaling: tuple[str, str], wd: float, nesterov: bool) -> None:
    for theirs, ours, start in muon_pair(scaling, [(12, 5), (5, 12)], wd, nesterov, steps=3):
        # relative to the distance moved: bf16 rounds at 4e-3
        assert (theirs - ours).norm() / (theirs - start).norm() < 6e-2  # 2e-2 seen


def test_muon_defaults_are_the_recipe() -> None:
    (group,) = LmoOptimizer([{"params": [nn.Parameter(normal(3, 4))]}]).param_groups
    assert group["lr"] == 0.02
    assert group["momentum"] == 0.95
    assert group["nesterov"] is True
    assert group["weight_decay"] == 0.0
    assert group["scaling"] == "jordan"
