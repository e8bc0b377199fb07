"""docs/coverage.md is what docs/coverage_page.py makes, its commands are commands and its tests are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import stepformer as sf
from scripts import script
from stepformer.base.words import merge
from stepformer.catalogue.recipes import recipe_names
from stepformer.cli.main import parser

ROOT = Path(__file__).resolve().parents[2]


SCRIPT = script("docs/coverage_page.py")
ROWS = [row for members in SCRIPT.rows().values() for row in members]


def test_the_page_is_made_of_what_there_is() -> None:
    page = (ROOT / "docs/coverage.md").read_text()
    assert page == SCRIPT.page(), "run `python docs/coverage_page.py`"
    for name in sf.presets():
        assert f"| `{name}`" in page
    for name in recipe_names():
        assert f"recipe `{name}`" in page


def test_every_command_is_one() -> None:
    """Words that name a run or a corpus stand in capitals; architectures are looked up, options parsed."""
    for row in ROWS:
        name, command, *words = shlex.split(row["command"])
        assert name == "stepformer", row["command"]
        try:
            given = parser(command).parse_args([command, *words])
        except SystemExit:
            pytest.fail(row["command"])
        if command in ("show", "audit"):
            names = [word for word in words if "=" not in word and not word.startswith("-")]
            settings = merge({}, [word for word in words if "=" in word], "model")
            for each in names:
                assert sf.presets(each), row["command"]
                sf.model_config(each, **settings)
        assert given is not None


def test_every_row_has_a_test_that_exists() -> None:
    for row in ROWS:
        assert row["tests"] or row.get("differs"), row["item"]
        for test in row["tests"]:
            file, name = test.split("::")
            assert re.search(rf"^\s*def {name}\(", (ROOT / file).read_text(), flags=re.MULTILINE), test
