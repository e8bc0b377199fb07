"""`sf.compare` and `sf.sweep`: studies from Python, and what the command line makes them of."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stepformer.base.arguments import checks
from stepformer.base.errors import ConfigError, InputError, StepformerError, StepformerWarning, UnknownNameError
from stepformer.base.plugins import comes_from_plugin, explained, is_ours, load_plugins
from stepformer.base.progress import say
from stepformer.base.words import parse_overrides
from stepformer.catalogue import SIZES
from stepformer.catalogue.recipes import read_recipe
from stepformer.measure.diagnostics.audit import first_look, small_copy
from stepformer.model import Model
from stepformer.model.config import ModelConfig
from stepformer.study.comparison import Comparison, Facts
from stepformer.study.comparison import compare as compare_records
from stepformer.study.differences import fair, what_was_read
from stepformer.study.fairness import search_left, search_of, with_matches, with_tuning
from stepformer.study.held_out import evaluate_held_out, open_held_out
from stepformer.study.records import load_records
from stepformer.study.statistics import seed_words
from stepformer.study.study import (
    OWN_FILE,
    Planned,
    carry_out,
    grid,
    grid_axes,
    plan,
    refuse_seed,
    rounded,
    seeds_of,
    steps_for,
)
from stepformer.training import RunConfig, run_config
from stepformer.training.config import place
from stepformer.training.corpora import corpus_facts, open_corpus
from stepformer.training.parallel import ALONE, choose_device
from stepformer.training.stopping import Watch

Named = str | Path | RunConfig | ModelConfig  # a row: preset, recipe or TOML file by name, or a config


@checks(jobs=1)
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
    by_turns: int = 0,
    held_out: str | Sequence[str] = (),
    confidence: float = 0.95,
    jobs: int | None = None,
    max_seconds: float | None = None,
    plugins: Sequence[str] = (),
    quiet: bool = True,
    **settings: Any,
) -> Comparison:
    """Train every row with every seed in the folder `out`, what is not there yet, and return the table.

    Args:
        rows: Names, TOML files or configs, or several of them under labels of your own: `{"mine": config}`.
        out: The study's folder; what is finished in it is not trained again.
        seeds: How many, or which.
        budget: Training tokens of a run, such as "2M", instead of `steps`.
        baseline: The row that others are compared with, by default the first.
        recipe: A paper's settings for all rows.
        allow: Settings that may differ between the rows although they are not of the architecture.
        match: "parameters", "flops" or "time": adds for each row a baseline that has as much of it.
        tune: A search such as "lr,lr_norm=0.5x,1x,2x" that every row gets first.
        budget_tune: Tokens of each run of that search.
        by_turns: Search one key after the other, in so many rounds, instead of all points.
        held_out: Texts, as for `open_text`, that the final weights are evaluated on once.
        confidence: Of the intervals.
        jobs: Runs at a time.
        max_seconds: Save and raise `Stopped` after so long; the same call goes on.
        plugins: Files or modules with rules of your own.
        quiet: Print nothing.
        settings: For all rows, `steps=300` or, where a dot is needed, `**{"optim.name": "adamw"}`.

    Returns:
        The table, which prints as Markdown and shows as HTML in a notebook; see `Comparison`.

    Examples:
        >>> import stepformer as sf
        >>> print(sf.compare("vanilla", "yurii", out="runs/two", seeds=3, steps=300))  # doctest: +SKIP
    """
    texts = [held_out] if isinstance(held_out, str) else list(held_out)
    how: dict[str, Any] = {"jobs": jobs, "plugins": plugins, "quiet": quiet, "watch": Watch(max_seconds)}
    study = compared(
        rows,
        Path(out),
        seeds=seeds_of(seeds),
        budget=budget,
        baseline=baseline,
        recipe=recipe,
        settings=settings,
        allow=allow,
        match=match,
        tune=[tune] if isinstance(tune, str) and tune else list(tune),
        budget_tune=budget_tune,
        by_turns=by_turns,
        held_out=texts,
        **how,
    )
    return _carried_out(study, confidence, texts, **how)


@checks(jobs=1)
def sweep(
    name: str | Path,
    axes: Mapping[str, Iterable[Any]],
    *,
    out: str | Path,
    seeds: int | Sequence[int] = 1,
    allow: Sequence[str] = (),
    confidence: float = 0.95,
    jobs: int | None = None,
    max_seconds: float | None = None,
    plugins: Sequence[str] = (),
    quiet: bool = True,
    **settings: Any,
) -> Comparison:
    """Train one architecture at every point of a grid and return the table, whose first row is the first point.

    Points that differ in steps, batch or context have losses and no paired differences.

    Args:
        name: A preset, a recipe or a TOML file.
        axes: The values of every key, `{"lr": (0.01, 0.02)}`.
        out: The study's folder; what is finished in it is not trained again.
        seeds: How many, or which.
        allow: Settings that may differ although they are not of the architecture.
        confidence: Of the intervals.
        jobs: Runs at a time.
        max_seconds: Save and raise `Stopped` after so long; the same call goes on.
        plugins: Files or modules with rules of your own.
        quiet: Print nothing.
        settings: For all points.
    """
    load_plugins(plugins)
    words = [f"{key}={_word(value)}" for key, value in settings.items()]
    grid_words = [f"{key}={','.join(map(_word, values))}" for key, values in _axes(axes).items()]
    study = swept(str(name), words, grid_words, Path(out), seeds_of(seeds), allow)
    return _carried_out(study, confidence, jobs=jobs, plugins=plugins, quiet=quiet, watch=Watch(max_seconds))


def _axes(axes: Mapping[str, Iterable[Any]]) -> Mapping[str, Iterable[Any]]:
    """Refused if they are no table of lists."""
    if not isinstance(axes, Mapping):
        raise InputError(f"`sweep` takes a table of lists, such as {{'lr': [0.01, 0.02]}}, not {axes!r}.")
    for key, values in axes.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise InputError(f"The values of '{key}' should be a list, such as [{values!r}].")
    return axes


@dataclass(frozen=True)
class Study:
    """What is going to be trained: the rows, the first of which need not be the baseline, and what is known of them."""

    out: Path
    variants: dict[str, RunConfig]
    facts: Facts
    seeds: Sequence[int]

    def plan(self, **how: Any) -> list[Planned]:
        """Its runs; `how` as for plan_runs."""
        return plan(self.out, self.variants, self.seeds, allowed=self.facts.allowed, facts=self.facts, **how)


def compared(
    rows: Iterable[Named | Mapping[str, Named]],
    out: Path | None,
    *,
    seeds: Sequence[int],
    budget: int | str | None = None,
    baseline: str | None = None,
    recipe: str | None = None,
    words: Sequence[str] = (),
    settings: Mapping[str, Any],
    allow: Sequence[str] = (),
    match: str | None = None,
    tune: Sequence[str] = (),
    budget_tune: int | str | None = None,
    by_turns: int = 0,
    plugins: Sequence[str] = (),
    held_out: Sequence[str] = (),
    quiet: bool = False,
    dry: bool = False,
    **how: Any,
) -> Study:
    """A comparison up to its runs: what cannot be compared is refused, baselines are made larger, rows are tuned; with
    `dry` the search is left out.
    """
    refuse_seed(*settings)
    load_plugins(plugins)
    searched = search_of(tune, budget_tune, seeds, by_turns)
    if budget is not None and {"steps", "train.steps"} & {*_keys(words, settings)}:
        raise InputError("Give a budget or steps, not both.")
    rows = list(rows)
    variants = _rows(rows, budget, recipe, words, settings)
    first = baseline or next(iter(variants))
    if first not in variants:
        raise UnknownNameError(f"The baseline '{first}' is not among {', '.join(variants)}.")
    for sentence in dict.fromkeys(rounded(config, budget, "--budget") for config in variants.values()):
        say(sentence, quiet=quiet or not sentence)
    variants, data = resolved(variants, quiet=quiet)
    variants = fair(variants, first, allow, searched, data)
    faults = refuse_broken(variants)
    if held_out:  # what cannot be read is said before anything is trained
        opened = open_corpus(variants[first].data, ALONE, quiet=quiet)
        records = [{"init": {"run": config.train.init}} for config in variants.values() if config.train.init]
        records.append({"corpus": corpus_facts(opened)})
        open_held_out(held_out, opened.tokenizer, variants[first].model.context, records)
    if out is None:
        corpus = Path(variants[first].data.corpus).name
        out = Path(f"runs/compare-{recipe or corpus}-{'-'.join(variants)[:60]}")
    facts = Facts(baseline=first, allowed=tuple(allow), remarks=(*faults, *_replaced(rows, words, settings)))
    facts = with_matches(variants, match, out, facts)
    facts = dataclasses.replace(facts, remarks=(*facts.remarks, *_left_out(out, variants, seeds)))
    how |= {"allow": allow, "plugins": plugins, "quiet": quiet}
    if dry and searched and search_left(variants, searched, budget_tune, out, by_turns):
        searched = {}  # one that is over has chosen the rates
    facts = with_tuning(variants, searched, budget_tune, out, facts, rounds=by_turns, **how)
    return Study(out, variants, facts, seeds)


def _left_out(out: Path, variants: Mapping[str, RunConfig], seeds: Sequence[int]) -> list[str]:
    """What is finished in the folder and not in the table: whole rows, and seeds of rows."""
    there = [run.parent.name.rpartition("-s") for run in out.glob("*-s*/result.json")]
    rows = sorted({label for label, _, _ in there} - {*variants})
    more = sorted({int(seed) for label, _, seed in there if label in variants and seed.isdigit()} - {*seeds})
    left = [*([", ".join(rows)] if rows else []), *([seed_words(more)] if more else [])]
    return [f"Trained here too, and not in this table since the command does not name it: {words}." for words in left]


def swept(
    name: str, words: Sequence[str], axes: Sequence[str], out: Path, seeds: Sequence[int], allow: Sequence[str]
) -> Study:
    """A grid up to its runs; its first point is the baseline."""
    found = grid_axes(axes)
    variants = grid(name, words, found)
    faults = refuse_broken(variants)
    facts = Facts(baseline=next(iter(variants)), axes=found, allowed=tuple(allow), remarks=tuple(faults))
    return Study(out, variants, facts, seeds)


def refuse_broken(variants: Mapping[str, RunConfig]) -> list[str]:
    """A sentence if a rule of one's own cannot take a step, before the rows beside it are trained; what else is wrong
    with such rules is told, here and below the table.
    """
    found = []
    own = {k: v for k, v in variants.items() if not all(map(is_ours, v.model.components().values()))}
    # one row of each architecture: points of a sweep may differ in their rates alone
    for label, config in {config.model.hash: (label, config) for label, config in reversed(own.items())}.values():
        with contextlib.suppress(ConfigError):  # at this size alone
            model = Model(small_copy(config.model), seed=0, device=(device := choose_device(config.train.device)))
            try:
                tokens = torch.zeros(1, 8, dtype=torch.long, device=device)
                model(tokens, tokens).loss.backward()
            except Exception as error:
                if not comes_from_plugin(error):
                    raise
                raise InputError(f"In the row {label}: {explained(error)}") from error
            if fault := first_look(config.model):
                warnings.warn(f"The row {label}: {fault}.", StepformerWarning, stacklevel=2)
                found.append(f"{label}: {fault}.")
    return found


def _rows(rows: Iterable[Named | Mapping[str, Named]], budget: int | str | None, *common: Any) -> dict[str, RunConfig]:
    """The rows of a comparison as labelled configs; `common` is what all of them have, as for _row."""
    found: dict[str, RunConfig] = {}
    named = [row if isinstance(row, Mapping) else {_label(row): row} for row in rows]
    for label, what in (pair for row in named for pair in row.items()):
        config = _row(what, *common)
        if budget is not None:
            length: dict[str, Any] = {"train.steps": steps_for(config, budget, "--budget")}
            config = _row(what, *common, **length)
        label = label or config.title
        if label in found:
            raise InputError(f"The name '{label}' stands twice: {OWN_FILE}")
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


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _label(row: Named) -> str:
    if isinstance(row, list | tuple):
        raise InputError(f"Rows are given one by one: compare(*{list(row)!r}, ...).")
    if isinstance(row, RunConfig | ModelConfig):
        return ""
    return Path(row).stem if str(row).endswith(".toml") else str(row)


def _row(what: Named, recipe: str | None, words: Sequence[str], settings: Mapping[str, Any], **more: Any) -> RunConfig:
    if isinstance(what, RunConfig):
        if words or settings or more:
            raise InputError("A whole RunConfig has its settings: give none besides.")
        return what
    settings = {**settings, **more}
    if isinstance(what, ModelConfig):  # its vocabulary is the corpus's, as for a name
        base = run_config(recipe or "vanilla", words, **settings)
        ours, theirs = base.model.to_dict(), what.to_dict()
        for key in (word.removeprefix("model.") for word in _keys(words, settings)):
            if key in {*ours, *theirs} and ours.get(key) != theirs.get(key):
                raise InputError(f"A ModelConfig has its own {key}, {theirs.get(key, 'unset')}: leave it out.")
        return RunConfig(what, base.data, base.optim, base.train, recipe=base.recipe)
    if recipe:
        return run_config(recipe, [f"model.preset={what}", *words], **settings)
    try:
        return run_config(what, words, **settings)
    except ConfigError as error:
        where = f"In the row {what}: " * str(what).endswith(".toml")
        raise ConfigError([f"{where}{problem}" for problem in error.problems]) from None


def _replaced(
    rows: Iterable[Named | Mapping[str, Named]], words: Sequence[str], settings: Mapping[str, Any]
) -> list[str]:
    """What holds for all rows and is not what a row's own file says."""
    found = []
    common = [*parse_overrides(words), *settings.items()]
    for row in (what for one in rows for what in (one.values() if isinstance(one, Mapping) else (one,))):
        if isinstance(row, RunConfig | ModelConfig) or not str(row).endswith(".toml"):
            continue
        document = read_recipe(Path(row)).document
        places = {place(word): value for word, value in common}
        for (section, key), value in places.items():
            given = f"{_word(value)}, given for all rows,"
            replaced = {key: value}
            if key == "size" and value in SIZES:
                given = f"size={value}, given for all rows,"
                replaced |= {name: new for name, new in SIZES[value].items() if ("model", name) not in places}
            for name, new in replaced.items():
                own = document.get(section, {}).get(name, new)
                if own != new:
                    found.append(f"{Path(row).name} says {name} = {_word(own)}: {given} replaces it.")
    return found


def _keys(words: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    return [*(word.partition("=")[0] for word in words), *settings]


def _carried_out(study: Study, confidence: float, held_out: Sequence[str] = (), **how: Any) -> Comparison:
    runs = study.plan(quiet=how["quiet"])
    finished, failed = carry_out(runs, **how)
    if failed:
        name, why = next(iter(failed.items()))
        first = f"{len(failed)} of {len(runs)} runs failed, {name} first: {why}"
        raise StepformerError(f"{first} The others are kept: the same call goes on.")
    found = evaluate_held_out(finished, held_out, quiet=how["quiet"], watch=how["watch"])
    return compare_records(load_records(finished), study.facts.baseline, confidence, study.facts, found)
