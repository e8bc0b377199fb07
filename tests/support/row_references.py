"""Row programs as plain PyTorch: what a generated pass, a table of numbers or a whole plan should compute.

Everything here is differentiable by autograd and runs in the dtype of what it is given. It shares with the generated
kernels only the symbols, which say what is computed: how each operation is done is written anew.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import stepformer as sf
from stepformer.model.engines import fused
from stepformer.model.engines.planning import Plan
from stepformer.ops import numbers, row_passes
from stepformer.ops.linear import rounded_weights
from stepformer.ops.row_programs import LETTERS, Program, aligned
from stepformer.ops.symbol_graphs import topological
from stepformer.ops.symbols import Symbol

TERMS = 24  # of the series of phi below 1: the next one is at most 1 / 24! = 2e-24


def phi(s: Tensor, order: int) -> Tensor:
    """phi_k(s) = sum_j (-s)^j / (j + k)!; above 1 by its recurrence from e^-s, which loses no more than k digits."""
    near = s.abs() < 1
    inner, outer = torch.where(near, s, 0.5), torch.where(near, 2.0, s)
    series = torch.zeros_like(inner)
    for j in reversed(range(TERMS)):
        series = 1 / math.factorial(j + order) - inner * series
    value = torch.exp(-outer)
    for k in range(order):
        value = (1 / math.factorial(k) - value) / outer
    return torch.where(near, series, value)


def _clamped(a: Tensor, attr: tuple[float, float]) -> Tensor:
    return a.clamp(*attr)


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "rec": torch.reciprocal,
    "quotient": lambda a: torch.where(a == 0, 0.0, 1 / torch.where(a == 0, 1.0, a)),
    "safe_rec": lambda a: torch.where(a > 0, 1 / torch.where(a > 0, a, 1.0), 0.0),
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "exp": torch.exp,
    "log": torch.log,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": lambda a: torch.logaddexp(a, torch.zeros_like(a)),  # F.softplus is linear from 20 on
    "abs": torch.abs,
    "sign": torch.sign,
    "relu": F.relu,
    "step": lambda a: (a > 0).to(a.dtype),
    "detach": lambda a: a.detach(),
    "sum": lambda a: a.sum(dim=-1, keepdim=True),
    "mean": lambda a: a.mean(dim=-1, keepdim=True),
    "first": lambda a, b: a.sum(dim=-1, keepdim=True),
    "second": lambda a, b: b.sum(dim=-1, keepdim=True),
}


def evaluate(outputs: Iterable[Symbol], inputs: Mapping[str, Tensor], width: int | None = None) -> list[Tensor]:
    """The outputs of a program from its inputs by name.

    Rows are (..., d), numbers per token (...), gains (d,), numbers have one element; results that are one number per
    token are (...) again, and those of kind row have the shape of the rows. `width`: d, if there are no rows.
    """
    outputs = list(outputs)
    values: dict[Symbol, Tensor] = {}
    like = next(iter(inputs.values()), torch.zeros((), dtype=torch.float64))
    shape: tuple[int, ...] = ()
    for n in topological(outputs):
        if n.kind == "row" and not n.args:
            shape = tuple(inputs[n.attr].shape)
    d = shape[-1] if shape else width
    for n in topological(outputs):
        a = [values[m] for m in n.args]
        if n.op == "const":
            value = torch.tensor(n.attr, dtype=like.dtype, device=like.device)
        elif n.op == "inv_d":
            assert d is not None
            value = torch.tensor(1 / d, dtype=like.dtype, device=like.device)
        elif not n.args:
            value = inputs[n.attr]
            value = value[..., None] if n.kind == "stat" else value.reshape(()) if n.kind == "num" else value
        elif n.op == "rdev":
            centred = a[0] - a[2] if n.attr else a[0]
            value = (centred.square().mean(dim=-1, keepdim=True) + a[1]).rsqrt()
        elif n.op == "hat":
            value = (a[0] - a[2] if len(a) == 3 else a[0]) * a[1]
        elif n.op == "phi":
            value = phi(a[0], n.attr)
        elif n.op == "clamp":
            value = _clamped(a[0], n.attr)
        elif n.op == "inside":
            value = ((a[0] >= n.attr[0]) & (a[0] <= n.attr[1])).to(a[0].dtype)
        else:
            value = OPERATIONS[n.op](*a)
        values[n] = value
    found = []
    for n in outputs:
        value = values[n]
        if n.kind == "stat":
            value = value[..., 0]
        found.append(value.expand(shape) if n.kind == "row" else value)
    return found


def named(program: Program, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors that `row_pass` takes, by the names of a program's inputs; numbers one by one."""
    counts = program.inputs
    names = [f"{LETTERS[kind]}{i}" for kind in ("row", "stat", "vec") for i in range(counts[kind])]
    found = dict(zip(names, tensors, strict=False))
    if counts["num"]:
        found |= {f"n{i}": tensors[-1][i] for i in range(counts["num"])}
    return found


def reference_pass(program: Program, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a program from what `row_pass` takes, in the dtype of the tensors."""
    return evaluate(program.outputs, named(program, tensors))


def reference_numbers(
    lines: Iterable[Sequence[Symbol]], raws: Mapping[str, Tensor], width: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """The line of numbers of each pass, filled up with zeros as `Numbers` does it."""
    inputs = {name: raw.to(dtype).reshape(()) for name, raw in raws.items()}
    found = []
    for line in lines:
        values = evaluate(line, inputs, width)
        padding = [torch.zeros((), dtype=dtype)] * (aligned(len(line)) - len(line))
        found.append(torch.stack([*values, *padding]).to(dtype))
    return found


@contextlib.contextmanager
def as_pytorch(plan: Plan, width: int) -> Iterator[list[str]]:
    """Inside, a run of this plan calls no kernel of its own; the list that is given grows by the text of every pass."""
    texts: list[str] = []

    def replaced(
        program: Program,
        tensors: Sequence[Tensor],
        carried: torch.dtype,
        point: torch.dtype,
        handed: tuple[str, ...] = (),
        borrows: Any = (),
        shares: Any = (),
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        texts.append(program.text)
        found = reference_pass(program, tensors)
        kinds = [carried] * (len(found) - program.points) + [point] * program.points
        outs = [t.to(kind) for t, kind in zip(found, kinds, strict=True)]
        return outs, row_passes.passed_on(program, tensors, outs, handed)

    def lines(_: Any, raws: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        values = [value for raw in raws for value in raw]
        return reference_numbers(plan.lines, dict(zip(plan.names, values, strict=True)), width)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_passes, "row_pass", replaced)
        patch.setattr(numbers, "lines_of", lines)
        yield texts


def run_plan(model: sf.Model, ids: Tensor) -> Tensor:
    """The logits of a model by its plan as PyTorch, whatever kernels could take."""
    plan = model.plan()
    assert isinstance(plan, Plan), plan
    call = model.call_of(ids)
    start = model.start(ids, call.positions, from_zero=True)
    with as_pytorch(plan, model.config.d_model) as texts, rounded_weights(model.blocks, model.shared):
        h = fused.run(model, start, call, None)
    assert len(texts) == len(plan.passes())
    return model.logits_of(h)
