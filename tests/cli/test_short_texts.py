"""What is said about texts too short for what is asked of them: of vocabularies, validation texts and trainings."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepformer.cli import main
from stepformer.cli.train import print_result

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
    shard = next(tmp_path.rglob("train-00000.bin"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(AssertionError):
        prepared(tmp_path, STORY * 20, "--tokenizer", "bytes")
    said = capsys.readouterr()
    assert "unchanged" not in said.out
    assert "checksum is not the one in the manifest. Prepare the corpus again with --force: the same source" in said.err
    prepared(tmp_path, STORY * 20, "--tokenizer", "bytes", "--force")
    assert "unchanged" not in capsys.readouterr().out
    assert shard.read_bytes() == whole


SMALL = ["n_layer=1", "n_head=2", "d_model=16", "context=64", "batch=4", "device=cpu"]


def test_train_says_that_a_validation_text_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = prepared(tmp_path, STORY * 150, "--tokenizer", "bytes")
    words = ["train", "vanilla", f"corpus={corpus}", *SMALL, "steps=1", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    assert "the validation text has 6 windows of 64 tokens: losses on it are noisy" in capsys.readouterr().err
    assert main([*words, "context=16", "eval_tokens=16", "--out", str(tmp_path / "other")]) == 0
    assert "noisy" not in capsys.readouterr().err


def test_the_end_of_a_training_says_that_it_overfits(capsys: pytest.CaptureFixture[str]) -> None:
    result = {
        **{"val_loss": 2.5, "val_tokens": 640, "val_hash": "a", "best_val_loss": 2.1, "best_step": 40, "steps": 90},
        **{"train_loss": 0.9, "train_tokens": 640, "unigram_entropy": 2.9, "tokens": 9000, "tokens_per_second": 100.0},
        **{"train_seconds": 90.0, "weights_sha256": "b", "folder": "runs/a"},
    }
    print_result(result)
    said = " ".join(capsys.readouterr().out.split())
    assert "best 2.1000 after step 40: its weights are kept, and `generate` and `eval` take them" in said
    assert "risen by 0.40 since, while that of training text fell (overfitting): more text or fewer steps help" in said
    print_result({**result, "val_loss": 2.11})
    assert "overfitting" not in capsys.readouterr().out
    print_result({**result, "train_loss": 2.4})  # it went wrong otherwise
    assert "overfitting" not in capsys.readouterr().out
