"""Times of repeated work: all of them, their median and their spread, and where they go, by kinds of kernels."""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from stepformer.ops import kernels

PRODUCT = {"cuda": (8192, 20), "cpu": (1024, 5)}  # size, how often
TOP = 25
# The first that fits. Attention before products: its kernels carry the names of the templates they are made from.
GROUPS = (
    ("memory copies", r"memcpy|memset|copy_|direct_copy|aten::clone|aten::contiguous"),
    ("stream passes", r"stepformer|velocity|adaptive"),
    ("loss", r"log_softmax|nll_loss|cross_entropy"),
    ("attention", r"flash|fmha|sdpa|attention|softmax"),
    ("matrix products", r"gemm|gemv|cutlass|cublas|nvjet|xmma|splitk|triton_tem|aten::(\w*mm|mv|dot|linear|matmul)\b"),
    ("optimizer", r"multi_tensor|adam|fused_optim"),
    ("elementwise by inductor", r"^triton_"),
    ("elementwise", r"elementwise|reduce|norm|gelu|aten::(add|mul|sub|div|sum|tanh|where|fill_|zero_)"),
)


class Limit:
    """Seconds that one architecture may take; None is no limit."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self.began = seconds, time.perf_counter()

    @property
    def used(self) -> float:
        return time.perf_counter() - self.began

    @property
    def passed(self) -> bool:
        return self.seconds is not None and self.used >= self.seconds

    def affords(self, count: int, each_ms: float, least: int = 3) -> int:
        """How many of `count` repetitions fit into what is left; never fewer than `least`, a median needs some."""
        if self.seconds is None:
            return count
        left = max(0.0, self.seconds - self.used)
        return max(min(least, count), min(count, int(1000 * left / max(each_ms, 1e-6))))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], Any], count: int, device: torch.device) -> list[float]:
    """Milliseconds of each of `count` calls in a row.

    On CUDA between events, without waiting in between: the host runs ahead as it does in training, so launching work
    counts only where the device has to wait for it.
    """
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            work()
            marks.append(time.perf_counter())
        return [1000 * (b - a) for a, b in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    synchronize(device)
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    synchronize(device)
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def spread(ms: list[float]) -> dict[str, Any]:
    """All times with their median, quartiles and extremes, in milliseconds."""
    q1, median, q3 = statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else ms * 3
    found = {"median_ms": median, "min_ms": min(ms), "q1_ms": q1, "q3_ms": q3, "max_ms": max(ms)}
    return {**found, "ms": [round(t, 4) for t in ms]}


def product_rate(device: torch.device) -> dict[str, Any]:
    """The rate of one large matrix product here: bf16 on CUDA, fp32 on the CPU; random numbers, zeros run faster."""
    size, count = PRODUCT[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    timed(lambda: a @ b, 2, device)
    found = spread(timed(lambda: a @ b, count, device))
    flops = 2e3 * size**3 / found["median_ms"]
    return {"size": size, "dtype": str(dtype).removeprefix("torch."), "flops": flops, **found}


GENERATED = {
    **dict.fromkeys(("row_forward", "row_backward"), "row_passes"),
    **dict.fromkeys(("numbers_forward", "numbers_backward"), "numbers"),
}


@lru_cache
def own_kernels() -> dict[str, str]:
    """The Triton functions of this package and the files they are in; a profile knows kernels by these names."""
    paths = sorted(Path(kernels.__file__).parent.rglob("*.py"))
    defined = re.compile(r"@triton\.jit[^\n]*\n(?:@[^\n]*\n)*def (\w+)")
    written = {name: path.stem for path in paths for name in defined.findall(path.read_text())}
    return {**written, **GENERATED}


def group_of(name: str) -> str:
    """The kind of work a kernel does, from its name; ours are known by the file they are written in."""
    if name in own_kernels():
        return f"kernel: {own_kernels()[name].lstrip('_')}"
    return next((group for group, pattern in GROUPS if re.search(pattern, name.lower())), "other")


def profile(work: Callable[[], Any], device: torch.device, what: str, repeats: int = 3) -> dict[str, Any]:
    """Milliseconds per call of `work` by group and for the longest kernels.

    On CUDA kernels are counted; `idle_ms` is what the device waited between them. On the CPU operators are counted, by
    the time spent in them and not in those they call.
    """
    on_cuda = device.type == "cuda"
    wall = sum(timed(work, repeats, device)) / repeats  # without the profiler, which costs time itself
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as found:
        for _ in range(repeats):
            work()
        synchronize(device)
    if on_cuda:
        events = [e for e in found.events() if e.device_type == DeviceType.CUDA]
        events = [e for e in events if not getattr(e, "is_user_annotation", False)]
        counted = [(e.name, e.time_range.elapsed_us(), 1) for e in events]
    else:
        counted = [(e.key, e.self_cpu_time_total, e.count) for e in found.key_averages()]
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for name, microseconds, count in counted:
        times[name] += microseconds / 1000 / repeats
        calls[name] += count
    groups: dict[str, float] = defaultdict(float)
    for name, ms in times.items():
        groups[group_of(name)] += ms
    longest, total = sorted(times, key=lambda name: -times[name])[:TOP], sum(times.values())
    return {
        "of": what,
        "wall_ms": wall,
        "counted_ms": total,
        "idle_ms": max(0.0, wall - total) if on_cuda else None,
        "groups_ms": dict(sorted(groups.items(), key=lambda item: -item[1])),
        "top": [
            {"name": name[:200], "group": group_of(name), "ms": times[name], "calls": round(calls[name] / repeats, 2)}
            for name in longest
        ],
    }
