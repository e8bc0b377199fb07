"""Long measurements of a run: a progress bar, a journal that survives Ctrl-C, and the result beside the run.

RUN/measured/KIND.json         the result, with the settings, the checkpoint and the command that made it
RUN/measured/KIND.jsonl        its journal while it is being made: the same command continues from it

A run that may not be written to (somebody else's) has them here, in ./measured/NAME-DIGEST of its path.

Of a hybrid or pinned model KIND has its name behind it (`perplexity@cutoff-6`), so that the run's own numbers stay.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stepformer.base import documents, files
from stepformer.base.errors import InputError, command_line
from stepformer.base.progress import counting, say
from stepformer.base.version import __version__
from stepformer.model import Model

FOLDER = "measured"
FORMAT = 1


class Journal:
    """Finished pieces of a long measurement by name, one JSON line each.

    `about` says what is measured. A journal about something else, other settings say, is begun again. Losing power
    in the middle of a line loses that line. Without a path it is kept in memory alone.
    """

    def __init__(self, path: Path | None = None, about: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.pieces: dict[str, Any] = {}
        self.used: set[str] = set()  # names that were asked for
        self.head = json.dumps({"about": about}, sort_keys=True)
        self.check = 0
        lines = path.read_bytes().splitlines() if path is not None and path.is_file() else []
        if lines and lines[0] == self.head.encode():
            for line in lines[1:]:
                body, told = files.parted(line)
                self.check = files.chained(body, self.check)
                if told != self.check:
                    break  # what follows is computed again
                piece = json.loads(body)
                self.pieces[piece["name"]] = piece["value"]
        self.kept = len(self.pieces)  # from an interrupted measurement
        self._write()

    def _write(self) -> None:
        self.check = 0
        if self.path is None:
            return
        with files.writing(self.path) as file:
            file.write(self.head.encode() + b"\n")
            file.writelines(self._line(name, value) for name, value in self.pieces.items())

    def _line(self, name: str, value: Any) -> bytes:
        body = json.dumps({"name": name, "value": value}).encode()
        self.check = files.chained(body, self.check)
        return files.checked_line(body, self.check)

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """The piece of this name: as it was found before, or computed now and kept. Pieces are JSON values."""
        self.used.add(name)
        if name not in self.pieces:
            value = compute()
            if self.path is not None:
                with files.explained(self.path), self.path.open("ab") as file:
                    file.write(self._line(name, value))
            self.pieces[name] = value
        return self.pieces[name]

    def each(self, title: str, parts: Mapping[str, Callable[[], Any]], *, quiet: bool) -> list[Any]:
        """Several pieces, one after the other, under a progress bar."""
        found = []
        with counting(title, len(parts), quiet=quiet) as step:
            for name, compute in parts.items():
                found.append(self.get(name, compute))
                step(1)
        return found

    def close_used(self) -> None:
        """The result of what was asked for is written; what another measurement left, interrupted, stays."""
        self.pieces = {name: value for name, value in self.pieces.items() if name not in self.used}
        if self.pieces:
            self._write()
        elif self.path is not None:
            self.path.unlink(missing_ok=True)


LONGEST = 60  # letters of a variant's name in the name of a file


def variant_of(model: Model) -> dict[str, Any]:
    """What makes a model another function than the one that was trained: the momentum layers of a hybrid, and pinned
    coefficients; empty for the model itself.
    """
    banks = [(i, bank) for i, block in enumerate(model.blocks) for bank in block.banks()]
    pinned = {f"{i}.{key}": value.tolist() for i, bank in banks for key, value in bank.pinned.items()}
    momentum = [i for i in range(model.config.n_layer) if i not in model.plain_layers]
    return ({"momentum_layers": momentum} if model.plain_layers else {}) | ({"pinned": pinned} if pinned else {})


def called(model: Model) -> str:
    """A variant in few words, `cutoff 6` or `layers 0,11`; nothing for the model as it was trained."""
    words, variant = [], variant_of(model)
    if "momentum_layers" in variant:
        layers = variant["momentum_layers"]
        first = layers == list(range(len(layers)))
        words.append(f"cutoff {len(layers)}" if first else f"layers {','.join(map(str, layers))}")
    return " ".join([*words, *([f"pinned {_digest(variant['pinned'])}"] if "pinned" in variant else [])])


def kind_of(kind: str, model: Model) -> str:
    """The name under which measurements of this model are kept: a hybrid or pinned one has its own."""
    words = called(model)
    if not words:
        return kind
    return f"{kind}@{re.sub('[ ,]', '-', words) if len(words) <= LONGEST else _digest(variant_of(model))}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def file(run: Path, kind: str) -> Path:
    """Where a measurement of a run is written; never into another run."""
    own = run / FOLDER
    if own.is_symlink():
        raise InputError(f"'{own}' is a link to another place: take it away.")
    if not os.access(own if own.is_dir() else run, os.W_OK):
        own = Path(FOLDER) / f"{run.resolve().name}-{_digest(str(run.resolve()))}"
    return own / f"{kind}.json"


def journal(run: Path, kind: str, about: Mapping[str, Any], *, quiet: bool = True) -> Journal:
    """The journal of a measurement of the run in the folder `run`; unless quiet it says when it continues one."""
    opened = Journal(file(run, kind).with_suffix(".jsonl"), about)
    say(f"{kind} continues: {opened.kept:,} finished parts were kept", quiet=quiet or not opened.kept)
    return opened


def save(run: Path, kind: str, *, step: int, settings: Mapping[str, Any], result: Mapping[str, Any]) -> Path:
    """Keep a measurement beside its run; `settings` is everything that decides the numbers, `step` the checkpoint's."""
    path = file(run, kind)
    command = command_line(*sys.argv[1:]) if Path(sys.argv[0]).name.startswith("stepformer") else ""
    about = {"format": FORMAT, "stepformer": __version__, "kind": kind, "step": step, "command": command}
    about |= {"run": known} if (known := _id(run)) else {}
    files.write_json(path, {**about, "settings": dict(settings), "result": dict(result)})
    return path


def load(run: Path, kind: str, *, own: bool = True) -> dict[str, Any] | None:
    """A measurement of a run, whole, or None if it was never made; `own`: of this run and its weights, no others."""
    path = path if (path := file(run, kind)).is_file() else run / FOLDER / f"{kind}.json"
    if not path.is_file():
        return None
    found = documents.read(path, documents.MEASUREMENT)
    if not own:
        return found
    result = documents.read(run / "result.json", documents.RESULT) if (run / "result.json").is_file() else {}
    weights = found["settings"].get("weights")
    if found.get("run", "") not in ("", _id(run)) or (
        weights is not None and found["step"] == result.get("steps") and weights != result["weights_sha256"]
    ):
        raise InputError(f"The measurement '{path}' is of other weights than those of its run: take it away.")
    return found


def _id(run: Path) -> str:
    return str(documents.read(run / "run.json", documents.RUN).get("id", "")) if (run / "run.json").is_file() else ""
