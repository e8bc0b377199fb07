"""Comparisons and forgetting as pictures: curves, and what differs between architectures."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from stepformer.present import style
from stepformer.present.tables import signed
from stepformer.study.forgetting import Direction, ForgettingRow
from stepformer.study.grids import numbers_of, point_of
from stepformer.study.records import Compared, Row
from stepformer.study.statistics import (
    PAIRS_FOR_SMALL,
    SMALL_DIFFERENCE,
    PairedDifference,
    seed_words,
    summarise,
    t_quantile,
)
from stepformer.study.tables import MARK, evaluated_on, percent

INSIDE = 6  # names that a legend may have inside the picture; more go below it
WIDE = 4  # the largest value of a setting over the smallest from which they are drawn by their logarithms
NAME_WIDTH = 26  # characters; longer labels go on on the next line


def plot_comparison(comparison: Compared, path: str | Path) -> None:
    """Write a PNG of evaluation loss against tokens and of each difference to the baseline with its interval."""
    style.save_figure(draw_comparison(comparison), path)


def draw_comparison(comparison: Compared) -> Any:
    """The same as a matplotlib figure."""
    panels: dict[Callable[[Any, Compared], None], float] = {_draw_curves: 6.5}
    if any(row.difference is not None for row in comparison.rows):
        panels[_draw_differences] = 4.5
    if _swept(comparison):
        panels[_draw_sweep] = 4.5
    figure = style.new_figure((sum(panels.values()), _height(comparison)))
    places = figure.subplots(1, len(panels), width_ratios=[*panels.values()], squeeze=False)[0]
    for draw, axes in reversed([*zip(panels, places, strict=True)]):
        draw(axes, comparison)
    style.say_below(figure, _footer(comparison))
    return figure


def plot_differences(comparison: Compared, paths: style.Paths) -> None:
    """Draw the differences to the baseline alone."""
    figure = style.new_figure((6.5, max(3.0, _height(comparison) - 0.8)))
    _draw_differences(figure.subplots(), comparison)
    style.save_figure(figure, paths, _footer(comparison))


def _height(comparison: Compared) -> float:
    """Inches that give every row of the differences as many lines of words as the longest has."""
    lines = max(1 + len(textwrap.wrap(row.verdict + MARK, NAME_WIDTH)) for row in comparison.rows)
    return max(4.4, 2.0 + 0.17 * (lines + 0.5) * len(comparison.rows))


def _footer(comparison: Compared) -> str:
    seeds = seed_words(comparison.seeds) if len(comparison.seeds) <= 8 else f"{len(comparison.seeds)} seeds"
    footer = f"evaluated {evaluated_on(comparison)}; {seeds}"
    if comparison.unigram_entropy is not None:
        footer += f"; unigram entropy {comparison.unigram_entropy:.3f}"
    apart = ", ".join(found.key for found in comparison.differences if not found.meant)
    if apart:
        footer += f"\nthe rows also differ in {apart}"
    if any(row.provisional for row in comparison.rows):
        footer += f"\n*  under {SMALL_DIFFERENCE} with fewer than {PAIRS_FOR_SMALL} paired seeds: not to be claimed"
    return footer


def _draw_curves(axes: Any, comparison: Compared) -> None:
    handles = []
    for index, row in enumerate(comparison.rows):
        look = style.looks(index)
        if len(row.records) > 1:
            for record in row.records:
                axes.plot(*zip(*record.curve, strict=True), linewidth=0.8, alpha=0.35, **look)
        curves = [dict(record.curve) for record in row.records]
        tokens = sorted(set(curves[0]).intersection(*curves[1:]))  # where all seeds were evaluated
        means = [math.fsum(curve[t] for curve in curves) / len(curves) for t in tokens]
        # the baseline below and wider, so that a curve that lies on it still shows
        handles += axes.plot(tokens, means, linewidth=1.8 if index else 2.8, zorder=3 + bool(index), **look)
    top, cut = _show_end(axes, comparison)
    labels = _names(comparison.rows)
    looks_of_legend = {"facecolor": "white", "edgecolor": "none", "fontsize": 9}
    if len(labels) <= INSIDE:
        legend = axes.legend(handles, labels, loc="upper right", bbox_to_anchor=(1, top), **looks_of_legend)
    else:  # inside it would cover the curves
        width = axes.figure.get_size_inches()[0]
        columns = max(1, int(width / (0.75 + 0.08 * max(len(line) for label in labels for line in label.split("\n")))))
        legend = axes.figure.legend(handles, labels, loc="outside upper left", ncols=columns, **looks_of_legend)
    style.as_written(legend.get_texts())
    axes.xaxis.set_major_formatter(lambda value, _: style.short_number(value))
    several = any(len(row.records) > 1 for row in comparison.rows)
    title = f"Evaluation loss{', mean (bold) and seeds (thin)' if several else ''}"
    _describe(axes, title, "training tokens", f"nats per token{style.FALL_CUT if cut else ''}", size=11)


def _show_end(axes: Any, comparison: Compared) -> tuple[float, bool]:
    """Give the room to where the curves differ: the fall from chance, in the first fifth, may leave the picture.

    Returns the height, as a part of the axes, under which the legend is clear of the entropy's line, and whether the
    fall is left out.
    """
    curves = [record.curve for row in comparison.rows for record in row.records]
    late = [[loss for tokens, loss in curve if tokens >= 0.2 * comparison.tokens] for curve in curves]
    cut = min(map(len, late)) >= 4  # with fewer evaluations all of them are needed to see a curve
    shown = late if cut else [[loss for _, loss in curve] for curve in curves]
    low, high = min(map(min, shown)), max(map(max, shown))
    axes.set_xlim(comparison.tokens * (0.1 if cut else 0), comparison.tokens * 1.01)
    entropy, span = comparison.unigram_entropy, high - low
    drawn = entropy is not None and low - 0.7 * span <= entropy <= high + 0.7 * span  # further off it costs too much
    if entropy is not None and drawn:
        axes.axhline(entropy, color=style.GREY, linestyle=(0, (4, 3)), linewidth=1, zorder=1)
        place = {"xy": (0.99, entropy), "xycoords": axes.get_yaxis_transform(), "ha": "right"}
        lift = {"xytext": (0, 3), "textcoords": "offset points"}
        axes.annotate("unigram entropy", **place, **lift, fontsize=8, color=style.GREY)
        low, high = min(low, entropy), max(high, entropy)
    margin = 0.07 * (high - low) or 0.01
    bottom, top = low - margin, high + margin
    axes.set_ylim(bottom, top)
    height = (entropy - bottom) / (top - bottom) if entropy is not None and drawn else 0.0
    return (height - 0.01 if height > 0.6 else 1.0), cut


def _swept(comparison: Compared) -> str:
    """The first setting of a sweep whose values are numbers; empty if there is none."""
    return next((key for key, values in comparison.axes.items() if len(numbers_of(values)) > 1), "")


def _draw_sweep(axes: Any, comparison: Compared) -> None:
    """Final losses against a setting, a line for each choice of the others."""
    key = _swept(comparison)
    numbers = numbers_of(comparison.axes[key])
    lines: dict[str, list[tuple[float, Row]]] = {}
    for row in comparison.rows:
        point = point_of(row.label, comparison.axes)
        others = ", ".join(f"{name} = {value}" for name, value in point.items() if name != key)
        if point:
            lines.setdefault(others, []).append((numbers[point[key]], row))
    for index, (name, points) in enumerate(lines.items()):
        look = style.looks(index)
        points.sort(key=lambda pair: pair[0])
        for value, row in points:
            losses = [record.val_loss for record in row.records]
            axes.plot([value] * len(losses), losses, ".", markersize=5, alpha=0.5, color=look["color"])
        values, means = [value for value, _ in points], [row.loss.mean for _, row in points]
        axes.plot(values, means, marker="o", markersize=5, linewidth=1.8, label=name or None, **look)
    if min(numbers.values()) > 0 and max(numbers.values()) >= WIDE * min(numbers.values()):
        axes.set_xscale("log")
        axes.set_xticks(list(numbers.values()), list(numbers), minor=False)
        axes.minorticks_off()
    if len(lines) > 1:
        style.as_written(axes.legend(frameon=False, fontsize=9).get_texts())
    _describe(axes, "Final loss, mean and seeds", key, "nats per token", size=11)


def _draw_differences(axes: Any, comparison: Compared) -> None:
    rows = [(index, row, row.difference) for index, row in enumerate(comparison.rows) if row.difference is not None]
    axes.axvline(0, color=style.COLOURS[0], linewidth=1.2, zorder=1)
    for place, (index, _, difference) in enumerate(rows):
        colour = style.looks(index)["color"]
        if difference.low is not None:
            ends = [difference.low, difference.high]
            axes.plot(ends, [place, place], linewidth=2.2, color=colour, solid_capstyle="butt")
        face = colour if difference.low is not None else "white"  # hollow: a mean without an interval
        axes.plot(difference.mean, place, "o", markersize=7, color=colour, markerfacecolor=face, markeredgewidth=1.8)
    style.name_rows(axes, _names(row for _, row, _ in rows))
    values = axes.secondary_yaxis("right")
    verdicts = [textwrap.fill(row.verdict + MARK * row.provisional, NAME_WIDTH) for _, row, _ in rows]
    words = [f"{_number(d)}\n{verdict}" for (_, _, d), verdict in zip(rows, verdicts, strict=True)]
    values.set_yticks(range(len(rows)), words, fontsize=8.5)
    values.tick_params(length=0)
    values.spines["right"].set_visible(False)
    style.few_ticks(axes, 5, min_n_ticks=3)
    several = any(difference.low is not None for _, _, difference in rows)
    confidence = f", {percent(comparison.confidence)} confidence" if several else ""
    name = comparison.baseline
    name = name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 1]}…"
    title = f"Paired difference to {name}{confidence}"
    _describe(axes, title, "difference in final loss (left of zero is better)", size=11)
    axes.spines["left"].set_visible(False)


def _number(difference: PairedDifference) -> str:
    """The mean, and the interval, which may be narrower than its dot."""
    if difference.low is None or difference.high is None:
        return signed(difference.mean)
    return f"{signed(difference.mean)} [{signed(difference.low)}, {signed(difference.high)}]"


def plot_forgetting(directions: Sequence[Direction], path: str | Path) -> None:
    """Write a PNG, a line of three pictures for each direction."""
    figure = style.new_figure((12.5, 3.9 * len(directions)))
    grid = figure.subplots(len(directions), 3, width_ratios=(1.5, 1, 1), squeeze=False)
    for (curves, left, right), direction in zip(grid, directions, strict=True):
        _draw_both(curves, direction)
        _draw_amounts(left, direction, "forgetting", "rise of the source loss (left is better)")
        _draw_amounts(right, direction, "plasticity", "fall of the target loss (right is better)")
    drawn = f"points: seeds; lines: mean and its {percent(directions[0].confidence)} interval (Student's t)"
    tokens = f"{directions[0].first.source_tokens:,} source and {directions[0].first.val_tokens:,} target tokens"
    style.save_figure(figure, path, f"{drawn}. Nats per token on {tokens}.")


def _draw_both(axes: Any, direction: Direction) -> None:
    handles: list[Any] = []
    for index, row in enumerate(direction.rows):
        colour = style.looks(index)["color"]
        steps = row.runs[0].evaluated
        for corpus, dashes in (("source", "-"), ("target", (0, (4, 2)))):
            for run in row.runs if len(row.runs) > 1 else ():
                axes.plot(steps, getattr(run, corpus), color=colour, linestyle=dashes, linewidth=0.7, alpha=0.35)
            means = [summarise(values).mean for values in zip(*(getattr(r, corpus) for r in row.runs), strict=True)]
            line = axes.plot(steps, means, color=colour, linestyle=dashes, linewidth=1.9)
            handles += line if corpus == "source" else []
    legend = axes.legend(handles, _names(direction.rows), fontsize=8.5, facecolor="white", edgecolor="none")
    style.as_written(legend.get_texts())
    style.few_ticks(axes, 6, integer=True)
    title = f"{direction.name}: source (solid) and target (dashed)"
    _describe(axes, title, "fine-tuning steps", "validation loss (nats per token)")


def _draw_amounts(axes: Any, direction: Direction, what: str, label: str) -> None:
    for place, row in enumerate(direction.rows):
        colour = style.looks(place)["color"]
        summary = row.amount(what)
        values = [getattr(run, what) for run in row.runs]
        axes.plot(values, [place] * len(values), "o", markersize=4, color=colour, alpha=0.5)
        if summary.standard_error is not None:
            half = t_quantile((1 + direction.confidence) / 2, summary.n - 1) * summary.standard_error
            axes.plot([summary.mean - half, summary.mean + half], [place, place], linewidth=1.6, color=colour)
            axes.plot(summary.mean, place, "|", markersize=16, markeredgewidth=2.4, color=colour)
    style.name_rows(axes, _names(direction.rows))
    style.few_ticks(axes, 4)
    _describe(axes, what, label)


def _describe(axes: Any, title: str, below: str, beside: str = "", size: float = 10.5) -> None:
    """What is drawn, over which axes, behind it faint lines."""
    axes.set_title(title, loc="left", fontsize=size, parse_math=False)
    axes.set_xlabel(below)
    axes.set_ylabel(beside)
    style.clean(axes, lines="x")


def _names(rows: Iterable[Row | ForgettingRow]) -> list[str]:
    return [textwrap.fill(row.label, NAME_WIDTH) for row in rows]
