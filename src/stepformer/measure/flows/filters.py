"""Depth as a filter: what gradient descent and momentum do to the modes of a quadratic energy.

On 1/2 lambda e^2 the oracle answers g(e) = -lambda e. Without norms a step is linear, e_{k+1} = (1 - gamma lambda) e_k
for gradient descent, and for v' = beta v + gamma g(e + mu v), e' = e + nu v'

    e_{k+1} = [1 + beta - gamma lambda (mu + nu)] e_k - [beta - gamma lambda mu] e_{k-1}.

The contraction is the larger |root| of that recurrence; the gain after L layers is |e_L / e_0| from v_0 = 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stepformer.measure.flows.results import Result, Row, Tell
from stepformer.rules import State, Substep, Values, templates

M, L = 0.01, 1.0
DEPTH = 12
POINTS = 241


def tuned(m: float = M, big: float = L) -> dict[str, dict[str, float]]:
    """Classical coefficients for curvatures between m and L."""
    root = math.sqrt(big / m)
    rho, nag = 1 - 1 / root, (root - 1) / (root + 1)
    return {
        "gd": {"step": 2 / (m + big)},
        "heavy-ball": {"gamma": 4 / (math.sqrt(big) + math.sqrt(m)) ** 2, "beta": nag**2},
        "nesterov": {"gamma": 1 / big, "beta": nag, "mu": nag},
        "triple-momentum": {
            "gamma": (1 + rho) / big,
            "beta": rho**2 / (2 - rho),
            "mu": rho**2 / ((1 + rho) * (2 - rho)),
            "nu": 1.0,
        },
    }


def step_matrix(name: str, curvature: float, c: dict[str, float]) -> Tensor:
    """The linear map of one step of a template on (e, v), or on e alone for gd."""
    template = templates[name].component(1, 1)
    values = {k: torch.tensor(v, dtype=torch.float64) for k, v in c.items()}
    turn = Substep(template, lambda e: -curvature * e, Values(values), None)
    size = 1 + len(template.streams)
    columns = []
    for unit in torch.eye(size, dtype=torch.float64):
        s = turn.take(State(unit[:1], dict(zip(template.streams, unit[1:, None], strict=True))))
        columns.append(torch.cat([s.x, *s.streams.values()]))
    return torch.stack(columns, dim=1)


def contraction(name: str, curvature: float, c: dict[str, float]) -> float:
    """Spectral radius of one step."""
    return torch.linalg.eigvals(step_matrix(name, curvature, c)).abs().max().item()


def gain(name: str, curvature: float, c: dict[str, float], depth: int = DEPTH) -> float:
    """|e_depth / e_0| from rest."""
    return torch.linalg.matrix_power(step_matrix(name, curvature, c), depth)[0, 0].abs().item()


def worst_rates(m: float = M, big: float = L) -> dict[str, float]:
    """What theory says of the worst contraction over [m, L]."""
    root = math.sqrt(big / m)
    rates = {"gd": (big - m) / (big + m), "heavy-ball": (root - 1) / (root + 1)}
    return rates | dict.fromkeys(("nesterov", "triple-momentum"), 1 - 1 / root)


def filter_(seed: int, particles: int, tell: Tell) -> Result:
    """Contraction per step and gain of a finite depth over the spectrum; seed and particles play no part."""
    curvatures = torch.logspace(math.log10(M), math.log10(L), POINTS, dtype=torch.float64).tolist()
    settings = {"m": M, "L": L, "depth": DEPTH, "coefficients": tuned()}
    result = Result("What is left of an error mode of curvature lambda, per step and after a few layers?", settings)
    rates: dict[str, list[float]] = {}
    gains: dict[str, list[float]] = {}
    for name, c in tuned().items():
        tell(name)
        rates[name] = [contraction(name, value, c) for value in curvatures]
        gains[name] = [gain(name, value, c) for value in curvatures]
        numbers = {"gamma": c.get("step", c.get("gamma")), **{k: c.get(k) for k in ("beta", "mu", "nu")}}
        row: Row = {"template": name, **numbers, "worst contraction": max(rates[name])}
        result.rows.append({**row, "theory": worst_rates()[name], f"worst gain, {DEPTH} steps": max(gains[name])})
    result.curves = {"curvature": curvatures, "contraction": rates, "gain": gains}
    result.note = f"Curvatures from {M:g} to {L:g}, coefficients tuned for that interval, norms left out."
    return result
