"""How deep must a network be for momentum to pay, and what is the best filter of a class? Momentum Streams, appendix F.

After T steps from rest a mode of curvature lambda in [m, L] is left with p_T(lambda) of its error, and a loss that is
beta-smooth in x is at most beta / 2 max p_T^2 |e_0|^2. Gradient descent tuned for [m, L] leaves rho^T of the worst mode
and momentum C_T rho_v^T, which defines C_T. With kappa = L / m the bound with momentum is the lower one for

    T > ln C_T / ln(rho / rho_v),    rho = (kappa - 1) / (kappa + 1),    rho_v = (sqrt kappa - 1) / (sqrt kappa + 1)

(heavy ball). The text takes C for a constant. With tuned coefficients it is none: at an end of [m, L] two roots
coincide, and C_T grows like T.

The best filter of a class is the least max |p_T| over its coefficients, here one set for all layers, in the ranges that
models have. In any class p_T is a polynomial of degree T with p_T(0) = 1, so that none is below Chebyshev's,

    1 / cosh(T arcosh((L + m) / (L - m))),    which gradient descent reaches with a step of its own for each layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from stepformer.measure.flows.filters import DEPTH, POINTS, L, M, tuned, worst_rates
from stepformer.measure.flows.results import Result, Row, Tell
from stepformer.rules import State, Substep, Values, templates
from stepformer.rules.coefficients import positive, unit

CONDITIONS = (10, 30, 100, 300, 1000, 3000, 10_000)
SHOWN = 100  # the condition number of the picture
DEEPEST = 500
SHARPER = [4**k for k in range(1, 7)]  # norms over the spectrum that end near the largest value
RANGES = {"beta": unit(0.5), "mu": unit(0.5), "gamma": positive(), "step": positive(), "nu": positive(1.0)}


def spectrum(m: float = M, big: float = L, points: int = POINTS) -> Tensor:
    """Curvatures from m to L, dense at both ends, where polynomials are steep."""
    return (big + m) / 2 - (big - m) / 2 * torch.linspace(0, math.pi, points, dtype=torch.float64).cos()


def errors(name: str, curvatures: Tensor, c: Mapping[str, Tensor | float]) -> Iterator[Tensor]:
    """|e_T| of every curvature for T = 0, 1, ..., from e = 1 and v = 0, by the template's own steps."""
    template = templates[name].component(1, 1)
    turn = Substep(template, lambda e: -curvatures * e, Values(dict(c)), None)
    s = State(torch.ones_like(curvatures), {stream: torch.zeros_like(curvatures) for stream in template.streams})
    while True:
        yield s.x.abs()
        s = turn.take(s)


def after(name: str, curvatures: Tensor, c: Mapping[str, Tensor | float], depth: int) -> Tensor:
    """|e_depth| of every curvature."""
    return next(itertools.islice(errors(name, curvatures, c), depth, None))


def worst(name: str, m: float, big: float, depth: int) -> list[float]:
    """The largest error after 0 to `depth` steps with the coefficients that are tuned for [m, L]."""
    steps = errors(name, spectrum(m, big), tuned(m, big)[name])
    return [left.max().item() for left in itertools.islice(steps, depth + 1)]


def threshold_depth(momentum: list[float], plain: list[float]) -> int:
    """The depth from which on momentum leaves less, as far as the lists go."""
    behind = [depth for depth, (one, other) in enumerate(zip(momentum, plain, strict=True)) if one >= other]
    return behind[-1] + 1


def threshold(seed: int, particles: int, tell: Tell) -> Result:
    """From which depth on momentum leaves less of the worst mode; seed and particles play no part."""
    result = Result("From which depth on does momentum leave less of an error than gradient descent?", {"L": L})
    result.settings |= {"deepest": DEEPEST, "conditions": list(CONDITIONS), "shown": SHOWN}
    depths: dict[str, list[int]] = {}
    for kappa in CONDITIONS:
        m, rates = L / kappa, worst_rates(L / kappa, L)
        tell(f"condition {kappa}")
        left = {name: worst(name, m, L, DEEPEST) for name in rates}
        if kappa == SHOWN:
            result.curves["left"] = {name: values[: 10 * DEPTH] for name, values in left.items()}
        for name in list(rates)[1:]:
            depth = threshold_depth(left[name], left["gd"])
            constant = left[name][depth] / rates[name] ** depth
            row: Row = {"condition": kappa, "template": name, "rate": rates[name], "rate of gd": rates["gd"]}
            row |= {"threshold": depth, "C there": constant}
            result.rows.append(row | {"ln C / ln ratio": math.log(constant) / math.log(rates["gd"] / rates[name])})
            depths.setdefault(name, []).append(depth)
    result.curves |= {"condition": list(CONDITIONS), "threshold": depths}
    result.note = (
        "Worst mode of [1 / condition, 1], coefficients tuned for it, from rest; C = worst error / rate^depth."
    )
    return result


def best_filter(name: str, depth: int, curvatures: Tensor) -> dict[str, float]:
    """Coefficients of a template with the least worst error after `depth` steps: quasi-Newton steps from the models'
    initial values on norms over the spectrum that come closer and closer to the maximum.
    """
    ranges = {key: RANGES[key] for key in tuned()[name]}
    raw = {key: torch.tensor(spec.raw_start, dtype=torch.float64, requires_grad=True) for key, spec in ranges.items()}
    for power in SHARPER:
        search = torch.optim.LBFGS(list(raw.values()), max_iter=60, line_search_fn="strong_wolfe", tolerance_change=0)

        def closure(power: int = power, search: torch.optim.Optimizer = search) -> float:
            search.zero_grad()
            left = after(name, curvatures, {key: ranges[key].value(value) for key, value in raw.items()}, depth)
            loss = torch.logsumexp(power * left.clamp_min(1e-9).log(), dim=0) / power
            loss.backward()
            return loss.item()

        search.step(closure)
    return {key: ranges[key].value(value).item() for key, value in raw.items()}


def chebyshev_steps(depth: int, m: float = M, big: float = L) -> list[float]:
    """Step sizes of gradient descent whose product of 1 - step lambda is Chebyshev's polynomial for [m, L]."""
    nodes = (math.cos(math.pi * (2 * k + 1) / (2 * depth)) for k in range(depth))
    return [2 / (big + m + (big - m) * node) for node in nodes]


def best(seed: int, particles: int, tell: Tell) -> Result:
    """The best filter of every class; seed and particles play no part."""
    dense = spectrum(points=8 * POINTS + 1)
    settings = {"m": M, "L": L, "depth": DEPTH}
    result = Result(f"What is the least that {DEPTH} layers can leave of the worst mode, class by class?", settings)
    gains = {}
    for name in tuned():
        tell(name)
        c = best_filter(name, DEPTH, spectrum())
        gains[name] = after(name, dense, c, DEPTH)
        numbers = {"gamma": c.get("step", c.get("gamma")), **{k: c.get(k) for k in ("beta", "mu", "nu")}}
        ends: Row = {
            "best worst gain": gains[name].max().item(),
            "tuned for the long run": worst(name, M, L, DEPTH)[-1],
        }
        result.rows.append({"class": name, **numbers, **ends})
    layerwise = "gd, a step for each layer"
    steps = torch.tensor(chebyshev_steps(DEPTH), dtype=torch.float64)
    gains[layerwise] = (1 - steps[:, None] * dense).prod(dim=0).abs()
    result.rows.append(
        dict.fromkeys(result.rows[0]) | {"class": layerwise, "best worst gain": gains[layerwise].max().item()}
    )
    shown = {name: left[::8].tolist() for name, left in gains.items()}
    result.curves = {"curvature": dense[::8].tolist(), "gain": shown}
    bound = 1 / math.cosh(DEPTH * math.acosh((L + M) / (L - M)))
    result.note = (
        f"Curvatures from {M:g} to {L:g}, from rest, one set of coefficients for all layers but in the last row. No "
        f"polynomial of degree {DEPTH} with p(0) = 1 leaves less than {bound:.4g}, Chebyshev's. Triple momentum is "
        "Nesterov with gamma nu for gamma and mu / nu for mu."
    )
    return result
