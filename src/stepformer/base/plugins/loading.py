"""Importing plug-ins: what their decorators register has a name here too."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.util
import sys
import traceback
from collections.abc import Container, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from stepformer.base.errors import ChangedRuleError, ComponentError, InputError, StepformerError
from stepformer.base.plugins.sources import Place, files_at, files_of, hashed, imports, modules_at, named, place_of
from stepformer.base.plugins.trusting import name_files, refuse_untrusted
from stepformer.base.version import PACKAGE

_IMPORTED: dict[str, dict[Path, str]] = {}  # module -> its files and their hashes when this process imported it
_LOADED: dict[str, str] = {}  # module -> the plug-in's file or name, for those that this process imported


def load_plugin(where: str) -> ModuleType:
    """Import `rules.py`, `folder/rules.py` or `package.module`, which the user has named."""
    place = place_of(where)
    name_files(files_at(place))
    return _load(where, place)


def load_plugins(plugins: Iterable[str]) -> None:
    """Import all that a call was given."""
    for where in lasting(plugins):
        load_plugin(where)


def _load(where: str, place: Place) -> ModuleType:
    if where.endswith(".py"):
        module = import_file(Path(where))
    else:
        BESIDE.add(place)
        try:
            module = importlib.import_module(where)
        except Exception as error:
            raise InputError(f"The plug-in module '{where}' cannot be imported: {str(error).rstrip('.')}.") from error
    refuse_edited(module)
    _refuse_other_helpers(module, place)
    _LOADED.setdefault(module.__name__, where)
    return module


def load_recorded(plugins: Sequence[str], then: Mapping[str, Mapping[str, str]], run: Path) -> list[str]:
    """Import the plug-ins that a run's record names, if they are trusted and what they were; returns where they are.

    One that the user has named from another place is taken from there.
    """
    what, found, names = f"The run '{run}'", list[str](), list[str]()
    for where in plugins:
        names.append(called(where, names))
        known = {*then.get(names[-1], {}).values()}
        here = [w for m, w in _LOADED.items() if known and {*_IMPORTED.get(m, {}).values()} == known]
        if here:
            found.append(here[0])
            continue
        try:
            place = place_of(where)
        except InputError as error:
            kept = f" A copy of it lies in '{run / 'plugins'}': save its .py.txt as .py." * (run / "plugins").is_dir()
            raise InputError(f"{error}{kept}") from None
        files = hashed(files_at(place))
        refuse_changed(then, {names[-1]: named(files)}, what)  # an edited file may not even load
        refuse_untrusted(files, where, run)
        _load(where, place)
        found.append(where)
    return found


def called(where: str, taken: Container[str] = ()) -> str:
    """What an identity calls a plug-in; with a mark if another one has the name, too."""
    name = f"plug-in '{Path(where).name}'"
    while name in taken:
        name += "'"
    return name


def lasting(plugins: Iterable[str]) -> list[str]:
    """Plug-ins each once, files by their whole path: a run is opened from other folders, too."""
    given = [plugins] if isinstance(plugins, str) else map(str, plugins)
    return list(dict.fromkeys(str(Path(where).resolve()) if Path(where).is_file() else where for where in given))


def loaded() -> dict[str, dict[str, str]]:
    """The plug-ins that this process has imported for whatever run, with their files as they were then. One that does
    more than register rules has done it to all of them.
    """
    found: dict[str, dict[str, str]] = {}
    for module, where in _LOADED.items():
        found[called(where, found)] = named(_IMPORTED.get(module, {}))
    return found


class _Source(SourceFileLoader):
    """Runs a file as it is: Python takes bytecode for its own if that says so, whoever wrote it."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


class _Beside(importlib.abc.MetaPathFinder):
    """Finds the modules that plug-ins consist of, whenever they are imported. Their folders are not on Python's path:
    that would also give away what nobody asked them for, a missing package of this program's say.
    """

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        file = self.files.get(name)
        if file is not None:
            return spec_of(name, file)
        if name.rpartition(".")[0] in self.files and PathFinder.find_spec(name, path) is not None:
            raise ImportError(
                f"'{name}' is imported in a way that shows only while the plug-in runs, so nobody has vouched for it: "
                "name it in an import statement"
            )
        return None

    def add(self, place: Place) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for path, name in modules_at(place).items():
            if path.suffix == ".py" and name not in sys.stdlib_module_names:
                self.files.setdefault(name, path)


def spec_of(name: str, path: Path) -> ModuleSpec | None:
    inside = [str(path.parent)] if path.name == "__init__.py" else None
    loader = _Source(name, str(path))
    return importlib.util.spec_from_file_location(name, path, loader=loader, submodule_search_locations=inside)


BESIDE = _Beside()


def remember_files(module: ModuleType) -> None:
    """Note what the files behind a module are while it registers something; they may be edited before it is used."""
    with contextlib.suppress(InputError):
        _IMPORTED.setdefault(module.__name__, hashed(files_of(module)))


def refuse_edited(module: ModuleType) -> None:
    """A sentence if a file behind a module is not what it was when this process imported it."""
    found = hashed(files_of(module))
    known = _IMPORTED.setdefault(module.__name__, found)
    for path, now in found.items():
        if known.setdefault(path, now) != now:
            raise ChangedRuleError(
                f"The plug-in file '{path}' was changed after this process imported it ({known[path][:12]}, now "
                f"{now[:12]}): two rules under one name. Start again to use the new one."
            )


def _refuse_other_helpers(module: ModuleType, place: Place) -> None:
    """A sentence if a plug-in got another file than the one beside it, because a module of that name was there."""
    sources = [path for path in files_of(module) if path.suffix == ".py"]
    names = {name for path in sources for name in imports(path, module.__name__ if path == place.path else "")}
    for name in sorted(names - sys.stdlib_module_names):
        got = getattr(sys.modules.get(name), "__file__", None)
        for wanted in (place.path.parent / f"{name}.py", place.path.parent / name / "__init__.py"):
            if got and wanted.is_file() and Path(got).resolve() != wanted.resolve():
                raise InputError(
                    f"The plug-in '{place.path.name}' imports '{name}' and got '{got}', not the one beside it: give "
                    "one of the two another name."
                )


def import_file(path: Path) -> ModuleType:
    """Import one Python file, once; a file of a package is imported as that package's module."""
    place = place_of(str(path))
    path = place.path
    for known in list(sys.modules.values()):  # another plug-in imported it, or it is the program that runs
        file = str(getattr(known, "__dict__", {}).get("__file__"))  # not getattr: a lazy module would import something
        if file.endswith(path.name) and Path(file).resolve() == path:
            return known
    alone = "." not in place.name
    name = f"stepformer_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}" if alone else place.name
    try:
        BESIDE.add(place)
        if not alone:
            module = importlib.import_module(name)
            found = Path(str(module.__file__)).resolve()
            if found != path:
                raise InputError(f"another '{name}' comes first on Python's path, '{found}'")
            return module
        spec = spec_of(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        if path.stem not in sys.stdlib_module_names:
            sys.modules.setdefault(path.stem, sys.modules[name])  # for another plug-in of its folder
        return sys.modules[name]
    except Exception as error:
        if alone:
            sys.modules.pop(name, None)
        raise InputError(f"The file '{path.name}' failed to load: {explained(error).rstrip('.')}.") from error


IN_PLACE = "modified by an inplace operation"  # how torch says it


def explained(error: Exception) -> str:
    """An exception in a sentence, with the place it came from unless it already is a sentence for users."""
    if isinstance(error, StepformerError):
        return str(error)
    if IN_PLACE in str(error):  # raised in the backward pass, where no line of the rule is seen
        return "Something changes a tensor in place (mul_, +=) that the backward pass needs: it must make a new tensor."
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if "torch" not in Path(f.filename).parts and not f.filename.startswith(str(PACKAGE))]
    place = (outside or frames)[-1]  # the rule's own line rather than the library's
    return f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}: {error}"


def comes_from_plugin(error: Exception) -> bool:
    """Whether a file of a plug-in was at work when it was raised, or gave what it should not."""
    known = {str(path) for files in _IMPORTED.values() for path in files}
    if known and IN_PLACE in str(error):
        return True
    return isinstance(error, ComponentError) or any(
        frame.filename in known for frame in traceback.extract_tb(error.__traceback__)
    )


def refuse_changed(
    then: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]], what: str, rules: Container[str] = ()
) -> None:
    """A sentence if a plug-in or rule is not what it was; one of `rules` that has no identity now is the package's."""
    for name in then:
        if name not in now:
            if name in rules:
                raise ChangedRuleError(f"{what} was made with a {name} of its own; the package has one now, too.")
            continue
        old, new = then[name], now[name]
        same = all(old[file] == new[file] for file in old.keys() & new.keys())
        if same and sorted(old.values()) == sorted(new.values()):  # a copy under another name is the same rule
            continue
        for file in sorted({*old, *new}):
            before, after = (known.get(file, "none")[:12] for known in (old, new))
            if before != after:
                raise ChangedRuleError(
                    f"{what} was made with another {name}: SHA-256 of {file} was {before}, now {after}. A changed rule "
                    "is another rule: give it a name of its own, and new runs beside it another folder. What it was "
                    "lies in the run's folder 'plugins': copy its .py.txt to .py and name that with --plugin."
                )
