"""Forward and backward pass of one micro-batch as a CUDA graph: recorded once, then replayed by a single launch.

A step of a small model is a thousand kernels, and Python needs longer to launch them than the GPU to run them. The
graph runs the same kernels on the same memory in the same order, so the results are those of the ordinary step.
Shapes are fixed, and gradients live in memory that belongs to the graph: they are handed to the parameters after every
replay. The first micro-batch of a step writes the gradients, the others add to them: two graphs in one memory pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stepformer.ops.graphs import capture

WARM_UP = 2  # ordinary passes before the recording: libraries choose their algorithms, Triton compiles


class CapturedPass:
    """`run(inputs, targets, first)`: the loss of a micro-batch; its gradient is in, or added to, the parameters'."""

    def __init__(
        self,
        loss_of: Callable[[Tensor, Tensor], Tensor],
        parameters: list[nn.Parameter],
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self.loss_of, self.parameters, self.autocast = loss_of, parameters, autocast
        self.pool: Any = None
        self.graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.gradients: list[Tensor | None] = []
        self.inputs = self.targets = torch.empty(0)

    def prepare(self, before: list[Tensor | None]) -> None:
        """Begin from gradients that somebody else has written, before a run that adds to them."""
        for gradient, other in zip(self.gradients, before, strict=False):
            if gradient is not None and other is not gradient:
                gradient.zero_() if other is None else gradient.copy_(other)

    def run(self, inputs: Tensor, targets: Tensor, first: bool) -> Tensor:
        if first not in self.graphs:
            self.record(inputs, targets, accumulate=not first)
        self.inputs.copy_(inputs, non_blocking=True)
        self.targets.copy_(targets, non_blocking=True)
        graph, loss = self.graphs[first]
        graph.replay()
        for p, gradient in zip(self.parameters, self.gradients, strict=True):
            p.grad = gradient
        return loss

    @property
    def recorded(self) -> bool:
        return bool(self.graphs)

    def record(self, inputs: Tensor, targets: Tensor, accumulate: bool) -> None:
        """Record the pass for micro-batches of this shape, and with `accumulate` the one that adds gradients."""
        if not self.graphs:
            self.inputs, self.targets = inputs.clone(), targets.clone()
            self._warm_up()
            self._record(True)
        if accumulate and False not in self.graphs:
            self._record(False)

    def forget(self) -> None:
        """Give the memory back; the next run records anew."""
        self.graphs, self.gradients, self.pool = {}, [], None
        self._clear()

    def _pass(self) -> Tensor:
        with self.autocast():
            loss = self.loss_of(self.inputs, self.targets)
        loss.backward()
        return loss.detach()

    def _warm_up(self) -> None:
        kept = [p.grad for p in self.parameters]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._clear()
                self._pass()
        torch.cuda.current_stream().wait_stream(stream)
        for p, gradient in zip(self.parameters, kept, strict=True):
            p.grad = gradient

    def _record(self, first: bool) -> None:
        """Record the pass that writes gradients (`first`), or the one that adds to what that one wrote."""
        if first:
            self._clear()
        else:
            for p, gradient in zip(self.parameters, self.gradients, strict=True):
                p.grad = gradient
        graph, loss = capture(self._pass, self.pool)
        if first:
            self.pool = graph.pool()
            self.gradients = [p.grad for p in self.parameters]
        self.graphs[first] = (graph, loss)

    def _clear(self) -> None:
        for p in self.parameters:
            p.grad = None
