"""Checkpoints of other programs, and exported ones of ours, as run folders."""

from stepformer.exchange.importing.run import import_checkpoint

__all__ = ["import_checkpoint"]
