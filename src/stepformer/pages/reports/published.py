"""Published figures beside ours, with every setting in which our runs differ from the recipe's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from stepformer.base.errors import StepformerError
from stepformer.catalogue import closest_preset, preset
from stepformer.catalogue.recipes import Recipe, load_recipe
from stepformer.pages.reports.collect import RunData
from stepformer.pages.reports.values import grouped, inside, real, records, values
from stepformer.present.tables import Cell, Column, Field, Table, number, numbers, tabulated, text, words
from stepformer.study import RunRecord, summarise
from stepformer.training import RunConfig, run_config

# What changes a result by rounding at most, or only what is kept and shown.
IMMATERIAL = {"seed", "device", "micro_batch", "compile", "log_every", "save_every", "keep", "parallel", "eval_every"}
IMMATERIAL |= {"tensorboard", "wandb", "tokenizer", "dialect", "count", "real_vocab", "precision", "deterministic"}
IMMATERIAL |= {"eval_first", "eval_whole"}
MOST_NAMED = 6

# What recipes hold under [recipe.measured]: its name, and what the papers measured it on.
QUANTITIES = {
    "hellaswag": ("HellaSwag, acc_norm as a fraction", "10 shots"),
    "arc_easy": ("ARC-Easy, acc_norm as a fraction", "25 shots"),
    "arc_easy_acc": ("ARC-Easy, acc as a fraction", "25 shots"),
    "hellaswag_zero_shot": ("HellaSwag, acc_norm as a fraction", "0 shots"),
    "arc_easy_zero_shot": ("ARC-Easy, acc_norm as a fraction", "0 shots"),
    "trace_per_parameter": ("trace of the Hessian per parameter", "2,048 tokens, 10 probes"),
    "largest_eigenvalue": ("eigenvalue of largest magnitude", "2,048 tokens, 15 power iterations"),
    "curve_range": ("range of the loss curve", "2,048 tokens"),
    "persistence": ("persistence, sum of log sigma_64 of the blocks", "12 layers, no rounds after the first sketch"),
    "persistence_11": ("sum of log sigma_11, given as persistence", "12 layers, no rounds after the first sketch"),
    "forgetting": ("forgetting", "1,000 steps on the other corpus"),
    "plasticity": ("plasticity", "1,000 steps on the other corpus"),
    "openwebtext": ("perplexity of OpenWebText", "1,638,400 tokens, random windows"),
    "wikitext": ("perplexity of WikiText", "1,638,400 tokens, random windows"),
    "lambada": ("perplexity of LAMBADA", "1,638,400 tokens, random windows"),
    "c4": ("perplexity of C4", "1,638,400 tokens, random windows"),
    "ood": ("mean perplexity of WikiText, LAMBADA and C4", "1,638,400 tokens each, random windows"),
}
# as many numbers as there are tokenizers
PER_TOKEN = {"forgetting", "plasticity", "openwebtext", "wikitext", "lambada", "c4", "ood"}
CURVATURE: dict[str, tuple[str | int, ...]] = {  # where it is among what was measured
    "trace_per_parameter": ("trace_per_parameter",),
    "largest_eigenvalue": ("eigenvalues", 0, "value"),
    "curve_range": ("curve", "range"),
}
TASKS = {
    "hellaswag": ("hellaswag@10", "acc_norm"),
    "arc_easy": ("arc_easy@25", "acc_norm"),
    "arc_easy_acc": ("arc_easy@25", "acc"),
    "hellaswag_zero_shot": ("hellaswag@0", "acc_norm"),
    "arc_easy_zero_shot": ("arc_easy@0", "acc_norm"),
}
PERSISTENT = 64  # how many singular values persistence is about
PERSISTENCE = {"persistence": ("persistence",), "persistence_11": ("legacy", "persistence")}
RECOMPUTED = "recomputed by us"


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
    """Losses in one row where both are of as many tokens, from the first of the split on; ours of others below."""

    def both(what: str, key: str) -> tuple[Field, Field]:
        theirs = Column(f"published {what}", True), lambda entry: number(entry.published.get(key))
        return theirs, (Column(f"ours {what}", True), lambda entry: number(getattr(entry, what)))

    fields: list[Field] = [
        words("architecture", lambda entry: entry.label),
        numbers("validation tokens", "tokens", ",d", "that the validation losses of a row are of"),
        *(field for of in ("best", "final", "train") for field in both(of, f"published_{of}".removesuffix("_best"))),
        numbers("our runs", "count", "d"),
        words("remark", lambda entry: entry.published.get("note", "")),
    ]
    entries, caveats = [], []
    for label, key, mine in _architectures(recipe, runs):
        on, same = recipe.published_tokens(key), tokens_alike(recipe.published_tokens(key), mine[0])
        records = [run.record for run in mine if run.record]
        ours = grouped(pair for record in records for pair in losses_of(record).items())
        for tokens in dict.fromkeys((same, *ours)):
            found, beside = ours.get(tokens, []), tokens == same
            row = SimpleNamespace(label=label, tokens=tokens if found else on, count=len(found))
            row.published = recipe.runs[key] if beside else {}
            row.best, row.final = (_mean(losses[i] for losses in found) for i in (0, 1))
            row.train = _mean(record.train_loss for record in records) if beside else None
            entries.append(row)
        caveats.append((_caveat(recipe, key, mine, None if same in ours else on), label))
    about = recipe.about
    notes = [f"Published: {about.get('published_what', '')} ({about.get('paper', '')}, {about.get('figure', '')})."]
    trained = any("published_train" in entry.published for entry in entries)
    if trained:
        notes.append(
            "Ours train: loss of fixed training tokens at the end. Of which tokens theirs is, is not published."
        )
    table = tabulated(entries, fields, f"Recipe {recipe.name}", notes + _for_each(caveats))
    return table if trained else table.without((6, 7))


def losses_of(record: RunRecord) -> dict[int, tuple[float | None, float]]:
    """Best and final loss of a run, by the number of tokens that they are of."""
    return {record.val_tokens: (record.best_val_loss, record.val_loss), **record.first}


def _mean(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if not known or None in known else summarise(cast("list[float]", known)).mean


def tokens_alike(published: int | None, run: RunData) -> int | None:
    """How many tokens of a run's own split an evaluation on so many has: whole blocks, and no more than there are."""
    tokens, context = (
        real(run.facts, "corpus", "splits", "val", "tokens"),
        run.config.model.context if run.config else 1,
    )
    if published is None:
        return run.record.val_tokens if run.record else None
    return min(published, int(tokens or published + 1) - 1) // context * context


def _measured(recipe: Recipe, runs: Sequence[RunData], forgetting: Sequence[Any]) -> Table:
    """What was published about the trained models beside what was measured of ours, where that is the same quantity."""
    titles = ("architecture", "quantity", "theirs", "source", "ours", "our runs", "theirs on", "ours on")
    rows: list[list[Cell]] = []
    scales: list[tuple[str, str]] = []
    for label, key, mine in _architectures(recipe, runs):
        before = len(rows)
        sources = (("published", recipe.measured.get(key, {})), (RECOMPUTED, recipe.recomputed.get(key, {})))
        for name, (source, known) in itertools.product(QUANTITIES, sources):
            if name not in known:
                continue
            title, on = QUANTITIES[name]
            error = "" if (e := recipe.error(name)) is None else f" ± {e:g}"
            theirs = Cell(f"{number(known[name], '.4g').text}{error}", known[name])
            alike = [run for run in mine if not (name in PER_TOKEN and _other_tokenizer(recipe, run))]
            found = ((where, real(value)) for run in alike for where, value in _ours(run, name, forgetting))
            for where, ours in grouped(pair for pair in found if pair[1] is not None).items():
                mean, count = number(math.fsum(ours) / len(ours), ".4g"), number(len(ours), "d")
                rows.append([text(label), text(title), theirs, text(source), mean, count, text(on), text(where)])
        if len(rows) > before:
            scales.append((_scale(recipe, key, mine), label))
    hints = {"theirs": "", "ours": "mean over our runs", "our runs": ""}
    columns = [Column(title, title in hints, hints.get(title, "")) for title in titles]
    notes = [f"Published: {recipe.about.get('paper', '')}, {recipe.about.get('measured_what', '')}."]
    if any(row[3].text == RECOMPUTED for row in rows):
        notes.append(
            f"{RECOMPUTED.capitalize()}: from values that the authors' files hold. What they published under this name "
            "is another quantity, in a row of its own."
        )
    return Table(columns, rows, f"Recipe {recipe.name}: what else was measured", notes + _for_each(scales))


def _ours(run: RunData, name: str, forgetting: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Our values of a published quantity, each with what it was measured on; none where ours is another quantity."""
    if name in TASKS:
        asked, metric = TASKS[name]
        found = inside(run.result("tasks"), "tasks", asked)
        items, whole = real(found, "items"), real(found, "of")
        of = f" of {whole:,.0f}" if whole is not None and whole != items else ""
        yield "" if items is None else f"{items:,.0f}{of} items", inside(found, metric)
    elif name in CURVATURE:
        found = run.result("hessian")
        tokens = real(found, "tokens")
        # a curve goes as far as the published ones, along a direction that is scaled alike
        ends = [real(found, "curve", "alpha", place) for place in (0, -1)]
        alike = ends == [-0.5, 0.5] and inside(found, "curve", "normalise") == "tensor"
        if name != "curve_range" or alike:
            yield "" if tokens is None else f"{tokens:,.0f} tokens", inside(found, *CURVATURE[name])
    elif name in PERSISTENCE:
        kept = [inside(layer, "block", "k") for layer in run.layers("jacobian")]
        if set(kept) == {PERSISTENT}:
            yield f"{len(kept)} layers", inside(run.result("jacobian"), "summary", "block", *PERSISTENCE[name])
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


def _caveat(recipe: Recipe, key: str, runs: Sequence[RunData], elsewhere: int | None) -> str:
    """What keeps our number from being a reproduction, in a sentence; `elsewhere`: on how many tokens the published one
    is, if ours is not.
    """
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
    if record and elsewhere:
        sentences.append(
            f"The published loss is of the first {elsewhere:,} tokens of a validation split, on which ours was not "
            "evaluated: no number of ours stands beside it."
        )
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
