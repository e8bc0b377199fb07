"""The device side of whitening.py, where its equations stand: the kernels and the steps they are made of.

Matrices of heads are held transposed, k x h, so that every warp has 16 rows of each product; P, Z, Y and E are held
times SCALE. `SPLIT` says whether operands are split into two halves, `EXACT` for how many steps from the first on.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCALE = tl.constexpr(512.0)  # of every matrix below, so that fp16 holds the smallest entries that matter


@triton.jit
def _operand(x, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """x as a pair of dot operands: leading and trailing half."""
    high = x.to(tl.float16)
    low = high
    if SPLIT:
        low = (x - high.to(tl.float32)).to(tl.float16)
    return high, low


@triton.jit
def _product(a, a_low, b, b_low, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """a @ b of two pairs."""
    if SPLIT:
        result = tl.dot(a, b, tl.dot(a, b_low, tl.dot(a_low, b)))
    else:
        result = tl.dot(a, b)
    return result


@triton.jit
def _power_of_two(x):  # type: ignore[no-untyped-def]
    """The largest power of two that is not above the Frobenius norm of x; never 0, so that one can divide by it."""
    norm = tl.maximum(tl.sqrt(tl.sum(x * x)), 1e-30)
    return (norm.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _shifted(covariance, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """The covariance plus 1e-6 I."""
    j = tl.arange(0, K)
    return tl.where(j[:, None] == j[None, :], covariance + 1e-6, covariance)


@triton.jit
def _normalised(covariance, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """(P_0, s) of a covariance."""
    shifted = _shifted(covariance, K)
    size = tl.maximum(tl.sqrt(tl.sum(shifted * shifted)), 1e-6)
    return shifted * (1 / size), size


@triton.jit
def _turned(z, zh, zl, ph, pl, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """T_i Z_i^T from Z_i^T (k x h) and P_i."""
    return 1.5 * z - _product(ph, pl, zh, zl, SPLIT) * (0.5 / SCALE)


@triton.jit
def _advanced(p, z, ph, pl, zh, zl, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """(P_{i+1}, Z_{i+1}^T) from P_i, Z_i^T and their operands."""
    z = _turned(z, zh, zl, ph, pl, SPLIT)
    qh, ql = _operand(_product(ph, pl, ph, pl, SPLIT) * (1 / SCALE) - 6 * p, SPLIT)
    return 2.25 * p + _product(qh, ql, ph, pl, SPLIT) * (0.25 / SCALE), z


@triton.jit
def _keep_operands(  # type: ignore[no-untyped-def]
    here, ph, pl, zh, zl, K: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr
):
    """P_i and Z_i^T into the programs' buffer, behind them their trailing halves."""
    j = tl.arange(0, K)
    square = j[:, None] * K + j[None, :]
    tall = j[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(here + square, ph)
    tl.store(here + K * K + tall, zh)
    if SPLIT:
        tl.store(here + K * (K + COLUMNS) + square, pl)
        tl.store(here + K * (2 * K + COLUMNS) + tall, zl)


@triton.jit
def _retreated(  # type: ignore[no-untyped-def]
    e, y, shrunk, here, K: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr
):
    """(E_i times another 4/9, Y_{i-1}^T) from E_{i+1}, Y_i^T and what was kept of step i."""
    j = tl.arange(0, K)
    square = j[:, None] * K + j[None, :]
    tall = j[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    ph = tl.load(here + square)
    zh = tl.load(here + K * K + tall)
    pl, zl = ph, zh
    if SPLIT:
        pl = tl.load(here + K * (K + COLUMNS) + square)
        zl = tl.load(here + K * (2 * K + COLUMNS) + tall)
    eh, el = _operand(e, SPLIT)
    v = _product(eh, el, ph, pl, SPLIT) * (1 / SCALE)
    vh, vl = _operand(v + 0.5 * tl.trans(v), SPLIT)
    half = 0.5 * e - (2 / 3) * v + _product(vh, vl, ph, pl, SPLIT) * (1 / (9 * SCALE))
    yh, yl = _operand(y, SPLIT)
    half += _product(zh, zl, tl.trans(yh), tl.trans(yl), SPLIT) * shrunk
    return half + tl.trans(half), _turned(y, yh, yl, ph, pl, SPLIT)


@triton.jit
def whitening_forward_kernel(  # type: ignore[no-untyped-def]
    g, m, r, beta_r, beta1, u, r_new, m_new,
    H: tl.constexpr, K: tl.constexpr, R_STRIDE: tl.constexpr, COLUMNS: tl.constexpr,
    MEAN: tl.constexpr, STEPS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    LEADING: tl.constexpr = EXACT if EXACT < STEPS else STEPS - 1
    token = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, K)
    head = tl.arange(0, COLUMNS)
    square = j[:, None] * K + j[None, :]
    turned = token * (H * K) + head[None, :] * K + j[:, None]  # of G^T
    real = (head < H)[None, :]

    d = tl.load(g + turned, mask=real, other=0.0).to(tl.float32)
    b = tl.load(beta_r).to(tl.float32)
    unit = _power_of_two(d)
    gh, gl = _operand(d * (SCALE / unit), True)
    gram = _product(gh, gl, tl.trans(gh), tl.trans(gl), True) * (unit / SCALE) * (unit / SCALE)
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
    for _ in range(LEADING):
        ph, pl = _operand(p, True)
        zh, zl = _operand(z, True)
        p, z = _advanced(p, z, ph, pl, zh, zl, True)
    for _ in range(STEPS - 1 - LEADING):
        ph, pl = _operand(p, False)
        zh, zl = _operand(z, False)
        p, z = _advanced(p, z, ph, pl, zh, zl, False)
    ph, pl = _operand(p, EXACT == STEPS)
    zh, zl = _operand(z, EXACT == STEPS)
    z = _turned(z, zh, zl, ph, pl, EXACT == STEPS)
    tl.store(u + turned, z * (unit / (SCALE * tl.sqrt(size))), mask=real)


@triton.jit
def whitening_backward_kernel(  # type: ignore[no-untyped-def]
    du, dr_new, dm_new, g, m, r, r_new, beta_r, beta1, dg, dm, dr, partial, scratch, tokens,
    H: tl.constexpr, K: tl.constexpr, R_STRIDE: tl.constexpr, COLUMNS: tl.constexpr,
    MEAN: tl.constexpr, HAS_DR: tl.constexpr, HAS_DM: tl.constexpr, NEEDS_DR: tl.constexpr,
    STEPS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    LEADING: tl.constexpr = EXACT if EXACT < STEPS else STEPS - 1
    SLOT: tl.constexpr = 2 * K * (K + COLUMNS)
    program = tl.program_id(0)
    j = tl.arange(0, K)
    head = tl.arange(0, COLUMNS)
    square = j[:, None] * K + j[None, :]
    turned = head[None, :] * K + j[:, None]
    real = (head < H)[None, :]
    base = scratch + program.to(tl.int64) * ((STEPS - 1) * SLOT)
    b = tl.load(beta_r).to(tl.float32)
    b1 = 0.0
    if MEAN:
        b1 = tl.load(beta1).to(tl.float32)
    one = tl.full((), 1, tl.int64)  # offsets of matrices pass 2^31
    db = 0.0
    db1 = 0.0

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
        for _ in range(LEADING):
            ph, pl = _operand(p, True)
            zh, zl = _operand(z, True)
            _keep_operands(here, ph, pl, zh, zl, K, COLUMNS, True)
            p, z = _advanced(p, z, ph, pl, zh, zl, True)
            here += SLOT
        for _ in range(STEPS - 1 - LEADING):
            ph, pl = _operand(p, False)
            zh, zl = _operand(z, False)
            _keep_operands(here, ph, pl, zh, zl, K, COLUMNS, False)
            p, z = _advanced(p, z, ph, pl, zh, zl, False)
            here += SLOT

        ph, pl = _operand(p, EXACT == STEPS)
        zh, zl = _operand(z, EXACT == STEPS)
        y = tl.load(du + vectors + turned, mask=real, other=0.0).to(tl.float32)
        y_unit = _power_of_two(y)
        y *= SCALE / y_unit
        yh, yl = _operand(y, EXACT == STEPS)
        shrunk = -0.25 / SCALE
        half = _product(zh, zl, tl.trans(yh), tl.trans(yl), EXACT == STEPS) * shrunk
        e = half + tl.trans(half)
        y = _turned(y, yh, yl, ph, pl, EXACT == STEPS)
        tl.debug_barrier()  # other threads read what was kept
        for _ in range(STEPS - 1 - LEADING):
            here -= SLOT
            shrunk = shrunk / 2.25
            e, y = _retreated(e, y, shrunk, here, K, COLUMNS, False)
        for _ in range(LEADING):
            here -= SLOT
            shrunk = shrunk / 2.25
            e, y = _retreated(e, y, shrunk, here, K, COLUMNS, True)
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
        along = tl.sum(e * p) + 0.5 * tl.sum(dd * d)
        e = (e - p * along) * (1 / size)
        if HAS_DR:
            given = tl.load(dr_new + matrices + square).to(tl.float32)
            e += 0.5 * (given + tl.trans(given))
        if NEEDS_DR:
            tl.store(dr + matrices + square, b * e)
        e_unit = _power_of_two(e)
        g_unit = _power_of_two(answer)
        eh, el = _operand(e * (SCALE / e_unit), True)
        gh, gl = _operand(answer * (SCALE / g_unit), True)
        through = _product(eh, el, gh, gl, True) * (e_unit / SCALE) * (g_unit / SCALE)
        old = tl.load(r + token * R_STRIDE + square).to(tl.float32)
        db += tl.sum(e * old) - tl.sum(through * answer)
        through *= 2 * (1 - b)
        if MEAN:
            if HAS_DM:
                dd += tl.load(dm_new + vectors + turned, mask=real, other=0.0).to(tl.float32)
            db1 += tl.sum(dd * (mean - answer))
            tl.store(dm + vectors + turned, b1 * dd, mask=real)
            dd = (1 - b1) * dd
        tl.store(dg + vectors + turned, dd + through, mask=real)
    tl.store(partial + program, db)
    tl.store(partial + tl.num_programs(0) + program, db1)
