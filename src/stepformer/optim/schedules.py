"""Learning-rate and momentum schedules: pure functions of the step, so that a resumed run has nothing to remember."""

from __future__ import annotations

import math

from stepformer.base.errors import ConfigError
from stepformer.optim.config import OptimConfig


class Schedule:
    """The factor f(t) of every peak rate, for the 0-based step t of S steps with W steps of warm-up.

    warm-up   f = (t+1)/W for t < W  (legacy: t/W, which loses the first step)
    cosine    f = floor + (1 - floor) (1 + cos(pi (t-W)/(S-W))) / 2
    wsd       f = 1 until D, then 1 - (1 - floor) (t-D)/(S-D)
    """

    def __init__(self, config: OptimConfig, steps: int) -> None:
        self.config, self.steps = config, steps
        self.warmup = min(steps, max(1, steps // 10)) if config.warmup is None else config.warmup
        self.decay_start = round(steps * 5 / 6) if config.decay_start is None else config.decay_start
        unset = config.decay_start is None
        problems = []
        if self.warmup > steps:
            problems.append(f"[optim] warmup = {self.warmup} is longer than the run of {steps} steps.")
        if config.schedule == "wsd" and not self.warmup <= self.decay_start <= steps:
            problems.append(
                f"[optim] decay_start = {self.decay_start}{' (unset: 5/6 of all)' if unset else ''} should lie between "
                f"the end of the warm-up, {self.warmup}, and the length of the run, {steps}."
            )
        if problems:
            raise ConfigError(problems)

    def factor(self, t: int) -> float:
        """What multiplies every peak rate at step t."""
        config, steps, warmup = self.config, self.steps, self.warmup
        if t < warmup:
            return (t if config.legacy_warmup else t + 1) / warmup
        if config.schedule == "cosine":
            share = min(1.0, (t - warmup) / max(1, steps - warmup))
            return config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * share))
        if config.schedule == "wsd" and t >= self.decay_start:
            share = min(1.0, (t - self.decay_start) / max(1, steps - self.decay_start))
            return 1 - (1 - config.floor) * share
        return 1.0

    def momentum(self, t: int) -> float:
        """The momentum of the matrix optimizer at step t; AdamW keeps its betas."""
        config = self.config
        if t >= config.momentum_warmup:
            return config.momentum
        return config.momentum_start + (config.momentum - config.momentum_start) * t / config.momentum_warmup

    def perturbs(self, t: int) -> bool:
        """Whether step t is sharpness-aware."""
        return self.config.sam == "always" or (self.config.sam == "decay" and t >= self.decay_start)
