"""Tables of a report on other texts and downstream tasks, in the words of `stepformer eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepformer.pages.reports.agreement import tasks_of
from stepformer.pages.reports.collect import RunData
from stepformer.pages.reports.values import cell, real, records
from stepformer.present.tables import NOTHING, Cell, Column, Table, columns, listed, number, text

CHANCE = {"hellaswag": 25.0, "arc_easy": 25.0, "arc_challenge": 25.0}  # percent: one of four answers
ACCURACIES = ("acc", "acc_norm")


def perplexity_table(runs: Sequence[RunData]) -> Table | None:
    titles = columns(
        Column("run"),
        Column("text"),
        Column("reading", hint="how the text was cut into windows, and how far they move"),
        Column("perplexity", True),
        Column("nats per token", True),
        Column("bits per byte", True),
        Column("tokens", True),
        Column("hash", hint="of the tokens that were scored: only numbers that agree in it may be compared"),
    )
    rows = []
    for run in runs:
        found = run.result("perplexity")
        for entry in records(found, "texts"):
            stride = real(entry, "stride")
            reading = f"{entry.get('mode', '')}{'' if stride is None else f', {stride:.0f}'}"
            words = (
                text(run.name),
                text(entry.get("name", "")),
                text(reading),
                cell(entry, "perplexity", digits=".3f"),
            )
            numbers = (cell(entry, "nats"), cell(entry, "bits_per_byte"), cell(entry, "tokens", digits=",.0f"))
            rows.append([*words, *numbers, text(str(entry.get("hash", ""))[:12], code=True)])
        mean = real(found, "mean_perplexity")
        if mean is not None:
            over, _, reading = str(found.get("protocol") or "mean").partition("; ")
            rows.append([text(run.name), text(over), text(reading), number(mean, ".3f"), *[Cell(NOTHING)] * 4])
    return Table(titles, rows, "Perplexity on other texts") if rows else None


def tasks_table(runs: Sequence[RunData]) -> Table | None:
    entries = [(run, task, found) for run in runs for task, found in tasks_of(run)]
    if not entries:
        return None
    error = "standard error"
    fields = [
        (Column("run"), lambda run, task, found: text(run.name)),
        (Column("task"), lambda run, task, found: text(task)),
        (Column("shots", True), lambda run, task, found: cell(found, "shots", digits=",.0f")),
        (Column("items", True), lambda run, task, found: _asked(found)),
        (Column("acc %", True, f"± is the {error} over items"), lambda run, task, found: _percent(found, "acc")),
        (
            Column("acc_norm %", True, f"with scores divided by the length of the answer; ± is the {error}"),
            lambda run, task, found: _percent(found, "acc_norm"),
        ),
    ]
    if any(task in CHANCE for _, task, _ in entries):
        chance = Column("chance %", True, "of guessing")
        fields.append((chance, lambda run, task, found: number(CHANCE.get(task), ".0f")))
    if any(_others(found) for _, _, found in entries):
        fields.append((Column("other"), lambda run, task, found: text(_others(found))))
    remarks: dict[str, list[str]] = {}
    for run, task, found in entries:
        for remark in _remarks(task, found):
            remarks.setdefault(remark, []).append(run.name)
    notes = [f"{remark} ({listed(names)})." for remark, names in remarks.items()]
    rows = [[made(*entry) for _, made in fields] for entry in entries]
    return Table([column for column, _ in fields], rows, "Downstream tasks", notes)


def _asked(found: Mapping[str, Any]) -> Cell:
    """How many items, and of how many if not of all."""
    items, whole = real(found, "items"), real(found, "of")
    if items is None or whole is None or whole == items:
        return number(items, ",.0f")
    return Cell(f"first {items:,.0f} of {whole:,.0f}", items)


def _remarks(task: str, found: Mapping[str, Any]) -> list[str]:
    items, whole, cut, shots = (real(found, key) for key in ("items", "of", "cut", "shots"))
    title = task if shots is None else f"{task} {shots:.0f}-shot"
    remarks = []
    if items is not None and whole is not None and whole != items:
        remarks.append(f"{title}: the first {items:,.0f} of {whole:,.0f} items")
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
