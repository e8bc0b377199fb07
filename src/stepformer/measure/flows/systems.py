"""The particle systems behind Hamiltonian attention, without weights, masks or norms.

N tokens x_i with momenta y_i move by the two fields of an energy H, slowed down by a friction alpha(t):

    x' = F(x, y) = dH/dy,    y' = G(x, y) - alpha(t) y,    G = -dH/dx.

The standard attention flow is what a plain residual layer follows. It is the same F, driven by the force at rest:

    x' = F(x, G(x, 0)),    so that U(x) = H(x, 0) falls while F(x, .) is positive:  U' = -<G(x, 0), F(x, G(x, 0))>.

Fields are written in closed form; `stepformer flow hamiltonian` compares them with the derivatives of H.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Force = Literal["full", "row"]


class Flow:
    """An energy of tokens and momenta, both of shape (N, d), with its two fields."""

    def hamiltonian(self, x: Tensor, y: Tensor) -> Tensor:
        """H."""
        raise NotImplementedError

    def velocity(self, x: Tensor, y: Tensor) -> Tensor:
        """F."""
        raise NotImplementedError

    def force(self, x: Tensor, y: Tensor) -> Tensor:
        """G, without friction."""
        raise NotImplementedError

    def potential(self, x: Tensor) -> Tensor:
        """U(x) = H(x, 0): the interaction energy that the standard flow descends."""
        return self.hamiltonian(x, torch.zeros_like(x))

    def standard(self, x: Tensor) -> Tensor:
        """F(x, G(x, 0)): softmax attention or linear attention with values V x_j."""
        return self.velocity(x, self.force(x, torch.zeros_like(x)))


class FieldsHere(NamedTuple):
    """The two fields at one (x, y), as the integrators of the models ask for them."""

    flow: Flow
    x: Tensor
    y: Tensor

    def velocity(self, y: Tensor) -> Tensor:
        return self.flow.velocity(self.x, y)

    def force(self) -> Tensor:
        return self.flow.force(self.x, self.y)


@dataclass(frozen=True)
class LinearFlow(Flow):
    """Linear attention, with symmetric A and V:

    H = (1/2N) sum_ij (x_i.A x_j) (y_i.y_j) - 1/2 sum_i x_i.V x_i
    F_i = (1/N) sum_j (x_j.A x_i) y_j,    G_i = V x_i - (1/N) sum_j (y_i.y_j) A x_j.

    Standard flow: x_i' = (1/N) sum_j (x_j.A x_i) V x_j.
    """

    A: Tensor
    V: Tensor

    def hamiltonian(self, x: Tensor, y: Tensor) -> Tensor:
        kinetic = ((x @ self.A @ x.mT) * (y @ y.mT)).sum() / (2 * len(x))
        return kinetic - 0.5 * (x * (x @ self.V)).sum()

    def velocity(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ self.A.mT @ (x.mT @ y) / len(x)

    def force(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ self.V.mT - y @ (y.mT @ x) @ self.A.mT / len(x)


@dataclass(frozen=True)
class SoftmaxFlow(Flow):
    """Softmax attention in the form free of N, with symmetric B and E_ij = exp(x_i.A x_j):

    z_i = (1/N) sum_j E_ij,    a_i = y_i.B y_i / divisor,
    H = 1/2 sum_i a_i / z_i - (kappa / 2N) sum_ij E_ij,
    F_i = B y_i / z_i,
    row   G_i = (1/2N) sum_j E_ij (a_i / z_i^2 + a_j / z_j^2 + 2 kappa) A x_j,
    full  G_i = (1/2N) [w_i sum_j E_ij A x_j + sum_j E_ji w_j A^T x_j],    w = a / z^2 + kappa.

    `full` is -dH/dx for every A; `row`, which a causal mask can cut, is the same for symmetric A and no gradient
    otherwise. Standard flow with kappa = 1: x_i' = sum_j softmax_j(x_i.A x_j) V x_j with V = B A; kappa = -1 turns
    the sign of V. `divisor` = 1 makes F = dH/dy. The models divide a_i (and not F) by d, and then F = d dH/dy.
    """

    A: Tensor
    B: Tensor
    kappa: float = 1.0
    divisor: float = 1.0
    rule: Force = "full"

    def kernel(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """E and z, a column."""
        e = torch.exp(x @ self.A @ x.mT)
        return e, e.mean(dim=1, keepdim=True)

    def squared(self, y: Tensor) -> Tensor:
        """a, a column."""
        return (y * (y @ self.B)).sum(dim=1, keepdim=True) / self.divisor

    def hamiltonian(self, x: Tensor, y: Tensor) -> Tensor:
        e, z = self.kernel(x)
        return 0.5 * (self.squared(y) / z).sum() - 0.5 * self.kappa * e.sum() / len(x)

    def velocity(self, x: Tensor, y: Tensor) -> Tensor:
        return y @ self.B / self.kernel(x)[1]

    def force(self, x: Tensor, y: Tensor) -> Tensor:
        e, z = self.kernel(x)
        w = self.squared(y) / z.square() + self.kappa
        if self.rule == "row":
            return (w * (e @ x) + e @ (w * x)) @ self.A.mT / (2 * len(x))
        return (w * (e @ x) @ self.A.mT + e.mT @ (w * x) @ self.A) / (2 * len(x))


def definite(d: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    """A symmetric matrix with eigenvalues spread evenly from `low` to `high` in random directions, fp64."""
    q, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    return q @ torch.diag(torch.linspace(low, high, d, dtype=torch.float64)) @ q.mT


def gaussian(n: int, d: int, spread: float, generator: torch.Generator) -> Tensor:
    """N tokens from a centred normal distribution, fp64."""
    return spread * torch.randn(n, d, generator=generator, dtype=torch.float64)


class Moments(NamedTuple):
    """Mean m, covariance S and, for the accelerated flow, the matrix P with y_i = P x_i.

    Under linear attention these follow ODEs of their own, because every token moves by one matrix, x_i' = C x_i:

    m' = C m,    S' = S C^T + C S,
    accelerated  C = P (S + m m^T) A,    P' = V - C^T P - P C - alpha(t) P,
    standard     C = V (S + m m^T) A.

    For tokens these hold exactly with m and S their own (1/N) moments, so kappa_g = 1 whatever their distribution.
    """

    m: Tensor
    S: Tensor
    P: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Moments:
        """Of tokens at rest: P = 0."""
        m = x.mean(dim=0)
        return cls(m, (x - m).mT @ (x - m) / len(x), x.new_zeros(x.shape[1], x.shape[1]))

    def rate(self, flow: LinearFlow, friction: float, *, accelerated: bool) -> Moments:
        """The right-hand sides."""
        second = self.S + torch.outer(self.m, self.m)
        c = (self.P if accelerated else flow.V) @ second @ flow.A
        p = flow.V - c.mT @ self.P - self.P @ c - friction * self.P
        return Moments(c @ self.m, self.S @ c.mT + c @ self.S, p if accelerated else torch.zeros_like(p))


def radii(x: Tensor) -> Tensor:
    """(x_i - m).S^-1 (x_i - m) with the tokens' own m and S, which an affine map of all tokens leaves alone."""
    own = Moments.of(x)
    centred = x - own.m
    return (centred * torch.linalg.solve(own.S, centred.mT).mT).sum(dim=1)
