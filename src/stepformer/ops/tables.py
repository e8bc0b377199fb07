"""Embedding tables: rows of a token table plus rows of a position table, which start a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stepformer.base.errors import InputError
from stepformer.ops import kernels
from stepformer.ops.adapters import is_adapted
from stepformer.ops.sharding import is_sharded

if TYPE_CHECKING:
    from stepformer.ops.embedding import Order


class Tables(nn.Module):
    """A token table and, with learned positions, a position table; their sum starts a stream."""

    def __init__(self, vocab_size: int, width: int, positions: int | None) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(vocab_size, width)
        self.pos_emb = None if positions is None else nn.Embedding(positions, width)

    def forward(
        self, tokens: Tensor, positions: Tensor, order: Order | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """With an `order` of the tokens one kernel does it, for positions 0, 1, ..., and gives `dtype`."""
        if order is not None:
            from stepformer.ops.embedding import embed

            table = self.tok_emb.weight
            learned = None if self.pos_emb is None else self.pos_emb.weight
            return embed(tokens, table, learned, order, table.dtype if dtype is None else dtype)
        x = self.tok_emb(tokens)
        return x if self.pos_emb is None else x + self.pos_emb(positions)


def token_order(tokens: Tensor, tables: Iterable[nn.Module]) -> Order | None:
    """What the kernel of the tables knows about tokens; None where plain PyTorch looks them up."""
    modules = [module for table in tables for module in table.modules()]
    weights = [parameter for module in modules for parameter in module.parameters(recurse=False)]
    if not kernels.usable(*weights) or any(map(is_sharded, weights)) or any(map(is_adapted, modules)):
        return None
    from stepformer.ops import embedding

    rows = next(module.num_embeddings for module in modules if isinstance(module, nn.Embedding))
    return embedding.token_order(tokens, rows, train=any(weight.requires_grad for weight in weights))


def check_ids(ids: Tensor, vocab_size: int, what: str = "token") -> None:
    """Refuse ids outside the vocabulary."""
    if ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"Found {what} id {low if low < 0 else high}, but the vocabulary has ids 0 to {vocab_size - 1}: "
            "was the text encoded with another tokenizer?"
        )
