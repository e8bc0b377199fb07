"""Full-matrix preconditioning over the channels of a head: Shampoo and SOAP, right factor only.

The left factor would act on the token axis, where it would mix tokens and duplicate attention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stepformer.ops import kernels
from stepformer.ops.matrix_functions import inverse_square_root, working_dtype
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

    def covariance(self, s: State, c: Values, g: Tensor) -> Tensor:
        """R' = betaR R + (1 - betaR) G^T G in fp32, whatever autocast says."""
        with torch.autocast(g.device.type, enabled=False):
            heads = self.heads(g).to(working_dtype(g.dtype))
            return c.betaR * s.R + (1 - c.betaR) * heads.mT @ heads

    def whitened(self, direction: Tensor, covariance: Tensor) -> Tensor:
        """A token's matrix of heads times R^{-1/2}, flattened back; (B, T, d) -> (B, T, d)."""
        with torch.autocast(direction.device.type, enabled=False):
            heads = self.heads(direction).to(covariance.dtype)
            return (heads @ inverse_square_root(covariance)).flatten(-2)

    def in_kernel(self, *tensors: Tensor) -> bool:
        """Whether kernels/whitening.py takes these and a matrix of heads of this size."""
        # a subclass may have changed the equations
        if type(self) not in (Shampoo, SOAP) or not kernels.usable(*tensors):
            return False
        from stepformer.ops.whitening import supports

        return supports(self.n_head, self.head_dim)

    def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
        if self.in_kernel(g, s.R):
            from stepformer.ops.whitening import shampoo_pass

            covariance, u = shampoo_pass(g, s.R, c.betaR, self.n_head, s.x.dtype)
            return s.replace(R=covariance, u=u)
        covariance = self.covariance(s, c, g)
        return s.replace(R=covariance, u=self.whitened(g, covariance).to(s.x.dtype))

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
        if self.in_kernel(g, s.m, s.R):
            from stepformer.ops.whitening import soap_pass

            mean, covariance, u = soap_pass(g, s.m, s.R, c.beta1, c.betaR, self.n_head, s.x.dtype)
            return s.replace(m=mean, R=covariance, u=u)
        mean = c.beta1 * s.m + (1 - c.beta1) * g
        covariance = self.covariance(s, c, g)
        return s.replace(m=mean, R=covariance, u=self.whitened(mean, covariance).to(s.x.dtype))
