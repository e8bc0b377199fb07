"""The states of a model along its depth, layer by layer, for diagnostics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stepformer.base.errors import InputError
from stepformer.model import Model, check_ids
from stepformer.oracles import Call, fresh_call
from stepformer.rules import State


@dataclass(frozen=True)
class Passage:
    """One layer at work: the state before and after it, and what happened inside."""

    layer: int
    before: State
    after: State
    point: Tensor | None  # what the attention's pre-norm receives, at its first call
    seen: dict[str, list[Tensor]]  # what the oracles report (`Model.observe`), a list over their calls
    call: Call


@torch.no_grad()
def through_depth(model: Model, tokens: Tensor, *, rows: bool = False) -> Iterator[Passage]:
    """Send tokens (B, T) through the layers; `rows` as in `Model.observe`."""
    if tokens.ndim != 2 or not 1 <= tokens.shape[1] <= model.config.context:
        raise InputError(
            f"Tokens should have the shape (batch, time) with a time of 1 to {model.config.context}, the model's "
            f"context, not {tuple(tokens.shape)}."
        )
    check_ids(tokens, model.config.vocab_size)
    tokens = tokens.long()
    call = fresh_call(tokens, None, model.config.document_separator)
    s = model.start(tokens, call.positions)
    for i, block in enumerate(model.blocks):
        seen: dict[str, list[Tensor]] = {}
        points: list[Tensor] = []

        def note(name: str, value: Tensor, seen: dict[str, list[Tensor]] = seen) -> None:
            seen.setdefault(name, []).append(value)

        def look(module: object, inputs: tuple[Tensor, ...], points: list[Tensor] = points) -> None:
            points.append(inputs[0])

        handle = block.attn_norm.register_forward_pre_hook(look)
        try:
            after = block(s, replace(call, observe=note, rows=rows), i in model.plain_layers)
        finally:
            handle.remove()
        yield Passage(i, s, after, points[0] if points else None, seen, call)
        s = after


def norms_by_layer(model: Model, tokens: Tensor) -> list[dict[str, float]]:
    """Root mean square of x and of every stream after each layer."""
    return [
        {name: float(t.double().square().mean().sqrt()) for name, t in {"x": at.after.x, **at.after.streams}.items()}
        for at in through_depth(model, tokens)
    ]


def per_token(s: State) -> list[str]:
    """The streams that belong to the tokens; the others, such as a clock, are the same for all."""
    return [name for name, stream in s.streams.items() if stream.shape[:2] == s.x.shape[:2]]
