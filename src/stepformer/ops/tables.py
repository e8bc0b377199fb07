"""Embedding tables: rows of a token table plus rows of a position table, which start a stream; and what has no row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stepformer.base.errors import InputError
from stepformer.ops import kernels
from stepformer.ops.adapters import is_adapted
from stepformer.ops.cross_entropy import IGNORE
from stepformer.ops.sharding import is_sharded

if TYPE_CHECKING:
    from stepformer.ops.embedding import Order


class Tables(nn.Module):
    """A token table and, with learned positions, a position table; their sum starts a stream."""

    def __init__(self, vocab_size: int, width: int, positions: int | None) -> None:
        super().__init__()
        self.tok_emb = _table(vocab_size, width)
        self.pos_emb = None if positions is None else _table(positions, width)

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


def _table(rows: int, width: int) -> nn.Embedding:
    """Nothing is drawn yet: on the meta device, where models are built, that would load torch's compiler."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


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
    low, high = (int(bound) for bound in ids.long().aminmax())
    if low < 0 or high >= vocab_size:
        hint = "was the text encoded with another tokenizer?"
        if low < 0 and what == "target":
            hint = f"a target that is to be ignored is {IGNORE}."
        raise InputError(
            f"Found {what} id {low if low < 0 else high}, but the vocabulary has ids 0 to {vocab_size - 1}: {hint}"
        )


def check_integers(given: Any, what: str) -> None:
    """Refuse what is not a tensor of integers of shape (batch, time)."""
    if isinstance(given, Tensor) and given.ndim == 2 and _is_integer(given):
        return
    is_tensor = isinstance(given, Tensor)
    found = f"{given.dtype} of shape {tuple(given.shape)}" if is_tensor else type(given).__name__
    row = f": {what.lower()}[None] is a batch of one row" if is_tensor and given.ndim == 1 else ""
    raise InputError(f"{what} should be a tensor of integers of shape (batch, time), not {found}{row}.")


def check_inputs(tokens: Any, targets: Any, lengths: Tensor | None, *, vocab_size: int, context: float) -> None:
    """Refuse what no model of this vocabulary and context can take.

    Values are looked at on CPU only: no synchronisation on a device.
    """
    check_integers(tokens, "Tokens")
    batch, time = tokens.shape
    if time == 0:
        raise InputError("There are no tokens: a sequence needs at least one.")
    if time > context:
        raise InputError(
            f"The sequence has {time} tokens, but the model's context is {context}: cut it, or build the model with "
            f"context={time}."
        )
    if targets is not None:
        check_integers(targets, "Targets")
        if targets.shape != tokens.shape:
            raise InputError(f"Targets have shape {tuple(targets.shape)}, tokens {tuple(tokens.shape)}.")
    if lengths is not None and not (isinstance(lengths, Tensor) and _is_integer(lengths)):
        raise InputError("`lengths` should be a tensor of integers, one per row.")
    if lengths is not None and lengths.shape != (batch,):
        raise InputError(f"`lengths` should have one entry per row, {batch}, not shape {tuple(lengths.shape)}.")
    # not fake, not distributed, not inside vmap or grad: a plain tensor on the CPU
    has_values = type(tokens) is Tensor and tokens.device.type == "cpu"
    if has_values and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        check_ids(tokens, vocab_size)
        if targets is not None:
            wanted = targets.long()
            check_ids(wanted[wanted != IGNORE], vocab_size, "target")
        if lengths is not None and not bool(((lengths >= 1) & (lengths <= time)).all()):
            raise InputError(f"`lengths` should lie between 1 and {time}, the width of the tokens.")


def _is_integer(t: Tensor) -> bool:
    return not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool
