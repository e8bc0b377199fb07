"""MLP oracles: what a token makes of itself."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from stepformer.base.errors import ComponentError
from stepformer.base.registry import Component, Registry
from stepformer.ops import Linear, operation


class MLP(Component, nn.Module):
    """A per-token oracle (B, T, d) -> (B, T, d) with an input map `up` and an output map `down`."""

    output_map = "down"  # its weight starts smaller the deeper the model
    branches = 1  # how many maps `up` holds; 2 for a gated MLP

    def __init__(self, d_model: int, hidden: int | None, *, bias: bool, **options: Any) -> None:
        super().__init__()
        self.set_options(options)
        hidden = self.default_hidden(d_model) if hidden is None else hidden
        self.up = Linear(d_model, self.branches * hidden, bias=bias)
        self.stacked = {"up.weight": self.branches}  # optim.build.stacked_parts
        self.down = Linear(hidden, d_model, bias=bias)

    @staticmethod
    def default_hidden(d_model: int) -> int:
        """The hidden width if `mlp_hidden` does not say it."""
        return 4 * d_model

    def activation(self, h: Tensor) -> Tensor:
        """What happens between the two maps; a gated MLP halves the last dimension here."""
        raise ComponentError(f"{type(self).__name__} has no nonlinearity: define activation().")

    def forward(self, u: Tensor) -> Tensor:
        return self.project(self.up(u))

    @operation
    def project(self, h: Tensor) -> Tensor:
        """The activation and the output layer."""
        return self.down(self.activation(h))


mlps: Registry[MLP] = Registry("mlp", MLP, "write-your-own-rule")
register_mlp = mlps.register
"""Class decorator: `@register_mlp("my-mlp", equation="...")` (see `Registry.register`)."""


@register_mlp("gelu", equation="g = W_2 gelu(W_1 u)", cite="hendrycks2016gaussian")
class GeluMLP(MLP):
    """Two maps with the exact (erf) GELU between them; hidden width 4 d."""

    def activation(self, h: Tensor) -> Tensor:
        return F.gelu(h)


@register_mlp("gelu-tanh", equation="g = W_2 gelu_tanh(W_1 u)", cite="hendrycks2016gaussian")
class TanhGeluMLP(MLP):
    """The tanh approximation of GELU, as in the released GPT-2 weights."""

    def activation(self, h: Tensor) -> Tensor:
        return F.gelu(h, approximate="tanh")


@register_mlp("relu2", equation="g = W_2 relu(W_1 u)^2", cite="so2021primer")
class SquaredReluMLP(MLP):
    """Two maps with the square of the positive part between them; hidden width 4 d."""

    def activation(self, h: Tensor) -> Tensor:
        return F.relu(h).square()


@register_mlp("swiglu", equation="g = W_2 (silu(W_g u) * W_1 u)", cite="shazeer2020glu")
class SwigluMLP(MLP):
    """A gated MLP; hidden width 8/3 d (to a multiple of 8), so that it has as many parameters as GELU's 4 d."""

    branches = 2

    @staticmethod
    def default_hidden(d_model: int) -> int:
        return 8 * round(d_model / 3)

    def activation(self, h: Tensor) -> Tensor:
        gate, value = h.chunk(2, dim=-1)
        return F.silu(gate) * value
