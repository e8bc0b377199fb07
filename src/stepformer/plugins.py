"""Rules that live outside the package: import a file or module, and what it registers has a name here too.

A plug-in is the content of its files: a run keeps a copy of them, to be read, and their SHA-256. A file that has
changed is another rule, and a run made with the old one is not opened with it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import sysconfig
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType

from stepformer.errors import ChangedRuleError, InputError, StepformerError
from stepformer.files import sha256 as checksum

_IMPORTED: dict[str, dict[Path, str]] = {}  # module -> its files and their hashes when this process imported it
_LOADED: dict[str, str] = {}  # module -> the plug-in's file or name, for those that this process imported
_SOURCES: dict[type, str] = {}  # rule -> SHA-256 of its class when it was registered: what it counts later is its own
_USED: dict[str, str] = {}  # rule -> digest of what this process has used under that name


def load_plugin(where: str) -> ModuleType:
    """Import `rules.py`, `folder/rules.py` or `package.module`; its decorators register what it defines."""
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise InputError(f"There is no plug-in file '{where}'.")
        module = import_file(Path(where))
    else:
        try:
            with _from_source():
                module = importlib.import_module(where)
        except Exception as error:
            raise InputError(f"The plug-in module '{where}' cannot be imported: {str(error).rstrip('.')}.") from error
    _refuse_edited(module)
    _refuse_other_helpers(module)
    _LOADED.setdefault(module.__name__, where)
    return module


def lasting(plugins: Iterable[str]) -> list[str]:
    """Plug-ins each once, files by their whole path: a run is opened from other folders, too."""
    return list(dict.fromkeys(str(Path(where).resolve()) if Path(where).is_file() else where for where in plugins))


def loaded() -> dict[str, dict[str, str]]:
    """The plug-ins that this process has imported for whatever run, with their files as they were then. One that does
    more than register rules has done it to all of them.
    """
    found: dict[str, dict[str, str]] = {}
    for module, where in _LOADED.items():
        files = _IMPORTED.get(module, {})
        found[_free(f"plug-in '{Path(where).name}'", found)] = {n: files[p] for n, p in _named(list(files)).items()}
    return found


def _free(name: str, taken: Container[str]) -> str:
    """The name with a mark if another plug-in has it, too."""
    while name in taken:
        name += "'"
    return name


@contextlib.contextmanager
def _from_source() -> Iterator[None]:
    """Import files as they are: Python takes bytecode for theirs if their size and their time in seconds agree."""
    before = sys.dont_write_bytecode, sys.pycache_prefix
    sys.dont_write_bytecode, sys.pycache_prefix = True, os.devnull
    try:
        yield
    finally:
        sys.dont_write_bytecode, sys.pycache_prefix = before


def remember(component: type) -> None:
    """Note what the files behind a rule are while it is registered; they may be edited before it is used."""
    module = sys.modules.get(component.__module__)
    if not _ours(component):
        _SOURCES[component] = _source(component)
    if module is not None and not _ours(component):
        with contextlib.suppress(InputError):
            _IMPORTED.setdefault(module.__name__, {path: sha256(path) for path in files_of(module)})


def _refuse_edited(module: ModuleType) -> None:
    """A sentence if a file behind a module is not what it was when this process imported it."""
    found = {path: sha256(path) for path in files_of(module)}
    known = _IMPORTED.setdefault(module.__name__, found)
    for path, now in found.items():
        if known.setdefault(path, now) != now:
            raise ChangedRuleError(
                f"The plug-in file '{path}' was changed after this process imported it ({known[path][:12]}, now "
                f"{now[:12]}): two rules under one name. Start again to use the new one."
            )


def _refuse_other_helpers(module: ModuleType) -> None:
    """A sentence if a plug-in got another file than the one beside it, because a module of that name was there."""
    own = Path(str(getattr(module, "__file__", None) or ""))
    sources = [path for path in files_of(module) if path.suffix == ".py"]
    names = {name for path in sources for name in _imports(path, module.__name__ if path == own.resolve() else "")}
    for name in sorted(names - sys.stdlib_module_names):
        got = getattr(sys.modules.get(name), "__file__", None)
        for wanted in (own.parent / f"{name}.py", own.parent / name / "__init__.py"):
            if got and wanted.is_file() and Path(got).resolve() != wanted.resolve():
                raise InputError(
                    f"The plug-in '{own.name}' imports '{name}' and got '{got}', not the one beside it: give one of "
                    "the two another name."
                )


def import_file(path: Path) -> ModuleType:
    """Import one Python file, once; a file of a package is imported as that package's module."""
    path = path.resolve()
    top, parts = path.parent, [path.stem]
    while (top / "__init__.py").is_file():
        parts.insert(0, top.name)
        top = top.parent
    for known in list(sys.modules.values()):  # another plug-in imported it, or it is the program that runs
        file = str(getattr(known, "__dict__", {}).get("__file__"))  # not getattr: a lazy module would import something
        if file.endswith(path.name) and Path(file).resolve() == path:
            return known
    try:
        if len(parts) > 1:
            if str(top) not in sys.path:
                sys.path.append(str(top))
            with _from_source():
                module = importlib.import_module(".".join(parts))
            found = Path(str(module.__file__)).resolve()
            if found != path:
                raise InputError(f"another '{'.'.join(parts)}' comes first on Python's path, '{found}'")
            return module
        name = f"stepformer_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            if str(top) not in sys.path:  # for files beside it
                sys.path.append(str(top))
            with _from_source():
                spec.loader.exec_module(sys.modules[name])
            if path.stem not in sys.stdlib_module_names:
                sys.modules.setdefault(path.stem, sys.modules[name])  # for another plug-in of its folder
        return sys.modules[name]
    except Exception as error:
        if len(parts) == 1:
            sys.modules.pop(name, None)
        reason = str(error) if isinstance(error, StepformerError) else f"{type(error).__name__}: {error}"
        raise InputError(f"The file '{path.name}' failed to load: {reason.rstrip('.')}.") from error


# What a plug-in consists of.


def sha256(path: Path) -> str:
    try:
        return checksum(path)
    except OSError as error:
        raise InputError(f"The plug-in file '{path}' cannot be read: {error.strerror}.") from None


def files_of(module: ModuleType) -> list[Path]:
    """A plug-in's file and those it imports, directly or not; installed packages are not part of it, save its own."""
    own = module.__name__.partition(".")[0]
    start = getattr(module, "__file__", None)
    waiting, found = list[tuple[str, Path]](), dict[Path, None]()
    if start and Path(start).is_file():  # standard input is no file
        waiting.append((module.__name__, Path(start)))
    while waiting:
        called, path = waiting.pop()
        path = path.resolve()
        if path in found or (_installed(path) and called.partition(".")[0] != own):
            continue
        found[path] = None
        if path.suffix != ".py":  # a compiled helper
            continue
        waiting += [(name, found_at) for name in _imports(path, called) if (found_at := _located(name)) is not None]
    return sorted(found)


def _located(name: str) -> Path | None:
    """The file of a module that may not be imported yet: a helper that is imported inside a function, say."""
    module = sys.modules.get(name)
    if module is not None:
        return Path(file) if (file := getattr(module, "__file__", None)) else None
    parent = name.rpartition(".")[0]
    if parent and parent not in sys.modules:
        return None  # to find it, its package would have to be imported
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _installed(path: Path) -> bool:
    """Whether a file belongs to Python, to an installed package or to this one."""
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    if {"site-packages", "dist-packages"} & {*path.parts}:
        return True
    return any(path.is_relative_to(Path(place).resolve()) for place in (*places, str(Path(__file__).parent)))


def _imports(path: Path, called: str) -> Iterator[str]:
    """Names of the modules that a file imports anywhere in it, and of the packages they are in."""
    package = called if path.name == "__init__.py" else called.rpartition(".")[0]
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise InputError(f"The plug-in file '{path}' cannot be read: {error}.") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, [*package.split(".")[: len(package.split(".")) - node.level + 1], base]))
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif (called_by_name := _literal_import(node)) is not None:
            names = [called_by_name]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def _literal_import(node: ast.AST) -> str | None:
    """What `importlib.import_module("name")` or `__import__("name")` names."""
    if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
        return None
    function, name = node.func, node.args[0].value
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name if called in ("import_module", "__import__") and isinstance(name, str) else None


@functools.cache
def package_digest() -> str:
    """Twelve hex digits of this package's own files: a version number does not tell edited sources apart."""
    root = Path(__file__).parent
    found = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".toml")):
        found.update(f"{path.relative_to(root).as_posix()} {sha256(path)}\n".encode())
    return found.hexdigest()[:12]


def named_files(where: str) -> dict[str, Path]:
    """The files of a plug-in by their place below the folder that holds all of them."""
    return _named(files_of(load_plugin(where)))


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    if not paths:
        return {}
    common = max(set.intersection(*(set(path.parents) for path in paths)), key=lambda folder: len(folder.parts))
    return {path.relative_to(common).as_posix(): path for path in paths}


def identity(plugins: Sequence[str], rules: Mapping[str, type]) -> dict[str, dict[str, str]]:
    """Of every plug-in, and of every component that is not of this package, its files and their SHA-256."""
    found: dict[str, dict[str, str]] = {}
    for where in plugins:
        found[_free(f"plug-in '{Path(where).name}'", found)] = _hashed(named_files(where))
    for name, component in rules.items():
        if _ours(component):
            continue
        module = sys.modules.get(component.__module__)
        files = _named(files_of(module)) if module is not None else {}
        if module is not None and files:
            _refuse_edited(module)
        found[name] = _hashed(files) if files else {"source": _class(component)}  # a notebook has no file
        now = digest({**found[name], "class": _class(component)})  # one file may register two of them
        used = _USED.setdefault(name, now)
        if used != now:
            raise ChangedRuleError(
                f"This process has already used another {name} ({used}, now {now}): two rules under one name. Register "
                "the new one under another name, or start again."
            )
    return found


def sources_of(plugins: Sequence[str], rules: Mapping[str, type]) -> list[dict[str, Path]]:
    """The files behind `identity`, each set of them once."""
    found = [named_files(where) for where in plugins]
    modules = [sys.modules.get(component.__module__) for component in rules.values() if not _ours(component)]
    found += [_named(files_of(module)) for module in modules if module is not None]
    return [files for i, files in enumerate(found) if files and files not in found[:i]]


def _hashed(files: Mapping[str, Path]) -> dict[str, str]:
    return {name: sha256(path) for name, path in files.items()}


def _ours(component: type) -> bool:
    return component.__module__.partition(".")[0] == __name__.partition(".")[0]


def _class(component: type) -> str:
    return _SOURCES.get(component) or _source(component)


def _source(component: type) -> str:
    """SHA-256 of what a class without a file says: its methods, also inherited ones, and its settings."""
    parts = []
    for cls in component.__mro__:
        if cls is object or _ours(cls):
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


def unread_identity(plugins: Sequence[str], then: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """The recorded plug-ins with the file itself as it is now, without importing it."""
    found = {}
    for where in plugins:
        name, path = f"plug-in '{Path(where).name}'", Path(where)
        own = [file for file in then.get(name, {}) if Path(file).name == path.name]
        if path.is_file() and len(own) == 1 and len([w for w in plugins if Path(w).name == path.name]) == 1:
            found[name] = {**then[name], own[0]: sha256(path)}
    return found


def refuse_changed(
    then: Mapping[str, Mapping[str, str]],
    now: Mapping[str, Mapping[str, str]],
    what: str,
    rules: Collection[str] = (),
) -> None:
    """A sentence if a plug-in or rule is not what it was; one of `rules` that has no identity now is the package's."""
    for name in then:
        if name not in now:
            if name in rules:
                raise ChangedRuleError(f"{what} was made with a {name} of its own; the package has one now, too.")
            continue
        old, new = then[name], now[name]
        for file in sorted({*old, *new}):
            before, after = (known.get(file, "none")[:12] for known in (old, new))
            if before != after:
                raise ChangedRuleError(
                    f"{what} was made with another {name}: SHA-256 of {file} was {before}, now {after}. A changed rule "
                    "is another rule: give it a name of its own. What it was lies in the run's folder 'plugins'."
                )
