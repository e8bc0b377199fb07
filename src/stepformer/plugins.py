"""Rules that live outside the package: import a file or module, and what it registers has a name here too."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from stepformer.errors import InputError, StepformerError


def load_plugin(where: str) -> ModuleType:
    """Import `rules.py`, `folder/rules.py` or `package.module`; its decorators register what it defines."""
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise InputError(f"There is no plug-in file '{where}'.")
        return import_file(Path(where))
    try:
        return importlib.import_module(where)
    except Exception as error:
        raise InputError(f"The plug-in module '{where}' cannot be imported: {str(error).rstrip('.')}.") from error


def import_file(path: Path) -> ModuleType:
    """Import one Python file, once; a file of a package is imported as that package's module."""
    path = path.resolve()
    top, parts = path.parent, [path.stem]
    while (top / "__init__.py").is_file():
        parts.insert(0, top.name)
        top = top.parent
    try:
        if len(parts) > 1:
            if str(top) not in sys.path:
                sys.path.append(str(top))
            return importlib.import_module(".".join(parts))
        name = f"stepformer_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]
    except Exception as error:
        if len(parts) == 1:
            sys.modules.pop(name, None)
        reason = str(error) if isinstance(error, StepformerError) else f"{type(error).__name__}: {error}"
        raise InputError(f"The file '{path.name}' failed to load: {reason.rstrip('.')}.") from error
