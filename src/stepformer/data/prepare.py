"""From documents to a corpus: split, tokenise in pieces, put the pieces together.

The pieces and their order depend on the source alone. Each becomes a part file, whole or absent, so a killed job goes
on with what is missing, and the corpus is the same bytes for any number of workers and interruptions. The manifest is
written last: a folder without one is not a corpus.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepformer.base import documents, files
from stepformer.base.errors import InputError, StepformerError, StepformerWarning, named
from stepformer.base.version import __version__
from stepformer.data import pieces
from stepformer.data.corpus import MANIFEST, SPLITS, TOKENIZER, Corpus, entropy, read_manifest
from stepformer.data.pieces import PIECE_CHARACTERS, PIECE_SEGMENTS, RULES, Counts, Encoded, Progress, Segment, Tokens
from stepformer.data.sources import Source, file_changes
from stepformer.data.token_files import TokenFiles
from stepformer.data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer, tokenizer_kind, tokenizer_name

PARTS = ".parts"
LOCK = ".lock"
BPE_SAMPLE = 20_000_000  # characters of training text that a BPE is trained on
SMALL_SOURCE = 20_000_000  # bytes below which starting processes costs more than it gains
FEW_DOCUMENTS = 100
MOST_RUNS = 10  # that are named


def prepare(
    source: Source,
    tokenizer_spec: str,
    out: str | Path,
    *,
    val_fraction: float | None = None,
    workers: int | None = None,
    shard_tokens: int = 100_000_000,
    progress: Callable[[Progress], None] | None = None,
    force: bool = False,
) -> Corpus:
    """Prepare a corpus in `out`, or continue there, or return it at once if it is finished.

    Args:
        source: What `open_source` gives.
        tokenizer_spec: "bytes", "bpe:4096", "gpt2", "gpt2:FOLDER" with its files, or the folder of a corpus or a run.
        out: The folder of the corpus.
        val_fraction: The part of the documents that is validation text, where the source does not say which is.
        workers: Processes; by default as many as there are cores, one for a small source.
        shard_tokens: Tokens in a file.
        progress: Called with what has been done.
        force: Replace a finished corpus; the old one is kept until the new one has been tokenised.
    """
    if not isinstance(source, Source):
        raise InputError(f"`prepare` takes what `open_source` gives, not {type(source).__name__}.")
    if tokenizer_kind(tokenizer_spec)[0] == "bpe" and isinstance(source, TokenFiles):
        raise InputError(
            f"'{source.name}' has tokens and no text to train '{tokenizer_spec}' on: name the tokenizer that made "
            "them, gpt2 or the folder of a run or a corpus."
        )
    asked = val_fraction is not None
    val_fraction = source.val_fraction if val_fraction is None else val_fraction
    if not 0 <= val_fraction < 1:
        raise InputError(f"The validation fraction must be at least 0 and below 1, not {val_fraction}.")
    if shard_tokens < 1:
        raise InputError(f"A shard must hold at least 1 token, not {shard_tokens}.")
    if workers is None:
        small = source.approximate_bytes is not None and source.approximate_bytes < SMALL_SOURCE
        mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        workers = 1 if small else mine or 1
    if workers < 1:
        raise InputError(f"The number of workers must be at least 1, not {workers}.")
    job = Job(source, tokenizer_spec, Path(out), val_fraction, shard_tokens, progress, asked)
    kept = (job.out / MANIFEST).exists() and not force
    if kept and not job.parts.exists():
        return job.finished()  # a finished corpus may lie where nothing can be written
    with locked(job.out):
        if (job.out / MANIFEST).exists() and not force:
            corpus = job.finished()
            shutil.rmtree(job.parts, ignore_errors=True)
            return corpus
        job.begin()
        job.encode(workers)
        job.assemble()
    corpus = Corpus(job.out)
    if force and (lost := [run for run, same in runs_of(job.out, corpus.manifest).items() if not same]):
        which = f"{named(lost, MOST_RUNS)} cannot be resumed or evaluated on it"
        said = f"'{job.out}' has other tokens than when these runs began: {which}."
        warnings.warn(said, StepformerWarning, stacklevel=2)
    return corpus


def shared_tokenizer(sources: Sequence[Source], tokenizer_spec: str, folder: Path) -> Tokenizer:
    """One tokenizer for several corpora, saved in `folder`: a BPE is trained on equal shares of their training text."""

    def texts() -> Iterator[str]:
        for source in sources:
            job = Job(source, tokenizer_spec, folder, source.val_fraction, 1)
            job.pinned = source.pin({})
            job.rule = job.choose_rule()
            yield from job.sample(BPE_SAMPLE // len(sources))

    tokenizer = make_tokenizer(tokenizer_spec, texts)
    tokenizer.save(folder)
    return tokenizer


def runs_of(folder: Path, manifest: Mapping[str, Any]) -> dict[Path, bool]:
    """The runs below `runs/` whose corpus is in this folder, and whether its tokens are those that they read."""
    found = {}
    for path in sorted(path for depth in ("*", "*/*", "*/*/*") for path in Path("runs").glob(f"{depth}/run.json")):
        with contextlib.suppress(StepformerError):  # a damaged one is told by who reads it
            record = documents.read(path, documents.RUN)
            for facts in filter(None, (record.get("corpus"), *record.get("also", {}).values())):
                if Path(facts["folder"]) == folder.resolve():
                    was, now = ({name: s["hash"] for name, s in of["splits"].items()} for of in (facts, manifest))
                    found[path.parent] = was == now
    return found


def locked(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Keep a second process out of the folder."""
    return files.held(folder, LOCK, f"Another process is preparing the corpus in '{folder}'; wait for it.")


@dataclass
class Job:
    """One preparation: what it depends on, and its state on disk."""

    source: Source
    spec: str
    out: Path
    val_fraction: float
    shard_tokens: int
    progress: Callable[[Progress], None] | None = None
    asked: bool = False  # was the fraction given?

    def __post_init__(self) -> None:
        self.parts = self.out / PARTS
        self.settings = {
            "source": self.source.description,
            "tokenizer": tokenizer_name(self.spec),
            "val_fraction": self.val_fraction,
            "shard_tokens": self.shard_tokens,
        }
        recipe = [self.settings, documents.CORPUS.format, PIECE_CHARACTERS, PIECE_SEGMENTS, BPE_SAMPLE, FEW_DOCUMENTS]
        self.fingerprint = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
        self.rule = ""
        self.pinned: dict[str, Any] = {}
        self.tokenizer: Tokenizer

    def finished(self) -> Corpus:
        """The corpus that is already there, if it is this one."""
        there = read_manifest(self.out)
        if there.get("source") == self.source.description:
            self.check_fraction(there.get("split_rule", {}).get("rule"))
        if there["job"] != self.fingerprint:
            runs = [run for run, same in runs_of(self.out, there).items() if same]
            such = f", such as {named(runs, MOST_RUNS)}," if runs else ""
            raise InputError(
                f"'{self.out}' already holds the corpus '{there['name']}' with {there['tokenizer']['name']} tokens, "
                f"made {self._otherwise(there)}: choose another folder (--out) or replace it (--force), after which "
                f"runs trained on it{such} cannot be resumed or evaluated on it."
            )
        return Corpus(self.out)

    def _otherwise(self, there: dict[str, Any]) -> str:
        """With what other settings the corpus was made that is there, and what happened to its files since."""
        known, asked = there["tokenizer"], self.settings["tokenizer"]
        same = asked in (known["name"], f"{known['name']}:{known['fingerprint'][:8]}")
        was: dict[str, Any] = {
            "source": there.get("source") or {},
            "tokenizer": asked if same else known["name"],
            "val_fraction": there.get("split_rule", {}).get("val_fraction"),
            "shard_tokens": there.get("shard_tokens"),
        }
        now: dict[str, Any] = dict(self.settings)
        if (there["name"], was["source"].get("kind")) == (self.source.name, now["source"]["kind"]):
            was, now = ({**each, **each["source"], "source": "the same"} for each in (was, now))
        changes = file_changes(was.pop("files", ()), now.pop("files", ()))
        other = [key for key in {**now, **was} if was.get(key) != now.get(key)]
        other += ["version of stepformer"] * (not other and not changes)
        said = [f"with another {' and '.join(other)}"] * bool(other)
        return " and ".join([*said, *[f"before its files changed ({changes})"] * bool(changes)])

    def check_fraction(self, rule: str | None) -> None:
        """Refuse a fraction that could not apply."""
        if self.asked and rule == "marked":
            how = "Leave it out; of a dataset one split can be read alone (--split train)."
            if isinstance(self.source, TokenFiles):
                how = "Of ready-made tokens these are the files with 'val' in their names: put one beside the others."
            raise InputError(
                f"A validation fraction of {self.val_fraction} cannot apply: '{self.source.name}' says itself which "
                f"documents are for validation. {how}"
            )

    def begin(self) -> None:
        """Take up the parts of this job, or clear those of another; then settle the split rule and the tokenizer."""
        state_file, saved = self.parts / "job.json", self.parts / TOKENIZER
        state = documents.read(state_file, documents.PREPARATION) if state_file.exists() else {}
        begun = state.get("job") == self.fingerprint
        self.pinned = self.source.pin(state["pinned"] if begun else {})
        self.rule = state["rule"] if begun else self.choose_rule()
        self.check_fraction(self.rule)
        if begun and (saved / "tokenizer.json").exists():
            self.tokenizer = load_tokenizer(saved)
        else:
            if tokenizer_kind(self.spec)[0] == "bpe":
                self._report("training the tokenizer")
            self.tokenizer = make_tokenizer(self.spec, self.sample)
        if not begun:
            shutil.rmtree(self.parts, ignore_errors=True)
            files.write_json(state_file, {"job": self.fingerprint, "rule": self.rule, "pinned": self.pinned})
        for folder in (self.out, self.parts, saved):
            files.remove_unfinished(folder)
        if not (saved / "tokenizer.json").exists():
            self.tokenizer.save(saved)

    def choose_rule(self) -> str:
        if self.source.marked:
            return "marked"
        count = sum(1 for _ in itertools.islice(self.source, FEW_DOCUMENTS))
        if not count:
            raise InputError(f"The source '{self.source.name}' has no documents with text.")
        return "tail" if count < FEW_DOCUMENTS else "hash"

    def sample(self, characters: int = BPE_SAMPLE) -> Iterator[str]:
        """The first training texts, for training a tokenizer."""
        size = 0
        found = (segments for unit in range(len(self.source.units())) for segments, _ in self.segments(unit))
        for text in (segment.text for segments in found for segment in segments if segment.split == "train"):
            yield text[: characters - size]
            size += len(text)
            if size >= characters:
                return

    def pieces(self, unit: int) -> Iterator[tuple[list[Segment] | Tokens, bool]]:
        """The pieces of a unit, and whether each is its last."""
        if isinstance(self.source, TokenFiles):
            return self.source.tokens(unit, self.tokenizer)
        return self.segments(unit)

    def segments(self, unit: int) -> Iterator[tuple[list[Segment], bool]]:
        """The same of text (an empty unit has one, empty piece)."""
        held: list[Segment] = []
        size = 0
        for document in self.source.documents(unit):
            for split, text in pieces.divide(document, self.rule, self.val_fraction):
                texts = pieces.segments_of(text, PIECE_CHARACTERS)
                for i, part in enumerate(texts):
                    held.append(Segment(split, part, i == len(texts) - 1))
                    size += len(part)
                    if size >= PIECE_CHARACTERS or len(held) >= PIECE_SEGMENTS:
                        yield held, False
                        held, size = [], 0
        yield held, True

    def encode(self, workers: int) -> None:
        """Make every part that is not there yet."""
        done, pool = pieces.none_yet(), None
        waiting: deque[tuple[Path, bool, Callable[[], Encoded]]] = deque()

        def keep(room: int) -> None:
            """Write parts until no more than `room` are waited for."""
            while len(waiting) > room:
                path, last, encoded = waiting.popleft()
                pieces.add(done, pieces.write_part(path, encoded(), last))
                self._report("tokenising", done, self.source.approximate_bytes)

        try:
            for path, segments, last in self._missing(done):
                if workers == 1:
                    encoded: Callable[[], Encoded] = functools.partial(pieces.encode, self.tokenizer, segments)
                else:
                    pool = pool or pieces.start_workers(workers, self.parts / TOKENIZER)
                    encoded = pool.submit(pieces.encode_in_worker, segments).result
                waiting.append((path, last, encoded))
                keep(2 * workers if pool else 0)  # bounds the text in memory
            keep(0)
        except StepformerError:  # the source: what was read before it failed is worth keeping
            with contextlib.suppress(StepformerError, BrokenProcessPool):
                keep(0)
            raise
        except BrokenProcessPool:
            raise StepformerError(
                "A worker process was killed (out of memory?); the finished parts are kept: "
                "the same command continues, with --workers 1 if it happens again."
            ) from None
        finally:
            if pool:
                pool.shutdown(cancel_futures=True)

    def _missing(self, done: Counts) -> Iterator[tuple[Path, list[Segment] | Tokens, bool]]:
        """The pieces without a part; a unit whose parts are all there is not even read."""
        for unit in range(len(self.source.units())):
            headers = []
            with contextlib.suppress(InputError):  # the first that is missing or damaged: it is made again
                for _, header in self._parts(unit):
                    headers.append(header)
                    pieces.add(done, header)
            if headers:
                self._report("tokenising", done, self.source.approximate_bytes)
            if headers and headers[-1]["last"]:
                continue
            for number, (segments, last) in enumerate(self.pieces(unit)):
                if number >= len(headers):
                    yield self._part(unit, number), segments, last

    def _part(self, unit: int, number: int) -> Path:
        return self.parts / f"{unit:06d}-{number:06d}.part"

    def _parts(self, unit: int) -> Iterator[tuple[Path, dict[str, Any]]]:
        """The parts of a unit with their headers; an InputError where one is missing or damaged."""
        for number in itertools.count():
            path = self._part(unit, number)
            header = pieces.read_part(path)[0]
            yield path, header
            if header["last"]:
                return

    def _report(self, stage: str, done: Counts | None = None, total_bytes: int | None = None) -> None:
        if self.progress:
            amounts = {what: sum(of.values()) for what, of in (done or {}).items()}
            self.progress(Progress(stage, **amounts, total_bytes=total_bytes))

    def assemble(self) -> None:
        """Put the parts together. Nothing old is deleted before every part is there."""
        parts = [part for unit in range(len(self.source.units())) for part in self._parts(unit)]
        totals = pieces.none_yet()
        for _, header in parts:
            pieces.add(totals, header)
        if not totals["documents"]["train"]:
            raise InputError(f"The source '{self.source.name}' has no training documents with text.")
        with files.explained(self.out):
            (self.out / MANIFEST).unlink(missing_ok=True)
            for old in self.out.iterdir():
                if re.fullmatch(r"(train|val)-\d{5}\.bin", old.name):
                    old.unlink()
            shutil.rmtree(self.out / TOKENIZER, ignore_errors=True)
        self.tokenizer.save(self.out / TOKENIZER)
        splits = {}
        for split in SPLITS:
            self._report("writing shards", totals)
            counts = {what: of[split] for what, of in totals.items()}
            splits[split] = counts | self._write_split(split, (pieces.read_part(path)[1][split] for path, _ in parts))
        files.write_json(
            self.out / MANIFEST,
            {
                "format": documents.CORPUS.format,
                "name": self.source.name,
                "job": self.fingerprint,
                "source": self.source.description,
                "pinned": self.pinned,
                "shard_tokens": self.shard_tokens,
                "split_rule": {"rule": self.rule, "meaning": RULES[self.rule], "val_fraction": self.val_fraction},
                "tokenizer": self.tokenizer.describe(),
                "dtype": pieces.dtype_of(self.tokenizer).name,
                "splits": splits,
                "stepformer": __version__,
            },
        )
        shutil.rmtree(self.parts, ignore_errors=True)

    def _write_split(self, split: str, arrays: Iterable[NDArray[Any]]) -> dict[str, Any]:
        shards: list[dict[str, Any]] = []
        content = hashlib.sha256()
        counts = np.zeros(self.tokenizer.vocab_size, dtype=np.int64)
        stream = (array for array in arrays if len(array))
        rest = next(stream, None)
        while rest is not None:
            name = f"{split}-{len(shards):05d}.bin"
            digest, room = hashlib.sha256(), self.shard_tokens
            with files.writing(self.out / name) as file:
                while room and rest is not None:
                    taken, rest = rest[:room], rest[room:]
                    block = taken.tobytes()
                    file.write(block)
                    digest.update(block)
                    content.update(block)
                    counts += np.bincount(taken, minlength=len(counts))
                    room -= len(taken)
                    if not len(rest):
                        rest = next(stream, None)
            tokens = self.shard_tokens - room
            size = tokens * pieces.dtype_of(self.tokenizer).itemsize
            shards.append({"file": name, "tokens": tokens, "bytes": size, "sha256": digest.hexdigest()})
        return {"shards": shards, "hash": content.hexdigest()[:16], "entropy": entropy(counts)}
