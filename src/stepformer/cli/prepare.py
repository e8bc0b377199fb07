"""`stepformer prepare`: a corpus of tokens from the tales, files or a dataset."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from stepformer.base.errors import command_line, named
from stepformer.catalogue import SIZES
from stepformer.cli.options import command, given, option
from stepformer.cli.show import console
from stepformer.data.corpus import FEW_WINDOWS, MANIFEST, Corpus, corpus_folder, few
from stepformer.data.opening import open_source
from stepformer.data.pieces import Progress
from stepformer.data.prepare import prepare
from stepformer.data.readers import DOCUMENT_RULES
from stepformer.data.sources import TALES_COUNT
from stepformer.present.tables import of_texts
from stepformer.training.corpora import checked


def run_prepare(args: argparse.Namespace) -> int:
    words = ("dialect", "count", "seed", "field", "val_field", "document", "local", "revision", "split", "limit")
    source = open_source(*args.source, **given(args, *words))
    tokenizer = args.tokenizer or ("bpe:1024" if args.source == ["tales"] else "gpt2")
    out = args.out or corpus_folder(source.name, tokenizer)
    reused = (out / MANIFEST).exists() and not args.force
    try:
        with progress_bar() as report:
            corpus = prepare(source, tokenizer, out, progress=report, **given(args, "val_fraction", "workers", "force"))
        if args.verify:
            corpus.verify()
        elif reused:
            checked(corpus)
    except KeyboardInterrupt:
        print("stepformer: interrupted; the same command continues where it stopped.", file=sys.stderr)
        return 130
    if reused:
        print("unchanged: this corpus was prepared before, of the same source with the same settings, and is reused")
    print_corpus(console(), corpus)
    if others := getattr(source, "passed_over", {}):
        counts = ", ".join(f"{count:,} {ending}" for ending, count in [*others.items()][:4])
        told = "a file that is named itself is read as text, whatever it is called"
        print(f"note: not read in {named(args.source)}: {counts}; {told}")
    if args.verify:
        print("all checksums agree")
    return 0


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None] | None]:
    """A bar on standard error, or nothing where that is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    amounts = "{task.fields[documents]:,} documents  {task.fields[tokens]:,} tokens  {task.fields[rate]:.1f} MB/s"
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(amounts), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None, documents=0, tokens=0, rate=0.0)
        begun: list[tuple[float, int]] = []  # time and bytes at the first report: parts found finished do not count

        def report(now: Progress) -> None:
            if not begun:
                begun.append((bar.get_time(), now.bytes))
            seconds = bar.get_time() - begun[0][0]
            rate = (now.bytes - begun[0][1]) / 1e6 / seconds if seconds > 0 else 0.0
            total = now.total_bytes if now.total_bytes and now.total_bytes > now.bytes else None
            shown: dict[str, Any] = {"documents": now.documents, "tokens": now.tokens, "rate": max(0.0, rate)}
            bar.update(task, description=now.stage, completed=now.bytes, total=total, **shown)

        yield report


def print_corpus(out: Console, corpus: Corpus) -> None:
    rows = []
    for name, split in corpus.manifest["splits"].items():
        per_byte = split["tokens"] / split["bytes"] if split["bytes"] else 0.0
        facts = (f"{split['documents']:,}", f"{split['tokens']:,}", f"{per_byte:.3f}", f"{split['entropy']:.3f} nats")
        rows.append((name, *facts, split["hash"]))
    tokenizer = corpus.manifest["tokenizer"]
    out.print(f"[bold]{corpus.name}[/bold] with tokenizer {tokenizer['name']} ({tokenizer['vocab_size']:,} ids)")
    out.print(of_texts(("split", "documents", "tokens", "tokens per byte", "unigram entropy", "hash"), rows))
    rule = corpus.manifest["split_rule"]
    meaning = rule["meaning"].replace("val_fraction", f"{100 * rule['val_fraction']:g} %")
    out.print(f"split: {meaning}", soft_wrap=True, markup=False)
    made = corpus.manifest["source"].get("kind") == "tokens"  # by another program, whose tokenizer it is
    if not corpus.manifest["splits"]["val"]["tokens"]:
        how = (
            "a file with 'val' in its name makes one"
            if made
            else "more text or a larger --val-fraction makes one (with --force)"
        )
        out.print(f"Nothing can be trained on this corpus: it has no validation text; {how}.", soft_wrap=True)
    if not made and few(tokens := corpus.manifest["splits"]["train"]["tokens"], tokenizer["vocab_size"]):
        few_words = f"note: {tokens:,} training tokens are few for {tokenizer['vocab_size']:,} ids"
        out.print(f"{few_words}: --tokenizer bpe:1024 or bytes suits so short a text better.", soft_wrap=True)
    splits, context = corpus.manifest["splits"], SIZES["tiny"]["context"]
    kind, _, asked = tokenizer["name"].partition(":")
    if kind == "bpe" and tokenizer["vocab_size"] < int(asked):
        why = "the text it was trained on has no more pairs to join: each of its words is one id"
        out.print(f"note: the tokenizer has {tokenizer['vocab_size']:,} ids, for {why}", soft_wrap=True)
    if 0 < splits["val"]["tokens"] < FEW_WINDOWS * context:
        more = "" if rule["rule"] == "marked" else "; a larger --val-fraction (with --force) gives it more"
        few_words = f"note: {splits['val']['tokens']:,} validation tokens are few, so losses on them are noisy"
        out.print(f"{few_words}{more}", soft_wrap=True)
    out.print(f"folder: {corpus.folder}", soft_wrap=True, markup=False)
    fits = min(splits["train"]["tokens"] // 2, splits["val"]["tokens"] - 1)  # the longest context that can be trained
    if fits > 0:
        shorter = [f"context={1 << fits.bit_length() - 1}"] if fits < context else []
        train = command_line("train", "glide", f"corpus={corpus.folder}", *shorter)
        out.print(f"train on it: {train}", soft_wrap=True, markup=False)


add_prepare = command(
    run_prepare,
    option("source SOURCE", "tales, paths, a short name or hf:OWNER/NAME", nargs="+"),
    option(
        "--tokenizer KIND|DIR",
        "gpt2 (or gpt2:FOLDER with its files), bytes, bpe:N trained on this corpus, or the folder of a run or a "
        "corpus whose tokenizer is used (default: gpt2; bpe:1024 for tales)",
    ),
    option("--out DIR", "folder of the corpus (default: data/NAME-TOKENIZER)", type=Path),
    option("--dialect D", "tales: village or space"),
    option("--count N", f"tales: number of stories (default: {TALES_COUNT:,})", type=int),
    option("--seed S", "tales: other stories (default: 0)", type=int),
    option("--field F", "rows: the field with the text (default: text)"),
    option("--val-field F", "rows: a true/false field that marks validation documents"),
    option(
        "--document",
        ".txt and .md: what a document is (default: auto, what stands between <|endoftext|> lines, else the file)",
        choices=DOCUMENT_RULES,
    ),
    option("--local DIR", "dataset: its files are in this folder, laid out as on the Hub; no network"),
    option("--revision R", "dataset: a commit, tag or branch of it"),
    option("--split S", "dataset: read this split alone, e.g. train; validation is a part of it"),
    option("--limit N", "read only the first N documents (of each split)", type=int),
    option(
        "--val-fraction X",
        "share of validation (default: 0.05, tales 0.02); not for a source that marks its validation documents",
        type=float,
    ),
    option("--workers N", "processes (default: one per core, 1 if it is little)", type=int),
    option("--verify", "read all shards again and compare their checksums"),
    option("--force", "replace another corpus in the folder; runs trained on that one cannot be resumed"),
)
