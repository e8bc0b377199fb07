"""How good is a run? Perplexity on any text, and downstream tasks by the evaluation harness (docs/evaluate.md)."""

from stepformer.measure.evaluation.harness import measure_tasks
from stepformer.measure.evaluation.perplexity import Reading, measure_texts
from stepformer.measure.evaluation.texts import Text, open_text, out_of_domain

__all__ = ["Reading", "Text", "measure_tasks", "measure_texts", "open_text", "out_of_domain"]
