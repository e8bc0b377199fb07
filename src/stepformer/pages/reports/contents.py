"""Everything that a report says, before it becomes a page or a paper."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stepformer.base.errors import InputError, StepformerError, UnknownNameError, suggestion
from stepformer.pages.reports import charts, parts
from stepformer.pages.reports.agreement import cautions
from stepformer.pages.reports.collect import Curve, Gathered, RunData, mean_curve
from stepformer.pages.reports.figures import factorial, hybrid_table, propagation
from stepformer.pages.reports.published import published_tables
from stepformer.pages.reports.samples import Samples, first_of_each
from stepformer.pages.reports.values import grouped, inside, real, records
from stepformer.present.tables import NAMED, Table, listed, signed
from stepformer.study import Comparison, Facts, Row, compare
from stepformer.study.held_out import kept_held_out
from stepformer.study.records import HeldOutRows, not_in_the_table
from stepformer.study.statistics import PairedDifference
from stepformer.study.tables import percent
from stepformer.training.runs import as_toml

FEW = 3  # paired seeds with which an interval is wide: Student's t is above 4 there

# What can be measured of a run besides its losses, and by which command.
MEASURES = {
    "hessian": ("the curvature of the loss", "stepformer diagnose RUN --hessian"),
    "jacobian": ("the Jacobians of the layers", "stepformer diagnose RUN --jacobian"),
    "depth": ("what happens inside, layer by layer", "stepformer diagnose RUN --depth"),
    "balance": ("the balance of second moments", "stepformer diagnose RUN --balance"),
    "perplexity": ("perplexity on other texts", "stepformer eval RUN --on TEXT"),
    "tasks": ("downstream tasks", "stepformer eval RUN --tasks NAMES"),
}


@dataclass
class Report:
    """A report on runs, labels in the order in which they are coloured, the baseline first."""

    title: str
    verdict: str
    dates: str
    search: str  # what the rates of all rows were chosen from
    runs: list[RunData]
    labels: list[str]
    comparison: Comparison | None
    incomparable: str  # why there are no paired differences
    tables: dict[str, Table]
    published: list[Table]
    forgetting: list[Table]
    charts: dict[str, charts.Charts]
    samples: Samples | None
    commands: list[str]
    again: list[tuple[str, str, str]]  # label, command and TOML that train it again
    notes: list[str] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)  # what was not measured of which, and the command
    cautions: dict[str, list[str]] = field(default_factory=dict)  # which runs were not measured alike, by kind

    def curves(self, kind: str) -> list[tuple[list[tuple[RunData, Curve]], Curve | None]]:
        """For each label its runs' curves, and their mean if several are finished: others would cut it short."""
        found = []
        for label in self.labels:
            mine = [(run, getattr(run, kind)) for run in self.runs if run.label == label and len(getattr(run, kind))]
            finished = [curve for run, curve in mine if run.record]
            found.append((mine, (mean_curve(finished) or None) if len(finished) > 1 else None))
        return found


def build(
    gathered: Gathered,
    *,
    baseline: str | None = None,
    confidence: float = 0.95,
    samples: Samples | None = None,
    title: str | None = None,
) -> Report:
    """Put a report together; a baseline that no run has is refused."""
    runs = gathered.runs
    labels = list(dict.fromkeys(run.label for run in runs))
    if baseline is not None and baseline not in labels:
        known = ", ".join(f"'{label}'" for label in labels)
        raise UnknownNameError(
            f"No run is labelled '{baseline}', the baseline.{suggestion(baseline, labels) or f' Labels: {known}.'}"
        )
    chosen = baseline or (gathered.baseline if gathered.baseline in labels else labels[0])
    labels = [chosen, *(label for label in labels if label != chosen)]
    runs = sorted(runs, key=lambda run: labels.index(run.label))  # stable: seeds stay in order
    comparison, incomparable = _compared(runs, chosen, confidence, gathered.facts)
    differing, common = parts.config_tables(runs)
    against_loss, scatter = propagation(runs)
    tables = {
        "comparison": parts.comparison_table(comparison) if comparison else None,
        "runs": parts.runs_table(runs),
        "hessian": parts.hessian_table(runs),
        "jacobian": parts.jacobian_table(runs),
        "propagation": against_loss,
        "balance": parts.balance_table(runs),
        "factorial": factorial(runs),
        "hybrid": hybrid_table(runs),
        "perplexity": parts.perplexity_table(runs),
        "tasks": parts.tasks_table(runs),
        "differing": differing,
        "common": common,
        "environment": parts.environment_table(runs),
    }
    forgetting = [parts.forgetting_table(found, folder) for folder, found in gathered.forgetting]
    forgotten = [found for _, found in gathered.forgetting]
    begun, ended = min(run.begun for run in runs), max(run.ended for run in runs)
    return Report(
        title=title or titled(labels, runs),
        verdict=" ".join([*([verdict(comparison)] if comparison else []), *forgetting_words(forgotten)])
        or incomparable,
        dates=" to ".join(dict.fromkeys(f"{day.day} {day:%B %Y}" for day in (begun, ended))),
        search=gathered.facts.search,
        runs=runs,
        labels=labels,
        comparison=comparison,
        incomparable=incomparable,
        tables={name: table for name, table in tables.items() if table and table.rows},
        published=published_tables(runs, forgotten),
        forgetting=[table for table in forgetting if table.rows],
        charts={
            "coefficients": charts.coefficient_charts(runs),
            "depth": charts.depth_charts(runs),
            "jacobian": charts.jacobian_charts(runs),
            "propagation": scatter,
            "balance": charts.balance_charts(runs),
            "hessian": charts.hessian_charts(runs),
            "forgetting": charts.forgetting_charts(runs, forgotten),
        },
        samples=samples if samples and (samples.texts or samples.problems) else None,
        commands=list(dict.fromkeys(shlex.join(run.command) for run in runs if run.command)),
        again=_again(runs),
        notes=[*gathered.notes, *_notes(runs)],
        missing=_missing(runs),
        cautions=cautions(runs),
    )


def _notes(runs: Sequence[RunData]) -> list[str]:
    """Sentences about single runs; one that is true of several is said once."""
    about = grouped((note, run.name) for run in runs for note in dict.fromkeys(filter(None, (run.state, *run.notes))))
    return [f"{listed(names)}: {note}" for note, names in about.items()]


def _missing(runs: Sequence[RunData]) -> list[tuple[str, str]]:
    """What no run was measured for, or which runs were not; each with the command that does it."""
    found = []
    for kind, (what, command) in MEASURES.items():
        kinds = {kind, "held-out"} if kind == "perplexity" else {kind}  # held-out texts are other texts, too
        without = [run for run in runs if not kinds & run.measured.keys()]
        if len(without) == len(runs):
            found.append((f"Not measured: {what}", command))
        elif without:
            folders = shlex.quote(str(without[0].folder)) if len(without) == 1 else "RUN"
            names = listed([run.name for run in without], len(without))
            found.append((f"Not measured of {names}: {what}", command.replace("RUN", folders)))
    return found


def _compared(runs: Sequence[RunData], baseline: str, confidence: float, facts: Facts) -> tuple[Comparison | None, str]:
    """The paired comparison of the finished runs, or why there is none."""
    finished = [run.record for run in runs if run.record]
    if not finished:
        return None, "No run has finished a training here, so there is nothing to compare."
    if not any(record.label == baseline for record in finished):
        return None, f"No run of the baseline {baseline} is finished: there are losses, and no paired differences."
    if absent := [run.name for run in runs if not run.record]:
        facts = replace(facts, remarks=(*facts.remarks, not_in_the_table(absent)))
    texts = {run.record.folder: records(run.result("held-out"), "texts") for run in runs if run.record}
    try:
        return compare(finished, baseline, confidence, facts, kept_held_out(texts)), ""
    except InputError as error:
        if not 0 < confidence < 1:
            raise
        return None, f"These runs cannot be paired, so there are losses and no differences. {error}"


def verdict(comparison: Comparison) -> str:
    """What the paired differences show, in a sentence or three, and no more than they show."""
    others = [row for row in comparison.rows if not row.is_baseline]
    base = comparison.baseline
    if not others:
        return f"Only {base} has finished runs: there is nothing to compare it with."
    firm = [row for row in others if row.difference and not row.provisional and not row.identical]
    better, worse, undecided = (
        [row for row in firm if _known(row).verdict == word] for word in ("better", "worse", "no difference shown")
    )
    controls = {row.matched[1] for row in others if row.matched}  # what was asked about comes first
    better, worse = (sorted(rows, key=lambda r: (r.label in controls, _known(r).mean)) for rows in (better, worse))
    sentences = []

    def say(rows: Sequence[Row], one: str, several: str, rest: str) -> None:
        if rows:
            sentences.append(f"{listed([row.label for row in rows])} {one if len(rows) == 1 else several} {rest}.")

    if better:
        sentences.append(f"{better[0].label} ends at a lower loss than {base}: {_interval(better[0], comparison)}.")
    if len(better) > 1:
        names = listed([row.label for row in better[1:]])
        sentences.append(f"So {'does' if len(better) == 2 else 'do'} {names}.")
    detail = f": {_interval(worse[0], comparison)}" if len(worse) == 1 else ""
    say(worse, "ends", "end", f"at a higher loss than {base}{detail}")
    if undecided:
        names = listed([row.label for row in undecided])
        sentences.append(f"For {names} no difference to {base} is shown ({_reached(undecided)}).")
    say([row for row in others if row.provisional], "differs", "differ", "by too little to be claimed yet")
    for text in comparison.held_out:
        turned = [f"{row.label} {text.differences[row.label]}" for row in (*better, *worse) if _turned(row, text)]
        if turned:
            sentences.append(f"On the held-out {text.name} it is the other way round: {', '.join(turned)}.")
        if unsure := [row.label for row in (*better, *worse) if _unsure(row, text)]:
            sentences.append(f"On the held-out {text.name} no difference is shown for {listed(unsure)}.")
    single = sorted((row for row in firm if _known(row).low is None), key=lambda row: _known(row).mean)
    if single:
        ends = ", ".join(f"{row.label} {signed(_known(row).mean)}" for row in single[:NAMED])
        sentences.append(f"One paired seed has no interval and shows nothing yet: {ends} nats per token to {base}.")
    alone = [row for row in others if row.difference is None and row.paired]
    say(alone, "has", "have", f"no seed in common with {base}")
    say([row for row in others if row.other_budget], "has", "have", "a budget of its own")
    say([row for row in others if row.identical], "is", "are", f"{base}, weight for weight")
    if not comparison.paired:
        sentences.append(
            "The rows differ in their batches or their budget: there are losses and no paired differences."
        )
    for row in others:
        if row.matched is not None and row.matched[1] != base:
            what, other, found = row.matched
            sentences.append(f"At equal {what}, {row.label} against {other}: {found.verdict} ({found}).")
    if apart := [found.key for found in comparison.differences if not found.meant]:
        sentences.append(f"The rows also differ in {listed(apart)}.")
    return " ".join(sentences)


def forgetting_words(tables: Sequence[Any]) -> list[str]:
    """For each direction, the paired differences in forgetting with their intervals: numbers, and no claim."""
    said: dict[str, list[str]] = {}
    for found in tables:
        own = ", own optimizers" if inside(found, "settings", "native") is True else ""
        for row in records(found, "rows"):
            mean, low, high = (real(row, f"forgetting_difference{end}") for end in ("", "_low", "_high"))
            level = real(row, "confidence")
            if mean is None:
                continue
            spread = "one seed, which shows nothing yet"
            if low is not None and high is not None and level is not None:
                spread = f"{percent(level)} confidence interval [{signed(low)}, {signed(high)}]"
            where = f"Forgetting, {row.get('direction', '')}{own}, against {row.get('baseline', '')}"
            said.setdefault(where, []).append(f"{row.get('architecture', '')} {signed(mean)} nats per token ({spread})")
    return [
        f"{where}: {'; '.join(words[:NAMED])}{f' and {len(words) - NAMED} more' if len(words) > NAMED else ''}."
        for where, words in said.items()
    ]


def _known(row: Row) -> PairedDifference:
    assert row.difference is not None
    return row.difference


def _turned(row: Row, text: HeldOutRows) -> bool:
    """Whether a difference that is shown has the other sign on another text, and is shown there, too."""
    found = text.differences.get(row.label)
    return found is not None and {found.verdict, _known(row).verdict} == {"better", "worse"}


def _unsure(row: Row, text: HeldOutRows) -> bool:
    """Whether a difference that is shown is not shown on another text."""
    found = text.differences.get(row.label)
    return found is not None and found.verdict == "no difference shown"


def _interval(row: Row, comparison: Comparison) -> str:
    found, level = _known(row), percent(comparison.confidence)
    mean, low, high = (signed(value or 0.0) for value in (found.mean, found.low, found.high))
    return f"{mean} nats per token, {level} confidence interval [{low}, {high}], {found.n} paired seeds"


def _reached(rows: Sequence[Row]) -> str:
    """How many seeds the rows have and how far their intervals reach: what is not shown may still be there."""
    found = []
    for row in rows[:NAMED]:
        low, high = (signed(value or 0.0) for value in (_known(row).low, _known(row).high))
        wide = "is wide and reaches" if _known(row).n <= FEW else "reaches"
        about = f"{row.label}, " if len(rows) > 1 else ""
        found.append(f"{about}{_known(row).n} seeds: the interval {wide} from {low} to {high}")
    return "; ".join(found)


def titled(labels: Sequence[str], runs: Sequence[RunData]) -> str:
    """Which architectures were trained on which corpora."""
    folders = filter(None, (inside(run.facts, "corpus", "folder") for run in runs))
    corpora = sorted({Path(str(folder)).name for folder in folders})
    return f"{listed(labels)} on {listed(corpora)}" if corpora else listed(labels)


def _again(runs: Sequence[RunData]) -> list[tuple[str, str, str]]:
    """For each label, how its first run is trained again."""
    found = []
    for run in first_of_each([run for run in runs if not run.imported]):
        words = ["stepformer", "train", str(run.folder / "config.toml"), "--out", f"{run.folder}-again"]
        for plugin in run.facts.get("plugins") or []:
            words += ["--plugin", str(plugin)]
        words += ["--label", run.label]
        try:
            toml = as_toml(run.config) if run.config else ""
        except StepformerError:
            toml = ""
        found.append((run.label, shlex.join(words), toml))
    return found
