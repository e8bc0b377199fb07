"""Times of repeated work, and what they say: all of them, their median and their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

PRODUCT = {"cuda": (8192, 20), "cpu": (1024, 5)}  # size, how often


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
