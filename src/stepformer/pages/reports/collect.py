"""What run folders hold, gathered for a report.

A report is made of what is there. A run that is unfinished, was never evaluated or has a damaged file is taken with a
sentence that says so; only a folder that is no run at all is refused.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stepformer.base import documents
from stepformer.base.errors import ChangedRuleError, InputError, StepformerError
from stepformer.data.tokenizers import valid
from stepformer.measure import measured
from stepformer.model import Model
from stepformer.pages.reports.values import grouped, inside, record, records, values
from stepformer.study import Facts, RunRecord
from stepformer.study.records import folders_of
from stepformer.training import RunConfig
from stepformer.training.metrics import BY_LAYER, Lines, read_lines
from stepformer.training.runs import RunFolder

KINDS = ("hessian", "jacobian", "depth", "balance", "perplexity", "tasks", "hybrid", "held-out")
STUDY = "study.json"
FORGETTING = "forgetting.json"
NATIVE = "forgetting-native.json"  # of both directions with the runs' own optimizers
MOST_POINTS = 400  # of one curve: more than a chart has pixels for
MOST_EVALUATIONS = 40  # of a coefficient's history
ALL_POINTS = 60_000  # of all curves together: about 2 MB of the page


@dataclass(frozen=True)
class Curve:
    """A loss along training, as columns."""

    step: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    window: int = 1  # how many values each loss is the mean of

    def __len__(self) -> int:
        return len(self.step)


History = list[tuple[int, list[dict[str, Any]]]]
"""Tokens, and then for each layer its values by name."""


@dataclass
class RunData:
    """One run; `record` is None unless it is finished and whole, and then `state` says why."""

    folder: Path
    label: str
    seed: int
    state: str
    record: RunRecord | None
    facts: dict[str, Any]
    config: RunConfig | None
    environment: dict[str, Any]
    training: Curve
    evaluation: Curve
    measured: dict[str, dict[str, Any]]
    begun: datetime
    ended: datetime
    notes: list[str] = field(default_factory=list)
    coefficients: list[dict[str, float]] | None = None
    history: dict[str, History] = field(default_factory=dict)  # of coefficients and norms, at evaluations

    @property
    def imported(self) -> dict[str, Any]:
        """What is known of weights that came without their training; empty for a run that was trained here."""
        return record(self.facts, "imported")

    @property
    def name(self) -> str:
        return self.label if self.imported else f"{self.label} s{self.seed}"

    @property
    def known(self) -> RunRecord | SimpleNamespace:
        """Its record, or what the curves of an unfinished run say under the same names; None where they are empty."""
        if self.record:
            return self.record
        if self.imported:
            sized = Model(self.config.model, device="meta").num_parameters() if self.config else None
            return SimpleNamespace(steps=self.imported.get("step"), train_seconds=None, parameters=sized)
        curves = [curve for curve in (self.training, self.evaluation) if len(curve)]
        best = min(zip(self.evaluation.loss, self.evaluation.step, strict=True), default=(None, None))
        return SimpleNamespace(
            val_loss=self.evaluation.loss[-1] if len(self.evaluation) else None,
            best_val_loss=best[0],
            best_step=best[1],
            steps=max((curve.step[-1] for curve in curves), default=None),
            tokens=max((curve.tokens[-1] for curve in curves), default=None),
            train_seconds=curves[0].seconds[-1] if curves else None,
        )

    def result(self, kind: str) -> dict[str, Any]:
        """What was measured of a kind."""
        return record(self.measured, kind, "result")

    def layers(self, kind: str) -> list[dict[str, Any]]:
        return records(self.measured, kind, "result", "layers")

    def windows(self, kind: str) -> str:
        """The hash of the windows that were measured."""
        return str(self.result(kind).get("windows_hash") or "")

    @property
    def settings(self) -> dict[str, Any]:
        """The config with one key for each setting, `optim.lr` say; a model's defaults are not among them."""
        sections = record(self.facts, "config")
        sections = {"model": record(sections, "model")} if self.imported else sections
        return {f"{name}.{key}": value for name in sections for key, value in record(sections, name).items()}

    @property
    def command(self) -> list[str]:
        """The words that started the run, without the folder that the program lies in."""
        words = [str(word) for word in values(self.environment, "command")]
        names = ["stepformer" if Path(word).name == "__main__.py" else Path(word).name for word in words[:1]]
        return [*names, *words[1:]]


@dataclass
class Gathered:
    """All runs of a report in order, what is known about their studies, and sentences about what is missing."""

    runs: list[RunData] = field(default_factory=list)
    baseline: str | None = None
    facts: Facts = field(default_factory=Facts)
    forgetting: list[tuple[Path, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    studies: list[Facts] = field(default_factory=list)


def gather(paths: Sequence[str | Path]) -> Gathered:
    """Read runs and studies."""
    folders: list[Path] = []
    found = Gathered()
    for path in map(Path, paths):
        new = _folders(path, found)
        folders += [folder for folder in new if folder.resolve() not in {known.resolve() for known in folders}]
    if not folders:
        raise InputError("No run has been started in " + ", ".join(f"'{path}'" for path in paths) + ".")
    # what one study says does not hold for the others
    remarks = tuple(remark for study in found.studies for remark in study.remarks)
    searches = dict.fromkeys(filter(None, (study.search for study in found.studies)))
    together = Facts(remarks=remarks, search=" ".join(searches))
    found.facts = found.studies[0] if len(found.studies) == 1 else together
    points = max(40, min(MOST_POINTS, ALL_POINTS // (2 * len(folders))))
    found.runs = [read_run(folder, points) for folder in folders]
    _tell_apart(found.runs)
    return found


def _tell_apart(runs: Sequence[RunData]) -> None:
    """Give runs of one label and one seed, of two studies say, labels that name what they are from."""
    clashes = grouped(((run.label, run.seed), run) for run in runs)
    names: tuple[Callable[[Path], str], ...] = (lambda f: f.parent.name, lambda f: str(f.parent), lambda f: f.name, str)
    for label in {label for (label, _), several in clashes.items() if len(several) > 1}:
        groups = [several for (known, _), several in clashes.items() if known == label]
        name = next(n for n in names if all(len({n(run.folder) for run in group}) == len(group) for group in groups))
        for run in (run for group in groups for run in group):
            run.label = f"{label} ({name(run.folder)})"
            if run.record:
                run.record = dataclasses.replace(run.record, label=run.label)


def _folders(path: Path, found: Gathered) -> list[Path]:
    """The run folders behind a path; what its study says besides goes into `found`."""
    if not path.is_dir():
        raise InputError(f"There is no run or study folder '{path}'.")
    study = path / STUDY
    forgetting = [path / name for name in (FORGETTING, NATIVE) if (path / name).is_file()]
    found.forgetting += [(path, documents.read(file, documents.FORGETTING)) for file in forgetting]
    if RunFolder(path).exists:
        return [path]
    runs = sorted(folder for folder in path.iterdir() if RunFolder(folder).exists)
    if study.is_file():
        plan = documents.read(study, documents.STUDY)
        found.studies.append(Facts.of_study(plan))
        found.baseline = found.baseline or found.studies[-1].baseline or _baseline(path)  # the last of older studies
        planned = folders_of(path, plan)
        begun = [folder for folder in planned if RunFolder(folder).exists]
        if missing := ", ".join(folder.name for folder in planned if folder not in begun):
            found.notes.append(f"Planned in '{path}' and not begun: {missing}.")
        if others := [folder for folder in runs if folder not in begun]:
            if not begun:
                raise InputError(
                    f"No run that '{study}' plans has begun. Runs of another plan lie in '{path}': "
                    f"name them, e.g. '{others[0]}'."
                )
            unplanned = ", ".join(folder.name for folder in others)
            found.notes.append(f"In '{path}' and not planned there, so left out: {unplanned}.")
        return begun
    studies = sorted(part for part in path.iterdir() if (part / STUDY).is_file())
    if forgetting:  # of fine-tuning in both directions: studies beside each other
        parts = [part for part in studies if (part / FORGETTING).is_file()]
        within = [folder for part in parts for folder in _folders(part, Gathered(notes=found.notes))]
        if before := " and ".join(f"'{part}'" for part in studies if part not in parts):
            found.notes.append(
                f"The runs before their fine-tuning lie in {before}: name these folders too to see them."
            )
        return [*within, *runs]
    holds = ("runs", runs) if runs else ("studies", studies)
    hint = f" It holds {holds[0]}: name them, e.g. '{holds[1][0]}'." if holds[1] else ""
    if not hint and (path / "comparison.csv").is_file():
        hint = " It holds a table of runs that lie elsewhere: name those."
    raise InputError(f"'{path}' is neither a run (no run.json) nor a study (no {STUDY}).{hint}")


def _baseline(study: Path) -> str | None:
    """The baseline that the study was last compared with: its table says so."""
    try:
        with (study / "comparison.csv").open(newline="") as file:
            return next(iter(csv.DictReader(file)), {}).get("baseline", "").removeprefix("'") or None
    except (OSError, ValueError, csv.Error):
        return None


def read_run(path: Path, points: int = MOST_POINTS) -> RunData:
    """One run folder; `points` is how many points of each curve are kept."""
    folder, told = RunFolder(path), path / "environment.json"
    facts = folder.read()
    notes: list[str] = []
    config = _config(folder, notes)
    training, evaluation, history = read_curves(folder.metrics, [] if facts.get("imported") else notes)
    finished, state = _record(folder, facts, training, evaluation)
    seed = finished.seed if finished else inside(facts, "config", "train", "seed")
    label = valid(finished.label if finished else str(facts.get("label") or path.name))
    if finished and finished.label != label:
        finished = dataclasses.replace(finished, label=label)
    ended = max((p for p in (folder.result, folder.metrics) if p.is_file()), key=_changed, default=path / "run.json")
    return RunData(
        folder=path,
        label=label,
        seed=seed if isinstance(seed, int) else 0,
        state=state,
        record=finished,
        facts=facts,
        config=config,
        environment=_noted(lambda: documents.read(told, documents.ENVIRONMENT) if told.is_file() else {}, notes) or {},
        training=smoothed(training, points),
        evaluation=thinned(evaluation, points),
        measured=_measurements(path, finished, notes),
        begun=datetime.fromtimestamp(_changed(path / "run.json")),
        ended=datetime.fromtimestamp(_changed(ended)),
        notes=notes,
        history=history,
    )


def _changed(path: Path) -> float:
    return path.stat().st_mtime


def _config(folder: RunFolder, notes: list[str]) -> RunConfig | None:
    """Its config; a run whose rules have been changed since is refused."""
    try:
        return folder.opened()[1]
    except ChangedRuleError:
        raise
    except StepformerError as error:
        notes.append(f"Its config cannot be built here: {str(error).splitlines()[0]}")
    except (KeyError, TypeError, AttributeError):
        notes.append("Its run.json has no whole config.")
    return None


def _record(folder: RunFolder, facts: dict[str, Any], *curves: Curve) -> tuple[RunRecord | None, str]:
    """The result of a finished run, or a sentence on what the run is instead."""
    if folder.result.is_file():
        try:
            return RunRecord.load(folder.path), ""
        except InputError as error:
            return None, str(error)
    if imported := record(facts, "imported"):
        known = f", after step {imported['step']:,}" if imported.get("step") else ""
        return None, f"Weights alone{known}: how they were trained is not recorded."
    done = max((curve.step[-1] for curve in curves if len(curve)), default=0)
    planned = inside(facts, "config", "train", "steps")
    of = f" of {planned:,}" if isinstance(planned, int) else ""
    with contextlib.suppress(OSError):  # there is none, or a run that goes on has just removed it
        why = " ".join(folder.failure.read_text(errors="replace").split())
        return None, f"Failed after step {done:,}{of}: {why}"
    return None, f"Unfinished: step {done:,}{of}."


def _measurements(path: Path, finished: RunRecord | None, notes: list[str]) -> dict[str, dict[str, Any]]:
    """What was measured; a note if it was while the run was not finished."""
    found = {kind: _noted(functools.partial(measured.load, path, kind), notes) for kind in KINDS}
    for kind, step in ((kind, inside(whole, "step")) for kind, whole in found.items()):
        if finished is not None and isinstance(step, int) and step not in (finished.best_step, finished.steps):
            notes.append(f"Its {kind} was measured after step {step:,}, before it was finished: measure it again.")
    return {kind: whole for kind, whole in found.items() if whole is not None}


def _noted(read: Callable[[], Any], notes: list[str]) -> Any:
    """What is read; None where it cannot be, and a note says why."""
    try:
        return read()
    except InputError as error:
        notes.append(str(error))
        return None


def read_curves(path: Path, notes: list[str]) -> tuple[Curve, Curve, dict[str, History]]:
    """Training and evaluation losses of a metrics file, every line of it, and what layers had at evaluations; lines
    that are damaged are counted.
    """
    rows: dict[str, dict[int, tuple[int, float, float]]] = {"train": {}, "eval": {}}
    layers: dict[str, dict[int, tuple[int, list[dict[str, Any]]]]] = {name: {} for name in BY_LAYER}
    damaged = 0
    try:
        lines = read_lines(path)
    except InputError as error:
        notes.append(f"There are no curves: {error}")
        lines = Lines()
    for entry, kind in ((entry, entry["kind"]) for entry in lines.entries if entry["kind"] in rows):
        try:
            loss = float(entry["loss" if kind == "train" else "val_loss"])
            if math.isfinite(loss):
                seconds = float(entry.get("seconds", math.nan))
                rows[kind][entry["step"]] = (int(entry["tokens"]), seconds, loss)
            for name in layers.keys() & entry.keys():
                by_layer = [record(layer) for layer in values(entry[name])]
                layers[name][entry["step"]] = (int(entry["tokens"]), by_layer)
        except (ValueError, KeyError, TypeError, OverflowError):
            damaged += 1
    if lines.faults:
        notes.append(f"Its metrics.jsonl is damaged: {'; '.join(lines.faults[:3])}.")
    if lines.unchecked:
        notes.append("Lines of its metrics.jsonl have no checks, as in version 0.5.0.")
    if damaged:
        notes.append(f"{damaged:,} damaged lines of its metrics.jsonl are left out.")
    history = {name: _few([found[step] for step in sorted(found)]) for name, found in layers.items() if found}
    return _curve(rows["train"]), _curve(rows["eval"]), history


def _few(history: History) -> History:
    """At most as many evaluations as a small chart can show, the first and the last among them."""
    most = min(len(history), MOST_EVALUATIONS)
    return [history[round(i * (len(history) - 1) / max(1, most - 1))] for i in range(most)]


def _curve(rows: dict[int, tuple[int, float, float]]) -> Curve:
    columns: Any = map(list, zip(*((step, *rows[step]) for step in sorted(rows)), strict=True))
    return Curve(*columns)


def smoothed(curve: Curve, points: int) -> Curve:
    """A noisy curve as running means over a fiftieth of it, at no more than `points` places."""
    n = len(curve)
    half = n // 100  # the window is centred, so that the curve does not lag behind
    sums = list(itertools.accumulate(curve.loss, initial=0.0))
    means = []
    for i in range(n):
        # narrow at the start, where the loss falls steeply; at the end, where it is flat, the past alone will do
        before = min(half, i)
        after = min(before, n - 1 - i)
        means.append((sums[i + after + 1] - sums[i - before]) / (before + after + 1))
    return thinned(dataclasses.replace(curve, loss=means, window=2 * half + 1), points)


def thinned(curve: Curve, points: int) -> Curve:
    """At most `points` points, evenly over the curve, the first, the last and the lowest among them."""
    n = len(curve)
    if n <= points:
        return curve
    places = {round(i * (n - 1) / (points - 2)) for i in range(points - 1)}
    places.add(min(range(n), key=curve.loss.__getitem__))
    kept = sorted(places)
    chosen: Any = {name: [getattr(curve, name)[i] for i in kept] for name in ("step", "tokens", "seconds", "loss")}
    return dataclasses.replace(curve, **chosen)


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean over several runs at the steps that all of them have."""
    rows = [dict(zip(c.step, zip(c.tokens, c.seconds, c.loss, strict=True), strict=True)) for c in curves]
    steps = sorted(set(rows[0]).intersection(*rows[1:]))
    seconds, loss = ([math.fsum(row[step][i] for row in rows) / len(rows) for step in steps] for i in (1, 2))
    return Curve(steps, [rows[0][step][0] for step in steps], seconds, loss)
