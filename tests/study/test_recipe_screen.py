"""The factorial design of `benchmarks/recipe_screen.py` and the effects that it finds."""

from __future__ import annotations

import importlib.util
from itertools import combinations
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture(scope="module")
def screen() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks/recipe_screen.py"
    spec = importlib.util.spec_from_file_location("recipe_screen", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_effect_is_mixed_up_with_another_or_with_a_pair_of_others(screen: ModuleType) -> None:
    runs = np.array(screen.design())
    assert runs.shape == (32, len(screen.CHANGES))
    assert len({*map(tuple, runs)}) == 32
    for chosen in (columns for n in (1, 2, 3) for columns in combinations(range(runs.shape[1]), n)):
        assert runs[:, chosen].prod(1).sum() == 0, chosen


def test_effects_are_those_of_least_squares(screen: ModuleType) -> None:
    rng = np.random.default_rng(0)
    runs = np.array(screen.design())
    losses = 4.3 + runs @ rng.normal(0, 0.02, runs.shape[1]) + rng.normal(0, 0.01, len(runs))
    columns = np.column_stack([np.ones(len(runs)), (runs + 1) / 2])  # a change is made (1) or not (0)
    solution, rest, *_ = np.linalg.lstsq(columns, losses, rcond=None)
    free = len(runs) - columns.shape[1]
    error = (rest[0] / free * np.linalg.inv(columns.T @ columns)[1, 1]) ** 0.5
    found, found_error, found_free = screen.effects(losses.tolist())
    assert found == pytest.approx(solution[1:].tolist(), abs=1e-12)  # fp64 round-off
    assert (found_error, found_free) == (pytest.approx(error, rel=1e-9), free)
