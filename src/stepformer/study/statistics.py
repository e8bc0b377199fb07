"""Statistics of a few paired runs.

Two runs on one seed see the same batches and the same evaluation, so most of the run-to-run noise is common to both and
leaves their difference. Every claim is therefore about paired differences, seed by seed, with Student's t for the few
pairs there are.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stepformer.base.errors import InputError

SMALL_DIFFERENCE = 0.003  # about two run-to-run standard deviations at the scale of the speed-run
PAIRS_FOR_SMALL = 4
EXACT_ORDERS = 7  # pairs whose orders can all be tried, 5,040


def t_tail(t: float, df: float) -> float:
    """P(T > t) for Student's t: half the regularised incomplete beta function at df / (df + t^2) when t >= 0."""
    if t < 0:
        return 1 - t_tail(-t, df)
    return 0.5 * _beta(df / (df + t * t), t * t / (df + t * t), df / 2, 0.5)


@functools.lru_cache(256)
def t_quantile(p: float, df: float) -> float:
    """The t with P(T <= t) = p: the factor between a standard error and a confidence limit. Error below 1e-8."""
    if not 0 < p < 1:
        raise InputError(f"A probability lies strictly between 0 and 1, not at {p!r}.")
    if not df > 0:
        raise InputError(f"Degrees of freedom are positive, not {df!r}.")
    if p == 0.5:
        return 0.0
    tail = min(p, 1 - p)
    low, high = 0.0, 1.0
    while t_tail(high, df) > tail:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:  # until no float lies between
        low, high = (middle, high) if t_tail(middle, df) > tail else (low, middle)
    return math.copysign(high, p - 0.5)


def _beta(x: float, rest: float, a: float, b: float) -> float:
    """Regularised incomplete beta function I_x(a, b); `rest` is 1 - x, given apart so that neither end loses digits."""
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only below this point
        return 1 - _beta(rest, x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    return math.exp(log_front) * _beta_fraction(x, a, b) / a


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of I_x(a, b), evaluated forwards by Lentz's method."""
    tiny = 1e-300  # stands for a zero denominator, which cancels in the next factor
    c = 1.0
    d = 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    value = d
    for m in range(1, 100_000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + term * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + term / c
            c = c if abs(c) > tiny else tiny
            value *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return value


@dataclass(frozen=True)
class Summary:
    """Mean of `n` values; `std` is their spread, `standard_error` the mean's own (both None for one value)."""

    n: int
    mean: float
    standard_error: float | None
    std: float | None


def summarise(values: Iterable[float]) -> Summary:
    """Mean, sample standard deviation (n - 1 below) and standard error std / sqrt(n)."""
    values = list(values)
    n = len(values)
    if not n:
        raise InputError("There are no values to summarise.")
    mean = math.fsum(values) / n
    if n == 1:
        return Summary(1, mean, None, None)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return Summary(n, mean, std / math.sqrt(n), std)


@dataclass(frozen=True)
class PairedDifference:
    """Other minus baseline over the seeds both have; below zero the other has the lower loss.

    `low` and `high` bound the mean difference: of many studies like this one, the fraction `confidence` has the true
    difference inside. One pair has a mean and no interval. `p_value` is the chance of a difference at least this far
    from zero if there were none. `unpaired` are the seeds that only one of the two has.
    """

    n: int
    mean: float
    standard_error: float | None
    low: float | None
    high: float | None
    p_value: float | None
    seeds: tuple[int, ...]
    unpaired: tuple[int, ...]
    confidence: float

    @property
    def verdict(self) -> str:
        """A word for a loss: a difference is shown when the interval excludes zero."""
        if self.low is None or self.high is None:
            return "one seed: no interval"
        if self.high < 0:
            return "better"
        return "worse" if self.low > 0 else "no difference shown"

    @property
    def provisional(self) -> bool:
        """Whether the difference is too small to be claimed from so few pairs, whatever its interval says."""
        return abs(self.mean) < SMALL_DIFFERENCE and self.n < PAIRS_FOR_SMALL

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:+.4f} ({self.verdict})"
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def paired(baseline: Mapping[int, float], other: Mapping[int, float], confidence: float = 0.95) -> PairedDifference:
    """Mean of the differences seed by seed, and the interval mean +- t(n - 1) * standard error around it."""
    check_confidence(confidence)
    seeds = tuple(sorted(baseline.keys() & other.keys()))
    unpaired = tuple(sorted(baseline.keys() ^ other.keys()))
    if not seeds:
        raise InputError("The two sets of runs have no seed in common, so nothing can be paired.")
    summary = summarise(other[seed] - baseline[seed] for seed in seeds)
    n, mean, error = summary.n, summary.mean, summary.standard_error
    if error is None:
        return PairedDifference(1, mean, None, None, None, None, seeds, unpaired, confidence)
    half = t_quantile((1 + confidence) / 2, n - 1) * error
    p_value = 2 * t_tail(abs(mean) / error, n - 1) if error else float(mean == 0)
    return PairedDifference(n, mean, error, mean - half, mean + half, p_value, seeds, unpaired, confidence)


def rank_correlation(pairs: Sequence[Sequence[float]]) -> tuple[float | None, float | None]:
    """Spearman's rank correlation of (x, y) pairs, equal values sharing their mean rank; None where one never changes.

    With it the chance of one at least as far from zero if all orders were as likely: over all orders of up to seven
    pairs, by Student's t for more.
    """
    centred = []
    for values in zip(*pairs, strict=True):
        ordered = sorted(values)
        ranks = [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
        centred.append([rank - (len(pairs) - 1) / 2 for rank in ranks])
    x, y = centred
    scale = math.sqrt(math.fsum(a * a for a in x) * math.fsum(b * b for b in y))
    if scale == 0:
        return None, None

    def correlation(other: Sequence[float]) -> float:
        return math.fsum(a * b for a, b in zip(x, other, strict=True)) / scale

    rho, n = correlation(y), len(pairs)
    if n <= EXACT_ORDERS:
        orders = [abs(correlation(order)) >= abs(rho) - 1e-12 for order in itertools.permutations(y)]
        return rho, sum(orders) / len(orders)
    by_chance = 2 * t_tail(abs(rho) * math.sqrt((n - 2) / max(1e-300, 1 - rho * rho)), n - 2)
    return rho, max(by_chance, 2 / math.factorial(n))


def check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise InputError(f"A confidence level lies strictly between 0 and 1 (0.95 is usual), not at {confidence!r}.")


def tokens_to_reach(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Training tokens at which an evaluation curve of (tokens, loss) first reaches `target`; None if it never does.

    Straight between evaluations: loss curves bend downwards first, so this errs on the side of more tokens.
    """
    before: tuple[float, float] | None = None
    for tokens, loss in curve:
        if loss <= target:
            if before is None:
                return float(tokens)
            return before[0] + (before[1] - target) / (before[1] - loss) * (tokens - before[0])
        before = (tokens, loss)
    return None


def mean_ratio(baseline: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Other over baseline: geometric mean over common seeds, so that swapping the two inverts it."""
    seeds = sorted(baseline.keys() & other.keys())
    if not seeds:
        raise InputError("The two sets of runs have no seed in common, so nothing can be paired.")
    return math.exp(math.fsum(math.log(other[seed] / baseline[seed]) for seed in seeds) / len(seeds))


def too_small(label: str, difference: PairedDifference | None) -> list[str]:
    """A sentence on a difference that is smaller than so few pairs can show."""
    if difference is None or not difference.provisional:
        return []
    pairs = "one paired seed" if difference.n == 1 else f"{difference.n} paired seeds"
    small = f"a difference under {SMALL_DIFFERENCE} is not to be claimed from {pairs}"
    return [f"{label}: {small}; it needs at least {PAIRS_FOR_SMALL}."]


def several_intervals(differences: Iterable[PairedDifference | None], confidence: float) -> list[str]:
    """A warning to whoever reads more than one interval."""
    intervals = sum(difference is not None and difference.low is not None for difference in differences)
    if intervals < 2:
        return []
    return [
        f"Each interval holds on its own: among {intervals}, the chance that at least one misses the true difference "
        f"is up to {min(1.0, intervals * (1 - confidence)):.0%}."
    ]


def seed_words(seeds: Sequence[int]) -> str:
    """`seed 42`, `seeds 7, 8, 11`; many in a row as `seeds 42 to 61`."""
    if len(seeds) > 4 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
