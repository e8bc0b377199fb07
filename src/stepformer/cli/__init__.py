"""The `stepformer` command."""

from stepformer.cli.main import main

__all__ = ["main"]
