"""Kernels of hyper-connections whose weights a token makes, against plain PyTorch, values and gradients, interpreted.

fp32 with sums in another order: 1e-6 measured, 1e-5 of the largest entry allowed. On a GPU also in bf16, which the
interpreter cannot multiply: 2e-2 for streams and gradients that are rounded. Gradients of products are compared with
fp64: on a GPU plain PyTorch in bf16 adds parts of a long product in bf16 too, which is more than the kernels' error.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from draws import seeded
from stepformer.ops import connections, kernels

pytestmark = pytest.mark.usefixtures("interpreted")
CASES = [
    (4, "sinkhorn", 40),
    (3, "sinkhorn", 20),
    (1, "sinkhorn", 16),
    (3, "permutations", 20),
    (2, "permutations", 16),
    pytest.param(5, "sinkhorn", 70, marks=pytest.mark.slow),  # streams that do not fill their block, as 3 do not
]


def run(n: int, mixing: str, d: int, dtype: torch.dtype, device: str = "cpu") -> tuple[list[Tensor], list[Tensor]]:
    """The streams that are handed on, their weights, and gradients of a random functional of all of them."""
    generator = seeded(n)
    outputs = 2 * n + (n * n if mixing == "sinkhorn" else math.factorial(n))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    H = [drawn(2, 37, d).to(dtype).requires_grad_() for _ in range(n)]
    maps = (0.3 * drawn(outputs, n * d) * (16 / d) ** 0.5).requires_grad_()
    line = drawn(3 + outputs).requires_grad_()
    found = connections.connections(*H, maps, line, eps=1e-5, mixing=mixing, dtype=dtype)
    total = torch.stack([(t.float() * drawn(*t.shape)).sum() for t in found]).sum()
    return found, list(torch.autograd.grad(total, [*H, maps, line]))


@pytest.mark.parametrize(("n", "mixing", "d"), CASES)
def test_weights_of_streams(n: int, mixing: str, d: int) -> None:
    with kernels.off():
        expected, slopes = run(n, mixing, d, torch.float32)
    found, own = run(n, mixing, d, torch.float32)
    for a, b in zip([*found, *own], [*expected, *slopes], strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


SHARES = ((0, 3), (1, 4), (0, 9), (1, 9), (2, 9), (1, 11), (2, 4))  # rows and numbers among 3 streams and their numbers


def check_products(
    kind: str,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tolerance: float = 1e-5,
    n: int = 3,
    d: int = 20,
    whole: bool = False,
    length: int = 37,
) -> None:
    """Of `SHARES`, or as a model mixes n streams (`whole`): one gradient for what is read, one for each new stream.

    The kernels take `dtype`, plain PyTorch the same numbers in fp64.
    """
    generator = seeded(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    H = [drawn(2, length, d).to(dtype).requires_grad_() for _ in range(n)]
    outputs = {"sinkhorn": 2 * n + n * n, "permutations": 2 * n + math.factorial(n), "along": n + 2}[kind]
    maps = (0.3 * (20 / d) ** 0.5 * drawn(outputs, d if kind == "along" else n * d)).requires_grad_()
    line = drawn(2 + n * (n + 2) if kind == "along" else 3 + outputs).requires_grad_()
    settings = {"centred": True} if kind == "along" else {"mixing": kind}
    function = connections.along_rows if kind == "along" else connections.connections
    own, grads = drawn(2, length), [drawn(2, length, d).to(dtype) for _ in range(n + 1)]
    shares, arriving = SHARES, [grads[0], grads[0], grads[1], grads[1], grads[1].clone(), grads[0], None]
    if whole:
        shares = tuple((i, n + k * n + i) for k in range(n + 1) for i in range(n))
        arriving = [grads[k] for k in range(n + 1) for _ in range(n)]

    def slopes(given: list[Tensor], found: list[Tensor], products: list[Tensor]) -> Any:
        some = [(t, g) for t, g in zip(products, arriving, strict=True) if g is not None]
        results, back = [*(t for t, _ in some), found[n], found[0]], [*(g for _, g in some), own, grads[0]]
        back = [g.to(t.dtype) for t, g in zip(results, back, strict=True)]
        return torch.autograd.grad(results, given, back)

    given = [*H, maps, line]
    exact = [t.detach().double().requires_grad_() for t in given]
    with kernels.off():
        found = function(*exact, eps=1e-5, dtype=torch.float64, **settings)
        wanted = slopes(exact, found, [found[row] * found[weight].detach()[..., None] for row, weight in shares])
    count = len(found)
    found = function(*given, eps=1e-5, dtype=dtype, **settings, shares=shares)
    assert len(found) == count + len(shares)
    for a, b in zip(slopes(given, found, found[count:]), wanted, strict=True):
        assert (a.double() - b.double()).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("kind", ["sinkhorn", "permutations", "along"])
def test_gradients_of_products_that_others_make(kind: str) -> None:
    """A gradient of several products as one tensor or as two, of two numbers of one stream, or of none."""
    check_products(kind)
    check_products(kind, n=2, whole=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "n"),
    [
        (kind, n)
        for kind in ("sinkhorn", "permutations", "along")
        for n in (3, 4, 8)
        if (kind, n) != ("permutations", 8)
    ],
)
def test_gradients_of_products_on_the_gpu(kind: str, dtype: torch.dtype, n: int) -> None:
    """Also where a kernel with the usual tile would not have the memory, which is fp32. With 3,000 tokens of 768
    numbers a program takes several turns, so that copies for later ones are on their way."""
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    check_products(kind, dtype, "cuda", tolerance, n, 20 if n == 3 else 768, whole=n > 3, length=37 if n == 3 else 1500)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("room", [99 * 1024, 163 * 1024, 227 * 1024])
def test_a_kernel_has_room(joined: bool, dtype: torch.dtype, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four streams in bf16 on a large card with the tile that was fastest, elsewhere with a smaller one."""
    from stepformer.ops import common
    from stepformer.ops import connection_passes as fast

    monkeypatch.setattr(common, "shared_memory", lambda device: room)
    for n in range(1, fast.MOST_STREAMS + 1):
        maps = torch.zeros(2 * n + n * n, n * 768) if joined else torch.zeros(n + 3, 768)
        streams = fast.Streams([torch.zeros(4, 768, dtype=dtype)] * n, maps, centred=not joined)
        tile = streams.back_tile(0, [tuple(range(n))] * (n + 1))
        if n == 4 and dtype == torch.bfloat16 and room > 200_000:
            assert tile == fast.BACK
        rows = (2 * n + 1) * tile.rows * tile.chunk * dtype.itemsize  # what is on its way for one stage
        held = n * streams.whole * tile.chunk * dtype.itemsize + 4 * tile.rows * tile.chunk  # maps, and a result
        assert (tile.stages - 1) * rows + held <= room
        assert tile.rows >= 16
        assert tile.chunk >= 16
        forth = streams.project_tile()
        assert forth.stages >= 2  # copies are on their way while products are computed
        assert (forth.stages - 1) * (streams.wide + forth.rows) * forth.chunk * dtype.itemsize <= room


def run_along(n: int, centred: bool, d: int, dtype: torch.dtype, device: str = "cpu", mean: float = 0.5) -> Any:
    """The same of dynamic hyper-connections: n vectors for the streams, one for reading, one for writing."""
    generator = seeded(n)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    H = [(drawn(2, 37, d) + mean).to(dtype).requires_grad_() for _ in range(n)]
    maps, line = (drawn(n + 2, d) / d**0.5).requires_grad_(), drawn(2 + n * (n + 2) + 4).requires_grad_()
    found = connections.along_rows(*H, maps, line, eps=1e-5, centred=centred, dtype=dtype)
    total = torch.stack([(t.float() * drawn(*t.shape)).sum() for t in found]).sum()
    return found, list(torch.autograd.grad(total, [*H, maps, line]))


@pytest.mark.parametrize(("n", "centred", "d"), [(4, True, 40), (3, False, 20), (1, True, 16), (5, True, 130)])
def test_weights_along_streams(n: int, centred: bool, d: int) -> None:
    with kernels.off():
        expected, slopes = run_along(n, centred, d, torch.float32)
    found, own = run_along(n, centred, d, torch.float32)
    for a, b in zip([*found, *own], [*expected, *slopes], strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def check_large_mean(d: int, device: str) -> None:
    """A number of 300 is rounded by 2e-5. By differences of sums, weights are wrong by 2.5e-3 on a GPU."""
    with kernels.off():
        expected, slopes = run_along(2, True, d, torch.float32, device, mean=300.0)
    found, own = run_along(2, True, d, torch.float32, device, mean=300.0)
    for a, b in zip([*found, *own], [*expected, *slopes], strict=True):
        assert (a - b).abs().max() <= 3e-4 * b.abs().max()


def test_a_large_mean_does_not_spoil_the_variance() -> None:
    check_large_mean(256, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_large_mean_on_the_gpu() -> None:
    check_large_mean(768, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "mixing", "d"), [*CASES, (4, "sinkhorn", 768), (4, "permutations", 768)])
def test_weights_on_the_gpu(n: int, mixing: str, d: int, dtype: torch.dtype) -> None:
    with kernels.off():
        expected, slopes = run(n, mixing, d, torch.float32, "cuda")
    found, own = run(n, mixing, d, dtype, "cuda")
    for a, b in zip([*found, *own], [*expected, *slopes], strict=True):
        assert (a.float() - b).norm() <= (1e-4 if dtype == torch.float32 else 2e-2) * b.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "centred", "d"), [(4, True, 768), (4, False, 768), (3, True, 40)])
def test_weights_along_on_the_gpu(n: int, centred: bool, d: int, dtype: torch.dtype) -> None:
    with kernels.off():
        expected, slopes = run_along(n, centred, d, torch.float32, "cuda")
    found, own = run_along(n, centred, d, dtype, "cuda")
    for a, b in zip([*found, *own], [*expected, *slopes], strict=True):
        assert (a.float() - b).norm() <= (1e-4 if dtype == torch.float32 else 2e-2) * b.norm()
