"""Symbols: what a rule's own methods meet instead of tensors when a fused pass is made from them.

A symbol is a node of an expression over one token's rows. It has one of these kinds:

    num   one number for all tokens (a coefficient)       vec   one per column (a gain)
    stat  one per token (a mean)                          row   one per token and column (a stream, an answer)
    other anything else, such as a matrix per token: only `record`ed functions take it

Equal expressions are one object. Arithmetic simplifies a little as it builds: constants fold, numbers gather in front
of rows, and a sum that an oracle's answer enters is led by it,

    a v + b g = b ((a / b) v + g),

so that v and g have one gradient, and what is carried to that sum is (a / b) v. A norm sees a factor of its argument
only through its eps: hat(c y; eps) = sign(c) hat(y; eps / c^2).

What symbols do not know raises `UntraceableError` with a sentence that ends "... since": it says why a rule runs as it
is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

RANK = {"num": 0, "vec": 1, "stat": 2, "row": 3, "other": 4}
FUNCTIONS = ("sqrt", "rsqrt", "exp", "log", "log1p", "expm1", "tanh", "sigmoid", "softplus", "abs", "sign", "relu")
SMOOTH_POSITIVE = ("softplus", "sigmoid", "exp", "phi")


class UntraceableError(Exception):
    """What a row program cannot do; the sentence says what."""


class Symbol:
    """A value of a row program; `key` is a digest of the whole expression, the same in every process."""

    __slots__ = ("__weakref__", "args", "attr", "key", "kind", "op")
    op: str
    args: tuple[Symbol, ...]
    attr: Any
    kind: str
    key: str

    def __add__(self, other: Any) -> Symbol:
        return add(self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Symbol:
        return add(self, mul(-1.0, other))

    def __rsub__(self, other: Any) -> Symbol:
        return add(other, mul(-1.0, self))

    def __mul__(self, other: Any) -> Symbol:
        return mul(self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Symbol:
        return mul(self, rec(other))

    def __rtruediv__(self, other: Any) -> Symbol:
        return mul(other, rec(self))

    def __neg__(self) -> Symbol:
        return mul(-1.0, self)

    def __pow__(self, power: Any) -> Symbol:
        roots = {0.5: "sqrt", -0.5: "rsqrt"}
        if power in roots:
            return function(roots[power], self)
        if power not in (-1, 1, 2, 3):
            raise UntraceableError(f"it takes the power {power!r}")
        return rec(self) if power == -1 else mul(self, self ** (power - 1)) if power > 1 else self

    def _compared(self, other: Any) -> Symbol:
        raise UntraceableError("it compares values of a tensor")

    __lt__ = __le__ = __gt__ = __ge__ = _compared

    def __bool__(self) -> bool:
        raise UntraceableError("it decides by the value of a tensor")

    def __getitem__(self, key: Any) -> Symbol:
        raise UntraceableError("it indexes a tensor, and a fused pass has whole rows only")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "dtype":
            return None  # whatever a stream is carried in
        if name == "shape" and self.kind == "row":
            return RowShape()
        method = METHODS.get(name)
        if method is None:
            raise UntraceableError(f"it uses Tensor.{name}")
        return lambda *args, **named: method(self, *args, **named)

    @classmethod
    def __torch_function__(cls, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(called, "__name__", str(called))
        method = METHODS.get(name)
        if method is None:
            raise UntraceableError(f"it calls torch's {name}")
        return method(*args, **(kwargs or {}))

    def __repr__(self) -> str:
        inside = ", ".join(map(repr, self.args))
        if self.op == "const":
            return repr(self.attr)
        return f"{self.attr}" if not self.args else f"{self.op}({inside})"


_known: WeakValueDictionary[tuple[Any, ...], Symbol] = WeakValueDictionary()


def make(op: str, *args: Symbol, attr: Any = None, kind: str | None = None) -> Symbol:
    """The one symbol for this expression."""
    if kind is None:
        kinds = {a.kind for a in args}
        if "other" in kinds:
            raise UntraceableError("it computes with a stream that is not one row per token")
        kind = "row" if {"vec", "stat"} <= kinds else max(kinds, key=RANK.__getitem__)
    if _recording.recorder is not None and not torch.is_grad_enabled():
        raise UntraceableError("it computes something without gradients")
    key = (op, tuple(map(id, args)), attr, kind)
    found = _known.get(key)
    if found is None:
        found = Symbol.__new__(Symbol)
        found.op, found.args, found.attr, found.kind = op, args, attr, kind
        found.key = hashlib.sha1(f"{op} {attr!r} {kind} {[a.key for a in args]}".encode()).hexdigest()
        _known[key] = found
    return found


def leaf(kind: str, name: str, *, answer: bool = False) -> Symbol:
    """An input by its name; `answer` if it is an oracle's."""
    return make("answer" if answer else "in", attr=name, kind=kind)


def lift(value: Any) -> Symbol:
    """A Python number as a symbol."""
    if isinstance(value, Symbol):
        return value
    if isinstance(value, bool):  # also what == makes of a symbol
        raise UntraceableError("it computes with a truth value")
    if isinstance(value, int | float):
        return make("const", attr=float(value), kind="num")
    raise UntraceableError(f"it mixes in a {type(value).__name__} that is neither a stream nor a coefficient")


def is_const(a: Symbol, value: float | None = None) -> bool:
    return a.op == "const" and (value is None or a.attr == value)


def is_led(a: Symbol) -> bool:
    """Whether it is an oracle's answer, or a sum of answers."""
    return a.op == "answer" or (a.op == "add" and all(map(is_led, a.args)))


def positive(a: Symbol) -> bool:
    """Whether a number is known to be positive."""
    if a.op == "const":
        return bool(a.attr > 0)
    if a.op == "add" and any(is_const(b, 1.0) for b in a.args):  # 1 - sigmoid
        other = next(b for b in a.args if not is_const(b, 1.0))
        if other.op == "mul" and is_const(other.args[0], -1.0) and other.args[1].op == "sigmoid":
            return True
    return a.op in SMOOTH_POSITIVE or (a.op in ("mul", "rec", "add", "detach") and all(map(positive, a.args)))


def nonzero(a: Symbol) -> bool:
    if a.op == "mul" and is_const(a.args[0]):
        return a.args[0].attr != 0 and nonzero(a.args[1])
    return positive(a) or (a.op == "const" and a.attr != 0)


def factored(a: Symbol) -> tuple[Symbol, Symbol]:
    """A number and the rest of a product."""
    if a.op == "mul" and a.args[0].kind == "num" and a.kind != "num":
        return a.args[0], a.args[1]
    return lift(1.0), a


def add(a: Any, b: Any) -> Symbol:
    a, b = lift(a), lift(b)
    if is_const(a, 0.0):
        return b
    if is_const(b, 0.0):
        return a
    if a.op == b.op == "const":
        return lift(a.attr + b.attr)
    if a is b:
        return mul(2.0, a)
    for lead, other in ((b, a), (a, b)):
        c, g = factored(lead)
        d, y = factored(other)
        if is_led(g) and not is_const(c, 1.0) and not is_const(d, 1.0) and nonzero(c) and y.kind == "row":
            return mul(c, add(mul(mul(d, rec(c)), y), g))
    return make("add", a, b)


def mul(a: Any, b: Any) -> Symbol:
    a, b = lift(a), lift(b)
    if RANK[a.kind] > RANK[b.kind] or (a.kind == b.kind and b.op == "const"):
        a, b = b, a
    if is_const(a, 1.0):
        return b
    if is_const(a, 0.0) or is_const(b, 0.0):
        return lift(0.0)
    if a.op == b.op == "const":
        return lift(a.attr * b.attr)
    if a.op == "const" and b.op == "mul" and b.args[0].op == "const":
        return mul(a.attr * b.args[0].attr, b.args[1])
    if b.kind != "num":  # numbers meet numbers, in front
        c, y = factored(b)
        if y is not b:
            return mul(mul(a, c), y) if a.kind == "num" else mul(c, mul(a, y))
        c, y = factored(a)
        if y is not a:
            return mul(c, mul(y, b))
    return make("mul", a, b)


def rec(a: Any) -> Symbol:
    a = lift(a)
    if a.op == "const":
        return lift(math.inf if a.attr == 0 else 1.0 / a.attr)
    if a.op == "rec":
        return a.args[0]
    c, y = factored(a)
    return make("rec", a) if y is a else mul(rec(c), rec(y))


def function(name: str, a: Any, attr: Any = None) -> Symbol:
    """A function of each number by itself."""
    return make(name, lift(a), attr=attr)


def inverse_width() -> Symbol:
    """One over the number of columns."""
    return make("inv_d", attr="1/d", kind="num")


class RowShape:
    """The shape of a row: its last entry is known, the others belong to all tokens together."""

    def __getitem__(self, place: Any) -> Any:
        if place not in (-1, 2, slice(-1, None)):
            raise UntraceableError("it asks how many tokens there are")
        width = rec(inverse_width())
        return (width,) if isinstance(place, slice) else width


def row_sum(a: Any) -> Symbol:
    """Over a token's row, one number per token."""
    if lift(a).kind != "row":
        raise UntraceableError("it sums over something that is not a row")
    c, y = factored(lift(a))
    return mul(c, make("sum", y, kind="stat"))


def standardise(p: Any, eps: Any, *, centred: bool) -> Symbol:
    """(p - mean) / sqrt(variance + eps), or p over its root mean square."""
    c, y = factored(lift(p))
    if y.kind != "row":
        raise UntraceableError("it normalises something that is not a row")
    if is_const(c, 1.0):
        sign, eps = lift(1.0), lift(eps)
    else:
        sign, eps = lift(1.0) if positive(c) else function("sign", c), mul(eps, rec(mul(c, c)))
    mean = (make("mean", y, kind="stat"),) if centred else ()
    r = make("rdev", y, eps, *mean, attr=centred, kind="stat")
    return mul(sign, make("hat", y, r, *mean, kind="row"))


# functions that a pass cannot do: they are called around it


class _Recording(threading.local):
    recorder: Any = None


_recording = _Recording()


@contextlib.contextmanager
def recording(recorder: Any) -> Iterator[None]:
    """Inside, `record` tells this recorder, and whoever stops gradients is not followed."""
    before, _recording.recorder = _recording.recorder, recorder
    try:
        with torch.enable_grad():
            yield
    finally:
        _recording.recorder = before


def record(
    name: str, rows: Sequence[Symbol], kinds: Sequence[str], numbers: Sequence[Any] = (), **settings: Any
) -> list[Symbol]:
    """The results, of these kinds, of a function that will be called with tensors for `rows` and for `numbers`."""
    if _recording.recorder is None:
        raise UntraceableError(f"nobody records {name} here")
    found: list[Symbol] = _recording.recorder.record(
        name, list(rows), list(kinds), [lift(n) for n in numbers], settings
    )
    return found


# what torch functions and methods of tensors mean here


def _over_rows(a: Any, dim: Any = None, keepdim: bool = False, **other: Any) -> Symbol:
    if dim not in (-1, (-1,), [-1]) or not keepdim or other:
        raise UntraceableError("it sums over something else than a token's own row, kept as a column")
    return row_sum(a)


def _norm(a: Any, weight: Any = None, bias: Any = None, eps: float | None = 1e-5, *, centred: bool) -> Symbol:
    if eps is None:
        raise UntraceableError("it normalises with an eps that depends on the dtype: rms_norm takes one, eps=1e-6")
    found = standardise(a, eps, centred=centred)
    found = found if weight is None else mul(weight, found)
    return found if bias is None else add(found, bias)


def _clamp(a: Any, min: float | None = None, max: float | None = None) -> Symbol:
    return function("clamp", a, (-math.inf if min is None else float(min), math.inf if max is None else float(max)))


def _is_inf(a: Any) -> Symbol:
    a = lift(a)
    return lift(float(a.op == "const" and math.isinf(a.attr)))  # a learned coefficient is finite


def _where(condition: Any, a: Any, b: Any) -> Symbol:
    if isinstance(condition, bool) or not is_const(lift(condition)):
        raise UntraceableError("it chooses by the value of a tensor")
    return lift(a) if lift(condition).attr else lift(b)


def _relu(a: Any, inplace: bool = False) -> Symbol:
    if inplace:
        raise UntraceableError("it changes a tensor in place")
    return function("relu", a)


def _softplus(a: Any, beta: float = 1, threshold: float = 20) -> Symbol:
    if (beta, threshold) != (1, 20):
        raise UntraceableError("it calls softplus with a beta or threshold of its own")
    return function("softplus", a)


def _detach(a: Any) -> Symbol:
    a = lift(a)
    if a.kind != "num":
        raise UntraceableError("it detaches a row")
    return a if a.op in ("const", "detach") else function("detach", a)


def _same(a: Any, *_: Any, **__: Any) -> Any:
    """What concerns the memory or the dtype of a tensor alone."""
    return a


_ADD, _LESS = lambda a, b: add(a, b), lambda a, b: add(a, mul(-1.0, b))
_OVER, _NEGATIVE = lambda a, b: mul(a, rec(b)), lambda a: mul(-1.0, a)

METHODS: dict[str, Callable[..., Any]] = {
    **{name: (lambda a, name=name: function(name, a)) for name in FUNCTIONS},
    "relu": _relu,
    "softplus": _softplus,
    **dict.fromkeys(("add", "__add__", "__radd__"), _ADD),
    **dict.fromkeys(("sub", "subtract", "__sub__"), _LESS),
    **dict.fromkeys(("rsub", "__rsub__"), lambda a, b: _LESS(b, a)),
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), mul),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), _OVER),
    **dict.fromkeys(("__rtruediv__",), lambda a, b: _OVER(b, a)),
    **dict.fromkeys(("neg", "negative", "__neg__"), _NEGATIVE),
    **dict.fromkeys(("to", "float", "double", "type_as", "contiguous"), _same),
    **dict.fromkeys(("clamp", "clip"), _clamp),
    "clamp_min": lambda a, min: _clamp(a, min),
    "clamp_max": lambda a, max: _clamp(a, None, max),
    "reciprocal": rec,
    "square": lambda a: mul(a, a),
    "pow": lambda a, power: lift(a) ** power,
    "lerp": lambda a, b, weight: add(a, mul(weight, _LESS(b, a))),
    "sum": _over_rows,
    "mean": lambda a, *at, **named: mul(inverse_width(), _over_rows(a, *at, **named)),
    "layer_norm": lambda a, shape, **named: _norm(a, **named, centred=True),
    "rms_norm": lambda a, shape, **named: _norm(a, **named, centred=False),
    "isinf": _is_inf,
    "where": _where,
    "detach": _detach,
    "ones_like": lambda a, **_: lift(1.0),
    "zeros_like": lambda a, **_: lift(0.0),
}
