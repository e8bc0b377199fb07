"""Published figures beside ours, with every setting in which our runs differ from the recipe's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepformer.catalogue import closest_preset, preset
from stepformer.errors import StepformerError
from stepformer.recipes import Recipe, load_recipe
from stepformer.reports.collect import RunData
from stepformer.reports.parts import mean_of
from stepformer.reports.tables import Cell, Column, Table, columns, number, text
from stepformer.training import RunConfig, run_config

# What changes a result by rounding at most, or only what is kept and shown.
IMMATERIAL = {"seed", "device", "micro_batch", "compile", "log_every", "save_every", "keep", "parallel", "eval_every"}
IMMATERIAL |= {"tensorboard", "wandb", "tokenizer", "dialect", "count", "real_vocab", "precision", "deterministic"}
MOST_NAMED = 6


def published_tables(runs: Sequence[RunData]) -> list[Table]:
    """One table for every recipe that runs were trained by and that has figures or remarks for them."""
    recipes = list(dict.fromkeys(run.config.recipe for run in runs if run.config and run.config.recipe))
    tables = []
    for name in recipes:
        try:
            recipe = load_recipe(name)
        except StepformerError:
            continue  # a recipe of another version
        table = _table(recipe, [run for run in runs if run.config and run.config.recipe == name])
        if table.rows:
            tables.append(table)
    return tables


def _table(recipe: Recipe, runs: Sequence[RunData]) -> Table:
    titles = columns(
        Column("architecture"),
        Column("published best", True),
        Column("ours best", True),
        Column("published final", True),
        Column("ours final", True),
        Column("our runs", True),
        Column("remark"),
    )
    rows: list[list[Cell]] = []
    caveats: dict[str, list[str]] = {}
    for label in dict.fromkeys(run.label for run in runs):
        mine = [run for run in runs if run.label == label]
        config = mine[0].config
        assert config is not None
        key = _key(recipe, config)
        if key is None:
            continue
        facts = recipe.runs[key]
        rows.append(
            [
                text(label),
                number(facts.get("published"), ".4g" if facts.get("published", 0) < 1 else ".4f"),
                number(mean_of(mine, "best_val_loss")),
                number(facts.get("published_final"), ".4f"),
                number(mean_of(mine, "val_loss")),
                number(sum(run.record is not None for run in mine), "d"),
                text(facts.get("note", "")),
            ]
        )
        caveats.setdefault(_caveat(recipe, key, facts, mine), []).append(label)
    about = recipe.about
    notes = [f"Published: {about.get('published_what', '')} ({about.get('paper', '')}, {about.get('figure', '')})."]
    for caveat, labels in caveats.items():
        notes.append(caveat if len(caveats) == 1 else f"{', '.join(labels)}: {caveat}")
    return Table(titles, rows, f"Recipe {recipe.name}", notes)


def _key(recipe: Recipe, config: RunConfig) -> str | None:
    """The architecture of the recipe that a run is; None if it is none of them."""
    row, _ = closest_preset(config.model)
    return next((key for key in recipe.runs if row is not None and preset(key).name == row.name), None)


def _caveat(recipe: Recipe, key: str, facts: dict[str, Any], runs: Sequence[RunData]) -> str:
    """What keeps our number from being a reproduction, in a sentence."""
    config = runs[0].config
    assert config is not None
    theirs, ours = _flat(run_config(recipe.name, [f"model.preset={key}"])), _flat(config)
    differing = [k for k in dict.fromkeys((*theirs, *ours)) if theirs.get(k) != ours.get(k)]
    record = next((run.record for run in runs if run.record), None)
    sentences = []
    if differing:
        named = [f"{k} {_word(ours, k)} instead of {_word(theirs, k)}" for k in differing[:MOST_NAMED]]
        more = f" and {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
        sentences.append(f"Not the published setting, so not a reproduction: {', '.join(named)}{more}.")
    if record and facts.get("parameters") not in (None, record.parameters):
        sentences.append(f"The published model has {facts['parameters']:,} parameters, ours {record.parameters:,}.")
    if record:
        sentences.append(f"Ours was evaluated on {record.val_tokens:,} tokens of the split {record.val_hash[:12]}.")
    if not differing:
        sentences.append("The settings are the recipe's; data, its split and the evaluation may still differ.")
    return " ".join(sentences)


def _flat(config: RunConfig) -> dict[str, Any]:
    sections = {name: values for name, values in config.to_dict().items() if isinstance(values, dict)}
    flat = {
        f"{name}.{key}": value
        for name, values in sections.items()
        for key, value in values.items()
        if key not in IMMATERIAL
    }
    flat["data.corpus"] = Path(str(flat["data.corpus"])).name.removesuffix("-gpt2")
    return flat


def _word(settings: dict[str, Any], key: str) -> str:
    return str(settings.get(key, "default"))
