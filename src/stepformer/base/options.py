"""Options that a component declares about itself, so that a new rule brings its own settings along.

A config accepts an option as an ordinary key whenever the component that declares it is selected:
`splitting = "imex"` makes `k`, `order` and `velocity_norm` valid, any other splitting refuses `k`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stepformer.base.settings import limit_problem, type_problem


@dataclass(frozen=True)
class Option:
    """A typed setting with a default and a sentence of help."""

    default: Any  # its type is that of the values
    help: str
    choices: tuple[Any, ...] | None = None  # all values that it may have
    minimum: float | None = None
    refused: tuple[Any, ...] = ()  # values that the component itself refuses, with a sentence of its own

    @property
    def values(self) -> str:
        """What it may be, in a few words."""
        if self.choices is not None:
            return ", ".join("true" if v is True else "false" if v is False else str(v) for v in self.choices)
        return type(self.default).__name__ + (f" >= {self.minimum:g}" if self.minimum is not None else "")

    def fault(self, name: str) -> str | None:
        """Why its own default is not acceptable, or None."""
        if not isinstance(self.default, bool | int | float | str):
            return f"{self.default!r} is no number, word, true or false, and the values are of its type."
        return self.problem(name, self.default)

    def problem(self, name: str, value: Any) -> str | None:
        """Why `value` is not acceptable, or None."""
        if self.choices is not None:
            known = value in self.choices and isinstance(value, bool) == isinstance(self.default, bool)
            listed = ", ".join(map(repr, self.choices))
            return None if known or value in self.refused else f"{name} = {value!r} is not one of {listed}."
        problem = type_problem(name, value, type(self.default)) or limit_problem(name, value, {})
        if problem is None and self.minimum is not None and value < self.minimum:
            return f"{name} = {value!r} is below its minimum {self.minimum:g}."
        return problem


def choice(*values: Any, help: str, refused: tuple[Any, ...] = ()) -> Option:
    """One of `values`; the first is the default."""
    return Option(values[0], help, choices=values, refused=refused)


def integer(default: int, *, minimum: int, help: str) -> Option:
    """A whole number that is not below its minimum."""
    return Option(default, help, minimum=minimum)


def flag(default: bool, *, help: str) -> Option:
    """True or false."""
    return Option(default, help, choices=(False, True))
