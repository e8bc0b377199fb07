"""What the architectures should reach on one H200: size small, context 1024, micro-batch 32, bf16 autocast.

Each row names presets and a bound on one measured quantity. Ratios are to vanilla in the same process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from stepformer.base.errors import UnknownNameError, suggestion
from stepformer.catalogue import preset
from stepformer.measure.benchmark.planning import Wanted

MOMENTUM = ("hb", "yurii", "tmm", "symplectic-euler", "polyak-euler", "nesterov-euler")
IMEX_K1 = ("imex-k1-ama", "imex-k1-mam", "imex-ln-k1-ama", "imex-ln-k1-mam")
IMEX_K2 = ("imex-k2-ama", "imex-k2-mam", "imex-ln-k2-ama", "imex-ln-k2-mam")
SCHEMES = ("plain-euler", "presymp-euler", "exp-euler", "conformal-euler", "ab2", "etd-ab2")
LINEAR = ("linear", "linear-yurii", *(f"linear-symp-{scheme}" for scheme in SCHEMES))


@dataclass(frozen=True)
class Target:
    """A row: `presets` should have `quantity` of at least (or at most) `bound`."""

    row: str
    presets: tuple[str, ...]
    quantity: str
    bound: float
    at_most: bool = False
    context: int = 1024

    def holds(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound


TARGETS = (
    Target("vanilla", ("vanilla",), "ktok/s", 600.0),
    Target("vanilla-memory", ("vanilla",), "peak GiB", 10.0, at_most=True),
    Target("momentum", (*MOMENTUM, *IMEX_K1), "ratio", 0.96),
    Target("rmsprop", ("rmsprop",), "ratio", 0.93),
    Target("adam", ("adam", "adamw"), "ratio", 0.90),
    Target("muon", ("muon", "ortho"), "ratio", 0.75),
    Target("two-calls", ("verlet-ama", "verlet-mam", *IMEX_K2), "ratio by FLOPs", 0.95),
    Target("soap", ("soap", "shampoo"), "ratio", 0.10),
    Target("symp", tuple(f"symp-{scheme}" for scheme in SCHEMES), "ratio", 0.80),
    Target("linear", LINEAR, "ratio", 0.85),
    Target("linear-8192", LINEAR, "ratio", 1.2, context=8192),
    Target("entropy", ("entropy", "entropy-head", "entropy-token", "entropy-floor", "kl"), "ratio", 0.70),
    Target("prior", ("kl-previous", "kl-carried"), "ratio", 0.50),
    Target("optimizer", ("vanilla",), "optimizer % of a step", 1.0, at_most=True),
    Target("decode", ("vanilla",), "decode tok/s", 4000.0),
    Target("decode-momentum", ("hb", "yurii", "tmm"), "decode ratio", 0.90),
)


def select(words: str | None) -> list[Target]:
    """The rows that a comma-separated list names; None or `all` is every row."""
    if words in (None, "all"):
        return list(TARGETS)
    rows = {target.row: target for target in TARGETS}
    found = []
    for word in str(words).split(","):
        if word not in rows:
            raise UnknownNameError(
                f"There is no target row '{word}'.{suggestion(word, rows)} The rows are {', '.join(rows)}."
            )
        found.append(rows[word])
    return found


def wanted(targets: Iterable[Target]) -> list[Wanted]:
    """The architectures that the rows are about."""
    return list(dict.fromkeys(Wanted(name, (), target.context) for target in targets for name in target.presets))


@dataclass(frozen=True)
class Verdict:
    """A row for one preset: what was measured (None: not yet) and what it should be."""

    target: Target
    preset: str
    value: float | None
    reached: bool | None


def ratio(record: dict[str, Any], baseline: dict[str, Any]) -> float:
    """The speed as a part of vanilla's: of the steps taken in turn with it, or of those it took before."""
    if "beside" in record:
        return float(record["beside"]["median_ms"] / record["forward_backward"]["median_ms"])
    return float(record["tokens_per_second"] / baseline["tokens_per_second"])


def value_of(quantity: str, record: dict[str, Any], baseline: dict[str, Any]) -> float | None:
    """One measured quantity of a record, in the unit of its target; None if it was not measured."""
    ways: dict[str, Callable[[], float]] = {
        "ktok/s": lambda: record["tokens_per_second"] / 1000,
        "peak GiB": lambda: record["memory"]["peak_bytes"] / 2**30,
        "ratio": lambda: ratio(record, baseline),
        "ratio by FLOPs": lambda: ratio(record, baseline) * record["flops_per_token"] / baseline["flops_per_token"],
        "optimizer % of a step": lambda: 100 * record["batch"]["optimizer_share"],
        "decode tok/s": lambda: record["decode"]["tokens_per_second"],
        "decode ratio": lambda: record["decode"]["tokens_per_second"] / baseline["decode"]["tokens_per_second"],
    }
    try:
        return ways[quantity]()
    except (KeyError, TypeError):
        return None


def _canonical(label: str) -> str:
    """One name for a preset, whichever of its names was given; other labels are no preset's."""
    try:
        return preset(label).name
    except UnknownNameError:
        return label


def verdicts(targets: Iterable[Target], pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> list[Verdict]:
    """One verdict per row and preset, from (record, its baseline) pairs; the last that measured it counts."""
    known: dict[tuple[str, int], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for record, baseline in pairs:
        known.setdefault((_canonical(record["label"]), record["context"]), []).append((record, baseline))
    found = []
    for target in targets:
        for name in target.presets:
            values = [value_of(target.quantity, *pair) for pair in known.get((_canonical(name), target.context), [])]
            value = next((v for v in reversed(values) if v is not None), None)
            found.append(Verdict(target, name, value, None if value is None else target.holds(value)))
    return found
