"""Attention over depth by its kernels against the same in fp64, through chains of calls.

fp32: 1e-5 of the norm (3.6e-6 measured, at the end of six calls). A chain of 24 calls amplifies rounding, with strong
maps without bounds: with those of the tests of 24 calls plain PyTorch is 5e-6 from fp64 in fp32 and 6e-2 in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from draws import seeded
from stepformer.ops import kernels
from stepformer.ops.depth_attention import DepthAttention, attend_depth

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SINGLE, HALF = torch.float32, torch.bfloat16
EPS = 1e-5
Places = list[list[int]]


def drawn(*shape: int, seed: int, scale: float = 1.0, device: str = "cpu", dtype: torch.dtype = SINGLE) -> Tensor:
    values = scale * torch.randn(shape, generator=seeded(seed), dtype=torch.float64)
    return values.to(device, dtype).requires_grad_()


def needs_of(calls: int, size: int) -> Places:
    """The places of the sources of each call after the first, in blocks of `size` calls; answer l has place l + 1."""
    ends = [*range(size, calls, size), calls]
    found = []
    for done in range(1, calls + 1):
        finished = [end for end in ends if end <= done]
        found.append([0, *finished] + ([done] if done not in finished else []))
    return found


def chain(attend: Callable[..., tuple[Tensor, Tensor]], needs: Places, x: Tensor, maps: Sequence[Tensor]) -> Tensor:
    """Each answer is tanh of a matrix times the point; the running sum of a block has the place of its last answer."""
    rows, h = {0: x}, x
    for done, (sources, weight) in enumerate(zip(needs, maps, strict=True), start=1):
        g = torch.tanh(h @ weight).to(x.dtype)
        before = needs[done - 2] if done > 1 else [0]
        running = done > 1 and before[-1] not in sources
        rows[done] = rows[done - 1] + g if running else g
        h, rows[sources[-1]] = attend(sources, [rows[at] for at in sources])
    return h


def errors(
    calls: int, size: int, d: int, shape: tuple[int, ...] = (2, 3), device: str = "cpu", dtype: torch.dtype = SINGLE,
    strength: float = 1.0,
) -> list[float]:  # fmt: skip
    """Of the result and of all gradients, in their norms."""
    x = drawn(*shape, d, seed=0, device=device, dtype=dtype)
    vectors = [drawn(d, seed=i, scale=(1 + strength) / d**0.5, device=device) for i in range(1, calls + 1)]
    maps = [drawn(d, d, seed=50 + i, scale=strength * d**-0.5, device=device, dtype=dtype) for i in range(calls)]
    needs = needs_of(calls, size)
    own = DepthAttention(needs, vectors, EPS, dtype)
    found = chain(own, needs, x, maps)
    assert own.history is not None  # the kernels have run
    assert found.dtype == dtype
    weight = drawn(*shape, d, seed=99, device=device, dtype=dtype).detach()
    slopes = torch.autograd.grad(found, [x, *vectors, *maps], weight)
    wide = [t.detach().double().requires_grad_() for t in (x, *vectors, *maps)]
    with kernels.off():
        twin = DepthAttention(needs, wide[1 : calls + 1], EPS, torch.float64)
        expected = chain(twin, needs, wide[0], wide[calls + 1 :])
    wanted = torch.autograd.grad(expected, wide, weight.double())
    pairs = zip((found, *slopes), (expected, *wanted), strict=True)
    return [float(((a.double() - b).norm() / b.norm()).detach()) for a, b in pairs]


def test_places() -> None:
    assert needs_of(4, 1) == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert needs_of(5, 2) == [[0, 1], [0, 2], [0, 2, 3], [0, 2, 4], [0, 2, 4, 5]]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("calls", "size"), [(4, 1), (5, 2), (3, 3), (1, 1)])
@pytest.mark.parametrize(("d", "shape"), [(24, (2, 3)), (7, (1, 1))])
def test_values_and_gradients(calls: int, size: int, d: int, shape: tuple[int, ...]) -> None:
    assert max(errors(calls, size, d, shape)) <= 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("d", [300, 768, 1030])
def test_wide_rows(d: int) -> None:
    assert max(errors(3, 1, d)) <= 1e-5


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("calls", "tokens", "d"), [(1, 3, 5), (20, 70, 130), (40, 5, 16)])
def test_gradients_of_vectors(calls: int, tokens: int, d: int) -> None:
    """More calls, tokens or columns than a program multiplies at once."""
    from stepformer.ops.depth_kernels import weight_gradient

    slopes, source = drawn(calls, tokens, seed=0).detach(), drawn(tokens, d, seed=1).detach()
    expected = slopes.double() @ source.double()
    assert (weight_gradient(slopes, source) - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.usefixtures("interpreted")
def test_large_scores_do_not_overflow() -> None:
    """Scores of some hundred: one source takes all, and neither result nor gradients are NaN."""
    sources = [drawn(3, 16, seed=i) for i in range(3)]
    w = drawn(16, seed=9, scale=100.0)
    own = DepthAttention([[0, 1, 2]], [w], EPS, SINGLE)
    h, _ = own([0, 1, 2], sources)
    expected = attend_depth([v.detach() for v in sources], w.detach(), eps=EPS)
    assert torch.allclose(h, expected, atol=1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(h.sum(), [*sources, w]))


@pytest.mark.usefixtures("interpreted")
def test_again_without_gradients_and_with_frozen_vectors() -> None:
    x, g = drawn(2, 8, seed=0), drawn(2, 8, seed=1)
    w = drawn(8, seed=2)
    h, _ = DepthAttention([[0, 1]], [w], EPS, SINGLE)([0, 1], [x, g])
    with torch.no_grad():
        assert torch.equal(DepthAttention([[0, 1]], [w], EPS, SINGLE)([0, 1], [x, g])[0], h)
    first = torch.autograd.grad(h.sum(), [x, g], retain_graph=True)
    again = torch.autograd.grad(h.sum(), [x, g])
    assert all(map(torch.equal, first, again))
    frozen, _ = DepthAttention([[0, 1]], [w.detach()], EPS, SINGLE)([0, 1], [x, g])
    assert all(map(torch.equal, first, torch.autograd.grad(frozen.sum(), [x, g])))


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize(("calls", "size"), [(24, 1), (24, 6), (24, 3)])
@pytest.mark.parametrize("d", [768, 1030])
@pytest.mark.parametrize("_", [pytest.param("", marks=on_gpu)])
def test_on_the_gpu(_: str, d: int, calls: int, size: int, dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    assert max(errors(calls, size, d, (3, 129), "cuda", dtype, strength=0.3)) <= (3e-5 if dtype == SINGLE else 1e-1)
