"""What a model in training is worth, what it says about itself, and where its numbers stopped being finite.

The validation loss is that of a number of tokens that nothing else decides: full blocks of `context` tokens from the
first token of the split on; the remainder is dropped. The count and the split's hash go with the number: two losses may
be compared only when both agree.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stepformer.base.errors import InputError
from stepformer.data.corpus import TokenSplit
from stepformer.model import Model
from stepformer.ops import kernels
from stepformer.ops.sharding import is_sharded
from stepformer.training.parallel import ParallelModel, World


@dataclass(frozen=True)
class Evaluation:
    """A loss in nats per token, and on what."""

    val_loss: float
    val_tokens: int
    val_hash: str
    first: dict[str, float] = field(default_factory=dict)  # of its first so many tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.val_loss, 700.0))

    @property
    def remark(self) -> str:
        """The losses of its first tokens in words, if any were asked for."""
        return "".join(f", first {int(tokens):,} tokens {loss:.4f}" for tokens, loss in self.first.items())

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "first" or value}


def check_blocks(split: TokenSplit, context: int, tokens: int) -> int:
    """How many full blocks an evaluation has; none is an error."""
    blocks = min(tokens, len(split) - 1) // context
    if blocks < 1:
        if tokens < context < len(split):
            raise InputError(f"{tokens:,} tokens are too few for one block of {context}: ask for {context} or more.")
        raise InputError(
            f"The validation split has {len(split):,} tokens: too few for one block of {context}. Train with a "
            "smaller context, or make the split longer (--val-fraction of `stepformer prepare`)."
        )
    return blocks


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: TokenSplit,
    *,
    context: int,
    tokens: int,
    micro_batch: int,
    world: World,
    first: Iterable[int] = (),
    autocast: torch.dtype | None = None,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Mean loss over the first `tokens` tokens of a split, in full blocks; ranks share the blocks. `first` asks for the
    mean over fewer tokens as well, which costs nothing.
    """
    blocks = check_blocks(split, context, tokens)
    ends = sorted({blocks, *(n for n in (check_blocks(split, context, some) for some in first) if n < blocks)})
    sums: list[float] = []
    stride = micro_batch * world.size
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    was_training = model.training
    model.eval()
    try:
        for start, end in pairwise((0, *ends)):
            for begin in range(start, end, stride):
                mine = np.arange(micro_batch, dtype=np.int64) + begin + world.rank * micro_batch
                mine = mine[mine < end]
                # a rank with nothing left still takes part (sharded models gather their weights together), at weight 0
                starts = (mine if len(mine) else np.zeros(1, dtype=np.int64)) * context
                window = torch.from_numpy(split.gather(starts, context + 1)).to(world.device)
                with autocasting(world.device, autocast):
                    loss = model(window[:, :-1], window[:, 1:], loss_only=True).loss
                total += loss.double() * len(mine)
                if progress:
                    progress(min(stride, end - begin))
            sums.append(float(world.sum(total)))
    finally:
        model.train(was_training)
    *some, whole = (value / end for value, end in zip(sums, ends, strict=True))
    fewer = {str(end * context): loss for end, loss in zip(ends, some, strict=False)}
    return Evaluation(whole, blocks * context, split.hash, fewer)


def measured_once(
    evaluated: Callable[..., Evaluation], last: Evaluation, train: TokenSplit, whole: TokenSplit | None
) -> dict[str, Any]:
    """At the end: the loss of as many training tokens, the same for every run; and of a whole split, if it is given."""
    seen = evaluated(train, tokens=last.val_tokens)
    found = {"train_loss": seen.val_loss, "train_tokens": seen.val_tokens, "train_hash": seen.val_hash}
    if whole is None:
        return found
    all_of_it = evaluated(whole, tokens=len(whole))
    return {**found, "first": {**last.first, str(all_of_it.val_tokens): all_of_it.val_loss}}


def autocasting(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Autocast to `dtype`, or nothing."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def first_windows(model: Model, split: TokenSplit, count: int) -> Tensor:
    """The beginning of a split."""
    context = model.config.context
    starts = np.arange(min(count, len(split) // context), dtype=np.int64) * context
    return torch.from_numpy(split.gather(starts, context)).to(model.device)


def reported(
    model: Model, split: TokenSplit, parallel: ParallelModel, autocast: torch.dtype | None
) -> dict[str, float]:
    """What the oracles say about themselves on the first block, as means over the layers.

    Shares of rows that miss their target and of scores beyond their bound (`Model.observe`). Sharded models are
    left out: outside its forward pass a rank holds only a part of the weights.
    """
    if parallel.sharded or not any(block.attn.reports for block in model.blocks):
        return {}
    with autocasting(model.device, autocast):
        layers = model.observe(first_windows(model, split, 1), rows=False)
    shares: dict[str, list[float]] = {}
    for layer in layers:
        for name, values in layer.items():
            shares.setdefault(name, []).extend(v.item() for v in values if v.ndim == 0)
    return {name: sum(values) / len(values) for name, values in shares.items() if values}


def first_bad(
    model: Model, world: World, micro_batches: Sequence[tuple[Tensor, Tensor]], autocast: torch.dtype | None
) -> tuple[str, bool]:
    """The first tensor, in the order of the computation, that is not finite, if any; and whether the weights are.

    Ranks look at their own shards and micro-batches and agree on the earliest find after each stage, so that none
    of them waits for another that has gone on.
    """
    nowhere = 1 << 40
    names, modules = [name for name, _ in model.named_parameters()], [name for name, _ in model.named_modules()]

    def outputs() -> list[int]:
        found = [_first_bad_output(model, inputs, targets, autocast) for inputs, targets in micro_batches]
        return [modules.index(name) for name in found if name is not None]

    stages: tuple[tuple[str, list[str], Callable[[], list[int]]], ...] = (
        ("the parameter", names, lambda: _bad(model.parameters())),
        ("the output of", modules, outputs),
        ("the gradient of", names, lambda: _bad(p.grad for p in model.parameters())),
    )
    for what, called, look in stages:
        first = -world.largest(-min(look(), default=nowhere))
        if first != nowhere:
            return f"{what} '{called[first]}'", what != "the parameter"
    return "", True


def _bad(tensors: Iterable[Tensor | None]) -> list[int]:
    """Where tensors, or what this rank has of them, are not finite."""
    local = [t.to_local() if is_sharded(t) else t for t in tensors]  # type: ignore[union-attr]
    return [i for i, t in enumerate(local) if t is not None and not bool(t.isfinite().all())]


@torch.no_grad()
def _first_bad_output(model: nn.Module, inputs: Tensor, targets: Tensor, autocast: torch.dtype | None) -> str | None:
    """The first submodule whose output is not finite, by running the model once with hooks."""
    found: list[str] = []

    def look(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not found and isinstance(output, Tensor) and not bool(output.isfinite().all()):
            found.append(name)

    hooks = [module.register_forward_hook(partial(look, name)) for name, module in model.named_modules() if name]
    try:
        with autocasting(inputs.device, autocast), kernels.off():  # in fused passes modules are not called
            model(inputs, targets, loss_only=True)
    except InputError:
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None
