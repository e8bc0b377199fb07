"""stepformer: transformers whose layers are steps of an optimizer, chosen by a word in the config."""

from stepformer.catalogue import build, load_config, model_config, preset, presets, register_preset
from stepformer.config import ModelConfig
from stepformer.errors import ConfigError, InputError, StepformerError, UnknownNameError
from stepformer.model import Model, Output
from stepformer.options import Option
from stepformer.oracles import MLP, Attention, register_attention, register_mlp
from stepformer.roles import Role
from stepformer.schemes import (
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

__version__ = "0.1.0"

__all__ = [
    "MLP",
    "Attention",
    "ConfigError",
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
    "UnknownNameError",
    "Values",
    "build",
    "free",
    "load_config",
    "model_config",
    "positive",
    "preset",
    "presets",
    "register_attention",
    "register_mlp",
    "register_preset",
    "register_splitting",
    "register_template",
    "unit",
]
