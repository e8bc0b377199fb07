"""Time steps for the flows: those of the models' own templates, and Runge-Kutta for reference solutions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from stepformer.measure.flows.systems import FieldsHere, Flow
from stepformer.rules import State, Substep, Values, templates
from stepformer.rules.hamiltonian import HamiltonianStep

BEGIN = 1.0  # the models' clock starts at t = 1


class Friction(NamedTuple):
    """alpha(t) = c_log / t + c_lin, with the models' initial values."""

    c_log: float = 3.0
    c_lin: float = 1e-4

    def __call__(self, t: float) -> float:
        return self.c_log / t + self.c_lin


class Scheme(NamedTuple):
    """A template with its options, and the order of accuracy that it should have."""

    template: str
    order: int | None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        return " ".join([self.template, *(f"{key}={value}" for key, value in self.options)])


EULERS = ("plain-euler", "presymp-euler", "exp-euler", "conformal-euler")
SCHEMES = (*(Scheme(name, 1) for name in EULERS), Scheme("ab2", 2), Scheme("etd-ab2", 2))


def cases() -> list[tuple[Scheme, bool]]:
    """Integrators, and whether their steps alternate; those of one's own (`--plugin`) have an unknown order."""
    lawson, constant = Scheme("etd-ab2", 2, (("etd", "lawson"),)), Scheme("ab2", 1, (("history", "constant"),))
    even, known = (*SCHEMES, lawson), {scheme.template for scheme in SCHEMES}
    own = [Scheme(e.name, None) for e in templates if e.component.integrates and e.name not in known]
    return [(s, False) for s in even] + [(s, True) for s in (*even[-3:], constant)] + [(s, False) for s in own]


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def accelerated(
    flow: Flow, scheme: Scheme, x: Tensor, h: float | Sequence[float], steps: int, friction: Friction
) -> Iterator[State]:
    """The states from rest (y = 0) to after the last of `steps` steps, taken by the template's own `advance`.

    h_x = h_y = h; a sequence of step sizes is repeated. plain-euler has a memory instead of a friction: with
    alpha = 1 - alpha(t) h in each step it integrates the same ODE, and is then presymp-euler.
    """
    template = templates[scheme.template].component(1, x.shape[1], **dict(scheme.options))
    assert isinstance(template, HamiltonianStep)
    sizes = [h] if isinstance(h, float) else list(h)
    starts = {name: stream.start for name, stream in template.streams.items()}
    s = State(x, {k: number(v) if isinstance(v, float) else torch.zeros_like(x) for k, v in starts.items()})
    t = BEGIN
    yield s
    for size in itertools.islice(itertools.cycle(sizes), steps):
        c = {"h_x": size, "h_y": size, **friction._asdict(), "alpha": 1 - friction(t) * size}
        values = Values({name: number(value) for name, value in c.items()})
        s = template.advance(s, values, FieldsHere(flow, s.x, s.y))
        t += size
        yield s


def standard(flow: Flow, x: Tensor, h: float, steps: int) -> Iterator[State]:
    """x' = x + h F(x, G(x, 0)): residual layers, by the template `gd`."""
    turn = Substep(templates["gd"].component(1, x.shape[1]), flow.standard, Values({"step": h}), None)
    s = State(x)
    yield s
    for _ in range(steps):
        s = turn.take(s)
        yield s


V = TypeVar("V", bound="tuple[Tensor, ...]")


class Phase(NamedTuple):
    """(x, y) as one vector."""

    x: Tensor
    y: Tensor

    @classmethod
    def at_rest(cls, x: Tensor) -> Phase:
        return cls(x, torch.zeros_like(x))


def plus(u: V, h: float, rate: V) -> V:
    """u + h f, tensor by tensor."""
    return type(u)(*(part + h * moved for part, moved in zip(u, rate, strict=True)))


def rk4(rate: Callable[[float, V], V], u: V, span: float, steps: int) -> Iterator[V]:
    """The classical Runge-Kutta method of order four for u' = rate(t, u), for a time `span` from t = 1 on."""
    h = span / steps
    yield u
    for k in range(steps):
        t = BEGIN + k * h
        k1 = rate(t, u)
        k2 = rate(t + h / 2, plus(u, h / 2, k1))
        k3 = rate(t + h / 2, plus(u, h / 2, k2))
        k4 = rate(t + h, plus(u, h, k3))
        for part, slope in ((6, k1), (3, k2), (3, k3), (6, k4)):
            u = plus(u, h / part, slope)
        yield u


def damped(flow: Flow, friction: Friction) -> Callable[[float, Phase], Phase]:
    """(x', y') = (F, G - alpha(t) y)."""
    return lambda t, u: Phase(flow.velocity(u.x, u.y), flow.force(u.x, u.y) - friction(t) * u.y)
