"""Order of accuracy: of the integrators, and of tokens against the ODEs of their moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from stepformer.measure.flows.integrators import SCHEMES, Friction, Phase, accelerated, cases, damped, rk4, standard
from stepformer.measure.flows.results import Result, Row, Tell, far, generator, last, slope
from stepformer.measure.flows.systems import LinearFlow, Moments, SoftmaxFlow, definite, gaussian, radii

HORIZON = 1.0
REFERENCE = 1000  # steps of RK4
COUNTS = (20, 40, 80, 160, 320)
ALTERNATING = (1.4, 0.6)
SPANS = {"standard": 1.0, "accelerated": 3.0}  # from rest and against friction, the tokens need longer to move
SHOWN = 4


def order(seed: int, particles: int, tell: Tell, d: int = 4) -> Result:
    """Error at the end of the horizon against step size, for every integrator, against RK4 with many steps.

    With steps that alternate between 1.4 h and 0.6 h, two-step methods need the weights of their step-size ratio.
    """
    g = generator(seed)
    a, b, v = definite(d, 0.5, 1.5, g), definite(d, 0.5, 1.5, g), definite(d, -1.0, 1.0, g)
    x = gaussian(particles, d, 0.7, g)
    friction = Friction(3.0, 0.1)
    flows = {"linear": LinearFlow(a, v), "softmax": SoftmaxFlow(0.4 * a, b)}
    settings = {"friction": list(friction), "horizon": HORIZON, "steps": COUNTS, "d": d}
    result = Result("Does the error fall as h^p, with p = 1 for Euler and 2 for two-step integrators?", settings)
    sizes = [HORIZON / n for n in COUNTS]
    for name, flow in flows.items():
        tell(f"{name}: reference")
        exact = last(rk4(damped(flow, friction), Phase.at_rest(x), HORIZON, REFERENCE))
        curves: dict[str, list[float]] = {}
        for scheme, varied in cases():
            label = f"{scheme.label}, alternating h" if varied else scheme.label
            tell(f"{name}: {label}")
            steps = [[r * h for r in ALTERNATING] if varied else h for h in sizes]
            ends = [last(accelerated(flow, scheme, x, h, n, friction)) for h, n in zip(steps, COUNTS, strict=True)]
            curves[label] = [max(far(s.x, exact.x), far(s.y, exact.y)) for s in ends]
            about: Row = {"flow": name, "integrator": label, "expected": scheme.order}
            result.rows.append(about | fit(curves[label]))
        result.curves[name] = {"h": sizes, "errors": curves}
    result.note = "Relative error of (x, y) in the largest entry; the order is fitted without the coarsest h."
    return result


def fit(errors: list[float]) -> Row:
    """The fitted order with the errors at both ends."""
    ends = {f"error, {COUNTS[k]} steps": errors[k] for k in (0, -1)}
    return {"fitted order": slope([1 / n for n in COUNTS[1:]], errors[1:]), **ends}


def ellipse(seed: int, particles: int, tell: Tell) -> Result:
    """Tokens against the ODEs of their mean, covariance and P, started from their own moments."""
    g = generator(seed)
    flow = LinearFlow(definite(2, 0.5, 1.0, g), definite(2, -0.8, 0.45, g))
    x = gaussian(particles, 2, 1.0, g) * torch.tensor([0.9, 0.5], dtype=torch.float64)
    x = x + torch.tensor([0.6, -0.3], dtype=torch.float64)
    x = x / x.square().sum(dim=1).mean().sqrt()  # the standard flow then cannot blow up within time 1 / (2 * 0.45)
    friction = Friction()
    settings = {"friction": list(friction), "horizon": SPANS, "steps": COUNTS, "d": 2}
    settings |= {"A": flow.A.tolist(), "V": flow.V.tolist()}
    result = Result("Do tokens under linear attention follow the ODEs of their mean, covariance and P?", settings)
    result.curves = {"steps": COUNTS, "errors": {}, "pictures": {}}
    for name, span in SPANS.items():
        tell(f"{name}: moments")
        fast = name == "accelerated"
        exact = list(rk4(moment_rate(flow, friction, fast), Moments.of(x), span, REFERENCE))
        known = methods(flow, x, friction, fast, span)
        for method, (expected, path) in known.items():
            tell(f"{name}: {method}")
            ends = [last(path(n)) for n in COUNTS]
            errors = [moment_error(s, exact[-1], fast) for s in ends]
            result.curves["errors"][f"{name}, {method}"] = errors
            about: Row = {"flow": name, "integrator": method, "expected": expected}
            result.rows.append({**about, **fit(errors), "radii moved": moved(ends[-1].x, x)})
        result.curves["pictures"][name] = picture(list(known["rk4"][1](COUNTS[-1])), exact, span)
    tell("softmax: radii")
    softmax = SoftmaxFlow(flow.A, flow.A)
    bent = last(accelerated(softmax, SCHEMES[-1], x, SPANS["accelerated"] / COUNTS[-1], COUNTS[-1], friction))
    settings["radii moved by softmax attention"] = by_softmax = moved(bent.x, x)
    result.note = (
        "Error of m, S and (accelerated) P against their ODEs. The radii (x - m).S^-1 (x - m) say whether every token "
        f"keeps its place in the ellipse; accelerated softmax attention moves them by {by_softmax:.2g} of the largest."
    )
    return result


Way = Callable[[int], Iterator[Any]]


def methods(flow: LinearFlow, x: Tensor, friction: Friction, fast: bool, span: float) -> dict[str, tuple[Any, Way]]:
    """Order and, for a number of steps, the way of the tokens, for RK4 and the templates."""

    def by(scheme: Any) -> Way:
        return lambda n: accelerated(flow, scheme, x, span / n, n, friction)

    rate = token_rate(flow, friction, fast)
    found: dict[str, tuple[Any, Way]] = {"rk4": (4, lambda n: rk4(rate, Phase.at_rest(x), span, n))}
    if fast:
        return found | {scheme.label: (scheme.order, by(scheme)) for scheme in SCHEMES}
    return found | {"gd": (1, lambda n: standard(flow, x, span / n, n))}


def token_rate(flow: LinearFlow, friction: Friction, fast: bool) -> Callable[[float, Phase], Phase]:
    if fast:
        return damped(flow, friction)
    return lambda t, u: Phase(flow.standard(u.x), torch.zeros_like(u.y))


def moment_rate(flow: LinearFlow, friction: Friction, fast: bool) -> Callable[[float, Moments], Moments]:
    return lambda t, u: u.rate(flow, friction(t), accelerated=fast)


def moment_error(s: Any, exact: Moments, fast: bool) -> float:
    """Largest error of m, S and P, each relative to its largest entry; P is fitted to y = P x."""
    here = Moments.of(s.x)
    errors = [far(here.m, exact.m), far(here.S, exact.S)]
    if fast:
        errors.append(far(torch.linalg.lstsq(s.x, s.y).solution.mT, exact.P))
    return max(errors)


def moved(x: Tensor, begin: Tensor) -> float:
    """Largest change of a radius, relative to the largest radius."""
    return far(radii(x), radii(begin))


def picture(tokens: list[Phase], exact: list[Moments], span: float) -> dict[str, Any]:
    """Tokens, and the mean and covariance of the ODEs, at a few times."""
    parts = [k / (SHOWN - 1) for k in range(SHOWN)]
    moments = [exact[round(part * (len(exact) - 1))] for part in parts]
    return {
        "time": [part * span for part in parts],
        "mean": [u.m.tolist() for u in moments],
        "covariance": [u.S.tolist() for u in moments],
        "tokens": [tokens[round(part * (len(tokens) - 1))].x.tolist() for part in parts],
    }
