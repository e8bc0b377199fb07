"""The Hessian of a model's loss in its parameters, by products with vectors.

    H v = grad_theta (grad_theta L . v),    L = mean cross-entropy over fixed batches

by double backward, the one way whose second derivatives of LayerNorm are right in every torch we know. Fused attention
has no second derivative, so everything runs with plain products in place of fused kernels. The model that is measured
is never written to: all happens in a copy that shares its memory. Beside it stands the loss along random directions
through the weights, scaled so that models of different size can be compared.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from stepformer.base.errors import InputError, StepformerError
from stepformer.measure.diagnostics.common import generator_of, twin
from stepformer.measure.diagnostics.lanczos import dot, norm
from stepformer.model import IGNORE, Model
from stepformer.ops import kernels

Batch = tuple[Tensor, Tensor]
Normalise = Literal["tensor", "filter"]

# Of the finite differences, relative to the size of each tensor. The best of them counts: constrained attention curves
# so much that it needs the shortest, which for others is all rounding.
STEPS = {torch.float32: (3e-3, 1e-3, 1e-4), torch.float64: (1e-4, 1e-5, 1e-6)}
SMALLEST = 0.01  # a tensor that is (nearly) zero is moved as if its entries had this size
# Beyond these something is wrong, not merely rounded: trained presets stay at least ten times below.
LIMITS = {
    torch.float32: {"repeat": 1e-3, "finite_difference": 2e-2, "symmetry": 1e-2},
    torch.float64: {"repeat": 1e-9, "finite_difference": 1e-4, "symmetry": 1e-7},
}


class HessianOperator:
    """H of the mean token loss of `model` over `batches` of (inputs, targets); `operator @ v` for flat vectors v.

    Its parameters are those that require a gradient, each once, in the order of `names`. `dtype` is that of the
    computation, the model's own if None. Batches are worked off one after the other: memory is that of one of them.
    """

    def __init__(self, model: Model, batches: Sequence[Batch], *, dtype: torch.dtype | None = None) -> None:
        self.model = twin(model, dtype or model.embed.tok_emb.weight.dtype)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not named:
            raise InputError("No parameter of the model requires a gradient, so there is no Hessian.")
        self.names, self.parameters = list(named), list(named.values())
        self.sizes = [p.numel() for p in self.parameters]
        self.size = sum(self.sizes)
        self.device, self.dtype = self.parameters[0].device, self.parameters[0].dtype
        if self.dtype not in STEPS:
            raise InputError(f"Curvature needs fp32 or fp64, not {self.dtype}: give dtype=torch.float32.")
        counts = [int((targets != IGNORE).sum()) for _, targets in batches]
        self.tokens = sum(counts)
        if not self.tokens:
            raise InputError("The batches have no targets, so there is no loss.")
        self.batches = list(batches)
        self.weights = [count / self.tokens for count in counts]

    def _losses(self) -> Iterator[tuple[Tensor, float]]:
        """The loss of every batch and its weight in the mean."""
        for (inputs, targets), weight in zip(self.batches, self.weights, strict=True):
            if weight:
                loss = self.model(inputs.to(self.device), targets.to(self.device)).loss
                assert loss is not None
                yield loss, weight

    @torch.no_grad()
    def loss(self) -> float:
        with kernels.twice_differentiable():
            return math.fsum(float(loss) * weight for loss, weight in self._losses())

    def gradient(self) -> Tensor:
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        with torch.enable_grad(), kernels.twice_differentiable():
            for loss, weight in self._losses():
                total += self.flat(torch.autograd.grad(weight * loss, self.parameters, materialize_grads=True))
        return total

    def product(self, v: Tensor) -> Tensor:
        """H v."""
        if v.shape != (self.size,):
            raise InputError(f"The Hessian has {self.size:,} columns; a vector of shape {tuple(v.shape)} was given.")
        along = self.split(v.to(self.device, self.dtype))
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        with torch.enable_grad(), kernels.twice_differentiable():
            for loss, weight in self._losses():
                gradient = torch.autograd.grad(
                    weight * loss, self.parameters, create_graph=True, materialize_grads=True
                )
                # a gradient that is zero whatever the parameters has no second derivative
                pairs = [(g, part) for g, part in zip(gradient, along, strict=True) if g.requires_grad]
                ends, parts = zip(*pairs, strict=True)
                total += self.flat(torch.autograd.grad(ends, self.parameters, parts, materialize_grads=True))
        if not bool(total.isfinite().all()):
            raise StepformerError("A Hessian-vector product is not finite at these weights: nothing is measured.")
        return total

    __matmul__ = product

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """One vector of what belongs to the parameters, in their order."""
        return torch.cat([t.detach().reshape(-1) for t in tensors])

    def split(self, v: Tensor) -> list[Tensor]:
        """The parts of a flat vector, in the parameters' shapes."""
        return [part.view_as(p) for part, p in zip(v.split(self.sizes), self.parameters, strict=True)]

    def draw(self, kind: Literal["normal", "signs"], seed: int, purpose: str) -> Tensor:
        """A random vector of independent normal numbers or signs, the same on every device.

        Each parameter has its own stream, keyed by its name, as in `Model.reset_parameters`. So two architectures
        are probed alike in the parameters that they share.
        """
        parts = []
        for name, parameter in zip(self.names, self.parameters, strict=True):
            generator = generator_of(seed, purpose, name)
            if kind == "normal":
                part = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            else:
                part = torch.randint(2, parameter.shape, generator=generator, dtype=torch.int8) * 2 - 1
            parts.append(part.to(self.device, self.dtype))
        return self.flat(parts)

    def start(self, number: int, seed: int = 0) -> Tensor:
        """Where a search for eigenvectors begins."""
        return self.draw("normal", seed, f"start {number}")

    @contextlib.contextmanager
    def moved(self, direction: Tensor, by: float = 1.0) -> Iterator[None]:
        """The parameters at theta + by * direction inside the block; those of the measured model stay as they are."""
        here = [p.data for p in self.parameters]
        try:
            for p, part in zip(self.parameters, self.split(direction), strict=True):
                p.data = p.data + by * part
            yield
        finally:
            for p, data in zip(self.parameters, here, strict=True):
                p.data = data

    def check(self, seed: int = 0) -> dict[str, float]:
        """How far this is from a Hessian, before anything is built on it; gross faults are errors.

        repeat: |H d - H d| / |H d|, the same product twice. finite_difference: |D - H d| / |H d| with the central
        difference D of gradients along d. symmetry: |u.H d - d.H u| / |H d| for normal u, whose products with H d are
        of the size of |H d|.
        """
        drawn = zip(self.split(self.draw("normal", seed, "check direction")), self.parameters, strict=True)
        d = self.flat([part * max(SMALLEST, float(p.detach().square().mean()) ** 0.5) for part, p in drawn])
        u = self.draw("normal", seed, "check symmetry")
        hd, again, hu = self @ d, self @ d, self @ u
        size = norm(hd) or 1.0
        found = {
            "repeat": norm(hd - again) / size,
            "finite_difference": min(norm(self._difference(d, step) - hd) / size for step in STEPS[self.dtype]),
            "symmetry": abs(dot(u, hd) - dot(d, hu)) / size,
        }
        for name, sentence in FAULTS.items():
            limit = LIMITS[self.dtype][name]
            if not found[name] <= limit:
                raise StepformerError(sentence.format(found=found[name], limit=limit))
        return found

    def _difference(self, d: Tensor, step: float) -> Tensor:
        """(gradient at theta + step d, minus that at theta - step d) / 2 step."""
        with self.moved(d, step):
            ahead = self.gradient()
        with self.moved(d, -step):
            return (ahead - self.gradient()) / (2 * step)


FAULTS = {
    "repeat": "The same Hessian-vector product twice differs by {found:.1e} of its size (rounding is below "
    "{limit:.0e}): something in the model is random, so nothing is measured.",
    "finite_difference": "Hessian-vector products differ from differences of gradients by {found:.1e} of their size "
    "(rounding is below {limit:.0e}): a second derivative is wrong or a gradient stopped, so nothing is measured.",
    "symmetry": "The Hessian is not symmetric: u.Hv and v.Hu differ by {found:.1e} of their size (rounding is below "
    "{limit:.0e}): a second derivative is wrong, so nothing is measured.",
}


def batches_of(windows: Tensor, size: int) -> list[Batch]:
    """Windows (count, context + 1) as batches of `size` rows: inputs, and targets one token later."""
    return [(rows[:, :-1], rows[:, 1:]) for rows in windows.split(size)]


def direction(operator: HessianOperator, number: int = 0, *, seed: int = 0, normalise: Normalise = "tensor") -> Tensor:
    """A normal random direction with the scale of the weights: flat, in the order of the operator's parameters.

    tensor: each tensor's part has the norm of that tensor, gains and coefficients included. filter: each row of a
    matrix or table has the norm of that row (one output unit, one token, one position), and tensors of one dimension
    do not move. What is zero does not move either.
    """
    drawn = operator.split(operator.draw("normal", seed, f"curve {number}"))
    return operator.flat(
        [_scaled(part, p.detach(), normalise) for part, p in zip(drawn, operator.parameters, strict=True)]
    )


def _scaled(part: Tensor, weight: Tensor, normalise: Normalise) -> Tensor:
    if normalise == "tensor":
        return part * (weight.norm() / part.norm())
    if weight.ndim < 2:
        return torch.zeros_like(part)
    own, wanted = (t.flatten(1).norm(dim=1).view(-1, *[1] * (t.ndim - 1)) for t in (part, weight))
    return part * (wanted / own)


def grid(points: int, reach: float) -> list[float]:
    """Evenly spaced from -reach to reach, with an exact zero in the middle of an odd number of points."""
    middle = (points - 1) / 2
    return [reach * (i - middle) / middle for i in range(points)]


def loss_at(operator: HessianOperator, along: Sequence[Tensor], by: Sequence[float]) -> float:
    """The loss at theta + by_1 along_1 + by_2 along_2 + ..."""
    total = torch.zeros(operator.size, dtype=operator.dtype, device=operator.device)
    for a, d in zip(by, along, strict=True):
        total.add_(d, alpha=a)
    with operator.moved(total):
        return operator.loss()
