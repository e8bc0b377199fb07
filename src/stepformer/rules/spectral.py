"""Spectral preconditioning: Muon and Ortho. A token's heads form a matrix; its polar factor is the update."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stepformer.base.options import choice
from stepformer.ops import kernels
from stepformer.ops.matrix_functions import newton_schulz
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
        if self.in_kernel(g):
            from stepformer.ops.newton_schulz import newton_schulz as fused

            return fused(g, self.n_head, dtype, fast=self.newton_schulz_dtype == "bfloat16")
        low = torch.bfloat16 if self.newton_schulz_dtype == "bfloat16" else torch.float32
        return newton_schulz(self.heads(g), dtype=low).flatten(-2).to(dtype)

    def in_kernel(self, *vectors: Tensor) -> bool:
        """Whether kernels/newton_schulz.py takes these and a matrix of heads of this size."""
        # a subclass may have changed the equations
        if type(self) not in (Ortho, Muon) or not kernels.usable(*vectors):
            return False
        from stepformer.ops.newton_schulz import supports

        return supports(self.n_head, self.head_dim)

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
        if self.in_kernel(g, s.m):
            return s.replace(**self.fused_kick(s, c, g))
        mean = c.beta * s.m + (1 - c.beta) * g
        return s.replace(m=mean, u=self.orthogonal(mean, s.x.dtype))

    def fused_kick(self, s: State, c: Values, g: Tensor) -> dict[str, Tensor]:
        """The same mean and update in one pass; the mean stays in its dtype."""
        from stepformer.ops.common import Scalar
        from stepformer.ops.newton_schulz import muon_pass

        fast = self.newton_schulz_dtype == "bfloat16"
        mean, u = muon_pass(g, s.m, Scalar(c.beta), self.n_head, s.x.dtype, fast)
        return {"m": mean, "u": u}
