"""The learned sum of two streams against its equation in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from draws import seeded
from stepformer.ops import mixing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = [
    pytest.param((32, 1024, 768), marks=[pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")])
]


def off_by(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b).norm() / b.norm())


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 4097), *ON_GPU])
@pytest.mark.parametrize(("narrow", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_mix(shape: tuple[int, ...], narrow: torch.dtype, bound: float) -> None:
    """fp32: sums in another order. bf16: results of 8 bits. Weights of the loss along the output: nothing cancels."""
    torch.use_deterministic_algorithms(True)  # what torch.empty gives is NaN
    try:
        generator = seeded(len(shape))
        draws = [torch.randn(s, generator=generator).to(DEVICE) for s in (shape, shape, (2,))]
        ours = [draws[0].to(narrow).requires_grad_(), draws[1].requires_grad_(), draws[2].requires_grad_()]
        exact = [t.detach().double().requires_grad_() for t in ours]
        out, expected = mixing.mix(*ours), exact[2][0] * exact[0] + exact[2][1] * exact[1]
        assert out.dtype == narrow
        assert off_by(out, expected.detach()) < bound
        weight = expected.detach() + torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)
        found = torch.autograd.grad((out.double() * weight).sum(), ours)
        for ours_, theirs in zip(found, torch.autograd.grad((expected * weight).sum(), exact), strict=True):
            assert off_by(ours_, theirs) < bound
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_operator_is_well_formed() -> None:
    a, b, weights = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((3, 5), (3, 5), (2,)))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.stepformer.mix.default, (a, b, weights), test_utils=checks)
