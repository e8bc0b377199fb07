"""Every accepted pair equals its independent transcription in fp64, values and gradients.

Tolerance 1e-11, relative to the largest entry: both sides are fp64 (2e-16 per operation) but sum in different order
over a few hundred operations; anything beyond that is another formula.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import stepformer as sf
from helpers import ACCEPTED, pair_id, shake, tiny, tokens
from transcriptions.adapter import transcribe, transcribe_hybrid

TOLERANCE = 1e-11


def assert_same(model: sf.Model, independent: torch.Tensor, ids: torch.Tensor, targets: torch.Tensor) -> None:
    output = model(ids, targets)
    scale = output.logits.abs().max()
    assert (output.logits - independent).abs().max() <= TOLERANCE * scale
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    loss = F.cross_entropy(independent.flatten(0, 1), targets.flatten())
    assert output.loss is not None
    ours = torch.autograd.grad(output.loss, trained.values(), allow_unused=True)
    theirs = torch.autograd.grad(loss, trained.values(), allow_unused=True)
    largest = max(g.abs().max() for g in theirs if g is not None)
    for name, a, b in zip(trained, ours, theirs, strict=True):
        assert (a is None) == (b is None), name
        if a is not None and b is not None:
            assert (a - b).abs().max() <= TOLERANCE * largest, name


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("aux_init", ["embed", "zero"])
@pytest.mark.parametrize("pair", ACCEPTED, ids=pair_id)
def test_pair_equals_transcription(pair: dict[str, Any], aux_init: str, norm: str) -> None:
    model = shake(tiny(**pair, aux_init=aux_init, norm=norm))
    ids = tokens(2, 7)
    independent = transcribe(model, ids)
    assert independent is not None
    assert_same(model, independent, ids, tokens(2, 7, seed=1))


@pytest.mark.parametrize("backend", ["sdpa", "math"])
def test_both_attention_backends(backend: str) -> None:
    model = shake(tiny("yurii", attention_backend=backend))
    ids = tokens()
    independent = transcribe(model, ids)
    assert independent is not None
    assert_same(model, independent, ids, tokens(seed=1))


@pytest.mark.parametrize("template", ["heavy-ball", "nesterov", "triple-momentum"])
@pytest.mark.parametrize("layers", [set(), {0}, {2}, {0, 2}, {0, 1, 2}], ids=str)
def test_hybrid_equals_transcription(template: str, layers: set[int]) -> None:
    model = shake(tiny(template, n_layer=3))
    ids = tokens()
    twin = model.hybrid(layers=layers)
    assert_same(twin, transcribe_hybrid(model, ids, layers), ids, tokens(seed=1))
