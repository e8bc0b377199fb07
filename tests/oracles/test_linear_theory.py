"""The templates on a quadratic, without norms, are the classical methods with their classical rates (1.15)."""

from __future__ import annotations

import math

import pytest
import torch

from stepformer.rules import State, Substep, Values, templates

M, L = 0.01, 1.0  # curvatures between m and L: condition number 100
KAPPA = L / M
ROOT = math.sqrt(KAPPA)
CURVATURES = torch.linspace(M, L, 2001, dtype=torch.float64)


def step_matrix(name: str, curvature: float, **c: float) -> torch.Tensor:
    """The linear map (e, u) -> (e', u') of one substep with oracle g(point) = -curvature * point."""
    values = {k: torch.tensor(v, dtype=torch.float64) for k, v in c.items()}
    template = templates[name].component(1, 1)
    turn = Substep(template, lambda point: -curvature * point, Values(values), None)
    columns = []
    for unit in ((1.0, 0.0), (0.0, 1.0)):
        e, u = (torch.tensor([value], dtype=torch.float64) for value in unit)
        s = turn.take(State(e, {"v": u}))
        columns.append(torch.cat([s.x, s.v]))
    return torch.stack(columns, dim=1)


def worst_rate(name: str, **c: float) -> float:
    """Largest spectral radius over the curvatures."""
    return max(torch.linalg.eigvals(step_matrix(name, x, **c)).abs().max().item() for x in CURVATURES.tolist())


@pytest.mark.parametrize("curvature", [0.01, 0.3, 1.0])
def test_second_order_recurrence_of_triple_momentum(curvature: float) -> None:
    """e_{t+1} = [1 + beta - gamma lambda (mu + nu)] e_t - [beta - gamma lambda mu] e_{t-1}.

    (Eliminate u with nu u_t = e_t - e_{t-1}.)
    """
    mu, beta, gamma, nu = 0.37, 0.61, 0.83, 1.7
    a = step_matrix("triple-momentum", curvature, mu=mu, beta=beta, gamma=gamma, nu=nu)
    z = torch.tensor([0.9, -0.4], dtype=torch.float64)
    path = [z[0].item()]
    for _ in range(12):
        z = a @ z
        path.append(z[0].item())
    g = gamma * curvature
    for before, now, after in zip(path[1:], path[2:], path[3:], strict=False):
        expected = (1 + beta - g * (mu + nu)) * now - (beta - g * mu) * before
        assert after == pytest.approx(expected, abs=1e-13)


def test_gradient_descent_rate() -> None:
    """gamma = 2 / (m + L): rate (kappa - 1) / (kappa + 1)."""
    gamma = 2 / (M + L)
    turn = templates["gd"].component(1, 1)
    worst = 0.0
    for curvature in CURVATURES.tolist():
        oracle = lambda point, c=curvature: -gamma * c * point  # noqa: E731
        s = Substep(turn, oracle, Values({"step": 1.0}), None).take(State(torch.ones(1, dtype=torch.float64)))
        worst = max(worst, s.x.abs().item())
    assert worst == pytest.approx((KAPPA - 1) / (KAPPA + 1), abs=1e-12)


def test_heavy_ball_rate() -> None:
    """gamma = 4 / (sqrt L + sqrt m)^2, beta = r^2: rate r = (sqrt kappa - 1) / (sqrt kappa + 1)."""
    gamma = 4 / (math.sqrt(L) + math.sqrt(M)) ** 2
    beta = ((ROOT - 1) / (ROOT + 1)) ** 2
    # at the ends of the spectrum the roots coincide, where eigenvalues are only accurate to sqrt(1e-16)
    assert worst_rate("heavy-ball", gamma=gamma, beta=beta) == pytest.approx((ROOT - 1) / (ROOT + 1), abs=1e-6)


def test_nesterov_rate() -> None:
    """mu = beta = (sqrt kappa - 1) / (sqrt kappa + 1), gamma = 1 / L: rate 1 - 1 / sqrt kappa = 0.900."""
    beta = (ROOT - 1) / (ROOT + 1)
    assert worst_rate("nesterov", mu=beta, beta=beta, gamma=1 / L) == pytest.approx(1 - 1 / ROOT, abs=1e-6)


def test_triple_momentum_rate() -> None:
    """The classical parameters contract every mode by rho = 1 - 1 / sqrt kappa = 0.900 per step."""
    rho = 1 - 1 / ROOT
    parameters = {
        "gamma": (1 + rho) / L,
        "beta": rho**2 / (2 - rho),
        "mu": rho**2 / ((1 + rho) * (2 - rho)),
        "nu": 1.0,
    }
    assert worst_rate("triple-momentum", **parameters) == pytest.approx(rho, abs=1e-6)


def test_momentum_beats_gradient_descent_at_this_condition_number() -> None:
    beta = (ROOT - 1) / (ROOT + 1)
    assert worst_rate("nesterov", mu=beta, beta=beta, gamma=1 / L) < (KAPPA - 1) / (KAPPA + 1) - 0.07
