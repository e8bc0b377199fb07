"""Matrix functions of one small matrix per token: approximate polar factor, whitening by a covariance."""

from __future__ import annotations

import torch
from torch import Tensor

from stepformer.ops import kernels
from stepformer.ops.dtypes import working_dtype

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def newton_schulz(
    g: Tensor, *, heads: int, dtype: torch.dtype | None = None, low: torch.dtype = torch.float32
) -> Tensor:
    """NS5 of each token's matrix of heads, (..., d) -> (..., d) in `dtype`; products in `low`, of fp64 in fp64."""
    dtype = g.dtype if dtype is None else dtype
    if kernels.usable(g):
        from stepformer.ops import newton_schulz_kernels as fast

        if fast.supports(heads, g.shape[-1] // heads):
            return fast.newton_schulz(g, heads, dtype, fast=low == torch.bfloat16)
    return polar_steps(g.unflatten(-1, (heads, -1)), dtype=low).flatten(-2).to(dtype)


def polar_steps(y: Tensor, steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Five quintic steps towards the polar factor of each matrix in y (..., h, k), h <= k.

    Y <- (a I + b G + c G^2) Y with the left Gram matrix G = Y Y^T. It equals Y <- a Y + b Y (Y^T Y) + c Y (Y^T Y)^2
    in exact arithmetic; with 12 heads of 64 the h x h form needs about 18 times fewer products than the k x k one.
    """
    a, b, c = NEWTON_SCHULZ
    with torch.autocast(y.device.type, enabled=False):
        z = y.to(working_dtype(y.dtype, dtype))
        z = z / z.flatten(-2).norm(dim=-1).clamp_min(1e-12)[..., None, None]
        identity = torch.eye(z.shape[-2], dtype=z.dtype, device=z.device)
        for _ in range(steps):
            gram = z @ z.mT
            z = (a * identity + b * gram + c * gram @ gram) @ z
    return z


def whiten(
    direction: Tensor, g: Tensor, covariance: Tensor, beta: Tensor, *, heads: int, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """R' = beta R + (1 - beta) G^T G, and D R'^{-1/2} in `dtype`, (B, T, d).

    G and D are the matrices of heads of `g` and `direction` (B, T, d), R (B, T, k, k) is in fp32 at least, whatever
    autocast says.
    """
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


def inverse_square_root(r: Tensor, steps: int = 10) -> Tensor:
    """(r + 1e-6 I)^{-1/2} of symmetric positive matrices (..., k, k) by an uncoupled Newton iteration, in fp32.

    X <- X (3 I - X A X) / 2 from X = I on A = r / ||r||_F. Exact to 1e-4 for eigenvalues above 1 % of the Frobenius
    norm; growth is capped at 1.5^steps, which damps directions that the history has hardly seen.
    """
    with torch.autocast(r.device.type, enabled=False):
        r = r.to(working_dtype(r.dtype))
        identity = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)
        r = r + 1e-6 * identity
        size = r.flatten(-2).norm(dim=-1).clamp_min(1e-6)[..., None, None]
        a = r / size
        x = identity.expand_as(a)
        for _ in range(steps):
            x = 0.5 * x @ (3 * identity - x @ a @ x)
    return x / torch.sqrt(size)
