"""Attention oracles A(z) = Attn(LN_attn(z)): softmax, entropy, kl, linear; notation in parts.py.

`rule["memory"]` holds what one call leaves for the next (value residual, prior) and who sees whom.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from transcriptions.constrained import constrained_weights
from transcriptions.parts import (
    Block,
    Memory,
    Rule,
    count,
    free_coef,
    mlp,
    pre_norm,
    rms_norm,
    scaled,
    sigmoid,
    softmax,
    softplus,
    turn,
)


def attention(z: Tensor, b: Block, rule: Rule) -> Tensor:
    """A(z) = Attn(LN_attn(z))."""
    u = pre_norm(z, b, "attn_norm", rule)
    answer = linear_attention(u, b, rule) if rule["attention"] == "linear" else multi_head_attention(u, b, rule)
    return scaled(answer, b, "attn", rule)


def oracle(name: str, z: Tensor, b: Block, rule: Rule) -> Tensor:
    """A(z) for the name "attn", M(z) for the name "mlp"."""
    return attention(z, b, rule) if name == "attn" else mlp(z, b, rule)


def multi_head_attention(u: Tensor, b: Block, rule: Rule) -> Tensor:
    """concat_h( a_h V_h ) W_out^T with the weights a_h of softmax, entropy or kl, one head after the other.

    s_ij = q_i.k_j / sqrt(d_h), per head; qk_norm: q, k <- RMSNorm(q), RMSNorm(k); rotary: q_i, k_j <- R_i q_i, R_j k_j.
    """
    width = u.shape[2]
    head_dim = width // rule["n_head"]
    q = u @ b["qkv"][:width].T
    k = u @ b["qkv"][width : 2 * width].T
    v = with_value_tables(with_value_residual(u @ b["qkv"][2 * width :].T, b, rule), b, rule)
    scores, values = [], []
    for h in range(rule["n_head"]):
        part = slice(h * head_dim, (h + 1) * head_dim)
        q_h, k_h = q[:, :, part], k[:, :, part]
        if rule["qk_norm"]:
            q_h, k_h = rms_norm(q_h), rms_norm(k_h)
        if rule["positions"] == "rotary":
            q_h, k_h = turn_each(q_h), turn_each(k_h)
        scores.append(q_h @ k_h.transpose(1, 2) / math.sqrt(head_dim))
        values.append(v[:, :, part])
    if rule["attention"] == "softmax":
        weights = [softmax(scores[h].masked_fill(hidden(scores[h], rule), -math.inf)) for h in range(rule["n_head"])]
    else:
        weights = constrained_weights(scores, u, b, rule)
    return torch.cat([weights[h] @ values[h] for h in range(rule["n_head"])], dim=-1) @ b["out"].T


def hidden(scores: Tensor, rule: Rule) -> Tensor:
    """True where token i does not see token j."""
    result = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    for s, rows in enumerate(rule["memory"].visible):
        for i, seen in enumerate(rows):
            result[s, i, seen] = False
    return result


def turn_each(z: Tensor) -> Tensor:
    """Token i of every sequence turned by R_i."""
    return torch.stack([turn(z[:, i], i) for i in range(z.shape[1])], dim=1)


def with_value_residual(values: Tensor, b: Block, rule: Rule) -> Tensor:
    """v = (1 - lambda) v_cur + lambda v_1; v_1 are the values of the model's very first call, which keeps them.

    lambda: 1/2 ("fixed"), this layer's coefficient as it is ("free") or behind a sigmoid ("unit").
    """
    memory: Memory = rule["memory"]
    if rule["value_residual"] == "off":
        return values
    if memory.first_values is None:
        memory.first_values = values
        return values
    if rule["value_residual"] == "fixed":
        lam = 0.5
    elif rule["value_residual"] == "free":
        lam = free_coef(b, "lambda_v")
    else:
        lam = b["coef_value"]["lambda_v"] if "lambda_v" in b.get("coef_value", {}) else sigmoid(b["coef"]["lambda_v"])
    return (1 - lam) * values + lam * memory.first_values


def with_value_tables(values: Tensor, b: Block, rule: Rule) -> Tensor:
    """v + lambda (F[token] + Q[position]), lambda this layer's coefficient as it is."""
    return values + free_coef(b, "lambda_table") * rule["memory"].value_rows if rule["value_tables"] else values


def linear_attention(u: Tensor, b: Block, rule: Rule) -> Tensor:
    """answer_i = h (1/n_i) sum_{j seen by i} (u_j^T A u_i) v_j, v_j = V u_j; no output projection."""
    values = with_value_tables(with_value_residual(u @ b["V"].T, b, rule), b, rule)
    h = softplus(b["attn_coef"]["h"])
    sequences = []
    for s, rows in enumerate(rule["memory"].visible):
        answers = []
        for i, seen in enumerate(rows):
            total = torch.zeros_like(u[s, i])
            for j in seen:
                total = total + (u[s, j] @ b["A"] @ u[s, i]) * values[s, j]
            answers.append(h * total / count(seen, rule))
        sequences.append(torch.stack(answers))
    return torch.stack(sequences)
