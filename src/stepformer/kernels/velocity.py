"""One pass from an oracle's answer to the next oracle's input, for rules that follow a velocity (or the answer itself).

Forward, for every row (token) of d numbers, with w = V + g (+ g2):

    v' = sign(step) gain_v LN(w; eps_v / step^2)         or v' = step w without a norm
    x' = (1 - lam) x + nu v'                             or x' = x without a drift
    V' = ratio v',  ratio = beta_next / step_next
    u  = gain Norm(x' + mu_next v') + bias               up to two outputs with their own gain and bias

The velocity travels as V = v beta / step with the beta and the step (= scale * gamma) of the pass that will consume
it. Then beta v + step g = step w, and as LN does not see the factor, dL/dV = dL/dg: one tensor is written for both.

Backward, with p = x' + mu v', c = dL/d(hat p) from du:

    dp = norm'(c);  dt = dx' + dp;  dx = (1 - lam) dt;  dv' = nu dt + mu dp + ratio dV'
    dhat = sign gain_v dv';  dw = LN'(dhat)              or dw = step dv'
    dnu = <dt, v'>;  dlam = -<dt, x>;  dmu = <dp, v'>;  dratio = <dV', v'>;  dgain_v = sign hat dv'
    dstep = eps_v / step^3 sum_rows r^2 <dhat, hat>      or <dv', v'> / step (r = 1 / deviation of w)

What is kept for it: x', V' and four statistics per row. v' = V' / ratio and hat = v' / (sign gain_v), so neither g
nor V is needed. A pass without V' (gd, or the tail of a rule with its own update) keeps g instead, which exists
anyway, and not even that where nothing asks for v' (gd with constant steps).

Traffic in d-vectors per token: forward 3 reads (x, V, g) and 3 writes (x', V', u); backward 5 reads (du, dx', dV',
x', V') and 2 writes (dx, dw). gd: 2 + 2 and 3 + 1, as dx = dg. About 20 and 35 operations per number: bandwidth-bound.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from stepformer.kernels import common
from stepformer.kernels.common import (
    ABSENT,
    Scalar,
    Tile,
    load_columns,
    load_tile,
    mapped,
    quotient,
    row_norm_backward,
    row_statistics,
    slope,
)

VECTORS = ("gain_v", "gain_a", "bias_a", "gain_b", "bias_b")
SCALARS = ("step", "nu", "lam", "mu", "beta", "next")
Norms = tuple[()] | tuple[tuple[Tensor | None, Tensor | None], ...]


@triton.jit
def _forward_kernel(
    g: Any, g2: Any, x: Any, V: Any, gain_v: Any, gain_a: Any, bias_a: Any, gain_b: Any, bias_b: Any,
    raw_step: Any, raw_nu: Any, raw_lam: Any, raw_mu: Any, raw_beta: Any, raw_next: Any,
    c_step: Any, c_nu: Any, c_lam: Any, c_mu: Any, c_beta: Any, c_next: Any,
    x_out: Any, V_out: Any, u: Any, u2: Any, statistics: Any, n: Any, eps_v: Any, eps: Any,
    STEP: tl.constexpr, NU: tl.constexpr, LAM: tl.constexpr, MU: tl.constexpr, BETA: tl.constexpr, NEXT: tl.constexpr,
    CENTRED: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    column = (columns < D)[None, :]
    row = rows < n
    mask = row[:, None] & column
    at = rows.to(tl.int64)[:, None] * D + columns[None, :]

    w = load_tile(g, at, mask)
    if g2 is not None:
        w += load_tile(g2, at, mask)
    if V is not None:
        w += load_tile(V, at, mask)
    step = mapped(raw_step, c_step, STEP)
    if gain_v is not None:
        mean, r = row_statistics(w, column, eps_v / (step * step), True, D)
        tl.store(statistics + rows, mean, mask=row)
        tl.store(statistics + n + rows, r, mask=row)
        gain = tl.where(step < 0, -1.0, 1.0) * load_columns(gain_v, columns, D)
        v = (w - mean[:, None]) * r[:, None] * gain[None, :]
    else:
        v = step * w
    if V_out is not None:
        V_next = v
        if BETA != ABSENT:
            V_next = v * (mapped(raw_beta, c_beta, BETA) / mapped(raw_next, c_next, NEXT))
        tl.store(V_out + at, V_next, mask=mask)
    if x is not None:
        p = load_tile(x, at, mask)
        if x_out is not None:
            if LAM != ABSENT:
                p *= 1 - mapped(raw_lam, c_lam, LAM)
            if NU != ABSENT:
                p += mapped(raw_nu, c_nu, NU) * v
            else:
                p += v
            # what follows sees x' as it is stored, and so does the backward
            stored = p.to(x_out.dtype.element_ty)
            tl.store(x_out + at, stored, mask=mask)
            p = stored.to(tl.float32)
        if u is not None:
            if MU != ABSENT:
                p += mapped(raw_mu, c_mu, MU) * v
            mean, r = row_statistics(p, column, eps, CENTRED, D)
            tl.store(statistics + 2 * n + rows, mean, mask=row)
            tl.store(statistics + 3 * n + rows, r, mask=row)
            hat = (p - mean[:, None]) * r[:, None]
            out = hat
            if gain_a is not None:
                out = out * load_columns(gain_a, columns, D)[None, :]
            if bias_a is not None:
                out = out + load_columns(bias_a, columns, D)[None, :]
            tl.store(u + at, out, mask=mask)
            if u2 is not None:
                out = hat
                if gain_b is not None:
                    out = out * load_columns(gain_b, columns, D)[None, :]
                if bias_b is not None:
                    out = out + load_columns(bias_b, columns, D)[None, :]
                tl.store(u2 + at, out, mask=mask)


@triton.jit
def _backward_kernel(
    du: Any, du2: Any, dx_out: Any, dV_out: Any, x_out: Any, V_out: Any, g: Any, g2: Any, statistics: Any,
    gain_v: Any, gain_a: Any, bias_a: Any, gain_b: Any, bias_b: Any,
    raw_step: Any, raw_nu: Any, raw_lam: Any, raw_mu: Any, raw_beta: Any, raw_next: Any,
    c_step: Any, c_nu: Any, c_lam: Any, c_mu: Any, c_beta: Any, c_next: Any,
    dx: Any, dw: Any, partial: Any, n: Any, eps_v: Any,
    STEP: tl.constexpr, NU: tl.constexpr, LAM: tl.constexpr, MU: tl.constexpr, BETA: tl.constexpr, NEXT: tl.constexpr,
    DRIFT: tl.constexpr, CENTRED: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.arange(0, BLOCK)
    column = (columns < D)[None, :]
    step = mapped(raw_step, c_step, STEP)
    nu = mapped(raw_nu, c_nu, NU) if NU != ABSENT else 1.0
    keep = 1 - mapped(raw_lam, c_lam, LAM) if LAM != ABSENT else 1.0
    mu = mapped(raw_mu, c_mu, MU) if MU != ABSENT else 0.0
    beta = mapped(raw_beta, c_beta, BETA) if BETA != ABSENT else 1.0
    step_next = mapped(raw_next, c_next, NEXT) if BETA != ABSENT else 1.0
    ratio = beta / step_next
    if gain_v is not None:
        signed_gain = tl.where(step < 0, -1.0, 1.0) * load_columns(gain_v, columns, D)
        to_hat = quotient(1.0, ratio * signed_gain)
    sum_gain_v = tl.zeros((BLOCK,), tl.float32)
    sum_gain_a, sum_bias_a = sum_gain_v, sum_gain_v
    sum_gain_b, sum_bias_b = sum_gain_v, sum_gain_v
    sum_nu, sum_lam, sum_mu, sum_ratio = sum_gain_v, sum_gain_v, sum_gain_v, sum_gain_v
    sum_step = tl.zeros((ROWS,), tl.float32)

    for tile in tl.range(0, TILES, num_stages=STAGES):
        rows = (tile * tl.num_programs(0) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
        row = rows < n
        mask = row[:, None] & column
        at = rows.to(tl.int64)[:, None] * D + columns[None, :]

        v = tl.zeros((ROWS, BLOCK), tl.float32)
        hat = v
        if gain_v is not None:
            r = tl.load(statistics + n + rows, mask=row, other=0.0)
        if V_out is not None:
            kept = load_tile(V_out, at, mask)
            v = kept * quotient(1.0, ratio)
            if gain_v is not None:
                hat = kept * to_hat[None, :]
        elif g is not None:
            w = load_tile(g, at, mask)
            if g2 is not None:
                w += load_tile(g2, at, mask)
            if gain_v is not None:
                hat = (w - tl.load(statistics + rows, mask=row, other=0.0)[:, None]) * r[:, None]
                v = hat * signed_gain[None, :]
            else:
                v = step * w

        dp = tl.zeros((ROWS, BLOCK), tl.float32)
        if du is not None or du2 is not None or LAM >= 0:
            p = load_tile(x_out, at, mask)
            if LAM >= 0:
                x = (p - nu * v) / keep
        if du is not None or du2 is not None:
            if MU != ABSENT:
                p += mu * v
            mean_p = tl.load(statistics + 2 * n + rows, mask=row, other=0.0)
            r_p = tl.load(statistics + 3 * n + rows, mask=row, other=0.0)
            hat_p = (p - mean_p[:, None]) * r_p[:, None]
            c = dp
            if du is not None:
                c = load_tile(du, at, mask)
                if gain_a is not None:
                    sum_gain_a += tl.sum(c * hat_p, 0)
                if bias_a is not None:
                    sum_bias_a += tl.sum(c, 0)
                if gain_a is not None:
                    c = c * load_columns(gain_a, columns, D)[None, :]
            if du2 is not None:
                c2 = load_tile(du2, at, mask)
                if gain_b is not None:
                    sum_gain_b += tl.sum(c2 * hat_p, 0)
                if bias_b is not None:
                    sum_bias_b += tl.sum(c2, 0)
                if gain_b is not None:
                    c2 = c2 * load_columns(gain_b, columns, D)[None, :]
                c = c + c2
            dp, _ = row_norm_backward(c, hat_p, r_p, CENTRED, D)

        dt = dp
        if dx_out is not None:
            dt = dt + load_tile(dx_out, at, mask)
        if dx is not None:
            if DRIFT and LAM != ABSENT:
                tl.store(dx + at, keep * dt, mask=mask)
            else:
                tl.store(dx + at, dt, mask=mask)
        dv = tl.zeros((ROWS, BLOCK), tl.float32)
        if DRIFT:
            dv = dt
            if NU != ABSENT:
                dv = nu * dt
            if NU >= 0:
                sum_nu += tl.sum(dt * v, 0)
            if LAM >= 0:
                sum_lam -= tl.sum(dt * x, 0)
        if MU != ABSENT:
            dv += mu * dp
        if MU >= 0:
            sum_mu += tl.sum(dp * v, 0)
        if dV_out is not None:
            dV = load_tile(dV_out, at, mask)
            dv += ratio * dV
            if BETA >= 0 or NEXT >= 0:
                sum_ratio += tl.sum(dV * v, 0)
        if gain_v is not None:
            sum_gain_v += tl.sum(dv * hat, 0)
            dw_tile, along = row_norm_backward(dv * signed_gain[None, :], hat, r, True, D)
            sum_step += r * r * along
        else:
            dw_tile = step * dv
            if STEP >= 0:
                sum_step += tl.sum(dv * v, 1)
        if dw is not None:
            tl.store(dw + at, dw_tile, mask=mask)

    line = partial + tl.program_id(0).to(tl.int64) * WIDTH
    if gain_v is not None:
        sum_gain_v *= tl.where(step < 0, -1.0, 1.0)
        tl.store(line + columns, sum_gain_v, mask=columns < D)
        line += D
    if gain_a is not None:
        tl.store(line + columns, sum_gain_a, mask=columns < D)
        line += D
    if bias_a is not None:
        tl.store(line + columns, sum_bias_a, mask=columns < D)
        line += D
    if gain_b is not None:
        tl.store(line + columns, sum_gain_b, mask=columns < D)
        line += D
    if bias_b is not None:
        tl.store(line + columns, sum_bias_b, mask=columns < D)
        line += D
    if STEP >= 0:
        if gain_v is not None:
            factor = D * eps_v / (step * step * step)
        else:
            factor = quotient(1.0, step)
        tl.store(line, tl.sum(sum_step, 0) * factor * slope(raw_step, c_step, STEP))
    if NU >= 0:
        tl.store(line + 1, tl.sum(sum_nu, 0) * slope(raw_nu, c_nu, NU))
    if LAM >= 0:
        tl.store(line + 2, tl.sum(sum_lam, 0) * slope(raw_lam, c_lam, LAM))
    if MU >= 0:
        tl.store(line + 3, tl.sum(sum_mu, 0) * slope(raw_mu, c_mu, MU))
    if BETA >= 0:
        tl.store(line + 4, tl.sum(sum_ratio, 0) / step_next * slope(raw_beta, c_beta, BETA))
    if NEXT >= 0:
        tl.store(line + 5, -tl.sum(sum_ratio, 0) * ratio / step_next * slope(raw_next, c_next, NEXT))
