"""The ledger of claims: what the documents say, what was measured of it, and the verdict that follows.

`catalogue/claims.toml` has every claim with its tests, and the sources: raw files, the commands that made them, and how
numbers are read out of them. `catalogue/claims.json` keeps the numbers that were read, which `docs/claims_page.py`
writes, for an installed package has no raw files. Verdicts are written nowhere: they follow from the numbers.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepformer.base.errors import InputError
from stepformer.base.version import PACKAGE
from stepformer.present.style import short_number
from stepformer.study.statistics import PAIRS_FOR_SMALL, SMALL_DIFFERENCE, PairedDifference, paired, summarise

CLAIMS = PACKAGE / "catalogue" / "claims.toml"
NUMBERS = PACKAGE / "catalogue" / "claims.json"
CONFIRMED, REFUTED, OPEN, OUT_OF_REACH = VERDICTS = ("confirmed", "refuted", "open", "out of reach")
ONE = {"seeds": "seed", "draws": "draw", "processes": "process"}
DIGITS = 6  # of a stored number
Numbers = Mapping[str, Sequence[float | None]]  # by claim, part and source: see `key`


@dataclass(frozen=True)
class Source:
    """A raw file, or several that are alike, and what they are of.

    The rows of a file are those of a CSV file, the matches of `pattern` with its named groups, or a list at a path of a
    JSON file. `label` is the column that names a row, `names` and `prefix` change what it says, `where` leaves rows
    out, `columns` says which column has a quantity. A row holds one seed (column `seed`), all of them
    (`QUANTITY_by_seed`), the difference to the baseline with its interval (`difference`, `difference_low`,
    `difference_high`; other quantities than the loss with their name before it) or one measurement of several.
    """

    name: str
    raw: tuple[str, ...]
    commands: tuple[str, ...]
    model: str
    corpus: str = ""
    parameters: int = 0
    tokens: int = 0  # trained on
    pattern: str = ""
    at: str = ""
    label: str = "architecture"
    names: Mapping[str, str] | None = None
    prefix: str = ""
    where: Mapping[str, Any] | None = None  # what else a row has to say
    columns: Mapping[str, str] | None = None
    seeds: tuple[int, ...] = ()
    baseline: str = "vanilla"
    pairs: str = "seeds"  # what is paired: or draws, processes
    exact: bool = False  # computed, not sampled: the interval is the range of the numbers

    @property
    def scale(self) -> str:
        return f"{self.model}, {short_number(self.tokens)} tokens of {self.corpus}" if self.tokens else self.model

    @property
    def short(self) -> str:
        return f"{short_number(self.tokens)} tokens of {self.corpus}" if self.tokens else self.model

    @property
    def work(self) -> int:
        """Parameters times tokens, by which scales are ordered."""
        return self.parameters * self.tokens

    def rows(self, root: Path) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for name in self.raw:
            text = (root / name).read_text(encoding="utf-8")
            if self.pattern:
                found += [match.groupdict() for match in re.finditer(self.pattern, text, re.MULTILINE)]
            elif name.endswith(".csv"):
                found += csv.DictReader(io.StringIO(text))
            else:
                there = _at(json.loads(text), self.at)
                if isinstance(there, dict):  # of lists
                    there = [{self.label: label, "value_by_seed": values} for label, values in there.items()]
                found += there
        asked = (self.where or {}).items()
        kept = [row for row in found if row[self.label].startswith(self.prefix) and asked <= row.items()]
        names = self.names or {}
        return [{**row, self.label: names.get(row[self.label], row[self.label][len(self.prefix) :])} for row in kept]


@dataclass(frozen=True)
class Measured:
    """The quantity of a test: the mean of `n` pairs and its 95 % interval, none for a single one."""

    n: int
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Criterion:
    """A quantity and where the claim has it: between `low` and `high`.

    `a - b < 0` is a difference, `a - 0.5 b - 0.5 c > 0` a sum whose terms may have factors, `a / b in 0.4..0.6` a
    ratio, `(a - b) / noise > 5` a difference over the standard deviation between seeds, and `every row < 1e-12` is
    about all numbers of a source.
    """

    kind: str
    terms: tuple[tuple[float, str], ...]
    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> Criterion:
        found = re.fullmatch(r"(.+?) (?:([<>]) (\S+)|in (\S+?)\.\.(\S+))", text)
        if not found:
            raise InputError(f"'{text}' is no test: it ends with < bound, > bound or in low..high.")
        left, side, bound, low, high = found.groups()
        if side:
            low, high = ("-inf", bound) if side == "<" else (bound, "inf")
        kind, terms = "difference", left
        if noise := re.fullmatch(r"\((.+)\) / noise", left):
            kind, terms = "noise", noise[1]
        elif " / " in left:
            kind, terms = "ratio", left.replace(" / ", " - ")
        elif left == "every row":
            kind, terms = "every", ""
        return cls(kind, tuple(_terms(terms)), float(low), float(high))

    def measure(self, source: Source, rows: Sequence[Mapping[str, Any]], quantity: str) -> Measured:
        """The quantity as the rows of a source have it."""
        column = (source.columns or {}).get(quantity, quantity)
        if self.kind == "every":
            numbers = [float(row[column]) for row in rows]
            return Measured(len(numbers), max(numbers), min(numbers), max(numbers))
        mine = {label: [row for row in rows if row[source.label] == label] for _, label in self.terms}
        for label, found in mine.items():
            if not found:
                raise InputError(f"{' and '.join(source.raw)} have no row '{label}'.")
        before = "" if quantity == "loss" else f"{quantity}_"
        first = next(iter(mine.values()))[0]
        if f"{before}difference_low" in first and f"{column}_by_seed" not in first:
            return self._of_differences(source, {label: found[0] for label, found in mine.items()}, before)
        values = {label: _by_seed(source, found, column) for label, found in mine.items()}
        seeds = sorted(set.intersection(*(set(of) for of in values.values())))
        log = math.log if self.kind == "ratio" else float
        sums = {seed: math.fsum(c * log(values[label][seed]) for c, label in self.terms) for seed in seeds}
        if source.exact:
            return Measured(len(sums), max(sums.values()), min(sums.values()), max(sums.values()))
        pairs = paired(dict.fromkeys(seeds, 0.0), sums)
        if self.kind == "noise":
            return _over_noise(pairs, [[of[seed] for seed in seeds] for of in values.values()])
        scale = math.exp if self.kind == "ratio" else float
        low, high = (None if end is None else scale(end) for end in (pairs.low, pairs.high))
        return Measured(pairs.n, scale(pairs.mean), low, high)

    def _of_differences(self, source: Source, rows: Mapping[str, Mapping[str, Any]], before: str) -> Measured:
        """Of rows that have their differences to the baseline alone: what is between two of them is not known by seed,
        so their half-widths are added, which makes the interval at least as wide as the paired one.
        """
        if abs(math.fsum(c for c, _ in self.terms)) > 1e-9:
            raise InputError(f"{' and '.join(source.raw)} have differences alone, and the factors do not add up to 0.")
        mean, half, counts = 0.0, 0.0, list[int]()
        for factor, label in self.terms:
            row = rows[label]
            if label != row.get("baseline", source.baseline):
                centre, low, high = (float(row[f"{before}difference{end}"] or "nan") for end in ("", "_low", "_high"))
                mean, half = mean + factor * centre, half + abs(factor) * (high - low) / 2
                counts.append(int(row["n"]))
        if math.isnan(half):  # of one seed
            return Measured(min(counts), mean, None, None)
        return Measured(min(counts), mean, mean - half, mean + half)

    def verdict(self, measured: Measured, quantity: str) -> str:
        """Confirmed if the interval lies where the claim has it, refuted if nowhere there, open otherwise."""
        if measured.low is None or measured.high is None:
            return OPEN
        small = abs(measured.mean) < SMALL_DIFFERENCE and measured.n < PAIRS_FOR_SMALL
        if small and quantity == "loss" and self.kind == "difference":
            return OPEN
        if self.low <= measured.low and measured.high <= self.high:
            return CONFIRMED
        return REFUTED if measured.high < self.low or measured.low > self.high else OPEN


@dataclass(frozen=True)
class Evidence:
    """What a source says of a test."""

    source: Source
    test: Criterion
    measured: Measured
    verdict: str

    def __str__(self) -> str:
        """The mean, with its sign if it is a difference, and its interval."""
        if self.test.kind == "every":
            return f"at most {self.measured.mean:.2g}"
        digits = "+.4f" if self.test.kind == "difference" else ".3g"
        mean, *ends = (f"{value:{digits}}" for value in _three(self.measured) if value is not None)
        return f"{mean} [{', '.join(ends)}]" if ends and not self.source.exact else mean

    @property
    def pairs(self) -> str:
        """How many seeds, draws or processes."""
        if self.source.exact:
            return "exact"
        return f"{self.measured.n} {self.source.pairs if self.measured.n > 1 else ONE[self.source.pairs]}"


@dataclass(frozen=True)
class Part:
    """A test, and what was measured of it, the largest scale first."""

    test: str
    quantity: str = "loss"
    what: str = ""
    counts: bool = True  # False: asked beside the claim
    sources: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()

    @property
    def decisive(self) -> list[Evidence]:
        """What was measured at the largest scale."""
        return [found for found in self.evidence if found.source.work == self.evidence[0].source.work]

    @property
    def verdict(self) -> str:
        return together(found.verdict for found in self.decisive)

    def __str__(self) -> str:
        quantity = "" if self.quantity == "loss" else f" ({self.quantity})"
        return f"{self.test}{quantity}{', ' * bool(self.what)}{self.what}"


@dataclass(frozen=True)
class Claim:
    number: int
    document: str
    section: str
    claim: str
    published: str
    parts: tuple[Part, ...] = ()
    commands: tuple[str, ...] = ()  # that would test what is open
    out_of_reach: str = ""
    remark: str = ""

    @property
    def counted(self) -> list[Part]:
        return [part for part in self.parts if part.counts]

    @property
    def verdict(self) -> str:
        if self.out_of_reach and not any(part.evidence for part in self.counted):
            return OUT_OF_REACH
        return together(part.verdict for part in self.counted)

    @property
    def deciding(self) -> Part | None:
        """The first part that has the verdict of the claim, one with evidence if there is one. Where all have it, that
        of the smallest scale: the claim holds no further.
        """
        mine = [part for part in self.counted if part.verdict == self.verdict]
        if self.verdict == CONFIRMED:
            return min(mine, key=lambda part: part.decisive[0].source.work)
        return next((part for part in mine if part.evidence), next(iter(mine), None))


def together(verdicts: Iterable[str]) -> str:
    """One refuted refutes them all, and only all of them confirm."""
    found = list(verdicts)
    if REFUTED in found:
        return REFUTED
    return CONFIRMED if found and all(verdict == CONFIRMED for verdict in found) else OPEN


def ledger(numbers: Numbers | None = None) -> list[Claim]:
    """All claims with their verdicts, by the numbers that the package has or by others."""
    known: Numbers = json.loads(NUMBERS.read_text(encoding="utf-8")) if numbers is None else numbers
    sources, claims = _read()
    found = []
    for claim in claims:
        parts = []
        for place, part in enumerate(claim.parts):
            evidence = []
            for name in part.sources:
                entry = key(claim, place, name)
                if entry not in known:
                    raise InputError(f"claims.json has no numbers for '{entry}': run `python docs/claims_page.py`.")
                n, mean, low, high = known[entry]
                measured = Measured(int(n or 0), float(mean or 0), low, high)
                test = Criterion.parse(part.test)
                evidence.append(Evidence(sources[name], test, measured, test.verdict(measured, part.quantity)))
            evidence.sort(key=lambda one: (one.source.work, one.measured.n), reverse=True)
            parts.append(replace(part, evidence=tuple(evidence)))
        found.append(replace(claim, parts=tuple(parts)))
    return found


def read_numbers(root: Path) -> dict[str, list[float | None]]:
    """What `ledger` takes, from the raw files under a folder."""
    sources, claims = _read()
    rows: dict[str, list[dict[str, Any]]] = {}
    found: dict[str, list[float | None]] = {}
    for claim in claims:
        for place, part in enumerate(claim.parts):
            for name in part.sources:
                if name not in rows:
                    rows[name] = sources[name].rows(root)
                measured = Criterion.parse(part.test).measure(sources[name], rows[name], part.quantity)
                numbers = [None if value is None else _rounded(value) for value in _three(measured)]
                found[key(claim, place, name)] = [measured.n, *numbers]
    return found


def changed(root: Path) -> list[str]:
    """A sentence for every number that is not what the raw files under a folder say."""
    known, now = json.loads(NUMBERS.read_text(encoding="utf-8")), read_numbers(root)
    return [
        f"{entry}: claims.json has {known.get(entry, 'nothing')}, the raw files say {now.get(entry, 'nothing')}."
        for entry in dict.fromkeys([*known, *now])
        if known.get(entry) != now.get(entry)
    ]


def as_json(numbers: Numbers) -> str:
    """The text of claims.json, a line for each number."""
    return "{\n" + ",\n".join(f"  {json.dumps(entry)}: {json.dumps(of)}" for entry, of in numbers.items()) + "\n}\n"


def key(claim: Claim, place: int, source: str) -> str:
    return f"{claim.number}.{place + 1} {source}"


def _read() -> tuple[dict[str, Source], list[Claim]]:
    table = tomllib.loads(CLAIMS.read_text(encoding="utf-8"))
    lists = ("raw", "commands", "seeds", "sources")

    def fixed(entry: Mapping[str, Any]) -> dict[str, Any]:
        return {key: tuple(value) if key in lists else value for key, value in entry.items()}

    sources = {name: Source(name=name, **fixed(entry)) for name, entry in table["source"].items()}
    claims = [
        Claim(**{**fixed(entry), "parts": tuple(Part(**fixed(part)) for part in entry.get("parts", ()))})
        for entry in table["claim"]
    ]
    return sources, claims


def _at(value: Any, path: str) -> Any:
    """What lies at a path of keys; of a list, what all its members have there."""
    for step in filter(None, path.split(".")):
        value = [part for member in value for part in member[step]] if isinstance(value, list) else value[step]
    return value


def _terms(text: str) -> Iterable[tuple[float, str]]:
    """Labels with their factors: `a - 0.5 b` is (1, a), (-0.5, b)."""
    for sign, term in re.findall(r"(?:^|(?<= )([+-]) )(.+?)(?= [+-] |$)", text):
        factor, _, label = term.rpartition(" ")
        yield (-1 if sign == "-" else 1) * float(factor or 1), label


def _by_seed(source: Source, rows: Sequence[Mapping[str, Any]], column: str) -> dict[int, float]:
    first = rows[0]
    if (all_of_them := first.get(f"{column}_by_seed")) is not None:
        values = all_of_them.split() if isinstance(all_of_them, str) else all_of_them
        seeds = source.seeds or first.get("seeds", "").split() or range(len(values))
        return {int(seed): float(value) for seed, value in zip(seeds, values, strict=True)}
    numbers = [float(row[column] if column in row else _at(row, column)) for row in rows]
    seeds = [row["seed"] for row in rows] if "seed" in first else range(len(rows))
    if len({*seeds}) < len(rows):
        raise InputError(
            f"{' and '.join(source.raw)} have a seed of '{first[source.label]}' twice: say which by `where`."
        )
    return {int(seed): value for seed, value in zip(seeds, numbers, strict=True)}


def _over_noise(pairs: PairedDifference, values: Sequence[Sequence[float]]) -> Measured:
    """A difference over the pooled standard deviation between seeds. The interval has both uncertainties: the ends of
    the difference over those of the deviation, whose chi-squared quantiles are Wilson and Hilferty's.
    """
    if pairs.low is None or pairs.high is None:
        return Measured(pairs.n, math.nan, None, None)
    df = len(values) * (pairs.n - 1)
    noise = math.sqrt(math.fsum((x - summarise(of).mean) ** 2 for of in values for x in of) / df)
    least, most = (math.sqrt((1 - 2 / (9 * df) + z * math.sqrt(2 / (9 * df))) ** 3) for z in (-1.96, 1.96))
    ends = sorted(end * root / noise for end in (pairs.low, pairs.high) for root in (least, most))
    return Measured(pairs.n, pairs.mean / noise, ends[0], ends[-1])


def _three(measured: Measured) -> tuple[float, float | None, float | None]:
    return measured.mean, measured.low, measured.high


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}") + 0.0  # no minus before a zero
