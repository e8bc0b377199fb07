"""Functions that Triton does not have, for generated kernels, in fp32 and fp64; and how each operation is printed."""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from stepformer.ops.common import quotient

SERIES_BELOW = tl.constexpr(0.1)


@triton.jit
def log1p(y):  # type: ignore[no-untyped-def]
    """log(1 + y) loses the digits of a small y; log(1 + y) / ((1 + y) - 1) loses the same ones (Kahan)."""
    more = 1 + y
    lost = tl.where(more == 1, 1.0, more - 1)
    return tl.where(more == 1, y, tl.log(more) * (y / lost))


@triton.jit
def softplus(y):  # type: ignore[no-untyped-def]
    return tl.maximum(y, 0.0) + log1p(tl.exp(-tl.abs(y)))


@triton.jit
def sigmoid(y):  # type: ignore[no-untyped-def]
    return 1 / (1 + tl.exp(-y))


@triton.jit
def expm1(y):  # type: ignore[no-untyped-def]
    """(e - 1) y / log(e) for e = exp(y), which forgives the rounding of e (Kahan)."""
    e = tl.exp(y)
    near = (e == 1) | (e <= 0)
    return tl.where(e == 1, y, tl.where(e <= 0, -1.0, (e - 1) * (y / tl.log(tl.where(near, 2.0, e)))))


@triton.jit
def tanh(y):  # type: ignore[no-untyped-def]
    e = expm1(-2 * tl.abs(y))
    size = -e / (2 + e)
    return tl.where(y < 0, -size, size)


@triton.jit
def sign(y):  # type: ignore[no-untyped-def]
    return tl.where(y < 0, -1.0, tl.where(y > 0, 1.0, 0.0))


@triton.jit
def safe_rec(y):  # type: ignore[no-untyped-def]
    """1 / y of a root, and 0 where that is 0."""
    return tl.where(y > 0, 1 / tl.where(y > 0, y, 1.0), 0.0)


@triton.jit
def phi(s, ORDER: tl.constexpr):  # type: ignore[no-untyped-def]
    """phi_k(s) = sum_j (-s)^j / (j + k)!, by phi_0 = e^-s and phi_{k+1} = (1 / k! - phi_k) / s away from 0."""
    near = tl.abs(s) < SERIES_BELOW
    away = tl.where(near, 1.0, s)
    value = -expm1(-away) / away
    factorial = 1.0
    for k in tl.static_range(1, ORDER):
        factorial *= k
        value = (1 / factorial - value) / away
    # (-s)^j / (j + k)! from the last of ten terms on, as 1/k! (1 - s/(k+1) (1 - s/(k+2) (...)))
    series = s * 0 + 1
    last = 1.0
    for j in tl.static_range(0, 10):
        series = 1 - s / (ORDER + 10 - j) * series
    for k in tl.static_range(1, ORDER + 1):
        last *= k
    return tl.where(near, series / last, value)


def bounds(attr: tuple[float, float], value: str) -> str:
    """A value between two numbers, of which some may be infinite."""
    low, high = attr
    text = value if math.isinf(low) else f"tl.maximum({value}, {low!r})"
    return text if math.isinf(high) else f"tl.minimum({text}, {high!r})"


def within(attr: tuple[float, float], value: str) -> str:
    """1 where a value lies between two numbers, else 0."""
    low, high = attr
    tests = [f"({value} >= {low!r})"] if not math.isinf(low) else []
    tests += [f"({value} <= {high!r})"] if not math.isinf(high) else []
    return f"tl.where({' & '.join(tests) or f'({value} == {value})'}, 1.0, 0.0)"


FORMS = {
    "rec": "1 / {0}", "quotient": "quotient(1.0, {0})", "safe_rec": "safe_rec({0})", "sqrt": "tl.sqrt({0})",
    "rsqrt": "1 / tl.sqrt({0})", "exp": "tl.exp({0})", "log": "tl.log({0})", "log1p": "log1p({0})",
    "expm1": "expm1({0})", "tanh": "tanh({0})", "sigmoid": "sigmoid({0})", "softplus": "softplus({0})",
    "abs": "tl.abs({0})", "sign": "sign({0})", "relu": "tl.maximum({0}, 0.0)", "step": "tl.where({0} > 0, 1.0, 0.0)",
    "detach": "{0}",
}  # fmt: skip


def printed(op: str, attr: Any, args: list[str]) -> str:
    """An operation in Triton's language."""
    if op == "add":
        return f"{args[0]} - {args[1][1:]}" if args[1].startswith("-") else " + ".join(args)
    if op == "mul":
        return f"-{args[1]}" if args[0] == "-1.0" else " * ".join(args)
    if op == "clamp":
        return bounds(attr, args[0])
    if op == "inside":
        return within(attr, args[0])
    if op == "phi":
        return f"phi({args[0]}, {attr})"
    return FORMS[op].format(*args)


NAMES = {
    f.__name__: f for f in (log1p, softplus, sigmoid, expm1, tanh, sign, safe_rec, phi, quotient)
}  # what generated text may call
