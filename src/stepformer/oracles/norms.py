"""Norms: LayerNorm with a learned gain, and gainless RMSNorm (projection on the unit-RMS sphere)."""

from __future__ import annotations

from torch import nn


def make_norm(kind: str, d_model: int, *, eps: float, bias: bool = False) -> nn.Module:
    """A pre-norm or final norm; `bias` concerns LayerNorm only, as RMSNorm here has no parameters at all."""
    if kind == "rmsnorm":
        return nn.RMSNorm(d_model, eps=eps, elementwise_affine=False)
    return nn.LayerNorm(d_model, eps=eps, bias=bias)
