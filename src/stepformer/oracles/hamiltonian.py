"""Softmax Hamiltonian attention: attention as the energy of moving tokens, in its causal row form.

With scores S_ij = u_i.A u_j, A = tau W_Q^T W_K, n_i visible tokens and a symmetric positive B,

    z_i = (1/n_i) sum_{j<=i} exp(S_ij),   a_i = (y_i.B y_i) / d,
    F_i = B y_i / z_i,
    G_i = (1/n_i) sum_{j<=i} exp(S_ij) (a_i / (2 z_i^2) + a_j / (2 z_j^2) + kappa) A u_j.

Without a mask and with symmetric A, G = -dH/du for H = sum_i a_i / (2 z_i) - (kappa / 2n) sum_ij exp(S_ij), and
F = d dH/dy: dividing a by d, without which the potential would be inert after LN_Y, is not applied to F. Under a causal
mask the exact gradient of H would hear from later tokens (docs/reading-the-future.md); the row form above keeps each
row to what it may see; force = "query" keeps a token to its own row, with the factor a_i / (2 z_i^2) + kappa / 2. Where
the soft bound on the scores acts, its slope is left out of G.

The paper's particle system (34) has, with N = `n0` for all n_i, a_i = y_i.B y_i and kappa N^2 in the place of kappa:
system = "particles". Its derivation from (33) gives the "mean-field" form above, up to the division by d.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepformer.base.options import Option, choice, flag, integer
from stepformer.base.registry import Selection
from stepformer.ops import Linear, at_least_fp32, linear, operation
from stepformer.ops.adapters import weight_of
from stepformer.ops.scores import over_queries, rotate, softmax_rows
from stepformer.ops.slots import TokenSlot
from stepformer.oracles.attention import Attention, register_attention
from stepformer.oracles.caches import Call
from stepformer.rules.coefficients import CoefficientBank, positive
from stepformer.rules.hamiltonian import SYMP, Fields

RIDGE = 1e-6


@register_attention(
    "hamiltonian",
    equation="F_i = B y_i / z_i;  G_i = (1/n_i) sum_{j<=i} e^{S_ij} (a_i/2z_i^2 + a_j/2z_j^2 + kappa) A u_j;  "
    "S_ij = u_i.A u_j, z_i = (1/n_i) sum_{j<=i} e^{S_ij}, a_i = y_i.B y_i / d",
    cite=SYMP,
)
class HamiltonianAttention(Attention):
    """The two fields of softmax attention as a Hamiltonian system, causal by construction."""

    options = {
        "force": choice(
            "row", "query", refused=("full",), help="kinetic terms of all visible keys, or the query's own"
        ),
        "kernel": choice("single", "per-head", help="one kernel of full rank, or the mean over one per head"),
        "metric": choice("learned", "derived", help="B = C C^T + 1e-6 I, or Sym(W_V A^-1)"),
        "system": choice(
            "mean-field", "particles", help="free of N; or the paper's (34), N = n0: a = y.B y, kappa N^2 for kappa"
        ),
        "symmetric": flag(False, help="W_K = W_Q, so that A is symmetric"),
        "kappa": Option(1.0, help="weight of the potential", minimum=0.0),
        "learned_kappa": flag(False, help="learn kappa (positive) from this start"),
        "score_bound": Option(12.0, help="scores are bounded softly, S = s tanh(S/s); 0: not at all", minimum=0.0),
        "n0": integer(0, minimum=0, help="divide sums by this constant; 0: by the number of visible tokens"),
        "query_chunk": integer(256, minimum=0, help="queries at a time, to save memory; 0: all at once"),
    }
    output_map = None
    has_fields = True
    reports = True
    can_bias = False

    metric: str
    system: str
    kappa: float
    score_bound: float
    n0: int
    query_chunk: int

    def __init__(self, d_model: int, n_head: int, **settings: Any) -> None:
        super().__init__(d_model, n_head, **settings)
        self.kernels = n_head if self.kernel == "per-head" else 1
        # Averaging head scores before the exponential leaves one kernel at this temperature.
        self.tau = 1 / (n_head // self.kernels * math.sqrt(self.head_dim))
        self.coordinates = d_model if self.system == "mean-field" else 1  # that y.B y is divided by
        self.query = Linear(d_model, d_model, bias=False)
        self.key = None if self.symmetric else Linear(d_model, d_model, bias=False)
        if self.metric == "learned":
            self.root = Linear(d_model, d_model, bias=False)
        else:
            self.value = Linear(d_model, d_model, bias=False)
        self.coefficients = CoefficientBank({"attn": {"kappa": positive(self.kappa)} if self.learned_kappa else {}})

    @torch.no_grad()
    def initialise(self) -> None:
        if self.metric == "learned":
            nn.init.eye_(self.root.weight)

    @classmethod
    def refusals(cls, config: Selection) -> list[str]:
        found = super().refusals(config)
        if config.option("force") == "full":
            found.append(
                "force = 'full', the whole gradient of the masked energy, hears from later tokens and reads the future "
                "(docs/reading-the-future.md): use force = 'row' or 'query'. `stepformer flow` has it without a mask."
            )
        if config.option("kernel") == "per-head" and config.option("metric") == "derived":
            found.append(
                "metric = 'derived' inverts A, which has low rank for kernel = 'per-head': use metric = 'learned'."
            )
        if config.option("system") == "particles" and not config.option("n0"):
            found.append(
                "system = 'particles', equation (34), has one N for all tokens, whatever they see: give it as n0, for "
                "example the context."
            )
        if config.option("learned_kappa") and config.option("kappa") == 0:
            found.append(
                "learned_kappa = true starts at kappa = 0, which a positive coefficient cannot: give kappa > 0."
            )
        return found

    @classmethod
    def forces_at_rest(cls, config: Selection) -> bool:
        return config.option("kappa") > 0

    @classmethod
    def idle_at_rest(cls, config: Selection) -> tuple[str, ...]:
        return ("root",) if config.option("metric") == "learned" else ("value",)

    @classmethod
    def idle_without_force(cls, config: Selection) -> tuple[str, ...]:
        return ("coefficients",) if config.option("learned_kappa") else ()

    def new_slot(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> TokenSlot:
        wide = torch.promote_types(dtype, torch.float32)
        return TokenSlot(
            batch,
            capacity,
            device,
            k=(self.kernels, self.d_model // self.kernels, dtype),
            log_z=(self.kernels, 1, wide),
            a=(1, 1, wide),
        )

    def weight(self, name: str) -> Tensor:
        """The weight of a map, adapters included: calling the map would not do, since weights are multiplied."""
        return weight_of(getattr(self, name), f"Hamiltonian attention multiplies the weight of '{name}' by others")

    def lower(self, y: Tensor) -> Tensor:
        """B y."""
        if self.metric == "learned":
            root = self.weight("root").to(y.dtype)
            return F.linear(F.linear(y, root.mT), root) + RIDGE * y
        return y @ self.metric_matrix().to(y.dtype)

    def metric_matrix(self) -> Tensor:
        """B. Many tokens times B cost half of what C and C^T cost; the products behind it are of weights alone."""
        if self.metric == "learned":
            root = self.weight("root")
            b = root @ root.mT
            return b + RIDGE * torch.eye(self.d_model, dtype=b.dtype, device=b.device)
        wq, wv = at_least_fp32(self.weight("query"), self.weight("value"))
        with torch.autocast(wq.device.type, enabled=False):
            wk = wq if self.key is None else at_least_fp32(self.weight("key"))[0]
            a = self.tau * wq.mT @ wk
            ridge = RIDGE * torch.eye(self.d_model, dtype=a.dtype, device=a.device)
            b = torch.linalg.solve(a + ridge, wv, left=False)  # W_V (A + ridge)^-1
            return 0.5 * (b + b.mT)

    def kappa_now(self) -> Tensor | float:
        """The weight of the potential: kappa, set or learned, and N^2 of it between particles."""
        kappa = self.coefficients.value("kappa") if self.coefficients.specs else self.kappa
        return kappa if self.system == "mean-field" else kappa * float(self.n0**2)

    @operation
    def fields(self, u: Tensor, y: Tensor, call: Call) -> Fields:
        return SoftmaxFields(self, u, y, call)

    def queries_and_keys(self, u: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Of the tokens of this call, (B, kernels, T, width) each."""
        heads = (self.kernels, -1)
        q = self.query(u).unflatten(-1, heads).transpose(1, 2)
        k = q if self.key is None else self.key(u).unflatten(-1, heads).transpose(1, 2)
        return (self.turned(q, call), self.turned(k, call)) if self.rotary else (q, k)

    @operation
    def turned(self, t: Tensor, call: Call, back: bool = False) -> Tensor:
        """Vectors (B, kernels, T, width) turned by their positions, or back."""
        return rotate(t, -call.positions if back else call.positions)

    def from_keys(self, total: Tensor, call: Call, dtype: torch.dtype) -> Tensor:
        """W_Q^T of sums of keys (B, kernels, T, width), as A u_j = tau W_Q^T k_j."""
        if self.rotary:
            total = self.turned(total, call, back=True)
        return linear(total.transpose(1, 2).flatten(-2).to(dtype), self.weight("query").mT)

    def scores(self, q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
        """S between some queries and all keys, bounded, -inf where not visible."""
        raw = self.tau * q @ k.mT
        bounded = self.score_bound * torch.tanh(raw / self.score_bound) if self.score_bound else raw
        return bounded.masked_fill(~visible, -torch.inf)


class SoftmaxFields:
    """F and G of softmax Hamiltonian attention at one (u, y)."""

    def __init__(self, attention: HamiltonianAttention, u: Tensor, y: Tensor, call: Call) -> None:
        self.attention, self.call, self.y, self.dtype = attention, call, y, y.dtype
        q, k = attention.queries_and_keys(u, call)
        slot = call.next_slot()
        if isinstance(slot, TokenSlot):
            (k,) = slot.extend(call, k=k)
        with torch.autocast(u.device.type, enabled=False):  # exponentials of scores: fp32 at least
            self.q, self.k = at_least_fp32(q, k)
            (y32,) = at_least_fp32(y)
            if attention.n0:
                self.log_n = self.q.new_full((), math.log(attention.n0))
            else:
                self.log_n = call.counts().to(self.q.dtype).log()[..., None, :, None]  # (..., 1, T, 1)
            self.gathered, self.log_z = over_queries(self.first_pass, u.shape[1], attention.query_chunk, dim=2)
            self.by = attention.lower(y32)
            self.a = (y32 * self.by).sum(dim=-1)[:, None, :, None] / attention.coordinates  # (B, 1, T, 1)
        self.keys_log_z, self.keys_a = self.log_z, self.a
        if isinstance(slot, TokenSlot):
            self.keys_log_z, self.keys_a = slot.extend(call, log_z=self.log_z, a=self.a)
        if call.observe is not None and attention.score_bound:
            beyond = over_queries(self.beyond_bound, u.shape[1], attention.query_chunk, dim=2)
            seen = call.counts().sum() * (attention.kernels * (u.shape[0] if call.origins is None else 1))
            call.observe("bounded_scores", beyond.sum() / seen)
        if call.observe is not None and call.rows:
            call.observe("entropy", over_queries(self.entropy, u.shape[1], attention.query_chunk, dim=2))
            z = torch.exp(self.log_z)
            call.observe("energy", 0.5 * (self.a / z - attention.kappa_now() * z)[..., 0])

    def beyond_bound(self, begin: int, end: int) -> Tensor:
        """How many visible scores of each query the soft bound changes a lot, (B, H, T)."""
        raw = self.attention.tau * self.q[:, :, begin:end] @ self.k.mT
        return ((raw.abs() > self.attention.score_bound) & self.call.visible(begin, end)).sum(dim=-1)

    def entropy(self, begin: int, end: int) -> Tensor:
        """Of the softmax of some queries' scores, (B, H, T)."""
        visible = self.call.visible(begin, end)
        return softmax_rows(self.attention.scores(self.q[:, :, begin:end], self.k, visible), visible)[0]

    def log_n_of(self, begin: int, end: int) -> Tensor:
        return self.log_n if self.log_n.ndim == 0 else self.log_n[..., begin:end, :]

    def first_pass(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """P K for some queries, P the softmax of their scores, and ln z."""
        scores = self.attention.scores(self.q[:, :, begin:end], self.k, self.call.visible(begin, end))
        lse = scores.logsumexp(dim=-1, keepdim=True)
        return torch.exp(scores - lse) @ self.k, lse - self.log_n_of(begin, end)

    def second_pass(self, begin: int, end: int) -> Tensor:
        """(1/n_i) sum_j exp(S_ij) (a_j / z_j^2) k_j: the same scores with a bias per key."""
        scores = self.attention.scores(self.q[:, :, begin:end], self.k, self.call.visible(begin, end))
        return torch.exp(scores - 2 * self.keys_log_z.mT - self.log_n_of(begin, end)) @ (self.keys_a * self.k)

    def velocity(self, y: Tensor) -> Tensor:
        with torch.autocast(y.device.type, enabled=False):
            by = self.by if y is self.y else self.attention.lower(at_least_fp32(y)[0])
            return (torch.exp(-self.log_z).mean(dim=1) * by).to(self.dtype)

    def force(self) -> Tensor:
        attention = self.attention
        kappa = attention.kappa_now()
        with torch.autocast(self.q.device.type, enabled=False):
            z = torch.exp(self.log_z)
            if attention.force == "query":
                total = 0.5 * (self.a / z + kappa * z) * self.gathered
            else:
                others = over_queries(self.second_pass, self.q.shape[2], attention.query_chunk, dim=2)
                total = (0.5 * self.a / z + kappa * z) * self.gathered + 0.5 * others
        return attention.from_keys((attention.tau / attention.kernels) * total, self.call, self.dtype)
