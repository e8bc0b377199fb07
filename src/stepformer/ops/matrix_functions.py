"""Matrix functions of one small matrix per token: approximate polar factor and inverse square root."""

from __future__ import annotations

import torch
from torch import Tensor

from stepformer.ops.dtypes import working_dtype

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


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
