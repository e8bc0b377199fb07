"""Scaled residuals: learned factors on what a turn adds to x, and on x itself."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from stepformer.base.registry import Selection
from stepformer.extras.extra import Extra, register_extra
from stepformer.rules.coefficients import Coefficient, Values, free
from stepformer.rules.state import State


def layer_scale(n_layer: int) -> float:
    """Where LayerScale starts: the smaller the deeper the model."""
    return 0.1 if n_layer <= 18 else 1e-5 if n_layer <= 24 else 1e-6


@register_extra(
    "scaled",
    equation="x' = a x + s .* (what a turn adds), s on the answer of a rule with velocity",
    cite=("bachlechner2021rezero", "touvron2021going"),
)
class Scaled(Extra):
    """scale = "rezero": one s a turn from 0; "layerscale": a vector; "scalar": s and a from 1. Else a = 1.

    Of gradient descent x' = a x + s T(x). Any rule drifts from a x. One without velocity proposes an update u, and s
    multiplies that, behind its auxiliary norm, which would forget s; a velocity is kicked by s T(point).
    """

    def __init__(self, config: Selection) -> None:
        super().__init__(config)
        self.kind, self.width = config.get("scale"), config.get("d_model")
        self.kicks = config.component("template").has_velocity()
        self.begins = {"rezero": 0.0, "scalar": 1.0}.get(self.kind, layer_scale(config.n_layer))

    @classmethod
    def chosen(cls, config: Selection) -> bool:
        return bool(config.get("scale") != "off")

    @classmethod
    def refusal(cls, config: Selection) -> str | None:
        kind = config.get("scale")
        if config.component("template").integrates:
            return (
                f"scale = '{kind}' multiplies what an oracle adds to x, and template '{config.template}' integrates "
                "the fields of its attention instead: use another template."
            )
        if kind == "scalar" and config.splitting in ("imex", "symplectic-euler"):
            return (
                f"scale = 'scalar' has a factor on x for every turn, and splitting '{config.splitting}' moves x once "
                "in a layer: use 'rezero' or 'layerscale', or another splitting."
            )
        return None

    def turn_coefficients(self) -> Mapping[str, Coefficient]:
        if self.kind == "layerscale":
            return {"scale": Coefficient(self.begins, "free", "step", self.width)}
        kept = {"keep_x": free(1.0, "decay")} if self.kind == "scalar" else {}
        return {"scale": free(self.begins, "step"), **kept}

    def answer(self, g: Tensor, c: Values) -> Tensor:
        return c.scale * g if self.kicks else g

    def drifting(self, s: State, c: Values) -> State:
        s = s.replace(x=c.keep_x * s.x) if self.kind == "scalar" else s
        return s if self.kicks else s.replace(u=c.scale * s.u)

    def describe(self) -> str:
        how = {
            "rezero": "s a number from 0, a = 1",
            "layerscale": f"s a vector from {self.begins:g}, a = 1",
            "scalar": "s and a numbers from 1",
        }
        return f"{super().describe()}; {how[self.kind]}, learned in every turn"
