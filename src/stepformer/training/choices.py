"""What a run's config leaves open, decided by its length, its data and its device."""

from __future__ import annotations

import math

import torch

from stepformer.base.errors import ConfigError
from stepformer.data.corpus import Corpus
from stepformer.training.config import RunConfig
from stepformer.training.parallel import World


def pairing(config: RunConfig, corpus: Corpus) -> str:
    """Runs with one pairing and one seed saw the same batches; it names the data, the budget and the evaluation."""
    splits = f"{corpus.split('train').hash}/{corpus.split('val').hash}"
    train = config.train
    return f"{splits}/{config.model.context}x{train.batch}x{train.steps}/{train.eval_tokens}"


def precision_of(config: RunConfig, device: torch.device) -> str:
    """What auto means: bf16 autocast on CUDA, fp32 on the CPU, where bf16 is slower by orders of magnitude."""
    chosen = config.train.precision
    if chosen != "auto":
        return chosen
    return "bf16" if device.type == "cuda" else "fp32"


def streams_of(config: RunConfig, device: torch.device) -> torch.dtype | None:
    """What x and the velocities are carried in: bf16 under bf16 autocast on CUDA unless fp32 is asked for
    (docs/performance.md has the difference in loss); otherwise as the weights."""
    if precision_of(config, device) != "bf16" or config.train.streams == "fp32":
        return None
    return torch.bfloat16 if config.train.streams == "bf16" or device.type == "cuda" else None


def eval_every_of(config: RunConfig, eval_tokens: int) -> int:
    """Steps between evaluations: as asked, or ten in a run; fewer, but four, if they would read more than half as many
    tokens as training does."""
    train = config.train
    affordable = train.steps * config.step_tokens / (2 * eval_tokens)
    return train.eval_every or max(1, train.steps // max(4, min(10, int(affordable))))


def max_loss_of(config: RunConfig) -> float:
    """The loss above which a run has diverged: ln V is what knowing nothing costs. Scion's own start is far above."""
    if config.train.max_loss is not None:
        return config.train.max_loss
    return math.inf if config.optim.own_init else math.log(config.model.vocab_size) + 4


def micro_batch_of(config: RunConfig, world: World) -> int:
    """Sequences per forward pass; it must divide each rank's share of the batch."""
    batch = config.train.batch
    if batch % world.size:
        raise ConfigError([f"[train] batch = {batch} cannot be shared by {world.size} ranks: it does not divide."])
    share = batch // world.size
    chosen = config.train.micro_batch
    if chosen is None:  # tokens in a forward pass that keep the device busy without filling its memory
        room = max(1, (32_768 if world.device.type == "cuda" else 4_096) // config.model.context)
        return max(n for n in range(1, min(share, room) + 1) if share % n == 0)
    if share % chosen:
        raise ConfigError(
            [f"[train] micro_batch = {chosen} does not divide the {share} sequences of a step on each rank."]
        )
    return chosen
