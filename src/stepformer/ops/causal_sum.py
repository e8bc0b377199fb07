"""Sums over earlier tokens, of which linear attention is made, by products and a state (kernels: linear_flow.py)."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None = None,
    chunk: int = 0,
    positions: Tensor | None = None,
    origins: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """sum_{j visible to i} (q_i.k_j) v_j for tokens (B, T, d), and the state sum_j k_j v_j^T after them.

    state: what earlier tokens left, (B, d, d). Inside a chunk the sum is a masked product, between chunks the state
    carries it; `chunk` = 0 means one chunk. Of the tokens at `positions`, each sees those from its `origins` (B, T) on,
    and `lengths` (B,) of them are real: padding leaves no trace, and with documents the state holds the last one.
    """
    batch, length, _ = q.shape
    chunk = chunk or length
    places = None if positions is None else positions.expand(batch, length)
    state = q.new_zeros(batch, k.shape[-1], v.shape[-1]) if state is None else state.to(q.dtype)
    gathered = []
    for begin in range(0, length, chunk):
        end = min(begin + chunk, length)
        qs, ks, vs = q[:, begin:end], k[:, begin:end], v[:, begin:end]
        within = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).tril()
        before = qs @ state
        if places is not None and origins is not None:
            within = within & (places[:, None, begin:end] >= origins[:, begin:end, None])
            before = before * (origins[:, begin:end, None] < places[:, begin, None, None])
        gathered.append((qs @ ks.mT).masked_fill(~within, 0.0) @ vs + before)
        if lengths is not None:
            real = torch.arange(begin, end, device=q.device) < lengths[:, None]
            ks = ks * real[..., None]
        if places is not None and origins is not None:
            last = torch.full_like(origins[:, 0], end - 1)  # the last token so far: whose document goes on
            last = last if lengths is None else torch.minimum(last, lengths - 1)
            origin = origins.gather(1, last[:, None])
            ks = ks * (places[:, begin:end] >= origin)[..., None]
            state = state * (origin < places[:, begin, None])[..., None]
        state = state + ks.mT @ vs
    return torch.cat(gathered, dim=1), state
