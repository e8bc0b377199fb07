"""A run in training as its folder shows it: curves, speed, time left, checkpoints. Nothing here touches the run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepformer.training.checkpoints import MANIFEST, Checkpoints
from stepformer.training.config import RunConfig
from stepformer.training.runs import RunFolder

MOST_POINTS = 600  # of a curve on the page
RECENT = 20  # lines that speed and time left are taken from
QUIET = 60.0  # seconds without a line after which a run may have been stopped


@dataclass(frozen=True)
class Point:
    """A line of metrics.jsonl; of an evaluation `loss` is the validation loss."""

    step: int
    loss: float
    seconds: float = 0.0
    tokens_per_second: float = 0.0


class Tail:
    """The lines of a metrics file that grows, each read once.

    A last line without its end waits for the rest. A file that was replaced or cut, as a resumed run does to drop what
    it will measure again, is read anew. Lines that are no metrics are counted and left out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self.train: list[Point] = []
        self.evals: list[Point] = []
        self.damaged = 0
        self._read = 0  # bytes of whole lines
        self._end = b""  # the last of them, to recognise the file
        self._file: tuple[int, int] | None = None

    def update(self) -> tuple[list[Point], list[Point]]:
        """Read what is new; returns training and evaluation points so far."""
        with self._lock:
            try:
                with self.path.open("rb") as file:
                    self._continue(file)
            except OSError:
                self._forget()  # not there yet, or not any more
            return list(self.train), list(self.evals)

    def _continue(self, file: Any) -> None:
        facts = os.fstat(file.fileno())
        file.seek(self._read - len(self._end))
        if (facts.st_dev, facts.st_ino) != self._file or file.read(len(self._end)) != self._end:
            self._forget()
            self._file = (facts.st_dev, facts.st_ino)
        file.seek(self._read)
        new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._take(line)
        self._read += len(whole)
        self._end = (self._end + whole)[-256:]

    def _take(self, line: bytes) -> None:
        try:
            values = json.loads(line)
            if values["kind"] == "saved":
                return
            kind, loss = (self.train, "loss") if values["kind"] == "train" else (self.evals, "val_loss")
            numbers = [float(n) for n in (values[loss], values["seconds"], values.get("tokens_per_second", 0.0))]
            point = Point(int(values["step"]), *numbers)
            if not all(map(math.isfinite, numbers)):
                raise ValueError
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            self.damaged += 1
            return
        while kind and kind[-1].step >= point.step:
            kind.pop()
        kind.append(point)


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Steps and losses; of long curves the means of neighbouring points, at most `most` of them."""
    width = max(1, -(-len(points) // most))
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    return [(statistics.fmean(p.step for p in g), statistics.fmean(p.loss for p in g)) for g in groups]


def pace(train: Sequence[Point]) -> tuple[float, float] | None:
    """Tokens per second (median) and seconds per step of the latest steps; None before the first."""
    if not train:
        return None
    recent = train[-RECENT:]
    first, last = (recent[0], recent[-1]) if len(recent) > 1 else (Point(0, 0.0), recent[-1])
    per_step = (last.seconds - first.seconds) / (last.step - first.step)
    return statistics.median(p.tokens_per_second for p in recent), max(0.0, per_step)


def checkpoints(folder: RunFolder, evals: Sequence[Point]) -> list[dict[str, Any]]:
    """The checkpoints that a folder holds now, newest first, with the loss where it was evaluated."""
    kept = Checkpoints(folder.checkpoints)
    losses = {point.step: point.loss for point in evals}
    found = []
    for name in (*kept.names("best"), *kept.names("step")):
        age = _age(folder.checkpoints / name / MANIFEST)
        kind, _, digits = name.partition("-")
        if age is not None:  # else superseded and deleted meanwhile
            loss = losses.get(int(digits))
            found.append({"name": name, "kind": kind, "step": int(digits), "loss": loss, "age": age})
    return sorted(found, key=lambda entry: (-entry["step"], entry["kind"]))


def _age(path: Path) -> float | None:
    """Seconds since a file was written; None if there is none."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def progress(folder: RunFolder, config: RunConfig, tail: Tail) -> dict[str, Any]:
    """Where a run stands, for the page."""
    train, evals = tail.update()
    step = max([p.step for p in (*train[-1:], *evals[-1:])], default=0)
    steps, now = config.train.steps, pace(train)
    age = _age(folder.metrics)
    status, sentence = _status(folder, age, now, step >= steps)
    best = min(evals[1:] if evals and evals[0].step == 0 else evals, key=lambda p: p.loss, default=None)
    return {
        "status": status,
        "sentence": sentence,
        "step": step,
        "steps": steps,
        "tokens": step * config.step_tokens,
        "loss": train[-1].loss if train else None,
        "seconds": train[-1].seconds if train else 0.0,
        "tokens_per_second": now[0] if now else None,
        "seconds_left": now[1] * (steps - step) if now and status == "training" else None,
        "age": age,
        "last_eval": {"step": evals[-1].step, "loss": evals[-1].loss} if evals else None,
        "best_eval": {"step": best.step, "loss": best.loss} if best else None,
        "train": thinned(train),
        "evals": thinned(evals),
        "checkpoints": checkpoints(folder, evals),
        "damaged": tail.damaged,
    }


def _status(folder: RunFolder, age: float | None, now: tuple[float, float] | None, done: bool) -> tuple[str, str]:
    """One word and one sentence. Whether a process holds the folder is not asked: that would take its lock."""
    if folder.result.is_file() and done:
        return "finished", "The run is finished."
    with contextlib.suppress(OSError):
        return "failed", folder.failure.read_text(errors="replace").strip()[:1000]
    if age is None:
        return "waiting", "The run has no metrics yet."
    if age > max(QUIET, 10 * now[1] if now else 0.0):
        return "quiet", "No new line for a while: the run was stopped, or does something long between two steps."
    if done:
        return "training", "All steps are done; the last evaluation is under way."
    return "training", "The run is training."
