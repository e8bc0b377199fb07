"""Shampoo's and SOAP's kick in one kernel: covariance, its inverse square root and the whitened direction, per token.

Forward, for a token's answer G (h x k), its covariance R (k x k) and, with SOAP, its running mean M (h x k):

    R' = b R + (1 - b) G^T G          M' = b1 M + (1 - b1) G          D = M', or G without a mean
    s = ||R' + 1e-6 I||_F,  P_0 = (R' + 1e-6 I) / s,  Z_0 = D
    T_i = (3 I - P_i) / 2,  Z_{i+1} = Z_i T_i,  P_{i+1} = P_i T_i^2 = 9/4 P_i + 1/4 (P_i^2 - 6 P_i) P_i,  i = 0..9
    U = Z_10 / sqrt(s)

It is the twin's iteration X <- X (3 I - X A X) / 2 with P = X A X carried along and D multiplied in from the start: all
iterates are polynomials in one symmetric matrix, so they commute. Coupled like this the iteration forgets rounding
errors (Guo and Higham, SIAM J. Matrix Anal. Appl. 28, 2006); uncoupled it amplifies them.

Backward, from dU, dR', dM'. Run the P_i and Z_i again, then backwards with Y_9 = dU and E_10 = 0,
where sym(H) = (H + H^T) / 2 and every E_i is symmetric:

    E_i = 9/4 E + sym(-3 V + 1/2 (V + V^T / 2) P_i) - 1/2 sym(Z_i^T Y_i),  V = E P_i,  E = E_{i+1}
    Y_{i-1} = Y_i T_i                                           (so Y_{-1} = dU X)
    dD = Y_{-1} / sqrt(s) (+ dM'),  dA = E_0 / sqrt(s)
    S = sym(dR') + (dA - P_0 (<dA, P_0> + <Y_{-1}, D> / (2 sqrt(s)))) / s
    dR = b S,  db = <S, R> - <G S, G>,  dG = 2 (1 - b) G S + (1 - b1) dD,  dM = b1 dD,  db1 = <dD, M - G>

The gradient of R is returned symmetrised, unlike the twin's: R is symmetric, and no other part of it ever reaches a
parameter or an answer.

Count for k = 64, h = 12: 2 products of k x k matrices and one of k x k with k x 16 for each of ten steps forward,
4 and 4 backward: about 20 and 46 times 2 k^3 FLOP = 11 and 24 MFLOP a token. Memory: 32 KB a token forward, 64 KB
backward. The backward keeps P_i and Z_i in a buffer of its programs, not of its tokens (20 KB a step and program).

Precision. A product reads its operands as fp16, scaled to norms between 1 and 2^15: |P| <= 1, |Z|, |Y| < 58 and
|E| < 35 for directions of norm 1, when E is divided by 9/4 at each step. "fp16x3" splits each operand into two fp16
numbers (22 bits) and adds three products: as exact as fp32, 1e-6 for the values and 1e-5 for the gradients up to a
condition of 1e6. "fp16" takes one product: as exact as tf32 and twice as fast, 2e-3 for values and 5e-3 for gradients
at a condition of 1e4. fp32 answers take the first, bf16 answers the second, because they have 8 bits themselves.
"ieee" multiplies in fp32 without tensor cores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepformer.kernels.common import multiprocessors

STEPS = 10
HEAD_DIMS = (16, 32, 64)
MAX_HEADS = 32
SCALE = tl.constexpr(512.0)  # of every matrix below, so that fp16 holds the smallest entries that matter


@triton.jit
def _operand(x: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """x as a pair of dot operands: leading and trailing half."""
    if PRECISION == "ieee":
        return x, x
    high = x.to(tl.float16)
    if PRECISION == "fp16":
        return high, high
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _product(a: tl.tensor, a_low: tl.tensor, b: tl.tensor, b_low: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """a @ b of two pairs."""
    if PRECISION == "ieee":
        return tl.dot(a, b, input_precision="ieee")
    if PRECISION == "fp16":
        return tl.dot(a, b)
    small = tl.dot(a, b_low, tl.dot(a_low, b))
    return tl.dot(a, b, small)


@triton.jit
def _power_of_two(x: tl.tensor) -> tl.tensor:
    """The largest power of two that is not above the Frobenius norm of x; never 0, so that one can divide by it."""
    norm = tl.maximum(tl.sqrt(tl.sum(x * x)), 1e-30)
    return (norm.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _shifted(covariance: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """The covariance plus 1e-6 I."""
    j = tl.arange(0, K)
    return tl.where(j[:, None] == j[None, :], covariance + 1e-6, covariance)


@triton.jit
def _normalised(covariance: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """(P_0, s) of a covariance."""
    shifted = _shifted(covariance, K)
    size = tl.maximum(tl.sqrt(tl.sum(shifted * shifted)), 1e-6)
    return shifted * (1 / size), size


@triton.jit
def _next(p: tl.tensor, ph: tl.tensor, pl: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """P_{i+1} from P_i and its operands."""
    square = _product(ph, pl, ph, pl, PRECISION) * (1 / SCALE)
    qh, ql = _operand(square - 6 * p, PRECISION)
    return 2.25 * p + _product(qh, ql, ph, pl, PRECISION) * (0.25 / SCALE)


@triton.jit
def _turned(
    z: tl.tensor, zh: tl.tensor, zl: tl.tensor, ph: tl.tensor, pl: tl.tensor, PRECISION: tl.constexpr
) -> tl.tensor:
    """T_i Z_i^T from Z_i^T (k x h) and P_i."""
    return 1.5 * z - _product(ph, pl, zh, zl, PRECISION) * (0.5 / SCALE)


@triton.jit
def _forward(
    g: tl.tensor,
    m: tl.tensor,
    r: tl.tensor,
    beta_r: tl.tensor,
    beta1: tl.tensor,
    u: tl.tensor,
    r_new: tl.tensor,
    m_new: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    R_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MEAN: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, K)
    head = tl.arange(0, COLUMNS)
    square = j[:, None] * K + j[None, :]
    turned = token * (H * K) + head[None, :] * K + j[:, None]  # G^T: tensor cores want 64 rows
    real = (head < H)[None, :]

    d = tl.load(g + turned, mask=real, other=0.0).to(tl.float32)
    b = tl.load(beta_r).to(tl.float32)
    unit = _power_of_two(d)
    gh, gl = _operand(d * (SCALE / unit), PRECISION)
    gram = _product(gh, gl, tl.trans(gh), tl.trans(gl), PRECISION) * (unit / SCALE) * (unit / SCALE)
    covariance = b * tl.load(r + token * R_STRIDE + square).to(tl.float32) + (1 - b) * gram
    tl.store(r_new + token * (K * K) + square, covariance)
    if MEAN:
        b1 = tl.load(beta1).to(tl.float32)
        d = b1 * tl.load(m + turned, mask=real, other=0.0).to(tl.float32) + (1 - b1) * d
        tl.store(m_new + turned, d, mask=real)
        unit = _power_of_two(d)

    p, size = _normalised(covariance, K)
    p *= SCALE
    z = d * (SCALE / unit)
    for _ in range(STEPS - 1):
        ph, pl = _operand(p, PRECISION)
        zh, zl = _operand(z, PRECISION)
        z = _turned(z, zh, zl, ph, pl, PRECISION)
        p = _next(p, ph, pl, PRECISION)
    ph, pl = _operand(p, PRECISION)
    zh, zl = _operand(z, PRECISION)
    z = _turned(z, zh, zl, ph, pl, PRECISION)
    tl.store(u + turned, z * (unit / (SCALE * tl.sqrt(size))), mask=real)


@triton.jit
def _backward(
    du: tl.tensor,
    dr_new: tl.tensor,
    dm_new: tl.tensor,
    g: tl.tensor,
    m: tl.tensor,
    r: tl.tensor,
    r_new: tl.tensor,
    beta_r: tl.tensor,
    beta1: tl.tensor,
    dg: tl.tensor,
    dm: tl.tensor,
    dr: tl.tensor,
    partial: tl.tensor,
    scratch: tl.tensor,
    tokens: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    R_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MEAN: tl.constexpr,
    HAS_DR: tl.constexpr,
    HAS_DM: tl.constexpr,
    NEEDS_DR: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    HALVES: tl.constexpr = 2 if PRECISION == "fp16x3" else 1
    PART: tl.constexpr = K * K + K * COLUMNS  # P_i and Z_i; their trailing halves follow
    program = tl.program_id(0)
    j = tl.arange(0, K)
    head = tl.arange(0, COLUMNS)
    square = j[:, None] * K + j[None, :]
    tall = j[:, None] * COLUMNS + head[None, :]
    turned = head[None, :] * K + j[:, None]
    real = (head < H)[None, :]
    base = scratch + program.to(tl.int64) * ((STEPS - 1) * PART * HALVES)
    b = tl.load(beta_r).to(tl.float32)
    b1 = 0.0
    if MEAN:
        b1 = tl.load(beta1).to(tl.float32)
    one = tl.full((), 1, tl.int64)  # offsets of matrices pass 2^31
    db = tl.zeros((K,), tl.float32)
    db1 = tl.zeros((K,), tl.float32)

    for t in range(program, tokens, tl.num_programs(0)):
        token = t * one
        vectors = token * (H * K)
        matrices = token * (K * K)
        d = tl.load(g + vectors + turned, mask=real, other=0.0).to(tl.float32)
        if MEAN:
            d = b1 * tl.load(m + vectors + turned, mask=real, other=0.0).to(tl.float32) + (1 - b1) * d
        unit = _power_of_two(d)
        z = d * (SCALE / unit)
        p, size = _normalised(tl.load(r_new + matrices + square), K)
        p *= SCALE
        here = base
        for _ in range(STEPS - 1):
            ph, pl = _operand(p, PRECISION)
            zh, zl = _operand(z, PRECISION)
            tl.store(here + square, ph)
            tl.store(here + K * K + tall, zh)
            if HALVES == 2:
                tl.store(here + PART + square, pl)
                tl.store(here + PART + K * K + tall, zl)
            z = _turned(z, zh, zl, ph, pl, PRECISION)
            p = _next(p, ph, pl, PRECISION)
            here += PART * HALVES

        ph, pl = _operand(p, PRECISION)
        zh, zl = _operand(z, PRECISION)
        y = tl.load(du + vectors + turned, mask=real, other=0.0).to(tl.float32)
        y_unit = _power_of_two(y)
        y *= SCALE / y_unit
        yh, yl = _operand(y, PRECISION)
        half = _product(zh, zl, tl.trans(yh), tl.trans(yl), PRECISION) * (-0.25 / SCALE)
        e = half + tl.trans(half)
        y = _turned(y, yh, yl, ph, pl, PRECISION)
        shrunk = -0.25 / SCALE
        tl.debug_barrier()  # other threads read what was stored
        for _ in range(STEPS - 1):
            here -= PART * HALVES
            shrunk = shrunk / 2.25
            ph = tl.load(here + square)
            zh = tl.load(here + K * K + tall)
            pl, zl = ph, zh
            if HALVES == 2:
                pl = tl.load(here + PART + square)
                zl = tl.load(here + PART + K * K + tall)
            eh, el = _operand(e, PRECISION)
            v = _product(eh, el, ph, pl, PRECISION) * (1 / SCALE)
            vh, vl = _operand(v + 0.5 * tl.trans(v), PRECISION)
            half = 0.5 * e - (2 / 3) * v + _product(vh, vl, ph, pl, PRECISION) * (1 / (9 * SCALE))
            yh, yl = _operand(y, PRECISION)
            half += _product(zh, zl, tl.trans(yh), tl.trans(yl), PRECISION) * shrunk
            e = half + tl.trans(half)
            y = _turned(y, yh, yl, ph, pl, PRECISION)
        tl.debug_barrier()  # the next token's stores wait for these loads

        answer = tl.load(g + vectors + turned, mask=real, other=0.0).to(tl.float32)
        d = answer
        if MEAN:
            mean = tl.load(m + vectors + turned, mask=real, other=0.0).to(tl.float32)
            d = b1 * mean + (1 - b1) * answer
        p = _shifted(tl.load(r_new + matrices + square), K) * (1 / size)
        root = y_unit / (SCALE * tl.sqrt(size))
        dd = y * root
        e *= (unit * 2.25 ** (STEPS - 1)) * root
        along = tl.sum(tl.sum(e * p, 1) + 0.5 * tl.sum(dd * d, 1))
        e = (e - p * along) * (1 / size)
        if HAS_DR:
            given = tl.load(dr_new + matrices + square).to(tl.float32)
            e += 0.5 * (given + tl.trans(given))
        if NEEDS_DR:
            tl.store(dr + matrices + square, b * e)
        e_unit = _power_of_two(e)
        g_unit = _power_of_two(answer)
        eh, el = _operand(e * (SCALE / e_unit), PRECISION)
        gh, gl = _operand(answer * (SCALE / g_unit), PRECISION)
        through = _product(eh, el, gh, gl, PRECISION) * (e_unit / SCALE) * (g_unit / SCALE)
        old = tl.load(r + token * R_STRIDE + square).to(tl.float32)
        db += tl.sum(e * old, 1) - tl.sum(through * answer, 1)
        through *= 2 * (1 - b)
        if MEAN:
            if HAS_DM:
                dd += tl.load(dm_new + vectors + turned, mask=real, other=0.0).to(tl.float32)
            db1 += tl.sum(dd * (mean - answer), 1)
            tl.store(dm + vectors + turned, b1 * dd, mask=real)
            dd = (1 - b1) * dd
        tl.store(dg + vectors + turned, dd + through, mask=real)
    tl.store(partial + program, tl.sum(db))
    tl.store(partial + tl.num_programs(0) + program, tl.sum(db1))


class Launch(NamedTuple):
    """How the backward runs: warps, stages of its loads, programs per multiprocessor and registers per thread."""

    warps: int = 4
    stages: int = 1
    programs: int = 2
    registers: int | None = None


def launch(k: int, precision: str) -> Launch:
    """Four warps share a 64 x 64 product; the registers they need let two programs run side by side."""
    return Launch()


def precision_for(dtype: torch.dtype) -> str:
    """fp32 answers deserve 22 bits, bf16 answers 11."""
    return "fp16" if dtype == torch.bfloat16 else "fp16x3"


def supports(n_head: int, head_dim: int) -> bool:
    """Whether a token's matrix of heads has a shape that the kernels take."""
    return head_dim in HEAD_DIMS and n_head <= MAX_HEADS


def whiten(
    g: Tensor, m: Tensor | None, r: Tensor, beta_r: Tensor, beta1: Tensor | None, n_head: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """u = D R'^{-1/2} in `dtype`, R' and M' of each token; without m and beta1 D is g and there is no M'.

    g and m are (..., n_head * k), r is (..., k, k) and may be expanded; the betas are mapped values of shape (1,).
    """
    u, r_new, m_new = _whiten(g, m, r, beta_r, beta1, n_head, dtype, precision_for(g.dtype))
    return u, r_new, None if m is None else m_new


@torch.library.custom_op("stepformer::whiten", mutates_args=())
def _whiten(
    g: Tensor,
    m: Tensor | None,
    r: Tensor,
    beta_r: Tensor,
    beta1: Tensor | None,
    n_head: int,
    dtype: torch.dtype,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    u, r_new, m_new = _outputs(g, m, r, beta1, dtype)
    r, stride = _matrices(r)
    k = r.shape[-1]
    tokens = g.numel() // (n_head * k)
    if tokens:
        _forward[(tokens,)](
            g.contiguous(), None if m is None else m.contiguous(), r, beta_r, beta1, u, r_new, m_new,
            H=n_head, K=k, R_STRIDE=stride, COLUMNS=_columns(n_head), MEAN=m is not None, STEPS=STEPS,
            PRECISION=precision, num_warps=4, num_stages=1,
        )  # fmt: skip
    return u, r_new, m_new


def _outputs(
    g: Tensor, m: Tensor | None, r: Tensor, beta1: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Unwritten memory for u, R' and M'; an operator returns tensors only, so a missing M' is an empty one."""
    u = g.new_empty(g.shape, dtype=dtype)
    r_new = g.new_empty(r.shape, dtype=torch.float32)
    if m is None or beta1 is None:
        return u, r_new, g.new_empty(0)
    wide = torch.promote_types(torch.promote_types(g.dtype, m.dtype), beta1.dtype)
    return u, r_new, g.new_empty(g.shape, dtype=wide)


def _columns(n_head: int) -> int:
    """Heads, padded to what a product takes."""
    return max(16, triton.next_power_of_2(n_head))


def _matrices(r: Tensor) -> tuple[Tensor, int]:
    """r with its distance between tokens: 0 for one matrix that all tokens share."""
    k = r.shape[-1]
    if r.stride()[-2:] == (k, 1) and not any(r.stride()[:-2]):
        return r, 0
    return r.contiguous(), k * k


@_whiten.register_fake
def _(
    g: Tensor,
    m: Tensor | None,
    r: Tensor,
    beta_r: Tensor,
    beta1: Tensor | None,
    n_head: int,
    dtype: torch.dtype,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(g, m, r, beta1, dtype)


@torch.library.custom_op("stepformer::whiten_backward", mutates_args=())
def _whiten_backward(
    du: Tensor,
    dr_new: Tensor | None,
    dm_new: Tensor | None,
    g: Tensor,
    m: Tensor | None,
    r: Tensor,
    r_new: Tensor,
    beta_r: Tensor,
    beta1: Tensor | None,
    n_head: int,
    precision: str,
    needs_dr: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dg, dm, dr = _gradients(g, m, r, needs_dr)
    r, stride = _matrices(r)
    k = r.shape[-1]
    tokens = g.numel() // (n_head * k)
    how = launch(k, precision)
    programs = min(tokens, multiprocessors(g.device) * how.programs)
    partial = g.new_empty((2, programs), dtype=torch.float32)
    halves = 2 if precision == "fp16x3" else 1
    scratch = g.new_empty(
        (programs, STEPS - 1, halves, k * (k + _columns(n_head))),
        dtype=torch.float32 if precision == "ieee" else torch.float16,
    )
    if tokens:
        _backward[(programs,)](
            du.contiguous(), None if dr_new is None else dr_new.contiguous(),
            None if dm_new is None else dm_new.contiguous(), g.contiguous(), None if m is None else m.contiguous(),
            r, r_new, beta_r, beta1, dg, dm, dr, partial, scratch, tokens,
            H=n_head, K=k, R_STRIDE=stride, COLUMNS=_columns(n_head), MEAN=m is not None,
            HAS_DR=dr_new is not None, HAS_DM=dm_new is not None, NEEDS_DR=needs_dr, STEPS=STEPS, PRECISION=precision,
            num_warps=how.warps, num_stages=how.stages, maxnreg=how.registers,
        )  # fmt: skip
    return dg, dm, dr, partial.sum(1)


def _gradients(g: Tensor, m: Tensor | None, r: Tensor, needs_dr: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Unwritten memory for dg, dm and dr."""
    dm = g.new_empty(0) if m is None else g.new_empty(m.shape, dtype=m.dtype)
    return g.new_empty(g.shape), dm, g.new_empty(r.shape if needs_dr else 0, dtype=r.dtype)


@_whiten_backward.register_fake
def _(
    du: Tensor,
    dr_new: Tensor | None,
    dm_new: Tensor | None,
    g: Tensor,
    m: Tensor | None,
    r: Tensor,
    r_new: Tensor,
    beta_r: Tensor,
    beta1: Tensor | None,
    n_head: int,
    precision: str,
    needs_dr: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_gradients(g, m, r, needs_dr), g.new_empty(2, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    g, m, r, beta_r, beta1, ctx.n_head, _, ctx.precision = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(g, m, r, output[1], beta_r, beta1)


def _differentiate(ctx: Any, du: Tensor | None, dr_new: Tensor | None, dm_new: Tensor | None) -> tuple[Any, ...]:
    g, m, r, r_new, beta_r, beta1 = ctx.saved_tensors
    if du is None:
        du = torch.zeros_like(g)
    needs_dr = ctx.needs_input_grad[2]
    dg, dm, dr, dbetas = _whiten_backward(
        du, dr_new, None if m is None else dm_new, g, m, r, r_new, beta_r, beta1, ctx.n_head, ctx.precision, needs_dr
    )
    mean = (None, None) if m is None else (dm, dbetas[1:].to(beta1.dtype))
    return dg, mean[0], dr if needs_dr else None, dbetas[:1].to(beta_r.dtype), mean[1], None, None, None


_whiten.register_autograd(_differentiate, setup_context=_keep)
