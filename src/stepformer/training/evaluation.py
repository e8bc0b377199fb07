"""Validation loss on a number of tokens that nothing else decides.

Full blocks of `context` tokens from the first token of the split on; the remainder is dropped. The count and the
split's hash go with the number: two losses may be compared only when both agree.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stepformer.base.errors import InputError
from stepformer.training.parallel import World


class EvaluatedSplit(Protocol):
    """What evaluation reads."""

    @property
    def hash(self) -> str: ...

    def __len__(self) -> int: ...

    def gather(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class Best:
    """The best evaluation so far."""

    val_loss: float
    step: int


@dataclass(frozen=True)
class Evaluation:
    """A loss in nats per token, and on what."""

    val_loss: float
    val_tokens: int
    val_hash: str

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.val_loss, 700.0))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_blocks(split: EvaluatedSplit, context: int, tokens: int) -> int:
    """How many full blocks an evaluation has; none is an error."""
    blocks = min(tokens, len(split) - 1) // context
    if blocks < 1:
        raise InputError(
            f"The validation split has {len(split):,} tokens and {tokens:,} were asked for: "
            f"too few for one block of {context}."
        )
    return blocks


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: EvaluatedSplit,
    *,
    context: int,
    tokens: int,
    micro_batch: int,
    world: World,
    autocast: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Mean loss over the first `tokens` tokens of a split, in full blocks; ranks share the blocks."""
    blocks = check_blocks(split, context, tokens)
    stride = micro_batch * world.size
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    was_training = model.training
    model.eval()
    try:
        for begin in range(0, blocks, stride):
            mine = np.arange(begin + world.rank * micro_batch, begin + (world.rank + 1) * micro_batch, dtype=np.int64)
            mine = mine[mine < blocks]
            # a rank with nothing left still takes part (sharded models gather their weights together), at weight 0
            starts = (mine if len(mine) else np.zeros(1, dtype=np.int64)) * context
            window = torch.from_numpy(split.gather(starts, context + 1)).to(world.device)
            with autocasting(world.device, autocast):
                loss = model(window[:, :-1], window[:, 1:], loss_only=True).loss
            total += loss.double() * len(mine)
            if progress:
                progress(min(begin + stride, blocks), blocks)
    finally:
        model.train(was_training)
    return Evaluation(float(world.sum(total)) / blocks, blocks * context, split.hash)


def autocasting(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Autocast to `dtype`, or nothing."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
