"""Tables of a report, made once and written as HTML, Markdown or LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
NAMED = 5  # names that a sentence gives before it counts


@dataclass(frozen=True)
class Cell:
    """What is shown, what it is sorted by, and whether it is to be noticed."""

    text: str
    value: float | str | None = None
    marked: bool = False
    code: bool = False  # a command, a path, a hash: shown as it is typed


@dataclass(frozen=True)
class Column:
    title: str
    numeric: bool = False
    hint: str = ""


@dataclass
class Table:
    """Rows under columns; the first column names the row."""

    columns: list[Column]
    rows: list[list[Cell]]
    caption: str = ""
    notes: list[str] = field(default_factory=list)


def number(value: float | None, digits: str = ".4f", suffix: str = "") -> Cell:
    """A number with a true minus sign; a dash when there is none."""
    if value is None or value != value:
        return Cell(NOTHING)
    return Cell(format(value, digits).replace("-", MINUS) + suffix, value)


def text(value: object, *, marked: bool = False, code: bool = False) -> Cell:
    shown = str(value)
    return Cell(shown or NOTHING, shown, marked, code)


def columns(*titles: str | Column) -> list[Column]:
    """Columns of words for bare titles."""
    return [title if isinstance(title, Column) else Column(title) for title in titles]


def listed(names: Sequence[str], most: int = NAMED) -> str:
    """a, b and c; after some names, how many more."""
    if len(names) > most + 1:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def markdown(table: Table) -> str:
    """A GitHub table with its notes below."""
    lines = [[_markdown(column.title) for column in table.columns]]
    lines.append(["--:" if column.numeric else ":--" for column in table.columns])
    lines += [[f"`{_plain(cell.text)}`" if cell.code else _markdown(cell.text) for cell in row] for row in table.rows]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([body, *(markdown_text(note) for note in table.notes)]) + "\n"


def markdown_text(words: str) -> str:
    """Words that Markdown shows as they are, on one line."""
    words = " ".join(words.split())
    for character in "\\`*_<[#":
        words = words.replace(character, f"\\{character}")
    return words


def _markdown(words: str) -> str:
    return markdown_text(words).replace("|", "\\|")


def _plain(words: str) -> str:
    return " ".join(words.split()).replace("`", "'").replace("|", "\\|")


LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    TIMES: r"$\times$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    MINUS: "$-$",
    NOTHING: "--",
}


def latex_text(words: str) -> str:
    return "".join(LATEX.get(character, character) for character in " ".join(words.split()))


def latex(table: Table, shown: Sequence[int] | None = None) -> str:
    """A tabular with the rules of the booktabs package; `shown` are the columns that fit on paper."""
    chosen = range(len(table.columns)) if shown is None else shown
    layout = "".join("r" if table.columns[c].numeric else "l" for c in chosen)
    head = " & ".join(latex_text(table.columns[c].title) for c in chosen)
    rows = [" & ".join(latex_text(row[c].text) for c in chosen) + r" \\" for row in table.rows]
    notes = [f"% {' '.join(note.split())}" for note in table.notes]
    lines = [
        "% needs \\usepackage{booktabs}",
        *notes,
        rf"\begin{{tabular}}{{{layout}}}",
        r"\toprule",
        head + r" \\",
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"
