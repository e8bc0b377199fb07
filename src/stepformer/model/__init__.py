"""The language model: its config, its blocks, and the engines that carry them out."""

from stepformer.model.config import ModelConfig
from stepformer.model.model import Model, Output, Passage
from stepformer.model.roles import Role
from stepformer.ops.cross_entropy import IGNORE
from stepformer.ops.tables import check_ids

__all__ = ["IGNORE", "Model", "ModelConfig", "Output", "Passage", "Role", "check_ids"]
