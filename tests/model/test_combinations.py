"""Templates x splittings x attentions x extras: what composes keeps every obligation, whatever the combination."""

from __future__ import annotations

from typing import Any

import pytest

import stepformer as sf
from architectures import all_combinations, combinations, title
from helpers import short_audit
from stepformer.measure.diagnostics.audit import GEOMETRY
from stepformer.oracles import attentions
from stepformer.rules import splittings, templates

SAMPLE = combinations(76, seed=44)


def cost(settings: dict[str, Any]) -> float:
    """How much longer an audit takes, roughly: constrained rows are solved, matrices of a token iterated."""
    solved = settings.get("attention") in ("entropy", "kl")
    return (4 if solved else 1) * (2 if settings.get("template") in ("muon", "ortho", "soap", "shampoo") else 1)


def covering(sample: list[dict[str, Any]]) -> list[int]:
    """Indices of a few combinations that hold every setting of the sample: those that add most for their time."""
    facets = [{(key, str(value)) for key, value in settings.items()} for settings in sample]
    missing, chosen = set().union(*facets), list[int]()
    while missing:
        chosen.append(max(range(len(sample)), key=lambda i: len(facets[i] & missing) / cost(sample[i])))
        missing -= facets[chosen[-1]]
    return chosen


# An audit of an attention that solves a problem in every row takes ten times as long: their presets are in the fast set
# of other tests.
QUICK = [i for i in covering(SAMPLE) if cost(SAMPLE[i]) < 4][:10]


def test_the_sample_covers_what_there_is() -> None:
    """Every template, splitting, attention and extra is in the sample, and no combination twice."""
    shipped = lambda registry: {e.name for e in registry if e.component.__module__.startswith("stepformer.")}  # noqa: E731
    configs = [sf.model_config("vanilla", **settings) for settings in SAMPLE]
    assert {c.template for c in configs} == shipped(templates)
    assert {c.splitting for c in configs} == shipped(splittings)
    assert {c.attention for c in configs} == shipped(attentions)
    assert {c.value_residual for c in configs} == {"off", "fixed", "free", "unit"}
    for key in ("embedding_skip", "scale", "denseformer", "unet", "logit_softcap", "document_separator", "qk_norm"):
        assert sum(key in s for s in SAMPLE) >= 3, key
    assert len({title(s) for s in SAMPLE}) == len(SAMPLE) >= 60


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The sample, with ten steps of training; in the fast set those that cover most of it, with three.

    The whole product (hours): `pytest --all-combinations tests/model/test_combinations.py`.
    """
    if "combination" not in metafunc.fixturenames:
        return
    chosen = [pytest.param(SAMPLE[i], 3, id=title(SAMPLE[i])) for i in QUICK]
    chosen += [pytest.param(settings, 10, id=f"{title(settings)}-10", marks=pytest.mark.slow) for settings in SAMPLE]
    if metafunc.config.getoption("--all-combinations"):
        chosen = [pytest.param(settings, 10, id=title(settings)) for settings in all_combinations()]
    metafunc.parametrize(("combination", "steps"), chosen)


def test_combination(combination: dict[str, Any], steps: int) -> None:
    """The obligations; test_equations compares combinations with the transcription, and presets train for longer: a few
    steps here only show that training works.
    """
    config = sf.model_config("vanilla", **{**GEOMETRY, **combination, "n_head": 8})
    result = short_audit(config, title(combination), steps=steps)
    assert {c.obligation: c.detail for c in result.checks if not c.passed} == {}
