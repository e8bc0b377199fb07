"""Compiles kernels for a Hopper GPU where there is none, and launches nothing. It changes torch: a program of its own.

    python tests/support/compiled.py FOLDER CASE...      Triton's code of each kernel goes to FOLDER

Tensors on the CPU say that they are on a GPU, and Triton is told of a device that cannot be launched on. What kernels
would have written is whatever was in memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from stepformer.ops import common, connections, constrained, document_attention, kernels, rows

MULTIPROCESSORS = 132  # of an H200
BATCH, HEADS, LENGTH = 2, 2, 256


class Device:
    """What Triton asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def prepare(folder: Path) -> None:
    driver.set_active(Device())  # type: ignore[arg-type]
    compile_and_launch: Any = jit.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **how: Any) -> None:
        kernel = compile_and_launch(self, *args, grid=grid, warmup=True, **how)
        (folder / f"{self.__name__}-{kernel.hash[:12]}.ttgir").write_text(kernel.asm["ttgir"])
        if kernel.metadata.shared > common.ROOM:
            raise SystemExit(f"{self.__name__} asks for {kernel.metadata.shared} bytes of shared memory")

    jit.JITFunction.run = compile_only  # type: ignore[method-assign, assignment]
    torch.Tensor.is_cuda = property(lambda tensor: True)  # type: ignore[misc, assignment, method-assign]
    kernels.usable = lambda *tensors: all(t is None or t.dtype in kernels.DTYPES for t in tensors)
    common.multiprocessors = lambda device: MULTIPROCESSORS
    rows.dependent = lambda like, rows=1: {"OVERLAP": 0}
    for module in (constrained, document_attention):
        module.tiles = _as_on_a_gpu(module.tiles)


def _as_on_a_gpu(tiles: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(like: Tensor, *args: Any, **how: Any) -> Any:
        return tiles(SimpleNamespace(device=torch.device("cuda"), shape=like.shape, dtype=like.dtype), *args, **how)

    return chosen


def heads(width: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(BATCH, HEADS, LENGTH, width, dtype=dtype, requires_grad=True) for _ in range(3)]


def constrained_rows() -> None:
    for width in (64, 128):
        for chained in (False, True):
            radius = torch.rand(BATCH, HEADS, LENGTH)
            if chained:
                below = torch.randn(BATCH, HEADS, LENGTH, LENGTH).log_softmax(-1)
                found: Any = constrained.prior_attention(*heads(width, torch.bfloat16), radius, below)
                found = found[0] if isinstance(found, tuple) else found
            else:
                found = constrained.constrained_attention(*heads(width, torch.bfloat16), radius, None)
            found.sum().backward()


def documents() -> None:
    origins, ends = (
        torch.zeros(BATCH, LENGTH, dtype=torch.int32),
        torch.full((BATCH, LENGTH), LENGTH, dtype=torch.int32),
    )
    for width in (64, 128):
        document_attention.document_attention(*heads(width, torch.bfloat16), origins, ends).sum().backward()


def streams(n: int = 4) -> None:
    """As a model weighs them, in both dtypes; so many tokens that a program has several turns."""
    d = 768
    shares = tuple((i, n + k * n + i) for k in range(n + 1) for i in range(n))
    for dtype in (torch.bfloat16, torch.float32):
        for outputs, width, numbers, function, how in (
            (2 * n + n * n, n * d, 3 + 2 * n + n * n, connections.connections, {"mixing": "sinkhorn"}),
            (n + 2, d, 2 + n * (n + 2), connections.along_rows, {"centred": True}),
            (n + 2, d, 2 + n * (n + 2), connections.along_rows, {"centred": False}),
        ):
            H = [torch.randn(2, 1500, d, dtype=dtype, requires_grad=True) for _ in range(n)]
            maps, line = torch.randn(outputs, width, requires_grad=True), torch.randn(numbers, requires_grad=True)
            found = function(*H, maps, line, eps=1e-5, dtype=dtype, shares=shares, **how)[-len(shares) :]
            grads = [torch.randn(2, 1500, d, dtype=dtype) for _ in range(n + 1)]
            torch.autograd.grad(found, [*H, maps, line], [grads[k] for k in range(n + 1) for _ in range(n)])


def decoding() -> None:
    """Products of many rows, gated and not."""
    for many in (16, 64):
        for source in (torch.float32, torch.bfloat16):
            u = torch.randn(many, 768, dtype=source)
            rows.linear(u, torch.randn(4096, 768, dtype=torch.bfloat16), activation="swiglu")
            rows.linear(u, torch.randn(3072, 768, dtype=torch.bfloat16))
            rows.logits(u, torch.randn(50_304, 768, dtype=torch.bfloat16), real=50_257)


CASES = {
    "constrained": constrained_rows,
    "documents": documents,
    "streams": streams,
    "more-streams": partial(streams, 8),
    "decoding": decoding,
}


if __name__ == "__main__":
    os.makedirs(sys.argv[1], exist_ok=True)
    prepare(Path(sys.argv[1]))
    for case in sys.argv[2:]:
        CASES[case]()
