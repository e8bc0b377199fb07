"""What all runs of a report have in common, in the sentences that the method of a paper needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from stepformer.optim.config import OptimConfig, Schedule
from stepformer.pages.reports.collect import RunData
from stepformer.pages.reports.parts import machine
from stepformer.pages.reports.values import grouped, inside, real
from stepformer.study.statistics import seed_words
from stepformer.training import RunConfig


def method(runs: Sequence[RunData]) -> list[str]:
    """Sentences on model, data, training, machine, seeds and optimizer, or that one is not the same for all runs.

    Rates and decays in which runs differ are named as such: the rest of the optimizer's sentence is that of all.
    """
    configs = [run.config for run in runs if run.config]
    trained = [run for run in runs if not run.imported]

    def same(says: Callable[[RunConfig], str]) -> list[str]:
        return one_of({says(run.config) for run in trained if run.config})

    def one_of(said: Set[str], where: str = "settings that differ") -> list[str]:
        apart = f"{next(iter(said), '').partition(':')[0]}: not the same in all rows ({where})."
        return [*said] if len(said) == 1 else [apart] if said else []

    found = [_model(configs), *one_of({_data(run) for run in runs} - {""}), *same(_training)]
    found += [*one_of({_machine(run) for run in trained} - {""}, "environment"), _seeds(trained)]
    rates = [key for key in OptimConfig.field_names() if key.startswith(("lr", "wd_"))]
    own = [key for key in rates if len({getattr(config.optim, key) for config in configs}) > 1]
    found += same(lambda config: _optimizer(config, own))
    return [sentence for sentence in found if sentence]


def _model(configs: Sequence[RunConfig]) -> str:
    words = {"n_layer": "{} layers", "d_model": "width {}", "n_head": "{} heads", "context": "context {}"}
    values = {key: list(dict.fromkeys(getattr(config.model, key) for config in configs)) for key in words}
    parts = [words[key].format(*found) for key, found in values.items() if len(found) == 1]
    own = [key for key in (*words, "mlp_hidden") if len({getattr(config.model, key) for config in configs}) > 1]
    apart = [f"{', '.join(own)} not the same in all rows (settings that differ)"] * bool(own)
    return f"Model: {', '.join([*parts, *apart])}." if configs else ""


def _data(run: RunData) -> str:
    known = run.facts.get("corpus")
    sizes = [real(known, "splits", name, "tokens") for name in ("train", "val")]
    ids, hashes = real(known, "tokenizer", "vocab_size"), [inside(known, "splits", n, "hash") for n in ("train", "val")]
    if run.config is None or ids is None or None in sizes:
        return ""
    text = f"tokenizer {inside(known, 'tokenizer', 'name')} with {ids:,.0f} ids"
    trained, validated = (f"{size:,.0f} tokens (hash {h})" for size, h in zip(sizes, hashes, strict=True))
    half, whole = run.config.train.eval_half, sizes[1] or 0
    used = run.record.val_tokens if run.record else min(run.config.train.eval_tokens, round(whole))
    part = "" if half == "all" else f"of the {half} half "
    all_of_it = used > whole / (2 if part else 1) - run.config.model.context  # but for what fills no block
    amount = "all" if all_of_it else f"the first {used:,}"
    validated += " for validation" + f", {amount} {part}evaluated" * (bool(part) or not all_of_it)
    return f"Data: {run.config.data.corpus}; {text}; {trained} for training, {validated}."


def _training(config: RunConfig) -> str:
    steps, each = config.train.steps, config.step_tokens
    said = f"Training: {steps:,} steps of {each:,} tokens, {config.train.batch} sequences of {config.model.context}"
    return f"{said}, {steps * each:,} tokens in all."


def _machine(run: RunData) -> str:
    precision, device = run.facts.get("precision"), machine(run)
    return f"Computation: {precision} on {device}." if precision and device else ""


def _seeds(runs: Sequence[RunData]) -> str:
    by_row = grouped((run.label, run.seed) for run in runs)
    said = {label: seed_words(sorted({*seeds})).partition(" ")[2] for label, seeds in by_row.items()}
    if len({*said.values()}) > 1:
        return f"Seeds: {'; '.join(f'{label} {seeds}' for label, seeds in said.items())}."
    return "" if not said else f"Seeds: {next(iter(said.values()))}{' in every row' * (len(said) > 1)}."


def _optimizer(config: RunConfig, own: Sequence[str]) -> str:
    optim, schedule = config.optim, Schedule(config.optim, config.train.steps)
    warmup = f"{schedule.warmup:,} step{'s' * (schedule.warmup != 1)} of linear warm-up"
    falls = f", falling linearly from step {schedule.decay_start:,} on" * (optim.schedule == "wsd")
    ends = f"{falls}, towards {100 * optim.floor:g}% of the peak rates" * (optim.schedule != "constant")
    parts = [f"{optim.name}, {optim.schedule} schedule after {warmup}{ends}", optim.rates_text(own)]
    parts += [f"momentum {optim.momentum:g}"] if optim.name != "adamw" else []
    parts += [f"AdamW with betas {optim.beta1:g} and {optim.beta2:g}"] if optim.name != "scion" else []
    parts += [f"gradients clipped at norm {optim.clip:g}"] if optim.clip else []
    parts += [f"{', '.join(own)} not the same in all rows (settings that differ)"] if own else []
    return f"Optimizer: {'; '.join(filter(None, parts))}."
