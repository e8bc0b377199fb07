"""Row programs as Triton kernels: one printer for the forward and the backward pass of all of them.

A program of a kernel has a tile of rows, or goes through several (`loops`). For each it loads what it reads, computes
in fp32, stores what it gives, and adds up what gains and numbers receive in registers; at the end every program writes
one line of partial sums. So nothing is added by atomics, and the same inputs give the same bits.

A tile has more columns than there are, and some rows that do not exist. `Printer.state` knows what an expression holds
there: only what is not zero has to be masked before it is summed.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl

from stepformer.ops import common
from stepformer.ops.row_programs import Gradients, is_statistic
from stepformer.ops.scalar_functions import NAMES, printed
from stepformer.ops.symbol_graphs import topological
from stepformer.ops.symbols import Symbol, is_const, make

COMMON = (
    common.four_row_sums, common.load_columns, common.load_gain, common.load_stored, common.numbers, common.over_row,
    common.row_statistics, common.row_statistics_at_once, common.row_sum, common.row_sums, common.standardised,
    common.store_columns, common.thread_sums, common.tile_columns,
)  # fmt: skip
ZERO, FINITE, ANYTHING = 0, 1, 2


@dataclass(frozen=True)
class Task:
    """What a kernel computes: rows and numbers per token to store, sums to add up, statistics to leave or to find."""

    name: str
    rows: dict[str, Symbol]
    stats: dict[str, Symbol] = field(default_factory=dict)
    sums: Gradients = field(default_factory=Gradients)
    rounded: frozenset[str] = frozenset()  # rows that go on as they are stored, since the backward reads them again
    leaves: tuple[Symbol, ...] = ()  # statistics that the backward needs
    finds: tuple[Symbol, ...] | None = None  # those that the forward left; None in the forward itself
    divided: frozenset[str] = frozenset()  # gains by which the backward divides
    numbers: int = 0  # how many there are
    scaled: dict[str, int] = field(default_factory=dict)  # rows that are read as multiples, and by which number

    def roots(self) -> list[Symbol]:
        factors = [c for terms in self.sums.sums.values() for c, _ in terms]
        return [*self.rows.values(), *self.stats.values(), *self.leaves, *self.sums.all(), *factors]


class Printer:
    """One kernel as text; `parameters` names its arguments in their order."""

    statistics = "row_statistics"
    one_row = False  # of a program, by several warps

    def __init__(self, task: Task, *, loops: bool, hold: bool, ahead: bool) -> None:
        self.task, self.loops, self.hold = task, loops, hold
        self.names: dict[Symbol, str] = {}
        self.before: list[str] = []
        self.loop: list[str] = []
        self.after: list[str] = []
        self.count = 0
        found = task.finds or ()
        nodes = topological(task.roots(), lambda n: n in found)
        leaves = [n for n in nodes if not n.args and n.op in ("in", "answer")]
        order = {n.attr: n for n in leaves}
        self.reads = sorted((k for k, n in order.items() if n.kind == "row"), key=lambda k: (not k.startswith("d_"), k))
        self.given = sorted(k for k, n in order.items() if n.kind == "stat")
        self.vectors = sorted(k for k, n in order.items() if n.kind == "vec")
        self.found = [n for n in found if n in nodes]
        self.groups = grouped(nodes) if loops or self.one_row else {}
        self._print(nodes)
        self.text = self._assembled(ahead)

    # the order of what is computed

    def _print(self, nodes: list[Symbol]) -> None:
        task = self.task
        scaled = {name: k for name, k in task.scaled.items() if name in self.reads}
        self.before += [f"by_{name} = tl.load(scalars + {k})" for name, k in scaled.items()]
        for n in self.found:
            place = task.finds.index(n) if task.finds else 0
            self.names[n] = f"kept{place}"
            self.loop.append(f"kept{place} = tl.load(stats + {place} * n + rows, mask=row, other=0.0)")
        for name in self.given:
            self.loop.append(f"l_{name} = tl.load(p_{name} + rows, mask=row, other=0.0).to(tl.float32)")
        self.early, self.loop = self.loop, []
        depth: dict[Symbol, int] = {}
        for n in nodes:
            depth[n] = 1 + max([depth.get(a, 0) for a in n.args], default=0)
        stores: dict[Symbol, list[str]] = {}
        for name, n in task.rows.items():
            stores.setdefault(n, []).append(name)
        self.stores = stores
        terms = [(key, k, term) for key, found in task.sums.sums.items() for k, (_, term) in enumerate(found)]
        for key, k, term in terms:
            kind = "vec" if key.startswith("g") else term.kind
            shape = {"vec": "(CHUNKS, ROWS, CHUNK)", "row": "(ROWS, CHUNK // 8)", "stat": "(ROWS,)"}[kind]
            self.before.append(f"sum_{key}_{k} = tl.zeros({shape}, tl.float32)")
        sinks = dict.fromkeys([*task.rows.values(), *task.stats.values(), *task.leaves, *(t for _, _, t in terms)])
        for sink in sorted(sinks, key=depth.__getitem__):
            self.value(sink)
            for name, n in task.stats.items():
                if n is sink:
                    self.loop.append(f"tl.store(o_{name} + rows, {self.names[n]}, mask=row)")
            for key, k, term in terms:
                if term is sink:
                    self._accumulate(f"sum_{key}_{k}", key, term)
        self._finish()

    def _accumulate(self, name: str, key: str, term: Symbol) -> None:
        value = self.clean(term) if term.kind == "row" and self.state(term) == ANYTHING else self.names[term]
        if key.startswith("n"):
            value = f"thread_sums({self.clean(term)})" if term.kind == "row" else self._live(term)
        self.loop.append(f"{name} += {value}")

    def _live(self, term: Symbol) -> str:
        """A number per token where there is one."""
        return f"tl.where(row, {self.names[term]}, 0.0)"

    def _finish(self) -> None:
        sums = self.task.sums.sums
        if not sums:
            return
        self.after.append("line = partial + tl.program_id(0).to(tl.int64) * WIDTH")
        for key in sorted((k for k in sums if k.startswith("g")), key=lambda k: int(k[1:])):
            parts = [
                f"sum_{key}_{k}" + ("" if is_const(c, 1.0) else f" * {self.value(c, self.after)}")
                for k, (c, _) in enumerate(sums[key])
            ]
            self.after.append(f"store_columns(line, columns, {' + '.join(parts)}, D)")
            self.after.append("line += D")
        for place in range(self.task.numbers):
            parts = [
                f"tl.sum(sum_n{place}_{k})" + ("" if is_const(c, 1.0) else f" * {self.value(c, self.after)}")
                for k, (c, _) in enumerate(sums.get(f"n{place}", []))
            ]
            self.after.append(f"tl.store(line + {place}, {' + '.join(parts) or '0.0'})")

    # expressions

    def state(self, n: Symbol) -> int:
        """What stands in columns and rows that do not exist."""
        if n.kind != "row":
            return ZERO if n.kind == "vec" else FINITE
        if not n.args:
            return ZERO
        states = [self.state(a) for a in n.args]
        if n.op == "mul":
            return ANYTHING if ANYTHING in states else min(states)
        if n.op == "add":
            return max(states)
        if n.op in ("sqrt", "abs", "safe_rec", "relu", "sign", "tanh", "expm1"):
            return states[0]
        if n.op == "hat" or (n.op in ("sigmoid", "step", "inside", "quotient", "rec") and finite_rec(n)):
            return max(FINITE, states[0])
        return ANYTHING

    def clean(self, n: Symbol, mask: str = "mask") -> str:
        return self.names[n] if self.state(n) == ZERO else f"tl.where({mask}, {self.names[n]}, 0.0)"

    def fresh(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def value(self, root: Symbol, lines: list[str] | None = None) -> str:
        """The name of an expression; what computes it is printed where that is missing."""
        for n in topological([root], lambda n: n in self.names):
            if n not in self.names:
                self._compute(n, lines)
        return self.names[root]

    def _compute(self, n: Symbol, lines: list[str] | None) -> None:
        if n.op == "const":
            self.names[n] = repr(n.attr)
            return
        if n.op == "inv_d":
            self.names[n] = "(1.0 / D)"
            return
        if n.op == "mean":  # printed with its deviation
            self.names[n] = self.fresh()
            return
        args = [self.names[a] for a in n.args]
        name = self.names[n] = self.fresh()
        constant = n.kind == "num" or (n.kind == "vec" and self.hold)
        put = lines if lines is not None else self.before if constant else self.loop
        if n.op == "rdev":
            mean = self.names[n.args[2]] if n.attr else f"{name}_none"
            rows = self.clean(n.args[0], "column")
            put.append(f"{mean}, {name} = {self.statistics}({rows}, column, {args[1]}, {n.attr}, D)")
        elif n.op in ("first", "second"):
            other = "second" if n.op == "first" else "first"
            self._pair(n, other, name, put)
        elif n in self.groups:
            self._sums(n, put)
            return
        elif n.op == "sum":
            put.append(f"{name} = row_sum({self.clean(n.args[0])})")
        elif n.op == "hat":
            form = (
                f"standardised({args[0]}, {args[2]}, {args[1]})"
                if len(args) > 2
                else f"{args[0]} * over_row({args[1]})"
            )
            put.append(f"{name} = {form}")
        elif not n.args:
            put.append(f"{name} = {self._leaf(n)}")
        else:
            wide = [
                f"over_row({t})" if n.kind == "row" and a.kind == "stat" else t
                for a, t in zip(n.args, args, strict=True)
            ]
            put.append(f"{name} = {printed(n.op, n.attr, wide)}")
        self._store(n, put)

    def _pair(self, n: Symbol, other: str, name: str, put: list[str]) -> None:
        """Two sums over rows at once."""
        twin = make(other, *n.args, kind="stat")
        self.names[twin] = self.fresh()
        first, second = (name, self.names[twin]) if n.op == "first" else (self.names[twin], name)
        put.append(f"{first}, {second} = row_sums({self.clean(n.args[0])}, {self.clean(n.args[1])})")

    def _sums(self, n: Symbol, put: list[str]) -> None:
        """Several sums over rows at once."""
        group = self.groups[n]
        rows = []
        for m in group:
            self.value(m.args[0])
            rows.append(self.clean(m.args[0]))
            self.names.setdefault(m, self.fresh())
        names = ", ".join(self.names[m] for m in group)
        put.append(f"{names} = {'four_row_sums' if len(group) == 4 else 'row_sums'}({', '.join(rows)})")
        for m in group:
            self._store(m, put)

    def _leaf(self, n: Symbol) -> str:
        if n.kind == "row":
            return f"numbers(l_{n.attr})" + (f" * by_{n.attr}" if n.attr in self.task.scaled else "")
        if n.kind == "vec":
            load = "load_gain" if n.attr in self.task.divided else "load_columns"
            return f"{load}(p_{n.attr}, columns, D)"
        if n.kind == "stat":
            return f"l_{n.attr}"
        return f"tl.load(scalars + {int(n.attr[1:])})"

    def _store(self, n: Symbol, put: list[str]) -> None:
        for name in self.stores.get(n, ()):
            value = self.names[n] if n.kind == "row" else f"over_row({self.names[n]}) + tl.zeros_like(columns)"
            if name in self.task.rounded:
                put.append(f"r_{name} = {value}.to(o_{name}.dtype.element_ty)")
                put.append(f"tl.store(o_{name} + at, r_{name}, mask=mask)")
                self.names[n] = self.fresh()
                put.append(f"{self.names[n]} = r_{name}.to(tl.float32)")
            else:
                put.append(f"tl.store(o_{name} + at, {value}, mask=mask)")
        for place, statistic in enumerate(self.task.leaves):
            if statistic is n or (n.op == "rdev" and n.attr and statistic is n.args[2]):
                put.append(f"tl.store(stats + {place} * n + rows, {self.names[statistic]}, mask=row)")

    # the whole text

    def _assembled(self, ahead: bool) -> str:
        task = self.task
        self.parameters = [
            *(f"p_{k}" for k in (*self.reads, *self.given, *self.vectors)),
            *("scalars", "stats"),
            *(f"o_{k}" for k in (*task.rows, *task.stats)),
            *("partial", "n", "tiles"),
        ]
        sizes = ("D", "CHUNKS", "CHUNK", "ROWS", "STAGES", "WIDTH")
        signature = ", ".join([*self.parameters, *(f"{size}: tl.constexpr" for size in sizes)])

        def loads(rows: str, prefix: str = "") -> list[str]:
            return [f"{prefix}l_{k} = load_stored(p_{k}, {rows}, n, D, CHUNKS, CHUNK)" for k in self.reads]

        head = ["columns = tile_columns(CHUNKS, CHUNK)", "column = columns < D", *self.before]
        asked = loads("rows")
        if ahead:
            head += ["first = tl.program_id(0) * ROWS + tl.arange(0, ROWS)", *loads("first", "next_")]
            asked = [f"l_{k} = next_l_{k}" for k in self.reads]
            asked += ["after = rows + tl.num_programs(0) * ROWS", *loads("after", "next_")]
            asked += ["tl.debug_barrier()"]  # else they would be issued as late as possible, to save registers
        place = "tile * tl.num_programs(0) + tl.program_id(0)" if self.loops else "tl.program_id(0)"
        body = [
            f"rows = ({place}) * ROWS + tl.arange(0, ROWS)",
            "row = rows < n",
            "mask = over_row(row) & column",
            "at = over_row(rows.to(tl.int64)) * D + columns",
            *self.early, *asked, *self.loop,
        ]  # fmt: skip
        inner = "        " if self.loops else "    "
        lines = [
            '@triton.jit(do_not_specialize=["tiles"])',
            f"def {task.name}({signature}):",
            *(f"    {line}" for line in head),
            *(["    for tile in tl.range(0, tiles, num_stages=STAGES):"] if self.loops else []),
            *(f"{inner}{line}" for line in body),
            *(f"    {line}" for line in self.after),
        ]
        return "\n".join(lines) + "\n"


class StepPrinter(Printer):
    """A pass of one row a program, for decoding: by itself, or in front of the product that takes its output `into`.

    In front of a product every program computes the pass, and the first of a row stores the outputs in `stored`.
    """

    statistics = "row_statistics_at_once"
    one_row = True

    def __init__(self, rows: dict[str, Symbol], stored: Sequence[str], into: str | None) -> None:
        self.into, self.stored = into, stored
        self.last: list[str] = []
        super().__init__(Task("step_kernel", rows), loops=False, hold=True, ahead=False)

    def _store(self, n: Symbol, put: list[str]) -> None:
        for name in self.stores.get(n, ()):
            if name == self.into:
                put.append(f"u = tl.reshape({self.clean(n)}, (CHUNK,))")
            if name in self.stored and n.kind == "stat":
                self.last.append(f"tl.store(o_{name} + rows, {self.names[n]}, mask=row)")
            elif name in self.stored:
                value = self.names[n] if n.kind == "row" else f"over_row({self.names[n]}) + tl.zeros_like(columns)"
                self.last.append(f"tl.store(o_{name} + at, {value}, mask=mask)")

    def _assembled(self, ahead: bool) -> str:
        product = ["weight", "bias", "out", "apart"] if self.into else []
        own = [f"p_{k}" for k in (*self.reads, *self.given, *self.vectors)]
        self.parameters = [*product, *own, "scalars", *(f"o_{k}" for k in self.stored), "n"]
        sizes = ["N", "FIRST", "ACT", "BIAS", "BLOCK_N"] if self.into else []
        sizes += ["D", "CHUNK", "OVERLAP"]
        signature = ", ".join([*self.parameters, *(f"{size}: tl.constexpr" for size in sizes)])
        ask = [
            "outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)",
            "tile, second, offset, second_offset = ask_weights("
            "weight, bias, apart, outs, tl.arange(0, CHUNK), N, D, FIRST, ACT, BIAS)",
        ]
        finish = ["finish_product(tile, second, offset, second_offset, u, out, tl.program_id(1), outs, N, ACT)"]
        if self.last:  # after the outputs, for which everybody waits
            finish += ["if tl.program_id(0) == 0:", *(f"    {line}" for line in self.last)]
        lines = [
            *(ask if self.into else []),
            "columns = tile_columns(1, CHUNK)", "column = columns < D", *self.before,
            "await_others(OVERLAP)",
            f"rows = tl.program_id({1 if self.into else 0}) + tl.arange(0, 1)",
            "row = rows < n", "mask = over_row(row) & column", "at = over_row(rows.to(tl.int64)) * D + columns",
            *self.early, *(f"l_{k} = load_stored(p_{k}, rows, n, D, 1, CHUNK)" for k in self.reads), *self.loop,
            *(finish if self.into else self.last),
        ]  # fmt: skip
        return "\n".join(["@triton.jit", f"def step_kernel({signature}):", *(f"    {line}" for line in lines), ""])


def finite_rec(n: Symbol) -> bool:
    """Whether a reciprocal is finite wherever its argument is 0 in columns that do not exist."""
    if n.op != "rec":
        return True
    a = n.args[0]
    constant = a.op == "add" and any(is_const(b) and b.attr > 0 for b in a.args)
    return constant and all(is_const(b) or b.op in ("sqrt", "abs", "exp", "relu") for b in a.args)


def grouped(nodes: Sequence[Symbol]) -> dict[Symbol, tuple[Symbol, ...]]:
    """Sums over rows of which none needs another, by fours and twos: warps meet once for all of a group."""
    level: dict[Symbol, int] = {}
    alike: dict[int, list[Symbol]] = {}
    for n in nodes:
        level[n] = max([level.get(a, 0) for a in n.args], default=0) + (n.op == "sum")
        if n.op == "sum":
            alike.setdefault(level[n], []).append(n)
    found: dict[Symbol, tuple[Symbol, ...]] = {}
    for sums in alike.values():
        while len(sums) > 1:
            group, sums = tuple(sums[: 4 if len(sums) > 3 else 2]), sums[4 if len(sums) > 3 else 2 :]
            found |= dict.fromkeys(group, group)
    return found


def load_kernel(name: str, text: str, more: Sequence[Any] = ()) -> Any:
    """The function of a generated text; Triton and tracebacks find its lines under a name made from them.

    `more`: functions of kernels that it calls beside those of common.py.
    """
    file = f"<stepformer {name} {hashlib.sha1(text.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"triton": triton, "tl": tl, **NAMES, **{f.__name__: f for f in (*COMMON, *more)}}
    scope["__name__"] = __name__
    exec(compile(text, file, "exec"), scope)
    return scope[name]


def statistics_of(symbols: Sequence[Symbol]) -> tuple[Symbol, ...]:
    """The means and deviations that these expressions use."""
    return tuple(n for n in topological(symbols, is_statistic) if is_statistic(n))
