"""One look for all pictures."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepformer.base.errors import InputError, StepformerError
from stepformer.base.files import writing

# Okabe and Ito's palette, black for the baseline; told apart with every common kind of colour blindness.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)))
GREY = "#666666"
FALL_CUT = " (fall from chance cut off)"  # beside an axis that begins below it
PICTURES = ("png", "pdf", "svg")
UNDATED = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}  # the same picture twice is the same file


def new_figure(size: tuple[float, float]) -> Any:
    """An empty matplotlib figure, inches wide and high."""
    try:
        from matplotlib.figure import Figure  # not pyplot: it would choose a backend for the whole process
    except ImportError:
        raise StepformerError("The plot needs matplotlib: pip install 'stepformer[plot]'.") from None
    return Figure(figsize=size, layout="constrained", facecolor="white")


Paths = str | Path | Sequence[Path]


def save_figure(figure: Any, paths: Paths, below: str = "") -> None:
    """Write a picture, whole or not at all: PNG, PDF or SVG by the file's name, PNG for a name without an ending; to
    several files, if there are several names.

    `below` is said in small grey letters under it.
    """
    from matplotlib import rc_context

    several = [Path(paths)] if isinstance(paths, str | Path) else list(paths)
    kinds = [path.suffix.removeprefix(".").lower() or "png" for path in several]
    if wrong := [path for path, kind in zip(several, kinds, strict=True) if kind not in PICTURES]:
        raise InputError(f"'{wrong[0]}': pictures are written as {', '.join(PICTURES)}.")
    if below:
        say_below(figure, below)
    for path, kind in zip(several, kinds, strict=True):
        # letters as TrueType: journals refuse the Type 3 of matplotlib's default
        with writing(path) as file, rc_context({"pdf.fonttype": 42}):
            figure.savefig(file, format=kind, dpi=150, metadata=UNDATED.get(kind))
        figure.set_layout_engine(None)  # everything has its place now: another file is drawn once


def say_below(figure: Any, words: str) -> None:
    """Small grey letters under a picture, in lines that are not wider than it: 16 of them to an inch."""
    width = int(16 * figure.get_size_inches()[0])
    lines = [textwrap.fill(line, width) for line in words.splitlines()]
    figure.supxlabel("\n".join(lines), fontsize=8, color=GREY, parse_math=False)


def looks(index: int) -> dict[str, Any]:
    """Colour and dashes of the architecture at this place; 0 is the baseline."""
    colour, dashes = look_of(index)
    return {"color": COLOURS[colour], "linestyle": DASHES[dashes]}


def look_of(index: int) -> tuple[int, int]:
    """Which colour and which of three dashes an architecture has: a line that lies on top of another leaves gaps to
    see it through. Of the baseline, 0, the colour alone counts.
    """
    cycle, place = divmod(max(index, 1) - 1, len(COLOURS) - 1)
    return (1 + place if index else 0), (place + cycle) % 3


def short_number(value: float) -> str:
    """1500 as 1.5k, 2e6 as 2M."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:g}"


def clean(axes: Any, *, lines: str = "both", width: float = 0.8) -> None:
    """No frame above and to the right, and faint lines behind what is drawn: across `x`, `y` or both."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=lines, color="#E5E5E5", linewidth=width)
    axes.set_axisbelow(True)


def titled(axes: Any, title: str, below: str = "", beside: str = "") -> None:
    """A title at the left, as it is written, and what the two axes are."""
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    axes.set(xlabel=below, ylabel=beside)


def as_written(words: Any) -> None:
    """Labels and names of a picture as they are: one with dollar signs is no formula."""
    for text in words:
        text.set_parse_math(False)


def few_ticks(axes: Any, most: int, **more: Any) -> None:
    """At most so many numbers along the axis below."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=most, **more))


def name_rows(axes: Any, names: Sequence[str]) -> None:
    """Names of rows at the left, the first on top."""
    as_written(tick.label1 for tick in axes.set_yticks(range(len(names)), names))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
