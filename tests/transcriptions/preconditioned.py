"""Adaptive and matrix rules, one function per splitting; notation in parts.py."""

from __future__ import annotations

import torch
from torch import Tensor

from transcriptions.attend import attention, oracle
from transcriptions.parts import (
    ADAM_EPS,
    Block,
    Rule,
    coef,
    inverse_sqrt,
    ln_u,
    mlp,
    ns5,
    outer_inner,
    to_matrix,
    to_vector,
)


def adam_parallel(x: Tensor, m: Tensor, s: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """g = A(x) + M(x);  m' = beta1 m + (1-beta1) g;  s' = beta2 s + (1-beta2) g^2;

    x' = x + gamma LN^both(m' / (sqrt(s') + eps)).
    """
    beta1, beta2, gamma = coef(b, "beta1"), coef(b, "beta2"), coef(b, "gamma")
    g = attention(x, b, rule) + mlp(x, b, rule)
    m = beta1 * m + (1 - beta1) * g
    s = beta2 * s + (1 - beta2) * g * g
    x = x + gamma * ln_u(m / (torch.sqrt(s) + ADAM_EPS), b, "both", rule)
    return x, m, s


def adam_lie_trotter(x: Tensor, m: Tensor, s: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """For attention, then the MLP, each with its own coefficients and LN:

    g = O(x);  m <- beta1 m + (1-beta1) g;  s <- beta2 s + (1-beta2) g^2;
    x <- x + gamma LN(m / (sqrt(s) + eps)).
    """
    g = attention(x, b, rule)
    m = coef(b, "beta1_attn") * m + (1 - coef(b, "beta1_attn")) * g
    s = coef(b, "beta2_attn") * s + (1 - coef(b, "beta2_attn")) * g * g
    x = x + coef(b, "gamma_attn") * ln_u(m / (torch.sqrt(s) + ADAM_EPS), b, "attn", rule)
    g = mlp(x, b, rule)
    m = coef(b, "beta1_mlp") * m + (1 - coef(b, "beta1_mlp")) * g
    s = coef(b, "beta2_mlp") * s + (1 - coef(b, "beta2_mlp")) * g * g
    x = x + coef(b, "gamma_mlp") * ln_u(m / (torch.sqrt(s) + ADAM_EPS), b, "mlp", rule)
    return x, m, s


def adam_strang(x: Tensor, m: Tensor, s: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Half outer, full inner, half outer step; moments in full, gamma halved in a half step:

    g = O(x);  m <- beta1 m + (1-beta1) g;  s <- beta2 s + (1-beta2) g^2;
    x <- x + [1/2] gamma LN(m / (sqrt(s) + eps)).  beta1, beta2 shared in the layer, gamma and LN per oracle.
    """
    outer, inner = outer_inner(rule)
    beta1, beta2 = coef(b, "beta1"), coef(b, "beta2")
    gamma_outer, gamma_inner = coef(b, f"gamma_{outer}"), coef(b, f"gamma_{inner}")
    # half step
    g = oracle(outer, x, b, rule)
    m = beta1 * m + (1 - beta1) * g
    s = beta2 * s + (1 - beta2) * g * g
    x = x + 0.5 * gamma_outer * ln_u(m / (torch.sqrt(s) + ADAM_EPS), b, outer, rule)
    # full step
    g = oracle(inner, x, b, rule)
    m = beta1 * m + (1 - beta1) * g
    s = beta2 * s + (1 - beta2) * g * g
    x = x + gamma_inner * ln_u(m / (torch.sqrt(s) + ADAM_EPS), b, inner, rule)
    # half step
    g = oracle(outer, x, b, rule)
    m = beta1 * m + (1 - beta1) * g
    s = beta2 * s + (1 - beta2) * g * g
    x = x + 0.5 * gamma_outer * ln_u(m / (torch.sqrt(s) + ADAM_EPS), b, outer, rule)
    return x, m, s


def adamw_parallel(x: Tensor, m: Tensor, s: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """g = A(x) + M(x);  m' = beta1 m + (1-beta1) g;  s' = beta2 s + (1-beta2) g^2;

    x' = (1-lambda) x + gamma LN^both(m' / (sqrt(s') + eps)).
    """
    beta1, beta2, gamma, lam = coef(b, "beta1"), coef(b, "beta2"), coef(b, "gamma"), coef(b, "lambda")
    g = attention(x, b, rule) + mlp(x, b, rule)
    m = beta1 * m + (1 - beta1) * g
    s = beta2 * s + (1 - beta2) * g * g
    x = (1 - lam) * x + gamma * ln_u(m / (torch.sqrt(s) + ADAM_EPS), b, "both", rule)
    return x, m, s


def adamw_lie_trotter(x: Tensor, m: Tensor, s: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """For attention, then the MLP, each with its own coefficients and LN:

    g = O(x);  m <- beta1 m + (1-beta1) g;  s <- beta2 s + (1-beta2) g^2;
    x <- (1-lambda) x + gamma LN(m / (sqrt(s) + eps)).
    """
    g = attention(x, b, rule)
    m = coef(b, "beta1_attn") * m + (1 - coef(b, "beta1_attn")) * g
    s = coef(b, "beta2_attn") * s + (1 - coef(b, "beta2_attn")) * g * g
    update = ln_u(m / (torch.sqrt(s) + ADAM_EPS), b, "attn", rule)
    x = (1 - coef(b, "lambda_attn")) * x + coef(b, "gamma_attn") * update
    g = mlp(x, b, rule)
    m = coef(b, "beta1_mlp") * m + (1 - coef(b, "beta1_mlp")) * g
    s = coef(b, "beta2_mlp") * s + (1 - coef(b, "beta2_mlp")) * g * g
    update = ln_u(m / (torch.sqrt(s) + ADAM_EPS), b, "mlp", rule)
    x = (1 - coef(b, "lambda_mlp")) * x + coef(b, "gamma_mlp") * update
    return x, m, s


def adamw_strang(x: Tensor, m: Tensor, s: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Half outer, full inner, half outer step; moments and decay in full, gamma halved in a half step:

    g = O(x);  m <- beta1 m + (1-beta1) g;  s <- beta2 s + (1-beta2) g^2;
    x <- (1-lambda) x + [1/2] gamma LN(m / (sqrt(s) + eps)).
    beta1, beta2 shared in the layer; gamma, lambda and LN per oracle.
    """
    outer, inner = outer_inner(rule)
    beta1, beta2 = coef(b, "beta1"), coef(b, "beta2")
    gamma_outer, gamma_inner = coef(b, f"gamma_{outer}"), coef(b, f"gamma_{inner}")
    lam_outer, lam_inner = coef(b, f"lambda_{outer}"), coef(b, f"lambda_{inner}")
    # half step
    g = oracle(outer, x, b, rule)
    m = beta1 * m + (1 - beta1) * g
    s = beta2 * s + (1 - beta2) * g * g
    x = (1 - lam_outer) * x + 0.5 * gamma_outer * ln_u(m / (torch.sqrt(s) + ADAM_EPS), b, outer, rule)
    # full step
    g = oracle(inner, x, b, rule)
    m = beta1 * m + (1 - beta1) * g
    s = beta2 * s + (1 - beta2) * g * g
    x = (1 - lam_inner) * x + gamma_inner * ln_u(m / (torch.sqrt(s) + ADAM_EPS), b, inner, rule)
    # half step
    g = oracle(outer, x, b, rule)
    m = beta1 * m + (1 - beta1) * g
    s = beta2 * s + (1 - beta2) * g * g
    x = (1 - lam_outer) * x + 0.5 * gamma_outer * ln_u(m / (torch.sqrt(s) + ADAM_EPS), b, outer, rule)
    return x, m, s


def rmsprop_parallel(x: Tensor, s: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """g = A(x) + M(x);  s' = beta2 s + (1-beta2) g^2;  x' = x + gamma LN^both(g / (sqrt(s') + eps))."""
    beta2, gamma = coef(b, "beta2"), coef(b, "gamma")
    g = attention(x, b, rule) + mlp(x, b, rule)
    s = beta2 * s + (1 - beta2) * g * g
    x = x + gamma * ln_u(g / (torch.sqrt(s) + ADAM_EPS), b, "both", rule)
    return x, s


def rmsprop_lie_trotter(x: Tensor, s: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """For attention, then the MLP, each with its own coefficients and LN:

    g = O(x);  s <- beta2 s + (1-beta2) g^2;  x <- x + gamma LN(g / (sqrt(s) + eps)).
    """
    g = attention(x, b, rule)
    s = coef(b, "beta2_attn") * s + (1 - coef(b, "beta2_attn")) * g * g
    x = x + coef(b, "gamma_attn") * ln_u(g / (torch.sqrt(s) + ADAM_EPS), b, "attn", rule)
    g = mlp(x, b, rule)
    s = coef(b, "beta2_mlp") * s + (1 - coef(b, "beta2_mlp")) * g * g
    x = x + coef(b, "gamma_mlp") * ln_u(g / (torch.sqrt(s) + ADAM_EPS), b, "mlp", rule)
    return x, s


def rmsprop_strang(x: Tensor, s: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """Half outer, full inner, half outer step; s in full, gamma halved in a half step:

    g = O(x);  s <- beta2 s + (1-beta2) g^2;  x <- x + [1/2] gamma LN(g / (sqrt(s) + eps)).
    """
    outer, inner = outer_inner(rule)
    beta2 = coef(b, "beta2")
    gamma_outer, gamma_inner = coef(b, f"gamma_{outer}"), coef(b, f"gamma_{inner}")
    # half step
    g = oracle(outer, x, b, rule)
    s = beta2 * s + (1 - beta2) * g * g
    x = x + 0.5 * gamma_outer * ln_u(g / (torch.sqrt(s) + ADAM_EPS), b, outer, rule)
    # full step
    g = oracle(inner, x, b, rule)
    s = beta2 * s + (1 - beta2) * g * g
    x = x + gamma_inner * ln_u(g / (torch.sqrt(s) + ADAM_EPS), b, inner, rule)
    # half step
    g = oracle(outer, x, b, rule)
    s = beta2 * s + (1 - beta2) * g * g
    x = x + 0.5 * gamma_outer * ln_u(g / (torch.sqrt(s) + ADAM_EPS), b, outer, rule)
    return x, s


def muon_parallel(x: Tensor, m: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """g = A(x) + M(x);  m' = beta m + (1-beta) g;  x' = x + gamma LN^both(NS5(m'))."""
    beta, gamma = coef(b, "beta"), coef(b, "gamma")
    g = attention(x, b, rule) + mlp(x, b, rule)
    m = beta * m + (1 - beta) * g
    x = x + gamma * ln_u(ns5(m, rule), b, "both", rule)
    return x, m


def muon_lie_trotter(x: Tensor, m: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """For attention, then the MLP, each with its own coefficients and LN:

    g = O(x);  m <- beta m + (1-beta) g;  x <- x + gamma LN(NS5(m)).
    """
    g = attention(x, b, rule)
    m = coef(b, "beta_attn") * m + (1 - coef(b, "beta_attn")) * g
    x = x + coef(b, "gamma_attn") * ln_u(ns5(m, rule), b, "attn", rule)
    g = mlp(x, b, rule)
    m = coef(b, "beta_mlp") * m + (1 - coef(b, "beta_mlp")) * g
    x = x + coef(b, "gamma_mlp") * ln_u(ns5(m, rule), b, "mlp", rule)
    return x, m


def muon_strang(x: Tensor, m: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """Half outer, full inner, half outer step; m in full, gamma halved in a half step:

    g = O(x);  m <- beta m + (1-beta) g;  x <- x + [1/2] gamma LN(NS5(m)).
    """
    outer, inner = outer_inner(rule)
    beta = coef(b, "beta")
    gamma_outer, gamma_inner = coef(b, f"gamma_{outer}"), coef(b, f"gamma_{inner}")
    # half step
    m = beta * m + (1 - beta) * oracle(outer, x, b, rule)
    x = x + 0.5 * gamma_outer * ln_u(ns5(m, rule), b, outer, rule)
    # full step
    m = beta * m + (1 - beta) * oracle(inner, x, b, rule)
    x = x + gamma_inner * ln_u(ns5(m, rule), b, inner, rule)
    # half step
    m = beta * m + (1 - beta) * oracle(outer, x, b, rule)
    x = x + 0.5 * gamma_outer * ln_u(ns5(m, rule), b, outer, rule)
    return x, m


def ortho_parallel(x: Tensor, b: Block, rule: Rule) -> tuple[Tensor]:
    """x' = x + gamma LN^both(NS5(A(x) + M(x)))."""
    g = attention(x, b, rule) + mlp(x, b, rule)
    return (x + coef(b, "gamma") * ln_u(ns5(g, rule), b, "both", rule),)


def ortho_lie_trotter(x: Tensor, b: Block, rule: Rule) -> tuple[Tensor]:
    """x <- x + gamma^a LN^a(NS5(A(x)));  x <- x + gamma^m LN^m(NS5(M(x)))."""
    x = x + coef(b, "gamma_attn") * ln_u(ns5(attention(x, b, rule), rule), b, "attn", rule)
    x = x + coef(b, "gamma_mlp") * ln_u(ns5(mlp(x, b, rule), rule), b, "mlp", rule)
    return (x,)


def ortho_strang(x: Tensor, b: Block, rule: Rule) -> tuple[Tensor]:
    """Half outer, full inner, half outer step, each x <- x + [1/2] gamma LN(NS5(O(x)))."""
    outer, inner = outer_inner(rule)
    gamma_outer, gamma_inner = coef(b, f"gamma_{outer}"), coef(b, f"gamma_{inner}")
    x = x + 0.5 * gamma_outer * ln_u(ns5(oracle(outer, x, b, rule), rule), b, outer, rule)
    x = x + gamma_inner * ln_u(ns5(oracle(inner, x, b, rule), rule), b, inner, rule)
    x = x + 0.5 * gamma_outer * ln_u(ns5(oracle(outer, x, b, rule), rule), b, outer, rule)
    return (x,)


def soap_parallel(x: Tensor, m: Tensor, r: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """G = mat(A(x) + M(x));  m' = beta1 m + (1-beta1) G;  R' = betaR R + (1-betaR) G^T G;

    x' = x + gamma LN^both(flat(m' R'^{-1/2})).
    """
    beta1, beta_r, gamma = coef(b, "beta1"), coef(b, "betaR"), coef(b, "gamma")
    g = to_matrix(attention(x, b, rule) + mlp(x, b, rule), rule)
    m = beta1 * m + (1 - beta1) * g
    r = beta_r * r + (1 - beta_r) * g.transpose(-2, -1) @ g
    x = x + gamma * ln_u(to_vector(m @ inverse_sqrt(r)), b, "both", rule)
    return x, m, r


def soap_lie_trotter(x: Tensor, m: Tensor, r: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """For attention, then the MLP, each with its own coefficients and LN, on the same R:

    G = mat(O(x));  m <- beta1 m + (1-beta1) G;  R <- betaR R + (1-betaR) G^T G;
    x <- x + gamma LN(flat(m R^{-1/2})).
    """
    g = to_matrix(attention(x, b, rule), rule)
    m = coef(b, "beta1_attn") * m + (1 - coef(b, "beta1_attn")) * g
    r = coef(b, "betaR_attn") * r + (1 - coef(b, "betaR_attn")) * g.transpose(-2, -1) @ g
    x = x + coef(b, "gamma_attn") * ln_u(to_vector(m @ inverse_sqrt(r)), b, "attn", rule)
    g = to_matrix(mlp(x, b, rule), rule)
    m = coef(b, "beta1_mlp") * m + (1 - coef(b, "beta1_mlp")) * g
    r = coef(b, "betaR_mlp") * r + (1 - coef(b, "betaR_mlp")) * g.transpose(-2, -1) @ g
    x = x + coef(b, "gamma_mlp") * ln_u(to_vector(m @ inverse_sqrt(r)), b, "mlp", rule)
    return x, m, r


def soap_strang(x: Tensor, m: Tensor, r: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Half outer, full inner, half outer step; m and R in full, gamma halved in a half step:

    G = mat(O(x));  m <- beta1 m + (1-beta1) G;  R <- betaR R + (1-betaR) G^T G;
    x <- x + [1/2] gamma LN(flat(m R^{-1/2})).  beta1, betaR shared in the layer, gamma and LN per oracle.
    """
    outer, inner = outer_inner(rule)
    beta1, beta_r = coef(b, "beta1"), coef(b, "betaR")
    gamma_outer, gamma_inner = coef(b, f"gamma_{outer}"), coef(b, f"gamma_{inner}")
    # half step
    g = to_matrix(oracle(outer, x, b, rule), rule)
    m = beta1 * m + (1 - beta1) * g
    r = beta_r * r + (1 - beta_r) * g.transpose(-2, -1) @ g
    x = x + 0.5 * gamma_outer * ln_u(to_vector(m @ inverse_sqrt(r)), b, outer, rule)
    # full step
    g = to_matrix(oracle(inner, x, b, rule), rule)
    m = beta1 * m + (1 - beta1) * g
    r = beta_r * r + (1 - beta_r) * g.transpose(-2, -1) @ g
    x = x + gamma_inner * ln_u(to_vector(m @ inverse_sqrt(r)), b, inner, rule)
    # half step
    g = to_matrix(oracle(outer, x, b, rule), rule)
    m = beta1 * m + (1 - beta1) * g
    r = beta_r * r + (1 - beta_r) * g.transpose(-2, -1) @ g
    x = x + 0.5 * gamma_outer * ln_u(to_vector(m @ inverse_sqrt(r)), b, outer, rule)
    return x, m, r


def shampoo_parallel(x: Tensor, r: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """G = mat(A(x) + M(x));  R' = betaR R + (1-betaR) G^T G;  x' = x + gamma LN^both(flat(G R'^{-1/2}))."""
    beta_r, gamma = coef(b, "betaR"), coef(b, "gamma")
    g = to_matrix(attention(x, b, rule) + mlp(x, b, rule), rule)
    r = beta_r * r + (1 - beta_r) * g.transpose(-2, -1) @ g
    x = x + gamma * ln_u(to_vector(g @ inverse_sqrt(r)), b, "both", rule)
    return x, r


def shampoo_lie_trotter(x: Tensor, r: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """For attention, then the MLP, each with its own coefficients and LN, on the same R:

    G = mat(O(x));  R <- betaR R + (1-betaR) G^T G;  x <- x + gamma LN(flat(G R^{-1/2})).
    """
    g = to_matrix(attention(x, b, rule), rule)
    r = coef(b, "betaR_attn") * r + (1 - coef(b, "betaR_attn")) * g.transpose(-2, -1) @ g
    x = x + coef(b, "gamma_attn") * ln_u(to_vector(g @ inverse_sqrt(r)), b, "attn", rule)
    g = to_matrix(mlp(x, b, rule), rule)
    r = coef(b, "betaR_mlp") * r + (1 - coef(b, "betaR_mlp")) * g.transpose(-2, -1) @ g
    x = x + coef(b, "gamma_mlp") * ln_u(to_vector(g @ inverse_sqrt(r)), b, "mlp", rule)
    return x, r


def shampoo_strang(x: Tensor, r: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """Half outer, full inner, half outer step; R in full, gamma halved in a half step:

    G = mat(O(x));  R <- betaR R + (1-betaR) G^T G;  x <- x + [1/2] gamma LN(flat(G R^{-1/2})).
    """
    outer, inner = outer_inner(rule)
    beta_r = coef(b, "betaR")
    gamma_outer, gamma_inner = coef(b, f"gamma_{outer}"), coef(b, f"gamma_{inner}")
    # half step
    g = to_matrix(oracle(outer, x, b, rule), rule)
    r = beta_r * r + (1 - beta_r) * g.transpose(-2, -1) @ g
    x = x + 0.5 * gamma_outer * ln_u(to_vector(g @ inverse_sqrt(r)), b, outer, rule)
    # full step
    g = to_matrix(oracle(inner, x, b, rule), rule)
    r = beta_r * r + (1 - beta_r) * g.transpose(-2, -1) @ g
    x = x + gamma_inner * ln_u(to_vector(g @ inverse_sqrt(r)), b, inner, rule)
    # half step
    g = to_matrix(oracle(outer, x, b, rule), rule)
    r = beta_r * r + (1 - beta_r) * g.transpose(-2, -1) @ g
    x = x + 0.5 * gamma_outer * ln_u(to_vector(g @ inverse_sqrt(r)), b, outer, rule)
    return x, r
