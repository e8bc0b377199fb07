"""The factorial design of `benchmarks/recipe_screen.py` and the effects that it finds."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from scripts import script

SCREEN = script("benchmarks/recipe_screen.py")


def test_no_effect_is_mixed_up_with_another_or_with_a_pair_of_others() -> None:
    runs = np.array(SCREEN.design())
    assert runs.shape == (32, len(SCREEN.CHANGES))
    assert len({*map(tuple, runs)}) == 32
    for chosen in (columns for n in (1, 2, 3) for columns in combinations(range(runs.shape[1]), n)):
        assert runs[:, chosen].prod(1).sum() == 0, chosen


def test_effects_are_those_of_least_squares() -> None:
    rng = np.random.default_rng(0)
    runs = np.array(SCREEN.design())
    losses = 4.3 + runs @ rng.normal(0, 0.02, runs.shape[1]) + rng.normal(0, 0.01, len(runs))
    columns = np.column_stack([np.ones(len(runs)), (runs + 1) / 2])  # a change is made (1) or not (0)
    solution, rest, *_ = np.linalg.lstsq(columns, losses, rcond=None)
    free = len(runs) - columns.shape[1]
    error = (rest[0] / free * np.linalg.inv(columns.T @ columns)[1, 1]) ** 0.5
    found, found_error, found_free = SCREEN.effects(losses.tolist())
    assert found == pytest.approx(solution[1:].tolist(), abs=1e-12)  # fp64 round-off
    assert (found_error, found_free) == (pytest.approx(error, rel=1e-9), free)
