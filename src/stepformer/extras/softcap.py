"""Soft cap of the logits: none can grow beyond c in size."""

from __future__ import annotations

import torch
from torch import Tensor

from stepformer.base.registry import Selection
from stepformer.extras.extra import Extra, register_extra


@register_extra("logit-softcap", equation="logits = c tanh(logits / c)", cite="gemma2024gemma")
class SoftCap(Extra):
    """logit_softcap = c."""

    def __init__(self, config: Selection) -> None:
        super().__init__(config)
        self.cap: float = config.get("logit_softcap")

    @classmethod
    def chosen(cls, config: Selection) -> bool:
        return config.get("logit_softcap") is not None

    def logits(self, logits: Tensor) -> Tensor:
        return self.cap * torch.tanh(logits / self.cap)

    def describe(self) -> str:
        return super().describe().replace("c ", f"{self.cap:g} ", 1).replace("/ c", f"/ {self.cap:g}")
