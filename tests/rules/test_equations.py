"""Every accepted pair equals its independent transcription in fp64, values and gradients.

Tolerance 2e-11, relative to the largest entry: both sides are fp64 (2e-16 per operation) but sum in different order
over a few hundred operations; anything beyond that is another formula.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import stepformer as sf
from architectures import EXTRAS, ROWS, accepted, alternating, combinations, title
from helpers import ACCEPTED, shake, tiny, tokens
from transcriptions.adapter import transcribe, transcribe_hybrid

TOLERANCE = 2e-11


Transcription = Callable[[sf.Model, torch.Tensor], torch.Tensor | None]


def grads(model: sf.Model, loss: torch.Tensor) -> dict[str, torch.Tensor | None]:
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values()), allow_unused=True), strict=True))


def assert_same(
    model: sf.Model, ids: torch.Tensor, targets: torch.Tensor, transcription: Transcription = transcribe
) -> None:
    independent = transcription(model, ids)
    assert independent is not None
    output = model(ids, targets)
    scale = output.logits.abs().max()
    assert (output.logits - independent).abs().max() <= TOLERANCE * scale
    assert output.loss is not None
    ours = grads(model, output.loss)
    theirs = grads(model, F.cross_entropy(independent.flatten(0, 1), targets.flatten()))
    allowed = TOLERANCE * max(float(g.abs().max()) for g in theirs.values() if g is not None)
    for name, b in theirs.items():
        a = ours[name]
        if b is None:  # not read at all, such as the target of a floor that no row touches
            assert a is None or not a.any(), name
        else:
            assert a is not None, name
            assert (a - b).abs().max() <= allowed, name


PAIRS = [
    {**pair, "aux_init": start, "norm": norm}
    for pair in ACCEPTED
    for start, norm in (("embed", "layernorm"), ("embed", "rmsnorm"), ("zero", "rmsnorm"), ("zero", "layernorm"))
    if accepted({**pair, "aux_init": start})
]


@pytest.mark.parametrize("settings", alternating(PAIRS))
def test_pair_equals_transcription(settings: dict[str, Any]) -> None:
    check(settings)


@pytest.mark.parametrize("backend", ["sdpa", "math"])
def test_both_attention_backends(backend: str) -> None:
    model = shake(tiny("yurii", attention_backend=backend))
    assert_same(model, tokens(), tokens(seed=1))


@pytest.mark.parametrize("template", ["heavy-ball", "nesterov", "triple-momentum"])
@pytest.mark.parametrize("layers", [set(), {0}, {2}, {0, 2}, {0, 1, 2}], ids=str)
def test_hybrid_equals_transcription(template: str, layers: set[int]) -> None:
    model = shake(tiny(template, n_layer=3))
    hybrid = partial(transcribe_hybrid, momentum_layers=layers)
    assert_same(model.hybrid(layers=layers), tokens(), tokens(seed=1), hybrid)


def check(settings: dict[str, Any], scale: float = 0.3) -> None:
    model = shake(tiny(**settings), scale)
    assert_same(model, tokens(2, 7), tokens(2, 7, seed=1))


@pytest.mark.parametrize("settings", alternating(ROWS))
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


@pytest.mark.parametrize("settings", alternating(WITH_EXTRAS))
def test_extra_equals_transcription(settings: dict[str, Any]) -> None:
    check(settings)


# a factor on x is transcribed for gradient descent alone; test_around has that of Nesterov
SAMPLE = [s for s in combinations(26, seed=1) if s.get("scale") != "scalar" or s["template"] == "gd"]


@pytest.mark.parametrize("settings", SAMPLE, ids=title)
def test_sampled_combination_equals_transcription(settings: dict[str, Any]) -> None:
    check(settings)
