"""Linear layers of bf16 tokens with fp32 weights, and the second one of an MLP with the activation before it.

Tokens x (N, in), weight W (out, in) in fp32, W16 its rounded copy, bias b:

    y = x W16^T + b,    dx = dy W16,   dW = dy^T x,   db = sum_N dy

Plain autograd under autocast rounds dW to bf16 and casts it back. Here the product's fp32 sums are written as they are:
no rounding, and one pass over dW less. For the second layer of an MLP, with h (N, hidden) what the first one gives,

    a = act(h),   y = a W16^T + b
    da = dy W16,  dh = da act'(h),   dW = dy^T a,   db = sum_N dy

a is not kept: the kernel that makes dh from h and da computes a again, with the bits of the forward. Activations, with
Phi the normal distribution and sigma the logistic function:

    gelu       h Phi(h)                                     act' = Phi + h Phi'
    gelu-tanh  h s,  s = sigma(2 c (h + 0.044715 h^3))      act' = s + h s (1 - s) 2 c (1 + 3 * 0.044715 h^2)
    relu2      h s,  s = max(h, 0)                          act' = 2 s
    swiglu     silu(g) v,  h = (g, v),  silu = g sigma(g)   dg = da v silu'(g),  dv = da silu(g)

with c = sqrt(2 / pi). fp32 storage takes Phi from erf. bf16 storage takes it from Abramowitz and Stegun, Handbook of
Mathematical Functions, 7.1.26: absolute error below 1e-7 in Phi, relative error below 2e-3 (half of what bf16 rounds)
down to h = -5, and the exponential in it is the one that Phi' needs.

Traffic of the activation in numbers per entry of a: forward 1 read and 1 write, backward 2 and 2 (swiglu 2 + 1, 3 + 3).
About 20 and 30 operations each: bandwidth-bound. dh replaces da in memory where they have the same shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from stepformer.ops.operators import differentiable, operator

LOG2E = tl.constexpr(1.4426950408889634)
SQRT_HALF = tl.constexpr(0.7071067811865476)
DENSITY_AT_0 = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
TANH_SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
CUBIC = tl.constexpr(0.044715)

GELU = tl.constexpr(0)
TANH_GELU = tl.constexpr(1)
SWIGLU = tl.constexpr(2)
RELU2 = tl.constexpr(3)
CODES: dict[str, int] = {"gelu": 0, "gelu-tanh": 1, "swiglu": 2, "relu2": 3}

# Entries of a program and its warps: one or two 16-byte loads of each tensor per thread are on their way at a time.
FORWARD = {"BLOCK": 4096, "num_warps": 8}
BACKWARD = {"BLOCK": 2048, "num_warps": 8}


@triton.jit
def _normal(h, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Phi(h) and its derivative."""
    e = tl.exp2(h * h * (-0.5 * LOG2E))
    if EXACT:
        below = 0.5 + 0.5 * tl.math.erf(h * SQRT_HALF)
    else:
        t = 1 / (1 + tl.abs(h) * (0.3275911 * SQRT_HALF))
        series = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
        tail = t * series * e
        below = tl.where(h < 0, tail, 1 - tail)
    return below, e * DENSITY_AT_0


@triton.jit
def _logistic(z):  # type: ignore[no-untyped-def]
    return 1 / (1 + tl.exp2(z * -LOG2E))


@triton.jit
def _value_and_slope(h, KIND: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the activation makes of h (of the gate, for swiglu), and the derivative of that."""
    if KIND == GELU:
        s, density = _normal(h, EXACT)
        slope = s + h * density
    elif KIND == TANH_GELU:
        square = h * h
        s = _logistic(h * (1 + square * CUBIC) * TANH_SLOPE)
        slope = s + h * s * (1 - s) * (TANH_SLOPE * (1 + square * (3 * CUBIC)))
    elif KIND == RELU2:
        s = tl.where(h < 0, 0.0, h)  # NaN stays NaN
        slope = 2 * s
    else:
        s = _logistic(h)
        slope = s + h * s * (1 - s)
    return h * s, slope


@triton.jit
def _place(blocks, width, KIND: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where this program's entries begin in h and in a, their offsets from there, and which exist."""
    program = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    if KIND == SWIGLU:  # a row of h is a row of gates, then one of values
        first = (program % blocks) * BLOCK
        in_a = program // blocks * width + first
        in_h = in_a + program // blocks * width
    else:
        first = program * BLOCK
        in_a = first
        in_h = first
    mask = lanes < BLOCK if EVEN else lanes < width - first
    return in_h, in_a, lanes, mask


@triton.jit(do_not_specialize=["blocks"])
def _activate(  # type: ignore[no-untyped-def]
    h, a, blocks, width, KIND: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr
):
    in_h, in_a, lanes, mask = _place(blocks, width, KIND, BLOCK, EVEN)
    value, _ = _value_and_slope(tl.load(h + in_h + lanes, mask=mask).to(tl.float32), KIND, EXACT)
    if KIND == SWIGLU:
        value *= tl.load(h + in_h + width + lanes, mask=mask).to(tl.float32)
    tl.store(a + in_a + lanes, value.to(a.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["blocks"])
def _activate_backward(  # type: ignore[no-untyped-def]
    h, da, dh, a, blocks, width, KIND: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr
):
    """dh, which may be da, and a where it is asked for."""
    in_h, in_a, lanes, mask = _place(blocks, width, KIND, BLOCK, EVEN)
    source = tl.load(h + in_h + lanes, mask=mask).to(tl.float32)
    d = tl.load(da + in_a + lanes, mask=mask).to(tl.float32)
    value, slope = _value_and_slope(source, KIND, EXACT)
    if KIND == SWIGLU:
        v = tl.load(h + in_h + width + lanes, mask=mask).to(tl.float32)
        tl.store(dh + in_h + width + lanes, (d * value).to(dh.dtype.element_ty), mask=mask)
        d *= v
        value *= v
    tl.store(dh + in_h + lanes, (d * slope).to(dh.dtype.element_ty), mask=mask)
    if a is not None:
        tl.store(a + in_a + lanes, value.to(a.dtype.element_ty), mask=mask)


def _launch(like: Tensor, kind: str, settings: dict[str, int]) -> tuple[int, dict[str, Any]]:
    """Programs and arguments for entries like those of a (N, hidden); without gates they are one long row."""
    rows, width = like.shape if kind == "swiglu" else (1, like.numel())
    block = settings["BLOCK"]
    blocks = triton.cdiv(width, block)
    arguments = {"KIND": CODES[kind], "EXACT": like.dtype == torch.float32, "EVEN": width % block == 0}
    return rows * blocks, {"blocks": blocks, "width": width, **arguments, **settings}


def activate(h: Tensor, kind: str) -> Tensor:
    """act(h) of a contiguous h (N, hidden)."""
    a = h.new_empty(h.shape[0], h.shape[1] // (2 if kind == "swiglu" else 1))
    programs, arguments = _launch(a, kind, FORWARD)
    if programs:
        _activate[(programs,)](h, a, **arguments)
    return a


def activate_backward(h: Tensor, da: Tensor, kind: str, again: bool) -> tuple[Tensor, Any]:
    """dh from contiguous h and da, whose memory it may take, and act(h) once more if `again`, else None."""
    dh = torch.empty_like(h) if kind == "swiglu" else da
    a = torch.empty_like(da) if again else None
    programs, arguments = _launch(da, kind, BACKWARD)
    if programs:
        _activate_backward[(programs,)](h, da, dh, a, **arguments)
    return dh, a


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b with the sums written in `dtype`, which may be wider than the factors'."""
    if a.dtype == dtype:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))  # the CPU has no such product


def unwritten_rows(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """Unwritten memory for y."""
    return x.new_empty(x.shape[0], weight.shape[0])


def _unwritten_gradients(dy: Tensor, x: Tensor, rounded: Tensor, dtype: torch.dtype, *others: Any) -> Any:
    """Of x, W and b; whether they are asked for are the last three arguments."""
    for_x, for_weight, for_bias = others[-3:]
    dw = dy.new_empty(rounded.shape if for_weight else 0, dtype=dtype)
    return dy.new_empty(x.shape if for_x else 0), dw, dy.new_empty(dy.shape[1] if for_bias else 0, dtype=dtype)


def _layer(x: Tensor, weight: Tensor, bias: Tensor | None, rounded: Tensor, kind: str | None) -> Tensor:
    """act(x) W^T + b, x itself without a `kind`; `rounded` is the weight, which is there for its gradient, as x is."""
    with torch.autocast(x.device.type, enabled=False):
        a = activate(x.contiguous(), kind) if kind else x
        return F.linear(a, rounded, None if bias is None else bias.to(x.dtype))


@operator("linear_backward", fake=_unwritten_gradients)
def _backward(
    dy: Tensor, x: Tensor, rounded: Tensor, dtype: torch.dtype, kind: str | None,
    for_x: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dW and db; where one is not asked for, an empty tensor, as operators return tensors only."""
    dy = dy.contiguous()
    with torch.autocast(dy.device.type, enabled=False):
        dx, a = torch.mm(dy, rounded) if for_x else dy.new_empty(0), x
        if kind and for_x:
            dx, a = activate_backward(x.contiguous(), dx, kind, for_weight)
        elif kind and for_weight:
            a = activate(x.contiguous(), kind)
        dw = product(dy.t(), a, dtype) if for_weight else dy.new_empty(0, dtype=dtype)
        db = dy.sum(0, dtype=torch.float32).to(dtype) if for_bias else dy.new_empty(0, dtype=dtype)
        return dx, dw, db


_linear, _activated = (operator(name, unwritten_rows)(_layer) for name in ("linear", "activated_linear"))
for _forward in (_linear, _activated):
    differentiable(
        _forward,
        keep=lambda inputs, _: ((inputs[0], inputs[3]), (inputs[1].dtype, inputs[4])),
        gradients=lambda needs, kept, constants, dy: _backward(dy, *kept, *constants, *needs[:3]),
    )


# Rounded copies made beforehand, by the identity of the weight, with what tells whether it has changed since; one
# dictionary per thread of execution.
_Copies = dict[int, tuple[Tensor, int, int]]
_COPIES: ContextVar[_Copies | None] = ContextVar("stepformer_rounded_weights", default=None)


@contextlib.contextmanager
def rounded_together(weights: list[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Round weights in a few launches, for all layers inside; one that is used twice also has one copy, not two."""
    with torch.no_grad():
        copies = [torch.empty_like(w, dtype=dtype) for w in weights]
        if copies:
            torch._foreach_copy_(copies, weights)
    before = _COPIES.set({id(w): (c, w._version, w.data_ptr()) for w, c in zip(weights, copies, strict=True)})
    try:
        yield
    finally:
        _COPIES.reset(before)


def rounded_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`: a copy made beforehand if there is one and the weight is still what it was."""
    known = None if torch.compiler.is_compiling() else _COPIES.get()
    if known is not None and id(weight) in known:
        copy, version, address = known[id(weight)]
        if copy.dtype == dtype and weight._version == version and weight.data_ptr() == address:
            return copy
    return weight.detach().to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b for tokens (..., in) in their dtype; the gradients of W and b keep the digits that W's dtype has."""
    y: Tensor = _linear(x.flatten(0, -2), weight, bias, rounded_weight(weight, x.dtype), None)
    return y.view(*x.shape[:-1], weight.shape[0])


def activated_linear(h: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """act(h) W^T + b for h (..., hidden), with `kind` a key of CODES; keeps h for the backward, not act(h)."""
    y: Tensor = _activated(h.flatten(0, -2), weight, bias, rounded_weight(weight, h.dtype), kind)
    return y.view(*h.shape[:-1], weight.shape[0])
