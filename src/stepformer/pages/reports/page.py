"""A report as one HTML page that needs nothing but itself.

All words are escaped where they enter the page. The data of the charts is JSON in which no character can end the
script element, and the page's policy allows the one script whose hash it names and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from typing import Any

from markupsafe import Markup

from stepformer.base.version import __version__
from stepformer.pages.reports.charts import Charts, Line, Surface
from stepformer.pages.reports.contents import Report
from stepformer.present.style import look_of
from stepformer.present.tables import signed
from stepformer.present.templates import template
from stepformer.study import Comparison
from stepformer.study.tables import percent

MOST_CELLS = 48  # of a surface's side

CURVES_LEAD = (
    "Drag over a chart to zoom, double-click to go back; click a name to hide it. With the keyboard: arrows read "
    "values, plus and minus zoom, Escape resets. Thin lines are seeds, bold ones their mean."
)
FACTORIAL = "Momentum by preconditioner"
PARTS = {
    "coefficients": (
        "Coefficients",
        "What the layers learned to be: each coefficient of the update rule, layer by layer, at the best checkpoint.",
    ),
    "depth": ("Inside the network", "What happens to the streams from layer to layer, on fixed validation windows."),
    "jacobian": ("Jacobians", "How a small change of a layer's input travels through the layer: singular values."),
    "propagation": (
        "Jacobians and loss",
        "Do the runs whose layers damp or spread perturbations more reach a lower loss? One point for each run.",
    ),
    "balance": (
        "Balance of second moments",
        "Whether a preconditioner coordinate by coordinate would do more than a scalar, which norms take away.",
    ),
    "hessian": ("Curvature", "How sharply the loss bends around the trained weights."),
    "forgetting": ("Forgetting", "What is lost of the first corpus while the second is learned."),
}


def page_html(report: Report) -> str:
    """The whole page."""
    script = _asset("chart.js") + _asset("page.js")
    labels, today = report.labels, datetime.now()
    return template(__package__, "assets/page.html").render(
        report=report,
        facts=_facts(report),
        forest=_forest(report.comparison) if report.comparison else None,
        has_curves=any(len(run.training) or len(run.evaluation) for run in report.runs),
        titles={"factorial": FACTORIAL, **{name: title for name, (title, _) in PARTS.items()}},
        leads={"curves": CURVES_LEAD, **{name: lead for name, (_, lead) in PARTS.items()}},
        mark=lambda name: _swatch(labels.index(name)) if name in labels else "",
        swatch=_swatch,
        looks=_looks,
        made=f"{today.day} {today:%B %Y}",
        version=__version__,
        style=Markup(_asset("page.css")),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=Markup(script_json(_data(report))),
    )


def script_json(value: Any) -> str:
    """JSON that stays inside its script element, whatever strings are in it."""
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _facts(report: Report) -> list[str]:
    finished, count = sum(run.record is not None for run in report.runs), len(report.runs)
    return [
        f"Trained {report.dates}",
        *([f"{len(report.labels)} architectures"] if len(report.labels) > 1 else []),
        f"{count} run{'s' if count > 1 else ''}{f', {finished} finished' if finished < count else ''}",
        *([f"{report.comparison.tokens:,} training tokens each"] if report.comparison else []),
    ]


def _looks(index: int) -> str:
    """The classes of an architecture's colour and dashes."""
    colour, dashes = look_of(index)
    return f"s{colour} d{1 + dashes}" if index else "s0"


def _swatch(index: int) -> Markup:
    return Markup(
        f'<svg class="swatch" viewBox="0 0 20 8" aria-hidden="true"><line x1="0" x2="20" y1="4" y2="4" '
        f'stroke-width="{2.5 if index else 3}" class="line {_looks(index)}"/></svg>'
    )


def _forest(comparison: Comparison) -> dict[str, Any] | None:
    """Paired differences with their intervals on one scale; the table above has the numbers."""
    rows = [(i, row.label, row.difference) for i, row in enumerate(comparison.rows) if row.difference is not None]
    if not rows:
        return None
    ends = [0.0, *(v for _, _, d in rows for v in (d.mean, d.low, d.high) if v is not None)]
    low, high = min(ends), max(ends)
    room = 0.06 * (high - low) or 0.001
    low, high = low - room, high + room

    def place(value: float, begin: float = low) -> str:
        return f"{100 * (value - begin) / (high - low):.2f}%"

    lines = []
    for index, label, found in rows:
        line = {"index": index, "label": label, "mean": place(found.mean), "value": signed(found.mean), "width": ""}
        if found.low is not None and found.high is not None:
            line |= {"low": place(found.low), "width": place(found.high, found.low)}
        lines.append(line)
    level = percent(comparison.confidence)
    return {
        "title": f"Difference in final loss to {comparison.baseline}, {level} confidence; left of the line is better",
        "lines": lines,
        "zero": place(0),
        "ticks": [(place(value), signed(value, ".3g") if value else "0") for value in _ticks(low, high)],
    }


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers."""
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step = next(step * f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= 6)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _data(report: Report) -> dict[str, Any]:
    """What the script draws."""
    entropies = {run.record.unigram_entropy for run in report.runs if run.record}
    return {
        "labels": report.labels,
        "entropy": entropies.pop() if report.comparison and len(entropies) == 1 else None,
        "window": max((run.training.window for run in report.runs if len(run.training)), default=1),
        "curves": {kind: _curves(report, kind) for kind in ("training", "evaluation")},
        "parts": {name: _charts(charts, report.labels) for name, charts in report.charts.items()},
    }


def _curves(report: Report, kind: str) -> list[dict[str, Any]]:
    """Each run's curve, and after them the mean of those architectures that have several."""
    return [
        {
            "group": group,
            "seed": seed,
            "step": curve.step,
            "tokens": curve.tokens,
            "seconds": [round(value, 2) for value in curve.seconds],  # one that is unknown is null in JSON
            "loss": [round(value, 5) for value in curve.loss],
        }
        for group, (curves, mean) in enumerate(report.curves(kind))
        for seed, curve in [*((run.seed, curve) for run, curve in curves), *([(None, mean)] if mean else [])]
    ]


def _charts(found: Charts, labels: Sequence[str]) -> dict[str, Any]:
    def short(numbers: Sequence[float | None]) -> list[float | None]:
        return [None if value is None else float(f"{value:.6g}") for value in numbers]

    def of(drawn: Line | Surface) -> dict[str, Any]:
        return {"group": labels.index(drawn.label), "seed": drawn.seed}

    charts, surfaces = [], []
    for chart in found.charts:
        log = chart.log and all(value > 0 for line in chart.lines for value in line.y)
        lines = [{**of(line), "choice": line.choice, "x": short(line.x), "y": short(line.y)} for line in chart.lines]
        axes = {
            "title": chart.title,
            "x": chart.x,
            "y": chart.y,
            "log": log,
            "whole": chart.whole_x,
            "points": chart.points,
        }
        charts.append({**axes, "lines": lines})
    for surface in found.surfaces:
        across, down = (1 + len(side) // MOST_CELLS for side in (surface.x, surface.y))
        loss = [short(row[::across]) for row in surface.loss[::down]]
        surfaces.append({**of(surface), "x": short(surface.x[::across]), "y": short(surface.y[::down]), "loss": loss})
    return {"charts": charts, "surfaces": surfaces}
