"""Which files a plug-in consists of, found without running any of them."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from stepformer.base.errors import InputError
from stepformer.base.files import sha256
from stepformer.base.version import PACKAGE

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a plug-in begins: its module's name, its file, and the folder in which it finds what it imports."""

    name: str
    path: Path
    top: Path


def place_of(where: str) -> Place:
    """The place of `folder/rules.py` or `package.module`; nothing is imported."""
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise InputError(
                f"There is no plug-in file '{where}': if it was moved, say where it is with --plugin "
                "(in Python: plugins=[...])."
            )
        path = path.resolve()
        if "." in path.stem:
            renamed = f"{path.stem.replace('.', '_')}.py"
            raise InputError(
                f"'{path.name}' has a dot in its name, which Python reads as a package: call it {renamed}."
            )
        top, parts = path.parent, [path.stem]
        while (top / "__init__.py").is_file():
            parts.insert(0, top.name)
            top = top.parent
        return Place(".".join(parts), path, top)
    found = located(where, None)
    if found is None:
        raise InputError(f"There is no plug-in module '{where}' on Python's path.")
    levels = where.count(".") + (found.name == "__init__.py")
    return Place(where, found.resolve(), found.resolve().parents[levels])


def modules_at(place: Place) -> dict[Path, str]:
    """A plug-in's file and those it imports, directly or not, with their modules' names; installed packages are not
    part of it, save its own.
    """
    own = place.name.partition(".")[0]
    waiting, found = [(place.name, place.path)], dict[Path, str]()
    for depth in range(1, place.name.count(".") + 1):  # a module's packages are run before it
        called = place.name.rsplit(".", depth)[0]
        above = located(called, place.top)
        waiting += [(called, above)] if above is not None else []
    while waiting:
        called, path = waiting.pop()
        path = path.resolve()
        if path in found or (installed(path) and called.partition(".")[0] != own):
            continue
        found[path] = called
        if path.suffix != ".py":  # a compiled helper
            continue
        names = [*imports(path, called), *(_listed(path, called) if path.name == "__init__.py" else ())]
        waiting += [(name, there) for name in names if (there := located(name, place.top)) is not None]
    return found


def files_at(place: Place) -> list[Path]:
    """The files of a plug-in."""
    return sorted(modules_at(place))


def files_of(module: ModuleType | None) -> list[Path]:
    """The same for a module that was imported; standard input and notebooks have none."""
    start = getattr(module, "__file__", None)
    if module is None or not start or not Path(start).is_file():
        return []
    path = Path(start).resolve()
    levels = module.__name__.count(".") + (path.name == "__init__.py")
    return files_at(Place(module.__name__, path, path.parents[levels]))


def located(name: str, beside: Path | None) -> Path | None:
    """The file of a module that may not be imported yet: where Python would find it, or beside the plug-in."""
    module = sys.modules.get(name)
    if module is not None:
        return Path(file) if (file := getattr(module, "__file__", None)) else None
    first, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(first)  # of a first name this imports nothing
    except (ImportError, ValueError):
        spec = None
    if spec is None and beside is not None:
        spec = PathFinder.find_spec(first, [str(beside)])
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", list(spec.submodule_search_locations))
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def installed(path: Path) -> bool:
    """Whether a file belongs to Python, to an installed package or to this one."""
    return bool({"site-packages", "dist-packages"} & {*path.parts}) or any(map(path.is_relative_to, _places()))


@functools.cache
def _places() -> list[Path]:
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return [Path(folder).resolve() for folder in (*folders, str(PACKAGE))]


def imports(path: Path, called: str) -> Iterator[str]:
    """Names of the modules that a file imports anywhere in it, and of the packages they are in."""
    package = called if path.name == "__init__.py" else called.rpartition(".")[0]
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise InputError(f"The plug-in file '{path}' is not Python: {error.msg}, line {error.lineno}.") from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"The plug-in file '{path}' cannot be read: {error}.") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, [*package.split(".")[: len(package.split(".")) - node.level + 1], base]))
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif (called_by_name := _literal_import(node, package)) is not None:
            names = [called_by_name]
        else:
            continue
        for name in filter(None, names):
            parts = name.split(".")
            yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def _literal_import(node: ast.AST, package: str) -> str | None:
    """What `importlib.import_module("name")`, also with a package, or `__import__("name")` names."""
    if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
        return None
    function, name = node.func, node.args[0].value
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if called not in ("import_module", "__import__") or not isinstance(name, str):
        return None
    if not name.startswith("."):
        return name
    given = [*node.args[1:2], *(word.value for word in node.keywords if word.arg == "package")]
    told = given[0].value if given and isinstance(given[0], ast.Constant) else package  # __name__, __package__
    try:
        return importlib.util.resolve_name(name, str(told))
    except ImportError:
        return None


def _listed(path: Path, called: str) -> list[str]:
    """What a package's `__all__` lists: `from package import *` imports those that are modules."""
    found = []
    for node in ast.parse(path.read_bytes()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(getattr(target, "id", "") == "__all__" for target in targets):
            words = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            found += [f"{called}.{word}" for word in words if isinstance(word, str)]
    return found


def hashed(paths: Iterable[Path]) -> dict[Path, str]:
    """Files and their SHA-256."""
    found = {}
    for path in paths:
        try:
            found[path] = sha256(path)
        except OSError as error:
            raise InputError(f"The plug-in file '{path}' cannot be read: {error.strerror}.") from None
    return found


def named(files: Mapping[Path, T]) -> dict[str, T]:
    """What is known of files by their place below the folder that holds all of them."""
    common = os.path.commonpath([path.parent for path in files]) if files else ""
    return {path.relative_to(common).as_posix(): known for path, known in files.items()}


@functools.cache
def package_digest() -> str:
    """Twelve hex digits of this package's own files: a version number does not tell edited sources apart."""
    found = hashlib.sha256()
    for path, content in hashed(sorted(p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".toml"))).items():
        found.update(f"{path.relative_to(PACKAGE).as_posix()} {content}\n".encode())
    return found.hexdigest()[:12]
