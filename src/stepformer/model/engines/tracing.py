"""A model's forward pass on symbols: what its template, splitting and extras do between two calls of an oracle.

The methods of the rule run as they are, with symbols in the place of rows and coefficients (ops/symbols.py). Whatever
is not a function of one token's rows, an oracle's answer or a product of matrices, is an event that takes symbols and
gives others. What comes out is the list of events, and every tensor that passes between them as an expression.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from stepformer.model.backbone import Backbone
from stepformer.model.block import Block
from stepformer.ops.symbols import (
    Symbol,
    UntraceableError,
    add,
    factored,
    function,
    is_const,
    leaf,
    lift,
    mul,
    recording,
    standardise,
)
from stepformer.rules import State, Substep
from stepformer.rules.coefficients import Array, Coefficient, CoefficientBank, Values

MAPS = {"unit": "sigmoid", "positive": "softplus"}


@dataclass(frozen=True)
class Mixture:
    """Values of an attention call: weights of its own and of other ones, None for its own alone.

    The others are those of an earlier call, or the rows of an extra's tables.
    """

    weights: tuple[Symbol, ...] = ()
    others: Symbol | None = None


@dataclass(frozen=True, eq=False)
class Event:
    """Something between two passes: `kind` is "ask", "fields", "velocity", "force", "finish" or a recorded function."""

    kind: str
    layer: int
    needs: tuple[Symbol, ...]
    gives: tuple[Symbol, ...] = ()
    numbers: tuple[Symbol, ...] = ()
    oracles: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    mixture: Mixture | None = None


class Memory(dict[str, Any]):
    """What layers remember; a name that nobody has written here was there before the first layer."""

    def __missing__(self, name: str) -> Symbol:
        self[name] = leaf("row", f"memory {name}")
        return self[name]


class Trace:
    """The events of a model, in order. `raws` names the coefficients that occur, as (layer, bank, key)."""

    def __init__(self, model: Backbone) -> None:
        self.model = model
        self.events: list[Event] = []
        self.raws: dict[tuple[int, str, str], list[Symbol]] = {}
        self.values: dict[Symbol, int] = {}  # values of an attention call -> its event
        self.means: dict[Symbol, Symbol] = {}
        self.recorded: dict[Any, Any] = {}
        self.mixes = True  # whether all mixtures of values are known
        self.layer = 0
        with recording(self):
            self._run()

    def _run(self) -> None:
        model = self.model
        x = leaf("row", "x")
        streams = {name: x if start == "copy" else self._start(name, start) for name, start in model.starts.items()}
        memory = Memory()
        for part in model.parts:
            try:
                memory.update({k: v for k, v in part.start(x).items() if v is x})
            except UntraceableError:
                continue  # what it has made of the embedding is in the state's memory
        s: Any = State(x, streams, memory)  # type: ignore[arg-type]
        for i, block in enumerate(model.blocks):
            self.layer = i
            values = self._values(block.extras, "extras")
            c = values["block"]
            for part in block.parts:
                s = part.enter(s, c)
            mix = partial(self._mixture, block, c, memory)
            if i in model.plain_layers:
                for turn in ("attn", "mlp"):
                    ask: Any = block.answered(partial(self.ask, block, (turn,), mix), values[turn])  # type: ignore
                    s = s.replace(x=block.drifting(s, c=values[turn]).x + ask(s.x))
            else:
                s = block.splitting.step(self._turns(block, mix, values), s)
            if block.reads_out:
                s = s.replace(x=block.template.read_out(s, self._own(block)["out"]))
            s = State(s.x, s.streams, memory)
            for part in block.parts:
                s = part.leave(s, c)
        self._add("finish", [self._norm(model.final_norm, "final_norm")(s.x)], [])

    def _start(self, name: str, start: Any) -> Symbol:
        if isinstance(start, float):
            return lift(start)
        return leaf("other" if start == "identity" else "row", f"stream {name}")

    def _add(self, kind: str, needs: list[Any], kinds: list[str], **more: Any) -> list[Symbol]:
        for need in needs:
            if not isinstance(need, Symbol) or need.kind not in ("row", "other"):
                raise UntraceableError("an oracle of it is asked at something that is not one row per token")
        place = len(self.events)
        gives = [leaf(k, f"event {place}.{i}", answer=k == "row") for i, k in enumerate(kinds)]
        self.events.append(Event(kind, self.layer, tuple(needs), tuple(gives), **more))
        return gives

    def digest(self) -> list[Any]:
        """What it depends on: the same rule gives the same one whenever it is traced."""
        return [(e.kind, e.oracles, [n.key for n in (*e.needs, *e.numbers)], str(e.settings)) for e in self.events]

    def record(self, name: str, rows: list[Symbol], kinds: list[str], numbers: list[Symbol], settings: Any) -> Any:
        """A function that no pass can do, called once however often a rule asks for it."""
        key = (name, *rows, *numbers, str(settings))
        if key not in self.recorded:
            self.recorded[key] = self._recorded(name, rows, kinds, numbers, settings)
        return self.recorded[key]

    def _recorded(self, name: str, rows: list[Symbol], kinds: list[str], numbers: list[Symbol], settings: Any) -> Any:
        """With a running mean of the answers as its direction, both in one."""
        mean = running_mean(rows[0], self.means)
        if mean is None or name not in MEANS:
            return self._add(name, rows, kinds, numbers=tuple(numbers), settings=settings)
        beta, old, new = mean
        gives = self._add(MEANS[name], [new, old, *rows[2:]], kinds, numbers=(beta, *numbers), settings=settings)
        last = self.events[-1]
        self.events[-1] = replace(last, gives=(rows[0], *gives))  # the mean is what it was traced to be
        return gives

    # coefficients and norms

    def _values(self, bank: CoefficientBank, name: str) -> dict[str, Values]:
        """As `CoefficientBank.values`."""
        found = {key: self._coefficient(name, key, spec) for key, spec in bank.specs.items()}
        return {
            turn: Values({**{word: found[key] for word, key in keys.items()}, **bank.constants.get(turn, {})})
            for turn, keys in bank.keys_of.items()
        }

    def _own(self, block: Block) -> dict[str, Values]:
        """As `Block.values`."""
        arrays = self._values(block.arrays, "arrays")
        return {turn: own | arrays[turn] for turn, own in self._values(block.coefficients, "coefficients").items()}

    def _coefficient(self, bank: str, key: str, spec: Coefficient | Array) -> Any:
        if isinstance(spec, Array):
            if len(spec.size) == 1:
                return leaf("vec", f"{self.layer} {bank} {key}")
            return leaf("other", f"array {self.layer} {key}")
        several, name = isinstance(spec.start, tuple), f"{self.layer} {bank} {key}"
        if spec.size > 1 and not several:
            if spec.size != self.model.config.d_model or spec.range != "free":
                raise UntraceableError(f"its coefficient {key} is neither one number nor a vector")
            return leaf("vec", name)
        names = [f"{name}[{i}]" for i in range(spec.size)] if several else [name]
        raws = self.raws.setdefault((self.layer, bank, key), [leaf("num", name) for name in names])
        found = [raw if spec.range == "free" else function(MAPS[spec.range], raw) for raw in raws]
        return found if several else found[0]

    def _norm(self, norm: nn.Module, name: str) -> Callable[[Any], Symbol]:
        """LayerNorm or RMSNorm themselves on a symbol."""
        if type(norm) not in (nn.LayerNorm, nn.RMSNorm):
            raise UntraceableError(f"its norm {name} is not LayerNorm or RMSNorm itself")
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        if norm.eps is None:
            raise UntraceableError(f"its norm {name} leaves its eps to the dtype")

        def apply(p: Any) -> Symbol:
            found = standardise(p, norm.eps, centred=isinstance(norm, nn.LayerNorm))
            if norm.weight is not None:
                found = mul(leaf("vec", f"{self.layer} {name} weight"), found)
            bias = getattr(norm, "bias", None)
            return found if bias is None else add(found, leaf("vec", f"{self.layer} {name} bias"))

        return apply

    # what a splitting calls

    def _turns(self, block: Block, mix: Callable[[], Mixture], own: dict[str, Values]) -> dict[str, Substep]:
        """As `Block.turns`."""
        values = self._own(block)
        turns = {}
        for turn, oracles in block.splitting.oracles.items():
            norm = None
            if turn in block.norm_keys:
                key = block.norm_keys[turn]
                norm = self._norm(block.aux_norms[key], f"aux_norms.{key}")
            fields = partial(self._fields, block) if block.attn.has_fields and "attn" in oracles else None
            ask = block.answered(partial(self.ask, block, oracles, mix), own[turn])  # type: ignore[arg-type]
            more = fields, partial(block.drifting, c=own[turn])
            turns[turn] = Substep(block.template, ask, values[turn], norm, *more)  # type: ignore[arg-type]
        return turns

    def ask(self, block: Block, oracles: tuple[str, ...], mix: Callable[[], Mixture], point: Symbol) -> Symbol:
        points = [self._norm(getattr(block, f"{oracle}_norm"), f"{oracle}_norm")(point) for oracle in oracles]
        mixture = mix() if "attn" in oracles else None
        answers = self._add("ask", points, ["row"] * len(points), oracles=oracles, mixture=mixture)
        return answers[0] if len(answers) == 1 else sum(answers[1:], answers[0])

    def _mixture(self, block: Block, c: Values, memory: Memory) -> Mixture:
        """What the extras make of the values of the attention call that comes next."""
        own = leaf("row", f"values {len(self.events)}")
        self.values[own] = len(self.events)
        found: Any = own
        try:
            for part in block.parts:
                if part.changes("values"):
                    found = part.values(found, c, memory)
            if found is own:
                return Mixture()
            terms = {y: a for a, y in map(factored, found.args)} if found.op == "add" else {}
            if len(terms) == 2 and own in terms:
                others = next(y for y in terms if y is not own)
                tabled = others.attr in {f"memory {name}" for part in block.parts for name in part.tables}
                if tabled or (others in self.values and not self.events[self.values[others]].mixture.weights):  # type: ignore
                    return Mixture((terms[own], terms[others]), others)
        except UntraceableError:
            pass
        self.mixes = False
        return Mixture()

    def _fields(self, block: Block, point: Symbol, y: Symbol) -> Fields:
        self._add("fields", [self._norm(block.attn_norm, "attn_norm")(point), y], [])
        return Fields(self, y)


class Fields:
    """The two fields of a Hamiltonian attention as symbols: each is asked for once."""

    def __init__(self, trace: Trace, y: Symbol) -> None:
        self.trace, self.y = trace, y
        self.found: dict[Any, Symbol] = {}

    def velocity(self, y: Symbol) -> Symbol:
        """At the own momentum a row and a number per token by which it is multiplied."""
        if y not in self.found:
            if y is self.y:
                row, factor = self.trace._add("velocity", [], ["row", "stat"])
                self.found[y] = mul(factor, row)
            else:
                self.found[y] = self.trace._add("velocity", [y], ["row"])[0]
        return self.found[y]

    def force(self) -> Symbol:
        if "force" not in self.found:
            self.found["force"] = self.trace._add("force", [], ["row"])[0]
        return self.found["force"]


MEANS = {"newton_schulz": "newton_schulz_of_mean", "whiten": "whiten_mean"}


def running_mean(n: Symbol, known: dict[Symbol, Symbol]) -> tuple[Symbol, Symbol, Symbol] | None:
    """beta, m and g if this is beta m + (1 - beta) g, which symbols write as (1 - beta) ((beta / (1 - beta)) m + g).

    `known` are such means by what they are without their own factor.
    """
    rest, total = factored(n)
    if total.op != "add" or rest.op != "add" or not is_const(rest.args[0], 1.0):
        return None
    beta = add(1.0, mul(-1.0, rest)) if rest.args[1].op != "mul" else rest.args[1].args[1]
    for old, new in (total.args, total.args[::-1]):
        _, m = factored(old)
        m = known.get(m, m)
        if m.kind == new.kind == "row" and add(mul(beta, m), mul(rest, new)) is n:
            known[total] = n
            return beta, m, new
    return None
