"""Perplexity of a run on any text: in blocks as in training, with a sliding window, or on random windows.

blocks    full blocks of `context` tokens from the first token on; the remainder is dropped (what `eval` alone does)
sliding   windows `stride` apart: the first scores all its tokens, each later one those that are new, so that every
          token but the first is scored once, and after the first window with at least context - stride before it
random    windows of `context` tokens at random places, which may overlap; the protocol of the momentum-streams paper

The first token of a window is context only: nothing precedes it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepformer.base.errors import InputError
from stepformer.base.progress import counting, say
from stepformer.measure import measured
from stepformer.measure.evaluation.scoring import Part, Scorer, about_run, scorer_of
from stepformer.measure.evaluation.texts import Text, count_bytes, token_hash
from stepformer.present.tables import Table, of_texts
from stepformer.training.loading import LoadedRun

KIND = "perplexity"
PIECE_WINDOWS = 32  # windows between two lines of the journal
SEEN = "* The run was trained or validated on this text."  # of an entry whose name has the asterisk
RANDOM_WINDOWS, RANDOM_SEED = 200 * 8, 0
Window = tuple[int, int, int]  # where it begins and ends in the text, and how many of its last tokens are scored


@dataclass(frozen=True)
class Reading:
    """How a text is read. `tokens`: at most so many are scored; None: all."""

    stride: int | None = None
    tokens: int | None = None
    random: bool = False

    def __post_init__(self) -> None:
        for name, value in (("stride", self.stride), ("tokens", self.tokens)):
            if value is not None and value < 1:
                raise InputError(f"{name} = {value} should be at least 1.")
        if self.random and self.stride is not None:
            raise InputError("Random windows have no stride: give one or the other.")

    @property
    def mode(self) -> str:
        return "random" if self.random else "blocks" if self.stride is None else "sliding"

    def windows(self, text: Text, context: int) -> list[Window]:
        """Every window of a text."""
        limit = min(len(text) - 1, math.inf if self.tokens is None else self.tokens)
        if self.stride is not None:
            if self.stride > context:
                raise InputError(f"stride = {self.stride} should be at most {context}, the model's context.")
            if limit < 1:
                raise InputError(f"The text '{text.name}' has {len(text)} tokens: at least 2 are needed.")
            return sliding_windows(int(limit), context, self.stride)
        if limit < context:
            raise InputError(
                f"The text '{text.name}' has {len(text):,} tokens"
                + ("" if self.tokens is None else f" and {self.tokens:,} were asked for")
                + f": too few for one block of {context}; `eval --stride` scores shorter texts, by a sliding window."
            )
        if self.random:
            count = RANDOM_WINDOWS if self.tokens is None else max(1, self.tokens // context)
            draw = np.random.Generator(np.random.PCG64(RANDOM_SEED))
            starts = draw.integers(0, max(1, len(text) - context - 2), size=count).tolist()  # as the paper's code does
        else:
            starts = [block * context for block in range(int(limit) // context)]
        return [(start, start + context + 1, context) for start in starts]


def sliding_windows(limit: int, context: int, stride: int) -> list[Window]:
    """Windows that score the tokens 1 to `limit`, each once."""
    windows = [(0, min(context, limit) + 1, min(context, limit))]
    while (end := windows[-1][1]) <= limit:
        begin = windows[-1][0] + stride
        new = min(stride, limit + 1 - end)
        windows.append((begin, end + new, new))
    return windows


def measure_texts(
    run: LoadedRun,
    texts: Sequence[Text],
    reading: Reading,
    *,
    mean: bool = False,
    micro_batch: int = 8,
    quiet: bool = False,
    journal: measured.Journal | None = None,
) -> dict[str, Any]:
    """Perplexities of a run, kept in RUN/measured/perplexity.json beside those of other texts; `mean`: also theirs.

    `journal` is one of `journal_of` for a caller who has more to measure, would continue all of it after Ctrl-C, and
    closes it in the end.
    """
    scorer = scorer_of(run, micro_batch)
    windows = [reading.windows(text, run.model.config.context) for text in texts]  # what is too short is said at once
    notes = journal or journal_of(run)
    found = []
    for text, places in zip(texts, windows, strict=True):
        nats = total_nats(scorer, text, places, notes, quiet=quiet)
        found.append(entry_of(text, reading, places, nats, run))
    result: dict[str, Any] = {"texts": found}
    if mean:
        result["mean_perplexity"] = math.fsum(entry["perplexity"] for entry in found) / len(found)
        how = reading.mode if reading.stride is None else f"{reading.mode} {reading.stride}"
        result["protocol"] = f"mean over {', '.join(text.name for text in texts)}; {how}"
    save_texts(run, result)
    if journal is None:
        notes.close_used()
    return result


def journal_of(run: LoadedRun) -> measured.Journal:
    """What was found so far with these weights."""
    return measured.journal(run.folder.path, measured.kind_of(KIND, run.model), about_run(run))


def total_nats(
    scorer: Scorer, text: Text, windows: Sequence[Window], notes: measured.Journal | None = None, *, quiet: bool = True
) -> float:
    """The sum of -ln p over all scored tokens."""
    name, journal = token_hash(text.tokens), notes or measured.Journal()

    def nats(some: Sequence[Window]) -> float:
        parts = [Part(text.tokens[begin:end].tolist(), count) for begin, end, count in some]
        sums = [
            float(score.log_probabilities.sum())
            for batch in scorer.batches(parts)
            for score in scorer.score([parts[i] for i in batch])
        ]
        return -math.fsum(sums)

    cut = [windows[begin : begin + PIECE_WINDOWS] for begin in range(0, len(windows), PIECE_WINDOWS)]
    pieces = {f"{name}/{some[0]}/{some[-1]}/{len(some)}": some for some in cut}
    scored = {piece: sum(count for _, _, count in some) for piece, some in pieces.items()}
    kept = sum(scored[piece] for piece in pieces if piece in journal.pieces and piece not in journal.used)
    say(f"{text.name} continues: {kept:,} of {sum(scored.values()):,} tokens were kept", quiet=quiet or not kept)
    total = []
    with counting(text.name, sum(scored.values()), quiet=quiet) as count:
        for piece, some in pieces.items():
            total.append(float(journal.get(piece, functools.partial(nats, some))))
            count(scored[piece])
    return math.fsum(total)


def entry_of(text: Text, reading: Reading, windows: Sequence[Window], nats: float, run: LoadedRun) -> dict[str, Any]:
    """A number with what it was measured on. Two may be compared when tokens, hash, mode and stride agree."""
    scored = np.concatenate([text.tokens[end - count : end] for _, end, count in windows])  # as often as they are
    size = count_bytes(run.tokenizer, scored)
    return {
        "name": text.name,
        "source": text.source,
        "mode": reading.mode,
        "stride": reading.stride,
        "nats": nats / len(scored),
        "perplexity": math.exp(min(nats / len(scored), 700.0)),  # bounded, so that JSON has a word for it
        "bits_per_byte": nats / math.log(2) / size if size else None,
        "tokens": len(scored),
        "bytes": size,
        "hash": token_hash(scored),
        "seen": text.seen,
    }


def marked_name(entry: Mapping[str, Any]) -> str:
    """The name of a text, with a mark if it is no test of the run."""
    return f"{entry.get('name', '')}{' *' if entry.get('seen') is True else ''}"


def save_texts(run: LoadedRun, result: Mapping[str, Any]) -> None:
    """Keep the numbers, beside those of the same weights on other texts or read in other ways."""
    settings, kind = about_run(run), measured.kind_of(KIND, run.model)
    earlier = measured.load(run.folder.path, kind, own=False)
    kept = earlier["result"] if earlier and earlier["settings"] == settings else {"texts": []}
    identity = operator.itemgetter("name", "mode", "stride", "hash")
    names = [identity(entry) for entry in result["texts"]]
    others = [entry for entry in kept["texts"] if identity(entry) not in names]
    known = {identity(entry): entry.get("seen") for entry in kept["texts"]}  # while its corpus was there
    texts = [e if e["seen"] is not None else {**e, "seen": known.get(identity(e))} for e in result["texts"]]
    whole = {**kept, **result, "texts": [*others, *texts]}
    measured.save(run.folder.path, kind, step=run.step, settings=settings, result=whole)


def as_table(result: Mapping[str, Any]) -> Table:
    """A line for every text."""
    titles = ("text", "read in", "nats/token", "perplexity", "bits/byte", "tokens", "bytes", "hash")
    rows = []
    for entry in result["texts"]:
        mode = entry["mode"] if entry["stride"] is None else f"{entry['mode']} {entry['stride']}"
        per_byte = "" if entry["bits_per_byte"] is None else f"{entry['bits_per_byte']:.4f}"
        amounts = (f"{entry['nats']:.4f}", f"{entry['perplexity']:.3f}", per_byte)
        rows.append((entry["name"], mode, *amounts, f"{entry['tokens']:,}", f"{entry['bytes']:,}", entry["hash"]))
    return of_texts(titles, rows, words=("read in", "hash"))
