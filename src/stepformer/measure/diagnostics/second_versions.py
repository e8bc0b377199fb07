"""Equations written a second time, outside the package, for the audit to compare an architecture with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from stepformer.base.errors import InputError
from stepformer.base.plugins import import_file
from stepformer.base.version import PACKAGE
from stepformer.model import Model

Transcription = Callable[[Model, Tensor], Tensor | None]
"""Logits of a model's architecture computed independently from its parameters, or None if it is not transcribed."""


def load_transcription(path: str | Path | None = None) -> Transcription | None:
    """The `transcribe` function of a Python file; by default of the checkout this package runs from, if any."""
    source = PACKAGE.resolve().parents[1] / "tests" / "transcriptions" / "adapter.py"
    if path is None and not source.is_file():
        return None
    file = source if path is None else Path(path)
    if not file.is_file():
        raise InputError(f"There is no transcription file '{file}'.")
    module = import_file(file)
    if not hasattr(module, "transcribe"):
        raise InputError(f"'{file}' defines no function transcribe(model, tokens).")
    return module.transcribe
