"""docs/ways-through-depth.md is what docs/depth_page.py makes, and has every template of the library."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("depth_page", ROOT / "docs/depth_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["depth_page"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_of_what_there_is(script: Any) -> None:
    assert (ROOT / "docs/ways-through-depth.md").read_text() == script.page(), "run `python docs/depth_page.py`"
    assert script.missing() == []


def test_counts_are_those_of_the_equations(script: Any) -> None:
    """What is built has as many parameters as its equations say."""
    vanilla = script.Model(script.sf.model_config("vanilla", size="small"), device="meta").num_parameters()
    for row in script.THEIRS:
        config = script.config_of(row)
        if config is not None:
            assert script.Model(config, device="meta").num_parameters() - vanilla == row.parameters, row.words
    assert script.config_of(next(row for row in script.THEIRS if row.words == "attnres blocks=4")) is not None


def test_traffic_is_counted_by_hand(script: Any) -> None:
    """Vanilla reads x and g and writes x and the point at 23 of 25 boundaries: 4 less 4 at both ends, over 24 calls."""
    vanilla = script.Model(script.sf.model_config("vanilla", size="small"), device="meta")
    assert script.traffic(vanilla) == (2 + 23 * 4 + 3) / 24
