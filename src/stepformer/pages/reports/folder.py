"""The folder of a report: only files of an earlier report are written over.

The page and report.md say themselves whose they are. The others, a comparison.csv say, are known by a list in the
report's cache; a report without the list, an older one, is taken to own them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from stepformer.base.errors import InputError
from stepformer.base.files import clear_left, read_json, write_json
from stepformer.pages.reports.paper import FIRST_LINE

SIGNS = {"index.html": '<meta name="generator" content="stepformer ', "report.md": FIRST_LINE}
HEAD = 2000  # bytes of a file in which its sign is
LIST = Path(".cache") / "files.json"


def refuse_foreign(out: Path, names: Sequence[str]) -> None:
    """Stop if a file that a report would write is there and is not a report's."""
    for name in names:
        if os.path.lexists(out / name) and not _ours(out, name):
            raise InputError(
                f"'{out / name}' was not made by a report and would be written over: name another folder with --out."
            )


def hold(out: Path) -> None:
    """Make the folder, or say that it cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The folder --out '{out}' cannot be made: {error.strerror or error}.") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise InputError(f"The folder --out '{out}' may not be written.")


def claim(out: Path, names: Sequence[str]) -> None:
    """Note the files that will be written, before they are: a report that is interrupted knows its own. What a killed
    one left half-written is cleared away.
    """
    refuse_foreign(out, names)
    for name in (*names, str(LIST), str(LIST.with_name("models.jsonl"))):
        clear_left(out / name)
    write_json(out / LIST, sorted({*names, *(_listed(out) or [])}))


def _ours(out: Path, name: str) -> bool:
    if name in SIGNS:
        return _signed(out, name)
    listed = _listed(out)
    return name in listed if listed is not None else _signed(out, "index.html")


def _signed(out: Path, name: str) -> bool:
    try:
        with (out / name).open("rb") as file:
            return SIGNS[name].encode() in file.read(HEAD)
    except OSError:
        return False


def _listed(out: Path) -> list[str] | None:
    try:
        found = read_json(out / LIST, "list of files")
    except InputError:  # there is none, or it is damaged
        return None
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else None
