"""Tokens that other code has written: train.bin and val.bin of nanoGPT, and the shards of llm.c and modded-nanogpt.

Such a file has ids and nothing else, uint16 little-endian (uint32 for a tokenizer of more than 65,536 ids), or after a
header of 256 int32 that begins with a known number. What made them is not in it: the tokenizer must be named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from stepformer.base.errors import InputError
from stepformer.data import pieces, readers
from stepformer.data.pieces import Tokens
from stepformer.data.readers import COMPRESSIONS, Split
from stepformer.data.sources import Source, describe_file
from stepformer.data.tokenizers import Tokenizer

NAME = re.compile(rf".+\.bin({'|'.join(map(re.escape, COMPRESSIONS))})?", re.IGNORECASE)
HEADER_BYTES, MAGIC = 1024, (20240520).to_bytes(4, "little")
BLOCK = 2**21  # tokens of a piece
TEXT = 2.2  # bytes of text for a byte of uint16 tokens, about, and half as much again in a packed file


def token_files(path: Path) -> list[Path]:
    """The token files of a folder, or the one that `path` is; none if there is other data in the folder."""
    found = [path] if path.is_file() else sorted(each for each in path.glob("*.bin*") if each.is_file())
    return [each for each in found if NAME.fullmatch(each.name)]


class TokenFiles(Source):
    """Files whose names contain `val` are for validation, all others for training; in the order of their names."""

    marked = True

    def __init__(self, path: Path) -> None:
        self.paths = token_files(path)
        root = path if path.is_dir() else path.parent
        if (root / "meta.pkl").exists():
            raise InputError(
                f"'{root / 'meta.pkl'}' says that these tokens are characters in an order of their own, as nanoGPT "
                "makes them, and only unpickling, which may run anything, would tell the order: prepare the text "
                "instead, with --tokenizer bytes or bpe:N."
            )
        self.name = path.resolve().name if path.is_dir() else path.name.partition(".")[0]
        self.description = {"kind": "tokens", "files": [describe_file(p, root) for p in self.paths]}
        self.approximate_bytes = int(
            TEXT * sum(p.stat().st_size * (1.5 if readers.packing(p) else 1) for p in self.paths)
        )

    def units(self) -> Sequence[str]:
        return [str(path) for path in self.paths]

    def tokens(self, unit: int, tokenizer: Tokenizer) -> Iterator[tuple[Tokens, bool]]:
        """The tokens of a file in blocks, and whether each is the last; its last document ends if it did not."""
        path, dtype = self.paths[unit], pieces.dtype_of(tokenizer)
        split: Split = "val" if "val" in path.name.lower() else "train"
        size = BLOCK * dtype.itemsize
        with readers.reading(path), readers.opened(path) as file:
            block = file.read(HEADER_BYTES + size)
            block = block[HEADER_BYTES:] if block.startswith(MAGIC) else block
            while block:
                if len(block) % dtype.itemsize:
                    raise InputError(f"'{path}' is damaged: it ends inside of a token of {dtype.itemsize} bytes.")
                ids = np.frombuffer(block, dtype)
                if (largest := int(ids.max())) >= tokenizer.vocab_size:
                    raise InputError(
                        f"'{path}' has the token {largest}, and tokenizer '{tokenizer.name}' has "
                        f"{tokenizer.vocab_size:,}: name the one that made it (--tokenizer)."
                    )
                block = file.read(size)
                if not block and ids[-1] != tokenizer.eot:
                    ids = np.append(ids, dtype.type(tokenizer.eot))
                yield Tokens(split, ids), not block
