"""What a type checker knows about a model: mypy reads this file (pyproject.toml), pytest runs it."""

from __future__ import annotations

from typing import Any, assert_type

import pytest
import torch
from torch import Tensor

import stepformer as sf
from stepformer.decoding.sampling import Generation


def test_calls_have_types() -> None:
    model = assert_type(sf.build("vanilla", size="tiny", n_layer=1, d_model=16, n_head=2, seed=0), sf.Model)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    out = assert_type(model(tokens), sf.Output[Tensor, None])
    assert isinstance(assert_type(out.logits, Tensor), Tensor)
    assert_type(model(tokens, tokens), sf.Output[Tensor, Tensor])
    assert_type(model(tokens, tokens, loss_only=True), sf.Output[None, Tensor])
    assert_type(model(tokens, cache=model.new_cache(1), last_only=True).logits, Tensor)
    targets: Tensor | None = tokens if out.loss is None else None
    assert_type(model(tokens, targets), sf.Output[Any, Any])
    assert_type(model.generate([[1]], max_new_tokens=1), Generation)
    assert_type(sf.preset("yurii").config, sf.ModelConfig)
    with pytest.raises(TypeError):
        model(tokens, target=tokens)  # type: ignore[call-overload]
