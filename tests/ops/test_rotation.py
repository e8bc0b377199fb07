"""Rotary positions in one pass against the plain equation, and where a Hamiltonian attention uses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draws import seeded
from helpers import shake, tiny, tokens
from stepformer.ops import kernels
from stepformer.ops.rotation import rotated
from stepformer.ops.scores import rotate

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WHERE = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="no interpreter")),
    pytest.param("cuda", marks=on_gpu),
]


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("shape", [(2, 1, 5, 24), (1, 3, 1, 8), (2, 12, 9, 2), (0, 2, 3, 4)], ids=str)
def test_values_and_gradients(shape: tuple[int, ...], back: bool, device: str) -> None:
    """fp32 against fp64 at angles of fp32: 1e-6 for single products and sums of numbers of size 1."""
    batch, heads, time, width = shape
    draws = torch.randn(2, batch, time, heads, width, generator=seeded(0), dtype=torch.float64)
    x, grad = (t.transpose(1, 2) for t in draws)  # as heads come from a product
    positions = torch.arange(time)
    exact = x.clone().requires_grad_()
    expected = rotate(exact, -positions if back else positions)
    expected.backward(grad)
    narrow = x.float().to(device).requires_grad_()
    found = rotated(narrow, back)
    found.backward(grad.float().to(device))
    torch.testing.assert_close(found.cpu().double(), expected, atol=1e-6, rtol=1e-6)
    assert exact.grad is not None
    assert narrow.grad is not None
    torch.testing.assert_close(narrow.grad.cpu().double(), exact.grad, atol=1e-6, rtol=1e-6)
    assert found.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), {"kernel": "per-head"}], ids=str)
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter was not chosen")
def test_a_model_with_rotary_positions(options: dict[str, Any]) -> None:
    """With kernels and without: sums of fp32 in another order, 1e-5."""
    size = {"n_head": 2, "d_model": 16, "n_layer": 2}
    model = shake(tiny("symp-exp-euler", positions="rotary", dtype=torch.float32, **size, **options), scale=0.1)
    found = []
    for plain in (True, False):
        model.zero_grad()
        with kernels.off() if plain else kernels.interpreted():
            loss = model(tokens(), tokens(seed=1)).loss
            assert loss is not None
            loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
