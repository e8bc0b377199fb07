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

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from transcriptions.optimizers import polar_by_svd
from transcriptions.trust_layers import (
    Head,
    Layer,
    activation,
    covariance,
    deviation,
    divergence,
    expectation,
    key_map,
    mean,
    norm_of,
    normalised,
    query_map,
    row_quadratic,
    stream_quadratic,
    tangent_quadratic,
)

Factors = dict[str, Tensor]  # "L" and "R"


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
    L = lambda/(2 d_h H) E_i sum_j a_ij beta_i^2 r_ij r_ij^T, r_ij = J_j^T Rot_j^T q_i. Constrained attention: in L a
    row counts t_i / E[t], t_i = tr of its term of R (docs/trust-region.md).
    """
    head, constrained = layer.heads[h], layer.rule["attention"] != "softmax"
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

    R = expectation(layer, right)
    L = (
        expectation(layer, lambda i: left(i) * right(i).trace() / R.trace())
        if constrained
        else expectation(layer, left)
    )
    return {"L": attention_scale(layer, head) * L, "R": R}


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
    found = {name: {side: sum(one[name][side] for one in each) / len(each) for side in ("L", "R")} for name in each[0]}
    if layers[0].rule["attention"] != "softmax":  # t_i / E[t] with the mean over all of them
        for name in [name for name in found if name.startswith("W_K")]:
            traces = [one[name]["R"].trace() for one in each]
            found[name]["L"] = sum(t * one[name]["L"] for t, one in zip(traces, each, strict=True)) / sum(traces)
    return found


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
