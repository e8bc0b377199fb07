"""The order of the house: which folder may import which, and what only `ops/` may name (CONTRIBUTING.md).

`make lint` runs this file. It reads the sources without importing them, so type-only imports and those inside
functions count. import-linter knows layers, but neither CUDA graphs nor sharded tensors, which are attributes of
torch and not imports of a package.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = (
    *("base", "ops", "rules", "oracles", "extras", "decoding", "model", "catalogue", "data", "optim", "training"),
    *("present", "measure", "study", "exchange", "pages", "cli"),
)
ROOT_FILES = {"__init__.py", "__main__.py", "py.typed"}
# Triton; graphs; tensors that are spread over ranks
ONLY_IN_OPS = re.compile(r"\btriton\b|\bCUDAGraph\b|\bcuda\.graphs?\b|\bDTensor\b|\bdistributed\.tensor\b")


def problems(package: Path) -> list[str]:
    """Every sentence about what breaks the order; empty if nothing does."""
    found = [
        f"{path.name}: at the root of the package there are only {', '.join(sorted(ROOT_FILES))} and folders."
        for path in sorted(package.iterdir())
        if (path.is_file() and path.name not in ROOT_FILES)
        or (path.is_dir() and path.name not in FOLDERS and _has_sources(path))
    ]
    modules = {_name(path, package): path for path in sorted(package.rglob("*.py"))}
    graph = {name: list(_imported(name, path, modules)) for name, path in modules.items()}
    for name, imported in graph.items():
        here = _folder(name)
        for line, other in imported:
            there = _folder(other)
            if here and there and FOLDERS.index(there) > FOLDERS.index(here):
                found.append(
                    f"{_place(name, modules, package)}:{line}: {here}/ imports {there}/, which stands after it."
                )
            elif here and not there:
                found.append(f"{_place(name, modules, package)}:{line}: imports the root, which imports all folders.")
        if here != "ops":
            for line, node in _code(modules[name]):
                word = ONLY_IN_OPS.search(node)
                if word:
                    place = _place(name, modules, package)
                    found.append(f"{place}:{line}: names {word.group()}, which is for ops/ alone.")
    links = {name: {other for _, other in imported} for name, imported in graph.items() if _folder(name)}
    return found + [f"An import circle: {' -> '.join(circle)}." for circle in _circles(links)]


def _has_sources(folder: Path) -> bool:
    """Whether anything is in a folder but what Python compiled: git leaves that behind where a folder was moved."""
    return any(path.is_file() and path.suffix != ".pyc" for path in folder.rglob("*"))


def _name(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _place(name: str, modules: dict[str, Path], package: Path) -> str:
    return modules[name].relative_to(package).as_posix()


def _folder(name: str) -> str:
    first = name.partition(".")[0]
    return first if first in FOLDERS else ""


def _imported(name: str, path: Path, modules: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Modules of the package that a file imports anywhere in it, with the lines."""
    for node in _nodes(path.read_bytes()):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            base = node.module
            names = [f"{base}.{a.name}" if _inside(f"{base}.{a.name}") in modules else base for a in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("stepformer."):
            names = [node.value]  # for import_module
        else:
            continue
        for full in names:
            if full.split(".")[0] == "stepformer" and _inside(full) in modules and _inside(full) != name:
                yield node.lineno, _inside(full)


@functools.cache
def _nodes(source: bytes) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def _inside(full: str) -> str:
    return full.partition(".")[2]


def _code(path: Path) -> Iterator[tuple[int, str]]:
    """Imports and dotted names of a file as text, no comments and no strings; nothing of most files."""
    if not ONLY_IN_OPS.search(path.read_text(encoding="utf-8")):
        return
    for node in _nodes(path.read_bytes()):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute | ast.Name):
            yield node.lineno, ast.unparse(node)


def _circles(links: dict[str, set[str]]) -> list[list[str]]:
    """One circle through every set of modules that import each other."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            circle = trail[trail.index(name) :]
            if not any(set(circle) & set(other) for other in found):
                found.append([*circle, name])
            return
        if name in done:
            return
        for other in sorted(links.get(name, ())):
            visit(other, [*trail, name])
        done.add(name)

    for name in sorted(links):
        visit(name, [])
    return found


def main() -> int:
    package = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "src" / "stepformer"
    found = problems(package)
    print("\n".join(found) if found else "The house is in order.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
