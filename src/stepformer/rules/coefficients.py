"""Learned scalars of a depth rule, each behind a map that keeps it in its range.

A rule declares specifications (`unit(0.5)`, `positive(1.0)`); a block turns them into raw parameters of shape
(1,) and hands the mapped values to the rule. An attention may have one of each per head, shape (n_head,).
A test can pin a value the map never reaches (0 or 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from stepformer.base.errors import InputError, suggestion
from stepformer.ops.scalars import LearnedScalars

Kind = Literal["memory", "lookahead", "step", "drift", "decay", "damping", "mix", "target", "gain"]
"""What a coefficient does; a splitting shares whole kinds inside a layer.

memory: how much of an old stream survives (beta); lookahead: how far ahead the oracle looks (mu);
step: the gain on the oracle's answer (gamma); drift: how far x follows the streams (nu, delta);
decay: how much of x itself is forgotten (lambda); damping: friction of a momentum in time (c_log, c_lin);
mix: how much of an older tensor enters (values, embedding, prior); target: what a constraint asks for (r);
gain: that of a norm, which optimizers treat as they do those of other norms.
"""


@dataclass(frozen=True)
class Coefficient:
    """Range, initial value and kind of one learned scalar."""

    start: float | tuple[float, ...]  # of free ones each may have its own
    range: Literal["unit", "positive", "free"]
    kind: Kind
    size: int = 1

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InputError(f"A coefficient's kind is one of {', '.join(get_args(Kind))}, not '{self.kind}'.")
        if isinstance(self.start, tuple):
            if self.range != "free" or len(self.start) != self.size:
                raise InputError("Only free coefficients have several starts, as many as there are of them.")
            return
        if self.range == "unit" and not 0.0 < self.start < 1.0:
            raise InputError(f"A unit coefficient starts strictly between 0 and 1, not at {self.start}.")
        if self.range == "positive" and not 0.0 < self.start < math.inf:
            raise InputError(f"A positive coefficient starts above 0, not at {self.start}.")

    @property
    def raw_start(self) -> float | tuple[float, ...]:
        """The unconstrained parameter whose mapped value is `start`."""
        if isinstance(self.start, tuple) or self.range == "free":
            return self.start
        ratio = self.start / (1.0 - self.start) if self.range == "unit" else math.expm1(self.start)
        return round(math.log(ratio), 12)  # so that 0.5 and ln 2 start at exactly 0

    def value(self, raw: Tensor) -> Tensor:
        if self.range == "free":
            return raw
        return torch.sigmoid(raw) if self.range == "unit" else F.softplus(raw)

    @property
    def interval(self) -> str:
        return {"unit": "(0, 1)", "positive": "(0, inf)", "free": "(-inf, inf)"}[self.range]


def unit(start: float = 0.5, kind: Kind = "step", size: int = 1) -> Coefficient:
    """A coefficient in (0, 1), behind a sigmoid.

    Args:
        start: Its initial value.
        kind: What it does; a splitting shares whole kinds inside a layer.
        size: How many there are of it, such as one per head.

    Examples:
        `coefficients = {"mu": unit(0.9, "lookahead"), "gamma": positive(1.0, "step")}` in a template.
    """
    return Coefficient(start, "unit", kind, size)


def positive(start: float = math.log(2.0), kind: Kind = "step") -> Coefficient:
    """A positive coefficient, behind a softplus, with its initial value and kind."""
    return Coefficient(start, "positive", kind)


def free(start: float | tuple[float, ...], kind: Kind = "step") -> Coefficient:
    """A coefficient of any sign, without a map; with several starts so many, which a rule reads by index."""
    return Coefficient(start, "free", kind, len(start) if isinstance(start, tuple) else 1)


@dataclass(frozen=True)
class Array:
    """A learned array of one turn, such as a vector of the width; all of its numbers start alike.

    A rule reads it as it reads a coefficient. Vectors multiply rows; only functions that are called around a pass take
    an array of more dimensions (ops/symbols.py). Arrays are trained by AdamW with the rate and the decay of the tables.
    """

    size: tuple[int, ...]
    start: float = 0.0
    kind: Kind = "mix"

    @property
    def raw_start(self) -> float:
        return self.start

    def value(self, raw: Tensor) -> Tensor:
        return raw


def refuse_undeclared(specs: Mapping[str, Any]) -> None:
    """A sentence if one of them is no specification."""
    for name, spec in specs.items():
        if not isinstance(spec, Coefficient | Array):
            how = "sf.unit(0.5), sf.positive(1.0) or sf.free(0.0)"
            raise InputError(f"The coefficient '{name}' is {spec!r}: declare it as {how}.")


class Values:
    """Mapped values of one substep, read as attributes: `c.mu`, `c.beta`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name == "_values" or name not in self._values:
            there = {} if name == "_values" else self._values
            guess = suggestion(name, there) or f" It has {', '.join(there) or 'none'}."
            raise AttributeError(f"This turn has no coefficient '{name}'.{guess}")
        return self._values[name]

    def __or__(self, other: Values) -> Values:
        return Values(self._values | other._values)


class CoefficientBank(LearnedScalars):
    """The raw coefficients of one layer, stored under `name` (shared or alone) or `name_substep`.

    `substeps` says which coefficients each substep uses; a kind in `shared` exists once for all of them. `constants`
    are numbers that a substep reads the same way but nobody learns.
    """

    def __init__(
        self,
        substeps: Mapping[str, Mapping[str, Coefficient | Array]],
        shared: frozenset[str] = frozenset(),
        constants: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        super().__init__()
        self.constants = constants or {}
        self.keys_of: dict[str, dict[str, str]] = {substep: {} for substep in substeps}
        for substep, specs in substeps.items():
            refuse_undeclared(specs)
            for name, spec in specs.items():
                users = [other for other in substeps.values() if name in other]
                key = name if len(users) == 1 or spec.kind in shared else f"{name}_{substep}"
                self.keys_of[substep][name] = key
                if key not in self.specs:
                    self.add(key, spec)

    def values(self) -> dict[str, Values]:
        """Mapped values for every substep, each coefficient mapped once."""
        mapped: dict[str, Any] = {key: self.value(key) for key in self.specs}
        mapped |= {key: mapped[key].split(1) for key, spec in self.specs.items() if isinstance(spec.start, tuple)}
        return {
            sub: Values({**{name: mapped[k] for name, k in keys.items()}, **self.constants.get(sub, {})})
            for sub, keys in self.keys_of.items()
        }

    def names(self) -> list[str]:
        """Every word that `pin` understands."""
        return [*{name for keys in self.keys_of.values() for name in keys}, *self.specs]

    def owned_by(self, substep: str) -> list[str]:
        """Keys that only this substep uses."""
        others = {k for sub, keys in self.keys_of.items() if sub != substep for k in keys.values()}
        return [k for k in self.keys_of[substep].values() if k not in others]

    def pin(self, word: str, value: float | Tensor) -> int:
        """Replace the mapped value of a key (`mu_attn`) or of every key of a name (`mu`); returns how many."""
        named = sorted({keys[word] for keys in self.keys_of.values() if word in keys})
        return self.pin_keys([word] if word in self.specs else named, word, value)


class ArrayBank(CoefficientBank):
    """The learned arrays of one layer, named as its coefficients are."""
