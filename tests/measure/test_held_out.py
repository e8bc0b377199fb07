"""Held-out text of datasets by name: which documents, from copies as on the Hub, and what `eval` makes of it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when those packages are imported

import numpy as np
import pytest

from runs import make_corpus, small_run
from stepformer.base.errors import InputError, StepformerError
from stepformer.cli import main
from stepformer.data import open_source
from stepformer.data.prepare import prepare
from stepformer.data.tokenizers import ByteTokenizer
from stepformer.measure.evaluation.perplexity import Reading
from stepformer.measure.evaluation.texts import OUT_OF_DOMAIN, Text, held_out, open_text
from stepformer.training import train
from texts import copies_of_datasets, documents, write_rows

TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copies_of_datasets(tmp_path_factory.mktemp("hub"))


def tokens(texts: list[str]) -> list[int]:
    return [token for text in texts for token in [*text.encode(), TOKENIZER.eot]]


def test_the_texts_of_the_paper(copies: Path) -> None:
    """WikiText-103-v1, validation, each row that is not blank as it is; LAMBADA's passages; 5,000 documents of C4."""
    lines = [" = wikitext-103-v1 = \n", " A validation of wikitext-103-v1 . \n"]
    passages = [f"passage default {i}" for i in range(5)]
    pages = [f"validation {shard} {i}" for shard in range(2) for i in range(3000)][:5000]
    found = [held_out(name, TOKENIZER, copies) for name in OUT_OF_DOMAIN]
    for text, name, expected in zip(found, ("wikitext", "lambada", "c4"), (lines, passages, pages), strict=True):
        assert text.name == name
        assert text.tokens.tolist() == tokens(expected)
    assert [text.source for text in found] == [
        "wikitext wikitext-103-v1 validation",
        "lambada default test",
        "c4 en validation first 5,000",
    ]
    assert len(held_out("c4", TOKENIZER, copies, enough=100)) < 120


def test_documents_that_no_corpus_trains_on(copies: Path, tmp_path: Path) -> None:
    """OpenWebText has one split: what measures a run is what `prepare` keeps out of its training."""
    pages = [f"page {shard} {i}" for shard in range(3) for i in range(300)]
    shares = {page: int(hashlib.sha256(page.encode()).hexdigest()[:16], 16) / 2**64 for page in pages}
    expected = [page for page in pages if shares[page] < 0.05]
    assert expected
    assert open_text("openwebtext", TOKENIZER, data=copies).tokens.tolist() == tokens(expected)
    source = open_source("openwebtext", local=copies / "openwebtext")
    corpus = prepare(source, "bytes", tmp_path / "out", workers=1)
    assert documents(corpus, "val") == expected
    validation = [f"validation {i}" for i in range(7)]
    assert open_text("tinystories", TOKENIZER, data=copies).tokens.tolist() == tokens(validation)


def test_files_that_are_not_laid_out(tmp_path: Path) -> None:
    """Any file in the folder of a name: the first one, and of it as many documents as of the dataset."""
    rows = [{"text": f"row {i}"} for i in range(5001)]
    for name in ("c4", "openwebtext"):
        write_rows(tmp_path / name / "some.jsonl.gz", rows)
        write_rows(tmp_path / name / "zz.jsonl", [{"text": "not this one"}])
        text = held_out(name, TOKENIZER, tmp_path)
        assert (text.source, text.tokens.tolist()) == (
            f"{name}/some.jsonl.gz",
            tokens([r["text"] for r in rows[:5000]]),
        )
    (tmp_path / "tinystories").mkdir()
    (tmp_path / "tinystories" / "a.txt").write_text("one\ntwo\n<|endoftext|>\nthree")
    assert held_out("tinystories", TOKENIZER, tmp_path).tokens.tolist() == tokens(["one\ntwo", "three"])
    # numbered files are those of the Hub, without the folder of the config too: the split is read, not the first file
    for split in ("test", "validation"):
        write_rows(tmp_path / "wikitext" / f"{split}-00000-of-00001.parquet", [{"text": f" {split}\n"}])
    assert held_out("wikitext", TOKENIZER, tmp_path).tokens.tolist() == tokens([" validation\n"])


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'wikitext' is not in"):
        held_out("wikitext", TOKENIZER, tmp_path)
    with pytest.raises(StepformerError, match=r"'allenai/c4' .* cannot be reached.* --data DIR: DIR/c4/, laid out"):
        held_out("c4", TOKENIZER)
    with pytest.raises(InputError, match="of 'c4' are known: field, document and split do not apply"):
        open_text("c4", TOKENIZER, field="body")


def test_random_windows_are_those_of_the_paper() -> None:
    """200 batches of 8 places from numpy's generator with seed 0, the last two places left out."""
    text = Text("t", np.arange(5000), "t")
    draw = np.random.default_rng(0)
    starts = [start for _ in range(200) for start in draw.integers(0, len(text) - 1024 - 2, size=8).tolist()]
    assert Reading(random=True).windows(text, 1024) == [(start, start + 1025, 1024) for start in starts]
    short = Text("t", np.arange(18), "t")
    assert Reading(random=True, tokens=16).windows(short, 16) == [(0, 17, 16)]


def test_names_on_the_command_line(
    copies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_corpus(tmp_path / "tales")
    train(small_run(tmp_path / "tales"), tmp_path / "run", quiet=True)
    words = ["eval", str(tmp_path / "run"), "--json", "--tokens", "64"]

    def measured(*more: str) -> dict[str, float]:
        assert main([*words, *more]) == 0
        entries = json.loads(capsys.readouterr().out)["perplexity"]["texts"]
        return {entry["name"]: entry["perplexity"] for entry in entries}

    each = measured("--data", str(copies), "--on", "wikitext", "lambada", "c4", "openwebtext")
    assert list(each) == ["wikitext", "lambada", "c4", "openwebtext"]
    assert all(map(math.isfinite, each.values()))
    assert measured("--data", str(copies), "--on", "openwebtext", "--ood") == each
    monkeypatch.setenv("STEPFORMER_DATA", str(tmp_path))  # without --data, what the folder eval/ there has
    shutil.copytree(copies / "c4", tmp_path / "eval" / "c4")
    assert measured("--on", "c4") == {"c4": each["c4"]}
    for more, sentence in (
        (["--on", "lambada"], "cannot be reached"),
        (["--corpus", "c4"], "held-out text of a dataset goes by --on c4"),
        (["--on", "c4", "--field", "x"], "do not apply"),
        (["--data", str(tmp_path), "--on", str(tmp_path / "tales")], "--data is where tasks and named texts are"),
    ):
        assert main([*words, *more]) != 0
        assert sentence in capsys.readouterr().err
