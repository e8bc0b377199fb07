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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepformer.optim.polar import polar
from stepformer.sharding import is_sharded, like, whole

SCALINGS: dict[str, Callable[[int, int], float]] = {
    "jordan": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
    "rms": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    "spectral": lambda rows, cols: math.sqrt(rows / cols),
    "none": lambda rows, cols: 1.0,
}


@dataclass(frozen=True)
class Piece:
    """One matrix to orthogonalise: a parameter, or one of the matrices stacked in it."""

    index: int
    part: int
    value: Tensor


class LmoOptimizer(torch.optim.Optimizer):
    """Momentum and a linear minimisation oracle per group.

    Groups may set `geometry` ("polar", "row" or "sign"), `nuclear` (PolarGrad's dual norm), `nesterov`, `momentum`,
    `weight_decay`, `scaling`, `method`, `dtype`, and `parts`: how many stacked matrices each parameter holds.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.02, **defaults: Any) -> None:
        usual = {
            "geometry": "polar",
            "nuclear": False,
            "nesterov": True,
            "momentum": 0.95,
            "weight_decay": 0.0,
            "scaling": "jordan",
            "method": "newton-schulz",
            "dtype": None,
            "parts": None,
        }
        super().__init__(params, {"lr": lr, **usual, **defaults})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            members = [i for i, p in enumerate(group["params"]) if p.grad is not None]
            params = [group["params"][i] for i in members]
            parts = [group["parts"][i] for i in members] if group["parts"] else [1] * len(members)
            directions = self._directions(group, [self._average(p, group) for p in params], parts)
            for p, direction in zip(params, directions, strict=True):
                if group["weight_decay"]:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(direction, alpha=-group["lr"])

    def _average(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the running average and return what the step is taken along."""
        state, gradient = self.state[p], p.grad
        assert gradient is not None
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        average = state["momentum"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(average, group["momentum"]) if group["nesterov"] else average

    def _directions(self, group: dict[str, Any], averages: list[Tensor], parts: list[int]) -> list[Tensor]:
        if group["geometry"] == "sign":
            return [m.sign() for m in averages]
        if group["geometry"] == "row":
            return [m / m.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-12) for m in averages]
        pieces = [
            Piece(i, part, value)
            for i, (m, count) in enumerate(zip(map(whole, averages), parts, strict=True))
            for part, value in enumerate(m.chunk(count))
        ]
        by_shape: dict[torch.Size, list[Piece]] = {}
        for piece in pieces:
            by_shape.setdefault(piece.value.shape, []).append(piece)
        found: dict[tuple[int, int], Tensor] = {}
        for shape, members in by_shape.items():
            scale = SCALINGS[group["scaling"]](*shape)
            steps = _shared([piece.value for piece in members], lambda stack: _polar_steps(stack, group))
            found.update({(p.index, p.part): step * scale for p, step in zip(members, steps, strict=True)})
        result = []
        for i, (m, count) in enumerate(zip(averages, parts, strict=True)):
            step = torch.cat([found[i, part] for part in range(count)]) if count > 1 else found[i, 0]
            result.append(like(step, m) if is_sharded(m) else step)
        return result


def _polar_steps(stack: Tensor, group: dict[str, Any]) -> Tensor:
    """Polar factors of a stack of matrices (n, rows, cols), times their nuclear norms where asked."""
    factors = polar(stack, group["method"], dtype=group["dtype"])
    if group["nuclear"]:
        factors = factors * (stack * factors).sum(dim=(-2, -1), keepdim=True)
    return factors


def _shared(matrices: list[Tensor], work: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """`work` on equally shaped matrices: each rank does its share of them, all get all results."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return list(work(torch.stack(matrices)))
    share = -(-len(matrices) // world)
    mine = matrices[dist.get_rank() * share : (dist.get_rank() + 1) * share]
    done = matrices[0].new_zeros(share, *matrices[0].shape)
    if mine:
        done[: len(mine)] = work(torch.stack(mine))
    everything = done.new_empty(world * share, *done.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    gather(everything, done)
    return list(everything[: len(matrices)])
