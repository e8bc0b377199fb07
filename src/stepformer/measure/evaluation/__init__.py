"""How good is a run? Perplexity on any text, and downstream tasks by the evaluation harness (docs/evaluate.md)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepformer.measure.evaluation.harness import measure_tasks
    from stepformer.measure.evaluation.perplexity import Reading, measure_texts
    from stepformer.measure.evaluation.texts import Text, open_text, out_of_domain

# loaded when first asked for
_HOME = {
    "Reading": "perplexity",
    "Text": "texts",
    "measure_tasks": "harness",
    "measure_texts": "perplexity",
    "open_text": "texts",
    "out_of_domain": "texts",
}

__all__ = ["Reading", "Text", "measure_tasks", "measure_texts", "open_text", "out_of_domain"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stepformer.measure.evaluation' has no attribute '{name}'")
    return getattr(importlib.import_module(f"stepformer.measure.evaluation.{_HOME[name]}"), name)
