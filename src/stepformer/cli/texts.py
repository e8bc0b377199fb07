"""What `stepformer NAME --help` says, by command; read without importing anything that takes time."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path


@functools.cache
def texts() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
