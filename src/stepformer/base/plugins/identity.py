"""What a rule is: the content of the files behind it, or of its class where there is no file."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CellType, CodeType, FunctionType

from stepformer.base.errors import ChangedRuleError
from stepformer.base.plugins.loading import called, refuse_edited, remember_files
from stepformer.base.plugins.sources import files_at, files_of, hashed, named, place_of

_SOURCES: dict[type, str] = {}  # rule -> SHA-256 of its class when it was registered: what it counts later is its own
_USED: dict[str, str] = {}  # rule -> digest of what this process has used under that name


def remember(component: type) -> None:
    """Note what is behind a rule while it is registered; its files may be edited before it is used."""
    module = sys.modules.get(component.__module__)
    if not is_ours(component):
        _SOURCES[component] = _source(component)
        if module is not None:
            remember_files(module)


def identity(plugins: Sequence[str], rules: Mapping[str, type]) -> dict[str, dict[str, str]]:
    """Of every plug-in, and of every component that is not of this package, its files and their SHA-256."""
    found: dict[str, dict[str, str]] = {}
    for where in plugins:
        found[called(where, found)] = named(hashed(files_at(place_of(where))))
    for name, component in rules.items():
        if is_ours(component):
            continue
        module = sys.modules.get(component.__module__)
        if module is not None and files_of(module):
            refuse_edited(module)
        own = _SOURCES.get(component) or _source(component)
        found[name] = named(hashed(files_of(module))) or {"source": own}  # a notebook has no file
        now = digest({**found[name], "class": own})  # one file may register two of them
        used = _USED.setdefault(name, now)
        if used != now:
            raise ChangedRuleError(
                f"This process has already used another {name} ({used}, now {now}): two rules under one name. Register "
                "the new one under another name, or start again."
            )
    return found


def sources_of(plugins: Sequence[str], rules: Mapping[str, type]) -> list[dict[str, Path]]:
    """The files behind `identity`, each set of them once."""
    paths = [files_at(place_of(where)) for where in plugins]
    paths += [files_of(sys.modules.get(part.__module__)) for part in rules.values() if not is_ours(part)]
    found = [named({path: path for path in files}) for files in paths]
    return [files for i, files in enumerate(found) if files and files not in found[:i]]


def is_ours(component: type) -> bool:
    """Whether a class belongs to this package."""
    return component.__module__.partition(".")[0] == __name__.partition(".")[0]


def _source(component: type) -> str:
    """SHA-256 of what a class without a file says: its methods, also inherited ones, and its settings."""
    parts = []
    for cls in component.__mro__:
        if cls is object or is_ours(cls):
            continue
        for name, value in sorted(vars(cls).items()):
            function = getattr(getattr(value, "fget", value), "__func__", getattr(value, "fget", value))
            if inspect.isfunction(function):
                parts.append(f"{name}: {_code(function)}")
            elif not name.startswith("__"):
                parts.append(f"{name} = {_shown(value)}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _code(function: FunctionType, depth: int = 4) -> str:
    """The text of a function, which a notebook keeps, or its instructions; and what it has from around it."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = _instructions(function.__code__)
    around = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    cells = [cell.cell_contents for name, cell in around if name != "__class__" and not _empty(cell)]
    values = (*cells, function.__defaults__, function.__kwdefaults__)
    return "\n".join([text, *(_shown(value, depth) for value in values)])


def _empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:  # not filled yet
        return True


def _shown(value: object, depth: int = 4) -> str:
    """A value as text that is the same in every process; functions by what they do."""
    if inspect.isfunction(value) and depth:
        return _code(value, depth - 1)
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_shown(part, depth) for part in value))}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(_shown(part, depth) for part in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_shown(k, depth)}: {_shown(v, depth)}' for k, v in value.items())}}}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _instructions(code: CodeType) -> str:
    constants = [_instructions(c) if isinstance(c, CodeType) else _shown(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def digest(files: Mapping[str, str]) -> str:
    """Twelve hex digits of some files, names and contents."""
    return hashlib.sha256(json.dumps(dict(files), sort_keys=True).encode()).hexdigest()[:12]
