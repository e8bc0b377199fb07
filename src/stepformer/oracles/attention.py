"""Attention oracles: what a token gathers from the tokens before it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepformer.options import choice
from stepformer.oracles.caches import Call, KeyValueSlot, Slot
from stepformer.registry import Component, Registry


class Attention(Component, nn.Module):
    """An attention oracle: `forward(u, call)` maps normalised tokens (B, T, d) to their update (B, T, d).

    It must be causal, and it declares what one call has to remember (`new_slot`) for incremental decoding.
    Parameters start by their role (`stepformer.roles`); a method `initialise` may set others afterwards.
    """

    output_map = "out"  # its weight starts smaller the deeper the model
    stacked: Mapping[str, int] = {}  # weights that hold several matrices (roles.stacked_parts)

    def new_slot(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> Slot:
        raise NotImplementedError(
            f"{type(self).__name__} does not say what decoding has to remember: define new_slot()."
        )

    def forward(self, u: Tensor, call: Call) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not attend: define forward().")


attentions: Registry[Attention] = Registry("attention", Attention)
register_attention = attentions.register


@register_attention(
    "softmax",
    equation="g_i = W_O sum_{j<=i} softmax_j(q_i.k_j / sqrt(head_dim)) W_V z_j;  q = W_Q z, k = W_K z, per head",
    cite="vaswani2017attention",
)
class SoftmaxAttention(Attention):
    """Causal multi-head softmax attention with a fused projection for queries, keys and values."""

    options = {
        "attention_backend": choice(
            "sdpa", "math", help="fused kernels, or plain products that are twice differentiable"
        ),
    }

    stacked = {"qkv.weight": 3}

    def __init__(self, d_model: int, n_head: int, *, bias: bool, rotary: bool, attention_backend: str = "sdpa") -> None:
        super().__init__()
        self.n_head, self.head_dim = n_head, d_model // n_head
        self.rotary, self.backend = rotary, attention_backend
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=bias)
        self.out = nn.Linear(d_model, d_model, bias=bias)

    def new_slot(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> KeyValueSlot:
        return KeyValueSlot((batch, self.n_head, capacity, self.head_dim), device, dtype)

    def forward(self, u: Tensor, call: Call) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in self.qkv(u).chunk(3, dim=-1))
        if self.rotary:
            q, k = rotate(q, call.positions), rotate(k, call.positions)
        slot = call.next_slot()
        if isinstance(slot, KeyValueSlot):
            k, v = slot.extend(k, v, call)
        # Only a single new token that sees every stored key may do without causal masking.
        causal = call.mask is None and (q.shape[2] == k.shape[2])
        attend = attend_math if self.backend == "math" else F.scaled_dot_product_attention
        gathered = attend(q, k, v, attn_mask=call.mask, is_causal=causal)
        return self.out(gathered.transpose(1, 2).flatten(-2))


def attend_math(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v in plain products: it has second derivatives, fused kernels have none."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        attn_mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


def rotate(t: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary: turn the pairs (i, i + head_dim/2) of t (B, H, T, head_dim) by position * base^(-2i/head_dim)."""
    half = t.shape[-1] // 2
    # Angles in at least fp32: bf16 cannot tell position 1023 from 1024.
    wide = torch.promote_types(t.dtype, torch.float32)
    rates = base ** (-torch.arange(half, device=t.device, dtype=wide) / half)
    angles = positions[..., None].to(wide) * rates  # (T, half) or (B, T, half)
    if angles.ndim == 3:
        angles = angles[:, None]
    cos, sin = angles.cos(), angles.sin()
    first, second = t[..., :half], t[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(t.dtype)
