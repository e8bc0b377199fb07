"""Measurements as tables: for the terminal, and as the Markdown page that is kept beside the raw numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stepformer.catalogue import SIZES
from stepformer.measure.benchmark.planning import BASELINE, HOW_COMPILED
from stepformer.measure.benchmark.records import Process, Record, frame, in_order, ratio
from stepformer.present.tables import Cell, Column, Table

Pair = tuple[Record, Record]
PAGE = """\
# How fast the architectures are

Made by `stepformer bench --table benchmarks/results -o benchmarks/README.md` from the JSON files in `results/`, which
hold every step's time, the settings, the versions and the commit; nothing here is typed by hand.
`stepformer bench` measures the same on your machine (`docs/benchmark.md`).
"""
LEGEND = {
    "ktok/s": "thousand tokens a second of forward pass, loss and backward pass, by the median step",
    "ratio": "of that to vanilla's in the same process",
    "ms": "the median step with its quartiles",
    "batch": "ktok/s of a whole step of {tokens} tokens: gradients added up over micro-batches, clipping, optimizer",
    "opt": "clipping and optimizer ({optimizer}), alone and as a part of such a step",
    "GiB": "peak of forward and backward pass, without the optimizer's memory",
    "MFU": "of {peak}, counting 6 operations per weight and token and 12 L T d for attention (linear does fewer)",
    "product": "of the measured rate of one large matrix product",
    "decode": "tokens a second, greedy, cached, {rows}",
    "compile": "seconds of the first step",
}
# What stands in a column: of a record, and of the vanilla that it is compared with.
CELLS: dict[str, Callable[[Record, Record], str]] = {
    "ktok/s": lambda record, _: f"{record['tokens_per_second'] / 1000:,.1f}",
    "ratio": lambda record, vanilla: f"{ratio(record, vanilla):.3f}",
    "ms [q1, q3]": lambda record, _: "{median_ms:.1f} [{q1_ms:.1f}, {q3_ms:.1f}]".format(**record["forward_backward"]),
    "batch": lambda record, _: f"{record['batch']['tokens_per_second'] / 1000:,.1f}",
    "opt ms": lambda record, _: f"{record['optimizer']['median_ms']:.2f}",
    "opt %": lambda record, _: f"{100 * record['batch']['optimizer_share']:.2f}",
    "GiB": lambda record, _: f"{record['memory']['peak_bytes'] / 2**30:.2f}",
    "MFU %": lambda record, _: f"{100 * record['mfu']:.1f}",
    "product %": lambda record, _: f"{100 * record['of_product']:.1f}",
    "decode": lambda record, _: f"{record['decode']['tokens_per_second']:,.0f}",
    "compile s": lambda record, _: f"{record['compile_seconds']:.0f}",
}
SPARE = ("compile s", "product %", "opt ms", "ms [q1, q3]", "opt %", "MFU %", "batch")  # what a narrow terminal misses
BUSY = 1.15
UNEVEN = 1.2  # how far a quotient of speeds may lie from one of steps taken in turn


def made(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, notes: Sequence[str] = ()) -> Table:
    """Cells as text; the first `left` columns are words, the others numbers. What failed or was missed stands out."""
    spare = {name: rank for rank, name in enumerate(SPARE, start=1)}
    columns = [Column(name, i >= left, spare=spare.get(name, 0)) for i, name in enumerate(header)]
    cells = [[Cell(t, t, style="red" if t in ("failed", "NOT reached") else "") for t in row] for row in rows]
    return Table(columns, cells, notes=list(notes))


def speed_table(measured: Sequence[Pair]) -> Table:
    """One row per measurement; columns that are empty, or say the same in every row, are left out."""
    records = [record for record, _ in measured]
    ways = [key for key in ("context", "micro_batch", "kernels", "streams") if len({r[key] for r in records}) > 1]
    header = ["architecture", *(way.replace("_", "-") for way in ways), *CELLS]
    rows, notes = [], []
    for record, baseline in measured:
        cells = [_cell(name, record, baseline) for name in CELLS]
        rows.append([record["label"], *(str(record[way]) for way in ways), *cells])
        notes += [f"{record['label']}: {text}" for text in (*record["notes"], record["error"]) if text]
    empty = [i for i in range(len(header)) if all(row[i] == "" for row in rows)]
    return made(header, rows, notes=notes).without(empty)


def _cell(name: str, record: Record, baseline: Record) -> str:
    """Empty where nothing was measured."""
    if "tokens_per_second" not in record:
        return "failed" if record["error"] and name == "ktok/s" else ""
    try:
        return CELLS[name](record, baseline)
    except (KeyError, TypeError):
        return ""


def legend(process: Process, table: Table) -> str:
    """What the columns of a table mean, and what makes its numbers rough."""
    results = [record for record in process["results"] if "mfu_of" in record]
    shown = {column.title.split(" ")[0] for column in table.columns}
    rows = process["settings"].get("decode_rows") or 1
    text = "; ".join(f"{word}: {meaning}" for word, meaning in LEGEND.items() if word in shown)
    text = text.format(
        tokens=f"{process['settings']['batch_tokens']:,}",
        optimizer=process["settings"]["optimizer"],
        rows="one row" if rows == 1 else f"{rows} rows together",
        peak=results[0]["mfu_of"] if results else "the data sheet",
    )
    if any(record["memory"]["how"] == "estimated" for record in results):
        text += ". GiB are estimated from the tensors that a step keeps"
    if any("beside" in record for record in results):
        text += ". Ratios are of steps taken in turn"
        base = results[0]["tokens_per_second"]
        quotients = [record["tokens_per_second"] / base / ratio(record, results[0]) for record in results]
        if max(*quotients, 1.0) > UNEVEN * min(*quotients, 1.0):
            text += "; the machine was not equally fast for all rows, so compare the ratios and not the speeds"
    q1, q3 = (results[0]["forward_backward"][key] if results else 0 for key in ("q1_ms", "q3_ms"))
    if q3 > BUSY * q1:
        text += f". The middle half of vanilla's steps took {q1:.1f} to {q3:.1f} ms: the machine was busy with "
        text += "something else, and the speeds are rough"
    return f"{text}."


def profile_table(measured: Sequence[Pair]) -> Table | None:
    """Milliseconds of one step by kind of kernel, a column per architecture; None if nothing was profiled."""
    records = [record for record, _ in measured if record.get("profile")]
    if not records:
        return None
    names = [record["label"] + ("" if record["kernels"] != "off" else " (off)") for record in records]
    groups: dict[str, list[float]] = {}
    for column, record in enumerate(records):
        for group, ms in record["profile"]["groups_ms"].items():
            groups.setdefault(group, [0.0] * len(records))[column] = ms
    ordered = sorted(groups.items(), key=lambda item: -max(item[1]))
    rows = [[group, *(f"{ms:.2f}" for ms in times)] for group, times in ordered]
    for key, word in (("counted_ms", "all of these"), ("idle_ms", "device idle"), ("wall_ms", "forward + backward")):
        if records[0]["profile"][key] is not None:
            rows.append([word, *(f"{record['profile'][key]:.2f}" for record in records)])
    if all(record.get("profile_optimizer") for record in records):
        rows.append(["optimizer step", *(f"{record['profile_optimizer']['wall_ms']:.2f}" for record in records)])
    return made(["ms per micro-batch", *names], rows)


def newest(processes: Iterable[Process]) -> list[Pair]:
    """The last measurement of every architecture under every condition, each with the vanilla of its own process.

    Whole steps and decoding that the last one did not measure are those of an earlier one.
    """
    found: dict[tuple[Any, ...], Pair] = {}
    for record, baseline in in_order(processes):
        key = (frame(record), record["label"])
        if key not in found:
            found[key] = (record, baseline)
        elif "tokens_per_second" in record:
            kept = {name: found[key][0][name] for name in ("batch", "decode") if found[key][0].get(name)}
            found[key] = (kept | record, baseline)
    return sorted(found.values(), key=lambda pair: (pair[0]["context"], pair[0]["label"] != BASELINE))


def page(processes: Sequence[Process]) -> str:
    """The Markdown page: per machine and size a table, where the time goes, and what was measured when."""
    groups: dict[tuple[Any, ...], list[Process]] = {}
    for process in processes:
        if process["results"]:
            settings = process["settings"]
            key = (process["device"]["name"], settings["size"], _changes(process), settings["compile"])
            groups.setdefault(key, []).append(process)
    out = [PAGE]
    for (name, size, changes, compiled), members in groups.items():
        measured = newest(members)
        table = speed_table(measured)
        out.append(f"\n## {name}, size {size}{changes}, {HOW_COMPILED[compiled]}\n")
        out += [_conditions(members), table.markdown(), f"\n{legend(members[-1], table)}"]
        times = profile_table(measured)
        if times is not None:
            out += ["\n### Where the time goes\n", times.markdown()]
    return "\n".join(out) + "\n"


def _changes(process: Process) -> str:
    """How the shape differs from that of the size, as words; contexts have their own column."""
    usual, config = SIZES[process["settings"]["size"]], process["results"][0]["config"]
    return "".join(f" {k}={config[k]}" for k in usual if k != "context" and config.get(k) != usual[k] and k in config)


def _conditions(members: Sequence[Process]) -> str:
    """One paragraph about what a table was measured with."""
    last = members[-1]
    versions, device, product = last["versions"], last["device"], last["product"]
    parts = [f"torch {versions['torch']}", f"triton {versions['triton']}", f"Python {versions['python']}"]
    parts += [f"driver {device['driver']}"] if device.get("driver") else []
    parts += [f"{device['threads']} threads"] if device.get("threads") else []
    parts.append(f"a {product['dtype']} product of size {product['size']} at {product['flops'] / 1e12:,.2f} TFLOP/s")
    dates = sorted({str(process["date"])[:10] for process in members})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    known = [process["commit"] or {} for process in members]
    commits = sorted({str(c.get("hash", "unknown"))[:10] + " with changes" * bool(c.get("changed")) for c in known})
    results = [record for process in members for record in process["results"]]
    shortest = min(record["context"] for record in results)
    vanilla = [record for record in results if record["label"] == BASELINE and "tokens_per_second" in record]
    same = [record for record in vanilla if record["kernels"] != "off" and record["context"] == shortest]
    speeds = [record["tokens_per_second"] / 1000 for record in same]
    processes = f"{len(members)} process{'es' * (len(members) > 1)}"
    text = f"{', '.join(parts)}; {when}, {processes}, commit {', '.join(commits)}."
    if len(speeds) > 1:
        text += f" Vanilla, measured in {len(speeds)} of them: {min(speeds):,.1f} to {max(speeds):,.1f} ktok/s."
    return f"{text}\n"
