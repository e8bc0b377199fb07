"""Linear attention: sums over past tokens that a running d x d matrix can carry, in O(T d^2) and constant memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepformer.base.options import integer
from stepformer.base.registry import Selection
from stepformer.ops import Linear, at_least_fp32, operation
from stepformer.ops.causal_sum import causal_sum
from stepformer.ops.slots import StateSlot
from stepformer.oracles.attention import Attention, register_attention
from stepformer.oracles.caches import Call
from stepformer.rules.coefficients import CoefficientBank, positive
from stepformer.rules.hamiltonian import SYMP, Fields

CHUNK = 128


class BilinearAttention(Attention):
    """What linear attentions share: free matrices A (`kernel`) and V (`value`), no heads, no output map."""

    options = {
        "n0": integer(0, minimum=0, help="divide sums by this constant; 0: by the number of visible tokens"),
        "chunk": integer(
            0, minimum=0, help="tokens per chunk; 0: one up to 2 d_model tokens, beyond chunks of 128 (1024 on CUDA)"
        ),
    }
    output_map = None
    can_rotate = False
    can_bias = False

    n0: int
    chunk: int

    def __init__(self, d_model: int, n_head: int, **settings: Any) -> None:
        super().__init__(d_model, n_head, **settings)
        self.kernel = Linear(d_model, d_model, bias=False)
        self.value = Linear(d_model, d_model, bias=False)

    def new_slot(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> StateSlot:
        return StateSlot(batch, self.d_model, device, dtype, moved=self.moves_with_new_momentum)

    def chunk_of(self, length: int, usual: int) -> int:
        """Tokens between two states, `usual` if there are many; 0: all at once."""
        # The masked product costs T^2 d, chunks cost T d^2: up to about 2 d tokens the first is cheaper.
        return 0 if self.chunk == 0 and length <= 2 * self.d_model else self.chunk or usual

    def gather(self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """nu_i sum_j (q_i.k_j) v_j with nu = 1 / n_i in fp32 at least, and the new state if anyone asks for one."""
        with torch.autocast(q.device.type, enabled=False):  # operands too: a running sum needs the digits
            q, k, v = at_least_fp32(q, k, v)
            chunk = self.chunk_of(q.shape[1], CHUNK)
            total, state = causal_sum(q, k, v, state, chunk, call.positions, call.origins, call.lengths)
        if self.n0:
            return total / self.n0, state
        return total / call.counts()[..., None].to(total.dtype), state


@register_attention(
    "linear",
    equation="g_i = (h / n_i) sum_{j<=i} (u_j.A u_i) V u_j;  n_i visible tokens, h learned, one kernel for all heads",
    cite=SYMP,
)
class LinearAttention(BilinearAttention):
    """Causal linear attention with one bilinear kernel; its memory does not grow with the text."""

    has_values = True

    def __init__(self, d_model: int, n_head: int, **settings: Any) -> None:
        super().__init__(d_model, n_head, **settings)
        self.coefficients = CoefficientBank({"attn": {"h": positive(1.0, "step")}})

    def forward(self, u: Tensor, call: Call) -> Tensor:
        own = self.value(u)
        if call.observe is not None and call.rows:
            call.observe("energy", -0.5 * (u * own).sum(dim=-1)[:, None])
        return self.attend(u, call.mix_values(own), call)

    @operation
    def attend(self, u: Tensor, values: Tensor, call: Call) -> Tensor:
        """(h / n_i) sum_{j<=i} (u_j.A u_i) v_j."""
        slot = call.next_slot()
        state = slot.state if isinstance(slot, StateSlot) else None
        gathered, state = self.gather(self.kernel(u), u, values, call, state)
        if isinstance(slot, StateSlot) and state is not None:
            slot.state = state
        return self.coefficients.value("h") * gathered.to(u.dtype)


@register_attention(
    "linear-hamiltonian",
    equation="F_i = (1/n_i) sum_{j<=i} (u_j.A u_i) y_j;  G_i = V u_i - (1/n_i) sum_{j<=i} (y_i.y_j) A u_j",
    cite=SYMP,
)
class LinearHamiltonian(BilinearAttention):
    """The Hamiltonian of linear attention: one state sum_j u_j y_j^T serves both fields."""

    has_fields = True

    @classmethod
    def idle_at_rest(cls, config: Selection) -> tuple[str, ...]:
        return ("kernel",)

    @classmethod
    def idle_without_force(cls, config: Selection) -> tuple[str, ...]:
        return ("value",)

    @operation
    def fields(self, u: Tensor, y: Tensor, call: Call) -> Fields:
        slot = call.next_slot()
        return LinearFields(self, u, y, call, slot if isinstance(slot, StateSlot) else None)


class LinearFields:
    """F and G of linear attention at one (u, y)."""

    def __init__(self, attention: LinearHamiltonian, u: Tensor, y: Tensor, call: Call, slot: StateSlot | None) -> None:
        self.attention, self.u, self.y, self.call, self.slot = attention, u, y, call, slot
        self.before = slot.state if slot is not None else None
        if call.observe is not None and call.rows:
            velocity, _ = attention.gather(attention.kernel(u), u, y, call, self.before)
            energy = 0.5 * ((y * velocity).sum(dim=-1) - (u * attention.value(u)).sum(dim=-1))
            call.observe("energy", energy[:, None])

    def velocity(self, y: Tensor) -> Tensor:
        own = y is self.y
        before = self.before if own or self.slot is None else self.slot.moved
        field, after = self.attention.gather(self.attention.kernel(self.u), self.u, y, self.call, before)
        if self.slot is not None and after is not None:
            setattr(self.slot, "state" if own else "moved", after)
        return field.to(y.dtype)

    def force(self) -> Tensor:
        before = None if self.before is None else self.before.mT
        field, after = self.attention.gather(self.y, self.y, self.u, self.call, before)
        if self.slot is not None and after is not None:
            self.slot.state = after.mT
        return self.attention.value(self.u) - self.attention.kernel(field.to(self.u.dtype))
