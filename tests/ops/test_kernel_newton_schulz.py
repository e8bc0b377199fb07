"""Newton-Schulz kernels against the plain PyTorch iteration, in fp64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from draws import seeded
from helpers import shake, tiny, tokens
from stepformer.ops import kernels
from stepformer.ops.matrix_functions import polar_steps as plain

pytest.importorskip("triton")
ns = pytest.importorskip("stepformer.ops.newton_schulz_kernels")
common = pytest.importorskip("stepformer.ops.common")

in_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU in this process")

SINGLE = 3e-5  # fp32 by three tf32 products each: 22 bits, and rounding grows about tenfold over five steps; 4e-6 seen
ILL = 5e-5  # the same where singular values spread over three decades; 1.4e-5 seen, in PyTorch 1e-5
HALF = 1e-2  # bf16 results have 8 bits, 2e-3 in a norm; derivatives by one tf32 product 2e-3


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens to a program and 16 columns at once: few programs for the interpreter, several chunks."""
    monkeypatch.setattr(ns, "tile", lambda h, k, backward: ns.Tile(4, 4, 16))


def numbers(*shape: int, seed: int = 0, scale: float = 1.0, **options: Any) -> Tensor:
    generator = seeded(seed + sum(shape))
    return (scale * torch.randn(*shape, generator=generator)).to(**options).requires_grad_()


def spread(n: int, h: int, k: int, values: Tensor) -> Tensor:
    """n matrices with these singular values, flat."""
    left, _, right = torch.linalg.svd(numbers(n, h, k).detach(), full_matrices=False)
    return ((left * values) @ right).flatten(1).contiguous().requires_grad_()


def apart(found: Tensor, expected: Tensor) -> float:
    """Relative distance; nan where something is."""
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def ortho_in_fp64(y: Tensor, do: Tensor, h: int) -> tuple[Tensor, Tensor]:
    y = y.detach().double().requires_grad_()
    o = plain(y.unflatten(-1, (h, -1))).flatten(-2)
    return o.detach(), *torch.autograd.grad(o, y, do.double())


def muon_in_fp64(g: Tensor, m: Tensor, raw: Tensor, dm: Tensor, do: Tensor, h: int) -> tuple[Tensor, ...]:
    """m', o and the gradients of g, m and raw."""
    g, m, raw = (t.detach().double().requires_grad_() for t in (g, m, raw))
    beta = torch.sigmoid(raw)
    mean = beta * m + (1 - beta) * g
    o = plain(mean.unflatten(-1, (h, -1))).flatten(-2)
    return mean.detach(), o.detach(), *torch.autograd.grad([mean, o], [g, m, raw], [dm.double(), do.double()])


def check_ortho(n: int, h: int, k: int, tolerance: float, **options: Any) -> None:
    y, do = numbers(n, h * k, **options), numbers(n, h * k, seed=1, **options).detach()
    o = ns.newton_schulz(y, h)
    found = (o, *torch.autograd.grad(o, y, do))
    for ours, theirs in zip(found, ortho_in_fp64(y, do, h), strict=True):
        assert (ours.shape, ours.dtype) == (y.shape, y.dtype)
        assert apart(ours, theirs) < tolerance


def check_muon(n: int, h: int, k: int, tolerance: float, **options: Any) -> None:
    g, m = numbers(n, h * k, **options), numbers(n, h * k, seed=1, **options)
    do, dm = (numbers(n, h * k, seed=2 + i, **options).detach() for i in range(2))
    raw = torch.tensor([0.7], device=g.device, requires_grad=True)
    mean, o = ns.muon_pass(g, m, torch.sigmoid(raw), h)
    found = (mean, o, *torch.autograd.grad([mean, o], [g, m, raw], [dm, do]))
    for ours, theirs in zip(found, muon_in_fp64(g, m, raw, dm, do, h), strict=True):
        assert ours.shape == theirs.shape
        assert apart(ours, theirs) < tolerance


@in_interpreter
@pytest.mark.parametrize(
    ("n", "h", "k"),
    [pytest.param(3, 12, 64, marks=pytest.mark.slow), (2, 5, 40), (1, 16, 128), (1, 20, 32), (5, 1, 4)],
)
def test_values_and_gradients(n: int, h: int, k: int, packed: None, poisoned: None) -> None:
    """Padded rows, one row, 17 to 32 rows, columns that fill no chunk, programs that are not full, two programs."""
    check_ortho(n, h, k, SINGLE)


@in_interpreter
@pytest.mark.parametrize(("n", "h", "k"), [(5, 12, 32), (1, 2, 24)])
def test_muon_values_and_gradients(n: int, h: int, k: int, packed: None, poisoned: None) -> None:
    """Two programs, the second with one token: the gradient of beta is a sum over both."""
    check_muon(n, h, k, SINGLE)


@in_interpreter
def test_own_tiles(poisoned: None) -> None:
    """The settings that are launched at the small size."""
    assert ns.tile(12, 64, backward=False).warps == ns.tile(12, 64, backward=False).tokens
    check_muon(1, 12, 64, SINGLE)


@in_interpreter
def test_ill_conditioned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the second Gram matrix the values would be 1e-3, 3e-4 and 2e-5 off, the gradients 1e-3 to 3e-4."""
    monkeypatch.setattr(ns, "tile", lambda h, k, backward: ns.Tile(16, 4, 64))
    h, k, n = 12, 64, 5
    one_large = torch.cat([torch.tensor([300.0]), torch.ones(h - 1)])
    three_decades = torch.logspace(0, -3, h)
    half_rank = (torch.arange(h) < 6).float()
    y = torch.cat([spread(n, h, k, values).detach() for values in (one_large, three_decades, half_rank)])
    y, do = y.requires_grad_(), numbers(len(y), h * k, seed=1).detach()
    o = ns.newton_schulz(y, h)
    for ours, theirs in zip((o, *torch.autograd.grad(o, y, do)), ortho_in_fp64(y, do, h), strict=True):
        for of_kind in (slice(0, n), slice(n, 2 * n), slice(2 * n, None)):
            assert apart(ours[of_kind], theirs[of_kind]) < ILL


@in_interpreter
def test_zero_tiny_and_huge_matrices(packed: None) -> None:
    """At 0 the map is linear: Y / 1e-12 times a^5 = 485, value and gradient; elsewhere the scale does not matter."""
    h, k = 3, 16
    y = torch.stack([torch.zeros(h * k), *(s * numbers(h * k).detach() for s in (1e-9, 1.0, 1e15))]).requires_grad_()
    do = numbers(4, h * k, seed=1).detach()
    o = ns.newton_schulz(y, h)
    (dy,) = torch.autograd.grad(o, y, do)
    expected, expected_gradient = ortho_in_fp64(y, do, h)
    for i in range(4):
        assert apart(o[i], expected[i]) < SINGLE
        assert apart(dy[i], expected_gradient[i]) < SINGLE


@in_interpreter
def test_mixed_dtypes_views_and_missing_gradients(packed: None) -> None:
    """bf16 answers on an fp32 mean, as under autocast; neither contiguous. An unused output has no gradient."""
    h, k = 3, 16
    g = numbers(h * k, 2, 2).detach().bfloat16().permute(1, 2, 0).requires_grad_()
    m = numbers(1, 1, h * k).detach().expand(2, 2, -1).requires_grad_()
    raw = torch.tensor([-0.4], requires_grad=True)
    do = numbers(2, 2, h * k, seed=1).detach()
    mean, o = ns.muon_pass(g, m, torch.sigmoid(raw), h, torch.float32)
    assert (mean.dtype, o.dtype) == (torch.float32, torch.float32)
    found = torch.autograd.grad(o, [g, m, raw], do)
    assert [t.dtype for t in found] == [torch.bfloat16, torch.float32, torch.float32]
    expected = muon_in_fp64(g, m, raw, torch.zeros_like(do), do, h)
    assert apart(mean, expected[0]) < SINGLE
    assert apart(o, expected[1]) < SINGLE
    assert apart(found[0], expected[2]) < 4e-3  # margin: one rounding to bf16, 2^-8 at most
    assert apart(found[1], expected[3]) < SINGLE
    assert apart(found[2], expected[4]) < SINGLE
    mean, o = ns.muon_pass(g, m, torch.sigmoid(raw), h, torch.float32)
    dg, dm = torch.autograd.grad(mean, [g, m], do)
    beta = torch.sigmoid(raw.detach())
    assert apart(dm, (beta * do).double()) < 1e-6
    assert apart(dg, ((1 - beta) * do).double()) < 4e-3  # margin: as above
    fixed, _ = ns.muon_pass(g, m, torch.tensor([0.25]), h)
    assert apart(fixed, 0.25 * m.double() + 0.75 * g.double()) < 1e-6


@in_interpreter
@pytest.mark.parametrize("name", ["ortho", "muon"])
def test_models_take_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and every gradient, against the model in fp64; PyTorch in fp32 is 4e-6 off, more where a sum cancels."""
    monkeypatch.setattr(ns, "tile", lambda h, k, backward: ns.Tile(8, 4, 16))
    taken = []
    launch = ns._forward
    monkeypatch.setattr(ns, "_forward", lambda *a: taken.append(1) or launch(*a))
    model = shake(tiny(name, dtype=torch.float32, n_layer=1, d_model=48))
    ids, targets = tokens(1), tokens(1, seed=1)
    results = []
    with kernels.interpreted():
        for m in (model, copy.deepcopy(model).double()):
            loss = m(ids, targets).loss
            results.append((loss, *torch.autograd.grad(loss, [p for p in m.parameters() if p.requires_grad])))
    assert len(taken) == 2  # attention and MLP of the fp32 model; fp64 has no kernel
    largest = max(gradient.norm() for gradient in results[1][1:])
    for ours, theirs in zip(*results, strict=True):
        assert (ours.double() - theirs).norm() < 3e-5 * theirs.norm() + 1e-5 * largest


@in_interpreter
def test_operators_are_well_formed(packed: None) -> None:
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    g, m = numbers(1, 32), numbers(1, 32, seed=1)
    for mean in ((None, None), (m, numbers(1))):  # ortho, muon
        torch.library.opcheck(ns._forward, (g, *mean, 2, torch.float32, False), test_utils=checks)


@in_interpreter
def test_compiled_without_a_graph_break(packed: None) -> None:
    g, m, raw = numbers(3, 32), numbers(3, 32, seed=1), numbers(1)

    def both(g: Tensor, m: Tensor, raw: Tensor) -> Tensor:
        mean, o = ns.muon_pass(g, m, torch.sigmoid(raw), 2)
        return mean + o

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(g, m, raw)
    eager = both(g, m, raw)
    assert torch.equal(compiled, eager)
    do = numbers(3, 32, seed=2).detach()
    found, expected = (torch.autograd.grad(out, [g, m, raw], do) for out in (compiled, eager))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_does_not_fit() -> None:
    assert ns.supports(12, 64)
    assert ns.supports(32, 128)
    assert not ns.supports(33, 64)
    assert not ns.supports(12, 129)


SHAPES = [
    (1, 12, 64),
    (1000, 12, 64),
    (77, 16, 128),
    (33, 1, 16),
    (129, 7, 48),
    (65, 32, 64),
    (9, 25, 128),
    (200, 6, 32),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "h", "k"), SHAPES)
def test_on_the_gpu(n: int, h: int, k: int, dtype: torch.dtype, poisoned: None) -> None:
    tolerance = SINGLE if dtype == torch.float32 else HALF
    check_ortho(n, h, k, tolerance, device="cuda", dtype=dtype)
    check_muon(n, h, k, tolerance, device="cuda", dtype=dtype)
