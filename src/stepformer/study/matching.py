"""A baseline that has what a candidate has: as many parameters, as many operations a token, or as much time a token.

An architecture that is better at equal tokens may only be larger. So the baseline is made wider until it has as much,
and the candidate is compared with that one, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stepformer.base.errors import InputError
from stepformer.model import Model
from stepformer.oracles import mlps
from stepformer.training import RunConfig
from stepformer.training.parallel import choose_device
from stepformer.training.speed import flops_per_token, forecast

CLOSE = 0.02  # an amount within 2 % is the same amount
FAR = 0.05  # and one beyond 5 % another
WIDEST = 65_536


@dataclass(frozen=True)
class Match:
    """A baseline made as large as a candidate; `wanted` is the candidate's amount, `found` the new baseline's."""

    what: str
    candidate: str
    label: str
    config: RunConfig
    wanted: float
    found: float

    def __str__(self) -> str:
        unit = {"parameters": "parameters", "flops": "operations a token", "time": "s a step"}[self.what]
        digits = ",.0f" if self.what == "parameters" else ".3g"
        model = self.config.model
        hidden = f" (MLP {model.mlp_hidden})" if model.mlp_hidden else ""
        return (
            f"{self.label}: {model.n_layer} layer{'s' * (model.n_layer > 1)} of width {model.d_model}{hidden}, "
            f"{self.found:{digits}} {unit}; "
            f"{self.candidate} has {self.wanted:{digits}} ({self.found / self.wanted - 1:+.1%})."
        )


AMOUNTS: Mapping[str, Callable[[RunConfig], float]] = {
    "parameters": lambda config: float(Model(config.model, device="meta").num_parameters()),
    "flops": lambda config: flops_per_token(Model(config.model, device="meta")),
    "time": lambda config: forecast(config, choose_device(config.train.device)).step,  # seconds of it, measured here
}


def matched(variants: Mapping[str, RunConfig], baseline: str, what: str) -> list[Match]:
    """For every other row a baseline that has what it has, one for all that have the same.

    Rows that have as much as the baseline need none.
    """
    if what not in AMOUNTS:
        raise InputError(f"--match {what}: write one of {', '.join(AMOUNTS)}.")
    amount, base = AMOUNTS[what], variants[baseline]
    own = amount(base)
    found: list[Match] = []
    for label, config in variants.items():
        wanted = amount(config) if label != baseline else own
        if abs(wanted / own - 1) <= CLOSE:
            continue
        shared = next((match for match in found if abs(match.found / wanted - 1) <= CLOSE / 2), None)
        if shared:
            found.append(replace(shared, candidate=label, wanted=wanted))
            continue
        larger = _widened(base, wanted, amount)
        if what != "time":  # which cannot be measured to a few hidden units
            larger = _filled(larger, wanted, amount)
        off = amount(larger) / wanted - 1
        if abs(off) > FAR:
            raise InputError(
                f"--match {what}: no width of '{baseline}' has what '{label}' has; the nearest is {off:+.1%} off."
            )
        found.append(Match(what, label, f"{baseline}-{what}-of-{label}", larger, wanted, wanted * (1 + off)))
    return found


def _widened(base: RunConfig, wanted: float, amount: Callable[[RunConfig], float]) -> RunConfig:
    """The width that comes nearest; widths are whole numbers of even heads."""
    unit = 2 * base.model.n_head

    def at(count: int) -> RunConfig:
        return _resized(base, d_model=unit * count)

    low, high = 1, max(2, 2 * base.model.d_model // unit)
    while amount(at(high)) < wanted and unit * high < WIDEST:
        low, high = high, 2 * high
    return _between(low, high, at, wanted, amount)


def _filled(config: RunConfig, wanted: float, amount: Callable[[RunConfig], float]) -> RunConfig:
    """The hidden width of the MLP, a multiple of eight, that makes up for what whole heads leave."""
    hidden = config.model.mlp_hidden or mlps[config.model.mlp].component.default_hidden(config.model.d_model)
    return _between(max(1, hidden // 16), hidden // 4, lambda n: _resized(config, mlp_hidden=8 * n), wanted, amount)


def _between(
    low: int, high: int, at: Callable[[int], RunConfig], wanted: float, amount: Callable[[RunConfig], float]
) -> RunConfig:
    """By bisection, the number between `low` and `high` whose amount comes nearest."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if amount(at(middle)) < wanted else (low, middle)
    return min((at(low), at(high)), key=lambda config: abs(amount(config) - wanted))


def _resized(base: RunConfig, **sizes: int) -> RunConfig:
    settings = base.to_dict()
    settings["model"] |= sizes
    return RunConfig.from_dict(settings)
