"""U-shaped skips: layers of the second half begin with what those of the first half gave, the last with the first."""

from __future__ import annotations

from collections.abc import Mapping

from stepformer.base.registry import Selection
from stepformer.extras.extra import Extra, register_extra
from stepformer.rules.coefficients import Coefficient, Values, free
from stepformer.rules.state import State


@register_extra(
    "unet",
    equation="before layer L - 1 - i of 0 .. L - 1: x = x + s X_i, what layer i < L // 2 gave",
    cite=("ronneberger2015unet", "jordan2024modded"),
)
class UNet(Extra):
    """unet = true; `unet_start` is s before training. The middle one of an odd number of layers has no partner."""

    def __init__(self, config: Selection) -> None:
        super().__init__(config)
        self.share = config.get("unet_start")

    @classmethod
    def chosen(cls, config: Selection) -> bool:
        return bool(config.get("unet"))

    @classmethod
    def refusal(cls, config: Selection) -> str | None:
        one = "unet = true joins two halves of the layers, and n_layer = 1 has no halves: leave it off."
        return one if config.n_layer == 1 else None

    @property
    def partner(self) -> int:
        """The layer at the same height on the other side."""
        return self.n_layer - 1 - self.layer

    def coefficients(self) -> Mapping[str, Coefficient]:
        return {"skip_unet": free(self.share, "mix")} if self.partner < self.layer else {}

    def enter(self, s: State, c: Values) -> State:
        if self.partner >= self.layer:
            return s
        return s.replace(x=s.x + c.skip_unet * s.memory[f"unet_{self.partner}"])

    def leave(self, s: State, c: Values) -> State:
        if self.layer < self.partner:
            s.memory[f"unet_{self.layer}"] = s.x
        return s

    def describe(self) -> str:
        return f"{super().describe()}; s learned from {self.share:g}"
