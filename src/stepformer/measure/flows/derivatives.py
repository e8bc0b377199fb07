"""Are the fields the derivatives of the energies, and do the steps keep the energy?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepformer.measure.flows.integrators import SCHEMES, Friction, Phase, accelerated, damped, rk4
from stepformer.measure.flows.results import Result, Row, Tell, far, generator
from stepformer.measure.flows.systems import Flow, LinearFlow, SoftmaxFlow, definite, gaussian

WIDTHS = [10.0**-k for k in range(1, 9)]
USED = 1e-5  # near the cube root of 1e-16, where the error e^2 of a central difference meets the rounding 1e-16 / e
DRIFT_H, DRIFT_STEPS = 0.05, 200


def central(f: Callable[[Tensor], Tensor], x: Tensor, width: float) -> Tensor:
    """df/dx by (f(x + e) - f(x - e)) / 2e in every entry."""
    units = torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
    return torch.stack([(f(x + e) - f(x - e)) / (2 * width) for e in width * units]).view_as(x)


def differences(flow: Flow, x: Tensor, y: Tensor, symbol: str) -> Callable[[float], Tensor]:
    """dH/dy for F and -dH/dx for G by central differences, as a function of their width."""
    if symbol == "F":
        return lambda width: central(lambda u: flow.hamiltonian(x, u), y, width)
    return lambda width: -central(lambda u: flow.hamiltonian(u, y), x, width)


def gradients(flow: Flow, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """dH/dx and dH/dy by automatic differentiation."""
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    dx, dy = torch.autograd.grad(flow.hamiltonian(x, y), (x, y))
    return dx, dy


def systems(seed: int, d: int = 3) -> dict[str, Flow]:
    """Every form of the fields, including those that are no gradient."""
    g = generator(seed)
    a, b, v = definite(d, 0.3, 0.9, g), definite(d, 0.5, 1.5, g), definite(d, -1.0, 1.0, g)
    skew = torch.randn(d, d, generator=g, dtype=torch.float64)
    crooked = a + 0.2 * (skew - skew.mT)
    return {
        "linear": LinearFlow(a, v),
        "softmax, full force": SoftmaxFlow(a, b),
        "softmax, row force": SoftmaxFlow(a, b, rule="row"),
        "linear, A not symmetric": LinearFlow(crooked, v),
        "softmax, full force, A not symmetric": SoftmaxFlow(crooked, b),
        "softmax, row force, A not symmetric": SoftmaxFlow(crooked, b, rule="row"),
        "softmax, a / d as in the models": SoftmaxFlow(a, b, divisor=float(d)),
    }


def hamiltonian(seed: int, particles: int, tell: Tell, d: int = 3) -> Result:
    """F = dH/dy and G = -dH/dx, by central differences and by automatic differentiation; H without friction."""
    n = min(particles, 8)  # 2 n d evaluations of H for each width
    g = generator(seed + 1)
    x, y = gaussian(n, d, 0.8, g), gaussian(n, d, 0.8, g)
    settings: dict[str, Any] = {"tokens": n, "d": d, "width": USED, "drift h": DRIFT_H, "drift steps": DRIFT_STEPS}
    result = Result("Are the fields F = dH/dy and G = -dH/dx, and which forms are not?", settings)
    sweeps: dict[str, list[float]] = {}
    for name, flow in systems(seed, d).items():
        tell(name)
        dx, dy = gradients(flow, x, y)
        row: Row = {"system": name}
        for symbol, field, exact in (("F", flow.velocity(x, y), dy), ("G", flow.force(x, y), -dx)):
            difference = differences(flow, x, y, symbol)
            row[f"{symbol} - autograd"] = far(field, exact)
            row[f"{symbol} - differences"] = far(field, difference(USED))
            if name in ("linear", "softmax, full force"):
                sweeps[f"{symbol}, {name}"] = [far(field, difference(width)) for width in WIDTHS]
        row["F / (dH/dy)"] = (flow.velocity(x, y).norm() / dy.norm()).item()
        result.rows.append(row)
    tell("energy without friction")
    result.curves = {"width": WIDTHS, "errors": sweeps, "drift": drifts(seed, particles)}
    drift = {k: max(map(abs, v)) for k, v in result.curves["drift"]["paths"].items()}
    settings["largest drift of H"] = drift
    words = ", ".join(f"{name} {value:.1g}" for name, value in drift.items())
    result.note = (
        f"Differences relative to the largest entry. Without friction H should stay; over {DRIFT_STEPS} steps of "
        f"{DRIFT_H:g}, |H - H(0)| / |H(0)| reaches: {words}."
    )
    return result


def drifts(seed: int, particles: int, d: int = 3) -> dict[str, Any]:
    """(H - H(0)) / |H(0)| along the softmax flow with kappa = -1 (bound tokens) without friction."""
    g = generator(seed)
    flow = SoftmaxFlow(definite(d, 0.3, 0.9, g), definite(d, 0.5, 1.5, g), kappa=-1.0)
    x = gaussian(particles, d, 0.8, g)
    none = Friction(0.0, 0.0)
    begin = flow.hamiltonian(x, torch.zeros_like(x)).item()
    exact = rk4(damped(flow, none), Phase.at_rest(x), DRIFT_H * DRIFT_STEPS, DRIFT_STEPS)
    paths = {"rk4": [flow.hamiltonian(u.x, u.y).item() / begin - 1 for u in exact]}
    for scheme in SCHEMES:
        if scheme.template in ("plain-euler", "exp-euler", "etd-ab2"):
            continue  # without friction they are presymp-euler and ab2
        states = accelerated(flow, scheme, x, DRIFT_H, DRIFT_STEPS, none)
        paths[scheme.label] = [flow.hamiltonian(s.x, s.y).item() / begin - 1 for s in states]
    return {"h": DRIFT_H, "paths": paths}
