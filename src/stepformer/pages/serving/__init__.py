"""A page on this machine alone: type a prompt, compare two checkpoints token by token, watch a training."""

from stepformer.pages.serving.runs import ServedRun
from stepformer.pages.serving.server import PageServer

__all__ = ["PageServer", "ServedRun"]
