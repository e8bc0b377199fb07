"""Import paths: names that a package has without loading them, and paths of earlier versions.

The latter are what pages, plug-ins and exported models may still name.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

# folder below `stepformer.` -> what lay outside it once; what lies below a path moves with it
GATHERED = {
    "base": "documents errors files options plugins registry settings",
    "catalogue": "architectures recipes references",
    "decoding": "beams",
    "exchange": "huggingface importing",
    "measure": "benchmark diagnostics evaluation flows measured",
    "model": "block config roles",
    "ops": "adapters sharding",
    "pages": "reports serving",
    "present": "tables",
    "training": "memory",
}
MOVED = {name: f"{folder}.{name}" for folder, names in GATHERED.items() for name in names.split()}
MOVED |= {"comparing": "study", "generation": "decoding.sampling", "kernels": "ops", "schemes": "rules"}
PACKAGE = __name__.partition(".")[0]


def lazy(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package: what it imports under `if TYPE_CHECKING` is loaded when first asked for."""

    @functools.cache
    def homes() -> dict[str, str]:
        spec: Any = sys.modules[package].__spec__
        nodes = ast.walk(ast.parse(spec.loader.get_source(package)))
        return {name.name: str(n.module) for n in nodes if isinstance(n, ast.ImportFrom) for name in n.names}

    def find(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(importlib.import_module(homes()[name]), name)

    return find


def moved(name: str) -> str | None:
    """Where a module of an earlier version is now, both as full names; None for all that did not move."""
    package, _, path = name.partition(".")
    first, dot, rest = path.partition(".")
    if package != PACKAGE or first not in MOVED:
        return None
    return f"{PACKAGE}.{MOVED[first]}{dot}{rest}"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets an old path name the module at the new one: the same object, imported once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if moved(name) else None

    def exec_module(self, module: ModuleType) -> None:
        new = moved(module.__name__)
        assert new is not None
        try:
            sys.modules[module.__name__] = importlib.import_module(new)
        except ModuleNotFoundError as error:
            if error.name != new:
                raise
            raise ModuleNotFoundError(f"No module named '{module.__name__}'", name=module.__name__) from None


def install() -> None:
    """Understand old paths from now on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # before the search for files, which would load a second copy
