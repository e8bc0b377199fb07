"""The pieces of a corpus in the making: which split a text belongs to, its tokens, and the file that keeps them."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import types
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepformer.base import files
from stepformer.base.errors import InputError
from stepformer.data.corpus import SPLITS
from stepformer.data.readers import Document, Split
from stepformer.data.tokenizers import Tokenizer, load_tokenizer

PIECE_CHARACTERS, PIECE_SEGMENTS = 2_000_000, 2000
RULES = {
    "marked": "as the source says; documents it leaves open by the sha256 of their text",
    "hash": "validation if the sha256 of the text, as a fraction, is below val_fraction",
    "tail": "fewer than 100 documents: the end of each, val_fraction of its characters, is validation",
}


@dataclass(frozen=True)
class Progress:
    """How far a preparation is; `total_bytes` is an estimate, None if there is none."""

    stage: str  # "training the tokenizer", "tokenising" or "writing shards"
    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    total_bytes: int | None = None


class Segment(NamedTuple):
    """A document, or a piece of a very long one."""

    split: Split
    text: str
    ends: bool  # is this the end of its document?


class Tokens(NamedTuple):
    """Ready-made tokens, end of text included."""

    split: Split
    ids: NDArray[Any]


Counts = dict[str, dict[str, int]]  # {split: number} for documents, bytes and tokens
Encoded = tuple[Counts, dict[str, NDArray[Any]]]  # the counts of a piece and the tokens of each split


def divide(document: Document, rule: str, val_fraction: float) -> list[tuple[Split, str]]:
    """The split of a document; under the rule `tail`, its two parts. Depends on nothing but the document."""
    text = document.text
    if document.split is not None:
        return [(document.split, text)]
    if rule == "tail":
        cut = _tail(text, val_fraction)
        return [("train", text[:cut]), ("val", text[cut:])] if cut < len(text) else [("train", text)]
    share = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    return [("val" if share < val_fraction else "train", text)]


def _tail(text: str, fraction: float) -> int:
    """Where the last `fraction` of a text begins: after a line, else before a word, else at any character."""
    tail = round(len(text) * fraction)
    cut = len(text) - tail
    low = max(1, cut - tail // 2)
    line = text.rfind("\n", low, cut) + 1
    word = text.rfind(" ", low, cut + 1)
    cut = line if line > low else word if word >= low else cut
    return cut if text[:cut].strip() and text[cut:].strip() else len(text)


_SEAM = re.compile(r"(?<=\S)[ \n](?=\S)")


def segments_of(text: str, limit: int) -> list[str]:
    """A very long text in segments of at most `limit` characters.

    They are cut before a single space or line end, where GPT-2's pattern cuts as well, so that the tokens are those of
    the whole text. Only a text with no such place within the last 10,000 characters of a segment is cut anywhere.
    """
    found = []
    start = 0
    while len(text) - start > limit:
        end = start + limit
        for seam in _SEAM.finditer(text, max(start + 1, end - 10_000), end):
            end = seam.start()
        found.append(text[start:end])
        start = end
    return [*found, text[start:]]


def none_yet() -> Counts:
    return {what: dict.fromkeys(SPLITS, 0) for what in ("documents", "bytes", "tokens")}


def add(totals: Counts, part: Mapping[str, Any]) -> None:
    for what, split in itertools.product(totals, SPLITS):
        totals[what][split] += part[what][split]


def dtype_of(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype("<u2" if tokenizer.vocab_size <= 65_536 else "<u4")


def encode(tokenizer: Tokenizer, segments: list[Segment] | Tokens) -> Encoded:
    """The tokens of a piece, each document followed by end of text."""
    counts = none_yet()
    if isinstance(segments, Tokens):
        split, found = segments
        lengths = np.array([len(tokenizer.piece(token)) for token in range(tokenizer.vocab_size)])
        lengths[tokenizer.eot] = 0
        counts["bytes"][split] = int(lengths[found].sum())
        counts["documents"][split] = int((found == tokenizer.eot).sum())
        counts["tokens"][split] = len(found)
        return counts, {name: found if name == split else found[:0] for name in SPLITS}
    ids: dict[str, list[int]] = {split: [] for split in SPLITS}
    for segment, tokens in zip(segments, tokenizer.encode_batch([s.text for s in segments]), strict=True):
        ids[segment.split] += tokens
        counts["bytes"][segment.split] += len(segment.text.encode())
        if segment.ends:
            ids[segment.split].append(tokenizer.eot)
            counts["documents"][segment.split] += 1
    counts["tokens"] = {split: len(ids[split]) for split in SPLITS}
    return counts, {split: np.array(ids[split], dtype=dtype_of(tokenizer)) for split in SPLITS}


def write_part(path: Path, encoded: Encoded, last: bool) -> dict[str, Any]:
    """Keep the tokens of a piece: a line with its counts, then the tokens of each split."""
    counts, tokens = encoded
    header = {**counts, "last": last}
    with files.writing(path) as file:
        file.write(json.dumps(header, sort_keys=True).encode() + b"\n")
        for split in SPLITS:
            file.write(tokens[split].tobytes())
    return header


def read_part(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The header of a part and, as views of the file, its tokens."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline())
            start = file.tell()
        tokens = header["tokens"]
        number = sum(tokens[split] for split in SPLITS)
        width = (path.stat().st_size - start) // number if number else 2
        if width not in (2, 4) or path.stat().st_size != start + number * width:
            raise ValueError
    except (OSError, ValueError, KeyError):
        raise InputError(f"The unfinished part '{path}' is damaged: delete it and prepare again.") from None
    found = np.memmap(path, f"<u{width}", "r", start, (number,)) if number else np.zeros(0, "<u2")
    return header, {"train": found[: tokens["train"]], "val": found[tokens["train"] :]}


def start_workers(number: int, tokenizer: Path) -> ProcessPoolExecutor:
    """Processes that tokenise. Unlike a `Pool` this notices when one of them is killed."""
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of torch and tokenizers
    pool = ProcessPoolExecutor(number, context, initializer=_start_worker, initargs=(str(tokenizer),))
    # Ctrl-C reaches every process of a terminal. The workers inherit that it is blocked; the first process decides.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    safe = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"  # `python -c`, as workers start, would import from the current folder
    # Workers begin with the program that started them, which may be a script without `if __name__ == "__main__"` and
    # would run once more in each. They need nothing of it.
    program, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        for _ in range(number):  # each starts one worker
            pool.submit(int)
    finally:
        sys.modules["__main__"] = program
        os.environ.pop("PYTHONSAFEPATH") if safe is None else os.environ.update(PYTHONSAFEPATH=safe)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pool


_worker: list[Tokenizer] = []


def _start_worker(tokenizer: str) -> None:
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _worker.append(load_tokenizer(tokenizer))


def _leave_with_parent() -> None:
    """A worker would wait for work forever if its parent were killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def encode_in_worker(segments: list[Segment] | Tokens) -> Encoded:
    return encode(_worker[0], segments)
