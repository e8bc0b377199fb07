"""Where numbers stopped being finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepformer.base.errors import InputError
from stepformer.model import Model
from stepformer.ops import kernels
from stepformer.training.evaluation import autocasting
from stepformer.training.parallel import World


def first_bad(
    model: Model, world: World, micro_batches: Sequence[tuple[Tensor, Tensor]], autocast: torch.dtype | None
) -> tuple[str, bool]:
    """The first tensor, in the order of the computation, that is not finite, if any; and whether the weights are.

    Ranks look at their own shards and micro-batches and agree on the earliest find after each stage, so that none
    of them waits for another that has gone on.
    """
    nowhere = 1 << 40

    def earliest(found: list[int]) -> int | None:
        first = -world.largest(-min(found, default=nowhere))
        return None if first == nowhere else first

    names = [name for name, _ in model.named_parameters()]
    first = earliest([i for i, p in enumerate(model.parameters()) if not bool(_local(p).isfinite().all())])
    if first is not None:
        return f"the parameter '{names[first]}'", False
    modules = [name for name, _ in model.named_modules()]
    outputs = [first_bad_output(model, inputs, targets, autocast) for inputs, targets in micro_batches]
    first = earliest([modules.index(found) for found in outputs if found is not None])
    if first is not None:
        return f"the output of '{modules[first]}'", True
    gradients = [p.grad for p in model.parameters()]
    bad = [i for i, g in enumerate(gradients) if g is not None and not bool(_local(g).isfinite().all())]
    first = earliest(bad)
    return ("" if first is None else f"the gradient of '{names[first]}'"), True


@torch.no_grad()
def first_bad_output(model: nn.Module, inputs: Tensor, targets: Tensor, autocast: torch.dtype | None) -> str | None:
    """The first submodule whose output is not finite, by running the model once with hooks."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not found and isinstance(output, Tensor) and not bool(output.isfinite().all()):
                found.append(name)

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with autocasting(inputs.device, autocast), kernels.off():  # in fused passes modules are not called
            model(inputs, targets, loss_only=True)
    except InputError:
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
