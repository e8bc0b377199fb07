"""metrics.jsonl: one JSON object a line, appended as a run goes on.

Every line ends with a check of itself and of all lines before it, so that a changed, lost or doubled line is noticed.
A line `saved` follows each checkpoint once it is on disk: the file never knows less than the checkpoints do.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepformer import files
from stepformer.errors import InputError, StepformerWarning

_CHECKED = re.compile(rb'(.*), "check": "([0-9a-f]{8})"\}', re.DOTALL)
LONGEST = 1 << 24  # bytes of a line: coefficients of every layer are in some


@dataclass
class Lines:
    """What a metrics file holds: its entries, the lines as they stand there, and sentences about what is wrong."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    check: int = 0  # of the last line
    unchecked: int = 0  # lines of version 0.5.0

    @property
    def saved(self) -> int | None:
        """The newest step that a checkpoint was written of."""
        return max((entry["step"] for entry in self.entries if entry["kind"] == "saved"), default=None)


def read_lines(path: Path) -> Lines:
    """Every line of a metrics file; a last one cut by a kill is left out."""
    found, started = Lines(), False
    for number, line in enumerate(_split(path), 1):
        whole = line.endswith(b"\n")
        body, told = _parted(line.rstrip(b"\n"))
        try:
            entry = files.loads(body.decode(), "")
            if not isinstance(entry, dict) or entry.get("kind") not in KINDS or not _whole(entry.get("step")):
                raise ValueError
        except (InputError, ValueError):
            if whole:
                found.faults.append(f"line {number} is damaged")
                found.check = zlib.crc32(body, found.check)
            continue
        if not whole:
            continue
        found.check = zlib.crc32(body, found.check)
        if told is None:
            found.unchecked += 1
            if started:
                found.faults.append(f"line {number} has no check")
        elif told != found.check:
            found.faults.append(f"line {number} was changed, or does not follow the line before it")
            found.check = told  # what comes after it may be whole
        started = started or told is not None
        found.entries.append(entry)
        found.raw.append(line)
    return found


KINDS = ("train", "eval", "saved")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _split(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while line := file.readline(LONGEST):
                yield line
    except FileNotFoundError:
        raise InputError(f"There is no metrics file '{path}'.") from None
    except OSError as error:
        raise InputError(f"The metrics file '{path}' cannot be read: {error.strerror}.") from None


def _parted(line: bytes) -> tuple[bytes, int | None]:
    """A line without its check, and the check."""
    found = _CHECKED.fullmatch(line)
    return (found[1] + b"}", int(found[2], 16)) if found else (line, None)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a metrics file, once it is known to be whole; a last line cut by a kill is left out."""
    lines = read_lines(path)
    if lines.faults:
        raise InputError(f"The metrics file '{path}' is damaged: {lines.faults[0]}.")
    warn_unchecked(lines)
    return iter(lines.entries)


def warn_unchecked(lines: Lines) -> None:
    if lines.unchecked:
        warnings.warn(
            "Lines of a metrics file have no checks, as in version 0.5.0: a change to them would not be noticed.",
            StepformerWarning,
            stacklevel=1,
        )


class Metrics:
    """The file of a run that trains, opened for more; lines beyond a resumed step are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = lines_until(path, step) if path.exists() else []
        if path.exists():
            with files.writing(path) as file:
                file.writelines(kept)
        self.check = read_lines(path).check if path.exists() else 0
        self._lock = threading.Lock()  # a checkpoint is written by another thread
        with files.explained(path):
            self._file = path.open("ab")

    def write(self, **values: Any) -> None:
        body = json.dumps(values).encode()
        with files.explained(self.path), self._lock:
            self.check = zlib.crc32(body, self.check)
            self._file.write(body[:-1] + f', "check": "{self.check:08x}"}}\n'.encode())
            self._file.flush()

    def sync(self) -> None:
        """Hand all lines to the disk."""
        with files.explained(self.path), self._lock:
            os.fsync(self._file.fileno())

    def saved(self, step: int) -> None:
        """Note a checkpoint that is on disk."""
        self.write(kind="saved", step=step)
        self.sync()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def lines_until(path: Path, step: int) -> list[bytes]:
    """The lines of a metrics file up to a step, as they stand there; none may be damaged."""
    lines = read_lines(path)
    kept = [i for i, entry in enumerate(lines.entries) if entry["step"] <= step]
    if lines.faults and kept:
        raise InputError(f"The metrics file '{path}' is damaged: {lines.faults[0]}.")
    return [lines.raw[i] for i in kept]
