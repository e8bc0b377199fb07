"""Attention rows that solve a constrained problem: the largest score inside a ball around a prior.

One row with visible keys j, scores s and a prior q on them:

    max_a  s.a   subject to   KL(a || q) <= rho,      solved by   a = softmax(log q + beta s),   D(beta) = rho,

where D(beta) = KL(a || q) = beta E_a[s] - log sum_j q_j exp(beta s_j) grows from 0 to -log q(argmax set). With q
uniform on t keys D = ln t - H(a), so an entropy bound H(a) >= h is the same problem with rho = ln t - h.

The objective is linear, hence scale-free: c s with c > 0 gives the same a, since beta absorbs c. Every row is solved on
its own by a fixed number of evaluations of its statistics: no data-dependent control flow, no synchronisation.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

BETA_MAX = 300.0  # times 1 / std(s): where a row stops whose target is out of reach
EVALUATIONS = {torch.float32: 8, torch.float64: 20}  # of the row statistics, the one at beta_max included
# Priors that are attention weights themselves, chained over layers, become nearly one-hot and need more: with 8, rows
# of a 12-layer chain missed their radius by hundreds of nats.
EVALUATIONS_WITH_PRIOR = {torch.float32: 16, torch.float64: 32}
PACKED = torch.bfloat16  # the bits of fp16 in the dtype of the other tensors: what kernels keep of ln a
UNSOLVED = 1e-2  # nats, relative to 1 + D(inf): rows left farther from their radius count as capped

NEVER = -1e4  # a logit that underflows


class Weights(NamedTuple):
    """A solved row: what `constrained_softmax` returns, in fp32 (fp64 for fp64 scores)."""

    weights: Tensor  # a, (..., T, K), zero where not visible
    log_weights: Tensor  # log a, (..., T, K); 0, not -inf, where not visible
    beta: Tensor  # inverse temperature, (..., T)
    capped: Tensor  # (..., T), bool: the target was not reached; no gradient passes through beta


def constrained_softmax(
    scores: Tensor,
    radius: Tensor | float,
    visible: Tensor,
    log_prior: Tensor | None = None,
    *,
    ceiling: float | None = None,
) -> Weights:
    """a = softmax(log q + beta s) over the visible keys with KL(a || q) = radius, differentiable twice.

    scores (..., T, K); radius broadcasts to (..., T); visible, bool, broadcasts to the scores, one key or more a row.
    log_prior: finite, q is its softmax over the visible keys; uniform if None. ceiling: beta = min(ceiling, beta*).

    radius <= 0: a = q with beta = 0. Equal scores: a = q with beta = 0, or the ceiling, where the row is an ordinary
    softmax. Out of reach: beta = beta_max, a constant. In all these rows no gradient passes through beta.
    """
    s, rho, visible, log_q = _prepare(scores, radius, visible, log_prior)
    top = s.detach().masked_fill(~visible, -math.inf).amax(dim=-1, keepdim=True)
    beta, _, capped = _Beta.apply(s, log_q, rho, visible, ceiling)
    # the shift by the row's top score changes nothing but the rounding
    logits = (log_q + beta.unsqueeze(-1) * (s - top)).masked_fill(~visible, -math.inf)
    log_weights = logits.log_softmax(dim=-1).masked_fill(~visible, 0.0)
    weights = log_weights.exp().masked_fill(~visible, 0.0)
    return Weights(weights, log_weights, beta, capped)


def _prepare(
    scores: Tensor, radius: Tensor | float, visible: Tensor, log_prior: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(s, rho, visible, log q) in the working dtype, zero where not visible; log q is normalised, (..., T, 1 or K)."""
    # autocast leaves the operations of this module alone: in fp32 and fp64 it acts on products of matrices only
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    visible = visible.expand(scores.shape)
    s = scores.to(dtype).masked_fill(~visible, 0.0)
    rho = torch.as_tensor(radius, dtype=dtype, device=scores.device).expand(scores.shape[:-1])
    if log_prior is None:
        log_q = -visible.sum(dim=-1, keepdim=True).to(dtype).log()
    else:
        log_q = log_prior.to(dtype).expand(scores.shape).masked_fill(~visible, -math.inf)
        log_q = log_q.log_softmax(dim=-1).masked_fill(~visible, 0.0)
    return s, rho, visible, log_q


def _scale(s: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(max, std, is the row constant?) of the visible scores, each (..., T, 1); std = 1 for a constant row."""
    top = s.masked_fill(~visible, -math.inf).amax(dim=-1, keepdim=True)
    x = (s - top).masked_fill_(~visible, 0.0)
    # the range first: squares of very large or small scores leave the range of fp32
    spread = x.amin(dim=-1, keepdim=True).neg()
    constant = ~(spread > 1e8 * torch.finfo(s.dtype).tiny)
    spread = spread.masked_fill(constant, 1.0)
    count = visible.sum(dim=-1, keepdim=True)
    x = x.div_(spread)
    x = x.sub_(x.sum(dim=-1, keepdim=True) / count).masked_fill_(~visible, 0.0)
    std = (x.mul_(x).sum(dim=-1, keepdim=True) / count).sqrt_() * spread
    return top, std.masked_fill(constant, 1.0), constant


def _statistics(x: Tensor, rest: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(E, Var_a, third central moment) at b; E = D(inf) - D(b) >= 0 is what the row still misses.

    rest = log q - log q(argmax set), NEVER on that set and where not visible. With its mass taken as 1,
    E = log(1 + sum_rest exp(rest + b x)) - b E_a[x] is a sum of positive terms: full relative accuracy near the end.
    """
    logits = torch.addcmul(rest, b.unsqueeze(-1), x)
    shift = logits.amax(dim=-1).clamp_min(0.0)
    # exp(-60) = 9e-27 is nothing beside 1, and exp is up to 20 times slower where it underflows
    mass = logits.sub_(shift.unsqueeze(-1)).clamp_min_(-60.0).exp_()
    top = shift.neg().exp()
    tail = mass.sum(dim=-1)
    total = top + tail
    mean = (mass * x).sum(dim=-1) / total
    missing = shift + torch.log1p(top - 1 + tail) - b * mean
    d = x - mean.unsqueeze(-1)
    mass = mass.mul_(d).mul_(d)
    second = (mass.sum(dim=-1) + top * mean**2) / total
    third = (mass.mul_(d).sum(dim=-1) - top * mean**3) / total
    return missing, second, third


def _solve(
    s: Tensor, log_q: Tensor, rho: Tensor, visible: Tensor, ceiling: float | None, evaluations: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Halley's method in u = ln b, b = beta std(s), on logit(D / D(inf)), inside a bracket.

    D(u) behaves like exp(2 u) at first and reaches D(inf) exponentially: the logit of D / D(inf) is nearly straight.
    """
    with_prior = log_q.shape[-1] > 1
    count = evaluations or (EVALUATIONS_WITH_PRIOR if with_prior else EVALUATIONS)[s.dtype]
    eps, tiny = torch.finfo(s.dtype).eps, torch.finfo(s.dtype).tiny
    top, std, constant = _scale(s, visible)
    x = ((s - top) / std).masked_fill_(~visible, 0.0)
    std, constant = std.squeeze(-1), constant.squeeze(-1)
    on_top = visible & (x == 0)
    q_top = log_q.masked_fill(~on_top, -math.inf).logsumexp(dim=-1)  # log q(argmax set)
    rest = (log_q - q_top.unsqueeze(-1)).masked_fill(on_top | ~visible, NEVER)
    free = ~(rho <= 0) & ~constant
    full = -q_top  # D(inf)
    goal = full - rho  # E at the solution
    # a goal that is nothing but rounding of D(inf) is out of reach, as h = 0 is in exact arithmetic
    solvable = free & (goal > 4 * eps * full)
    # the other rows are iterated along with a harmless target
    rho_ = torch.where(solvable, rho, 0.5)
    goal_, full_ = torch.where(solvable, goal, 0.5), torch.where(solvable, full, 1.0)

    high = torch.full_like(rho, BETA_MAX)
    reachable = solvable & (_statistics(x, rest, high)[0] <= goal_)
    # Var_a <= range^2 / 4, hence D(b) <= (b range)^2 / 8
    low = torch.minimum((8 * rho_).sqrt() / -x.amin(dim=-1).clamp_max(-tiny), high)
    q = log_q.exp().masked_fill(~visible, 0.0)
    mean = (q * x).sum(dim=-1)
    second = (q * (x - mean.unsqueeze(-1)) ** 2).sum(dim=-1)
    # D = b^2 Var_q / 2 for small b; the other start is lower when one key stands out
    b = torch.minimum((2 * rho_ / second.clamp_min(tiny)).sqrt(), (full_ + rho_) / -mean.clamp_max(-tiny))
    b = torch.maximum(torch.minimum(b, high), low)
    target = (rho_ / goal_).log()
    done = torch.zeros_like(reachable)
    for _ in range(count - 1):
        missing, second, third = _statistics(x, rest, b)
        slope = (b * b * second).clamp_min(tiny)  # dD/du
        error = goal_ - missing  # D - rho
        low, high = torch.where(error < 0, b, low), torch.where(error < 0, high, b)
        gained = (full_ - missing).clamp_min(eps * full_)
        missing = missing.clamp_min(tiny)
        newton = ((gained / missing).log() - target) * (gained / full_) * (missing / slope)
        curvature = 1 + 0.5 * b * third / second.clamp_min(tiny) + 0.5 * slope * (1 / missing - 1 / gained)
        step = newton / (1 - (newton * curvature).clamp(-1.0, 0.5))
        # a row converged to the rounding of D or b stays where it is: noise would throw it across the bracket
        done = done | (error.abs() <= 2 * eps * (1 + full_ + slope)) | (step.abs() <= 2 * eps)
        new = b * (-step.clamp(-3.0, 3.0)).exp()
        # E below 1e-18 is not resolved by the statistics, and far from any goal: halve the bracket
        usable = (new > low) & (new < high) & (missing > 1e-18)
        new = torch.where(usable, new, (low * high).sqrt())
        b = torch.where(done, b, new)

    beta = torch.where(reachable, b, BETA_MAX) / std
    active, capped = reachable, free & ~reachable
    if with_prior:
        solved = (_statistics(x, rest, b)[0] - goal_).abs() <= UNSOLVED * (1 + full_)
        active, capped = active & solved, capped | (reachable & ~solved)
    if ceiling is not None:
        beta = torch.where(constant, ceiling, beta)
        active, capped = active & (beta < ceiling), capped & (beta < ceiling)
        beta = beta.clamp_max(ceiling)
        free = ~(rho <= 0)
    beta = torch.where(free, beta, 0.0)
    return torch.where(rho.isnan(), rho, beta), active, capped


class _Beta(torch.autograd.Function):
    """beta(s, log q, rho) by the implicit function theorem: D(beta) = rho on active rows, constant on the others.

    dbeta = (drho - beta^2 sum_j a_j (s_j - m) ds_j - sum_j a_j (beta (s_j - m) - 1) dlog q_j) / (beta Var_a(s))
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        s: Tensor, log_q: Tensor, rho: Tensor, visible: Tensor, ceiling: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _solve(s, log_q, rho, visible, ceiling, None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        s, log_q, _, visible, _ = inputs
        beta, active, capped = output
        ctx.mark_non_differentiable(active, capped)
        ctx.save_for_backward(s, log_q, visible, beta, active)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # plain differentiable operations, beta being this function's own output: differentiable again
        s, log_q, visible, beta, active = ctx.saved_tensors
        # any constant shift and scale of the scores give the same result; these keep fp32 in range
        with torch.no_grad():
            top, std, _ = _scale(s, visible)
        x = ((s - top) / std).masked_fill(~visible, 0.0)
        b = beta.unsqueeze(-1) * std
        a = (log_q + b * x).masked_fill(~visible, -math.inf).softmax(dim=-1)
        d = x - (a * x).sum(dim=-1, keepdim=True)
        second = (a * d.square()).sum(dim=-1, keepdim=True)
        # one-hot to rounding: the quotient has no digits left, send zero
        safe = active.unsqueeze(-1) & (b.square() * second > torch.finfo(s.dtype).eps)
        grad = torch.where(safe, grads[0].unsqueeze(-1) / std, 0.0) / torch.where(safe, b * second, 1.0)
        grad_s = -grad * (b.square() / std) * a * d if ctx.needs_input_grad[0] else None
        grad_q = grad * a * (1 - b * d) if ctx.needs_input_grad[1] else None
        return grad_s, grad_q, grad.squeeze(-1), None, None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor) -> Tensor:
        return packed.view(torch.float16).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].to(PACKED)


def unpacked(log_a: Tensor) -> Tensor:
    """ln a as numbers, from what `prior_attention` returns; anything else as it is."""
    # the diagonal and below alone: the rest was never written
    return _Unpack.apply(log_a).tril() if log_a.dtype == PACKED else log_a
