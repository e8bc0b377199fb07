"""`stepformer compare`, `sweep` and `demo`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from stepformer.base import documents
from stepformer.base.errors import InputError, command_line
from stepformer.base.files import write_text
from stepformer.base.units import duration
from stepformer.catalogue.recipes import load_recipe
from stepformer.cli.options import (
    CONFIDENCE,
    JOBS,
    NO_DISPLAY,
    check,
    command,
    drawn,
    given,
    option,
    tell_failed,
)
from stepformer.cli.show import console
from stepformer.model import Model
from stepformer.present.tables import Table, of_texts
from stepformer.study import Comparison, Facts, compare, load_records, plot_comparison
from stepformer.study.differences import refuse_unmeant
from stepformer.study.matching import AMOUNTS
from stepformer.study.statistics import seed_words
from stepformer.study.studies import Study, check_tuning, compared, resolved, swept
from stepformer.study.study import Report, carry_out, plan, seeds_of, submit, words_of
from stepformer.training import Stopped, load_run, run_config
from stepformer.training.parallel import choose_device
from stepformer.training.run import continue_text
from stepformer.training.runs import RunFolder
from stepformer.training.speed import forecast

# Few tokens, well used: small batches for many steps, and a vocabulary in which most words are one token, so that the
# text can be read. Four minutes of training where vanilla at this size trains on 5,000 tokens a second (batches of 32).
# Its rates are those of the sweep in docs/lab-notebook.md.
DEMO = (
    *("size=tiny", "steps=300", "batch=8", "tokenizer=bpe:4096", "lr_embedding=6e-3", "lr_norm=6e-3"),
    *("eval_every=50", "eval_tokens=16384"),
)
DEMO_PROMPT = "One morning"


def run_compare(args: argparse.Namespace) -> int:
    names, words = words_of(args.names)
    if args.runs:
        others = given(args, "recipe", "match", "tune", "budget", "corpus", "seeds", "dry_run")
        if names or words or any(others.values()):
            raise InputError(
                "--runs compares what is there: of the other options only --baseline, --allow and --out apply."
            )
        for folder in args.runs:
            RunFolder(Path(folder)).check_code()
        records = load_records(args.runs)
        out = Path(args.out or "runs/compare")
        studies = {Path(folder).resolve().parent / "study.json" for folder in args.runs}
        facts = Facts()
        if len(studies) == 1 and (study_file := studies.pop()).is_file():  # all of one study, which may say more
            facts = Facts.of_study(documents.read(study_file, documents.STUDY))
        usual = facts.baseline if facts.baseline in {record.label for record in records} else records[0].label
        found = compare(records, args.baseline or usual, args.confidence, facts)
        refuse_unmeant(found.differences, {record.label: record.settings for record in records}, args.allow)
        _present(found, out)
        return 0
    if args.recipe and not names:
        names = list(load_recipe(args.recipe).runs)
    if args.corpus:
        words.append(f"data.corpus={args.corpus}")
    if args.recipe and args.seeds is None:
        args.seeds = ",".join(map(str, load_recipe(args.recipe).about.get("seeds", [42])))
    check(args, "jobs")
    searched = check_tuning(args.tune, args.budget_tune, seeds_of(args.seeds or "1"))
    if args.tune and args.slurm is not None:
        raise InputError("--tune searches here, before the runs: it does not go with --slurm.")
    try:
        study = compared(
            names,
            Path(args.out) if args.out else None,
            seeds=seeds_of(args.seeds or "1"),
            words=words,
            tune=[] if args.dry_run else args.tune,
            budget_tune=None if args.dry_run else args.budget_tune,
            plugins=args.plugin,
            **given(args, "budget", "baseline", "recipe", "allow", "match", "jobs", "quiet"),
        )
    except Stopped as stopped:
        print(f"stepformer: {stopped}; the search is saved. The same command continues.", file=sys.stderr)
        return stopped.status
    if args.dry_run and args.tune:
        points = f"{len(searched.points())} points of {', '.join(searched.axes)}"
        said = f"Before that, each row is trained at {points}, on {args.budget_tune} tokens each."
        study = replace(study, facts=study.facts + Facts(remarks=(said,)))
    return _study(args, study)


def run_sweep(args: argparse.Namespace) -> int:
    names, words = words_of(args.names)
    if len(names) != 1:
        raise InputError("A sweep is over one NAME; use --grid preset=a,b to go over architectures.")
    check(args, "jobs")
    study = swept(names[0], words, args.grid, Path(args.out or f"runs/sweep-{Path(names[0]).stem}"))
    return _study(args, replace(study, seeds=tuple(seeds_of(args.seeds or "1")), allow=tuple(args.allow)))


def _study(args: argparse.Namespace, study: Study) -> int:
    """Train what is missing, then show what there is."""
    out = study.out
    if args.dry_run:
        console().print(planned_table(study))
        return 0
    runs = study.plan(quiet=args.quiet, here=args.slurm is None)
    if args.slurm is not None and not all(run.finished for run in runs):
        asked = dict(word.partition("=")[::2] for word in args.slurm)
        slurm = {key: int(value) if value.isdigit() else value for key, value in asked.items()}
        ids = submit(runs, out, slurm=slurm, plugins=args.plugin)
        print(f"submitted {len(ids)} runs ({', '.join(ids)}); the same command shows the table when they are done")
        return 0
    try:
        report = carry_out(runs, jobs=args.jobs, quiet=args.quiet, plugins=args.plugin)
    except Stopped as stopped:
        done = f"{sum(run.finished for run in runs)} of {len(runs)} runs are finished, the rest is saved"
        print(f"stepformer: {stopped}; {done}. The same command continues.", file=sys.stderr)
        return stopped.status
    return show_study(report, study.baseline, args.confidence, out, study.facts)


def planned_table(study: Study) -> Table:
    """What would be trained."""
    rows, rates = list[tuple[str, ...]](), dict[str, str]()
    variants, _ = resolved(study.variants)
    for label, config in variants.items():
        model = Model(config.model, device="meta")
        tokens = config.train.steps * config.step_tokens
        numbers = (model.num_parameters(), *(getattr(config.model, key) for key in ("n_layer", "d_model", "context")))
        rows.append((label, *(f"{number:,}" for number in (*numbers, config.train.steps, tokens))))
        rates[label] = f"{config.optim.name}, {config.optim.schedule}: {config.optim.rates_text()}."
    told = [f"{label}: {text}" for label, text in rates.items()]
    folders = [study.out / f"{label}-s{seed}" for label in variants for seed in study.seeds]
    finished = sum(RunFolder(folder).result.is_file() for folder in folders)
    notes = [
        f"{len(folders)} runs, {finished} of them finished: {len(rows)} rows, {seed_words(study.seeds)}.",
        f"The baseline is {study.baseline}.",
        *(told if len({*rates.values()}) > 1 else [f"All rows: {rates[study.baseline]}"]),
        *study.facts.remarks,
    ]
    header = ("architecture", "parameters", "layers", "width", "context", "steps", "tokens")
    return of_texts(header, rows, notes=notes)


def show_study(report: Report, baseline: str, confidence: float, out: Path, facts: Facts | None = None) -> int:
    """Table and plot of what finished, and a sentence for what failed; 1 if anything did."""
    failed = tell_failed(report.failed)
    if report.finished:
        records = load_records(report.finished)
        if any(record.label == baseline for record in records):
            _present(compare(records, baseline, confidence, facts), out)
        else:
            print(f"stepformer: no run of the baseline '{baseline}' finished: nothing to compare with", file=sys.stderr)
    return int(failed)


def _present(comparison: Comparison, out: Path) -> None:
    console().print(comparison.table)
    table, details = out / "comparison.md", out / "comparison.csv"
    write_text(table, comparison.table.markdown())
    write_text(details, comparison.details.csv())
    made = [table, details, *drawn(plot_comparison, comparison, out / "comparison.png")]
    print(f"written: {', '.join(map(str, made))}")


def run_demo(args: argparse.Namespace) -> int:
    """A plain GPT and a Nesterov one: same data, same start, same optimizer."""
    words = [*DEMO, *args.overrides]
    names = ("vanilla", "yurii")
    out = Path(args.out)
    runs = plan(out, {name: run_config(name, words) for name in names}, [42])
    tokens = runs[0].config.train.steps * runs[0].config.step_tokens
    left = [run.config for run in runs if not run.finished]
    took = sum(forecast(config, choose_device(config.train.device)).run for config in left)
    print(
        f"training {' and '.join(names)} on {tokens:,} tokens of tales each, about {duration(took)} on this machine; "
        "Ctrl-C saves, the same command continues",
        flush=True,
    )
    try:
        report = carry_out(runs, jobs=1, plugins=args.plugin)
    except Stopped as stopped:
        print(f"stepformer: {stopped}; saved. The same command continues.", file=sys.stderr)
        return stopped.status
    status = show_study(report, names[0], 0.95, out)
    for folder in report.finished:
        run = load_run(folder)
        text = "".join(continue_text(run, DEMO_PROMPT, max_new_tokens=120, temperature=0.7, seed=0))
        print(f"\n{run.config.title} continues '{DEMO_PROMPT}':\n  {text.strip()}")
    for record in load_records(report.finished):
        if record.label == "yurii" and record.unigram_entropy:
            entropy = f"the unigram entropy of the corpus is {record.unigram_entropy:.4f}"
            print(f"\nyurii's validation loss {record.val_loss:.4f} nats/token; {entropy}")
    print(f"\ngo on: {command_line('generate', out / 'yurii-s42', 'The old')} ; stepformer compare --help")
    return status


STUDY_OPTIONS = (
    option(
        "--allow KEY",
        "a setting that may differ between the rows although it is not of the architecture; may be repeated",
        action="append",
        default=[],
    ),
    option("--seeds N|a,b,c", "how many seeds (from 42 on), or which (1; a recipe's own)"),
    option("--out DIR", "folder of all runs, table and plot (default: runs/compare-... or runs/sweep-...)"),
    JOBS,
    CONFIDENCE,
    NO_DISPLAY,
    option("--dry-run", "say what would be trained, with which rates, and stop"),
    option(
        "--slurm key=value",
        "submit the runs with submitit: timeout_min=240 gpus_per_node=1 slurm_partition=...",
        nargs="*",
    ),
)

add_compare = command(
    run_compare,
    option("names NAME | key=value", "presets; settings for all of them", nargs="*"),
    option("--recipe RECIPE", "settings of a paper's experiment; without NAMEs all its runs"),
    option("--runs DIR", "compare these finished runs instead of training", nargs="+"),
    option("--corpus NAME|DIR", "what to train on (default: tales)"),
    option("--budget TOKENS", "tokens each run trains on: 200k, 5M, 1.5B"),
    option("--baseline NAME", "what the others are compared with (default: the first)"),
    option("--match", "also compare with a baseline made wider until it has what a row has", choices=list(AMOUNTS)),
    option(
        "--tune KEY[,KEY]=a,b,c",
        "first the same search for every row, over values (0.01) or multiples of what it has (2x)",
        action="append",
        default=[],
    ),
    option("--budget-tune TOKENS", "tokens that each run of the search trains on"),
    *STUDY_OPTIONS,
)

add_sweep = command(
    run_sweep,
    option("names NAME | key=value", "preset, recipe or TOML file; settings", nargs="+"),
    option("--grid key=a,b,c", "an axis; may be repeated", action="append", required=True),
    *STUDY_OPTIONS,
)

add_demo = command(
    run_demo,
    option("--out DIR", "folder (runs/demo)", default="runs/demo"),
    option("overrides key=value", "settings to change, e.g. steps=1000", nargs="*"),
)
