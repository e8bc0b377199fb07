"""Operators of `torch.library`: what the files with kernels would repeat for each of theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

Kept = tuple[Sequence[Tensor | None], Sequence[Any]]


def operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make a function the operator `stepformer::name`, which changes none of its arguments.

    `fake` takes the same arguments and gives the outputs unwritten, for compilers.
    """

    def register(run: Callable[..., Any]) -> CustomOpDef:
        made: CustomOpDef = torch.library.custom_op(f"stepformer::{name}", run, mutates_args=())
        made.register_fake(fake)
        return made

    return register


def unwritten(t: Tensor, wanted: bool = True, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for something like `t`; operators return tensors only, so an empty one stands for what nobody wants."""
    return t.new_empty(t.shape if wanted else 0, dtype=dtype)


def traced(t: Tensor) -> bool:
    """Whether a compiler is looking: `is_compiling` says no while it traces the backward pass of an operator."""
    return torch.compiler.is_compiling() or type(t) not in (Tensor, torch.nn.Parameter)


def shaped_as(*places: int) -> Callable[..., tuple[Tensor, ...]]:
    """A fake whose outputs are like the arguments at these places."""
    return lambda *arguments: tuple(unwritten(arguments[place]) for place in places)


def differentiable(
    forward: CustomOpDef,
    keep: Callable[[tuple[Any, ...], Any], Kept],
    gradients: Callable[..., Sequence[Tensor | None]],
    *,
    unused: bool = False,
) -> None:
    """Register an operator's derivative.

    `keep(inputs, outputs)` gives the tensors and the constants that it needs; `gradients(needs, tensors, constants,
    *grads)` those of the first inputs, of which some may not be asked for (`needs`); the others have none. `unused`:
    whether the gradient of an output that nobody has used arrives as None, not as zeros.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, ctx.constants = keep(inputs, output)
        ctx.save_for_backward(*tensors)
        if unused:
            ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        found = gradients(needs, ctx.saved_tensors, ctx.constants, *grads)
        asked = [g if need else None for g, need in zip(found, needs, strict=False)]
        return *asked, *[None] * (len(needs) - len(asked))

    forward.register_autograd(backward, setup_context=setup)
