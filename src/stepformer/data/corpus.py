"""A prepared corpus: shards of token ids, the tokenizer that made them, and a manifest that vouches for both."""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepformer.base import documents, files
from stepformer.base.errors import InputError
from stepformer.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_name

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
SPLITS = ("train", "val")
FEW_WINDOWS = 8  # of a context: the loss on a validation text of fewer is noisy
SEARCHED = 1 << 24  # tokens at a time


def few(tokens: float, vocab_size: int) -> bool:
    """Whether a text is too short for a vocabulary, because most of its ids would come up a few times or never."""
    return vocab_size > 1024 and tokens < 20 * vocab_size


def corpora_folder() -> Path:
    """Where corpora lie unless told otherwise: in `data`, in $STEPFORMER_HOME if that is set."""
    return Path(os.environ.get("STEPFORMER_HOME", ""), "data")


def corpus_folder(name: str, tokenizer_spec: str) -> Path:
    """Where a corpus lies unless told otherwise: `data/NAME-TOKENIZER`."""
    return corpora_folder() / re.sub(r"[^\w.-]+", "-", f"{name}-{tokenizer_name(tokenizer_spec)}")


def entropy(counts: NDArray[np.int64]) -> float:
    """The unigram entropy in nats: the loss of the best model that ignores the context."""
    share = counts[counts > 0] / max(1, counts.sum())
    return round(float(-(share * np.log(share)).sum()), 6) + 0.0


class TokenSplit:
    """The tokens of one split, in order, read from the shards as they are needed."""

    def __init__(self, folder: Path, name: str, facts: dict[str, Any], dtype: np.dtype[Any]) -> None:
        self.name = name
        self.hash: str = facts["hash"]
        self.documents: int = facts["documents"]
        self.bytes: int = facts["bytes"]
        self.entropy: float = facts["entropy"]
        self._begin, self._length = 0, int(facts["tokens"])
        self._dtype = dtype
        self._paths = [folder / shard["file"] for shard in facts["shards"]]
        self._ends = np.cumsum([shard["tokens"] for shard in facts["shards"]], dtype=np.int64)
        self._maps: dict[int, NDArray[Any]] = {}

    def __len__(self) -> int:
        return self._length

    def half(self, which: str) -> TokenSplit:
        """The first or second half of the tokens, as a split with hash and entropy of its own; `all` is the whole."""
        if which == "all":
            return self
        part = copy.copy(self)
        middle = self._length // 2
        part._begin = self._begin + (middle if which == "second" else 0)
        part._length = self._length - middle if which == "second" else middle
        part.name = f"{self.name}, {which} half"
        part.hash = hashlib.sha256(f"{self.hash}/{which}".encode()).hexdigest()[: len(self.hash)]
        part.entropy = entropy(np.bincount(part.tokens(0, len(part))))
        return part

    def __getstate__(self) -> dict[str, Any]:  # another process opens the shards itself
        return {**self.__dict__, "_maps": {}}

    def _shard(self, index: int) -> NDArray[Any]:
        if index not in self._maps:
            try:
                self._maps[index] = np.memmap(self._paths[index], dtype=self._dtype, mode="r")
            except (OSError, ValueError) as error:
                raise InputError(f"Shard '{self._paths[index]}' cannot be read: {error}.") from None
        return self._maps[index]

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """The tokens from `start` up to `stop`, as stored (uint16 or uint32)."""
        if not 0 <= start <= stop <= self._length:
            raise InputError(
                f"Tokens {start} to {stop} of the split '{self.name}' do not exist: it has {self._length:,}."
            )
        result = np.empty(stop - start, dtype=self._dtype)
        self._copy(start, result)
        return result

    def gather(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """The `length` tokens from each start on, (len(starts), length)."""
        starts = np.asarray(starts, dtype=np.int64)
        if length < 0 or (starts.size and not (starts.min() >= 0 and starts.max() + length <= self._length)):
            raise InputError(
                f"Rows of {length} tokens from {starts.min()} to {starts.max()} do not all exist: "
                f"the split '{self.name}' has {self._length:,} tokens."
            )
        result = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(result, starts.tolist(), strict=True):
            self._copy(start, row)
        return result

    def holds(self, passage: NDArray[np.integer]) -> bool:
        """Whether these tokens stand somewhere in it, one after the other."""
        for start in range(0, len(self) - len(passage) + 1, SEARCHED):
            piece = self.tokens(start, min(start + SEARCHED + len(passage) - 1, len(self)))
            places = np.flatnonzero(piece[: len(piece) - len(passage) + 1] == passage[0])
            for offset, token in enumerate(passage):
                places = places[piece[places + offset] == token]
            if len(places):
                return True
        return False

    def _copy(self, start: int, target: NDArray[Any]) -> None:
        """Fill `target` with the tokens from `start` on, shard by shard."""
        start, done = start + self._begin, 0
        index = int(np.searchsorted(self._ends, start, side="right"))
        while done < len(target):
            shard = self._shard(index)
            first = start + done - (int(self._ends[index]) - len(shard))
            part = shard[first : first + len(target) - done]
            target[done : done + len(part)] = part
            done += len(part)
            index += 1


class Corpus:
    """A folder that `stepformer prepare` finished. Opening it checks the shards' sizes, `verify` their bytes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.name: str = self.manifest["name"]
        self.dtype: np.dtype[Any] = np.dtype(self.manifest["dtype"]).newbyteorder("<")
        for fault in self._faults():
            raise InputError(f"The manifest '{self.folder / MANIFEST}' is damaged: {fault}.{AGAIN}")
        for shard in self._shards():
            path = self.folder / shard["file"]
            if not path.is_file():
                raise InputError(f"{self._damaged(shard)}: the file is missing.{AGAIN}")
            if (size := path.stat().st_size) != shard["bytes"]:
                raise InputError(f"{self._damaged(shard)}: it has {size:,} bytes instead of {shard['bytes']:,}.{AGAIN}")

    def _faults(self) -> Iterator[str]:
        """What does not add up in the manifest: numbers of tokens, their width, each shard in the split it is named
        after and nowhere else.
        """
        names = Counter(shard["file"] for shard in self._shards())
        yield from (f"'{name}' is listed twice" for name, times in names.items() if times > 1)
        for name in SPLITS:
            if name not in self.manifest["splits"]:
                yield f"it has no {name} split"
                continue
            split = self.manifest["splits"][name]
            for shard in split["shards"]:
                if not shard["file"].startswith(f"{name}-"):
                    yield f"'{shard['file']}' is no shard of the {name} split"
                if shard["tokens"] * self.dtype.itemsize != shard["bytes"]:
                    yield f"'{shard['file']}' cannot hold {shard['tokens']:,} tokens of {self.dtype.name}"
            if sum(shard["tokens"] for shard in split["shards"]) != split["tokens"]:
                yield f"the shards of the {name} split do not have {split['tokens']:,} tokens together"

    def _shards(self) -> list[dict[str, Any]]:
        return [shard for split in self.manifest["splits"].values() for shard in split["shards"]]

    def _damaged(self, shard: dict[str, Any]) -> str:
        return f"Shard '{shard['file']}' of '{self.folder}' is damaged"

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the shards were written with."""
        if not (self.folder / TOKENIZER).is_dir():
            raise InputError(f"The tokenizer of the corpus '{self.folder}' is gone.{AGAIN}")
        tokenizer = load_tokenizer(self.folder / TOKENIZER)
        self.check_tokenizer(tokenizer)
        return tokenizer

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer other than the one the tokens were made with."""
        written = self.manifest["tokenizer"]
        if tokenizer.fingerprint != written["fingerprint"]:
            raise InputError(
                f"The tokens of '{self.folder}' were made by the tokenizer {written['name']} with fingerprint "
                f"{written['fingerprint']}, not by {tokenizer.name} with fingerprint {tokenizer.fingerprint}. "
                "`stepformer prepare SOURCE --tokenizer RUN` makes tokens with the tokenizer of a run."
            )

    @property
    def vocab_size(self) -> int:
        return int(self.manifest["tokenizer"]["vocab_size"])

    def split(self, name: str) -> TokenSplit:
        if name not in self.manifest["splits"]:
            known = ", ".join(self.manifest["splits"])
            raise InputError(f"The corpus '{self.folder}' has no split '{name}'; it has {known}.")
        return TokenSplit(self.folder, name, self.manifest["splits"][name], self.dtype)

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Read every shard and compare its checksum; `progress` is told the bytes as they are read."""
        for name, split in self.manifest["splits"].items():
            one, content = len(split["shards"]) == 1, hashlib.sha256()  # the hash of one shard is that of the split
            for shard in split["shards"]:
                try:
                    found = files.sha256(self.folder / shard["file"], progress, None if one else content)
                except OSError as error:
                    raise InputError(f"{self._damaged(shard)}: it cannot be read ({error.strerror}).") from None
                if found != shard["sha256"]:
                    raise InputError(f"{self._damaged(shard)}: its checksum is not the one in the manifest.{AGAIN}")
            known = (found if one else content.hexdigest())[: len(split["hash"])]
            if known != split["hash"] or len(known) < 16:
                raise InputError(
                    f"The {name} split of '{self.folder}' has hash {known}, not {split['hash']} as its manifest says."
                    f"{AGAIN}"
                )
        self.check_tokenizer(self.tokenizer)


LEFT = (".parts", "train-*.bin", "val-*.bin")  # what an interrupted preparation leaves


def is_left(folder: Path) -> bool:
    """Whether there is an unfinished corpus, and no text or tokens of somebody else."""
    return (folder / LEFT[0]).is_dir() or ((folder / TOKENIZER).is_dir() and any(folder.glob(LEFT[1])))


AGAIN = " Prepare the corpus again with --force: the same source gives the same tokens, and runs can go on with them."


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished corpus."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise InputError(f"There is no corpus '{folder}'; `stepformer prepare --help` says how to make one.")
    if not path.exists() and not any(found for pattern in LEFT for found in folder.glob(pattern)):
        raise InputError(
            f"'{folder}' is not a prepared corpus: it has no {MANIFEST}; `stepformer prepare --help` says how to make "
            "one."
        )
    if not path.exists():
        raise InputError(f"The corpus in '{folder}' was not finished (no {MANIFEST}); run stepformer prepare again.")
    return documents.read(path, documents.CORPUS)
