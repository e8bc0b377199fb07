"""Capturing CUDA graphs, and what is left after a capture that fails."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stepformer.ops.graphs import capture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 1 << 20


def asks(x: Tensor) -> float:
    return (torch.empty(64 * MIB, device="cuda").fill_(2) * x).sum().item()


def asks_for_memory(x: Tensor) -> Tensor:
    return x * torch.empty(1 << 42, device="cuda")


def stops(x: Tensor) -> None:
    x * 2
    raise RuntimeError("it stops by itself")


@pytest.mark.parametrize(
    ("work", "said"),
    [(asks, "operation not permitted when stream is capturing"), (asks_for_memory, "out of memory"), (stops, "itself")],
)
def test_after_a_failed_capture_all_goes_on(work, said) -> None:  # type: ignore[no-untyped-def]
    """Its own reason is told; streams, memory, both generators and a capture from before are as if nobody had tried."""
    own = torch.Generator("cuda").manual_seed(5)
    x = torch.ones(1, device="cuda")
    drawing, noise = capture(lambda: torch.rand(4, device="cuda"))
    torch.cuda.manual_seed(5)
    expected = [torch.rand(4, device="cuda") for _ in range(3)]
    expected_own = torch.rand(4, device="cuda", generator=own)
    torch.cuda.manual_seed(5)
    own.manual_seed(5)
    torch.cuda.empty_cache()
    held, stream = torch.cuda.memory_reserved(), torch.cuda.current_stream()
    assert torch.equal(torch.rand(4, device="cuda"), expected[0])
    with pytest.raises(RuntimeError, match=said):
        capture(lambda: work(x), generator=own)
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.rand(4, device="cuda"), expected[1])
    drawing.replay()
    assert torch.equal(noise, expected[2])
    assert torch.equal(torch.rand(4, device="cuda", generator=own), expected_own)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held + 4 * MIB  # the rounding of a segment or two; the work held 256 MiB
    graph, found = capture(lambda: x * 3)
    graph.replay()
    assert found.item() == 3
