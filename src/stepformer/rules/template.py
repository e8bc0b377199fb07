"""What a depth rule is: where to look, how the answer changes the streams, how x moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from stepformer.base.errors import ComponentError, InputError
from stepformer.base.registry import Component, Registry, Selection
from stepformer.rules.coefficients import Array, Coefficient, Values, refuse_undeclared
from stepformer.rules.state import State

Start = Literal["embed", "copy", "zero", "ones", "identity", "later"]


@dataclass(frozen=True)
class Stream:
    """A per-token tensor carried through depth.

    start = "embed": its own token and position tables (or zero, `aux_init`), shape (B, T, d);
    "copy": the embedding, as x starts; "zero" and "ones": constant, (B, T, d);
    "later": not there before a layer that writes it, such as an answer that deeper layers read again, (B, T, d);
    "identity": one identity matrix per token, (B, T, head_dim, head_dim);
    a number: one scalar for all tokens that starts there, such as a clock.
    """

    start: Start | float
    meaning: str

    def __post_init__(self) -> None:
        if not isinstance(self.start, float) and self.start not in get_args(Start):
            words = ", ".join(map(repr, get_args(Start)))
            raise InputError(f"A stream starts from {words} or a float, not {self.start!r}.")


class Template(Component):
    """An optimizer whose step a layer takes. Subclass, declare, register; nothing here may mix tokens.

    The splitting calls, for each oracle in its turn, `query`, `kick`, `normalise`, `drift`:

    * `query(s, c)`: the point at which the oracle is evaluated;
    * `kick(s, c, g, scale)`: what the oracle's answer g does to the streams. `x` stays where it is;
    * `normalise(s, norm)`: the auxiliary norm, on the stream named by `normalises`; with `normalises_point` before the
      query and for it alone, so that what is carried stays as it is;
    * `drift(s, c, scale)`: how x moves.

    `scale` is the step fraction: 1/2 in a half step, -1 where a kick subtracts. A rule that works on a velocity
    applies it in `kick`; a rule whose auxiliary norm would erase it applies it in `drift`, never in both.
    A rule without velocity proposes its update as the stream `u` in `kick`, and `drift` consumes it.

    A rule with `reads_out = True` makes the last x of its streams: `read_out(s, c)`, after the last turn of the last
    block, with the coefficients and arrays of a turn of its own, "out".

    A rule with `integrates = True` takes the attention's turn as a whole instead (`integrate`), from the velocity and
    force fields of a Hamiltonian attention; its other turns go as above (rules/hamiltonian.py).
    """

    streams: Mapping[str, Stream] = {}  # what a token carries beside x, by name
    coefficients: Mapping[str, Coefficient] = {}  # the learned scalars of every turn, read as `c.name`
    normalises: str | None = None  # the stream on which the auxiliary norm acts
    normalises_point = False  # whether that norm is for the query alone
    integrates = False  # whether it takes the attention's turn as a whole
    attention_calls = 1  # how often an integrator evaluates its attention in one turn
    goes_with: Mapping[str, str] = {}  # settings without which the bare name of this template has no meaning
    reads_out = False  # whether it makes the last x of its streams
    layer, n_layer = 0, 1
    norm, eps = "layernorm", 1e-5  # of the model
    first = last = False  # whether the block is the first, the last of its model

    def __init__(self, n_head: int, head_dim: int, **options: Any) -> None:
        self.n_head = n_head
        self.head_dim = head_dim
        self.set_options(options)

    @classmethod
    def fault(cls) -> str | None:
        if not isinstance(cls.streams, Mapping):
            return f"{cls.__name__}.streams should be a table, such as {{'v': sf.Stream('zero', 'velocity')}}."
        for name, stream in cls.streams.items():
            if not isinstance(stream, Stream):
                return f"The stream '{name}' is {stream!r}: declare it as sf.Stream('zero', 'what it means')."
            if hasattr(State, name) or name in State.__dataclass_fields__:
                return f"A stream cannot be called '{name}', which every state has: give it another name."
        if isinstance(cls.coefficients, Mapping):  # a property is asked when a layer is built
            refuse_undeclared(cls.coefficients)
        missing = [f"{name}()" for name in ("kick", "drift") if getattr(cls, name) is getattr(Template, name)]
        return f"{cls.__name__} is not a whole rule: define {' and '.join(missing)}." if missing else None

    def place(self, layer: int, n_layer: int) -> None:
        """Which block of how many this rule is in; one whose streams depend on that declares them here."""
        self.layer, self.n_layer, self.first, self.last = layer, n_layer, layer == 0, layer == n_layer - 1

    def call_of(self, turn: str) -> int:
        """Which oracle call of the model, from 0 on, a turn begins with under a splitting of one call per oracle."""
        return self.layer if turn == "both" else 2 * self.layer + (turn == "mlp")

    @classmethod
    def has_velocity(cls) -> bool:
        """Whether there is a stream named `v`: by that name it is the velocity, which x follows.

        Momentum splittings (IMEX, symplectic Euler) and hybrid inference need one.
        """
        return "v" in cls.streams

    def describe(self) -> str:
        """Its step under these options, for people; g is the answer of the oracle whose turn it is."""
        return templates[self.name].equation

    def coefficients_of(self, turn: str) -> Mapping[str, Coefficient]:
        """The learned scalars that one turn ("attn", "mlp" or "both") uses."""
        return self.coefficients

    def arrays_of(self, turn: str) -> Mapping[str, Array]:
        """The learned vectors and matrices that one turn uses."""
        return {}

    def constants_of(self, turn: str) -> Mapping[str, float]:
        """Numbers that a turn reads like coefficients, but that are set and not learned."""
        return {}

    def normalises_in(self, turn: str) -> str | None:
        """The stream that the auxiliary norm of this turn acts on, None for a turn without one."""
        return self.normalises

    def unused(self, config: Selection) -> tuple[str, ...]:
        """Parts of the block, by name, that cannot reach the logits: modules (`attn`) or parameters of them."""
        return ()

    def query(self, s: State, c: Values) -> Tensor:
        """The point (B, T, d) at which the oracle is asked; x unless overridden."""
        return s.x

    def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
        """The state with the streams as the oracle's answer g (B, T, d) changes them; x stays. Define this one."""
        raise ComponentError(f"{type(self).__name__} does not say what an oracle's answer does: define kick().")

    def normalise(self, s: State, norm: Callable[[Tensor], Tensor]) -> State:
        """The state with the stream `normalises` behind the auxiliary norm."""
        if self.normalises is None:
            return s
        stream = s.streams.get(self.normalises)
        if stream is None:
            raise ComponentError(f"{type(self).__name__} normalises '{self.normalises}', which is none of its streams.")
        if isinstance(stream, Tensor) and stream.shape != s.x.shape:  # a rule is also followed on symbols
            raise ComponentError(
                f"{type(self).__name__}.kick() leaves the stream '{self.normalises}' in the shape "
                f"{tuple(stream.shape)}; the norm needs that of x, {tuple(s.x.shape)}."
            )
        return s.replace(**{self.normalises: norm(stream)})

    def drift(self, s: State, c: Values, scale: float = 1.0) -> State:
        """The state with x moved along the streams. Define this one."""
        raise ComponentError(f"{type(self).__name__} does not say how x moves: define drift().")

    def read_out(self, s: State, c: Values) -> Tensor:
        """The last x, for a rule with `reads_out`."""
        return s.x

    def heads(self, g: Tensor) -> Tensor:
        """A token's d-vector as its matrix of heads, (..., d) -> (..., n_head, head_dim)."""
        return g.unflatten(-1, (self.n_head, self.head_dim))


templates: Registry[Template] = Registry("template", Template, "write-your-own-rule")
register_template = templates.register
"""Class decorator: `@register_template("my-rule", equation="...")` (see `Registry.register`)."""


def scaled(scale: float | Tensor, value: Tensor) -> Tensor:
    """`scale * value` without the multiplication when there is nothing to scale."""
    return value if isinstance(scale, float) and scale == 1.0 else scale * value
