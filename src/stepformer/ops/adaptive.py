"""One pass from an oracle's answer to the next oracle's input, for RMSProp, Adam and AdamW as depth rules.

Forward, for every row (token) of d numbers, with g = g1 (+ g2):

    m' = beta1 m + (1 - beta1) g;  s' = beta2 s + (1 - beta2) g g
    o = m' / (sqrt(s') + 1e-8)                           (RMSProp: g instead of m')
    v = gain_v LN(o; eps_v);  x' = (1 - lam) x + step v, step = scale * gamma
    u = gain Norm(x') + bias                             up to two outputs with their own gain and bias

Backward, with c = dL/d(hat x') from du and q = sqrt(s') + 1e-8:

    dt = dx' + norm'(c);  dx = (1 - lam) dt;  dhat = gain_v step dt;  do = LN'(dhat)
    Dm = dm' + do / q;  Ds = ds' - do o / (2 q sqrt(s'))  (the second term is 0 where s' = 0)
    dm = beta1 Dm;  ds = beta2 Ds;  dg = (1 - beta1) Dm + 2 (1 - beta2) g Ds     (RMSProp: dg = do / q + ...)
    dbeta1 = <Dm, m - g>;  dbeta2 = <Ds, s - g g>;  dstep = <dt, v>;  dlam = -<dt, x>,  x = (x' - step v) / (1 - lam)

Kept for it: g, m, s, x' and four statistics per row. The moments before the pass are as many tensors as those after
it, and from them m' and s' follow without a division by beta.

Traffic in d-vectors per token: forward 4 reads and 4 writes; backward 8 reads and 4 writes (RMSProp: 3 and 3, 6
and 3). About 30 and 55 operations per number: bandwidth-bound.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepformer.ops import common
from stepformer.ops.common import (
    ABSENT,
    Norms,
    Scalar,
    Tile,
    dense,
    hat_gradient,
    held_columns,
    load_columns,
    load_four,
    load_stored,
    load_tile,
    mapped,
    numbers,
    over_row,
    packed,
    quotient,
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
from stepformer.ops.operators import operator

SCALARS = ("beta1", "beta2", "step", "lam")


@triton.jit
def _proposal(a, second):  # type: ignore[no-untyped-def]
    """a / q, 1 / q and 1 / sqrt(second) (0 where `second` is 0), with q = sqrt(second) + 1e-8."""
    rsqrt = tl.where(second > 0, tl.rsqrt(tl.where(second > 0, second, 1.0)), 0.0)
    inverse = 1 / (second * rsqrt + 1e-8)
    return a * inverse, inverse, rsqrt


@triton.jit
def _adaptive_forward_kernel(  # type: ignore[no-untyped-def]
    g, g2, x, m, s, gain_v, gain_a, bias_a, gain_b, bias_b, raw_beta1, raw_beta2, raw_step, raw_lam,
    c_beta1, c_beta2, c_step, c_lam, x_out, m_out, s_out, u, u2, statistics, n, eps_v, eps,
    BETA1: tl.constexpr, BETA2: tl.constexpr, STEP: tl.constexpr, LAM: tl.constexpr,
    CENTRED: tl.constexpr, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tile_columns(CHUNKS, CHUNK)
    column = columns < D
    row = rows < n
    mask = over_row(row) & column
    at = over_row(rows.to(tl.int64)) * D + columns

    answer = load_tile(g, at, mask)
    if g2 is not None:
        answer += load_tile(g2, at, mask)
    second = load_tile(s, at, mask)
    if m is not None:
        first = load_tile(m, at, mask)
    p = load_tile(x, at, mask)

    beta2 = mapped(raw_beta2, c_beta2, BETA2)
    second = beta2 * second + (1 - beta2) * answer * answer
    tl.store(s_out + at, second, mask=mask)
    if m is not None:
        beta1 = mapped(raw_beta1, c_beta1, BETA1)
        first = beta1 * first + (1 - beta1) * answer
        tl.store(m_out + at, first, mask=mask)
        o, _, _ = _proposal(first, second)
    else:
        o, _, _ = _proposal(answer, second)
    mean, r = row_statistics(o, column, eps_v, True, D)
    tl.store(statistics + rows, mean, mask=row)
    tl.store(statistics + n + rows, r, mask=row)
    v = standardised(o, mean, r) * load_columns(gain_v, columns, D)

    if LAM != ABSENT:
        p *= 1 - mapped(raw_lam, c_lam, LAM)
    # what follows sees x' as it is stored, and so does the backward
    stored = (p + mapped(raw_step, c_step, STEP) * v).to(x_out.dtype.element_ty)
    tl.store(x_out + at, stored, mask=mask)
    if u is not None:
        p = stored.to(tl.float32)
        mean, r = row_statistics(p, column, eps, CENTRED, D)
        tl.store(statistics + 2 * n + rows, mean, mask=row)
        tl.store(statistics + 3 * n + rows, r, mask=row)
        hat = standardised(p, mean, r)
        store_normalised(u, at, mask, hat, gain_a, bias_a, columns, D)
        if u2 is not None:
            store_normalised(u2, at, mask, hat, gain_b, bias_b, columns, D)


@triton.jit
def _adaptive_backward_kernel(  # type: ignore[no-untyped-def]
    du, du2, dx_out, dm_out, ds_out, x_out, g, g2, m, s, statistics, gain_v, gain_a, bias_a, gain_b, bias_b,
    raw_beta1, raw_beta2, raw_step, raw_lam, c_beta1, c_beta2, c_step, c_lam, dx, dg, dm, ds, partial, n,
    BETA1: tl.constexpr, BETA2: tl.constexpr, STEP: tl.constexpr, LAM: tl.constexpr,
    CENTRED: tl.constexpr, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, HOLD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = tile_columns(CHUNKS, CHUNK)
    column = columns < D
    beta1 = mapped(raw_beta1, c_beta1, BETA1) if m is not None else 0.0
    beta2 = mapped(raw_beta2, c_beta2, BETA2)
    step = mapped(raw_step, c_step, STEP)
    keep = 1 - mapped(raw_lam, c_lam, LAM) if LAM != ABSENT else 1.0
    sum_gain_v = tl.zeros((CHUNKS, ROWS, CHUNK), tl.float32)
    sum_gain_a, sum_bias_a = sum_gain_v, sum_gain_v
    sum_gain_b, sum_bias_b = sum_gain_v, sum_gain_v
    sum_beta1 = tl.zeros((ROWS, CHUNK // 8), tl.float32)
    sum_beta2, sum_lam = sum_beta1, sum_beta1
    sum_step = tl.zeros((ROWS,), tl.float32)

    held_v = held_columns(gain_v, columns, D, HOLD)
    held_a = held_columns(gain_a, columns, D, HOLD)
    held_b = held_columns(gain_b, columns, D, HOLD)

    for tile in tl.range(0, TILES, num_stages=STAGES):
        rows = (tile * tl.num_programs(0) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
        row = rows < n
        mask = over_row(row) & column
        at = over_row(rows.to(tl.int64)) * D + columns

        # all loads before the first store, which they could not pass
        mean = tl.load(statistics + rows, mask=row, other=0.0)
        r = tl.load(statistics + n + rows, mask=row, other=0.0)
        if du is not None or du2 is not None:
            mean_p = tl.load(statistics + 2 * n + rows, mask=row, other=0.0)
            r_p = tl.load(statistics + 3 * n + rows, mask=row, other=0.0)
        answer_a, answer_b, first, old = load_four(g, g2, m, s, rows, n, D, CHUNKS, CHUNK)
        c_a, c_b, position, moved = load_four(du, du2, x_out, dx_out, rows, n, D, CHUNKS, CHUNK)
        dm_stored = load_stored(dm_out, rows, n, D, CHUNKS, CHUNK)
        ds_stored = load_stored(ds_out, rows, n, D, CHUNKS, CHUNK)

        answer = numbers(answer_a)
        if g2 is not None:
            answer += numbers(answer_b)
        old_second = numbers(old)
        if m is not None:
            old_first = numbers(first)
        if du is not None or du2 is not None or LAM >= 0:
            p = numbers(position)
        second = beta2 * old_second + (1 - beta2) * answer * answer
        if m is not None:
            o, inverse, rsqrt = _proposal(beta1 * old_first + (1 - beta1) * answer, second)
        else:
            o, inverse, rsqrt = _proposal(answer, second)
        hat = standardised(o, mean, r)

        if du is not None or du2 is not None:
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
            dt = numbers(moved) + dp if dx_out is not None else dp
        elif dx_out is not None:
            dt = numbers(moved)
        else:
            dt = tl.zeros((CHUNKS, ROWS, CHUNK), tl.float32)
        if dx is not None:
            tl.store(dx + at, keep * dt, mask=mask)

        gain = held_v if HOLD else load_columns(gain_v, columns, D)
        if LAM >= 0:
            sum_lam -= thread_sums(dt * (p - step * gain * hat))
        sum_gain_v += dt * hat
        do, along = row_norm_backward(dt * (step * gain), hat, r, True, D)
        sum_step += along
        toward = do * inverse
        d_second = -0.5 * toward * o * rsqrt
        if ds_out is not None:
            d_second += numbers(ds_stored)
        d_answer = 2 * (1 - beta2) * answer * d_second
        if m is not None:
            d_first = toward
            if dm_out is not None:
                d_first += numbers(dm_stored)
            d_answer += (1 - beta1) * d_first
            if dm is not None:
                tl.store(dm + at, beta1 * d_first, mask=mask)
            if BETA1 >= 0:
                sum_beta1 += thread_sums(d_first * (old_first - answer))
        else:
            d_answer += toward
        if BETA2 >= 0:
            sum_beta2 += thread_sums(d_second * (old_second - answer * answer))
        if ds is not None:
            tl.store(ds + at, beta2 * d_second, mask=mask)
        if dg is not None:
            tl.store(dg + at, d_answer, mask=mask)

    line = partial + tl.program_id(0).to(tl.int64) * WIDTH
    store_columns(line, columns, sum_gain_v * step, D)
    line += D
    line = store_vector_sums(line, columns, gain_a, bias_a, sum_gain_a, sum_bias_a, D)
    line = store_vector_sums(line, columns, gain_b, bias_b, sum_gain_b, sum_bias_b, D)
    if BETA1 >= 0:
        tl.store(line, tl.sum(sum_beta1) * slope(raw_beta1, c_beta1, BETA1))
    if BETA2 >= 0:
        tl.store(line + 1, tl.sum(sum_beta2) * slope(raw_beta2, c_beta2, BETA2))
    if STEP >= 0:
        tl.store(line + 2, tl.sum(sum_step) * quotient(D * 1.0, step) * slope(raw_step, c_step, STEP))
    if LAM >= 0:
        tl.store(line + 3, tl.sum(sum_lam) / keep * slope(raw_lam, c_lam, LAM))


def backward_tile(d: int, width: int) -> Tile:
    """A warp for 256 numbers of a row: eight tensors of it are too many registers for fewer. Sixteen warps fit.

    Rows come through shared memory: 155 us at d = 768 and 32,768 rows in bf16 on an H200, 212 without.
    """
    chunk = min(4096, max(16, triton.next_power_of_2(d)))
    warps = max(1, chunk // 256)
    tile = Tile(chunk, 1, warps, programs=max(1, 16 // warps), registers=128 if d <= chunk else None)
    return common.buffered(tile, d, width)


def _outputs(g: Tensor, x: Tensor, m: Tensor | None, s: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Unwritten memory for x', m', s', u, u2 and the statistics; empty where one does not exist."""
    outputs, _, dtype = others[-3:]
    return (
        x.new_empty(g.shape),
        s.new_empty(0) if m is None else m.new_empty(g.shape),
        s.new_empty(g.shape),
        x.new_empty(g.shape if outputs else 0, dtype=dtype),
        x.new_empty(g.shape if outputs > 1 else 0, dtype=dtype),
        x.new_empty((4, g.numel() // g.shape[-1]), dtype=torch.float32),
    )


@operator("adaptive_pass", fake=_outputs)
def _pass(
    g: Tensor, x: Tensor, m: Tensor | None, s: Tensor, g2: Tensor | None,
    gain_v: Tensor, gain_a: Tensor | None, bias_a: Tensor | None, gain_b: Tensor | None, bias_b: Tensor | None,
    raw_beta1: Tensor | None, raw_beta2: Tensor | None, raw_step: Tensor | None, raw_lam: Tensor | None,
    kinds: list[int], constants: list[float], eps_v: float, eps: float, outputs: int, centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x_out, m_out, s_out, u, u2, statistics = _outputs(g, x, m, s, outputs, centred, dtype)
    d = g.shape[-1]
    n = statistics.shape[1]
    tile = common.row_tile(d)
    _adaptive_forward_kernel[(max(1, triton.cdiv(n, tile.rows)),)](
        g.contiguous(), dense(g2), x.contiguous(), dense(m), s.contiguous(), gain_v, gain_a, bias_a, gain_b, bias_b,
        raw_beta1, raw_beta2, raw_step, raw_lam, *constants,
        x_out, m_out, s_out, u if outputs else None, u2 if outputs > 1 else None, statistics, n, eps_v, eps, *kinds,
        CENTRED=centred, **tile.options(d),
    )  # fmt: skip
    return x_out, m_out, s_out, u, u2, statistics


def _gradients(x_out: Tensor, g: Tensor, m: Tensor | None, s: Tensor, wants: list[bool]) -> list[Tensor]:
    """Unwritten memory for dx, dg, dm, ds, empty where nobody wants one."""
    streams = (x_out, g, s if m is None else m, s)
    return [t.new_empty(g.shape if want else 0) for t, want in zip(streams, wants, strict=True)]


def _all_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    x_out, g, _, m, s, statistics = arguments[5:11]
    columns = common.columns(arguments[11:16], g.shape[-1], len(SCALARS))
    return *_gradients(x_out, g, m, s, arguments[-1]), statistics.new_empty(columns)


@operator("adaptive_pass_backward", fake=_all_gradients)
def _pass_backward(
    du: Tensor | None, du2: Tensor | None, dx_out: Tensor | None, dm_out: Tensor | None, ds_out: Tensor | None,
    x_out: Tensor, g: Tensor, g2: Tensor | None, m: Tensor | None, s: Tensor, statistics: Tensor,
    gain_v: Tensor, gain_a: Tensor | None, bias_a: Tensor | None, gain_b: Tensor | None, bias_b: Tensor | None,
    raw_beta1: Tensor | None, raw_beta2: Tensor | None, raw_step: Tensor | None, raw_lam: Tensor | None,
    kinds: list[int], constants: list[float], centred: bool, wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d = g.shape[-1]
    n = statistics.shape[1]
    inputs = (du, du2, dx_out, dm_out, ds_out, x_out, g, g2, m, s)
    tile = backward_tile(d, common.column_bytes(*inputs))
    programs, tiles = common.persistent(n, tile, g.device)
    vectors = (gain_v, gain_a, bias_a, gain_b, bias_b)
    columns = common.columns(vectors, d, len(SCALARS))
    grads = _gradients(x_out, g, m, s, wants)
    partial = statistics.new_empty((programs, columns))
    _adaptive_backward_kernel[(programs,)](
        *[packed(t) for t in inputs], statistics, *vectors,
        raw_beta1, raw_beta2, raw_step, raw_lam, *constants,
        *[t if want else None for t, want in zip(grads, wants, strict=True)], partial, n, *kinds,
        CENTRED=centred, TILES=tiles, STAGES=tile.stages, HOLD=tile.hold, WIDTH=columns, **tile.options(d),
    )  # fmt: skip
    return *grads, common.sum_lines(partial)  # type: ignore[return-value]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    g, _x, m, s, g2, *rest = inputs
    kinds, constants, _, _, _, centred, _ = rest[9:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[0], g, g2, m, s, output[5], *rest[:9])
    ctx.numbers = (kinds, constants, centred)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    dx_out, dm_out, ds_out, du, du2, _ = grads
    saved = ctx.saved_tensors
    _, g, g2, m, _s, _, *parameters = saved
    needs_g, needs_x, needs_m, needs_s, needs_g2 = ctx.needs_input_grad[:5]
    wants = [needs_x, needs_g or needs_g2, needs_m, needs_s]
    dx, dg, dm, ds, sums = torch.ops.stepformer.adaptive_pass_backward(
        du, du2, dx_out, dm_out if m is not None else None, ds_out, *saved, *ctx.numbers, wants
    )
    return (
        dg if needs_g else None,
        dx if needs_x else None,
        dm if needs_m else None,
        ds if needs_s else None,
        dg.to(g2.dtype) if needs_g2 else None,
        *common.split_sums(sums, tuple(parameters[:5]), tuple(parameters[5:]), g.shape[-1]),
        *[None] * 7,
    )


_pass.register_autograd(_backward, setup_context=_setup)


def adaptive_pass(
    g: Tensor, *, x: Tensor, m: Tensor | None, s: Tensor, g2: Tensor | None = None, beta1: Scalar | None = None,
    beta2: Scalar, gamma: Scalar, lam: Scalar | None = None, scale: float = 1.0, gain_v: Tensor, eps_v: float = 1e-5,
    norms: Norms = (), norm_kind: str = "layernorm", eps: float = 1e-5, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """x', m', s', u and u2 after an oracle's answer g (plus g2), all (..., d).

    Without `m` (and `beta1`) it is RMSProp's pass, with `lam` AdamW's. Streams keep their dtypes, u has `out_dtype`
    (default: that of x); `norms` holds gain and bias (or None) of each output, none to two. Not twice differentiable.
    """
    (gain_a, bias_a), (gain_b, bias_b) = [*norms, (None, None), (None, None)][:2]
    scalars = (beta1 if m is not None else None, beta2, gamma.times(scale), lam)
    x_out, m_out, s_out, u, u2, _ = torch.ops.stepformer.adaptive_pass(
        g, x, m, s, g2, gain_v, gain_a, bias_a, gain_b, bias_b,
        *common.taken_apart(scalars),
        eps_v, eps, len(norms), norm_kind == "layernorm", out_dtype or x.dtype,
    )  # fmt: skip
    return x_out, None if m is None else m_out, s_out, u if norms else None, u2 if len(norms) > 1 else None
