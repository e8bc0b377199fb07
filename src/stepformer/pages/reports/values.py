"""Numbers and lists out of files that may lack them, or hold something else in their place."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from stepformer.present.tables import Column, Field, number


def inside(value: Any, *path: str | int) -> Any:
    """The value under nested keys and places, or None."""
    for key in path:
        if isinstance(key, int):
            value = value[key] if isinstance(value, list) and value else None
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def real(value: Any, *path: str | int) -> float | None:
    """A finite number, or None for anything else."""
    value = inside(value, *path)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def values(value: Any, *path: str | int) -> list[Any]:
    """A list, or an empty one for anything else."""
    found = inside(value, *path)
    return found if isinstance(found, list) else []


def records(value: Any, *path: str | int) -> list[dict[str, Any]]:
    """The objects in a list."""
    return [entry for entry in values(value, *path) if isinstance(entry, dict)]


def record(value: Any, *path: str | int) -> dict[str, Any]:
    """An object, or an empty one for anything else."""
    found = inside(value, *path)
    return found if isinstance(found, dict) else {}


def reals(value: Any, *path: str | int) -> list[float]:
    """A list of finite numbers, or nothing if one of them is not."""
    found = [real(entry) for entry in values(value, *path)]
    return [entry for entry in found if entry is not None] if None not in found else []


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """All values of each key, in order."""
    found: dict[Any, list[Any]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def measured(title: str, *path: str | int, digits: str = ".4f", hint: str = "") -> Field:
    """A column of the finite numbers under nested keys; a dash for anything else."""
    return Column(title, True, hint), lambda entry: number(real(entry, *path), digits)
