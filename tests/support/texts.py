"""Small texts for the tests of corpora: files of every kind, and the documents in a corpus."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stepformer.base import files
from stepformer.data import Corpus
from stepformer.data.readers import extensions


def zstd(data: bytes) -> bytes:
    import zstandard  # here, so that the GPU's tests are collected where it is not installed

    return zstandard.ZstdCompressor().compress(data)


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def content(form: str, rows: list[dict[str, Any]]) -> bytes:
    if form == ".txt":
        return "\n<|endoftext|>\n".join(row["text"] for row in rows).encode()
    if form == ".parquet":
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows), sink)
        return bytes(sink.getvalue())
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    form, packing = extensions(path)
    path.write_bytes(PACK[packing](content(form, rows)))
    return path


def stories(count: int) -> list[dict[str, Any]]:
    return [{"text": f"Story {i}: the {i % 7} cats met {i} dogs.\nThe end of {i}."} for i in range(count)]


def documents(corpus: Corpus, split: str) -> list[str]:
    tokens = corpus.split(split)
    ids = tokens.tokens(0, len(tokens)).tolist()
    found, held = [], []
    for i in ids:
        if i == corpus.tokenizer.eot:
            found.append(corpus.tokenizer.decode(held))
            held = []
        else:
            held.append(i)
    assert not held, "a document without its end"
    return found


def tree(out: Path) -> dict[str, str]:
    """The checksums of all files below a folder, but for its lock."""
    paths = [p for p in sorted(out.rglob("*")) if p.is_file() and p.name != ".lock"]
    return {str(p.relative_to(out)): files.sha256(p) for p in paths}
