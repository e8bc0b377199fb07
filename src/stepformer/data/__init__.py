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
    "Batches": "batches",
    "Corpus": "corpus",
    "Source": "sources",
    "TokenSplit": "corpus",
    "Tokenizer": "tokenizers",
    "corpus_folder": "corpus",
    "load_tokenizer": "tokenizers",
    "make_tokenizer": "tokenizers",
    "open_source": "sources",
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
    if name not in _HOME:
        raise AttributeError(f"module 'stepformer.data' has no attribute '{name}'")
    return getattr(importlib.import_module(f"stepformer.data.{_HOME[name]}"), name)
