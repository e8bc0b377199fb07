"""From a trace to what is run: between two events one pass that reads and writes every row once.

Pass k comes before event k. An expression can be computed in the first pass that has all of its inputs; if a later pass
needs it again, it is carried there, unless it is made of a single row that exists anyway. Of several multiples of one
row the row itself is carried. A tensor is dropped when nobody needs it any more.

Streams that an event weighs token by token (`WEIGHING`) are not carried as mixtures: a pass mixes them where it needs
the mixture, and gives the gradient of each weighted stream back to the event, which writes the sum of all of them once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from stepformer.model.engines.tracing import Event, Mixture, Trace
from stepformer.ops.row_programs import Extract, Program, extract, lending
from stepformer.ops.symbol_graphs import topological
from stepformer.ops.symbols import Symbol, factored, leaf

if TYPE_CHECKING:
    from stepformer.ops.numbers import Numbers


@dataclass(frozen=True)
class PassStep:
    """A pass: the places of its rows and numbers per token, its gains, its line of numbers, where results go."""

    program: Program
    reads: tuple[int, ...]
    gains: tuple[tuple[int, str, str], ...]  # layer, norm and name of a parameter
    line: int
    writes: tuple[int, ...]
    handed: tuple[str, ...]
    drops: tuple[int, ...] = ()
    lends: tuple[int, ...] = ()  # where rows go of which later passes read a multiple
    borrows: tuple[tuple[str, int], ...] = ()  # such rows that it reads, and by which number
    weighted: tuple[tuple[str, str], ...] = ()  # rows that it reads times a number of the token alone, and that number
    shares: tuple[int, ...] = ()  # where the event that weighs them takes the gradients of these products


@dataclass(frozen=True)
class EventStep:
    """An event: the places of what it needs and gives; `line` of its numbers, -1 if it has none."""

    kind: str
    layer: int
    oracles: tuple[str, ...]
    needs: tuple[int, ...]
    gives: tuple[int, ...]
    line: int = -1
    count: int = 0  # of numbers
    settings: tuple[tuple[str, Any], ...] = ()
    mixture: tuple[int] | None = None  # the place of values or rows that are mixed in, or of a call's values
    mixes: bool = False
    drops: tuple[int, ...] = ()


@dataclass(eq=False)
class Plan:
    """What a model's forward pass does, without the model; `starts` says which places are filled before it.

    Its fields are tuples, which a compiler can look into.
    """

    steps: tuple[PassStep | EventStep, ...]
    starts: tuple[tuple[str, int], ...]
    lines: tuple[tuple[Symbol, ...], ...]
    raws: tuple[tuple[int, str, str], ...]
    names: tuple[str, ...]  # of the raws as the lines have them
    places: int
    mixes: bool  # whether the plan mixes values itself
    numbers: Numbers | None = None  # what computes the lines from the coefficients, once somebody runs the plan

    def ready(self, width: int) -> Plan:
        """The plan with its numbers, for rows of so many columns."""
        if self.numbers is None:
            from stepformer.ops.numbers import numbers_of

            self.numbers = numbers_of(self.lines, self.names, width)
        return self

    def passes(self) -> list[PassStep]:
        return [step for step in self.steps if isinstance(step, PassStep)]


WEIGHING = ("along", "connections")  # recorded functions that give rows and numbers per token to weigh them by


def weighed_rows(events: Iterable[Event]) -> dict[Symbol, int]:
    """The rows and numbers of events that weigh rows, and of which event each is."""
    return {n: k for k, event in enumerate(events) if event.kind in WEIGHING for n in event.gives}


class Planner:
    """Which expression is computed in which pass."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.events = trace, trace.events
        self.when: dict[Symbol, int] = {}  # the first pass that can compute it
        self.given: dict[Symbol, int] = {}  # by an event: from the pass after it on
        given = {n for event in self.events for n in event.gives}
        after = len(self.events)
        for k in reversed(range(len(self.events))):  # an event that finds all it needs has no pass before it
            self.given |= dict.fromkeys(self.events[k].gives, after)
            if any(n.args and n not in given for n in self.events[k].needs):
                after = k
        self.needed = {n for event in self.events for n in event.needs}
        self.weighed = weighed_rows(self.events)
        self.first = after
        self.roots: list[list[Symbol]] = [[] for _ in self.events]
        self._times()
        self._cut()

    def is_row(self, n: Symbol) -> bool:
        return n.kind in ("row", "other", "stat")

    def stop(self, n: Symbol) -> bool:
        return n in self.given or not self.is_row(n)

    def _times(self) -> None:
        for n in topological([n for event in self.events for n in event.needs], self.stop):
            if n in self.given:
                self.when[n] = self.given[n]
            elif self.is_row(n):
                self.when[n] = max([self.when.get(a, self.first) for a in n.args], default=self.first)

    def leaves(self, n: Symbol) -> set[Symbol]:
        """The rows from which it is made that are there anyway: answers, the first ones, and what an event reads."""

        def there(m: Symbol) -> bool:
            return m is not n and (self.exists(m) or m in self.needed)

        return {m for m in topological([n], lambda m: self.stop(m) or there(m)) if m.kind == "row" and there(m)}

    def exists(self, n: Symbol) -> bool:
        return n in self.given or not n.args

    def _cut(self) -> None:
        """From the last pass to the first: what each computes, and what it asks of those before it."""
        wanted: list[dict[Symbol, None]] = [{} for _ in self.events]  # carried, by the pass that computes it
        for k in reversed(range(len(self.events))):
            needs = [n for n in self.events[k].needs if not self.exists(n)]
            carried = self._merged(wanted[k], needs)
            for n in needs:
                if self.when[n] < k and n not in carried:  # it could have been made before: it was, or is now
                    wanted[self.when[n]][n] = None
            own = [n for n in needs if self.when[n] == k]
            self.roots[k] = [*(n for n in carried if n not in own), *own]
            for n in topological(self.roots[k], partial(self._before, k)):
                if self.is_row(n) and not self.exists(n) and self.when[n] < k:
                    self._carry(n, wanted)

    def _before(self, k: int, n: Symbol) -> bool:
        return self.stop(n) or self.when[n] < k

    def _merged(self, asked: Iterable[Symbol], needs: list[Symbol]) -> list[Symbol]:
        """Multiples of one row become the row."""
        groups: dict[Symbol, list[Symbol]] = {}
        for n in (*asked, *(n for n in needs if n in asked)):
            groups.setdefault(factored(n)[1], []).append(n)
        found: dict[Symbol, None] = {}
        for base, members in groups.items():
            alone = dict.fromkeys(members)
            fixed = [n for n in alone if n in needs]
            found |= dict.fromkeys([*fixed, base] if len(alone) > 1 else alone)
        return list(found)

    def _carry(self, n: Symbol, wanted: list[dict[Symbol, None]]) -> None:
        if n.kind == "stat":  # one of rows that exist is made again
            if any(m.kind == "row" and not self.exists(m) for m in topological([n], self.stop)):
                wanted[self.when[n]][n] = None
        elif len(self.leaves(n)) > 1 and not self._is_mixture(n):
            wanted[self.when[n]][n] = None

    def _is_mixture(self, n: Symbol) -> bool:
        """Whether it is a sum of weighed rows."""
        if n.op == "add":
            return all(map(self._is_mixture, n.args))
        return n.op == "mul" and all(a in self.weighed for a in n.args)


def plan_of(trace: Trace) -> Plan:
    """The steps of a traced model."""
    planner = Planner(trace)
    made: dict[Symbol, int] = {}  # by a pass, which one
    taken: list[Extract | None] = []
    for k, event in enumerate(trace.events):
        roots = [n for n in planner.roots[k] if n not in made]
        points = [
            n
            for n in roots
            if n in event.needs and event.kind in ("ask", "fields", "finish") and n is not _momentum(event)
        ]
        carried = [n for n in roots if n not in points]
        known = dict(made)

        def given(n: Symbol, known: dict[Symbol, int] = known) -> bool:
            return n in planner.given or n in known

        taken.append(extract(carried, points, given) if roots else None)
        made |= dict.fromkeys([*carried, *points], k)
    return Assembly(trace, taken).plan


def _momentum(event: Event) -> Symbol | None:
    """What a Hamiltonian attention reads as it is carried."""
    return event.needs[1] if event.kind == "fields" else None


FEWEST_LOANS = 3  # of a row: with fewer a gradient that is handed back moves as little memory


@dataclass(frozen=True)
class Loan:
    """A row of which a later pass reads a multiple: by a number, the place of it in the borrower's line."""

    row: Symbol
    lender: int
    borrower: int
    number: Symbol
    by: int

    @property
    def place(self) -> Symbol:
        return leaf("row", f"lent {self.row.key} to {self.borrower}")


def loans_of(taken: list[Extract | None]) -> list[Loan]:
    """Of rows that some passes read as multiples: whoever writes or first reads them lends them.

    It pays where a pass borrows several, which then share one gradient.
    """
    passes = {k: found for k, found in enumerate(taken) if found is not None}
    lenders: dict[Symbol, int] = {}
    asked: dict[Symbol, list[Loan]] = {}
    for k, found in passes.items():
        for i, row in enumerate(found.inputs["row"]):
            own = list(found.program.multiples(f"r{i}", "num")) if row in lenders and row.op != "answer" else []
            if len(own) == 1:
                by = int(own[0][1:])
                asked.setdefault(row, []).append(Loan(row, lenders[row], k, found.inputs["num"][by], by))
        lenders = dict.fromkeys((*found.inputs["row"], *found.roots), k) | lenders
    loans = [own for own in asked.values() if len(own) >= FEWEST_LOANS]
    borrowers = Counter(loan.borrower for own in loans for loan in own)
    return [loan for own in loans if any(borrowers[other.borrower] > 1 for other in own) for loan in own]


@dataclass(frozen=True)
class Share:
    """A pass reads a row of an event times a number of the token that is the event's too."""

    row: Symbol
    weight: Symbol
    event: int
    borrower: int
    names: tuple[str, str]  # of both in the pass

    @property
    def place(self) -> Symbol:
        return leaf("row", f"lent {self.row.key} by {self.weight.key} to {self.borrower}")


def shares_of(taken: list[Extract | None], events: Sequence[Event]) -> list[Share]:
    """Of rows that a pass reads in no other way."""
    weighed = weighed_rows(events)
    found = []
    for k, own in enumerate(taken):
        for i, row in enumerate(own.inputs["row"] if own is not None else ()):
            assert own is not None
            weights = {name: own.inputs["stat"][int(name[1:])] for name in own.program.multiples(f"r{i}", "stat")}
            if row in weighed and all(weighed.get(n) == weighed[row] for n in weights.values()):
                found += [Share(row, n, weighed[row], k, (f"r{i}", name)) for name, n in weights.items()]
    return found


class Assembly:
    """Places for all tensors, and who drops them."""

    def __init__(self, trace: Trace, taken: list[Extract | None]) -> None:
        self.places: dict[Symbol, int] = {}
        self.lines: list[tuple[Symbol, ...]] = []
        self.trace = trace
        values = self._values()
        loans = loans_of(taken)
        shares = shares_of(taken, trace.events)
        steps: list[Any] = []
        for k, event in enumerate(trace.events):
            found = taken[k]
            if found is not None:
                lent, borrows = [n for n in loans if n.lender == k], {n.row: n for n in loans if n.borrower == k}
                reads = [borrows[n].place if n in borrows else n for n in found.inputs["row"]]
                at = tuple(self.place(n) for n in (*reads, *found.inputs["stat"]))
                gains = tuple(self._gain(n) for n in found.inputs["vec"])
                line = self._line([*found.inputs["num"], *(n.number for n in lent)])
                program = lending(found.program, [found.name_of(n.row) for n in lent]) if lent else found.program
                writes = tuple(self.place(n) for n in found.roots)
                names = [found.name_of(row) for row in borrows]
                by = tuple((name, n.by) for name, n in zip(names, borrows.values(), strict=True))
                places = tuple(self.place(n.place) for n in lent)
                own = [share for share in shares if share.borrower == k]
                weighted, back = tuple(share.names for share in own), tuple(self.place(n.place) for n in own)
                steps.append(PassStep(program, at, gains, line, writes, (), (), places, by, weighted, back))
            steps.append(self._event(k, event, values, [share for share in shares if share.event == k]))
        steps = self._handed(steps)
        names = [str(raw.attr) for raws in trace.raws.values() for raw in raws]
        between = ("event", "values", "lent")
        starts = [(n.attr, at) for n, at in self.places.items() if not n.args and not n.attr.startswith(between)]
        self.plan = Plan(
            tuple(steps),
            tuple(starts),
            tuple(self.lines),
            tuple(trace.raws),
            tuple(names),
            len(self.places),
            trace.mixes,
        )

    def place(self, n: Symbol) -> int:
        return self.places.setdefault(n, len(self.places))

    def _line(self, numbers: Iterable[Symbol]) -> int:
        line = tuple(numbers)
        if not line:
            return -1
        self.lines.append(line)
        return len(self.lines) - 1

    def _gain(self, n: Symbol) -> tuple[int, str, str]:
        layer, norm, name = str(n.attr).split()
        return int(layer), norm, name

    def _values(self) -> dict[int, Symbol]:
        """The values of calls that others mix in, by their event."""
        mixtures = [event.mixture for event in self.trace.events if event.mixture is not None]
        sources = {m.others for m in mixtures if m.weights}
        return {event: n for n, event in self.trace.values.items() if n in sources} if self.trace.mixes else {}

    def _event(self, k: int, event: Event, values: dict[int, Symbol], shares: list[Share]) -> EventStep:
        mixture, mixes, numbers = None, False, list(event.numbers)
        own = event.mixture or Mixture()
        if self.trace.mixes and own.others is not None:
            numbers, mixes, mixture = list(own.weights), True, (self.place(own.others),)
        elif k in values:
            mixture = (self.place(values[k]),)
        settings = event.settings
        if shares:
            settings = settings | {"shares": tuple(tuple(map(event.gives.index, (n.row, n.weight))) for n in shares)}
        return EventStep(
            event.kind, event.layer, event.oracles, tuple(self.place(n) for n in event.needs),
            tuple(self.place(n) for n in (*event.gives, *(share.place for share in shares))),
            self._line(numbers), len(numbers), tuple(settings.items()), mixture, mixes,
        )  # fmt: skip

    def _handed(self, steps: list[Any]) -> list[Any]:
        """Mark what each step is the last to use, and which rows a pass hands on to later ones."""
        later: set[int] = set()
        result = []
        for step in reversed(steps):
            if isinstance(step, PassStep):
                used = {*step.reads, *step.shares}
                rows = step.reads[: step.program.inputs["row"]]
                weighted = {row for row, _ in step.weighted}
                handed = tuple(f"r{i}" for i, at in enumerate(rows) if at in later and f"r{i}" not in weighted)
                sources = {step.writes[int(name[1:])] for name, _ in step.program.lends if name[0] == "o"}
                result.append(replace(step, handed=handed, drops=tuple((used | sources) - later)))
                written = {*step.writes, *step.lends}
            else:
                used = set(step.needs) | ({step.mixture[0]} if step.mixture and step.mixes else set())
                result.append(replace(step, drops=tuple(used - later)))
                written = set(step.gives)
            later = (later | used) - (written - used)
        return result[::-1]
