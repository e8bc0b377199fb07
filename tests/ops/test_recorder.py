"""The order of things in a recording, with a stand-in for CUDA; `test_kernel_graphs.py` has the device's part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepformer.ops.graphs import WARM_UP, Recorder
from stepformer.ops.pass_graphs import CapturedPass


class Device:
    """What a recorder asks of CUDA: a list of what happened."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.pools = 0

    def graph_pool_handle(self) -> tuple[int, int]:
        self.pools += 1
        return (0, self.pools)

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: Any = None, capture_error_mode: str = "") -> Iterator[None]:
        self.seen.append(("capture", pool))
        yield

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.seen.append("aside")
        yield
        self.seen.append("back")


class Stand:
    """A stream, or a graph."""

    device, device_index = torch.device("cpu"), 0

    def wait_stream(self, other: Any) -> None:
        pass

    def register_generator_state(self, generator: Any) -> None:
        self.generator = generator

    def replay(self) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    own = Device()
    for name in ("graph_pool_handle", "graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(own, name))
    for name in ("Stream", "CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stand)
    for name in ("set_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(
            torch._C, name, lambda *args, name=name: own.seen.append((name.rpartition("_")[2], args[1])), raising=False
        )
    return own


def test_what_happens_in_which_order(device: Device) -> None:
    recorder = Recorder()
    note = device.seen.append
    _, found = recorder.record(lambda: note("work") or 5, 2, before=lambda: note("before"))
    runs = ["before", "work"]
    assert (found, device.seen) == (5, ["aside", *runs, *runs, "back", "before", ("capture", (0, 1)), "work"])
    device.seen.clear()
    recorder.record(lambda: None)
    assert device.seen == [("capture", (0, 1))]  # the same pool, and no run before


def test_after_a_failure_there_is_another_pool(device: Device) -> None:
    def stops() -> None:
        raise RuntimeError("it stops by itself")

    own = torch.Generator()
    recorder = Recorder(own)
    with pytest.raises(RuntimeError, match="itself"):
        recorder.record(stops)
    given = [("endAllocateToPool", (0, 1)), ("releasePool", (0, 1))]
    assert device.seen == [("capture", (0, 1)), *given, ("capture", None)]
    device.seen.clear()
    replay, _ = recorder.record(lambda: None)
    assert device.seen == [("capture", (0, 2))]
    assert replay.__self__.generator is own  # type: ignore[attr-defined]


def test_the_gradients_of_a_recorded_pass(device: Device) -> None:
    """The first graph writes them into memory of its own, the second one adds to that memory."""
    weight, loose = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    weight.grad, calls = torch.full((3,), 7.0), []

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(None if weight.grad is None else weight.grad.clone())
        return ((inputs - targets) * weight).sum()

    own = CapturedPass(loss_of, [weight, loose], contextlib.nullcontext)
    own.record(torch.full((3,), 2.0), torch.zeros(3), accumulate=True)
    assert len(calls) == WARM_UP + 2
    assert all(gradient is None for gradient in calls[:-1])
    assert torch.equal(calls[-1], torch.full((3,), 2.0))
    written = own.gradients[0]
    assert own.gradients[1] is None
    weight.grad = None
    own.run(torch.ones(3), torch.zeros(3), first=True)
    assert weight.grad is written
    assert [at for what, at in (s for s in device.seen if isinstance(s, tuple))] == [(0, 1), (0, 1)]
    own.forget()
    assert not own.recorded
    assert weight.grad is None
    own.run(torch.ones(3), torch.zeros(3), first=True)
    assert device.seen[-1] == ("capture", (0, 2))
