"""The trust-region optimizer of the block matrices: the best step that changes the network by at most eta.

With M the running average of the gradient (Muon's), L and R the factors of a matrix (factors.py), L = C C^T, R = K K^T:

    frobenius  dW ~ -L^-1 M R^-1 = -C^-T (C^-1 M K^-T) K^-1          the sum of all tr(L dW R dW^T) is eta^2
    spectral   dW ~ -C^-T polar(C^-1 M K^-T) K^-1                    each is eta^2 / number of matrices

The first is the minimiser of <M, dW> under a bound on the average change, the second under one on the worst case.
Every `probe_every` steps a few sequences are looked at: statistics of the factors, what the step was predicted to
change and what it changed. From that the radius eta is found, a share of the schedule's rate (docs/trust-region.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stepformer.base.errors import ConfigError, InputError
from stepformer.model import Model
from stepformer.ops.graphs import capturable
from stepformer.ops.sharding import is_sharded, like, whole
from stepformer.optim.config import OptimConfig
from stepformer.optim.lmo import Direction, LmoOptimizer, polar_directions, shared
from stepformer.optim.trust.changes import Change, change, local, tangent_between
from stepformer.optim.trust.factors import (
    Stack,
    factors,
    inverse_root,
    kronecker,
    refusals,
    rounded_products,
    stacks,
)
from stepformer.optim.trust.observing import Observation, moved, observe

Probe = Callable[[int, int], tuple[Tensor, Tensor]]
"""Tokens and targets (B, T) to look at in a step, about so many tokens, the same on every rank."""

MEMORY = 0.8  # of factors and ratios, from one look to the next
LARGEST = 50.0  # times the upper quartile: what a constrained row's change counts at most
LEAST = 1e-3  # of its Kronecker form: a smaller exact change is rounding, since the rows do not see the matrix
COLLAPSED = 1e-3  # of the peak: a smaller radius learns nothing any more


class TrustRegion(LmoOptimizer):
    """Steps of the block matrices inside the region; `t` is the number of the step to come."""

    def __init__(
        self, group: dict[str, Any], model: nn.Module, config: OptimConfig, probe: Probe | None, **same: Any
    ) -> None:
        assert isinstance(model, Model)
        if found := refusals(model.config):
            raise ConfigError(found)
        if probe is None:
            raise InputError("optim.name = 'trust' looks at tokens: give Optimizers a `probe`.")
        self.model, self.config, self.probe = model, config, probe
        self.t = 0
        self.places: list[Tensor] = []  # of averages, and then of steps
        self.report: dict[str, Any] = {}  # of this step, for the metrics
        self.problem = ""  # why training cannot go on
        names = {p: name for name, p in model.named_parameters()}
        parts = [[stack for stack in stacks(model) if stack.name == names[p]] for p in group["params"]]
        if [] in parts:
            foreign = names[group["params"][parts.index([])]]
            raise InputError(f"optim.name = 'trust' has no factors for the matrix '{foreign}'.")
        own = [stack for some in parts for stack in some]
        self.owner = {stack.key: p for p, some in zip(group["params"], parts, strict=True) for stack in some}
        # what a matrix counts in the budget
        self.weights = {s.key: config.share_qk if s.part in (".q", ".k") else 1.0 for s in own}
        self.count = sum(s.count * self.weights[s.key] for s in own)
        super().__init__([group | {"parts": parts}], **same)

    def create(self, p: Tensor) -> None:
        """Momentum, factors and what is remembered of them; the radius belongs to the first matrix."""
        super().create(p)
        group, state = self.param_groups[0], self.state[p]
        if any(key.startswith("ratio") for key in state):
            return
        number = next(i for i, other in enumerate(group["params"]) if other is p)
        plain: dict[str, Any] = {"dtype": p.dtype, "device": p.device}
        for stack in group["parts"][number]:
            for side, shape in zip(("left", "right"), stack.shapes(), strict=True):
                state[f"{side}{stack.part}"] = torch.zeros(shape, **plain)
                state[f"{side}_root{stack.part}"] = torch.zeros(shape, **plain)
            state[f"ratio{stack.part}"] = torch.ones(stack.count, **plain)
        if number == 0:
            state["radius"] = torch.tensor(group["peak"], dtype=torch.float64)
            state["looks"] = torch.zeros((), dtype=torch.float64)

    def kept(self, stack: Stack, *words: str) -> list[Tensor]:
        """What is remembered of a stack."""
        state = self.state[self.owner[stack.key]]
        return [state[f"{word}{stack.part}"] for word in words]

    @property
    def stacks_of_all(self) -> list[Stack]:
        return [stack for some in self.param_groups[0]["parts"] for stack in some]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        group, params = self.param_groups[0], self.param_groups[0]["params"]
        for p in params:
            self.create(p)
        first = self.state[params[0]]
        if group["peak"] > 0:
            group["lr"] *= float(first["radius"]) / group["peak"]  # of what the schedule has set for this step
        self.report = {"eta": group["lr"]}
        every = self.config.probe_every
        if self.t % every and self.t >= every and first["looks"]:  # at first the factors change with every step
            super().step()
            return
        tokens, targets = self.probe(self.t, self.config.probe)
        at = observe(self.model, tokens, targets, inputs=True)
        self.learn(factors(self.model, at, self.config.lambda_attn))
        if self.problem:
            return
        before = [p.detach().clone() for p in params]
        super().step()
        if group["lr"] > 0:
            names = [some[0].name for some in group["parts"]]
            step = {name: p.detach() - old for name, p, old in zip(names, params, before, strict=True)}
            self._judge(step, tokens, targets, at)

    def learn(self, found: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Take new factors into the averages, and at times their roots into the steps."""
        looks = self.state[self.param_groups[0]["params"][0]]["looks"]
        weight = max(1 - MEMORY, 1 / (float(looks) + 1))
        for stack in self.stacks_of_all:
            for average, new in zip(self.kept(stack, "left", "right"), found[stack.key], strict=True):
                average.lerp_(new.to(average.dtype), weight)
        looks += 1
        if self.t % self.config.factor_every < self.config.probe_every or looks < 2 * self.config.probe_every:
            self._take_roots()

    def _take_roots(self) -> None:
        """Each rank takes its share of the roots, all get all."""
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor, str]]] = {}
        for stack in self.stacks_of_all:
            for side in ("left", "right"):
                average, root = self.kept(stack, side, f"{side}_root")
                some = [(*both, f"the {side} factor of '{stack.key}'") for both in zip(average, root, strict=True)]
                by_shape.setdefault(average.shape[1:], []).extend(some)
        good, names = [], []
        for known in by_shape.values():
            found = shared([a for a, _, _ in known], lambda some: inverse_root(some, self.config.factor_damping))
            for (_, root, name), new in zip(known, found, strict=True):
                root.copy_(new)
                good.append(new.sum().isfinite())
                names.append(name)
        bad = (~torch.stack(good)).nonzero().flatten().tolist()  # the same on every rank
        if bad:
            self.problem = (
                f"{names[bad[0]]} in the trust region is not positive: what it averages is not finite, or too little"
            )

    def _directions(self, number: int, averages: list[Tensor], parts: list[Any]) -> list[Direction]:
        """Steps of unit size: eta times them is taken. On a GPU by way of memory that stays where it is, as a graph."""
        if not capturable(averages[0]):
            return [(step, 1.0) for step in self._steps(averages, parts)]
        places = [(m.shape, m.dtype, m.device) for m in averages]
        if [(t.shape, t.dtype, t.device) for t in self.places] != places:
            self.places = [torch.empty_like(m) for m in averages]
        own = [stack for some in parts for stack in some]
        used = [t for stack in own for t in self.kept(stack, "left_root", "right_root", "ratio")]
        torch._foreach_copy_(self.places, averages)
        self.graphs.run(
            "trust",
            tuple(t.data_ptr() for t in (*self.places, *used)),
            lambda: torch._foreach_copy_(self.places, self._steps(self.places, parts)),
            averages[0],
        )
        return [(step, 1.0) for step in self.places]

    def _steps(self, averages: list[Tensor], parts: list[Any]) -> list[Tensor]:
        with rounded_products():
            whitened: dict[str, Tensor] = {}
            for m, some in zip(averages, parts, strict=True):
                full = whole(m)
                for stack in some:
                    left, right = self.kept(stack, "left_root", "right_root")
                    whitened[stack.key] = _times(left, stack.of(full)) @ right.mT
            own = [stack for some in parts for stack in some]
            if self.config.norm == "spectral":
                self._orthogonalise(own, whitened)
            else:
                sizes = [self.weights[s.key] * whitened[s.key].square().sum() for s in own]
                total = torch.stack(sizes).sum().sqrt().clamp_min(1e-30)
                for s in own:
                    whitened[s.key] *= self.weights[s.key] / total
            directions = []
            for m, some in zip(averages, parts, strict=True):
                steps = []
                for stack in some:
                    left, right, ratio = self.kept(stack, "left_root", "right_root", "ratio")
                    step = _times(left.mT, whitened[stack.key]) @ right
                    steps.append((step / ratio.sqrt()[:, None, None]).flatten(0, 1))
                step = torch.cat(steps) if len(steps) > 1 else steps[0]
                directions.append(like(step, m) if is_sharded(m) else step)
        return directions

    def _orthogonalise(self, own: list[Stack], whitened: dict[str, Tensor]) -> None:
        """Polar factors in place of whitened matrices, so that each takes its share of eta^2."""
        group = self.param_groups[0]
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for stack in own:
            by_shape.setdefault(whitened[stack.key].shape[1:], []).extend(whitened[stack.key])
        found = {shape: iter(polar_directions(some, group)) for shape, some in by_shape.items()}
        for stack in own:
            steps = torch.stack([next(found[whitened[stack.key].shape[1:]])[0] for _ in range(stack.count)])
            size = math.sqrt(self.weights[stack.key] / self.count / min(stack.rows, stack.cols))
            whitened[stack.key] = steps.to(whitened[stack.key].dtype) * size

    def _judge(self, step: dict[str, Tensor], tokens: Tensor, targets: Tensor, at: Observation) -> None:
        """Compare what the step changed with what was predicted; change radius and ratios accordingly."""
        config, group = self.config, self.param_groups[0]
        after = observe(self.model, tokens, targets)
        measured = change(at, after, LARGEST)
        with moved(self.model, step, -2.0):  # as far the other way
            predicted = tangent_between(at, after, observe(self.model, tokens, targets), 1.0, LARGEST)
        with moved(self.model, step, -1.0), rounded_products():  # where it began
            exact = local(self.model, tokens, step, lambda_attn=config.lambda_attn, at=at, largest=LARGEST)
            for stack in self.stacks_of_all:
                left, right, ratio = self.kept(stack, "left", "right", "ratio")
                guess = kronecker(left, right, stack.of(whole(step[stack.name]).to(left.dtype)))
                known = (guess > 0) & (exact[stack.key] > LEAST * guess)
                new = torch.where(known, exact[stack.key].to(ratio.dtype) / torch.where(known, guess, 1.0), ratio)
                ratio.lerp_(new, 1 - MEMORY)
        r1, r2 = self._ratios(measured, predicted)
        radius, peak = self.state[group["params"][0]]["radius"], group["peak"]
        if not (math.isfinite(r1) and math.isfinite(r2)):
            self.problem = f"the trust region is not finite (measured over predicted change {r1:g}, decrease {r2:g})"
            return
        self.report |= {"r1": r1, "r2": r2, "changes": _by_layer(measured)}
        if config.adapt_radius and (r1 > 1.5 or r2 < 0.25):
            radius.div_(1.2)
        elif config.adapt_radius and r1 < 1.2 and r2 > 0.6:
            radius.mul_(1.05).clamp_(max=peak)
        if float(radius) < COLLAPSED * peak:
            self.problem = (
                f"the radius of the trust region fell to {float(radius):.3g}, below {COLLAPSED:g} of the largest "
                f"rate (measured over predicted change {r1:.3g}, decrease {r2:.3g})"
            )

    def _ratios(self, measured: Change, predicted: Change) -> tuple[float, float]:
        """r1 of the changes, r2 of the decreases of the loss; a step that should increase the loss has r2 = 0."""
        assert measured.loss is not None
        assert predicted.loss is not None
        totals = [which.total(self.config.lambda_attn).double() for which in (measured, predicted)]
        done, told, loss, slope = torch.stack([*totals, measured.loss.double(), predicted.loss.double()]).tolist()
        r2 = loss / slope if slope < 0 else 0.0 * (loss + slope)
        return done / told if told else 1.0, r2


def _by_layer(measured: Change) -> list[dict[str, float]]:
    """The KL of every head and the squared RMS of every branch, for the metrics."""
    found = [{f"kl[{head}]": kl for head, kl in enumerate(heads)} for heads in measured.kl.tolist()]
    for branch, values in measured.rms.items():
        for layer, value in enumerate(values.tolist()):
            found[layer][branch] = value
    return found


def _times(root: Tensor, matrices: Tensor) -> Tensor:
    return root * matrices if root.shape[-1] == 1 else root @ matrices
