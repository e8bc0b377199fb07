"""The state of the tokens at one depth: the positions `x`, the streams of the depth rule, the oracles' memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from stepformer.base.errors import StepformerError


@dataclass(repr=False, eq=False)
class State:
    """`x` (B, T, d) and named per-token streams, e.g. `State(x, {"v": v})`; immutable by convention.

    Streams read as attributes (`s.v`) and change through `replace`, so an update rule looks like its equation.
    `memory` is what the oracles and the block hand on to deeper layers (the embedding x_0, the first values v_1, the
    prior of a KL constraint): oracles reach it through their `Call`, templates never touch it.
    It is a dataclass and a registered pytree because those are the two ways in which torch finds the tensors inside
    (FSDP2 of torch 2.13 looks into dataclasses only, checkpointing and compilation into pytrees).
    """

    x: Tensor
    streams: dict[str, Tensor] = field(default_factory=dict)
    memory: dict[str, Tensor] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Tensor:
        # the first guard keeps copy and pickle from recursing
        if name in ("streams", "memory") or name not in self.streams:
            raise AttributeError(f"this state has no stream '{name}': declare it in `streams`, or it starts 'later'")
        return self.streams[name]

    def replace(self, **changes: Tensor) -> State:
        """The same state with some of `x` and the streams changed (or a new stream added)."""
        if "memory" in changes:
            raise StepformerError("`memory` is no stream: write into it, s.memory['name'] = value.")
        streams = dict(self.streams)
        streams.update(changes)
        x = streams.pop("x", self.x)
        return State(x, streams, self.memory)

    def without(self, *names: str) -> State:
        """The same state without these streams, where it has them."""
        return State(self.x, {k: t for k, t in self.streams.items() if k not in names}, self.memory)

    def in_dtypes_of(self, other: State) -> State:
        """The same state with x and streams in the dtypes that `other` has: fp32 coefficients would widen them."""
        if self.x.dtype is other.x.dtype is torch.float32:  # as wide as any coefficient; streams start as x does
            return self
        kinds = {k: other.streams.get(k, other.x).dtype for k in self.streams}  # a new stream is carried as x is
        wider = {k: t for k, t in self.streams.items() if t.dtype is not kinds[k]}
        if not wider and self.x.dtype is other.x.dtype:
            return self
        streams = self.streams | {k: t.to(kinds[k]) for k, t in wider.items()}
        return State(self.x.to(other.x.dtype), streams, self.memory)

    def __repr__(self) -> str:
        named = {**self.streams, **self.memory}
        parts = [f"x{tuple(self.x.shape)}", *(f"{k}{tuple(t.shape)}" for k, t in named.items())]
        return f"State({', '.join(parts)})"


def _flatten(s: State) -> tuple[list[Any], Any]:
    return [s.x, *s.streams.values(), *s.memory.values()], (tuple(s.streams), tuple(s.memory))


def _unflatten(leaves: Any, names: Any) -> State:
    x, *rest = leaves
    streams, memory = names
    return State(
        x,
        dict(zip(streams, rest[: len(streams)], strict=True)),
        dict(zip(memory, rest[len(streams) :], strict=True)),
    )


pytree.register_pytree_node(State, _flatten, _unflatten, serialized_type_name="stepformer.State")
