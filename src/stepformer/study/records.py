"""Finished runs, as their folders tell them, and what a comparison of them holds."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from stepformer.base import documents
from stepformer.base.described import problem
from stepformer.base.errors import InputError, StepformerError, UnknownNameError, suggestion
from stepformer.study.differences import BUDGET, Difference, recorded
from stepformer.study.statistics import PairedDifference, Summary, several_intervals, summarise
from stepformer.training.metrics import read_lines, warn_unchecked
from stepformer.training.runs import RunFolder

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
    train_loss: float | None = field(default=None, kw_only=True)  # of fixed training tokens at the end
    start_steps: int = field(default=0, kw_only=True)  # of those that a spell of training begins with
    start_seconds: float = field(default=0.0, kw_only=True)  # which they took
    # best and final loss of other numbers of tokens of the split; no best where only the end was evaluated
    first: Mapping[int, tuple[float | None, float]] = field(default_factory=dict, kw_only=True)

    @property
    def seconds(self) -> float:
        """In training steps, without evaluations and saves; those that compile count as the mean of the others."""
        others = self.steps - self.start_steps
        if not self.start_steps or others < 1:
            return self.train_seconds
        return (self.train_seconds - self.start_seconds) * self.steps / others

    @property
    def speed(self) -> float:
        """Training tokens a second."""
        return self.tokens / self.seconds if self.start_steps else self.tokens_per_second

    @property
    def same_batches(self) -> str:
        """Its pairing but for the length: a shorter run sees the first batches of a longer one."""
        return re.sub(r"x\d+/(?=\d+$)", "/", self.pairing)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read `result.json`, the evaluations in `metrics.jsonl`, and what was asked for and ran in `run.json`."""
        folder = Path(folder)
        if not folder.is_dir():
            raise InputError(f"There is no run folder '{folder}'.")
        result = documents.read(folder / "result.json", documents.RESULT)
        known = {f.name for f in dataclasses.fields(cls)} - {"folder", "curve", "settings", "first"}
        fields = {"unigram_entropy": None, **{key: value for key, value in result.items() if key in known}}
        fields["label"] = fields["label"] or fields["title"]
        curve, first = _read_curve(folder / "metrics.jsonl", result)
        settings, run = recorded(folder), RunFolder(folder)
        try:
            record, config = run.read(), run.config()
        except StepformerError:  # rules that are gone cannot be asked
            pass
        else:
            run.read_result(record, config)
        return cls(folder=folder, curve=curve, first=first, settings=settings, **fields)


Kind = TypeVar("Kind", bound=RunRecord)


def load_records(folders: Iterable[str | Path]) -> list[RunRecord]:
    return [RunRecord.load(folder) for folder in folders]


def folders_of(study: Path, plan: Mapping[str, Any]) -> list[Path]:
    """Where the runs lie that a study.json plans; a name that leads out of the study's folder is nobody's."""
    names = [f"{run['label']}-s{run['seed']}" for run in plan["runs"]]
    return [study / name for name in names if name == Path(name).name]


def not_in_the_table(names: Iterable[str]) -> str:
    """Said of runs without a result, so that nobody takes the table for all of them."""
    return f"Not in the table, since they failed or are not finished: {', '.join(names)}."


def by_label(runs: Iterable[Kind], baseline: str) -> dict[str, dict[int, Kind]]:
    """The runs of every label by their seeds, those of the baseline first."""
    found: dict[str, dict[int, Kind]] = {}
    for run in runs:
        mine = found.setdefault(run.label, {})
        if run.seed in mine:
            both = f"'{mine[run.seed].folder}' and '{run.folder}'"
            raise InputError(f"{both} are both seed {run.seed} of '{run.label}': give one of them.")
        mine[run.seed] = run
    if baseline not in found:
        known = ", ".join(f"'{label}'" for label in found)
        others = suggestion(baseline, found) or f" Labels: {known}."
        raise UnknownNameError(f"No run is labelled '{baseline}', the baseline.{others}")
    return {baseline: found[baseline], **found}


def check_alike(runs: Sequence[RunRecord], facts: Mapping[str, str]) -> None:
    """Refuse runs whose losses do not measure one thing; of each fact that they have in common, what to say."""
    for run, (fact, sentence) in itertools.product(runs, facts.items()):
        one, two = getattr(runs[0], fact), getattr(run, fact)
        if one != two:
            said = sentence.format(one, two)
            raise InputError(f"'{runs[0].folder}' and '{run.folder}' cannot be compared: {said}.")


def values(runs: Mapping[int, RunRecord], name: str) -> dict[int, float]:
    """One number of every run."""
    return {seed: getattr(run, name) for seed, run in runs.items()}


def _read_curve(
    path: Path, result: Mapping[str, Any]
) -> tuple[tuple[tuple[int, float], ...], dict[int, tuple[float | None, float]]]:
    """The evaluations of a run in order of steps, ending with its result; and `RunRecord.first`."""
    lines = read_lines(path)
    if lines.faults or result.get("metrics", f"{lines.check:08x}") != f"{lines.check:08x}":
        fault = lines.faults[0] if lines.faults else "it does not end as it did when the run was finished"
        raise InputError(f"The metrics file '{path}' is damaged: {fault}.")
    warn_unchecked(lines)
    steps, tokens, val_loss = result["steps"], result["tokens"], result["val_loss"]
    evaluations: dict[int, tuple[int, float]] = {}
    fewer: dict[int, dict[str, float]] = {}
    for number, entry in enumerate(lines.entries, 1):
        if entry["kind"] == "eval":
            known = {key: entry[key] for key in documents.EVALUATION.known if key in entry}  # oracles add their own
            if fault := problem(known, documents.EVALUATION):
                raise InputError(f"The metrics file '{path}' is damaged in line {number}: {fault}.")
            # a resumed run repeats the evaluations after its checkpoint: the later line is of the weights that stayed
            evaluations[entry["step"]] = (entry["tokens"], entry["val_loss"])
            fewer[entry["step"]] = entry.get("first", {}) if entry["step"] else {}  # a best one is of trained weights
    if not evaluations:
        raise InputError(f"The metrics file '{path}' has no evaluation in it.")
    logged = evaluations.get(steps, (tokens, val_loss))
    if max(evaluations) > steps or logged[0] != tokens or abs(logged[1] - val_loss) > SAME_LOSS:
        raise InputError(f"The evaluations in '{path}' do not end with the loss in result.json: they are of two runs.")
    evaluations[steps] = (tokens, val_loss)
    first = {
        int(name): (min((found[name] for found in fewer.values() if name in found), default=None), final)
        for name, final in result.get("first", {}).items()
    }
    return tuple(evaluations[step] for step in sorted(evaluations)), first


@dataclass(frozen=True)
class Facts:
    """What has to be known of a study. It is kept in study.json, so that a report knows it too."""

    baseline: str = ""
    meant: tuple[str, ...] = ()  # settings that differ on purpose
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of a sweep: key -> values
    matches: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # row -> what of, and the other baseline
    remarks: tuple[str, ...] = ()  # what to say
    allowed: tuple[str, ...] = ()  # settings that may differ, although they are not of the architecture
    search: str = ""  # what was searched for every row

    @property
    def own_budgets(self) -> bool:
        """Whether rows may train on different numbers of tokens."""
        return bool(BUDGET & {*self.allowed})

    @classmethod
    def of_study(cls, study: Any) -> Self:
        """What study.json says; nothing if it is older or says it in another way."""
        try:
            found = study["facts"]
            remarks = [*map(str, found["remarks"])]
            among = (text for text in remarks if text.startswith("Search: "))  # as in older studies
            search = str(found.get("search") or next(among, ""))
            return cls(
                str(found["baseline"]),
                tuple(map(str, found["meant"])),
                {str(key): tuple(map(str, values)) for key, values in found["axes"].items()},
                {str(label): (str(what), str(other)) for label, (what, other) in found["matches"].items()},
                tuple(text for text in remarks if text != search),
                tuple(map(str, found.get("allowed", BUDGET if found.get("own_budgets") else ()))),  # older studies
                search,
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return cls()


Matched = tuple[str, str, PairedDifference]
"""Of what a row has as much as which other row, and its difference to that."""


def verdict_of(difference: PairedDifference, matched: Matched | None) -> str:
    """On a row at equal tokens, and at equal what it was matched in."""
    if matched is None:
        return difference.verdict
    what, _, to_that = matched
    if to_that == difference:  # the baseline itself has as much
        return f"{difference.verdict} at equal tokens and {what}"
    return f"{difference.verdict} at equal tokens; at equal {what} {to_that.verdict}"


def matched_words(label: str, matched: Matched) -> str:
    """The difference of a row to a baseline that has as much of something."""
    what, other, difference = matched
    return f"{label} to {other}, which has equal {what}: {difference}"


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
    train: Summary | None  # of fixed training tokens; None if a run does not know
    difference: PairedDifference | None
    common_seeds: tuple[int, ...]
    reached: int
    tokens_fraction: float | None
    seconds_fraction: float | None  # the same of its seconds
    speed_ratio: float | None  # tokens per second, over the baseline's
    time_ratio: float | None  # seconds for the same tokens, over the baseline's
    parameters: int
    notes: tuple[str, ...]
    identical: bool = False  # on every common seed the very weights and the loss of the baseline
    matched: Matched | None = None
    paired: bool = True  # False: its batches or its budget are others than the baseline's
    other_budget: bool = False  # it was trained on other numbers of tokens, on purpose

    @property
    def seconds(self) -> float:
        """A run's, on average."""
        return summarise(record.seconds for record in self.records).mean

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
        if self.other_budget:
            return f"{self.difference.verdict}, other budget"
        return verdict_of(self.difference, self.matched)

    @property
    def provisional(self) -> bool:
        return self.difference is not None and self.difference.provisional and not self.identical


@dataclass(frozen=True)
class HeldOutRows:
    """All rows on one text: their losses, and differences to the baseline where a seed has both."""

    name: str
    tokens: int
    hash: str
    losses: Mapping[str, Mapping[int, float]]  # by label and seed
    differences: Mapping[str, PairedDifference]
    matched: Mapping[str, Matched]
    notes: tuple[str, ...]


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
    held_out: tuple[HeldOutRows, ...] = ()  # losses on texts that nothing was chosen by
    axes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of a sweep: what its rows are a grid of

    @property
    def paired(self) -> bool:
        """Whether the runs of one seed saw the same batches, as many tokens and the same evaluation."""
        return all(row.paired for row in self.rows)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know before quoting the table."""
        apart = [f"The rows also differ in {found}." for found in self.differences if not found.meant]
        notes = [*self.remarks, *apart, *(note for row in self.rows for note in row.notes)]
        second = [row.matched[2] for row in self.rows if row.matched and row.matched[1] != self.baseline]
        return (*notes, *several_intervals([*(row.difference for row in self.rows), *second], self.confidence))
