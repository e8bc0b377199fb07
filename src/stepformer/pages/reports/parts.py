"""The tables of a report, from the runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stepformer.pages.reports.charts import inside, layers_of, real, result
from stepformer.pages.reports.collect import RunData
from stepformer.present.tables import MINUS, NOTHING, TIMES, Cell, Column, Table, columns, number, text
from stepformer.study import Comparison, Row, summarise
from stepformer.study.tables import MARK, losses_of, percent, reach


def comparison_table(comparison: Comparison) -> Table:
    """Every architecture against the baseline, with all that is known about it."""
    interval = f"{percent(comparison.confidence)} interval"
    titles = columns(
        Column("architecture"),
        Column("n", True, "runs"),
        Column("final loss", True, "mean over seeds, nats per token"),
        Column("± se", True, "standard error of the mean"),
        Column("difference", True, f"to {comparison.baseline}, paired by seed; below zero is better"),
        Column(interval, True, "Student's t on the paired differences"),
        Column("parameters", True),
        Column("p", True, "chance of a difference this large if there were none"),
        Column("verdict"),
        Column("best loss", True, "lowest evaluation, mean over seeds"),
        Column("tokens to baseline", True, "part of the budget after which the baseline's final loss was reached"),
        Column("speed", True, "training tokens per second over the baseline's"),
        Column("time", True, "seconds for the same tokens over the baseline's"),
        Column("seeds"),
    )
    notes = [losses_of(comparison), *comparison.notes]
    return Table(titles, [_comparison_row(row) for row in comparison.rows], "Comparison with the baseline", notes)


def _comparison_row(row: Row) -> list[Cell]:
    difference = row.difference
    bounds = _bounds(difference.low, difference.high) if difference else Cell(NOTHING)
    told = row.verdict in ("better", "worse") and not row.provisional
    return [
        text(row.label),
        number(row.loss.n, "d"),
        number(row.loss.mean),
        number(row.loss.standard_error),
        number(difference.mean if difference else None, "+.4f"),
        bounds,
        number(row.parameters, ",d"),
        number(difference.p_value if difference else None, ".2g"),
        text(row.verdict + (MARK if row.provisional else ""), marked=told),
        number(row.best.mean),
        Cell(reach(row).replace("-", NOTHING), row.tokens_fraction),
        number(row.speed_ratio, ".2f", f" {TIMES}"),
        number(row.time_ratio, ".2f", f" {TIMES}"),
        text(", ".join(map(str, row.seeds))),
    ]


def runs_table(runs: Sequence[RunData]) -> Table:
    """Every run by itself: what was measured, where it lies."""
    titles = columns(
        Column("run"),
        Column("seed", True),
        Column("state"),
        Column("final loss", True, "of a run that is not finished: its latest evaluation"),
        Column("best loss", True),
        Column("at step", True, "of the best loss"),
        Column("steps", True),
        Column("tokens", True),
        Column("tokens/s", True),
        Column("time", True, "spent in training steps"),
        Column("parameters", True),
        Column("evaluated on", True, "tokens"),
        Column("config", hint="hash of all settings that decide the result"),
        Column("folder"),
    )
    rows = []
    for run in runs:
        record = run.record
        curve = run.evaluation
        last = curve.loss[-1] if len(curve) else None
        best = min(range(len(curve)), key=curve.loss.__getitem__) if len(curve) else None
        spent = next((c.seconds[-1] for c in (run.training, curve) if len(c)), None)
        done = max((c.step[-1] for c in (run.training, curve) if len(c)), default=None)
        tokens = max((c.tokens[-1] for c in (run.training, curve) if len(c)), default=None)
        seconds = record.train_seconds if record else spent
        rows.append(
            [
                text(run.label),
                number(run.seed, "d"),
                text(short_state(run), marked=record is None),
                number(record.val_loss if record else last),
                number(record.best_val_loss if record else (None if best is None else curve.loss[best])),
                number(record.best_step if record else (None if best is None else curve.step[best]), ",d"),
                number(record.steps if record else done, ",d"),
                number(record.tokens if record else tokens, ",d"),
                number(record.tokens_per_second if record else None, ",.0f"),
                Cell(NOTHING) if seconds is None or math.isnan(seconds) else Cell(duration(seconds), seconds),
                number(record.parameters if record else None, ",d"),
                number(record.val_tokens if record else None, ",d"),
                text(record.config_hash if record else "", code=bool(record)),
                text(run.folder, code=True),
            ]
        )
    return Table(titles, rows, "All runs")


def short_state(run: RunData) -> str:
    if run.record:
        return "finished"
    return run.state.split(":")[0].lower() if run.state.startswith(("Unfinished", "Failed")) else "damaged"


def duration(seconds: float) -> str:
    """4.2 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


WINDOWS = Column("windows", hint="hash of the windows: only numbers that agree in it may be compared")


def measured_on(found: dict[str, Any]) -> tuple[Cell, Cell]:
    """Tokens and the beginning of the windows' hash."""
    return number(real(found.get("tokens")), ",.0f"), text(str(found.get("windows_hash") or "")[:8], code=True)


def hessian_table(runs: Sequence[RunData]) -> Table | None:
    titles = columns(
        Column("run"),
        Column("loss", True, "on the tokens of the measurement"),
        Column("largest eigenvalue", True, "of largest magnitude, with its sign"),
        Column("residual", True),
        Column("trace", True),
        Column("± se", True),
        Column("trace per parameter", True),
        Column("protocol"),
        Column("tokens", True),
        WINDOWS,
        Column("step", True, "of the checkpoint"),
    )
    rows, unsure = [], []
    for run in runs:
        found = result(run, "hessian")
        if not found:
            continue
        listed = found.get("eigenvalues")
        first = listed[0] if isinstance(listed, list) and listed else None
        if any(inside(entry, "converged") is False for entry in (listed if isinstance(listed, list) else [])):
            unsure.append(run.name)
        values = (
            number(real(found.get("loss"))),
            number(real(inside(first, "value")), ".4g"),
            number(real(inside(first, "residual")), ".1e"),
            number(real(inside(found, "trace", "mean")), ".5g"),
            number(real(inside(found, "trace", "standard_error")), ".2g"),
            number(real(found.get("trace_per_parameter")), ".3g"),
            text(inside(found, "settings", "protocol") or ""),
            *measured_on(found),
            number(real(run.measured["hessian"].get("step")), ",.0f"),
        )
        rows.append([text(run.name), *values])
    notes = [f"Some eigenvalues had not converged: {', '.join(unsure)}."] if unsure else []
    return Table(titles, rows, "Curvature of the loss", notes) if rows else None


SUMMARY = {
    "persistence": ("persistence", "sum over layers of the logarithm of the last singular value kept"),
    "mean_spread": ("mean spread", "first singular value over the last one kept"),
    "max_spread": ("largest spread", ""),
    "mean_stable_rank": ("mean stable rank", ""),
    "mean_sigma_max": ("mean largest singular value", ""),
    "sum_log_rms_gain": ("sum of log gains", "of the root mean square gain, over layers"),
}


def jacobian_table(runs: Sequence[RunData]) -> Table | None:
    rows, unsure = [], []
    for run in runs:
        summary = inside(result(run, "jacobian"), "summary", "block")
        if isinstance(summary, dict):
            layers = [inside(layer, "block") for layer in layers_of(run, "jacobian")]
            kept = sorted({k for layer in layers if (k := real(inside(layer, "k"))) is not None})
            if any(inside(layer, "converged") is False for layer in layers):
                unsure.append(run.name)
            values = (number(real(summary.get(key)), ".4g") for key in SUMMARY)
            on = measured_on(result(run, "jacobian"))
            rows.append([text(run.name), text(", ".join(f"{k:.0f}" for k in kept)), *values, *on])
    titles = columns(
        Column("run"),
        Column("k", hint="singular values kept of each layer: only numbers that agree in it may be compared"),
        *(Column(title, True, hint) for title, hint in SUMMARY.values()),
        Column("tokens", True),
        WINDOWS,
    )
    notes = [f"Some singular values had not settled and may be too low: {', '.join(unsure)}."] if unsure else []
    return Table(titles, rows, "Jacobians of the blocks, over all layers", notes) if rows else None


def forgetting_table(found: Any, folder: object) -> Table | None:
    """Forgetting and plasticity with their paired differences; other records in columns as they come."""
    own = ", with the runs' own optimizers" if inside(found, "settings", "native") is True else ""
    caption = f"Forgetting in {folder}{own}"
    rows = inside(found, "rows")
    records = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    if not records or not all(
        {"architecture", "direction", "forgetting", "plasticity"} <= row.keys() for row in records
    ):
        return generic_table(found, caption)
    shown = [Column("architecture"), Column("direction"), Column("n", True, "runs")]
    for what, corpus, meaning in (
        ("forgetting", "source", "rise of the loss on the first corpus; less is better"),
        ("plasticity", "target", "fall of the loss on the second corpus; more is better"),
    ):
        shown += [
            Column(f"{corpus} loss before", True),
            Column("after", True),
            Column(what, True, meaning),
            Column("± se", True, "standard error over seeds"),
            Column("difference", True, "to the baseline, paired by seed"),
            Column("interval", True, "Student's t on the paired differences"),
        ]
    cells = []
    for row in records:
        line = [text(row["architecture"]), text(row["direction"]), number(real(row.get("n")), ".0f")]
        for what, corpus in (("forgetting", "source"), ("plasticity", "target")):
            low, high = (real(row.get(f"{what}_difference_{end}")) for end in ("low", "high"))
            line += [number(real(row.get(f"{corpus}_{when}"))) for when in ("before", "after")]
            line += [number(real(row.get(key))) for key in (what, f"{what}_standard_error")]
            line += [number(real(row.get(f"{what}_difference")), "+.4f"), _bounds(low, high)]
        cells.append(line)
    baseline, confidence = records[0].get("baseline"), real(records[0].get("confidence"))
    notes = ["Nats per token. ± is the standard error over seeds."]
    if baseline is not None and confidence is not None:
        notes = [f"{notes[0]} Differences are to {baseline}, paired by seed, with {percent(confidence)} intervals."]
    return Table(shown, cells, caption, notes)


def _bounds(low: float | None, high: float | None) -> Cell:
    if low is None or high is None:
        return Cell(NOTHING)
    return Cell(f"[{low:+.4f}, {high:+.4f}]".replace("-", MINUS), low)


FIRST = ("architecture", "label", "direction", "baseline", "seed", "n")  # columns that say what a row is about


def generic_table(found: Any, caption: str) -> Table | None:
    """Any list of records under `rows`: a column for every key."""
    rows = inside(found, "rows")
    records = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    keys = list(dict.fromkeys(key for record in records for key in record))
    keys.sort(key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST))  # stable: the others stay in order
    if not keys:
        return None
    numeric = {key: all(isinstance(r.get(key), int | float | None) for r in records) for key in keys}
    shown = [[_any(record.get(key)) for key in keys] for record in records]
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
    return (
        str(run.facts.get("stepformer") or ""),
        revision,
        str(inside(found, "versions", "python") or ""),
        str(inside(found, "versions", "torch") or ""),
        machine,
        str(found.get("threads") or ""),
        str(run.facts.get("precision") or ""),
        str(found.get("platform") or ""),
    )


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
