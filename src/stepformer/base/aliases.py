"""Import paths of earlier versions, which pages, plug-ins and exported models may still name."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

# path below `stepformer.` as it was -> as it is; what lies below a path moves with it
MOVED = {
    "adapters": "ops.adapters",
    "architectures": "catalogue.architectures",
    "beams": "decoding.beams",
    "benchmark": "measure.benchmark",
    "block": "model.block",
    "comparing": "study",
    "config": "model.config",
    "diagnostics": "measure.diagnostics",
    "documents": "base.documents",
    "errors": "base.errors",
    "evaluation": "measure.evaluation",
    "files": "base.files",
    "flows": "measure.flows",
    "generation": "decoding.sampling",
    "huggingface": "exchange.huggingface",
    "importing": "exchange.importing",
    "kernels": "ops",
    "measured": "measure.measured",
    "memory": "training.memory",
    "options": "base.options",
    "plugins": "base.plugins",
    "recipes": "catalogue.recipes",
    "references": "catalogue.references",
    "registry": "base.registry",
    "reports": "pages.reports",
    "roles": "model.roles",
    "schemes": "rules",
    "serving": "pages.serving",
    "settings": "base.settings",
    "sharding": "ops.sharding",
    "tables": "present.tables",
}
PACKAGE = __name__.partition(".")[0]


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
