"""The stream passes as plain equations, differentiable by autograd in any dtype: the twins that tests compare with.

The rules themselves (schemes/) are twins too, of a whole step; these have the signature of one pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stepformer.ops.common import ONE, Norms, Scalar

EPS = 1e-8  # of the adaptive rules


def velocity_pass_reference(
    g: Tensor | None, *, x: Tensor, V: Tensor | None = None, g2: Tensor | None = None, gamma: Scalar = ONE,
    scale: float = 1.0, gain_v: Tensor | None = None, eps_v: float = 1e-5, nu: Scalar | None = None,
    lam: Scalar | None = None, drift: bool = True, mu_next: Scalar | None = None, beta_next: Scalar | None = None,
    gamma_next: Scalar | None = None, scale_next: float = 1.0, norms: Norms = (), norm_kind: str = "layernorm",
    eps: float = 1e-5, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """`velocity_pass`, written with the velocity itself."""
    if g is None:
        g = torch.zeros_like(x)
    answer = g if g2 is None else g + g2
    v = scale * gamma.value() * (answer if V is None else V + answer)
    if gain_v is not None:
        v = F.layer_norm(v, v.shape[-1:], gain_v, None, eps_v)
    x_out = x
    if drift:
        moved = v if nu is None else nu.value() * v
        x_out = ((x if lam is None else (1 - lam.value()) * x) + moved).to(x.dtype)
    V_out = None
    if V is not None or beta_next is not None:
        ratio: Tensor | float = 1.0
        if beta_next is not None:
            ratio = beta_next.value() / (scale_next * (gamma_next or ONE).value())
        V_out = (ratio * v).to((x if V is None else V).dtype)
    p = x_out if mu_next is None else x_out + mu_next.value() * v
    us = [_norm(p, gain, bias, norm_kind, eps).to(out_dtype or x.dtype) for gain, bias in norms]
    u, u2 = [*us, None, None][:2]
    return x_out, V_out, u, u2


def adaptive_pass_reference(
    g: Tensor, *, x: Tensor, m: Tensor | None, s: Tensor, g2: Tensor | None = None, beta1: Scalar | None = None,
    beta2: Scalar, gamma: Scalar, lam: Scalar | None = None, scale: float = 1.0, gain_v: Tensor, eps_v: float = 1e-5,
    norms: Norms = (), norm_kind: str = "layernorm", eps: float = 1e-5, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """`adaptive_pass`."""
    answer = g if g2 is None else g + g2
    b2 = beta2.value()
    second = b2 * s + (1 - b2) * answer * answer
    first = answer
    if m is not None:
        assert beta1 is not None
        b1 = beta1.value()
        first = b1 * m + (1 - b1) * answer
    o = first / (torch.sqrt(second) + EPS)
    v = F.layer_norm(o, o.shape[-1:], gain_v, None, eps_v)
    kept = x if lam is None else (1 - lam.value()) * x
    x_out = (kept + scale * gamma.value() * v).to(x.dtype)
    us = [_norm(x_out, gain, bias, norm_kind, eps).to(out_dtype or x.dtype) for gain, bias in norms]
    u, u2 = [*us, None, None][:2]
    return x_out, None if m is None else first.to(m.dtype), second.to(s.dtype), u, u2


def integrator_pass_reference(
    *, x: Tensor, y: Tensor, velocity: Tensor, force: Tensor | None, weights: Tensor,
    older_velocity: Tensor | None = None, older_force: Tensor | None = None, older_y: Tensor | None = None,
    scale: Tensor | None = None, older_scale: Tensor | None = None, along: Tensor | None = None,
    gain_y: Tensor, eps_y: float = 1e-5,
    mu_next: Scalar | None = None, beta_next: Scalar | None = None, gamma_next: Scalar | None = None,
    scale_next: float = 1.0, norms: Norms = (), norm_kind: str = "layernorm", eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`integrator_pass`."""
    b, b_o, a, c, c_o, a_o = weights.unbind()
    moved = x + b * (velocity if scale is None else scale.unsqueeze(-1) * velocity)
    if older_velocity is not None:
        moved = moved + b_o * (older_velocity if older_scale is None else older_scale.unsqueeze(-1) * older_velocity)
    w = a * y
    for weight, term in ((c, force), (c_o, older_force), (a_o, older_y)):
        w = w if term is None else w + weight * term
    momentum = F.layer_norm(w, w.shape[-1:], gain_y, None, eps_y)
    x_out = moved.to(x.dtype)
    ratio: Tensor | float = 1.0
    if beta_next is not None:
        ratio = beta_next.value() / (scale_next * (gamma_next or ONE).value())
    looked_along = momentum
    if along is not None:
        looked_along, ratio = along / ratio, 1.0
    p = x_out if mu_next is None else x_out + mu_next.value() * looked_along
    us = [_norm(p, gain, bias, norm_kind, eps).to(out_dtype or x.dtype) for gain, bias in norms]
    return x_out, (ratio * momentum).to(y.dtype), us[0] if us else None


def _norm(p: Tensor, gain: Tensor | None, bias: Tensor | None, kind: str, eps: float) -> Tensor:
    """The norm behind u in plain PyTorch."""
    if kind == "layernorm":
        return F.layer_norm(p, p.shape[-1:], gain, bias, eps)
    u = F.rms_norm(p, p.shape[-1:], gain, eps)
    return u if bias is None else u + bias
