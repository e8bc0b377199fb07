"""`sf.compare` and `sf.sweep`: studies from Python, and what the command line makes them of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepformer.base import documents, files
from stepformer.base.errors import InputError, StepformerError, UnknownNameError
from stepformer.base.plugins import digest, identity, load_plugin, package_digest
from stepformer.base.version import __version__
from stepformer.model.config import ModelConfig
from stepformer.present.tables import listed
from stepformer.study.comparison import Comparison, Facts
from stepformer.study.comparison import compare as compare_records
from stepformer.study.differences import differences, fair, recorded, what_was_read
from stepformer.study.matching import CLOSE, Match, matched
from stepformer.study.records import load_records
from stepformer.study.study import (
    ALONE,
    Planned,
    Report,
    amount,
    carry_out,
    grid,
    grid_axes,
    plan,
    refuse_seed,
    seeds_of,
)
from stepformer.study.tuning import FIRST_SEED, Grid, chosen, planned
from stepformer.training import RunConfig, run_config
from stepformer.training.corpora import open_corpus
from stepformer.training.run import corpus_facts

Named = str | Path | RunConfig | ModelConfig  # a row: preset, recipe or TOML file by name, or a config


def compare(
    *rows: Named | Mapping[str, Named],
    out: str | Path,
    seeds: int | Sequence[int] = 1,
    budget: int | str | None = None,
    baseline: str | None = None,
    recipe: str | None = None,
    allow: Sequence[str] = (),
    match: str | None = None,
    tune: str | Sequence[str] = (),
    budget_tune: int | str | None = None,
    confidence: float = 0.95,
    jobs: int | None = None,
    plugins: Sequence[str] = (),
    quiet: bool = True,
    **settings: Any,
) -> Comparison:
    """Train every row with every seed in the folder `out`, what is not there yet, and return the table.

    A row is a name, a TOML file or a config, or several of them under labels of your own: `{"mine": config}`.
    `settings` are for all rows, `steps=300` or, where a dot is needed, `**{"optim.name": "adamw"}`. `match`
    ("parameters", "flops" or "time") adds for each row a baseline that has as much of it; `tune`
    ("lr,lr_norm=0.5x,1x,2x") gives every row the same search of `budget_tune` tokens a run first.
    """
    axes = [tune] if isinstance(tune, str) and tune else list(tune)
    study = compared(
        rows,
        Path(out),
        seeds=_seeds(seeds),
        budget=budget,
        baseline=baseline,
        recipe=recipe,
        settings=settings,
        allow=allow,
        match=match,
        tune=axes,
        budget_tune=budget_tune,
        jobs=jobs,
        plugins=plugins,
        quiet=quiet,
    )
    return _carried_out(study, confidence, jobs, plugins, quiet)


def sweep(
    name: str | Path,
    axes: Mapping[str, Iterable[Any]],
    *,
    out: str | Path,
    seeds: int | Sequence[int] = 1,
    allow: Sequence[str] = (),
    confidence: float = 0.95,
    jobs: int | None = None,
    plugins: Sequence[str] = (),
    quiet: bool = True,
    **settings: Any,
) -> Comparison:
    """Train `name` at every point of a grid, `{"lr": (0.01, 0.02)}`, and return the table; its first row is the first
    point. Points that differ in steps, batch or context have losses and no paired differences.
    """
    for plugin in plugins:
        load_plugin(plugin)
    words = [f"{key}={_word(value)}" for key, value in settings.items()]
    grid_words = [f"{key}={','.join(map(_word, values))}" for key, values in axes.items()]
    study = swept(str(name), words, grid_words, Path(out))
    study = replace(study, seeds=tuple(_seeds(seeds)), allow=tuple(allow))
    return _carried_out(study, confidence, jobs, plugins, quiet)


@dataclass(frozen=True)
class Study:
    """What is going to be trained: the rows, the first of which need not be the baseline, and what is known of them."""

    out: Path
    variants: dict[str, RunConfig]
    baseline: str
    facts: Facts
    seeds: tuple[int, ...] = (42,)
    allow: tuple[str, ...] = ()

    def plan(self, *, quiet: bool = False, here: bool = True) -> list[Planned]:
        return plan(self.out, self.variants, self.seeds, quiet=quiet, allowed=self.allow, facts=self.facts, here=here)


def compared(
    rows: Iterable[Named | Mapping[str, Named]],
    out: Path | None,
    *,
    seeds: Sequence[int],
    budget: int | str | None = None,
    baseline: str | None = None,
    recipe: str | None = None,
    words: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    allow: Sequence[str] = (),
    match: str | None = None,
    tune: Sequence[str] = (),
    budget_tune: int | str | None = None,
    jobs: int | None = None,
    plugins: Sequence[str] = (),
    quiet: bool = False,
) -> Study:
    """A comparison up to its runs: what cannot be compared is refused, baselines are made larger, rows are tuned."""
    for key in settings or {}:
        refuse_seed(key)
    for plugin in plugins:
        load_plugin(plugin)
    searched = check_tuning(tune, budget_tune, seeds)
    variants = labelled(rows, recipe, words, budget, settings)
    first = baseline or next(iter(variants))
    if first not in variants:
        raise UnknownNameError(f"The baseline '{first}' is not among {', '.join(variants)}.")
    variants, data = resolved(variants, quiet=quiet)
    variants = fair(variants, first, allow, searched.axes, data)
    if out is None:
        corpus = Path(variants[first].data.corpus).name
        out = Path(f"runs/compare-{recipe or corpus}-{'-'.join(variants)[:60]}")
    facts = Facts(baseline=first) + with_matches(variants, first, match, out)
    facts += with_tuning(variants, searched, budget_tune, out, allow, jobs=jobs, plugins=plugins, quiet=quiet)
    return Study(out, variants, first, facts, tuple(seeds), tuple(allow))


def swept(name: str, words: Sequence[str], axes: Sequence[str], out: Path) -> Study:
    """A grid up to its runs; its first point is the baseline."""
    found = grid_axes(axes)
    variants = grid(name, words, found)
    first = next(iter(variants))
    return Study(out, variants, first, Facts(baseline=first, axes=found))


def labelled(
    rows: Iterable[Named | Mapping[str, Named]],
    recipe: str | None,
    words: Sequence[str],
    budget: int | str | None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, RunConfig]:
    """The rows of a comparison as labelled configs, under the settings of all of them."""
    found: dict[str, RunConfig] = {}
    for row in rows:
        named = row if isinstance(row, Mapping) else {_label(row): row}
        for label, what in named.items():
            config = _variant(what, recipe, words, budget, settings or {})
            label = label or config.title
            if label in found:
                raise InputError(
                    f"The name '{label}' stands twice: rename one of the rows (a file's name is its row's)."
                )
            found[label] = config
    if len(found) < 2:
        raise InputError("Name at least two architectures to compare, e.g. `stepformer compare vanilla yurii`.")
    return found


def resolved(
    variants: Mapping[str, RunConfig], *, quiet: bool = False
) -> tuple[dict[str, RunConfig], dict[str, dict[str, Any]]]:
    """The rows with the vocabulary of their corpus, which is part of their size, and what each of them reads."""
    found, data = {}, {}
    for label, config in variants.items():
        corpus = open_corpus(config.data, ALONE, quiet=quiet)
        found[label], data[label] = config.for_vocabulary(corpus.vocab_size), what_was_read(corpus_facts(corpus))
    return found, data


def with_matches(variants: dict[str, RunConfig], baseline: str, what: str | None, out: Path) -> Facts:
    """Add to the rows of a study the baselines that have what the others have."""
    if what is None:
        return Facts()
    stored = _measured_before(variants, baseline, what, out)
    found = matched(variants, baseline, what) if stored is None else stored
    if what == "time":  # measured, so another time it would come out a little differently
        kept = [{**vars(match), "config": match.config.to_dict()} for match in found]
        files.write_json(out / MATCHES, {"of": _hashes(variants), "baseline": baseline, "matches": kept})
    variants |= {match.label: match.config for match in found}
    pairs = {match.candidate: (match.what, match.label) for match in found}
    alike = [label for label in variants if label not in {baseline, *pairs, *(match.label for match in found)}]
    said = [f"{listed(alike)} and {baseline} have equal {what}, within {CLOSE:.0%}."] if alike else []
    pairs |= dict.fromkeys(alike, (what, baseline))
    return Facts(matches=pairs, remarks=(*map(str, found), *said))


MATCHES = "matches.json"


def _hashes(variants: Mapping[str, RunConfig]) -> dict[str, str]:
    """Of settings and code: what another code took is no measurement of this one."""
    codes = {label: identity([], config.model.components()) for label, config in variants.items()}
    own = {label: digest({name: digest(files) for name, files in code.items()}) for label, code in codes.items()}
    return {label: f"{config.hash} {own[label]} {package_digest()}" for label, config in variants.items()}


def _measured_before(variants: Mapping[str, RunConfig], baseline: str, what: str, out: Path) -> list[Match] | None:
    """What an earlier call of the same study measured; None if there was none."""
    if what != "time" or not (out / MATCHES).is_file():
        return None
    stored = documents.read(out / MATCHES, documents.MATCHES)
    if stored["of"] != _hashes(variants) or stored["baseline"] != baseline:
        return None
    return [Match(**{**match, "config": RunConfig.from_dict(match["config"])}) for match in stored["matches"]]


def check_tuning(axes: Sequence[str], budget: int | str | None, seeds: Sequence[int]) -> Grid:
    """The grid of a search; what cannot be tuned is refused before anything is trained."""
    if axes and budget is None:
        raise InputError("--tune needs --budget-tune TOKENS: what each run of the search trains on.")
    if budget is not None and not axes:
        raise InputError("--budget-tune is for --tune: say what to tune.")
    if axes and max(seeds) >= FIRST_SEED:
        raise InputError(f"Seeds from {FIRST_SEED} on are those of the search: choose smaller ones for the comparison.")
    return Grid.parse(axes)


def with_tuning(
    variants: dict[str, RunConfig],
    searched: Grid,
    budget: int | str | None,
    out: Path,
    allow: Sequence[str] = (),
    *,
    jobs: int | None = None,
    plugins: Sequence[str] = (),
    quiet: bool = False,
) -> Facts:
    """Give every row of a study the same search, in the folder `tuning`, and put its best point in its place."""
    if not searched.axes:
        return Facts()
    search = planned(out / "tuning", variants, searched, amount(str(budget)), quiet=quiet, allowed=allow)
    runs = [run for points in search.values() for _, run in points]
    report = _trained(runs, jobs, plugins, quiet)
    for run in runs:
        if not run.finished and not run.folder.diverged:
            why = report.failed.get(run.folder.path.name, "it was stopped.")
            raise StepformerError(
                f"The run {run.folder.path.name} of the search failed: {why} The others are kept: try again to go on."
            )
    rows, said = chosen(variants, searched, search)
    variants |= rows
    made_by = {run.folder.path.name: recorded(run.folder.path) for run in runs if run.folder.exists}
    codes = {str(settings.get("code.stepformer")) for settings in made_by.values()}
    if codes != {f"{__version__} {package_digest()}"}:
        said.append(f"The search was made by stepformer {', '.join(sorted(codes))}.")
    for apart in differences(made_by):
        if apart.key.startswith("machine."):
            values = sorted({str(value) for value in apart.values.values()})
            said.append(f"The runs of the search differ in {apart.key} ({', '.join(values)}).")
    return Facts(meant=tuple(searched.axes), remarks=tuple(said))


def _trained(runs: Sequence[Planned], jobs: int | None, plugins: Sequence[str], quiet: bool) -> Report:
    """One at a time, in this process, for rules that only this process knows."""
    rules = [rule for run in runs for rule in run.config.model.components().values()]
    ours = all(rule.__module__.partition(".")[0] == "stepformer" for rule in rules)
    return carry_out(runs, jobs=1 if jobs is None and not plugins and not ours else jobs, quiet=quiet, plugins=plugins)


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    return seeds_of(str(seeds)) if isinstance(seeds, int) else list(seeds)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _label(row: Named) -> str:
    if isinstance(row, RunConfig | ModelConfig):
        return ""
    return Path(row).stem if str(row).endswith(".toml") else str(row)


def _variant(
    what: Named, recipe: str | None, words: Sequence[str], budget: int | str | None, settings: Mapping[str, Any]
) -> RunConfig:
    config = _config(what, recipe, words, settings)
    if budget is None:
        return config
    keys = [word.partition("=")[0] for word in words] + list(settings)
    if any(key.removeprefix("train.") == "steps" for key in keys):
        raise InputError("Give --budget or steps, not both.")
    steps = round(amount(str(budget)) / config.step_tokens)
    if steps < 1:
        raise InputError(f"--budget {budget} is less than half a step of {config.step_tokens:,} tokens.")
    return _config(what, recipe, words, {**settings, "train.steps": steps})


def _config(what: Named, recipe: str | None, words: Sequence[str], settings: Mapping[str, Any]) -> RunConfig:
    if isinstance(what, ModelConfig):  # its vocabulary is the corpus's, as for a name
        base = run_config(recipe or "vanilla", words, **settings)
        keys = [word.partition("=")[0] for word in words] + list(settings)
        ours, theirs = base.model.to_dict(), what.to_dict()
        for key in (word.removeprefix("model.") for word in keys):
            if key in {*ours, *theirs} and ours.get(key) != theirs.get(key):
                raise InputError(f"A ModelConfig has its own {key}, {theirs.get(key, 'unset')}: leave it out.")
        return RunConfig(what, base.data, base.optim, base.train, recipe=base.recipe)
    if isinstance(what, RunConfig):
        if words or settings:
            raise InputError("A whole RunConfig has its settings: give none besides.")
        return what
    if recipe:
        return run_config(recipe, [f"model.preset={what}", *words], **settings)
    return run_config(what, words, **settings)


def _carried_out(study: Study, confidence: float, jobs: int | None, plugins: Sequence[str], quiet: bool) -> Comparison:
    runs = study.plan(quiet=quiet)
    report = _trained(runs, jobs, plugins, quiet)
    if report.failed:
        name, why = next(iter(report.failed.items()))
        raise StepformerError(
            f"{len(report.failed)} of {len(runs)} runs failed, {name} first: {why} The others are kept: the same call "
            "goes on."
        )
    return compare_records(load_records(report.finished), study.baseline, confidence, study.facts)
