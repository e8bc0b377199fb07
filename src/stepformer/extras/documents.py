"""Documents: tokens see those of their own document alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stepformer.base.registry import Selection
from stepformer.extras.extra import Extra, register_extra
from stepformer.ops.visibility import Confined
from stepformer.oracles.caches import Call


@register_extra("documents", equation="j visible to i: o_i <= j <= i, o_i where the document of i begins")
class Documents(Extra):
    """document_separator = the id that begins a document. A cache keeps one number a row: where its last one began."""

    def __init__(self, config: Selection) -> None:
        super().__init__(config)
        self.separator: int = config.get("document_separator")

    @classmethod
    def chosen(cls, config: Selection) -> bool:
        return config.get("document_separator") is not None

    @classmethod
    def refusal(cls, config: Selection) -> str | None:
        separator, size = config.get("document_separator"), config.get("vocab_size")
        if 0 <= separator < size:
            return None
        return f"document_separator = {separator} is no id of a vocabulary of {size}."

    def confine(self, call: Call, tokens: Tensor, origins: Tensor) -> Call:
        return within_documents(call, tokens == self.separator, origins)

    def describe(self) -> str:
        return f"token {self.separator} begins a document; attention stays inside"


def within_documents(call: Call, begins: Tensor, origin: Tensor) -> Call:
    """The same call with every token confined to its document.

    begins: (B, T), True where a token opens a new document; origin: (B,), where the document before them began.
    Keys from the first position of its document to the query are visible. No mask is made before somebody wants one.
    """
    positions = call.positions.expand(begins.shape)
    origins = torch.where(begins, positions, origin[:, None]).cummax(dim=1).values
    return replace(call, documents=Confined(positions, origins, max(call.end, begins.shape[1])))
