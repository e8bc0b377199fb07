"""The force and ln z of softmax Hamiltonian attention: library products over stretches of queries, Triton in between.

Per kernel (head), with raw scores X_ij = q_i.k_j, n_i = i + 1 (or n0), a bound b and c a constant factor,

    S = b tanh(tau X / b) (or tau X),  e_ij = exp(S_ij) for j <= i,  z_i = (1/n_i) sum_j e_ij,
    r_i = a_i / (2 z_i^2),   W_ij = (c / n_i) e_ij (r_i + r_j + kappa),   out_i = sum_j W_ij k_j.

`row` force: as above. `query` force: W_ij = (c / n_i) e_ij (r_i + kappa). The two sums of the force have the same
vectors k_j, so one product with W serves both. r_j is known once row j is complete: stretches go in order.

Backward, with G = dL/dout, l = dL/d ln z, D_ij = G_i.k_j and H_ij = (c / n_i) e_ij D_ij:

    dr_i = sum_j H_ij + sum_{j>=i} H_ji (the second sum for `row` only),   dkappa = sum_ij H_ij,
    da_i = dr_i / (2 z_i^2),   dlnz_i = l_i - 2 r_i dr_i,
    dS_ij = H_ij (r_i + r_j + kappa) + e_ij dlnz_i / (n_i z_i),   dX = tau (1 - (S/b)^2) dS,
    dq = dX k,   dk = dX^T q + W^T G.

dS of row i needs H of all later rows: stretches go backwards, and each takes two looks at e and D. Kept for it: e in
the dtype of q (relative 2^-9 in bf16, as W itself), from which S = ln e; no scores. S, D, r, z and sums are fp32.

Per head, in units of 2 T^2 d f FLOPs, f = (1 + chunk/T) / 2 = 5/8 at T = 1024: forward 2 products, backward 4 (5 if e
is not kept). Bytes in units of f T^2, bf16: forward 16 (X, e and W, each written and read once), backward 26 (D
written, read twice; e read twice; dX written, read twice; W written, read). Blocks above the diagonal exist in
memory but are neither written nor read.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepformer.ops.linear_flow import CHUNK, KEPT, fp32_product, from_later, padded, stretches
from stepformer.ops.operators import differentiable, operator, shaped_as, unwritten

LONGEST = 16_384  # tokens: a kernel holds a whole row of scores
GROUP = 16  # rows whose column sums are added before they are written
TILE = 4096  # scores that a program holds at a time
SLAB = 2**27  # entries of W that exist at the same time in the backward pass


@triton.jit
def _own_rows(begin, rows, R: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of this program within its stretch, their keys, whether a row exists, and whether it sees a key.

    `near` is `live` rounded up to whole vectors of 16 keys: what is read and written, so that accesses are wide.
    """
    first = tl.program_id(0) * R
    row = first + tl.arange(0, R)
    column = tl.arange(0, BLOCK)
    inside = row < rows
    limit = (begin + first + R + 15) // 16 * 16
    near = inside[:, None] & (column < limit)[None, :]
    live = inside[:, None] & (column[None, :] <= (begin + row)[:, None])
    return row, column, inside, near, live


@triton.jit
def _visible(i, n0):  # type: ignore[no-untyped-def]
    """n_i."""
    return tl.where(n0 > 0, n0, i + 1).to(tl.float32)


@triton.jit
def _entries(matrices, batch, row, column, rows, width, near):  # type: ignore[no-untyped-def]
    """What stands there in a stretch's matrices (batch, rows, width), as far as they go."""
    at = matrices + batch * rows * width + (row[:, None] * width + column[None, :])
    return tl.load(at, mask=near & (column < width)[None, :], other=0.0)


@triton.jit
def _exponentials_kernel(  # type: ignore[no-untyped-def]
    scores, a, e, log_z, r, begin, rows, keys, width, T, tau, bound, n0,
    BOUNDED: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """e = exp(S), ln z and r for a stretch of queries; `width` is the room of a row of e."""
    batch = tl.program_id(1).to(tl.int64)
    row, column, inside, near, live = _own_rows(begin, rows, R, BLOCK)
    s = tau * _entries(scores, batch, row, column, rows, keys, near)
    if BOUNDED:
        s = bound * (2 / (1 + tl.exp(-2 / bound * s)) - 1)  # tanh: its rounding, 1e-7 bound, is that of S
    weights = tl.where(live, tl.exp(s), 0.0)
    target = e + batch * rows * width + (row[:, None] * width + column[None, :])
    tl.store(target, weights, mask=near & (column < width)[None, :])
    i = begin + row
    at = batch * T + i
    log_mean = tl.log(tl.where(inside, tl.sum(weights, 1), 1.0) / _visible(i, n0))
    tl.store(log_z + at, log_mean, mask=inside)
    tl.store(r + at, 0.5 * tl.load(a + at, mask=inside, other=0.0) * tl.exp(-2 * log_mean), mask=inside)


@triton.jit
def _weights_kernel(  # type: ignore[no-untyped-def]
    e, r, kappa, out, begin, rows, keys, width, T, factor, n0, KEYS: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr
):
    """W of a stretch of queries, zeros above the diagonal."""
    batch = tl.program_id(1).to(tl.int64)
    row, column, inside, near, live = _own_rows(begin, rows, R, BLOCK)
    i = begin + row
    weights = _entries(e, batch, row, column, rows, width, near).to(tl.float32)
    omega = (tl.load(r + batch * T + i, mask=inside, other=0.0) + tl.load(kappa))[:, None]
    if KEYS:
        omega = omega + tl.load(r + batch * T + column, mask=column < keys, other=0.0)[None, :]
    weights = tl.where(live, (factor / _visible(i, n0))[:, None] * weights * omega, 0.0)
    target = out + batch * rows * width + (row[:, None] * width + column[None, :])
    tl.store(target, weights, mask=inside[:, None] & (column < keys)[None, :])


@triton.jit
def _sums_kernel(  # type: ignore[no-untyped-def]
    e, d, row_sums, column_sums, begin, rows, keys, width, T, factor, n0,
    KEYS: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of H over each row, and over GROUP rows for each column."""
    batch = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    limit = (begin + (tl.program_id(0) + 1) * GROUP + 15) // 16 * 16
    below = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(GROUP // R):
        row = tl.program_id(0) * GROUP + part * R + tl.arange(0, R)
        i = begin + row
        inside = row < rows
        live = inside[:, None] & (column[None, :] <= i[:, None])
        # e is written up to the last row of a tile of R, rounded up to 16: GROUP is 16
        near = inside[:, None] & (column < limit)[None, :]
        h = _entries(e, batch, row, column, rows, width, near).to(tl.float32)
        h *= _entries(d, batch, row, column, rows, keys, near)
        h = tl.where(live, h * (factor / _visible(i, n0))[:, None], 0.0)
        tl.store(row_sums + batch * T + i, tl.sum(h, 1), mask=inside)
        if KEYS:
            below += tl.sum(h, 0)
    if KEYS:
        groups = (T + GROUP - 1) // GROUP
        group = begin // GROUP + tl.program_id(0)
        known = (column < limit) & (column < keys)
        tl.store(column_sums + (batch * groups + group) * T + column, below, mask=known)


@triton.jit
def _slopes_kernel(  # type: ignore[no-untyped-def]
    e, d, r, log_z, d_log_z, kappa, row_sums, column_sums, slopes, weights, d_r, begin, rows, keys, width, T, room,
    tau, bound, factor, n0,
    BOUNDED: tl.constexpr,
    KEYS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dX and W of a stretch of queries, zeros above the diagonal, into (B, T, room); and dr."""
    batch = tl.program_id(1).to(tl.int64)
    row, column, inside, near, live = _own_rows(begin, rows, R, BLOCK)
    i = begin + row
    at = batch * T + i
    own = tl.load(r + at, mask=inside, other=0.0)
    change = tl.load(row_sums + at, mask=inside, other=0.0)
    omega = (own + tl.load(kappa))[:, None]
    if KEYS:
        omega = omega + tl.load(r + batch * T + column, mask=column < keys, other=0.0)[None, :]
        groups = (T + GROUP - 1) // GROUP
        group = tl.arange(0, GROUPS)
        later = (group < groups)[:, None] & (group[:, None] >= (i // GROUP)[None, :]) & inside[None, :]
        place = column_sums + batch * groups * T + (group[:, None] * T + i[None, :])
        change += tl.sum(tl.load(place, mask=later, other=0.0), 0)
    tl.store(d_r + at, change, mask=inside)
    n = _visible(i, n0)
    d_lz = tl.load(d_log_z + at, mask=inside, other=0.0) - 2 * own * change
    scale = d_lz * tl.exp(-tl.load(log_z + at, mask=inside, other=0.0)) / n

    ew = _entries(e, batch, row, column, rows, width, near).to(tl.float32)
    dw = _entries(d, batch, row, column, rows, keys, near)
    w = (factor / n)[:, None] * ew * omega
    x = tau * (w * dw + ew * scale[:, None])
    if BOUNDED:
        t = tl.log(tl.where(ew > 0, ew, 1.0)) / bound
        x *= 1 - t * t
    place = batch * T * room + (i[:, None] * room + column[None, :])
    known = inside[:, None] & (column < keys)[None, :]
    tl.store(weights + place, tl.where(live, w, 0.0), mask=known)
    tl.store(slopes + place, tl.where(live, x, 0.0), mask=known)


def _tile(keys: int) -> dict[str, int]:
    """Rows and columns of a tile that holds whole rows, and its warps."""
    block = max(16, triton.next_power_of_2(keys))
    return {"R": min(GROUP, max(1, TILE // block)), "BLOCK": block, "num_warps": 8 if block <= TILE else 16}


def _exponentials(
    q: Tensor, k: Tensor, a: Tensor, e: Tensor, log_z: Tensor, r: Tensor, begin: int, tau: float, bound: float, n0: int
) -> None:
    """Fill e (B, rows, width), the exponentials of the scores from query `begin` on, and the rows of ln z and r."""
    rows, length = e.shape[1], q.shape[1]
    keys = begin + rows
    scores = fp32_product(q[:, begin:keys], k[:, :keys].mT)
    tile = _tile(keys)
    grid = (triton.cdiv(rows, tile["R"]), q.shape[0])
    _exponentials_kernel[grid](
        *(scores, a, e, log_z, r, begin, rows, keys, e.shape[2], length, tau, bound or 1.0, n0),
        BOUNDED=bound > 0,
        **tile,
    )


def _blocks(kept: Tensor, batch: int, length: int, chunk: int) -> dict[int, Tensor]:
    """The kept exponentials, (batch, rows, width) per stretch, by its begin."""
    blocks, at = {}, 0
    for begin, end in stretches(length, chunk):
        shape = (batch, end - begin, padded(end))
        size = batch * shape[1] * shape[2]
        blocks[begin] = kept[at : at + size].view(shape)
        at += size
    return blocks


def _kept_size(batch: int, length: int, chunk: int) -> int:
    return sum(batch * (end - begin) * padded(end) for begin, end in stretches(length, chunk))


def _per_head(a: Tensor, heads: int) -> Tensor:
    """(B, T) -> (B * heads, T)."""
    return a[:, None].expand(-1, heads, -1).reshape(-1, a.shape[-1]).contiguous()


def _outputs(q: Tensor, k: Tensor, a: Tensor, kappa: Tensor, *constants: Any) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads, length, _), (chunk, keep) = q.shape, constants[-2:]
    kept = q.new_empty(_kept_size(batch * heads, length, chunk) if keep else 0)
    return unwritten(q), a.new_empty(batch, heads, length), kept


@operator("hamiltonian", fake=_outputs)
def _forward(
    q: Tensor, k: Tensor, a: Tensor, kappa: Tensor,
    tau: float, bound: float, n0: int, factor: float, keys: bool, chunk: int, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """out, ln z and the exponentials (empty unless they are to be kept)."""
    batch, heads, length, _ = q.shape
    shape = q.shape
    q, k = (t.reshape(-1, length, t.shape[-1]) for t in (q, k))
    a = _per_head(a, heads)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    log_z, r = torch.empty_like(a), torch.empty_like(a)
    kept = q.new_empty(_kept_size(q.shape[0], length, chunk) if keep else 0)
    blocks = _blocks(kept, q.shape[0], length, chunk) if keep else {}
    for begin, end in stretches(length, chunk):
        room = (q.shape[0], end - begin, padded(end))
        e = blocks[begin] if keep else q.new_empty(room)
        _exponentials(q, k, a, e, log_z, r, begin, tau, bound, n0)
        weights = q.new_empty(room)
        tile = _tile(end)
        _weights_kernel[(triton.cdiv(room[1], tile["R"]), room[0])](
            e, r, kappa, weights, begin, room[1], end, room[2], length, factor, n0, KEYS=keys, **tile
        )
        torch.bmm(weights[:, :, :end], k[:, :end], out=out[:, begin:end])
    return out.view(shape), log_z.view(batch, heads, length), kept


@operator("hamiltonian_backward", fake=shaped_as(2, 3, 4, 5))
def _backward(
    grad: Tensor, d_log_z: Tensor, q: Tensor, k: Tensor, a: Tensor, kappa: Tensor, log_z: Tensor, kept: Tensor,
    tau: float, bound: float, n0: int, factor: float, keys: bool, chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, da (B, T) and dkappa."""
    batch, heads, length, _ = q.shape
    shape = q.shape
    grad, q, k = (t.reshape(-1, length, t.shape[-1]) for t in (grad, q, k))
    d_log_z, log_z = (t.reshape(-1, length).contiguous() for t in (d_log_z, log_z))
    shrink = 0.5 * torch.exp(-2 * log_z)
    a = _per_head(a, heads)
    r = a * shrink
    dq, dk = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2))
    d_r, row_sums = torch.empty_like(r), torch.empty_like(r)
    blocks = _blocks(kept, q.shape[0], length, chunk) if kept.numel() else {}
    slab = max(1, SLAB // length**2)
    for first in range(0, q.shape[0], slab):
        part = slice(first, first + slab)
        column_sums = r.new_empty(q[part].shape[0], triton.cdiv(length, GROUP), length) if keys else r
        slopes, weights = (q.new_empty(q[part].shape[0], length, padded(length)) for _ in range(2))
        for begin, end in reversed(stretches(length, chunk)):
            if blocks:
                e = blocks[begin][part]
            else:
                e = q.new_empty(q[part].shape[0], end - begin, padded(end))
                scratch = torch.empty_like(r[part]), torch.empty_like(r[part])
                _exponentials(q[part], k[part], a[part], e, *scratch, begin, tau, bound, n0)
            d = fp32_product(grad[part, begin:end], k[part, :end].mT)
            stretch = (begin, end - begin, end, e.shape[2], length)
            tile = _tile(end)
            _sums_kernel[(triton.cdiv(end - begin, GROUP), e.shape[0])](
                *(e, d, row_sums[part], column_sums, *stretch, factor, n0), KEYS=keys, GROUP=GROUP, **tile
            )
            _slopes_kernel[(triton.cdiv(end - begin, tile["R"]), e.shape[0])](
                *(e, d, r[part], log_z[part], d_log_z[part], kappa, row_sums[part], column_sums, slopes, weights),
                *(d_r[part], *stretch, slopes.shape[2], tau, bound or 1.0, factor, n0),
                BOUNDED=bound > 0,
                KEYS=keys,
                GROUP=GROUP,
                GROUPS=triton.next_power_of_2(triton.cdiv(length, GROUP)),
                **tile,
            )
            torch.bmm(slopes[:, begin:end, :end], k[part, :end], out=dq[part, begin:end])
        from_later(weights[:, :, :length], grad[part], dk[part], chunk, fresh=True)
        from_later(slopes[:, :, :length], q[part], dk[part], chunk, fresh=False)
    da = (d_r * shrink).view(batch, heads, length).sum(dim=1)
    return dq.view(shape), dk.view(shape), da, row_sums.sum().reshape(kappa.shape)


differentiable(
    _forward,
    keep=lambda inputs, outputs: ((*inputs[:4], *outputs[1:]), inputs[4:-1]),
    gradients=lambda needs, kept, constants, grad, d_log_z, _: _backward(grad, d_log_z, *kept, *constants),
)


def force_and_log_z(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    kappa: Tensor,
    *,
    tau: float,
    bound: float = 0.0,
    n0: int = 0,
    factor: float = 1.0,
    keys: bool = True,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """out (B, H, T, d) and ln z (B, H, T) of plain causal tokens.

    q, k: (B, H, T, d) of one dtype. a: (B, T) and kappa, one number, are fp32. keys: whether keys bring their r_j.
    chunk: queries at a time, rounded up to a multiple of 16; 0: all at once.
    """
    batch, heads, length, _ = q.shape
    keep = torch.is_grad_enabled() and batch * heads * length**2 <= KEPT
    chunk = triton.cdiv(min(chunk or length, length), GROUP) * GROUP
    out, log_z, _ = _forward(q, k, a, kappa, tau, bound, n0, factor, keys, chunk, keep)
    return out, log_z
