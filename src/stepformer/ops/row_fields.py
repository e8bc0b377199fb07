"""Attentions without a softmax over keys, of one new token per row: linear ones by a state, Hamiltonian fields.

Linear (`advance_state`), one kernel: with the state S = sum_j k_j v_j^T of earlier tokens every program updates some
columns, S' = S + k v^T, and gives q S' there. Traffic: the state once in and once out, 4 bytes a number.

Hamiltonian (`hamiltonian`), two kernels: over stretches of keys sum_j e^{S_ij} k_j (1, a_j / z_j^2); then, of the
merged sums and the token's own key, z_i and the total that W_Q^T turns into the force (oracles/hamiltonian.py).

Overlap and everything else as in row_kernels.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepformer.ops.row_kernels import await_others, place_of
from stepformer.ops.rows import WARPS, Mix, Where, dependent


@triton.jit
def state_kernel(  # type: ignore[no-untyped-def]
    q, k, v, state, earlier, mix, factor, positions, origins, out, q_apart, v_apart, apart, n0,
    D: tl.constexpr, MIXED: tl.constexpr, FACTOR: tl.constexpr, COUNTED: tl.constexpr,
    DOCUMENTS: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (i, row): S + k v^T and q of that in some columns. COUNTED: over the number of tokens seen, else n0."""
    row, i = tl.program_id(1), tl.arange(0, BLOCK_K)
    c = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (i < D)[:, None] & (c < D)[None, :]
    at = row.to(tl.int64) * D * D + i[:, None] * D + c[None, :]
    s = tl.load(state + at, mask=inside, other=0.0, cache_modifier=".cg")
    p = tl.maximum(tl.load(positions + row, cache_modifier=".cg"), 0)
    await_others(OVERLAP)
    columns = c < D
    values = tl.load(v + row * v_apart + c, mask=columns, other=0.0)
    if MIXED:
        before = tl.load(earlier + row * apart + c, mask=columns, other=0.0)
        values = tl.load(mix) * values + tl.load(mix + 1) * before
    origin = p * 0
    if DOCUMENTS:
        origin = tl.minimum(tl.load(origins + row, cache_modifier=".cg"), p)
        s = tl.where(origin == p, 0.0, s)
    s += tl.load(k + row * D + i, mask=i < D, other=0.0).to(tl.float32)[:, None] * values[None, :]
    tl.store(state + at, s, mask=inside)
    found = tl.sum(tl.load(q + row * q_apart + i, mask=i < D, other=0.0)[:, None] * s, axis=0)
    scale = 1.0 / n0
    if COUNTED:
        scale = 1.0 / (p - origin + 1).to(tl.float32)
    if FACTOR:
        scale *= tl.load(factor).to(tl.float32)
    tl.store(out + row * D + c, found * scale, mask=columns)


def advance_state(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, where: Where, n0: int, factor: Tensor | None = None,
    mix: Mix | None = None,
) -> Tensor:  # fmt: skip
    """q S' / n for S' = S + k v^T, which takes the place of S (B, d, d); q, k, v (B, d), k contiguous.

    n is n0, or the number of tokens seen if that is 0; `factor` a number that multiplies the result.
    """
    rows, d = k.shape
    out = torch.empty(rows, d, dtype=torch.float32, device=k.device)
    block_k = triton.next_power_of_2(d)
    block_n = max(1, min(16, 8192 // block_k))
    earlier, weights = mix or (out, out)
    state_kernel[(triton.cdiv(d, block_n), rows)](
        q, k, v, state, earlier, weights, out if factor is None else factor, where.positions, where.origins, out,
        q.stride(0), v.stride(0), earlier.stride(0), float(n0 or 1),
        D=d, MIXED=mix is not None, FACTOR=factor is not None, COUNTED=n0 == 0,
        DOCUMENTS=where.documents, BLOCK_K=block_k, BLOCK_N=block_n, num_warps=WARPS, **dependent(k, rows),
    )  # fmt: skip
    return out


@triton.jit
def _bounded(raw, bound):  # type: ignore[no-untyped-def]
    """bound tanh(raw / bound), and raw itself without a bound."""
    return tl.where(bound > 0, bound * (2 * tl.sigmoid(2 * raw / tl.where(bound > 0, bound, 1.0)) - 1), raw)


@triton.jit
def key_sums_kernel(  # type: ignore[no-untyped-def]
    qk, keys, log_z, a, positions, origins, first, second, tops, sums, tau, bound,
    H: tl.constexpr, W: tl.constexpr, CAPACITY: tl.constexpr, DOCUMENTS: tl.constexpr, OVERLAP: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Program (s, row and kernel): sum_j e^{S_j - top} k_j and that with a_j / z_j^2, over a stretch of the past."""
    stretch, row_head = tl.program_id(0), tl.program_id(1)
    row = row_head // H
    w = tl.arange(0, BLOCK_W)
    inside = w < W
    top = tl.full((), -1e30, tl.float32)
    total = tl.zeros((), tl.float32)
    one, two = tl.zeros((BLOCK_W,), tl.float32), tl.zeros((BLOCK_W,), tl.float32)
    await_others(OVERLAP)
    p, origin = place_of(positions, origins, row, CAPACITY, DOCUMENTS)
    q = tl.load(qk + row * (2 * H * W) + (row_head % H) * W + w, mask=inside, other=0.0)
    for block in range(BLOCKS):
        t = (stretch * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        past = (t < p) & (t >= origin)
        at = row_head.to(tl.int64) * CAPACITY + t
        k = tl.load(keys + at[:, None] * W + w[None, :], mask=past[:, None] & inside[None, :], other=0.0)
        k = k.to(tl.float32)
        s = tl.where(past, _bounded(tau * tl.sum(k * q[None, :], axis=1), bound), -1e30)
        highest = tl.maximum(top, tl.max(s))
        kept = tl.exp(top - highest)
        e = tl.where(past, tl.exp(s - highest), 0.0)
        less = tl.load(log_z + at, mask=past, other=0.0)
        own = tl.load(a + row.to(tl.int64) * CAPACITY + t, mask=past, other=0.0)
        total = total * kept + tl.sum(e)
        one = one * kept + tl.sum(e[:, None] * k, axis=0)
        e = tl.where(past, tl.exp(s - highest - 2 * less), 0.0) * own
        two = two * kept + tl.sum(e[:, None] * k, axis=0)
        top = highest
    place = row_head * tl.num_programs(0) + stretch
    tl.store(first + place * W + w, one, mask=inside)
    tl.store(second + place * W + w, two, mask=inside)
    tl.store(tops + place, top)
    tl.store(sums + place, total)


@triton.jit
def fields_kernel(  # type: ignore[no-untyped-def]
    qk, y, by, first, second, tops, sums, keys, log_z, a, positions, origins, kappa, out, inverse, tau, bound, n0,
    coordinates, fixed, H: tl.constexpr, W: tl.constexpr, CAPACITY: tl.constexpr, SPLIT: tl.constexpr,
    QUERY: tl.constexpr, LEARNED: tl.constexpr, DOCUMENTS: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (i, row and kernel): some columns of the total behind the force; the first one stores z, a and 1 / z."""
    row_head = tl.program_id(1)
    row, head = row_head // H, row_head % H
    w, d = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_D)
    await_others(OVERLAP)
    p, origin = place_of(positions, origins, row, CAPACITY, DOCUMENTS)
    base = qk + row * (2 * H * W) + head * W
    k = tl.load(base + H * W + w, mask=w < W, other=0.0).to(keys.dtype.element_ty).to(tl.float32)
    own = _bounded(tau * tl.sum(tl.load(base + w, mask=w < W, other=0.0) * k), bound)
    mine = tl.load(y + row * (H * W) + d, mask=d < H * W, other=0.0)
    kinetic = tl.sum(mine * tl.load(by + row * (H * W) + d, mask=d < H * W, other=0.0)) / coordinates
    s = tl.arange(0, BLOCK)
    place = row_head * SPLIT + s
    highest = tl.load(tops + place, mask=s < SPLIT, other=-1e30)
    top = tl.maximum(tl.max(highest), own)
    share = tl.exp(highest - top)
    total = tl.sum(share * tl.load(sums + place, mask=s < SPLIT, other=0.0)) + tl.exp(own - top)
    log_n = tl.log(tl.where(n0 > 0, n0, (p - origin + 1).to(tl.float32)))
    level = top + tl.log(total) - log_n
    z = tl.exp(level)
    potential = fixed
    if LEARNED:
        potential = tl.load(kappa).to(tl.float32)
    c = tl.program_id(0) * 32 + tl.arange(0, 32)
    at = place[:, None] * W + c[None, :]
    there = (s < SPLIT)[:, None] & (c < W)[None, :]
    key = tl.load(base + H * W + c, mask=c < W, other=0.0).to(keys.dtype.element_ty)
    k = key.to(tl.float32)
    gathered = tl.sum(share[:, None] * tl.load(first + at, mask=there, other=0.0), axis=0) + tl.exp(own - top) * k
    gathered = gathered / total
    if QUERY:
        result = 0.5 * (kinetic / z + potential * z) * gathered
    else:
        others = tl.exp(top - log_n) * tl.sum(share[:, None] * tl.load(second + at, mask=there, other=0.0), axis=0)
        others += tl.exp(own - 2 * level - log_n) * kinetic * k
        result = (0.5 * kinetic / z + potential * z) * gathered + 0.5 * others
    tl.store(out + row * (H * W) + head * W + c, result * (tau / H), mask=c < W)
    new = row_head.to(tl.int64) * CAPACITY + p
    tl.store(keys + new * W + c, key, mask=c < W)
    if tl.program_id(0) == 0:
        tl.store(log_z + new, level)
        tl.store(inverse + row_head, tl.exp(-level))
        tl.store(a + row.to(tl.int64) * CAPACITY + p, kinetic)


class Hamiltonian(NamedTuple):
    """The constants of a Hamiltonian attention (oracles/hamiltonian.py)."""

    tau: float
    bound: float
    n0: int
    coordinates: int
    query: bool
    kappa: Tensor | float


def hamiltonian(
    qk: Tensor, y: Tensor, by: Tensor, stored: dict[str, Tensor], where: Where, how: Hamiltonian
) -> tuple[Tensor, Tensor]:
    """From queries and keys (B, 2 d), momenta y and B y (B, d): what W_Q^T makes the force of, and 1 / z (B, kernels).

    Key, z and a of the new tokens are written to the cache.
    """
    keys = stored["k"]
    rows, heads, capacity, width = keys.shape
    device, like = qk.device, dependent(qk, rows)
    block_w, block = triton.next_power_of_2(width), max(1, min(64, 16_384 // triton.next_power_of_2(width)))
    blocks = triton.cdiv(triton.cdiv(capacity, block), 64)
    split = triton.cdiv(capacity, block * blocks)
    first, second = (torch.empty(rows, heads, split, width, dtype=torch.float32, device=device) for _ in range(2))
    tops, sums = (torch.empty(rows, heads, split, dtype=torch.float32, device=device) for _ in range(2))
    sizes: dict[str, Any] = {"H": heads, "W": width, "CAPACITY": capacity, "DOCUMENTS": where.documents}
    sizes |= {"BLOCK_W": block_w, "num_warps": WARPS, **like}
    places = (where.positions, where.origins)
    key_sums_kernel[(split, rows * heads)](
        qk, keys, stored["log_z"], stored["a"], *places, first, second, tops, sums, how.tau, how.bound,
        BLOCK=block, BLOCKS=blocks, **sizes,
    )  # fmt: skip
    out, inverse = torch.empty_like(y), torch.empty(rows, heads, dtype=torch.float32, device=device)
    learned = isinstance(how.kappa, Tensor)
    fields_kernel[(triton.cdiv(width, 32), rows * heads)](
        qk, y, by, first, second, tops, sums, keys, stored["log_z"], stored["a"], *places,
        how.kappa if learned else out, out, inverse, how.tau, how.bound, float(how.n0),
        float(how.coordinates), 0.0 if learned else how.kappa, SPLIT=split, QUERY=how.query, LEARNED=learned,
        BLOCK=triton.next_power_of_2(split), BLOCK_D=triton.next_power_of_2(heads * width), **sizes,
    )  # fmt: skip
    return out, inverse
