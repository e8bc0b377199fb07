"""What fine-tuning on a target corpus does to runs pretrained on a source corpus, architecture by architecture.

forgetting  F = L_source(end) - L_source(start)     how much worse the model has become at what it knew
plasticity  P = L_target(start) - L_target(end)     how much it has learned

Losses are validation losses on fixed tokens, from the run's own evaluations. Two architectures on one seed saw the same
batches in pretraining and in fine-tuning, so their differences are taken seed by seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stepformer.base import documents
from stepformer.base.errors import InputError
from stepformer.study import statistics
from stepformer.study.differences import Difference, differences, recorded
from stepformer.study.records import RunRecord, by_label, check_alike, values
from stepformer.training.metrics import read_metrics
from stepformer.training.runs import RunFolder

AMOUNTS = {"forgetting": "source", "plasticity": "target"}  # and the corpus whose loss they are of
ALIKE = {
    "source_hash": "they have different source splits ({} and {})",
    "source_tokens": "they have different numbers of source tokens ({:,} and {:,})",
    "pairing": "they have different batches, budgets or target splits ({} and {})",
    "evaluated": "they have different steps of evaluation ({} and {})",
}


@dataclass(frozen=True)
class Finetuned(RunRecord):
    """A finished fine-tuning run; `source` and `target` are the losses after `evaluated` steps, from 0 to the end."""

    evaluated: tuple[int, ...]
    source: tuple[float, ...]
    target: tuple[float, ...]
    source_tokens: int
    source_hash: str
    start: Mapping[str, Any]

    @property
    def forgetting(self) -> float:
        return self.source[-1] - self.source[0]

    @property
    def plasticity(self) -> float:
        return self.target[0] - self.target[-1]

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read the result and the evaluations of a run that began with another's weights."""
        folder = Path(folder)
        record = RunRecord.load(folder)
        start = RunFolder(folder).read().get("init")
        if not start:
            raise InputError(f"The run '{folder}' began with random weights: nothing was fine-tuned.")
        lines = {line["step"]: line for line in read_metrics(folder / "metrics.jsonl") if line.get("kind") == "eval"}
        lines[record.steps] = documents.read(folder / "result.json", documents.RESULT)
        others = [(step, line["val_loss"], *line.get("also", {}).values()) for step, line in sorted(lines.items())]
        if others[0][0] != 0 or any(len(found) != 3 for found in others):
            raise InputError(f"The run '{folder}' was not evaluated on one other corpus from its start to its end.")
        steps, target, source = zip(*others, strict=True)
        on: dict[str, Any] = {f"source_{what}": source[-1][f"val_{what}"] for what in ("tokens", "hash")}
        losses = tuple(float(found["val_loss"]) for found in source)
        return cls(**vars(record), evaluated=steps, source=losses, target=target, start=start, **on)


@dataclass(frozen=True)
class ForgettingRow:
    """One architecture over its seeds; differences are to the baseline, None for itself and without common seeds."""

    label: str
    runs: tuple[Finetuned, ...]
    differences: Mapping[str, statistics.PairedDifference | None]  # by what is forgotten or learned

    def amount(self, what: str) -> statistics.Summary:
        """Forgetting or plasticity over the seeds."""
        return statistics.summarise(getattr(run, what) for run in self.runs)

    def mean(self, corpus: str, place: int) -> float:
        """Mean loss on `source` or `target` at the start (0) or the end (-1)."""
        return statistics.summarise(getattr(run, corpus)[place] for run in self.runs).mean


@dataclass(frozen=True)
class Direction:
    """All architectures, the baseline first, from one source to one target."""

    source: str
    target: str
    baseline: str
    confidence: float
    rows: tuple[ForgettingRow, ...]
    apart: tuple[Difference, ...] = ()  # settings of pretraining that are no architecture and not the same in all rows

    @property
    def name(self) -> str:
        return f"{self.source} -> {self.target}"

    @property
    def first(self) -> Finetuned:
        return self.rows[0].runs[0]

    @property
    def notes(self) -> tuple[str, ...]:
        notes = [f"the pretrained runs differ in {difference}." for difference in self.apart]
        for row in self.rows:
            notes += [
                f"{row.label}'s difference in {what} is under {statistics.SMALL_DIFFERENCE}, not to be claimed from "
                f"fewer than {statistics.PAIRS_FOR_SMALL} paired seeds."
                for what, difference in row.differences.items()
                if difference and difference.provisional
            ]
            if (found := row.differences["forgetting"]) and found.unpaired:
                left_out = f"{statistics.seed_words(found.unpaired)} left out of the differences"
                notes.append(f"{row.label}: {left_out}, only one of the two has them.")
        return tuple(f"{self.name}: {note}" for note in notes)


def forgetting(runs: list[Finetuned], source: str, target: str, baseline: str, confidence: float = 0.95) -> Direction:
    """The rows of one direction; runs whose losses do not measure one thing are refused."""
    if not runs:
        raise InputError("There are no fine-tuned runs to measure.")
    check_alike(runs, ALIKE)
    found = by_label(runs, baseline)
    rows = []
    for label, mine in found.items():
        common = label != baseline and mine.keys() & found[baseline].keys()
        apart = {
            what: statistics.paired(values(found[baseline], what), values(mine, what), confidence) if common else None
            for what in AMOUNTS
        }
        rows.append(ForgettingRow(label, tuple(mine[seed] for seed in sorted(mine)), apart))
    return Direction(source, target, baseline, confidence, tuple(rows), _pretraining(found))


def _pretraining(of: Mapping[str, Mapping[int, Finetuned]]) -> tuple[Difference, ...]:
    """In what the runs differ that the rows began with, as far as these runs are still there."""
    found: dict[str, Difference] = {}
    for seed in sorted({seed for runs in of.values() for seed in runs}):
        rows = {}
        for label, runs in of.items():
            start = runs[seed].start if seed in runs else {}
            with contextlib.suppress(InputError):
                if start and RunFolder(Path(start["run"])).read().get("id") == start.get("id"):
                    rows[label] = recorded(Path(start["run"]))
        for difference in differences(rows):
            if not difference.meant and difference.key != "train.init":
                found.setdefault(difference.key, difference)
    return tuple(found.values())
