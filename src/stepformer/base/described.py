"""What a JSON value must look like, said in its own shape: `problem` is the first way in which one does not.

A description is a plain type, `Limits` of one, a `Literal`, `[T]` for a list, `{T: U}` for an object with any names,
`Fields` for one with known names, or a tuple of descriptions of which one fits. Written here, in a hundred lines,
because training must run where nothing can be installed (pydantic and msgspec are compiled) and because each violation
is one sentence of ours that names the place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

LONGEST = 1 << 20  # letters of a text, unless its limits say otherwise
FEW = 40  # letters of a value that a sentence shows


@dataclass(frozen=True)
class Limits:
    """A plain type narrowed: of a number its bounds, of a text its length and form."""

    kind: Any
    least: float | None = None
    most: float | None = None
    longest: int = LONGEST
    form: str = ""  # a regular expression for the whole text
    called: str = ""  # what a value of this form is


class Fields:
    """An object with known names: `needed` and `optional` are tables of names, with blanks between, and what is there.

    It has all that `beside` has, too.
    """

    def __init__(
        self, needed: Mapping[str, Any], optional: Mapping[str, Any] | None = None, *, beside: Fields | None = None
    ) -> None:
        own = {name: kind for names, kind in needed.items() for name in names.split()}
        others = {name: kind for names, kind in (optional or {}).items() for name in names.split()}
        self.needed: tuple[str, ...] = (*(beside.needed if beside else ()), *own)
        self.known: dict[str, Any] = {**(beside.known if beside else {}), **own, **others}


def problem(value: Any, hint: Any, where: str = "") -> str:
    """How a value differs from its description, or nothing; `where` is its place: `state.best.step`."""
    if hint is Any:
        return ""
    if get_origin(hint) is Literal:
        accepted = get_args(hint)
        fits = value in accepted and type(value) in map(type, accepted)
        return "" if fits else _not(where, value, f"one of {', '.join(map(repr, accepted))}")
    if isinstance(hint, tuple):
        faults = [problem(value, kind, where) for kind in hint]
        return "" if "" in faults else _closest(value, hint, faults, where)
    if isinstance(hint, list):
        if not isinstance(value, list):
            return _not(where, value, "a list")
        return next(filter(None, (problem(part, hint[0], f"{where}[{i}]") for i, part in enumerate(value))), "")
    if isinstance(hint, dict | Fields):
        if not isinstance(value, dict):
            return _not(where, value, "an object")
        return _fields(value, hint, where) if isinstance(hint, Fields) else _any_names(value, hint, where)
    return _plain(value, hint if isinstance(hint, Limits) else UNLIMITED[hint], where)


def _any_names(value: dict[str, Any], hint: Mapping[Any, Any], where: str) -> str:
    ((names, kind),) = hint.items()
    for name, part in value.items():
        fault = problem(name, names, f"a name in {where or 'it'}") or problem(part, kind, _inside(where, name))
        if fault:
            return fault
    return ""


def _fields(value: dict[str, Any], hint: Fields, where: str) -> str:
    for name in hint.needed:
        if name not in value:
            return f"{_inside(where, name)} is missing"
    for name, part in value.items():
        if name not in hint.known:
            return f"{_inside(where, name)} is nothing that this stepformer knows"
        if fault := problem(part, hint.known[name], _inside(where, name)):
            return fault
    return ""


KINDS: dict[Any, tuple[str, Any]] = {
    str: ("a text", (str,)),
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    None: ("null", (type(None),)),
}
UNLIMITED = {kind: Limits(kind) for kind in KINDS}


def _plain(value: Any, limits: Limits, where: str) -> str:
    called, types_of = KINDS[limits.kind]
    if not isinstance(value, types_of) or (isinstance(value, bool) and limits.kind is not bool):
        return _not(where, value, called)
    if isinstance(value, str):
        if len(value) > limits.longest:
            return f"{where} has {len(value):,} letters"
        if limits.form and not re.fullmatch(limits.form, value):
            return _not(where, value, limits.called or f"of the form {limits.form}")
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return _not(where, value, "a finite number")
    if isinstance(value, int) and not abs(value) < 1 << 63:
        return _not(where, value, "a number of any use")
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
    return faults[0] if len([k for k in kinds if k is not None]) == 1 else _not(where, value, "what it should be")


def _inside(where: str, name: str) -> str:
    return f"{where}.{_short(name)}" if where else f"'{_short(name)}'" if "." in name else _short(name)


def _not(where: str, value: Any, wanted: str) -> str:
    shown = _short(repr(value)) if isinstance(value, str | int | float | bool) or value is None else ""
    kind = "an object" if isinstance(value, dict) else "a list"
    return f"{where or 'it'} is {shown or kind}, not {wanted}"


def _short(text: str) -> str:
    return text if len(text) <= FEW else f"{text[: FEW - 3]}..."
