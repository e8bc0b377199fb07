"""How much memory a training step needs, found by running it on tensors that have shapes but no data.

No formula per architecture: the forward pass runs under FakeTensorMode and every tensor that autograd saves is
counted once. So the estimate is right for any template, splitting or rule of your own, with or without activation
checkpointing. What it leaves out: temporary buffers inside kernels and the allocator's fragmentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from stepformer.base.errors import InputError
from stepformer.model import Model
from stepformer.model.block import Block
from stepformer.model.config import ModelConfig
from stepformer.rules import State


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one training step and of decoding."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logit_gradient: int
    cache: int

    @property
    def training(self) -> int:
        """The peak: everything saved for the backward pass, and the gradient of the logits with which it begins."""
        saved = self.parameters + self.gradients + self.optimizer + self.activations
        return saved + self.logit_gradient

    def __str__(self) -> str:
        parts = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "gradient of the logits": self.logit_gradient,
        }
        gib = 2.0**30
        shares = ", ".join(f"{name} {size / gib:.2f}" for name, size in parts.items())
        return f"training {self.training / gib:.2f} GiB ({shares}); decoding cache {self.cache / gib:.2f} GiB"


def estimate_memory(
    config: ModelConfig,
    batch: int,
    *,
    time: int | None = None,
    autocast: torch.dtype | None = None,
    optimizer_copies: float = 2,
) -> MemoryEstimate:
    """Memory of a training step on `batch` sequences of `time` tokens (default: the context), weights in fp32.

    autocast: e.g. torch.bfloat16; optimizer_copies: fp32 numbers the optimizer keeps per trained parameter
    (AdamW 2, Muon 1). The cache is that of decoding `batch` full contexts.
    """
    if batch < 1:
        raise InputError(f"batch = {batch} should be at least 1.")
    time = config.context if time is None else time
    weights = {name: (p.numel(), p.requires_grad) for name, p in Model(config, device="meta").named_parameters()}
    activations = _saved_bytes(config, batch, time, autocast)
    if config.activation_checkpointing:  # while one block is recomputed, all it saves is there as well
        plain = config.replace(activation_checkpointing=False, n_layer=1)
        two = _saved_bytes(plain.replace(n_layer=2), batch, time, autocast)
        activations += two - _saved_bytes(plain, batch, time, autocast)
    parameters = sum(4 * n for n, _ in weights.values())
    trained = sum(4 * n for n, requires_grad in weights.values() if requires_grad)
    block = Model(config.replace(n_layer=1), device="meta").blocks[0]
    slot = block.attn.new_slot(batch, config.context, torch.device("meta"), autocast or torch.float32)
    per_call = sum(t.numel() * t.element_size() for t in slot.tensors())
    return MemoryEstimate(
        parameters=parameters,
        gradients=trained,
        optimizer=int(optimizer_copies * trained),
        activations=activations,
        logit_gradient=4 * batch * time * config.vocab_size,
        cache=config.n_layer * block.calls()["attn"] * per_call,
    )


def _saved_bytes(config: ModelConfig, batch: int, time: int, autocast: torch.dtype | None) -> int:
    """Bytes that autograd keeps between the forward and the backward pass, weights left out, logits included."""
    saved: dict[int, tuple[Tensor, int]] = {}  # the tensors are kept so that storages stay alive and distinct

    def count(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        saved[storage._cdata] = (t, storage.nbytes())
        return t

    def count_state(block: Block, args: tuple[State, Any]) -> None:
        for t in (args[0].x, *args[0].streams.values(), *args[0].memory.values()):
            count(t)

    model = Model(config, device="meta")
    if config.activation_checkpointing:  # checkpoint() keeps each block's input itself, where hooks do not see it
        for block in model.blocks:
            block.register_forward_pre_hook(count_state)
    with FakeTensorMode():
        weights = {name: torch.empty(p.shape, requires_grad=p.requires_grad) for name, p in model.named_parameters()}
        tokens, targets = (torch.zeros(batch, time, dtype=torch.long) for _ in range(2))
        with (
            torch.autograd.graph.saved_tensors_hooks(count, lambda t: t),
            torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None),
        ):
            count(functional_call(model, weights, (tokens, targets)).logits)
        own = {w.untyped_storage()._cdata for w in weights.values()}
    return sum(size for key, (_, size) in saved.items() if key not in own)
