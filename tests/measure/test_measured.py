"""Journals and results of long measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepformer.base.errors import InputError
from stepformer.measure import measured


def test_a_journal_continues(tmp_path: Path) -> None:
    asked: list[str] = []

    def piece(name: str) -> float:
        asked.append(name)
        return len(asked) / 2

    first = measured.journal(tmp_path, "hessian", {"probes": 3})
    assert first.get("a", lambda: piece("a")) == 0.5
    with pytest.raises(KeyboardInterrupt):
        first.get("b", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    second = measured.journal(tmp_path, "hessian", {"probes": 3})
    assert second.get("a", lambda: piece("a")) == 0.5
    assert second.get("b", lambda: piece("b")) == 1.0
    assert asked == ["a", "b"]


def test_a_journal_about_something_else_begins_again(tmp_path: Path) -> None:
    measured.journal(tmp_path, "hessian", {"probes": 3}).get("a", lambda: 1)
    assert measured.journal(tmp_path, "hessian", {"probes": 4}).get("a", lambda: 2) == 2


def test_what_another_measurement_left_in_a_shared_journal_stays(tmp_path: Path) -> None:
    measured.journal(tmp_path, "tasks", {}).get("interrupted", lambda: 1)
    second = measured.journal(tmp_path, "tasks", {})
    second.get("finished", lambda: 2)
    second.close_used()
    third = measured.journal(tmp_path, "tasks", {})
    assert third.pieces == {"interrupted": 1}
    assert third.get("interrupted", lambda: 3) == 1
    third.close_used()
    assert not third.path.exists()


def test_a_run_that_may_not_be_written_to_has_its_measurements_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, here = tmp_path / "theirs", tmp_path / "here"
    theirs.mkdir()
    here.mkdir()
    old = measured.save(theirs, "tasks", step=1, settings={}, result={"a": 1})
    assert old == theirs / "measured" / "tasks.json"
    monkeypatch.chdir(here)
    monkeypatch.setattr(measured.os, "access", lambda path, mode: theirs not in (path, path.parent))
    assert measured.load(theirs, "tasks")["result"] == {"a": 1}  # what was there can be read
    measured.journal(theirs, "tasks", {}).get("part", lambda: 1)
    new = measured.save(theirs, "tasks", step=1, settings={}, result={"a": 2})
    assert new.resolve().is_relative_to(here / "measured")
    assert measured.load(theirs, "tasks")["result"] == {"a": 2}
    assert sorted(theirs.rglob("*")) == [theirs / "measured", old]


def test_half_a_line_is_dropped(tmp_path: Path) -> None:
    first = measured.journal(tmp_path, "x", {})
    first.get("a", lambda: [1.0])
    with first.path.open("a") as file:
        file.write('{"name": "b", "val')
    again = measured.journal(tmp_path, "x", {})
    assert again.pieces == {"a": [1.0]}
    assert again.get("b", lambda: 7) == 7
    assert measured.journal(tmp_path, "x", {}).pieces == {"a": [1.0], "b": 7}


def test_a_journal_whose_lines_were_changed_is_not_believed(tmp_path: Path) -> None:
    book = measured.journal(tmp_path, "x", {})
    for name in ("a", "b", "c"):
        book.get(name, lambda: 1.25)
    path = tmp_path / "measured" / "x.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[2].replace("1.25", "1.35"), *lines[3:]]))
    assert measured.journal(tmp_path, "x", {}).pieces == {"a": 1.25}


def test_results_are_kept_and_read(tmp_path: Path) -> None:
    assert measured.load(tmp_path, "depth") is None
    path = measured.save(tmp_path, "depth", step=7, settings={"tokens": 9}, result={"layers": []})
    found = measured.load(tmp_path, "depth")
    assert found is not None
    assert found["step"] == 7
    assert found["settings"] == {"tokens": 9}
    for text in ("{", "[1]", '{"format": 1, "settings": {}}'):
        path.write_text(text)
        with pytest.raises(InputError, match="damaged"):
            measured.load(tmp_path, "depth")
