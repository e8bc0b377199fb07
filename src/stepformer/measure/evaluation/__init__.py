"""How good is a run? Perplexity on any text, and downstream tasks by the evaluation harness (docs/evaluate.md)."""

from stepformer.measure.evaluation.harness import measure_tasks
from stepformer.measure.evaluation.perplexity import Reading, measure_texts
from stepformer.measure.evaluation.texts import Text, held_out, open_text

__all__ = ["Reading", "Text", "held_out", "measure_tasks", "measure_texts", "open_text"]
