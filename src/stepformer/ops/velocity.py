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
import triton
from torch import Tensor

from stepformer.base.errors import InputError
from stepformer.ops import common
from stepformer.ops.common import ABSENT, ONE, Norms, Scalar, Tile, dense, packed
from stepformer.ops.operators import operator, unwritten
from stepformer.ops.velocity_kernels import velocity_backward_kernel, velocity_forward_kernel

SCALARS = ("step", "nu", "lam", "mu", "beta", "next")


def backward_tile(d: int, light: bool, width: int) -> Tile:
    """As many programs as the registers let run at once: 255 a thread at d = 768, fewer if it is `light`.

    Few warps do not hide the latency of memory, so rows are copied to shared memory while the one before them is
    computed. `width` is the bytes of a column in all tensors that are read. A light pass has registers left for the
    next row instead. Both were the fastest of six (32,768 rows of 768 in bf16 on an H200): 90 us, and 55 us.
    """
    if light and d <= 4096:
        chunk = max(16, triton.next_power_of_2(d))
        warps = max(1, chunk // 256)
        return Tile(chunk, 1, warps, programs=max(1, 32 // warps), ahead=True, hold=True)
    return common.buffered(common.row_tile(d, rows=1, programs=8), d, width)


def _outputs(g: Tensor | None, x: Tensor, V: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    """Unwritten memory for x', V', u, u2 and the statistics; empty where one does not exist."""
    outputs, _, drift, carry, dtype = others[-5:]
    return (
        unwritten(x, drift),
        (x if V is None else V).new_empty(x.shape if carry else 0),
        unwritten(x, outputs > 0, dtype),
        unwritten(x, outputs > 1, dtype),
        x.new_empty((4, x.numel() // x.shape[-1]), dtype=torch.float32),
    )


@operator("velocity_pass", fake=_outputs)
def _pass(
    g: Tensor | None, x: Tensor, V: Tensor | None, g2: Tensor | None,
    gain_v: Tensor | None, gain_a: Tensor | None, bias_a: Tensor | None, gain_b: Tensor | None, bias_b: Tensor | None,
    raw_step: Tensor | None, raw_nu: Tensor | None, raw_lam: Tensor | None, raw_mu: Tensor | None,
    raw_beta: Tensor | None, raw_next: Tensor | None,
    kinds: list[int], constants: list[float], eps_v: float, eps: float,
    outputs: int, centred: bool, drift: bool, carry: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x_out, V_out, u, u2, statistics = _outputs(g, x, V, outputs, centred, drift, carry, dtype)
    d = x.shape[-1]
    n = statistics.shape[1]
    tile = common.row_tile(d)
    velocity_forward_kernel[(max(1, triton.cdiv(n, tile.rows)),)](
        dense(g), dense(g2), x.contiguous() if drift or outputs else None, dense(V),
        gain_v, gain_a, bias_a, gain_b, bias_b, raw_step, raw_nu, raw_lam, raw_mu, raw_beta, raw_next, *constants,
        x_out if drift else None, V_out if carry else None, u if outputs else None, u2 if outputs > 1 else None,
        statistics, n, eps_v, eps, *kinds,
        CENTRED=centred, **tile.options(d),
    )  # fmt: skip
    return x_out, V_out, u, u2, statistics


def _gradients(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Unwritten memory for dx, dw and the sums."""
    statistics, vectors, (shape, dx_dtype, dw_dtype) = arguments[8], arguments[9:14], arguments[-3:]
    dx = statistics.new_empty(0 if dx_dtype is None else shape, dtype=dx_dtype)
    dw = statistics.new_empty(0 if dw_dtype is None else shape, dtype=dw_dtype)
    return dx, dw, statistics.new_empty(common.columns(vectors, shape[-1], len(SCALARS)))


@operator("velocity_pass_backward", fake=_gradients)
def _pass_backward(
    du: Tensor | None, du2: Tensor | None, dx_out: Tensor | None, dV_out: Tensor | None,
    x_out: Tensor | None, V_out: Tensor | None, g: Tensor | None, g2: Tensor | None, statistics: Tensor,
    gain_v: Tensor | None, gain_a: Tensor | None, bias_a: Tensor | None, gain_b: Tensor | None, bias_b: Tensor | None,
    raw_step: Tensor | None, raw_nu: Tensor | None, raw_lam: Tensor | None, raw_mu: Tensor | None,
    raw_beta: Tensor | None, raw_next: Tensor | None,
    kinds: list[int], constants: list[float], eps_v: float, centred: bool, drift: bool,
    shape: list[int], dx_dtype: torch.dtype | None, dw_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    d = shape[-1]
    n = statistics.shape[1]
    inputs = [packed(t) for t in (du, du2, dx_out, dV_out, x_out, V_out, g, g2)]
    vectors = (gain_v, gain_a, bias_a, gain_b, bias_b)
    light = V_out is None and g is None and sum(v is not None for v in vectors) < 2
    tile = backward_tile(d, light, common.column_bytes(du, du2, dx_out, dV_out, x_out, V_out, g, g2))
    programs, tiles = common.persistent(n, tile, statistics.device)
    dx = statistics.new_empty(0 if dx_dtype is None else shape, dtype=dx_dtype)
    dw = statistics.new_empty(0 if dw_dtype is None else shape, dtype=dw_dtype)
    columns = common.columns(vectors, d, len(SCALARS))
    partial = statistics.new_empty((programs, columns))
    velocity_backward_kernel[(programs,)](
        *inputs, statistics, *vectors,
        raw_step, raw_nu, raw_lam, raw_mu, raw_beta, raw_next, *constants,
        None if dx_dtype is None else dx, None if dw_dtype is None else dw, partial, n, eps_v, *kinds,
        DRIFT=drift, CENTRED=centred, TILES=tiles, STAGES=tile.stages, AHEAD=tile.ahead, HOLD=tile.hold, WIDTH=columns,
        **tile.options(d),
    )  # fmt: skip
    return dx, dw, common.sum_lines(partial)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    g, x, V, g2, *rest = inputs
    vectors, raws, (kinds, constants, eps_v, _, outputs, centred, drift, carry, _) = rest[:5], rest[5:11], rest[11:]
    x_out, V_out, _, _, statistics = output
    step, nu, lam, mu = kinds[:4]
    asks_for_v = vectors[0] is not None or step >= 0 or nu >= 0 or lam >= 0 or mu != ABSENT.value
    answers = (g, g2) if asks_for_v and not carry else (None, None)
    position = None
    if outputs or lam >= 0:
        position = x_out if drift else x
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(position, V_out if carry else None, *answers, statistics, *vectors, *raws)
    ctx.numbers = (kinds, constants, eps_v, centred, drift)
    ctx.shape, ctx.dtypes = list(x.shape), [None if t is None else t.dtype for t in (g, x, V, g2)]
    # x' = x + g: both have the same gradient, and it is written once
    residual = drift and not carry and not asks_for_v and lam == ABSENT.value and constants[0] * constants[1] == 1.0
    ctx.same = residual and g.dtype == x.dtype


def _backward(ctx: Any, dx_out: Tensor | None, dV_out: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
    du, du2, _ = others
    saved = ctx.saved_tensors
    vectors, raws = saved[5:10], saved[10:]
    g_dtype, x_dtype, V_dtype, g2_dtype = ctx.dtypes
    needs = ctx.needs_input_grad
    wants_w = needs[0] or needs[2] or needs[3]
    has_dx = dx_out is not None or du is not None or du2 is not None
    dx, dw, sums = torch.ops.stepformer.velocity_pass_backward(
        du, du2, dx_out, dV_out, *saved, *ctx.numbers, ctx.shape,
        x_dtype if has_dx and (needs[1] or ctx.same) else None,
        (V_dtype or g_dtype) if wants_w and not ctx.same else None,
    )  # fmt: skip
    if ctx.same:
        dw = dx
    inputs = [
        dw.to(t) if need and t is not None else None
        for need, t in zip((needs[0], needs[2], needs[3]), (g_dtype, V_dtype, g2_dtype), strict=True)
    ]
    by_parameter = common.split_sums(sums, vectors, raws, ctx.shape[-1])
    return inputs[0], dx if has_dx and needs[1] else None, inputs[1], inputs[2], *by_parameter, *[None] * 9


_pass.register_autograd(_backward, setup_context=_setup)


class _Staying(torch.autograd.Function):
    """A pass that looks from x without moving it, and gives x back as an output of its own.

    Whoever uses x next takes that one, so its gradient arrives here and is added while dx is written; else autograd
    would add the two gradients of x in a pass of its own. An operator of torch.library must not return its input.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        outputs = torch.ops.stepformer.velocity_pass(*inputs)
        _setup(ctx, inputs, outputs)
        return inputs[1], *outputs[1:]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _backward(ctx, *gradients)


def velocity_pass(
    g: Tensor | None, *, x: Tensor, V: Tensor | None = None, g2: Tensor | None = None, gamma: Scalar = ONE,
    scale: float = 1.0, gain_v: Tensor | None = None, eps_v: float = 1e-5, nu: Scalar | None = None,
    lam: Scalar | None = None, drift: bool = True, mu_next: Scalar | None = None, beta_next: Scalar | None = None,
    gamma_next: Scalar | None = None, scale_next: float = 1.0, norms: Norms = (), norm_kind: str = "layernorm",
    eps: float = 1e-5, out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """x', V', u and u2 after an oracle's answer g (plus g2), all (..., d).

    `V` is the velocity times beta / (scale * gamma) of this pass; V' comes back times beta / (scale * gamma) of the
    next one (`beta_next`, `gamma_next`, `scale_next`), or as it is without `beta_next`. There is a V' when there is a
    V or a `beta_next`. Without `gain_v` the velocity is not normalised. No gain and no beta may be exactly 0.
    `norms` holds gain and bias (or None) of each output, none to two; statistics are taken once. x' has the dtype
    of x, V' that of V (without V that of x), u that of `out_dtype` (default: that of x). Not twice differentiable.
    Without a drift x' has the values of x; going on from x' saves a pass over its gradients.

    Before the first answer, `g` is the velocity itself and nothing drifts: V' = ratio g and u looks ahead along g.
    Without a `g` there is only the norm of x.
    """
    if g is None and (drift or V is not None or g2 is not None or gain_v is not None or mu_next or beta_next):
        raise InputError("Without an answer a pass only normalises x.")
    carry = V is not None or beta_next is not None
    if not drift:
        nu = lam = None
    (gain_a, bias_a), (gain_b, bias_b) = [*norms, (None, None), (None, None)][:2]
    step_next = common.next_step(beta_next, gamma_next, scale_next)
    scalars = (gamma.times(scale), nu, lam, mu_next if norms else None, beta_next, step_next)
    staying = not drift and len(norms) > 0 and not torch.compiler.is_compiling()
    arguments = (
        g, x, V, g2, gain_v, gain_a, bias_a, gain_b, bias_b,
        *common.taken_apart(scalars),
        eps_v, eps, len(norms), norm_kind == "layernorm", drift, carry, out_dtype or x.dtype,
    )  # fmt: skip
    if staying:
        x_out, V_out, u, u2, _ = _Staying.apply(*arguments)
    else:
        x_out, V_out, u, u2, _ = torch.ops.stepformer.velocity_pass(*arguments)
    return (
        x_out if drift or staying else x,
        V_out if carry else None,
        u if norms else None,
        u2 if len(norms) > 1 else None,
    )
