"""The outer step in the geometry of the layer, naively in fp64: one row, one head, one matrix after the other.

Weights are (out, in), vectors are one-dimensional, E_i is the mean over the queries of a layer, and a "group" is one
weight of one head, or one matrix of the layer. Notation
    a, s, beta   weights, scores q.k / sqrt(d_h) and inverse temperature of a row: a = softmax(log q + beta s)
    bound        whether the row's constraint decides beta: then beta answers to a change of the scores
    u, m         normalised inputs of attention and MLP;  ubar_i = sum_j a_ij u_j;  o the concatenated head outputs
    x_a, x_m     the stream after attention and after the MLP
    rho_a, rho_m row rms of x_a and x_m, for LayerNorm their standard deviation
    L, R         q(dW) = tr(L dW R dW^T), the quadratic form of a group
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transcriptions.optimizers import polar_by_svd
from transcriptions.parts import turn

Factors = dict[str, Tensor]  # "L" and "R"
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


# Exact quadratics of a layer, a group or several moved together, without the change of later inputs.


def score_change(layer: Layer, head: Head, i: int, dW_Q: Tensor | None, dW_K: Tensor | None) -> Tensor:
    """ds_ij = (dq_i . k_j + q_i . dk_j) / sqrt(d_h), j <= i."""
    dq = torch.zeros_like(head.q[i]) if dW_Q is None else query_map(layer, head, i) @ dW_Q @ layer.u[i]
    changes = []
    for j in range(i + 1):
        ds = (dq * head.k[j]).sum()
        if dW_K is not None:
            ds = ds + (head.q[i] * (key_map(layer, head, j) @ dW_K @ layer.u[j])).sum()
        changes.append(ds / math.sqrt(len(head.q[i])))
    return torch.stack(changes)


def exact_attention(layer: Layer, dW_Q: Sequence[Tensor | None], dW_K: Sequence[Tensor | None]) -> Tensor:
    """lambda_attn times the mean over heads and queries of KL(A || A + dA) to second order."""
    total = torch.zeros((), dtype=torch.float64)
    for head, dQ, dK in zip(layer.heads, dW_Q, dW_K, strict=True):
        for i in layer.queries:
            ds = score_change(layer, head, i, dQ, dK)
            total = total + row_quadratic(head.a[i], head.s[i], ds, head.beta[i], head.bound[i])
    return layer.rule["lambda_attn"] * total / (len(layer.heads) * len(layer.queries))


def exact_attention_stream(
    layer: Layer, dW_V: Sequence[Tensor | None], dW_O: Sequence[Tensor | None], radial: bool = True
) -> Tensor:
    """E_i |d(x_a / rho_a)|^2 / d of dB = alpha sum_h ((1 - lambda) W_O,h dW_V,h ubar + dW_O,h o_h)."""

    def change(i: int) -> Tensor:
        dB = torch.zeros_like(layer.x_a[i])
        for h, head in enumerate(layer.heads):
            dV, dO = dW_V[h], dW_O[h]
            width = len(head.q[i])
            if dV is not None:
                dB = dB + (1 - layer.rule["value_lambda"]) * (head.W_O @ dV @ ubar(layer, head, i))
            if dO is not None:
                dB = dB + dO @ layer.o[i][h * width : (h + 1) * width]
        return of_stream(layer, layer.x_a[i], layer.rule["alpha"] * dB, radial)

    return expectation(layer, change)


def exact_mlp_stream(
    layer: Layer, dW_up: Tensor | None, dW_down: Tensor | None, dW_gate: Tensor | None = None, radial: bool = True
) -> Tensor:
    """E_i |d(x_m / rho_m)|^2 / d of dB = b (W_down (phi'_up .* dW_up m + phi'_gate .* dW_gate m) + dW_down phi)."""

    def change(i: int) -> Tensor:
        dB = torch.zeros_like(layer.x_m[i])
        if dW_up is not None:
            dB = dB + layer.W_down @ (slope(layer, i, "up") * (dW_up @ layer.m[i]))
        if dW_gate is not None:
            dB = dB + layer.W_down @ (slope(layer, i, "gate") * (dW_gate @ layer.m[i]))
        if dW_down is not None:
            dB = dB + dW_down @ phi(layer, i)
        return of_stream(layer, layer.x_m[i], layer.rule["b"] * dB, radial)

    return expectation(layer, change)


def of_stream(layer: Layer, x: Tensor, dB: Tensor, radial: bool) -> Tensor:
    """The exact quadratic, or |dB|^2 / (d rho^2), which is what the Kronecker factors keep of it."""
    if radial:
        return stream_quadratic(x, dB, *norm_of(layer))
    return (dB * dB).sum() / (len(x) * deviation(x, *norm_of(layer)) ** 2)


# Kronecker factors.


def ubar(layer: Layer, head: Head, i: int) -> Tensor:
    """ubar_i = sum_j a_ij u_j."""
    return mean(head.a[i], torch.stack(layer.u[: i + 1]))


def phi(layer: Layer, i: int) -> Tensor:
    gate = None if layer.W_gate is None else layer.W_gate @ layer.m[i]
    return activation(layer.rule["mlp"], layer.W_up @ layer.m[i], gate)


def slope(layer: Layer, i: int, weight: str) -> Tensor:
    """phi' of one row.

    GELU'(z) = Phi(z) + z exp(-z^2/2) / sqrt(2 pi); ReLU^2: 2 max(z, 0); swiglu: silu(g) for up, silu'(g) .* h for gate,
    silu'(g) = sigma(g) (1 + g (1 - sigma(g))).
    """
    z = layer.W_up @ layer.m[i]
    if layer.rule["mlp"] == "relu2":
        return 2.0 * torch.clamp(z, min=0.0)
    if layer.rule["mlp"] == "gelu":
        density = torch.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
        return 0.5 * (1.0 + torch.erf(z / math.sqrt(2.0))) + z * density
    assert layer.W_gate is not None
    g = layer.W_gate @ layer.m[i]
    sigma = 1.0 / (1.0 + torch.exp(-g))
    return g * sigma if weight == "up" else sigma * (1.0 + g * (1.0 - sigma)) * z


def attention_scale(layer: Layer, head: Head) -> float:
    """lambda_attn / (2 d_h H)."""
    return layer.rule["lambda_attn"] / (2.0 * len(head.q[0]) * len(layer.heads))


def query_factors(layer: Layer, h: int) -> Factors:
    """L = lambda/(2 d_h H) E_i beta_i^2 J_i^T Rot_i^T [S_i - S_i q_i q_i^T S_i / (q_i^T S_i q_i)] Rot_i J_i.

    R = E[u u^T]; S_i = Cov_{a_i}(k); the second term for bound rows only; J_i with QK-norm, Rot_i with rotary.
    """
    head = layer.heads[h]

    def left(i: int) -> Tensor:
        keys = torch.stack(head.k[: i + 1])
        S = covariance(head.a[i], keys, keys)
        if head.bound[i]:
            along = S @ head.q[i]
            S = S - torch.outer(along, along) / (head.q[i] * along).sum()
        to_query = query_map(layer, head, i)
        return head.beta[i] ** 2 * (to_query.T @ S @ to_query)

    L = attention_scale(layer, head) * expectation(layer, left)
    return {"L": L, "R": expectation(layer, lambda i: torch.outer(layer.u[i], layer.u[i]))}


def key_factors(layer: Layer, h: int) -> Factors:
    """L = lambda/(2 d_h H) E_i beta_i^2 q_i q_i^T;  R = E_i Cov_{a_i}(u).

    Bound rows: R has minus E_i[c c^T / Var(s)], c = Cov_{a_i}(u, s). QK-norm, rotary:
    L = lambda/(2 d_h H) E_i sum_j a_ij beta_i^2 r_ij r_ij^T, r_ij = J_j^T Rot_j^T q_i.
    """
    head = layer.heads[h]
    turned = layer.rule["qk_norm"] or layer.rule["rotary"]

    def left(i: int) -> Tensor:
        if not turned:
            return head.beta[i] ** 2 * torch.outer(head.q[i], head.q[i])
        total = torch.zeros(len(head.q[i]), len(head.q[i]), dtype=torch.float64)
        for j in range(i + 1):
            r = key_map(layer, head, j).T @ head.q[i]
            total = total + head.a[i][j] * head.beta[i] ** 2 * torch.outer(r, r)
        return total

    def right(i: int) -> Tensor:
        u = torch.stack(layer.u[: i + 1])
        result = covariance(head.a[i], u, u)
        if head.bound[i]:
            s = head.s[i]
            c = covariance(head.a[i], u, s)
            result = result - torch.outer(c, c) / covariance(head.a[i], s, s)
        return result

    return {"L": attention_scale(layer, head) * expectation(layer, left), "R": expectation(layer, right)}


def value_factors(layer: Layer, h: int) -> Factors:
    """L = (alpha^2/d) W_O,h^T W_O,h, times (1 - lambda)^2 with a value residual;  R = E[ubar ubar^T / rho_a^2]."""
    head, d = layer.heads[h], len(layer.u[0])
    factor = layer.rule["alpha"] * (1 - layer.rule["value_lambda"])

    def right(i: int) -> Tensor:
        rho = deviation(layer.x_a[i], *norm_of(layer))
        return torch.outer(ubar(layer, head, i), ubar(layer, head, i)) / rho**2

    return {"L": factor**2 / d * (head.W_O.T @ head.W_O), "R": expectation(layer, right)}


def output_factors(layer: Layer) -> Factors:
    """L = (alpha^2/d) I;  R = E[o o^T / rho_a^2], o all heads."""
    d = len(layer.u[0])
    L = layer.rule["alpha"] ** 2 / d * torch.eye(d, dtype=torch.float64)

    def right(i: int) -> Tensor:
        return torch.outer(layer.o[i], layer.o[i]) / deviation(layer.x_a[i], *norm_of(layer)) ** 2

    return {"L": L, "R": expectation(layer, right)}


def up_factors(layer: Layer, weight: str = "up") -> Factors:
    """L = (b^2/d) (W_down^T W_down .* E[phi' phi'^T]);  R = E[u u^T / rho_m^2], u the MLP's input; "up" or "gate"."""
    d = len(layer.u[0])
    gram = layer.W_down.T @ layer.W_down
    slopes = expectation(layer, lambda i: torch.outer(slope(layer, i, weight), slope(layer, i, weight)))

    def right(i: int) -> Tensor:
        return torch.outer(layer.m[i], layer.m[i]) / deviation(layer.x_m[i], *norm_of(layer)) ** 2

    return {"L": layer.rule["b"] ** 2 / d * (gram * slopes), "R": expectation(layer, right)}


def down_factors(layer: Layer) -> Factors:
    """L = (b^2/d) I;  R = E[phi phi^T / rho_m^2]."""
    d = len(layer.u[0])

    def right(i: int) -> Tensor:
        return torch.outer(phi(layer, i), phi(layer, i)) / deviation(layer.x_m[i], *norm_of(layer)) ** 2

    return {"L": layer.rule["b"] ** 2 / d * torch.eye(d, dtype=torch.float64), "R": expectation(layer, right)}


def all_factors(layer: Layer) -> dict[str, Factors]:
    """Every group of the layer: "W_Q.0", "W_K.0", "W_V.0", ..., "W_O", "W_up", "W_down", "W_gate" if there is one."""
    result = {}
    for h in range(len(layer.heads)):
        result[f"W_Q.{h}"] = query_factors(layer, h)
        result[f"W_K.{h}"] = key_factors(layer, h)
        result[f"W_V.{h}"] = value_factors(layer, h)
    result |= {"W_O": output_factors(layer), "W_up": up_factors(layer), "W_down": down_factors(layer)}
    if layer.W_gate is not None:
        result["W_gate"] = up_factors(layer, "gate")
    return result


def averaged(layers: Sequence[Layer]) -> dict[str, Factors]:
    """The factors over several sequences with equally many queries."""
    each = [all_factors(layer) for layer in layers]
    return {name: {side: sum(one[name][side] for one in each) / len(each) for side in ("L", "R")} for name in each[0]}


# The step.


def quadratic(factors: Factors, dW: Tensor) -> Tensor:
    """q(dW) = tr(L dW R dW^T)."""
    return torch.trace(factors["L"] @ dW @ factors["R"] @ dW.T)


def damped(matrix: Tensor, damping: float = 1e-2) -> Tensor:
    """The matrix plus damping times its mean eigenvalue, on the diagonal."""
    size = matrix.shape[0]
    return matrix + damping * torch.trace(matrix) / size * torch.eye(size, dtype=matrix.dtype)


def damped_factors(factors: Factors, damping: float = 1e-2) -> Factors:
    return {side: damped(matrix, damping) for side, matrix in factors.items()}


def inverse_root(matrix: Tensor) -> Tensor:
    """The inverse square root of a positive definite matrix, by its eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values**-0.5) @ vectors.T


def frobenius_steps(groups: Mapping[str, Factors], M: Mapping[str, Tensor], eta: float) -> dict[str, Tensor]:
    """dW_g = -mu L^-1 M R^-1, one mu for all groups: sum_g q_g = eta^2."""
    natural = {
        name: torch.linalg.inv(factors["L"]) @ M[name] @ torch.linalg.inv(factors["R"])
        for name, factors in groups.items()
    }
    total = sum(quadratic(factors, natural[name]) for name, factors in groups.items())
    return {name: -eta / torch.sqrt(total) * direction for name, direction in natural.items()}


def spectral_steps(groups: Mapping[str, Factors], M: Mapping[str, Tensor], eta: float) -> dict[str, Tensor]:
    """dW_g = -mu_g L^-1/2 polar(L^-1/2 M R^-1/2) R^-1/2, each scaled to q_g = eta^2 / number of groups."""
    result = {}
    for name, factors in groups.items():
        left, right = inverse_root(factors["L"]), inverse_root(factors["R"])
        direction = left @ polar_by_svd(left @ M[name] @ right) @ right
        mu = eta / torch.sqrt(len(groups) * quadratic(factors, direction))
        result[name] = -mu * direction
    return result


def corrected(dW: Tensor, exact_over_kronecker: float) -> Tensor:
    """dW_g / sqrt(exact / Kronecker), the ratio of the group's own quadratics."""
    return dW / math.sqrt(exact_over_kronecker)


# Radius.


def measured_change(before: Sequence[Layer], after: Sequence[Layer]) -> Tensor:
    """Sum over layers of E |du|^2/d of both normalised streams and lambda_attn times the mean of KL(A || A + dA)."""
    total = torch.zeros((), dtype=torch.float64)
    for old, new in zip(before, after, strict=True):
        for i in old.queries:
            change = torch.zeros((), dtype=torch.float64)
            for x, moved in ((old.x_a[i], new.x_a[i]), (old.x_m[i], new.x_m[i])):
                du = normalised(moved, *norm_of(old)) - normalised(x, *norm_of(old))
                change = change + (du * du).mean()
            for head, other in zip(old.heads, new.heads, strict=True):
                change = change + old.rule["lambda_attn"] / len(old.heads) * divergence(head.a[i], other.a[i])
            total = total + change / len(old.queries)
    return total


def predicted_change(at: Sequence[Layer], plus: Sequence[Layer], minus: Sequence[Layer], fraction: float) -> Tensor:
    """The same of the tangent of the whole network, by central differences of two passes at W +- fraction dW."""
    total = torch.zeros((), dtype=torch.float64)
    for old, up, down in zip(at, plus, minus, strict=True):
        for i in old.queries:
            change = torch.zeros((), dtype=torch.float64)
            for one, other in ((up.x_a[i], down.x_a[i]), (up.x_m[i], down.x_m[i])):
                du = (normalised(one, *norm_of(old)) - normalised(other, *norm_of(old))) / (2 * fraction)
                change = change + (du * du).mean()
            for head, first, second in zip(old.heads, up.heads, down.heads, strict=True):
                d_log_a = (torch.log(first.a[i]) - torch.log(second.a[i])) / (2 * fraction)
                change = change + old.rule["lambda_attn"] / len(old.heads) * tangent_quadratic(head.a[i], d_log_a)
            total = total + change / len(old.queries)
    return total


def decrease_ratio(loss_before: float, loss_after: float, G: Mapping[str, Tensor], dW: Mapping[str, Tensor]) -> float:
    """r2 = actual decrease / -<G, dW>, all of one micro-batch."""
    return (loss_before - loss_after) / -sum(float((G[name] * dW[name]).sum()) for name in dW)


def next_radius(eta: float, r1: float, r2: float, cap: float) -> float:
    """r1 > 1.5 or r2 < 0.25: eta / 1.2;  r1 < 1.2 and r2 > 0.6: 1.05 eta;  else eta; never above the schedule's cap."""
    if r1 > 1.5 or r2 < 0.25:
        eta = eta / 1.2
    elif r1 < 1.2 and r2 > 0.6:
        eta = 1.05 * eta
    return min(eta, cap)
