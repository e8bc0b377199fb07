"""Options that a component declares about itself, so that a new rule brings its own settings along.

A config accepts an option as an ordinary key whenever the component that declares it is selected:
`splitting = "imex"` makes `k`, `order` and `velocity_norm` valid, any other splitting refuses `k`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """A typed setting with a default and a sentence of help."""

    default: Any
    help: str
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    refused: tuple[Any, ...] = ()  # values that the component itself refuses, with a sentence of its own

    @property
    def values(self) -> str:
        """What it may be, in a few words."""
        if self.choices is not None:
            return ", ".join("true" if v is True else "false" if v is False else str(v) for v in self.choices)
        return f"{type(self.default).__name__}" + (f" >= {self.minimum:g}" if self.minimum is not None else "")

    def problem(self, name: str, value: Any) -> str | None:
        """Why `value` is not acceptable, or None."""
        if self.choices is not None:
            if value in self.refused:
                return None
            if value not in self.choices or isinstance(value, bool) != isinstance(self.default, bool):
                return f"{name} = {value!r} is not one of {', '.join(map(repr, self.choices))}."
            return None
        kind = type(self.default)
        if isinstance(value, float) and not math.isfinite(value):
            return f"{name} = {value!r} is not finite."
        acceptable = isinstance(value, (int, float) if kind is float else kind)
        if not acceptable or (isinstance(value, bool) and kind is not bool):
            return f"{name} = {value!r} should be of type {kind.__name__}."
        if self.minimum is not None and value < self.minimum:
            return f"{name} = {value!r} is below its minimum {self.minimum:g}."
        return None


def choice(*values: Any, help: str, refused: tuple[Any, ...] = ()) -> Option:
    """One of `values`; the first is the default."""
    return Option(values[0], help, choices=values, refused=refused)


def integer(default: int, *, minimum: int, help: str) -> Option:
    return Option(default, help, minimum=minimum)


def flag(default: bool, *, help: str) -> Option:
    return Option(default, help, choices=(False, True))
