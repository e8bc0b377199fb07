"""A run's folder: what it was asked to do, where it ran, what it measured, its checkpoints.

run.json          config, data and their hashes       tokenizer/    to read and write text without the corpus
config.toml       the same config, to train again     metrics.jsonl every step and evaluation
environment.json  versions, device, git revision      checkpoints/  see stepformer.training.checkpoints
result.json       final numbers, once finished        failed.txt    why it cannot go on, if it cannot
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import secrets
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from stepformer import __version__, files
from stepformer.errors import InputError, StepformerError, StepformerWarning
from stepformer.training.checkpoints import Checkpoints
from stepformer.training.config import RunConfig
from stepformer.training.parallel import World

FORMAT = 1


class RunFolder:
    """Paths and small files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.result = path / "result.json"
        self.failure = path / "failed.txt"
        self.tokenizer = path / "tokenizer"

    @property
    def exists(self) -> bool:
        return (self.path / "run.json").is_file()

    def create(self, config: RunConfig, facts: dict[str, Any], tokenizer: Path, plugins: list[str]) -> None:
        """Write what a new run is; `run.json` last, so that a half-made folder is not a run."""
        files.remove_unfinished(self.path)
        foreign = sorted(p.name for p in self.path.iterdir() if p.name not in _OWN) if self.path.is_dir() else []
        if foreign:
            raise InputError(f"'{self.path}' holds other files ('{foreign[0]}'): choose another --out.")
        files.write_text(self.path / "config.toml", as_toml(config))
        files.write_json(self.path / "environment.json", environment())
        self.tokenizer.mkdir(parents=True, exist_ok=True)
        for source in tokenizer.iterdir():
            with files.writing(self.tokenizer / source.name) as file:
                file.write(source.read_bytes())
        record = {"format": FORMAT, "stepformer": __version__, "id": secrets.token_hex(6), "config": config.to_dict()}
        record |= {**facts, "plugins": plugins}
        files.write_json(self.path / "run.json", record)

    def read(self) -> dict[str, Any]:
        """The record of the run; sentences for what is no run, or one of a newer stepformer."""
        if not self.path.is_dir():
            raise InputError(f"There is no run folder '{self.path}'.")
        if not self.exists and (self.path / "study.json").is_file():
            runs = sorted(str(found.parent) for found in self.path.glob("*/run.json"))
            named = " or ".join(f"'{run}'" for run in runs[:2])
            raise InputError(
                f"'{self.path}' is a study, not a run: "
                + (f"name one of its runs, {named}." if runs else "it has no runs yet.")
            )
        if not self.exists:
            raise InputError(f"'{self.path}' is not a run: it has no run.json.")
        record: dict[str, Any] = files.read_json(self.path / "run.json", "run record")
        if not isinstance(record, dict):
            raise InputError(f"The run record '{self.path / 'run.json'}' is damaged: it is not a JSON object.")
        if record.get("format") != FORMAT:
            raise InputError(
                f"The run '{self.path}' has format {record.get('format')}; this stepformer reads format {FORMAT}."
            )
        return record

    def config(self) -> RunConfig:
        return RunConfig.from_dict(self.read()["config"])

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder: a second process that wants to train in it is told so."""
        with files.explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            with files.explained(self.path):
                lock = stack.enter_context((self.path / "run.lock").open("a"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StepformerError(
                    f"Another process is training in '{self.path}': wait for it or stop it."
                ) from None
            yield


_OWN = {
    "run.lock",
    "config.toml",
    "environment.json",
    "tokenizer",
    "metrics.jsonl",
    "checkpoints",
    "tensorboard",
    "failed.txt",
}


def checkpoint_of(folder: RunFolder, which: str, world: World) -> tuple[Path, dict[str, Any]]:
    """A run's best checkpoint (its last one while it has no best), or its last one, and the state with it."""
    if which not in ("best", "last"):
        raise InputError(f"'{which}' is not 'best' or 'last'.")
    kept = Checkpoints(folder.checkpoints, world)
    found = kept.latest("best" if which == "best" else "step")
    if found is None and which == "best" and kept.names("step"):
        warnings.warn(
            f"'{folder.path}' has no best checkpoint yet: its last one is used.", StepformerWarning, stacklevel=3
        )
        found = kept.latest("step")
    if found is None:
        if which == "last" and kept.names("best"):  # an imported run, say
            raise InputError(f"The run '{folder.path}' has no last checkpoint, only a best one: ask for that.")
        raise InputError(f"The run '{folder.path}' has no checkpoint yet.")
    return found


class Metrics:
    """metrics.jsonl: one JSON object a line, appended; lines beyond a resumed step are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        lines = list(read_metrics(path)) if path.exists() else []
        kept = [line for line in lines if line["step"] <= step]
        if path.exists():
            files.write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        with files.explained(path):
            self._file: IO[str] = path.open("a")

    def write(self, **values: Any) -> None:
        with files.explained(self.path):
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file; a last line cut by a kill is left out."""
    text = path.read_text(errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        try:
            yield json.loads(line)
        except ValueError:
            if number < text.count("\n"):
                raise InputError(f"Line {number} of '{path}' is damaged.") from None


def environment() -> dict[str, Any]:
    """Versions, device and revision, for whoever wonders later."""
    versions = {"python": platform.python_version(), "stepformer": __version__, "torch": torch.__version__}
    device: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        device |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count(), "cuda": torch.version.cuda}
    return {
        "versions": versions,
        "platform": platform.platform(),
        "device": device,
        "threads": torch.get_num_threads(),
        "command": sys.argv,
        "git": git_revision(),
    }


def git_revision() -> dict[str, Any] | None:
    """Commit of the source tree this package runs from, and whether it has changes; None outside a repository."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    revision = git("rev-parse", "HEAD")
    return None if revision is None else {"revision": revision, "changed": bool(git("status", "--porcelain"))}


def as_toml(config: RunConfig) -> str:
    """A config as TOML that `stepformer train FILE` reads; keys that are unset are left out."""

    def value(v: Any) -> str:
        return (
            ("true" if v else "false")
            if isinstance(v, bool)
            else json.dumps(v, ensure_ascii=False)
            if isinstance(v, str)
            else repr(v)
        )

    # where it comes from, so that published figures stay beside it
    text = [f"[recipe]\nname = {value(config.recipe)}\n"] if config.recipe else []
    for section in ("model", "data", "optim", "train"):
        values = config.to_dict()[section]
        text.append(f"[{section}]\n" + "".join(f"{k} = {value(v)}\n" for k, v in values.items() if v is not None))
    return "\n".join(text)
