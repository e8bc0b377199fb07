"""The two kernels of `velocity`, whose equations they follow name by name."""

from __future__ import annotations

import triton
import triton.language as tl

from stepformer.ops.common import (
    ABSENT,
    hat_gradient,
    held_columns,
    load_columns,
    load_four,
    load_gain,
    load_tile,
    mapped,
    numbers,
    over_row,
    quotient,
    row_norm_backward,
    row_statistics,
    row_sum,
    row_sums,
    slope,
    standardised,
    store_columns,
    store_normalised,
    store_vector_sums,
    thread_sums,
    tile_columns,
)


@triton.jit
def velocity_forward_kernel(  # type: ignore[no-untyped-def]
    g, g2, x, V, gain_v, gain_a, bias_a, gain_b, bias_b, raw_step, raw_nu, raw_lam, raw_mu, raw_beta, raw_next,
    c_step, c_nu, c_lam, c_mu, c_beta, c_next, x_out, V_out, u, u2, statistics, n, eps_v, eps,
    STEP: tl.constexpr, NU: tl.constexpr, LAM: tl.constexpr, MU: tl.constexpr, BETA: tl.constexpr, NEXT: tl.constexpr,
    CENTRED: tl.constexpr, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tile_columns(CHUNKS, CHUNK)
    column = columns < D
    row = rows < n
    mask = over_row(row) & column
    at = over_row(rows.to(tl.int64)) * D + columns

    if g is not None:
        w = load_tile(g, at, mask)
    if g2 is not None:
        w += load_tile(g2, at, mask)
    if V is not None:
        w += load_tile(V, at, mask)
    if x is not None:
        p = load_tile(x, at, mask)  # early: it is on its way while the first norm is computed
    step = mapped(raw_step, c_step, STEP)
    if g is None:
        v = 0.0
    elif gain_v is not None:
        mean, r = row_statistics(w, column, eps_v / (step * step), True, D)
        r = tl.where(step < 0, -r, r)  # with the sign of the step, here and in the backward
        tl.store(statistics + rows, mean, mask=row)
        tl.store(statistics + n + rows, r, mask=row)
        v = standardised(w, mean, r) * load_gain(gain_v, columns, D)
    else:
        v = step * w
    if V_out is not None:
        V_next = v
        if BETA != ABSENT:
            V_next = v * (mapped(raw_beta, c_beta, BETA) / mapped(raw_next, c_next, NEXT))
        tl.store(V_out + at, V_next, mask=mask)
    if x is not None:
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
            hat = standardised(p, mean, r)
            store_normalised(u, at, mask, hat, gain_a, bias_a, columns, D)
            if u2 is not None:
                store_normalised(u2, at, mask, hat, gain_b, bias_b, columns, D)


@triton.jit
def velocity_backward_kernel(  # type: ignore[no-untyped-def]
    du, du2, dx_out, dV_out, x_out, V_out, g, g2, statistics, gain_v, gain_a, bias_a, gain_b, bias_b,
    raw_step, raw_nu, raw_lam, raw_mu, raw_beta, raw_next, c_step, c_nu, c_lam, c_mu, c_beta, c_next,
    dx, dw, partial, n, eps_v,
    STEP: tl.constexpr, NU: tl.constexpr, LAM: tl.constexpr, MU: tl.constexpr, BETA: tl.constexpr, NEXT: tl.constexpr,
    DRIFT: tl.constexpr, CENTRED: tl.constexpr, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, HOLD: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    columns = tile_columns(CHUNKS, CHUNK)
    column = columns < D
    step = mapped(raw_step, c_step, STEP)
    nu = mapped(raw_nu, c_nu, NU) if NU != ABSENT else 1.0
    keep = 1 - mapped(raw_lam, c_lam, LAM) if LAM != ABSENT else 1.0
    mu = mapped(raw_mu, c_mu, MU) if MU != ABSENT else 0.0
    beta = mapped(raw_beta, c_beta, BETA) if BETA != ABSENT else 1.0
    step_next = mapped(raw_next, c_next, NEXT) if BETA != ABSENT else 1.0
    ratio = beta / step_next
    unit = 1.0  # v below is v' / unit: V' as it was stored
    if V_out is not None:
        unit = quotient(1.0, ratio)
    if gain_v is not None:
        to_hat = quotient(1.0, ratio * load_gain(gain_v, columns, D))
    sum_gain_v = tl.zeros((CHUNKS, ROWS, CHUNK), tl.float32)
    sum_gain_a, sum_bias_a = sum_gain_v, sum_gain_v
    sum_gain_b, sum_bias_b = sum_gain_v, sum_gain_v
    sum_nu = tl.zeros((ROWS, CHUNK // 8), tl.float32)
    sum_lam, sum_mu, sum_ratio = sum_nu, sum_nu, sum_nu
    sum_step = tl.zeros((ROWS,), tl.float32)

    held_v = held_columns(gain_v, columns, D, HOLD)
    held_a = held_columns(gain_a, columns, D, HOLD)
    held_b = held_columns(gain_b, columns, D, HOLD)
    first = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if AHEAD:
        next_kept, next_g, next_g2, next_p = load_four(V_out, g, g2, x_out, first, n, D, CHUNKS, CHUNK)
        next_c, next_c2, next_dt, next_dV = load_four(du, du2, dx_out, dV_out, first, n, D, CHUNKS, CHUNK)

    for tile in tl.range(0, TILES, num_stages=STAGES):
        rows = tile * tl.num_programs(0) * ROWS + first
        row = rows < n
        mask = over_row(row) & column
        at = over_row(rows.to(tl.int64)) * D + columns

        # all loads before the first reduction and the first store, behind which they would wait
        if gain_v is not None:
            r = tl.load(statistics + n + rows, mask=row, other=0.0)
            if V_out is None:
                mean = tl.load(statistics + rows, mask=row, other=0.0)
        if du is not None or du2 is not None:
            mean_p = tl.load(statistics + 2 * n + rows, mask=row, other=0.0)
            r_p = tl.load(statistics + 3 * n + rows, mask=row, other=0.0)
        if AHEAD:
            kept, answer, answer2, position = next_kept, next_g, next_g2, next_p
            c_a, c_b, dt_stored, dV = next_c, next_c2, next_dt, next_dV
            after = rows + tl.num_programs(0) * ROWS
            next_kept, next_g, next_g2, next_p = load_four(V_out, g, g2, x_out, after, n, D, CHUNKS, CHUNK)
            next_c, next_c2, next_dt, next_dV = load_four(du, du2, dx_out, dV_out, after, n, D, CHUNKS, CHUNK)
            tl.debug_barrier()  # else they would be issued as late as possible, to save registers
        else:
            kept, answer, answer2, position = load_four(V_out, g, g2, x_out, rows, n, D, CHUNKS, CHUNK)
            c_a, c_b, dt_stored, dV = load_four(du, du2, dx_out, dV_out, rows, n, D, CHUNKS, CHUNK)
        if x_out is not None:
            p = numbers(position)

        v = tl.zeros((CHUNKS, ROWS, CHUNK), tl.float32)
        hat = v
        if V_out is not None:
            v = numbers(kept)
            if gain_v is not None:
                hat = v * to_hat
        elif g is not None:
            w = numbers(answer)
            if g2 is not None:
                w += numbers(answer2)
            if gain_v is not None:
                hat = standardised(w, mean, r)
                v = hat * (held_v if HOLD else load_columns(gain_v, columns, D))
            else:
                v = step * w

        if LAM >= 0:
            x = (p - nu * unit * v) / keep
        if du is not None or du2 is not None:
            if MU != ABSENT:
                p += mu * unit * v
            hat_p = standardised(p, mean_p, r_p)
            if du is not None:
                c, sum_gain_a, sum_bias_a = hat_gradient(
                    numbers(c_a), hat_p, gain_a, bias_a, sum_gain_a, sum_bias_a, held_a, columns, D, HOLD
                )
            if du2 is not None:
                c2, sum_gain_b, sum_bias_b = hat_gradient(
                    numbers(c_b), hat_p, gain_b, bias_b, sum_gain_b, sum_bias_b, held_b, columns, D, HOLD
                )
                c = c + c2 if du is not None else c2
            dp, _ = row_norm_backward(c, hat_p, r_p, CENTRED, D)
            dt = numbers(dt_stored) + dp if dx_out is not None else dp
        elif dx_out is not None:
            dt = numbers(dt_stored)
        else:
            dt = tl.zeros((CHUNKS, ROWS, CHUNK), tl.float32)
        if dx is not None:
            if DRIFT and LAM != ABSENT:
                tl.store(dx + at, keep * dt, mask=mask)
            else:
                tl.store(dx + at, dt, mask=mask)
        dv = tl.zeros((CHUNKS, ROWS, CHUNK), tl.float32)
        if DRIFT:
            dv = dt
            if NU != ABSENT:
                dv = nu * dt
            if NU >= 0:
                sum_nu += thread_sums(dt * v)
            if LAM >= 0:
                sum_lam -= thread_sums(dt * x)
        if MU != ABSENT and (du is not None or du2 is not None):
            dv += mu * dp
            if MU >= 0:
                sum_mu += thread_sums(dp * v)
        if dV_out is not None:
            dv += ratio * numbers(dV)
            if BETA >= 0 or NEXT >= 0:
                sum_ratio += thread_sums(numbers(dV) * v)
        if gain_v is not None:
            # dhat hat = dv v', so hat itself is needed late, and one factor of it is left to the end
            towards = dv * v
            sum_gain_v += dv * hat if V_out is None else towards
            dhat = dv * (held_v if HOLD else load_columns(gain_v, columns, D))
            total, along = row_sums(dhat, towards)
            along *= unit
            sum_step += r * r * along
            dw_tile = (dhat - over_row(total / D)) * over_row(r) - hat * over_row(along / D * r)
        else:
            dw_tile = step * dv
            if STEP >= 0:
                sum_step += row_sum(dv * v)
        if dw is not None:
            tl.store(dw + at, dw_tile, mask=mask)

    line = partial + tl.program_id(0).to(tl.int64) * WIDTH
    if gain_v is not None:
        if V_out is not None:
            sum_gain_v *= to_hat
        store_columns(line, columns, sum_gain_v, D)
        line += D
    line = store_vector_sums(line, columns, gain_a, bias_a, sum_gain_a, sum_bias_a, D)
    line = store_vector_sums(line, columns, gain_b, bias_b, sum_gain_b, sum_bias_b, D)
    if STEP >= 0:
        if gain_v is not None:
            factor = eps_v / (step * step * step)
        else:
            factor = quotient(unit, step)
        tl.store(line, tl.sum(sum_step) * factor * slope(raw_step, c_step, STEP))
    if NU >= 0:
        tl.store(line + 1, tl.sum(sum_nu) * unit * slope(raw_nu, c_nu, NU))
    if LAM >= 0:
        tl.store(line + 2, tl.sum(sum_lam) * slope(raw_lam, c_lam, LAM))
    if MU >= 0:
        tl.store(line + 3, tl.sum(sum_mu) * unit * slope(raw_mu, c_mu, MU))
    if BETA >= 0:
        tl.store(line + 4, tl.sum(sum_ratio) * unit / step_next * slope(raw_beta, c_beta, BETA))
    if NEXT >= 0:
        tl.store(line + 5, -tl.sum(sum_ratio) * unit * ratio / step_next * slope(raw_next, c_next, NEXT))
