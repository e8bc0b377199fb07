"""Newton-Schulz of one small matrix per token: the update of ortho, and with its running mean that of muon.

Forward, for every token a matrix Y (h, k), Z = Y / max(||Y||_F, 1e-12), five steps in the h x h Gram space:

    G = Z Z^T, Q = I;   M = a I + b G + c G^2,  G <- M G M,  Q <- M Q;   o = Q Z

After two steps Z_2 = Q Z is formed once and G starts again from Z_2 Z_2^T. Without that, rounding in G's smallest
eigenvalues grows by a^2 = 12 a step (relative error 1e-3 where one singular value is 300 times the others; now 1e-5).
Muon forms m' = beta m + (1 - beta) g on the way and takes Y = m' as it is stored.

Backward: o is the gradient of a function of Y's singular values, so its Jacobian is symmetric, and the gradient dZ is
the directional derivative of Z -> o along do. Every matrix X above becomes a pair (X, dX) and nothing is kept:

    dG = do Z^T + Z do^T;   d(X Y) = dX Y + X dY;   dZ = Q do + dQ Z;   dY = (dZ - <Z, dZ> Z) / ||Y||_F
    muon: t = dm' + dY,  dm = beta t,  dg = (1 - beta) t,  dbeta = <t, m - g>

All matrices of the h x h space are polynomials in G: symmetric, so what one product leaves in the registers of a warp
is both a left and a right factor of the next (`_product`), and the whole iteration moves no data.

Products run on tensor cores in tf32. "Accurate" ones split each fp32 number into two tf32 numbers and add three
products: relative error about 1e-6, 1e-5 for ill-conditioned Y. One product alone gives 2e-3 for Gaussian Y, 3e-2 for
Y without full rank (products in bf16: 3e-2 and 3e-1). Values are accurate unless `fast`; derivatives unless `fast` or
do is bf16, where one product adds 2e-3 (6e-3 ill-conditioned) to what storing do in bf16 costs anyway.

12 heads of 64, padded to 16: 127 k multiply-adds a token forward and 365 k backward, three times that where accurate.
Traffic in d-vectors per token: ortho 2 forward, 3 backward; muon 4 and 6 (g, m, do, dm' read, dg, dm written).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepformer.ops.common import dense
from stepformer.ops.matrix_functions import NEWTON_SCHULZ
from stepformer.ops.operators import differentiable, operator, unwritten

MOST_ROWS, MOST_COLUMNS = 32, 128  # larger matrices do not fit in the registers of a warp

A, B, C = tl.constexpr(NEWTON_SCHULZ[0]), tl.constexpr(NEWTON_SCHULZ[1]), tl.constexpr(NEWTON_SCHULZ[2])


@triton.jit
def _product(x, y, total):  # type: ignore[no-untyped-def]
    """total + x y^T in tf32, of x (tokens, rows, k) and y (tokens, columns, k).

    The summed index runs in the order 0 2 4 6 1 3 5 7 of every eight. That changes nothing but which register meets
    which: now those that a product wrote are those that the next one reads, on the left and transposed on the right.
    """
    T: tl.constexpr = x.shape[0]
    R: tl.constexpr = x.shape[1]
    C: tl.constexpr = y.shape[1]
    K: tl.constexpr = x.shape[2]
    left = tl.reshape(tl.permute(tl.reshape(x, (T, R, K // 8, 4, 2)), (0, 1, 2, 4, 3)), (T, R, K))
    right = tl.reshape(tl.permute(tl.reshape(y, (T, C, K // 8, 4, 2)), (0, 2, 4, 3, 1)), (T, K, C))
    return tl.dot(left, right, total, input_precision="tf32")


@triton.jit
def _tf32(x):  # type: ignore[no-untyped-def]
    """x rounded to the 11 significant bits of tf32."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _times(x, y, total, ACCURATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """total + x y^T: with a symmetric y, x y."""
    x_high, y_high = _tf32(x), _tf32(y)
    if ACCURATE:
        total = _product(x - x_high, y_high, total)
        total = _product(x_high, y - y_high, total)
    return _product(x_high, y_high, total)


@triton.jit
def _gram(x, y, total, ACCURATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """total + x y^T of stored numbers; products of bf16 numbers are exact."""
    if x.dtype == tl.bfloat16 and y.dtype == tl.bfloat16:
        result = tl.dot(x, tl.permute(y, (0, 2, 1)), total)
    else:
        result = _times(x.to(tl.float32), y.to(tl.float32), total, ACCURATE)
    return result


@triton.jit
def _apply(q, y, total, ACCURATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """total + q y of a symmetric q with a stored y; bf16 numbers are tf32 numbers already."""
    columns = tl.permute(y.to(tl.float32), (0, 2, 1))
    columns_high = columns if y.dtype == tl.bfloat16 else _tf32(columns)
    q_high = _tf32(q)
    if ACCURATE:
        total = _product(q - q_high, columns_high, total)
        if y.dtype != tl.bfloat16:
            total = _product(q_high, columns - columns_high, total)
    return _product(q_high, columns_high, total)


@triton.jit
def _times_pair(X, dX, Y, dY, VALUES: tl.constexpr, DERIVATIVES: tl.constexpr):  # type: ignore[no-untyped-def]
    """X Y and its derivative."""
    zero = tl.zeros_like(X)
    return _times(X, Y, zero, VALUES), _times(dX, Y, _times(X, dY, zero, DERIVATIVES), DERIVATIVES)


@triton.jit
def _polynomial_pair(G, dG, one, VALUES: tl.constexpr, DERIVATIVES: tl.constexpr):  # type: ignore[no-untyped-def]
    square, dsquare = _times_pair(G, dG, G, dG, VALUES, DERIVATIVES)
    return one * A + G * B + square * C, dG * B + dsquare * C


@triton.jit
def _steps_pair(  # type: ignore[no-untyped-def]
    G, dG, one, STEPS: tl.constexpr, VALUES: tl.constexpr, DERIVATIVES: tl.constexpr
):
    """The product of the polynomials of STEPS steps from G, and its derivative along dG.

    (M G^T) M^T, in this order, keeps what rounding adds to G symmetric; in others it grows to five times the error.
    """
    M, dM = _polynomial_pair(G, dG, one, VALUES, DERIVATIVES)
    Q, dQ = M, dM
    for _ in tl.static_range(STEPS - 1):
        P, dP = _times_pair(M, dM, G, dG, VALUES, DERIVATIVES)
        G, dG = _times_pair(P, dP, M, dM, VALUES, DERIVATIVES)
        M, dM = _polynomial_pair(G, dG, one, VALUES, DERIVATIVES)
        Q, dQ = _times_pair(M, dM, Q, dQ, VALUES, DERIVATIVES)
    return Q, dQ


@triton.jit
def _steps(G, one, STEPS: tl.constexpr, ACCURATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The product alone: what nobody reads is not compiled."""
    Q, _ = _steps_pair(G, G, one, STEPS, ACCURATE, False)
    return Q


@triton.jit
def _load(source, at, mask):  # type: ignore[no-untyped-def]
    return tl.load(source + at, mask=mask, other=0.0)


@triton.jit
def _load_matrix(g, m, beta, at, mask):  # type: ignore[no-untyped-def]
    """Y: g itself, or the mean m' as it is stored."""
    y = _load(g, at, mask)
    if m is not None:
        y = (beta * _load(m, at, mask) + (1 - beta) * y).to(m.dtype.element_ty)
    return y


@triton.jit
def _identity(R: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.where(tl.arange(0, R)[None, :, None] == tl.arange(0, R)[None, None, :], 1.0, 0.0)


@triton.jit(do_not_specialize=["n"])  # no compilation of its own for one token
def _newton_schulz_forward_kernel(  # type: ignore[no-untyped-def]
    g, m, mixing, m_out, o, n,
    H: tl.constexpr, K: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, TOKENS: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """Columns in chunks: three walks over Y keep fewer registers busy than holding it, and the later ones hit L1."""
    first = tl.program_id(0).to(tl.int64) * TOKENS
    token, row, column = tl.arange(0, TOKENS)[:, None, None], tl.arange(0, R)[None, :, None], tl.arange(0, CHUNK)
    at = (token * (H * K) + row * K) + column[None, None, :] + first * (H * K)
    rows = (token < n - first) & (row < H)
    one = _identity(R)
    G = tl.zeros((TOKENS, R, R), tl.float32)
    empty = tl.zeros((TOKENS, R, CHUNK), tl.float32)
    beta = tl.load(mixing).to(tl.float32) if m is not None else 0.0

    squares = tl.sum(empty, 2)
    for c in tl.static_range(CHUNKS):
        mask = rows & (c * CHUNK + column < K)[None, None, :]
        y = _load_matrix(g, m, beta, at + c * CHUNK, mask)
        if m is not None:
            tl.store(m_out + at + c * CHUNK, y, mask=mask)
        f = y.to(tl.float32)
        squares += tl.sum(f * f, 2)
        G = _gram(y, y, G, ACCURATE)
    inverse = (1 / tl.maximum(tl.sqrt(tl.sum(squares, 1)), 1e-12))[:, None, None]
    early = _steps(G * (inverse * inverse), one, 2, ACCURATE) * inverse

    G = tl.zeros((TOKENS, R, R), tl.float32)
    for c in tl.static_range(CHUNKS):
        if CHUNKS > 1:
            mask = rows & (c * CHUNK + column < K)[None, None, :]
            y = _load_matrix(g, m, beta, at + c * CHUNK, mask)
        z = _apply(early, y, empty, ACCURATE)
        G = _times(z, z, G, ACCURATE)
    # the very matrix that made z, not its transpose: rounding in the difference would grow by a^3 = 41
    Q = _times(_steps(G, one, 3, ACCURATE), tl.permute(early, (0, 2, 1)), tl.zeros_like(G), ACCURATE)

    for c in tl.static_range(CHUNKS):
        mask = rows & (c * CHUNK + column < K)[None, None, :]
        if CHUNKS > 1:
            y = _load_matrix(g, m, beta, at + c * CHUNK, mask)
        tl.store(o + at + c * CHUNK, _apply(Q, y, empty, ACCURATE), mask=mask)


@triton.jit(do_not_specialize=["n"])  # no compilation of its own for one token
def _newton_schulz_backward_kernel(  # type: ignore[no-untyped-def]
    g, m, mixing, do, dm_out, dg, dm, partial, n,
    H: tl.constexpr, K: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, TOKENS: tl.constexpr, VALUES: tl.constexpr, DERIVATIVES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * TOKENS
    token, row, column = tl.arange(0, TOKENS)[:, None, None], tl.arange(0, R)[None, :, None], tl.arange(0, CHUNK)
    at = (token * (H * K) + row * K) + column[None, None, :] + first * (H * K)
    rows = (token < n - first) & (row < H)
    one = _identity(R)
    zero = tl.zeros((TOKENS, R, R), tl.float32)
    empty = tl.zeros((TOKENS, R, CHUNK), tl.float32)
    beta = tl.load(mixing).to(tl.float32) if m is not None else 0.0

    squares = tl.sum(empty, 2)
    G, dG = zero, zero
    for c in tl.static_range(CHUNKS):
        mask = rows & (c * CHUNK + column < K)[None, None, :]
        y = _load_matrix(g, m, beta, at + c * CHUNK, mask)
        v = _load(do, at + c * CHUNK, mask)
        f = y.to(tl.float32)
        squares += tl.sum(f * f, 2)
        G = _gram(y, y, G, VALUES)
        dG = _gram(y, v, _gram(v, y, dG, DERIVATIVES), DERIVATIVES)
    size = tl.sqrt(tl.sum(squares, 1))[:, None, None]
    inverse = 1 / tl.maximum(size, 1e-12)
    G_start, dG_start = G * (inverse * inverse), dG * inverse
    early, dearly = _steps_pair(G_start, dG_start, one, 2, VALUES, DERIVATIVES)

    G, dG = zero, zero
    for c in tl.static_range(CHUNKS):
        if CHUNKS > 1:
            mask = rows & (c * CHUNK + column < K)[None, None, :]
            y = _load_matrix(g, m, beta, at + c * CHUNK, mask)
            v = _load(do, at + c * CHUNK, mask)
        z = _apply(early * inverse, y, empty, VALUES)
        dz = _apply(early, v, _apply(dearly * inverse, y, empty, DERIVATIVES), DERIVATIVES)
        G = _times(z, z, G, VALUES)
        dG = _times(z, dz, _times(dz, z, dG, DERIVATIVES), DERIVATIVES)
    Q, dQ = _steps_pair(G, dG, one, 3, VALUES, DERIVATIVES)
    Q, dQ = _times_pair(Q, dQ, tl.permute(early, (0, 2, 1)), tl.permute(dearly, (0, 2, 1)), VALUES, DERIVATIVES)

    # <Z, dZ> = <Q, Z do^T> + <dQ, Z Z^T>; a norm below the clamp is a constant and has no gradient
    along = tl.sum(tl.sum(0.5 * Q * dG_start + dQ * G_start, 2), 1)[:, None, None]
    dQ -= tl.where(size < 1e-12, 0.0, along) * one
    Q, dQ = Q * inverse, dQ * (inverse * inverse)
    change = tl.sum(empty, 2)
    for c in tl.static_range(CHUNKS):
        mask = rows & (c * CHUNK + column < K)[None, None, :]
        if CHUNKS > 1:
            y = _load_matrix(g, m, beta, at + c * CHUNK, mask)
            v = _load(do, at + c * CHUNK, mask)
        t = _apply(Q, v, _apply(dQ, y, empty, DERIVATIVES), DERIVATIVES)
        if m is None:
            tl.store(dg + at + c * CHUNK, t, mask=mask)
        else:
            if dm_out is not None:
                t += _load(dm_out, at + c * CHUNK, mask).to(tl.float32)
            old = _load(m, at + c * CHUNK, mask).to(tl.float32)
            new = _load(g, at + c * CHUNK, mask).to(tl.float32)
            change += tl.sum(t * (old - new), 2)
            tl.store(dm + at + c * CHUNK, beta * t, mask=mask)
            tl.store(dg + at + c * CHUNK, (1 - beta) * t, mask=mask)
    if partial is not None:
        tl.store(partial + tl.program_id(0), tl.sum(tl.sum(change, 1), 0))


class Tile(NamedTuple):
    """How a kernel is launched: tokens per program, warps (each has whole matrices), columns at once, registers."""

    tokens: int
    warps: int
    chunk: int
    registers: int | None = None


def tile(h: int, k: int, backward: bool) -> Tile:
    """One token per warp: its matrices fill the registers of a warp in the backward."""
    return Tile(1, 1, min(32 if backward or h > 16 else 64, max(16, triton.next_power_of_2(k))))


def supports(h: int, k: int) -> bool:
    """Whether matrices of h x k fit."""
    return h <= MOST_ROWS and k <= MOST_COLUMNS


def _shape(h: int, k: int, t: Tile) -> dict[str, Any]:
    return {
        "H": h, "K": k, "R": max(16, triton.next_power_of_2(h)), "CHUNK": t.chunk,
        "CHUNKS": triton.cdiv(k, t.chunk), "TOKENS": t.tokens, "num_warps": t.warps, "maxnreg": t.registers,
    }  # fmt: skip


def _outputs(
    g: Tensor, m: Tensor | None, beta: Tensor | None, heads: int, dtype: torch.dtype, fast: bool
) -> tuple[Tensor, Tensor]:
    """Unwritten memory for m', empty without an m, and o."""
    return g.new_empty(0) if m is None else unwritten(m), unwritten(g, dtype=dtype)


@operator("newton_schulz", fake=_outputs)
def _forward(
    g: Tensor, m: Tensor | None, beta: Tensor | None, heads: int, dtype: torch.dtype, fast: bool
) -> tuple[Tensor, Tensor]:
    k = g.shape[-1] // heads
    n = g.numel() // g.shape[-1]
    m_out, o = _outputs(g, m, beta, heads, dtype, fast)
    t = tile(heads, k, backward=False)
    if n:
        _newton_schulz_forward_kernel[(triton.cdiv(n, t.tokens),)](
            g.contiguous(), dense(m), beta, None if m is None else m_out, o, n,
            ACCURATE=not fast, **_shape(heads, k, t),
        )  # fmt: skip
    return m_out, o


def _gradients(g: Tensor, *learned: Tensor | None) -> tuple[Tensor, ...]:
    """Unwritten memory for dg and, empty where there is none, dm and dbeta."""
    return unwritten(g), *(g.new_empty(0) if t is None else unwritten(t) for t in learned)


@operator("newton_schulz_backward", fake=lambda g, m, beta, *_: _gradients(g, m, beta))
def _backward(
    g: Tensor, m: Tensor | None, beta: Tensor | None, do: Tensor, dm_out: Tensor | None, heads: int, fast: bool
) -> tuple[Tensor, Tensor, Tensor]:
    k = g.shape[-1] // heads
    n = g.numel() // g.shape[-1]
    t = tile(heads, k, backward=True)
    programs = triton.cdiv(n, t.tokens)
    dg, dm, dbeta = _gradients(g, m, beta)
    partial = None if beta is None else torch.empty(programs, dtype=torch.float32, device=g.device)
    if n:
        _newton_schulz_backward_kernel[(programs,)](
            g.contiguous(), dense(m), beta, do.contiguous(), dense(dm_out), dg, None if m is None else dm,
            partial, n, VALUES=not fast, DERIVATIVES=not fast and do.dtype != torch.bfloat16, **_shape(heads, k, t),
        )  # fmt: skip
    return dg, dm, dbeta if beta is None or partial is None else partial.sum().to(beta.dtype).expand_as(beta).clone()


def _differentiate(needs: Any, kept: Any, constants: Any, dm_out: Tensor | None, do: Tensor | None) -> Any:
    (g, m, beta), (heads, dtype, fast) = kept, constants
    do = g.new_zeros(g.shape, dtype=dtype) if do is None else do
    return _backward(g, m, beta, do, dm_out, heads, fast)


# the mean after the last turn has no gradient
differentiable(_forward, lambda inputs, _: (inputs[:3], inputs[3:]), _differentiate, unused=True)


def newton_schulz(g: Tensor, heads: int, dtype: torch.dtype | None = None, fast: bool = False) -> Tensor:
    """Newton-Schulz of the `heads` rows of every vector of g (..., d), in `dtype` (as g without one)."""
    o: Tensor = _forward(g, None, None, heads, g.dtype if dtype is None else dtype, fast)[1]
    return o


def muon_pass(
    g: Tensor, m: Tensor, beta: Tensor, heads: int, dtype: torch.dtype | None = None, fast: bool = False
) -> tuple[Tensor, Tensor]:
    """The mean m' = beta m + (1 - beta) g, in the dtype of m, and Newton-Schulz of it, in `dtype` (that of g)."""
    return _forward(g, m, beta, heads, g.dtype if dtype is None else dtype, fast)
