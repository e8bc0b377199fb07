"""Output projection and cross-entropy as one operator: the logits exist for some rows at a time, never whole.

Hidden states h (N, d), table W (V, d), targets y (N), n of them not ignored:

    z = h W^T,  u = c tanh(z / c) with a soft cap c (else u = z),  loss = 1/n sum_i (log sum_j exp u_ij - u_iy)

and with p = softmax(u) the gradients, for the rows that are not ignored,

    dz_ij = (p_ij - [j = y_i]) / n * (1 - (u_ij / c)^2),  dh = dz W,  dW = dz^T h.

Rows are taken in chunks: one product gives the chunk's logits in the dtype of h, one kernel replaces each row by its dz
in place and leaves the row's loss, two products give dh and add to dW. As the loss is a scalar, the gradients are
complete but for the factor that comes back, so the forward pass computes them and the backward pass multiplies.
Without gradients the kernel reads the logits once.

Work: 6 N d V FLOP in three products. The kernel moves 2 N V numbers, one read and one write (the second read of a row
follows the first closely enough to come from a cache), 6.6 GB in bf16 at N = 32,768 and V = 50,304. A chunk of logits
has at most `CHUNK_BYTES`. dW is accumulated in fp32; the logits, dz and dh are rounded where plain PyTorch rounds them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepformer.base.errors import StepformerError
from stepformer.ops.operators import differentiable, operator, traced, unwritten
from stepformer.ops.token_rows import scale_rows

IGNORE = tl.constexpr(-100)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)  # finite: -inf minus -inf has no value

LOW_CAP = 40.0  # exp(-2 c), the smallest term of a sum that is relative to the cap, is far from underflow

# Six chunks for 32,768 rows of 50,304 bf16 logits: products of 5,504 rows were the fastest of six sizes on an H200.
CHUNK_BYTES = 560_000_000


@triton.jit
def _inside(z, cap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """tanh(z / c), or z itself; CAPPED = 2: by the one instruction that a GPU has for it, exact to 2^-11 relative."""
    x = z
    if CAPPED == 2:
        x = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [z * (1 / cap)], dtype=tl.float32, is_pure=True, pack=1
        )
    elif CAPPED:
        a = z * (1 / cap)
        square = a * a
        # near 0 the quotient cancels; the series is exact to fp32 below a quarter
        series = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
        x = tl.where(square < 0.0625, a * series, 1 - 2 / (1 + tl.exp2(a * (2 * LOG2E))))
    return x


@triton.jit
def _fold(largest, total, x, unit, BOUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One tile into the running maxima, in bits, and sums of 2^(x unit - maximum), one of each per vector.

    BOUNDED: no logit is above the cap, which takes the place of the maxima.
    """
    if BOUNDED:
        larger = largest
        total += tl.sum(tl.exp2(x * unit - unit), axis=1)
    else:
        larger = tl.maximum(largest, tl.max(x, axis=1) * unit)
        total = total * tl.exp2(largest - larger) + tl.sum(tl.exp2(x * unit - larger[:, None]), axis=1)
    return larger, total


@triton.jit
def _derivative(x, hot, unit, largest, share, scale, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """dz of a tile: softmax minus the target's one, over the number of targets, through the cap."""
    dz = tl.exp2(x * unit - largest) * share - tl.where(hot, scale, 0.0)
    if CAPPED:
        dz = dz * (1 - x * x)
    return dz


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    logits, targets, count, losses, cap,
    V: tl.constexpr, WIDTH: tl.constexpr, VECTORS: tl.constexpr, LANES: tl.constexpr, CAPPED: tl.constexpr,
    BOUNDED: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """One row of logits: its loss, and with GRADIENT dz in its place.

    A tile is VECTORS x LANES columns, LANES of them the 16 bytes a thread loads at once, so maxima and sums along them
    need no other thread. Rows are WIDTH >= V long; what lies behind V is ignored and becomes 0.
    """
    TILE: tl.constexpr = VECTORS * LANES
    FULL: tl.constexpr = V // TILE
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * WIDTH
    columns = tl.arange(0, VECTORS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    target = tl.load(targets + row)
    if target == IGNORE:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            zero = tl.zeros((VECTORS, LANES), logits.dtype.element_ty)
            for i in range(0, FULL):
                tl.store(start + i * TILE + columns, zero)
            if FULL * TILE < WIDTH:
                tl.store(start + FULL * TILE + columns, zero, mask=columns < WIDTH - FULL * TILE)
    else:
        known = (target >= 0) & (target < V)
        hot = tl.where(known, target, -1).to(tl.int32)
        # before the maxima, whose exchange between threads keeps this ahead of every store
        at_target = tl.load(start + hot, mask=known, other=float("nan")).to(tl.float32)
        unit = cap * LOG2E  # logits are x c in nats, x unit in bits; c = 1 without a cap
        at_target = _inside(at_target, cap, CAPPED) * cap
        maxima = tl.full((VECTORS,), LOWEST, tl.float32)
        sums = tl.zeros((VECTORS,), tl.float32)
        for i in range(0, FULL):
            z = tl.load(start + i * TILE + columns, eviction_policy="evict_last").to(tl.float32)
            maxima, sums = _fold(maxima, sums, _inside(z, cap, CAPPED), unit, BOUNDED)
        if FULL * TILE < V:
            rest = FULL * TILE + columns
            z = tl.load(start + rest, mask=rest < WIDTH, other=0.0, eviction_policy="evict_last").to(tl.float32)
            x = tl.where(rest < V, _inside(z, cap, CAPPED), float("-inf"))
            maxima, sums = _fold(maxima, sums, x, unit, BOUNDED)
        if BOUNDED:
            largest = unit
            total = tl.sum(sums, axis=0)
        else:
            largest = tl.max(maxima, axis=0)
            total = tl.sum(sums * tl.exp2(maxima - largest), axis=0)
        tl.store(losses + row, (largest + tl.log2(total)) * LN2 - at_target)
        if GRADIENT:
            scale = 1.0 / tl.load(count)
            share = scale / total
            if FULL * TILE < WIDTH:
                rest = FULL * TILE + columns
                z = tl.load(start + rest, mask=rest < WIDTH, other=0.0, eviction_policy="evict_first").to(tl.float32)
                dz = _derivative(_inside(z, cap, CAPPED), rest == hot, unit, largest, share, scale, CAPPED)
                dz = tl.where(rest < V, dz, 0.0)
                tl.store(start + rest, dz.to(logits.dtype.element_ty), mask=rest < WIDTH)
            for i in range(0, FULL):
                at = (FULL - 1 - i) * TILE + columns  # backwards: what was read last is still near
                z = tl.load(start + at, eviction_policy="evict_first").to(tl.float32)
                dz = _derivative(_inside(z, cap, CAPPED), at == hot, unit, largest, share, scale, CAPPED)
                tl.store(start + at, dz.to(logits.dtype.element_ty))


def row_settings(vocabulary: int, element_size: int) -> dict[str, int]:
    """Tile and warps of the row kernel: the most threads and one vector each was the fastest of six (1.79 ms for
    32,768 rows of 50,304 in bf16 on an H200; 16 warps with four vectors each 2.06)."""
    lanes = 16 // element_size
    vectors = triton.next_power_of_2(triton.cdiv(vocabulary, lanes))
    warps = 32 if vectors >= 2048 else 4
    return {"LANES": lanes, "VECTORS": min(vectors, warps * 32 * (1 if warps == 32 else 4)), "num_warps": warps}


def capping(cap: float | None, h: Tensor) -> int:
    """CAPPED of the row kernel. bf16 logits are rounded to 2^-9 themselves, so the quick tanh takes them."""
    if cap is None:
        return 0
    return 2 if h.dtype == torch.bfloat16 and h.is_cuda and torch.version.hip is None else 1


def chunk_rows(rows: int, width: int, element_size: int, chunk_bytes: int) -> int:
    """Rows of a chunk: as equal as possible, a multiple of 128 where there are several."""
    most = max(128, chunk_bytes // (width * element_size) // 128 * 128)
    if rows <= most:
        return rows
    return triton.cdiv(triton.cdiv(rows, triton.cdiv(rows, most)), 128) * 128


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total = a b or total += a b, total in fp32 whatever the factors are."""
    if a.dtype == torch.float32:
        torch.addmm(total, a, b, beta=0 if first else 1, out=total)
    elif first:
        torch.mm(a, b, out_dtype=torch.float32, out=total)
    elif torch.__version__ >= "2.10":
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:  # where the sum still had to have the factors' dtype
        total += torch.mm(a, b, out_dtype=torch.float32)


def _outputs(
    h: Tensor, table: Tensor, targets: Tensor, cap: float | None, train: bool, train_table: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtable = table.new_empty(table.shape if train_table else (0, table.shape[1]))
    return h.new_empty((), dtype=torch.float32), unwritten(h, train), dtable


@operator("linear_cross_entropy", fake=_outputs)
def _loss(
    h: Tensor, table: Tensor, targets: Tensor, cap: float | None, train: bool, train_table: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, dh if they are to `train`, and dW if that is."""
    (n, d), vocabulary = h.shape, table.shape[0]
    lanes = 16 // h.element_size()
    width = triton.cdiv(vocabulary, lanes) * lanes  # unaligned rows would be slow to load, and to multiply
    dh = h.new_empty(h.shape if train else 0)
    dtable = torch.empty(width if train_table else 0, d, dtype=torch.float32, device=h.device)
    with torch.autocast(h.device.type, enabled=False):
        weight = table.to(h.dtype)
        if width > vocabulary:
            weight = torch.cat([weight, weight.new_zeros(width - vocabulary, d)])
        h, targets = h.contiguous(), targets.contiguous()
        count = (targets != IGNORE.value).sum().float()
        losses = torch.empty(n, dtype=torch.float32, device=h.device)
        rows = chunk_rows(n, width, h.element_size(), CHUNK_BYTES)
        buffer = torch.empty(rows, width, dtype=h.dtype, device=h.device)
        settings: dict[str, Any] = row_settings(vocabulary, h.element_size())
        for begin in range(0, n, rows):
            part = slice(begin, begin + rows)
            logits = buffer[: h[part].shape[0]]
            torch.mm(h[part], weight.t(), out=logits)
            _rows[(logits.shape[0],)](
                logits, targets[part], count, losses[part], cap or 1.0,
                V=vocabulary, WIDTH=width, CAPPED=capping(cap, h), BOUNDED=cap is not None and cap <= LOW_CAP,
                GRADIENT=train, **settings,
            )  # fmt: skip
            if train:
                torch.mm(logits, weight, out=dh[part])
            if train_table:
                _add_product(dtable, logits.t(), h[part], first=begin == 0)
        return losses.sum() / count, dh, dtable[:vocabulary].to(table.dtype)


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    if not torch.is_grad_enabled() and not traced(gradient):
        return scale_rows(gradient, factor.float())  # torch's own loads one entry at a time, to broadcast
    product = gradient * factor.view(1, 1)  # as a 0-D tensor it would be rounded to bf16 first
    return product.to(gradient.dtype)


def _multiply(
    needs: Any, kept: Any, _: Any, factor: Tensor | None, second_h: Tensor | None, second_table: Tensor | None
) -> tuple[Tensor | None, ...]:
    """For a compiler plain PyTorch, so that it may fuse the product with what comes next (the embedding's share)."""
    if second_h is not None or second_table is not None:
        raise StepformerError("The fused loss has no second derivative: ask for it inside `with kernels.off():`.")
    if factor is None:
        return ()
    dh, dtable = kept
    return _scaled(dh, factor), _scaled(dtable, factor) if needs[1] else None


differentiable(_loss, lambda inputs, outputs: (outputs[1:], ()), _multiply, unused=True)


def linear_cross_entropy(h: Tensor, table: Tensor, targets: Tensor, cap: float | None = None) -> Tensor:
    """Mean cross-entropy (fp32, in nats) of the logits h W^T for hidden states (N, d), table (V, d), targets (N).

    The products run in the dtype of h. Target -100 is ignored; without any other target the loss is nan, as that of
    F.cross_entropy. Another target outside the vocabulary makes it nan too.
    """
    train = torch.is_grad_enabled() and (h.requires_grad or table.requires_grad)
    if not train:
        h, table = h.detach(), table.detach()
    loss: Tensor = _loss(h, table, targets.long(), cap, train, table.requires_grad)[0]
    return loss
