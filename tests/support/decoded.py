"""Models whose text tests decode."""

from __future__ import annotations

from typing import Any

import torch

import stepformer as sf
from draws import fixed
from helpers import shake, tiny

# One line per kind of attention memory: arguments of `tiny`.
ARCHITECTURES: list[dict[str, Any]] = [
    {"name": "vanilla"},
    {"name": "yurii"},
    {"name": "verlet-ama"},  # two caches a block
    {"name": "muon"},
    {"name": "yurii", "positions": "rotary", "n_head": 2},
    {"name": "yurii", "document_separator": 6},
    {"name": "linear-yurii"},  # a state instead of keys and values
    {"name": "linear-symp-conformal-euler"},  # two states a call
    {"name": "symp-presymp-euler"},
    {"name": "kl-carried"},
    {"name": "kl", "prior": "learned"},  # distances between tokens
]


def varied(**overrides: Any) -> sf.Model:
    """A model whose greedy text varies: large weights, so that position and token both matter."""
    return shake(tiny(**{"name": "yurii", "seed": fixed(0), **overrides}), scale=1.0, seed=fixed(3))


def lively(**overrides: Any) -> sf.Model:
    """A model whose text depends on every token before, and in doubt, so that beams overtake each other."""
    model = varied(**{"context": 16, **overrides})
    with torch.no_grad():
        model.embed.tok_emb.weight *= 0.3
    return model
