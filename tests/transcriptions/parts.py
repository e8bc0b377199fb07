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
    tok_emb (V, d), pos_emb (Tmax, d) [absent for rotary positions], final_norm (d,) [absent for rmsnorm],
    aux_tok_emb (V, d), aux_pos_emb (Tmax, d) [optional: without them v, m, y start at zero],
    value_tok_emb (V, d), value_pos_emb (Tmax, d) [F and Q of the value tables], head (V, d) [if it is not tok_emb],
    blocks: list of dicts with attn_norm (d,), mlp_norm (d,) [absent for rmsnorm],
        up (4d, d), down (d, 4d), aux_norm {"attn", "mlp"} or {"both"} -> (d,), coef {key: raw (1,)},
        and optionally coef_value {key: value}, which replaces the mapped coefficient (for exact 0 and 1);
        for the attention:
            softmax, entropy, kl   qkv (3d, d), out (d, d); attn_coef "r", "keep" (n_head,), ratio_map (n_head, d)
            kl, learned prior      prior_table (n_head, Tmax)
            linear                 A (d, d), V (d, d), attn_coef "h"
            hamiltonian            query (d, d), key (d, d), root (d, d) or value (d, d), attn_coef "kappa"
            linear-hamiltonian     A (d, d), V (d, d)

Rule `rule`
    template, n_head, and optionally everything in DEFAULTS; `ratio` for entropy and kl with a fixed target. A key that
    does not concern the chosen template, splitting or attention is not read. `report`, an optional dictionary, receives
    counts of the rows that a constrained attention solved, left inactive or capped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Block = dict[str, Any]
Rule = dict[str, Any]

NORM_EPS = 1e-5
ADAM_EPS = 1e-8

PRECONDITIONED = ("adam", "adamw", "rmsprop", "muon", "ortho", "soap", "shampoo")

DEFAULTS: Rule = {
    "splitting": "lie-trotter",
    "order": "ama",
    "k": 1,
    "velocity_norm": "once",
    "final_drift": False,
    "norm": "layernorm",
    "alpha": 1.0,  # gd: gains of the attention's and the MLP's answer where they are not learned
    "beta": 1.0,
    "attention": "softmax",
    "positions": "learned",
    "document_separator": None,
    "qk_norm": False,
    "value_residual": "off",
    "value_tables": False,
    "mlp": "gelu",
    "embedding_skip": False,
    "output_norm": False,
    "scale": "off",
    "denseformer": False,
    "dilation": 1,
    "period": 1,
    "unet": False,
    "logit_softcap": None,
    # linear and Hamiltonian attention
    "n0": 0,
    # entropy and kl
    "target": "fixed",
    "target_form": "log",
    "constraint": "equality",
    "tau": 1.0,
    "prior": "uniform",
    "detach_prior": False,
    # Hamiltonian attention and its integrators
    "force": "row",
    "kappa": 1.0,
    "score_bound": 12.0,
    "kernel": "single",
    "symmetric": False,
    "metric": "learned",
    "system": "mean-field",
    "alpha_k": "learned",
    "t0": 1.0,
    "damping": "loglin",
    "lookahead": False,
    "clock_gradient": False,
    "history": "variable",
    "etd": "cox-matthews",
    "etd_start": "exponential",
    "mlp_step": "B",
}


@dataclass
class Memory:
    """What one forward pass carries from one attention call to the next, besides the streams.

    visible[s][i] lists the tokens j that token i of sequence s sees.
    """

    visible: list[list[list[int]]]
    first_values: Tensor | None = None  # v_1 of the value residual
    value_rows: Tensor | None = None  # F[token] + Q[position] of the value tables, (B, T, d)
    log_weights: dict[tuple[int, int, int], Tensor] | None = None  # log a of the latest call, by (sequence, head, i)
    waiting: Tensor | None = None  # A(z), until M(z) of the same turn is there too: the output norm takes their sum


def visible_tokens(tokens: Tensor, separator: int | None) -> list[list[list[int]]]:
    """Token i sees j <= i of its own document; a separator is the first token of a new document."""
    result = []
    for sequence in tokens.tolist():
        document, documents = 0, []
        for token in sequence:
            document += int(separator is not None and token == separator)
            documents.append(document)
        length = len(sequence)
        result.append([[j for j in range(i + 1) if documents[j] == documents[i]] for i in range(length)])
    return result


def count(seen: list[int], rule: Rule) -> int:
    """n_i, the number of visible tokens, or the constant N_0 in its place."""
    return rule["n0"] if rule["n0"] > 0 else len(seen)


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


def turn(z: Tensor, position: int) -> Tensor:
    """R_p z: coordinates (i, i + D/2) of the last axis turned by the angle p * 10000^(-2i/D); R_p^T = R_{-p}."""
    width = z.shape[-1]
    half = width // 2
    index = torch.arange(half, dtype=z.dtype, device=z.device)
    angle = position * 10000.0 ** (-2.0 * index / width)
    a, b = z[..., :half], z[..., half:]
    return torch.cat([a * torch.cos(angle) - b * torch.sin(angle), a * torch.sin(angle) + b * torch.cos(angle)], dim=-1)


def pre_norm(z: Tensor, weights: dict[str, Any], key: str, rule: Rule) -> Tensor:
    """The pre-norm (or final norm): LayerNorm with the gain stored under `key`, or gainless RMSNorm."""
    if rule["norm"] == "rmsnorm":
        return rms_norm(z)
    return layer_norm(z, weights[key])


def mlp(z: Tensor, b: Block, rule: Rule) -> Tensor:
    """M(z) = W_down act(W_up LN_mlp(z)), act = GELU, or ReLU^2: the square of what is positive, else 0."""
    h = pre_norm(z, b, "mlp_norm", rule) @ b["up"].T
    act = gelu(h) if rule["mlp"] == "gelu" else torch.where(h > 0, h * h, torch.zeros_like(h))
    return scaled(act @ b["down"].T, b, "mlp", rule)


def scaled(answer: Tensor, b: Block, turn: str, rule: Rule) -> Tensor:
    """s_l .* T(z), s_l of this turn, or of the one turn with both oracles; `ln_u` has that of a preconditioned rule."""
    answer = output_normed(answer, b, turn, rule)
    return answer if rule["template"] in PRECONDITIONED else scale(b, turn, rule) * answer


def output_normed(answer: Tensor, b: Block, turn: str, rule: Rule) -> Tensor:
    """s .* norm(T(z)), s of this turn, norm of the model's kind and without a gain of its own.

    One turn with both oracles: s .* norm(A(z) + M(z)). Every rule adds A(z) and M(z), asked in this order, with equal
    factors: it is told 0 for A(z) and all of it for M(z).
    """
    if not rule["output_norm"]:
        return answer
    memory: Memory = rule["memory"]
    key = f"output_gain_{turn}"
    if rule["splitting"] == "parallel":
        if turn == "attn":
            assert memory.waiting is None
            memory.waiting = answer
            return torch.zeros_like(answer)
        assert memory.waiting is not None
        answer, memory.waiting, key = memory.waiting + answer, None, "output_gain"
    s = free_coef(b, key)
    return s * rms_norm(answer) if rule["norm"] == "rmsnorm" else layer_norm(answer, s)


def scale(b: Block, turn: str, rule: Rule) -> Any:
    if rule["scale"] == "off":
        return 1.0
    return free_coef(b, "scale" if rule["splitting"] == "parallel" else f"scale_{turn}")


def kept(x: Tensor, b: Block, turn: str, rule: Rule) -> Tensor:
    """a_l x, where a_l is learned."""
    if rule["scale"] != "scalar":
        return x
    return free_coef(b, "keep_x" if rule["splitting"] == "parallel" else f"keep_x_{turn}") * x


def ln_u(z: Tensor, b: Block, key: str, rule: Rule) -> Tensor:
    """s_l .* LN_u(z): what a preconditioned rule adds to x, but for gamma."""
    return scale(b, key, rule) * ln_aux(z, b, key)


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
    """Coefficient of this layer: sigmoid for mu, beta*, lambda, alpha; softplus for gamma, nu, delta, h, c.

    An entry of the same key in `coef_value` is taken as it is.
    """
    if key in b.get("coef_value", {}):
        return b["coef_value"][key]
    name = key.split("_")[0]
    if name in ("mu", "beta", "beta1", "beta2", "betaR", "lambda", "alpha"):
        return sigmoid(b["coef"][key])
    if name in ("gamma", "nu", "delta", "h", "c"):
        return softplus(b["coef"][key])
    raise ValueError(f"unknown coefficient {key!r}")


def free_coef(b: Block, key: str) -> Any:
    """A coefficient without a map."""
    return b["coef_value"][key] if key in b.get("coef_value", {}) else b["coef"][key]


def gain(b: Block, key: str, rule: Rule) -> Any:
    """alpha, beta of gradient descent: positive and learned if this layer has them, else the rule's constants."""
    if key in b.get("coef_value", {}):
        return b["coef_value"][key]
    return softplus(b["coef"][key]) if key in b.get("coef", {}) else rule[key]


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
