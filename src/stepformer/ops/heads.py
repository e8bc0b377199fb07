"""Functions of a token's matrix of heads: its polar factor, and its whitening by a covariance."""

from __future__ import annotations

import torch
from torch import Tensor

from stepformer.ops import kernels
from stepformer.ops.dtypes import working_dtype
from stepformer.ops.matrix_functions import inverse_square_root, polar_steps
from stepformer.ops.symbols import Symbol, record


def newton_schulz(
    g: Tensor, *, heads: int, dtype: torch.dtype | None = None, low: torch.dtype = torch.float32
) -> Tensor:
    """NS5 of each token's matrix of heads, (..., d) -> (..., d) in `dtype`; products in `low`, of fp64 in fp64."""
    if isinstance(g, Symbol):
        return record("newton_schulz", [g], ["row"], heads=heads, low=low)[0]
    dtype = g.dtype if dtype is None else dtype
    if kernels.usable(g):
        from stepformer.ops import newton_schulz_kernels as fast

        if fast.supports(heads, g.shape[-1] // heads):
            return fast.newton_schulz(g, heads, dtype, fast=low == torch.bfloat16)
    return polar_steps(g.unflatten(-1, (heads, -1)), dtype=low).flatten(-2).to(dtype)


def whiten(
    direction: Tensor, g: Tensor, covariance: Tensor, beta: Tensor, *, heads: int, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """R' = beta R + (1 - beta) G^T G, and D R'^{-1/2} in `dtype`, (B, T, d).

    G and D are the matrices of heads of `g` and `direction` (B, T, d), R (B, T, k, k) is in fp32 at least, whatever
    autocast says.
    """
    if isinstance(g, Symbol):
        return tuple(record("whiten", [direction, g, covariance], ["other", "row"], [beta], heads=heads))
    dtype = direction.dtype if dtype is None else dtype
    if kernels.usable(direction, g, covariance):
        from stepformer.ops import whitening as fast

        if fast.supports(heads, g.shape[-1] // heads):
            if direction is g:
                return fast.shampoo_pass(g, covariance, beta, heads, dtype)
            _, covariance, u = fast.soap_pass(g, direction, covariance, torch.ones_like(beta), beta, heads, dtype)
            return covariance, u  # a running mean that forgets nothing and learns nothing is the direction itself
    with torch.autocast(g.device.type, enabled=False):
        wide = working_dtype(g.dtype)
        rows = g.unflatten(-1, (heads, -1)).to(wide)
        covariance = beta * covariance + (1 - beta) * rows.mT @ rows
        matrix = direction.unflatten(-1, (heads, -1)).to(covariance.dtype)
        return covariance, (matrix @ inverse_square_root(covariance)).flatten(-2).to(dtype)


def newton_schulz_of_mean(
    g: Tensor, m: Tensor, beta: Tensor, *, heads: int, dtype: torch.dtype, low: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """m' = beta m + (1 - beta) g in the dtype of m, and NS5 of it: the kernel mixes while it reads."""
    if kernels.usable(g, m):
        from stepformer.ops import newton_schulz_kernels as fast

        if fast.supports(heads, g.shape[-1] // heads):
            return fast.muon_pass(g, m, beta, heads, dtype, low == torch.bfloat16)
    mean = (beta * m + (1 - beta) * g).to(m.dtype)
    return mean, newton_schulz(mean, heads=heads, dtype=dtype, low=low)


def whiten_mean(
    g: Tensor, m: Tensor, covariance: Tensor, beta1: Tensor, beta: Tensor, *, heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """m' = beta1 m + (1 - beta1) g, and `whiten` with it as the direction."""
    if kernels.usable(g, m, covariance):
        from stepformer.ops import whitening as fast

        if fast.supports(heads, g.shape[-1] // heads):
            return fast.soap_pass(g, m, covariance, beta1, beta, heads, dtype)
    mean = beta1 * m + (1 - beta1) * g
    return mean, *whiten(mean, g, covariance, beta, heads=heads, dtype=dtype)
