"""Fused passes: a row program, compiled and launched, with its gradient.

`row_pass` takes rows (..., d), numbers per token, gains and one line of numbers (numbers.py), and gives the program's
outputs. Rows that somebody after this pass reads again are handed on: they come back as outputs of the pass, so that
their gradients arrive here and are added while that of the row is written; else autograd would add them in passes of
its own. Rows with one gradient, as the velocity and the answer of a momentum rule, share one tensor of it.

A row of which several later passes read a multiple each is lent: it comes back once for each of them, as if it were
multiplied by that number here. So a pass that borrows many rows into one sum writes one gradient for all of them and
reads none of them again; the lender, who has the row at hand, adds the gradients up, and finds those of the numbers.

Rows that are read times a number per token alone may be weighted: then the pass gives no gradient of the row, but one
of each product, often the gradient of an output as it has arrived. Whoever has made the numbers from the rows and
writes the rows' gradient anyway (connection_passes.py) adds them up. The products come as tensors that nobody reads.

Traffic is what a pass costs: every row is read once and written once. The backward reads the gradients that arrive and
the rows of `choose_kept`, copied to shared memory while the row before them is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepformer.ops import common
from stepformer.ops.common import dense, packed
from stepformer.ops.operators import operator, traced
from stepformer.ops.row_launching import Kernel, backward_tile, forward_tile
from stepformer.ops.row_printing import Task, statistics_of
from stepformer.ops.row_programs import (
    NOTHING,
    Gradients,
    Program,
    borrowing,
    by_text,
    choose_kept,
    differentiate,
    through,
)
from stepformer.ops.symbol_graphs import topological

KINDS = ("row", "stat")  # of outputs


class Backward(NamedTuple):
    """How some gradients lead to others: the kernel, what it stores under which name, and where equal ones are."""

    kernel: Kernel
    found: Gradients
    stored: dict[str, str]  # input -> the row in which its gradient is written
    same: dict[str, str]  # input -> the output whose gradient is its own, as it arrived


class Pass:
    """A program ready to run; `handed` names the rows that it hands on, `borrows` those that others lend, `weighted`
    rows and numbers per token of whose products it gives the gradients."""

    def __init__(
        self,
        program: Program,
        handed: tuple[str, ...] = (),
        borrows: tuple[tuple[str, int], ...] = (),
        weighted: tuple[tuple[str, str], ...] = (),
    ) -> None:
        program = borrowing(program, borrows) if borrows else program
        self.program, self.handed, self.scaled = program, handed, dict(borrows)
        counts = program.inputs
        self.rows = program.rows
        self.stats = [f"s{i}" for i in range(counts["stat"])]
        self.vectors = [f"g{i}" for i in range(counts["vec"])]
        self.count = counts["num"]
        self.products = {f"{row}_{stat}": program.multiples(row, "stat")[stat] for row, stat in weighted}
        read = [*self.rows, *self.stats, *self.vectors, *(["scalars"] if self.count else [])]
        self.names = [*read, *self.products]
        self.parameters = read[len(self.rows) :]
        self.outputs = program.names()
        row_outputs, stat_outputs = ({k: n for k, n in self.outputs.items() if n.kind == kind} for kind in KINDS)
        self.carried = len(self.outputs) - program.points
        learned = [*self.rows, *self.stats, *self.vectors, *(f"n{i}" for i in range(self.count)), *self.products]
        self.kept = choose_kept(program, frozenset(learned))
        self.reached = {**self.outputs, **{f"h_{name}": program.input(name) for name in handed}, **program.lent()}
        found = self._found(tuple(self.reached), learned)
        nodes = topological(found.all())
        sums = {n for n in topological(program.outputs) if n.op == "sum"}  # of the forward, which leaves them too
        self.statistics = *statistics_of(found.all()), *(n for n in nodes if n in sums)
        divided = frozenset(n.args[0].attr for n in nodes if n.op == "quotient" and n.args[0].kind == "vec")
        self.divided = divided
        self.forwards = {
            keep: Kernel(
                Task(
                    "row_forward",
                    row_outputs,
                    stat_outputs,
                    rounded=frozenset(k for k in self.kept if k in self.outputs),
                    leaves=self.statistics if keep else (),
                    divided=divided,
                    scaled=self.scaled,
                )
            )
            for keep in (True, False)
        }
        self.backwards: dict[Any, Backward] = {}

    def _found(self, present: tuple[str, ...], wanted: Sequence[str]) -> Gradients:
        arrived = {k: self.reached[k] for k in present}
        found = through(self.kept, self.outputs, differentiate(arrived, set(wanted), self.products))
        assert found is not None
        return found

    def backward(
        self, present: dict[str, torch.dtype], needed: tuple[str, ...], dtypes: tuple[torch.dtype, ...]
    ) -> Backward:
        """For the gradients that arrive and those that are asked for, in these dtypes."""
        key = (*present.items(), needed, dtypes)
        if key not in self.backwards:
            wanted = [*needed, *(f"n{i}" for i in range(self.count) if "scalars" in needed)]
            found = self._found(tuple(present), wanted)
            first: dict[Any, str] = {}
            kinds = dict(zip(self.names, dtypes, strict=True))
            arrived = {f"d_{k}": k for k, kind in present.items() if self.reached[k].kind == "row"}
            same = {
                k: arrived[n.attr]
                for k, n in found.rows.items()
                if n.op == "in" and n.attr in arrived and present[arrived[n.attr]] == kinds[k]
            }
            stored = {k: first.setdefault((n, kinds[k]), k) for k, n in found.rows.items() if k not in same}
            sums = Gradients(sums=found.sums)
            task = Task(
                "row_backward",
                {k: found.rows[k] for k in dict.fromkeys(stored.values())},
                found.stats,
                sums,
                finds=self.statistics,
                divided=self.divided,
                numbers=self.program.numbers if any(k.startswith("n") for k in found.sums) else 0,
                scaled=self.scaled,
            )
            self.backwards[key] = Backward(Kernel(task), found, stored, same)
        return self.backwards[key]

    # running

    def unwritten(
        self, like: Tensor, carried: torch.dtype, point: torch.dtype, keep: bool
    ) -> tuple[list[Tensor], Tensor]:
        """Memory for the outputs and the statistics."""
        kinds = [carried] * self.carried + [point] * self.program.points
        outs = [
            like.new_empty(like.shape, dtype=kind)
            if n.kind == "row"
            else like.new_empty(like.shape[:-1], dtype=torch.float32)
            for n, kind in zip(self.outputs.values(), kinds, strict=True)
        ]
        lines = len(self.statistics) if keep else 0
        return outs, like.new_empty((lines, like.numel() // max(1, like.shape[-1])), dtype=torch.float32)

    def forward(
        self, tensors: Sequence[Tensor], carried: torch.dtype, point: torch.dtype, keep: bool
    ) -> tuple[list[Tensor], Tensor]:
        like = tensors[0]
        outs, statistics = self.unwritten(like, carried, point, keep)
        named: dict[str, Any] = {
            f"p_{k}": dense(t) for k, t in zip(self.names, tensors, strict=True) if k not in self.products
        }
        named["scalars"] = named.get("p_scalars")
        named |= {f"o_{k}": t for k, t in zip(self.outputs, outs, strict=True)}
        named["stats"] = statistics if keep and len(self.statistics) else None
        d = like.shape[-1]
        if like.numel():
            self.forwards[keep].launch(named, like.numel() // d, d, forward_tile(d))
        return outs, statistics

    def gradients(
        self, grads: dict[str, Tensor], kept: Sequence[Tensor], statistics: Tensor, parameters: dict[str, Tensor],
        needed: tuple[str, ...], dtypes: tuple[torch.dtype, ...], shape: Sequence[int],
    ) -> dict[str, Tensor]:  # fmt: skip
        """By name of the inputs; `grads` by name of the outputs."""
        plan = self.backward({k: t.dtype for k, t in grads.items()}, needed, dtypes)
        found = {k: grads[at] for k, at in plan.same.items()}
        if not plan.stored and not plan.found.stats and not plan.found.sums:
            return found  # nothing else that is asked for depends on what has arrived
        stats = {f"d_{k}": t for k, t in grads.items() if self.reached[k].kind == "stat"}
        rows = {f"d_{k}": t for k, t in grads.items() if f"d_{k}" not in stats}
        printer_rows = {**rows, **dict(zip(self.kept, kept, strict=True))}
        d, n = shape[-1], math.prod(shape[:-1]) if shape[-1] else 0
        kinds = dict(zip(self.names, dtypes, strict=True))
        device = next(iter(grads.values())).device
        named: dict[str, Any] = {f"p_{k}": packed(t) for k, t in printer_rows.items()}
        named |= {f"p_{k}": dense(t) for k, t in {**parameters, **stats}.items()}
        named["scalars"] = named.get("p_scalars")
        named["stats"] = statistics if statistics.numel() else None
        task = plan.kernel.task
        outs = {k: torch.empty(tuple(shape), dtype=kinds[k], device=device) for k in task.rows}
        singles = {k: torch.empty(tuple(shape[:-1]), dtype=torch.float32, device=device) for k in task.stats}
        named |= {f"o_{k}": t for k, t in (*outs.items(), *singles.items())}
        vectors = sorted((k for k in plan.found.sums if k.startswith("g")), key=lambda k: int(k[1:]))
        width = -(-(len(vectors) * d + task.numbers) // 8) * 8
        reads = [t for k, t in printer_rows.items()]
        room = common.shared_memory(device)
        tile = backward_tile(d, len(reads), len(vectors), common.column_bytes(*reads), len(task.stats), room)
        partial = plan.kernel.launch(named, n, d, tile, width) if n else None
        found |= {k: outs[at] for k, at in plan.stored.items()} | singles
        if partial is not None:
            total = common.sum_lines(partial)
            for place, k in enumerate(vectors):
                found[k] = total[place * d : (place + 1) * d].to(kinds[k])
            if task.numbers:
                found["scalars"] = total[len(vectors) * d :][: task.numbers]
        return found


@cache
def compiled(
    text: str,
    handed: tuple[str, ...] = (),
    borrows: tuple[tuple[str, int], ...] = (),
    weighted: tuple[tuple[str, str], ...] = (),
) -> Pass:
    """The pass of a program, one for all that ask."""
    return Pass(by_text(text), handed, borrows, weighted)


def passed_on(
    program: Program, tensors: Sequence[Tensor], outs: Sequence[Tensor], handed: tuple[str, ...]
) -> dict[str, Tensor]:
    """The rows that a pass hands on and lends, by name."""
    lent = {f"l{i}": (outs if name[0] == "o" else tensors)[int(name[1:])] for i, (name, _) in enumerate(program.lends)}
    return {name: tensors[int(name[1:])] for name in handed} | lent


class _RowPass(torch.autograd.Function):
    """A pass as eager code calls it: rows that are handed on are outputs too."""

    @staticmethod
    def forward(ctx: Any, own: Pass, carried: torch.dtype, point: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        outs, statistics = own.forward(tensors, carried, point, True)
        _keep(ctx, own, tensors, outs, statistics)
        passed = passed_on(own.program, tensors, outs, own.handed)
        return *outs, *(t if name in own.handed else t.detach() for name, t in passed.items())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, None, *_gradients(ctx, grads)


def _keep(ctx: Any, own: Pass, tensors: Sequence[Tensor], outs: Sequence[Tensor], statistics: Tensor) -> None:
    by_name = {**dict(zip(own.names, tensors, strict=True)), **dict(zip(own.outputs, outs, strict=True))}
    parameters = [by_name[k] for k in own.parameters]
    ctx.own, ctx.shape, ctx.dtypes = own, tensors[0].shape, tuple(t.dtype for t in tensors)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(statistics, *(by_name[k] for k in own.kept), *parameters)


def _gradients(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    own: Pass = ctx.own
    statistics, *rest = ctx.saved_tensors
    kept, others = rest[: len(own.kept)], rest[len(own.kept) :]
    parameters = dict(zip(own.parameters, others, strict=True))
    present = {k: g for k, g in zip(own.reached, grads, strict=False) if g is not None}
    needs = ctx.needs_input_grad[-len(own.names) :]
    needed = tuple(k for k, need in zip(own.names, needs, strict=True) if need)
    if not present or not needed:
        return [None] * len(own.names)
    found = own.gradients(present, kept, statistics, parameters, needed, ctx.dtypes, ctx.shape)
    return [found.get(k) if k in needed else None for k in own.names]


# for compilers


def _fake_pass(text: str, tensors: list[Tensor], carried: torch.dtype, point: torch.dtype, keep: bool) -> list[Tensor]:
    outs, statistics = compiled(text).unwritten(tensors[0], carried, point, keep)
    return [*outs, statistics]


@operator("row_pass", fake=_fake_pass)
def _row_pass(text: str, tensors: list[Tensor], carried: torch.dtype, point: torch.dtype, keep: bool) -> list[Tensor]:
    outs, statistics = compiled(text).forward(tensors, carried, point, keep)
    return [*outs, statistics]


def _dtypes(names: str) -> tuple[torch.dtype, ...]:
    """An operator takes no list of dtypes, so their names are written one after another."""
    return tuple(getattr(torch, name) for name in names.split())


def _fake_backward(
    text: str, grads: list[Tensor], names: str, kept: list[Tensor], statistics: Tensor, parameters: list[Tensor],
    needed: str, dtypes: str, shape: list[int],
) -> list[Tensor]:  # fmt: skip
    own = compiled(text)
    shapes = dict.fromkeys(own.rows, shape) | dict.fromkeys(own.stats, shape[:-1])
    shapes |= dict.fromkeys(own.vectors, shape[-1:]) | {"scalars": [own.program.numbers]}
    kinds = dict(zip(own.names, _dtypes(dtypes), strict=True))
    return [grads[0].new_empty(shapes[k], dtype=kinds[k]) for k in needed.split()]


@operator("row_pass_backward", fake=_fake_backward)
def _row_pass_backward(
    text: str, grads: list[Tensor], names: str, kept: list[Tensor], statistics: Tensor, parameters: list[Tensor],
    needed: str, dtypes: str, shape: list[int],
) -> list[Tensor]:  # fmt: skip
    own = compiled(text)
    others = dict(zip(own.parameters, parameters, strict=True))
    given = dict(zip(names.split(), grads, strict=True))
    found = own.gradients(given, kept, statistics, others, tuple(needed.split()), _dtypes(dtypes), shape)
    seen = {t.untyped_storage().data_ptr() for t in grads}
    result = []
    for k in needed.split():
        t = found.get(k)
        if t is None:
            t = _fake_backward(text, grads, names, kept, statistics, parameters, k, dtypes, shape)[0].zero_()
        memory = t.untyped_storage().data_ptr()
        # what an operator is given and what it gives share no memory, and what it gives lies as compilers were told
        t = t.clone(memory_format=torch.contiguous_format) if memory in seen else t
        seen.add(memory)
        result.append(t)
    return result


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    text, tensors, *_ = inputs
    own = compiled(text)
    _keep(ctx, own, tensors, output[:-1], output[-1])
    ctx.text = text


def _backward(ctx: Any, grads: list[Tensor | None]) -> Any:
    own: Pass = ctx.own
    statistics, *rest = ctx.saved_tensors
    kept, others = rest[: len(own.kept)], rest[len(own.kept) :]
    present = {k: g for k, g in zip(own.outputs, grads, strict=False) if g is not None}
    needs = ctx.needs_input_grad[1]
    needed = [k for k, need in zip(own.names, needs, strict=True) if need]
    if not present or not needed:
        return None, [None] * len(own.names), None, None, None
    found = dict(
        zip(
            needed,
            torch.ops.stepformer.row_pass_backward(
                ctx.text, list(present.values()), " ".join(present), kept, statistics, others,
                " ".join(needed), " ".join(str(t).removeprefix("torch.") for t in ctx.dtypes), list(ctx.shape),
            ),
            strict=True,
        )
    )  # fmt: skip
    return None, [found.get(k) for k in own.names], None, None, None


_row_pass.register_autograd(_backward, setup_context=_setup)


def row_pass(
    program: Program,
    tensors: Sequence[Tensor],
    carried: torch.dtype,
    point: torch.dtype,
    handed: tuple[str, ...] = (),
    borrows: tuple[tuple[str, int], ...] = (),
    shares: Mapping[tuple[str, str], Tensor] = NOTHING,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs of a program, and the rows that it hands on and lends by name.

    `tensors`: the rows, the numbers per token, the gains, and the line of numbers if the program has any; `point` is
    the dtype of what oracles read, `carried` that of all other outputs. `shares`: what takes the gradients of weighted
    rows times their numbers, by the names of both. Not twice differentiable.
    """
    if traced(tensors[0]):
        keep = torch.is_grad_enabled()
        *outs, _ = torch.ops.stepformer.row_pass(program.text, list(tensors), carried, point, keep)
        return outs, passed_on(program, tensors, outs, handed)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        outs, _ = compiled(program.text).forward(tensors, carried, point, False)
        return outs, passed_on(program, tensors, outs, handed)
    own = compiled(program.text, handed, borrows, tuple(shares))
    weighted = {row for row, _ in shares}
    tensors = [t.detach() if f"r{i}" in weighted else t for i, t in enumerate(tensors)]
    found = _RowPass.apply(own, carried, point, *tensors, *shares.values())
    names = (*handed, *program.lent())
    return list(found[: len(own.outputs)]), dict(zip(names, found[len(own.outputs) :], strict=True))
