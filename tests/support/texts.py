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


def copies_of_datasets(root: Path) -> Path:
    """Small copies of the datasets with names in `root/NAME`, each laid out as on the Hub."""

    def rows(what: str, count: int) -> list[dict[str, Any]]:
        return [{"text": f"{what} {i}"} for i in range(count)]

    for shard, count in enumerate((60, 50)):
        write_rows(root / f"tinystories/data/train-{shard:05d}-of-00002-2d5a14.parquet", rows(f"train {shard}", count))
    write_rows(root / "tinystories/data/validation-00000-of-00001-869c89.parquet", rows("validation", 7))
    write_rows(root / "tinystories/TinyStoriesV2-GPT4-train.txt", rows("another version", 3))
    for shard in range(3):
        write_rows(root / f"openwebtext/plain_text/train-{shard:05d}-of-00003.parquet", rows(f"page {shard}", 300))
    configs = "configs:\n- config_name: plain_text\n  data_files:\n  - split: train\n    path: plain_text/train-*\n"
    (root / "openwebtext" / "README.md").write_text(f"---\n{configs}---\n# OpenWebText\n")
    for config in ("wikitext-103-raw-v1", "wikitext-103-v1", "wikitext-2-v1"):
        lines = ["", f" = {config} = \n", "", f" A line of {config} . \n"]
        for split in ("test", "train", "validation"):
            path = root / f"wikitext/{config}/{split}-00000-of-00001.parquet"
            write_rows(path, [{"text": line.replace("line", split)} for line in lines])
    for config in ("de", "default", "en"):
        write_rows(root / f"lambada/{config}/test/0000.parquet", rows(f"passage {config}", 5))
    for split, shards, count in (("train", 2, 4), ("validation", 2, 3000)):
        for shard in range(shards):
            path = root / f"c4/en/c4-{split}.{shard:05d}-of-{shards:05d}.json.gz"
            write_rows(path, [{**row, "url": "u"} for row in rows(f"{split} {shard}", count)])
    return root
