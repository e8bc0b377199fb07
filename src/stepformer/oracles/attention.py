"""Attention oracles: what a token gathers from the tokens before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stepformer.base.errors import ComponentError
from stepformer.base.registry import Component, Registry, Selection
from stepformer.ops.slots import Slot
from stepformer.oracles.caches import Call
from stepformer.rules.hamiltonian import Fields


class Attention(Component, nn.Module):
    """An attention oracle: `forward(u, call)` maps normalised tokens (B, T, d) to their update (B, T, d).

    It must be causal, and it declares what one call has to remember (`new_slot`) for incremental decoding.
    Parameters start by their role (`stepformer.model.roles`); a method `initialise` may set others afterwards. Learned
    scalars of its own live in a `CoefficientBank` called `coefficients`.
    """

    output_map: str | None = "out"  # its weight starts smaller the deeper the model; None if there is no such map
    stacked: Mapping[str, int] = {}  # weights that hold several matrices (optim.build.stacked_parts)
    has_values = False  # whether it gathers values and passes them through `call.mix_values` (value residual)
    has_fields = False  # whether it is a Hamiltonian attention: `fields` instead of `forward`
    moves_with_new_momentum = False  # whether its integrator asks for a velocity at newer momenta; set by the block
    takes_context = False  # whether its __init__ is also given the longest sequence, `context`
    reports = False  # whether it tells `call.observe` something besides entropy and energy
    can_rotate = True  # whether rotary positions have a meaning
    can_bias = True  # whether its maps may have biases

    def __init__(self, d_model: int = 0, n_head: int = 1, *, bias: bool = False, rotary: bool = False, **options: Any):
        super().__init__()
        self.d_model, self.n_head, self.head_dim, self.rotary = d_model, n_head, d_model // n_head, rotary
        self.set_options(options)

    def unused(self, *, first: bool, calls: int) -> tuple[str, ...]:
        """Parameters that cannot reach the logits in the first block, or when a block calls it so many times."""
        return ()

    def new_slot(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> Slot:
        """The empty memory of one call for so many rows and tokens, such as a `TokenSlot`. Define this one."""
        raise ComponentError(f"{type(self).__name__} does not say what decoding has to remember: define new_slot().")

    def forward(self, u: Tensor, call: Call) -> Tensor:
        """What each of the normalised tokens u (B, T, d) gathers from those it sees. Define this one.

        Where `call.next_slot()` gives a slot, the tokens follow what it holds.
        """
        raise ComponentError(f"{type(self).__name__} does not attend: define forward().")

    def fields(self, u: Tensor, y: Tensor, call: Call) -> Fields:
        """For a Hamiltonian attention: its velocity and force at normalised tokens u and momenta y (B, T, d)."""
        raise ComponentError(f"{type(self).__name__} has no fields: define fields().")

    @classmethod
    def refusals(cls, config: Selection) -> list[str]:
        found = super().refusals(config)
        if config.positions == "rotary" and not cls.can_rotate:
            found.append(
                f"Attention '{cls.name}' has nothing that rotary positions could rotate: use positions = 'learned'."
            )
        if config.bias and not cls.can_bias:
            found.append(
                f"Attention '{cls.name}' is made of bilinear forms, which a bias would break: use bias = false."
            )
        return found

    # for Hamiltonian attentions: which parameters do nothing in special places

    @classmethod
    def forces_at_rest(cls, config: Selection) -> bool:
        """Whether there is a force where all momenta are zero."""
        return True

    @classmethod
    def idle_at_rest(cls, config: Selection) -> tuple[str, ...]:
        """Parameters without effect while all momenta are zero."""
        return ()

    @classmethod
    def idle_without_force(cls, config: Selection) -> tuple[str, ...]:
        """Parameters that only the force uses."""
        return ()


attentions: Registry[Attention] = Registry("attention", Attention, "write-your-own-attention")
register_attention = attentions.register
"""Class decorator: `@register_attention("my-attention", equation="...")` (see `Registry.register`)."""
