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
from architectures import EXTRAS, ROWS, accepted, combinations, title
from helpers import ACCEPTED, pair_id, shake, tiny, tokens
from transcriptions.adapter import transcribe, transcribe_hybrid

TOLERANCE = 2e-11  # 5e-12 seen, in gradients through Newton-Schulz
# Gradients of a constrained row divide by the variance of its scores: rows with nearly equal scores lose digits, how
# many depends on the draw (measured: up to 7e-10). Values keep the tolerance above.
CONSTRAINED_TOLERANCE = 1e-8


def assert_same(model: sf.Model, independent: torch.Tensor, ids: torch.Tensor, targets: torch.Tensor) -> None:
    output = model(ids, targets)
    scale = output.logits.abs().max()
    assert (output.logits - independent).abs().max() <= TOLERANCE * scale
    tolerance = CONSTRAINED_TOLERANCE if model.config.attention in ("entropy", "kl") else TOLERANCE
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    loss = F.cross_entropy(independent.flatten(0, 1), targets.flatten())
    assert output.loss is not None
    ours = torch.autograd.grad(output.loss, trained.values(), allow_unused=True)
    theirs = torch.autograd.grad(loss, trained.values(), allow_unused=True)
    largest = max(g.abs().max() for g in theirs if g is not None)
    for name, a, b in zip(trained, ours, theirs, strict=True):
        if b is None:  # not read at all, such as the target of a floor that no row touches
            assert a is None or not a.any(), name
        else:
            assert a is not None, name
            assert (a - b).abs().max() <= tolerance * largest, name


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


def check(settings: dict[str, Any], scale: float = 0.3) -> None:
    model = shake(tiny(**settings), scale)
    ids = tokens(2, 7)
    independent = transcribe(model, ids)
    assert independent is not None
    assert_same(model, independent, ids, tokens(2, 7, seed=1))


@pytest.mark.parametrize("settings", ROWS, ids=title)
def test_row_equals_transcription(settings: dict[str, Any]) -> None:
    """Hamiltonian, linear and constrained attention with their options, step sizes of gradient descent."""
    check(settings)


WITH_EXTRAS = [
    {**base, **extra}
    for base in (
        {"attention": "softmax"},
        {"attention": "linear"},
        {"attention": "entropy", "ratio": 0.6},
        {"attention": "kl", "prior": "previous"},
        {"attention": "hamiltonian", "template": "etd-ab2"},
        {"attention": "linear-hamiltonian", "template": "conformal-euler"},
    )
    for extra in EXTRAS
    if accepted({**base, **extra})
]


@pytest.mark.parametrize("settings", WITH_EXTRAS, ids=title)
def test_extra_equals_transcription(settings: dict[str, Any]) -> None:
    check(settings)


@pytest.mark.parametrize("settings", combinations(24, seed=1), ids=title)
def test_sampled_combination_equals_transcription(settings: dict[str, Any]) -> None:
    check(settings)
