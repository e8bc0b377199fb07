"""Tables, made once and written for the terminal, as Markdown, CSV, HTML or LaTeX, or as a pandas.DataFrame."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from stepformer.base.errors import StepformerError
from stepformer.present.templates import template

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table as RichTable

MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
NAMED = 5  # names that a sentence gives before it counts
GAP = 2  # between columns
PROSE = 24  # width of a column of words, after which they fold
LONG = 44  # characters after which a page breaks a cell into lines
PRINTED = 75  # characters of a line of an article, in its small letters
FOLDED = 16  # characters after which the names of a table that is too wide for that fold
BELOW = re.compile(r" (?=±|\[|->)")  # what stands before what may stand below a number
FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")  # an apostrophe, too, so that one may always be taken away again
CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")  # nothing to see, and no space either


@dataclass(frozen=True)
class Cell:
    """What is shown, what it is sorted by and written to CSV as, and whether it is to be noticed."""

    text: str
    value: float | str | None = None
    marked: bool = False
    code: bool = False  # a command, a path, a hash: shown as it is typed
    style: str = ""  # colour of its row in a terminal


@dataclass(frozen=True)
class Column:
    title: str
    numeric: bool = False
    hint: str = ""
    key: str = ""  # its name in CSV, if not the title
    spare: int = 0  # a narrow terminal leaves out those with 1 first, then 2; never those with 0
    printed: bool = True  # a paper has it too, if it is not spare


@dataclass
class Table:
    """Rows under columns; the first column names the row."""

    columns: list[Column]
    rows: list[list[Cell]]
    caption: str = ""
    notes: list[str] = field(default_factory=list)

    # For a terminal.

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What `console.print` shows of it."""
        yield self.rich(options.max_width)

    def rich(self, width: int = 120, *, rule: bool = True) -> RichTable:
        """For a terminal of this width. What is too wide loses its spare columns, then has its cells in two lines."""
        from rich import box  # a machine that only measures may lack it
        from rich.markup import escape
        from rich.table import Table as RichTable

        shown = self.fitting(width)
        left_out = [column.title for column in self.columns if column not in shown.columns]
        below = [*self.notes, *([f"Too wide for this terminal: {listed(left_out)}."] if left_out else [])]
        table = RichTable(
            box=box.SIMPLE_HEAD if rule else None,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0) if rule else (0, GAP, 0, 0),  # a box puts a blank between columns
            header_style="bold",
            caption=escape("\n" + "\n".join(below)) if below else None,
            caption_justify="left",
            caption_style="",
        )
        spacious = sum(shown.widths()) + GAP * (len(shown.columns) - 1) <= width
        for place, column in enumerate(shown.columns):
            title = [column.title] if spacious else _heading(column, [row[place].text for row in shown.rows])
            justify: Literal["left", "right"] = "right" if column.numeric else "left"
            whole = column.numeric or (place == 0 and shown.widths()[0] <= width // 3)
            table.add_column(escape("\n".join(title)), justify=justify, no_wrap=whole, overflow="fold", vertical="top")
        for row in shown.rows:
            style = next((cell.style for cell in row if cell.style), None)
            table.add_row(*(escape(cell.text) for cell in row), style=style)
        return table

    def plain(self) -> str:
        """For a terminal without colours, or a file."""
        out = [(" " * GAP).join(_padded(line, self.widths(), self.columns)).rstrip() for line in self._lines()]
        return "\n".join([*out, *self.notes])

    def _lines(self) -> list[list[str]]:
        return [[column.title for column in self.columns], *([cell.text for cell in row] for row in self.rows)]

    def widths(self) -> list[int]:
        """Of every column with its title, as text on one line."""
        return [max(map(_width, column)) for column in zip(*self._lines(), strict=True)]

    def fitting(self, width: int) -> Table:
        """What fits: all of it, or without spare columns, or with cells of two lines, or both."""
        smaller = [self]
        for rank in sorted({column.spare for column in self.columns if column.spare}):
            smaller.append(smaller[-1].without(i for i, c in enumerate(smaller[-1].columns) if c.spare == rank))
        for table in (*smaller, *(table.stacked() for table in smaller)):
            if table._least() <= width:
                return table
        return smaller[-1].stacked()

    def without(self, places: Iterable[int]) -> Table:
        """The table less some columns."""
        gone = set(places)
        kept = [[cell for i, cell in enumerate(row) if i not in gone] for row in self.rows]
        return replace(self, columns=[c for i, c in enumerate(self.columns) if i not in gone], rows=kept)

    def stacked(self) -> Table:
        """The table with what follows a number, its error or interval, below it."""

        def stack(cell: Cell, column: Column) -> Cell:
            return replace(cell, text=BELOW.sub("\n", cell.text)) if column.numeric else cell

        return replace(self, rows=[list(map(stack, row, self.columns)) for row in self.rows])

    def _least(self) -> int:
        """The width that it needs, words folded."""
        found = 0
        for place, column in enumerate(self.columns):
            cells = [row[place].text for row in self.rows]
            needed = max(map(_width, [*_heading(column, cells), *cells]))
            found += needed if column.numeric or place == 0 else min(needed, PROSE)
        return found + GAP * (len(self.columns) - 1)

    # For files.

    def markdown(self) -> str:
        """A GitHub table, padded so that it also reads well as text, with its notes below."""
        lines = [list(map(markdown_cell, row)) for row in ([Cell(c.title) for c in self.columns], *self.rows)]
        # at least two: a delimiter such as "-:" needs its hyphen
        widths = [max(2, *map(len, column)) for column in zip(*lines, strict=True)]
        rule = ["-" * (w - 1) + (":" if c.numeric else "-") for c, w in zip(self.columns, widths, strict=True)]
        body = [f"| {' | '.join(_padded(line, widths, self.columns))} |" for line in [lines[0], rule, *lines[1:]]]
        return "\n\n".join(["\n".join(body), *(markdown_text(note) for note in self.notes)]) + "\n"

    def csv(self) -> str:
        """Plain values under the columns' keys; an apostrophe before words that a spreadsheet would calculate."""
        return self._csv([[_guarded(value) for value in row] for row in self._values()])

    def _values(self) -> list[list[float | str]]:
        return [["" if cell.value is None else cell.value for cell in row] for row in self.rows]

    def _csv(self, values: list[list[float | str]]) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([column.key or column.title for column in self.columns])
        writer.writerows(values)
        return out.getvalue()

    def html(self, style: str = "", mark: Callable[[str], str] | None = None) -> str:
        """A table whose cells carry what they are sorted by; `mark` gives what stands before the name of a row."""
        return template(__package__, "parts/table.html").render(table=self, style=style, mark=mark, long=LONG)

    def _repr_html_(self) -> str:
        return self.html()

    def latex(self, label: str = "") -> str:
        """A table with the rules of the booktabs package, no wider than an article's text, of the columns that a paper
        has; `label` is for \\ref, and the notes stand below.
        """
        left_out = [column for column in self.columns if column.spare or not column.printed]
        kept = self.without(place for place, column in enumerate(self.columns) if column in left_out)
        wide, names = sum(kept.widths()) + GAP * len(kept.columns) > PRINTED, kept.widths()[0]
        if wide:
            kept = replace(kept.stacked(), columns=[replace(c, title=BELOW.sub("\n", c.title)) for c in kept.columns])
        words = ["p{4cm}" if width > LONG else "l" for width in kept.widths()]  # what is long folds
        words[0] = "p{2.3cm}" if wide and names > FOLDED else words[0]
        layout = "".join("r" if column.numeric else how for column, how in zip(kept.columns, words, strict=True))
        head, *rows = (" & ".join(map(_latex_cell, line)) + r" \\" for line in kept._lines())
        # there LaTeX would take a bracket or an asterisk for an option of the line above
        rows = ["{}" * row.startswith(("[", "(", "*")) + row for row in rows]
        top = ["% needs \\usepackage{booktabs}", r"\begin{table}", r"\centering"]
        top += [rf"\caption{{{latex_text(self.caption)}}}"] if self.caption else []
        top += [rf"\label{{{label}}}"] if label else []
        top += [r"\small\setlength{\tabcolsep}{4pt}"]
        top += [rf"\begin{{tabular}}{{@{{}}{layout}@{{}}}}", r"\toprule", head, r"\midrule"]
        gone = {column.title for column in left_out}  # nothing is said of them
        parts = (
            re.split(r"(?<=\.) (?=[A-Z][a-z ]*: )", note) for note in self.notes
        )  # those of columns that are there
        told = [" ".join(p for p in note if p.partition(":")[0].lower() not in gone) for note in parts]
        below = [r"\par\smallskip\footnotesize\raggedright"] if self.notes else []
        below += [rf"{latex_text(note)}\par" for note in filter(None, told)]
        return "\n".join([*top, *rows, r"\bottomrule", r"\end{tabular}", *below, r"\end{table}"]) + "\n"

    def to_frame(self) -> Any:
        """The values as a pandas.DataFrame."""
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            raise StepformerError("to_frame needs pandas: pip install pandas.") from None
        return pandas.read_csv(io.StringIO(self._csv(self._values())))


def _guarded(value: float | str) -> float | str:
    if isinstance(value, str) and value.startswith(FORMULA):
        try:
            float(value)
        except ValueError:
            return f"'{value}"
    return value


def number(value: float | None, digits: str = ".4f", suffix: str = "") -> Cell:
    """A number with a true minus sign; a dash when there is none."""
    if value is None or value != value:
        return Cell(NOTHING)
    return Cell(format(value, digits).replace("-", MINUS) + suffix, value)


def signed(value: float, digits: str = ".4f") -> str:
    """With its sign, a true minus where it has one."""
    return format(value, f"+{digits}").replace("-", MINUS)


def text(value: object, *, marked: bool = False, code: bool = False, style: str = "") -> Cell:
    shown = str(value)
    return Cell(shown or NOTHING, shown, marked, code and shown != "", style)


def of_texts(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, words: Container[str] = (), notes: Sequence[str] = ()
) -> Table:
    """Cells as they are to be read; the first column and those in `words` are words, the others numbers."""
    titles = [Column(name, numeric=place > 0 and name not in words) for place, name in enumerate(header)]
    return Table(titles, [[Cell(cell, cell) for cell in row] for row in rows], notes=list(notes))


Field = tuple[Column, Callable[[Any], Cell]]
"""A column, and what makes its cell of an entry."""


def tabulated(entries: Iterable[Any], fields: Sequence[Field], caption: str = "", notes: Sequence[str] = ()) -> Table:
    """A row for each entry, a column for each field."""
    rows = [[made(entry) for _, made in fields] for entry in entries]
    return Table([column for column, _ in fields], rows, caption, list(notes))


def words(title: str, made: Callable[[Any], object], hint: str = "", *, code: bool = False) -> Field:
    return Column(title, hint=hint), lambda entry: text(made(entry), code=code)


def numbers(title: str, path: str, digits: str = ".4f", hint: str = "", suffix: str = "") -> Field:
    """Numbers at a path of attributes, `loss.mean` say; a dash where there is none."""

    def made(entry: Any) -> Cell:
        for name in path.split("."):
            entry = getattr(entry, name, None)
        return number(entry, digits, suffix)

    return Column(title, True, hint), made


def columns(*titles: str | Column) -> list[Column]:
    """Columns of words for bare titles."""
    return [title if isinstance(title, Column) else Column(title) for title in titles]


def listed(names: Sequence[str], most: int = NAMED) -> str:
    """a, b and c; after some names, how many more."""
    if len(names) > most + 1:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def on_one_line(words: object) -> str:
    return " ".join(CONTROL.sub("", str(words)).split())


def markdown_text(words: object) -> str:
    """Words that Markdown shows as they are, on one line, wherever it begins: no tag, link, formula, list or fence."""
    words = on_one_line(words)
    special = "\\`*_<"
    special += "[" if any(sign in words for sign in ("](", "]:", "][")) else ""  # an interval stays as it is
    special += "$" if words.count("$") > 1 else ""  # and so does a price
    special += "~" if "~~" in words else ""
    words = "".join(f"\\{character}" if character in special else character for character in words)
    words = re.sub(r"&(?=#?\w+;)", r"\\&", words)
    words = re.sub(r"^(?=#|>(?!=)|[-+](?:[ -]|$))", r"\\", words)
    return re.sub(r"^([0-9]+)(?=[.)](?: |$))", r"\1\\", words)


def markdown_code(words: object) -> str:
    """Words as they are typed, on one line."""
    words = on_one_line(words)
    return markdown_text(words) if "`" in words else f"`{words}`"


def markdown_block(text: str, kind: str = "text") -> str:
    """A code block whose fence is longer than any in the text."""
    longest = max((len(found) for found in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{kind}\n{text}\n{fence}"


def markdown_cell(cell: Cell) -> str:
    """What stands in a table; code in which a backslash would undo that of a bar is written as words."""
    typed = cell.code and not ("|" in cell.text and "\\" in cell.text)
    return (markdown_code(cell.text) if typed else markdown_text(cell.text)).replace("|", "\\|")


def _padded(line: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> list[str]:
    return [t.rjust(w) if c.numeric else t.ljust(w) for t, w, c in zip(line, widths, columns, strict=True)]


def _width(words: str) -> int:
    return max(map(len, words.split("\n")))


def _heading(column: Column, cells: Sequence[str]) -> list[str]:
    """A title in the two lines that make a column narrow, in one if its cells are as wide."""
    words = column.title.split() or [""]
    least = max([*map(len, words), *map(_width, cells)])
    for width in range(least, len(column.title) + 1):
        lines = textwrap.wrap(column.title, width)
        if len(lines) <= 2:
            return lines
    return [column.title]


LATEX: dict[str, str | int | None] = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    TIMES: r"$\times$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\`{}",
    MINUS: "$-$",
    NOTHING: r"\textendash{}",
}


def latex_text(words: str) -> str:
    """Words as LaTeX sets them; a hyphen before a number is its sign, and two of them are no dash."""
    words = re.sub(r"(?<![\w)-])-(?=\d)", MINUS, on_one_line(words)).translate(str.maketrans(LATEX))
    return words.replace("--", "-{}-").replace("--", "-{}-")


def _latex_cell(words: str) -> str:
    """Words of a table; a second line of theirs stands below the first."""
    lines = r"\\{}".join(map(latex_text, words.split("\n")))
    return rf"\begin{{tabular}}[t]{{@{{}}r@{{}}}}{lines}\end{{tabular}}" if "\n" in words else lines
