"""Muon, Scion and PolarGrad: momentum, then the steepest step of a norm, batched over matrices and shared by ranks.

With M the running average of the gradient (Muon and PolarGrad look ahead: M <- momentum M + (1 - momentum) G once more)
and polar(M) = U V^T:

    muon       W <- (1 - lr wd) W - lr scale polar(M)
    scion      W <- (1 - lr / radius) W - lr scale lmo(M);  lmo: polar for matrices, unit-RMS rows or signs elsewhere
    polargrad  W <- (1 - lr wd) W - lr scale <M, polar(M)> polar(M);  <M, polar(M)> is the nuclear norm of M

The polar factor is taken of whole matrices. On several ranks each one is computed once, by one of them, and sent to
the others; sharded parameters are gathered before and cut again after it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepformer.ops.graphs import CudaGraphs, alone
from stepformer.ops.sharding import is_sharded, like, whole
from stepformer.optim.polar import polar, working_dtype

SCALINGS: dict[str, Callable[[int, int], float]] = {
    "jordan": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
    "rms": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    "spectral": lambda rows, cols: math.sqrt(rows / cols),
    "none": lambda rows, cols: 1.0,
}
Direction = tuple[Tensor, float]
"""What is subtracted from a parameter, times the rate: a step and its scale."""


class LmoOptimizer(torch.optim.Optimizer):
    """Momentum and a linear minimisation oracle per group.

    Groups may set `geometry` ("polar", "row" or "sign"), `nuclear` (PolarGrad's dual norm), `nesterov`, `momentum`,
    `weight_decay`, `scaling`, `method`, `dtype`, and `parts`: how many stacked matrices each parameter holds.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.02, *, graphs: CudaGraphs | None = None, **defaults: Any
    ) -> None:
        usual = {"lr": lr, "weight_decay": 0.0, "momentum": 0.95, "nesterov": True, "geometry": "polar", "parts": None}
        of_polar = {"nuclear": False, "scaling": "jordan", "method": "newton-schulz", "dtype": None}
        super().__init__(params, {**usual, **of_polar, **defaults})
        self.graphs = graphs or CudaGraphs()
        self.stacks: dict[int, list[Tensor]] = {}  # of each group, where its narrow matrices are stacked

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.graphs, self.stacks = CudaGraphs(), {}

    def create(self, p: Tensor) -> None:
        """Make what is remembered of a parameter, if it is not there yet."""
        if "momentum" not in self.state[p]:
            self.state[p]["momentum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for number, group in enumerate(self.param_groups):
            members = [i for i, p in enumerate(group["params"]) if p.grad is not None]
            if not members:
                continue
            params = [group["params"][i] for i in members]
            parts = [group["parts"][i] for i in members] if group["parts"] else [1] * len(members)
            directions = self._directions(number, self._averages(params, group), parts)
            # over lists of tensors: the same operations, on a GPU in a few launches
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            for scale in dict.fromkeys(scale for _, scale in directions):
                chosen = [(p, step) for p, (step, own) in zip(params, directions, strict=True) if own == scale]
                torch._foreach_add_([p for p, _ in chosen], [step for _, step in chosen], alpha=-group["lr"] * scale)

    def _averages(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Update the running averages and return what the steps are taken along."""
        for p in params:
            self.create(p)
        gradients = [p.grad for p in params if p.grad is not None]
        averages = [self.state[p]["momentum"] for p in params]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        if not group["nesterov"]:
            return averages
        if any(map(is_sharded, gradients)):  # torch 2.9 has the other form for them in place only
            ahead = [g.clone() for g in gradients]
            torch._foreach_lerp_(ahead, averages, group["momentum"])
            return ahead
        return list(torch._foreach_lerp(gradients, averages, group["momentum"]))

    def _directions(self, number: int, averages: list[Tensor], parts: list[int]) -> list[Direction]:
        group, first = self.param_groups[number], averages[0]
        if group["geometry"] == "sign":
            return [(m.sign(), 1.0) for m in averages]
        if group["geometry"] == "row":
            return [(unit_rows(m), 1.0) for m in averages]
        pieces = [whole(m).chunk(count) for m, count in zip(averages, parts, strict=True)]
        alike = all(m.dtype == first.dtype and m.device == first.device for m in averages)
        if alone(first) and alike and _narrow(first, group) is not None:
            return self._fixed_directions(number, averages, pieces)
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for piece in chain(*pieces):
            by_shape.setdefault(piece.shape, []).append(piece)
        found = {shape: iter(polar_directions(members, group)) for shape, members in by_shape.items()}
        directions = []
        for m, own in zip(averages, pieces, strict=True):
            steps, scales = zip(*(next(found[piece.shape]) for piece in own), strict=True)
            step = torch.cat(steps) if len(steps) > 1 else steps[0]
            directions.append((like(step, m) if is_sharded(m) else step, scales[0]))
        return directions

    def _fixed_directions(
        self, number: int, averages: list[Tensor], pieces: list[tuple[Tensor, ...]]
    ) -> list[Direction]:
        """Polar directions by way of stacks that stay where they are, so that the iteration can be captured.

        The rates and the momentum are not part of it: a schedule captures nothing again.
        """
        group = self.param_groups[number]
        # what Nesterov looks ahead to is nobody's: the steps take its place
        steps = averages if group["nesterov"] else [torch.empty_like(m) for m in averages]
        values = list(chain(*pieces))
        places = [part for step, own in zip(steps, pieces, strict=True) for part in step.chunk(len(own))]
        counts = Counter(value.shape for value in values)
        stacks = self._stacks(number, [torch.Size((n, *shape)) for shape, n in counts.items()], averages[0])
        unstacked = {shape: iter(stack.unbind()) for shape, stack in zip(counts, stacks, strict=True)}
        slots = [next(unstacked[value.shape]) for value in values]

        def iterate() -> None:
            for stack in stacks:
                stack.copy_(polar(stack, group["method"], dtype=group["dtype"]))

        key = (group["method"], group["dtype"], *((stack.data_ptr(), stack.shape) for stack in stacks))
        torch._foreach_copy_(slots, values)
        self.graphs.run(f"polar {number}", key, iterate, averages[0])
        torch._foreach_copy_(places, slots)  # a list of mixed dtypes would be added one by one
        return [(step, _scale(own[0], group)) for step, own in zip(steps, pieces, strict=True)]

    def _stacks(self, number: int, shapes: list[torch.Size], matrix: Tensor) -> list[Tensor]:
        """The stacks of a group, in these shapes: those of the last step if they fit."""
        dtype = _narrow(matrix, self.param_groups[number])
        known = self.stacks.get(number, [])
        if [(stack.shape, stack.dtype, stack.device) for stack in known] != [(s, dtype, matrix.device) for s in shapes]:
            self.stacks[number] = known = [matrix.new_empty(shape, dtype=dtype) for shape in shapes]
        return known


def unit_rows(m: Tensor) -> Tensor:
    return m / m.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-12)


def _scale(matrix: Tensor, group: dict[str, Any]) -> float:
    return SCALINGS[group["scaling"]](*matrix.shape)


def polar_directions(matrices: list[Tensor], group: dict[str, Any]) -> list[Direction]:
    """The directions of equally shaped matrices: each rank computes its share of them, all get all."""
    narrow, scale = _narrow(matrices[0], group), _scale(matrices[0], group)
    inside, outside = (scale, 1.0) if narrow is None else (1.0, scale)
    return [(step, outside) for step in shared(matrices, lambda some: _polar_steps(some, group, inside), narrow)]


def shared(
    matrices: list[Tensor], work: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
) -> Iterable[Tensor]:
    """What work on a stack (n, rows, cols) makes of equally shaped matrices: each rank does its share, all get all."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return work(_stack(matrices, dtype))
    share = -(-len(matrices) // world)
    mine = matrices[dist.get_rank() * share : (dist.get_rank() + 1) * share]
    done = matrices[0].new_zeros(share, *matrices[0].shape, dtype=dtype)
    if mine:
        done[: len(mine)] = work(_stack(mine, dtype))
    found = done.new_empty(world * share, *done.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    gather(found, done)
    return found[: len(matrices)]


def _narrow(matrix: Tensor, group: dict[str, Any]) -> torch.dtype | None:
    """What matrices are stacked in where that is narrower than they are; None: as they are.

    On a GPU the iteration rounds them to bf16 anyway, so they are copied, sent and added in half the bytes. Its factors
    are bf16 numbers too: nothing is lost, if the scale comes in later.
    """
    if not matrix.is_cuda or group["nuclear"] or group["method"] == "svd":
        return None
    dtype = group["dtype"] or working_dtype(matrix, group["method"])
    return dtype if dtype.itemsize < matrix.dtype.itemsize else None


def _stack(matrices: list[Tensor], dtype: torch.dtype | None) -> Tensor:
    if dtype is None:
        return torch.stack(matrices)
    stack = matrices[0].new_empty(len(matrices), *matrices[0].shape, dtype=dtype)
    torch._foreach_copy_(list(stack), matrices)
    return stack


def _polar_steps(stack: Tensor, group: dict[str, Any], scale: float) -> Tensor:
    """Polar factors of a stack of matrices (n, rows, cols), times their nuclear norms where asked, times a scale."""
    factors = polar(stack, group["method"], dtype=group["dtype"])
    if group["nuclear"]:
        factors = factors * (stack * factors).sum(dim=(-2, -1), keepdim=True)
    return factors if scale == 1.0 else factors * scale
