"""How much memory a training step needs, and what would fit where there is too little.

It is found by running the step on tensors that have shapes but no data.

No formula per architecture: the forward pass runs under FakeTensorMode and every tensor that autograd saves is
counted once. So the estimate is right for any template, splitting or rule of your own, with or without activation
checkpointing. What it leaves out: temporary buffers inside kernels and the allocator's fragmentation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import resource
import shlex
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from stepformer.base.errors import InputError, StepformerError
from stepformer.base.units import memory
from stepformer.model import Model
from stepformer.model.block import Block
from stepformer.model.config import ModelConfig
from stepformer.model.roles import Role, named_roles
from stepformer.optim.trust.factors import stacks
from stepformer.rules import State
from stepformer.training.config import RunConfig
from stepformer.training.parallel import World
from stepformer.training.stopping import resume_command

GIB = 2.0**30
SPARE = 0.9  # of the memory there is: an estimate leaves out the buffers of kernels and what lies between tensors


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
        return sum(dataclasses.astuple(self)) - self.cache

    def __str__(self) -> str:
        names = ("parameters", "gradients", "optimizer", "activations", "gradient of the logits")
        shares = ", ".join(f"{name} {memory(n)}" for name, n in zip(names, dataclasses.astuple(self), strict=False))
        return f"training {memory(self.training)} ({shares}); decoding cache {memory(self.cache)}"


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
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to load

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


@contextlib.contextmanager
def explained(config: RunConfig, world: World, folder: Path) -> Iterator[None]:
    """Say what would fit where the memory of a device or a machine runs out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # on the CPU, and inside some libraries of CUDA, torch says so in words only
        words = ("DefaultCPUAllocator", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
        known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not known and not any(word in str(error) for word in words):
            raise
        traceback.clear_frames(error.__traceback__)  # what the failed step held is free again
        raise StepformerError(shortage(config, world, folder)) from None


def refuse_hopeless(config: RunConfig, world: World, folder: Path) -> None:
    """On a CPU, where the system may end a process without a word: what needs twice the memory there is."""
    micro_batch, model, free = config.micro_batch(world), config.model, free_memory(torch.device("cpu"))
    rough = 4 * micro_batch * model.context * (2 * model.vocab_size + 20 * model.n_layer * model.d_model)
    if world.device.type != "cpu" or rough < free / 2:  # a closer estimate takes a second
        return
    try:
        needed, _ = _needed(config, world, micro_batch)
    except Exception:  # a rule of one's own need not run on tensors without data
        return
    if needed > 2 * free:
        raise StepformerError(shortage(config, world, folder))


def shortage(config: RunConfig, world: World, folder: Path) -> str:
    micro_batch, batch = config.micro_batch(world), config.train.batch // world.size
    tokens = 2 * 8 * batch * config.model.context
    if tokens > free_memory(torch.device("cpu")):  # it is read at once
        need = f"the tokens of a batch of {batch:,} sequences need {tokens / GIB:,.0f} GiB"
        return f"Out of memory: {need}: use a smaller batch."
    where = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "this machine"
    begin = f"Out of memory: {micro_batch} sequences in one pass (micro_batch)"
    show = f"`stepformer show {shlex.quote(str(folder / 'config.toml'))} --batch N` says what N sequences need"
    try:
        needed, weights = _needed(config, world, micro_batch)
        room = free_memory(world.device) + weights
        less = [n for n in range(1, micro_batch) if micro_batch % n == 0]
        fitting = (n for n in reversed(less) if _needed(config, world, n)[0] <= SPARE * min(room, needed))
        best = next(fitting, None)
    except Exception:  # a rule of one's own need not run on tensors without data
        return f"{begin} do not fit: try a smaller micro_batch; {show}."
    begin += f" need about {needed / GIB:.2f} GiB, and {where} has {room / GIB:.2f} GiB for them"
    if best is None:
        return (
            f"{begin}, too little for fewer of them, too: train with activation_checkpointing=true, a shorter context "
            f"or a smaller model{', or on several ranks with parallel=fsdp' if world.size == 1 else ''}; {show}."
        )
    about = _needed(config, world, best)[0] / GIB
    begun = (folder / "run.json").is_file()
    again = f"`{resume_command(folder)} micro_batch={best}`; {show}" if begun else "add it to the command"
    return f"{begin}; micro_batch={best} needs about {about:.2f} GiB and changes the result by rounding only: {again}."


def run_memory(config: RunConfig, device: torch.device, micro_batch: int) -> MemoryEstimate:
    """Memory of a run's step with its own optimizer, on one rank that holds all of the model."""
    model, name = Model(config.model, device="meta"), config.optim.name
    kept = 0  # numbers: one of momentum, two moments of AdamW, SAM's way back
    for _, p, role in named_roles(model):
        steepest = name == "scion" or (role is Role.MATRIX and name != "adamw")
        kept += p.numel() * (1 if steepest else 2)
    if name == "trust":  # factors and their roots
        kept += sum(2 * math.prod(shape) for stack in stacks(model) for shape in stack.shapes())
    copies = kept / model.num_parameters() + (config.optim.sam != "off")
    return estimate_memory(config.model, micro_batch, autocast=config.autocast_on(device), optimizer_copies=copies)


def _needed(config: RunConfig, world: World, micro_batch: int) -> tuple[float, float]:
    """Bytes on each rank, by estimate; and how many of them the weights take with what belongs to them."""
    found = run_memory(config, world.device, micro_batch)
    factor = 2 if config.precision_on(world.device) == "fp64" else 1
    weights = found.parameters + found.gradients + found.optimizer
    shards = world.size if config.train.parallel == "fsdp" else 1
    return factor * (found.training - weights + weights / shards), factor * weights / shards


def free_memory(device: torch.device) -> float:
    """Bytes that this process could still get."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return float(torch.cuda.mem_get_info(device)[0])
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        size = page * int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return float(page * os.sysconf("SC_PHYS_PAGES"))
    free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return float(free if limit == resource.RLIM_INFINITY else max(0, min(free, limit - size)))
