"""One layer as the outer step sees it, naively in fp64: rows, streams and a whole forward pass; see trust_region.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transcriptions.parts import turn

Rows = list[Tensor]


# Attention rows.


def mean(a: Tensor, z: Tensor) -> Tensor:
    """E_a[z] = sum_j a_j z_j, of numbers or of vectors."""
    return sum((a[j] * z[j] for j in range(len(a))), torch.zeros_like(z[0]))


def covariance(a: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Cov_a(y, z) = sum_j a_j (y_j - E_a y)(z_j - E_a z)^T, of numbers (t,) or of vectors (t, width)."""
    y_mean, z_mean = mean(a, y), mean(a, z)
    total: Any = 0.0
    for j in range(len(a)):
        one, other = y[j] - y_mean, z[j] - z_mean
        both = torch.outer(one, other) if one.dim() and other.dim() else one * other
        total = total + a[j] * both
    return total


def divergence(a: Tensor, b: Tensor) -> Tensor:
    """KL(a || b) = sum_j a_j log(a_j / b_j); its first order, sum_j (b_j - a_j) = 0, taken out term by term."""
    total = torch.zeros((), dtype=a.dtype)
    for j in range(len(a)):
        change = (b[j] - a[j]) / a[j]
        total = total + a[j] * (change - torch.log1p(change))
    return total


def row(beta: float, s: Tensor, log_q: Tensor) -> Tensor:
    """a = softmax(log q + beta s)."""
    raw = log_q + beta * s
    return torch.exp(raw - torch.logsumexp(raw, dim=0))


def spread(beta: float, s: list[float], log_q: list[float]) -> tuple[float, float]:
    """H(a) and KL(a || q) of a = softmax(log q + beta s), in Python's numbers."""
    raw = [q + beta * score for score, q in zip(s, log_q, strict=True)]
    top = max(raw)
    log_sum = top + math.log(math.fsum(math.exp(value - top) for value in raw))
    log_a = [value - log_sum for value in raw]
    entropy = -math.fsum(math.exp(p) * p for p in log_a)
    return entropy, math.fsum(math.exp(p) * (p - q) for p, q in zip(log_a, log_q, strict=True))


def solve(
    s: Tensor, kind: str, goal: float = 0.0, log_q: Tensor | None = None, tau: float = 1.0
) -> tuple[Tensor, float, bool]:
    """(a, beta, bound) of one row, beta by bisection.

    softmax: beta = 1.  entropy: H(a) = goal.  kl: KL(a || q) = goal.  floor: beta = min(1/tau, root of H(a) = goal).
    One visible key or equal scores: a = q, not bound.
    """
    log_q = torch.full_like(s, -math.log(len(s))) if log_q is None else log_q
    if kind == "softmax":
        return row(1.0, s, log_q), 1.0, False
    if len(s) == 1 or bool(s.max() == s.min()):
        return torch.exp(log_q), 0.0, False

    numbers = s.tolist(), log_q.tolist()

    def slack(beta: float) -> float:  # falls with beta
        entropy, divergence = spread(beta, *numbers)
        return goal - divergence if kind == "kl" else entropy - goal

    if kind == "floor" and slack(1.0 / tau) >= 0:
        return row(1.0 / tau, s, log_q), 1.0 / tau, False
    low, high = 0.0, 1.0
    while slack(high) > 0:
        high *= 2.0
    for _ in range(56):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if slack(middle) > 0 else (low, middle)
    beta = 0.5 * (low + high)
    return row(beta, s, log_q), beta, True


def row_quadratic(a: Tensor, s: Tensor, ds: Tensor, beta: float = 1.0, bound: bool = False) -> Tensor:
    """KL(a || a + da) to second order: beta^2/2 Var_a(ds); bound: beta^2/2 (Var_a(ds) - Cov_a(ds, s)^2 / Var_a(s))."""
    variance = covariance(a, ds, ds)
    if bound:
        variance = variance - covariance(a, ds, s) ** 2 / covariance(a, s, s)
    return 0.5 * beta**2 * variance


def row_tangent(a: Tensor, s: Tensor, ds: Tensor, beta: float, bound: bool, d_log_q: Tensor | None = None) -> Tensor:
    """d log a, where the prior may move too (chained priors; sum_j q_j d log q_j = 0).

    d log a = r - E_a[r], r = d log q + beta ds + dbeta s; bound: KL(a || q) stays,
    dbeta = (E_a[d log q] / beta - Cov_a(d log q + beta ds, s)) / Var_a(s).
    """
    d_log_q = torch.zeros_like(s) if d_log_q is None else d_log_q
    r = d_log_q + beta * ds
    if bound:
        r = r + (mean(a, d_log_q) / beta - covariance(a, r, s)) / covariance(a, s, s) * s
    return r - mean(a, r)


def tangent_quadratic(a: Tensor, d_log_a: Tensor) -> Tensor:
    """KL(a || a + da) to second order: 1/2 E_a[(d log a)^2]."""
    return 0.5 * mean(a, d_log_a * d_log_a)


# Normalised streams.


def deviation(x: Tensor, norm: str, eps: float = 0.0) -> Tensor:
    """rho: the rms of the row, or its standard deviation for LayerNorm."""
    away = x - x.mean() if norm == "layernorm" else x
    return torch.sqrt((away * away).mean() + eps)


def normalised(x: Tensor, norm: str, eps: float = 0.0) -> Tensor:
    """x / rho, x centred for LayerNorm; no gain."""
    return (x - x.mean() if norm == "layernorm" else x) / deviation(x, norm, eps)


def stream_quadratic(x: Tensor, dB: Tensor, norm: str, eps: float = 0.0) -> Tensor:
    """|d(x/rho)|^2 / d = (|dB|^2 - (x.dB)^2 / (d rho^2)) / (d rho^2); x and dB centred for LayerNorm."""
    rho, d = deviation(x, norm, eps), len(x)
    if norm == "layernorm":
        x, dB = x - x.mean(), dB - dB.mean()
    return ((dB * dB).sum() - (x * dB).sum() ** 2 / (d * rho**2)) / (d * rho**2)


# One layer, row by row.


@dataclass
class Head:
    """Weights of one head and what it computed: queries and keys before and after norm and rotation."""

    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor  # (d, d_h): this head's columns
    raw_q: Rows
    raw_k: Rows
    q: Rows  # as they enter the scores
    k: Rows
    values: Rows  # as they are averaged
    a: Rows  # weights of the queries on the keys j <= i
    s: Rows
    beta: list[float]
    bound: list[bool]


@dataclass
class Layer:
    """One layer at one sequence; `queries` are the rows that the averages E_i run over, all of them unless said."""

    heads: list[Head]
    u: Rows
    m: Rows
    x_a: Rows
    x_m: Rows
    o: Rows
    W_up: Tensor
    W_down: Tensor
    W_gate: Tensor | None
    rule: dict[str, Any]
    queries: list[int]


RULE: dict[str, Any] = {
    "attention": "softmax",  # entropy, kl, floor
    "ratio": 0.5,  # h = ratio ln t (entropy, floor); rho = ratio ln t (kl)
    "tau": 1.0,
    "norm": "rmsnorm",
    "qk_norm": False,
    "rotary": False,
    "mlp": "gelu",  # relu2, swiglu
    "alpha": 1.0,
    "b": 1.0,
    "lambda_attn": 1.0,
    "value_lambda": 0.0,
    "eps": 0.0,
}


def activation(kind: str, up: Tensor, gate: Tensor | None) -> Tensor:
    """phi of one row: GELU(up), the square of what is positive of up, or silu(gate) .* up."""
    if kind == "swiglu":
        assert gate is not None
        return gate / (1.0 + torch.exp(-gate)) * up
    if kind == "relu2":
        return torch.where(up > 0, up * up, torch.zeros_like(up))
    return 0.5 * up * (1.0 + torch.erf(up / math.sqrt(2.0)))


def run_layer(
    x: Rows,
    weights: Mapping[str, Any],
    rule: Mapping[str, Any],
    first_values: list[Rows] | None = None,
    queries: list[int] | None = None,
) -> Layer:
    """x_a = x + alpha sum_h W_O,h o_h, x_m = x_a + b W_down phi, with norms before attention and MLP.

    weights: "W_Q", "W_K", "W_V", "W_O" lists over heads, "W_up", "W_down", for swiglu "W_gate", and the norms'
    gains "attn_norm" and "mlp_norm" if they have any, which the normalised streams of the constraint do not. QK-norm:
    q, k <- q / rms(q), k / rms(k); rotary: q_i, k_j <- Rot_i q_i, Rot_j k_j; value residual:
    v = (1 - lambda) W_V u + lambda v_1, v_1 the `first_values` of each head.
    """
    rule = {**RULE, **rule}
    if first_values is None:
        rule["value_lambda"] = 0.0
    norm, eps = rule["norm"], rule["eps"]
    u = [weights.get("attn_norm", 1.0) * normalised(z, norm, eps) for z in x]
    heads = []
    for h in range(len(weights["W_Q"])):
        W_Q, W_K, W_V, W_O = (weights[name][h] for name in ("W_Q", "W_K", "W_V", "W_O"))
        raw_q, raw_k = [W_Q @ z for z in u], [W_K @ z for z in u]
        q, k = list(raw_q), list(raw_k)
        if rule["qk_norm"]:
            q, k = ([normalised(z, "rmsnorm", eps) for z in rows] for rows in (q, k))
        if rule["rotary"]:
            q, k = ([turn(z, i) for i, z in enumerate(rows)] for rows in (q, k))
        values = [W_V @ z for z in u]
        if first_values is not None:
            lam = rule["value_lambda"]
            values = [(1 - lam) * v + lam * first for v, first in zip(values, first_values[h], strict=True)]
        head = Head(W_Q, W_K, W_V, W_O, raw_q, raw_k, q, k, values, [], [], [], [])
        for i in range(len(x)):
            s = torch.stack([(q[i] * k[j]).sum() / math.sqrt(len(q[i])) for j in range(i + 1)])
            a, beta, bound = solve(s, rule["attention"], rule["ratio"] * math.log(i + 1), tau=rule["tau"])
            head.a.append(a)
            head.s.append(s)
            head.beta.append(beta)
            head.bound.append(bound)
        heads.append(head)
    o = [torch.cat([mean(head.a[i], torch.stack(head.values)) for head in heads]) for i in range(len(x))]
    W_O = torch.cat([head.W_O for head in heads], dim=1)
    x_a = [z + rule["alpha"] * (W_O @ out) for z, out in zip(x, o, strict=True)]
    m = [weights.get("mlp_norm", 1.0) * normalised(z, norm, eps) for z in x_a]
    W_gate = weights.get("W_gate")
    phi = [activation(rule["mlp"], weights["W_up"] @ z, None if W_gate is None else W_gate @ z) for z in m]
    x_m = [z + rule["b"] * (weights["W_down"] @ p) for z, p in zip(x_a, phi, strict=True)]
    return Layer(
        heads,
        u,
        m,
        x_a,
        x_m,
        o,
        weights["W_up"],
        weights["W_down"],
        W_gate,
        rule,
        list(range(len(x))) if queries is None else queries,
    )


def expectation(layer: Layer, term: Callable[[int], Tensor]) -> Tensor:
    """E_i: the mean of term(i) over the layer's queries."""
    return sum((term(i) for i in layer.queries[1:]), term(layer.queries[0])) / len(layer.queries)


def norm_of(layer: Layer) -> tuple[str, float]:
    return layer.rule["norm"], layer.rule["eps"]


def jacobian_of_norm(z: Tensor, eps: float) -> Tensor:
    """J = (I - z^ z^^T / d_h) / rms(z), z^ = z / rms(z)."""
    rms = deviation(z, "rmsnorm", eps)
    hat = z / rms
    return (torch.eye(len(z), dtype=z.dtype) - torch.outer(hat, hat) / len(z)) / rms


@functools.cache
def rotation(position: int, width: int) -> Tensor:
    """Rot_i as a matrix."""
    return torch.stack([turn(unit, position) for unit in torch.eye(width, dtype=torch.float64)], dim=1)


def query_map(layer: Layer, head: Head, i: int) -> Tensor:
    """d q_i / d(W_Q u_i): Rot_i J_i, each where there is one."""
    width = len(head.q[i])
    J = jacobian_of_norm(head.raw_q[i], layer.rule["eps"]) if layer.rule["qk_norm"] else torch.eye(width).double()
    return rotation(i, width) @ J if layer.rule["rotary"] else J


def key_map(layer: Layer, head: Head, j: int) -> Tensor:
    """d k_j / d(W_K u_j): Rot_j J_j, each where there is one."""
    width = len(head.k[j])
    J = jacobian_of_norm(head.raw_k[j], layer.rule["eps"]) if layer.rule["qk_norm"] else torch.eye(width).double()
    return rotation(j, width) @ J if layer.rule["rotary"] else J
