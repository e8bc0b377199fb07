"""The fused pass of a Hamiltonian integrator against plain equations: values and gradients of all that goes in.

Without CUDA the kernels run in Triton's interpreter, in fp32 on tiny shapes. The twin runs in fp64, so the error is
that of the kernel: sums of at most 1,100 fp32 numbers and a few roundings, below 1e-5 of the norm of each tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from test_kernel_streams import CUDA, Build, Parts, compare, off_by, poison

import stream_references
from draws import seeded
from stepformer.base.errors import InputError
from stepformer.ops import common, integrator, kernels
from stepformer.ops.common import Scalar

BACKWARD_TILE = integrator.backward_tile
STREAMS = ("x", "y", "velocity", "force", "older_velocity", "older_force", "older_y")


def run(_: None, **inputs: Any) -> tuple[Any, ...]:
    """The pass as `compare` calls one: the answer comes first, and here there is none."""
    return integrator.integrator_pass(**inputs)


def twin(_: None, **inputs: Any) -> tuple[Any, ...]:
    return stream_references.integrator_pass_reference(**inputs)


def row_factors(p: Parts, name: str) -> Tensor:
    return p.draw(name, p.shape[:-1], p.dtype, lambda t: 0.2 + t.abs())


def minimal(p: Parts) -> dict[str, Any]:
    return {
        "g": None, **{name: p.rows(name) for name in STREAMS[:4]}, "gain_y": p.vector("gain_y"), "eps_y": 1e-2,
        "weights": p.draw("weights", (6,), p.dtype, lambda t: 0.6 + 0.5 * t),
        "mu_next": p.scalar("mu", "unit"), "beta_next": p.scalar("beta", "unit"),
        "gamma_next": p.scalar("gamma_next", "positive"), "norms": ((p.vector("gain_a"), None),),
    }  # fmt: skip


def scaled(p: Parts) -> dict[str, Any]:
    return minimal(p) | {"scale": row_factors(p, "scale")}


def two_steps(p: Parts) -> dict[str, Any]:
    older = {name: p.rows(name) for name in ("older_velocity", "older_force")}
    return scaled(p) | older | {"older_scale": row_factors(p, "older_scale")}


def everything(p: Parts) -> dict[str, Any]:
    return two_steps(p) | {
        "older_y": p.rows("older_y"),
        "scale_next": -0.5,
        "norms": ((p.vector("gain_a"), p.vector("bias_a")),),
    }


def along_another(p: Parts) -> dict[str, Any]:
    return everything(p) | {"along": p.rows("along")}


CASES: dict[str, Build] = {
    "minimal": minimal,
    "along another velocity": along_another,
    "along another velocity, first layer": lambda p: minimal(p) | {"along": p.rows("along")},
    "along another velocity, constants": lambda p: (
        minimal(p)
        | {"along": p.rows("along"), "mu_next": Scalar(constant=0.9), "beta_next": Scalar(constant=-0.8)}
        | {"gamma_next": None, "scale_next": 2.0}
    ),
    "scaled rows": scaled,
    "older fields, not scaled": lambda p: two_steps(p) | {"scale": None, "older_scale": None},
    "older fields": two_steps,
    "everything": everything,
    "without a force": lambda p: scaled(p) | {"force": None},
    "only an older force": lambda p: two_steps(p) | {"force": None, "older_velocity": None},
    "rmsnorm": lambda p: minimal(p) | {"norm_kind": "rmsnorm", "norms": ((None, None),)},
    "rmsnorm with gain and bias": lambda p: everything(p) | {"norm_kind": "rmsnorm"},
    "no output": lambda p: two_steps(p) | {"norms": ()},
    "no look-ahead": lambda p: scaled(p) | {"mu_next": None},
    "last layer": lambda p: scaled(p) | {"mu_next": None, "beta_next": None, "gamma_next": None},
    "constants": lambda p: (
        minimal(p)
        | {"mu_next": Scalar(constant=0.9), "beta_next": Scalar(constant=-0.8), "gamma_next": None, "scale_next": 2.0}
    ),
}


def toward(name: str) -> dict[int, str] | None:
    """Along another velocity all three scalars act on u alone, whose norm takes away what is along u itself."""
    return {2: "along"} if name.startswith("along") else None


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that a kernel should have written is NaN until it has; few programs, so that each has several tiles."""
    poison(monkeypatch)
    if not CUDA:
        monkeypatch.setattr(integrator, "backward_tile", lambda d, *_: common.row_tile(d, rows=2, programs=2))
    with kernels.interpreted():
        yield


@pytest.mark.parametrize("name", CASES)
def test_the_pass_equals_its_equations(name: str) -> None:
    compare(run, twin, CASES[name], (5, 1, 48), 1e-5, toward=toward(name))


@pytest.mark.parametrize("shape", [(1, 16), (2, 50), (2, 300), (2, 768), (1, 1100)])
def test_widths(shape: tuple[int, ...]) -> None:
    """One row, odd widths, several chunks (with an empty one at 768), more than one warp per row."""
    compare(run, twin, everything, shape, 1e-5, seed=3)


@pytest.mark.parametrize("build", [everything, along_another, CASES["no look-ahead"]])
@pytest.mark.parametrize("output", [0, 1, 2])
def test_outputs_that_nobody_uses(build: Build, output: int) -> None:
    """A missing gradient is not asked for as a tensor of zeros, and what it would reach gets none."""
    compare(run, twin, build, (5, 32), 2e-5, used=lambda k: k == output)  # 4e-6 seen, where a norm's gradient cancels


@pytest.mark.parametrize("single", [None, "x", "y"])
def test_dtypes_are_independent(single: str | None) -> None:
    """bf16 has 8 bits: each rounding is 4e-3 at most, and a sum of several. One stream alone stays fp32, or none."""
    streams = dict.fromkeys(STREAMS, torch.bfloat16) | ({single: torch.float32} if single else {})
    compare(run, twin, everything, (5, 48), 2e-2, streams=streams, out_dtype=torch.bfloat16)


def test_what_follows_sees_the_stored_position() -> None:
    """u is the norm of x' after its rounding to bf16, to the digits of fp32: before it, it would be 2e-3 off."""
    p = Parts((3, 48), torch.float32, streams={"x": torch.bfloat16})
    inputs = minimal(p) | {"mu_next": None, "norms": ((None, None),), "out_dtype": torch.float32}
    x, _, u = run(inputs.pop("g"), **inputs)
    assert x.dtype == torch.bfloat16
    assert off_by(u, torch.nn.functional.layer_norm(x.double(), (48,))) < 1e-5


def gradients(inputs: dict[str, Any], p: Parts) -> dict[str, Tensor | None]:
    outputs = [o for o in run(inputs.pop("g"), **inputs) if o is not None]
    generator = seeded(1)
    weights = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
    torch.autograd.backward(outputs, weights)
    return {name: leaf.grad for name, leaf in p.leaves.items()}


@pytest.mark.parametrize(
    "without", [("weights",), ("scale", "velocity"), ("weights", "scale", "older_scale", "x", "older_y")]
)
def test_gradients_that_nobody_needs(without: tuple[str, ...]) -> None:
    """They are not computed, and the others are the same. On a GPU the compiler may fuse differently: 1e-5."""
    p, q = Parts((3, 32), torch.float32), Parts((3, 32), torch.float32)
    full = gradients(everything(p), p)
    inputs = everything(q)
    for name in without:
        q.leaves[name].requires_grad_(False)
    some = gradients(inputs, q)
    for name, grad in full.items():
        other = some[name]
        assert grad is not None
        assert (other is None) == (name in without), name
        assert other is None or off_by(other, grad) < 1e-5, name


@pytest.mark.parametrize("width", [47, 48])
def test_every_way_through_the_rows_is_the_same(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Gains held in registers or not; bf16 in pairs, or alone where the width is odd.

    The same operations in the same order: a compiler may fuse others, so a few numbers round the other way (1e-3).
    """
    results = []
    for options in ({}, {"hold": True, "stages": 3}):
        tile = common.row_tile(width, rows=2, programs=2)._replace(**options)  # type: ignore[arg-type]
        monkeypatch.setattr(integrator, "backward_tile", lambda *_, tile=tile: tile)
        p = Parts((5, width), torch.float32, streams=dict.fromkeys(STREAMS, torch.bfloat16))
        results.append(gradients(everything(p), p))
    for name, grad in results[0].items():
        assert off_by(results[1][name], grad) < 1e-3, name  # type: ignore[arg-type]


def test_nothing_is_divided_by_what_may_be_zero() -> None:
    """A gain, a weight, a factor and a memory of exactly 0, and a row without any momentum."""

    def degenerate(p: Parts) -> dict[str, Any]:
        inputs = two_steps(p) | {"beta_next": Scalar(constant=0.0)}
        with torch.no_grad():
            p.leaves["gain_y"][3] = 0.0
            p.leaves["weights"][4] = 0.0
            p.leaves["scale"][1] = 0.0
            for name in ("y", "force", "older_force"):
                p.leaves[name][0] = 0.0
        return inputs

    p = Parts((3, 16), torch.float32)
    for name, grad in gradients(degenerate(p), p).items():
        assert grad is None or grad.isfinite().all(), name
    compare(run, twin, degenerate, (3, 16), 1e-5)


def test_views_and_repeatability() -> None:
    """Non-contiguous inputs give the numbers of contiguous ones, and the same call the same bits."""

    def spread(t: Tensor) -> Tensor:
        wide = torch.zeros(*t.shape, 2, device=t.device)
        wide[..., 0] = t.detach()
        return wide[..., 0].requires_grad_()

    p, q = Parts((4, 32), torch.float32), Parts((4, 32), torch.float32)
    inputs, strided = everything(p), everything(q)
    for name in (*STREAMS, "scale", "older_scale", "weights"):
        strided[name] = q.leaves[name] = spread(strided[name])
    first, second = gradients(inputs, p), gradients(strided, q)
    for name, grad in first.items():
        assert torch.equal(grad, second[name]), name  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [6, 14, 20, 40])
@pytest.mark.parametrize("d", [16, 100, 768, 1024, 4096, 10_000])
def test_the_programs_of_a_multiprocessor_fit(d: int, width: int) -> None:
    """65,536 registers and 227 KiB of shared memory on an H200; at least one program; a row in one tile."""
    tile = BACKWARD_TILE(d, width, 2)
    assert tile.programs >= 1
    assert tile.programs * tile.warps * 32 * (tile.registers or 65536 // (32 * tile.warps)) <= 65536
    assert common.chunks(d, tile) * tile.chunk >= d
    if tile.stages > 1:
        assert tile.programs * (tile.stages - 1) * width * common.chunks(d, tile) * tile.chunk <= 227 * 1024


def test_one_output_at_most() -> None:
    p = Parts((1, 16), torch.float32)
    inputs = minimal(p) | {"norms": ((None, None), (None, None))}
    inputs.pop("g")
    with pytest.raises(InputError, match="one output"):
        integrator.integrator_pass(**inputs)


def test_traces_without_graph_break() -> None:
    def loss(p: Parts) -> Tensor:
        inputs = everything(p)
        inputs.pop("g")
        return sum((o * o).sum() for o in integrator.integrator_pass(**inputs) if o is not None)  # type: ignore[return-value]

    eager, traced = Parts((3, 32), torch.float32), Parts((3, 32), torch.float32)
    everything(traced)  # draws the leaves outside of the graph
    loss(eager).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(traced).backward()
    for name, leaf in eager.leaves.items():
        assert torch.equal(leaf.grad, traced.leaves[name].grad), name  # type: ignore[arg-type]


@pytest.mark.parametrize("build", [minimal, everything])
def test_operators_are_what_they_declare(build: Build) -> None:
    """Fake shapes and dtypes, no aliasing, registered autograd; the backward's operator too."""
    p = Parts((3, 16), torch.float32)
    i = build(p)
    streams = [i.get(name) for name in (*STREAMS[1:], "scale", "older_scale", "along")]
    parameters = [i["gain_y"], *i["norms"][0], i["mu_next"].raw, i["beta_next"].raw, i["gamma_next"].raw]
    numbers = ([1, 1, 2], [1.0] * 3)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.stepformer.integrator_pass.default,
        (i["x"], *streams, i["weights"], *parameters, *numbers, 1e-5, 1e-5, 1, True, torch.float32),
        test_utils=checks,
    )
    rows = [p.rows(name).detach() for name in ("du", "dx", "dV", "x_out")]
    known = [None if t is None else t.detach() for t in (*streams, i["weights"])]
    statistics = torch.ones(4, 3, device=i["x"].device)
    wants = [True, *[t is not None for t in streams]]
    torch.library.opcheck(
        torch.ops.stepformer.integrator_pass_backward.default,
        (*rows, *known, statistics, *[None if t is None else t.detach() for t in parameters], *numbers, True,
         torch.float32, wants, True),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(1, 768), (4, 257, 768), (3001, 1024), (33, 100), (777, 257), (7, 4096)])
def test_large_on_the_gpu(name: str, shape: tuple[int, ...]) -> None:
    """fp32 1e-5; bf16 streams 1e-2 (scalars and gains average over rows, rounding does too); see above."""
    build = CASES[name]
    compare(run, twin, build, shape, 1e-5, toward=toward(name))
    bound = 1e-2 if shape[0] > 1 else 3e-2
    streams = dict.fromkeys(STREAMS, torch.bfloat16)
    compare(run, twin, build, shape, bound, toward=toward(name), streams=streams, out_dtype=torch.bfloat16)
