"""The two kernels of `integrator`, whose equations they follow name by name."""

from __future__ import annotations

import triton
import triton.language as tl

from stepformer.ops.common import (
    ABSENT,
    hat_gradient,
    held_columns,
    load_columns,
    load_four,
    load_stored,
    load_tile,
    mapped,
    numbers,
    over_row,
    row_norm_backward,
    row_statistics,
    slope,
    standardised,
    store_columns,
    store_normalised,
    store_vector_sums,
    thread_sums,
    tile_columns,
)


@triton.jit
def _row_scale(scale, rows, row):  # type: ignore[no-untyped-def]
    """The factor of each row, 1 where there is none."""
    if scale is None:
        s = tl.full(rows.shape, 1.0, tl.float32)
    else:
        s = tl.load(scale + rows, mask=row, other=0.0).to(tl.float32)
    return s


@triton.jit
def _plus(total, source, weight, at, mask):  # type: ignore[no-untyped-def]
    """total + weight source, of a tensor that may not exist."""
    if source is not None:
        total += weight * load_tile(source, at, mask)
    return total


@triton.jit
def _plus_stored(total, source, stored, weight):  # type: ignore[no-untyped-def]
    """`_plus` with the tile that `load_stored` gave of the source."""
    if source is not None:
        total += weight * numbers(stored)
    return total


@triton.jit
def _products(a, source, stored, nought):  # type: ignore[no-untyped-def]
    """<a, source> of each row, as far as one thread holds it."""
    if source is None:
        inner = nought
    else:
        inner = thread_sums(a * numbers(stored))
    return inner


@triton.jit
def _store(target, at, mask, value):  # type: ignore[no-untyped-def]
    if target is not None:
        tl.store(target + at, value, mask=mask)


@triton.jit
def _four_sums(a, b, c, d):  # type: ignore[no-untyped-def]
    """Row sums of four (ROWS, THREADS) at once: warps meet once."""
    ab, cd = tl.split(tl.sum(tl.join(tl.join(a, b), tl.join(c, d)), 1))
    a, b = tl.split(ab)
    c, d = tl.split(cd)
    return a, b, c, d


@triton.jit
def integrator_forward_kernel(  # type: ignore[no-untyped-def]
    x, y, velocity, force, older_velocity, older_force, older_y, scale, older_scale, along, weights, gain_y, gain, bias,
    raw_mu, raw_beta, raw_next, c_mu, c_beta, c_next, x_out, V_out, u, statistics, n, eps_y, eps,
    MU: tl.constexpr, BETA: tl.constexpr, NEXT: tl.constexpr,
    CENTRED: tl.constexpr, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tile_columns(CHUNKS, CHUNK)
    column = columns < D
    row = rows < n
    mask = over_row(row) & column
    at = over_row(rows.to(tl.int64)) * D + columns

    # x' first: while the row sums of w are waited for, only w and x' are held
    p = load_tile(x, at, mask)
    w = tl.load(weights + 2) * load_tile(y, at, mask)
    w = _plus(w, force, tl.load(weights + 3), at, mask)
    w = _plus(w, older_force, tl.load(weights + 4), at, mask)
    w = _plus(w, older_y, tl.load(weights + 5), at, mask)
    p = _plus(p, velocity, over_row(tl.load(weights) * _row_scale(scale, rows, row)), at, mask)
    p = _plus(p, older_velocity, over_row(tl.load(weights + 1) * _row_scale(older_scale, rows, row)), at, mask)
    # what follows sees x' as it is stored, and so does the backward
    stored = p.to(x_out.dtype.element_ty)
    tl.store(x_out + at, stored, mask=mask)

    mean, r = row_statistics(w, column, eps_y, True, D)
    tl.store(statistics + rows, mean, mask=row)
    tl.store(statistics + n + rows, r, mask=row)
    momentum = standardised(w, mean, r) * load_columns(gain_y, columns, D)
    V_next = momentum
    if BETA != ABSENT and along is None:
        V_next = momentum * (mapped(raw_beta, c_beta, BETA) / mapped(raw_next, c_next, NEXT))
    tl.store(V_out + at, V_next, mask=mask)

    if u is not None:
        p = stored.to(tl.float32)
        if along is not None:
            ahead = mapped(raw_mu, c_mu, MU) * mapped(raw_next, c_next, NEXT) / mapped(raw_beta, c_beta, BETA)
            p += ahead * load_tile(along, at, mask)
        elif MU != ABSENT:
            p += mapped(raw_mu, c_mu, MU) * momentum
        mean, r = row_statistics(p, column, eps, CENTRED, D)
        tl.store(statistics + 2 * n + rows, mean, mask=row)
        tl.store(statistics + 3 * n + rows, r, mask=row)
        store_normalised(u, at, mask, standardised(p, mean, r), gain, bias, columns, D)


@triton.jit
def integrator_backward_kernel(  # type: ignore[no-untyped-def]
    du, dx_out, dV_out, x_out, y, velocity, force, older_velocity, older_force, older_y,
    along, scale, older_scale, weights, statistics, gain_y, gain, bias,
    raw_mu, raw_beta, raw_next, c_mu, c_beta, c_next, dx, dy, d_velocity, d_force,
    d_older_velocity, d_older_force, d_older_y, d_scale, d_older_scale, d_along, partial, n,
    MU: tl.constexpr, BETA: tl.constexpr, NEXT: tl.constexpr, MOVES: tl.constexpr, TURNS: tl.constexpr,
    LEARN: tl.constexpr, CENTRED: tl.constexpr, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, HOLD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """MOVES: there is a dt (du or dx'). TURNS: there is a dw (dV', or du with a look-ahead)."""
    columns = tile_columns(CHUNKS, CHUNK)
    column = columns < D
    mu = mapped(raw_mu, c_mu, MU) if MU != ABSENT else 0.0
    beta = mapped(raw_beta, c_beta, BETA) if BETA != ABSENT else 1.0
    step_next = mapped(raw_next, c_next, NEXT) if BETA != ABSENT else 1.0
    ratio = beta / step_next
    if along is not None:  # they scale what it looks along, and y' is handed on as it is
        ahead = mu / ratio
        ratio = 1.0
    b, b_o = tl.load(weights), tl.load(weights + 1)
    a, c = tl.load(weights + 2), tl.load(weights + 3)
    c_o, a_o = tl.load(weights + 4), tl.load(weights + 5)
    sum_gain_y = tl.zeros((CHUNKS, ROWS, CHUNK), tl.float32)
    sum_gain, sum_bias = sum_gain_y, sum_gain_y
    nought = tl.zeros((ROWS, CHUNK // 8), tl.float32)
    sum_mu, sum_ratio = nought, nought
    sum_b, sum_b_o, sum_a, sum_c, sum_c_o, sum_a_o = nought, nought, nought, nought, nought, nought

    held_y = held_columns(gain_y, columns, D, HOLD)
    held = held_columns(gain, columns, D, HOLD)

    for tile in tl.range(0, TILES, num_stages=STAGES):
        rows = (tile * tl.num_programs(0) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
        row = rows < n
        mask = over_row(row) & column
        at = over_row(rows.to(tl.int64)) * D + columns

        # what comes through shared memory is taken out where it is needed: early for y' and the norm of p, late for the
        # rest, which would take registers meanwhile
        if TURNS:
            mean = tl.load(statistics + rows, mask=row, other=0.0)
            r = tl.load(statistics + n + rows, mask=row, other=0.0)
        if du is not None:
            mean_p = tl.load(statistics + 2 * n + rows, mask=row, other=0.0)
            r_p = tl.load(statistics + 3 * n + rows, mask=row, other=0.0)
        s = _row_scale(scale, rows, row)
        s_o = _row_scale(older_scale, rows, row)
        t_y, t_force, t_older_force, t_older_y = load_four(y, force, older_force, older_y, rows, n, D, CHUNKS, CHUNK)
        t_u = load_stored(du, rows, n, D, CHUNKS, CHUNK)
        t_x_out = load_stored(x_out, rows, n, D, CHUNKS, CHUNK)

        if TURNS:
            w = a * numbers(t_y)
            w = _plus_stored(w, force, t_force, c)
            w = _plus_stored(w, older_force, t_older_force, c_o)
            w = _plus_stored(w, older_y, t_older_y, a_o)
            hat = standardised(w, mean, r)
            gain_of_y = held_y if HOLD else load_columns(gain_y, columns, D)
            momentum = hat * gain_of_y
        d_momentum = tl.zeros((CHUNKS, ROWS, CHUNK), tl.float32)
        dt = d_momentum
        along_t, total_t, dot, dot_o = nought, nought, nought, nought
        if du is not None:
            p = numbers(t_x_out)
            if along is not None:
                t_along = load_stored(along, rows, n, D, CHUNKS, CHUNK)
                p += ahead * numbers(t_along)
            elif MU != ABSENT:
                p += mu * momentum
            hat_p = standardised(p, mean_p, r_p)
            dhat_p, sum_gain, sum_bias = hat_gradient(
                numbers(t_u), hat_p, gain, bias, sum_gain, sum_bias, held, columns, D, HOLD
            )
            dp, _ = row_norm_backward(dhat_p, hat_p, r_p, CENTRED, D)
            dt = dp
            if along is not None:
                _store(d_along, at, mask, ahead * dp)
                sum_mu += thread_sums(dp * numbers(t_along))
            elif MU != ABSENT:
                d_momentum = mu * dp
                along_p = thread_sums(dp * momentum)
                sum_mu += along_p
                along_t = mu * along_p
        # before the first store, behind which loads would wait where rows do not come through shared memory
        t_dx, t_dV, t_velocity, t_older_velocity = load_four(
            dx_out, dV_out, velocity, older_velocity, rows, n, D, CHUNKS, CHUNK
        )
        if dx_out is not None:
            dt += numbers(t_dx)
        if dV_out is not None:
            dV = numbers(t_dV)
            d_momentum += ratio * dV
            along_V = thread_sums(dV * momentum)
            along_t += ratio * along_V
            if along is None:
                sum_ratio += along_V
        if MOVES:
            _store(dx, at, mask, dt)
            _store(d_velocity, at, mask, over_row(b * s) * dt)
            _store(d_older_velocity, at, mask, over_row(b_o * s_o) * dt)
            dot = _products(dt, velocity, t_velocity, nought)
            dot_o = _products(dt, older_velocity, t_older_velocity, nought)
            if LEARN:
                sum_b += dot * s[:, None]
                sum_b_o += dot_o * s_o[:, None]
        if TURNS:
            sum_gain_y += d_momentum * hat
            dhat = d_momentum * gain_of_y
            total_t = thread_sums(dhat)
        if d_scale is not None or d_older_scale is not None:
            total, inner, dot_row, dot_o_row = _four_sums(total_t, along_t, dot, dot_o)
            if d_scale is not None:
                tl.store(d_scale + rows, b * dot_row, mask=row)
            if d_older_scale is not None:
                tl.store(d_older_scale + rows, b_o * dot_o_row, mask=row)
        else:
            total, inner = tl.split(tl.sum(tl.join(total_t, along_t), 1))
        if TURNS:
            dw = dhat * over_row(r) - over_row(total / D * r) - hat * over_row(inner / D * r)
            _store(dy, at, mask, a * dw)
            _store(d_force, at, mask, c * dw)
            _store(d_older_force, at, mask, c_o * dw)
            _store(d_older_y, at, mask, a_o * dw)
            if LEARN:
                sum_a += _products(dw, y, t_y, nought)
                sum_c += _products(dw, force, t_force, nought)
                sum_c_o += _products(dw, older_force, t_older_force, nought)
                sum_a_o += _products(dw, older_y, t_older_y, nought)

    line = partial + tl.program_id(0).to(tl.int64) * WIDTH
    store_columns(line, columns, sum_gain_y, D)
    line = store_vector_sums(line + D, columns, gain, bias, sum_gain, sum_bias, D)
    of_mu, of_beta = tl.sum(sum_mu), tl.sum(sum_ratio) / step_next
    of_next = -tl.sum(sum_ratio) * ratio / step_next
    if along is not None:
        of_next = of_mu * mu / beta
        of_beta = -of_mu * ahead / beta
        of_mu *= step_next / beta
    if MU >= 0:
        tl.store(line, of_mu * slope(raw_mu, c_mu, MU))
    if BETA >= 0:
        tl.store(line + 1, of_beta * slope(raw_beta, c_beta, BETA))
    if NEXT >= 0:
        tl.store(line + 2, of_next * slope(raw_next, c_next, NEXT))
    if LEARN:
        tl.store(line + 3, tl.sum(sum_b))
        tl.store(line + 4, tl.sum(sum_b_o))
        tl.store(line + 5, tl.sum(sum_a))
        tl.store(line + 6, tl.sum(sum_c))
        tl.store(line + 7, tl.sum(sum_c_o))
        tl.store(line + 8, tl.sum(sum_a_o))
