"""Adapters that a library such as PEFT puts around a model's maps, for code that reads a weight.

Calling a map is always right: the wrapper adds what its adapter has learned. But Hamiltonian attention multiplies
weights with each other, and the token table is also the head. They ask here for the weight that a wrapped map stands
for. PEFT is not imported: a wrapper is known by what it holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stepformer.base.errors import InputError

HELD = {"base_layer", "original_module"}  # what adapters and whole copies (`modules_to_save`) call the wrapped module


def is_adapted(module: nn.Module) -> bool:
    """Whether this module stands in the place of another one."""
    return not HELD.isdisjoint(module._modules)


def weight_of(layer: nn.Module, why: str) -> Tensor:
    """The weight of a map or a table with what its active adapters add; `why` it is read begins a refusal."""
    wrapper: Any = layer
    if not is_adapted(layer) or hasattr(wrapper, "modules_to_save"):
        return wrapper.weight
    if not hasattr(wrapper, "base_layer"):
        raise refusal(why, f"'{type(layer).__name__}' is not")
    if wrapper.merged and wrapper.disable_adapters:
        wrapper.unmerge()  # as a call would
    weight = weight_of(wrapper.base_layer, why)
    if wrapper.merged or wrapper.disable_adapters:
        return weight
    for name in wrapper.active_adapters:
        problem = adapter_problem(wrapper, name)
        if problem:
            raise refusal(why, problem)
        if name in wrapper.lora_A or name in wrapper.lora_embedding_A:
            with torch.autocast(weight.device.type, enabled=False):
                weight = weight + wrapper.get_delta_weight(name).to(weight.dtype)
    return weight


def adapter_problem(wrapper: Any, name: str) -> str | None:
    """Why an adapter is more than a matrix that is added to the weight, and what would help; None if it is not."""
    if not hasattr(wrapper, "lora_A"):
        return f"'{type(wrapper).__module__}' is not"
    if name in getattr(wrapper, "lora_variant", ()) or wrapper.use_dora.get(name):
        return "DoRA and other variants are not"
    if name in wrapper.lora_A and not isinstance(wrapper.lora_dropout[name], nn.Identity):  # tables have no dropout
        return "this one has dropout (set lora_dropout=0)"
    if getattr(wrapper, "lora_bias", {}).get(name):
        return "this one has a bias (set lora_bias=False)"
    if wrapper._forward_pre_hooks:
        return "adapter_names, or another hook, gives each row its own"
    return None


def refusal(why: str, problem: str) -> InputError:
    return InputError(
        f"{why}, so its adapter must be plain LoRA, a matrix that is added, and {problem}: change that, or leave it "
        "out of the adapter's target modules."
    )
