"""Which runs of one table or chart were measured alike, and a sentence where they were not.

Two numbers may be compared when all that decides them agrees: the tokens they were measured on and the settings that
change the quantity. What a result does not say, an older one say, is taken to agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepformer.pages.reports.collect import RunData
from stepformer.pages.reports.values import grouped, inside, real, record, records
from stepformer.present.tables import listed

Facts = dict[str, Any]
"""What decides a number, by the name that a reader knows it by."""

SETTINGS = {
    "hessian": ("protocol", "method", "windows", "context", "normalise"),
    "jacobian": ("windows", "window_batch", "context", "iterations"),
    "depth": ("windows", "context"),
    "balance": ("windows", "context"),
}
SENTENCES = {
    "perplexity": ("scored on other tokens or read in another way", "these rows"),
    "tasks": ("asked other items or with other shots", "these rows"),
}
DIAGNOSED = ("measured on other windows or with other settings", "these rows and lines")


def cautions(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """For each kind of measurement, sentences on which runs are not to be compared with which."""
    found: dict[str, list[str]] = {}
    for kind in (*SETTINGS, *SENTENCES):
        told = ((subject, (run.name, facts)) for run in runs for subject, facts in facts_of(run, kind).items())
        how, what = SENTENCES.get(kind, DIAGNOSED)
        for subject, measured in grouped(told).items():
            for names, others, differing in _apart(measured):
                who = f"{subject}: " * bool(subject) + listed(names, len(names))
                were, than = "was" if len(names) == 1 else "were", listed(others, len(others))
                sentence = f"{who} {were} {how} ({', '.join(differing)}) than {than}: do not compare {what}."
                found.setdefault(kind, []).append(sentence)
    return found


def facts_of(run: RunData, kind: str) -> dict[str, list[Facts]]:
    """What decides the numbers of a run, by what they are about: a text, a task, or nothing in particular."""
    found = run.result(kind)
    if kind in SETTINGS:
        return {"": [_diagnosed(run, kind)]} if found else {}
    told = [(name, {what: real(entry, what) for what in ("shots", "items")}) for name, entry in tasks_of(run)]
    if kind == "perplexity":
        read = ("mode", "stride", "tokens", "hash")
        texts = records(found, "texts")
        told = [(str(entry.get("name", "")), {what: entry.get(what) for what in read}) for entry in texts]
    return grouped(told)


def tasks_of(run: RunData) -> list[tuple[str, dict[str, Any]]]:
    """The downstream tasks that a run was asked, each with what came out."""
    tasks = ((key, entry) for key, entry in record(run.result("tasks"), "tasks").items() if isinstance(entry, dict))
    return [(str(entry.get("task") or key.partition("@")[0]), entry) for key, entry in tasks]


def _diagnosed(run: RunData, kind: str) -> Facts:
    found = run.result(kind)
    facts: Facts = {"windows hash": found.get("windows_hash"), "tokens": real(found, "tokens")}
    if kind == "jacobian":
        kept = {real(layer, "block", "k") for layer in run.layers(kind)} - {None}
        facts["k"] = kept or None
    for name in SETTINGS[kind]:
        value = inside(found, "settings", name)
        facts[name] = inside(run.measured[kind], "settings", name) if value is None else value
    return facts


def _apart(measured: Sequence[tuple[str, list[Facts]]]) -> list[tuple[list[str], list[str], list[str]]]:
    """Runs that agree with none before them, those before them, and in what they differ."""
    groups: list[tuple[list[str], list[Facts]]] = []
    for name, facts in measured:
        group = next((names for names, known in groups if not _differing(known, facts)), None)
        if group is None:
            groups.append(([name], facts))
        else:
            group.append(name)
    found = []
    for place, (names, facts) in enumerate(groups[1:], start=1):
        differing = [what for _, known in groups[:place] for what in _differing(known, facts)]
        others = [name for before, _ in groups[:place] for name in before]
        found.append((names, others, list(dict.fromkeys(differing))))
    return found


def _differing(known: Sequence[Facts], facts: Sequence[Facts]) -> list[str]:
    """In what two runs differ where they are closest to each other; nothing if some of their numbers agree."""
    pairs = [
        [what for what in a if a[what] is not None and b.get(what) is not None and a[what] != b[what]]
        for a in known
        for b in facts
    ]
    return min(pairs, key=len, default=[])
