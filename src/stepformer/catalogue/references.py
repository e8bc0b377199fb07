"""BibTeX of everything the catalogue cites, so that `stepformer show NAME --cite` prints exactly what a model uses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_ENTRIES = Path(__file__).with_name("references.bib").read_text(encoding="utf-8").strip().split("\n\n")
BIBTEX: dict[str, str] = {re.split(r"[{,]", entry, maxsplit=2)[1]: entry for entry in _ENTRIES}
TRAINING: dict[str, tuple[str, ...]] = {  # by the name of an optimizer
    "muon": ("jordan2024muon", "loshchilov2019decoupled"),
    "adamw": ("loshchilov2019decoupled",),
    "scion": ("pethick2025training",),
    "polargrad": ("lau2025polargrad", "loshchilov2019decoupled"),
    "trust": ("constrained-transformers", "loshchilov2019decoupled"),
}


def bibtex(keys: Iterable[str]) -> str:
    """The entries of keys, each once; a comment in place of one that is not there."""
    return "\n\n".join(BIBTEX.get(key, f"% {key}: no entry among the references") for key in dict.fromkeys(keys))
