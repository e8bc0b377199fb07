"""`stepformer eval`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepformer.base.errors import InputError
from stepformer.cli.hybrids import HYBRID, Row, as_table, hybrids, over_hybrids
from stepformer.cli.hybrids import KIND as TABLE
from stepformer.cli.options import CHECKPOINT, DEVICE, JSON, QUIET, check, command, given, group, option, tell_faults
from stepformer.cli.show import console
from stepformer.data.sources import DATASETS
from stepformer.measure import measured
from stepformer.measure.evaluation import harness, open_text, perplexity
from stepformer.measure.evaluation.tasks import data_folder, need
from stepformer.measure.evaluation.texts import OUT_OF_DOMAIN, Text
from stepformer.training import load_run
from stepformer.training.corpora import corpora_of, is_there, part_of_corpus, shares_passages
from stepformer.training.evaluation import Evaluation
from stepformer.training.loading import LoadedRun, validation_loss


def run_eval(args: argparse.Namespace) -> int:
    check(args, "micro_batch")
    if args.folder is None and len(args.on or ()) > 1 and Path(args.on[-1], "run.json").is_file():
        args.folder = args.on.pop()  # `eval --on TEXT RUN`
    if args.folder is None:
        raise InputError("Which run? Name its folder: `stepformer eval RUN --on TEXT`.")
    check_words(args)
    run = load_run(args.folder, args.checkpoint, args.device)
    tell_faults(args.folder, run.model.config)
    if args.tasks:
        need("lm_eval.evaluator")  # before a long text is measured
    chosen = hybrids(args, run)
    args.several = len(chosen) > 1
    run = chosen[0] if len(chosen) == 1 else run
    if not (args.several or args.on or args.ood or args.tasks):
        return show_loss(args, run)
    try:
        if args.several:
            return choices_of_layers(args, run)
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
        print(json.dumps({"run": args.folder, "step": run.known_step, **measured.variant_of(run.model), **found}))
    elif is_unfinished(run) or _is_early(run):
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


def choices_of_layers(args: argparse.Namespace, run: LoadedRun) -> int:
    """A table of what is asked for over choices of the layers that have momentum."""

    def measure(run: LoadedRun) -> Row:
        row: Row = {}
        if not (args.on or args.ood or args.tasks):
            loss = own_loss(args, run)
            row |= {"tokens": loss.val_tokens, "split": loss.val_hash, "loss": loss.val_loss}
        if args.on or args.ood:
            found, journal = perplexities(args, run)
            row |= {f"perplexity of {entry['name']}": entry["perplexity"] for entry in found["texts"]}
            journal.close_used()
        for key, entry in downstream(args, run)["tasks"].items() if args.tasks else ():
            name = "acc_norm" if "acc_norm" in entry else "acc"
            row |= {f"{key} {name} %": 100 * entry[name]} if name in entry else {}
        return row

    rows = over_hybrids(args, run, measure)
    if args.json:
        print(json.dumps({"run": args.folder, "step": run.known_step, "rows": rows}))
    else:
        console().print(as_table(rows))
        print(f"{standing(run)}; kept in {measured.file(run.folder.path, TABLE)}")
    return 0


def own_loss(args: argparse.Namespace, run: LoadedRun) -> Evaluation:
    return validation_loss(run, quiet=args.quiet or args.json, **given(args, "corpus", "tokens", "micro_batch"))


def show_loss(args: argparse.Namespace, run: LoadedRun) -> int:
    found = own_loss(args, run)
    if args.json:
        about = {
            "perplexity": found.perplexity,
            "step": run.known_step,
            "run": args.folder,
            **measured.variant_of(run.model),
        }
        print(json.dumps(found.to_dict() | about))
        return 0
    print(
        f"{standing(run)}: loss {found.val_loss:.4f} nats/token, perplexity "
        f"{found.perplexity:.3f}, on {found.val_tokens:,} tokens of the split {found.val_hash}{found.remark}"
    )
    return 0


def is_unfinished(run: LoadedRun) -> bool:
    return not run.folder.result.is_file() and not run.record.get("imported")


def _is_early(run: LoadedRun) -> bool:
    """Whether a finished run was better before its end: the best weights are read."""
    return run.folder.result.is_file() and run.step < run.config.train.steps


def standing(run: LoadedRun) -> str:
    """Which weights were measured; those of a run that is not finished are said to be."""
    early = "its best weights (--checkpoint last: those of the end)" if _is_early(run) else ""
    later = f", its best weights (--checkpoint last: after step {run.newest:,})" * (run.newest > run.step)
    state = f"unfinished{later}" if is_unfinished(run) else early
    steps = f" of {run.config.train.steps:,}, {state}" * bool(state)
    variant = measured.called(run.model)
    when = f"after step {run.step:,}{steps}" if run.known_step is not None else "as imported"
    return f"{run.config.title}{f', {variant},' if variant else ''} {when}"


def perplexities(args: argparse.Namespace, run: LoadedRun) -> tuple[dict[str, Any], measured.Journal]:
    """The numbers, and the journal to be closed when all the command asks for is done."""
    reading = perplexity.Reading(args.stride, args.tokens, args.random)
    enough = None if args.random else args.tokens
    named = given(args, "field", "document", "split")
    folder = data_folder(args.data)

    def opened(where: str, **words: Any) -> Text:
        here = folder if folder and (args.data or (folder / where).is_dir()) else None  # else from the Hub
        return open_text(where, run.tokenizer, enough=enough, data=here, **words)

    corpora = corpora_of(run.record)
    gone = [str(corpus.get("folder")) for corpus in corpora if not is_there(corpus)]
    texts = []
    for where in args.on or ():
        text = opened(where, **named)
        known = any(part_of_corpus(where, corpus) or shares_passages(text.tokens, corpus) for corpus in corpora)
        texts.append(replace(text, seen=known or (None if gone else False)))
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
    if seen := [where for where, text in zip(args.on or (), texts, strict=True) if text.seen]:
        print(f"note: the run was trained or validated on {', '.join(seen)}", file=sys.stderr)
    if unknown := [where for where, text in zip(args.on or (), texts, strict=True) if text.seen is None]:
        told = f"whether the run was trained on {', '.join(unknown)} is not known"
        print(f"note: {told}: its corpus is not in {', '.join(gone)} any more", file=sys.stderr)
    if not (args.json or args.several):
        console().print(perplexity.as_table(found))
        if "mean_perplexity" in found:
            files = ", ".join(entry["source"] for entry in found["texts"][-len(foreign) :])
            print(f"mean perplexity {found['mean_perplexity']:.3f} over {files}")
        print(f"kept in {measured.file(run.folder.path, measured.kind_of(perplexity.KIND, run.model))}")
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
    if not (args.json or args.several):
        console().print(harness.as_table(found))
        for note in harness.notes(found):
            print(note)
        if len(found.get("not_kept", ())) < len(found["tasks"]):
            print(f"kept in {measured.file(run.folder.path, measured.kind_of(harness.KIND, run.model))}")
    return found


add_eval = command(
    run_eval,
    option("folder RUN", "run folder", nargs="?"),
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
    HYBRID,
    option("--micro-batch N", "sequences at once (8)", type=int, default=8),
    CHECKPOINT,
    DEVICE,
    JSON,
    QUIET,
)
