"""What the tests of downstream tasks share: a loop over tokens, and where the real items are."""

from __future__ import annotations

import pytest
import torch

import stepformer as sf
from real_data import GPT2, REAL

REAL_TASKS = REAL / "eval"
needs_tasks = pytest.mark.skipif(
    not (GPT2.is_dir() and (REAL_TASKS / "hellaswag").is_dir()), reason="needs HellaSwag and ARC: set STEPFORMER_DATA"
)


def naive(model: sf.Model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """ln p of the continuation and whether it is greedy, a token at a time, with the last tokens that fit."""
    total, greedy = 0.0, True
    for i, token in enumerate(continuation):
        # the window of the whole prompt: its last context + 1 tokens, of which the last is never an input
        row = (context + continuation)[-model.config.context - 1 :]
        place = len(row) - len(continuation) + i
        with torch.no_grad():
            logits = model(torch.tensor([row[:place]])).logits[0, -1]
        total += float(torch.log_softmax(logits, dim=-1)[token])
        greedy = greedy and int(logits.argmax()) == token
    return total, greedy
