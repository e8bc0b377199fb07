"""Hyper-connections: n streams of the width of x, which every oracle reads, mixes and writes by its own weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from stepformer.base.options import choice, flag, integer
from stepformer.base.registry import Selection
from stepformer.ops import connections
from stepformer.rules.coefficients import Array, Coefficient, Values, free
from stepformer.rules.state import State
from stepformer.rules.template import Start, Stream, Template, register_template

MOST_PERMUTED = 4  # 5! would be 120 permutations


class Connections(Template):
    """Streams H_0 = x, H_1, ..., which start as the embedding or from `tables` of their own; their sum is the last x.

    The oracle is asked at sum_i read_i H_i, and H'_j = sum_i mix_ij H_i + write_j g.
    """

    options = {
        "n": integer(4, minimum=1, help="streams"),
        "tables": integer(0, minimum=0, help="streams beside x that start from own tables, not as the embedding"),
    }
    reads_out = True
    n: int
    tables: int

    def __init__(self, n_head: int, head_dim: int, **options: Any) -> None:
        super().__init__(n_head, head_dim, **options)
        self.names = [f"h{i}" for i in range(1, self.n)]
        starts: list[Start] = ["embed" if i < self.tables else "copy" for i in range(self.n - 1)]
        self.streams = {k: Stream(start, "stream beside x") for k, start in zip(self.names, starts, strict=True)}

    @classmethod
    def refusals(cls, config: Selection) -> list[str]:
        n, tables = config.option("n"), config.option("tables")
        found = [] if tables < n else [f"n = {n} has {n - 1} streams beside x: use fewer tables than n, not {tables}."]
        if config.splitting not in ("lie-trotter", "parallel") and not config.component("splitting").needs_velocity:
            found.append(
                f"Template '{cls.name}' gives each oracle call its own weights, and splitting '{config.splitting}' "
                "would use them twice: use splitting = 'lie-trotter' or 'parallel'."
            )
        return found

    def rows(self, s: State) -> list[Tensor]:
        return [s.x, *(getattr(s, name) for name in self.names)]

    def read(self, H: list[Tensor], c: Values) -> tuple[list[Tensor], Sequence[Any]]:
        """The streams and the weight of each in the point of the oracle."""
        raise NotImplementedError

    def mix(self, H: list[Tensor], c: Values) -> tuple[list[Tensor], Sequence[Sequence[Any]], Sequence[Any]]:
        """The streams; the weight of stream i in the new stream j at [i][j]; that of the answer in each."""
        raise NotImplementedError

    def query(self, s: State, c: Values) -> Tensor:
        H, weights = self.read(self.rows(s), c)
        return connections.mixtures([weights], H)[0]

    def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
        return s.replace(u=g)

    def drift(self, s: State, c: Values, scale: float = 1.0) -> State:
        H, mix, write = self.mix(self.rows(s), c)
        new = connections.mixtures([[*(line[j] for line in mix), write[j]] for j in range(self.n)], [*H, s.u])
        return s.without("u").replace(x=new[0], **dict(zip(self.names, new[1:], strict=True)))

    def read_out(self, s: State, c: Values) -> Tensor:
        x, *others = self.rows(s)
        return sum(others, x)


def one_hot(n: int, place: int, on: float = 1.0, off: float = 0.0) -> tuple[float, ...]:
    return tuple(on if i == place else off for i in range(n))


@register_template(
    "hyper",
    equation="h = A_m^T H;  H' = A_r^T H + B^T g(h);  x = sum of the n rows of H after the last call",
    cite="zhu2025hyper",
    aliases="hyper-connections",
)
class HyperConnections(Connections):
    """The weights are learned numbers; with `dynamic`, each stream's own row changes them.

    A_m += s_a tanh(Hbar W_m), A_r += s_a tanh(Hbar W_r), B += s_b tanh(Hbar W_b), where Hbar_i = norm(H_i), the norm
    of the model without a gain.
    """

    options = {**Connections.options, "dynamic": flag(False, help="weights also depend on the token's own streams")}
    dynamic: bool

    def describe(self) -> str:
        own = ";  A_m, A_r, B = learned + s tanh(norm(H) W)" if self.dynamic else ""
        return f"h = A_m^T H;  H' = A_r^T H + B^T g(h){own};  H of {self.n} rows, their sum is read"

    def coefficients_of(self, turn: str) -> Mapping[str, Coefficient]:
        if turn == "out":
            return {}
        n = self.n
        eye = tuple(float(i == j) for i in range(n) for j in range(n))
        found = {"A_m": free(one_hot(n, self.call_of(turn) % n), "mix"), "A_r": free(eye, "mix")}
        found["B"] = free((1.0,) * n, "mix")
        return found | ({"s_a": free(0.01, "mix"), "s_b": free(0.01, "mix")} if self.dynamic else {})

    def arrays_of(self, turn: str) -> Mapping[str, Array]:
        if turn == "out" or not self.dynamic:
            return {}
        return {"W": Array((2 + self.n, self.n_head * self.head_dim))}  # lines W_m, W_b, W_r

    def weights(self, H: list[Tensor], c: Values) -> tuple[list[Tensor], list[Any]]:
        """The streams, and of each its weights A_m, B and A_r with what they gain from its own row, (..., 1)."""
        n = self.n
        starts = [[c.A_m[i], c.B[i], *c.A_r[i * n : (i + 1) * n]] for i in range(n)]
        return connections.along(H, c.W, (c.s_a, c.s_b), starts, self.eps, self.norm != "rmsnorm")

    def read(self, H: list[Tensor], c: Values) -> tuple[list[Tensor], Sequence[Any]]:
        if not self.dynamic:
            return H, c.A_m
        H, weights = self.weights(H, c)
        return H, [own[0] for own in weights]

    def mix(self, H: list[Tensor], c: Values) -> tuple[list[Tensor], Sequence[Sequence[Any]], Sequence[Any]]:
        n = self.n
        if not self.dynamic:
            return H, [c.A_r[i * n : (i + 1) * n] for i in range(n)], c.B
        H, weights = self.weights(H, c)
        return H, [own[2:] for own in weights], [own[1] for own in weights]


@register_template(
    "mhc",
    equation="h = pre H;  H' = R H + post^T g(h), R doubly stochastic;  x = sum of the n rows of H after the last call",
    cite=("xie2025mhc", "yang2026mhclite"),
)
class ConstrainedConnections(Connections):
    """Manifold-constrained hyper-connections: R is doubly stochastic, pre in (0, 1) and post in (0, 2), all of a token.

    z = RMSNorm(vec H);  pre = sigmoid(a1 z F1 + b1), post = 2 sigmoid(a2 z F2 + b2), and R from res = a3 z F3 + b3:
    by 20 Sinkhorn steps from exp(res), or as the mean of all permutations with weights softmax(res) (mHC-lite).
    """

    options = {
        **Connections.options,
        "mixing": choice("sinkhorn", "permutations", help="R by 20 Sinkhorn steps, or a mean of all permutations"),
    }
    mixing: str

    @classmethod
    def refusals(cls, config: Selection) -> list[str]:
        found, n = super().refusals(config), config.option("n")
        if config.option("mixing") == "permutations" and n > MOST_PERMUTED:
            found.append(
                f"mixing = 'permutations' weighs all n! permutations, too many of n = {n}: use n up to "
                f"{MOST_PERMUTED}, or mixing = 'sinkhorn'."
            )
        return found

    def describe(self) -> str:
        how = "20 Sinkhorn steps from exp(res)" if self.mixing == "sinkhorn" else "sum_k softmax(res)_k P_k"
        return (
            f"h = pre H;  H' = R H + post^T g(h);  pre, post/2 = sigmoid, R = {how} of a RMSNorm(vec H) F + b;  "
            f"H of {self.n} rows, their sum is read"
        )

    def coefficients_of(self, turn: str) -> Mapping[str, Coefficient]:
        if turn == "out":
            return {}
        n, place = self.n, self.call_of(turn) % self.n
        gates = free(one_hot(n, place, 1.0, -1.0), "mix")
        if self.mixing == "sinkhorn":
            kept = free(tuple(0.0 if i == j else -8.0 for i in range(n) for j in range(n)), "mix")
        else:
            kept = free(one_hot(math.factorial(n), 0, 0.0, -8.0), "mix")
        return {"a": free((0.01,) * 3, "mix"), "b1": gates, "b2": gates, "b3": kept}

    def arrays_of(self, turn: str) -> Mapping[str, Array]:
        if turn == "out":
            return {}
        n, third = self.n, math.factorial(self.n) if self.mixing == "permutations" else self.n**2
        return {"F": Array((2 * n + third, n * self.n_head * self.head_dim))}

    def numbers(self, c: Values) -> list[Any]:
        return [*c.a, *c.b1, *c.b2, *c.b3]

    def read(self, H: list[Tensor], c: Values) -> tuple[list[Tensor], Sequence[Any]]:
        return connections.read(H, c.F, self.numbers(c), self.eps, self.mixing)

    def mix(self, H: list[Tensor], c: Values) -> tuple[list[Tensor], Sequence[Sequence[Any]], Sequence[Any]]:
        H, R, post = connections.mix(H, c.F, self.numbers(c), self.eps, self.mixing)
        return H, [[line[j] for line in R] for j in range(self.n)], post  # H' = R H
