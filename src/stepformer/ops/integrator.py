"""One pass of a Hamiltonian integrator: from the two fields of an attention to the next oracle's input.

Forward, for every row (token) of d numbers. F is the attention's velocity, G its force; F_o, G_o and y_o are what the
layer before had, s and s_o one number per row (1 where absent), and a term of an absent tensor is absent:

    x' = x + b s F + b_o s_o F_o
    w  = a y + c G + c_o G_o + a_o y_o;  y' = gain_y LN(w; eps_y)
    V' = ratio y',  ratio = beta_next / (scale_next * gamma_next)         (1 without beta_next)
    u  = gain Norm(x' + mu_next y') + bias

Where the next oracle follows a velocity of its own, carried as V_n = ratio v, it looks along that one:

    V' = y',   u = gain Norm(x' + ahead V_n) + bias,  ahead = mu_next / ratio

The six weights [b, b_o, a, c, c_o, a_o] are one fp32 tensor on the device. V' is what `velocity` takes as its V.

Backward, with p = x' + mu y', dp from du through its norm, and sums over rows and columns in <,>:

    dt = dx' + dp;  dx = dt;  dF = b s dt;  dF_o = b_o s_o dt;  ds = b <dt, F> and ds_o = b_o <dt, F_o> in each row
    dy' = mu dp + ratio dV';  dw = LN'(gain_y dy');  dy = a dw;  dG = c dw;  dG_o = c_o dw;  dy_o = a_o dw
    db = <s dt, F>;  db_o = <s_o dt, F_o>;  da = <dw, y>;  dc = <dw, G>;  dc_o = <dw, G_o>;  da_o = <dw, y_o>
    dmu = <dp, y'>;  dratio = <dV', y'>;  dgain_y = hat dy'
    (along V_n: dy' = dV', dV_n = ahead dp, dahead = <dp, V_n>)

What is kept for it: x', four statistics per row, and the fields and streams that came in, which exist anyway. The
gradients of the weights ask for these, so w is computed from them again in fp32: V' need not be read, and its
rounding does not come in.

Traffic in d-vectors per token: forward 4 reads (x, y, F, G) and 3 writes (x', V', u), one read more for each older
tensor; backward 7 reads (du, dx', dV', x', y, F, G) and 4 writes (dx, dy, dF, dG), one of each more for each older
tensor. About 25 and 50 operations per number: bandwidth-bound.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from stepformer.base.errors import InputError
from stepformer.ops import common
from stepformer.ops.common import ABSENT, Norms, Scalar, Tile, dense, packed
from stepformer.ops.integrator_kernels import integrator_backward_kernel, integrator_forward_kernel
from stepformer.ops.operators import operator, unwritten

SCALARS = ("mu", "beta", "next", "b", "b_o", "a", "c", "c_o", "a_o")


def backward_tile(d: int, width: int, vectors: int) -> Tile:
    """A warp for 256 numbers of a row: seven to ten tensors of it do not fit into the registers of fewer.

    `width` is the bytes of a column in all tensors that are read, `vectors` how many parameters are added up by column.
    Together they decide how many registers a thread needs in order not to spill. At d = 768 in bf16 (four warps) that
    is 128 without older tensors, so four programs fit on a multiprocessor, and 168 with two or three of them, so three
    do. One warp a row would spill 400 bytes a thread and more; two spill little or nothing, but only eight warps fit.
    Rows come through shared memory, with two copies under way.
    """
    chunk = min(4096, max(16, triton.next_power_of_2(d)))
    warps = max(1, chunk // 256)
    held = width + 4 * vectors
    registers = 128 if held <= 22 else 168 if held <= 30 else 255
    programs = 65536 // (32 * warps * registers)
    tile = Tile(chunk, 1, warps, programs=max(1, programs), registers=registers if programs > 1 else None)
    return common.buffered(tile, d, width)


def _outputs(x: Tensor, y: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unwritten memory for x', V', u (empty where there is none) and the statistics."""
    outputs, _, dtype = others[-3:]
    statistics = x.new_empty((4, x.numel() // x.shape[-1]), dtype=torch.float32)
    return unwritten(x), y.new_empty(x.shape), unwritten(x, outputs > 0, dtype), statistics


@operator("integrator_pass", fake=_outputs)
def _pass(
    x: Tensor, y: Tensor, velocity: Tensor, force: Tensor | None,
    older_velocity: Tensor | None, older_force: Tensor | None, older_y: Tensor | None,
    scale: Tensor | None, older_scale: Tensor | None, along: Tensor | None, weights: Tensor,
    gain_y: Tensor, gain: Tensor | None, bias: Tensor | None,
    raw_mu: Tensor | None, raw_beta: Tensor | None, raw_next: Tensor | None,
    kinds: list[int], constants: list[float], eps_y: float, eps: float,
    outputs: int, centred: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x_out, V_out, u, statistics = _outputs(x, y, outputs, centred, dtype)
    d = x.shape[-1]
    n = statistics.shape[1]
    tile = common.row_tile(d)  # 88 registers at most in bf16: twenty rows are under way on a multiprocessor
    streams = (x, y, velocity, force, older_velocity, older_force, older_y, scale, older_scale, along, weights)
    integrator_forward_kernel[(max(1, triton.cdiv(n, tile.rows)),)](
        *[dense(t) for t in streams], gain_y, gain, bias, raw_mu, raw_beta, raw_next, *constants,
        x_out, V_out, u if outputs else None, statistics, n, eps_y, eps, *kinds,
        CENTRED=centred, **tile.options(d),
    )  # fmt: skip
    return x_out, V_out, u, statistics


def _gradients(streams: tuple[Any, ...], statistics: Tensor, dx_dtype: torch.dtype, wants: list[bool]) -> list[Tensor]:
    """Unwritten memory for the gradients of x and of the streams, empty where nobody wants one."""
    dx = statistics.new_empty(streams[0].shape if wants[0] else 0, dtype=dx_dtype)
    others = zip(streams, wants[1:], strict=True)
    return [dx, *(unwritten(t) if t is not None and want else statistics.new_empty(0) for t, want in others)]


def _all_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    statistics, vectors, (dx_dtype, wants, _) = arguments[14], arguments[15:18], arguments[-3:]
    columns = common.columns(vectors, arguments[4].shape[-1], len(SCALARS))
    return *_gradients(arguments[4:13], statistics, dx_dtype, wants), statistics.new_empty(columns)


@operator("integrator_pass_backward", fake=_all_gradients)
def _pass_backward(
    du: Tensor | None, dx_out: Tensor | None, dV_out: Tensor | None, x_out: Tensor | None,
    y: Tensor, velocity: Tensor, force: Tensor | None,
    older_velocity: Tensor | None, older_force: Tensor | None, older_y: Tensor | None,
    scale: Tensor | None, older_scale: Tensor | None, along: Tensor | None, weights: Tensor, statistics: Tensor,
    gain_y: Tensor, gain: Tensor | None, bias: Tensor | None,
    raw_mu: Tensor | None, raw_beta: Tensor | None, raw_next: Tensor | None,
    kinds: list[int], constants: list[float], centred: bool, dx_dtype: torch.dtype, wants: list[bool], learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d = y.shape[-1]
    n = statistics.shape[1]
    moves, turns = _reaches(du, dx_out, dV_out, along, kinds)
    turned = (y, force, older_force, older_y) if turns else (None,) * 4
    # only the weights and the scales ask for the velocities
    moved = (velocity if learn or wants[7] else None, older_velocity if learn or wants[8] else None)
    moved = moved if moves else (None, None)
    inputs = (
        du, dx_out, dV_out, None if du is None else x_out, turned[0], moved[0], turned[1], moved[1], *turned[2:], along,
    )  # fmt: skip
    vectors = (gain_y, gain, bias)
    tile = backward_tile(d, common.column_bytes(*inputs), sum(v is not None for v in vectors))
    programs, tiles = common.persistent(n, tile, statistics.device)
    columns = common.columns(vectors, d, len(SCALARS))
    streams = (y, velocity, force, older_velocity, older_force, older_y, scale, older_scale, along)
    grads = _gradients(streams, statistics, dx_dtype, wants)
    partial = statistics.new_empty((programs, columns))
    integrator_backward_kernel[(programs,)](
        *[packed(t) for t in inputs], dense(scale), dense(older_scale), weights.contiguous(), statistics, *vectors,
        raw_mu, raw_beta, raw_next, *constants,
        *[t if want else None for t, want in zip(grads, wants, strict=True)], partial, n, *kinds,
        MOVES=moves, TURNS=turns, LEARN=learn, CENTRED=centred,
        TILES=tiles, STAGES=tile.stages, HOLD=tile.hold, WIDTH=columns, **tile.options(d),
    )  # fmt: skip
    return *grads, common.sum_lines(partial)  # type: ignore[return-value]


def _reaches(
    du: Tensor | None, dx_out: Tensor | None, dV_out: Tensor | None, along: Tensor | None, kinds: list[int]
) -> tuple[bool, bool]:
    """Whether the gradients of the outputs reach the position (dt) and the momentum (dw)."""
    looks_ahead = du is not None and kinds[0] != ABSENT.value and along is None
    return du is not None or dx_out is not None, dV_out is not None or looks_ahead


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *streams = inputs[:10]
    kinds, constants, _, _, outputs, centred, _ = inputs[17:]
    x_out, _, _, statistics = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_out if outputs else None, *streams, inputs[10], statistics, *inputs[11:17])
    ctx.numbers = (kinds, constants, centred, x.dtype)


def _backward(ctx: Any, dx_out: Tensor | None, dV_out: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
    du, _ = others
    saved = ctx.saved_tensors
    along, weights, vectors, raws = saved[9], saved[10], saved[12:15], saved[15:]
    moves, turns = _reaches(du, dx_out, dV_out, along, ctx.numbers[0])
    reached = (moves, turns, moves, turns, moves, turns, turns, moves, moves, du is not None)
    *needs, learn = ctx.needs_input_grad[:11]
    wants = [need and there for need, there in zip(needs, reached, strict=True)]
    *grads, sums = torch.ops.stepformer.integrator_pass_backward(du, dx_out, dV_out, *saved, *ctx.numbers, wants, learn)
    d = saved[1].shape[-1]
    d_weights = None
    if learn:
        start = sum(v is not None for v in vectors) * d + len(raws)
        d_weights = sums[start : start + weights.numel()].to(weights.dtype)
    return (
        *[t if want else None for t, want in zip(grads, wants, strict=True)],
        d_weights,
        *common.split_sums(sums, vectors, raws, d),
        *[None] * 7,
    )


_pass.register_autograd(_backward, setup_context=_setup)


def integrator_pass(
    *, x: Tensor, y: Tensor, velocity: Tensor, force: Tensor | None, weights: Tensor,
    older_velocity: Tensor | None = None, older_force: Tensor | None = None, older_y: Tensor | None = None,
    scale: Tensor | None = None, older_scale: Tensor | None = None, along: Tensor | None = None,
    gain_y: Tensor, eps_y: float = 1e-5,
    mu_next: Scalar | None = None, beta_next: Scalar | None = None, gamma_next: Scalar | None = None,
    scale_next: float = 1.0, norms: Norms = (), norm_kind: str = "layernorm", eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """x', V' and u after the two fields of an attention, all (..., d).

    `weights` holds [b, b_o, a, c, c_o, a_o] in fp32; those of absent tensors are not looked at, and their gradient is
    0. `scale` and `older_scale` are fp32 (...,), factors of the velocities. V' comes back times beta / (scale * gamma)
    of the next pass (`beta_next`, `gamma_next`, `scale_next`), or as it is without `beta_next`. With `along`, another
    velocity with that factor, u looks along it and V' is y' as it is. `norms` holds gain and bias (or None) of u, or
    nothing where there is no u. x' has the dtype of x, V' that of y, u that of `out_dtype`
    (default: that of x). Not twice differentiable.
    """
    if len(norms) > 1:
        raise InputError("An integrator's pass has one output at most.")
    if along is not None and (not norms or mu_next is None or beta_next is None):
        raise InputError("To look along another velocity a pass needs a norm, mu and the beta that scales it.")
    gain, bias = [*norms, (None, None)][0]
    scalars = (mu_next if norms else None, beta_next, common.next_step(beta_next, gamma_next, scale_next))
    x_out, V_out, u, _ = torch.ops.stepformer.integrator_pass(
        x, y, velocity, force, older_velocity, older_force, older_y,
        scale, None if older_velocity is None else older_scale, along, weights, gain_y, gain, bias,
        *common.taken_apart(scalars),
        eps_y, eps, len(norms), norm_kind == "layernorm", out_dtype or x.dtype,
    )  # fmt: skip
    return x_out, V_out, u if norms else None
