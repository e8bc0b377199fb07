"""The inside of a network for the eye: tables for the terminal and a picture."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from stepformer.present.style import COLOURS, DASHES, GREY, new_figure, save_figure
from stepformer.present.tables import of_texts

COLUMNS = {
    "readout_loss": "loss here",
    "update_norm": "|update|",
    "cosine": "cosine",
    "entropy": "entropy",
    "energy": "energy",
    "capped_rows": "capped",
    "bounded_scores": "bounded",
}
MOST_COEFFICIENTS = 9  # in one table; a wider one would be cut at the edge of the terminal


def text(result: dict[str, Any]) -> RenderableType:
    """Tables of what the layers do, of the streams and of the learned coefficients, and what it was measured on."""
    layers, start = result["layers"], result["start"]
    shown = [key for key in COLUMNS if any(row[key] is not None for row in layers)]
    streams = list(start["norms"])
    doing = [["start", *(_cell({key: start.get(key)}, key) for key in shown)]]
    sizes = [["start", *(_number(start["norms"][name]) for name in streams)]]
    for row in layers:
        doing.append([str(row["layer"]), *(_cell(row, key) for key in shown)])
        sizes.append([str(row["layer"]), *(_number(row["norms"].get(name)) for name in streams)])
    parts: list[RenderableType] = [
        *(of_texts(["after layer", *(COLUMNS[key] for key in shown)], doing), ""),
        *(of_texts(["after layer", *(f"|{name}|" for name in streams)], sizes), ""),
    ]
    names = list(dict.fromkeys(name for row in layers for name in row["coefficients"]))
    for begin in range(0, len(names), MOST_COEFFICIENTS):
        some = names[begin : begin + MOST_COEFFICIENTS]
        rows = [[str(row["layer"]), *(_number(row["coefficients"].get(name)) for name in some)] for row in layers]
        parts += [of_texts(["layer", *some], rows), ""]
    windows = f", windows {result['windows_hash']}" if "windows_hash" in result else ""
    parts.append(
        f"{result['tokens']:,} tokens{windows}; norms are root mean squares, entropy is a mean over heads in nats\n"
        "loss here: of the head, read out after this layer; cosine: of successive updates of x; energy: of attention "
        "(docs/inside-the-network.md)"
    )
    return Group(*parts)


def _cell(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if isinstance(value, list):
        value = _over_heads(value)
    return f"{value:.1%}" if value is not None and key in ("capped_rows", "bounded_scores") else _number(value)


def _over_heads(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Write a PNG: a panel for every kind of number, along depth."""
    layers, start = result["layers"], result["start"]
    places = [row["layer"] for row in layers]
    panels: list[tuple[str, str, dict[str, tuple[list[int], list[Any]]]]] = []
    panels.append(
        (
            "Loss read out after each layer",
            "nats per token",
            {"": ([-1, *places], [start["readout_loss"], *(row["readout_loss"] for row in layers)])},
        )
    )
    norms = {
        name: ([-1, *places], [start["norms"][name], *(row["norms"].get(name) for row in layers)])
        for name in start["norms"]
    }
    panels.append(("Streams", "root mean square", {**norms, "update of x": (places, _column(layers, "update_norm"))}))
    heads = next((row["entropy"] for row in layers if row["entropy"]), None)
    if heads:
        each = {
            f"head {h}": (places, [None if row["entropy"] is None else row["entropy"][h] for row in layers])
            for h in range(len(heads))
        }
        panels.append(("Entropy of attention, by head", "nats", each))
    panels.append(("Cosine of successive updates", "", {"": (places, _column(layers, "cosine"))}))
    if any(row["energy"] is not None for row in layers):
        panels.append(("Energy of attention", "", {"": (places, _column(layers, "energy"))}))
    for kind, names in _families(layers).items():
        each = {name: (places, [row["coefficients"].get(name) for row in layers]) for name in names}
        panels.append((f"Coefficient {kind}", "", each))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure((1 + 3.8 * columns, 0.6 + 2.9 * rows))
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (title, unit, lines) in zip(grid, panels, strict=False):
        _draw(axes, title, unit, lines)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    windows = f", windows {result['windows_hash']}" if "windows_hash" in result else ""
    figure.supxlabel(f"by layer, -1 is the start; {result['tokens']:,} tokens{windows}", fontsize=8, color=GREY)
    save_figure(figure, path)


def _column(layers: Sequence[dict[str, Any]], key: str) -> list[Any]:
    return [row[key] for row in layers]


def _families(layers: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Coefficients that differ by turn or head alone share a panel: mu_attn and mu_mlp, r[0] and r[1]."""
    families: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for row in layers for name in row["coefficients"]):
        families.setdefault(re.sub(r"(_attn|_mlp|_both)$|\[\d+\]$", "", name), []).append(name)
    return families


def _draw(axes: Any, title: str, unit: str, lines: dict[str, tuple[list[int], list[Any]]]) -> None:
    for place, (label, (x, y)) in enumerate(lines.items()):
        cycle, colour = divmod(place, len(COLOURS))
        values = [float("nan") if value is None else value for value in y]
        looks = {"color": COLOURS[colour], "linestyle": DASHES[cycle % len(DASHES)]}
        axes.plot(x, values, marker="o", markersize=3.5, linewidth=1.5, label=label or None, **looks)
    if len(lines) > 1:
        legend = axes.legend(frameon=False, fontsize=7, ncols=1 if len(lines) <= 5 else 2)
        for entry in legend.get_texts():
            entry.set_parse_math(False)
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    axes.set_ylabel(unit, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.get_major_locator().set_params(integer=True)
