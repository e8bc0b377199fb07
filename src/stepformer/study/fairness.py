"""What keeps a comparison from being unfair to its baseline.

A baseline that has what a candidate has: as many parameters, as many operations a token, or as much time a token. An
architecture that is better at equal tokens may only be larger. So the baseline is made wider until it has as much, and
the candidate is compared with that one, too.

The same search for every row before it is compared: a baseline that nobody tuned is easily beaten. Every row is trained
at every point of one grid, or by turns along one axis after the other, for a tuning budget, with seed 1000, and judged
on the first half of the validation split. Then it is trained anew at its best point, and the table shows losses on the
second half.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepformer.base import documents, files
from stepformer.base.errors import InputError, StepformerError, suggestion
from stepformer.base.plugins import digest, identity, package_digest
from stepformer.base.version import __version__
from stepformer.base.words import parse_override, translated
from stepformer.model import Model
from stepformer.optim import OptimConfig
from stepformer.oracles import mlps
from stepformer.present.tables import listed
from stepformer.study.differences import differences, recorded
from stepformer.study.grids import all_points, at_the_edge, grid_points
from stepformer.study.records import Facts, RunRecord
from stepformer.study.study import Planned, carry_out, plan_runs, steps_for
from stepformer.training import RunConfig
from stepformer.training.parallel import choose_device
from stepformer.training.speed import flops_per_token, forecast

CLOSE = 0.02  # an amount within 2 % is the same amount
FAR = 0.05  # and one beyond 5 % another
WIDEST = 65_536
FIRST_SEED = 1000  # of the search


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
        size = f"{model.n_layer} layer{'s' * (model.n_layer > 1)} of width {model.d_model}{hidden}"
        wanted = f"{self.candidate} has {self.wanted:{digits}} ({self.found / self.wanted - 1:+.1%})"
        return f"{self.label}: {size}, {self.found:{digits}} {unit}; {wanted}."


AMOUNTS: Mapping[str, Callable[[RunConfig], float]] = {
    "parameters": lambda config: float(Model(config.model, device="meta").num_parameters()),
    "flops": lambda config: flops_per_token(Model(config.model, device="meta")),
    "time": lambda config: forecast(config, choose_device(config.train.device)).step,  # seconds of it, measured here
}


def matched(variants: Mapping[str, RunConfig], baseline: str, what: str, there: Container[str] = ()) -> list[Match]:
    """For every row that has more or less than the baseline one that has as much, one for all that need the same. In
    whatever order the rows are, it is named after one whose baseline is `there` already, or the alphabet's first.
    """
    if what not in AMOUNTS:
        raise InputError(f"--match {what}: write one of {', '.join(AMOUNTS)}.")
    amount, base = AMOUNTS[what], variants[baseline]
    own = amount(base)
    names = {label: f"{baseline}-{what}-of-{label}" for label in variants}
    found: dict[str, Match] = {}
    for label in sorted(variants, key=lambda label: (names[label] not in there, label)):
        wanted = amount(variants[label]) if label != baseline else own
        if abs(wanted / own - 1) <= CLOSE:
            continue
        near = next((match for match in found.values() if abs(match.found / wanted - 1) <= CLOSE / 2), None)
        larger = near.config if near else _as_large(base, wanted, amount, whole=what == "time")  # too rough for units
        shared = near or next((match for match in found.values() if match.config == larger), None)
        reached = shared.found if shared else amount(larger)
        if abs(reached / wanted - 1) > FAR:
            none = f"no width of '{baseline}' has what '{label}' has"
            raise InputError(f"--match {what}: {none}; the nearest is {reached / wanted - 1:+.1%} off.")
        found[label] = Match(what, label, shared.label if shared else names[label], larger, wanted, reached)
    return [found[label] for label in variants if label in found]


def _as_large(base: RunConfig, wanted: float, amount: Callable[[RunConfig], float], whole: bool) -> RunConfig:
    """The baseline at the width, of even heads, that comes nearest; unless whole heads are enough, the hidden width of
    the MLP, a multiple of eight, makes up for what they leave.
    """

    def nearest(of: RunConfig, key: str, unit: int, low: int, high: int, widest: int = 0) -> RunConfig:
        def at(count: int) -> RunConfig:
            settings = of.to_dict()
            settings["model"][key] = unit * count
            return RunConfig.from_dict(settings)

        while unit * high < widest and amount(at(high)) < wanted:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if amount(at(middle)) < wanted else (low, middle)
        return min((at(low), at(high)), key=lambda config: abs(amount(config) - wanted))

    unit = 2 * base.model.n_head
    larger = nearest(base, "d_model", unit, 1, max(2, 2 * base.model.d_model // unit), WIDEST)
    model = larger.model
    hidden = model.mlp_hidden or mlps[model.mlp].component.default_hidden(model.d_model)
    return larger if whole else nearest(larger, "mlp_hidden", 8, max(1, hidden // 16), hidden // 4)


def with_matches(variants: dict[str, RunConfig], what: str | None, out: Path, facts: Facts) -> Facts:
    """Add to the rows of a study the baselines that have what the others have, and to its facts what they are."""
    if what is None:
        return facts
    baseline = facts.baseline
    study = {"of": {label: _identity(config) for label, config in variants.items()}, "baseline": baseline}
    # what an earlier call of the same study measured: another time it would come out a little differently
    path = out / "matches.json"
    stored = documents.read(path, documents.MATCHES) if what == "time" and path.is_file() else {}
    if stored and all(stored[key] == value for key, value in study.items()):
        found = [Match(**{**match, "config": RunConfig.from_dict(match["config"])}) for match in stored["matches"]]
    else:
        there = [run.parent.name.rpartition("-s")[0] for run in out.glob("*-s*/run.json")]
        found = matched(variants, baseline, what, there)
    if what == "time":
        kept = [{**vars(match), "config": match.config.to_dict()} for match in found]
        files.write_json(path, {**study, "matches": kept})
    pairs = {match.candidate: (what, match.label) for match in found}
    alike = [label for label in variants if label not in {baseline, *pairs}]
    said = [f"{listed(alike)} and {baseline} have equal {what}, within {CLOSE:.0%}."] if alike else []
    variants |= {match.label: match.config for match in found}
    pairs |= dict.fromkeys(alike, (what, baseline))
    return replace(facts, matches=pairs, remarks=(*facts.remarks, *map(str, found), *said))


def _identity(config: RunConfig) -> str:
    """Of settings and code: what another code took is no measurement of this one."""
    own = {name: digest(sources) for name, sources in identity([], config.model.components()).items()}
    return f"{config.hash} {digest(own)} {package_digest()}"


Axes = Mapping[str, tuple[str, ...]]
Point = dict[str, str]
OWN = "1x"  # what the row has


def search_of(words: Sequence[str], budget: int | str | None, seeds: Sequence[int] = (), rounds: int = 0) -> Axes:
    """What is searched, `lr,lr_norm=0.01,0.02`: each key takes each value; `2x` is twice what the row has. What cannot
    be tuned is refused before anything is trained; `seeds` are those of the comparison, `rounds` those of turns.
    """
    if rounds < 0 or (rounds and not words):
        raise InputError("--by-turns ROUNDS says how often to go over the axes of --tune: give those, and 1 or more.")
    if words and budget is None:
        raise InputError("--tune needs --budget-tune TOKENS: what each run of the search trains on.")
    if budget is not None and not words:
        raise InputError("--budget-tune is for --tune: say what to tune.")
    if words and max(seeds, default=0) >= FIRST_SEED:
        raise InputError(f"Seeds from {FIRST_SEED} on are those of the search: choose smaller ones for the comparison.")
    axes: dict[str, tuple[str, ...]] = {}
    for word in words:
        keys, _, values = word.partition("=")
        found = tuple(value for value in values.split(",") if value)
        if not keys or len(found) < 2:
            raise InputError(f"--tune {word}: write KEY=a,b,c or KEY,KEY=a,b,c with two values or more.")
        axes |= dict.fromkeys((key for key in keys.split(",") if key), found)
    return axes


def most_points(axes: Axes, rounds: int) -> int:
    """Points that a row is trained at; by turns, at most."""
    if not rounds:
        return len(all_points(axes))
    return rounds * sum(len(values) - (OWN in values) for values in axes.values()) + (OWN in next(iter(axes.values())))


def search_label(label: str, point: Point) -> str:
    """What a run of the search is called: by what it has of its own, so that a longer grid finds it again."""
    own = {key: value for key, value in point.items() if value != OWN}
    return f"{label}-{next(iter(grid_points({key: (value,) for key, value in own.items()}))) or OWN}"


def search_left(
    variants: Mapping[str, RunConfig], axes: Axes, budget: int | str | None, out: Path, rounds: int
) -> list[RunConfig]:
    """What a search would train; by turns, as many runs as it takes at most."""
    points = [{}] * most_points(axes, rounds) if rounds else all_points(axes)
    runs = [(search_label(label, point), config, point) for label, config in variants.items() for point in points]
    done = {name for name, _, _ in runs if (out / "tuning" / f"{name}-s{FIRST_SEED}" / "result.json").is_file()}
    return [_shortened(config, point, budget) for name, config, point in runs if rounds or name not in done]


def with_tuning(
    variants: dict[str, RunConfig],
    axes: Axes,
    budget: int | str | None,
    out: Path,
    facts: Facts,
    *,
    rounds: int = 0,
    allow: Sequence[str] = (),
    **how: Any,
) -> Facts:
    """Give every row the same search, in the folder `tuning`, then its best point; `how` as for carry_out.

    The search is over every point of the grid or, with `rounds`, over one axis after the other: from what the row has,
    each takes all its values while the others stay at the best point so far. A point that was tried is not tried again.
    """
    if not axes:
        return facts
    for config, (key, values) in itertools.product(variants.values(), axes.items()):
        for value in values:  # what is wrong with the last axis is said before the first is tried
            _shortened(config, {key: value}, budget)
    own = {key: OWN for key, values in axes.items() if OWN in values}
    best: dict[str, Point] = dict.fromkeys(variants, own)
    tried: dict[str, list[Point]] = {label: [] for label in variants}
    turns = [key for _ in range(rounds) for key in axes]
    for turn in range(max(1, len(turns))):
        for label, points in tried.items():
            new = [{**best[label], turns[turn]: value} for value in axes[turns[turn]]] if turns else all_points(axes)
            points += [point for point in new if point not in points]
        short = [
            (search_label(label, point), _shortened(variants[label], point, budget))
            for label, points in tried.items()
            for point in points
        ]
        runs = plan_runs(out / "tuning", short, quiet=how.get("quiet", False), allowed=allow)
        there = iter(runs)
        made = {label: [(point, next(there)) for point in points] for label, points in tried.items()}
        called = f"runs of the search{f', turn {turn + 1} of {len(turns)},' if turns else ''}"
        going = [run for run in runs if not run.folder.diverged]  # those would again
        _, failed = carry_out(going, after=_without_weights, called=called, **how)
        if lost := [run.name for run in runs if not run.finished and not run.folder.diverged]:
            why, others = failed.get(lost[0], "it was stopped."), "The others are kept: try again to go on."
            raise StepformerError(f"The run {lost[0]} of the search failed: {why} {others}")
        best |= {label: min(found)[2] for label, points in made.items() if (found := _losses(points))}
    said = []
    for label, of_row in made.items():
        variants[label], chosen = _best(label, variants[label], axes, of_row, rounds)
        said.append(chosen)
    tokens = short[0][1].train.steps * short[0][1].step_tokens
    grid = "; ".join(f"{key} = {', '.join(values)}" for key, values in axes.items())
    times = " (x: times what the row has)" * any(v.endswith("x") for values in axes.values() for v in values)
    how_far = f"one axis after the other in {rounds} round{'s' * (rounds > 1)}" if rounds else "every point"
    search = (
        f"Search: {grid}{times}, {how_far}, {tokens:,} training tokens a point, seed "
        f"{FIRST_SEED}, judged on the first half of the validation split. The rows are trained anew and judged on the "
        "second."
    )
    longest = max(config.train.steps * config.step_tokens for config in variants.values())
    if tokens < longest / 2:
        part = f"{tokens / longest:.0%} of the tokens of a run"
        said.append(f"The search trained on {part}: what is best for so short a training need not be for all of it.")
    counts = {label: len(points) for label, points in tried.items()}
    if len({*counts.values()}) > 1:
        numbers = ", ".join(f"{label} {count}" for label, count in counts.items())
        said.append(f"Points tried: {numbers}; all had the same turns, and what a row has tried is not trained again.")
    made_by = {run.name: recorded(run.folder.path) for run in runs if run.folder.exists}
    codes = {str(settings.get("code.stepformer")) for settings in made_by.values()}
    if codes != {f"{__version__} {package_digest()}"}:
        said.append(f"The search was made by stepformer {', '.join(sorted(codes))}.")
    for apart in differences(made_by):
        if apart.key.startswith("machine."):
            shown = sorted({str(value) for value in apart.values.values()})
            said.append(f"The runs of the search differ in {apart.key} ({', '.join(shown)}).")
    return replace(facts, meant=tuple(axes), remarks=(*facts.remarks, *said), search=search)


def _at_point(config: RunConfig, point: Mapping[str, str], half: str) -> dict[str, Any]:
    """The settings of a row at a point of the grid, evaluated on one half of the validation split."""
    settings = config.to_dict()
    optim = settings["optim"]
    for word, text in point.items():
        key = word.rpartition(".")[2]
        if key not in optim:
            meant = translated(key, optim) or suggestion(key, optim)
            raise InputError(f"--tune {word}: only keys of [optim] can be tuned.{meant}")
        value: Any = parse_override(f"{key}={text}")[1]
        if text.endswith("x"):
            try:
                value = optim[key] * float(text[:-1])
            except (TypeError, ValueError):
                raise InputError(f"--tune {word}: '{text}' is no multiple of {optim[key]!r}.") from None
        optim[key] = value
    OptimConfig.from_dict(optim)  # a key of another optimizer is refused here, and left out where a run is read
    settings["train"]["eval_half"] = half
    return settings


def _shortened(config: RunConfig, point: Mapping[str, str], budget: int | str | None) -> RunConfig:
    """A run of the search."""
    steps = steps_for(config, budget, "--budget-tune")
    settings = _at_point(config, point, "first")
    for key in ("warmup", "decay_start"):  # as large a part of the shorter run
        if settings["optim"][key] is not None:
            settings["optim"][key] = round(settings["optim"][key] * steps / config.train.steps)
    settings["train"] |= {"steps": steps, "seed": FIRST_SEED, "keep": 1}
    return RunConfig.from_dict(settings)


def _without_weights(run: Planned) -> None:
    """Of a run of the search only its loss is asked for: the weights of hundreds would fill a disk."""
    shutil.rmtree(run.folder.checkpoints, ignore_errors=True)


def _losses(points: Sequence[tuple[Point, Planned]]) -> list[tuple[float, int, Point]]:
    """Of the points that did not diverge, in their order."""
    runs = [(number, point, run) for number, (point, run) in enumerate(points) if run.finished]
    return [(RunRecord.load(run.folder.path).val_loss, number, point) for number, point, run in runs]


def _best(
    label: str, config: RunConfig, axes: Axes, points: Sequence[tuple[Point, Planned]], rounds: int
) -> tuple[RunConfig, str]:
    """A row at its best point, to be judged on the other half, and a sentence on what was chosen."""
    losses = _losses(points)
    if not losses:
        raise InputError(f"No run of the search for '{label}' finished: nothing can be chosen.")
    loss, _, best = min(losses)
    settings = _at_point(config, best, "second")
    chosen = {key: settings["optim"][key.rpartition(".")[2]] for key in best}
    words = ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in chosen.items())
    diverged = len(points) - len(losses)
    out = f", {diverged} of which diverged" if diverged else ""
    out += f", by turns in {rounds} round{'s' * (rounds > 1)}" if rounds else ""
    edge = ", ".join(at_the_edge(axes, best))
    beyond = f"; at the edge of the grid of {edge}: a better value may lie beyond" if edge else ""
    said = f"({loss:.4f} on the other half, the best of {len(points)} points{out}){beyond}"
    return RunConfig.from_dict(settings), f"{label}: tuned to {words} {said}."
