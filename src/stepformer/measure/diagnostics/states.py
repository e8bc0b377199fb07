"""The states of a model along its depth, layer by layer, for diagnostics."""

from __future__ import annotations

from torch import Tensor

from stepformer.model import Model
from stepformer.rules import State


def norms_by_layer(model: Model, tokens: Tensor) -> list[dict[str, float]]:
    """Root mean square of x and of every stream after each layer."""
    return [
        {name: float(t.double().square().mean().sqrt()) for name, t in {"x": at.after.x, **at.after.streams}.items()}
        for at in model.passages(tokens)
    ]


def per_token(s: State) -> list[str]:
    """The streams that belong to the tokens; the others, such as a clock, are the same for all."""
    return [name for name, stream in s.streams.items() if stream.shape[:2] == s.x.shape[:2]]
