"""Energies: how fast they fall by steps, whether the fields are their derivatives, and whether the steps keep them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepformer.measure.flows.integrators import SCHEMES, Friction, Phase, Scheme, accelerated, damped, rk4, standard
from stepformer.measure.flows.results import Result, Row, Tell, far, generator
from stepformer.measure.flows.systems import Flow, LinearFlow, SoftmaxFlow, definite, gaussian

STEPS = 60
DRAWS = 5
GRID = [2.0 ** (k / 2) for k in range(-8, 5)]
WIDTHS = [10.0**-k for k in range(1, 9)]
USED = 1e-5  # near the cube root of 1e-16, where the error e^2 of a central difference meets the rounding 1e-16 / e
DRIFT_H, DRIFT_STEPS = 0.05, 200
TAIL = 10  # a step size is judged by the worst of the last steps, so that no lucky swing decides


@dataclass(frozen=True)
class Problem:
    """A flow and its start; `infimum` of U / N, or None and the step size that all methods then share."""

    name: str
    flow: Flow
    x: Tensor
    infimum: float | None
    h: float | None = None
    steps: int = STEPS


def problems(seed: int, particles: int, d: int = 4) -> list[Problem]:
    """Linear and softmax attention, with values that pull to the origin and with values that push away from it.

    U / N = 1/2 mean_ij exp(x_i.A x_j) for kappa = -1, not below 1/2 by Jensen's inequality, and 1/2 at x = 0.
    """
    g = generator(seed)
    a, b, v = definite(d, 0.5, 1.5, g), definite(d, 0.5, 1.5, g), definite(d, 0.2, 1.0, g)
    x = gaussian(particles, d, 1.0, g)
    return [
        Problem("linear, V < 0", LinearFlow(a, -v), x, 0.0),
        Problem("softmax, kappa = -1", SoftmaxFlow(0.5 * a, b, kappa=-1.0), x, 0.5),
        Problem("linear, V > 0", LinearFlow(a, v), 0.7 * x, None, h=0.02, steps=25),
        Problem("softmax, kappa = 1", SoftmaxFlow(0.2 * a, b), 0.7 * x, None, h=0.1),
    ]


def best_path(p: Problem, scheme: Scheme | None, friction: Friction) -> tuple[float, list[float]]:
    """Step size and U / N after every step: of the best size in the grid, or of the one that the problem prescribes.

    A path ends where it stops being a number; no scheme means the standard flow.
    """
    best: list[float] = []
    size = judged = math.inf
    for h in GRID if p.h is None else [p.h]:
        states = accelerated(p.flow, scheme, p.x, h, p.steps, friction) if scheme else standard(p.flow, p.x, h, p.steps)
        values = list(itertools.takewhile(math.isfinite, (p.flow.potential(s.x).item() / len(s.x) for s in states)))
        worst = max(values[-TAIL:]) if len(values) > p.steps else math.inf
        if not best or worst < judged:
            best, size, judged = values, h, worst
    return size, [u - (p.infimum or 0.0) for u in best]


def outcome(p: Problem, curve: list[float]) -> float:
    """What is left of U - inf U, or how far U fell where it has no bound; NaN for a path that blew up."""
    if len(curve) <= p.steps:
        return math.nan
    return curve[-1] if p.infimum is not None else curve[0] - curve[-1]


def energy(seed: int, particles: int, tell: Tell) -> Result:
    """U against steps, for several draws of matrices and tokens.

    Where U is bounded below, every method has its own best step size out of one grid. Where it is not, a larger step
    always wins, so that all share one step size and a finite horizon.
    """
    friction = Friction()
    settings = {"friction": list(friction), "grid": GRID, "tail": TAIL, "draws": DRAWS, "d": 4}
    result = Result("How fast does the interaction energy U fall, per step (one evaluation of the fields)?", settings)
    ratios: dict[tuple[str, str], list[float]] = {}
    for draw in range(DRAWS):
        for p in problems(seed + draw, particles):
            plain = math.nan
            for scheme in (None, *SCHEMES):
                label = "standard" if scheme is None else scheme.label
                tell(f"draw {draw + 1} of {DRAWS}, {p.name}: {label}")
                size, curve = best_path(p, scheme, friction)
                plain = outcome(p, curve) if scheme is None else plain
                ratios.setdefault((p.name, label), []).append(outcome(p, curve) / plain)
                if draw == 0:
                    at = {"start": 0, "step 10": 10, "last step": p.steps}
                    numbers = {name: curve[k] if k < len(curve) else None for name, k in at.items()}
                    result.rows.append({"problem": p.name, "flow": label, "h": size, **numbers})
                    shown = result.curves.setdefault(p.name, {"infimum": p.infimum, "paths": {}})
                    shown["paths"][label] = curve
    settings["ratios"] = {f"{name}: {label}": values for (name, label), values in ratios.items()}
    for row, values in zip(result.rows, ratios.values(), strict=True):
        known = sorted(value for value in values if math.isfinite(value))
        row["median ratio"] = statistics.median(known) if known else None
        row["range"] = f"{known[0]:.3g} to {known[-1]:.3g}" if known else "-"
    result.note = (
        "U is per token. Bounded below (V < 0, kappa = -1): U - inf U at each method's best h of a grid. Unbounded: U "
        f"at one h for all, on a finite horizon. Ratio to the standard flow in {DRAWS} draws: of what is left of "
        "U - inf U (small is good), or of how far U fell (large is)."
    )
    return result


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
    none, begin = Friction(0.0, 0.0), flow.potential(x).item()
    ways: dict[str, Iterator[Any]] = {
        "rk4": rk4(damped(flow, none), Phase.at_rest(x), DRIFT_H * DRIFT_STEPS, DRIFT_STEPS)
    }
    for scheme in SCHEMES:  # without friction the others are presymp-euler and ab2
        if scheme.template not in ("plain-euler", "exp-euler", "etd-ab2"):
            ways[scheme.label] = accelerated(flow, scheme, x, DRIFT_H, DRIFT_STEPS, none)
    paths = {name: [flow.hamiltonian(s.x, s.y).item() / begin - 1 for s in way] for name, way in ways.items()}
    return {"h": DRIFT_H, "paths": paths}
