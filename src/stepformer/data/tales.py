"""A training corpus that needs no download: small coherent English stories, each a pure function of its index.

A dialect is plain text in a file of its own (tales/village.toml, tales/space.toml); this module compiles that text once
and tells stories from it. To add a plot, add an entry to the file's `plots`; no code changes. The notation:

    {slot}          the first column of a row drawn from the slot's table. The row is drawn at the first mention and
                    kept for the whole story, so a lost thing is found in the colour it was lost in.
    {slot.field}    another column of the same row. People have he, him, his, himself, child and capitalised He, His.
    {colour2}       a second row of table `colour`; slots never share a row. `roles` names slots after their part.
    [this|that|]    one of the wordings, chosen anew each time; an empty one leaves the words out.
    <name>          one line of rule `name`, or, where there is no such rule, a word of table `name` that is not kept.

A plot is written one beat to a line; a blank line ends the paragraph and an indented line continues the one above.

    ? text          a beat told in half of the stories
    / text          neighbouring lines of this kind are alternatives, of which one is told
    /wet: text      the same, and it is remembered that `wet` was told
    when wet: text  told only if `wet` was told (`unless wet: text` only if it was not)

Tables are either a comma separated list or, when they contain semicolons, a header line and one row to a line; a first
cell with commas stands for several rows that differ only there. Sentence capitals and a/an are set at the end.

Python's and numpy's random streams may change between versions, so the choices come from a generator written here.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stepformer.base.errors import UnknownNameError, suggestion

VERSION = 1
"""Goes up whenever any story changes, so that results name the corpus they were measured on."""

Source = dict[str, dict[str, str]]
"""What the file of a dialect holds, in the notation above: `roles`, `tables`, `rules` and `plots`, texts by name."""

DIALECTS: tuple[str, ...] = ("village", "space")

_PRONOUNS = {
    "he": {"him": "him", "his": "his", "himself": "himself", "He": "He", "His": "His", "child": "boy"},
    "she": {"him": "her", "his": "her", "himself": "herself", "He": "She", "His": "Her", "child": "girl"},
    "it": {"him": "it", "his": "its", "himself": "itself", "He": "It", "His": "Its", "child": "machine"},
}
_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


_NEXT = "\n".join(["number ; after", *(f"{n} ; {after}" for n, after in itertools.pairwise(_NUMBERS[2:]))])
# all small sums as a table, so that counting in a story is always right; `were` agrees with `more`
_SUMS = [
    f"{_NUMBERS[part]} ; {_NUMBERS[more]} ; {_NUMBERS[part + more]} ; {'was' if more == 1 else 'were'}"
    for part in range(2, 10)
    for more in range(1, min(part, 12 - part) + 1)
]


class Dice:
    """The splitmix64 generator, keyed by a text: the n-th roll depends on nothing but the key and n."""

    __slots__ = ("_state",)

    def __init__(self, key: str) -> None:
        self._state = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")

    def below(self, count: int) -> int:
        """A whole number from 0 to count - 1; the bias of the multiplication is under count / 2**32."""
        self._state = mixed = (self._state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        return (((mixed ^ (mixed >> 31)) >> 32) * count) >> 32


@dataclass(slots=True)
class Telling:
    """What one story has settled so far: rows drawn, wordings of their fields, branches taken."""

    dice: Dice
    rows: dict[str, dict[str, Piece]] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    taken: dict[str, list[int]] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    last_lines: dict[str, int] = field(default_factory=dict)


Piece = Callable[[Telling], str]


@dataclass(frozen=True)
class Table:
    """Rows of compiled cells; `main` is the column that a bare `{slot}` shows."""

    name: str
    main: str
    fields: frozenset[str]
    rows: list[dict[str, Piece]]

    def draw(self, telling: Telling) -> dict[str, Piece]:
        taken = telling.taken.setdefault(self.name, [])
        if len(taken) == len(self.rows):
            raise ValueError(f"The story asks for more than the {len(taken)} rows of table '{self.name}'.")
        chosen = telling.dice.below(len(self.rows))
        while chosen in taken:
            chosen = (chosen + 1) % len(self.rows)
        taken.append(chosen)
        return self.rows[chosen]


@dataclass(frozen=True)
class Tale:
    """A story with what it was made from; `cast` maps each role to the person's name and pronoun."""

    text: str
    plot: str
    cast: dict[str, tuple[str, str]]


def _fixed(text: str) -> Piece:
    return lambda telling: text


def _joined(pieces: list[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    return lambda telling: "".join([piece(telling) for piece in pieces])


def _choice(options: Sequence[Piece]) -> Piece:
    count = len(options)
    return lambda telling: options[telling.dice.below(count)](telling)


def _remembered(flag: str, piece: Piece) -> Piece:
    def render(telling: Telling) -> str:
        telling.told.add(flag)
        return piece(telling)

    return render


def _conditional(flag: str, wanted: bool, piece: Piece) -> Piece:
    return lambda telling: piece(telling) if (flag in telling.told) is wanted else ""


def _lines(text: str) -> list[str]:
    """The lines of a block, with indented ones joined to the line above; blank lines stay as paragraph breaks."""
    lines: list[str] = []
    for line in text.strip().split("\n"):
        if line.startswith(" ") and lines:
            lines[-1] += " " + line.strip()
        else:
            lines.append(line.strip())
    return lines


_TOKEN = re.compile(r"\{([^{}]*)\}|<([a-z_]+)>|([\[\]|])")
_BEAT = re.compile(r"(\?|/(?:(\w+):)?|(when|unless) (\w+):) +(.*)", re.DOTALL)


class Grammar:
    """A dialect compiled to nested functions of a `Telling`; a mistake in the text raises ValueError here."""

    def __init__(self, name: str, source: Source) -> None:
        self.name = name
        self.roles = source["roles"]
        self.rules: dict[str, list[Piece]] = {rule: [] for rule in source["rules"]}
        texts = {"next": _NEXT, "sum": "\n".join(["part ; more ; total ; were", *_SUMS]), **source["tables"]}
        cells = {table: self._cells(text) for table, text in texts.items()}
        # the columns first: a cell may mention slots of any table
        self.tables = {table: Table(table, fields[0], frozenset(fields), []) for table, (fields, _) in cells.items()}
        for table, (fields, rows) in cells.items():
            for row in rows:
                if len(row) != len(fields):
                    raise ValueError(f"{name}: table '{table}' has {len(fields)} columns, but one row is {row}.")
                self.tables[table].rows.append(dict(zip(fields, map(self.compile, row), strict=True)))
        for rule, text in source["rules"].items():
            self.rules[rule].extend(self.compile(line) for line in _lines(text) if line)
        self.plots = [(plot, self._plot(text)) for plot, text in source["plots"].items()]

    def _cells(self, text: str) -> tuple[list[str], list[list[str]]]:
        if ";" not in text:
            return ["word"], [[word.strip()] for word in " ".join(text.split()).split(",")]
        header, *lines = ([cell.strip() for cell in line.split(";")] for line in _lines(text))
        rows = [[first.strip(), *rest] for heads, *rest in lines for first in heads.split(",")]
        if "he" in header:
            column = header.index("he")
            rows = [row + list(_PRONOUNS[row[column]].values()) for row in rows]
            header = header + list(_PRONOUNS["he"])
        return header, rows

    def compile(self, text: str) -> Piece:
        """The piece that renders `text`; brackets nest."""
        levels: list[list[list[Piece]]] = [[[]]]  # open brackets, each with its options so far
        position = 0
        for token in _TOKEN.finditer(text):
            if token.start() > position:
                levels[-1][-1].append(_fixed(text[position : token.start()]))
            position = token.end()
            slot, rule, mark = token.groups()
            if slot is not None:
                levels[-1][-1].append(self._slot(slot))
            elif rule is not None:
                levels[-1][-1].append(self._rule(rule))
            elif mark == "[":
                levels.append([[]])
            elif mark == "|":
                levels[-1].append([])
            elif len(levels) > 1:
                options = [_joined(option) for option in levels.pop()]
                levels[-1][-1].append(_choice(options))
            else:
                raise ValueError(f"{self.name}: a bracket is closed but not opened in '{text}'.")
        levels[-1][-1].append(_fixed(text[position:]))
        if len(levels) > 1 or len(levels[0]) > 1:
            raise ValueError(f"{self.name}: a bracket is left open, or a bar stands outside one, in '{text}'.")
        return _joined(levels[0][0])

    def _slot(self, mention: str) -> Piece:
        slot, _, field = mention.partition(".")
        table = self.tables.get(self.roles.get(slot, slot.rstrip("0123456789")))
        if table is None or (field or table.main) not in table.fields:
            raise ValueError(f"{self.name}: nothing answers to the slot '{{{mention}}}'.")
        field = field or table.main
        key = f"{slot}.{field}"

        def render(telling: Telling) -> str:
            value = telling.values.get(key)
            if value is None:
                row = telling.rows.get(slot)
                if row is None:
                    row = telling.rows[slot] = table.draw(telling)
                value = telling.values[key] = row[field](telling)
            return value

        return render

    def _rule(self, name: str) -> Piece:
        table = self.tables.get(name)
        options = self.rules.get(name)
        if options is None:
            if table is None:
                raise ValueError(f"{self.name}: there is no rule or table '{name}'.")
            rows, main = table.rows, table.main
            return lambda telling: rows[telling.dice.below(len(rows))][main](telling)

        def render(telling: Telling) -> str:
            chosen = telling.dice.below(len(options))
            if telling.last_lines.get(name) == chosen:  # the same sentence twice in one story reads badly
                chosen = (chosen + 1) % len(options)
            telling.last_lines[name] = chosen
            return options[chosen](telling)

        return render

    def _plot(self, text: str) -> list[list[Piece]]:
        paragraphs: list[list[Piece]] = [[]]
        alternatives: list[Piece] = []
        for line in [*_lines(text), ""]:
            beat = _BEAT.fullmatch(line)
            kind, flag, condition, told, words = beat.groups() if beat else ("", "", "", "", line)
            piece = self.compile(words)
            if kind.startswith("/"):
                alternatives.append(_remembered(flag, piece) if flag else piece)
                continue
            if alternatives:
                paragraphs[-1].append(_choice(alternatives))
                alternatives = []
            if condition:
                piece = _conditional(told, condition == "when", piece)
            elif kind:
                piece = _choice([piece, _fixed("")])
            paragraphs[-1].append(piece) if line else paragraphs.append([])
        return [paragraph for paragraph in paragraphs if paragraph]

    def tell(self, dice: Dice) -> Tale:
        telling = Telling(dice)
        plot, paragraphs = self.plots[dice.below(len(self.plots))]
        told = (" ".join(filter(None, [beat(telling) for beat in paragraph])) for paragraph in paragraphs)
        text = _finished("\n".join(filter(None, told)))
        cast: dict[str, tuple[str, str]] = {}
        for slot, row in telling.rows.items():
            table = self.tables[self.roles.get(slot, slot.rstrip("0123456789"))]
            if "he" in table.fields:
                cast[slot] = (row[table.main](telling), row["he"](telling))
        return Tale(text, plot, cast)


_SPACES = re.compile(r" +(?=[ .,!?])")
_ARTICLE = re.compile(r"\b([Aa])(?= (?!one\b|use|uni|eu)(?:[aeiou]|hour|honest))")
_CAPITAL = re.compile(r'((?:^|[.!?] |[.]" )"?|[!?]" ")([a-z])', re.MULTILINE)


def _finished(text: str) -> str:
    """Spaces left by empty options removed, a/an before the sound that follows, capitals where sentences begin."""
    text = _ARTICLE.sub(r"\1n", _SPACES.sub("", text))
    return _CAPITAL.sub(lambda start: start[1] + start[2].upper(), text)


@functools.cache
def grammar(dialect: str) -> Grammar:
    """The compiled dialect; compiled at first use, so that importing the package costs nothing."""
    if dialect not in DIALECTS:
        known = ", ".join(f"'{name}'" for name in DIALECTS)
        raise UnknownNameError(f"There is no dialect '{dialect}'; known are {known}.{suggestion(dialect, DIALECTS)}")
    text = (Path(__file__).parent / "tales" / f"{dialect}.toml").read_text(encoding="utf-8")
    return Grammar(dialect, tomllib.loads(text))


def tale(index: int, *, dialect: str = DIALECTS[0], seed: int = 0) -> Tale:
    """Story number `index` together with its plot and cast."""
    return grammar(dialect).tell(Dice(f"{dialect}/{seed}/{index}"))


def story(index: int, *, dialect: str = DIALECTS[0], seed: int = 0) -> str:
    """Story number `index`: the same text in any process and in any order. Paragraphs end in one newline."""
    return tale(index, dialect=dialect, seed=seed).text


def stories(count: int, *, dialect: str = DIALECTS[0], seed: int = 0, start: int = 0) -> Iterator[str]:
    """Stories `start` to `start + count - 1`, one at a time."""
    grammar(dialect)  # an unknown dialect is reported here, not at the first story
    return (story(index, dialect=dialect, seed=seed) for index in range(start, start + count))
