"""Rules that live outside the package: import a file or module, and what it registers has a name here too."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from stepformer.errors import InputError


def load_plugin(where: str) -> ModuleType:
    """Import `rules.py`, `folder/rules.py` or `package.module`; its decorators register what it defines."""
    if where.endswith(".py"):
        path = Path(where).resolve()
        if not path.is_file():
            raise InputError(f"There is no plug-in file '{where}'.")
        name = f"stepformer_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise InputError(f"The plug-in '{where}' failed to load: {type(error).__name__}: {error}.") from error
        return module
    try:
        return importlib.import_module(where)
    except ImportError as error:
        raise InputError(f"The plug-in module '{where}' cannot be imported: {error}.") from error
