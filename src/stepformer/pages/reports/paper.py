"""A report for a paper: Markdown, pictures, CSV and a LaTeX table."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepformer.base.files import write_text
from stepformer.base.version import __version__
from stepformer.data.tokenizers import valid
from stepformer.pages.reports.charts import Chart, Charts, Line
from stepformer.pages.reports.collect import Curve
from stepformer.pages.reports.contents import Report
from stepformer.pages.reports.page import PARTS
from stepformer.pages.reports.samples import Samples
from stepformer.present.style import COLOURS, look_of, new_figure, save_figure, short_number
from stepformer.present.tables import Table, markdown_block, markdown_text
from stepformer.study import plot_differences

TITLES = {"curves": "Loss curves", "differences": "Paired differences"} | {n: title for n, (title, _) in PARTS.items()}
FIRST_LINE = "<!-- made by stepformer report, which writes this file anew -->"
DASHES = ((5, 1.5), (1.5, 1), (5, 1.2, 1.2, 1.2))  # on and off, in widths of the line
LATEX_COLUMNS = (0, 1, 2, 3, 4, 5, 6, 8, 9)  # of the comparison: what fits on a page
COLUMNS = 3  # of small charts
MOST_CHOICES = 2  # of a chart that shows one of several things: the first and the last


def write_paper(report: Report, out: Path, progress: Callable[[int], None] = lambda amount: None) -> list[Path]:
    """Write report.md with its pictures and tables into `out`; returns what was written.

    Without matplotlib there are no pictures, and the report says so.
    """
    pictures: dict[str, tuple[str, Path]] = {}
    problem = no_pictures()
    for name, title, draw in _pictures(report):
        if not problem:
            draw(out / f"{name}.png")
            pictures[name] = (title, out / f"{name}.png")
            progress(1)
    written = [path for _, path in pictures.values()]
    if report.comparison:
        write_text(out / "comparison.csv", valid(report.comparison.details.csv()))
        write_text(out / "comparison.tex", valid(report.tables["comparison"].latex(LATEX_COLUMNS)))
        written += [out / "comparison.csv", out / "comparison.tex"]
    write_text(out / "runs.csv", valid(report.tables["runs"].csv()))
    write_text(out / "report.md", valid(markdown_report(report, pictures, [problem] if problem else [])))
    return [out / "report.md", out / "runs.csv", *written]


def files_of(report: Report) -> list[str]:
    """The names of all files of a report, the page among them."""
    compared = ["comparison.csv", "comparison.tex"] if report.comparison else []
    pictures = [] if no_pictures() else [f"{name}.png" for name, _, _ in _pictures(report)]
    return ["index.html", "report.md", "runs.csv", *compared, *pictures]


def no_pictures() -> str:
    """Why there are no pictures, in a sentence; nothing if there are."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return "There are no pictures: they need matplotlib, pip install 'stepformer[plot]'."
    return ""


def _pictures(report: Report) -> list[tuple[str, str, Callable[[Path], None]]]:
    """Name, title and drawing of each picture there is something for."""
    found: list[tuple[str, str, Callable[[Path], None]]] = []
    if any(len(run.training) or len(run.evaluation) for run in report.runs):
        found.append(("curves", TITLES["curves"], lambda path: plot_curves(report, path)))
    comparison = report.comparison
    if comparison and any(row.difference for row in comparison.rows):
        found.append(("differences", TITLES["differences"], lambda path: plot_differences(comparison, path)))
    for name, charts in report.charts.items():
        if charts:
            found.append((name, TITLES[name], functools.partial(plot_charts, charts, report.labels)))
    return found


def markdown_report(report: Report, pictures: dict[str, tuple[str, Path]], notes: Sequence[str] = ()) -> str:
    """The report as Markdown; pictures lie beside it."""
    words = markdown_text
    out = [
        FIRST_LINE,
        f"# {words(report.title)}",
        words(report.verdict),
        f"Trained {report.dates}; made with stepformer {__version__}.",
    ]
    if report.comparison:
        out += ["## Comparison", report.comparison.table.markdown().rstrip()]
    shown = report.tables
    for name in ("curves", "differences", *PARTS):
        picture = [f"![{words(pictures[name][0])}]({pictures[name][1].name})"] if name in pictures else []
        table = [shown[name].markdown()] if name in PARTS and name in shown else []
        table += map(Table.markdown, report.forgetting) if name == "forgetting" else []
        if picture or table:
            out += [f"## {words(TITLES[name])}", *_cautions(report, name), *picture, *table]
    evaluated = [name for name in ("perplexity", "tasks") if name in shown]
    if evaluated:
        out.append("## Other texts and tasks")
    for name in evaluated:
        out += [*_cautions(report, name), shown[name].markdown()]
    out += _tables("Published figures", report.published)
    if report.samples:
        out += _samples(report.samples, report.labels)
    out += _tables("All runs", [shown["runs"]])
    if "differing" in shown:
        out += _tables("Settings that differ", [shown["differing"]])
    out += _tables("Environment", [shown["environment"]])
    commands = [*report.commands, *(command for _, command, _ in report.again)]
    out += ["## Commands", markdown_block("\n".join(commands))]
    remarks = [*report.notes, *notes, *(f"{what} (`{command}`)." for what, command in report.missing)]
    if remarks:
        out += ["## Notes", "\n".join(f"- {words(remark)}" for remark in remarks)]
    return "\n\n".join(part.rstrip() for part in out) + "\n"


def _cautions(report: Report, name: str) -> list[str]:
    return [f"**{markdown_text(caution)}**" for caution in report.cautions.get(name, [])]


def _tables(title: str, found: Sequence[Table]) -> list[str]:
    return [f"## {markdown_text(title)}", *map(Table.markdown, found)] if found else []


def _samples(samples: Samples, labels: Sequence[str]) -> list[str]:
    out = ["## Text side by side"]
    for prompt in samples.prompts:
        out.append(f"### {markdown_text(prompt) if prompt else 'A new document'}")
        for label in labels:
            found = samples.texts.get(prompt, {}).get(label)
            if found is not None:
                out += [f"{markdown_text(label)}:", markdown_block(prompt + found)]
    return out


def look(index: int) -> dict[str, Any]:
    """As on the page: the baseline solid, the others dashed, so that what lies below them shows in the gaps."""
    colour, dashes = look_of(index)
    return {"color": COLOURS[colour], "linestyle": (1.5 * index, DASHES[dashes]) if index else "-"}


def _legend(figure: Any, labels: Sequence[str], chosen: Sequence[int]) -> None:
    """One legend for the figure, outside of all axes, where it covers nothing."""
    from matplotlib.lines import Line2D

    if not chosen:
        return
    handles = [Line2D([], [], linewidth=2, **look(index)) for index in chosen]
    names = [labels[index] for index in chosen]
    shown = [name if len(name) <= 40 else f"{name[:39]}…" for name in names]
    width = figure.get_size_inches()[0]
    columns = max(1, min(len(shown), int(width / (0.7 + 0.085 * max(map(len, shown))))))
    legend = figure.legend(handles, shown, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a label with dollar signs is a label


def plot_curves(report: Report, path: Path) -> None:
    """Validation and training loss over tokens."""
    titles = {"evaluation": "Validation loss", "training": "Training loss, running mean"}
    kinds = [kind for kind in titles if any(len(getattr(run, kind)) for run in report.runs)]
    figure = new_figure((5.5 * len(kinds), 4.2 + 0.2 * (len(report.labels) // 5)))
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        found = report.curves(kind)
        for index, (curves, mean) in enumerate(found):
            for _, curve in curves:
                thin = {"linewidth": 0.8, "alpha": 0.35} if len(curves) > 1 else {"linewidth": 1.7}
                axes.plot(curve.tokens, curve.loss, **thin, **look(index))
            if mean:
                axes.plot(mean.tokens, mean.loss, linewidth=1.8, **look(index))
        _limit(axes, [curve for curves, _ in found for _, curve in curves])
        axes.xaxis.set_major_formatter(lambda value, _: short_number(value))
        _label(axes, titles[kind], "training tokens", "nats per token")
    _legend(figure, report.labels, range(len(report.labels)))
    save_figure(figure, path)


def _limit(axes: Any, curves: Sequence[Curve]) -> None:
    """Leave the fall from chance out of the picture where enough is left without it."""
    end = max(curve.tokens[-1] for curve in curves)
    late = [[loss for t, loss in zip(c.tokens, c.loss, strict=True) if t >= 0.2 * end] for c in curves]
    if min(map(len, late)) >= 4:
        low, high = min(map(min, late)), max(map(max, late))
        margin = 0.07 * (high - low) or 0.01
        axes.set_ylim(low - margin, high + margin)


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9, parse_math=False)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)


def plot_charts(charts: Charts, labels: Sequence[str], path: Path) -> None:
    """Small charts in rows; a chart of several choices is drawn for the first and the last of them."""
    panels: list[tuple[Chart, str, list[Line]]] = []
    for chart in charts.charts:
        chosen = chart.choices if len(chart.choices) <= MOST_CHOICES else [chart.choices[0], chart.choices[-1]]
        panels += [(chart, choice, [line for line in chart.lines if line.choice == choice]) for choice in chosen]
    count = len(panels) + len(charts.surfaces)
    columns = min(COLUMNS, count)
    rows = math.ceil(count / columns)
    figure = new_figure((3.7 * columns, 2.7 * rows + 0.5 + 0.2 * (len(labels) // 5)))
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, (chart, choice, lines) in zip(places, panels, strict=False):
        averaged = {line.label for line in lines if line.seed is None}
        for line in lines:
            thin = line.seed is not None and line.label in averaged
            weight: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.4} if thin else {"linewidth": 1.6}
            if not thin and len(line.x) <= 40:
                weight |= {"marker": "o", "markersize": 2.5}
            axes.plot(line.x, line.y, **weight, **look(labels.index(line.label)))
        if chart.log and all(value > 0 for line in lines for value in line.y):
            axes.set_yscale("log")
        if chart.whole_x:
            axes.xaxis.get_major_locator().set_params(integer=True)
        _label(axes, f"{chart.title}, {choice}" if choice else chart.title, chart.x, chart.y)
    for axes, surface in zip(places[len(panels) :], charts.surfaces, strict=False):
        loss = [[math.nan if value is None else value for value in row] for row in surface.loss]
        drawn = axes.contourf(surface.x, surface.y, loss, levels=16, cmap="cividis")
        figure.colorbar(drawn, ax=axes)
        _label(axes, f"Loss, {surface.label} s{surface.seed}", "first direction", "second direction")
        axes.grid(visible=False)
    for axes in places[count:]:
        axes.set_visible(False)
    drawn_labels = {line.label for _, _, lines in panels for line in lines}
    _legend(figure, labels, [index for index, label in enumerate(labels) if label in drawn_labels])
    save_figure(figure, path)
