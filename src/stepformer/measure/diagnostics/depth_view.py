"""The inside of a network for the eye: tables for the terminal and a picture."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from stepformer.present.style import COLOURS, DASHES, as_written, clean, new_figure, save_figure
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
    streams, after = list(start["norms"]), [{"layer": "start", **start}, *layers]
    doing = [[str(row["layer"]), *(_cell(row.get(key), key) for key in shown)] for row in after]
    sizes = [[str(row["layer"]), *(_number(row["norms"].get(name)) for name in streams)] for row in after]
    parts: list[RenderableType] = [
        *(of_texts(["after layer", *(COLUMNS[key] for key in shown)], doing), ""),
        *(of_texts(["after layer", *(f"|{name}|" for name in streams)], sizes), ""),
    ]
    names = list(dict.fromkeys(name for row in layers for name in row["coefficients"]))
    for begin in range(0, len(names), MOST_COEFFICIENTS):
        some = names[begin : begin + MOST_COEFFICIENTS]
        rows = [[str(row["layer"]), *(_number(row["coefficients"].get(name)) for name in some)] for row in layers]
        parts += [of_texts(["layer", *some], rows), ""]
    parts.append(
        f"{_measured_on(result)}; norms are root mean squares, entropy is a mean over heads in nats\n"
        "loss here: of the head, read out after this layer; cosine: of successive updates of x; energy: of attention "
        "(docs/inside-the-network.md)"
    )
    return Group(*parts)


def _cell(value: Any, key: str) -> str:
    if isinstance(value, list):  # by head
        known = [one for one in value if one is not None]
        value = statistics.fmean(known) if known else None
    return f"{value:.1%}" if value is not None and key in ("capped_rows", "bounded_scores") else _number(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Write a PNG: a panel for every kind of number, along depth."""
    layers, start = result["layers"], result["start"]
    of = {key: [row[key] for row in layers] for key in layers[0]}
    norms = {name: [first, *(norm.get(name) for norm in of["norms"])] for name, first in start["norms"].items()}
    heads = len(next((entropy for entropy in of["entropy"] if entropy), ()))
    panels: list[tuple[str, str, dict[str, list[Any]]]] = [
        ("Loss read out after each layer", "nats per token", {"": [start["readout_loss"], *of["readout_loss"]]}),
        ("Streams", "root mean square", {**norms, "update of x": of["update_norm"]}),
    ]
    if heads:
        each = {f"head {h}": [entropy and entropy[h] for entropy in of["entropy"]] for h in range(heads)}
        panels.append(("Entropy of attention, by head", "nats", each))
    panels.append(("Cosine of successive updates", "", {"": of["cosine"]}))
    if any(energy is not None for energy in of["energy"]):
        panels.append(("Energy of attention", "", {"": of["energy"]}))
    for kind, names in _families(layers).items():
        panels.append((f"Coefficient {kind}", "", {n: [row.get(n) for row in of["coefficients"]] for n in names}))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure((1 + 3.8 * columns, 0.6 + 2.9 * rows))
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (title, unit, lines) in zip(grid, panels, strict=False):
        _draw(axes, title, unit, lines, of["layer"])
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    save_figure(figure, path, f"by layer, -1 is the start; {_measured_on(result)}")


def _measured_on(result: dict[str, Any]) -> str:
    windows = f", windows {result['windows_hash']}" if "windows_hash" in result else ""
    return f"{result['tokens']:,} tokens{windows}"


def _families(layers: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Coefficients that differ by turn or head alone share a panel: mu_attn and mu_mlp, r[0] and r[1]."""
    families: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for row in layers for name in row["coefficients"]):
        families.setdefault(re.sub(r"(_attn|_mlp|_both)$|\[\d+\]$", "", name), []).append(name)
    return families


def _draw(axes: Any, title: str, unit: str, lines: dict[str, list[Any]], layers: list[int]) -> None:
    """Lines along depth; one with a value more than there are layers begins at the start."""
    for place, (label, y) in enumerate(lines.items()):
        cycle, colour = divmod(place, len(COLOURS))
        x = layers if len(y) == len(layers) else [-1, *layers]
        values = [float("nan") if value is None else value for value in y]
        looks = {"color": COLOURS[colour], "linestyle": DASHES[cycle % len(DASHES)]}
        axes.plot(x, values, marker="o", markersize=3.5, linewidth=1.5, label=label or None, **looks)
    if len(lines) > 1:
        as_written(axes.legend(frameon=False, fontsize=7, ncols=1 if len(lines) <= 5 else 2).get_texts())
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    axes.set_ylabel(unit, fontsize=8)
    clean(axes)
    axes.xaxis.get_major_locator().set_params(integer=True)
