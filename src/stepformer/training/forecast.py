"""How long a run will take here, before it has begun."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from stepformer.model import Model
from stepformer.optim import Optimizers
from stepformer.training.config import RunConfig, eval_every_of, micro_batch_of, precision_of
from stepformer.training.evaluation import autocasting
from stepformer.training.parallel import World
from stepformer.training.speed import flops_per_token, peak_flops


@dataclass(frozen=True)
class Forecast:
    """Seconds of an optimizer step and of a whole run with its evaluations, and where they come from."""

    step: float
    run: float
    how: str


def forecast(config: RunConfig, device: torch.device, ranks: int = 1) -> Forecast:
    """From one micro-batch and one update, the best of three; from counted operations where that would take long."""
    train = config.train
    flops = flops_per_token(Model(config.model, device="meta"))
    peak, source = peak_flops(device)
    guess = flops * config.step_tokens / (0.3 * peak) / ranks
    micro = micro_batch_of(config, World(0, ranks, device))
    accumulation = train.batch // ranks // micro
    passes = 2 if config.optim.sam == "always" else 1
    if guess / accumulation > 20:
        batch, update, how = guess, 0.0, f"guessed at 30 % of {source}"
    else:
        once, update = _measured(config, micro, device)
        batch, how = once * accumulation, "from one micro-batch and an update, not compiled"
    step = batch * passes + update
    # a forward pass is a third of a forward and backward pass; evaluated at the start, on the way and at the end
    evaluations = 2 + (train.steps - 1) // eval_every_of(config, train.eval_tokens)
    evaluation = batch / 3 * train.eval_tokens / config.step_tokens
    return Forecast(step, step * train.steps + evaluation * evaluations, how)


def _measured(config: RunConfig, micro: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a forward and backward pass, and of an update."""
    model = Model(config.model, seed=0, device=device)
    optimizers = Optimizers(model, config.optim, steps=config.train.steps)
    tokens = torch.zeros(micro, config.model.context, dtype=torch.long, device=device)
    dtype = torch.bfloat16 if precision_of(config, device) == "bf16" else None

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    once = update = float("inf")
    for _ in range(3):
        optimizers.zero_grad()
        begin = now()
        with autocasting(device, dtype):
            loss = model(tokens, tokens).loss
        assert loss is not None
        loss.backward()
        between = now()
        optimizers.step(0)
        once, update = min(once, between - begin), min(update, now() - between)
    return once, update
