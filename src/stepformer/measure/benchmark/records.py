"""Measurements as files: every process that measured is one entry, with its machine, settings and raw times."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from stepformer.base.errors import InputError
from stepformer.base.files import read_json, write_text
from stepformer.measure.benchmark.planning import BASELINE, SHAPE

FORMAT = 1
Record = dict[str, Any]
Process = dict[str, Any]  # date, commit, versions, device, settings, product, results


def write(path: Path, processes: list[Process]) -> None:
    write_text(path, as_json(processes))


def as_json(processes: list[Process]) -> str:
    """The text of a file: indented, with every list of numbers on one line."""
    text = json.dumps(finite({"format": FORMAT, "processes": processes}), indent=2, sort_keys=True)
    return re.sub(r"\[\s+([-\d.,e+\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def read(path: Path) -> list[Process]:
    """The processes of one file."""
    document = read_json(path, "benchmark result")
    if not isinstance(document, dict) or document.get("format") != FORMAT or "processes" not in document:
        raise InputError(f"'{path}' is not a result of `stepformer bench --json`.")
    return list(document["processes"])


def read_all(where: Path) -> list[Process]:
    """The processes of a file, or of a folder of JSON files, the newest last."""
    paths = sorted(where.glob("*.json")) if where.is_dir() else [where]
    if not paths:
        raise InputError(f"There are no JSON files in '{where}': write some with `stepformer bench --json FILE`.")
    return sorted((each for path in paths for each in read(path)), key=lambda process: str(process["date"]))


def finite(value: Any) -> Any:
    """The same data with None for numbers that JSON has no word for."""
    return json.loads(json.dumps(value), parse_constant=lambda word: None)


def frame(record: Record) -> tuple[Any, ...]:
    """What a ratio keeps equal (`Case.frame`), from a stored record."""
    return (*(record["config"].get(key) for key in SHAPE), record["kernels"], record["streams"])


def pairs(results: Iterable[Record]) -> list[tuple[Record, Record]]:
    """Every record with the vanilla that was measured first under the same conditions in its process."""
    results = list(results)
    baselines = {frame(record): record for record in reversed(results) if record["label"] == BASELINE}
    return [(record, baselines.get(frame(record), {})) for record in results]


def in_order(processes: Iterable[Process]) -> list[tuple[Record, Record]]:
    """All measurements beside the vanilla of their process, what counts last: of more steps, then the newer one; of
    several ways to store streams in one process the first.

    Vanilla itself is that of the process with the most rows: one card is some per cent faster than another, so that its
    speed alone says little without theirs.
    """
    by_date = sorted(processes, key=lambda process: str(process["date"]))
    by_steps = sorted(by_date, key=lambda process: process["settings"]["steps"])
    by_rows = sorted(by_date, key=lambda process: (process["settings"]["steps"], len(process["results"])))
    found = [pair for process in by_steps for pair in _within(process) if pair[0]["label"] != BASELINE]
    return found + [pair for process in by_rows for pair in _within(process) if pair[0]["label"] == BASELINE]


def judged_ones(processes: Iterable[Process]) -> list[tuple[Record, Record]]:
    """Those that targets and pages are about, in the same order: on a GPU, at the size small, with kernels."""
    small = [each for each in processes if each["device"]["kind"] == "cuda" and each["settings"]["size"] == "small"]
    return [pair for pair in in_order(small) if pair[0]["kernels"] != "off"]


def _within(process: Process) -> list[tuple[Record, Record]]:
    """The pairs of a process in the order of their labels, the first of each label last."""
    found: dict[str, list[tuple[Record, Record]]] = {}
    for pair in pairs(process["results"]):
        found.setdefault(pair[0]["label"], []).insert(0, pair)
    return [pair for same in found.values() for pair in same]


def ratio(record: dict[str, Any], baseline: dict[str, Any]) -> float:
    """The speed as a part of vanilla's: of the steps taken in turn with it, or of those it took before."""
    if "beside" in record:
        return float(record["beside"]["median_ms"] / record["forward_backward"]["median_ms"])
    return float(record["tokens_per_second"] / baseline["tokens_per_second"])


def value_of(quantity: str, record: dict[str, Any], baseline: dict[str, Any]) -> float | None:
    """One measured quantity of a record, in the unit of its target; None if it was not measured."""
    ways: dict[str, Callable[[], float]] = {
        "ktok/s": lambda: record["tokens_per_second"] / 1000,
        "peak GiB": lambda: record["memory"]["peak_bytes"] / 2**30,
        "ratio": lambda: ratio(record, baseline),
        "ratio by FLOPs": lambda: ratio(record, baseline) * record["flops_per_token"] / baseline["flops_per_token"],
        "optimizer % of a step": lambda: 100 * record["batch"]["optimizer_share"],
        "decode tok/s": lambda: record["decode"]["tokens_per_second"],
        "decode ratio": lambda: record["decode"]["tokens_per_second"] / baseline["decode"]["tokens_per_second"],
    }
    try:
        return ways[quantity]()
    except (KeyError, TypeError):
        return None
