"""DenseFormer: after a layer x is a learned average of what all layers before it gave, and of the embedding."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from stepformer.base.registry import Selection
from stepformer.extras.extra import Extra, register_extra
from stepformer.rules.coefficients import Coefficient, Values, free
from stepformer.rules.state import State


@register_extra(
    "denseformer",
    equation="after layer i, if period divides i: x = sum_j alpha_j X_j over j = i, i - dilation, ... >= 0",
    cite="pagliardini2024denseformer",
)
class DenseFormer(Extra):
    """denseformer = true, `dilation`, `period`. X_0 is the embedding, X_i what layer i gives; alpha starts at X_i."""

    def __init__(self, config: Selection) -> None:
        super().__init__(config)
        self.dilation, self.period = config.get("dilation"), config.get("period")

    @classmethod
    def chosen(cls, config: Selection) -> bool:
        return bool(config.get("denseformer"))

    @classmethod
    def refusal(cls, config: Selection) -> str | None:
        for key in ("dilation", "period"):
            if config.get(key) > config.n_layer:
                return f"{key} = {config.get(key)} is more than n_layer = {config.n_layer}: nothing would be averaged."
        return None

    def sources(self, i: int) -> range:
        """Which X enter the average after layer i (1, 2, ...), the newest last; none where it is not taken."""
        return range(i % self.dilation, i + 1, self.dilation) if i and i % self.period == 0 else range(0)

    def coefficients(self) -> Mapping[str, Coefficient]:
        i = self.layer + 1
        return {f"alpha_{j}": free(float(j == i), "mix") for j in self.sources(i)}

    def start(self, x: Tensor) -> dict[str, Tensor]:
        return {"dense_0": x}

    def leave(self, s: State, c: Values) -> State:
        i = self.layer + 1
        if any(i in self.sources(later) for later in range(i + 1, self.n_layer + 1)):
            s.memory[f"dense_{i}"] = s.x
        if not self.sources(i):
            return s
        x = getattr(c, f"alpha_{i}") * s.x
        for j in self.sources(i)[:-1]:
            x = x + getattr(c, f"alpha_{j}") * s.memory[f"dense_{j}"]
        return s.replace(x=x)

    def describe(self) -> str:
        return f"{super().describe()}; dilation {self.dilation}, period {self.period}"
