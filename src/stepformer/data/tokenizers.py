"""From text to token ids and back: bytes, the GPT-2 BPE, and a BPE trained on the corpus itself.

A BPE is trained with Hugging Face `tokenizers` and applied with tiktoken: the same ids, several times faster. Saved
tokenizers are plain text files with a fingerprint; a file that does not give it back is refused.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepformer.base import documents, files
from stepformer.base.errors import InputError, StepformerError, UnknownNameError, suggestion

END_OF_TEXT = "<|endoftext|>"
KINDS = ("bytes", "gpt2", "bpe")
DESCRIPTION = "tokenizer.json"
SMALLEST_BPE, LARGEST_BPE = 257, 1_000_000

# OpenAI's pattern for GPT-2 in the form tiktoken uses: the same pieces without backtracking.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
# The sha256 of r50k_base.tiktoken, which lists the 50,256 ranks of GPT-2, one to a line.
GPT2_RANKS = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"

# tiktoken's regular expressions overflow their stack (a Rust panic) on runs of some 10^6 spaces.
_LONGEST_BLANK = 100_000


class Tokenizer:
    """Ids 0 to `vocab_size` - 1; `eot` ends a document and is never produced from text.

    `pieces` are the bytes of each id. A subclass says how text is cut into them (`encode`).
    """

    kind: str = ""
    file: str = ""  # the data file beside the description, if the kind needs one
    data: str = ""  # its content

    def __init__(self, name: str, pieces: Sequence[bytes], eot: int, behaviour: str) -> None:
        self.name = name
        self.eot = eot
        self.vocab_size = len(pieces)
        self.fingerprint = hashlib.sha256(f"{self.kind}\n{eot}\n{behaviour}".encode()).hexdigest()[:16]
        self._pieces = pieces

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens; "<|endoftext|>" in it is ordinary text."""
        raise NotImplementedError

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids. Bytes that are not UTF-8, and ids beyond the vocabulary, become U+FFFD."""
        pieces, size = self._pieces, self.vocab_size
        unknown = "\ufffd".encode()
        return b"".join(pieces[i] if 0 <= i < size else unknown for i in map(int, ids)).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """The bytes of one id; they may be a part of a character."""
        if not 0 <= token < self.vocab_size:
            raise InputError(f"There is no token {token}: the ids are 0 to {self.vocab_size - 1}.")
        return self._pieces[token]

    def describe(self) -> dict[str, Any]:
        """What a manifest says about it."""
        return {key: getattr(self, key) for key in ("kind", "name", "fingerprint", "vocab_size", "eot")}

    def save(self, folder: Path) -> None:
        """Write the data file, then `tokenizer.json`: a folder with a description is complete."""
        if self.file:
            files.write_text(folder / self.file, self.data)
        files.write_json(folder / DESCRIPTION, {"format": documents.TOKENIZER.format, **self.describe()})


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and 256 for end of text."""

    kind = "bytes"

    def __init__(self) -> None:
        super().__init__("bytes", [bytes([i]) for i in range(256)] + [END_OF_TEXT.encode()], 256, "utf-8")

    def encode(self, text: str) -> list[int]:
        return list(valid(text).encode())


class RankTokenizer(Tokenizer):
    """Byte-level BPE: inside each piece of the pattern the neighbours with the lowest rank are joined first."""

    def __init__(self, name: str, ranks: Mapping[bytes, int], behaviour: str) -> None:
        import tiktoken

        pieces = sorted(ranks, key=lambda token: ranks[token])
        super().__init__(name, [*pieces, END_OF_TEXT.encode()], len(pieces), behaviour)
        self._encoding = tiktoken.Encoding(
            self.kind, pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens={END_OF_TEXT: len(pieces)}
        )

    def encode(self, text: str) -> list[int]:
        text = valid(text)
        if _blank(text):
            # the run is cut, at the cost of a token or so at the cuts: without that there would be no tokens at all
            parts = re.split(rf"(\s{{{_LONGEST_BLANK}}})", text)
            return [token for part in parts if part for token in self._encoding.encode_ordinary(part)]
        return self._encoding.encode_ordinary(text)


class Gpt2Tokenizer(RankTokenizer):
    """OpenAI's GPT-2 vocabulary: 50,256 ranks and end of text."""

    kind = "gpt2"
    file = "gpt2.tiktoken"

    def __init__(self, ranks: Mapping[bytes, int], where: str) -> None:
        self.data = rank_lines(ranks)
        if hashlib.sha256(self.data.encode()).hexdigest() != GPT2_RANKS:
            raise InputError(f"{where} is not the GPT-2 vocabulary: its checksum is another one.")
        super().__init__("gpt2", ranks, GPT2_RANKS)


class TrainedTokenizer(RankTokenizer):
    """A BPE trained on a corpus; its data file is a `tokenizer.json` of Hugging Face `tokenizers`."""

    kind = "bpe"
    file = "bpe.json"

    def __init__(self, name: str, trained: str, where: str) -> None:
        self.data = trained
        try:
            model = files.loads(trained, "")["model"]
            letters = byte_of_letter()
            ranks = {bytes(letters[letter] for letter in word): rank for word, rank in model["vocab"].items()}
            whole = all(type(rank) is int for rank in ranks.values())
            every_byte = ranks.keys() >= {bytes([i]) for i in range(256)}
            if not whole or sorted(ranks.values()) != list(range(len(ranks))) or not every_byte:
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{where} is damaged: it is not a byte-level BPE.") from None
        super().__init__(name, ranks, rank_lines(ranks))


def tokenizer_kind(spec: str) -> tuple[str, str]:
    """The kind and argument of `bytes`, `gpt2`, `gpt2:PATH`, `bpe:N` or a FOLDER with a saved tokenizer, checked."""
    kind, _, argument = spec.partition(":")
    if kind not in KINDS:
        return "folder", str(_saved(spec))
    if kind == "bpe":
        if not argument:
            raise InputError("bpe needs a size, e.g. bpe:1024.")
        size = int(argument) if argument.isascii() and argument.isdigit() else 0
        if not SMALLEST_BPE <= size <= LARGEST_BPE:
            raise InputError(
                f"The size in '{spec}' must be a whole number from {SMALLEST_BPE} (256 bytes and end of text) "
                f"to {LARGEST_BPE:,}, e.g. bpe:1024."
            )
        return kind, str(size)
    if kind == "bytes" and argument:
        raise InputError(f"The tokenizer 'bytes' takes no argument, but '{spec}' was given.")
    return kind, argument


def _saved(spec: str) -> Path:
    """The folder with the tokenizer of a run or a corpus: `spec` itself, or `tokenizer/` in it."""
    given = Path(spec).expanduser()
    for folder in (given / "tokenizer", given):
        if (folder / DESCRIPTION).is_file():
            return folder
    if given.is_dir():
        raise InputError(f"There is no tokenizer in the folder '{spec}': neither {DESCRIPTION} nor tokenizer/.")
    without_colon = re.fullmatch(r"bpe[-_ ]?(\d+)", spec)
    guess = f" Did you mean 'bpe:{without_colon[1]}'?" if without_colon else suggestion(spec.partition(":")[0], KINDS)
    raise UnknownNameError(
        f"There is no tokenizer '{spec}'; the kinds are bytes, gpt2 and bpe:N, or give the folder of a run or a "
        f"corpus to use its own.{guess}"
    )


def tokenizer_name(spec: str) -> str:
    """The spec without what is particular to this machine: `gpt2:PATH` is `gpt2`.

    A BPE taken from a folder was trained on some other text: its name carries the beginning of its fingerprint.
    """
    kind, argument = tokenizer_kind(spec)
    if kind != "folder":
        return f"bpe:{argument}" if kind == "bpe" else kind
    saved = load_tokenizer(argument)
    return f"{saved.name}:{saved.fingerprint[:8]}" if saved.kind == "bpe" else saved.kind


def make_tokenizer(spec: str, texts: Callable[[], Iterable[str]] | None = None) -> Tokenizer:
    """The tokenizer of a spec; `bpe:N` is trained on `texts()`."""
    kind, argument = tokenizer_kind(spec)
    if kind == "folder":
        record = Path(argument).parent / "run.json"
        known = documents.read(record, documents.RUN).get("tokenizer") if record.is_file() else None
        return of_its_run(load_tokenizer(argument), known, record.parent)
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "gpt2":
        return gpt2_tokenizer(argument)
    if texts is None:
        raise InputError(f"The tokenizer {spec} is trained on a corpus; without one, use bytes or gpt2.")
    return train_bpe(int(argument), texts())


def of_its_run(tokenizer: Tokenizer, known: Mapping[str, Any] | None, run: Path) -> Tokenizer:
    """The tokenizer in a run's folder, if it is the one that the weights were trained with, as far as that is known."""
    if known is not None and known["fingerprint"] != tokenizer.fingerprint:
        raise InputError(
            f"The run '{run}' was made with the tokenizer {known['name']} of fingerprint {known['fingerprint']}, but "
            f"the one in its folder is {tokenizer.name} of fingerprint {tokenizer.fingerprint}."
        )
    return tokenizer


def gpt2_tokenizer(path: str = "") -> Tokenizer:
    """GPT-2's tokenizer from `path`, $STEPFORMER_GPT2_BPE, $STEPFORMER_DATA/gpt2_bpe, or tiktoken's download."""
    given = path or os.environ.get("STEPFORMER_GPT2_BPE", "")
    if given:
        return _gpt2_from(Path(given).expanduser())
    data = os.environ.get("STEPFORMER_DATA", "")
    if data and (Path(data) / "gpt2_bpe").is_dir():
        return _gpt2_from(Path(data) / "gpt2_bpe")
    import tiktoken

    try:
        ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
    except Exception as error:  # whatever requests, the cache folder or a proxy may raise
        reason = type(error).__name__
        raise StepformerError(
            f"The GPT-2 vocabulary could not be downloaded ({reason}): put gpt2.tiktoken, or vocab.bpe and "
            "encoder.json, into a folder and write --tokenizer gpt2:FOLDER or set STEPFORMER_GPT2_BPE to it. The "
            "tokenizers bytes and bpe:1024 need no download."
        ) from None
    return Gpt2Tokenizer(ranks, "What tiktoken downloaded")


def _gpt2_from(path: Path) -> Tokenizer:
    folder, file = (path, path / Gpt2Tokenizer.file) if path.is_dir() else (path.parent, path)
    try:
        if file.is_file() and file.name not in ("vocab.bpe", "encoder.json"):
            return Gpt2Tokenizer(_read_ranks(file.read_bytes(), file), f"'{file}'")
        merges, names = folder / "vocab.bpe", folder / "encoder.json"
        if not (merges.is_file() and names.is_file()):
            raise InputError(
                f"There is no GPT-2 vocabulary in '{path}': gpt2.tiktoken, or vocab.bpe and encoder.json, is needed."
            )
        return Gpt2Tokenizer(_read_merges(merges, names), f"'{merges}'")
    except OSError as error:
        raise InputError(f"The GPT-2 vocabulary '{path}' cannot be read: {error.strerror}.") from None


def _read_ranks(text: str | bytes, path: Path) -> dict[bytes, int]:
    try:
        rows = [line.split() for line in text.splitlines() if line]
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in rows}
    except ValueError:
        raise InputError(f"'{path}' is not the GPT-2 vocabulary: its lines are not a token and its rank.") from None


def _read_merges(merges: Path, names: Path) -> dict[bytes, int]:
    """The ranks from OpenAI's two files, of which the second must agree with the first."""
    letters = byte_of_letter()
    try:
        lines = merges.read_text(encoding="utf-8").split("\n")[1:]  # after the version
        words = [*letters, *(line.replace(" ", "") for line in lines if line)]
        if files.loads(names.read_text(encoding="utf-8"), "") != {w: i for i, w in enumerate([*words, END_OF_TEXT])}:
            raise ValueError
        return {bytes(letters[letter] for letter in word): rank for rank, word in enumerate(words)}
    except (ValueError, KeyError):
        raise InputError(f"'{merges}' and '{names.name}' beside it are not the GPT-2 vocabulary.") from None


def train_bpe(size: int, texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE with `size` ids, end of text included; fewer if the texts have no more pairs to join."""
    from tokenizers import Tokenizer as Trainee
    from tokenizers import models, pre_tokenizers, trainers

    trainee = Trainee(models.BPE())
    trainee.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,  # end of text is no token of theirs: it would be found in ordinary text
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trainee.train_from_iterator((valid(text) for text in texts), trainer)
    return TrainedTokenizer(f"bpe:{size}", trainee.to_str(), "The trained tokenizer")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """A saved tokenizer, checked against its fingerprint."""
    folder = Path(folder)
    saved = documents.read(folder / DESCRIPTION, documents.TOKENIZER)
    tokenizer: Tokenizer = ByteTokenizer()
    if saved["kind"] != "bytes":
        path = folder / (Gpt2Tokenizer if saved["kind"] == "gpt2" else TrainedTokenizer).file
        text = files.read_text(path, "tokenizer")
        if saved["kind"] == "gpt2":
            tokenizer = Gpt2Tokenizer(_read_ranks(text, path), f"'{path}'")
        else:
            tokenizer = TrainedTokenizer(saved["name"], text, f"The tokenizer '{path}'")
    found = tokenizer.describe()
    for key in ("fingerprint", *found):  # the fingerprint first: it says most
        if found[key] != saved[key]:
            raise InputError(
                f"The tokenizer in '{folder}' is damaged: its {key} is {found[key]}, not {saved[key]} as when it was "
                "saved."
            )
    return tokenizer


def rank_lines(ranks: Mapping[bytes, int]) -> str:
    """The ranks as tiktoken writes them: a line with token (base64) and rank for each, by rank."""
    return "".join(
        f"{base64.b64encode(token).decode()} {rank}\n"
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    )


def merges_of(pieces: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The pairs that a byte-level BPE joins, in this order, given its pieces by rank: each piece's last two parts."""
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    merges = []
    for rank, piece in enumerate(pieces):
        if len(piece) == 1:
            continue
        parts = [bytes([byte]) for byte in piece]
        while len(parts) > 2:
            joined = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
            first = min(joined)
            if first >= rank:
                raise InputError(f"The piece {piece!r} of this BPE cannot be made by joining two earlier ones.")
            at = joined.index(first)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        merges.append((parts[0], parts[1]))
    return merges


def valid(text: str) -> str:
    """The text with lone surrogates, which JSON can smuggle in and UTF-8 cannot hold, as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _blank(text: str) -> bool:
    """Does the text contain a run of blanks that is too long? A long run covers two neighbours of a coarse grid."""
    grid = text[:: _LONGEST_BLANK // 2]
    return len(text) > _LONGEST_BLANK and any(a.isspace() and b.isspace() for a, b in itertools.pairwise(grid))


@functools.cache
def byte_of_letter() -> dict[str, int]:
    """The printable letters that stand for bytes in the files of byte-level BPEs (OpenAI's convention for GPT-2)."""
    printable = [i for i in range(256) if chr(i).isprintable() and chr(i) != " "]
    others = [i for i in range(256) if i not in printable]
    return {chr(i): i for i in printable} | {chr(256 + n): i for n, i in enumerate(others)}
