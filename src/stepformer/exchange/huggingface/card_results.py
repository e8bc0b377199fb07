"""What was measured of a run, for its model card: a small table for each kind, and the command that makes it.

Numbers by layer and by token are for the report. Commands are made from the settings, not copied: what was typed may
name places on the machine.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepformer.measure.evaluation.harness import other_metrics, with_error
from stepformer.present.tables import Cell, markdown_cell, markdown_code, markdown_text

MOST_ROWS = 8  # of a table with a line for each text or task
MODULES = {"hessian": "curvature", "jacobian": "jacobian", "depth": "depth"}
Row = Sequence[Any]
Values = Mapping[str, Any]


def section(kind: str, measurement: Values) -> str:
    """The heading, the command, the table and what to know about it; empty where there is nothing to show."""
    if kind not in KINDS:
        return ""
    title, read = KINDS[kind]
    try:
        titles, rows, command, notes = read(kind, measurement["settings"], measurement["result"])
        step = f"{measurement['step']:,}"
    except (KeyError, TypeError, ValueError, AttributeError):  # of another version, or written by hand
        return ""
    if not rows:
        return ""
    if len(rows) > MOST_ROWS:
        notes = [*notes, f"{len(rows) - MOST_ROWS} more are in the run's own file."]
    made = f"{markdown_code(command)}, weights of step {step}. {markdown_text(' '.join(notes))}".rstrip()
    return "\n".join([f"### {title}", "", made, "", markdown(titles, rows[:MOST_ROWS])])


Read = tuple[Row, list[Row], str, list[str]]  # titles, rows, the command, notes


def hessian(kind: str, settings: Values, result: Values) -> Read:
    trace, curve = result.get("trace") or {}, result.get("curve") or {}
    values = [f"{entry['value']:.4g}{'' if entry['converged'] else '?'}" for entry in result.get("eigenvalues") or ()]
    rows = [
        ("loss, nats per token", digits(result.get("loss"))),
        ("largest eigenvalues", ", ".join(values)),
        ("trace", plus_minus(trace.get("mean"), trace.get("standard_error"))),
        ("trace per parameter", digits(result.get("trace_per_parameter"))),
        ("range of the loss curve", digits(curve.get("range"))),
        ("tokens", f"{result['tokens']:,}"),
    ]
    notes = ["± is one standard error."] if trace else []
    notes += ["An eigenvalue with ? had not converged."] if any(value.endswith("?") for value in values) else []
    return ("", ""), [row for row in rows if row[1]], diagnosing(kind, settings), notes


def jacobian(kind: str, settings: Values, result: Values) -> Read:
    titles = ("of a layer", "persistence", "sum of log rms gain", "mean spread")
    keys = ("persistence", "sum_log_rms_gain", "mean_spread")
    rows: list[Row] = [
        (name, *(digits(result["summary"][name].get(key)) for key in keys))
        for name in ("block", "oracle", "joint")
        if name in result["summary"]
    ]
    ranks = sorted({part["k"] for layer in result["layers"] for part in layer.values() if isinstance(part, Mapping)})
    k = " or ".join(map(str, ranks))
    notes = [
        f"Persistence is the sum over layers of the logarithm of singular value {k}, spread the largest over that one.",
        f"{result['tokens']:,} tokens.",
    ]
    return titles, rows, diagnosing(kind, settings), notes


def depth(kind: str, settings: Values, result: Values) -> Read:
    heads = [mean(layer["entropy"]) for layer in result["layers"] if layer.get("entropy")]
    shares = {key: [layer[key] for layer in result["layers"] if layer.get(key) is not None] for key in SHARES}
    rows = [("mean attention entropy, nats", digits(mean(heads)))] if heads else []
    count = len(result["layers"])
    rows += [(SHARES[key], f"{100 * mean(found):.2f} %") for key, found in shares.items() if any(found)]
    rows += [("layers", f"{count}"), ("tokens", f"{result['tokens']:,}")] if rows else []
    return ("", ""), list(rows), diagnosing(kind, settings), []


SHARES = {"capped_rows": "capped rows, mean over layers", "bounded_scores": "bounded scores, mean over layers"}


def tasks(kind: str, settings: Values, result: Values) -> Read:
    entries = sorted(result["tasks"].values(), key=lambda entry: (entry["task"], entry["shots"] or 0))
    other = [", ".join(f"{name} {with_error(entry, name, 1)}" for name in other_metrics(entry)) for entry in entries]
    rows: list[Row] = []
    for entry, rest in zip(entries, other, strict=True):
        items = "" if entry["items"] is None else f"{entry['items']:,}"
        if entry["items"] != entry["of"]:
            items += f" of {entry['of']:,}"
        shots = "" if entry["shots"] is None else entry["shots"]
        accuracies = [with_error(entry, name, 100) for name in ("acc", "acc_norm")]
        rows.append((Path(entry["task"]).name, shots, items, *accuracies, *([rest] if any(other) else [])))
    titles = ("task", "shots", "items", "acc %", "acc_norm %", *(["other"] if any(other) else []))
    words = ["--tasks", ",".join(dict.fromkeys(row[0] for row in rows))]
    shown = sorted({entry["shots"] for entry in entries if entry["shots"] is not None})
    words += ["--shots", ",".join(map(str, shown))] if shown else []
    notes = ["± is one standard error.", f"lm_eval {settings['lm_eval']}." if "lm_eval" in settings else ""]
    return titles, rows, f"stepformer eval RUN {shlex.join(words)}", [note for note in notes if note]


def perplexity(kind: str, settings: Values, result: Values) -> Read:
    titles = ("text", "read in", "nats per token", "perplexity", "bits per byte", "tokens", "hash")
    rows: list[Row] = []
    for entry in result["texts"]:
        mode = entry["mode"] if entry["stride"] is None else f"{entry['mode']} {entry['stride']}"
        numbers = (f"{entry['nats']:.4f}", digits(entry["perplexity"]), digits(entry["bits_per_byte"]))
        rows.append((entry["name"], mode, *numbers, f"{entry['tokens']:,}", Cell(str(entry["hash"]), code=True)))
    notes = ["Only numbers with the same tokens and hash may be compared."]
    command = "stepformer eval RUN --on TEXT"
    if "mean_perplexity" in result:
        command += " --ood --data DIR"
        notes.append(f"Mean perplexity {digits(result['mean_perplexity'])} ({result['protocol']}).")
    return titles, rows, command, notes


KINDS = {
    "hessian": ("Hessian of the loss", hessian),
    "jacobian": ("Jacobians of the layers", jacobian),
    "depth": ("Inside the network", depth),
    "tasks": ("Downstream tasks", tasks),
    "perplexity": ("Perplexity", perplexity),
}


def diagnosing(kind: str, settings: Values) -> str:
    """The command with the settings that are not the default; of a folder only its name."""
    defaults = importlib.import_module(f"stepformer.measure.diagnostics.{MODULES[kind]}").SETTINGS().to_dict()
    return " ".join(["stepformer diagnose RUN", f"--{kind}", *changed(settings, defaults)])


def changed(settings: Values, defaults: Values) -> Iterator[str]:
    for key, value in settings.items():
        if value != defaults.get(key):
            yield shlex.quote(f"{key}={Path(value).name if key == 'corpus' else value}")


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def digits(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def plus_minus(value: float | None, error: float | None) -> str:
    return digits(value) if error is None else f"{digits(value)} ± {error:.2g}"


def markdown(titles: Row, rows: Sequence[Row]) -> str:
    lines = [[cell(value) for value in line] for line in (titles, *rows)]
    lines.insert(1, ["---"] * len(titles))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(value: Any) -> str:
    return markdown_cell(value if isinstance(value, Cell) else Cell(str(value)))
