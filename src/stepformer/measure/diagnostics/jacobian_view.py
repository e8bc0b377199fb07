"""Jacobians for the eye: tables for the terminal and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from stepformer.present.style import COLOURS, GREY, clean, new_figure, save_figure
from stepformer.present.tables import Table, of_texts

TITLES = {
    "block": "block: x to x', streams held",
    "oracle": "oracle: X to R(X)",
    "joint": "joint: x and all streams",
}


def text(result: dict[str, Any]) -> RenderableType:
    """A table for each Jacobian, the sums over depth, and the notes."""
    shown: list[RenderableType] = []
    kinds = [kind for kind in TITLES if result["summary"][kind] is not None]
    same = all(row["joint"] == row["block"] for row in result["layers"])  # as a note says
    for kind in kinds:
        if kind == "joint" and same:
            continue
        rows = [row for row in result["layers"] if row[kind] is not None]
        title = f"{TITLES[kind]}, dimension {rows[0][kind]['dimension']:,}"
        shown += [Text(title, style="bold"), _layers(kind, rows), ""]
    if kinds:
        shown += [_summary(result["summary"], kinds), ""]
    settings = result["settings"]
    shown.append(
        f"{result['tokens']:,} tokens in {result['batches']} batches, windows {result['windows_hash']}; "
        f"at most {settings['iterations']} rounds, {settings['probes']} probes, {settings['precision']}"
    )
    shown.append("error: the values are estimates from below; the last of them may be too low by so much")
    shown.append("persistence, spread and the rest: docs/jacobian.md")
    return Group(*shown, *result["notes"])


def _layers(kind: str, rows: Sequence[dict[str, Any]]) -> Table:
    k = rows[0][kind]["k"]
    names = ["layer", "sigma_1", f"sigma_{k}", f"sigma_1/sigma_{k}", "stable rank", "rms gain", "error"]
    keys = ("sigma_max", "sigma_k", "spread", "stable_rank", "rms_gain")
    cells = []
    for row in rows:
        found = row[kind]
        error = "-" if found["error"] is None else f"{found['error']:.1%}"
        cells.append([str(row["layer"]), *(_number(found[key]) for key in keys), error])
    return of_texts(names, cells)


def _summary(summary: dict[str, Any], kinds: Sequence[str]) -> Table:
    titles = (
        ("persistence", "persistence, sum of log sigma_k"),
        ("sum_log_rms_gain", "sum of log rms gain"),
        ("mean_sigma_max", "mean sigma_1"),
        ("mean_sigma_k", "mean sigma_k"),
        ("mean_spread", "mean spread"),
        ("max_spread", "largest spread"),
        ("mean_stable_rank", "mean stable rank"),
    )
    rows = [[title, *(_number(summary[kind][key]) for kind in kinds)] for key, title in titles]
    if all("legacy" in summary[kind] for kind in kinds):
        legacy = (_number(summary[kind]["legacy"]["persistence"]) for kind in kinds)
        rows.append(["legacy persistence, sum of log sigma_11", *legacy])
    return of_texts(["over all layers", *kinds], rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Write a PNG: the singular values of every layer for each Jacobian, and gains along depth."""
    kinds = [kind for kind in TITLES if result["summary"][kind] is not None]
    columns = max(1, len(kinds))
    figure = new_figure((1 + 3.6 * columns, 6.6))
    panels = figure.subplots(2, columns, squeeze=False)
    for above, below, kind in zip(panels[0], panels[1], kinds, strict=False):
        rows = [row for row in result["layers"] if row[kind] is not None]
        _draw_spectra(above, kind, rows)
        _draw_gains(below, kind, rows)
    below = f"{result['tokens']:,} tokens in {result['batches']} batches, windows {result['windows_hash']}"
    save_figure(figure, path, below)


def _draw_spectra(axes: Any, kind: str, rows: Sequence[dict[str, Any]]) -> None:
    for place, row in enumerate(rows):
        values = row[kind]["singular_values"]
        depth = place / max(1, len(rows) - 1)
        ends = {0: "first layer", len(rows) - 1: "last layer"} if len(rows) > 1 else {}
        axes.plot(range(1, len(values) + 1), values, color=_shade(depth), linewidth=1.6, label=ends.get(place))
    axes.set_yscale("log")
    axes.set_xlabel("index")
    axes.set_ylabel("singular value")
    axes.set_title(TITLES[kind], loc="left", fontsize=10)
    if len(rows) > 1:
        axes.legend(frameon=False, fontsize=8)
    clean(axes)


def _draw_gains(axes: Any, kind: str, rows: Sequence[dict[str, Any]]) -> None:
    layers = [row["layer"] for row in rows]
    k = rows[0][kind]["k"]
    for key, label, colour in (
        ("sigma_max", "sigma_1", COLOURS[1]),
        ("sigma_k", f"sigma_{k}", COLOURS[2]),
        ("rms_gain", "rms gain", COLOURS[3]),
    ):
        axes.plot(layers, [row[kind][key] for row in rows], "o-", color=colour, markersize=4, label=label)
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_yscale("log")
    axes.set_xticks(layers if len(layers) <= 12 else layers[:: len(layers) // 8])
    axes.set_xlabel("layer")
    axes.legend(frameon=False, fontsize=8)
    clean(axes)


def _shade(depth: float) -> tuple[float, float, float]:
    """From light blue at the first layer to black at the last."""
    red, green, blue = (int(COLOURS[6][i : i + 2], 16) / 255 * (1 - depth) for i in (1, 3, 5))
    return red, green, blue
