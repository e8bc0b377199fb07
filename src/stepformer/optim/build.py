"""From roles to optimizers: which parameter is stepped by what."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from stepformer.base.errors import InputError
from stepformer.base.settings import checked
from stepformer.model.roles import Role, named_roles
from stepformer.ops.graphs import CudaGraphs, capturable
from stepformer.ops.sharding import whole
from stepformer.optim.config import OptimConfig, Schedule
from stepformer.optim.lmo import LmoOptimizer, unit_rows
from stepformer.optim.polar import polar
from stepformer.optim.trust.region import Probe, TrustRegion

DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class Optimizers:
    """All parameter groups of a model, one per role, under one schedule, with clipping and sharpness-aware steps."""

    def __init__(self, model: nn.Module, config: OptimConfig, steps: int, probe: Probe | None = None) -> None:
        """probe: what the trust region looks at, tokens and targets of every step; the others need none."""
        if not isinstance(model, nn.Module):
            raise InputError(
                f"`Optimizers` takes the model itself, not {type(model).__name__}: what a parameter is for decides how "
                "it is trained."
            )
        if not isinstance(config, OptimConfig):
            raise InputError(
                f"`Optimizers` takes an OptimConfig, not {type(config).__name__}: of a run's config it is config.optim."
            )
        if checked("steps", steps, int) < 1:
            raise InputError(f"steps = {steps} should be at least 1, the length of the schedule.")
        self.config = config
        self.schedule = Schedule(config, steps)
        named = [(n, p, r) for n, p, r in named_roles(model) if p.requires_grad]
        self.names: dict[nn.Parameter, str] = {p: n for n, p, _ in named}
        self.parameters = [p for _, p, _ in named]
        self.clipped = [p for _, p, r in named if config.clip_coefficients or r is not Role.COEFFICIENT]
        parts = stacked_parts(model, config.qkv)
        steepest, trusted, adaptive = [], [], []
        for role in Role:
            members = [(n, p) for n, p, r in named if r is role]
            if not members:
                continue
            rate, decay = config.rate(role), config.decay(role)
            group: dict[str, Any] = {"role": str(role), "lr": rate, "peak": rate, "weight_decay": decay}
            group["params"] = [p for _, p in members]
            if config.name == "trust" and role is Role.MATRIX:
                trusted.append(group)
            elif config.name == "scion" or (role is Role.MATRIX and config.name != "adamw"):
                geometry = {Role.MATRIX: "polar", Role.EMBEDDING: config.embedding_geometry}.get(role, "sign")
                group |= {"geometry": geometry, "parts": [parts.get(n, 1) for n, _ in members]}
                if role is Role.MATRIX and config.radius is not None:
                    group["weight_decay"] = 1 / config.radius
                steepest.append(group)
            else:
                adaptive.append(group)
        self.parts: list[torch.optim.Optimizer] = []
        self.graphs = CudaGraphs()  # in one memory pool for all parts
        self._perturbed = False  # since the last step: of a sharpness-aware one
        self._number = torch.zeros(())  # where captured work reads or writes a norm
        same: dict[str, Any] = {
            "nuclear": config.name == "polargrad",
            "nesterov": config.nesterov and config.name != "scion",
            "momentum": config.momentum,
            "scaling": config.scaling,
            "method": config.polar,
            "dtype": DTYPES[config.polar_dtype],
        }
        self.trust: TrustRegion | None = None
        if steepest:
            self.parts.append(LmoOptimizer(steepest, graphs=self.graphs, **same))
        for group in trusted:  # before the others: it looks at what its own step changes
            self.trust = TrustRegion(group, model, config, probe, graphs=self.graphs, **same)
            self.parts.append(self.trust)
        if adaptive:
            # fused needs no copies of the gradients on CUDA; on CPU one code path for every tensor is as fast
            fused, betas = self.parameters[0].device.type == "cuda", (config.beta1, config.beta2)
            self.parts.append(torch.optim.AdamW(adaptive, betas=betas, eps=config.eps, fused=fused))

    def groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts, as those of torch have them; a group also knows its `role` and `peak` rate."""
        return self.groups()

    def step(self, t: int | None = None) -> None:
        """One update with the rates of step t, from 0 on; gradients stay. Without t the groups keep their rates, which
        a scheduler of torch may have set.
        """
        if t is not None:
            self._set_rates(t)
        elif self.trust is not None or self.config.sam != "off":
            what = f"name = '{self.config.name}'" if self.trust else f"sam = '{self.config.sam}'"
            raise InputError(f"optim.{what} needs the number of the step: call step(t).")
        if t is not None and self.schedule.perturbs(t) and not self._perturbed:
            raise InputError(
                f"Step {t} is sharpness-aware (optim.sam): after backward() call `before = optimizers.perturb()`, "
                "zero_grad(), backward() once more on the same batch and `optimizers.restore(before)`."
            )
        self._perturbed = False
        for part in self.parts:
            part.step()

    def _set_rates(self, t: int) -> None:
        if not isinstance(t, Integral) or t < 0:
            raise InputError(f"step({t!r}): give the number of the step; the first one is step(0).")
        factor, momentum = self.schedule.factor(t), self.schedule.momentum(t)
        for group in self.groups():
            group["lr"] = group["peak"] * factor
            if "momentum" in group:
                group["momentum"] = momentum
        if self.trust is not None:
            self.trust.t = t

    def report(self) -> dict[str, Any]:
        """Rates, and what the trust region has to say about the last step, for the metrics."""
        rates = {f"lr_{role}": rate for role, rate in self.rates().items()}
        return rates if self.trust is None else rates | self.trust.report

    @property
    def problem(self) -> str:
        """Why it cannot go on, if it cannot."""
        return "" if self.trust is None else self.trust.problem

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """What all parts remember, and whose it is; for a checkpoint of one's own loop."""
        shapes = {name: list(p.shape) for p, name in self.names.items()}
        return {"name": self.config.name, "shapes": shapes, "parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, rates included; it must be of the same optimizer and of such a model."""
        own = self.state_dict()
        if not isinstance(state, Mapping) or any(state.get(key) != own[key] for key in ("name", "shapes")):
            raise InputError("This is no state of these optimizers: another `optim.name` or another model made it.")
        for part, kept in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(kept)

    def rates(self) -> dict[str, float]:
        return {group["role"]: group["lr"] for group in self.groups()}

    @torch.no_grad()
    def norm(self, *, everything: bool = False) -> Tensor:
        """The global norm of the gradients that take part in clipping, or of all."""
        members = self.parameters if everything else self.clipped
        gradients = [p.grad for p in members if p.grad is not None]
        if not gradients or not capturable(gradients[0]):
            return global_norm(gradients)
        number = self._number_like(gradients[0])
        self._run("norm of all" if everything else "norm", gradients, lambda: number.copy_(global_norm(gradients)))
        return number.clone()

    @torch.no_grad()
    def clip(self, norm: Tensor | None = None) -> Tensor:
        """Scale the gradients down to the global norm `clip`; returns the norm before, over what takes part."""
        norm = self.norm() if norm is None else norm
        if not isinstance(norm, Tensor):
            raise InputError("`clip` takes what `norm` gave, or nothing; the limit is the setting optim.clip.")
        gradients = [p.grad for p in self.clipped if p.grad is not None]
        limit = self.config.clip
        if limit and gradients and capturable(gradients[0]):
            number = self._number_like(norm).copy_(norm)
            self._run("clip", gradients, lambda: _scale_down(gradients, number, limit))
        elif limit and gradients:
            _scale_down(gradients, norm, limit)
        return norm

    def _number_like(self, tensor: Tensor) -> Tensor:
        if (self._number.dtype, self._number.device) != (tensor.dtype, tensor.device):
            self._number = tensor.new_zeros(())
        return self._number

    def _run(self, name: str, gradients: list[Tensor], work: Callable[[], object]) -> None:
        """By a graph where gradients lie as last time: replayed passes leave them there; others may."""
        places = ((g.data_ptr(), g.dtype, g.stride()) for g in gradients)
        self.graphs.run(name, (self.config.clip, self._number.data_ptr(), *places), work, gradients[0])

    @torch.no_grad()
    def perturb(self) -> list[Tensor]:
        """SAM's first half: move every parameter by rho g / ||g||; returns where they were, for `restore`."""
        scale = self.config.rho / (self.norm(everything=True) + 1e-12)
        before = []
        for p in self.parameters:
            before.append(p.detach().clone())
            if p.grad is not None:
                p.add_(p.grad * scale.to(p.dtype))
        return before

    @torch.no_grad()
    def restore(self, before: list[Tensor]) -> None:
        """Put the parameters back, to the bit: adding and subtracting would not."""
        for p, value in zip(self.parameters, before, strict=True):
            p.copy_(value)
        self._perturbed = True

    def tensors(self, *, create: bool = False) -> dict[str, Tensor]:
        """The optimizer's memory as flat names (`PARAMETER.KEY`) and tensors, for checkpoints.

        create: make what a fresh optimizer would only make in its first step, so that there is something to load into.
        """
        found: dict[str, Tensor] = {}
        for part in self.parts:
            for group in part.param_groups:
                for p in group["params"]:
                    if create:
                        self._create(part, p)
                    for key, value in part.state.get(p, {}).items():
                        found[f"{self.names[p]}.{key}"] = value
        return found

    def _create(self, part: torch.optim.Optimizer, p: nn.Parameter) -> None:
        if isinstance(part, LmoOptimizer):
            part.create(p)
            return
        state = part.state[p]
        if "step" not in state:
            on_device = p.device if part.defaults.get("fused") else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=on_device)
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)


@torch.no_grad()
def global_norm(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of all tensors together; shards of one tensor count once, on every rank the same."""
    if not tensors:
        return torch.zeros(())
    norms = torch._foreach_norm(tensors)
    return torch.linalg.vector_norm(torch.stack([whole(norm) for norm in norms]))


def _scale_down(gradients: list[Tensor], norm: Tensor, limit: float) -> None:
    """Multiply gradients by min(1, limit / norm)."""
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for dtype in dict.fromkeys(g.dtype for g in gradients):
        torch._foreach_mul_([g for g in gradients if g.dtype == dtype], factor.to(dtype))


@torch.no_grad()
def scion_init(model: nn.Module, config: OptimConfig) -> None:
    """Scion's own start: block matrices and tables on the unit balls in which its steps are measured."""
    parts = stacked_parts(model, config.qkv)
    for name, p, role in named_roles(model):
        if role is Role.MATRIX:
            pieces = p.chunk(parts.get(name, 1))
            p.copy_(torch.cat([polar(m, "svd") * math.sqrt(m.shape[0] / m.shape[1]) for m in pieces]))
        elif role is Role.EMBEDDING:
            p.copy_(p.sign() if config.embedding_geometry == "sign" else unit_rows(p))


def stacked_parts(model: nn.Module, qkv: str) -> dict[str, int]:
    """Parameters that hold several matrices on top of each other, and how many; modules say so in `stacked`.

    A module declares `stacked = {"qkv.weight": 3}` when its map gives queries, keys and values in one product. With
    qkv = "heads" an attention's weight holds one matrix of `head_dim` rows for every head of each of them.
    """
    found: dict[str, int] = {}
    if qkv == "fused":
        return found
    for prefix, module in model.named_modules():
        for name, count in getattr(module, "stacked", {}).items():
            rows, head_dim = module.get_parameter(name).shape[0], getattr(module, "head_dim", 0)
            per_head = qkv == "heads" and head_dim and rows % head_dim == 0
            found[f"{prefix}.{name}" if prefix else name] = rows // head_dim if per_head else count
    return {name: count for name, count in found.items() if count > 1}
