"""How each attention takes the decoding step of one token per row (rows.py).

A step is called with the walk through the plan, the attention, the point where it is asked, its slot and values to mix
in, and returns the answer (B, d) and its own values, which later calls may mix in. That of a Hamiltonian attention is
called with the momenta instead of values, and returns its fields.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stepformer.ops import Linear
from stepformer.oracles.constrained import ConstrainedAttention, EntropyAttention, KLAttention
from stepformer.oracles.hamiltonian import RIDGE, HamiltonianAttention
from stepformer.oracles.linear import LinearAttention, LinearHamiltonian
from stepformer.oracles.softmax import QK_NORM_EPS, MultiHeadAttention, SoftmaxAttention
from stepformer.rules.coefficients import CoefficientBank


def has_plain_layers(module: nn.Module) -> bool:
    """Whether its layers mean their weights: nobody has put another kind of layer in the place of one."""
    return all(type(layer) in (Linear, nn.Linear, CoefficientBank) for layer in module.children())


def known(attn: Any, context: int) -> Callable[..., Any] | None:
    """The step of an attention under its options; None if it is called as it is."""
    step = STEPS.get(type(attn))
    if not has_plain_layers(attn):
        return None
    if isinstance(attn, MultiHeadAttention) and attn.head_dim & (attn.head_dim - 1):
        return None
    if isinstance(attn, ConstrainedAttention):
        from stepformer.ops.row_attention import LONGEST

        return step if context <= LONGEST else None
    return None if isinstance(attn, HamiltonianAttention) and attn.rotary else step


def _softmax(walk: Any, attn: Any, point: Any, slot: Any, mix: Any) -> tuple[Tensor, Tensor]:
    qkv = walk.fast.linear(point, attn.qkv.weight, attn.qkv.bias)
    eps = QK_NORM_EPS if attn.qk_norm else None
    seen = walk.fast.attend(qkv, slot.stored["k"], slot.stored["v"], walk.where, mix, eps)
    return walk.fast.linear(seen, attn.out.weight, attn.out.bias), qkv[:, 2 * attn.d_model :]


def _constrained(walk: Any, attn: Any, point: Any, slot: Any, mix: Any) -> tuple[Tensor, Tensor]:
    from stepformer.ops.row_attention import Prior, Radius, constrained

    linear = walk.fast.linear
    qkv = linear(point, attn.qkv.weight, attn.qkv.bias)
    ratio = attn.ratio
    if attn.target == "head":
        ratio = attn.coefficients.value("r")
    elif attn.target == "token":
        ratio = linear(point, attn.ratio_map.weight, attn.coefficients.get_parameter("r"), activation="sigmoid")
    prior = None
    if isinstance(attn, KLAttention) and attn.prior != "uniform":
        keep = attn.coefficients.value("keep") if attn.prior == "carried" else None
        prior = Prior(walk.remembered.get("log_prior") if attn.prior_table is None else attn.prior_table, keep)
    form = "kl" if isinstance(attn, KLAttention) else attn.target_form
    eps = QK_NORM_EPS if attn.qk_norm else None
    seen, log_weights = constrained(
        qkv, slot.stored["k"], slot.stored["v"], walk.where, mix, eps, Radius(form, ratio, attn.ceiling), prior
    )
    if log_weights is not None:
        walk.remembered["log_prior"] = log_weights
    return linear(seen, attn.out.weight, attn.out.bias), qkv[:, 2 * attn.d_model :]


def _with_input(walk: Any, point: Any, *weights: Tensor) -> tuple[Tensor, Tensor]:
    """The point itself, and both products of it (B, 2 d)."""
    if isinstance(point, Tensor):
        return point, walk.fast.linear(point, weights[0], second=weights[1])
    point.of.wanted.append(point.name)
    products = walk.fast.linear(point, weights[0], second=weights[1])
    return point.stored(), products


def _linear(walk: Any, attn: Any, point: Any, slot: Any, mix: Any) -> tuple[Tensor, Tensor]:
    from stepformer.ops.row_fields import advance_state

    u, products = _with_input(walk, point, attn.kernel.weight, attn.value.weight)
    q, values = products[:, : attn.d_model], products[:, attn.d_model :]
    h = attn.coefficients.value("h")
    return advance_state(q, u, values, slot.state, walk.where, attn.n0, h, mix), values


class LinearRows:
    """F and G of linear attention for one token of each row."""

    def __init__(self, walk: Any, attn: Any, point: Any, momentum: Callable[[], Tensor], slot: Any) -> None:
        from stepformer.ops.row_fields import advance_state

        self.walk, self.attn, self.slot, self.advance = walk, attn, slot, advance_state
        self.u, products = _with_input(walk, point, attn.kernel.weight, attn.value.weight)
        self.q, self.values = products[:, : attn.d_model], products[:, attn.d_model :]
        self.y = momentum().flatten(0, 1).contiguous()
        self.own = advance_state(self.q, self.u, self.y, slot.state, walk.where, attn.n0)

    def scaled_velocity(self) -> tuple[Tensor, Tensor]:
        return self.own[:, None], self.walk.ones

    def velocity(self, y: Tensor) -> Tensor:
        y = y.flatten(0, 1).contiguous()
        found: Tensor = self.advance(self.q, self.u, y, self.slot.moved, self.walk.where, self.attn.n0)
        return found[:, None]

    def force(self) -> Tensor:
        """V u - A (S y) / n."""
        # not by a kernel that asks for its weight before it waits: this step has just written the state
        total = torch.bmm(self.slot.state, self.y[..., None])[..., 0]
        found = self.walk.fast.linear(total, self.attn.kernel.weight)
        count = self.attn.n0 or self.walk.counts
        return torch.sub(self.values, found / count)[:, None]


class SoftmaxRows:
    """F and G of softmax Hamiltonian attention for one token of each row."""

    def __init__(self, walk: Any, attn: Any, point: Any, momentum: Callable[[], Tensor], slot: Any) -> None:
        from stepformer.ops.row_fields import Hamiltonian, hamiltonian

        self.walk, self.attn = walk, attn
        key = attn.query if attn.key is None else attn.key
        qk = walk.fast.linear(point, attn.query.weight, second=key.weight)
        y = momentum().flatten(0, 1).contiguous()
        self.by = self.lower(y)
        query = attn.force == "query"
        how = Hamiltonian(attn.tau, attn.score_bound, attn.n0, attn.coordinates, query, attn.kappa_now())
        self.total, inverse = hamiltonian(qk, y, self.by, slot.stored, walk.where, how)
        self.factor = inverse if attn.kernels == 1 else inverse.mean(dim=1, keepdim=True)

    def lower(self, y: Tensor) -> Tensor:
        """B y."""
        attn = self.attn

        def metric() -> Tensor:
            if attn.metric != "learned":
                return attn.metric_matrix().mT
            root = attn.weight("root").float()
            return root @ root.mT + RIDGE * torch.eye(len(root), device=root.device)

        found: Tensor = self.walk.fast.linear(y, self.walk.step.of_weights((attn, "metric"), metric))
        return found

    def scaled_velocity(self) -> tuple[Tensor, Tensor]:
        return self.by[:, None], self.factor

    def velocity(self, y: Tensor) -> Tensor:
        return (self.lower(y.flatten(0, 1).contiguous()) * self.factor)[:, None]

    def force(self) -> Tensor:
        attn = self.attn
        turned = self.walk.step.of_weights((attn, "query"), lambda: attn.weight("query").mT)
        found: Tensor = self.walk.fast.linear(self.total, turned)
        return found[:, None]


STEPS: dict[type, Callable[..., Any]] = {
    SoftmaxAttention: _softmax,
    EntropyAttention: _constrained,
    KLAttention: _constrained,
    LinearAttention: _linear,
    LinearHamiltonian: LinearRows,
    HamiltonianAttention: SoftmaxRows,
}
