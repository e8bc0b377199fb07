"""Texts to measure perplexity on: prepared corpora, files, and held-out text of datasets by name.

Three of those, WikiText, LAMBADA and C4, are the out-of-domain texts of the momentum-streams paper.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stepformer.base.errors import InputError, StepformerError, suggestion
from stepformer.data.corpus import MANIFEST, Corpus
from stepformer.data.opening import open_source
from stepformer.data.pieces import divide
from stepformer.data.readers import Layout, cut_text, extensions, opened, read_documents, reading
from stepformer.data.sources import DATASETS, usable_files
from stepformer.data.token_files import TokenFiles
from stepformer.data.tokenizers import Tokenizer
from stepformer.training.corpora import checked

PIECE = 1 << 20  # tokens that are hashed and counted at a time
OUT_OF_DOMAIN = ("wikitext", "lambada", "c4")
T = TypeVar("T")


@dataclass(frozen=True)
class Text:
    """A row of tokens with a name; every document in it is followed by end of text, as `stepformer prepare` does."""

    name: str
    tokens: NDArray[np.integer]
    source: str  # the file or split it came from
    seen: bool | None = False  # whether the run that is measured was trained or validated on it; None: not known

    def __len__(self) -> int:
        return len(self.tokens)


def as_text(name: str, documents: Iterable[str], tokenizer: Tokenizer, source: str, enough: int | None = None) -> Text:
    """The tokens of documents, each followed by end of text; reading stops once there are more than `enough`."""
    found: list[NDArray[np.int64]] = []
    count = 0
    for document in documents:
        found.append(np.array([*tokenizer.encode(document), tokenizer.eot], dtype=np.int64))
        count += len(found[-1])
        if enough is not None and count > enough:
            break
    if not found:
        raise InputError(f"There is no text in '{source}'.")
    return Text(name, np.concatenate(found), source)


def open_text(
    where: str,
    tokenizer: Tokenizer,
    *,
    field: str | None = None,
    document: str | None = None,
    split: str = "val",
    enough: int | None = None,
    data: Path | None = None,
) -> Text:
    """A split of a prepared corpus, the documents of a file, a folder of files or hf:OWNER/NAME (as for `prepare`),
    ready-made tokens, or the held-out text of a dataset with a name, from `data/NAME` if `data` is given.
    """
    folder = Path(where).expanduser()
    if (folder / MANIFEST).is_file():
        corpus = checked(Corpus(folder))
        corpus.check_tokenizer(tokenizer)
        tokens = corpus.split(split)
        count = len(tokens) if enough is None else min(len(tokens), enough + 1)
        return Text(corpus.name, tokens.tokens(0, count), f"{corpus.folder.name}, {split} split")
    if where in DATASETS:
        if field or document or split != "val":
            raise InputError(f"The layout and the part of '{where}' are known: field, document and split do not apply.")
        return held_out(where, tokenizer, data, enough)
    if folder.is_dir() and (folder / "run.json").is_file():
        raise InputError(f"'{folder}' is a run, not a text: give a file, a folder of files or a prepared corpus.")
    is_name = where == "tales" or where.startswith("hf:")
    if not is_name and not folder.exists():
        raise InputError(
            f"There is no file or folder and no prepared corpus '{where}'.{suggestion(where, ('tales', *DATASETS))}"
        )
    source = open_source(where, field=field, document=document)
    if isinstance(source, TokenFiles):  # of a folder the files of the split, as `prepare` would take them
        blocks = (block for unit in range(len(source.units())) for block, _ in source.tokens(unit, tokenizer))
        ids = [block.ids for block in blocks if folder.is_file() or block.split == split]
        if not ids:
            raise InputError(f"There are no tokens of the {split} split in '{where}'.")
        return Text(source.name, np.concatenate(ids)[: None if enough is None else enough + 1], folder.name)
    documents = (found.text for found in source)
    return as_text(source.name, documents, tokenizer, folder.name if folder.exists() else where, enough)


def held_out(name: str, tokenizer: Tokenizer, data: Path | None = None, enough: int | None = None) -> Text:
    """The text of a dataset that measures a run: of the Hub or of `data/NAME`, laid out as there or with any files, of
    which the first readable one is taken.

    WikiText: every line that is not blank is a document. LAMBADA: every passage, its last word included. C4: every row,
    or every line of a text file; the first 5,000. OpenWebText and FineWeb have no split for this: the first 5,000
    documents that `stepformer prepare` keeps out of training.
    """
    known = DATASETS[name]
    place = None if data is None else data / name
    if data is not None and not as_on_the_hub(data / name):
        path = first_file(data, name)
        with reading(path):
            documents = itertools.islice(_documents(name, path), known.first)
            return as_text(name, documents, tokenizer, f"{name}/{path.name}", enough)
    by_checksum = known.held_out is None
    source = open_source(name, local=place, split=known.held_out, limit=None if by_checksum else known.first)
    revision = source.pin({}).get("revision", "")[:8]
    texts = (d.text for d in source if not by_checksum or divide(d, "hash", source.val_fraction)[0][0] == "val")
    first = f"first {known.first:,}" if known.first else None
    words = (name if place else known.repository, known.config, known.held_out or "by checksum", first, revision)
    what = " ".join(filter(None, words))
    try:
        return as_text(name, itertools.islice(texts, known.first), tokenizer, what, enough)
    except StepformerError as error:
        hint = "" if place else f" A local copy is read with --data DIR: DIR/{name}/, laid out as on the Hub."
        raise type(error)(f"{error}{hint}") from None


def as_on_the_hub(folder: Path) -> bool:
    """Whether a folder has subfolders of data, or files that are numbered as the Hub's are."""
    names = (path.relative_to(folder).as_posix() for path in (usable_files(folder) if folder.is_dir() else ()))
    return any("/" in name or re.search(r"\d{5}-of-\d{5}", name) for name in names)


def first_file(folder: Path, name: str) -> Path:
    """The file of an out-of-domain text; a sentence says what is missing."""
    place = folder / name
    if not place.is_dir():
        near = suggestion(name, [p.name for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else [])
        raise InputError(f"The out-of-domain text '{name}' is not in '{folder}': a folder '{name}' is needed.{near}")
    found = usable_files(place) or sorted(place.glob("*.utf8"))
    if not found:
        raise InputError(f"There is no text in '{place}': a .txt, .utf8, .jsonl or .parquet file is needed.")
    return found[0]


def _documents(name: str, path: Path) -> Iterator[str]:
    form = extensions(path)[0]
    if name == "lambada" and form not in (".txt", ".parquet"):
        yield from each_row(path, _passage, "has neither a text nor a context with its continuation.")
    elif form in ("", ".txt"):
        with opened(path) as raw:
            lines = (line.decode() for line in raw)
            texts = cut_text(lines, "line" if name in OUT_OF_DOMAIN else "auto")
            yield from (text for text in texts if text.strip())
    else:
        yield from (found.text for found in read_documents(path, Layout()))


def _passage(row: Any) -> str:
    """The text of a row, or its context and the continuation that one space joins to it."""
    text: str = row["text"] if "text" in row else f"{row['context']} {row['continuation']}"
    return text


def each_row(path: Path, read: Callable[[Any], T], wrong: str) -> Iterator[T]:
    """What `read` makes of every row of JSON lines; of one in another layout a sentence says what is wrong."""
    with reading(path), opened(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    found = read(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                    said = wrong.format(reason=reason(error))
                    raise InputError(f"Line {number:,} of '{path}' {said}") from None
                yield found


def reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")[:200]


@functools.lru_cache(maxsize=4)
def _piece_sizes(tokenizer: Tokenizer) -> NDArray[np.int64]:
    sizes = np.array([len(tokenizer.piece(i)) for i in range(tokenizer.vocab_size)], dtype=np.int64)
    sizes[tokenizer.eot] = 0  # a mark between documents, not text
    return sizes


def count_bytes(tokenizer: Tokenizer, tokens: NDArray[np.integer]) -> int:
    """Bytes of UTF-8 that tokens stand for; end of text stands for none."""
    sizes = _piece_sizes(tokenizer)
    return sum(int(sizes[tokens[begin : begin + PIECE]].sum()) for begin in range(0, len(tokens), PIECE))


def token_hash(tokens: NDArray[np.integer]) -> str:
    """A name for a row of tokens, the same for every way of storing it."""
    digest = hashlib.sha256()
    for begin in range(0, len(tokens), PIECE):
        digest.update(tokens[begin : begin + PIECE].astype("<u4").tobytes())
    return digest.hexdigest()[:16]
