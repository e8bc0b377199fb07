"""What a JSON value must look like, said with types: `problem` is the first way in which one does not.

A description is a `TypedDict`, `dict[str, T]`, `list[T]`, a union, a `Literal` or a plain type; `Annotated[int,
Limits(least=0)]` narrows it. Written here, in a hundred lines, because training must run where nothing can be installed
(pydantic and msgspec are compiled) and because each violation is one sentence of ours that names the place.
"""

from __future__ import annotations

import functools
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, get_args, get_origin

LONGEST = 1 << 20  # letters of a text, unless its limits say otherwise
FEW = 40  # letters of a value that a sentence shows


@dataclass(frozen=True)
class Limits:
    """Of a number its bounds, of a text its length and form."""

    least: float | None = None
    most: float | None = None
    longest: int = LONGEST
    form: str = ""  # a regular expression for the whole text
    called: str = ""  # what a value of this form is


def problem(value: Any, hint: Any, where: str = "") -> str:
    """How a value differs from its description, or nothing; `where` is its place: `state.best.step`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return ""
    if origin is Annotated:
        return problem(value, arguments[0], where) or _beyond(value, arguments[1], where)
    if origin is NotRequired:
        return problem(value, arguments[0], where)
    if origin is Literal:
        fits = value in arguments and type(value) in map(type, arguments)
        return "" if fits else _not(where, value, f"one of {', '.join(map(repr, arguments))}")
    if origin in (types.UnionType, typing.Union):
        faults = [problem(value, kind, where) for kind in arguments]
        return "" if "" in faults else _closest(value, arguments, faults, where)
    if origin is list:
        if not isinstance(value, list):
            return _not(where, value, "a list")
        return next(filter(None, (problem(part, arguments[0], f"{where}[{i}]") for i, part in enumerate(value))), "")
    if origin is dict:
        if not isinstance(value, dict):
            return _not(where, value, "an object")
        keys, values = arguments
        for name, part in value.items():
            fault = problem(name, keys, f"a name in {where or 'it'}") or problem(part, values, _inside(where, name))
            if fault:
                return fault
        return ""
    if typing.is_typeddict(hint):
        return _fields(value, hint, where)
    return _plain(value, hint, where)


def _fields(value: Any, hint: Any, where: str) -> str:
    if not isinstance(value, dict):
        return _not(where, value, "an object")
    known = _hints(hint)
    for name, kind in known.items():
        if name not in value and get_origin(kind) is not NotRequired:
            return f"{_inside(where, name)} is missing"
    for name, part in value.items():
        if name not in known:
            return f"{_inside(where, name)} is nothing that this stepformer knows"
        if fault := problem(part, known[name], _inside(where, name)):
            return fault
    return ""


@functools.cache
def _hints(described: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(described, include_extras=True)


KINDS: dict[Any, tuple[str, tuple[type, ...]]] = {
    str: ("a text", (str,)),
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    type(None): ("null", (type(None),)),
    dict: ("an object", (dict,)),
    list: ("a list", (list,)),
}


def _plain(value: Any, kind: Any, where: str) -> str:
    called, types_of = KINDS[kind]
    if not isinstance(value, types_of) or (isinstance(value, bool) and kind is not bool):
        return _not(where, value, called)
    if isinstance(value, str) and len(value) > LONGEST:
        return f"{where} has {len(value):,} letters"
    if isinstance(value, float) and not math.isfinite(value):
        return _not(where, value, "a finite number")
    if isinstance(value, int) and not abs(value) < 1 << 63:
        return _not(where, value, "a number of any use")
    return ""


def _beyond(value: Any, limits: Limits, where: str) -> str:
    if isinstance(value, str):
        if len(value) > limits.longest:
            return f"{where} has {len(value):,} letters"
        if limits.form and not re.fullmatch(limits.form, value):
            return _not(where, value, limits.called or f"of the form {limits.form}")
    elif isinstance(value, int | float):
        if limits.least is not None and value < limits.least:
            return f"{where} is {value:g}, below {limits.least:g}"
        if limits.most is not None and value > limits.most:
            return f"{where} is {value:g}, above {limits.most:g}"
    return ""


def _closest(value: Any, kinds: tuple[Any, ...], faults: list[str], where: str) -> str:
    """Of a union the fault of the member that the value was meant to be: an object that lacks something, say."""
    if isinstance(value, dict | list | str):
        deeper = [fault for fault in faults if not fault.startswith(f"{where} is ") or "is missing" in fault]
        if deeper:
            return deeper[0]
    return faults[0] if len([k for k in kinds if k is not type(None)]) == 1 else _not(where, value, "what it should be")


def _inside(where: str, name: str) -> str:
    return f"{where}.{_short(name)}" if where else f"'{_short(name)}'" if "." in name else _short(name)


def _not(where: str, value: Any, wanted: str) -> str:
    shown = _short(repr(value)) if isinstance(value, str | int | float | bool) or value is None else ""
    kind = "an object" if isinstance(value, dict) else "a list"
    return f"{where or 'it'} is {shown or kind}, not {wanted}"


def _short(text: str) -> str:
    return text if len(text) <= FEW else f"{text[: FEW - 3]}..."
