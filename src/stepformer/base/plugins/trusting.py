"""Whose code may run: plug-ins that the user names, and those on the user's own list.

A run folder names the plug-ins it was made with, and opening it would import them. They are imported only if every one
of their files is, by its SHA-256, among what the user named with --plugin, has trained with, or has trusted with
`stepformer trust RUN`. The list lies outside every run folder: ~/.config/stepformer/trusted.json.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import warnings
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from stepformer.base import documents, files
from stepformer.base.errors import InputError, StepformerError, StepformerWarning
from stepformer.base.plugins.sources import hashed

_NAMED: set[str] = set()  # SHA-256 of files that this process was told to import


class UntrustedError(InputError):
    """A run wants to import code that the user has neither named nor trusted."""


def place_of_list() -> Path:
    """Where the list lies: in $STEPFORMER_TRUSTED, or in the user's folder for settings."""
    given = os.environ.get("STEPFORMER_TRUSTED", "")
    settings = os.environ.get("XDG_CONFIG_HOME", "") or Path.home() / ".config"
    return Path(given) if given else Path(settings) / "stepformer" / "trusted.json"


def trusted() -> dict[str, dict[str, Any]]:
    """The files on the list: their SHA-256, and what they were called when."""
    path = place_of_list()
    if not path.is_file():
        return {}
    found: dict[str, dict[str, Any]] = documents.read(path, documents.TRUSTED)["files"]
    return found


def trust(paths: Iterable[Path]) -> None:
    """Add files to the list; a note if that cannot be written."""
    today = date.today().isoformat()
    new = {content: {"name": str(path), "since": today} for path, content in hashed(paths).items()}
    path = place_of_list()
    try:
        if not new or not new.keys() - trusted().keys():
            return
        with files.explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with (path.parent / "trusted.lock").open("a") as lock:  # jobs of a study write at the same time
                fcntl.flock(lock, fcntl.LOCK_EX)
                whole = {"format": documents.TRUSTED.format, "files": {**new, **trusted()}}
                files.write_json(path, whole, sealed=False)  # the user's own, who may take something out
    except StepformerError as error:
        warnings.warn(f"{error} Plug-ins have to be named with --plugin again.", StepformerWarning, stacklevel=2)


def name_files(paths: Iterable[Path]) -> None:
    """Remember files that this process was told to import."""
    _NAMED.update(hashed(paths).values())


def refuse_untrusted(contents: Mapping[Path, str], where: str, run: Path) -> None:
    """A sentence if one of the files of a run's plug-in `where` was neither named nor trusted."""
    known = {*_NAMED, *trusted()}
    for path, content in contents.items():
        if content not in known:
            raise UntrustedError(
                f"The run '{run}' needs code of its own, '{path}' (SHA-256 {content[:12]}), which you have not "
                f"trusted: read it, then name it with --plugin {shlex.quote(where)} or trust it with `stepformer trust "
                f"{shlex.quote(str(run))}`."
            )
