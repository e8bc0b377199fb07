"""What a set of finished runs says about the difference between architectures.

Two runs on one seed see the same batches and the same evaluation, so most of the run-to-run noise is common to both and
leaves their difference. Every claim here is therefore about paired differences, seed by seed, with Student's t for the
few pairs there are.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stepformer.errors import InputError, UnknownNameError, suggestion
from stepformer.files import read_json

RESULT_FORMAT = 1
SMALL_DIFFERENCE = 0.003  # about two run-to-run standard deviations at the scale of the speed-run
PAIRS_FOR_SMALL = 4
SAME_LOSS = 1e-4  # a log may round; two evaluations of one model on one split do not differ by more


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
    _check_confidence(confidence)
    seeds = tuple(sorted(baseline.keys() & other.keys()))
    unpaired = tuple(sorted(baseline.keys() ^ other.keys()))
    if not seeds:
        raise InputError("The two sets of runs have no seed in common, so nothing can be paired.")
    summary = summarise(other[seed] - baseline[seed] for seed in seeds)
    n, mean, error = summary.n, summary.mean, summary.standard_error
    if error is None:
        return PairedDifference(1, mean, None, None, None, None, seeds, unpaired, confidence)
    half = t_quantile((1 + confidence) / 2, n - 1) * error
    if error:
        p_value = 2 * t_tail(abs(mean) / error, n - 1)
    else:
        p_value = float(mean == 0)
    return PairedDifference(n, mean, error, mean - half, mean + half, p_value, seeds, unpaired, confidence)


def _check_confidence(confidence: float) -> None:
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


@dataclass(frozen=True)
class RunRecord:
    """A finished run as its folder tells it; `curve` holds (tokens, evaluation loss) from step 0 to the end."""

    folder: Path
    label: str
    title: str
    preset: str
    seed: int
    config_hash: str
    pairing: str
    steps: int
    tokens: int
    val_loss: float
    best_val_loss: float
    best_step: int
    val_tokens: int
    val_hash: str
    train_seconds: float
    tokens_per_second: float
    parameters: int
    unigram_entropy: float | None
    weights_sha256: str
    curve: tuple[tuple[int, float], ...]

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read `result.json` and the evaluations in `metrics.jsonl`."""
        folder = Path(folder)
        if not folder.is_dir():
            raise InputError(f"There is no run folder '{folder}'.")
        path = folder / "result.json"
        result = read_json(path, "result of a finished run")
        if not isinstance(result, dict):
            raise InputError(f"The result '{path}' is damaged: it is not a JSON object.")
        if result.get("format") != RESULT_FORMAT:
            found = result.get("format", "none")
            raise InputError(f"The result '{path}' has format {found}; this version reads format {RESULT_FORMAT}.")
        if result.get("status") != "finished":
            raise InputError(
                f"The run '{folder}' is not finished (status '{result.get('status', '')}'): only finished runs compare."
            )
        get = _Fields(path, result)
        fields: dict[str, Any] = {}
        for name in ("label", "title", "preset", "config_hash", "pairing", "val_hash", "weights_sha256"):
            fields[name] = get.text(name)
        for name in ("seed", "steps", "tokens", "best_step", "val_tokens", "parameters"):
            fields[name] = get.whole(name)
        for name in ("val_loss", "best_val_loss"):
            fields[name] = get.number(name)
        for name in ("train_seconds", "tokens_per_second"):
            fields[name] = get.positive(name)
        get.positive("tokens")
        fields["label"] = fields["label"] or fields["title"]
        entropy = None if result.get("unigram_entropy") is None else get.number("unigram_entropy")
        curve = _read_curve(folder / "metrics.jsonl", fields["steps"], fields["tokens"], fields["val_loss"])
        return cls(folder=folder, unigram_entropy=entropy, curve=curve, **fields)


def load_records(folders: Iterable[str | Path]) -> list[RunRecord]:
    return [RunRecord.load(folder) for folder in folders]


class _Fields:
    """Typed access to a JSON object, with a sentence for what is missing or of the wrong kind."""

    def __init__(self, path: Path, values: Mapping[str, Any], where: str = "") -> None:
        self.path, self.values, self.where = path, values, where

    def _fail(self, name: str, kind: str) -> InputError:
        fault = f"its '{name}' is not {kind}" if name in self.values else f"it has no '{name}'"
        return InputError(f"The file '{self.path}' is damaged{self.where}: {fault}.")

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise self._fail(name, "text")
        return value

    def whole(self, name: str) -> int:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._fail(name, "a whole number")
        return value

    def number(self, name: str) -> float:
        value = self.values.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self._fail(name, "a finite number")
        return float(value)

    def positive(self, name: str) -> float:
        if self.number(name) <= 0:
            raise self._fail(name, "above zero")
        return self.number(name)


def _read_curve(path: Path, steps: int, tokens: int, val_loss: float) -> tuple[tuple[int, float], ...]:
    """The evaluations of a run in order of steps, ending with its result."""
    try:
        lines = path.read_bytes().rstrip().splitlines()
    except FileNotFoundError:
        raise InputError(f"There is no metrics file '{path}'.") from None
    except OSError as error:
        raise InputError(f"The metrics file '{path}' cannot be read: {error.strerror}.") from None
    evaluations: dict[int, tuple[int, float]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            if number == len(lines):  # cut by a kill or a full disk; the result holds the final evaluation
                break
            raise InputError(f"The file '{path}' is damaged in line {number}: it is not valid JSON.") from None
        if not isinstance(entry, dict):
            raise InputError(f"The file '{path}' is damaged in line {number}: it is not a JSON object.")
        if entry.get("kind") == "eval":
            get = _Fields(path, entry, f" in line {number}")
            # a resumed run repeats the evaluations after its checkpoint: the later line is of the weights that stayed
            evaluations[get.whole("step")] = (get.whole("tokens"), get.number("val_loss"))
    if not evaluations:
        raise InputError(f"The metrics file '{path}' has no evaluation in it.")
    logged = evaluations.get(steps, (tokens, val_loss))
    if max(evaluations) > steps or logged[0] != tokens or abs(logged[1] - val_loss) > SAME_LOSS:
        raise InputError(f"The evaluations in '{path}' do not end with the loss in result.json: they are of two runs.")
    evaluations[steps] = (tokens, val_loss)
    return tuple(evaluations[step] for step in sorted(evaluations))


def mean_ratio(baseline: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Other over baseline: geometric mean over common seeds, so that swapping the two inverts it."""
    seeds = sorted(baseline.keys() & other.keys())
    if not seeds:
        raise InputError("The two sets of runs have no seed in common, so nothing can be paired.")
    return math.exp(math.fsum(math.log(other[seed] / baseline[seed]) for seed in seeds) / len(seeds))


def time_ratio(baseline: Mapping[int, RunRecord], other: Mapping[int, RunRecord]) -> float:
    """Training time per token over the baseline's: 1.2 takes a fifth longer for the same tokens."""
    seconds = [{seed: run.train_seconds / run.tokens for seed, run in runs.items()} for runs in (baseline, other)]
    return mean_ratio(*seconds)


@dataclass(frozen=True)
class Row:
    """One architecture against the baseline, over its seeds.

    `tokens_fraction` is the mean over common seeds of the tokens after which it reached the final loss of the
    baseline's run on that seed, as a fraction of that run's tokens; None unless all of them did, since a mean of only
    the successes would flatter. `reached` counts those that did. Ratios are over common seeds, None without any;
    `difference` is None for the baseline itself and when no seed is common.
    """

    label: str
    is_baseline: bool
    records: tuple[RunRecord, ...]
    loss: Summary
    best: Summary
    difference: PairedDifference | None
    common_seeds: tuple[int, ...]
    reached: int
    tokens_fraction: float | None
    speed_ratio: float | None  # tokens per second, over the baseline's
    time_ratio: float | None  # seconds for the same tokens, over the baseline's
    parameters: int
    notes: tuple[str, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(record.seed for record in self.records)

    @property
    def verdict(self) -> str:
        if self.is_baseline:
            return "baseline"
        return self.difference.verdict if self.difference else "no common seed"

    @property
    def provisional(self) -> bool:
        return self.difference is not None and self.difference.provisional


@dataclass(frozen=True)
class Comparison:
    """All rows, the baseline first, and what their numbers are numbers of."""

    baseline: str
    rows: tuple[Row, ...]
    confidence: float
    tokens: int
    val_tokens: int
    val_hash: str
    seeds: tuple[int, ...]
    unigram_entropy: float | None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know before quoting the table."""
        notes = [note for row in self.rows for note in row.notes]
        intervals = sum(row.difference is not None and row.difference.low is not None for row in self.rows)
        if intervals > 1:
            chance = min(1.0, intervals * (1 - self.confidence))
            notes.append(
                f"Each interval holds on its own: among {intervals}, the chance that at least one misses the true "
                f"difference is up to {chance:.0%}."
            )
        return tuple(notes)


def compare(records: Iterable[RunRecord], baseline: str, confidence: float = 0.95) -> Comparison:
    """Compare runs by label with the runs labelled `baseline`; refuses runs whose losses do not measure one thing."""
    _check_confidence(confidence)
    records = list(records)
    if not records:
        raise InputError("There are no runs to compare.")
    by_label: dict[str, dict[int, RunRecord]] = {}
    for record in records:
        _check_same(records[0], record)
        runs = by_label.setdefault(record.label, {})
        if record.seed in runs:
            raise InputError(
                f"'{runs[record.seed].folder}' and '{record.folder}' are both seed {record.seed} of '{record.label}': "
                f"give one of them."
            )
        first = next(iter(runs.values()), record)
        if record.parameters != first.parameters:
            raise InputError(
                f"'{first.folder}' and '{record.folder}' are both labelled '{record.label}' but have "
                f"{first.parameters:,} and {record.parameters:,} parameters: they are not one architecture."
            )
        runs[record.seed] = record
    if baseline not in by_label:
        known = ", ".join(f"'{label}'" for label in by_label)
        raise UnknownNameError(
            f"No run is labelled '{baseline}', the baseline.{suggestion(baseline, by_label) or f' Labels: {known}.'}"
        )
    order = [baseline, *(label for label in by_label if label != baseline)]
    entropies = {record.unigram_entropy for record in records}
    return Comparison(
        baseline=baseline,
        rows=tuple(_row(label, by_label[baseline], by_label[label], label == baseline, confidence) for label in order),
        confidence=confidence,
        tokens=records[0].tokens,
        val_tokens=records[0].val_tokens,
        val_hash=records[0].val_hash,
        seeds=tuple(sorted({record.seed for record in records})),
        unigram_entropy=entropies.pop() if len(entropies) == 1 else None,
    )


def _check_same(first: RunRecord, other: RunRecord) -> None:
    pair = f"'{first.folder}' and '{other.folder}' cannot be compared"
    if first.val_hash != other.val_hash:
        hashes = f"{first.val_hash[:12]} and {other.val_hash[:12]}"
        raise InputError(f"{pair}: they were evaluated on different splits (hashes {hashes}).")
    if first.val_tokens != other.val_tokens:
        counts = f"{first.val_tokens:,} and {other.val_tokens:,}"
        raise InputError(f"{pair}: they were evaluated on different numbers of tokens ({counts}).")
    if first.tokens != other.tokens:
        raise InputError(f"{pair}: their budgets are {first.tokens:,} and {other.tokens:,} training tokens.")
    if first.pairing != other.pairing:
        pairings = f"{first.pairing} and {other.pairing}"
        raise InputError(f"{pair}: the same seed gives them different batches (pairing {pairings}).")


def _row(
    label: str, base: Mapping[int, RunRecord], runs: Mapping[int, RunRecord], is_baseline: bool, confidence: float
) -> Row:
    common = sorted(base.keys() & runs.keys())
    fractions = []
    for seed in common:
        tokens = tokens_to_reach(runs[seed].curve, base[seed].val_loss)
        fractions += [] if tokens is None else [tokens / base[seed].tokens]
    difference = ratio = speed = None
    if common:
        ratio = time_ratio(base, runs)
        speed = mean_ratio(_values(base, "tokens_per_second"), _values(runs, "tokens_per_second"))
        if not is_baseline:
            difference = paired(_values(base, "val_loss"), _values(runs, "val_loss"), confidence)
    records = tuple(runs[seed] for seed in sorted(runs))
    return Row(
        label=label,
        is_baseline=is_baseline,
        records=records,
        loss=summarise(record.val_loss for record in records),
        best=summarise(record.best_val_loss for record in records),
        difference=difference,
        common_seeds=tuple(common),
        reached=len(fractions),
        tokens_fraction=summarise(fractions).mean if common and len(fractions) == len(common) else None,
        speed_ratio=speed,
        time_ratio=ratio,
        parameters=records[0].parameters,
        notes=() if is_baseline else _notes(label, base, runs, difference),
    )


def _values(runs: Mapping[int, RunRecord], name: str) -> dict[int, float]:
    return {seed: getattr(record, name) for seed, record in runs.items()}


def _notes(
    label: str, base: Mapping[int, RunRecord], runs: Mapping[int, RunRecord], difference: PairedDifference | None
) -> tuple[str, ...]:
    notes = []
    if difference and difference.provisional:
        pairs = "one paired seed" if difference.n == 1 else f"{difference.n} paired seeds"
        notes.append(
            f"{label}: a difference under {SMALL_DIFFERENCE} is not to be claimed from {pairs}; it needs at least "
            f"{PAIRS_FOR_SMALL}."
        )
    alone, missing = sorted(runs.keys() - base.keys()), sorted(base.keys() - runs.keys())
    if alone:
        notes.append(f"{label}: {seed_words(alone)} left out of the difference, the baseline has no such run.")
    if missing:
        notes.append(
            f"{label}: {seed_words(missing)} of the baseline left out of the difference, there is no such run."
        )
    return tuple(notes)


def seed_words(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
