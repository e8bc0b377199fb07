"""How fast a run is, how fast it could be, and how long it will take here."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from stepformer.model import Model
from stepformer.model.roles import Role, named_roles
from stepformer.optim import Optimizers
from stepformer.training.config import RunConfig
from stepformer.training.evaluation import autocasting
from stepformer.training.parallel import World

# Dense bf16 products a second, from the makers' data sheets (without sparsity).
FORWARD = 3  # forward passes that take as long as one forward and backward pass
PEAKS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "A10": 125e12,
}


def flops_per_token(model: Model) -> float:
    """Floating-point operations of a training step per token: 6 per matrix weight and use, and the attention scores.

    The convention of PaLM (12 L T d for scores and values, no discount for the causal mask); splittings that ask an
    oracle twice count it twice, tables count only where they are the head.
    """
    config = model.config
    total = 0.0
    for block in model.blocks:
        calls = block.splitting.calls()
        for oracle in ("attn", "mlp"):
            for name, p, role in named_roles(getattr(block, oracle)):
                if role is Role.MATRIX and f"{oracle}.{name}" not in block.unused:
                    total += 6 * p.numel() * calls[oracle]
        total += 12 * config.context * config.d_model * calls["attn"]
    return total + 6 * config.vocab_size * config.d_model


@lru_cache
def peak_flops(device: torch.device) -> tuple[float, str]:
    """Operations a second this device could do, and how we know: its data sheet, or a product measured now."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for word, peak in PEAKS.items():
            if word in name:
                return peak, f"{name} data sheet, bf16"
    size, dtype = (512, torch.float32) if device.type == "cpu" else (4096, torch.bfloat16)
    a, b = torch.ones(size, size, dtype=dtype, device=device), torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(8):
        begin = time.perf_counter()
        c = a @ b
        c[0, 0].item()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best, f"a product of {size} x {size} matrices, measured"


@dataclass(frozen=True)
class Forecast:
    """Seconds of an optimizer step and of a whole run with its evaluations, and where they come from."""

    step: float
    run: float
    how: str


_MEASURED: dict[tuple[Any, ...], tuple[float, float]] = {}  # runs that differ in their rates take as long


def forecast(
    config: RunConfig, device: torch.device, ranks: int = 1, *, eval_tokens: int | None = None, longest: float = 20
) -> Forecast:
    """From one micro-batch and one update, the best of three; from counted operations where a micro-batch would take
    longer than `longest` seconds. `eval_tokens` are those of an evaluation, if the validation split has fewer than the
    config asks for; 0 leaves evaluations out.
    """
    train = config.train
    eval_tokens = train.eval_tokens if eval_tokens is None else eval_tokens
    flops = flops_per_token(Model(config.model, device="meta"))
    peak, source = peak_flops(device)
    guess = flops * config.step_tokens / (0.3 * peak) / ranks
    micro = config.micro_batch(World(0, ranks, device))
    accumulation = train.batch // ranks // micro
    passes = 2 if config.optim.sam == "always" else 1
    if guess / accumulation > longest:
        batch, update, how = guess, 0.0, f"guessed at 30 % of {source}"
    else:
        kind = {k: getattr(config.optim, k) for k in config.optim.field_names() if not k.startswith(("lr", "wd_"))}
        alike = (config.model, str(kind), micro, str(device), config.autocast_on(device))
        if alike not in _MEASURED:
            _MEASURED[alike] = _measured(config, micro, device)
        once, update = _MEASURED[alike]
        batch, how = once * accumulation, "from one micro-batch and an update, not compiled"
    step = batch * passes + update
    evaluation = batch / FORWARD * eval_tokens / config.step_tokens
    return Forecast(step, step * train.steps + evaluation * config.evaluations(eval_tokens), how)


def _measured(config: RunConfig, micro: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a forward and backward pass, and of an update."""
    model = Model(config.model, seed=0, device=device)
    tokens = torch.zeros(micro, config.model.context, dtype=torch.long, device=device)
    optimizers = Optimizers(model, config.optim, config.train.steps, lambda *_: (tokens[:1], tokens[:1]))

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    once = update = float("inf")
    for t in range(3):
        optimizers.zero_grad()
        begin = now()
        with autocasting(device, config.autocast_on(device)):
            loss = model(tokens, tokens).loss
        assert loss is not None
        loss.backward()
        between = now()
        if optimizers.schedule.perturbs(t):
            optimizers.restore(optimizers.perturb())
        optimizers.step(t)
        once, update = min(once, between - begin), min(update, now() - between)
    return once, update
