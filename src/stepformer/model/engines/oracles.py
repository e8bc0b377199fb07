"""Fast versions of what the oracles mean: the same sums by kernels, for plain causal tokens that nobody watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stepformer.ops import Linear, as_products, faster, kernels, product_dtype
from stepformer.ops.linear import trainable_by_kernels
from stepformer.ops.sharding import is_sharded
from stepformer.oracles.caches import Call
from stepformer.oracles.constrained import ConstrainedAttention, EntropyAttention, KLAttention
from stepformer.oracles.hamiltonian import HamiltonianAttention
from stepformer.oracles.linear import BilinearAttention, LinearAttention, LinearHamiltonian
from stepformer.oracles.mlp import MLP, GeluMLP, SquaredReluMLP, SwigluMLP, TanhGeluMLP
from stepformer.oracles.softmax import QK_NORM_EPS, MultiHeadAttention, SoftmaxAttention

CUDA_CHUNK = 1024  # a state of d x d for so many tokens costs less to move than to multiply
LONGEST = 16_384  # tokens, as a kernel of Hamiltonian attention holds a whole row of scores
MLPS = (GeluMLP, TanhGeluMLP, SquaredReluMLP, SwigluMLP)  # kernels know their activations by these names
ACTIVATIONS: dict[str, Callable[..., Any]] = {mlp.name: mlp.activation for mlp in MLPS}


def unlike_training(call: Call, *tensors: Tensor, watched: bool = False) -> str | None:
    """Why a call is not one of training: all tokens from the first on, all visible before; nobody watches, or may."""
    if call.slots is not None:
        return "it continues a cache"
    if call.restricted:
        return "its tokens do not all see those before them"
    if call.observe is not None and not watched:
        return "somebody watches it"
    if not kernels.usable(*tensors) or product_dtype(*tensors) not in kernels.DTYPES:
        return "kernels cannot take these tensors"
    return None


# MLPs


def _refuses_layer(mlp: MLP, h: Tensor) -> str | None:
    down = mlp.down
    if type(down) is not Linear or not kernels.may_replace(down):
        return "its output layer is not a plain linear layer"
    return None if trainable_by_kernels(h, down.weight) else "there is no gradient to save"


def _with_activation(kind: str) -> None:
    @faster(MLP.project, also=(ACTIVATIONS[kind],), unless=_refuses_layer)
    def project(mlp: MLP, h: Tensor) -> Tensor:
        from stepformer.ops.linear_kernels import activated_linear

        return activated_linear(h, mlp.down.weight, mlp.down.bias, kind)


for _kind in ACTIVATIONS:
    _with_activation(_kind)


# queries, keys and values


def _refuses_heads(attention: MultiHeadAttention, qkv: Tensor, call: Call) -> str | None:
    if call.slots is not None or call.mixes or not kernels.may_replace(attention.qkv):
        return "it continues a cache, or somebody sees the joint product"
    if attention.head_dim % 2 or not (attention.qk_norm or attention.rotary or call.mixed is not None):
        return "there is nothing to do"
    return None


@faster(MultiHeadAttention.in_heads, unless=_refuses_heads)
def _heads(attention: MultiHeadAttention, qkv: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    from stepformer.ops.heads_pass import heads_pass

    mixed = call.mixed
    q, k, v, earlier = heads_pass(
        qkv,
        attention.n_head,
        eps=QK_NORM_EPS if attention.qk_norm else None,
        rotary=attention.rotary,
        weights=mixed.weights if mixed is not None else None,
        earlier=mixed.earlier if mixed is not None else None,
        shares=mixed is not None,
    )
    if mixed is not None:
        mixed.earlier = earlier
    return q, k, v


# softmax attention


def _refuses_softmax(attention: SoftmaxAttention, q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    if attention.attention_backend != "sdpa" or call.restricted or q.shape[2] != k.shape[2]:
        return "it is not plain causal attention"
    from stepformer.ops.cudnn_attention import serves

    return None if serves(q, k, v) else "cuDNN does not serve these heads"


@faster(SoftmaxAttention.attend, unless=_refuses_softmax)
def _softmax(attention: SoftmaxAttention, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    from stepformer.ops.cudnn_attention import causal_attention

    return causal_attention(q, k, v)


def _refuses_documents(attention: SoftmaxAttention, q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    if attention.attention_backend != "sdpa" or call.documents is None or call.slots is not None:
        return "it is not attention inside documents, all tokens from the first on"
    if call.observe is not None or not kernels.usable(q, k, v):
        return "somebody watches it, or kernels cannot take these tensors"
    from stepformer.ops.document_attention import takes

    return None if takes(q, k, v) else "these heads do not fit the kernels"


@faster(SoftmaxAttention.attend, unless=_refuses_documents)
def _documents(attention: SoftmaxAttention, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    from stepformer.ops.document_attention import document_attention

    assert call.documents is not None
    return document_attention(q, k, v, call.documents.origins, call.documents.ends())


# constrained attention


def _refuses_constrained(
    attention: ConstrainedAttention, q: Tensor, k: Tensor, v: Tensor, radius: Tensor, call: Call
) -> str | None:
    if call.restricted or call.slots is not None or call.observe is not None or not kernels.usable(q, k, v):
        return "it is not plain causal attention that nobody watches"
    from stepformer.ops.constrained import takes

    square = getattr(attention, "prior", "uniform") != "uniform"
    return None if takes(q, k, v, square=square) else "these heads do not fit the kernels"


@faster(
    ConstrainedAttention.attend,
    also=(ConstrainedAttention.log_prior, ConstrainedAttention.remember),
    unless=_refuses_constrained,
)
def _constrained(attention: EntropyAttention, q: Tensor, k: Tensor, v: Tensor, radius: Tensor, call: Call) -> Tensor:
    from stepformer.ops.constrained import constrained_attention

    return constrained_attention(q, k, v, radius, attention.ceiling)


@faster(ConstrainedAttention.attend, also=(KLAttention.log_prior, KLAttention.remember), unless=_refuses_constrained)
def _with_prior(attention: KLAttention, q: Tensor, k: Tensor, v: Tensor, radius: Tensor, call: Call) -> Tensor:
    from stepformer.ops.constrained import constrained_attention, prior_attention, table_attention

    if attention.prior == "uniform":
        return constrained_attention(q, k, v, radius, attention.ceiling)
    if attention.prior_table is not None:
        return table_attention(q, k, v, radius, attention.prior_table, attention.ceiling)
    below = call.memory.get("log_prior")
    keep = None if below is None or attention.prior == "previous" else attention.coefficients.value("keep")
    packed = q.dtype != torch.float32
    gathered, log_weights = prior_attention(q, k, v, radius, below, keep, attention.ceiling, packed=packed)
    attention.remember(log_weights, call)
    return gathered


# linear attention


def per_token(attention: BilinearAttention, call: Call) -> Tensor:
    """nu of a plain call, (T,) in fp32."""
    counts = call.counts()
    return torch.full_like(counts, 1 / attention.n0, dtype=torch.float32) if attention.n0 else counts.reciprocal()


def _refuses_sums(attention: LinearAttention, u: Tensor, values: Tensor, call: Call) -> str | None:
    return unlike_training(call, u, values, watched=True)  # who watches the energy has been told it before


@faster(LinearAttention.attend, also=(BilinearAttention.gather,), unless=_refuses_sums)
def _linear(attention: LinearAttention, u: Tensor, values: Tensor, call: Call) -> Tensor:
    from stepformer.ops.linear_flow import causal_sum
    from stepformer.ops.token_rows import scale_rows

    h, segment = attention.coefficients.value("h"), attention.chunk_of(u.shape[1], CUDA_CHUNK)
    total = causal_sum(*as_products(attention.kernel(u), u, values), segment=segment)
    return scale_rows(total, h.float() * per_token(attention, call))


@faster(
    LinearHamiltonian.fields,
    also=(BilinearAttention.gather,),
    unless=lambda attention, u, y, call: unlike_training(call, u, y),
)
class FusedLinearFields:
    """The same F and G of plain causal tokens by kernels, products in the dtype of autocast.

    Both are computed together when the first of them is asked for, unless the velocity will be asked for at a newer
    momentum. In bf16 operands, scores and sums are rounded, 2^-9 relative each; all sums are fp32.
    """

    def __init__(self, attention: LinearHamiltonian, u: Tensor, y: Tensor, call: Call) -> None:
        from stepformer.ops import linear_fields, linear_flow, token_rows

        self.sums, self.flow, self.rows = linear_fields, linear_flow, token_rows
        self.attention, self.y = attention, y
        self.u, self.momenta = as_products(u, y)
        self.segment, self.nu = attention.chunk_of(u.shape[1], CUDA_CHUNK), per_token(attention, call)
        self.together = not attention.moves_with_new_momentum
        self.queries: Tensor | None = None
        self.both: tuple[Tensor, Tensor] | None = None
        layers = (attention.kernel, attention.value)
        original = all(type(m) is Linear and m.bias is None for m in layers) and kernels.may_replace(*layers)
        weights = tuple(m.weight for m in layers) if original else ()
        self.own_layers = original and kernels.usable(*weights) and not any(map(is_sharded, weights))

    def lifted(self) -> Tensor:
        """A u."""
        if self.queries is None:
            self.queries = self.attention.kernel(self.u)
        return self.queries

    def shared(self) -> tuple[Tensor, Tensor]:
        """F at the own y before the division by n_i, and G."""
        if self.both is None and self.own_layers:
            kernel, value = self.attention.kernel.weight, self.attention.value.weight
            self.both = self.sums.linear_fields(self.u, self.momenta, kernel, value, self.nu, segment=self.segment)
        if self.both is None:
            total, gathered = self.flow.hamiltonian_sums(self.lifted(), self.u, self.momenta, segment=self.segment)
            self.both = total, self.force_from(gathered)
        return self.both

    def total(self, y: Tensor) -> Tensor:
        """F before the division by n_i."""
        if y is self.y and self.together:
            return self.shared()[0]
        return self.flow.causal_sum(self.lifted(), self.u, y.to(self.u.dtype), segment=self.segment)

    def force_from(self, gathered: Tensor) -> Tensor:
        """G from its sum before the division by n_i."""
        kernel, value = self.attention.kernel, self.attention.value
        if self.own_layers:
            return self.sums.sum_of_linear_layers(
                self.u, value.weight, self.rows.scale_rows(gathered, -self.nu), kernel.weight
            )
        difference: Tensor = value(self.u) - kernel(self.rows.scale_rows(gathered, self.nu))
        return difference

    def scaled_velocity(self) -> tuple[Tensor, Tensor]:
        """F at the own y as rows (B, T, d) and their factors (B, T) in fp32, which the caller multiplies."""
        return self.total(self.y), self.nu.expand(self.y.shape[:-1])

    def velocity(self, y: Tensor) -> Tensor:
        return self.rows.scale_rows(self.total(y), self.nu, y.dtype)

    def force(self) -> Tensor:
        if self.together:
            return self.shared()[1]
        return self.force_from(self.flow.causal_sum(self.momenta, self.momenta, self.u, segment=self.segment))


# softmax Hamiltonian attention


def _refuses_fields(attention: HamiltonianAttention, u: Tensor, y: Tensor, call: Call) -> str | None:
    return "it has too many tokens" if u.shape[1] > LONGEST else unlike_training(call, u, y)


@faster(
    HamiltonianAttention.turned,
    unless=lambda attention, t, call, back=False: "it continues a cache" if call.slots is not None else None,
)
def _turned(attention: HamiltonianAttention, t: Tensor, call: Call, back: bool = False) -> Tensor:
    from stepformer.ops.rotation import rotated

    return rotated(t, back)


@faster(
    HamiltonianAttention.fields,
    also=(HamiltonianAttention.scores, HamiltonianAttention.lower),
    unless=_refuses_fields,
)
class FusedFields:
    """The same F and G of plain causal tokens by kernels, products in the dtype of autocast.

    In bf16 q, k, By and the weights of the sums are rounded, 2^-9 relative each; scores, z, a and all sums are fp32.
    """

    def __init__(self, attention: HamiltonianAttention, u: Tensor, y: Tensor, call: Call) -> None:
        from stepformer.ops import hamiltonian, token_rows

        self.rows = token_rows
        self.attention, self.call, self.y, self.dtype = attention, call, y, y.dtype
        q, k = as_products(*attention.queries_and_keys(u, call))
        self.metric = attention.metric_matrix()
        self.by = self.lower(y)
        a = self.rows.row_dot(y, self.by, 1 / attention.coordinates)
        row = attention.force == "row"
        kappa = attention.kappa_now() * torch.full((), 1.0 if row else 0.5, device=a.device)
        self.total, self.log_z = hamiltonian.force_and_log_z(
            q,
            k,
            a,
            kappa,
            tau=attention.tau,
            bound=attention.score_bound,
            n0=attention.n0,
            factor=attention.tau / attention.kernels,
            keys=row,
            chunk=attention.query_chunk,
        )

    def lower(self, y: Tensor) -> Tensor:
        y, metric = as_products(y, self.metric)
        return F.linear(y, metric)

    def factor(self) -> Tensor:
        """1 / z, (B, T) in fp32; the mean over kernels if there are several."""
        if self.attention.kernels == 1:
            return torch.exp(-self.log_z.squeeze(1))
        return torch.exp(-self.log_z).mean(dim=1)

    def scaled_velocity(self) -> tuple[Tensor, Tensor]:
        """F at the own y as rows (B, T, d) and their factors (B, T) in fp32, which the caller multiplies."""
        return self.by, self.factor()

    def velocity(self, y: Tensor) -> Tensor:
        return self.rows.scale_rows(self.by if y is self.y else self.lower(y), self.factor(), self.dtype)

    def force(self) -> Tensor:
        return self.attention.from_keys(self.total, self.call, self.total.dtype)
