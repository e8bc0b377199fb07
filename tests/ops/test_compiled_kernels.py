"""Kernels that multiply, compiled for a Hopper GPU without one: they compile, they fit, no copy comes too early."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pipelines

pytest.importorskip("triton")
LOOP = """
  %row = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x64x64xbf16, #shared, #smem, mutable>
  %row_0 = ttg.memdesc_index %row[%c0] : !ttg.memdesc<{buffers}x64x64xbf16, #shared> -> !ttg.memdesc<64x64xbf16>
  %t_0 = ttg.async_copy_global_to_local %p, %row_0 mask %m : tensor<64x64x!tt.ptr<bf16>> -> <64x64xbf16>
  %row_1 = ttg.memdesc_index %row[%c1] : !ttg.memdesc<{buffers}x64x64xbf16, #shared> -> !ttg.memdesc<64x64xbf16>
  %t_1 = ttg.async_copy_global_to_local %p, %row_1 mask %m : tensor<64x64x!tt.ptr<bf16>> -> <64x64xbf16>
  %r = scf.for %i = %c0 to %c768 step %c64 iter_args(%total = %zero) -> (tensor<64x32xf32>) : i32 {{
    %here = ttg.memdesc_index %row[%i] : !ttg.memdesc<{buffers}x64x64xbf16, #shared> -> !ttg.memdesc<64x64xbf16>
    %sum = ttng.warp_group_dot %here, %tile, %total {{isAsync = true}} : !ttg.memdesc<64x64xbf16> * !ttg.memdesc<64x32>
    %done:2 = ttng.warp_group_dot_wait %sum, %here {{pendings = {pendings} : i32}} : tensor<64x32xf32>
    %next = ttg.memdesc_index %row[%j] : !ttg.memdesc<{buffers}x64x64xbf16, #shared> -> !ttg.memdesc<64x64xbf16>
    %t_2 = ttg.async_copy_global_to_local %p, %next mask %m : tensor<64x64x!tt.ptr<bf16>> -> <64x64xbf16>
  }}
"""


@pytest.mark.parametrize(("buffers", "pendings", "safe"), [(2, 1, False), (3, 1, True), (2, 0, True), (3, 2, False)])
def test_a_copy_over_what_is_read_is_found(buffers: int, pendings: int, safe: bool) -> None:
    """Copied two turns ahead: a product may be unfinished if there is a buffer more."""
    assert (pipelines.races(LOOP.format(buffers=buffers, pendings=pendings)) == []) == safe


def test_a_name_may_be_used_again() -> None:
    """In another part of the kernel `%row` was a view of another buffer, or had fewer buffers."""
    before = """
  %other = ttg.local_alloc : () -> !ttg.memdesc<2x64x64xbf16, #shared, #smem, mutable>
  %row = ttg.memdesc_index %other[%c0] : !ttg.memdesc<2x64x64xbf16, #shared> -> !ttg.memdesc<64x64xbf16>
"""
    assert pipelines.races(before + LOOP.format(buffers=3, pendings=1)) == []
    assert pipelines.races(before + LOOP.format(buffers=2, pendings=1)) != []
    assert pipelines.races(LOOP.format(buffers=2, pendings=1) + LOOP.format(buffers=3, pendings=1)) != []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        ("constrained", "key_gradient"),
        ("documents", "query_gradient"),
        ("streams", "streams_backward_kernel"),
        ("more-streams", "project_kernel"),
        ("decoding", "many_rows_kernel"),
    ],
)
def test_kernels_of_a_hopper_gpu(case: str, kernel: str, tmp_path: Path) -> None:
    """Triton 3.6 and 3.7 let the next copy overwrite the tile of a product that something else reads as well."""
    script = Path(pipelines.__file__).with_name("compiled.py")
    without = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script, tmp_path, case], env=without, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    files = list(tmp_path.glob("*.ttgir"))
    pipelined = [path for path in files if "async_copy_global_to_local" in path.read_text()]
    assert any(path.name.startswith(kernel) for path in pipelined)
    assert [(path.name, found) for path in files if (found := pipelines.races(path.read_text()))] == []
