"""Where the real texts are that some tests read: $STEPFORMER_DATA, or shared/data beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REAL = Path(os.environ.get("STEPFORMER_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
GPT2 = REAL / "gpt2_bpe"
TINYSTORIES = REAL / "tinystories" / "tinystories.jsonl.xz"

needs_gpt2 = pytest.mark.skipif(not GPT2.is_dir(), reason="needs the GPT-2 vocabulary: set STEPFORMER_DATA")
needs_tinystories = pytest.mark.skipif(not TINYSTORIES.is_file(), reason="needs TinyStories: set STEPFORMER_DATA")
