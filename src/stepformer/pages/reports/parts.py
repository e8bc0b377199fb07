"""The tables of a report, from the runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from stepformer.base.units import hours_and_minutes
from stepformer.pages.reports.collect import RunData
from stepformer.pages.reports.values import cell, inside, real, records
from stepformer.present.tables import NOTHING, TIMES, Cell, Column, Table, columns, number, signed, tabulated, text
from stepformer.study import Comparison, summarise
from stepformer.study.tables import MARK, losses_of, percent, reach


def comparison_table(comparison: Comparison) -> Table:
    """Every architecture against the baseline, with all that is known about it."""
    to_baseline = f"to {comparison.baseline}, paired by seed; below zero is better"
    fields = (
        (Column("architecture"), lambda row: text(row.label)),
        (Column("n", True, "runs"), lambda row: number(row.loss.n, "d")),
        (Column("final loss", True, "mean over seeds, nats per token"), lambda row: number(row.loss.mean)),
        (Column("± se", True, "standard error of the mean"), lambda row: number(row.loss.standard_error)),
        (Column("difference", True, to_baseline), lambda row: number(row.difference and row.difference.mean, "+.4f")),
        (
            Column(f"{percent(comparison.confidence)} interval", True, "Student's t on the paired differences"),
            lambda row: _bounds(row.difference and row.difference.low, row.difference and row.difference.high),
        ),
        (Column("parameters", True), lambda row: number(row.parameters, ",d")),
        (
            Column("p", True, "chance of a difference this large if there were none"),
            lambda row: number(row.difference and row.difference.p_value, ".2g"),
        ),
        (
            Column("verdict"),
            lambda row: text(
                row.verdict + (MARK if row.provisional else ""),
                marked=row.verdict in ("better", "worse") and not row.provisional,
            ),
        ),
        (Column("best loss", True, "lowest evaluation, mean over seeds"), lambda row: number(row.best.mean)),
        (
            Column("tokens to baseline", True, "part of the budget after which the baseline's final loss was reached"),
            lambda row: Cell(reach(row).replace("-", NOTHING), row.tokens_fraction),
        ),
        (Column("speed", True, "training tokens per second over the baseline's"), lambda row: _times(row.speed_ratio)),
        (Column("time", True, "seconds for the same tokens over the baseline's"), lambda row: _times(row.time_ratio)),
        (Column("seeds"), lambda row: text(", ".join(map(str, row.seeds)))),
    )
    notes = [losses_of(comparison), *comparison.notes]
    return tabulated(comparison.rows, fields, "Comparison with the baseline", notes)


def _times(ratio: float | None) -> Cell:
    return number(ratio, ".2f", f" {TIMES}")


def _bounds(low: float | None, high: float | None) -> Cell:
    if low is None or high is None:
        return Cell(NOTHING)
    return Cell(f"[{signed(low)}, {signed(high)}]", low)


def runs_table(runs: Sequence[RunData]) -> Table:
    """Every run by itself: what was measured, where it lies."""

    def known(name: str, digits: str = ".4f") -> Callable[[RunData], Cell]:
        return lambda run: number(getattr(run.record or run.so_far, name, None), digits)

    fields = (
        (Column("run"), lambda run: text(run.label)),
        (Column("seed", True), lambda run: number(run.seed, "d")),
        (Column("state"), lambda run: text(short_state(run), marked=run.record is None)),
        (Column("final loss", True, "of a run that is not finished: its latest evaluation"), known("val_loss")),
        (Column("best loss", True), known("best_val_loss")),
        (Column("at step", True, "of the best loss"), known("best_step", ",d")),
        (Column("steps", True), known("steps", ",d")),
        (Column("tokens", True), known("tokens", ",d")),
        (Column("tokens/s", True), known("tokens_per_second", ",.0f")),
        (
            Column("time", True, "spent in training steps"),
            lambda run: _time((run.record or run.so_far).train_seconds),
        ),
        (Column("parameters", True), known("parameters", ",d")),
        (Column("evaluated on", True, "tokens"), known("val_tokens", ",d")),
        (
            Column("config", hint="hash of all settings that decide the result"),
            lambda run: text(run.record.config_hash if run.record else "", code=bool(run.record)),
        ),
        (Column("folder"), lambda run: text(run.folder, code=True)),
    )
    return tabulated(runs, fields, "All runs")


def _time(seconds: float | None) -> Cell:
    return Cell(NOTHING) if seconds is None or math.isnan(seconds) else Cell(hours_and_minutes(seconds), seconds)


def short_state(run: RunData) -> str:
    if run.record:
        return "finished"
    return run.state.split(":")[0].lower() if run.state.startswith(("Unfinished", "Failed")) else "damaged"


def _measured(kind: str, *path: str | int, digits: str = ".4f") -> Callable[[RunData], Cell]:
    return lambda run: cell(run.result(kind), *path, digits=digits)


def _measured_on(kind: str) -> tuple[tuple[Column, Callable[[RunData], Cell]], ...]:
    """Tokens and the beginning of the windows' hash."""
    hint = "hash of the windows: only numbers that agree in it may be compared"
    return (
        (Column("tokens", True), _measured(kind, "tokens", digits=",.0f")),
        (Column("windows", hint=hint), lambda run: text(run.windows(kind)[:8], code=True)),
    )


def hessian_table(runs: Sequence[RunData]) -> Table | None:
    kind, first = "hessian", ("eigenvalues", 0)
    fields = (
        (Column("run"), lambda run: text(run.name)),
        (Column("loss", True, "on the tokens of the measurement"), _measured(kind, "loss")),
        (
            Column("largest eigenvalue", True, "of largest magnitude, with its sign"),
            _measured(kind, *first, "value", digits=".4g"),
        ),
        (Column("residual", True), _measured(kind, *first, "residual", digits=".1e")),
        (Column("trace", True), _measured(kind, "trace", "mean", digits=".5g")),
        (Column("± se", True), _measured(kind, "trace", "standard_error", digits=".2g")),
        (Column("trace per parameter", True), _measured(kind, "trace_per_parameter", digits=".3g")),
        (Column("protocol"), lambda run: text(inside(run.result(kind), "settings", "protocol") or "")),
        *_measured_on(kind),
        (Column("step", True, "of the checkpoint"), lambda run: cell(run.measured, kind, "step", digits=",.0f")),
    )
    shown = [run for run in runs if run.result(kind)]
    unsure = [
        run.name for run in shown if any(e.get("converged") is False for e in records(run.result(kind), "eigenvalues"))
    ]
    notes = [f"Some eigenvalues had not converged: {', '.join(unsure)}."] if unsure else []
    return tabulated(shown, fields, "Curvature of the loss", notes) if shown else None


SUMMARY = {
    "persistence": ("persistence", "sum over layers of the logarithm of the last singular value kept"),
    "mean_spread": ("mean spread", "first singular value over the last one kept"),
    "max_spread": ("largest spread", ""),
    "mean_stable_rank": ("mean stable rank", ""),
    "mean_sigma_max": ("mean largest singular value", ""),
    "sum_log_rms_gain": ("sum of log gains", "of the root mean square gain, over layers"),
}


def jacobian_table(runs: Sequence[RunData]) -> Table | None:
    kind, summary = "jacobian", ("summary", "block")

    def kept(run: RunData) -> Cell:
        found = {k for layer in run.layers(kind) if (k := real(layer, "block", "k")) is not None}
        return text(", ".join(f"{k:.0f}" for k in sorted(found)))

    fields = (
        (Column("run"), lambda run: text(run.name)),
        (Column("k", hint="singular values kept of each layer: only numbers that agree in it may be compared"), kept),
        *(
            (Column(title, True, hint), _measured(kind, *summary, key, digits=".4g"))
            for key, (title, hint) in SUMMARY.items()
        ),
        *_measured_on(kind),
    )
    shown = [run for run in runs if isinstance(inside(run.result(kind), *summary), dict)]
    unsure = [
        run.name for run in shown if any(inside(layer, "block", "converged") is False for layer in run.layers(kind))
    ]
    notes = [f"Some singular values had not settled and may be too low: {', '.join(unsure)}."] if unsure else []
    return tabulated(shown, fields, "Jacobians of the blocks, over all layers", notes) if shown else None


LEARNED = (
    ("forgetting", "source", "rise of the loss on the first corpus; less is better"),
    ("plasticity", "target", "fall of the loss on the second corpus; more is better"),
)


def forgetting_table(found: Any, folder: object) -> Table | None:
    """Forgetting and plasticity with their paired differences; other records in columns as they come."""
    own = ", with the runs' own optimizers" if inside(found, "settings", "native") is True else ""
    caption = f"Forgetting in {folder}{own}"
    rows = records(found, "rows")
    if not rows or not all({"architecture", "direction", "forgetting", "plasticity"} <= row.keys() for row in rows):
        return generic_table(found, caption)
    fields = [
        (Column("architecture"), lambda row: text(row["architecture"])),
        (Column("direction"), lambda row: text(row["direction"])),
        (Column("n", True, "runs"), lambda row: cell(row, "n", digits=".0f")),
    ]

    def of(key: str, digits: str = ".4f") -> Callable[[dict[str, Any]], Cell]:
        return lambda row: cell(row, key, digits=digits)

    def interval(what: str) -> Callable[[dict[str, Any]], Cell]:
        return lambda row: _bounds(real(row, f"{what}_difference_low"), real(row, f"{what}_difference_high"))

    for what, corpus, meaning in LEARNED:
        fields += [
            (Column(f"{corpus} loss before", True), of(f"{corpus}_before")),
            (Column("after", True), of(f"{corpus}_after")),
            (Column(what, True, meaning), of(what)),
            (Column("± se", True, "standard error over seeds"), of(f"{what}_standard_error")),
            (Column("difference", True, "to the baseline, paired by seed"), of(f"{what}_difference", "+.4f")),
            (Column("interval", True, "Student's t on the paired differences"), interval(what)),
        ]
    baseline, confidence = rows[0].get("baseline"), real(rows[0], "confidence")
    note = "Nats per token. ± is the standard error over seeds."
    if baseline is not None and confidence is not None:
        note += f" Differences are to {baseline}, paired by seed, with {percent(confidence)} intervals."
    return tabulated(rows, fields, caption, [note])


FIRST = ("architecture", "label", "direction", "baseline", "seed", "n")  # columns that say what a row is about


def generic_table(found: Any, caption: str) -> Table | None:
    """Any list of records under `rows`: a column for every key."""
    rows = records(found, "rows")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    keys.sort(key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST))  # stable: the others stay in order
    if not keys:
        return None
    numeric = {key: all(isinstance(row.get(key), int | float | None) for row in rows) for key in keys}
    shown = [[_any(row.get(key)) for key in keys] for row in rows]
    return Table([Column(key.replace("_", " "), numeric[key]) for key in keys], shown, caption)


def _any(value: Any) -> Cell:
    if value is None or isinstance(value, bool):
        return text("" if value is None else value)
    if isinstance(value, int):
        return number(value, ",d" if abs(value) >= 10_000 else "d")
    if not isinstance(value, float):
        return text(value)
    return number(value, ".4f" if 5e-5 <= abs(value) < 1e4 or value == 0 else ".3g")


def environment_table(runs: Sequence[RunData]) -> Table:
    """One row for every environment that runs were trained in."""
    places: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        places.setdefault(_environment(run), []).append(run.name)
    titles = columns(
        "runs", "stepformer", "source", "Python", "PyTorch", "device", Column("threads", True), "precision", "platform"
    )
    rows = []
    for facts, names in places.items():
        shown = "all" if len(places) == 1 else ", ".join(names)
        rows.append([text(shown), *(text(fact, code=place == 1) for place, fact in enumerate(facts))])
    return Table(titles, rows, "Where the runs were trained")


def _environment(run: RunData) -> tuple[str, ...]:
    found = run.environment
    device, git = inside(found, "device"), inside(found, "git")
    if inside(device, "gpu"):
        machine = f"{inside(device, 'gpus') or 1} {TIMES} {device['gpu']}, CUDA {inside(device, 'cuda')}"
    else:
        machine = f"{inside(device, 'cpu') or 'CPU'}, {inside(device, 'cores')} cores" if device else ""
    revision = str(inside(git, "revision") or "")[:12]
    if revision and inside(git, "changed"):
        revision += " with changes"
    python, torch = (inside(found, "versions", name) for name in ("python", "torch"))
    facts = (run.facts.get("stepformer"), revision, python, torch, machine, found.get("threads"))
    return tuple(str(fact or "") for fact in (*facts, run.facts.get("precision"), found.get("platform")))


def config_tables(runs: Sequence[RunData]) -> tuple[Table, Table]:
    """Settings in which the runs differ, a column for each config, and those that all have in common."""
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key != "train.seed"}
        names = next((names for known, names in groups if known == settings), None)
        if names is None:
            groups.append((settings, [run.label]))
        elif run.label not in names:
            names.append(run.label)
    keys = list(dict.fromkeys(key for settings, _ in groups for key in settings))
    differing, common = [], []
    for key in keys:
        values = [_setting(settings, key) for settings, _ in groups]
        if len(set(values)) > 1:
            differing.append([text(key, code=True), *(text(v, marked=v != values[0]) for v in values)])
        else:
            common.append([text(key, code=True), text(values[0])])
    titles = columns("setting", *(", ".join(names) for _, names in groups))
    return (
        Table(titles, differing, "Settings that differ"),
        Table(columns("setting", "value"), common, "Settings that all runs have in common"),
    )


def _setting(settings: dict[str, Any], key: str) -> str:
    if key not in settings:
        return "default"
    value = settings[key]
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def mean_of(runs: Sequence[RunData], name: str) -> float | None:
    """Mean of a result over the finished runs."""
    values = [float(getattr(run.record, name)) for run in runs if run.record]
    return summarise(values).mean if values else None
