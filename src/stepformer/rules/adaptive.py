"""Coordinate-wise preconditioning: RMSProp, Adam, AdamW as depth rules.

No look-ahead and no bias correction; the moments are carried un-normalised, the update passes LN_u.
A half step halves gamma; the moments and the decay are those of a full step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stepformer.rules.coefficients import Values, positive, unit
from stepformer.rules.state import State
from stepformer.rules.template import Stream, Template, register_template, scaled

EPS = 1e-8

FIRST_MOMENT = Stream("embed", "first moment")
SECOND_MOMENT = Stream("ones", "second moment")


@register_template(
    "rmsprop",
    equation="s' = beta2 s + (1 - beta2) g*g;  x' = x + gamma LN_u(g / (sqrt(s') + eps)),  g = g(x)",
    cite="tieleman2012rmsprop",
)
class RMSProp(Template):
    """Divide the oracle's answer by a running root mean square of its own history along depth."""

    streams = {"s": SECOND_MOMENT}
    coefficients = {"beta2": unit(0.5, "memory"), "gamma": positive(math.log(2), "step")}
    normalises = "u"

    def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
        second = c.beta2 * s.s + (1 - c.beta2) * g * g
        return s.replace(s=second, u=g / (torch.sqrt(second) + EPS))

    def drift(self, s: State, c: Values, scale: float = 1.0) -> State:
        return s.without("u").replace(x=s.x + scaled(scale, c.gamma) * s.u)


@register_template(
    "adam",
    equation="m' = beta1 m + (1 - beta1) g;  s' = beta2 s + (1 - beta2) g*g;  "
    "x' = x + gamma LN_u(m' / (sqrt(s') + eps)),  g = g(x)",
    cite="kingma2015adam",
)
class Adam(RMSProp):
    """RMSProp that moves along a running mean of the answers."""

    streams = {"m": FIRST_MOMENT, "s": SECOND_MOMENT}
    coefficients = {"beta1": unit(0.5, "memory"), **RMSProp.coefficients}

    def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
        first = c.beta1 * s.m + (1 - c.beta1) * g
        second = c.beta2 * s.s + (1 - c.beta2) * g * g
        return s.replace(m=first, s=second, u=first / (torch.sqrt(second) + EPS))


@register_template(
    "adamw",
    equation="m', s' as Adam;  x' = (1 - lambda) x + gamma LN_u(m' / (sqrt(s') + eps))",
    cite="loshchilov2019decoupled",
)
class AdamW(Adam):
    """Adam that also forgets a little of x; the oracle still looks at the undecayed x."""

    coefficients = {**Adam.coefficients, "lam": unit(1 / (1 + math.exp(5)), "decay")}

    def drift(self, s: State, c: Values, scale: float = 1.0) -> State:
        return s.without("u").replace(x=(1 - c.lam) * s.x + scaled(scale, c.gamma) * s.u)
