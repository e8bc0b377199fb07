"""Out of memory, in a sentence that says what would fit."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from stepformer.base.errors import StepformerError
from stepformer.model import Model
from stepformer.model.roles import Role, named_roles
from stepformer.optim import OptimConfig
from stepformer.training.config import RunConfig, micro_batch_of, precision_of
from stepformer.training.parallel import World
from stepformer.training.stopping import resume_command

GIB = 2.0**30
SPARE = 0.9  # of the memory there is: an estimate leaves out the buffers of kernels and what lies between tensors


@contextlib.contextmanager
def explained(config: RunConfig, world: World, folder: Path) -> Iterator[None]:
    """Say what would fit where the memory of a device or a machine runs out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        traceback.clear_frames(error.__traceback__)  # what the failed step held is free again
        raise StepformerError(sentence(config, world, folder)) from None


def is_shortage(error: BaseException) -> bool:
    """Whether memory ran out; on the CPU, and inside some libraries of CUDA, torch says so in words only."""
    words = ("DefaultCPUAllocator", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in words)


def sentence(config: RunConfig, world: World, folder: Path) -> str:
    micro_batch, batch = micro_batch_of(config, world), config.train.batch // world.size
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


def _needed(config: RunConfig, world: World, micro_batch: int) -> tuple[float, float]:
    """Bytes on each rank, by estimate; and how many of them the weights take with what belongs to them."""
    from stepformer.training.memory import estimate_memory  # slow to load

    precision = precision_of(config, world.device)
    copies = optimizer_copies(Model(config.model, device="meta"), config.optim)
    autocast = torch.bfloat16 if precision == "bf16" else None
    found = estimate_memory(config.model, micro_batch, autocast=autocast, optimizer_copies=copies)
    factor, shards = 2 if precision == "fp64" else 1, world.size if config.train.parallel == "fsdp" else 1
    weights = found.parameters + found.gradients + found.optimizer
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


def optimizer_copies(model: Model, config: OptimConfig) -> float:
    """Numbers the optimizer keeps per parameter, on average: one of momentum, two moments of AdamW, SAM's way back."""
    kept = 0
    for _, p, role in named_roles(model):
        steepest = config.name == "scion" or (role is Role.MATRIX and config.name != "adamw")
        kept += p.numel() * (1 if steepest else 2)
    return kept / model.num_parameters() + (config.sam != "off")
