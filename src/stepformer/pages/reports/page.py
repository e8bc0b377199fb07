"""A report as one HTML page that needs nothing but itself.

All words are escaped where they enter the page. The data of the charts is JSON in which no character can end the
script element, and the page's policy allows the one script whose hash it names and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from stepformer.base.version import __version__
from stepformer.pages.reports.charts import Charts
from stepformer.pages.reports.collect import Curve, mean_curve
from stepformer.pages.reports.contents import Report
from stepformer.pages.reports.samples import Samples
from stepformer.present.tables import MINUS, Table
from stepformer.present.tables import html_text as esc
from stepformer.study import Comparison
from stepformer.study.tables import percent

COLOURS = 7  # as in comparing.plots: the first for the baseline
DASHES = 3  # of all but the baseline: a line on top of another leaves gaps to see it through
MANY = 30  # runs that are listed only on demand
MOST_CELLS = 48  # of a surface's side

CURVES_LEAD = (
    "Drag over a chart to zoom, double-click to go back; click a name to hide it. With the keyboard: arrows read "
    "values, plus and minus zoom, Escape resets. Thin lines are seeds, bold ones their mean."
)
PARTS = {
    "coefficients": (
        "Coefficients",
        "What the layers learned to be: each coefficient of the update rule, layer by layer, at the best checkpoint.",
    ),
    "depth": ("Inside the network", "What happens to the streams from layer to layer, on fixed validation windows."),
    "jacobian": ("Jacobians", "How a small change of a layer's input travels through the layer: singular values."),
    "hessian": ("Curvature", "How sharply the loss bends around the trained weights."),
    "forgetting": ("Forgetting", "What is lost of the first corpus while the second is learned."),
}


def page_html(report: Report) -> str:
    """The whole page."""
    sections = [section for section in _sections(report) if section[2]]
    script = _asset("chart.js") + _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = {
        "title": esc(report.title),
        "verdict": esc(report.verdict),
        "facts": "".join(f"<li>{esc(fact)}</li>" for fact in _facts(report)),
        "navigation": "".join(f'<li><a href="#{name}">{esc(title)}</a></li>' for name, title, _ in sections),
        "sections": "\n".join(_section(*section) for section in sections),
        "made": f"{report.made.day} {report.made:%B %Y}",
        "version": esc(__version__),
        "style": _asset("page.css"),
        "script": script,
        "script_hash": f"'sha256-{digest}'",
        "data": script_json(_data(report)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], _asset("page.html"))


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
    finished = sum(run.record is not None for run in report.runs)
    runs = f"{len(report.runs)} run{'s' if len(report.runs) > 1 else ''}"
    if finished < len(report.runs):
        runs += f", {finished} finished"
    facts = [f"Trained {report.dates}", f"{len(report.labels)} architectures" if len(report.labels) > 1 else "", runs]
    if report.comparison:
        facts.append(f"{report.comparison.tokens:,} training tokens each")
    return [fact for fact in facts if fact]


def _section(name: str, title: str, body: str) -> str:
    anchor = f'<a class="anchor" href="#{name}" aria-label="Link to the section {esc(title)}">#</a>'
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{esc(title)}{anchor}</h2>\n{body}\n</section>'


def _sections(report: Report) -> list[tuple[str, str, str]]:
    """Name, title and body of every section; those without a body are left out."""
    tables = report.tables

    def table(name: str, style: str = "") -> str:
        return _table(tables[name], report.labels, style) if name in tables else ""

    def caution(name: str) -> str:
        return "".join(f'<p class="note caution">{esc(words)}</p>' for words in report.cautions.get(name, []))

    def part(name: str, *more: str) -> tuple[str, str, str]:
        title, lead = PARTS[name]
        charts = f'<div data-part="{name}"></div>' if report.charts[name] else ""
        body = charts + "".join(more)
        return name, title, body and f'<p class="lead">{esc(lead)}</p>{caution(name)}{body}'

    comparison = report.comparison
    compared = table("comparison") + (_forest(comparison) if comparison else "")
    if not comparison:
        compared = f'<p class="lead">{esc(report.incomparable)}</p>'
    many = len(report.runs) > MANY
    curves = any(len(run.training) or len(run.evaluation) for run in report.runs)
    evaluated = "".join(caution(name) + table(name) for name in ("perplexity", "tasks"))
    settings = table("differing", "differences") or '<p class="lead">All runs have the same settings, seeds apart.</p>'
    return [
        ("comparison", "Comparison", compared),
        (
            "curves",
            "Loss curves",
            f'<p class="lead screen">{esc(CURVES_LEAD)}</p><div data-part="curves"></div>' * curves,
        ),
        part("coefficients"),
        part("depth"),
        part("jacobian", table("jacobian")),
        part("hessian", table("hessian")),
        ("evaluation", "Other texts and tasks", evaluated),
        part("forgetting", *(_table(found, report.labels) for found in report.forgetting)),
        ("published", "Published figures", "".join(_titled(found, report.labels) for found in report.published)),
        ("samples", "Text side by side", _samples(report.samples, report.labels) if report.samples else ""),
        ("runs", "All runs", _folded(f"{len(report.runs)} runs", table("runs")) if many else table("runs")),
        ("settings", "Settings", settings + _folded("Settings that all runs have in common", table("common"))),
        ("reproduce", "Environment and commands", table("environment") + _reproduce(report)),
        ("notes", "Notes", _notes(report)),
    ]


def _titled(table: Table, labels: Sequence[str]) -> str:
    return f"<h3>{esc(table.caption)}</h3>{_table(table, labels)}"


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{esc(title)}</summary>{body}</details>" if body else ""


def _table(table: Table, labels: Sequence[str], style: str = "") -> str:
    return table.html(style, lambda name: _swatch(labels.index(name)) if name in labels else "")


def _looks(index: int) -> str:
    """The classes of an architecture's colour and dashes."""
    if index == 0:
        return "s0"
    cycle, place = divmod(index - 1, COLOURS - 1)
    return f"s{1 + place} d{1 + (place + cycle) % DASHES}"


def _swatch(index: int) -> str:
    return (
        f'<svg class="swatch" viewBox="0 0 20 8" aria-hidden="true"><line x1="0" x2="20" y1="4" y2="4" '
        f'stroke-width="{2.5 if index else 3}" class="line {_looks(index)}"/></svg>'
    )


def _forest(comparison: Comparison) -> str:
    """Paired differences with their intervals on one scale; the table above has the numbers."""
    rows = [(i, row, row.difference) for i, row in enumerate(comparison.rows) if row.difference is not None]
    if not rows:
        return ""
    ends = [0.0, *(v for _, _, d in rows for v in (d.mean, d.low, d.high) if v is not None)]
    low, high = min(ends), max(ends)
    room = 0.06 * (high - low) or 0.001
    low, high = low - room, high + room

    def place(value: float) -> str:
        return f"{100 * (value - low) / (high - low):.2f}%"

    lines = []
    for index, row, found in rows:
        bar = ""
        if found.low is not None and found.high is not None:
            width = f"{100 * (found.high - found.low) / (high - low):.2f}%"
            bar = f'<span class="bar" style="left:{place(found.low)};width:{width}"></span>'
        hollow = "" if bar else " hollow"
        lines.append(
            f'<div class="row"><span class="name" title="{esc(row.label)}">{_swatch(index)}{esc(row.label)}</span>'
            f'<span class="track {_looks(index)}"><span class="zero" style="left:{place(0)}"></span>{bar}'
            f'<span class="mean{hollow}" style="left:{place(found.mean)}"></span></span>'
            f'<span class="value">{esc(f"{found.mean:+.4f}".replace("-", MINUS))}</span></div>'
        )
    ticks = "".join(
        f'<span class="tick" style="left:{place(v)}">{esc(f"{v:+.3g}".replace("-", MINUS) if v else "0")}</span>'
        for v in _ticks(low, high)
    )
    axis = f'<div class="row axis"><span></span><span class="track">{ticks}</span><span></span></div>'
    title = (
        f"Difference in final loss to {comparison.baseline}, {percent(comparison.confidence)} confidence; left of the "
        "line is better"
    )
    return f'<div class="forest" role="img" aria-label="{esc(title)}"><h3>{esc(title)}</h3>{"".join(lines)}{axis}</div>'


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers."""
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step = next(step * f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= 6)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _samples(samples: Samples, labels: Sequence[str]) -> str:
    drawing = samples.drawing
    lead = (
        f"What the first run of each architecture writes, up to {drawing.tokens} tokens at temperature "
        f"{drawing.temperature:g}; the same seed everywhere."
    )
    out = [f'<p class="lead">{esc(" ".join([lead, *samples.notes]))}</p>']
    for prompt in samples.prompts:
        title = f"“{prompt}”" if prompt else "A new document"
        cards = []
        for index, label in enumerate(labels):
            found = samples.texts.get(prompt, {}).get(label)
            if found is not None:
                shown = f'<p><span class="prompt">{esc(prompt)}</span>{esc(found)}</p>'
            elif label in samples.problems:
                shown = f'<p class="problem">No text: {esc(samples.problems[label])}</p>'
            else:
                continue
            cards.append(f'<article class="sample"><h4>{_swatch(index)}{esc(label)}</h4>{shown}</article>')
        out.append(f'<h3>{esc(title)}</h3><div class="samples">{"".join(cards)}</div>')
    return "".join(out)


def _reproduce(report: Report) -> str:
    out = []
    if report.commands:
        commands = "\n".join(report.commands)
        out.append(f"<h3>The commands that made these runs</h3><pre>{esc(commands)}</pre>")
    again = "\n".join(command for _, command, _ in report.again)
    out.append(f"<h3>To train one again</h3><pre>{esc(again)}</pre>")
    out += [_folded(f"Config of {label}", f"<pre>{esc(toml)}</pre>") for label, _, toml in report.again if toml]
    return "".join(out)


def _notes(report: Report) -> str:
    out = [f'<p class="note">{esc(note)}</p>' for note in report.notes]
    out += [f'<p class="note">{esc(what)} (<code>{esc(command)}</code>).</p>' for what, command in report.missing]
    return "".join(out)


def _data(report: Report) -> dict[str, Any]:
    """What the script draws."""
    comparison = report.comparison
    entropies = {run.record.unigram_entropy for run in report.runs if run.record}
    windows = [run.training.window for run in report.runs if len(run.training)]
    return {
        "labels": report.labels,
        "entropy": entropies.pop() if comparison and len(entropies) == 1 else None,
        "window": max(windows, default=1),
        "curves": {
            "training": _curves(report, [run.training for run in report.runs]),
            "evaluation": _curves(report, [run.evaluation for run in report.runs]),
        },
        "parts": {name: _charts(charts, report.labels) for name, charts in report.charts.items()},
    }


def _curves(report: Report, curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Each run's curve, and after them the mean of those architectures that have several."""
    found = []
    for group, label in enumerate(report.labels):
        mine = [(run, c) for run, c in zip(report.runs, curves, strict=True) if run.label == label and len(c)]
        found += [{"group": group, "seed": run.seed, **_columns(curve)} for run, curve in mine]
        finished = [curve for run, curve in mine if run.record]
        if len(finished) > 1 and len(mean := mean_curve(finished)):
            found.append({"group": group, "seed": None, **_columns(mean)})
    return found


def _columns(curve: Curve) -> dict[str, list[Any]]:
    return {
        "step": curve.step,
        "tokens": curve.tokens,
        "seconds": [round(value, 2) if math.isfinite(value) else None for value in curve.seconds],
        "loss": [round(value, 5) for value in curve.loss],
    }


def _charts(charts: Charts, labels: Sequence[str]) -> dict[str, Any]:
    def short(values: Sequence[float | None]) -> list[float | None]:
        return [None if value is None else float(f"{value:.6g}") for value in values]

    return {
        "charts": [
            {
                "title": chart.title,
                "x": chart.x,
                "y": chart.y,
                "log": chart.log and all(value > 0 for line in chart.lines for value in line.y),
                "whole": chart.whole_x,
                "lines": [
                    {
                        "group": labels.index(line.label),
                        "seed": line.seed,
                        "choice": line.choice,
                        "x": short(line.x),
                        "y": short(line.y),
                    }
                    for line in chart.lines
                ],
            }
            for chart in charts.charts
        ],
        "surfaces": [
            {
                "group": labels.index(s.label),
                "seed": s.seed,
                "x": short(s.x[:: 1 + len(s.x) // MOST_CELLS]),
                "y": short(s.y[:: 1 + len(s.y) // MOST_CELLS]),
                "loss": [short(row[:: 1 + len(s.x) // MOST_CELLS]) for row in s.loss[:: 1 + len(s.y) // MOST_CELLS]],
            }
            for s in charts.surfaces
        ],
    }
