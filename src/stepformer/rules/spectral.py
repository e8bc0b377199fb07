"""Spectral preconditioning: Muon and Ortho. A token's heads form a matrix; its polar factor is the update."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stepformer import ops
from stepformer.base.options import choice
from stepformer.rules.adaptive import FIRST_MOMENT
from stepformer.rules.coefficients import Values, positive, unit
from stepformer.rules.state import State
from stepformer.rules.template import Template, register_template, scaled


@register_template(
    "ortho",
    equation="x' = x + gamma LN_u(NS5(g)),  g = g(x) as an n_head x head_dim matrix per token",
    cite=("gai2026momentum", "jordan2024muon"),
)
class Ortho(Template):
    """Orthogonalise the oracle's answer: all heads' directions get about the same strength."""

    coefficients = {"gamma": positive(math.log(2), "step")}
    normalises = "u"
    options = {
        "newton_schulz_dtype": choice(
            "float32", "bfloat16", help="precision of the per-token Newton-Schulz products (fp64 inputs stay fp64)"
        )
    }
    newton_schulz_dtype: str

    def orthogonal(self, g: Tensor, dtype: torch.dtype) -> Tensor:
        """NS5 of each token's matrix of heads, flattened back; (B, T, d) -> (B, T, d) in `dtype`."""
        return ops.newton_schulz(g, heads=self.n_head, dtype=dtype, low=getattr(torch, self.newton_schulz_dtype))

    def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
        return s.replace(u=self.orthogonal(g, s.x.dtype))

    def drift(self, s: State, c: Values, scale: float = 1.0) -> State:
        return s.without("u").replace(x=s.x + scaled(scale, c.gamma) * s.u)


@register_template(
    "muon",
    equation="m' = beta m + (1 - beta) g;  x' = x + gamma LN_u(NS5(m')),  g = g(x)",
    cite="jordan2024muon",
)
class Muon(Ortho):
    """Orthogonalise a running mean of the answers; the mean itself is carried as it is."""

    streams = {"m": FIRST_MOMENT}
    coefficients = {"beta": unit(0.5, "memory"), **Ortho.coefficients}

    def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
        mean = c.beta * s.m + (1 - c.beta) * g
        return s.replace(m=mean, u=self.orthogonal(mean, s.x.dtype))
