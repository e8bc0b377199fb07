"""Gradient descent, velocity rules and tables without dynamics, one function per splitting; notation in parts.py."""

from __future__ import annotations

from torch import Tensor

from transcriptions.attend import attention, oracle
from transcriptions.parts import (
    Block,
    Rule,
    coef,
    explicit_implicit,
    gain,
    kept,
    ln_aux,
    mlp,
    outer_inner,
)


def gd_parallel(x: Tensor, b: Block, rule: Rule) -> tuple[Tensor]:
    """x' = x + alpha (A(x) + M(x)): one step size for the one step (alpha = 1 unless given)."""
    alpha = gain(b, "alpha", rule)
    return (kept(x, b, "both", rule) + alpha * attention(x, b, rule) + alpha * mlp(x, b, rule),)


def gd_lie_trotter(x: Tensor, b: Block, rule: Rule) -> tuple[Tensor]:
    """x <- x + alpha A(x);  x <- x + beta M(x) (alpha = beta = 1 unless given)."""
    x = kept(x, b, "attn", rule) + gain(b, "alpha", rule) * attention(x, b, rule)
    x = kept(x, b, "mlp", rule) + gain(b, "beta", rule) * mlp(x, b, rule)
    return (x,)


def gd_strang(x: Tensor, b: Block, rule: Rule) -> tuple[Tensor]:
    """x <- x + c outer(x)/2;  x <- x + c' inner(x);  x <- x + c outer(x)/2;

    c is alpha where the oracle is attention, beta where it is the MLP (both 1 unless given).
    """
    outer, inner = outer_inner(rule)
    step = {"attn": gain(b, "alpha", rule), "mlp": gain(b, "beta", rule)}
    x = kept(x, b, outer, rule) + 0.5 * step[outer] * oracle(outer, x, b, rule)
    x = kept(x, b, inner, rule) + step[inner] * oracle(inner, x, b, rule)
    x = kept(x, b, outer, rule) + 0.5 * step[outer] * oracle(outer, x, b, rule)
    return (x,)


def heavy_ball_parallel(x: Tensor, v: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """v' = LN^both(beta v + gamma A(x) + gamma M(x));  x' = x + v'."""
    beta, gamma = coef(b, "beta"), coef(b, "gamma")
    v = ln_aux(beta * v + gamma * attention(x, b, rule) + gamma * mlp(x, b, rule), b, "both")
    x = x + v
    return x, v


def heavy_ball_lie_trotter(x: Tensor, v: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """v <- LN^a(beta^a v + gamma^a A(x)), x <- x + v;  v <- LN^m(beta^m v + gamma^m M(x)), x <- x + v."""
    v = ln_aux(coef(b, "beta_attn") * v + coef(b, "gamma_attn") * attention(x, b, rule), b, "attn")
    x = x + v
    v = ln_aux(coef(b, "beta_mlp") * v + coef(b, "gamma_mlp") * mlp(x, b, rule), b, "mlp")
    x = x + v
    return x, v


def heavy_ball_strang(x: Tensor, v: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """Half step of the outer oracle (gamma/2), full step of the inner one, half step of the outer one;

    each step is v <- LN(beta v + [1/2] gamma g(x)), x <- x + v, with one beta for the layer.
    """
    outer, inner = outer_inner(rule)
    beta = coef(b, "beta")
    gamma_outer, gamma_inner = coef(b, f"gamma_{outer}"), coef(b, f"gamma_{inner}")
    v = ln_aux(beta * v + 0.5 * gamma_outer * oracle(outer, x, b, rule), b, outer)
    x = x + v
    v = ln_aux(beta * v + gamma_inner * oracle(inner, x, b, rule), b, inner)
    x = x + v
    v = ln_aux(beta * v + 0.5 * gamma_outer * oracle(outer, x, b, rule), b, outer)
    x = x + v
    return x, v


def heavy_ball_imex(x: Tensor, v: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """V_half = beta v + gamma^E E(x);  v' = LN(beta V_half + gamma^I I(x));  x' = x + v'.

    mu = 0, so only k = 1 exists. velocity_norm "every" also normalises V_half.
    """
    explicit, implicit = explicit_implicit(rule)
    beta = coef(b, "beta")
    v_half = beta * v + coef(b, f"gamma_{explicit}") * oracle(explicit, x, b, rule)
    if rule["velocity_norm"] == "every":
        v_half = ln_aux(v_half, b, explicit)
    v = beta * v_half + coef(b, f"gamma_{implicit}") * oracle(implicit, x, b, rule)
    v = ln_aux(v, b, implicit if rule["velocity_norm"] == "every" else "both")
    x = x + v
    return x, v


def heavy_ball_symplectic_euler(x: Tensor, v: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """Attention kick: v <- LN^a(beta v - gamma^a A(x));  drift: x <- x + delta v;

    MLP kick: v <- LN^m(beta v - gamma^m M(x)); x does not move after it.
    """
    beta, delta = coef(b, "beta"), coef(b, "delta")
    v = ln_aux(beta * v - coef(b, "gamma_attn") * attention(x, b, rule), b, "attn")
    x = x + delta * v
    v = ln_aux(beta * v - coef(b, "gamma_mlp") * mlp(x, b, rule), b, "mlp")
    return x, v


def nesterov_parallel(x: Tensor, v: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """X_in = x + mu v;  v' = LN^both(beta v + gamma A(X_in) + gamma M(X_in));  x' = x + v'."""
    mu, beta, gamma = coef(b, "mu"), coef(b, "beta"), coef(b, "gamma")
    x_in = x + mu * v
    v = ln_aux(beta * v + gamma * attention(x_in, b, rule) + gamma * mlp(x_in, b, rule), b, "both")
    x = x + v
    return x, v


def nesterov_lie_trotter(x: Tensor, v: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """X_in = x + mu^a v;  v <- LN^a(beta^a v + gamma^a A(X_in));  x <- x + v;

    X_in = x + mu^m v;  v <- LN^m(beta^m v + gamma^m M(X_in));  x <- x + v.
    """
    x_in = x + coef(b, "mu_attn") * v
    v = ln_aux(coef(b, "beta_attn") * v + coef(b, "gamma_attn") * attention(x_in, b, rule), b, "attn")
    x = x + v
    x_in = x + coef(b, "mu_mlp") * v
    v = ln_aux(coef(b, "beta_mlp") * v + coef(b, "gamma_mlp") * mlp(x_in, b, rule), b, "mlp")
    x = x + v
    return x, v


def nesterov_strang(x: Tensor, v: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """PRK-Verlet: half step of the outer oracle (gamma/2), full inner step, half outer step; each step is

    X_in = x + mu v;  v <- LN(beta v + [1/2] gamma g(X_in));  x <- x + v, with one beta for the layer.
    """
    outer, inner = outer_inner(rule)
    beta = coef(b, "beta")
    mu_outer, mu_inner = coef(b, f"mu_{outer}"), coef(b, f"mu_{inner}")
    gamma_outer, gamma_inner = coef(b, f"gamma_{outer}"), coef(b, f"gamma_{inner}")
    # half step
    x_in = x + mu_outer * v
    v = ln_aux(beta * v + 0.5 * gamma_outer * oracle(outer, x_in, b, rule), b, outer)
    x = x + v
    # full step
    x_in = x + mu_inner * v
    v = ln_aux(beta * v + gamma_inner * oracle(inner, x_in, b, rule), b, inner)
    x = x + v
    # half step
    x_in = x + mu_outer * v
    v = ln_aux(beta * v + 0.5 * gamma_outer * oracle(outer, x_in, b, rule), b, outer)
    x = x + v
    return x, v


def nesterov_imex(x: Tensor, v: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """V_half = beta v + gamma^E E(x + mu^E v);  V^(0) = V_half;

    for j = 1..k:  V^(j) = beta V_half + gamma^I I(x + mu^I V^(j-1));  v' = LN^both(V^(k));  x' = x + v'.
    velocity_norm "every": LN^E on V_half and LN^I on every V^(j) instead of the one at the end.
    """
    explicit, implicit = explicit_implicit(rule)
    beta = coef(b, "beta")
    x_look = x + coef(b, f"mu_{explicit}") * v
    v_half = beta * v + coef(b, f"gamma_{explicit}") * oracle(explicit, x_look, b, rule)
    if rule["velocity_norm"] == "every":
        v_half = ln_aux(v_half, b, explicit)
    v_j = v_half
    for _ in range(rule["k"]):
        x_j = x + coef(b, f"mu_{implicit}") * v_j
        v_j = beta * v_half + coef(b, f"gamma_{implicit}") * oracle(implicit, x_j, b, rule)
        if rule["velocity_norm"] == "every":
            v_j = ln_aux(v_j, b, implicit)
    if rule["velocity_norm"] == "once":
        v_j = ln_aux(v_j, b, "both")
    x = x + v_j
    return x, v_j


def nesterov_symplectic_euler(x: Tensor, v: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """Attention kick: v <- LN^a(beta v - gamma^a A(x + mu v));  drift: x <- x + delta v;

    MLP kick: v <- LN^m(beta v - gamma^m M(x + mu v)); x does not move after it.
    """
    mu, beta, delta = coef(b, "mu"), coef(b, "beta"), coef(b, "delta")
    x_in = x + mu * v
    v = ln_aux(beta * v - coef(b, "gamma_attn") * attention(x_in, b, rule), b, "attn")
    x = x + delta * v
    x_in = x + mu * v
    v = ln_aux(beta * v - coef(b, "gamma_mlp") * mlp(x_in, b, rule), b, "mlp")
    return x, v


def triple_momentum_parallel(x: Tensor, v: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """X_in = x + mu v;  v' = LN^both(beta v + gamma A(X_in) + gamma M(X_in));  x' = x + nu v'."""
    mu, beta, gamma, nu = coef(b, "mu"), coef(b, "beta"), coef(b, "gamma"), coef(b, "nu")
    x_in = x + mu * v
    v = ln_aux(beta * v + gamma * attention(x_in, b, rule) + gamma * mlp(x_in, b, rule), b, "both")
    x = x + nu * v
    return x, v


def triple_momentum_lie_trotter(x: Tensor, v: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """X_in = x + mu^a v;  v <- LN^a(beta^a v + gamma^a A(X_in));  x <- x + nu^a v;

    X_in = x + mu^m v;  v <- LN^m(beta^m v + gamma^m M(X_in));  x <- x + nu^m v.
    """
    x_in = x + coef(b, "mu_attn") * v
    v = ln_aux(coef(b, "beta_attn") * v + coef(b, "gamma_attn") * attention(x_in, b, rule), b, "attn")
    x = x + coef(b, "nu_attn") * v
    x_in = x + coef(b, "mu_mlp") * v
    v = ln_aux(coef(b, "beta_mlp") * v + coef(b, "gamma_mlp") * mlp(x_in, b, rule), b, "mlp")
    x = x + coef(b, "nu_mlp") * v
    return x, v


def triple_momentum_strang(x: Tensor, v: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """Half outer, full inner, half outer step; a half step halves gamma and nothing else (nu in full):

    X_in = x + mu v;  v <- LN(beta v + [1/2] gamma g(X_in));  x <- x + nu v, with one beta for the layer.
    """
    outer, inner = outer_inner(rule)
    beta = coef(b, "beta")
    mu_outer, mu_inner = coef(b, f"mu_{outer}"), coef(b, f"mu_{inner}")
    gamma_outer, gamma_inner = coef(b, f"gamma_{outer}"), coef(b, f"gamma_{inner}")
    nu_outer, nu_inner = coef(b, f"nu_{outer}"), coef(b, f"nu_{inner}")
    # half step
    x_in = x + mu_outer * v
    v = ln_aux(beta * v + 0.5 * gamma_outer * oracle(outer, x_in, b, rule), b, outer)
    x = x + nu_outer * v
    # full step
    x_in = x + mu_inner * v
    v = ln_aux(beta * v + gamma_inner * oracle(inner, x_in, b, rule), b, inner)
    x = x + nu_inner * v
    # half step
    x_in = x + mu_outer * v
    v = ln_aux(beta * v + 0.5 * gamma_outer * oracle(outer, x_in, b, rule), b, outer)
    x = x + nu_outer * v
    return x, v


def triple_momentum_imex(x: Tensor, v: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """V_half = beta v + gamma^E E(x + mu^E v);  V^(0) = V_half;

    for j = 1..k:  V^(j) = beta V_half + gamma^I I(x + mu^I V^(j-1));  v' = LN^both(V^(k));  x' = x + nu v'.
    velocity_norm "every": LN^E on V_half and LN^I on every V^(j) instead of the one at the end.
    """
    explicit, implicit = explicit_implicit(rule)
    beta, nu = coef(b, "beta"), coef(b, "nu")
    x_look = x + coef(b, f"mu_{explicit}") * v
    v_half = beta * v + coef(b, f"gamma_{explicit}") * oracle(explicit, x_look, b, rule)
    if rule["velocity_norm"] == "every":
        v_half = ln_aux(v_half, b, explicit)
    v_j = v_half
    for _ in range(rule["k"]):
        x_j = x + coef(b, f"mu_{implicit}") * v_j
        v_j = beta * v_half + coef(b, f"gamma_{implicit}") * oracle(implicit, x_j, b, rule)
        if rule["velocity_norm"] == "every":
            v_j = ln_aux(v_j, b, implicit)
    if rule["velocity_norm"] == "once":
        v_j = ln_aux(v_j, b, "both")
    x = x + nu * v_j
    return x, v_j


def tables_parallel(x: Tensor, w_0: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """X_in = x + mu LN^both(w_0);  x' = x + A(X_in) + M(X_in); w_0 is the same in every layer."""
    x_in = x + coef(b, "mu") * ln_aux(w_0, b, "both")
    return x + attention(x_in, b, rule) + mlp(x_in, b, rule), w_0


def tables_lie_trotter(x: Tensor, w_0: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """x <- x + A(x + mu^a LN^a(w_0));  x <- x + M(x + mu^m LN^m(w_0))."""
    x = x + attention(x + coef(b, "mu_attn") * ln_aux(w_0, b, "attn"), b, rule)
    x = x + mlp(x + coef(b, "mu_mlp") * ln_aux(w_0, b, "mlp"), b, rule)
    return x, w_0


def tables_strang(x: Tensor, w_0: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """x <- x + outer(.)/2;  x <- x + inner(.);  x <- x + outer(.)/2, asked at x + mu LN(w_0), its own mu and LN."""
    outer, inner = outer_inner(rule)
    for name, share in ((outer, 0.5), (inner, 1.0), (outer, 0.5)):
        x = x + share * oracle(name, x + coef(b, f"mu_{name}") * ln_aux(w_0, b, name), b, rule)
    return x, w_0
