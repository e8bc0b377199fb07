"""Splittings: in which order, at which step fraction and how often the two oracles get their turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from stepformer.base.errors import ComponentError, given
from stepformer.base.options import choice, flag, integer
from stepformer.base.registry import Component, Registry
from stepformer.rules.coefficients import Coefficient, Values, positive
from stepformer.rules.hamiltonian import FieldsAt, HamiltonianStep
from stepformer.rules.state import State
from stepformer.rules.template import Template


class Substep:
    """A turn: the template bound to the oracle, the coefficients and the auxiliary norm that this turn uses.

    A Hamiltonian attention has `fields` instead of an answer; then the template integrates them. `drifting` is what
    extras make of the state before its drift.
    """

    def __init__(
        self,
        template: Template,
        oracle: Callable[[Tensor], Tensor],
        c: Values,
        norm: Callable[[Tensor], Tensor] | None,
        fields: FieldsAt | None = None,
        drifting: Callable[[State], State] = lambda s: s,
    ) -> None:
        self.template, self.oracle, self.c, self.norm, self.fields = template, oracle, c, norm, fields
        self.drifting = drifting

    def ask(self, s: State, scale: float = 1.0) -> Tensor:
        """The oracle's answer at the point where the template looks; `scale` is that of the kick to come."""
        if self.norm is not None and self.template.normalises_point:
            s = self.template.normalise(s, self.norm)
        return self.oracle(given(self.template.query(s, self.c), self.template, "query"))

    def kick(self, s: State, g: Tensor, scale: float = 1.0) -> State:
        """What the answer g does to the streams."""
        return given(self.template.kick(s, self.c, g, scale), self.template, "kick", State)

    def normalise(self, s: State) -> State:
        """The auxiliary norm, if this turn has one."""
        if self.norm is None or self.template.normalises_point:
            return s
        return self.template.normalise(s, self.norm)

    def drift(self, s: State, scale: float = 1.0) -> State:
        """How x moves."""
        moved = given(self.template.drift(self.drifting(s), self.c, scale), self.template, "drift", State)
        if isinstance(moved.x, Tensor) and moved.x.shape != s.x.shape:  # a rule is also followed on symbols
            raise ComponentError(
                f"{type(self.template).__name__}.drift() leaves x in the shape {tuple(moved.x.shape)}; it was "
                f"{tuple(s.x.shape)}."
            )
        return moved

    def follow(self, s: State, name: str) -> State:
        """x follows the velocity by a coefficient of the splitting."""
        return s.replace(x=s.x + getattr(self.c, name) * s.v)

    def take(self, s: State, scale: float = 1.0) -> State:
        """The whole turn: ask, kick, normalise, drift; or one step of the template's own integrator."""
        if self.fields is not None:
            assert isinstance(self.template, HamiltonianStep)
            assert self.norm is not None
            return self.template.integrate(s, self.c, self.fields, self.norm)
        return self.drift(self.normalise(self.kick(s, self.ask(s, scale), scale)), scale)


Substeps = Mapping[str, Substep]


class Splitting(Component):
    """How a block composes its turns. Subclass, declare, register.

    * `oracles`: the turns and the oracles each one asks (their answers are added);
    * `shares`: kinds of coefficients that all turns of a layer have in common;
    * `coefficients`: learned scalars of the splitting itself;
    * `norm_keys()`: which auxiliary norm each turn uses; turns with the same key share one;
    * `calls()`: oracle evaluations per block; every attention evaluation needs its own cache.
    """

    oracles: Mapping[str, tuple[str, ...]] = {"attn": ("attn",), "mlp": ("mlp",)}
    shares: frozenset[str] = frozenset()
    coefficients: Mapping[str, Coefficient] = {}
    own_drift = False  # whether x follows the velocity by a coefficient of its own, and drift() is not asked
    needs_velocity = False  # whether it has a meaning only for a template with a stream v
    answers = ""  # what g is in each turn, for people

    def __init__(self, *, layer: int = 0, n_layer: int = 1, **options: Any) -> None:
        self.layer, self.last = layer, layer == n_layer - 1
        self.set_options(options)

    def describe(self) -> str:
        """What a block does under these options, for people."""
        return splittings[self.name].equation

    def in_turns(self, rule: str) -> str:
        """A layer in one line, from a rule's step: which oracles answer, A the attention and M the MLP."""
        return f"g = {self.answers}:  {rule}" if self.answers else f"{rule};  {self.describe()}"

    def norm_keys(self) -> dict[str, str]:
        return {turn: turn for turn in self.oracles}

    def calls(self) -> dict[str, int]:
        """How often a block asks each oracle."""
        return {"attn": 1, "mlp": 1}

    def idle(self) -> tuple[str, ...]:
        """Turns that never reach the logits in this block."""
        return ()

    def step(self, turns: Substeps, s: State) -> State:
        """The state after the block, from its turns by name. Define this one."""
        raise ComponentError(f"{type(self).__name__} does not say how the turns compose: define step().")


splittings: Registry[Splitting] = Registry("splitting", Splitting)
register_splitting = splittings.register
"""Class decorator: `@register_splitting("my-order", equation="...")` (see `Registry.register`)."""

ORDER = choice("ama", "mam", help="attention outside (strang) or explicit (imex), or the MLP")


class Ordered(Splitting):
    """A splitting with a first and a second oracle, which `order` may exchange."""

    options = {"order": ORDER}
    order: str

    def ordered(self, turns: Substeps) -> tuple[Substep, Substep]:
        a, m = turns["attn"], turns["mlp"]
        return (a, m) if self.order == "ama" else (m, a)

    def names(self) -> tuple[str, str]:
        """The first and the second oracle, for people."""
        return ("attention", "MLP") if self.order == "ama" else ("MLP", "attention")


@register_splitting(
    "parallel",
    equation="g = attention(point) + MLP(point): one query, one kick, one drift per block",
    cite="chowdhery2023palm",
    aliases=("euler",),
)
class Parallel(Splitting):
    """Forward Euler on the sum of both oracles."""

    oracles = {"both": ("attn", "mlp")}
    answers = "A + M"

    def step(self, turns: Substeps, s: State) -> State:
        return turns["both"].take(s)


@register_splitting(
    "lie-trotter",
    equation="attention step, then MLP step on the updated state",
    cite="lu2019understanding",
    aliases=("lt",),
)
class LieTrotter(Splitting):
    """The order everyone knows: a full attention step, then a full MLP step, each with its own coefficients."""

    answers = "A, then M"

    def step(self, turns: Substeps, s: State) -> State:
        return turns["mlp"].take(turns["attn"].take(s))


@register_splitting(
    "strang",
    equation="half step of the outer oracle, full step of the inner one, half step of the outer one",
    cite=("strang1968construction", "verlet1967computer"),
    aliases=("verlet",),
)
class Strang(Ordered):
    """Symmetric splitting (PRK-Verlet for velocities): a half step halves gamma; both halves share everything."""

    shares = frozenset({"memory"})

    def describe(self) -> str:
        outer, inner = self.names()
        return f"half step with {outer} (gamma/2), full step with {inner}, half step with {outer} (same coefficients)"

    def in_turns(self, rule: str) -> str:
        outer, inner = ("A", "M") if self.order == "ama" else ("M", "A")
        return f"g = {outer}/2, then {inner}, then {outer}/2:  {rule}"

    def calls(self) -> dict[str, int]:
        return {"attn": 2, "mlp": 1} if self.order == "ama" else {"attn": 1, "mlp": 2}

    def step(self, turns: Substeps, s: State) -> State:
        outer, inner = self.ordered(turns)
        s = outer.take(s, 0.5)
        s = inner.take(s)
        return outer.take(s, 0.5)


@register_splitting(
    "imex",
    equation="V = explicit kick at x_t;  k times V' = kick of V by the implicit oracle at the look-ahead of V';"
    "  one drift from x_t",
    cite="ascher1995implicit",
)
class IMEX(Ordered):
    """One oracle explicit, the other implicit and approximated by k refinements.

    Every refinement restarts from the same x_t and the same explicit velocity; only the look-ahead moves. The
    YuriiFormer paper names the orders "Attn->MLP" and "MLP->Attn" and tabulates them as AMA and MAM without a
    definition: here ama means attention explicit and MLP implicit.
    """

    shares = frozenset({"memory", "drift"})
    options = {
        "order": ORDER,
        "k": integer(1, minimum=1, help="refinements of the implicit oracle"),
        "velocity_norm": choice("once", "every", help="LN_v once at the end, or after every velocity update"),
    }
    needs_velocity = True
    k: int
    velocity_norm: str

    def in_turns(self, rule: str) -> str:
        return self.describe()

    def describe(self) -> str:
        explicit, implicit = self.names()
        n = "LN_v" if self.velocity_norm == "every" else ""
        last = "x' = x + V'" if self.velocity_norm == "every" else "V' = LN_v(V'), x' = x + V'"
        return (
            f"V = {n}(beta v + gamma {explicit}(x + mu v));  V' = V, then {self.k} times "
            f"V' = {n}(beta V + gamma' {implicit}(x + mu' V'));  {last}  (nu, mu where the template has them)"
        )

    def norm_keys(self) -> dict[str, str]:
        if self.velocity_norm == "once":
            return {"attn": "both", "mlp": "both"}
        return super().norm_keys()

    def calls(self) -> dict[str, int]:
        return {"attn": 1, "mlp": self.k} if self.order == "ama" else {"attn": self.k, "mlp": 1}

    def step(self, turns: Substeps, s: State) -> State:
        explicit, implicit = self.ordered(turns)
        every = self.velocity_norm == "every"
        half = explicit.kick(s, explicit.ask(s))
        if every:
            half = explicit.normalise(half)
        new = half
        for _ in range(self.k):
            new = implicit.kick(half, implicit.ask(new))
            if every:
                new = implicit.normalise(new)
        if not every:
            new = implicit.normalise(new)
        return implicit.drift(new)


@register_splitting(
    "symplectic-euler",
    equation="v = LN_v(beta v - gamma attention);  x = x + delta v;  v = LN_v(beta v - gamma' MLP)",
    cite="hairer2006geometric",
)
class SymplecticEuler(Splitting):
    """Kick, drift, kick. The kicks subtract, and x stays where it is after the MLP kick.

    So in the last block the MLP kick never reaches the logits: it is not computed, and its parameters are declared
    unused, unless `final_drift` moves x once more.
    """

    shares = frozenset({"memory", "lookahead", "drift"})
    coefficients = {"delta": positive(1.0, "drift")}
    options = {"final_drift": flag(False, help="in the last block, let x follow the velocity after the MLP kick")}
    needs_velocity = True
    own_drift = True
    final_drift: bool

    def in_turns(self, rule: str) -> str:
        return self.describe()

    def describe(self) -> str:
        end = ";  in the last block x follows v once more" if self.final_drift else ""
        return (
            "v = LN_v(beta v - gamma attention(x + mu v));  x = x + delta v;  v = LN_v(beta v - gamma' MLP(x + mu v))"
            f"  (mu where the template has it){end}"
        )

    def idle(self) -> tuple[str, ...]:
        return ("mlp",) if self.last and not self.final_drift else ()

    def step(self, turns: Substeps, s: State) -> State:
        attention, mlp = turns["attn"], turns["mlp"]
        s = attention.normalise(attention.kick(s, attention.ask(s, -1.0), -1.0))
        s = attention.follow(s, "delta")
        if self.idle():
            return s
        s = mlp.normalise(mlp.kick(s, mlp.ask(s, -1.0), -1.0))
        return mlp.follow(s, "delta") if self.last else s
