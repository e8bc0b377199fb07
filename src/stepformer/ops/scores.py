"""What attentions share: queries some at a time, rows of scores, causal sums, rotary positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stepformer.ops.dtypes import at_least_fp32

REPORTED_AT_ONCE = 256  # queries whose scores exist at the same time while rows are reported


def over_queries(part: Callable[[int, int], Any], queries: int, chunk: int, dim: int) -> Any:
    """`part(begin, end)` for consecutive stretches of `chunk` queries, joined along `dim`; 0 means all at once.

    Each stretch is computed again in the backward pass, so that no tensor of all queries times all keys exists.
    `part` returns a tensor or a tuple of tensors.
    """
    if chunk == 0 or queries <= chunk:
        return part(0, queries)
    parts = []
    for begin in range(0, queries, chunk):
        end = min(begin + chunk, queries)
        again = torch.is_grad_enabled()
        # nothing here draws random numbers, and asking for their state would keep CUDA graphs away
        if again:
            parts.append(checkpoint(part, begin, end, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(part(begin, end))
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim=dim)
    return tuple(torch.cat(pieces, dim=dim) for pieces in zip(*parts, strict=True))


def softmax_rows(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """What softmax makes of scores (..., T, K): the entropy of each row, and ln z, z the mean of exp(scores); (..., T).

    Both are in nats and over the visible keys alone; a key that underflows counts 0 ln 0 = 0.
    """
    scores = scores.masked_fill(~visible, -torch.inf)
    log_weights = scores.log_softmax(dim=-1)
    entropy = -(log_weights.exp() * log_weights.masked_fill(~visible, 0.0)).sum(dim=-1)
    return entropy, scores.logsumexp(dim=-1) - visible.sum(dim=-1).to(scores.dtype).log()


def reported_rows(q: Tensor, k: Tensor, visible: Callable[[int, int], Tensor]) -> tuple[Tensor, Tensor]:
    """`softmax_rows` of the scores q.k_j / sqrt(head_dim) (B, H, T, K), some queries at a time, in fp32 at least."""
    with torch.autocast(q.device.type, enabled=False):
        q, k = at_least_fp32(q, k)

        def rows(begin: int, end: int) -> tuple[Tensor, Tensor]:
            return softmax_rows(q[:, :, begin:end] @ k.mT / math.sqrt(q.shape[-1]), visible(begin, end))

        entropy, log_z = over_queries(rows, q.shape[2], REPORTED_AT_ONCE, dim=2)
    return entropy, log_z


def attend_math(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v in plain products: it has second derivatives, fused kernels have none."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        attn_mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


def angles_of(positions: Tensor, half: int, dtype: torch.dtype, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-i/half) for i < half, in `dtype`: bf16 cannot tell position 1023 from 1024."""
    rates = base ** (-torch.arange(half, device=positions.device, dtype=dtype) / half)
    angles = positions[..., None].to(dtype) * rates  # (T, half) or (B, T, half)
    return angles.cos(), angles.sin()


def rotate(t: Tensor, positions: Tensor) -> Tensor:
    """Rotary: turn the pairs (i, i + head_dim/2) of t (B, H, T, head_dim) by position * 10000^(-2i/head_dim)."""
    half = t.shape[-1] // 2
    cos, sin = angles_of(positions, half, torch.promote_types(t.dtype, torch.float32))
    if cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    first, second = t[..., :half], t[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(t.dtype)
