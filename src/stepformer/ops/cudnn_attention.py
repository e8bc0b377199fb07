"""Causal softmax attention by cuDNN's fused kernels, forward and backward.

Of the fused attentions in torch it is the faster one on a Hopper card: for 32 sequences of 1,024 tokens, 12 heads of
64 in bf16 it took 0.16 ms forward and 0.53 ms backward on an H200 with torch 2.11, FlashAttention-2 0.25 and 0.72 ms
(docs/performance.md). torch would take the latter by default. The twin is `scaled_dot_product_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ATEN = torch.ops.aten
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether cuDNN takes these heads (B, H, T, width): bf16, as many queries as keys, usual widths."""
    usual = q.shape[-1] in (64, 128) and q.shape[2] >= 64 and q.shape[2] % 64 == 0
    # its backward adds in no fixed order: for the same bits every time torch has another one
    free = not torch.are_deterministic_algorithms_enabled()
    return HOPPER and q.is_cuda and usual and free and q.dtype == k.dtype == v.dtype == torch.bfloat16


@torch.library.custom_op("stepformer::causal_attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse, *_ = ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, time, width = q.shape
    out = q.new_empty(batch, time, heads, width).transpose(1, 2)
    return out, q.new_empty(batch, heads, time, 1, dtype=torch.float32)


def _no_dropout(device: torch.device) -> Tensor:
    """The seed of a dropout that there is not; made once, but never inside a recording, whose memory would hold it."""
    if device not in _SEEDS:
        seed = torch.zeros((), dtype=torch.int64, device=device)
        if torch.cuda.is_current_stream_capturing():
            return seed
        _SEEDS[device] = seed
    return _SEEDS[device]


_SEEDS: dict[torch.device, Tensor] = {}


@torch.library.custom_op("stepformer::causal_attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    seed = _no_dropout(q.device)
    time = q.shape[2]
    grads = ATEN._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, seed, seed, None, None, None, time, time, 0.0, True
    )
    dq, dk, dv = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in grads)
    return dq, dk, dv


@_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, time, width = q.shape
    dq, dk, dv = (q.new_empty(batch, time, heads, width).transpose(1, 2) for _ in range(3))
    return dq, dk, dv


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None
    result: tuple[Tensor, ...] = torch.ops.stepformer.causal_attention_backward(grad, *ctx.saved_tensors)
    return result


_attention.register_autograd(_backward, setup_context=_setup)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(width)) v over the keys up to each query, (B, H, T, width)."""
    out: Tensor = torch.ops.stepformer.causal_attention(q, k, v)[0]
    return out
