"""stepformer: transformers whose layers are steps of an optimizer, chosen by a word in the config."""

import os
from typing import TYPE_CHECKING, Any

# Before torch starts its threads: waiting threads should sleep, not spin. On two cores shared with other programs a
# training step was up to eight times slower with spinning threads (docs/lab-notebook.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from stepformer.catalogue import build, load_config, model_config, preset, presets, register_preset
from stepformer.config import ModelConfig
from stepformer.errors import ConfigError, InputError, StepformerError, UnknownNameError
from stepformer.model import Model, Output
from stepformer.options import Option
from stepformer.oracles import MLP, Attention, Call, TokenSlot, register_attention, register_mlp
from stepformer.roles import Role
from stepformer.schemes import (
    HamiltonianStep,
    Splitting,
    State,
    Stream,
    Template,
    Values,
    free,
    positive,
    register_splitting,
    register_template,
    unit,
)

if TYPE_CHECKING:
    from stepformer.comparing.studies import compare, sweep
    from stepformer.training import evaluate_run, load_run, resume, run_config, train

__version__ = "0.6.0"


def __getattr__(name: str) -> Any:
    """Training is imported when it is first asked for: a model alone should not wait for it."""
    if name in _TRAINING:
        import stepformer.training

        return getattr(stepformer.training, name)
    if name in _STUDIES:
        import stepformer.comparing.studies

        return getattr(stepformer.comparing.studies, name)
    raise AttributeError(f"module 'stepformer' has no attribute '{name}'")


_STUDIES = ("compare", "sweep")
_TRAINING = ("evaluate_run", "load_run", "resume", "run_config", "train")

__all__ = [
    "MLP",
    "Attention",
    "Call",
    "ConfigError",
    "HamiltonianStep",
    "InputError",
    "Model",
    "ModelConfig",
    "Option",
    "Output",
    "Role",
    "Splitting",
    "State",
    "StepformerError",
    "Stream",
    "Template",
    "TokenSlot",
    "UnknownNameError",
    "Values",
    "build",
    "compare",
    "evaluate_run",
    "free",
    "load_config",
    "load_run",
    "model_config",
    "positive",
    "preset",
    "presets",
    "register_attention",
    "register_mlp",
    "register_preset",
    "register_splitting",
    "register_template",
    "resume",
    "run_config",
    "sweep",
    "train",
    "unit",
]
