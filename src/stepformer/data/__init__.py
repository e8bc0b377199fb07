"""Corpora: where documents come from, tokenizers, preparation, and the tokens of a prepared corpus."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepformer.data.batches import Batches
    from stepformer.data.corpus import Corpus, TokenSplit, corpus_folder
    from stepformer.data.sources import Source, open_source
    from stepformer.data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer

# loaded when first asked for, so that `import stepformer` does not wait for them
_HOME = {
    "batches": ("Batches",),
    "corpus": ("Corpus", "TokenSplit", "corpus_folder"),
    "sources": ("Source", "open_source"),
    "tokenizers": ("Tokenizer", "load_tokenizer", "make_tokenizer"),
}

__all__ = [
    "Batches",
    "Corpus",
    "Source",
    "TokenSplit",
    "Tokenizer",
    "corpus_folder",
    "load_tokenizer",
    "make_tokenizer",
    "open_source",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"stepformer.data.{home}"), name)
    raise AttributeError(f"module 'stepformer.data' has no attribute '{name}'")
