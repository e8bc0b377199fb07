"""The particle systems of `stepformer flow`: fields, energies, orders of accuracy, moments, filters, the command."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stepformer.cli import main
from stepformer.measure.flows import (
    SCHEMES,
    Flow,
    Friction,
    LinearFlow,
    Moments,
    Result,
    SoftmaxFlow,
    accelerated,
    depths,
    energies,
)
from stepformer.measure.flows.convergence import ellipse, moment_rate, order, token_rate
from stepformer.measure.flows.energies import central, gradients
from stepformer.measure.flows.filters import contraction, gain, tuned, worst_rates
from stepformer.measure.flows.integrators import Phase, damped, rk4
from stepformer.measure.flows.plots import draw
from stepformer.measure.flows.results import far, generator, last
from stepformer.measure.flows.systems import definite, gaussian, radii

N, D = 6, 3


def silent(text: str) -> None:
    pass


def crooked(seed: int = 1) -> Tensor:
    """A matrix that is not symmetric."""
    return 0.4 * torch.randn(D, D, generator=generator(seed), dtype=torch.float64)


def tokens(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = generator(seed)
    return gaussian(N, D, 0.8, g), gaussian(N, D, 0.8, g)


def symmetric() -> tuple[Tensor, Tensor, Tensor]:
    g = generator(7)
    return definite(D, 0.3, 0.9, g), definite(D, 0.5, 1.5, g), definite(D, -1.0, 1.0, g)


A, B, V = symmetric()
GRADIENT_FLOWS: dict[str, Flow] = {
    "linear": LinearFlow(A, V),
    "softmax": SoftmaxFlow(A, B),
    "softmax row": SoftmaxFlow(A, B, rule="row"),
    "softmax kappa": SoftmaxFlow(A, B, kappa=-0.7),
    "softmax full, A not symmetric": SoftmaxFlow(crooked(), B),
}


@pytest.mark.parametrize("name", GRADIENT_FLOWS)
def test_fields_are_the_derivatives_of_the_energy(name: str) -> None:
    flow = GRADIENT_FLOWS[name]
    x, y = tokens()
    dx, dy = gradients(flow, x, y)
    assert far(flow.velocity(x, y), dy) < 1e-13  # rounding
    assert far(flow.force(x, y), -dx) < 1e-13
    # the error of a central difference of width e is about e^2 + 1e-16 / e = 1e-10, times third derivatives
    assert far(flow.velocity(x, y), central(lambda u: flow.hamiltonian(x, u), y, 1e-5)) < 1e-8
    assert far(flow.force(x, y), -central(lambda u: flow.hamiltonian(u, y), x, 1e-5)) < 1e-8


def test_row_force_is_the_gradient_for_symmetric_matrices_only() -> None:
    x, y = tokens()
    assert far(SoftmaxFlow(A, B, rule="row").force(x, y), SoftmaxFlow(A, B).force(x, y)) < 1e-13
    bent = crooked()
    assert far(SoftmaxFlow(bent, B, rule="row").force(x, y), SoftmaxFlow(bent, B).force(x, y)) > 0.1
    linear = LinearFlow(bent, V)
    assert far(linear.force(x, y), -gradients(linear, x, y)[0]) > 0.05


def test_dividing_a_leaves_the_force_a_gradient_and_not_the_velocity() -> None:
    """The models divide a_i = y_i.B y_i by d in G, and F stays B y / z."""
    x, y = tokens()
    flow = SoftmaxFlow(A, B, divisor=float(D))
    dx, dy = gradients(flow, x, y)
    assert far(flow.force(x, y), -dx) < 1e-13
    assert far(flow.velocity(x, y), D * dy) < 1e-13


def test_fields_against_sums_over_tokens() -> None:
    """The equations of the docstrings, one sum at a time, with A not symmetric."""
    x, y = tokens()
    a = crooked()
    linear, row = LinearFlow(a, V), SoftmaxFlow(a, B, kappa=0.7, rule="row")
    z = [sum(math.exp(x[i] @ a @ x[j]) for j in range(N)) / N for i in range(N)]
    w = [float(y[i] @ B @ y[i]) / z[i] ** 2 for i in range(N)]
    for i in range(N):
        f = sum((x[j] @ a @ x[i]) * y[j] for j in range(N)) / N
        g = V @ x[i] - sum((y[i] @ y[j]) * (a @ x[j]) for j in range(N)) / N
        torch.testing.assert_close(linear.velocity(x, y)[i], f)
        torch.testing.assert_close(linear.force(x, y)[i], g)
        pull = sum(math.exp(x[i] @ a @ x[j]) * (w[i] + w[j] + 1.4) * (a @ x[j]) for j in range(N)) / (2 * N)
        torch.testing.assert_close(row.velocity(x, y)[i], B @ y[i] / z[i])
        torch.testing.assert_close(row.force(x, y)[i], pull)


def test_standard_flow_is_attention() -> None:
    x, _ = tokens()
    weights = torch.softmax(x @ A @ x.mT, dim=1)
    torch.testing.assert_close(SoftmaxFlow(A, B).standard(x), weights @ x @ (B @ A).mT)
    torch.testing.assert_close(LinearFlow(A, V).standard(x), (x @ A @ x.mT) @ x @ V / N)


@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_energy_falls_with_friction_and_stays_without(name: str) -> None:
    x, _ = tokens()
    flow = LinearFlow(A, -(V @ V)) if name == "linear" else SoftmaxFlow(A, B, kappa=-1.0)
    free = last(rk4(damped(flow, Friction(0.0, 0.0)), Phase.at_rest(x), 1.0, 200))
    begin = flow.potential(x).item()
    # RK4 of step 0.005: 0.005^4 = 6e-10, times derivatives of order one
    assert flow.hamiltonian(free.x, free.y).item() == pytest.approx(begin, rel=1e-8)
    along = [flow.hamiltonian(u.x, u.y).item() for u in rk4(damped(flow, Friction()), Phase.at_rest(x), 1.0, 200)]
    assert all(after < before for before, after in itertools.pairwise(along))
    assert along[-1] < begin - 1e-3
    slope = -(flow.force(x, torch.zeros_like(x)) * flow.standard(x)).sum()
    still = x.clone().requires_grad_()
    (du,) = torch.autograd.grad(flow.potential(still), still)
    assert slope < 0
    torch.testing.assert_close((du * flow.standard(x)).sum(), slope)


def assert_drawn(name: str, result: Result, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(name, result, folder / f"{name}.png")
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_every_integrator_has_its_order(tmp_path: Path) -> None:
    """Within 0.15: the next term of the error, a relative O(h) with h = 1/40 and factors up to five, bends the line.
    Constant weights lose an order on alternating steps.
    """
    orders = order(0, 16, silent)
    assert len(orders.rows) == 2 * 11
    assert {row["integrator"] for row in orders.rows} >= {scheme.label for scheme in SCHEMES}
    for row in orders.rows:
        # margin: truncation, not rounding
        assert row["fitted order"] == pytest.approx(row["expected"], abs=0.15), row
    for name in ("linear", "softmax"):
        errors = orders.curves[name]["errors"]
        assert errors["ab2 history=constant, alternating h"][-1] > 10 * errors["ab2, alternating h"][-1]
    assert_drawn("order", orders, tmp_path)


@pytest.mark.slow
def test_the_reference_solution_is_exact_enough() -> None:
    """Smallest error measured against it: about 2e-6 for AB2 at h = 1/320."""
    g = generator(0)
    flow = SoftmaxFlow(0.4 * definite(4, 0.5, 1.5, g), definite(4, 0.5, 1.5, g))
    rest = Phase.at_rest(gaussian(16, 4, 0.7, g))
    coarse, fine = (last(rk4(damped(flow, Friction(3.0, 0.1)), rest, 1.0, n)) for n in (500, 1000))
    assert max(far(coarse.x, fine.x), far(coarse.y, fine.y)) < 1e-9


def test_plain_euler_with_that_memory_is_presymp_euler() -> None:
    x, _ = tokens()
    ends = [last(accelerated(SoftmaxFlow(A, B), scheme, x, 0.1, 10, Friction())) for scheme in SCHEMES[:2]]
    assert [scheme.template for scheme in SCHEMES[:2]] == ["plain-euler", "presymp-euler"]
    torch.testing.assert_close(ends[0].x, ends[1].x, rtol=1e-13, atol=0)
    torch.testing.assert_close(ends[0].y, ends[1].y, rtol=1e-13, atol=1e-15)


@pytest.mark.slow
def test_tokens_follow_the_odes_of_their_moments(tmp_path: Path) -> None:
    ellipses = ellipse(0, 16, silent)
    assert len(ellipses.rows) == 2 + 1 + len(SCHEMES)
    for row in ellipses.rows:
        # RK4 may reach rounding at 320 steps, which bends its line downwards
        assert row["fitted order"] == pytest.approx(row["expected"], abs=0.3 if row["integrator"] == "rk4" else 0.15)
        assert float(row["radii moved"] or 0) < 1e-11  # steps are linear maps of the tokens: only rounding moves them
        if row["integrator"] == "rk4":
            assert float(row["error, 320 steps"] or 0) < 1e-8
    assert ellipses.settings["radii moved by softmax attention"] > 0.01
    assert_drawn("ellipse", ellipses, tmp_path)


def test_a_heavy_tailed_start_keeps_its_radii_and_its_moments() -> None:
    """Proposition 4.3 with the tokens' own moments: kappa_g = 1 for a Student sample as well."""
    g = generator(3)
    x = gaussian(40, D, 0.5, g) / gaussian(40, 1, 1.0, g).abs().clamp_min(0.3)
    x = x / x.square().sum(dim=1).mean().sqrt() + 0.2
    flow, friction = LinearFlow(A, V), Friction()
    u = last(rk4(token_rate(flow, friction, True), Phase.at_rest(x), 1.0, 200))
    exact = last(rk4(moment_rate(flow, friction, True), Moments.of(x), 1.0, 200))
    torch.testing.assert_close(Moments.of(u.x).S, exact.S, rtol=1e-8, atol=1e-9)  # 0.005^4 = 6e-10
    torch.testing.assert_close(Moments.of(u.x).m, exact.m, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(u.y, u.x @ exact.P, rtol=1e-8, atol=1e-9)  # y = P x, P symmetric
    torch.testing.assert_close(radii(u.x), radii(x), rtol=1e-8, atol=0)


def test_centred_moments_are_corollary_4_4() -> None:
    """S' = S A S P + P S A S, P' = V - A S P^2 - P^2 S A - alpha P for m = 0."""
    S, P, alpha = definite(D, 0.4, 1.3, generator(5)), definite(D, -0.6, 0.9, generator(6)), 1.7
    rate = Moments(torch.zeros(D, dtype=torch.float64), S, P).rate(LinearFlow(A, V), alpha, accelerated=True)
    torch.testing.assert_close(rate.S, S @ A @ S @ P + P @ S @ A @ S)
    torch.testing.assert_close(rate.P, V - A @ S @ P @ P - P @ P @ S @ A - alpha * P)
    assert rate.m.abs().max() == 0


def test_energies_against_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energies, "DRAWS", 1)
    monkeypatch.setattr(energies, "GRID", [0.25, 0.5])
    result = energies.energy(0, 16, silent)
    assert len(result.rows) == 4 * (1 + len(SCHEMES))
    for p in energies.problems(0, 16):
        shown = result.curves[p.name]
        begin = p.flow.potential(p.x).item() / 16 - (p.infimum or 0.0)
        for path in shown["paths"].values():
            assert path[0] == pytest.approx(begin, rel=1e-12)
            assert p.infimum is None or min(path) >= 0
        falling = shown["paths"]["standard"]
        assert all(after < before for before, after in itertools.pairwise(falling))


def test_a_path_that_blows_up_is_shown_until_there() -> None:
    problem = energies.problems(0, 16)[2]
    size, curve = energies.best_path(
        energies.Problem(problem.name, problem.flow, problem.x, None, h=5.0), None, Friction()
    )
    assert size == 5.0
    assert 1 < len(curve) < 60
    assert math.isnan(energies.outcome(problem, curve))


def test_filter_of_gradient_descent_and_heavy_ball() -> None:
    """|1 - gamma lambda|; sqrt(beta) wherever the roots are complex, which is inside (m, L)."""
    c = tuned()
    beta = c["heavy-ball"]["beta"]
    for curvature in (0.012, 0.1, 0.7, 0.98):
        left = 1 - c["gd"]["step"] * curvature
        assert contraction("gd", curvature, c["gd"]) == pytest.approx(abs(left), abs=1e-14)
        assert gain("gd", curvature, c["gd"], 12) == pytest.approx(abs(left) ** 12, rel=1e-12)
        assert contraction("heavy-ball", curvature, c["heavy-ball"]) == pytest.approx(math.sqrt(beta), abs=1e-12)
    spectrum = torch.linspace(0.01, 1.0, 200, dtype=torch.float64).tolist()
    for name, rate in worst_rates().items():
        # at the ends of the spectrum two roots coincide, where eigenvalues are only accurate to sqrt(1e-16)
        assert max(contraction(name, value, c[name]) for value in spectrum) == pytest.approx(rate, abs=1e-6)


def test_gain_follows_the_recurrence_of_depth() -> None:
    c, curvature = tuned()["triple-momentum"], 0.37
    g = c["gamma"] * curvature
    path = [1.0, 1 - g * c["nu"]]  # from rest: v_1 = -g e_0
    for _ in range(11):
        path.append((1 + c["beta"] - g * (c["mu"] + c["nu"])) * path[-1] - (c["beta"] - g * c["mu"]) * path[-2])
    assert gain("triple-momentum", curvature, c, 12) == pytest.approx(abs(path[12]), rel=1e-9)


def test_command_writes_numbers_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["flow", "filter", "--out", str(tmp_path), "--particles", "8", "hamiltonian"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"flow.json", "filter.png", "hamiltonian.png"}
    record = json.loads((tmp_path / "flow.json").read_text())
    assert list(record["experiments"]) == ["filter", "hamiltonian"]
    assert (record["seed"], record["particles"]) == (0, 8)
    printed = capsys.readouterr().out
    assert "heavy-ball" in printed
    assert "0.818" in printed
    assert "row force, A not symmetric" in printed


def test_command_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["flow", "filter", "--json", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads((tmp_path / "flow.json").read_text())
    assert printed.err.count("\n") == 1
    assert "stepformer[plot]" in printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["flow.json"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["enrgy"], "Did you mean 'energy'?"), (["--particles", "4"], "between 8 and 2048"), (["xyz"], "Known: energy")],
)
def test_command_explains_bad_input(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flow", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


# How deep, and what is best (Momentum Streams, appendix F)


def mode(curvature: float, depth: int, gamma: float, beta: float = 0.0, mu: float = 0.0, nu: float = 1.0) -> float:
    """|e_T| by u' = beta u - gamma lambda (e + mu u), e' = e + nu u', from e = 1 and u = 0, with plain numbers."""
    e, u = 1.0, 0.0
    for _ in range(depth):
        u = beta * u - gamma * curvature * (e + mu * u)
        e = e + nu * u
    return abs(e)


@pytest.mark.parametrize("name", ["gd", "heavy-ball", "nesterov", "triple-momentum"])
def test_errors_after_any_depth_are_those_of_the_modes(name: str) -> None:
    curvatures, c = depths.spectrum(0.02, 1.0, 9), tuned(0.02, 1.0)[name]
    plain = {"gamma": c.get("step"), **c} if name == "gd" else dict(c)
    plain.pop("step", None)
    for depth, left in enumerate(itertools.islice(depths.errors(name, curvatures, c), 30)):
        expected = [mode(value, depth, **plain) for value in curvatures.tolist()]
        assert left.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-13)


def test_the_depth_from_which_on_momentum_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """T > ln C_T / ln(rho / rho_v) there, and not one layer before; gradient descent leaves rho^T, C_T grows like T."""
    monkeypatch.setattr(depths, "CONDITIONS", (10, 100))
    monkeypatch.setattr(depths, "DEEPEST", 60)
    result = depths.threshold(0, 8, silent)
    assert len(result.rows) == 6
    for row in result.rows:
        name, depth, kappa = str(row["template"]), int(row["threshold"] or 0), float(row["condition"] or 0)
        momentum, plain = (depths.worst(rule, 1 / kappa, 1.0, 60) for rule in (name, "gd"))
        rates = worst_rates(1 / kappa, 1.0)
        assert plain == pytest.approx([((kappa - 1) / (kappa + 1)) ** T for T in range(61)], rel=1e-9)
        for T in (depth - 1, depth):
            bound = math.log(momentum[T] / rates[name] ** T) / math.log(rates["gd"] / rates[name])
            assert (bound < T) == (depth == T)
            assert depth != T or row["ln C / ln ratio"] == pytest.approx(bound)
        assert all(one < other for one, other in zip(momentum[depth:], plain[depth:], strict=True))
    ball = depths.worst("heavy-ball", 0.01, 1.0, 60)
    constants = [ball[T] / worst_rates(0.01, 1.0)["heavy-ball"] ** T for T in (15, 30, 60)]
    assert constants[1] / constants[0] == pytest.approx(2, abs=0.1)
    assert constants[2] / constants[1] == pytest.approx(2, abs=0.1)
    assert next(row["threshold"] for row in result.rows if row["condition"] == 100) == 21  # more than twelve layers


@pytest.mark.slow
def test_the_best_filters(tmp_path: Path) -> None:
    """Classes contain each other, Chebyshev bounds all, and no coefficients of a dense grid are better."""
    result = depths.best(0, 8, silent)
    found = {str(row["class"]): row for row in result.rows}
    gains = [float(row["best worst gain"] or 0) for row in result.rows]
    plain, ball, nesterov, triple, layerwise = gains
    bound = 2 / sum((11 / 9) ** (sign * 12) for sign in (1, -1))  # T_12 at 101/99: (x + sqrt(x^2 - 1)) = 11/9
    assert layerwise == pytest.approx(bound, rel=1e-9)
    assert plain > ball > nesterov > layerwise
    assert plain == pytest.approx((99 / 101) ** 12, rel=1e-4)
    assert triple == pytest.approx(nesterov, rel=1e-6)  # gamma nu and mu / nu
    best = {name: float(found["triple-momentum"][name] or 0) for name in ("gamma", "mu", "nu")}
    assert best["gamma"] * best["nu"] == pytest.approx(float(found["nesterov"]["gamma"] or 0), rel=1e-3)
    assert best["mu"] / best["nu"] == pytest.approx(float(found["nesterov"]["mu"] or 0), rel=1e-3)
    gammas, betas = torch.meshgrid(
        torch.linspace(2.0, 3.6, 60, dtype=torch.float64),
        torch.linspace(0.5, 0.95, 60, dtype=torch.float64),
        indexing="ij",
    )
    e, u = torch.ones(60, 60, 200, dtype=torch.float64), torch.zeros(60, 60, 200, dtype=torch.float64)
    curvatures = torch.logspace(-2, 0, 200, dtype=torch.float64)
    for _ in range(12):
        u = betas[..., None] * u - gammas[..., None] * curvatures * e
        e = e + u
    assert ball <= e.abs().amax(dim=-1).min() * (1 + 1e-3)
    assert_drawn("best", result, tmp_path)
