"""`stepformer compare`, `sweep` and `demo`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from stepformer.base import documents, files
from stepformer.base.errors import InputError, command_line
from stepformer.base.units import duration
from stepformer.catalogue.recipes import load_recipe
from stepformer.cli.main import first_rank
from stepformer.cli.options import (
    CONFIDENCE,
    JOBS,
    MAX_TIME,
    NO_DISPLAY,
    command,
    drawn,
    given,
    harmless,
    option,
    repeated,
    tell_failed,
)
from stepformer.cli.show import console
from stepformer.model import Model
from stepformer.present.tables import Table, listed, of_texts
from stepformer.study import Comparison, Facts, compare, load_records, plot_comparison
from stepformer.study.differences import refuse_unmeant
from stepformer.study.fairness import AMOUNTS, most_points, search_left, search_of
from stepformer.study.held_out import HeldOut, evaluate_held_out
from stepformer.study.records import RunRecord, folders_of, not_in_the_table
from stepformer.study.statistics import seed_words
from stepformer.study.studies import Study, compared, resolved, swept
from stepformer.study.study import Planned, carry_out, plan, seeds_of, submit, words_of
from stepformer.training import RunConfig, load_run, run_config
from stepformer.training.corpora import open_corpus
from stepformer.training.parallel import ALONE, choose_device
from stepformer.training.runs import RunFolder
from stepformer.training.speed import forecast
from stepformer.training.stopping import Watch, seconds
from stepformer.training.text import continue_text

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
        others = given(args, "recipe", "match", "tune", "by_turns", "budget", "corpus", "seeds", "dry_run")
        if names or words or any(others.values()):
            raise InputError(
                "--runs compares what is there: of the other options only --baseline, --allow, --held-out, --max-time "
                "and --out apply."
            )
        args.runs = [run for folder in args.runs for run in _runs_of(Path(folder))]
        for folder in map(RunFolder, map(Path, args.runs)):
            folder.check_code()
            if folder.exists and folder.read().get("imported"):
                raise InputError(
                    f"'{folder.path}' came as weights alone, and a comparison is of trainings: "
                    f"`{command_line('eval', folder.path)} --on TEXT` measures it."
                )
        records = load_records(args.runs)
        studies = {Path(folder).resolve().parent / "study.json" for folder in args.runs}
        one = len(studies) == 1 and min(studies).is_file()  # study of them all, which may say more
        facts = Facts.of_study(documents.read(min(studies), documents.STUDY)) if one else Facts()
        labels = {record.label for record in records}
        absent = {run["label"] for run in documents.read(min(studies), documents.STUDY)["runs"]} - labels if one else ()
        kept = [text for text in facts.remarks if text.partition(":")[0] not in absent]  # what was tuned for others
        granted, facts = facts.allowed, replace(facts, allowed=(*facts.allowed, *args.allow), remarks=tuple(kept))
        usual = facts.baseline if facts.baseline in labels else records[0].label
        how = (records, args.baseline or usual, args.confidence, facts)
        found = compare(*how)  # what is refused is so before texts are read for minutes
        left = [difference for difference in found.differences if not difference.permitted(granted)]
        refuse_unmeant(left, {record.label: record.settings for record in records}, args.allow)
        texts = evaluate_held_out(list(map(Path, args.runs)), args.held_out, quiet=args.quiet, watch=_watch(args))
        _present(compare(*how, texts) if texts else found, Path(args.out or _place_of(records)))
        return 0
    if args.recipe and not names:
        names = list(load_recipe(args.recipe).runs)
    if args.corpus:
        words.append(f"data.corpus={args.corpus}")
    if args.recipe and args.seeds is None:
        args.seeds = ",".join(map(str, load_recipe(args.recipe).about.get("seeds", [42])))
    seeds = seeds_of(args.seeds or "1")
    searched = search_of(args.tune, args.budget_tune, seeds, args.by_turns)
    if args.tune and args.slurm is not None:
        raise InputError("--tune searches here, before the runs: it does not go with --slurm.")
    watch = _watch(args)
    study = compared(
        names,
        Path(args.out) if args.out else None,
        seeds=seeds,
        words=words,
        settings={},
        plugins=args.plugin,
        watch=watch,
        dry=args.dry_run,
        **given(args, "budget", "baseline", "recipe", "allow", "match", "held_out", "jobs", "quiet"),
        **given(args, "tune", "budget_tune", "by_turns"),
    )
    search: list[RunConfig] | None = None
    if args.dry_run and args.tune:
        search = search_left(resolved(study.variants)[0], searched, args.budget_tune, study.out, args.by_turns) or None
    if search:  # otherwise it is over and has chosen the rates
        points = f"{most_points(searched, args.by_turns)} points of {', '.join(searched)}"
        where = f"by turns at up to {points}" if args.by_turns else f"at {points}"
        said = f"This includes the search: each row is first trained {where}, on about {args.budget_tune} tokens each."
        study = replace(study, facts=replace(study.facts, remarks=(said, *study.facts.remarks)))
    return _study(args, study, watch, args.held_out, search)


def _place_of(records: Sequence[RunRecord]) -> str:
    """A folder for the table of these runs and no others."""
    which = files.checksum_of({"runs": sorted(record.weights_sha256 for record in records)})
    rows = "-".join(dict.fromkeys(record.label for record in records))
    return f"runs/compare-{rows[:60]}-{which[:6]}"


def _runs_of(folder: Path) -> list[Path]:
    """The finished runs of a study, or the run itself."""
    if not (folder / "study.json").is_file():
        return [folder]
    planned = folders_of(folder, documents.read(folder / "study.json", documents.STUDY))
    return [run for run in planned if RunFolder(run).result.is_file()] or [folder]


def _watch(args: argparse.Namespace) -> Watch:
    """One time limit for all that a command does."""
    if args.max_time is not None and args.slurm is not None:
        raise InputError("--max-time is for runs that train here: Slurm's own limit is --slurm timeout_min=...")
    return Watch(None if args.max_time is None else seconds(args.max_time))


def run_sweep(args: argparse.Namespace) -> int:
    names, words = words_of(args.names)
    if len(names) != 1:
        raise InputError("A sweep is over one NAME; use --grid preset=a,b to go over architectures.")
    out = Path(args.out or f"runs/sweep-{Path(names[0]).stem}")
    study = swept(names[0], words, args.grid, out, seeds_of(args.seeds or "1"), args.allow)
    return _study(args, study, _watch(args))


def _study(
    args: argparse.Namespace,
    study: Study,
    watch: Watch,
    held_out: Sequence[str] = (),
    search: Sequence[RunConfig] | None = None,
) -> int:
    """Train what is missing, then show what there is; of a dry run, also how long the `search` before it would take."""
    if args.dry_run:
        chosen = () if search is None else ("eval_half", *(word.partition("=")[0] for word in args.tune))
        study.plan(quiet=args.quiet, here=args.slurm is None, dry=True, open_keys=chosen)
        console().print(planned_table(study, search, held_out))
        return 0
    runs = study.plan(quiet=args.quiet, here=args.slurm is None)
    if args.slurm is not None and not all(run.finished for run in runs):
        asked = dict(word.partition("=")[::2] for word in args.slurm)
        slurm = {key: int(value) if value.isdigit() else value for key, value in asked.items()}
        ids = submit(runs, study.out, slurm=slurm, plugins=args.plugin)
        print(f"submitted {len(ids)} runs ({', '.join(ids)}); the same command shows the table when they are done")
        return 0
    finished, failed = carry_out(runs, jobs=args.jobs, quiet=args.quiet, plugins=args.plugin, watch=watch)
    if failed and held_out:
        print("stepformer: held-out texts are evaluated when all runs are finished", file=sys.stderr)
    texts = evaluate_held_out(finished, [] if failed else held_out, quiet=args.quiet, watch=watch)
    return show_study(finished, failed, study.facts, args.confidence, study.out, texts)


def planned_table(study: Study, search: Sequence[RunConfig] | None, held_out: Sequence[str] = ()) -> Table:
    """What would be trained, after a search if there is one, and evaluated."""
    rows, rates = list[tuple[str, ...]](), dict[str, str]()
    variants, _ = resolved(study.variants)
    for label, config in variants.items():
        model, steps = config.model, config.train.steps
        parameters = Model(model, device="meta").num_parameters()
        numbers = (parameters, model.n_layer, model.d_model, model.context, steps, steps * config.step_tokens)
        rows.append((label, *(f"{number:,}" for number in numbers)))
        rates[label] = f"{config.optim.name}, {config.optim.schedule}: {config.optim.rates_text()}."
    told = [f"{label}: {text}" for label, text in rates.items()]
    planned = [
        (config, RunFolder(study.out / f"{label}-s{s}")) for label, config in variants.items() for s in study.seeds
    ]
    left = [config for config, folder in planned if not folder.result.is_file()]
    finished = len(planned) - len(left)
    notes = [
        f"{len(planned)} runs, {finished} of them finished: {len(rows)} rows, {seed_words(study.seeds)}.",
        f"The baseline is {study.facts.baseline}.",
        *_time_for([*(search or ()), *left]),
        *study.facts.remarks,
        *([f"When all are finished, they are evaluated once on {listed(held_out)}."] if held_out else []),
        *(["Rates before the search, which may choose others:"] if search is not None else []),
        *(told if len({*rates.values()}) > 1 else [f"All rows: {rates[study.facts.baseline]}"]),
    ]
    return of_texts(("architecture", "parameters", "layers", "width", "context", "steps", "tokens"), rows, notes=notes)


def _time_for(runs: Sequence[RunConfig]) -> list[str]:
    """A sentence on how long these runs would take here; none without a run."""
    found, how = 0.0, ""
    for config, count in Counter(runs).items():
        val = open_corpus(config.data, ALONE, quiet=True).split("val").half(config.train.eval_half)
        tokens, device = min(config.train.eval_tokens, len(val)), choose_device(config.train.device)
        expected = forecast(config, device, eval_tokens=tokens, longest=1.5)
        found, how = found + count * expected.run, expected.how
    return [f"Roughly {duration(found)} for what is left, one run after the other, {how}."] if runs else []


def show_study(
    finished: list[Path],
    failed: dict[str, str],
    facts: Facts,
    confidence: float,
    out: Path,
    texts: Sequence[HeldOut] = (),
) -> int:
    """Table and plot of what finished, and a sentence for what failed; 1 if anything did."""
    status, baseline, records = int(tell_failed(failed)), facts.baseline, load_records(finished)
    if failed:
        facts = replace(facts, remarks=(*facts.remarks, not_in_the_table(failed)))
    if records and baseline not in (labels := [record.label for record in records]):
        said = f"No run of the baseline {baseline} finished: differences are to {labels[0]}."
        baseline, facts = labels[0], replace(facts, baseline=labels[0], remarks=(*facts.remarks, said))
    if records:
        _present(compare(records, baseline, confidence, facts, texts), out)
    return status


def _present(comparison: Comparison, out: Path) -> None:
    if not first_rank():
        return
    first, *others = comparison.tables
    console().print(first)
    for table in others:
        console().print(f"\n{escape(table.caption)}\n", table)
    made = [*comparison.write(out), *drawn(plot_comparison, comparison, out / "comparison.png")]
    print(f"written: {', '.join(map(str, made))}")


def run_demo(args: argparse.Namespace) -> int:
    """A plain GPT, a Nesterov one and the recipe: same data, same start, same optimizer."""
    names, out = ("vanilla", "yurii", "glide"), Path(args.out)
    runs = plan(out, {name: run_config(name, [*DEMO, *args.overrides]) for name in names}, [42])
    tokens = runs[0].config.train.steps * runs[0].config.step_tokens
    left = [run.config for run in runs if not run.finished]
    if left:
        took = sum(forecast(config, choose_device(config.train.device)).run for config in left)
        said = f"training {listed(names)} on {tokens:,} tokens of tales each, about {duration(took)} on this machine"
        print(f"{said}; Ctrl-C saves, the same command continues", flush=True)
    else:
        print(f"{listed(names)} are trained already: runs in {out}", flush=True)
    for run in runs:
        if run.finished:
            _continued(run)
    finished, failed = carry_out(runs, jobs=1, plugins=args.plugin, after=_continued)
    status = show_study(finished, failed, Facts(baseline=names[0]), 0.95, out)
    for record in load_records(finished):
        if record.label == "glide" and record.unigram_entropy:
            entropy = f"the unigram entropy of the corpus is {record.unigram_entropy:.4f}"
            print(f"\nglide's validation loss {record.val_loss:.4f} nats/token; {entropy}")
    print(f"\ngo on: {command_line('generate', out / 'glide-s42', 'The old')} ; stepformer compare --help")
    return status


def _continued(run: Planned) -> None:
    """Text of a finished run of the demo."""
    text = "".join(continue_text(load_run(run.folder.path), DEMO_PROMPT, max_new_tokens=120, temperature=0.7, seed=0))
    print(f"\n{run.label} continues '{DEMO_PROMPT}':\n  {harmless(text.strip())}\n", flush=True)


STUDY_OPTIONS = (
    repeated("--allow KEY", "a setting that may differ between the rows although it is not of the architecture"),
    option("--seeds N|a,b,c", "how many seeds (from 42 on), or which (1; a recipe's own)"),
    option("--out DIR", "folder of all runs, table and plot (default: runs/compare-... or runs/sweep-...)"),
    JOBS,
    CONFIDENCE,
    MAX_TIME,
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
    repeated(
        "--tune KEY[,KEY]=a,b,c",
        "first the same search for every row, over values (0.01) or multiples of what it has (2x)",
    ),
    option("--budget-tune TOKENS", "tokens that each run of the search trains on"),
    option(
        "--by-turns ROUNDS",
        "search one key after the other, the rest at its best so far, in so many rounds (1), not all points",
        nargs="?",
        const=1,
        default=0,
        type=int,
    ),
    repeated("--held-out TEXT", "when all runs are finished, evaluate them once on this text (as `eval --on`)"),
    *STUDY_OPTIONS,
)

add_sweep = command(
    run_sweep,
    option("names NAME | key=value", "preset, recipe or TOML file; settings", nargs="+"),
    repeated("--grid key=a,b,c", "an axis", required=True),
    *STUDY_OPTIONS,
)

add_demo = command(
    run_demo,
    option("--out DIR", "folder (runs/demo)", default="runs/demo"),
    option("overrides key=value", "settings to change, e.g. steps=1000", nargs="*"),
)
