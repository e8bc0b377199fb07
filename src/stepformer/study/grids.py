"""Grids of settings: their points, which of them is best, and whether it lies at the edge."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence

from stepformer.study import statistics
from stepformer.study.records import Row


def best_point(rows: Sequence[Row], axes: Mapping[str, Sequence[str]], confidence: float | None) -> list[str]:
    """Of a sweep: the point of lowest loss, how sure that is, and whether it lies at the edge of the grid."""
    texts = {(record.val_hash, record.val_tokens) for row in rows for record in row.records}
    if not axes or len(rows) < 2 or len(texts) > 1:  # losses on different texts have no best one
        return []
    best, second = sorted(rows, key=lambda row: row.loss.mean)[:2]
    said = f"Best of {len(rows)} points: {best.label}, {best.loss.mean:.4f}"
    next_best, lowest = ({record.seed: record.val_loss for record in row.records} for row in (second, best))
    if confidence is not None and next_best.keys() & lowest.keys():
        difference = statistics.paired(next_best, lowest, confidence)
        said += f"; to the next best, {second.label}, {difference}"
        if difference.low is not None:
            said += f" ({difference.verdict}{', not to be claimed from so few pairs' * difference.provisional})"
    edge = ", ".join(at_the_edge(axes, point_of(best.label, axes)))
    warning = f"{best.label} lies at the edge of the grid in {edge}: a better value may lie beyond."
    return [f"{said}.", *([warning] if edge else [])]


def all_points(axes: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def grid_points(axes: Mapping[str, Sequence[str]]) -> dict[str, dict[str, str]]:
    """Every point of a grid under its label."""
    points = all_points(axes)
    return {"_".join(f"{k.rpartition('.')[2]}={v}" for k, v in p.items()).replace("/", "-"): p for p in points}


def point_of(label: str, axes: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The point that a row is; none if it is not of this grid."""
    points = grid_points(axes)
    points |= {label.replace("=", "-"): point for label, point in points.items()}  # as sweeps of 0.6.0 call them
    return points.get(label, {})


def numbers_of(values: Sequence[str]) -> dict[str, float]:
    """The values of an axis as numbers; empty where they are words, which have no order."""
    with contextlib.suppress(ValueError):
        return {text: float(text.removesuffix("x")) for text in values}
    return {}


def at_the_edge(axes: Mapping[str, Sequence[str]], point: Mapping[str, str]) -> list[str]:
    """The keys whose value at a point is the smallest or largest of its axis; words have no order."""
    found = []
    for key, value in point.items():
        numbers = numbers_of(axes[key])
        ends = {min(numbers.values()), max(numbers.values())} if numbers else set[float]()
        found += [key] if len(ends) > 1 and numbers[value] in ends else []
    return found
