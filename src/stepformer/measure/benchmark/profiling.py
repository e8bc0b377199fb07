"""Where the time of a step goes, by kinds of kernels."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from stepformer.measure.benchmark.timing import synchronize, timed
from stepformer.ops import kernels

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


@lru_cache
def own_kernels() -> dict[str, str]:
    """The Triton functions of this package and the files they are in; a profile knows kernels by these names."""
    paths = sorted(Path(kernels.__file__).parent.rglob("*.py"))
    defined = re.compile(r"@triton\.jit[^\n]*\n(?:@[^\n]*\n)*def (\w+)")
    return {name: path.stem for path in paths for name in defined.findall(path.read_text())}


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
        kernels_run = [e for e in found.events() if e.device_type == DeviceType.CUDA]
        kernels_run = [e for e in kernels_run if not getattr(e, "is_user_annotation", False)]
        counted = [(event.name, event.time_range.elapsed_us(), 1) for event in kernels_run]
    else:
        counted = [(average.key, average.self_cpu_time_total, average.count) for average in found.key_averages()]
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
