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

Precision. A product reads its operands as fp16, scaled so that the norms are far from both ends of its range: |P| <= 1,
|Z|, |Y| < 58 and |E| < 35 for directions of norm 1, if E is multiplied by 4/9 at each step. Split into two fp16 numbers
(22 bits) an operand takes three products and is as good as fp32; whole (11 bits) it takes one, twice as fast as tf32
and as exact. fp32 answers have split operands everywhere: relative errors of 1e-6 in u and 1e-5 in the gradients at a
condition of 500, a third of the twin's. bf16 answers have 8 bits themselves; what rounding them does to u, dR and dG is
1.5e-3, 2.3e-3 and 2.5e-3. Whole operands do 3e-4, 3e-4 and 1e-2 more. In dG directions with small eigenvalues cancel,
and they suffer in the first steps: with these four split backward it is 1e-3. So that is what bf16 answers take.

Products are those of Ampere (mma.sync), on newer devices too. Hopper's own (wgmma) would be chosen for 64 rows and four
warps, with left operands in registers. Assemblers before CUDA 13.1, Triton's among them, can turn several such products
in one kernel into accesses outside shared memory or into wrong numbers (triton issues 10486 and 11366, pull request
11781). Built with wgmma these kernels ended in illegal accesses, though every address in their PTX is a good one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from stepformer.ops.common import dense, multiprocessors
from stepformer.ops.operators import differentiable, operator, unwritten
from stepformer.ops.whitening_kernels import whitening_backward_kernel, whitening_forward_kernel

STEPS = 10
HEAD_DIMS = (16, 32, 64)  # a matrix of 128 does not fit in the registers: the twin takes it
MAX_HEADS = 32


def launch_options(k: int) -> dict[str, Any]:
    """How both kernels run: a warp for 16 rows, as many as one product of a warp has.

    `arch` says whose products to use; the code is built for the device all the same.
    """
    here = {} if torch.version.hip else {"arch": "sm80"}
    return {"num_warps": k // 16, "num_stages": 1, "maxnreg": None, **here}


def backward_programs(k: int) -> int:
    """Per multiprocessor: each thread takes all the registers there are, which leaves room for 8 warps."""
    return 128 // k


def exact_steps(dtype: torch.dtype) -> tuple[int, int]:
    """How many of the ten steps, from the first on, multiply split operands: forward and backward."""
    return (0, 4) if dtype == torch.bfloat16 else (STEPS, STEPS)


def supports(n_head: int, head_dim: int) -> bool:
    """Whether a token's matrix of heads has a shape that the kernels take."""
    return head_dim in HEAD_DIMS and n_head <= MAX_HEADS


def shampoo_pass(g: Tensor, r: Tensor, beta_r: Tensor, n_head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(R', u = G R'^{-1/2} in `dtype`) of each token.

    g is (..., n_head * k), r is (..., k, k) and may be expanded; beta_r is the mapped value, of shape (1,).
    """
    u, r_new, _ = _whiten(g, None, r, beta_r, None, n_head, dtype, *exact_steps(g.dtype))
    return r_new, u


def soap_pass(
    g: Tensor, m: Tensor, r: Tensor, beta1: Tensor, beta_r: Tensor, n_head: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(M', R', u = M' R'^{-1/2} in `dtype`) of each token; arguments as for `shampoo_pass`."""
    u, r_new, m_new = _whiten(g, m, r, beta_r, beta1, n_head, dtype, *exact_steps(g.dtype))
    return m_new, r_new, u


def _outputs(
    g: Tensor, m: Tensor | None, r: Tensor, beta_r: Tensor, beta1: Tensor | None,
    n_head: int, dtype: torch.dtype, *exact: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Unwritten memory for u, R' and M'; an operator returns tensors only, so a missing M' is an empty one."""
    u, r_new = unwritten(g, dtype=dtype), g.new_empty(r.shape, dtype=torch.float32)
    if m is None or beta1 is None:
        return u, r_new, g.new_empty(0)
    wide = torch.promote_types(torch.promote_types(g.dtype, m.dtype), beta1.dtype)
    return u, r_new, unwritten(g, dtype=wide)


@operator("whiten", fake=_outputs)
def _whiten(
    g: Tensor, m: Tensor | None, r: Tensor, beta_r: Tensor, beta1: Tensor | None,
    n_head: int, dtype: torch.dtype, exact: int, exact_backward: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    u, r_new, m_new = _outputs(g, m, r, beta_r, beta1, n_head, dtype)
    r, stride = _matrices(r)
    k = r.shape[-1]
    tokens = g.numel() // (n_head * k)
    if tokens:
        whitening_forward_kernel[(tokens,)](
            g.contiguous(), dense(m), r, beta_r, beta1, u, r_new, m_new,
            H=n_head, K=k, R_STRIDE=stride, COLUMNS=_columns(n_head), MEAN=m is not None, STEPS=STEPS,
            EXACT=exact, **launch_options(k),
        )  # fmt: skip
    return u, r_new, m_new


def _columns(n_head: int) -> int:
    """Heads, padded to what a product takes."""
    return max(16, triton.next_power_of_2(n_head))


def _matrices(r: Tensor) -> tuple[Tensor, int]:
    """r with its distance between tokens: 0 for one matrix that all tokens share."""
    k = r.shape[-1]
    if r.stride()[-2:] == (k, 1) and not any(r.stride()[:-2]):
        return r, 0
    return r.contiguous(), k * k


def _gradients(
    du: Tensor, dr_new: Tensor | None, dm_new: Tensor | None, g: Tensor, m: Tensor | None, r: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    """Unwritten memory for dg, dm, dr, if that is needed (the last argument), and the gradients of both betas."""
    dm = g.new_empty(0) if m is None else unwritten(m)
    return unwritten(g), dm, unwritten(r, others[-1]), g.new_empty(2, dtype=torch.float32)


@operator("whiten_backward", fake=_gradients)
def _whiten_backward(
    du: Tensor, dr_new: Tensor | None, dm_new: Tensor | None, g: Tensor, m: Tensor | None, r: Tensor, r_new: Tensor,
    beta_r: Tensor, beta1: Tensor | None, n_head: int, exact: int, needs_dr: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dg, dm, dr, _ = _gradients(du, dr_new, dm_new, g, m, r, needs_dr)
    r, stride = _matrices(r)
    k = r.shape[-1]
    tokens = g.numel() // (n_head * k)
    programs = min(tokens, multiprocessors(g.device) * backward_programs(k))
    partial = g.new_empty((2, programs), dtype=torch.float32)
    scratch = g.new_empty((programs, STEPS - 1, 2, k * (k + _columns(n_head))), dtype=torch.float16)
    if tokens:
        whitening_backward_kernel[(programs,)](
            du.contiguous(), dense(dr_new), dense(dm_new), g.contiguous(), dense(m), r, r_new, beta_r, beta1,
            dg, dm, dr, partial, scratch, tokens,
            H=n_head, K=k, R_STRIDE=stride, COLUMNS=_columns(n_head), MEAN=m is not None,
            HAS_DR=dr_new is not None, HAS_DM=dm_new is not None, NEEDS_DR=needs_dr, STEPS=STEPS, EXACT=exact,
            **launch_options(k),
        )  # fmt: skip
    return dg, dm, dr, partial.sum(1)


def _differentiate(
    needs: Any, kept: Any, constants: Any, du: Tensor | None, dr_new: Tensor | None, dm_new: Tensor | None
) -> tuple[Tensor | None, ...]:
    g, m, r, r_new, beta_r, beta1 = kept
    du = torch.zeros_like(g) if du is None else du
    dm_new = None if m is None else dm_new
    dg, dm, dr, dbetas = _whiten_backward(du, dr_new, dm_new, g, m, r, r_new, beta_r, beta1, *constants, needs[2])
    return dg, dm, dr, dbetas[:1].to(beta_r.dtype), None if beta1 is None else dbetas[1:].to(beta1.dtype)


differentiable(
    _whiten,
    keep=lambda inputs, outputs: ((*inputs[:3], outputs[1], *inputs[3:5]), (inputs[5], inputs[8])),
    gradients=_differentiate,
    unused=True,
)
