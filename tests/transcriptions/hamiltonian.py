"""Hamiltonian attention and its integrators: state x, momentum y, clock t, and the history of the layer before.

    u = LN_attn(x), or LN_attn(x + mu_la y) with look-ahead
    F(u, y)   drift field: dx/dt = F
    G(u, y)   force:       dy/dt = G - alpha(t) y
    n_i       number of tokens that token i sees (or the constant N_0); all sums over j run over those tokens
    eta(t)    c_log ln t + c_lin t,   alpha(t) = eta'(t) = c_log / t + c_lin
    s         eta(t + h_y) - eta(t) = c_log ln(1 + h_y / t) + c_lin h_y, kept in [-12, 12]

One block: the attention step of the integrator, x, y -> x_half, LN_Y(y*), then the MLP substep A, B or C.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transcriptions.parts import (
    Block,
    Rule,
    coef,
    count,
    ln_aux,
    mlp,
    pre_norm,
    softplus,
    turn,
)

TEMPLATES = ("plain-euler", "presymp-euler", "exp-euler", "conformal-euler", "ab2", "etd-ab2")
RIDGE = 1e-6
ETA_CLIP = 12.0
STEP_FLOOR = 1e-8

# -- the two fields, for one sequence u, y (T, d); seen[i] lists the tokens that token i sees


def metric(b: Block, rule: Rule) -> Tensor:
    """learned: B = C C^T + 1e-6 I;  derived: B = Sym(W_V (A + 1e-6 I)^{-1}), A = tau W_Q^T W_K."""
    if rule["metric"] == "learned":
        root = b["root"]
        return root @ root.T + RIDGE * torch.eye(root.shape[0], dtype=root.dtype, device=root.device)
    ((query, key, tau),) = kernels(b, rule)
    a = tau * query.T @ key
    product = b["value"] @ torch.linalg.inv(a + RIDGE * torch.eye(a.shape[0], dtype=a.dtype, device=a.device))
    return 0.5 * (product + product.T)


def kernels(b: Block, rule: Rule) -> list[tuple[Tensor, Tensor, float]]:
    """(W_Q, W_K, tau) of every kernel tau (W_Q u_i).(W_K u_j).

    single: the whole matrices, tau = 1 / (n_h sqrt(d_h));  per-head: rows of head h, tau = 1 / sqrt(d_h).
    """
    query = b["query"]
    key = query if rule["symmetric"] else b["key"]
    n_head = rule["n_head"]
    head_dim = query.shape[0] // n_head
    if rule["kernel"] == "single":
        return [(query, key, 1.0 / (n_head * math.sqrt(head_dim)))]
    parts = [slice(h * head_dim, (h + 1) * head_dim) for h in range(n_head)]
    return [(query[part], key[part], 1.0 / math.sqrt(head_dim)) for part in parts]


def place(z: Tensor, position: int, rule: Rule) -> Tensor:
    """R_p z with rotary positions, else z."""
    return turn(z, position) if rule["positions"] == "rotary" else z


def score(u_i: Tensor, u_j: Tensor, i: int, j: int, kernel: tuple[Tensor, Tensor, float], rule: Rule) -> Tensor:
    """S_ij = u_i^T A_ij u_j, A_ij = tau W_Q^T R_i^T R_j W_K, then S <- s_max tanh(S / s_max)."""
    query, key, tau = kernel
    s = tau * (place(query @ u_i, i, rule) @ place(key @ u_j, j, rule))
    bound = rule["score_bound"]
    return bound * torch.tanh(s / bound) if bound > 0 else s


def direction(u_j: Tensor, i: int, j: int, kernel: tuple[Tensor, Tensor, float], rule: Rule) -> Tensor:
    """A_ij u_j = tau W_Q^T R_i^T R_j W_K u_j; the score's soft bound does not enter."""
    query, key, tau = kernel
    return tau * (query.T @ place(place(key @ u_j, j, rule), -i, rule))


def exponentials(u: Tensor, seen: list[list[int]], kernel: Any, rule: Rule) -> dict[tuple[int, int], Tensor]:
    """M_ij = exp(S_ij) / n_i."""
    return {
        (i, j): torch.exp(score(u[i], u[j], i, j, kernel, rule)) / count(seen[i], rule)
        for i in range(len(seen))
        for j in seen[i]
    }


def row_sums(m: dict[tuple[int, int], Tensor], seen: list[list[int]]) -> list[Tensor]:
    """z_i = sum_j M_ij."""
    return [sum((m[i, j] for j in seen[i][1:]), start=m[i, seen[i][0]]) for i in range(len(seen))]


def softmax_drift(u: Tensor, y: Tensor, seen: list[list[int]], b: Block, rule: Rule) -> Tensor:
    """F_i = B y_i / z_i, the mean over the kernels."""
    big_b = metric(b, rule)
    fields = []
    for kernel in kernels(b, rule):
        z = row_sums(exponentials(u, seen, kernel, rule), seen)
        fields.append(torch.stack([big_b @ y[i] / z[i] for i in range(len(seen))]))
    return torch.stack(fields).mean(dim=0)


def softmax_force(u: Tensor, y: Tensor, seen: list[list[int]], b: Block, rule: Rule) -> Tensor:
    """With a_i = (y_i^T B y_i) / d and R_i = a_i / z_i^2, the mean over the kernels of

    row:    G_i = sum_j M_ij [ (R_i + R_j) / 2 + kappa ] A u_j
    query:  G_i = sum_j M_ij [ (R_i + kappa) / 2 ] A u_j.
    """
    big_b = metric(b, rule)
    kappa = softplus(b["attn_coef"]["kappa"]) if "kappa" in b.get("attn_coef", {}) else rule["kappa"]
    width = u.shape[1]
    fields = []
    for kernel in kernels(b, rule):
        m = exponentials(u, seen, kernel, rule)
        z = row_sums(m, seen)
        r = [(y[i] @ big_b @ y[i]) / width / z[i] ** 2 for i in range(len(seen))]
        rows = []
        for i in range(len(seen)):
            total = torch.zeros_like(u[i])
            for j in seen[i]:
                factor = 0.5 * (r[i] + r[j]) + kappa if rule["force"] == "row" else 0.5 * (r[i] + kappa)
                total = total + m[i, j] * factor * direction(u[j], i, j, kernel, rule)
            rows.append(total)
        fields.append(torch.stack(rows))
    return torch.stack(fields).mean(dim=0)


def particle_force(u: Tensor, y: Tensor, seen: list[list[int]], b: Block, rule: Rule) -> Tensor:
    """The force of (34) with a lower triangular M: M_ij = exp(S_ij), r = M 1, R_i = |y_i|_B^2 / r_i^2,

    row:    G_i = (N/2) sum_j M_ij (R_i + R_j + 2 kappa) A u_j, which the paper has with kappa = 1
    query:  G_i = (N/2) sum_j M_ij (R_i + kappa) A u_j.
    """
    big_b = metric(b, rule)
    kappa = softplus(b["attn_coef"]["kappa"]) if "kappa" in b.get("attn_coef", {}) else rule["kappa"]
    N = rule["n0"]
    fields = []
    for kernel in kernels(b, rule):
        M = {(i, j): torch.exp(score(u[i], u[j], i, j, kernel, rule)) for i in range(len(seen)) for j in seen[i]}
        r = row_sums(M, seen)
        R = [(y[i] @ big_b @ y[i]) / r[i] ** 2 for i in range(len(seen))]
        rows = []
        for i in range(len(seen)):
            total = torch.zeros_like(u[i])
            for j in seen[i]:
                bracket = R[i] + R[j] + 2 * kappa if rule["force"] == "row" else R[i] + kappa
                total = total + N / 2 * M[i, j] * bracket * direction(u[j], i, j, kernel, rule)
            rows.append(total)
        fields.append(torch.stack(rows))
    return torch.stack(fields).mean(dim=0)


def linear_drift(u: Tensor, y: Tensor, seen: list[list[int]], b: Block, rule: Rule) -> Tensor:
    """F_i = (1/n_i) sum_j (u_j^T A u_i) y_j."""
    rows = []
    for i in range(len(seen)):
        total = torch.zeros_like(y[i])
        for j in seen[i]:
            total = total + (u[j] @ b["A"] @ u[i]) * y[j]
        rows.append(total / count(seen[i], rule))
    return torch.stack(rows)


def linear_force(u: Tensor, y: Tensor, seen: list[list[int]], b: Block, rule: Rule) -> Tensor:
    """G_i = -(1/n_i) sum_j <y_i, y_j> A u_j + V u_i."""
    rows = []
    for i in range(len(seen)):
        total = torch.zeros_like(u[i])
        for j in seen[i]:
            total = total + (y[i] @ y[j]) * (b["A"] @ u[j])
        rows.append(-total / count(seen[i], rule) + b["V"] @ u[i])
    return torch.stack(rows)


def normalised_input(x: Tensor, y: Tensor, b: Block, rule: Rule) -> Tensor:
    """u = LN_attn(x), or LN_attn(x + mu_la y) with look-ahead, in every layer."""
    return pre_norm(x + coef(b, "mu_la") * y if rule["lookahead"] else x, b, "attn_norm", rule)


def drift(u: Tensor, y: Tensor, b: Block, rule: Rule) -> Tensor:
    """F(u, y), every sequence by itself."""
    field = linear_drift if rule["attention"] == "linear-hamiltonian" else softmax_drift
    return torch.stack([field(u[s], y[s], seen, b, rule) for s, seen in enumerate(rule["memory"].visible)])


def force(u: Tensor, y: Tensor, b: Block, rule: Rule) -> Tensor:
    """G(u, y), every sequence by itself."""
    softmax = particle_force if rule["system"] == "particles" else softmax_force
    field = linear_force if rule["attention"] == "linear-hamiltonian" else softmax
    return torch.stack([field(u[s], y[s], seen, b, rule) for s, seen in enumerate(rule["memory"].visible)])


# -- damping


def damping(b: Block, rule: Rule) -> tuple[Any, Any]:
    """(c_log, c_lin); "log" has no c_lin and "linear" no c_log: they are 0."""
    c_log = coef(b, "c_log") if rule["damping"] in ("loglin", "log") else 0.0
    c_lin = coef(b, "c_lin") if rule["damping"] in ("loglin", "linear") else 0.0
    return c_log, c_lin


def damping_rate(t: Tensor, b: Block, rule: Rule) -> Tensor:
    """alpha(t) = c_log / t + c_lin."""
    c_log, c_lin = damping(b, rule)
    return c_log / t + c_lin


def damping_exponent(t: Tensor, b: Block, rule: Rule) -> Tensor:
    """s = c_log ln(1 + h_y / t) + c_lin h_y, kept in [-12, 12]."""
    c_log, c_lin = damping(b, rule)
    h_y = coef(b, "h_y")
    return torch.clamp(c_log * torch.log(1.0 + h_y / t) + c_lin * h_y, min=-ETA_CLIP, max=ETA_CLIP)


def phi1(s: Tensor) -> Tensor:
    """phi1(s) = (1 - e^{-s}) / s = sum_k (-s)^k / (k+1)!; the series below |s| = 1."""
    if abs(float(s.detach())) < 1.0:
        return sum(((-s) ** k / math.factorial(k + 1) for k in range(1, 19)), start=torch.ones_like(s))
    return (1.0 - torch.exp(-s)) / s


def phi2(s: Tensor) -> Tensor:
    """phi2(s) = (s - 1 + e^{-s}) / s^2 = sum_k (-s)^k / (k+2)!; the series below |s| = 1."""
    if abs(float(s.detach())) < 1.0:
        return sum(((-s) ** k / math.factorial(k + 2) for k in range(1, 19)), start=0.5 * torch.ones_like(s))
    return (s - 1.0 + torch.exp(-s)) / s**2


# -- attention steps: (x, y, t, past) -> x_half, y* (before LN_Y), what the next layer remembers


@dataclass
class Past:
    """Raw right-hand sides and step sizes of the attention step of the layer before."""

    f: Tensor  # F_{l-1}
    g: Tensor  # G_{l-1}; for ab2 the damped G_{l-1} - alpha(t_{l-1}) y_{l-1}
    h_x: Any
    h_y: Any
    s: Any = None  # s_{l-1}, for Lawson's form


Step = tuple[Tensor, Tensor, "Past | int | None"]


def plain_euler(x: Tensor, y: Tensor, t: Tensor, past: int | None, b: Block, rule: Rule) -> Step:
    """x+ = x + h_x F(u, y);  y* = alpha y + h_y G(u, y), alpha learned, or (k - 1) / (k + 2) in layer k = 1, 2, ..."""
    u = normalised_input(x, y, b, rule)
    k = 1 if past is None else past
    alpha = (k - 1) / (k + 2) if rule["alpha_k"] == "nesterov" else coef(b, "alpha")
    x_half = x + coef(b, "h_x") * drift(u, y, b, rule)
    y_star = alpha * y + coef(b, "h_y") * force(u, y, b, rule)
    return x_half, y_star, k + 1


def presymp_euler(x: Tensor, y: Tensor, t: Tensor, past: Past | None, b: Block, rule: Rule) -> Step:
    """x+ = x + h_x F(u, y);  y* = (1 - alpha(t) h_y) y + h_y G(u, y)."""
    u = normalised_input(x, y, b, rule)
    h_y = coef(b, "h_y")
    x_half = x + coef(b, "h_x") * drift(u, y, b, rule)
    y_star = (1.0 - damping_rate(t, b, rule) * h_y) * y + h_y * force(u, y, b, rule)
    return x_half, y_star, None


def exp_euler(x: Tensor, y: Tensor, t: Tensor, past: Past | None, b: Block, rule: Rule) -> Step:
    """x+ = x + h_x F(u, y);  y* = e^{-s} y + h_y phi1(s) G(u, y)."""
    u = normalised_input(x, y, b, rule)
    s = damping_exponent(t, b, rule)
    x_half = x + coef(b, "h_x") * drift(u, y, b, rule)
    y_star = torch.exp(-s) * y + coef(b, "h_y") * phi1(s) * force(u, y, b, rule)
    return x_half, y_star, None


def conformal_euler(x: Tensor, y: Tensor, t: Tensor, past: Past | None, b: Block, rule: Rule) -> Step:
    """y* = e^{-s} (y + h_y G(u, y));  x+ = x + h_x F(u, y*), with the same u."""
    u = normalised_input(x, y, b, rule)
    s = damping_exponent(t, b, rule)
    y_star = torch.exp(-s) * (y + coef(b, "h_y") * force(u, y, b, rule))
    x_half = x + coef(b, "h_x") * drift(u, y_star, b, rule)
    return x_half, y_star, None


def step_ratio(now: Any, before: Any, rule: Rule) -> Any:
    """r = h_l / h_{l-1}, or 1 for a history of constant steps."""
    return now / before if rule["history"] == "variable" else 1.0


def adams_bashforth(f: Tensor, f_before: Tensor, r: Any) -> Tensor:
    """(1 + r/2) f_l - (r/2) f_{l-1}."""
    return (1.0 + 0.5 * r) * f - 0.5 * r * f_before


def ab2(x: Tensor, y: Tensor, t: Tensor, past: Past | None, b: Block, rule: Rule) -> Step:
    """f^x = F(u, y), f^y = G(u, y) - alpha(t) y;  layer 0: x+ = x + h_x f^x, y* = y + h_y f^y; then

    x+ = x + h_x [(1 + r/2) f^x_l - (r/2) f^x_{l-1}],  r the ratio of h_x;
    y* = y + h_y [(1 + r/2) f^y_l - (r/2) f^y_{l-1}],  r the ratio of h_y.
    """
    u = normalised_input(x, y, b, rule)
    h_x, h_y = coef(b, "h_x"), coef(b, "h_y")
    f_x = drift(u, y, b, rule)
    f_y = force(u, y, b, rule) - damping_rate(t, b, rule) * y
    now = Past(f_x, f_y, h_x, h_y)
    if past is None:
        return x + h_x * f_x, y + h_y * f_y, now
    x_half = x + h_x * adams_bashforth(f_x, past.f, step_ratio(h_x, past.h_x, rule))
    y_star = y + h_y * adams_bashforth(f_y, past.g, step_ratio(h_y, past.h_y, rule))
    return x_half, y_star, now


def etd_ab2(x: Tensor, y: Tensor, t: Tensor, past: Past | None, b: Block, rule: Rule) -> Step:
    """Layer 0: exponential Euler, x+ = x + h_x F, y* = e^{-s} y + h_y phi1(s) G
    (with etd_start = "lawson": y* = e^{-s} (y + h_y G)); then, r the ratio of h_y,

    cox-matthews:  y* = e^{-s} y + h_y [phi1(s) G_l + r phi2(s) (G_l - G_{l-1})]
    lawson:        y* = e^{-s} (y + h_y [(1 + r/2) G_l - (r/2) e^{-s_{l-1}} G_{l-1}])
    and for both   x+ = x + h_x [(1 + r/2) F_l - (r/2) F_{l-1}], r the ratio of h_x.
    """
    u = normalised_input(x, y, b, rule)
    h_x, h_y = coef(b, "h_x"), coef(b, "h_y")
    s = damping_exponent(t, b, rule)
    f, g = drift(u, y, b, rule), force(u, y, b, rule)
    now = Past(f, g, h_x, h_y, s)
    if past is None:
        if rule["etd_start"] == "lawson":
            return x + h_x * f, torch.exp(-s) * (y + h_y * g), now
        return x + h_x * f, torch.exp(-s) * y + h_y * phi1(s) * g, now
    x_half = x + h_x * adams_bashforth(f, past.f, step_ratio(h_x, past.h_x, rule))
    r = step_ratio(h_y, past.h_y, rule)
    if rule["etd"] == "lawson":
        y_star = torch.exp(-s) * (y + h_y * adams_bashforth(g, torch.exp(-past.s) * past.g, r))
    else:
        y_star = torch.exp(-s) * y + h_y * (phi1(s) * g + r * phi2(s) * (g - past.g))
    return x_half, y_star, now


STEPS: dict[str, Callable[..., Step]] = {
    "plain-euler": plain_euler,
    "presymp-euler": presymp_euler,
    "exp-euler": exp_euler,
    "conformal-euler": conformal_euler,
    "ab2": ab2,
    "etd-ab2": etd_ab2,
}

# -- MLP substeps and the block


def mlp_step_a(x: Tensor, x_half: Tensor, b: Block, rule: Rule) -> Tensor:
    """w = (x_half - x) / h_x;  x+ = x_half + gamma M(x_half + mu w); no velocity is kept.

    h_x in w is floored at 1e-8; it is a constant in the one-step methods and live in the two-step ones (ab2, etd-ab2).
    """
    h_x = torch.as_tensor(coef(b, "h_x"), dtype=x.dtype)
    if rule["template"] not in ("ab2", "etd-ab2"):
        h_x = h_x.detach()
    w = (x_half - x) / torch.clamp(h_x, min=STEP_FLOOR)
    return x_half + coef(b, "gamma") * mlp(x_half + coef(b, "mu") * w, b, rule)


def mlp_step_momentum(x: Tensor, p: Tensor, b: Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """p+ = LN_V(beta p + gamma M(x + mu p));  x+ = x + p+, for p = y (variant B) or p = v (variant C)."""
    delta = mlp(x + coef(b, "mu") * p, b, rule)
    p = ln_aux(coef(b, "beta") * p + coef(b, "gamma") * delta, b, "mlp")
    return x + p, p


def hamiltonian_layer(
    x: Tensor, y: Tensor, v: Tensor, t: Tensor, past: Past | int | None, b: Block, rule: Rule
) -> tuple[Tensor, Tensor, Tensor, Tensor, Past | int | None]:
    """x_half, y* = attention step at time t;  y <- LN_Y(y*);  t <- t + h_x;  then the MLP substep.

    The clock carries no gradient unless the rule says so.
    """
    x_half, y_star, past = STEPS[rule["template"]](x, y, t, past, b, rule)
    y = ln_aux(y_star, b, "attn")
    h_x = torch.as_tensor(coef(b, "h_x"), dtype=x.dtype)
    t = t + (h_x if rule["clock_gradient"] else h_x.detach())
    if rule["mlp_step"] == "A":
        x = mlp_step_a(x, x_half, b, rule)
    elif rule["mlp_step"] == "B":
        x, y = mlp_step_momentum(x_half, y, b, rule)
    else:
        x, v = mlp_step_momentum(x_half, v, b, rule)
    return x, y, v, t, past
