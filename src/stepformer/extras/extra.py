"""What an extra is: it acts beside rule, splitting and oracles: around a layer or a turn, on values or logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stepformer.base.registry import Component, Registry, Selection
from stepformer.oracles.caches import Call
from stepformer.rules.coefficients import Coefficient, Values
from stepformer.rules.state import State


class Extra(Component):
    """Subclass, override what it changes, register. A config lists extras by name: `extras = ["my-extra"]`.

    Learned scalars (`coefficients`) exist once in every layer and come as `c`, those of `turn_coefficients` once in
    every turn of a layer. What later layers have to know goes into the memory of the state, which belongs to the
    tokens of one forward pass; nothing here may mix tokens.
    """

    tables: tuple[str, ...] = ()  # pairs of token and position tables; the memory has the rows of each, (B, T, d)
    layer, n_layer = 0, 1  # where it acts: the number of its layer, 0, 1, ..., and how many there are
    cap: float | None = None  # c of logits = c tanh(logits / c), for an extra that does this and no more to them

    def __init__(self, config: Selection) -> None:
        for key in self.options:
            setattr(self, key, config.option(key))

    @classmethod
    def chosen(cls, config: Selection) -> bool:
        """Whether a model has it: the config lists it, unless a class says otherwise."""
        return cls.name in config.get("extras")

    def coefficients(self) -> Mapping[str, Coefficient]:
        """The learned scalars of a layer."""
        return {}

    def turn_coefficients(self) -> Mapping[str, Coefficient]:
        """Those of every turn; one with `size` d is a vector, a number for each column."""
        return {}

    def unused(self, *, first: bool, calls: int) -> tuple[str, ...]:
        """Those that cannot reach the logits in the first layer, or where a layer asks its attention so many times."""
        return ()

    def start(self, x: Tensor) -> dict[str, Tensor]:
        """What the state remembers from before the first layer, by name."""
        return {}

    def enter(self, s: State, c: Values) -> State:
        """The state with which a layer begins."""
        return s

    def leave(self, s: State, c: Values) -> State:
        """The state with which a layer ends; its memory may be read and written."""
        return s

    def answer(self, g: Tensor, c: Values) -> Tensor:
        """What the rule is told in a turn, from the oracles' answer."""
        return g

    def drifting(self, s: State, c: Values) -> State:
        """The state with which the drift of a turn begins; a rule without velocity proposes its update as `s.u`."""
        return s

    def values(self, v: Tensor, c: Values, memory: dict[str, Tensor]) -> Tensor:
        """The values that an attention gathers, from its own; `memory` may be read and written."""
        return v

    def logits(self, logits: Tensor) -> Tensor:
        """The logits, from those of the head; in fp32 at least."""
        return logits

    def confine(self, call: Call, tokens: Tensor, origins: Tensor) -> Call:
        """Who sees whom: `tokens` (B, T) follow rows whose documents began at `origins` (B,)."""
        return call

    def describe(self) -> str:
        """What it does under these settings, for people."""
        return extras[self.name].equation

    @classmethod
    def changes(cls, method: str) -> bool:
        """Whether it has a method of its own by this name."""
        return getattr(cls, method) is not getattr(Extra, method)


extras: Registry[Extra] = Registry("extra", Extra, "write-your-own-extra")
register_extra = extras.register
"""Class decorator: `@register_extra("my-extra", equation="...")` (see `Registry.register`)."""


def chosen(config: Selection, layer: int = 0) -> list[Any]:
    """The extras of a config, ready to work: in the order of registration, listed ones in that of the list."""
    listed = list(config.get("extras"))
    own = [entry.name for entry in extras if entry.name not in listed and entry.component.chosen(config)]
    parts = [extras[name].component(config) for name in (*own, *listed)]
    for part in parts:
        part.layer, part.n_layer = layer, config.n_layer
    return parts
