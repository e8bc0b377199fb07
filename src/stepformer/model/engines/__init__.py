"""Who carries out a model: its blocks as they are written, or an engine that fuses what they do.

An engine has `refusal(model, ...)`, one sentence about why it does not serve, and `structural(model)`, the part of it
that depends on the architecture alone; `stepformer show` prints that. Importing this package registers the fast
versions of the oracles (oracles.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import ModuleType

from stepformer.base.plugins import is_ours
from stepformer.decoding.sampling import Sampling, Steps
from stepformer.model.backbone import Backbone
from stepformer.model.engines import fused, oracles, rows, steps  # noqa: F401
from stepformer.oracles import Call
from stepformer.rules import State


def training(model: Backbone, s: State, call: Call) -> ModuleType | None:
    """The engine of a forward pass; None for the blocks as they are written."""
    return fused if fused.refusal(model, s, call) is None else None


def decoding(
    model: Backbone, batch: int, longest: int, max_new_tokens: int, sampling: Sampling
) -> tuple[AbstractContextManager[Steps] | None, str | None]:
    """Recorded decoding steps, or why there are none."""
    reason = steps.refusal(model, max_new_tokens)
    if reason is not None:
        return None, reason
    capacity = steps.capacity_for(longest, max_new_tokens, model.config.context)
    return steps.decoder_for(model, batch, capacity, sampling), None


def describe(model: Backbone) -> dict[str, str]:
    """Which engines train and decode an architecture on a GPU, and why not the fused ones."""
    why = fused.structural(model)
    trained = "fused: one pass between two oracle calls" if why is None else f"as written, since {why}"
    parts = {"attention": model.blocks[0].attn, "MLP": model.blocks[0].mlp}
    if own := [word for word, part in parts.items() if why is None and not is_ours(type(part))]:
        trained += f"; your {' and '.join(own)} as written"
    slow, unfused = steps.structural(model), rows.structural(model)
    if slow is not None:
        decoded = f"as written, since {slow}"
    elif unfused is not None:
        decoded = f"as written, one CUDA graph a token, since {unfused}"
    else:
        decoded = "fused: passes computed by the products that need them, CUDA graphs of several tokens"
    return {"training": trained, "decoding": decoded}
