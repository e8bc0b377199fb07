"""Kronecker factors of what a step of a block matrix changes: q(dW) ~ tr(L dW R dW^T) (docs/trust-region.md).

With u what a matrix multiplies, a the attention rows with inverse temperatures beta, o what heads gather, phi the MLP's
activation, rho what the norm after a branch divides by, alpha the step size of the branch:

    W_Q,h   L = lambda/(2 d_h H) E[ beta^2 Cov_a(k) ]         R = E[ u u^T ]
    W_K,h   L = lambda/(2 d_h H) E[ beta^2 q q^T ]            R = E[ Cov_a(u) ]
    W_V,h   L = W_O,h^T W_O,h / d                             R = E[ ubar ubar^T alpha^2 / rho^2 ],  ubar = a.u
    W_O     L = 1 / d                                         R = E[ o o^T alpha^2 / rho^2 ]
    W_up    L = (W_down^T W_down * E[ phi' phi'^T ]) / d      R = E[ u u^T alpha^2 / rho^2 ]
    W_down  L = 1 / d                                         R = E[ phi phi^T alpha^2 / rho^2 ]

A row whose constraint decides beta does not see changes along its scores s: there Cov_a(y) is less
Cov_a(y, s) Cov_a(y, s)^T / Var_a(s). Rotations and norms of queries and keys are pulled back to what W_Q and W_K give.
Of constrained attention a row counts in W_K's L by the trace of its term of R, over the mean of these in its head:
where the largest scores are nearly equal beta is very large, and what is left to change is very little.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stepformer.extras import chosen as chosen_extras
from stepformer.model import Model
from stepformer.model.config import ModelConfig
from stepformer.ops.scores import angles_of
from stepformer.ops.sharding import whole
from stepformer.optim.trust.observing import Inputs, Observation, Rows
from stepformer.oracles.constrained import ConstrainedAttention
from stepformer.oracles.mlp import MLP
from stepformer.oracles.softmax import QK_NORM_EPS, MultiHeadAttention, SoftmaxAttention

AT_ONCE = 1 << 26  # numbers in a tensor of queries times keys times head width


@dataclass(frozen=True)
class Stack:
    """Equally shaped matrices that one parameter holds below each other, each with a region of its own.

    `part` tells them from the parameter's others, as in `changes.local`. L is one number where `left` is 1.
    """

    name: str
    part: str
    begin: int  # the first of its rows
    count: int
    rows: int  # of each matrix
    cols: int
    left: int  # rows of L
    several: tuple[bool, bool]  # whether each matrix has its own L, its own R

    @property
    def key(self) -> str:
        return self.name + self.part

    def of(self, parameter: Tensor) -> Tensor:
        """Its matrices (count, rows, cols) in a tensor of the parameter's shape."""
        return parameter[self.begin : self.begin + self.count * self.rows].unflatten(0, (self.count, self.rows))

    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Of L and R."""
        counts = [self.count if several else 1 for several in self.several]
        return (counts[0], self.left, self.left), (counts[1], self.cols, self.cols)


def stacks(model: Model) -> Iterator[Stack]:
    """All block matrices of an architecture that is not refused."""
    heads, d = model.config.n_head, model.config.d_model
    for i, block in enumerate(model.blocks):
        own = f"blocks.{i}"
        for place, part in enumerate("qkv"):
            several = (True, part != "q")
            yield Stack(f"{own}.attn.qkv.weight", f".{part}", place * d, heads, d // heads, d, d // heads, several)
        yield Stack(f"{own}.attn.out.weight", "", 0, 1, d, d, 1, (False, False))
        branches, hidden = block.mlp.branches, block.mlp.down.in_features
        for place in range(branches):
            part = "" if branches == 1 else (".gate", ".up")[place]
            yield Stack(f"{own}.mlp.up.weight", part, place * hidden, 1, hidden, d, hidden, (False, False))
        yield Stack(f"{own}.mlp.down.weight", "", 0, 1, d, hidden, 1, (False, False))


def refusals(config: ModelConfig) -> list[str]:
    """Why there are no factors of an architecture, in sentences; none if there are."""
    found, attention, mlp = [], config.component("attention"), config.component("mlp")
    if (config.template, config.splitting) != ("gd", "lie-trotter"):
        found.append(
            "optim.name = 'trust' trains plain residual layers only, those of a GPT (vanilla), and these are others: "
            f"template = '{config.template}', splitting = '{config.splitting}'. Train them with optim.name = 'muon'."
        )
    if not _known(attention):
        found.append(
            "optim.name = 'trust' bounds the change of attention rows, and those of attention "
            f"'{config.attention}' are not known to it: use 'softmax', 'entropy' or 'kl'."
        )
    elif "target" in attention.options and config.option("target") == "token":
        found.append("target = 'token' has a matrix for which optim.name = 'trust' has no factors: use 'head'.")
    if "prior" in attention.options and config.option("prior") in ("previous", "carried"):
        found.append(
            f"prior = '{config.option('prior')}' carries a change of rows into all later layers, for which "
            "optim.name = 'trust' has no factors: use prior = 'uniform' or 'learned'."
        )
    if (mlp.forward, mlp.project) != (MLP.forward, MLP.project):
        found.append(f"optim.name = 'trust' has no factors for mlp = '{config.mlp}', which is more than an activation.")
    parts = chosen_extras(config)
    if any(part.changes("values") and part.name != "value-tables" for part in parts):
        found.append(
            "optim.name = 'trust' cannot tell what a step changes where later layers use the values of the first one: "
            "leave out value_residual, or the extra of your own."
        )
    if any(part.changes("enter") for part in parts):
        found.append("optim.name = 'trust' does not follow what an extra (embedding_skip) does to x between layers.")
    if config.weight_sharing != "off":
        found.append("optim.name = 'trust' has factors of one layer at a time: leave weight_sharing out.")
    if config.output_init == "zero":
        found.append(
            "output_init = 'zero' leaves values and the MLP's first layer without effect, hence optim.name = 'trust' "
            "without a bound for them: leave it out."
        )
    return found


def _known(attention: type) -> bool:
    """Whether its rows are those of softmax or constrained attention, as they are written."""
    for kind in (SoftmaxAttention, ConstrainedAttention):
        if issubclass(attention, kind):
            return (attention.forward, attention.attend) == (kind.forward, kind.attend)
    return False


@torch.no_grad()
def factors(model: Model, at: Observation, lambda_attn: float = 1.0) -> dict[str, tuple[Tensor, Tensor]]:
    """L and R of every stack by its key, from a pass that was observed with `inputs`; in shapes `Stack.shapes`."""
    streams = {(stream.layer, stream.branch): stream.square for stream in at.streams}
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for i, (block, seen, rows) in enumerate(zip(model.blocks, at.inputs, at.rows, strict=True)):
        own, d, attention = f"blocks.{i}", model.config.d_model, block.attn
        assert isinstance(attention, MultiHeadAttention)
        assert seen.gathered is not None
        assert seen.mlp_input is not None
        assert seen.hidden is not None
        assert seen.activated is not None
        by_attention, by_mlp = (
            seen.steps[branch] ** 2 / streams[i, branch].squeeze(-1) / streams[i, branch].numel()
            for branch in ("attn", "mlp")
        )
        out, down = whole(attention.out.weight), whole(block.mlp.down.weight)
        one = out.new_full((1, 1, 1), 1 / d)
        left, right = _of_heads(attention, seen, rows, at.queries, by_attention, lambda_attn)
        with torch.enable_grad():
            hidden = seen.hidden.detach().requires_grad_()
            (slopes,) = torch.autograd.grad(block.mlp.activation(hidden).sum(), hidden)
        parts = ("",) if block.mlp.branches == 1 else (".gate", ".up")
        with rounded_products():
            heads = out.unflatten(1, (attention.n_head, -1)).transpose(0, 1)
            left["v"] = heads.mT @ heads / d
            found |= {f"{own}.attn.qkv.weight.{part}": (left[part], right[part]) for part in "qkv"}
            found[f"{own}.attn.out.weight"] = one, _gram(seen.gathered, by_attention).sum(0, keepdim=True)
            u = _gram(seen.mlp_input, by_mlp).sum(0, keepdim=True)
            products = down.mT @ down / d
            for part, slope in zip(parts, slopes.chunk(len(parts), dim=-1), strict=True):
                squares = _gram(slope, torch.ones_like(by_mlp) / by_mlp.numel()).sum(0)
                found[f"{own}.mlp.up.weight{part}"] = (products * squares)[None], u
            found[f"{own}.mlp.down.weight"] = one, _gram(seen.activated, by_mlp).sum(0, keepdim=True)
    return found


def _gram(x: Tensor, weights: Tensor) -> Tensor:
    """sum_n w_n x_n x_n^T of vectors (..., n, p) with weights (..., n)."""
    return (x * weights.unsqueeze(-1)).mT @ x


@contextlib.contextmanager
def rounded_products() -> Iterator[None]:
    """Inside, products of fp32 matrices on a GPU round their inputs to tf32: directions and sums of squares can bear
    it (1/2000 of the mean eigenvalue, a twentieth of the damping), differences of near ones cannot.
    """
    products = torch.backends.cuda.matmul  # not allow_tf32: it forgets "medium", and fails where this one was set
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before


def _of_heads(
    attention: MultiHeadAttention,
    seen: Inputs,
    rows: Rows,
    queries: Tensor | None,
    by_attention: Tensor,
    lambda_attn: float,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """L of queries and keys, R of queries, keys and values, by letter."""
    u, call = seen.attention_input, seen.call
    assert u is not None
    assert call is not None
    assert seen.qkv is not None
    # differences of large numbers, times a beta^2 that may be large too
    a, heads = rows.weights.double(), attention.n_head
    a = a / a.sum(dim=-1, keepdim=True)
    beta2 = rows.beta.double().square().masked_fill(rows.capped, 0.0)  # out of reach: one-hot, nothing moves it
    centred = taken = None
    if not rows.free:
        s = rows.below_top.double()
        centred = a * (s - (a * s).sum(dim=-1, keepdim=True))
        variance = (centred * s).sum(dim=-1)
        # where the constraint decides beta and the row is not one-hot to rounding
        tied = rows.active & (beta2 * variance > torch.finfo(u.dtype).eps)
        taken = torch.where(tied, 1 / torch.where(tied, variance, 1.0), 0.0)
    raw_q, raw_k, _ = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in seen.qkv.chunk(3, dim=-1))
    q, k, _ = attention.in_heads(seen.qkv, call)
    where = torch.arange(u.shape[1], device=u.device) if queries is None else queries
    q, k, raw_q, raw_k = (t.double() for t in (q[:, :, where], k, raw_q[:, :, where], raw_k))
    scale = lambda_attn / (2 * attention.head_dim * heads) / (len(u) * len(where))

    def covariance(y: Tensor, mean: Tensor, weights: Tensor) -> Tensor:
        """sum_i w_i (Cov_a(y) less what a tied row does not see), y (..., K, p) the same for every query."""
        found = _gram(y, (a * weights[..., None]).sum(-2).to(y.dtype)) - _gram(mean, weights.to(y.dtype))
        if centred is None or taken is None:
            return found
        return found - _gram(centred.to(y.dtype) @ y, (weights * taken).to(y.dtype))

    gathered, of_keys = a.to(u.dtype) @ u[:, None], beta2
    if centred is not None and taken is not None:
        along = (centred.to(u.dtype) @ u[:, None]).double().square().sum(-1) * taken
        of_rows = (a @ u.double().square().sum(-1)[:, None, :, None]).squeeze(-1) - gathered.double().square().sum(-1)
        traces = (of_rows - along).clamp(min=0.0)
        mean = traces.mean(dim=(0, 2), keepdim=True)
        of_keys = beta2 * torch.where(mean > 0, traces / mean, 1.0)
    if attention.qk_norm or attention.rotary:
        left_q, left_k = _pulled_back(attention, (q, k), (raw_q, raw_k), where, a, centred, beta2, of_keys, taken)
    else:
        left_q, left_k = covariance(k, a @ k, beta2), _gram(q, of_keys)
    ones = torch.full_like(beta2, 1 / (len(u) * len(where)))
    with rounded_products():
        right_q = _gram(u, torch.full_like(u[..., 0], 1 / u[..., 0].numel())).sum(0, keepdim=True)
        right_v = _gram(gathered, by_attention[:, None].expand(beta2.shape)).sum(0)
    left = {"q": (scale * left_q.sum(0)).to(u.dtype), "k": (scale * left_k.sum(0)).to(u.dtype)}
    return left, {"q": right_q, "k": covariance(u[:, None], gathered, ones).sum(0), "v": right_v}


def _pulled_back(
    attention: MultiHeadAttention,
    used: tuple[Tensor, Tensor],
    raw: tuple[Tensor, Tensor],
    where: Tensor,
    a: Tensor,
    centred: Tensor | None,
    beta2: Tensor,
    of_keys: Tensor,
    taken: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """sum_i beta^2 Cov_a and sum_ij beta^2 a_ij r_ij r_ij^T where the map to the queries and keys that are used depends
    on the token: k_j as query i's own map sees it, and r_ij, q_i as key j's does; some queries at a time.
    """
    (q, k), (raw_q, raw_k) = used, raw
    keys = torch.arange(k.shape[2], device=k.device)
    left_q = left_k = q.new_zeros(*q.shape[:2], q.shape[-1], q.shape[-1])
    step = max(1, AT_ONCE // k.numel())
    for begin in range(0, q.shape[2], step):
        some = slice(begin, begin + step)
        weights, b2 = a[:, :, some], beta2[:, :, some]
        seen = _back(attention, k[:, :, None], where[some, None], raw_q[:, :, some, None])
        both = (weights * b2.unsqueeze(-1)).flatten(2)
        mean = (weights.unsqueeze(-2) @ seen).squeeze(-2)
        left_q = left_q + _gram(seen.flatten(2, 3), both) - _gram(mean, b2)
        if centred is not None and taken is not None:
            along = (centred[:, :, some].unsqueeze(-2) @ seen).squeeze(-2)
            left_q = left_q - _gram(along, b2 * taken[:, :, some])
        seen = _back(attention, q[:, :, some, None], keys, raw_k[:, :, None])
        left_k = left_k + _gram(seen.flatten(2, 3), (weights * of_keys[:, :, some].unsqueeze(-1)).flatten(2))
    return left_q, left_k


def _back(attention: MultiHeadAttention, x: Tensor, positions: Tensor, raw: Tensor) -> Tensor:
    """Gradients by the queries or keys that are used, as gradients by what the matrix gives, (..., head_dim)."""
    if attention.rotary:
        cos, sin = angles_of(positions, x.shape[-1] // 2, x.dtype)
        first, second = x.chunk(2, dim=-1)
        x = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
    if attention.qk_norm:
        rms = (raw.square().mean(dim=-1, keepdim=True) + QK_NORM_EPS).sqrt()
        unit = raw / rms
        x = (x - unit * (unit * x).mean(dim=-1, keepdim=True)) / rms
    return x.expand(torch.broadcast_shapes(x.shape, raw.shape))


def kronecker(left: Tensor, right: Tensor, step: Tensor) -> Tensor:
    """tr(L dW R dW^T) of each matrix in (count, rows, cols)."""
    by_left = left * step if left.shape[-1] == 1 else left @ step
    return (by_left * (step @ right)).sum(dim=(-2, -1))


def inverse_root(matrices: Tensor, damping: float) -> Tensor:
    """C^-1 for A + damping (mean eigenvalue of A) = C C^T, C lower triangular; of (..., n, n).

    Then A^-1 = C^-T C^-1, and since polar factors turn with their matrix, A^-1/2 polar(A^-1/2 G) = C^-T polar(C^-1 G):
    no symmetric root is needed. NaN where A is not positive.
    """
    if matrices.shape[-1] == 1:  # one number: every direction has this eigenvalue
        return matrices.rsqrt()
    ridge = damping * matrices.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    root, failed = torch.linalg.cholesky_ex(matrices + ridge[..., None, None] * eye)
    found = torch.linalg.solve_triangular(root, eye.expand_as(root), upper=False)
    return found.masked_fill((failed > 0)[..., None, None], torch.nan)
