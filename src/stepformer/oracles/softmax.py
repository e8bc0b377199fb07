"""Softmax attention: the one everyone knows, with fused kernels or plain products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stepformer.base.options import choice, flag
from stepformer.ops import Linear, operation
from stepformer.ops.scores import attend_math, reported_rows, rotate
from stepformer.ops.slots import TokenSlot
from stepformer.oracles.attention import Attention, register_attention
from stepformer.oracles.caches import Call

QK_NORM_EPS = 1e-5


class MultiHeadAttention(Attention):
    """What attentions with queries, keys, values and an output map share."""

    options = {"qk_norm": flag(False, help="gainless RMSNorm of queries and keys, per head")}
    stacked = {"qkv.weight": 3}
    has_values = True

    qk_norm: bool

    def __init__(self, d_model: int, n_head: int, *, bias: bool, **settings: Any) -> None:
        super().__init__(d_model, n_head, **settings)
        self.qkv = Linear(d_model, 3 * d_model, bias=bias)
        self.out = Linear(d_model, d_model, bias=bias)

    def new_slot(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> TokenSlot:
        shape = (self.n_head, self.head_dim, dtype)
        return TokenSlot(batch, capacity, device, k=shape, v=shape)

    def project(self, u: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the new tokens, keys and values of all visible ones, each (B, H, tokens, head_dim)."""
        q, k, v = self.in_heads(self.qkv(u), call)
        slot = call.next_slot()
        if isinstance(slot, TokenSlot):
            k, v = slot.extend(call, k=k, v=v)
        return q, k, v

    @operation
    def in_heads(self, qkv: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the new tokens from their joint product (B, T, 3 d), as the options want them."""
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
        if self.qk_norm:
            q, k = (F.rms_norm(t, (self.head_dim,), eps=QK_NORM_EPS) for t in (q, k))
        if self.rotary:
            q, k = rotate(q, call.positions), rotate(k, call.positions)
        return q, k, call.mix_values(v)

    def merge(self, gathered: Tensor) -> Tensor:
        """(B, H, T, head_dim) -> (B, T, d) through the output map."""
        return self.out(gathered.transpose(1, 2).flatten(-2))


@register_attention(
    "softmax",
    equation="g_i = W_O sum_{j<=i} softmax_j(q_i.k_j / sqrt(head_dim)) W_V u_j;  q = W_Q u, k = W_K u, per head",
    cite="vaswani2017attention",
)
class SoftmaxAttention(MultiHeadAttention):
    """Causal multi-head softmax attention with a fused projection for queries, keys and values."""

    options = {
        **MultiHeadAttention.options,
        "attention_backend": choice(
            "sdpa", "math", help="fused kernels, or plain products that are twice differentiable"
        ),
    }

    attention_backend: str

    def forward(self, u: Tensor, call: Call) -> Tensor:
        q, k, v = self.project(u, call)
        if call.observe is not None and call.rows:
            # the energy -ln z = min_a [-s.a + KL(a || uniform)] is what the weights a attain
            entropy, log_z = reported_rows(q, k, call.visible)
            call.observe("entropy", entropy)
            call.observe("energy", -log_z)
        return self.merge(self.attend(q, k, v, call))

    @operation
    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """softmax(q k^T / sqrt(head_dim)) v over what each query sees, (B, H, T, head_dim)."""
        # Only a single new token that sees every stored key may do without causal masking.
        causal = not call.restricted
        if q.shape[2] != k.shape[2]:  # a branch: under torch.compile the comparison is a symbol, which SDPA refuses
            causal = False
        attend = attend_math if self.attention_backend == "math" else F.scaled_dot_product_attention
        return attend(q, k, v, attn_mask=call.mask, is_causal=causal)
