"""docs/ways-through-depth.md and the vector pictures are what their scripts in docs/ make of the stored results."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    sys.path.insert(0, str(ROOT / "docs"))
    return importlib.import_module("depth_page")


def test_the_page_is_made_of_what_there_is(script: Any) -> None:
    assert (ROOT / "docs/ways-through-depth.md").read_text() == script.page(), "run `python docs/depth_page.py`"
    assert script.missing() == []


def test_the_picture_has_every_rule_with_a_loss_and_a_speed(script: Any) -> None:
    drawn = script.PICTURE.read_text()
    assert drawn == script.picture(), "run `python docs/depth_page.py`"
    words = [element.text for element in ElementTree.fromstring(drawn).iter() if element.tag.endswith("text")]
    with (ROOT / "docs" / script.DRAWN[0]).open() as file:
        rows = {row["architecture"]: row for row in csv.DictReader(file)}
    speeds = script.speeds()
    for name, row in rows.items():
        said = script.SAID.get(name, name)
        if row["difference"] and script.BENCHED.get(name, name) in speeds:
            (point,) = [point for point in script.points(speeds) if point.name == said]
            assert (f"{point.loss:+.6f}", f"{point.low:+.6f}") == (row["difference"], row["difference_low"])
            assert said in words
    assert "better and as fast" in words


def test_comparisons_of_different_text_are_not_drawn_together(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "DRAWN", (*script.DRAWN, "raw/2026-11-rivals/tiny.csv"))
    with pytest.raises(AssertionError, match="differ in baseline, budget or validation text"):
        script.points(script.speeds())


def test_the_figure_of_a_layer_is_what_its_script_draws(script: Any) -> None:
    figure = importlib.import_module("layer_figure")
    assert figure.OUT.read_text() == figure.figure(), "run `python docs/layer_figure.py`"
    plain, momentum = figure.walk(2 / 13, 0.0), figure.walk(4 / 37, figure.BETA)
    assert plain[1] == pytest.approx((-10 * (1 - 2 / 13), 1.6 * (1 - 24 / 13)))  # x - gamma g(x)
    v = [-4 / 37 * c * x for x, c in zip(figure.START, (1, 12), strict=True)]
    x = [x + v for x, v in zip(figure.START, v, strict=True)]
    ahead = [x + figure.BETA * v for x, v in zip(x, v, strict=True)]
    v = [figure.BETA * v - 4 / 37 * c * a for v, c, a in zip(v, (1, 12), ahead, strict=True)]
    assert momentum[2] == pytest.approx([x + v for x, v in zip(x, v, strict=True)])


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
