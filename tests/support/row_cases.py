"""Programs of generated passes, inputs for them, and the comparison of a pass by kernels with plain PyTorch.

fp32: 1e-5 of the norm (measured 1e-6: sums of some hundred terms, two divisions). bf16: 1e-2, a rounding of 2^-9 in
what is written and in what the backward reads again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import stepformer as sf
from draws import seeded
from helpers import tiny
from row_references import reference_pass
from stepformer.ops.row_passes import row_pass
from stepformer.ops.row_programs import Program

SIZE: dict[str, Any] = {"n_layer": 3, "n_head": 2, "d_model": 16, "context": 8, "vocab_size": 17}
SINGLE, HALF = torch.float32, torch.bfloat16
FP64, FP32, BF16 = 1e-12, 1e-5, 1e-2
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


def gradients(model: sf.Model, logits: Tensor) -> dict[str, Tensor]:
    """Of all parameters, for a gradient of the logits that is drawn."""
    weight = torch.randn(logits.shape, generator=seeded(5), dtype=torch.float64)
    model.zero_grad()
    logits.backward(weight.to(logits.dtype))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def programs_of(name: str, **changes: Any) -> list[Program]:
    """The different passes of a model."""
    plan = tiny(name, **SIZE, **changes).plan()
    return list({step.program.text: step.program for step in plan.passes()}.values())


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gd": ("vanilla", {}),
    "gd, gainless": ("vanilla", {"norm": "rmsnorm"}),
    "gd, biases": ("vanilla", {"bias": True}),
    "nesterov": ("yurii", {}),
    "nesterov, skip": ("yurii", {"embedding_skip": True}),
    "nesterov, two points": ("nesterov-euler", {}),
    "adam": ("adam", {}),
    "exp-euler": ("symp-exp-euler", {}),
    "etd-ab2": ("symp-etd-ab2", {}),
    "imex": ("imex-ln-k2-ama", {}),
}
CASES = [(case, i) for case, (name, changes) in MODELS.items() for i in range(len(programs_of(name, **changes)))]


def program(case: tuple[str, int]) -> Program:
    name, changes = MODELS[case[0]]
    return programs_of(name, **changes)[case[1]]


def draw(*shape: int, seed: int, dtype: torch.dtype = SINGLE, positive: bool = False, device: str = "cpu") -> Tensor:
    values = torch.randn(shape, generator=seeded(seed), dtype=torch.float64)
    values = values.abs() + 0.2 if positive else values
    return values.to(device, dtype).requires_grad_()


def inputs_of(
    program: Program, shape: tuple[int, ...], dtype: torch.dtype = SINGLE, device: str = "cpu"
) -> list[Tensor]:
    """What `row_pass` takes; roots are of positive rows, and numbers are positive."""
    counts, seeds = program.inputs, itertools.count()
    roots = "sqrt" in program.text
    rows = [draw(*shape, seed=next(seeds), dtype=dtype, positive=roots, device=device) for _ in range(counts["row"])]
    stats = [draw(*shape[:-1], seed=next(seeds), device=device) for _ in range(counts["stat"])]
    gains = [draw(shape[-1], seed=next(seeds), positive=True, device=device) for _ in range(counts["vec"])]
    line = [draw(program.numbers, seed=next(seeds), positive=True, device=device)] if counts["num"] else []
    return [*rows, *stats, *gains, *line]


def close(a: Tensor, b: Tensor, tolerance: float, what: object = "", least: float = 0.0) -> None:
    """To a share of the norm, or of `least` if that is more."""
    assert a.shape == b.shape
    error, size = float((a.detach().double() - b).norm()), max(float(b.norm()), least)
    assert error <= tolerance * size, (what, error / size if size else error)


def check_pass(
    program: Program,
    tensors: list[Tensor],
    *,
    carried: torch.dtype = SINGLE,
    point: torch.dtype = SINGLE,
    handed: tuple[str, ...] = (),
    arrive: Callable[[int], bool] = lambda i: True,
) -> None:
    """Outputs and all gradients of a pass; `arrive` says of which results a gradient comes back.

    Gradients of gains and numbers are sums that may cancel: they keep the rounding of terms that are as large as the
    gradients that arrive.
    """
    tolerance = FP32 if SINGLE == carried == point == tensors[0].dtype else BF16
    found, passed = row_pass(program, tensors, carried, point, handed)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    expected = reference_pass(program, wide)
    kinds = [carried] * (len(found) - program.points) + [point] * program.points
    assert [t.dtype for t in found] == kinds
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        close(a, b.detach(), tolerance, f"output {i}")
    assert tuple(passed) == handed
    for name, t in passed.items():
        assert torch.equal(t, tensors[int(name[1:])])
    results = [*found, *passed.values()]
    twins = [*expected, *(wide[int(name[1:])] for name in handed)]
    chosen = [i for i, t in enumerate(results) if arrive(i) and twins[i].requires_grad]
    device = tensors[0].device.type
    weights = [draw(*results[i].shape, seed=50 + i, dtype=results[i].dtype, device=device).detach() for i in chosen]
    arrived = math.sqrt(sum(float(w.double().square().sum()) for w in weights))
    asked = [i for i, t in enumerate(tensors) if t.requires_grad]
    slopes = torch.autograd.grad([results[i] for i in chosen], [tensors[i] for i in asked], weights, allow_unused=True)
    wanted = torch.autograd.grad(
        [twins[i] for i in chosen], [wide[i] for i in asked], [w.double() for w in weights], allow_unused=True
    )
    for i, a, b in zip(asked, slopes, wanted, strict=True):
        if b is None or not b.any():
            assert a is None or not a.any(), f"gradient of input {i}"
            continue
        assert a is not None, f"gradient of input {i}"
        assert a.dtype == tensors[i].dtype
        summed = i >= len(program.rows) + program.inputs["stat"]
        close(a, b, tolerance, f"gradient of input {i}", least=arrived if summed else 0.0)


FEW = [("gd", 1), ("nesterov", 1), ("nesterov, skip", 1), ("adam", 1), ("exp-euler", 1), ("nesterov, two points", 1)]
QUICK = [*FEW, ("gd, gainless", 1), ("gd, biases", 1), ("nesterov", 0), ("nesterov", 3)]


def quickly(quick: Sequence[Any], everything: Sequence[Any] = CASES) -> list[Any]:
    """All of them, slow but for some: the interpreter takes half a second for a pass over three rows."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in everything]
