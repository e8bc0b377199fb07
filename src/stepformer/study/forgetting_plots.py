"""Forgetting as a picture: losses against steps, and F and P of every architecture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepformer.present.style import as_written, clean, few_ticks, looks, name_rows, new_figure, save_figure
from stepformer.study.forgetting import Direction
from stepformer.study.plots import NAME_WIDTH
from stepformer.study.statistics import summarise, t_quantile
from stepformer.study.tables import percent


def plot_forgetting(directions: Sequence[Direction], path: str | Path) -> None:
    """Write a PNG, a line of three pictures for each direction."""
    figure = new_figure((12.5, 3.9 * len(directions)))
    grid = figure.subplots(len(directions), 3, width_ratios=(1.5, 1, 1), squeeze=False)
    for (curves, left, right), direction in zip(grid, directions, strict=True):
        _draw_curves(curves, direction)
        _draw_amounts(left, direction, "forgetting", "rise of the source loss (left is better)")
        _draw_amounts(right, direction, "plasticity", "fall of the target loss (right is better)")
    first = directions[0]
    below = (
        f"points: seeds; lines: mean and its {percent(first.confidence)} interval (Student's t). "
        f"Nats per token on {first.first.source_tokens:,} source and {first.first.record.val_tokens:,} target tokens."
    )
    save_figure(figure, path, below)


def _draw_curves(axes: Any, direction: Direction) -> None:
    handles: list[Any] = []
    for index, row in enumerate(direction.rows):
        colour = looks(index)["color"]
        steps = row.runs[0].steps
        for corpus, dashes in (("source", "-"), ("target", (0, (4, 2)))):
            for run in row.runs if len(row.runs) > 1 else ():
                axes.plot(steps, getattr(run, corpus), color=colour, linestyle=dashes, linewidth=0.7, alpha=0.35)
            means = [summarise(values).mean for values in zip(*(getattr(r, corpus) for r in row.runs), strict=True)]
            line = axes.plot(steps, means, color=colour, linestyle=dashes, linewidth=1.9)
            handles += line if corpus == "source" else []
    legend = axes.legend(handles, _names(direction), fontsize=8.5, facecolor="white", edgecolor="none")
    as_written(legend.get_texts())
    axes.set_xlabel("fine-tuning steps")
    few_ticks(axes, 6, integer=True)
    axes.set_ylabel("validation loss (nats per token)")
    title = f"{direction.name}: source (solid) and target (dashed)"
    axes.set_title(title, loc="left", fontsize=10.5, parse_math=False)
    clean(axes, lines="x")


def _draw_amounts(axes: Any, direction: Direction, what: str, label: str) -> None:
    for place, row in enumerate(direction.rows):
        colour = looks(place)["color"]
        summary = getattr(row, what)
        values = [getattr(run, what) for run in row.runs]
        axes.plot(values, [place] * len(values), "o", markersize=4, color=colour, alpha=0.5)
        if summary.standard_error is not None:
            half = t_quantile((1 + direction.confidence) / 2, summary.n - 1) * summary.standard_error
            axes.plot([summary.mean - half, summary.mean + half], [place, place], linewidth=1.6, color=colour)
            axes.plot(summary.mean, place, "|", markersize=16, markeredgewidth=2.4, color=colour)
    name_rows(axes, _names(direction))
    axes.set_xlabel(label)
    few_ticks(axes, 4)
    axes.set_title(what, loc="left", fontsize=10.5)
    clean(axes, lines="x")


def _names(direction: Direction) -> list[str]:
    return [textwrap.fill(row.label, NAME_WIDTH) for row in direction.rows]
