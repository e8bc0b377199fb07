"""A training loop of one's own at the trainer's speed: forward and backward pass as one CUDA graph."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from stepformer.base.errors import InputError
from stepformer.model.model import Model
from stepformer.ops import kernels
from stepformer.ops.pass_graphs import CapturedPass


class Recorded:
    """`loss = recorded(tokens, targets)`: the loss of a batch, with its gradients in, or added to, `.grad`."""

    def __init__(self, model: Model, autocast: torch.dtype | None) -> None:
        self.model, self.autocast = model, autocast
        self.passes: dict[Any, CapturedPass] = {}
        self.refused: str | None = None  # why nothing is recorded

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        before = [p.grad for p in parameters]
        first = all(gradient is None for gradient in before)
        if self.refused is None:
            self.refused = self._refusal(tokens)
        if self.refused is not None:
            return self._plain(tokens, targets)
        key = (tokens.shape, tokens.dtype, targets.dtype, tuple(map(id, parameters)))
        own = self.passes.get(key)
        if own is None:
            own = self.passes[key] = CapturedPass(self._loss, parameters, self._autocasting)
        try:
            if not own.recorded:
                own.record(tokens, targets, accumulate=not first)
        except RuntimeError as error:  # nothing has run: it is done plainly from now on
            self.refused, self.passes = str(error).strip().splitlines()[0], {}
            for p, gradient in zip(parameters, before, strict=True):
                p.grad = gradient
            return self._plain(tokens, targets)
        if not first:
            own.prepare(before)
        return own.run(tokens, targets, first)

    def _refusal(self, tokens: Tensor) -> str | None:
        if not tokens.is_cuda or not kernels.switched_on():
            return "there are no CUDA graphs here"
        if self.model.config.activation_checkpointing:
            return "activations are computed twice"
        return None

    def _autocasting(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.model.device.type, self.autocast)

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = self.model(tokens, targets, loss_only=True).loss
        assert isinstance(loss, Tensor)
        return loss

    def _plain(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self._autocasting():
            loss = self._loss(tokens, targets)
        loss.backward()
        return loss.detach()


def record(model: Model, autocast: torch.dtype | None = None) -> Recorded:
    """The forward and backward pass of a model in a loop of your own, launched as one piece on a GPU.

    `loss = recorded(tokens, targets)` takes the place of `loss = model(...).loss; loss.backward()`: after
    `optimizer.zero_grad()` it writes the gradients, without it adds to them. The first call of a shape records. Where
    nothing can be recorded (on a CPU) the pass runs as it is; `recorded.refused` says why.

    Args:
        model: As `build` makes it, before any wrapper.
        autocast: The dtype of autocast, such as torch.bfloat16; None for none.

    Examples:
        >>> import stepformer as sf, torch
        >>> model = sf.build("yurii", size="tiny", n_layer=1, seed=0)
        >>> recorded = sf.record(model)
        >>> tokens = torch.randint(256, (4, 65))
        >>> loss = recorded(tokens[:, :-1], tokens[:, 1:])  # the gradients are there
    """
    if not isinstance(model, Model):
        raise InputError("`record` takes a stepformer model as `build` makes it, before any wrapper.")
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise InputError(f"autocast = {autocast!r} should be a dtype of torch such as torch.bfloat16.")
    return Recorded(model, autocast)
