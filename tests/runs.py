"""Small runs for the tests of training: a corpus of bytes and a model of a few thousand parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepformer.data.corpus import Corpus
from stepformer.data.prepare import prepare
from stepformer.data.sources import open_source
from stepformer.training import RunConfig, run_config

SMALL: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 2,
    "d_model": 16,
    "context": 16,
    "steps": 12,
    "batch": 8,
    "eval_every": 4,
    "eval_tokens": 512,
    "save_every": 3,
    "precision": "fp64",
    "device": "cpu",
}


def make_corpus(folder: Path, count: int = 40, tokenizer: str = "bytes") -> Corpus:
    """A few tales as bytes; the split is by the tail of each story or by hash, whatever prepare chooses."""
    return prepare(open_source("tales", count=count), tokenizer, folder, val_fraction=0.2, workers=1)


def small_run(data: Path, name: str = "yurii", **changes: Any) -> RunConfig:
    """The config of a run that takes well under a second."""
    return run_config(name, **{**SMALL, "corpus": str(data), **changes})
