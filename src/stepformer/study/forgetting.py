"""What fine-tuning on a target corpus does to runs pretrained on a source corpus, architecture by architecture.

forgetting  F = L_source(end) - L_source(start)     how much worse the model has become at what it knew
plasticity  P = L_target(start) - L_target(end)     how much it has learned

Losses are validation losses on fixed tokens, from the run's own evaluations. Two architectures on one seed saw the same
batches in pretraining and in fine-tuning, so their differences are taken seed by seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stepformer.base import documents
from stepformer.base.errors import InputError, UnknownNameError, suggestion
from stepformer.study.differences import Difference, differences, recorded
from stepformer.study.records import RunRecord
from stepformer.study.statistics import (
    PAIRS_FOR_SMALL,
    SMALL_DIFFERENCE,
    PairedDifference,
    Summary,
    paired,
    seed_words,
    summarise,
)
from stepformer.training.metrics import read_metrics
from stepformer.training.runs import RunFolder


@dataclass(frozen=True)
class Finetuned:
    """A finished fine-tuning run; `source` and `target` are the losses after `steps`, from 0 to the end."""

    record: RunRecord
    steps: tuple[int, ...]
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
        try:
            others = [(step, line["val_loss"], *line["also"].values()) for step, line in sorted(lines.items())]
        except KeyError:
            others = []
        if not others or others[0][0] != 0 or any(len(found) != 3 for found in others):
            raise InputError(f"The run '{folder}' was not evaluated on one other corpus from its start to its end.")
        steps, target, source = zip(*others, strict=True)
        last = source[-1]
        losses = tuple(float(found["val_loss"]) for found in source)
        return cls(record, steps, losses, target, last["val_tokens"], last["val_hash"], start)


@dataclass(frozen=True)
class ForgettingRow:
    """One architecture over its seeds; differences are to the baseline, None for itself and without common seeds."""

    label: str
    is_baseline: bool
    runs: tuple[Finetuned, ...]
    forgetting: Summary
    plasticity: Summary
    forgetting_difference: PairedDifference | None
    plasticity_difference: PairedDifference | None

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.record.seed for run in self.runs)

    def mean(self, corpus: str, place: int) -> float:
        """Mean loss on `source` or `target` at the start (0) or the end (-1)."""
        return summarise(getattr(run, corpus)[place] for run in self.runs).mean


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
        notes = [f"{self.name}: the pretrained runs differ in {difference}." for difference in self.apart]
        for row in self.rows:
            for what in ("forgetting", "plasticity"):
                difference: PairedDifference | None = getattr(row, f"{what}_difference")
                if difference and difference.provisional:
                    notes.append(
                        f"{self.name}: {row.label}'s difference in {what} is under {SMALL_DIFFERENCE}, not to be "
                        f"claimed from fewer than {PAIRS_FOR_SMALL} paired seeds."
                    )
            unpaired = row.forgetting_difference.unpaired if row.forgetting_difference else ()
            if unpaired:
                notes.append(
                    f"{self.name}: {row.label}: {seed_words(unpaired)} left out of the differences, only one of the "
                    "two has them."
                )
        return tuple(notes)


def forgetting(
    runs: Iterable[Finetuned], source: str, target: str, baseline: str, confidence: float = 0.95
) -> Direction:
    """The rows of one direction; runs whose losses do not measure one thing are refused."""
    runs = list(runs)
    if not runs:
        raise InputError("There are no fine-tuned runs to measure.")
    by_label: dict[str, dict[int, Finetuned]] = {}
    for run in runs:
        _check_same(runs[0], run)
        mine = by_label.setdefault(run.record.label, {})
        if run.record.seed in mine:
            raise InputError(
                f"'{mine[run.record.seed].record.folder}' and '{run.record.folder}' are both seed {run.record.seed} "
                f"of '{run.record.label}': give one of them."
            )
        mine[run.record.seed] = run
    if baseline not in by_label:
        raise UnknownNameError(
            f"No run is labelled '{baseline}', the baseline.{suggestion(baseline, by_label)} "
            f"Labels: {', '.join(by_label)}."
        )
    order = dict.fromkeys([baseline, *by_label])
    rows = [_row(label, by_label[baseline], by_label[label], label == baseline, confidence) for label in order]
    return Direction(source, target, baseline, confidence, tuple(rows), _pretraining(by_label))


def _pretraining(by_label: Mapping[str, Mapping[int, Finetuned]]) -> tuple[Difference, ...]:
    """In what the runs differ that the rows began with, as far as these runs are still there."""
    found: dict[str, Difference] = {}
    for seed in sorted({seed for runs in by_label.values() for seed in runs}):
        rows = {}
        for label, runs in by_label.items():
            start = runs[seed].start if seed in runs else {}
            with contextlib.suppress(InputError):
                if start and RunFolder(Path(start["run"])).read().get("id") == start.get("id"):
                    rows[label] = recorded(Path(start["run"]))
        for difference in differences(rows):
            if not difference.meant and difference.key != "train.init":
                found.setdefault(difference.key, difference)
    return tuple(found.values())


def _check_same(first: Finetuned, other: Finetuned) -> None:
    pair = f"'{first.record.folder}' and '{other.record.folder}' cannot be compared"
    for name, one, two in (
        ("source splits", first.source_hash, other.source_hash),
        ("numbers of source tokens", f"{first.source_tokens:,}", f"{other.source_tokens:,}"),
        ("batches, budgets or target splits", first.record.pairing, other.record.pairing),
        ("steps of evaluation", first.steps, other.steps),
    ):
        if one != two:
            raise InputError(f"{pair}: they have different {name} ({one} and {two}).")


def _row(
    label: str, base: Mapping[int, Finetuned], mine: Mapping[int, Finetuned], is_baseline: bool, confidence: float
) -> ForgettingRow:
    runs = tuple(mine[seed] for seed in sorted(mine))
    found: list[PairedDifference | None] = []
    for what in ("forgetting", "plasticity"):
        one, two = ({seed: getattr(run, what) for seed, run in some.items()} for some in (base, mine))
        found.append(None if is_baseline or not one.keys() & two.keys() else paired(one, two, confidence))
    amounts = (summarise(run.forgetting for run in runs), summarise(run.plasticity for run in runs))
    return ForgettingRow(label, is_baseline, runs, *amounts, *found)
