"""Quantiles, rank correlations, paired differences and tokens to reach a loss, against known values."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from draws import shifted
from stepformer.base.errors import InputError
from stepformer.study import (
    mean_ratio,
    paired,
    summarise,
    t_quantile,
    tokens_to_reach,
)
from stepformer.study.statistics import rank_correlation, seed_words


@pytest.mark.parametrize(
    ("p", "df", "value"),
    [
        (0.975, 1, 12.706204736432095),
        (0.975, 2, 4.302652729911275),
        (0.975, 3, 3.182446305284263),
        (0.975, 4, 2.7764451051977987),
        (0.975, 9, 2.2621571628540993),
        (0.975, 30, 2.0422724563012373),
        (0.975, 1e8, 1.9599640),
        (0.995, 5, 4.032142983557536),
        (0.9995, 1, 636.6192487687),
        (0.95, 1, math.tan(0.45 * math.pi)),  # one degree of freedom is Cauchy
        (0.6, 2, 0.2 * math.sqrt(2 / (4 * 0.6 * 0.4))),  # two have a closed form
        (1e-12, 2, -(1 - 2e-12) * math.sqrt(2 / (4e-12 * (1 - 1e-12)))),
        (0.5, 7, 0.0),
    ],
)
def test_quantiles_of_student_t(p: float, df: float, value: float) -> None:
    assert t_quantile(p, df) == pytest.approx(value, rel=2e-8, abs=1e-12)
    if p > 0.01:
        assert t_quantile(1 - p, df) == pytest.approx(-value, rel=2e-8, abs=1e-12)


def naive_ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal ones have the mean of their places."""
    return [sum(v < value for v in values) + (1 + sum(v == value for v in values)) / 2 for value in values]


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    return float(np.corrcoef(x, y)[0, 1])


# Published (Momentum Streams, from the authors' public results on OpenWebText): validation loss, then mean spread,
# largest spread, stable rank, persistence, mean largest singular value, sum of log rms gain of nine variants.
PUBLISHED = (
    (3.0078, 6.94, 9.79, 3110, 20.42, 58.40, 3.53),
    (2.9911, 6.30, 11.86, 1951, 25.21, 55.52, 3.10),
    (2.9883, 6.33, 11.11, 2037, 24.66, 63.12, 2.05),
    (2.9413, 8.12, 10.52, 4175, 14.44, 36.49, 2.55),
    (2.9342, 9.83, 21.26, 10614, 9.12, 24.51, 1.43),
    (2.9481, 9.68, 19.57, 5362, 11.25, 39.51, 2.66),
    (2.9275, 10.00, 19.23, 3601, 13.90, 37.78, 2.14),
    (2.9395, 8.50, 15.20, 26077, 6.69, 19.90, 1.35),
    (2.9236, 12.00, 32.64, 16906, 7.81, 25.73, 1.33),
)


def test_rank_correlations_are_those_that_were_published() -> None:
    loss, *columns = zip(*PUBLISHED, strict=True)
    found = [rank_correlation(list(zip(column, loss, strict=True)))[0] for column in columns]
    assert found == pytest.approx([-0.90, -0.77, -0.70, 0.75, 0.75, 0.80], abs=0.005)


@pytest.mark.parametrize("n", [3, 5, 7, 8, 20])
@pytest.mark.parametrize("ties", [False, True])
def test_a_rank_correlation_is_the_correlation_of_ranks(n: int, ties: bool) -> None:
    draw = np.random.default_rng(shifted(n))
    for _ in range(5):
        pairs = draw.integers(0, 3, (n, 2)).tolist() if ties else draw.normal(size=(n, 2)).tolist()
        x, y = (naive_ranks([pair[i] for pair in pairs]) for i in (0, 1))
        rho, p = rank_correlation(pairs)
        if len(set(x)) == 1 or len(set(y)) == 1:
            assert (rho, p) == (None, None)
            continue
        assert rho == pytest.approx(pearson(x, y), abs=1e-12)
        assert p is not None
        if n <= 5:
            others = [abs(pearson(x, order)) for order in itertools.permutations(y)]
            assert p == pytest.approx(sum(other >= abs(rho) - 1e-9 for other in others) / len(others))
    assert rank_correlation([(i, -i) for i in range(n)])[0] == pytest.approx(-1)
    assert rank_correlation([(i, i * i) for i in range(n)])[1] == pytest.approx(2 / math.factorial(n))


@pytest.mark.parametrize(("p", "df"), [(0.0, 3), (1.0, 3), (float("nan"), 3), (0.9, 0)])
def test_quantiles_need_a_probability_and_degrees_of_freedom(p: float, df: float) -> None:
    with pytest.raises(InputError):
        t_quantile(p, df)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_interval_covers_the_truth_as_often_as_it_says(n: int) -> None:
    """Seed noise ten times the difference's own is common to both runs and must not widen the interval."""
    rng = np.random.default_rng(shifted(n))
    trials, inside, widths = 2000, 0, []
    for _ in range(trials):
        base = 2 + 0.1 * rng.standard_normal(n)
        other = base - 0.02 + 0.01 * rng.standard_normal(n)
        result = paired(dict(enumerate(base.tolist())), dict(enumerate(other.tolist())))
        assert result.low is not None
        assert result.high is not None
        inside += result.low <= -0.02 <= result.high
        assert (result.low <= 0 <= result.high) == (result.p_value is not None and result.p_value >= 0.05)
        widths.append((result.high - result.low) / 2)
    # margin: three and a half standard errors, and half of what common noise would give
    assert inside / trials == pytest.approx(0.95, abs=3.5 * math.sqrt(0.95 * 0.05 / trials))
    assert np.median(widths) < 2 * t_quantile(0.975, n - 1) * 0.01 / math.sqrt(n)


def test_summary_by_hand() -> None:
    summary = summarise([1.0, 2.0, 4.0, 5.0])
    assert (summary.n, summary.mean) == (4, 3.0)
    assert summary.std == pytest.approx(math.sqrt(10 / 3))
    assert summary.standard_error == pytest.approx(math.sqrt(10 / 12))
    assert summarise([7.0]) == dataclasses.replace(summary, n=1, mean=7.0, standard_error=None, std=None)
    with pytest.raises(InputError):
        summarise([])


def test_paired_difference_by_hand() -> None:
    result = paired({1: 2.0, 2: 3.0, 3: 5.0, 9: 100.0}, {3: 4.7, 2: 2.8, 1: 1.9, 8: -100.0})
    assert (result.n, result.seeds, result.unpaired) == (3, (1, 2, 3), (8, 9))
    assert result.mean == pytest.approx(-0.2)
    assert result.standard_error == pytest.approx(0.1 / math.sqrt(3))
    half = 4.302652729911275 * 0.1 / math.sqrt(3)
    assert (result.low, result.high) == (pytest.approx(-0.2 - half), pytest.approx(-0.2 + half))
    t = 2 * math.sqrt(3)
    assert result.p_value == pytest.approx(1 - t / math.sqrt(2 + t * t))  # closed form for two degrees of freedom
    assert result.verdict == "no difference shown"
    assert paired({1: 2.0, 2: 3.0, 3: 5.0}, {1: 1.9, 2: 2.8, 3: 4.7}, confidence=0.9).verdict == "better"
    assert paired({1: 1.9, 2: 2.8, 3: 4.7}, {1: 2.0, 2: 3.0, 3: 5.0}, confidence=0.9).verdict == "worse"


def test_one_pair_has_no_interval_and_says_so() -> None:
    result = paired({1: 2.0}, {1: 1.5, 2: 1.0})
    assert (result.n, result.mean, result.low, result.high, result.p_value) == (1, -0.5, None, None, None)
    assert result.verdict == "one seed: no interval"
    assert str(result) == "-0.5000 (one seed: no interval)"


def test_equal_runs_show_no_difference() -> None:
    same = paired({1: 2.0, 2: 3.0}, {1: 2.0, 2: 3.0})
    assert (same.low, same.high, same.p_value, same.verdict) == (0.0, 0.0, 1.0, "no difference shown")


def test_nothing_to_pair() -> None:
    with pytest.raises(InputError, match="no seed in common"):
        paired({1: 2.0}, {2: 2.0})
    with pytest.raises(InputError, match="confidence level"):
        paired({1: 2.0}, {1: 2.0}, confidence=95)


@pytest.mark.parametrize(
    ("curve", "target", "tokens"),
    [
        ([(0, 4.0), (100, 3.0), (200, 2.0)], 2.5, 150.0),
        ([(0, 4.0), (100, 3.0), (200, 2.0)], 3.0, 100.0),
        ([(0, 4.0), (100, 3.0), (200, 2.0)], 2.0, 200.0),
        ([(0, 4.0), (100, 3.0), (200, 2.0)], 1.99, None),
        ([(0, 4.0), (100, 3.0), (200, 2.0)], 5.0, 0.0),
        ([(0, 4.0), (100, 2.0), (200, 3.0), (300, 1.0)], 2.5, 75.0),  # the first time, not the last
        ([(0, 4.0), (100, 4.5), (200, 3.5)], 4.0, 0.0),
        ([(0, 4.0), (100, 4.5), (200, 3.5)], 3.75, 175.0),
        ([], 1.0, None),
    ],
)
def test_tokens_to_reach(curve: list[tuple[int, float]], target: float, tokens: float | None) -> None:
    assert tokens_to_reach(curve, target) == (None if tokens is None else pytest.approx(tokens))


def test_ratios_are_inverted_by_swapping() -> None:
    a, b = {1: 2.0, 2: 8.0, 3: 5.0}, {1: 1.0, 2: 16.0, 4: 9.0}
    assert mean_ratio(a, b) == pytest.approx(1.0)
    assert mean_ratio({1: 2.0, 2: 2.0}, {1: 4.0, 2: 2.0}) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(
    ("seeds", "words"),
    [([42], "seed 42"), ([42, 43, 44], "seeds 42, 43, 44"), ([42, 44, 43, 45, 46], "seeds 42, 44, 43, 45, 46"),
     (list(range(42, 1042)), "seeds 42 to 1041")],
)  # fmt: skip
def test_many_seeds_in_a_row_are_not_all_listed(seeds: list[int], words: str) -> None:
    assert seed_words(seeds) == words
