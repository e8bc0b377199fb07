"""What `make dist` has built, looked at and tried: the files of both archives, then every kind of command in an
environment and a folder that have nothing else.

    python tests/support/released.py dist
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser
from fnmatch import fnmatch
from pathlib import Path

from stepformer.base.version import __version__

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "src/stepformer/"
BESIDE = ("CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "constraints.txt", "pyproject.toml")
SHORT = ("steps=4", "count=300", "batch=4", "eval_every=2", "eval_tokens=1024")
COMMANDS = (
    ("--version",),
    ("recipes",),
    ("list",),
    ("show", "yurii", "--cite"),
    ("audit", "yurii", "--steps", "60"),
    ("demo", *SHORT),
    ("train", "tmm", "--out", "run", "--quiet", *SHORT),
    ("generate", "run", "Once upon", "--tokens", "20"),
    ("report", "run", "--out", "report"),
)


def tracked() -> list[str]:
    """The files of the package that git knows, relative to it."""
    listed = subprocess.run(["git", "ls-files", SOURCE], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name.removeprefix(SOURCE) for name in listed.stdout.splitlines()]


def undeclared(names: Iterable[str]) -> list[str]:
    """Files that are neither Python nor fit a pattern of package-data in pyproject.toml: no wheel would have them."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["stepformer"]
    found = {path.relative_to(ROOT / SOURCE).as_posix() for p in patterns for path in (ROOT / SOURCE).glob(p)}
    return [name for name in names if not name.endswith(".py") and name not in found]


def problems(folder: Path, version: str) -> list[str]:
    """Every sentence about what is missing in the archives, or too much."""
    wheels, archives = list(folder.glob("*.whl")), list(folder.glob("*.tar.gz"))
    if [path.name for path in wheels + archives] != [
        f"stepformer-{version}-py3-none-any.whl",
        f"stepformer-{version}.tar.gz",
    ]:
        return [f"'{folder}' should hold one wheel and one archive of version {version}."]
    meant = set(tracked())
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = wheel.namelist()
        about = HeaderParser().parsestr(wheel.read(f"stepformer-{version}.dist-info/METADATA").decode())
    inside = {name.removeprefix("stepformer/") for name in names if name.startswith("stepformer/")}
    with tarfile.open(archives[0]) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    needed = {*BESIDE, *(SOURCE + name for name in meant)}
    return [
        *(f"The wheel lacks stepformer/{name}." for name in sorted(meant - inside)),
        *(f"The wheel has stepformer/{name}, which git does not know." for name in sorted(inside - meant)),
        *(f"The wheel installs {name}." for name in names if not fnmatch(name, "stepformer[-/]*")),
        *(f"The archive lacks {name}." for name in sorted(needed - sources)),
        *([] if about["Version"] == version else [f"The wheel calls itself {about['Version']}."]),
    ]


def tried(wheel: Path) -> None:
    """Install the wheel with what the demo needs in a new environment; run commands in an empty folder."""
    with tempfile.TemporaryDirectory() as place:
        home, empty = Path(place, "environment"), Path(place, "empty")
        empty.mkdir()
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "STEPFORMER"))}
        venv.create(home, with_pip=True)
        quiet = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
        subprocess.run([*quiet, f"{wheel.resolve()}[plot]"], env=clean, check=True)
        for words in COMMANDS:
            done = subprocess.run(
                [home / "bin" / "stepformer", *words], cwd=empty, env=clean, text=True, capture_output=True
            )
            if done.returncode:
                raise SystemExit(f"stepformer {' '.join(words)}: status {done.returncode}\n{done.stdout}{done.stderr}")
            print(f"stepformer {' '.join(words)}: good", flush=True)


def main() -> int:
    folder = Path(sys.argv[1])
    found = problems(folder, __version__)
    if found:
        print("\n".join(found))
        return 1
    tried(next(folder.glob("*.whl")))
    print(f"version {__version__} can be released: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
