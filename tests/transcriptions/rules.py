"""Every depth rule, transcribed naively: one function per (template, splitting), one line per equation.

Notation
    x            state, (B, T, d); v velocity, m and s moments, r per-token covariance R
    A(.), M(.)   attention and MLP *including* their own pre-norm:
                 A(z) = Attn(LN_attn(z)), M(z) = MLP(LN_mlp(z))
    LN^a, LN^m   auxiliary LayerNorm (LN_v for velocities, LN_u for updates) of the attention / MLP substep
    LN^both      the single auxiliary LayerNorm of a layer that has only one
    superscripts a, m on a coefficient: the copy owned by attention / by the MLP;
                 without one: shared in the layer
    E, I         "explicit" and "implicit" oracle of IMEX; "outer" and "inner" oracle of Strang

The functions use elementary tensor operations only, work in any float dtype, and autograd flows through them.
They are slow on purpose: nothing is fused, batched over heads, or shared between rules.

Weights `w`
    tok_emb (V, d), pos_emb (Tmax, d), final_norm (d,) [absent for rmsnorm],
    aux_tok_emb (V, d), aux_pos_emb (Tmax, d) [optional: without them v, m start at zero],
    blocks: list of dicts with attn_norm (d,), mlp_norm (d,) [absent for rmsnorm], qkv (3d, d), out (d, d),
        up (4d, d), down (d, 4d), aux_norm {"attn", "mlp"} or {"both"} -> (d,), coef {key: raw (1,)},
        and optionally coef_value {key: value}, which replaces the mapped coefficient (for exact 0 and 1).

Rule `rule`
    template, n_head, and optionally splitting ("lie-trotter"), order ("ama"), k (1), velocity_norm ("once"),
    final_drift (False), norm ("layernorm"). A key that does not concern the chosen splitting is not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

Block = dict[str, Any]
Rule = dict[str, Any]

NORM_EPS = 1e-5
ADAM_EPS = 1e-8

DEFAULTS: Rule = {
    "splitting": "lie-trotter",
    "order": "ama",
    "k": 1,
    "velocity_norm": "once",
    "final_drift": False,
    "norm": "layernorm",
}


# ----------------------------------------------------------------------------------------------------------
# Building blocks
# ----------------------------------------------------------------------------------------------------------


def layer_norm(z: Tensor, gain: Tensor) -> Tensor:
    """LN(z) = gain * (z - mean(z)) / sqrt(var(z) + eps), biased variance over the last axis, no bias."""
    mean = z.mean(dim=-1, keepdim=True)
    var = ((z - mean) ** 2).mean(dim=-1, keepdim=True)
    return gain * (z - mean) / torch.sqrt(var + NORM_EPS)


def rms_norm(z: Tensor) -> Tensor:
    """RMSNorm(z) = z / sqrt(mean(z^2) + eps), no gain."""
    return z / torch.sqrt((z**2).mean(dim=-1, keepdim=True) + NORM_EPS)


def gelu(z: Tensor) -> Tensor:
    """GELU(z) = z Phi(z) = z (1 + erf(z / sqrt 2)) / 2."""
    return 0.5 * z * (1.0 + torch.erf(z / math.sqrt(2.0)))


def softmax(scores: Tensor) -> Tensor:
    """exp(s_j - max_i s_i) / sum_k exp(s_k - max_i s_i) over the last axis."""
    e = torch.exp(scores - scores.amax(dim=-1, keepdim=True).detach())
    return e / e.sum(dim=-1, keepdim=True)


def causal_attention(z: Tensor, qkv: Tensor, out: Tensor, n_head: int) -> Tensor:
    """concat_h( softmax(mask(Q_h K_h^T / sqrt(d_h))) V_h ) W_out^T, one head after the other.

    Token i attends to tokens j <= i.
    """
    length, width = z.shape[1], z.shape[2]
    head_dim = width // n_head
    q = z @ qkv[:width].T
    k = z @ qkv[width : 2 * width].T
    v = z @ qkv[2 * width :].T
    future = torch.zeros(length, length, dtype=torch.bool, device=z.device)
    for i in range(length):
        for j in range(i + 1, length):
            future[i, j] = True
    heads = []
    for h in range(n_head):
        part = slice(h * head_dim, (h + 1) * head_dim)
        scores = q[:, :, part] @ k[:, :, part].transpose(1, 2) / math.sqrt(head_dim)
        scores = scores.masked_fill(future, -math.inf)
        heads.append(softmax(scores) @ v[:, :, part])
    return torch.cat(heads, dim=-1) @ out.T


def pre_norm(z: Tensor, weights: dict[str, Any], key: str, rule: Rule) -> Tensor:
    """The pre-norm (or final norm): LayerNorm with the gain stored under `key`, or gainless RMSNorm."""
    if rule["norm"] == "rmsnorm":
        return rms_norm(z)
    return layer_norm(z, weights[key])


def attention(z: Tensor, b: Block, rule: Rule) -> Tensor:
    """A(z) = Attn(LN_attn(z))."""
    return causal_attention(pre_norm(z, b, "attn_norm", rule), b["qkv"], b["out"], rule["n_head"])


def mlp(z: Tensor, b: Block, rule: Rule) -> Tensor:
    """M(z) = W_down GELU(W_up LN_mlp(z))."""
    return gelu(pre_norm(z, b, "mlp_norm", rule) @ b["up"].T) @ b["down"].T


def oracle(name: str, z: Tensor, b: Block, rule: Rule) -> Tensor:
    """A(z) for the name "attn", M(z) for the name "mlp"."""
    return attention(z, b, rule) if name == "attn" else mlp(z, b, rule)


def ln_aux(z: Tensor, b: Block, key: str) -> Tensor:
    """LN_v / LN_u of this layer: always a LayerNorm with gain."""
    return layer_norm(z, b["aux_norm"][key])


def sigmoid(raw: Tensor) -> Tensor:
    """1 / (1 + exp(-raw))."""
    return 1.0 / (1.0 + torch.exp(-raw))


def softplus(raw: Tensor) -> Tensor:
    """log(1 + exp(raw))."""
    return torch.logaddexp(raw, torch.zeros_like(raw))


def coef(b: Block, key: str) -> Any:
    """Coefficient of this layer: sigmoid for mu, beta*, lambda; softplus for gamma, nu, delta.

    An entry of the same key in `coef_value` is taken as it is.
    """
    if key in b.get("coef_value", {}):
        return b["coef_value"][key]
    name = key.split("_")[0]
    if name in ("mu", "beta", "beta1", "beta2", "betaR", "lambda"):
        return sigmoid(b["coef"][key])
    if name in ("gamma", "nu", "delta"):
        return softplus(b["coef"][key])
    raise ValueError(f"unknown coefficient {key!r}")


def to_matrix(z: Tensor, rule: Rule) -> Tensor:
    """Per token R^d -> R^{n_head x head_dim}."""
    batch, length, width = z.shape
    return z.reshape(batch, length, rule["n_head"], width // rule["n_head"])


def to_vector(z: Tensor) -> Tensor:
    """Per token R^{n_head x head_dim} -> R^d."""
    return z.reshape(z.shape[0], z.shape[1], z.shape[2] * z.shape[3])


def newton_schulz(z: Tensor) -> Tensor:
    """NS5: Y = Z / max(||Z||_F, 1e-12), then five times Y <- a Y + b Y (Y^T Y) + c Y (Y^T Y)^2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    frobenius = torch.sqrt((z**2).sum(dim=(-2, -1), keepdim=True))
    y = z / torch.clamp(frobenius, min=1e-12)
    for _ in range(5):
        gram = y.transpose(-2, -1) @ y
        y = a * y + b * (y @ gram) + c * (y @ gram @ gram)
    return y


def ns5(z: Tensor, rule: Rule) -> Tensor:
    """Newton-Schulz of the token's n_head x head_dim matrix, flattened again."""
    return to_vector(newton_schulz(to_matrix(z, rule)))


def inverse_sqrt(r: Tensor) -> Tensor:
    """R^{-1/2}: R_reg = R + 1e-6 I, f = max(||R_reg||_F, 1e-6), X_0 = I,

    ten times X <- X (3 I - X (R_reg / f) X) / 2, result X / sqrt(f).
    """
    eye = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)
    r_reg = r + 1e-6 * eye
    f = torch.clamp(torch.sqrt((r_reg**2).sum(dim=(-2, -1), keepdim=True)), min=1e-6)
    x = eye.expand_as(r_reg)
    for _ in range(10):
        x = 0.5 * x @ (3.0 * eye - x @ (r_reg / f) @ x)
    return x / torch.sqrt(f)


def outer_inner(rule: Rule) -> tuple[str, str]:
    """Strang: (half-step oracle, full-step oracle). ama = attention, MLP, attention; mam the other way."""
    return ("attn", "mlp") if rule["order"] == "ama" else ("mlp", "attn")


def explicit_implicit(rule: Rule) -> tuple[str, str]:
    """IMEX: (explicit oracle, implicit oracle). ama = attention explicit, MLP implicit; mam the other way."""
    return ("attn", "mlp") if rule["order"] == "ama" else ("mlp", "attn")


# ----------------------------------------------------------------------------------------------------------
# Gradient descent (plain residual block)
# ----------------------------------------------------------------------------------------------------------


def gd_parallel(x: Tensor, b: Block, rule: Rule) -> tuple[Tensor]:
    """x' = x + A(x) + M(x)."""
    return (x + attention(x, b, rule) + mlp(x, b, rule),)


def gd_lie_trotter(x: Tensor, b: Block, rule: Rule) -> tuple[Tensor]:
    """x <- x + A(x);  x <- x + M(x)."""
    x = x + attention(x, b, rule)
    x = x + mlp(x, b, rule)
    return (x,)


def gd_strang(x: Tensor, b: Block, rule: Rule) -> tuple[Tensor]:
    """x <- x + outer(x)/2;  x <- x + inner(x);  x <- x + outer(x)/2."""
    outer, inner = outer_inner(rule)
    x = x + 0.5 * oracle(outer, x, b, rule)
    x = x + oracle(inner, x, b, rule)
    x = x + 0.5 * oracle(outer, x, b, rule)
    return (x,)


# ----------------------------------------------------------------------------------------------------------
# Heavy ball (Polyak): no lookahead
# ----------------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------------
# Nesterov (YuriiFormer)
# ----------------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------------
# Triple momentum
# ----------------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------------
# Adam: m, s carried un-normalised, no lookahead, no bias correction
# ----------------------------------------------------------------------------------------------------------


def adam_parallel(x: Tensor, m: Tensor, s: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """g = A(x) + M(x);  m' = beta1 m + (1-beta1) g;  s' = beta2 s + (1-beta2) g^2;

    x' = x + gamma LN^both(m' / (sqrt(s') + eps)).
    """
    beta1, beta2, gamma = coef(b, "beta1"), coef(b, "beta2"), coef(b, "gamma")
    g = attention(x, b, rule) + mlp(x, b, rule)
    m = beta1 * m + (1 - beta1) * g
    s = beta2 * s + (1 - beta2) * g * g
    x = x + gamma * ln_aux(m / (torch.sqrt(s) + ADAM_EPS), b, "both")
    return x, m, s


def adam_lie_trotter(x: Tensor, m: Tensor, s: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """For attention, then the MLP, each with its own coefficients and LN:

    g = O(x);  m <- beta1 m + (1-beta1) g;  s <- beta2 s + (1-beta2) g^2;
    x <- x + gamma LN(m / (sqrt(s) + eps)).
    """
    g = attention(x, b, rule)
    m = coef(b, "beta1_attn") * m + (1 - coef(b, "beta1_attn")) * g
    s = coef(b, "beta2_attn") * s + (1 - coef(b, "beta2_attn")) * g * g
    x = x + coef(b, "gamma_attn") * ln_aux(m / (torch.sqrt(s) + ADAM_EPS), b, "attn")
    g = mlp(x, b, rule)
    m = coef(b, "beta1_mlp") * m + (1 - coef(b, "beta1_mlp")) * g
    s = coef(b, "beta2_mlp") * s + (1 - coef(b, "beta2_mlp")) * g * g
    x = x + coef(b, "gamma_mlp") * ln_aux(m / (torch.sqrt(s) + ADAM_EPS), b, "mlp")
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
    x = x + 0.5 * gamma_outer * ln_aux(m / (torch.sqrt(s) + ADAM_EPS), b, outer)
    # full step
    g = oracle(inner, x, b, rule)
    m = beta1 * m + (1 - beta1) * g
    s = beta2 * s + (1 - beta2) * g * g
    x = x + gamma_inner * ln_aux(m / (torch.sqrt(s) + ADAM_EPS), b, inner)
    # half step
    g = oracle(outer, x, b, rule)
    m = beta1 * m + (1 - beta1) * g
    s = beta2 * s + (1 - beta2) * g * g
    x = x + 0.5 * gamma_outer * ln_aux(m / (torch.sqrt(s) + ADAM_EPS), b, outer)
    return x, m, s


# ----------------------------------------------------------------------------------------------------------
# AdamW: Adam with decoupled decay; the oracle sees the undecayed x, the decay is not multiplied by gamma
# ----------------------------------------------------------------------------------------------------------


def adamw_parallel(x: Tensor, m: Tensor, s: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """g = A(x) + M(x);  m' = beta1 m + (1-beta1) g;  s' = beta2 s + (1-beta2) g^2;

    x' = (1-lambda) x + gamma LN^both(m' / (sqrt(s') + eps)).
    """
    beta1, beta2, gamma, lam = coef(b, "beta1"), coef(b, "beta2"), coef(b, "gamma"), coef(b, "lambda")
    g = attention(x, b, rule) + mlp(x, b, rule)
    m = beta1 * m + (1 - beta1) * g
    s = beta2 * s + (1 - beta2) * g * g
    x = (1 - lam) * x + gamma * ln_aux(m / (torch.sqrt(s) + ADAM_EPS), b, "both")
    return x, m, s


def adamw_lie_trotter(x: Tensor, m: Tensor, s: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """For attention, then the MLP, each with its own coefficients and LN:

    g = O(x);  m <- beta1 m + (1-beta1) g;  s <- beta2 s + (1-beta2) g^2;
    x <- (1-lambda) x + gamma LN(m / (sqrt(s) + eps)).
    """
    g = attention(x, b, rule)
    m = coef(b, "beta1_attn") * m + (1 - coef(b, "beta1_attn")) * g
    s = coef(b, "beta2_attn") * s + (1 - coef(b, "beta2_attn")) * g * g
    update = ln_aux(m / (torch.sqrt(s) + ADAM_EPS), b, "attn")
    x = (1 - coef(b, "lambda_attn")) * x + coef(b, "gamma_attn") * update
    g = mlp(x, b, rule)
    m = coef(b, "beta1_mlp") * m + (1 - coef(b, "beta1_mlp")) * g
    s = coef(b, "beta2_mlp") * s + (1 - coef(b, "beta2_mlp")) * g * g
    update = ln_aux(m / (torch.sqrt(s) + ADAM_EPS), b, "mlp")
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
    x = (1 - lam_outer) * x + 0.5 * gamma_outer * ln_aux(m / (torch.sqrt(s) + ADAM_EPS), b, outer)
    # full step
    g = oracle(inner, x, b, rule)
    m = beta1 * m + (1 - beta1) * g
    s = beta2 * s + (1 - beta2) * g * g
    x = (1 - lam_inner) * x + gamma_inner * ln_aux(m / (torch.sqrt(s) + ADAM_EPS), b, inner)
    # half step
    g = oracle(outer, x, b, rule)
    m = beta1 * m + (1 - beta1) * g
    s = beta2 * s + (1 - beta2) * g * g
    x = (1 - lam_outer) * x + 0.5 * gamma_outer * ln_aux(m / (torch.sqrt(s) + ADAM_EPS), b, outer)
    return x, m, s


# ----------------------------------------------------------------------------------------------------------
# RMSProp: second moment only
# ----------------------------------------------------------------------------------------------------------


def rmsprop_parallel(x: Tensor, s: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """g = A(x) + M(x);  s' = beta2 s + (1-beta2) g^2;  x' = x + gamma LN^both(g / (sqrt(s') + eps))."""
    beta2, gamma = coef(b, "beta2"), coef(b, "gamma")
    g = attention(x, b, rule) + mlp(x, b, rule)
    s = beta2 * s + (1 - beta2) * g * g
    x = x + gamma * ln_aux(g / (torch.sqrt(s) + ADAM_EPS), b, "both")
    return x, s


def rmsprop_lie_trotter(x: Tensor, s: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """For attention, then the MLP, each with its own coefficients and LN:

    g = O(x);  s <- beta2 s + (1-beta2) g^2;  x <- x + gamma LN(g / (sqrt(s) + eps)).
    """
    g = attention(x, b, rule)
    s = coef(b, "beta2_attn") * s + (1 - coef(b, "beta2_attn")) * g * g
    x = x + coef(b, "gamma_attn") * ln_aux(g / (torch.sqrt(s) + ADAM_EPS), b, "attn")
    g = mlp(x, b, rule)
    s = coef(b, "beta2_mlp") * s + (1 - coef(b, "beta2_mlp")) * g * g
    x = x + coef(b, "gamma_mlp") * ln_aux(g / (torch.sqrt(s) + ADAM_EPS), b, "mlp")
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
    x = x + 0.5 * gamma_outer * ln_aux(g / (torch.sqrt(s) + ADAM_EPS), b, outer)
    # full step
    g = oracle(inner, x, b, rule)
    s = beta2 * s + (1 - beta2) * g * g
    x = x + gamma_inner * ln_aux(g / (torch.sqrt(s) + ADAM_EPS), b, inner)
    # half step
    g = oracle(outer, x, b, rule)
    s = beta2 * s + (1 - beta2) * g * g
    x = x + 0.5 * gamma_outer * ln_aux(g / (torch.sqrt(s) + ADAM_EPS), b, outer)
    return x, s


# ----------------------------------------------------------------------------------------------------------
# Muon: orthogonalised momentum; m is carried un-orthogonalised
# ----------------------------------------------------------------------------------------------------------


def muon_parallel(x: Tensor, m: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """g = A(x) + M(x);  m' = beta m + (1-beta) g;  x' = x + gamma LN^both(NS5(m'))."""
    beta, gamma = coef(b, "beta"), coef(b, "gamma")
    g = attention(x, b, rule) + mlp(x, b, rule)
    m = beta * m + (1 - beta) * g
    x = x + gamma * ln_aux(ns5(m, rule), b, "both")
    return x, m


def muon_lie_trotter(x: Tensor, m: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """For attention, then the MLP, each with its own coefficients and LN:

    g = O(x);  m <- beta m + (1-beta) g;  x <- x + gamma LN(NS5(m)).
    """
    g = attention(x, b, rule)
    m = coef(b, "beta_attn") * m + (1 - coef(b, "beta_attn")) * g
    x = x + coef(b, "gamma_attn") * ln_aux(ns5(m, rule), b, "attn")
    g = mlp(x, b, rule)
    m = coef(b, "beta_mlp") * m + (1 - coef(b, "beta_mlp")) * g
    x = x + coef(b, "gamma_mlp") * ln_aux(ns5(m, rule), b, "mlp")
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
    x = x + 0.5 * gamma_outer * ln_aux(ns5(m, rule), b, outer)
    # full step
    m = beta * m + (1 - beta) * oracle(inner, x, b, rule)
    x = x + gamma_inner * ln_aux(ns5(m, rule), b, inner)
    # half step
    m = beta * m + (1 - beta) * oracle(outer, x, b, rule)
    x = x + 0.5 * gamma_outer * ln_aux(ns5(m, rule), b, outer)
    return x, m


# ----------------------------------------------------------------------------------------------------------
# Ortho: orthogonalised gradient, no stream
# ----------------------------------------------------------------------------------------------------------


def ortho_parallel(x: Tensor, b: Block, rule: Rule) -> tuple[Tensor]:
    """x' = x + gamma LN^both(NS5(A(x) + M(x)))."""
    g = attention(x, b, rule) + mlp(x, b, rule)
    return (x + coef(b, "gamma") * ln_aux(ns5(g, rule), b, "both"),)


def ortho_lie_trotter(x: Tensor, b: Block, rule: Rule) -> tuple[Tensor]:
    """x <- x + gamma^a LN^a(NS5(A(x)));  x <- x + gamma^m LN^m(NS5(M(x)))."""
    x = x + coef(b, "gamma_attn") * ln_aux(ns5(attention(x, b, rule), rule), b, "attn")
    x = x + coef(b, "gamma_mlp") * ln_aux(ns5(mlp(x, b, rule), rule), b, "mlp")
    return (x,)


def ortho_strang(x: Tensor, b: Block, rule: Rule) -> tuple[Tensor]:
    """Half outer, full inner, half outer step, each x <- x + [1/2] gamma LN(NS5(O(x)))."""
    outer, inner = outer_inner(rule)
    gamma_outer, gamma_inner = coef(b, f"gamma_{outer}"), coef(b, f"gamma_{inner}")
    x = x + 0.5 * gamma_outer * ln_aux(ns5(oracle(outer, x, b, rule), rule), b, outer)
    x = x + gamma_inner * ln_aux(ns5(oracle(inner, x, b, rule), rule), b, inner)
    x = x + 0.5 * gamma_outer * ln_aux(ns5(oracle(outer, x, b, rule), rule), b, outer)
    return (x,)


# ----------------------------------------------------------------------------------------------------------
# SOAP (right factor only): m is (B, T, n_head, head_dim), r is (B, T, head_dim, head_dim)
# ----------------------------------------------------------------------------------------------------------


def soap_parallel(x: Tensor, m: Tensor, r: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """G = mat(A(x) + M(x));  m' = beta1 m + (1-beta1) G;  R' = betaR R + (1-betaR) G^T G;

    x' = x + gamma LN^both(flat(m' R'^{-1/2})).
    """
    beta1, beta_r, gamma = coef(b, "beta1"), coef(b, "betaR"), coef(b, "gamma")
    g = to_matrix(attention(x, b, rule) + mlp(x, b, rule), rule)
    m = beta1 * m + (1 - beta1) * g
    r = beta_r * r + (1 - beta_r) * g.transpose(-2, -1) @ g
    x = x + gamma * ln_aux(to_vector(m @ inverse_sqrt(r)), b, "both")
    return x, m, r


def soap_lie_trotter(x: Tensor, m: Tensor, r: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """For attention, then the MLP, each with its own coefficients and LN, on the same R:

    G = mat(O(x));  m <- beta1 m + (1-beta1) G;  R <- betaR R + (1-betaR) G^T G;
    x <- x + gamma LN(flat(m R^{-1/2})).
    """
    g = to_matrix(attention(x, b, rule), rule)
    m = coef(b, "beta1_attn") * m + (1 - coef(b, "beta1_attn")) * g
    r = coef(b, "betaR_attn") * r + (1 - coef(b, "betaR_attn")) * g.transpose(-2, -1) @ g
    x = x + coef(b, "gamma_attn") * ln_aux(to_vector(m @ inverse_sqrt(r)), b, "attn")
    g = to_matrix(mlp(x, b, rule), rule)
    m = coef(b, "beta1_mlp") * m + (1 - coef(b, "beta1_mlp")) * g
    r = coef(b, "betaR_mlp") * r + (1 - coef(b, "betaR_mlp")) * g.transpose(-2, -1) @ g
    x = x + coef(b, "gamma_mlp") * ln_aux(to_vector(m @ inverse_sqrt(r)), b, "mlp")
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
    x = x + 0.5 * gamma_outer * ln_aux(to_vector(m @ inverse_sqrt(r)), b, outer)
    # full step
    g = to_matrix(oracle(inner, x, b, rule), rule)
    m = beta1 * m + (1 - beta1) * g
    r = beta_r * r + (1 - beta_r) * g.transpose(-2, -1) @ g
    x = x + gamma_inner * ln_aux(to_vector(m @ inverse_sqrt(r)), b, inner)
    # half step
    g = to_matrix(oracle(outer, x, b, rule), rule)
    m = beta1 * m + (1 - beta1) * g
    r = beta_r * r + (1 - beta_r) * g.transpose(-2, -1) @ g
    x = x + 0.5 * gamma_outer * ln_aux(to_vector(m @ inverse_sqrt(r)), b, outer)
    return x, m, r


# ----------------------------------------------------------------------------------------------------------
# Shampoo (right factor only): r is (B, T, head_dim, head_dim), no momentum
# ----------------------------------------------------------------------------------------------------------


def shampoo_parallel(x: Tensor, r: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """G = mat(A(x) + M(x));  R' = betaR R + (1-betaR) G^T G;  x' = x + gamma LN^both(flat(G R'^{-1/2}))."""
    beta_r, gamma = coef(b, "betaR"), coef(b, "gamma")
    g = to_matrix(attention(x, b, rule) + mlp(x, b, rule), rule)
    r = beta_r * r + (1 - beta_r) * g.transpose(-2, -1) @ g
    x = x + gamma * ln_aux(to_vector(g @ inverse_sqrt(r)), b, "both")
    return x, r


def shampoo_lie_trotter(x: Tensor, r: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """For attention, then the MLP, each with its own coefficients and LN, on the same R:

    G = mat(O(x));  R <- betaR R + (1-betaR) G^T G;  x <- x + gamma LN(flat(G R^{-1/2})).
    """
    g = to_matrix(attention(x, b, rule), rule)
    r = coef(b, "betaR_attn") * r + (1 - coef(b, "betaR_attn")) * g.transpose(-2, -1) @ g
    x = x + coef(b, "gamma_attn") * ln_aux(to_vector(g @ inverse_sqrt(r)), b, "attn")
    g = to_matrix(mlp(x, b, rule), rule)
    r = coef(b, "betaR_mlp") * r + (1 - coef(b, "betaR_mlp")) * g.transpose(-2, -1) @ g
    x = x + coef(b, "gamma_mlp") * ln_aux(to_vector(g @ inverse_sqrt(r)), b, "mlp")
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
    x = x + 0.5 * gamma_outer * ln_aux(to_vector(g @ inverse_sqrt(r)), b, outer)
    # full step
    g = to_matrix(oracle(inner, x, b, rule), rule)
    r = beta_r * r + (1 - beta_r) * g.transpose(-2, -1) @ g
    x = x + gamma_inner * ln_aux(to_vector(g @ inverse_sqrt(r)), b, inner)
    # half step
    g = to_matrix(oracle(outer, x, b, rule), rule)
    r = beta_r * r + (1 - beta_r) * g.transpose(-2, -1) @ g
    x = x + 0.5 * gamma_outer * ln_aux(to_vector(g @ inverse_sqrt(r)), b, outer)
    return x, r


# ----------------------------------------------------------------------------------------------------------
# The whole model
# ----------------------------------------------------------------------------------------------------------

LAYERS: dict[tuple[str, str], Callable[..., tuple[Tensor, ...]]] = {
    ("gd", "parallel"): gd_parallel,
    ("gd", "lie-trotter"): gd_lie_trotter,
    ("gd", "strang"): gd_strang,
    ("heavy-ball", "parallel"): heavy_ball_parallel,
    ("heavy-ball", "lie-trotter"): heavy_ball_lie_trotter,
    ("heavy-ball", "strang"): heavy_ball_strang,
    ("heavy-ball", "imex"): heavy_ball_imex,
    ("heavy-ball", "symplectic-euler"): heavy_ball_symplectic_euler,
    ("nesterov", "parallel"): nesterov_parallel,
    ("nesterov", "lie-trotter"): nesterov_lie_trotter,
    ("nesterov", "strang"): nesterov_strang,
    ("nesterov", "imex"): nesterov_imex,
    ("nesterov", "symplectic-euler"): nesterov_symplectic_euler,
    ("triple-momentum", "parallel"): triple_momentum_parallel,
    ("triple-momentum", "lie-trotter"): triple_momentum_lie_trotter,
    ("triple-momentum", "strang"): triple_momentum_strang,
    ("triple-momentum", "imex"): triple_momentum_imex,
    ("adam", "parallel"): adam_parallel,
    ("adam", "lie-trotter"): adam_lie_trotter,
    ("adam", "strang"): adam_strang,
    ("adamw", "parallel"): adamw_parallel,
    ("adamw", "lie-trotter"): adamw_lie_trotter,
    ("adamw", "strang"): adamw_strang,
    ("rmsprop", "parallel"): rmsprop_parallel,
    ("rmsprop", "lie-trotter"): rmsprop_lie_trotter,
    ("rmsprop", "strang"): rmsprop_strang,
    ("muon", "parallel"): muon_parallel,
    ("muon", "lie-trotter"): muon_lie_trotter,
    ("muon", "strang"): muon_strang,
    ("ortho", "parallel"): ortho_parallel,
    ("ortho", "lie-trotter"): ortho_lie_trotter,
    ("ortho", "strang"): ortho_strang,
    ("soap", "parallel"): soap_parallel,
    ("soap", "lie-trotter"): soap_lie_trotter,
    ("soap", "strang"): soap_strang,
    ("shampoo", "parallel"): shampoo_parallel,
    ("shampoo", "lie-trotter"): shampoo_lie_trotter,
    ("shampoo", "strang"): shampoo_strang,
}


def complete_rule(rule: Rule) -> Rule:
    """The rule with its defaults filled in; ValueError where the combination has no meaning."""
    full = {**DEFAULTS, **rule}
    template, splitting = full["template"], full["splitting"]
    if (template, splitting) not in LAYERS:
        raise ValueError(f"no rule for template {template!r} with splitting {splitting!r}")
    if full["norm"] not in ("layernorm", "rmsnorm"):
        raise ValueError(f"unknown norm {full['norm']!r}")
    if splitting in ("strang", "imex") and full["order"] not in ("ama", "mam"):
        raise ValueError(f"unknown order {full['order']!r}")
    if splitting == "imex":
        if full["k"] < 1:
            raise ValueError("IMEX needs k >= 1")
        if template == "heavy-ball" and full["k"] > 1:
            raise ValueError("heavy ball has mu = 0: IMEX refinements after the first are identical")
        if full["velocity_norm"] not in ("once", "every"):
            raise ValueError(f"unknown velocity_norm {full['velocity_norm']!r}")
    return full


def embed(tokens: Tensor, token_table: Tensor, position_table: Tensor) -> Tensor:
    """token_table[token at t] + position_table[t]."""
    return token_table[tokens] + position_table[: tokens.shape[1]]


def start(tokens: Tensor, w: dict[str, Any], rule: Rule) -> tuple[Tensor, ...]:
    """State before the first layer: x embedded; v, m from their own tables, or zero; s = 1; R = I."""
    template = rule["template"]
    x = embed(tokens, w["tok_emb"], w["pos_emb"])
    if template in ("gd", "ortho"):
        return (x,)
    if template == "rmsprop":
        return x, torch.ones_like(x)
    head_dim = x.shape[-1] // rule["n_head"]
    identities = torch.eye(head_dim, dtype=x.dtype, device=x.device).expand(*tokens.shape, head_dim, head_dim)
    if template == "shampoo":
        return x, identities
    aux = torch.zeros_like(x)
    if "aux_tok_emb" in w:
        aux = embed(tokens, w["aux_tok_emb"], w["aux_pos_emb"])
    if template in ("adam", "adamw"):
        return x, aux, torch.ones_like(x)
    if template == "soap":
        return x, to_matrix(aux, rule), identities
    return x, aux  # the velocity v, or the momentum m of muon


def head(x: Tensor, w: dict[str, Any], rule: Rule) -> Tensor:
    """LN_final(x) tok_emb^T; every other stream is discarded."""
    return pre_norm(x, w, "final_norm", rule) @ w["tok_emb"].T


def logits(tokens: Tensor, w: dict[str, Any], rule: Rule) -> Tensor:
    """Logits (B, T, V) of the model whose every layer takes one step of `rule`."""
    rule = complete_rule(rule)
    layer = LAYERS[rule["template"], rule["splitting"]]
    state = start(tokens, w, rule)
    for b in w["blocks"]:
        state = layer(*state, b, rule)
    x = state[0]
    if rule["splitting"] == "symplectic-euler" and rule["final_drift"]:
        v = state[1]
        x = x + coef(w["blocks"][-1], "delta") * v
    return head(x, w, rule)


def hybrid_logits(tokens: Tensor, w: dict[str, Any], rule: Rule, momentum_layers: Collection[int]) -> Tensor:
    """Layers in `momentum_layers` take the Lie-Trotter momentum step; the others are plain residual blocks

    x <- x + A(x), x <- x + M(x) with the same A, M (no LN_v, no coefficients), and pass v through unchanged.
    The cutoff mode with cutoff c is momentum_layers = range(c): v is then never read again.
    """
    rule = complete_rule(rule)
    template = rule["template"]
    if template not in ("heavy-ball", "nesterov", "triple-momentum") or rule["splitting"] != "lie-trotter":
        raise ValueError("hybrid inference is defined for velocity templates with Lie-Trotter splitting")
    for index in momentum_layers:
        if not 0 <= index < len(w["blocks"]):
            raise ValueError(f"there is no layer {index}")
    layer = LAYERS[template, "lie-trotter"]
    x, v = start(tokens, w, rule)
    for index, b in enumerate(w["blocks"]):
        if index in momentum_layers:
            x, v = layer(x, v, b, rule)
        else:
            (x,) = gd_lie_trotter(x, b, rule)
    return head(x, w, rule)
