"""The language model: its config, its blocks, and the engines that carry them out."""

from stepformer.model.config import ModelConfig
from stepformer.model.model import IGNORE, Model, Output, check_ids
from stepformer.model.roles import Role

__all__ = ["IGNORE", "Model", "ModelConfig", "Output", "Role", "check_ids"]
