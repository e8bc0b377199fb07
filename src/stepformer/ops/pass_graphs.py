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

from stepformer.ops.graphs import WARM_UP, Recorder


class CapturedPass:
    """`run(inputs, targets, first)`: the loss of a micro-batch; its gradient is in, or added to, the parameters'."""

    def __init__(
        self,
        loss_of: Callable[[Tensor, Tensor], Tensor],
        parameters: list[nn.Parameter],
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self.loss_of, self.parameters, self.autocast = loss_of, parameters, autocast
        self.recorder = Recorder()
        self.graphs: dict[bool, tuple[Callable[[], None], Tensor]] = {}
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
        replay, loss = self.graphs[first]
        replay()
        self._hand_over()
        return loss

    @property
    def recorded(self) -> bool:
        return bool(self.graphs)

    def record(self, inputs: Tensor, targets: Tensor, accumulate: bool) -> None:
        """Record the pass for micro-batches of this shape, and with `accumulate` the one that adds gradients."""
        if not self.graphs:
            self.inputs, self.targets = inputs.clone(), targets.clone()
            self.graphs[True] = self.recorder.record(self._pass, WARM_UP, before=self._clear)
            self.gradients = [p.grad for p in self.parameters]
        if accumulate and False not in self.graphs:
            self.graphs[False] = self.recorder.record(self._pass, before=self._hand_over)

    def forget(self) -> None:
        """Give the memory back; the next run records anew."""
        self.graphs, self.gradients, self.recorder = {}, [], Recorder()
        self._clear()

    def _pass(self) -> Tensor:
        with self.autocast():
            loss = self.loss_of(self.inputs, self.targets)
        loss.backward()
        return loss.detach()

    def _hand_over(self) -> None:
        for p, gradient in zip(self.parameters, self.gradients, strict=True):
            p.grad = gradient

    def _clear(self) -> None:
        for p in self.parameters:
            p.grad = None
