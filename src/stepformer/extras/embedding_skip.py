"""Embedding skip: every layer begins with a learned mix of the tokens and their embedding."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from stepformer.base.registry import Selection
from stepformer.extras.extra import Extra, register_extra
from stepformer.rules.coefficients import Coefficient, Values, free
from stepformer.rules.state import State


@register_extra("embedding-skip", equation="before the layer x = l0 x + l1 x_0", cite="shortcuts")
class EmbeddingSkip(Extra):
    """embedding_skip = true; `embedding_skip_start` is the share of the embedding before training."""

    def __init__(self, config: Selection) -> None:
        super().__init__(config)
        self.share = config.get("embedding_skip_start")

    @classmethod
    def chosen(cls, config: Selection) -> bool:
        return bool(config.get("embedding_skip"))

    def coefficients(self) -> Mapping[str, Coefficient]:
        return {"skip_x": free(1 - self.share, "mix"), "skip_x0": free(self.share, "mix")}

    def start(self, x: Tensor) -> dict[str, Tensor]:
        return {"x0": x}

    def enter(self, s: State, c: Values) -> State:
        return s.replace(x=c.skip_x * s.x + c.skip_x0 * s.memory["x0"])

    def describe(self) -> str:
        return f"{super().describe()}, learned from [{1 - self.share:g}, {self.share:g}]"
