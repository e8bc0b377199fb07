"""Full-matrix preconditioning over the channels of a head: Shampoo and SOAP, right factor only.

The left factor would act on the token axis, where it would mix tokens and duplicate attention.
"""

from __future__ import annotations

import math

from torch import Tensor

from stepformer import ops
from stepformer.rules.adaptive import FIRST_MOMENT
from stepformer.rules.coefficients import Values, positive, unit
from stepformer.rules.state import State
from stepformer.rules.template import Stream, Template, register_template, scaled

COVARIANCE = Stream("identity", "covariance of the channels, one matrix per token")


@register_template(
    "shampoo",
    equation="R' = betaR R + (1 - betaR) G^T G;  x' = x + gamma LN_u(G R'^{-1/2}),  G = g(x) as n_head x head_dim",
    cite="gupta2018shampoo",
)
class Shampoo(Template):
    """Whiten the oracle's answer with the covariance that its own history along depth has built up."""

    streams = {"R": COVARIANCE}
    coefficients = {"betaR": unit(0.5, "memory"), "gamma": positive(math.log(2), "step")}
    normalises = "u"

    def whitened(self, direction: Tensor, s: State, c: Values, g: Tensor) -> dict[str, Tensor]:
        """R' = betaR R + (1 - betaR) G^T G, and a token's matrix of heads times R'^{-1/2}, flattened back (B, T, d)."""
        covariance, u = ops.whiten(direction, g, s.R, c.betaR, heads=self.n_head, dtype=s.x.dtype)
        return {"R": covariance, "u": u}

    def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
        return s.replace(**self.whitened(g, s, c, g))

    def drift(self, s: State, c: Values, scale: float = 1.0) -> State:
        return s.without("u").replace(x=s.x + scaled(scale, c.gamma) * s.u)


@register_template(
    "soap",
    equation="m' = beta1 m + (1 - beta1) g;  R' as Shampoo;  x' = x + gamma LN_u(M' R'^{-1/2})",
    cite="vyas2025soap",
)
class SOAP(Shampoo):
    """Shampoo that whitens a running mean of the answers."""

    streams = {"m": FIRST_MOMENT, "R": COVARIANCE}
    coefficients = {"beta1": unit(0.5, "memory"), **Shampoo.coefficients}

    def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
        mean = c.beta1 * s.m + (1 - c.beta1) * g
        return s.replace(m=mean, **self.whitened(mean, s, c, g))
