"""The tables of a report, from the runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from stepformer.base.units import hours_and_minutes
from stepformer.measure.evaluation.perplexity import SEEN, marked_name
from stepformer.pages.reports.agreement import tasks_of
from stepformer.pages.reports.collect import RunData
from stepformer.pages.reports.values import grouped, inside, measured, real, records
from stepformer.present.tables import (
    NOTHING,
    TIMES,
    Cell,
    Column,
    Field,
    Table,
    listed,
    number,
    numbers,
    signed,
    tabulated,
    text,
    words,
)
from stepformer.study import Comparison, Row
from stepformer.study.differences import flat
from stepformer.study.tables import MARK, losses_of, percent, reach

PAIRED = "Student's t on the paired differences"
TIMED = (
    "Time and tokens/s: of all training steps, also those that compile, which in the comparison count as the mean of "
    "the others."
)
CHANCE = {"hellaswag": 25.0, "arc_easy": 25.0, "arc_challenge": 25.0}  # percent: one of four answers
ACCURACIES = ("acc", "acc_norm")


def comparison_table(comparison: Comparison) -> Table:
    """Every architecture against the baseline, with all that is known about it."""

    def verdict(row: Row) -> Cell:
        marked = row.verdict in ("better", "worse") and not row.provisional
        return text(row.verdict + (MARK if row.provisional else ""), marked=marked)

    def reached(row: Row) -> Cell:
        return Cell(reach(row, row.tokens_fraction).replace("-", NOTHING), row.tokens_fraction)

    level, base = percent(comparison.confidence), comparison.baseline
    budget = "part of the budget after which the baseline's final loss was reached"
    fields: list[Field] = [
        words("architecture", lambda row: row.label),
        numbers("n", "loss.n", "d", "runs"),
        numbers("final loss", "loss.mean", hint="mean over seeds, nats per token"),
        numbers("± se", "loss.standard_error", hint="standard error of the mean"),
        numbers("difference", "difference.mean", "+.4f", f"to {base}, paired by seed; below zero is better"),
        (Column(f"{level} interval", True, PAIRED), lambda row: _bounds(row.difference and vars(row.difference))),
        numbers("parameters", "parameters", ",d"),
        numbers("p", "difference.p_value", ".2g", "chance of a difference this large if there were none"),
        (Column("verdict"), verdict),
        numbers("best loss", "best.mean", hint="lowest evaluation, mean over seeds"),
        numbers("training loss", "train.mean", hint="at the end, on fixed training tokens, mean over seeds"),
        (Column("tokens to baseline", True, budget), reached),
        numbers("speed", "speed_ratio", ".2f", "training tokens per second over the baseline's", f" {TIMES}"),
        numbers("time", "time_ratio", ".2f", "seconds for the same tokens over the baseline's", f" {TIMES}"),
        words("seeds", lambda row: ", ".join(map(str, row.seeds))),
    ]
    notes = [losses_of(comparison), *comparison.notes]
    return tabulated(comparison.rows, fields, "Comparison with the baseline", notes)


def _bounds(found: Any, prefix: str = "") -> Cell:
    low, high = (real(found, f"{prefix}{end}") for end in ("low", "high"))
    return Cell(NOTHING) if low is None or high is None else Cell(f"[{signed(low)}, {signed(high)}]", low)


def runs_table(runs: Sequence[RunData]) -> Table:
    """Every run by itself: what was measured, where it lies."""

    def state(run: RunData) -> Cell:
        if run.imported:
            return text("weights alone")
        known = run.state.split(":")[0].lower() if run.state.startswith(("Unfinished", "Failed")) else "damaged"
        return text("finished" if run.record else known, marked=run.record is None)

    def time(run: RunData) -> Cell:
        spent = run.known.train_seconds
        return Cell(NOTHING) if spent is None or math.isnan(spent) else Cell(hours_and_minutes(spent), spent)

    settings = "hash of all settings that decide the result"
    fields: list[Field] = [
        words("run", lambda run: run.label),
        (Column("seed", True), lambda run: Cell(NOTHING) if run.imported else number(run.seed, "d")),
        (Column("state"), state),
        numbers("final loss", "known.val_loss", hint="of a run that is not finished: its latest evaluation"),
        numbers("best loss", "known.best_val_loss"),
        numbers("at step", "known.best_step", ",d", "of the best loss"),
        numbers("training loss", "record.train_loss", hint="at the end, on fixed training tokens"),
        numbers("steps", "known.steps", ",d"),
        numbers("tokens", "known.tokens", ",d"),
        numbers("tokens/s", "known.tokens_per_second", ",.0f"),
        (Column("time", True, "spent in training steps"), time),
        numbers("parameters", "known.parameters", ",d"),
        numbers("evaluated on", "known.val_tokens", ",d", "tokens"),
        words("config", lambda run: run.record.config_hash if run.record else "", settings, code=True),
        words("folder", lambda run: run.folder, code=True),
    ]
    return tabulated(runs, fields, "All runs", [TIMED])


# What was measured of a run: an entry is the whole file, and the run's name beside it.

RUN = words("run", lambda entry: entry["run"])
WINDOWS = "hash of the windows: only numbers that agree in it may be compared"
ON = (
    measured("tokens", "result", "tokens", digits=",.0f"),
    words("windows", lambda entry: str(inside(entry, "result", "windows_hash") or "")[:8], WINDOWS, code=True),
)
EIGENVALUE = ("result", "eigenvalues", 0)
SUMMARY = (
    ("persistence", "persistence", "sum over layers of the logarithm of the last singular value kept"),
    ("mean spread", "mean_spread", "first singular value over the last one kept"),
    ("largest spread", "max_spread", ""),
    ("mean stable rank", "mean_stable_rank", ""),
    ("mean largest singular value", "mean_sigma_max", ""),
    ("sum of log gains", "sum_log_rms_gain", "of the root mean square gain, over layers"),
)


def hessian_table(runs: Sequence[RunData]) -> Table:
    fields = [
        RUN,
        measured("loss", "result", "loss", hint="on the tokens of the measurement"),
        measured("largest eigenvalue", *EIGENVALUE, "value", digits=".4g", hint="of largest magnitude, with its sign"),
        measured("residual", *EIGENVALUE, "residual", digits=".1e"),
        measured("trace", "result", "trace", "mean", digits=".5g"),
        measured("± se", "result", "trace", "standard_error", digits=".2g"),
        measured("trace per parameter", "result", "trace_per_parameter", digits=".3g"),
        words("protocol", lambda entry: inside(entry, "result", "settings", "protocol") or ""),
        *ON,
        measured("step", "step", digits=",.0f", hint="of the checkpoint"),
    ]
    shown = [{**run.measured["hessian"], "run": run.name} for run in runs if run.result("hessian")]
    unsure = [e["run"] for e in shown if any(v.get("converged") is False for v in records(e, *EIGENVALUE[:2]))]
    notes = [f"Some eigenvalues had not converged: {', '.join(unsure)}."] if unsure else []
    return tabulated(shown, fields, "Curvature of the loss", notes)


def loss_at(run: RunData, kind: str) -> float | None:
    """The validation loss of the checkpoint that was measured, the best or the last one of a finished run."""
    if run.record is None:
        return None
    last = inside(run.measured[kind], "step") == run.record.steps
    return run.record.val_loss if last else run.record.best_val_loss


def jacobian_table(runs: Sequence[RunData]) -> Table:
    def blocks(entry: Any, key: str) -> list[Any]:
        return [inside(layer, "block", key) for layer in records(entry, "result", "layers")]

    def kept(entry: Any) -> str:
        return ", ".join(f"{k:.0f}" for k in sorted({k for k in map(real, blocks(entry, "k")) if k is not None}))

    summary = ("result", "summary", "block")
    fields = [
        RUN,
        words("k", kept, "singular values kept of each layer: only numbers that agree in it may be compared"),
        *(measured(title, *summary, key, digits=".4g", hint=hint) for title, key, hint in SUMMARY),
        measured("loss", "loss", hint="validation loss of these weights"),
        *ON,
    ]
    mine = [run for run in runs if "jacobian" in run.measured]
    entries = [{**run.measured["jacobian"], "run": run.name, "loss": loss_at(run, "jacobian")} for run in mine]
    shown = [entry for entry in entries if isinstance(inside(entry, *summary), dict)]
    unsure = [entry["run"] for entry in shown if False in blocks(entry, "converged")]
    notes = [f"Some singular values had not settled and may be too low: {', '.join(unsure)}."] if unsure else []
    return tabulated(shown, fields, "Jacobians of the blocks, over all layers", notes)


def balance_table(runs: Sequence[RunData]) -> Table:
    fields = [
        RUN,
        words("second moments", lambda entry: entry["of"], "of all tokens' answers, or what each token carries"),
        measured("max s / min s", "mean", "ratio", digits=".4g", hint="the largest coordinate's over the smallest's"),
        measured("distance", "mean", "distance", digits=".4g", hint="|D / c - I|, D the diagonal preconditioner"),
        measured("delta / 2", "mean", "bound", digits=".4g", hint="its bound"),
        measured("deviation", "mean", "deviation", digits=".4g", hint="from a scalar, in the Frobenius norm"),
        measured("cosine", "mean", "cosine", digits=".4g", hint="of the update with and without D, after centring"),
        *ON,
    ]
    entries = []
    for run in runs:
        for kind in ("oracle", "stream"):
            if isinstance(found := inside(run.result("balance"), "summary", kind), dict):
                entries.append({**run.measured["balance"], "run": run.name, "of": kind, "mean": found})
    return tabulated(entries, fields, "Balance of second moments, means over layers and turns")


def perplexity_table(runs: Sequence[RunData]) -> Table:
    def reading(entry: Mapping[str, Any]) -> str:
        stride = real(entry, "stride")
        return f"{entry.get('mode', '')}{'' if stride is None else f', {stride:.0f}'}"

    scored = "of the tokens that were scored: only numbers that agree in it may be compared"
    fields = [
        RUN,
        words("text", marked_name),
        words("reading", reading, "how the text was cut into windows, and how far they move"),
        measured("perplexity", "perplexity", digits=".3f"),
        measured("nats per token", "nats"),
        measured("bits per byte", "bits_per_byte"),
        measured("tokens", "tokens", digits=",.0f"),
        words("hash", lambda entry: str(entry.get("hash", ""))[:12], scored, code=True),
    ]
    entries: list[dict[str, Any]] = []
    for run in runs:
        found = run.result("perplexity")
        entries += [{**entry, "run": run.name} for entry in records(found, "texts")]
        if (mean := real(found, "mean_perplexity")) is not None:
            over, _, mode = str(found.get("protocol") or "mean").partition("; ")
            entries.append({"run": run.name, "name": over, "mode": mode, "perplexity": mean})
    notes = [SEEN] if any(entry.get("seen") is True for entry in entries) else []
    return tabulated(entries, fields, "Perplexity on other texts", notes)


def tasks_table(runs: Sequence[RunData]) -> Table:
    entries = [(run.name, task, found) for run in runs for task, found in tasks_of(run)]
    normed = "with scores divided by the length of the answer; ± is the standard error"
    fields: list[Field] = [
        words("run", lambda entry: entry[0]),
        words("task", lambda entry: entry[1]),
        (Column("shots", True), lambda entry: number(real(entry[2], "shots"), ",.0f")),
        (Column("items", True), lambda entry: _asked(entry[2])),
        (Column("acc %", True, "± is the standard error over items"), lambda entry: _percent(entry[2], "acc")),
        (Column("acc_norm %", True, normed), lambda entry: _percent(entry[2], "acc_norm")),
    ]
    if any(task in CHANCE for _, task, _ in entries):
        fields.append((Column("chance %", True, "of guessing"), lambda entry: number(CHANCE.get(entry[1]), ".0f")))
    if any(_others(found) for _, _, found in entries):
        fields.append(words("other", lambda entry: _others(entry[2])))
    remarks = grouped((remark, name) for name, task, found in entries for remark in _remarks(task, found))
    notes = [f"{remark} ({listed(names)})." for remark, names in remarks.items()]
    return tabulated(entries, fields, "Downstream tasks", notes)


def _asked(found: Mapping[str, Any]) -> Cell:
    """How many items, and of how many if not of all."""
    items, whole = real(found, "items"), real(found, "of")
    if items is None or whole is None or whole == items:
        return number(items, ",.0f")
    return Cell(f"first {items:,.0f} of {whole:,.0f}", items)


def _remarks(task: str, found: Mapping[str, Any]) -> list[str]:
    cut, shots = (real(found, key) for key in ("cut", "shots"))
    title = task if shots is None else f"{task} {shots:.0f}-shot"
    remarks = [f"{title}: the {said} items"] if (said := _asked(found).text).startswith("first") else []
    if cut:
        remarks.append(f"{title}: {cut:,.0f} prompts exceed the context and lost their beginning")
    return remarks


def _percent(found: Mapping[str, Any], name: str) -> Cell:
    value, error = real(found, name), real(found, f"{name}_stderr")
    if value is None:
        return Cell(NOTHING)
    return Cell(f"{100 * value:.2f}" + ("" if error is None else f" ± {100 * error:.2f}"), 100 * value)


def _others(found: Mapping[str, Any]) -> str:
    """Metrics that are no accuracy, with their standard errors: perplexity 1,234 ± 56."""
    words = []
    for name, value in found.items():
        # counts are whole numbers, metrics are not: they are written with a point
        if isinstance(value, float) and real(value) is not None and "_stderr" not in name and name not in ACCURACIES:
            base, bracket, kind = name.partition("[")
            error = real(found, f"{base}_stderr{bracket}{kind}")
            spread = "" if error is None else f" ± {error:.2g}"
            if error is not None and "perplexity" in name and error > abs(value):
                spread = " (error unknown)"  # as in the terminal: one item dominates the bootstrap
            words.append(f"{name} {four_digits(value)}{spread}")
    return ", ".join(words)


def four_digits(value: float) -> str:
    """Four significant digits, as one reads them: 0.01234, 1.234, 123,500."""
    rounded = float(f"{value:.4g}")
    return f"{rounded:,.0f}" if 1e3 <= abs(rounded) < 1e9 else f"{rounded:.4g}"


LEARNED = (
    ("forgetting", "source", "rise of the loss on the first corpus; less is better"),
    ("plasticity", "target", "fall of the loss on the second corpus; more is better"),
)


def forgetting_table(found: Any, folder: object) -> Table:
    """Forgetting and plasticity with their paired differences; other records in columns as they come."""
    own = ", with the runs' own optimizers" if inside(found, "settings", "native") is True else ""
    caption = f"Forgetting in {folder}{own}"
    rows = records(found, "rows")
    if not rows or not all({"architecture", "direction", "forgetting", "plasticity"} <= row.keys() for row in rows):
        return generic_table(found, caption)
    fields = [
        words("architecture", lambda row: row["architecture"]),
        words("direction", lambda row: row["direction"]),
        measured("n", "n", digits=".0f", hint="runs"),
    ]
    for what, corpus, meaning in LEARNED:
        bounds = functools.partial(_bounds, prefix=f"{what}_difference_")
        fields += [
            measured(f"{corpus} loss before", f"{corpus}_before"),
            measured("after", f"{corpus}_after"),
            measured(what, what, hint=meaning),
            measured("± se", f"{what}_standard_error", hint="standard error over seeds"),
            measured("difference", f"{what}_difference", digits="+.4f", hint="to the baseline, paired by seed"),
            (Column("interval", True, PAIRED), bounds),
        ]
    baseline, confidence = rows[0].get("baseline"), real(rows[0], "confidence")
    note = "Nats per token. ± is the standard error over seeds."
    if baseline is not None and confidence is not None:
        note += f" Differences are to {baseline}, paired by seed, with {percent(confidence)} intervals."
    return tabulated(rows, fields, caption, [note])


FIRST = ("architecture", "label", "direction", "baseline", "seed", "n")  # columns that say what a row is about


def generic_table(found: Any, caption: str) -> Table:
    """Any list of records under `rows`: a column for every key."""
    rows = records(found, "rows")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    keys.sort(key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST))  # stable: the others stay in order
    numeric = {key: all(isinstance(row.get(key), int | float | None) for row in rows) for key in keys}
    shown = [[_any(row.get(key)) for key in keys] for row in rows if keys]
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
    places = grouped((_environment(run), run.name) for run in runs)
    titles = ("runs", "stepformer", "source", "Python", "PyTorch", "device", "threads", "precision", "platform")
    rows = [
        [text("all" if len(places) == 1 else ", ".join(names)), *(text(f, code=f == facts[1]) for f in facts)]
        for facts, names in places.items()
    ]
    return Table([Column(title, title == "threads") for title in titles], rows, "Where the runs were trained")


def _environment(run: RunData) -> tuple[str, ...]:
    found = run.environment
    git = inside(found, "git")
    revision = str(inside(git, "revision") or "")[:12]
    if revision and inside(git, "changed"):
        revision += " with changes"
    python, torch = (inside(found, "versions", name) for name in ("python", "torch"))
    facts = (run.facts.get("stepformer"), revision, python, torch, machine(run), found.get("threads"))
    precision = None if run.imported else run.facts.get("precision")  # of weights alone nobody knows it
    return tuple(str(fact or "") for fact in (*facts, precision, found.get("platform")))


def machine(run: RunData) -> str:
    """The devices that trained a run."""
    device, ranks = inside(run.environment, "device"), inside(run.environment, "ranks")
    if inside(device, "gpu") and inside(run.facts, "config", "train", "device") != "cpu":
        return f"{ranks or inside(device, 'gpus') or 1} {TIMES} {device['gpu']}, CUDA {inside(device, 'cuda')}"
    return f"{inside(device, 'cpu') or 'CPU'}, {inside(device, 'cores')} cores" if device else ""


def config_tables(runs: Sequence[RunData]) -> tuple[Table, Table]:
    """Settings in which the runs differ, a column for each config, and those that all have in common."""
    groups: list[tuple[dict[str, Any], list[str], dict[str, Any]]] = []
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key != "train.seed"}
        names = next((names for known, names, _ in groups if known == settings), None)
        if names is None:  # a stored config leaves defaults out
            groups.append((settings, [run.label], flat(run.config) if run.config else {}))
        elif run.label not in names:
            names.append(run.label)
    keys = list(dict.fromkeys(key for settings, _, _ in groups for key in settings))
    differing, common = [], []
    for key in keys:
        values = [_setting(settings.get(key, filled.get(key, "default"))) for settings, _, filled in groups]
        if len(set(values)) > 1:
            differing.append([text(key, code=True), *(text(v, marked=v != values[0]) for v in values)])
        else:
            common.append([text(key, code=True), text(values[0])])
    titles = ["setting", *(", ".join(names) for _, names, _ in groups)]
    return (
        Table([Column(title) for title in titles], differing, "Settings that differ"),
        Table([Column("setting"), Column("value")], common, "Settings that all runs have in common"),
    )


def _setting(value: Any) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
