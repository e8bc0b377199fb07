"""How close every tolerance of the tests came to failing: a pytest plug-in, used by tests/support/shaken.py.

`pytest -p margins --margins FILE -o enable_assertion_pass_hook=true` writes one line of JSON for each place in the
tests that compares floating-point numbers within a bound: the largest share of its bound that was used, and where.
Seen are `assert a < b` (and <=) between numbers, `pytest.approx`, `torch.testing.assert_close` and `allclose`.
"""

from __future__ import annotations

import ast
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._comparison import default_tolerances

tests = str(Path(__file__).resolve().parents[1])  # the folder whose lines count
# A bound above this is an amount (a loss, a share), not a tolerance.
LARGEST_TOLERANCE = 0.1

Place = tuple[str, int, str]
used: dict[Place, tuple[float, float, str]] = {}  # share of the bound, bound, test


def record(file: str, line: int, how: str, share: float, bound: float) -> None:
    place = (os.path.relpath(file, tests), line, how)
    if math.isfinite(share) and share > used.get(place, (-1.0,))[0]:
        used[place] = (share, bound, os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0])


def record_call(how: str, share: float, bound: float) -> None:
    """The place is the innermost line of the tests that led here."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(tests) and frame.f_code.co_filename != __file__:
            record(frame.f_code.co_filename, frame.f_lineno, how, share, bound)
            return
        frame = frame.f_back  # type: ignore[assignment]


# `assert a < b`: pytest says with which values it passed.

ARITHMETIC: dict[type, Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: a**b,
}


def number(node: ast.expr) -> float:
    """The value of an explained operand: a number, a tensor of one number, or arithmetic with those."""
    match node:
        case ast.Constant(value=float() | int() as value) if not isinstance(value, bool):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -number(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            return ARITHMETIC[type(op)](number(left), number(right))
        case ast.Call(args=[first, *_]):  # tensor(1., dtype=...), np.float64(1.)
            return number(first)
    raise ValueError


def comparisons(explanation: str) -> Iterator[tuple[float, float]]:
    """(value, bound) of every `value < bound` in the first line of an explanation."""
    try:
        tree = ast.parse(explanation.partition("\n")[0].strip(), mode="eval")
    except (SyntaxError, ValueError):
        return
    body = tree.body
    for node in body.values if isinstance(body, ast.BoolOp) and isinstance(body.op, ast.And) else [body]:
        if not isinstance(node, ast.Compare):
            continue
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            try:
                if isinstance(op, ast.Lt | ast.LtE):
                    yield number(left), number(right)
                elif isinstance(op, ast.Gt | ast.GtE):
                    yield number(right), number(left)
            except (ValueError, ZeroDivisionError, OverflowError):
                continue


def pytest_assertion_pass(item: pytest.Item, lineno: int, orig: str, expl: str) -> None:
    frame = sys._getframe(1)
    while frame is not None and not (frame.f_code.co_filename.startswith(tests) and frame.f_lineno >= lineno):
        frame = frame.f_back  # type: ignore[assignment]
    file = frame.f_code.co_filename if frame is not None else str(item.path)
    for value, bound in comparisons(expl):
        if 0 < bound <= LARGEST_TOLERANCE and not (">" in orig and "<" not in orig):
            record(file, lineno, "<", abs(value) / bound, bound)


# approx, assert_close, allclose


def wrap_approx() -> None:
    scalar: Any = type(pytest.approx(1.0))  # sequences, dictionaries and arrays compare number by number through it
    plain = scalar.__eq__

    def equal(self: Any, actual: Any) -> bool:
        result = plain(self, actual)
        try:
            bound = float(self.tolerance)
            if result and 0 < bound < math.inf:
                record_call("approx", float(abs(self.expected - actual)) / bound, bound)
        except (TypeError, ValueError):
            pass
        return result

    scalar.__eq__ = equal


def share_used(actual: Any, expected: Any, rtol: float, atol: float) -> float:
    a, b = torch.as_tensor(actual).detach(), torch.as_tensor(expected).detach()
    if not a.numel() or a.shape != b.shape or not (a.is_floating_point() or a.is_complex()):
        return 0.0
    off = (a.to(b.device).double() - b.double()).abs()
    share = off / (atol + rtol * b.double().abs())
    return float(torch.where(off == 0, 0.0, share).nan_to_num(0.0).max())


def wrap_closeness() -> None:
    plain_assert, plain_allclose = torch.testing.assert_close, torch.allclose

    def assert_close(actual: Any, expected: Any, **options: Any) -> None:
        __tracebackhide__ = True
        plain_assert(actual, expected, **options)
        if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
            rtol, atol = options.get("rtol"), options.get("atol")
            if rtol is None or atol is None:
                rtol, atol = default_tolerances(actual, expected)
            record_call("assert_close", share_used(actual, expected, rtol, atol), max(rtol, atol))

    def allclose(a: torch.Tensor, b: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-8, **options: Any) -> bool:
        result = plain_allclose(a, b, rtol=rtol, atol=atol, **options)
        if result:
            record_call("allclose", share_used(a, b, rtol, atol), max(rtol, atol))
        return result

    plain_numpy = np.testing.assert_allclose

    def assert_allclose(actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 0.0, **options: Any) -> None:
        plain_numpy(actual, desired, rtol=rtol, atol=atol, **options)
        wide = [np.asarray(x, dtype=np.float64) for x in (actual, desired)]
        record_call("assert_allclose", share_used(*wide, rtol, atol), max(rtol, atol))

    np.testing.assert_allclose = assert_allclose
    torch.testing.assert_close = assert_close  # type: ignore[assignment]
    torch.allclose = torch.Tensor.allclose = allclose  # type: ignore[assignment, method-assign]


# The option and the file.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--margins", metavar="FILE", help="write how much of each tolerance was used")


def pytest_configure(config: pytest.Config) -> None:
    global tests
    if config.getoption("--margins"):
        tests = str(config.rootpath / "tests")
        wrap_approx()
        wrap_closeness()


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--margins")
    if not path:
        return
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    with Path(f"{path}.{worker}").open("w") as out:
        for (file, line, how), (share, bound, test) in used.items():
            row = {"file": file, "line": line, "how": how, "share": share, "bound": bound, "test": test}
            out.write(json.dumps(row) + "\n")
