"""What a comparison holds: its rows, what their numbers are numbers of, what a reader has to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from stepformer.study.differences import Difference
from stepformer.study.records import RunRecord
from stepformer.study.statistics import PairedDifference, Summary, several_intervals


@dataclass(frozen=True)
class Facts:
    """What has to be known of a study: settings that differ on purpose, the axes of a grid, baselines made as large as
    a row, and what to say. It is kept in study.json, so that a report knows it too.
    """

    baseline: str = ""
    meant: tuple[str, ...] = ()
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of a sweep: key -> values
    matches: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # row -> what of, and the other baseline
    remarks: tuple[str, ...] = ()

    def __add__(self, other: Facts) -> Facts:
        return Facts(
            self.baseline or other.baseline,
            (*self.meant, *other.meant),
            {**self.axes, **other.axes},
            {**self.matches, **other.matches},
            (*self.remarks, *other.remarks),
        )

    @classmethod
    def of_study(cls, study: Any) -> Self:
        """What study.json says; nothing if it is older or says it in another way."""
        found = study.get("facts", {}) if isinstance(study, dict) else {}
        try:
            return cls(
                str(found["baseline"]),
                tuple(map(str, found["meant"])),
                {str(key): tuple(map(str, values)) for key, values in found["axes"].items()},
                {str(label): (str(what), str(other)) for label, (what, other) in found["matches"].items()},
                tuple(map(str, found["remarks"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return cls()


@dataclass(frozen=True)
class Row:
    """One architecture against the baseline, over its seeds.

    `tokens_fraction` is the mean over common seeds of the tokens after which it reached the final loss of the
    baseline's run on that seed, as a fraction of that run's tokens; None unless all of them did, since a mean of only
    the successes would flatter. `reached` counts those that did. Ratios are over common seeds, None without any;
    `difference` is None for the baseline itself and when no seed is common.
    """

    label: str
    is_baseline: bool
    records: tuple[RunRecord, ...]
    loss: Summary
    best: Summary
    difference: PairedDifference | None
    common_seeds: tuple[int, ...]
    reached: int
    tokens_fraction: float | None
    speed_ratio: float | None  # tokens per second, over the baseline's
    time_ratio: float | None  # seconds for the same tokens, over the baseline's
    parameters: int
    notes: tuple[str, ...]
    identical: bool = False  # on every common seed the very weights and the loss of the baseline
    matched: tuple[str, str, PairedDifference] | None = None  # of what it has as much as which other row, and to that
    paired: bool = True  # False: its batches or its budget are others than the baseline's

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(record.seed for record in self.records)

    @property
    def verdict(self) -> str:
        if self.is_baseline:
            return "baseline"
        if self.identical:
            return "identical"
        if self.difference is None:
            return "no common seed" if self.paired else "not paired"
        if self.matched is None:
            return self.difference.verdict
        what, _, to_that = self.matched
        if to_that == self.difference:  # the baseline itself has as much
            return f"{self.difference.verdict} at equal tokens and {what}"
        return f"{self.difference.verdict} at equal tokens; at equal {what} {to_that.verdict}"

    @property
    def provisional(self) -> bool:
        return self.difference is not None and self.difference.provisional and not self.identical


@dataclass(frozen=True)
class Compared:
    """All rows, the baseline first, and what their numbers are numbers of."""

    baseline: str
    rows: tuple[Row, ...]
    confidence: float
    tokens: int
    val_tokens: int
    val_hash: str
    seeds: tuple[int, ...]
    unigram_entropy: float | None
    differences: tuple[Difference, ...] = ()  # settings in which the rows differ
    remarks: tuple[str, ...] = ()  # what was done so that they compare

    @property
    def paired(self) -> bool:
        """Whether the runs of one seed saw the same batches, as many tokens and the same evaluation."""
        return all(row.paired for row in self.rows)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know before quoting the table."""
        notes = [*self.remarks]
        notes += [f"The rows also differ in {found}." for found in self.differences if not found.meant]
        notes += [note for row in self.rows for note in row.notes]
        second = [row.matched[2] for row in self.rows if row.matched and row.matched[1] != self.baseline]
        return (*notes, *several_intervals([*(row.difference for row in self.rows), *second], self.confidence))
