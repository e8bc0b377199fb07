"""Output norm: a rule is told the oracles' answer behind a norm, with a learned gain."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from stepformer.base.registry import Selection
from stepformer.extras.extra import Extra, register_extra
from stepformer.rules.coefficients import Coefficient, Values


@register_extra("output-norm", equation="g = s .* norm(answer)", cite="kim2025periln")
class OutputNorm(Extra):
    """output_norm = true; s is a vector in every turn that starts at `output_norm_gain`.

    Gradient descent with it is normalised gradient descent: how far a turn moves a token is s, learned, and not how
    large the answer happens to be. The norm is the model's, without a gain or bias of its own.
    """

    def __init__(self, config: Selection) -> None:
        super().__init__(config)
        self.centred, self.eps = config.get("norm") != "rmsnorm", config.get("norm_eps")
        self.width, self.begins = config.get("d_model"), config.get("output_norm_gain")

    @classmethod
    def chosen(cls, config: Selection) -> bool:
        return bool(config.get("output_norm"))

    @classmethod
    def refusal(cls, config: Selection) -> str | None:
        if config.component("template").integrates:
            return (
                f"output_norm = true normalises an oracle's answer, and template '{config.template}' integrates the "
                "fields of its attention instead: use another template."
            )
        return None

    def turn_coefficients(self) -> Mapping[str, Coefficient]:
        return {"output_gain": Coefficient(self.begins, "free", "gain", self.width)}

    def answer(self, g: Tensor, c: Values) -> Tensor:
        norm = F.layer_norm if self.centred else F.rms_norm
        return c.output_gain * norm(g, (self.width,), eps=self.eps)

    def describe(self) -> str:
        return f"{super().describe()}, s a vector from {self.begins:g}, learned in every turn"
