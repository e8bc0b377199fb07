"""What public functions are called with, against their annotations: a sentence at once instead of a traceback later."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from stepformer.base.errors import InputError
from stepformer.base.settings import checked, limit_problem

P = ParamSpec("P")
R = TypeVar("R")
SIMPLE = {int, float, bool, str, Path, type(None)}


def checks(**least: float) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Refuse arguments that are not of the simple type, or the list of these, that their annotation names, and numbers
    below these. A text where a list of texts is due is taken as the only one.
    """

    def around(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        named = {name for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # says it in Python's words
            hints = _hints(function)
            for name in named & bound.arguments.keys() & hints.keys():
                value = _checked(name, bound.arguments[name], hints[name])
                if problem := limit_problem(name, value, {"least": least.get(name)}):
                    raise InputError(problem)
                bound.arguments[name] = value
            return function(*bound.args, **bound.kwargs)

        return call

    return around


_hints = functools.cache(typing.get_type_hints)


def _checked(name: str, value: Any, hint: Any) -> Any:
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    kinds = typing.get_args(hint) if union else (hint,)
    lists = [kind for kind in kinds if typing.get_origin(kind) in (Sequence, Iterable)]
    others = tuple(kind for kind in kinds if kind not in lists)
    if not all(kind in SIMPLE or typing.get_origin(kind) is Literal for kind in others):
        return value
    if not lists:
        return checked(name, value, hint)
    if any(isinstance(value, kind) and not isinstance(value, bool) for kind in others):
        return value
    (kind,) = typing.get_args(lists[0])
    if kind is str and isinstance(value, str):
        return [value]
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InputError(f"{name} = {value!r} should be a list, such as {name}=[{value!r}].")
    every = str | Path if kind is str else kind
    return [checked(f"{name}[{place}]", one, every) for place, one in enumerate(value)] if kind in SIMPLE else value
