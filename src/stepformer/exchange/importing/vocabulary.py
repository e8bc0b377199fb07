"""The tokenizer of an imported model: named by the user, found beside the weights, or known from their size."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepformer.base import files
from stepformer.base.errors import InputError
from stepformer.data.tokenizers import (
    END_OF_TEXT,
    ByteTokenizer,
    Gpt2Tokenizer,
    Tokenizer,
    TrainedTokenizer,
    byte_of_letter,
    make_tokenizer,
    merges_of,
)

GPT2_SIZES = (50_257, 50_304)  # GPT-2's own, and padded to a multiple of 64


def choose_tokenizer(
    given: str | Path | Tokenizer | None, source: Path, vocab_size: int, facts: Mapping[str, Any]
) -> Tokenizer:
    """The tokenizer that `given` is or names (gpt2, bytes or a folder), else that of the source."""
    if isinstance(given, Tokenizer):
        tokenizer = given
    elif given is not None:
        folder = Path(given).expanduser()
        tokenizer = from_folder(folder, {}) if folder.is_dir() and has_foreign(folder) else make_tokenizer(str(given))
    elif source.is_dir() and has_foreign(source):
        tokenizer = from_folder(source, facts.get("tokenizer") or {})
    elif vocab_size in GPT2_SIZES:
        tokenizer = make_tokenizer("gpt2")
    else:
        few = vocab_size < ByteTokenizer().vocab_size
        raise InputError(
            f"'{source}' does not say which tokenizer its {vocab_size} ids belong to: give --tokenizer gpt2, bytes or "
            f"the folder of a tokenizer.{' A table of characters, such as nanoGPT makes, has none here.' * few}"
        )
    if tokenizer.vocab_size > vocab_size:
        why = "it belongs to another tokenizer"
        if isinstance(tokenizer, ByteTokenizer) and vocab_size == 256:
            why = "the last id marks the end of a text, so a model of bytes is built with vocab_size=257"
        raise InputError(
            f"The tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids, but the model's table has {vocab_size} "
            f"rows: {why}."
        )
    return tokenizer


def has_foreign(folder: Path) -> bool:
    """Whether a folder holds a tokenizer in Hugging Face's form (ours is called tokenizer.json too)."""
    if (folder / "tokenizer.json").is_file():
        content = files.read_json(folder / "tokenizer.json", "tokenizer", sealed=False)
        return isinstance(content, dict) and "model" in content
    return (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()


def from_folder(folder: Path, known: Mapping[str, Any]) -> Tokenizer:
    """A byte-level BPE in Hugging Face's form; `known` is what an export says about it."""
    where = f"The tokenizer in '{folder}'"
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            vocab, merges = _modern(files.read_json(path, "tokenizer", sealed=False), where)
        else:
            vocab = files.read_json(folder / "vocab.json", "vocabulary", sealed=False)
            lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
            merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        tokenizer = _byte_level(dict(vocab), merges, where, known.get("name"))
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} cannot be read: it is not a byte-level BPE.") from None
    fingerprint = known.get("fingerprint")
    if fingerprint not in (None, tokenizer.fingerprint):
        raise InputError(f"{where} is damaged: its fingerprint is {tokenizer.fingerprint}, not {fingerprint}.")
    return tokenizer


def _modern(content: Any, where: str) -> tuple[dict[str, int], list[tuple[str, ...]]]:
    """Vocabulary and merges of a tokenizer.json, if it cuts text as GPT-2 does and does nothing else to it."""
    model, cut = content["model"], content.get("pre_tokenizer") or {}
    plain = model.get("type", "BPE") == "BPE" and content.get("normalizer") is None
    if not plain or cut.get("type") != "ByteLevel" or cut.get("add_prefix_space") or not cut.get("use_regex", True):
        raise InputError(f"{where} is not a byte-level BPE with GPT-2's pattern, the only kind that stepformer reads.")
    others = [token["content"] for token in content.get("added_tokens", []) if token["content"] != END_OF_TEXT]
    if others:
        raise InputError(f"{where} has the special token '{others[0]}', and stepformer knows only {END_OF_TEXT}.")
    ends = [token["id"] for token in content.get("added_tokens", [])]
    vocab = {word: rank for word, rank in model["vocab"].items() if word != END_OF_TEXT}
    if ends != [len(vocab)]:
        raise InputError(f"{where} should have {END_OF_TEXT} as its last id, {len(vocab)}.")
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    return {**vocab, END_OF_TEXT: len(vocab)}, merges


def _byte_level(vocab: dict[str, int], merges: list[tuple[str, ...]], where: str, name: str | None) -> Tokenizer:
    letters = byte_of_letter()
    if vocab.pop(END_OF_TEXT, None) != len(vocab) or sorted(vocab.values()) != list(range(len(vocab))):
        raise InputError(f"{where} should have the ids 0 to {len(vocab) - 1} and {END_OF_TEXT} as the last.")
    words = sorted(vocab, key=lambda word: vocab[word])
    pieces = [bytes(letters[letter] for letter in word) for word in words]
    if pieces == [bytes([i]) for i in range(256)] and not merges:
        return ByteTokenizer()
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    found = [tuple(bytes(letters[letter] for letter in part) for part in merge) for merge in merges]
    if found != merges_of(pieces):
        raise InputError(f"{where} joins its pieces in another order than that of their ids: it cannot be read.")
    with contextlib.suppress(InputError):  # that it is another vocabulary
        return Gpt2Tokenizer(ranks, where)
    trained = json.dumps({"model": {"type": "BPE", "vocab": vocab, "merges": [list(merge) for merge in merges]}})
    return TrainedTokenizer(name or f"bpe:{len(pieces) + 1}", trained, where)
