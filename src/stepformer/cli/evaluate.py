"""`stepformer eval`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from stepformer.base.errors import InputError
from stepformer.cli.options import CHECKPOINT, DEVICE, JSON, QUIET, RUN, check, command, given, group, option
from stepformer.cli.show import console
from stepformer.data.sources import DATASETS
from stepformer.measure import measured
from stepformer.measure.evaluation import harness, open_text, perplexity
from stepformer.measure.evaluation.tasks import data_folder, need
from stepformer.measure.evaluation.texts import OUT_OF_DOMAIN, Text
from stepformer.training import evaluate_run, load_run
from stepformer.training.run import LoadedRun


def run_eval(args: argparse.Namespace) -> int:
    check(args, "micro_batch")
    check_words(args)
    if not (args.on or args.ood or args.tasks):
        return validation_loss(args)
    run = load_run(args.folder, args.checkpoint, args.device)
    if args.tasks:
        need("lm_eval.evaluator")  # before a long text is measured
    try:
        found: dict[str, Any] = {}
        journal: measured.Journal | None = None
        if args.on or args.ood:
            found["perplexity"], journal = perplexities(args, run)
        if args.tasks:
            found["tasks"] = downstream(args, run)
        if journal is not None:
            journal.close_used()
    except KeyboardInterrupt:
        print("stepformer: interrupted; what was measured is kept, the same command continues", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps({"run": args.folder, "step": run.step, **found}))
    elif is_unfinished(run):
        print(standing(run))
    return 0


A_TEXT = "belongs to a text: say which one with --on FILE or --ood."
A_TASK = "belongs to downstream tasks: name some with --tasks."


def check_words(args: argparse.Namespace) -> None:
    """Options that would be ignored are mistakes."""
    texts, tasks = bool(args.on or args.ood), bool(args.tasks)
    named = args.ood or any(where in DATASETS for where in args.on or ())
    ignored = {
        **dict.fromkeys(("stride", "random"), (not texts, A_TEXT)),
        **dict.fromkeys(("field", "document", "split"), (not args.on, A_TEXT)),
        **dict.fromkeys(("shots", "limit"), (not tasks, A_TASK)),
        "data": (not (tasks or named), "is where tasks and named texts are: give --tasks, --ood or --on NAME as well."),
        "corpus": (texts or tasks, "is for the validation loss alone: name a text with --on."),
        "tokens": (tasks and not texts, "is for texts: a task is shortened with --limit, in items."),
    }
    if args.corpus in DATASETS and not Path(args.corpus).is_dir():
        raise InputError(f"--corpus takes a prepared corpus; held-out text of a dataset goes by --on {args.corpus}.")
    for name, (useless, sentence) in ignored.items():
        if useless and getattr(args, name) != args.parser.get_default(name):
            raise InputError(f"--{name} {sentence}")


def validation_loss(args: argparse.Namespace) -> int:
    chosen = given(args, "corpus", "tokens", "micro_batch", "device")
    found, run = evaluate_run(args.folder, which=args.checkpoint, quiet=args.quiet or args.json, **chosen)
    if args.json:
        print(json.dumps({**found.to_dict(), "perplexity": found.perplexity, "step": run.step, "run": args.folder}))
        return 0
    print(
        f"{standing(run)}: loss {found.val_loss:.4f} nats/token, perplexity "
        f"{found.perplexity:.3f}, on {found.val_tokens:,} tokens of the split {found.val_hash}{found.remark}"
    )
    return 0


def is_unfinished(run: LoadedRun) -> bool:
    return not run.folder.result.is_file() and not run.record.get("imported")


def standing(run: LoadedRun) -> str:
    """Which weights were measured; those of a run that is not finished are said to be."""
    steps = f" of {run.config.train.steps:,}, unfinished" if is_unfinished(run) else ""
    return f"{run.config.title} after step {run.step:,}{steps}"


def perplexities(args: argparse.Namespace, run: LoadedRun) -> tuple[dict[str, Any], measured.Journal]:
    """The numbers, and the journal to be closed when all the command asks for is done."""
    reading = perplexity.Reading(args.stride, args.tokens, args.random)
    enough = None if args.random else args.tokens
    named = given(args, "field", "document", "split")
    folder = data_folder(args.data)

    def opened(where: str, **words: Any) -> Text:
        here = folder if folder and (args.data or (folder / where).is_dir()) else None  # else from the Hub
        return open_text(where, run.tokenizer, enough=enough, data=here, **words)

    texts = [opened(where, **named) for where in args.on or ()]
    foreign = [opened(name) for name in OUT_OF_DOMAIN if args.ood]
    found: dict[str, Any] = {"texts": []}
    for text in (*texts, *foreign):
        reading.windows(text, run.model.config.context)  # what is too short is said at once
    journal = perplexity.journal_of(run)
    for some, mean in ((texts, False), (foreign, True)):
        if some:
            settings = {"micro_batch": args.micro_batch, "quiet": args.quiet or args.json, "journal": journal}
            made = perplexity.measure_texts(run, some, reading, mean=mean, **settings)
            found = {**made, "texts": [*found["texts"], *made["texts"]]}
    if not args.json:
        console().print(perplexity.as_table(found))
        if "mean_perplexity" in found:
            files = ", ".join(entry["source"] for entry in found["texts"][-len(foreign) :])
            print(f"mean perplexity {found['mean_perplexity']:.3f} over {files}")
        print(f"kept in {run.folder.path / measured.FOLDER / perplexity.KIND}.json")
    return found, journal


def downstream(args: argparse.Namespace, run: LoadedRun) -> dict[str, Any]:
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    if args.shots is not None and all(":" in name for name in names):
        raise InputError("--shots is for tasks without a number of their own, and all of these have one.")
    try:
        shots = None if args.shots is None else [int(word) for word in args.shots.split(",")]
    except ValueError:
        raise InputError(f"--shots {args.shots} should be a number, or several with commas: --shots 0,10.") from None
    chosen = given(args, "limit", "data", "micro_batch")
    found = harness.measure_tasks(run, names, shots=shots, quiet=args.quiet or args.json, **chosen)
    if not args.json:
        console().print(harness.as_table(found))
        for note in harness.notes(found):
            print(note)
        if len(found.get("not_kept", ())) < len(found["tasks"]):
            print(f"kept in {run.folder.path / measured.FOLDER / harness.KIND}.json")
    return found


add_eval = command(
    run_eval,
    RUN,
    option("--corpus DIR", "validation loss on another prepared corpus, same tokenizer"),
    option("--tokens N", "score at most N tokens (default: as in training; texts: all)", type=int),
    group(
        "perplexity",
        option("--on TEXT", f"files, folders, prepared corpora, or held out of {', '.join(DATASETS)}", nargs="+"),
        option("--stride N", "sliding window, N tokens further each time (no: blocks)", type=int),
        option("--ood", "out of domain: wikitext, lambada and c4, and their mean"),
        option("--random", "1,600 random windows as in the momentum-streams paper"),
        option("--field NAME", "field of a row that holds the text (text)"),
        option("--document RULE", "how a .txt is cut: auto, file, line or paragraph (auto)"),
        option("--split", "of a prepared corpus (val)", choices=("train", "val"), default="val"),
    ),
    group(
        "downstream tasks",
        option("--tasks NAME[:SHOTS],...", "of lm-evaluation-harness, or YAML files: hellaswag:10,piqa"),
        option("--shots N[,N]", "examples in the prompt (hellaswag 10, arc 25, else the task's)"),
        option("--limit N", "the first N items of each task, to try it out", type=int),
    ),
    option("--data DIR", "folder with hellaswag/, arc/, lambada/, wikitext/, c4/, ... ($STEPFORMER_DATA/eval)"),
    option("--micro-batch N", "sequences at once (8)", type=int, default=8),
    CHECKPOINT,
    DEVICE,
    JSON,
    QUIET,
)
