"""Constrained attention of one new token per row, in three kernels.

Scores of all keys; beta of a row by a program of one warp, whose sums need no barrier, with the weights that follow;
what these gather. The method is that of constraint.py, evaluation by evaluation. Overlap and everything else as in
row_kernels.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepformer.ops.constraint import BETA_MAX, EVALUATIONS, EVALUATIONS_WITH_PRIOR, NEVER
from stepformer.ops.row_kernels import await_others, new_heads, place_of
from stepformer.ops.rows import FEW, KEYS, STRETCHES, WARPS, Mix, Stretches, Where, dependent, heads_arguments
from stepformer.ops.scalar_functions import log1p

FORMS = {"log": 0, "support": 1, "kl": 2}  # of the radius: (1 - r) ln t, ln t - ln(1 + r (t - 1)), r ln t
LONGEST = 8192  # keys whose scores one warp holds
BETA = tl.constexpr(BETA_MAX)
HIDDEN = tl.constexpr(NEVER)
EPS = tl.constexpr(1.1920929e-07)
TINY = tl.constexpr(1.1754944e-38)


@triton.jit
def scores_kernel(  # type: ignore[no-untyped-def]
    qkv, keys, values, positions, origins, cosines, sines, earlier, mix, scores, scale, eps, apart,
    H: tl.constexpr, D: tl.constexpr, CAPACITY: tl.constexpr, ROTARY: tl.constexpr, QK_NORM: tl.constexpr,
    MIXED: tl.constexpr, OVERLAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (s, row and head): scores of some keys; the one that has the new key stores it and its value."""
    row_head = tl.program_id(1)
    row, head = row_head // H, row_head % H
    d, t = tl.arange(0, D), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p, _ = place_of(positions, origins, row, CAPACITY, False)
    at = (row_head.to(tl.int64) * CAPACITY + t)[:, None] * D + d[None, :]
    some = tl.load(keys + at, mask=(t < p)[:, None] & (d >= 0)[None, :], other=0.0, cache_modifier=".cg")
    await_others(OVERLAP)
    q, k, v = new_heads(
        qkv, cosines, sines, earlier, mix, row, head, p, scale, eps, apart, H, D, ROTARY, QK_NORM, MIXED
    )
    stored = k.to(keys.dtype.element_ty)
    owns = (p // BLOCK == tl.program_id(0)) & (d >= 0)
    new = (row_head.to(tl.int64) * CAPACITY + p) * D + d
    tl.store(keys + new, stored, mask=owns)
    tl.store(values + new, v.to(values.dtype.element_ty), mask=owns)
    these = tl.where((t == p)[:, None], stored[None, :], some).to(tl.float32)
    tl.store(scores + row_head * CAPACITY + t, tl.sum(these * q[None, :], axis=1), mask=t < CAPACITY)


@triton.jit
def _statistics(x, rest, b):  # type: ignore[no-untyped-def]
    """What a row still misses at b, variance and third central moment, as in constraint.py."""
    logits = rest + b * x
    shift = tl.maximum(tl.max(logits), 0.0)
    mass = tl.exp(tl.maximum(logits - shift, -60.0))
    top = tl.exp(-shift)
    tail = tl.sum(mass)
    total = top + tail
    mean = tl.sum(mass * x) / total
    missing = shift + log1p(top - 1 + tail) - b * mean
    d = x - mean
    square = mass * d * d
    second = (tl.sum(square) + top * mean * mean) / total
    third = (tl.sum(square * d) - top * mean * mean * mean) / total
    return missing, second, third


@triton.jit
def _solved(x, rest, log_q, seen, rho, constant, full, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """(beta std, whether it was reached): Halley's method in ln b on logit(D / D(inf)) inside a bracket."""
    free = (rho > 0) & (constant == 0)
    goal = full - rho
    solvable = free & (goal > full * (4 * EPS))
    rho, goal, full = tl.where(solvable, rho, 0.5), tl.where(solvable, goal, 0.5), tl.where(solvable, full, 1.0)
    high = tl.zeros_like(rho) + BETA
    missing, _, _ = _statistics(x, rest, high)
    reachable = solvable & (missing <= goal)
    low = tl.minimum(tl.sqrt(8 * rho) / tl.maximum(-tl.min(x), TINY), high)
    q = tl.where(seen, tl.exp(log_q), 0.0)
    mean = tl.sum(q * x)
    second = tl.sum(q * (x - mean) * (x - mean))
    b = tl.minimum(tl.sqrt(2 * rho / tl.maximum(second, TINY)), (full + rho) / tl.maximum(-mean, TINY))
    b = tl.maximum(tl.minimum(b, high), low)
    target = tl.log(rho / goal)
    done = rho != rho
    for _ in range(COUNT - 1):
        missing, second, third = _statistics(x, rest, b)
        slope = tl.maximum(b * b * second, TINY)
        error = goal - missing
        low, high = tl.where(error < 0, b, low), tl.where(error < 0, high, b)
        gained = tl.maximum(full - missing, full * EPS)
        left = tl.maximum(missing, TINY)
        newton = (tl.log(gained / left) - target) * (gained / full) * (left / slope)
        curvature = 1 + 0.5 * b * third / tl.maximum(second, TINY) + 0.5 * slope * (1 / left - 1 / gained)
        step = newton / (1 - tl.minimum(tl.maximum(newton * curvature, -1.0), 0.5))
        done = done | (tl.abs(error) <= (1 + full + slope) * (2 * EPS)) | (tl.abs(step) <= 2 * EPS)
        new = b * tl.exp(-tl.minimum(tl.maximum(step, -3.0), 3.0))
        new = tl.where((new > low) & (new < high) & (missing > 1e-18), new, tl.sqrt(low * high))
        b = tl.where(done, b, new)
    return tl.where(reachable, b, BETA), free


@triton.jit
def weights_kernel(  # type: ignore[no-untyped-def]
    scores, below, keep, ratio, positions, origins, weights, log_weights, ceiling, fixed, columns,
    H: tl.constexpr, CAPACITY: tl.constexpr, FORM: tl.constexpr, RATIO: tl.constexpr, CEILING: tl.constexpr,
    PRIOR: tl.constexpr, TABLE: tl.constexpr, KEEP: tl.constexpr, LEAVES: tl.constexpr, DOCUMENTS: tl.constexpr,
    COUNT: tl.constexpr, OVERLAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row and head): the weights of its keys at the radius, from their scores.

    RATIO: r is `fixed` (0), one of each head (1) or of each row and head (2). PRIOR: `below` has the logarithms of
    weights, with a TABLE of so many columns by head and distance; KEEP: times a number of each head. LEAVES: those of
    the new weights are stored for the next call.
    """
    row_head = tl.program_id(0)
    row, head = row_head // H, row_head % H
    t = tl.arange(0, BLOCK)
    at = row_head * CAPACITY + t
    await_others(OVERLAP)
    p, origin = place_of(positions, origins, row, CAPACITY, DOCUMENTS)
    seen = (t <= p) & (t >= origin)
    s = tl.load(scores + at, mask=seen, other=0.0)
    count = (p - origin + 1).to(tl.float32)
    if RATIO == 0:
        r = fixed
    else:
        r = tl.load(ratio + (head if RATIO == 1 else row_head)).to(tl.float32)
    if FORM == 0:
        rho = (1 - r) * tl.log(count)
    elif FORM == 1:
        rho = tl.log(count) - tl.log(1 + r * (count - 1))
    else:
        rho = r * tl.log(count)
    if PRIOR:
        level = tl.load(below + (head * columns + p - t if TABLE else at), mask=seen, other=0.0).to(tl.float32)
        if KEEP:
            level *= tl.load(keep + head).to(tl.float32)
        most = tl.max(tl.where(seen, level, -float("inf")))
        log_q = level - most - tl.log(tl.sum(tl.where(seen, tl.exp(level - most), 0.0)))
    else:
        log_q = tl.zeros_like(s) - tl.log(count)
    log_q = tl.where(seen, log_q, 0.0)

    top = tl.max(tl.where(seen, s, -float("inf")))
    x = tl.where(seen, s - top, 0.0)
    spread = -tl.min(x)
    constant = (spread > 1.2e-30) == 0
    spread = tl.where(constant, 1.0, spread)
    y = x / spread
    y = tl.where(seen, y - tl.sum(y) / count, 0.0)
    std = tl.where(constant, 1.0, tl.sqrt(tl.sum(y * y) / count) * spread)
    x = x / std
    on_top = seen & (x == 0)
    most = tl.max(tl.where(on_top, log_q, -float("inf")))
    q_top = most + tl.log(tl.sum(tl.where(on_top, tl.exp(log_q - most), 0.0)))
    rest = tl.where(seen & (on_top == 0), log_q - q_top, HIDDEN)
    b, free = _solved(x, rest, log_q, seen, rho, constant, -q_top, COUNT)
    if CEILING:
        b = tl.minimum(tl.where(constant, ceiling * std, b), ceiling * std)
        free = rho > 0
    b = tl.where(rho == rho, tl.where(free, b, 0.0), rho)
    logits = tl.where(seen, log_q + b * x, -float("inf"))
    most = tl.max(logits)
    log_a = logits - most - tl.log(tl.sum(tl.exp(logits - most)))
    tl.store(weights + at, tl.where(seen, tl.exp(log_a), 0.0), mask=t < CAPACITY)
    if LEAVES:
        tl.store(log_weights + at, tl.where(seen, log_a, 0.0), mask=t < CAPACITY)


@triton.jit
def gather_kernel(  # type: ignore[no-untyped-def]
    weights, values, positions, parts, tops, sums,
    H: tl.constexpr, D: tl.constexpr, CAPACITY: tl.constexpr, OVERLAP: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program (s, row and head): the weighted values of some keys."""
    stretch, row_head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    found = tl.zeros((D,), tl.float32)
    await_others(OVERLAP)
    p, _ = place_of(positions, positions, row_head // H, CAPACITY, False)
    for block in range(BLOCKS):
        t = (stretch * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        at = (row_head.to(tl.int64) * CAPACITY + t)[:, None] * D + d[None, :]
        v = tl.load(values + at, mask=(t <= p)[:, None] & (d >= 0)[None, :], other=0.0).to(tl.float32)
        a = tl.load(weights + row_head * CAPACITY + t, mask=t <= p, other=0.0)
        found += tl.sum(a[:, None] * v, axis=0)
    place = row_head * tl.num_programs(0) + stretch
    tl.store(parts + place * D + d, found)
    tl.store(tops + place, 0.0)
    tl.store(sums + place, tl.where(stretch == 0, 1.0, 0.0))


class Radius(NamedTuple):
    """How far attention may go: the form of the radius, r as a number or a tensor (H,) or (B, H), and the largest b."""

    form: str
    ratio: float | Tensor
    ceiling: float | None = None


class Prior(NamedTuple):
    """Logarithms of the weights of the call below (B, H, capacity), if any, and how much of each is kept (H,); or a
    table of them (H, context) by distance, after which no call asks for the new ones.
    """

    below: Tensor | None = None
    keep: Tensor | None = None

    @property
    def chained(self) -> bool:
        return self.below is None or self.below.ndim == 3


def constrained(
    qkv: Tensor, keys: Tensor, values: Tensor, where: Where, mix: Mix | None, qk_eps: float | None, radius: Radius,
    prior: Prior | None,
) -> tuple[Stretches | Tensor, Tensor | None]:  # fmt: skip
    """As `rows.attend`, at the b of the radius; in a chain also the logarithms of the weights (B, H, capacity)."""
    rows, heads, capacity, head_dim = keys.shape
    device, like = qkv.device, dependent(qkv, rows)
    scores = torch.empty(rows, heads, capacity, dtype=torch.float32, device=device)
    chained = prior is not None and prior.chained
    weights, log_weights = torch.empty_like(scores), torch.empty_like(scores) if chained else None
    block = min(KEYS, triton.next_power_of_2(capacity))
    scores_kernel[(triton.cdiv(capacity, block), rows * heads)](
        qkv, keys, values, where.positions, where.origins, *heads_arguments(qkv, where, mix), scores,
        head_dim**-0.5, qk_eps or 0.0, 0 if mix is None else mix.earlier.stride(0),
        H=heads, D=head_dim, CAPACITY=capacity, ROTARY=where.angles is not None, QK_NORM=qk_eps is not None,
        MIXED=mix is not None, BLOCK=block, num_warps=WARPS, **like,
    )  # fmt: skip
    below, keep = (None, None) if prior is None else prior
    ratio, fixed = (radius.ratio, 0.0) if isinstance(radius.ratio, Tensor) else (scores, radius.ratio)
    kind = 0 if ratio is scores else ratio.ndim
    whole = triton.next_power_of_2(capacity)
    weights_kernel[(rows * heads,)](
        scores, scores if below is None else below, scores if keep is None else keep, ratio, where.positions,
        where.origins, weights, weights if log_weights is None else log_weights, radius.ceiling or 0.0, fixed,
        0 if below is None else below.shape[-1],
        H=heads, CAPACITY=capacity, FORM=FORMS[radius.form], RATIO=kind, CEILING=radius.ceiling is not None,
        PRIOR=below is not None, TABLE=below is not None and not chained,
        KEEP=below is not None and keep is not None, LEAVES=log_weights is not None, DOCUMENTS=where.documents,
        COUNT=(EVALUATIONS if below is None else EVALUATIONS_WITH_PRIOR)[torch.float32],
        BLOCK=whole, num_warps=1 if whole <= 1024 else 4, **like,
    )  # fmt: skip
    blocks = triton.cdiv(triton.cdiv(capacity, block), STRETCHES if rows <= FEW else 1)
    split = triton.cdiv(capacity, block * blocks)
    dtype = torch.float32 if rows <= FEW else values.dtype
    parts = torch.empty(rows, heads, split, head_dim, dtype=dtype, device=device)
    tops, sums = (torch.empty(rows, heads, split, dtype=torch.float32, device=device) for _ in range(2))
    gather_kernel[(split, rows * heads)](
        weights, values, where.positions, parts, tops, sums,
        H=heads, D=head_dim, CAPACITY=capacity, BLOCK=block, BLOCKS=blocks, num_warps=WARPS, **like,
    )  # fmt: skip
    return Stretches(parts, tops, sums) if rows <= FEW else parts.view(rows, -1), log_weights
