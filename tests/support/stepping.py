"""Recipes that library and transcription share, batches and roles, for the tests of optimizers."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn

from helpers import tokens
from stepformer.model.roles import named_roles
from stepformer.optim import OptimConfig
from stepformer.optim.polar import quintics
from transcriptions import optimizers as naive

polar_file = importlib.import_module("stepformer.optim.polar")  # the function of its name hides it

METHODS = ("newton-schulz", "polar-express", "svd")
LR = {"matrix": 0.03, "embedding": 0.004, "norm": 0.005, "coefficient": 0.02}
WD = {"matrix": 0.3, "embedding": 0.2, "norm": 0.15, "coefficient": 0.1}
QUINTICS = {"svd": None, "newton-schulz": naive.JORDAN, "polar-express": quintics("polar-express")}
SCALING = {"muon": "jordan", "scion": "spectral", "polargrad": "none", "adamw": "none"}


def both_recipes(
    name: str,
    *,
    polar: str = "svd",
    qkv: str = "fused",
    steps: int = 8,
    wd: dict[str, float] | None = None,
    **other: Any,
) -> tuple[OptimConfig, naive.Recipe]:
    """The same numbers for the library and for the transcription; `other` has keys that both spell alike."""
    decay, table = {**WD, **(wd or {})}, other.pop("table", None)
    scaling = other.pop("scaling", None)
    shared: dict[str, Any] = {
        "warmup": 3, "momentum": 0.9, "momentum_start": 0.6, "momentum_warmup": 4, "clip": 0.5, "floor": 0.2, **other,
    }  # fmt: skip
    config = OptimConfig(
        name=name, polar=polar, qkv=qkv, beta1=0.8, beta2=0.9, eps=1e-6,
        lr=LR["matrix"], **{f"lr_{role}": LR[role] for role in LR if role != "matrix"},
        **{f"wd_{role}": value for role, value in decay.items()},
        **({"embedding_geometry": table} if table else {}), **({"scaling": scaling} if scaling else {}), **shared,
    )  # fmt: skip
    recipe = naive.Recipe(
        name=name, lr=LR, wd=decay, steps=steps, betas=(0.8, 0.9), eps=1e-6, quintics=QUINTICS[polar],
        scaling=scaling or SCALING[name], split=qkv != "fused", table=table or "row", **shared,
    )  # fmt: skip
    return config, recipe


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def roles_of(model: nn.Module) -> dict[str, str]:
    return {name: str(role) for name, _, role in named_roles(model)}


def batch_of(t: int) -> tuple[Tensor, Tensor]:
    return tokens(3, seed=2 * t), tokens(3, seed=2 * t + 1)
