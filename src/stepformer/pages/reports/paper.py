"""The files of a report for a paper: Markdown, pictures, CSV, a LaTeX table and BibTeX of what its rows use.

Only files of an earlier report are written over. The page and report.md say themselves whose they are. The others, a
comparison.csv say, are known by a list in the report's cache; a report without the list, an older one, is taken to own
them.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepformer.base.errors import InputError
from stepformer.base.files import clear_left, read_json, write_json, write_text
from stepformer.base.version import __version__
from stepformer.catalogue import citations
from stepformer.catalogue.references import bibtex
from stepformer.data.tokenizers import valid
from stepformer.pages.reports.charts import Chart, Charts, Line
from stepformer.pages.reports.collect import Curve
from stepformer.pages.reports.contents import Report, titled
from stepformer.pages.reports.method import method
from stepformer.pages.reports.page import FACTORIAL, PARTS
from stepformer.pages.reports.samples import Samples
from stepformer.present.style import (
    COLOURS,
    FALL_CUT,
    Paths,
    as_written,
    clean,
    few_ticks,
    look_of,
    new_figure,
    save_figure,
    short_number,
)
from stepformer.present.tables import Table, markdown_block, markdown_text
from stepformer.study import Comparison, plot_differences
from stepformer.study.comparison import REMEDY, ROUGH
from stepformer.study.statistics import seed_words
from stepformer.study.tables import MARK, differences_of, losses_of

TITLES = {"curves": "Loss curves", "differences": "Paired differences"} | {n: title for n, (title, _) in PARTS.items()}
FIRST_LINE = "<!-- made by stepformer report, which writes this file anew -->"
SIGNS = {"index.html": '<meta name="generator" content="stepformer ', "report.md": FIRST_LINE}
HEAD = 2000  # bytes of a file in which its sign is
DRAWN = (".png", ".pdf")  # each picture, for the page and for a paper
SUFFIXES = {".html", ".md", ".csv", ".tex", ".bib", *DRAWN}  # of a report's files
LIST = Path(".cache") / "files.json"
DASHES = ((5, 1.5), (1.5, 1), (5, 1.2, 1.2, 1.2))  # on and off, in widths of the line
COLUMNS = 3  # of small charts
TITLE_WIDTH = 38  # characters above one of them
MOST_CHOICES = 2  # of a chart that shows one of several things: the first and the last


def write_paper(report: Report, out: Path, progress: Callable[[int], None] = lambda amount: None) -> list[Path]:
    """Write report.md with its pictures and tables into `out`; returns what was written.

    Without matplotlib there are no pictures, and the report says so.
    """
    pictures = _pictures(report)
    for name, draw in pictures.items():
        draw([out / f"{name}{suffix}" for suffix in DRAWN])
        progress(len(DRAWN))
    texts = {"runs.csv": report.tables["runs"].csv(), "report.md": markdown_report(report, pictures, no_pictures())}
    texts["references.bib"] = references(report)
    if report.comparison:
        texts["comparison.csv"] = report.comparison.details.csv()
        texts["comparison.tex"] = "\n".join(latex_tables(report, report.comparison))
    for name, text in texts.items():
        write_text(out / name, valid(text))
    compared = [name for name in texts if name.startswith("comparison")]
    return [out / name for name in ("report.md", "runs.csv", "references.bib", *_drawn(pictures), *compared)]


def references(report: Report) -> str:
    """BibTeX of what the architectures and optimizers of all runs use; who trained an imported model is not known."""
    known = [(run.config, bool(run.facts.get("imported"))) for run in report.runs if run.config]
    keys = [citations(config.model, "" if imported else config.optim.name) for config, imported in known]
    return f"% as `stepformer show NAME --cite`, of all runs\n\n{bibtex(itertools.chain(*keys))}\n"


def latex_tables(report: Report, comparison: Comparison) -> Iterator[str]:
    """The tables of a comparison, each with a caption that says what was compared, on what, and how."""
    losses, differences = losses_of(comparison), differences_of(comparison)
    about = f"{titled([row.label for row in comparison.rows], report.runs)}."
    for number, table in enumerate(comparison.tables, 1):
        held_out = f"{table.caption} Loss in nats per token; {seed_words(comparison.seeds)}."
        said = [about, losses if number == 1 else held_out, *([differences] if comparison.paired else [])]
        notes = [note.removeprefix(f"{MARK.strip()} ") for note in table.notes if note not in (losses, differences)]
        notes = [note.replace(REMEDY, "") for note in notes if not note.endswith(ROUGH)]  # the table has no times
        yield replace(table, caption=" ".join(said), notes=notes).latex(f"tab:comparison-{number}")


def files_of(report: Report) -> list[str]:
    """The names of all files of a report, the page among them."""
    compared = ["comparison.csv", "comparison.tex"] if report.comparison else []
    return ["index.html", "report.md", "runs.csv", "references.bib", *compared, *_drawn(_pictures(report))]


def _drawn(pictures: Iterable[str]) -> list[str]:
    return [f"{name}{suffix}" for name in pictures for suffix in DRAWN]


def refuse_foreign(out: Path, names: Sequence[str]) -> None:
    """Stop if a file that a report would write is there and is not a report's."""
    for name in names:
        if os.path.lexists(out / name) and not _ours(out, name):
            raise InputError(
                f"'{out / name}' was not made by a report and would be written over: name another folder with --out."
            )


def hold(out: Path) -> None:
    """Make the folder, or say that it cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The folder --out '{out}' cannot be made: {error.strerror or error}.") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise InputError(f"The folder --out '{out}' may not be written.")


def claim(out: Path, names: Sequence[str]) -> None:
    """Note the files that will be written, before they are: a report that is interrupted knows its own. Cleared away
    are what a killed one left half-written, and files of an earlier report that this one does not have.
    """
    refuse_foreign(out, names)
    for old in {*(_listed(out) or [])} - {*names}:
        if old == Path(old).name and Path(old).suffix in SUFFIXES:
            (out / old).unlink(missing_ok=True)
    for name in (*names, str(LIST), str(LIST.with_name("models.jsonl"))):
        clear_left(out / name)
    write_json(out / LIST, sorted(names))


def _ours(out: Path, name: str) -> bool:
    listed = _listed(out)
    if name not in SIGNS and listed is not None:
        return name in listed
    signed = name if name in SIGNS else "index.html"
    try:
        with (out / signed).open("rb") as file:
            return SIGNS[signed].encode() in file.read(HEAD)
    except OSError:
        return False


def _listed(out: Path) -> list[str] | None:
    try:
        found = read_json(out / LIST, "list of files")
    except InputError:  # there is none, or it is damaged
        return None
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else None


def no_pictures() -> str:
    """Why there are no pictures, in a sentence; nothing if there are."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return "There are no pictures: they need matplotlib, pip install 'stepformer[plot]'."
    return ""


def _pictures(report: Report) -> dict[str, Callable[[Sequence[Path]], None]]:
    """What draws each picture there is something for, by its name."""
    found: dict[str, Callable[[Sequence[Path]], None]] = {}
    if no_pictures():
        return found
    if any(len(run.training) or len(run.evaluation) for run in report.runs):
        found["curves"] = functools.partial(plot_curves, report)
    if report.comparison and any(row.difference for row in report.comparison.rows):
        found["differences"] = functools.partial(plot_differences, report.comparison)
    drawn = {name: functools.partial(plot_charts, c, report.labels) for name, c in report.charts.items() if c}
    return found | drawn


def markdown_report(report: Report, pictures: Container[str], note: str = "") -> str:
    """The report as Markdown; pictures lie beside it."""
    shown = report.tables
    out = [
        FIRST_LINE,
        f"# {markdown_text(report.title)}",
        markdown_text(report.verdict),
        f"Trained {report.dates}; made with stepformer {__version__}.",
    ]

    def section(title: str, *parts: str | Table) -> None:
        if parts:
            out.append(f"## {title}")
            out.extend(part.markdown() if isinstance(part, Table) else part for part in parts)

    def measured(name: str, tables: Sequence[Table]) -> list[str | Table]:
        """Cautions, the picture and tables of a part, if there are any but the cautions."""
        cautions = [f"**{markdown_text(caution)}**" for caution in report.cautions.get(name, [])]
        picture = [f"![{TITLES[name]}]({name}.png)"] if name in pictures else []
        return [*cautions, *picture, *tables] if picture or tables else []

    section("Comparison", *([str(report.comparison)] if report.comparison else []))
    section(FACTORIAL, *([shown["factorial"]] if "factorial" in shown else []))
    for name, title in TITLES.items():
        one = [shown[name]] if name in shown else []
        section(title, *measured(name, report.forgetting if name == "forgetting" else one))
    evaluated = [measured(name, [shown[name]]) for name in ("perplexity", "tasks", "hybrid") if name in shown]
    section("Other texts and tasks", *itertools.chain(*evaluated))
    section("Published figures", *report.published)
    section("Text side by side", *(_samples(report.samples, report.labels) if report.samples else []))
    section("Method", *map(markdown_text, filter(None, [*method(report.runs), report.search])))
    section("All runs", shown["runs"])
    section("Settings that differ", *([shown["differing"]] if "differing" in shown else []))
    section("Environment", shown["environment"])
    commands = [*report.commands, *(command for _, command, _ in report.again)]
    section("Commands", markdown_block("\n".join(commands)))
    missing = [f"{what} (`{command}`)." for what, command in report.missing]
    remarks = [f"- {markdown_text(remark)}" for remark in (*report.notes, *filter(None, [note]), *missing)]
    section("Notes", *filter(None, ["\n".join(remarks)]))
    return "\n\n".join(part.rstrip() for part in out) + "\n"


def _samples(samples: Samples, labels: Sequence[str]) -> list[str]:
    out = []
    for prompt in samples.prompts:
        out.append(f"### {markdown_text(prompt) if prompt else 'A new document'}")
        for label, text in ((label, samples.texts.get(prompt, {}).get(label)) for label in labels):
            out += [] if text is None else [f"{markdown_text(label)}:", markdown_block(prompt + text)]
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
    shown = [name if len(name) <= 40 else f"{name[:39]}…" for name in (labels[index] for index in chosen)]
    width = figure.get_size_inches()[0]
    columns = max(1, min(len(shown), int(width / (0.7 + 0.085 * max(map(len, shown))))))
    legend = figure.legend(handles, shown, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)
    as_written(legend.get_texts())


def plot_curves(report: Report, paths: Paths) -> None:
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
        cut = _limit(axes, [curve for curves, _ in found for _, curve in curves])
        axes.xaxis.set_major_formatter(lambda value, _: short_number(value))
        _label(axes, titles[kind], "training tokens", f"nats per token{FALL_CUT if cut else ''}")
    _legend(figure, report.labels, range(len(report.labels)))
    save_figure(figure, paths)


def _limit(axes: Any, curves: Sequence[Curve]) -> bool:
    """Leave the fall from chance out of the picture where enough is left without it; whether it is."""
    end = max(curve.tokens[-1] for curve in curves)
    late = [[loss for t, loss in zip(c.tokens, c.loss, strict=True) if t >= 0.2 * end] for c in curves]
    if cut := min(map(len, late)) >= 4:
        low, high = min(map(min, late)), max(map(max, late))
        margin = 0.07 * (high - low) or 0.01
        axes.set_ylim(low - margin, high + margin)
    return cut


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9, parse_math=False)
    axes.tick_params(labelsize=8)
    clean(axes)


def plot_charts(charts: Charts, labels: Sequence[str], paths: Paths) -> None:
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
                weight |= {"marker": "o", "markersize": 5 if chart.points else 2.5}
            axes.plot(line.x, line.y, **weight, **look(labels.index(line.label)))
        if chart.log and all(value > 0 for line in lines for value in line.y):
            axes.set_yscale("log")
        few_ticks(axes, 5, integer=chart.whole_x)
        if axes.get_xlim()[1] >= 10_000:
            axes.xaxis.set_major_formatter(lambda value, _: short_number(value))
        title = f"{chart.title}, {choice}" if choice else chart.title
        _label(axes, textwrap.fill(title, TITLE_WIDTH), chart.x, chart.y)
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
    save_figure(figure, paths)
