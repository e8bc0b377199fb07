"""Energy against steps, for the standard and the accelerated flow."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass

from torch import Tensor

from stepformer.measure.flows.integrators import SCHEMES, Friction, Scheme, accelerated, standard
from stepformer.measure.flows.results import Result, Tell, generator
from stepformer.measure.flows.systems import Flow, LinearFlow, SoftmaxFlow, definite, gaussian

STEPS = 60
DRAWS = 5
GRID = [2.0 ** (k / 2) for k in range(-8, 5)]
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


def path(p: Problem, scheme: Scheme | None, h: float, friction: Friction) -> list[float]:
    """U / N after every step, up to where it stops being a number; no scheme means the standard flow."""
    states = accelerated(p.flow, scheme, p.x, h, p.steps, friction) if scheme else standard(p.flow, p.x, h, p.steps)
    return list(itertools.takewhile(math.isfinite, (p.flow.potential(s.x).item() / len(s.x) for s in states)))


def best_path(p: Problem, scheme: Scheme | None, friction: Friction) -> tuple[float, list[float]]:
    """Step size and energies: of the best step size in the grid, or of the one that the problem prescribes."""
    best: list[float] = []
    size = judged = math.inf
    for h in GRID if p.h is None else [p.h]:
        values = path(p, scheme, h, friction)
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
