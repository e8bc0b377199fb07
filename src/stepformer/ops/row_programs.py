"""Row programs: what one fused pass computes, its derivative, and what the backward pass has to read.

A program is a list of outputs (symbols) over inputs with canonical names, so that boundaries of the same form in
different layers are one program and one kernel:

    r0, r1, ...  rows          s0, ...  one number per token          g0, ...  gains and biases
    n0, n1, ...  numbers: whatever the coefficients make of themselves is computed elsewhere (numbers.py)

`differentiate` is reverse mode on the symbols and gives symbols again. The backward pass reads the gradients that
arrive, statistics of rows (means and deviations, which the forward pass leaves behind) and the smallest set of inputs
and outputs from which everything else follows (`choose_kept`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from stepformer.ops.symbol_graphs import rebuild, topological
from stepformer.ops.symbols import (
    Symbol,
    UntraceableError,
    add,
    factored,
    function,
    inverse_width,
    leaf,
    make,
    mul,
    rec,
    row_sum,
)

NOTHING: Mapping[Any, Any] = MappingProxyType({})
ALIGNED = 4  # numbers of 16 bytes: kernels are compiled anew for addresses that are not multiples of it


def aligned(count: int) -> int:
    """So many numbers, up to whole 16 bytes."""
    return ALIGNED * -(-count // ALIGNED)


LETTERS = {"row": "r", "stat": "s", "vec": "g", "num": "n"}


def is_statistic(n: Symbol) -> bool:
    return n.op in ("mean", "rdev")


@dataclass(frozen=True, eq=False)
class Program:
    """Outputs over canonical inputs: rows or numbers per token; `points` are those that an oracle reads."""

    outputs: tuple[Symbol, ...]
    points: int  # how many of the last outputs are points
    inputs: dict[str, int]  # how many of each kind
    text: str  # the same text, the same program
    lends: tuple[tuple[str, int], ...] = ()  # rows (o0, r0) of which later passes read a multiple, and by which number

    @property
    def rows(self) -> list[str]:
        return [f"r{i}" for i in range(self.inputs["row"])]

    @property
    def numbers(self) -> int:
        """The length of the line of numbers that it reads."""
        return aligned(self.inputs["num"])

    def names(self) -> dict[str, Symbol]:
        """The outputs by name: o0, o1, ..."""
        return {f"o{i}": n for i, n in enumerate(self.outputs)}

    def input(self, name: str) -> Symbol:
        """An input row by its name."""
        leaves = {n.attr: n for n in topological(self.outputs) if not n.args}
        return leaves.get(name, leaf("row", name))

    def lent(self) -> dict[str, Symbol]:
        """What later passes read of its rows: l0, l1, ..., each a row times a number."""
        rows = self.names() | {name: self.input(name) for name in self.rows}
        return {f"l{i}": mul(leaf("num", f"n{k}"), rows[name]) for i, (name, k) in enumerate(self.lends)}

    def multiples(self, name: str, kind: str) -> dict[str, Symbol]:
        """An input row times inputs of a kind, by their names; none if anything else happens to it."""
        row = self.input(name)
        users = [n for n in topological(self.outputs) if row in n.args]
        found = {n.args[0].attr: n for n in users if n.op == "mul" and n.args[1] is row and n.args[0].op == "in"}
        alone = len(users) == len(found) and row not in self.outputs
        return found if alone and all(n.args[0].kind == kind for n in found.values()) else {}


@dataclass(frozen=True)
class Extract:
    """A program and what its inputs are in the expression that it was taken from."""

    program: Program
    inputs: dict[str, list[Symbol]]
    roots: list[Symbol]

    def name_of(self, row: Symbol) -> str:
        """What the program calls a row that it writes or reads."""
        return f"o{self.roots.index(row)}" if row in self.roots else f"r{self.inputs['row'].index(row)}"


def extract(carried: Sequence[Symbol], points: Sequence[Symbol], given: Callable[[Symbol], bool]) -> Extract:
    """The program that computes these symbols from those that are `given`, leaves and numbers."""

    def is_input(n: Symbol) -> bool:
        return (n.kind == "num" and n.op not in ("const", "inv_d")) or (n.kind != "num" and (not n.args or given(n)))

    roots = [*carried, *points]
    inputs: dict[str, list[Symbol]] = {kind: [] for kind in LETTERS}
    known: dict[Symbol, Symbol] = {}
    for n in topological(roots, lambda n: is_input(n) and (n not in roots or not n.args or given(n))):
        if is_input(n):
            name = f"{LETTERS[n.kind]}{len(inputs[n.kind])}"
            known[n] = make("answer" if n.op == "answer" else "in", attr=name, kind=n.kind)
            inputs[n.kind].append(n)
    outputs = tuple(rebuild(n, known) for n in roots)
    text = listed(outputs) + f"\npoints {len(points)}"
    return Extract(program_of(outputs, len(points), tuple(len(i) for i in inputs.values()), text), inputs, roots)


_programs: dict[str, Program] = {}


def program_of(
    outputs: tuple[Symbol, ...],
    points: int,
    counts: Sequence[int],
    text: str,
    lends: tuple[tuple[str, int], ...] = (),
) -> Program:
    """One object for one text, whatever was traced before."""
    if text not in _programs:
        _programs[text] = Program(outputs, points, dict(zip(LETTERS, counts, strict=True)), text, lends)
    return _programs[text]


def lending(program: Program, rows: Sequence[str]) -> Program:
    """The program that also lends these rows, each times a number of its own behind those that it has."""
    counts = program.inputs | {"num": program.inputs["num"] + len(rows)}
    lends = tuple((name, program.inputs["num"] + i) for i, name in enumerate(rows))
    text = f"{program.text}\nlends {' '.join(rows)}"
    return program_of(program.outputs, program.points, list(counts.values()), text, lends)


def borrowing(program: Program, borrows: Sequence[tuple[str, int]]) -> Program:
    """The program as it is differentiated where these rows are multiples that other passes lend."""
    known: dict[Symbol, Symbol] = {}
    for name, k in borrows:
        row = program.input(name)
        known[mul(leaf("num", f"n{k}"), row)] = row
    outputs = tuple(rebuild(n, known) for n in program.outputs)
    text = f"{program.text}\nborrows {' '.join(name for name, _ in borrows)}"
    return program_of(outputs, program.points, list(program.inputs.values()), text, program.lends)


def by_text(text: str) -> Program:
    """A program that was extracted before."""
    return _programs[text]


def listed(outputs: Sequence[Symbol]) -> str:
    """A line for each operation, then the outputs."""
    names: dict[Symbol, str] = {}
    lines: list[str] = []
    for n in topological(outputs):
        if n.op == "const":
            names[n] = repr(n.attr)
        elif not n.args:
            names[n] = str(n.attr)
        else:
            names[n] = f"t{len(lines)}"
            attr = "" if n.attr is None else f" {n.attr!r}"
            lines.append(f"{names[n]} = {n.op}{attr}({', '.join(names[a] for a in n.args)})")
    return "\n".join([*lines, "return " + ", ".join(names[n] for n in outputs)])


# derivatives


def pulls(n: Symbol, bar: Symbol) -> list[tuple[Symbol, Symbol]]:
    """What the gradient `bar` of a symbol gives to its arguments."""
    a = n.args
    if n.op == "add":
        return [(a[0], bar), (a[1], bar)]
    if n.op == "mul":
        return [(a[0], mul(bar, a[1])), (a[1], mul(a[0], bar))]
    if n.op == "sum":
        return [(a[0], bar)]
    if n.op == "hat":
        r = a[1]
        less = mul(mul(-1.0, inverse_width()), r)
        back = mul(r, bar)
        if len(a) == 3:
            products = (bar, mul(bar, n))  # both sums at once: warps meet once
            along = make("second", *products, kind="stat")
            back = add(back, mul(make("first", *products, kind="stat"), less))
        else:
            along = row_sum(mul(bar, n))
        back = add(back, mul(n, mul(along, less)))
        return [(a[0], back), (r.args[1], mul(-0.5, mul(mul(r, r), along)))]
    slope = SLOPES.get(n.op)
    if slope is None:
        raise UntraceableError(f"nobody knows the derivative of {n.op}")
    found = slope(a[0], n)
    return [] if found is None else [(a[0], mul(bar, found))]


def _phi_slope(a: Symbol, n: Symbol) -> Symbol:
    """phi_k' = k phi_{k+1} - phi_k."""
    return add(mul(float(n.attr), function("phi", a, n.attr + 1)), mul(-1.0, n))


SLOPES: dict[str, Callable[[Symbol, Symbol], Symbol | None]] = {
    "rec": lambda a, n: mul(-1.0, mul(n, n)),
    "sqrt": lambda a, n: mul(0.5, function("safe_rec", n)),
    "rsqrt": lambda a, n: mul(-0.5, mul(n, mul(n, n))),
    "exp": lambda a, n: n,
    "log": lambda a, n: rec(a),
    "log1p": lambda a, n: rec(add(1.0, a)),
    "expm1": lambda a, n: add(1.0, n),
    "tanh": lambda a, n: add(1.0, mul(-1.0, mul(n, n))),
    "sigmoid": lambda a, n: mul(n, add(1.0, mul(-1.0, n))),
    "softplus": lambda a, n: function("sigmoid", a),
    "abs": lambda a, n: function("sign", a),
    "relu": lambda a, n: function("step", a),
    "clamp": lambda a, n: function("inside", a, n.attr),
    "phi": _phi_slope,
    "sign": lambda a, n: None,
    "detach": lambda a, n: None,
}


@dataclass
class Gradients:
    """Of the inputs by name: rows and numbers per token, and what is to be added up over all tokens."""

    rows: dict[str, Symbol] = field(default_factory=dict)
    stats: dict[str, Symbol] = field(default_factory=dict)
    sums: dict[str, list[tuple[Symbol, Symbol]]] = field(default_factory=dict)  # number times the sum of a row or stat

    def all(self) -> list[Symbol]:
        terms = [term for found in self.sums.values() for _, term in found]
        return [*self.rows.values(), *self.stats.values(), *terms]


def differentiate(outputs: dict[str, Symbol], wanted: set[str], inner: Mapping[str, Symbol] = NOTHING) -> Gradients:
    """From the gradients d_o0, d_o1, ... of these outputs to those of the wanted inputs, and of `inner` rows."""
    order = topological(outputs.values())
    asked_inside = {n for name, n in inner.items() if name in wanted}
    needed: set[Symbol] = set()
    for n in order:
        asked = not n.args and n.op in ("in", "answer") and n.attr in wanted
        if asked or n in asked_inside or any(a in needed for a in n.args):
            needed.add(n)
    bars: dict[Symbol, Symbol] = {}
    sums: dict[Symbol, list[Symbol]] = {}

    def give(to: Symbol, what: Symbol) -> None:
        if to not in needed:
            return
        if to.kind in ("num", "vec"):
            sums.setdefault(to, []).append(what)
            return
        if to.kind == "stat" and what.kind == "row":
            what = row_sum(what)
        bars[to] = add(bars[to], what) if to in bars else what

    for name, n in outputs.items():
        give(n, leaf(n.kind, f"d_{name}"))
    for n in reversed(order):
        if n.args and n in bars and not is_statistic(n):
            for to, what in pulls(n, bars[n]):
                give(to, what)
    found = Gradients({name: bars[n] for name, n in inner.items() if name in wanted and n in bars})
    for n in order:
        if n.args or n not in needed:
            continue
        if n.kind in ("num", "vec"):
            whats = sums.get(n, [])
            kinds = [[w for w in whats if w.kind == kind] for kind in ("row", "stat")]
            if any(w.kind not in ("row", "stat") for w in whats):
                raise UntraceableError("a gain or a coefficient stands alone in it")
            found.sums[n.attr] = [factored(sum(same[1:], same[0])) for same in kinds if same]
        elif n in bars:
            (found.rows if n.kind == "row" else found.stats)[n.attr] = bars[n]
    return found


# what the backward pass reads


def _blind(n: Symbol) -> bool:
    return is_statistic(n) or n.kind in ("num", "vec")


def through(kept: Sequence[str], outputs: dict[str, Symbol], found: Gradients) -> Gradients | None:
    """The gradients from these inputs and outputs and the statistics alone; None if that is impossible."""
    known: dict[Symbol, Symbol] = {}
    for name in kept:
        if name in outputs:
            n, value = outputs[name], leaf("row", name)
            known[n] = value
            while n.op == "mul" and n.args[0].kind in ("num", "vec") and n.args[0].op != "const":
                value, n = mul(value, function("quotient", n.args[0])), n.args[1]  # o = c y: y = o / c
                known[n] = value
    new = Gradients(
        {k: rebuild(n, known, _blind) for k, n in found.rows.items()},
        {k: rebuild(n, known, _blind) for k, n in found.stats.items()},
        {k: [(c, rebuild(n, known, _blind)) for c, n in terms] for k, terms in found.sums.items()},
    )
    for n in topological(new.all(), _blind):
        if n.kind == "row" and not n.args and n.attr not in kept and not str(n.attr).startswith("d_"):
            return None
    return new


@lru_cache(maxsize=1024)
def choose_kept(program: Program, wanted: frozenset[str], points_too: bool = True) -> tuple[str, ...]:
    """The fewest rows to read, of these the fewest operations."""
    outputs = program.names()
    found = differentiate({**outputs, **program.lent()}, set(wanted))
    names = list(outputs)
    usable = names if points_too else names[: len(names) - program.points]
    usable = [name for name in usable if outputs[name].kind == "row"]
    candidates = [*usable, *program.rows]
    without = [[other for other in candidates if other != one] for one in candidates]
    must = [one for one, others in zip(candidates, without, strict=True) if through(others, outputs, found) is None]
    rest = [one for one in candidates if one not in must]
    for size in range(len(rest) + 1):
        fits = []
        for more in itertools.combinations(rest, size):
            kept = tuple(one for one in candidates if one in must or one in more)
            new = through(kept, outputs, found)
            if new is not None:
                count = sum(n.kind == "row" for n in topological(new.all(), _blind))
                fits.append((count, kept))
        if fits:
            return min(fits)[1]
    raise AssertionError("all inputs together are always enough")
