"""Attention whose weights solve a constrained problem: as sharp as an entropy floor or a KL ball allows.

For each query and head, with scores s_j = q.k_j / sqrt(head_dim) over t visible keys and a prior p,

    max_a s.a   subject to   KL(a || p) <= rho       gives   a = softmax(ln p + beta s)

with the inverse temperature beta fixed by the constraint. Entropy is the uniform prior with rho = ln t - h. So the
scale of the scores does not matter; the target is what is set or learned.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from stepformer.base.options import Option, choice, flag, integer
from stepformer.base.registry import Selection
from stepformer.ops import at_least_fp32, operation
from stepformer.ops.constraint import constrained_softmax, unpacked
from stepformer.ops.scores import over_queries
from stepformer.oracles.attention import register_attention
from stepformer.oracles.caches import Call
from stepformer.oracles.softmax import MultiHeadAttention
from stepformer.rules.coefficients import CoefficientBank, unit

CITE = "constrained-transformers"


class ConstrainedAttention(MultiHeadAttention):
    """What entropy- and KL-constrained attention share: the target, the solve, the gathering."""

    options = {
        **MultiHeadAttention.options,
        "target": choice(
            "fixed", "head", "token", help="the ratio r is fixed, learned per head, or a map of the token"
        ),
        "constraint": choice("equality", "floor", help="at the target, or softmax(ln p + s / tau) unless too sharp"),
        "tau": Option(1.0, help="temperature of the softmax under constraint = 'floor'", minimum=1e-6),
        "query_chunk": integer(256, minimum=0, help="queries at a time, to save memory, unless priors chain; 0: all"),
    }
    reports = True

    target: str
    ratio: float
    constraint: str
    tau: float
    query_chunk: int

    def __init__(self, d_model: int, n_head: int, **settings: Any) -> None:
        super().__init__(d_model, n_head, **settings)
        self.ceiling = 1 / self.tau if self.constraint == "floor" else None
        learned = {} if self.target == "fixed" else {"r": unit(self.ratio, "target", size=n_head)}
        self.coefficients = CoefficientBank({"attn": {**learned, **self.prior_coefficients()}})
        self.ratio_map = nn.Linear(d_model, n_head, bias=False) if self.target == "token" else None

    def prior_coefficients(self) -> dict[str, Any]:
        return {}

    @torch.no_grad()
    def initialise(self) -> None:
        for learned in (getattr(self.ratio_map, "weight", None), getattr(self, "prior_table", None)):
            if learned is not None:
                learned.zero_()

    @classmethod
    def refusal(cls, config: Selection) -> str | None:
        if not 0 < config.option("ratio") < 1:
            return f"ratio = {config.option('ratio'):g} should lie strictly between 0 and 1."
        return None

    def ratios(self, u: Tensor) -> Tensor | float:
        """r: a number, (H, 1) or (B, H, T)."""
        if self.target == "fixed":
            return self.ratio
        if self.ratio_map is None:
            return self.coefficients.value("r")[:, None]
        u = u.to(self.ratio_map.weight.dtype)  # autocast is off, and u may come in bf16
        return torch.sigmoid(self.coefficients.get_parameter("r")[:, None] + self.ratio_map(u).mT)

    def radius(self, u: Tensor, call: Call) -> Tensor:
        """rho of every query, broadcastable to (B, H, T)."""
        raise NotImplementedError(f"{type(self).__name__} does not say how far attention may go: define radius().")

    def log_prior(self, call: Call) -> Tensor | None:
        return None

    def forward(self, u: Tensor, call: Call) -> Tensor:
        q, k, v = self.project(u, call)
        with torch.autocast(u.device.type, enabled=False):
            radius = self.radius(u, call).to(torch.promote_types(q.dtype, torch.float32)).expand(q.shape[:3])
            gathered = self.attend(q, k, v, radius, call)
        return self.merge(gathered)

    @operation
    def attend(self, q: Tensor, k: Tensor, v: Tensor, radius: Tensor, call: Call) -> Tensor:
        """What every query gathers at its radius (B, H, T), (B, H, T, head_dim)."""
        q, k = at_least_fp32(q, k)
        prior = self.log_prior(call)
        watched = call.observe is not None and call.rows

        def attend(begin: int, end: int) -> tuple[Tensor, ...]:
            scores = q[:, :, begin:end] @ k.mT / math.sqrt(self.head_dim)
            log_q = None if prior is None else prior[..., begin:end, :]
            solved = constrained_softmax(
                scores, radius[:, :, begin:end], call.visible(begin, end), log_q, ceiling=self.ceiling
            )
            self.remember(solved.log_weights, call)
            a = solved.weights
            rows = (-(a * solved.log_weights).sum(dim=-1), -(a * scores).sum(dim=-1)) if watched else ()
            return a @ v.to(scores.dtype), solved.beta, solved.capped, *rows

        chunk = self.query_chunk if self.chunks() else 0
        gathered, beta, capped, *rows = over_queries(attend, q.shape[2], chunk, dim=2)
        if call.observe is not None:
            call.observe("capped_rows", capped.float().mean())
            call.observe("beta", beta)
            # the energy is what the constrained problem minimises: -s.a
            for name, value in zip(("entropy", "energy"), rows, strict=False):
                call.observe(name, value)
        return gathered.to(v.dtype)

    def chunks(self) -> bool:
        """Whether queries may be treated some at a time."""
        return True

    def remember(self, log_weights: Tensor, call: Call) -> None:
        """What the next attention call needs of this one's weights."""


@register_attention(
    "entropy",
    equation="g = W_O a V, a = argmax s.a subject to H(a) >= h: a = softmax(b s) with H(a) = h;  h = r ln t",
    cite=CITE,
)
class EntropyAttention(ConstrainedAttention):
    """Softmax attention at the temperature that gives each row its target entropy, or (floor) at least that."""

    options = {
        **ConstrainedAttention.options,
        "ratio": Option(0.5, help="r of the target entropy h = r ln t, strictly between 0 and 1"),
        "target_form": choice("log", "support", help="h = r ln t, or h = ln(1 + r (t - 1)), a fraction of the support"),
    }
    # No gradient flows through the bound of beta in rows out of reach, and a floor may touch no row; not so here.
    all_active = {"ratio": 0.999}
    target_form: str

    def radius(self, u: Tensor, call: Call) -> Tensor:
        t = call.counts().to(torch.promote_types(u.dtype, torch.float32))
        t = t if t.ndim == 1 else t[:, None]
        r = self.ratios(u)
        if self.target_form == "log":
            return (1 - r) * t.log()
        return t.log() - torch.log1p(r * (t - 1))


@register_attention(
    "kl",
    equation="g = W_O a V, a = argmax s.a subject to KL(a || p) <= rho: a = softmax(ln p + b s) with KL = rho;  "
    "rho = r ln t; p uniform, the layer below, carried: ln p = keep ln a_below, or learned: ln p = c_{i-j}",
    cite=CITE,
)
class KLAttention(ConstrainedAttention):
    """A trust-region step from a prior: uniform, the attention of the same head one call before, or a learned one."""

    options = {
        **ConstrainedAttention.options,
        "ratio": Option(0.1, help="r of the radius rho = r ln t, strictly between 0 and 1"),
        "prior": choice(
            *("uniform", "previous", "carried", "learned"), help="p: uniform, a of the call before, a^keep, c_{i-j}"
        ),
        "detach_prior": flag(False, help="no gradient into the prior"),
    }
    exact_gradient = {"detach_prior": False}
    all_active = {"ratio": 0.02}  # as above; chains of priors need smaller radii
    takes_context = True
    parameter_roles = {"prior_table": "coefficient"}
    prior: str
    detach_prior: bool

    def __init__(self, d_model: int, n_head: int, *, context: int = 0, **settings: Any) -> None:
        super().__init__(d_model, n_head, **settings)
        # ln p of every head and distance, up to the constant by which the weights of a row sum to 1
        self.prior_table = nn.Parameter(torch.zeros(n_head, context)) if self.prior == "learned" else None

    @classmethod
    def refusal(cls, config: Selection) -> str | None:
        if config.option("prior") == "learned" and config.option("detach_prior"):
            return "detach_prior = true would leave the table of prior = 'learned' without a gradient: choose one."
        return super().refusal(config)

    def prior_coefficients(self) -> dict[str, Any]:
        return {"keep": unit(0.5, "mix", size=self.n_head)} if self.prior == "carried" else {}

    def unused(self, *, first: bool, calls: int) -> tuple[str, ...]:
        return ("coefficients.keep",) if self.prior == "carried" and first and calls == 1 else ()

    def radius(self, u: Tensor, call: Call) -> Tensor:
        t = call.counts().to(torch.promote_types(u.dtype, torch.float32))
        return self.ratios(u) * (t if t.ndim == 1 else t[:, None]).log()

    def log_prior(self, call: Call) -> Tensor | None:
        if self.prior_table is not None:
            return self.prior_table[:, call.distances().clamp_min(0)].movedim(0, -3)
        if self.prior == "uniform" or "log_prior" not in call.memory:
            return None
        below = unpacked(call.memory["log_prior"])
        # The uniform part of ln p is constant over the visible keys, so it vanishes in the normalisation.
        return below if self.prior == "previous" else self.coefficients.value("keep")[:, None, None] * below

    def chunks(self) -> bool:
        return self.prior in ("uniform", "learned")

    def remember(self, log_weights: Tensor, call: Call) -> None:
        if not self.chunks():
            call.memory["log_prior"] = log_weights.detach() if self.detach_prior else log_weights
