"""What is said about texts too short for what is asked of them: of vocabularies, validation texts and trainings."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepformer.cli import main

STORY = "The old keeper wrote a letter, and nobody answered it. "


def prepared(folder: Path, text: str, *words: str) -> Path:
    """The corpus that `stepformer prepare` makes of a text."""
    (folder / "a.txt").write_text(text)
    assert main(["prepare", str(folder / "a.txt"), "--out", str(folder / "corpus"), *words]) == 0
    return folder / "corpus"


def test_prepare_says_why_a_vocabulary_is_smaller_than_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(tmp_path, STORY * 20, "--tokenizer", "bpe:512")
    why = "ids, for the text it was trained on has no more pairs to join: each of its words is one id\n"
    assert why in capsys.readouterr().out
    prepared(tmp_path, STORY * 20, "--tokenizer", "bpe:260", "--force")
    assert "no more pairs" not in capsys.readouterr().out


def test_prepare_says_that_a_validation_text_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared(tmp_path, STORY * 200, "--tokenizer", "bytes")
    few = "note: 552 validation tokens are few, so losses on them are noisy; a larger --val-fraction (with --force)"
    assert few in capsys.readouterr().out
    prepared(tmp_path, STORY * 200, "--tokenizer", "bytes", "--val-fraction", "0.2", "--force")
    assert "noisy" not in capsys.readouterr().out


def test_prepare_says_that_nothing_has_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared(tmp_path, STORY * 20, "--tokenizer", "bytes")
    assert "unchanged" not in capsys.readouterr().out
    prepared(tmp_path, STORY * 20, "--tokenizer", "bytes")
    assert capsys.readouterr().out.startswith("unchanged: this corpus was prepared before, of the same source")
    prepared(tmp_path, STORY * 20, "--tokenizer", "bytes", "--force")
    assert "unchanged" not in capsys.readouterr().out
