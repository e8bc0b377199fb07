"""The polar factor of a matrix: G = U S V^T has polar factor U V^T, the steepest step of unit spectral norm.

Three ways to it, over batches of matrices (..., rows, cols):

- `svd`: exact; the reference.
- `newton-schulz`: five quintic steps with the coefficients that Muon made common (Jordan 2024). They do not converge:
  singular values between 3e-3 and 1 of the Frobenius norm end in [0.68, 1.21], which is enough for a training step.
- `polar-express`: eight quintic steps, each the best odd quintic on the interval the last one left (Amsel et al. 2025).
  It converges: singular values above 1e-3 of the Frobenius norm end within 1e-5 of 1 in exact arithmetic.

Both iterations treat every singular value by one scalar polynomial, so directions with singular value 0 stay at 0.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from stepformer.base.errors import InputError, suggestion

PolarMethod = Literal["newton-schulz", "polar-express", "svd"]
METHODS: tuple[str, ...] = get_args(PolarMethod)
Quintic = tuple[float, float, float]

JORDAN: Quintic = (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # the smallest Frobenius norm divided by


def polar(matrix: Tensor, method: str = "newton-schulz", *, dtype: torch.dtype | None = None) -> Tensor:
    """The polar factor of each matrix in (..., rows, cols), in the matrix's own dtype.

    dtype: what it is computed in. Default: bf16 on CUDA for Newton-Schulz, as is common; fp32 otherwise (bf16 products
    are slow on CPUs, and Polar Express converges further than bf16 can tell); fp64 for fp64 matrices.
    """
    if method not in METHODS:
        raise InputError(f"Unknown polar method '{method}'.{suggestion(method, METHODS)} Known: {', '.join(METHODS)}.")
    dtype = working_dtype(matrix, method) if dtype is None else dtype
    with torch.autocast(matrix.device.type, enabled=False):
        y = matrix.to(dtype)
        if method == "svd":
            u, s, vh = torch.linalg.svd(y, full_matrices=False)
            # directions that are zero to rounding have no sign: they stay at zero, as in the iterations
            tiny = s.amax(dim=-1, keepdim=True) * max(y.shape[-2:]) * torch.finfo(dtype).eps
            return ((u * (s > tiny)[..., None, :]) @ vh).to(matrix.dtype)
        tall = y.shape[-2] > y.shape[-1]
        turned = tall and not stays_tall(y)
        y = y.mT if turned else y
        y = y / torch.linalg.matrix_norm(y, keepdim=True).clamp_min(EPS)
        for quintic in quintics(method):
            y = _applied(quintic, y, right=tall and not turned)
        return (y.mT if turned else y).to(matrix.dtype)


def stays_tall(matrix: Tensor) -> bool:
    """Whether tall matrices are multiplied from the right, and not turned into wide ones.

    On a GPU every turn is a slow copy, and products are as fast from either side.
    """
    return matrix.is_cuda


def _applied(quintic: Quintic, y: Tensor, right: bool) -> Tensor:
    """a Y + b (Y Y^T) Y + c (Y Y^T)^2 Y, through the smaller of Y Y^T (from the left) and Y^T Y (from the right)."""
    a, b, c = quintic
    gram = y.mT @ y if right else y @ y.mT
    if y.ndim > 3:
        inner = b * gram + c * gram @ gram
        return a * y + (y @ inner if right else inner @ y)
    add = torch.addmm if y.ndim == 2 else torch.baddbmm
    inner = add(gram, gram, gram, beta=b, alpha=c)
    return add(y, y, inner, beta=a) if right else add(y, inner, y, beta=a)


def working_dtype(matrix: Tensor, method: str) -> torch.dtype:
    """What `polar` computes in where nobody chooses."""
    if matrix.dtype == torch.float64:
        return torch.float64
    on_gpu = matrix.device.type == "cuda" and method == "newton-schulz"
    return torch.bfloat16 if on_gpu else torch.float32


def quintics(method: str) -> tuple[Quintic, ...]:
    """The polynomials x -> a x + b x^3 + c x^5 that a method applies to the singular values, one after the other."""
    return (JORDAN,) * 5 if method == "newton-schulz" else polar_express_coefficients()


@lru_cache
def polar_express_coefficients(lower: float = 1e-3, steps: int = 8) -> tuple[Quintic, ...]:
    """Greedy minimax quintics: each is the best odd quintic approximation of 1 on the interval the last one left.

    The first interval is [lower, 1]; an error e turns it into [1 - e, 1 + e]. Every polynomial is read on an interval
    one percent wider on the right, so that rounding (in bf16 above all) cannot push a singular value out of it.
    """
    low, high = lower, 1.0
    found: list[Quintic] = []
    for _ in range(steps):
        a, b, c = _best_quintic(low, high)
        error = 1 - (a * low + b * low**3 + c * low**5)
        safety = 1.01
        found.append((a / safety, b / safety**3, c / safety**5))
        # what the narrowed polynomial does to [low, high], not what the unsafe one would do
        x = np.linspace(low, high, 20_001)
        a, b, c = found[-1]
        y = a * x + b * x**3 + c * x**5
        low, high = float(y.min()), float(max(y.max(), 1 + error))
    return tuple(found)


def _best_quintic(low: float, high: float) -> Quintic:
    """The odd quintic p that minimises max |1 - p| on [low, high], by Remez exchange.

    The error takes its largest size with alternating sign at low, at the two interior extrema of p, and at high.
    """
    if high - low < 1e-3:  # the limit: p agrees with the sign function to third order at 1, scaled to the middle
        middle = (low + high) / 2
        return 1.875 / middle, -1.25 / middle**3, 0.375 / middle**5
    inner = low + (high - low) * np.array([0.25, 0.75])
    error = math.inf
    for _ in range(200):
        x = np.array([low, *inner, high])
        signs = np.array([1.0, -1.0, 1.0, -1.0])
        a, b, c, new = np.linalg.solve(np.stack([x, x**3, x**5, signs], axis=1), np.ones(4))
        # p' = a + 3 b x^2 + 5 c x^4 vanishes at the interior extrema
        root = math.sqrt(max(9 * b * b - 20 * a * c, 0.0))
        squares = np.array([(-3 * b - root) / (10 * c), (-3 * b + root) / (10 * c)])
        inner = np.clip(np.sqrt(np.maximum(squares, low * low)), low, high)
        if abs(new - error) <= 1e-14:
            break
        error = new
    return float(a), float(b), float(c)
