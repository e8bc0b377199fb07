"""Building blocks of the transcriptions: norms, oracles, coefficient maps, per-token matrix functions.

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
