"""Linear attention: sums over past tokens that a running d x d matrix can carry, in O(T d^2) and constant memory."""

from __future__ import annotations

import torch
from torch import Tensor

from stepformer.base.options import integer
from stepformer.base.registry import Selection
from stepformer.ops import kernels
from stepformer.ops.sharding import is_sharded
from stepformer.oracles.attention import Attention, as_products, at_least_fp32, product_dtype, register_attention
from stepformer.oracles.caches import Call, StateSlot
from stepformer.oracles.maps import Linear
from stepformer.rules.coefficients import CoefficientBank, positive
from stepformer.rules.hamiltonian import SYMP, Fields

CHUNK = 128
CUDA_CHUNK = 1024  # a state of d x d for so many tokens costs less to move than to multiply


def gather(
    q: Tensor, k: Tensor, v: Tensor, call: Call, state: Tensor | None = None, chunk: int = 0
) -> tuple[Tensor, Tensor]:
    """sum_{j visible to i} (q_i.k_j) v_j for tokens (B, T, d), and the state sum_j k_j v_j^T after them.

    state: what earlier tokens left, (B, d, d). Inside a chunk the sum is a masked product, between chunks the state
    carries it; `chunk` = 0 means one chunk. Padding leaves no trace, and with documents the state holds the last one.
    """
    batch, length, _ = q.shape
    chunk = chunk or length
    state = q.new_zeros(batch, k.shape[-1], v.shape[-1]) if state is None else state.to(q.dtype)
    gathered = []
    for begin in range(0, length, chunk):
        end = min(begin + chunk, length)
        qs, ks, vs = q[:, begin:end], k[:, begin:end], v[:, begin:end]
        within = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).tril()
        before = qs @ state
        if call.origins is not None:
            positions, origins = call.positions.expand(batch, length), call.origins
            within = within & (positions[:, None, begin:end] >= origins[:, begin:end, None])
            before = before * (origins[:, begin:end, None] < positions[:, begin, None, None])
        gathered.append((qs @ ks.mT).masked_fill(~within, 0.0) @ vs + before)
        if call.lengths is not None:
            real = torch.arange(begin, end, device=q.device) < call.lengths[:, None]
            ks = ks * real[..., None]
        if call.origins is not None:
            last = torch.full_like(origins[:, 0], end - 1)  # the last token so far: whose document goes on
            last = last if call.lengths is None else torch.minimum(last, call.lengths - 1)
            origin = origins.gather(1, last[:, None])
            ks = ks * (positions[:, begin:end] >= origin)[..., None]
            state = state * (origin < positions[:, begin, None])[..., None]
        state = state + ks.mT @ vs
    return torch.cat(gathered, dim=1), state


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

    def __init__(self, d_model: int, n_head: int, *, bias: bool, rotary: bool, n0: int = 0, chunk: int = 0) -> None:
        super().__init__()
        self.d_model, self.n0, self.chunk = d_model, n0, chunk
        self.kernel = Linear(d_model, d_model, bias=False)
        self.value = Linear(d_model, d_model, bias=False)

    def new_slot(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> StateSlot:
        return StateSlot(batch, self.d_model, device, dtype, moved=self.moves_with_new_momentum)

    def runs_kernels(self, call: Call, *tensors: Tensor) -> bool:
        """Whether kernels may gather from these tokens: plain causal ones without a cache."""
        plain = call.slots is None and call.mask is None
        return plain and kernels.usable(*tensors) and product_dtype(*tensors) in kernels.DTYPES

    def segment(self, length: int) -> int:
        """Tokens between two states where kernels run; 0: one chunk."""
        # The masked product costs T^2 d, chunks cost T d^2: up to about 2 d tokens the first is cheaper.
        return 0 if self.chunk == 0 and length <= 2 * self.d_model else self.chunk or CUDA_CHUNK

    def per_token(self, call: Call) -> Tensor:
        """nu of a plain call, (T,) in fp32."""
        counts = call.counts()
        return torch.full_like(counts, 1 / self.n0, dtype=torch.float32) if self.n0 else counts.reciprocal()

    def gather(self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """nu_i sum_j (q_i.k_j) v_j with nu = 1 / n_i in fp32 at least, and the new state if anyone asks for one."""
        if self.runs_kernels(call, q, k, v):
            from stepformer.ops.linear_flow import causal_sum

            total = causal_sum(*as_products(q, k, v), segment=self.segment(q.shape[1]))
            (total,) = at_least_fp32(total)
        else:
            with torch.autocast(q.device.type, enabled=False):  # operands too: a running sum needs the digits
                chunk = self.chunk or (CHUNK if self.segment(q.shape[1]) else 0)
                q, k, v = at_least_fp32(q, k, v)
                total, state = gather(q, k, v, call, state, chunk)
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

    def __init__(self, d_model: int, n_head: int, *, bias: bool, rotary: bool, n0: int = 0, chunk: int = 0) -> None:
        super().__init__(d_model, n_head, bias=bias, rotary=rotary, n0=n0, chunk=chunk)
        self.coefficients = CoefficientBank({"attn": {"h": positive(1.0, "step")}})

    def forward(self, u: Tensor, call: Call) -> Tensor:
        own = self.value(u)
        if call.observe is not None and call.rows:
            call.observe("energy", -0.5 * (u * own).sum(dim=-1)[:, None])
        values = call.mix_values(own)
        original = type(self) is LinearAttention  # a subclass may gather in another way
        if original and self.runs_kernels(call, u, values):
            from stepformer.ops.linear_flow import causal_sum
            from stepformer.ops.token_rows import scale_rows

            h = self.coefficients.value("h")
            total = causal_sum(*as_products(self.kernel(u), u, values), segment=self.segment(u.shape[1]))
            return scale_rows(total, h.float() * self.per_token(call))
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

    def fields(self, u: Tensor, y: Tensor, call: Call) -> Fields:
        original = type(self) is LinearHamiltonian  # a subclass may have changed the equations
        if original and call.observe is None and self.runs_kernels(call, u, y):
            return FusedLinearFields(self, u, y, call)
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
        before = self.before
        if not own and self.slot is not None:
            before = self.slot.moved
        field, after = self.attention.gather(self.attention.kernel(self.u), self.u, y, self.call, before)
        if self.slot is not None and after is not None:
            if own:
                self.slot.state = after
            else:
                self.slot.moved = after
        return field.to(y.dtype)

    def force(self) -> Tensor:
        before = None if self.before is None else self.before.mT
        field, after = self.attention.gather(self.y, self.y, self.u, self.call, before)
        if self.slot is not None and after is not None:
            self.slot.state = after.mT
        return self.attention.value(self.u) - self.attention.kernel(field.to(self.u.dtype))


class FusedLinearFields:
    """The same F and G of plain causal tokens by kernels, products in the dtype of autocast.

    Both are computed together when the first of them is asked for, unless the velocity will be asked for at a newer
    momentum. In bf16 operands, scores and sums are rounded, 2^-9 relative each; all sums are fp32.
    """

    def __init__(self, attention: LinearHamiltonian, u: Tensor, y: Tensor, call: Call) -> None:
        self.attention, self.y = attention, y
        self.u, self.momenta = as_products(u, y)
        self.segment, self.nu = attention.segment(u.shape[1]), attention.per_token(call)
        self.together = not attention.moves_with_new_momentum
        self.queries: Tensor | None = None
        self.both: tuple[Tensor, Tensor] | None = None
        maps = (attention.kernel, attention.value)
        original = all(type(m) is Linear and m.bias is None for m in maps) and kernels.may_replace(*maps)
        weights = tuple(m.weight for m in maps) if original else ()
        self.own_maps = original and kernels.usable(*weights) and not any(map(is_sharded, weights))

    def lifted(self) -> Tensor:
        """A u."""
        if self.queries is None:
            self.queries = self.attention.kernel(self.u)
        return self.queries

    def shared(self) -> tuple[Tensor, Tensor]:
        """F at the own y before the division by n_i, and G."""
        from stepformer.ops.linear_fields import hamiltonian_sums, linear_fields

        if self.both is None and self.own_maps:
            kernel, value = self.attention.kernel.weight, self.attention.value.weight
            self.both = linear_fields(self.u, self.momenta, kernel, value, self.nu, segment=self.segment)
        if self.both is None:
            total, gathered = hamiltonian_sums(self.lifted(), self.u, self.momenta, segment=self.segment)
            self.both = total, self.force_from(gathered)
        return self.both

    def total(self, y: Tensor) -> Tensor:
        """F before the division by n_i."""
        if y is self.y and self.together:
            return self.shared()[0]
        from stepformer.ops.linear_flow import causal_sum

        return causal_sum(self.lifted(), self.u, y.to(self.u.dtype), segment=self.segment)

    def force_from(self, gathered: Tensor) -> Tensor:
        """G from its sum before the division by n_i."""
        from stepformer.ops.linear_fields import sum_of_maps
        from stepformer.ops.token_rows import scale_rows

        kernel, value = self.attention.kernel, self.attention.value
        if self.own_maps:
            return sum_of_maps(self.u, value.weight, scale_rows(gathered, -self.nu), kernel.weight)
        difference: Tensor = value(self.u) - kernel(scale_rows(gathered, self.nu))
        return difference

    def scaled_velocity(self) -> tuple[Tensor, Tensor]:
        """F at the own y as rows (B, T, d) and their factors (B, T) in fp32, which the caller multiplies."""
        return self.total(self.y), self.nu.expand(self.y.shape[:-1])

    def velocity(self, y: Tensor) -> Tensor:
        from stepformer.ops.token_rows import scale_rows

        return scale_rows(self.total(y), self.nu, y.dtype)

    def force(self) -> Tensor:
        if self.together:
            return self.shared()[1]
        from stepformer.ops.linear_flow import causal_sum

        return self.force_from(causal_sum(self.momenta, self.momenta, self.u, segment=self.segment))
