"""Attention over depth: the mean of a token's sources, weighted by a softmax over depth, times their number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from stepformer.ops import kernels
from stepformer.ops.dtypes import working_dtype
from stepformer.ops.operators import traced
from stepformer.ops.symbols import Symbol, record


def attend_depth(sources: Sequence[Tensor], w: Tensor, *, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """n sum_i c_i v_i with c = softmax_i(w . RMSNorm(v_i)), of n sources (..., d) and one vector (d,), in `dtype`."""
    if isinstance(sources[0], Symbol):
        return record("attend_depth", sources, ["row"], eps=eps, weight=str(w.attr))[0]
    wide = working_dtype(sources[0].dtype)
    rows = [v.to(wide) for v in sources]
    scores = [(v * w).sum(dim=-1) * (v.square().mean(dim=-1) + eps).rsqrt() for v in rows]
    shares = len(rows) * torch.stack(scores, dim=-1).softmax(dim=-1)
    found = sum(c[..., None] * v for c, v in zip(shares.unbind(-1), rows, strict=True))
    return found.to(dtype or sources[0].dtype)  # type: ignore[union-attr]


class DepthAttention:
    """All calls of `attend_depth` in one forward pass, by kernels where they may run.

    `needs` are the places of every call's sources, the newest one last, `weights` their vectors. Sources that a call
    reads when they are not the newest any more are kept on a stack (ops/depth_kernels.py).
    """

    def __init__(self, needs: Iterable[Sequence[int]], weights: Sequence[Tensor], eps: float, dtype: torch.dtype):
        self.weights, self.eps, self.dtype = weights, eps, dtype
        self.lasting = {at for call in needs for at in call[:-1]}
        self.places: list[int] = []  # of the sources on the stack
        self.call = 0
        self.history: History | None = None
        self.handle: Tensor | None = None

    def __call__(self, places: Sequence[int], sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The result of the next call, and its newest source to be used from now on."""
        w = self.weights[self.call]
        if not kernels.usable(*sources, w) or traced(sources[0]):
            self.call += 1
            return attend_depth(sources, w, eps=self.eps, dtype=self.dtype), sources[-1]
        if self.history is None:
            self.history = History(torch.stack(list(self.weights)).float(), len(self.lasting), self.eps, self.dtype)
        new = [(at, v) for at, v in zip(places, sources, strict=True) if at not in self.places]
        keeps = tuple(at in self.lasting for at, _ in new)
        self.places += [at for at, _ in new if at in self.lasting]
        weights = self.history.weights if self.handle is None else None
        rows = [v for _, v in new]
        h, self.handle, newest = _Call.apply(self.history, self.call, keeps, self.handle, weights, *rows)
        self.call += 1
        return h, newest


class History:
    """What the calls of a pass share: the stack of sources, and in the backward pass the gradients of all results."""

    def __init__(self, weights: Tensor, lasting: int, eps: float, dtype: torch.dtype) -> None:
        self.weights, self.lasting, self.eps, self.dtype = weights, lasting, eps, dtype
        self.stack: Tensor | None = None
        self.count = 0  # of sources on it
        self.grads: Tensor | None = None
        self.last = 0  # the last call whose gradient has arrived

    def begin(self, like: Tensor) -> None:
        """Memory for the forward pass over tokens like these."""
        self.stack = like.new_empty((self.lasting, *like.shape), dtype=self.dtype)
        self.levels = like.new_empty((len(self.weights), like.numel() // like.shape[-1]), dtype=torch.float32)

    def begin_backward(self, call: int) -> None:
        assert self.stack is not None
        calls = len(self.weights)
        self.grads, self.last = self.stack.new_empty((calls, *self.stack.shape[1:])), call
        self.means, self.weight_grads = torch.empty_like(self.levels), torch.zeros_like(self.weights)


class _Call(torch.autograd.Function):
    """One call. Its new sources have their gradients here, from all calls that read them.

    The handle is an empty tensor that each call takes from the one before it: so autograd runs a call backward when
    all later ones have run. The first call owns the vectors of all.
    """

    @staticmethod
    def forward(
        ctx: Any, own: History, call: int, keeps: tuple[bool, ...], handle: Any, weights: Any, *new: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from stepformer.ops import depth_kernels as fast

        if own.stack is None:
            own.begin(new[0])
        stack, slots = own.stack, []
        assert stack is not None
        for keep in keeps:
            slots.append(own.count if keep else None)
            own.count += keep
        for v, slot in zip(new[:-1], slots[:-1], strict=True):  # the embedding, at the first call
            stack[slot].copy_(v)
        newest, top = new[-1].contiguous(), slots[-1]
        older = own.count - keeps[-1]
        h = torch.empty_like(newest, dtype=own.dtype)
        kept = None if top is None else stack[top]
        fast.mix(stack, older, newest, kept, own.weights[call], h, own.levels[call], own.eps)
        ctx.own, ctx.call, ctx.slots, ctx.sources = own, call, slots, older + 1
        ctx.dtypes = [v.dtype for v in new]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h, *([newest] if top is None else []))
        return h, h.new_empty(0), new[-1].view_as(new[-1])

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, _: Any, handed: Tensor | None) -> Any:
        from stepformer.ops import depth_kernels as fast

        own, call = ctx.own, ctx.call
        h, *saved = ctx.saved_tensors
        if own.grads is None:
            own.begin_backward(call)
        dh = torch.zeros_like(h) if dh is None else dh.contiguous()
        found: list[Tensor] = []
        for slot, dtype in zip(reversed(ctx.slots), reversed(ctx.dtypes), strict=True):
            source = saved[0] if slot is None else own.stack[slot]
            newest = not found
            later = own.last - call if slot is not None else 0
            first = call + newest
            slopes = own.means.new_empty((later + 1, own.means.shape[1]))
            gradient = torch.empty_like(source, dtype=dtype)
            tensors = {
                "handed": handed.contiguous() if newest and handed is not None else None,
                "own": dh if newest else None, "h": h, "left": own.grads[call],
                "grads": own.grads[min(first, own.last)], "weights": own.weights[call],
                "levels": own.levels[call], "means": own.means[call], "slopes": slopes,
            }  # fmt: skip
            fast.gather(source, gradient, tensors, later + 1 - newest, ctx.sources, own.eps)
            if own.weights.requires_grad:
                own.weight_grads[call : call + later + 1] += fast.weight_gradient(slopes, source)
            found.append(gradient)
        weights = own.weight_grads if ctx.needs_input_grad[4] else None
        if call == 0:
            own.grads = None
        return None, None, None, None if call == 0 else h.new_empty(0), weights, *reversed(found)
