"""Operators on rows of tokens against the same in fp64.

fp32: 1e-5 of the norm (measured 1e-7: sums of some hundred terms). bf16: 1e-2, one rounding of 2^-9 when written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from draws import seeded
from stepformer.ops import token_rows
from stepformer.ops.row_printing import load_kernel
from stepformer.ops.token_rows import row_dot, scale_rows

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FP32, BF16 = 1e-5, 2e-2  # bf16: 2^-8 a rounding, 5e-3 seen
SINGLE, HALF = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that nobody has written is NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def draw(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = SINGLE) -> Tensor:
    """Numbers of `dtype` that require a gradient."""
    values = torch.randn(shape, generator=seeded(seed), dtype=torch.float64)
    return values.to(device, dtype).requires_grad_()


def check(function: Callable[..., Tensor], twin: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Value and gradients of both; a gradient has the dtype of its input."""
    found = function(*inputs)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    expected = twin(*wide)
    weight = draw(*found.shape, seed=9, device=found.device.type).detach().to(found.dtype)
    asked = [i for i, t in enumerate(inputs) if t.requires_grad]
    slopes = torch.autograd.grad(found, [inputs[i] for i in asked], weight)
    assert [t.dtype for t in slopes] == [inputs[i].dtype for i in asked]
    wanted = torch.autograd.grad(expected, [wide[i] for i in asked], weight.double())
    for a, b in zip((found, *slopes), (expected, *wanted), strict=True):
        assert a.shape == b.shape
        error = (a.double() - b).norm() / b.norm()
        assert error <= (BF16 if a.dtype == HALF else FP32), float(error)


def dot_twin(a: Tensor, b: Tensor) -> Tensor:
    return 0.3 * (a * b).sum(dim=-1)


def scale_twin(x: Tensor, s: Tensor) -> Tensor:
    return x * s[..., None]


SHAPES = [(2, 3, 1), (7, 50), (6,), (2, 2, 3, 16)]
SHAPES += [pytest.param(s, marks=pytest.mark.slow, id=str(s)) for s in ((1, 2, 300), (5, 768), (2, 1030))]


@pytest.mark.parametrize("dtypes", [(SINGLE, SINGLE), (HALF, SINGLE), (HALF, HALF)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_row_dot(shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    a, b = (draw(*shape, seed=i, dtype=d) for i, d in enumerate(dtypes))
    assert row_dot(a, b).dtype == SINGLE
    check(lambda a, b: row_dot(a, b, 0.3), dot_twin, [a, b])


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scale_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, s = draw(*shape, dtype=dtype), draw(*shape[:-1], seed=1)
    assert scale_rows(x, s).dtype == dtype
    check(scale_rows, scale_twin, [x, s])
    check(scale_rows, scale_twin, [x, s.detach()])
    check(scale_rows, scale_twin, [x.detach(), s])


@pytest.mark.parametrize("out", [SINGLE, HALF], ids=str)
def test_scale_rows_into_another_dtype(out: torch.dtype) -> None:
    x, s = draw(2, 3, 20, dtype=HALF if out == SINGLE else SINGLE), draw(2, 3, seed=1)
    assert scale_rows(x, s, out).dtype == out
    check(lambda x, s: scale_rows(x, s, out), scale_twin, [x, s])


@pytest.mark.parametrize("shape", [(5,), (3, 1), ()], ids=str)
@pytest.mark.parametrize("learned", [True, False])
def test_one_factor_for_several_rows(shape: tuple[int, ...], learned: bool) -> None:
    """Its gradient is the sum over them, in its own shape."""
    s = draw(*shape, seed=1).detach().requires_grad_(learned)
    check(scale_rows, scale_twin, [draw(3, 5, 20), s])


def test_views() -> None:
    """Rows that are not contiguous, factors of every second column, and gradients that are expanded."""
    wide, tall = draw(2, 5, 40), draw(2, 20, 5, seed=1)
    check(lambda w, t: row_dot(w[..., ::2], t.mT, 0.3), lambda w, t: dot_twin(w[..., ::2], t.mT), [wide, tall])
    check(
        lambda w, s: scale_rows(w[:, 1:, :20], s[:, ::2]),
        lambda w, s: scale_twin(w[:, 1:, :20], s[:, ::2]),
        [wide, draw(2, 8, seed=2)],
    )
    x, s = draw(2, 5, 8), draw(2, 5, seed=1)
    scale_rows(x, s).sum().backward()
    torch.testing.assert_close(s.grad, x.detach().sum(dim=-1))
    torch.testing.assert_close(x.grad, s.detach()[..., None].expand_as(x))


AT_ONCE = """
@triton.jit
def statistics(x, out, D: tl.constexpr, CHUNK: tl.constexpr):
    columns = tile_columns(1, CHUNK)
    rows = tl.program_id(0) + tl.arange(0, 1)
    column = columns < D
    at = over_row(rows) * D + columns
    p = tl.load(x + at, mask=column, other=0.0)
    mean, r = row_statistics_at_once(p, column, 1e-5, True, D)
    tl.store(out + at, standardised(p, mean, r), mask=column)
"""


@pytest.mark.parametrize("mean", [0.0, 1.0, 100.0])
def test_a_norm_in_one_pass_bears_a_large_mean(mean: float) -> None:
    """In deviations. No more than four times the error of torch's own LayerNorm (at 100: 8e-6; a difference of the mean
    square and the squared mean was off by 2e-2).
    """
    x = (torch.randn(4, 200, generator=seeded(3), dtype=torch.float64) + mean).float()
    x = x.to("cuda" if torch.cuda.is_available() else "cpu")
    found, exact = torch.empty_like(x), torch.nn.functional.layer_norm(x.double(), (200,))
    load_kernel("statistics", AT_ONCE)[(4,)](x, found, D=200, CHUNK=256)
    theirs = (torch.nn.functional.layer_norm(x, (200,)) - exact).abs().max()
    assert (found - exact).abs().max() <= 4 * theirs + 2e-6


def test_no_rows() -> None:
    assert row_dot(draw(0, 5), draw(0, 5)).shape == (0,)
    assert scale_rows(draw(0, 5), draw(0)).shape == (0, 5)


def test_the_operators_are_registered_properly() -> None:
    """Schema, fake tensors and autograd as torch checks them."""
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    a, b, s = draw(2, 3, 5), draw(2, 3, 5, seed=1), draw(2, 3, seed=2)
    for program, tensors in ((token_rows._dot(0.5), [a, b]), (token_rows.SCALED, [a, s])):
        arguments = (program.text, tensors, HALF, HALF, True)
        torch.library.opcheck(torch.ops.stepformer.row_pass.default, arguments, test_utils=checks)


def test_compiled_without_a_break() -> None:
    def both(a: Tensor, b: Tensor) -> Tensor:
        return scale_rows(a, row_dot(a, b, 0.5))

    torch._dynamo.reset()
    inputs = [draw(2, 3, 5), draw(2, 3, 5, seed=1)]
    compiled: Any = torch.compile(both, backend="aot_eager", fullgraph=True)
    for found, expected in zip(
        torch.autograd.grad(compiled(*inputs).sum(), inputs),
        torch.autograd.grad(both(*inputs).sum(), inputs),
        strict=True,
    ):
        assert torch.equal(found, expected)


class TestOnTheDevice:
    pytestmark = on_gpu

    @pytest.mark.parametrize("dtypes", [(SINGLE, SINGLE), (SINGLE, HALF), (HALF, HALF)], ids=str)
    @pytest.mark.parametrize("shape", [*SHAPES, (32, 1024, 768), (3, 517, 300), (1000, 5000)], ids=str)
    def test_both(self, shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        a, b = (draw(*shape, seed=i, dtype=d, device="cuda") for i, d in enumerate(dtypes))
        check(lambda a, b: row_dot(a, b, 0.3), dot_twin, [a, b])
        check(lambda x, s: scale_rows(x, s, dtypes[1]), scale_twin, [a, draw(*shape[:-1], seed=2, device="cuda")])
        if len(shape) == 3:
            shared = draw(shape[1], seed=2, device="cuda")
            check(scale_rows, scale_twin, [a, shared])
            check(scale_rows, scale_twin, [a, shared.detach()])

    def test_same_bits_again(self) -> None:
        a, b = (draw(8, 300, 768, seed=i, device="cuda", dtype=HALF) for i in range(2))
        runs = []
        for _ in range(2):
            out = scale_rows(a, row_dot(a, b))
            runs.append((out, *torch.autograd.grad(out, (a, b), torch.ones_like(out))))
        assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
