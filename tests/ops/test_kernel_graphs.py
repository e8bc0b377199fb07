"""Capturing CUDA graphs, and what is left after a capture that fails."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from stepformer.ops.graphs import Recorder

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
    x, recorder = torch.ones(1, device="cuda"), Recorder(own)
    draw, noise = Recorder().record(lambda: torch.rand(4, device="cuda"))
    torch.cuda.manual_seed(5)
    expected = [torch.rand(4, device="cuda") for _ in range(3)]
    expected_own = torch.rand(4, device="cuda", generator=own)
    torch.cuda.manual_seed(5)
    own.manual_seed(5)
    torch.cuda.empty_cache()
    held, stream = torch.cuda.memory_reserved(), torch.cuda.current_stream()
    assert torch.equal(torch.rand(4, device="cuda"), expected[0])
    with pytest.raises(RuntimeError, match=said):
        recorder.record(lambda: work(x))
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.rand(4, device="cuda"), expected[1])
    draw()
    assert torch.equal(noise, expected[2])
    assert torch.equal(torch.rand(4, device="cuda", generator=own), expected_own)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held + 4 * MIB  # the rounding of a segment or two; the work held 256 MiB
    for each in (recorder, Recorder()):  # the one that failed records again, in another pool
        replay, found = each.record(lambda: x * 3)
        replay()
        assert found.item() == 3


def test_what_runs_before_a_recording() -> None:
    """Runs on a stream of their own, each prepared; then the recording, prepared too, which does not run."""
    seen: list[str] = []
    here, total = torch.cuda.current_stream(), torch.zeros(1, device="cuda")
    recorder = Recorder()

    def work() -> Tensor:
        capturing = torch.cuda.is_current_stream_capturing()
        seen.append("recorded" if capturing else "plain" if torch.cuda.current_stream() == here else "aside")
        return total.add_(1) * 2

    replay, doubled = recorder.record(work, 2, before=lambda: seen.append("before"))
    assert seen == ["before", "aside", "before", "aside", "before", "recorded"]
    assert total.item() == 2
    replay()
    assert (total.item(), doubled.item()) == (3, 6)
    pool, (again, tripled) = recorder.pool, recorder.record(lambda: total * 3)
    assert recorder.pool == pool
    again()
    assert tripled.item() == 9


def test_an_old_graph_that_becomes_garbage_does_not_end_a_capture() -> None:
    """Python may look for cycles at any allocation; no graph may be destroyed while another one is captured."""
    x = torch.ones(1, device="cuda")
    old = [Recorder().record(lambda: x * 3)]
    thresholds = gc.get_threshold()

    def doubled() -> Tensor:
        cycle: list[object] = [old.pop()]
        cycle.append(cycle)
        del cycle
        assert [[number] for number in range(1000)]  # allocations, at which Python would look
        return x * 2

    try:
        gc.set_threshold(1, 1, 1)
        replay, found = Recorder().record(doubled)
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
    replay()
    assert found.item() == 2
