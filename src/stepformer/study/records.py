"""Finished runs, as their folders tell them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from stepformer.base import documents
from stepformer.base.described import problem
from stepformer.base.documents import Evaluation
from stepformer.base.errors import InputError, StepformerError, UnknownNameError, suggestion
from stepformer.study.differences import recorded
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

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read `result.json`, the evaluations in `metrics.jsonl`, and what was asked for and ran in `run.json`."""
        folder = Path(folder)
        if not folder.is_dir():
            raise InputError(f"There is no run folder '{folder}'.")
        result = documents.read(folder / "result.json", documents.RESULT)
        known = {f.name for f in dataclasses.fields(cls)} - {"folder", "curve", "settings"}
        fields = {"unigram_entropy": None, **{key: value for key, value in result.items() if key in known}}
        fields["label"] = fields["label"] or fields["title"]
        curve, settings, run = _read_curve(folder / "metrics.jsonl", result), recorded(folder), RunFolder(folder)
        try:
            record, config = run.read(), run.config()
        except StepformerError:  # rules that are gone cannot be asked
            pass
        else:
            run.read_result(record, config)
        return cls(folder=folder, curve=curve, settings=settings, **fields)


Kind = TypeVar("Kind", bound=RunRecord)


def load_records(folders: Iterable[str | Path]) -> list[RunRecord]:
    return [RunRecord.load(folder) for folder in folders]


def by_label(runs: Iterable[Kind], baseline: str) -> dict[str, dict[int, Kind]]:
    """The runs of every label by their seeds, those of the baseline first."""
    found: dict[str, dict[int, Kind]] = {}
    for run in runs:
        mine = found.setdefault(run.label, {})
        if run.seed in mine:
            raise InputError(
                f"'{mine[run.seed].folder}' and '{run.folder}' are both seed {run.seed} of '{run.label}': give one of "
                "them."
            )
        mine[run.seed] = run
    if baseline not in found:
        known = ", ".join(f"'{label}'" for label in found)
        raise UnknownNameError(
            f"No run is labelled '{baseline}', the baseline.{suggestion(baseline, found) or f' Labels: {known}.'}"
        )
    return {baseline: found[baseline], **found}


def check_alike(first: RunRecord, other: RunRecord, facts: Mapping[str, str]) -> None:
    """Refuse two runs whose losses do not measure one thing; of each fact that they have in common, what to say."""
    for fact, sentence in facts.items():
        one, two = getattr(first, fact), getattr(other, fact)
        if one != two:
            said = sentence.format(one, two)
            raise InputError(f"'{first.folder}' and '{other.folder}' cannot be compared: {said}.")


def values(runs: Mapping[int, RunRecord], name: str) -> dict[int, float]:
    """One number of every run."""
    return {seed: getattr(run, name) for seed, run in runs.items()}


def _read_curve(path: Path, result: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """The evaluations of a run in order of steps, ending with its result."""
    lines = read_lines(path)
    if lines.faults or result.get("metrics", f"{lines.check:08x}") != f"{lines.check:08x}":
        fault = lines.faults[0] if lines.faults else "it does not end as it did when the run was finished"
        raise InputError(f"The metrics file '{path}' is damaged: {fault}.")
    warn_unchecked(lines)
    steps, tokens, val_loss = result["steps"], result["tokens"], result["val_loss"]
    evaluations: dict[int, tuple[int, float]] = {}
    for number, entry in enumerate(lines.entries, 1):
        if entry["kind"] == "eval":
            known = {key: entry[key] for key in Evaluation.__annotations__ if key in entry}  # oracles add their own
            fault = problem(known, Evaluation)
            if fault:
                raise InputError(f"The metrics file '{path}' is damaged in line {number}: {fault}.")
            # a resumed run repeats the evaluations after its checkpoint: the later line is of the weights that stayed
            evaluations[entry["step"]] = (entry["tokens"], entry["val_loss"])
    if not evaluations:
        raise InputError(f"The metrics file '{path}' has no evaluation in it.")
    logged = evaluations.get(steps, (tokens, val_loss))
    if max(evaluations) > steps or logged[0] != tokens or abs(logged[1] - val_loss) > SAME_LOSS:
        raise InputError(f"The evaluations in '{path}' do not end with the loss in result.json: they are of two runs.")
    evaluations[steps] = (tokens, val_loss)
    return tuple(evaluations[step] for step in sorted(evaluations))
