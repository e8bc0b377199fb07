"""Published figures beside ours, with every setting in which our runs differ from the recipe's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stepformer.base.errors import StepformerError
from stepformer.catalogue import closest_preset, preset
from stepformer.catalogue.recipes import Recipe, load_recipe
from stepformer.pages.reports.collect import RunData
from stepformer.pages.reports.values import grouped, inside, real, records, values
from stepformer.present.tables import Cell, Column, Field, Table, number, numbers, tabulated, text, words
from stepformer.study import summarise
from stepformer.training import RunConfig, run_config

# What changes a result by rounding at most, or only what is kept and shown.
IMMATERIAL = {"seed", "device", "micro_batch", "compile", "log_every", "save_every", "keep", "parallel", "eval_every"}
IMMATERIAL |= {"tensorboard", "wandb", "tokenizer", "dialect", "count", "real_vocab", "precision", "deterministic"}
MOST_NAMED = 6

# What recipes hold under [recipe.measured]: its name, and what the papers measured it on.
QUANTITIES = {
    "hellaswag": ("HellaSwag, acc_norm as a fraction", "10 shots"),
    "arc_easy": ("ARC-Easy, acc_norm as a fraction", "25 shots"),
    "trace_per_parameter": ("trace of the Hessian per parameter", "2,048 tokens, 10 probes"),
    "largest_eigenvalue": ("eigenvalue of largest magnitude", "2,048 tokens, 15 power iterations"),
    "curve_range": ("range of the loss curve", "2,048 tokens"),
    "persistence": ("persistence, sum of log sigma_64 of the blocks", "12 layers, no rounds after the first sketch"),
    "forgetting": ("forgetting", "1,000 steps, OpenWebText to TinyStories"),
    "plasticity": ("plasticity", "1,000 steps, OpenWebText to TinyStories"),
    "wikitext": ("perplexity of WikiText", "1,638,400 tokens, random windows"),
    "lambada": ("perplexity of LAMBADA", "1,638,400 tokens, random windows"),
    "c4": ("perplexity of C4", "1,638,400 tokens, random windows"),
    "ood": ("mean perplexity of the three", "1,638,400 tokens each, random windows"),
}
PER_TOKEN = {"forgetting", "plasticity", "wikitext", "lambada", "c4", "ood"}  # as many numbers as there are tokenizers
CURVATURE: dict[str, tuple[str | int, ...]] = {  # where it is among what was measured
    "trace_per_parameter": ("trace_per_parameter",),
    "largest_eigenvalue": ("eigenvalues", 0, "value"),
    "curve_range": ("curve", "range"),
}
TASKS = {"hellaswag": "hellaswag@10", "arc_easy": "arc_easy@25"}
PERSISTENT = 64  # which singular value the published persistence is about


def published_tables(runs: Sequence[RunData], forgetting: Sequence[Any] = ()) -> list[Table]:
    """Tables for every recipe that runs were trained by and that has figures or remarks for them: losses, and more."""
    tables = []
    for name, mine in grouped((run.config.recipe, run) for run in runs if run.config and run.config.recipe).items():
        try:
            recipe = load_recipe(name)
        except StepformerError:
            continue  # a recipe of another version
        tables += [table for table in (_table(recipe, mine), _measured(recipe, mine, forgetting)) if table.rows]
    return tables


def _architectures(recipe: Recipe, runs: Sequence[RunData]) -> Iterator[tuple[str, str, list[RunData]]]:
    """For each label that is an architecture of the recipe: itself, the recipe's name for it, and its runs."""
    for label, mine in grouped((run.label, run) for run in runs).items():
        row = closest_preset(mine[0].config.model)[0] if mine[0].config else None
        key = next((key for key in recipe.runs if row is not None and preset(key).name == row.name), None)
        if key is not None:
            yield label, key, mine


def _for_each(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Sentences, with the labels that they are about unless it is one for all."""
    said = grouped(pairs)
    return [words if len(said) == 1 else f"{', '.join(labels)}: {words}" for words, labels in said.items()]


def _table(recipe: Recipe, runs: Sequence[RunData]) -> Table:
    def mean(entry: Any, name: str) -> Cell:
        values = [float(getattr(run.record, name)) for run in entry.mine if run.record]
        return number(summarise(values).mean if values else None)

    fields: list[Field] = [
        words("architecture", lambda entry: entry.label),
        (Column("published best", True), lambda e: number(e.best, ".4f" if e.best is None or e.best >= 1 else ".4g")),
        (Column("ours best", True), lambda entry: mean(entry, "best_val_loss")),
        numbers("published final", "final"),
        (Column("ours final", True), lambda entry: mean(entry, "val_loss")),
        (Column("our runs", True), lambda entry: number(sum(bool(run.record) for run in entry.mine), "d")),
        words("remark", lambda entry: entry.note),
    ]
    entries, caveats = [], []
    for label, key, mine in _architectures(recipe, runs):
        best, final, note = (recipe.runs[key].get(name) for name in ("published", "published_final", "note"))
        entries.append(SimpleNamespace(label=label, mine=mine, best=best, final=final, note=note or ""))
        caveats.append((_caveat(recipe, key, mine), label))
    about = recipe.about
    notes = [f"Published: {about.get('published_what', '')} ({about.get('paper', '')}, {about.get('figure', '')})."]
    return tabulated(entries, fields, f"Recipe {recipe.name}", notes + _for_each(caveats))


def _measured(recipe: Recipe, runs: Sequence[RunData], forgetting: Sequence[Any]) -> Table:
    """What was published about the trained models beside what was measured of ours, where that is the same quantity."""
    titles = ("architecture", "quantity", "published", "ours", "our runs", "published on", "ours on")
    rows: list[list[Cell]] = []
    scales: list[tuple[str, str]] = []
    for label, key, mine in _architectures(recipe, runs):
        published, before = recipe.measured.get(key, {}), len(rows)
        for name in (name for name in QUANTITIES if name in published):
            title, on = QUANTITIES[name]
            alike = [run for run in mine if not (name in PER_TOKEN and _other_tokenizer(recipe, run))]
            found = ((where, real(value)) for run in alike for where, value in _ours(run, name, forgetting))
            for where, ours in grouped(pair for pair in found if pair[1] is not None).items():
                both = (number(value, ".4g") for value in (published[name], math.fsum(ours) / len(ours)))
                rows.append([text(label), text(title), *both, number(len(ours), "d"), text(on), text(where)])
        if len(rows) > before:
            scales.append((_scale(recipe, key, mine), label))
    hints = {"published": "", "ours": "mean over our runs", "our runs": ""}
    columns = [Column(title, title in hints, hints.get(title, "")) for title in titles]
    notes = [f"Published: {recipe.about.get('paper', '')}, from the authors' public results."]
    return Table(columns, rows, f"Recipe {recipe.name}: what else was measured", notes + _for_each(scales))


def _ours(run: RunData, name: str, forgetting: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Our values of a published quantity, each with what it was measured on; none where ours is another quantity."""
    if name in TASKS:
        found = inside(run.result("tasks"), "tasks", TASKS[name])
        items, whole = real(found, "items"), real(found, "of")
        of = f" of {whole:,.0f}" if whole is not None and whole != items else ""
        yield "" if items is None else f"{items:,.0f}{of} items", inside(found, "acc_norm")
    elif name in CURVATURE:
        found = run.result("hessian")
        tokens = real(found, "tokens")
        # a curve goes as far as the published ones, along a direction that is scaled alike
        ends = [real(found, "curve", "alpha", place) for place in (0, -1)]
        alike = ends == [-0.5, 0.5] and inside(found, "curve", "normalise") == "tensor"
        if name != "curve_range" or alike:
            yield "" if tokens is None else f"{tokens:,.0f} tokens", inside(found, *CURVATURE[name])
    elif name == "persistence":
        kept = [inside(layer, "block", "k") for layer in run.layers("jacobian")]
        if set(kept) == {PERSISTENT}:
            yield f"{len(kept)} layers", inside(run.result("jacobian"), "summary", "block", "persistence")
    elif name in ("forgetting", "plasticity"):
        # in the fine-tunings that began with the run, those by one AdamW for all
        mine, shared = run.facts.get("id"), [f for f in forgetting if inside(f, "settings", "native") is not True]
        for entry in (entry for found in shared for entry in records(found, "runs")):
            if mine is not None and inside(entry, "init", "id") == mine and values(entry, "steps"):
                steps = real(entry, "steps", -1) or 0
                yield f"{steps:,.0f} steps, {entry.get('direction') or ''}", entry.get(name)
    elif name == "ood":
        over, _, how = str(run.result("perplexity").get("protocol", "")).partition("; ")
        if over == "mean over wikitext, lambada, c4":
            yield how, run.result("perplexity").get("mean_perplexity")
    else:
        for entry in records(run.result("perplexity"), "texts"):
            if entry.get("name") == name:
                stride = real(entry, "stride")
                how = f"{entry.get('mode') or ''}{'' if stride is None else f' {stride:.0f}'}"
                yield f"{real(entry, 'tokens') or 0:,.0f} tokens, {how}", entry.get("perplexity")


def _scale(recipe: Recipe, key: str, runs: Sequence[RunData]) -> str:
    """How far apart the models are that the numbers are about."""
    record = next((run.record for run in runs if run.record), None)
    theirs = run_config(recipe.name, [f"model.preset={key}"])
    parameters, tokens = recipe.runs[key].get("parameters"), theirs.train.steps * theirs.step_tokens
    if record is None:
        return "Ours is not finished, so its numbers are of a model in training."
    if (record.parameters, record.tokens) == (parameters, tokens):
        return "The models have one size and saw as many tokens; texts, windows and estimators may still differ."
    size = "" if parameters is None else f"{parameters:,} parameters and "
    return (
        f"Not the same scale: the published model has {size}{tokens:,} training tokens, ours {record.parameters:,} and "
        f"{record.tokens:,}. These numbers depend on both, so they stand beside each other and neither confirm nor "
        "contradict each other."
    )


def _other_tokenizer(recipe: Recipe, run: RunData) -> str:
    """The name of a run's tokenizer if it is not the recipe's, else nothing."""
    name = inside(run.facts, "corpus", "tokenizer", "name")
    return "" if name in (None, run_config(recipe.name).data.tokenizer) else str(name)


def _caveat(recipe: Recipe, key: str, runs: Sequence[RunData]) -> str:
    """What keeps our number from being a reproduction, in a sentence."""
    config, facts = runs[0].config, recipe.runs[key]
    assert config is not None
    theirs, ours = _flat(run_config(recipe.name, [f"model.preset={key}"])), _flat(config)
    differing = [k for k in dict.fromkeys((*theirs, *ours)) if theirs.get(k) != ours.get(k)]
    record = next((run.record for run in runs if run.record), None)
    sentences = []
    if differing:
        pairs = [(k, *(settings.get(k, "default") for settings in (ours, theirs))) for k in differing[:MOST_NAMED]]
        named = [f"{k} {here} instead of {there}" for k, here, there in pairs]
        more = f" and {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
        sentences.append(f"Not the published setting, so not a reproduction: {', '.join(named)}{more}.")
    if other := _other_tokenizer(recipe, runs[0]):
        sentences.append(
            f"Ours has the tokenizer '{other}', the published one '{run_config(recipe.name).data.tokenizer}': "
            "losses per token of different tokenizers cannot be compared."
        )
    if record and facts.get("parameters") not in (None, record.parameters):
        sentences.append(f"The published model has {facts['parameters']:,} parameters, ours {record.parameters:,}.")
    if record:
        sentences.append(f"Ours was evaluated on {record.val_tokens:,} tokens of the split {record.val_hash[:12]}.")
    if not differing:
        sentences.append("The settings are the recipe's; data, its split and the evaluation may still differ.")
    return " ".join(sentences)


def _flat(config: RunConfig) -> dict[str, Any]:
    sections = {name: values for name, values in config.to_dict().items() if isinstance(values, dict)}
    items = ((name, key, value) for name, section in sections.items() for key, value in section.items())
    flat = {f"{name}.{key}": value for name, key, value in items if key not in IMMATERIAL}
    flat["data.corpus"] = Path(str(flat["data.corpus"])).name.removesuffix("-gpt2")
    return flat
