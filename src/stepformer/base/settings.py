"""Typed settings: frozen dataclasses whose fields carry help and limits, and that report all their problems at once."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from stepformer.base.errors import ConfigError, InputError, T, independent, suggestion


def setting(
    default: Any, help: str, *, least: float | None = None, above: float | None = None, most: float | None = None
) -> Any:
    """A field with a default, a sentence of help, and limits: `least` and `most` are allowed, `above` is not."""
    return field(default=default, metadata={"help": help, "least": least, "above": above, "most": most})


@dataclass(frozen=True)
class Settings:
    """Base of a section of a config file. Fields are made with `setting`."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        make_plain(self)
        wrong = field_problems(self)
        problems = list(wrong.values()) if wrong else self.problems()
        if problems:
            own = [f"[{self.section}] {problem}" for problem in problems]
            raise ConfigError(own + (independent(self._others(wrong), wrong) if wrong else []))
        for f in dataclasses.fields(self):
            if isinstance(f.default, float):
                object.__setattr__(self, f.name, float(getattr(self, f.name)))

    def problems(self) -> list[str]:
        """What is wrong with values that each have the right type and range; a sentence names all keys it is about."""
        return []

    def _others(self, wrong: Collection[str]) -> tuple[str, ...]:
        """What would be wrong without the keys that have a wrong type or range."""
        try:
            type(self)(**{key: value for key, value in self.to_dict().items() if key not in wrong})
        except ConfigError as error:
            return error.problems
        return ()

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in dataclasses.fields(cls))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From the keys of a config section; unknown keys are errors with a suggestion."""
        known = cls.field_names()
        everything = f" Known keys: {', '.join(known)}."
        problems = [
            f"[{cls.section}] Unknown key '{key}'.{suggestion(key, known) or everything}"
            for key in values
            if key not in known
        ]
        try:
            result = cls(**{key: value for key, value in values.items() if key in known})
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        return result

    def replace(self, **changes: Any) -> Self:
        return type(self).from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value; nothing is left out, so that a later default cannot change an old run."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


@functools.cache
def type_hints(kind: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields, read once: Python parses every annotation anew, milliseconds a config."""
    return types.MappingProxyType(typing.get_type_hints(kind))


def field_problems(settings: Any, but: Collection[str] = ()) -> dict[str, str]:
    """Fields of a dataclass that have the wrong type or lie outside the limits of their `setting`, with a sentence."""
    hints, problems = type_hints(settings.__class__), {}
    for f in (f for f in dataclasses.fields(settings) if f.name not in but):
        value = getattr(settings, f.name)
        problem = type_problem(f.name, value, hints[f.name]) or limit_problem(f.name, value, f.metadata)
        if problem:
            problems[f.name] = problem
    return problems


def plain(value: Any) -> Any:
    """A number of numpy, or a tensor of one, as Python's own; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def checked(name: str, value: T, hint: Any) -> T:
    """An argument as Python's own; refused if it is of another type."""
    value = plain(value)
    if problem := type_problem(name, value, hint):
        raise InputError(problem)
    return value


def make_plain(settings: Any) -> None:
    """The same for the fields of a dataclass and the values of its tables."""
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        table = isinstance(value, Mapping)
        object.__setattr__(settings, f.name, {k: plain(v) for k, v in value.items()} if table else plain(value))


def is_number(value: Any) -> bool:
    """Whether arithmetic may be done with it: true and false are no numbers here."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def limit_problem(name: str, value: Any, limits: Mapping[str, Any]) -> str | None:
    """Why a number lies outside the limits of its setting, or None."""
    if not is_number(value):
        return None
    least, above, most = (limits.get(key) for key in ("least", "above", "most"))
    if not math.isfinite(value):
        return f"{name} = {value} is not finite."
    if least is not None and value < least:
        return f"{name} = {value} should be at least {least:g}."
    if above is not None and value <= above:
        return f"{name} = {value} should be above {above:g}."
    if most is not None and value > most:
        return f"{name} = {value} should be at most {most:,.0f}."
    return None


def type_problem(name: str, value: Any, hint: Any) -> str | None:
    """Why a value does not have the type its hint names, or None; whole numbers are fine where floats are wanted."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union  # Literal | None is the latter
    accepted = typing.get_args(hint) if union else (hint,)
    choices = [choice for kind in accepted for choice in typing.get_args(kind)]  # those of a Literal
    plain = {int | float if kind is float else kind for kind in accepted if not typing.get_args(kind)}
    if value in choices or any(
        isinstance(value, kind) for kind in plain if kind is bool or not isinstance(value, bool)
    ):
        return None
    if choices and plain <= {type(None)}:
        guess = suggestion(str(value), map(str, choices))
        return f"{name} = {value!r} is not one of {', '.join(map(repr, choices))}.{guess}"
    spelling = {type(None): "nothing", bool: "bool (true or false)"}
    wanted = (", ".join(map(repr, typing.get_args(k))) or spelling.get(k, k.__name__) for k in accepted)
    return f"{name} = {value!r} should be of type {' or '.join(wanted)}."
