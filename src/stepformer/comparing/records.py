"""Finished runs, as their folders tell them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stepformer.comparing.differences import recorded
from stepformer.errors import InputError
from stepformer.files import read_json

RESULT_FORMAT = 1
SAME_LOSS = 1e-4  # a log may round; two evaluations of one model on one split do not differ by more


@dataclass(frozen=True)
class RunRecord:
    """A finished run as its folder tells it; `curve` holds (tokens, evaluation loss) from step 0 to the end."""

    folder: Path
    label: str
    title: str
    preset: str
    seed: int
    config_hash: str
    pairing: str
    steps: int
    tokens: int
    val_loss: float
    best_val_loss: float
    best_step: int
    val_tokens: int
    val_hash: str
    train_seconds: float
    tokens_per_second: float
    parameters: int
    unigram_entropy: float | None
    weights_sha256: str
    curve: tuple[tuple[int, float], ...]
    settings: Mapping[str, Any]

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read `result.json`, the evaluations in `metrics.jsonl`, and what was asked for and ran in `run.json`."""
        folder = Path(folder)
        if not folder.is_dir():
            raise InputError(f"There is no run folder '{folder}'.")
        path = folder / "result.json"
        result = read_json(path, "result of a finished run")
        if not isinstance(result, dict):
            raise InputError(f"The result '{path}' is damaged: it is not a JSON object.")
        if result.get("format") != RESULT_FORMAT:
            found = result.get("format", "none")
            raise InputError(f"The result '{path}' has format {found}; this version reads format {RESULT_FORMAT}.")
        if result.get("status") != "finished":
            raise InputError(
                f"The run '{folder}' is not finished (status '{result.get('status', '')}'): only finished runs compare."
            )
        get = _Fields(path, result)
        fields: dict[str, Any] = {}
        for name in ("label", "title", "preset", "config_hash", "pairing", "val_hash", "weights_sha256"):
            fields[name] = get.text(name)
        for name in ("seed", "steps", "tokens", "best_step", "val_tokens", "parameters"):
            fields[name] = get.whole(name)
        for name in ("val_loss", "best_val_loss"):
            fields[name] = get.number(name)
        for name in ("train_seconds", "tokens_per_second"):
            fields[name] = get.positive(name)
        get.positive("tokens")
        fields["label"] = fields["label"] or fields["title"]
        entropy = None if result.get("unigram_entropy") is None else get.number("unigram_entropy")
        curve = _read_curve(folder / "metrics.jsonl", fields["steps"], fields["tokens"], fields["val_loss"])
        return cls(folder=folder, unigram_entropy=entropy, curve=curve, settings=recorded(folder), **fields)


def load_records(folders: Iterable[str | Path]) -> list[RunRecord]:
    return [RunRecord.load(folder) for folder in folders]


class _Fields:
    """Typed access to a JSON object, with a sentence for what is missing or of the wrong kind."""

    def __init__(self, path: Path, values: Mapping[str, Any], where: str = "") -> None:
        self.path, self.values, self.where = path, values, where

    def _fail(self, name: str, kind: str) -> InputError:
        fault = f"its '{name}' is not {kind}" if name in self.values else f"it has no '{name}'"
        return InputError(f"The file '{self.path}' is damaged{self.where}: {fault}.")

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise self._fail(name, "text")
        return value

    def whole(self, name: str) -> int:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._fail(name, "a whole number")
        return value

    def number(self, name: str) -> float:
        value = self.values.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self._fail(name, "a finite number")
        return float(value)

    def positive(self, name: str) -> float:
        if self.number(name) <= 0:
            raise self._fail(name, "above zero")
        return self.number(name)


def _read_curve(path: Path, steps: int, tokens: int, val_loss: float) -> tuple[tuple[int, float], ...]:
    """The evaluations of a run in order of steps, ending with its result."""
    try:
        lines = path.read_bytes().rstrip().splitlines()
    except FileNotFoundError:
        raise InputError(f"There is no metrics file '{path}'.") from None
    except OSError as error:
        raise InputError(f"The metrics file '{path}' cannot be read: {error.strerror}.") from None
    evaluations: dict[int, tuple[int, float]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            if number == len(lines):  # cut by a kill or a full disk; the result holds the final evaluation
                break
            raise InputError(f"The file '{path}' is damaged in line {number}: it is not valid JSON.") from None
        if not isinstance(entry, dict):
            raise InputError(f"The file '{path}' is damaged in line {number}: it is not a JSON object.")
        if entry.get("kind") == "eval":
            get = _Fields(path, entry, f" in line {number}")
            # a resumed run repeats the evaluations after its checkpoint: the later line is of the weights that stayed
            evaluations[get.whole("step")] = (get.whole("tokens"), get.number("val_loss"))
    if not evaluations:
        raise InputError(f"The metrics file '{path}' has no evaluation in it.")
    logged = evaluations.get(steps, (tokens, val_loss))
    if max(evaluations) > steps or logged[0] != tokens or abs(logged[1] - val_loss) > SAME_LOSS:
        raise InputError(f"The evaluations in '{path}' do not end with the loss in result.json: they are of two runs.")
    evaluations[steps] = (tokens, val_loss)
    return tuple(evaluations[step] for step in sorted(evaluations))
