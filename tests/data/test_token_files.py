"""Corpora from tokens that other code has written."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import pytest

from stepformer import StepformerError
from stepformer.data import Corpus, make_tokenizer, open_source, token_files
from stepformer.data.prepare import prepare

BYTES = make_tokenizer("bytes")
TEXTS = ["One day a fox came.", "Ödön saw it.", "The end."]


def ids(*texts: str, end: bool = True) -> np.ndarray:
    tokens = [token for text in texts for token in [*BYTES.encode(text), BYTES.eot]]
    return np.array(tokens if end else tokens[:-1], "<u2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A packed file, one with a header, one of another split, and a text about them."""
    found = tmp_path / "tokens"
    found.mkdir()
    (found / "a_train.bin.xz").write_bytes(lzma.compress(ids(*TEXTS[:2]).tobytes()))
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 9
    (found / "b_train_000001.bin").write_bytes(header.tobytes() + ids(TEXTS[2], end=False).tobytes())
    (found / "a_val.bin").write_bytes(ids(TEXTS[2]).tobytes())
    (found / "PROVENANCE.md").write_text("From nowhere.")
    return found


@pytest.mark.parametrize("block", [7, 2**21])
def test_tokens_stay_as_they_are(folder: Path, tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "BLOCK", block)
    corpus = prepare(open_source(str(folder)), "bytes", tmp_path / "corpus")
    train, val = corpus.split("train"), corpus.split("val")
    assert np.array_equal(train.tokens(0, len(train)), ids(*TEXTS))
    assert np.array_equal(val.tokens(0, len(val)), ids(TEXTS[2]))
    assert (train.documents, val.documents) == (3, 1)
    assert train.bytes == sum(len(text.encode()) for text in TEXTS)
    Corpus(tmp_path / "corpus").verify()
    assert corpus.manifest["split_rule"]["rule"] == "marked"


def test_one_file_is_a_corpus_without_validation(folder: Path, tmp_path: Path) -> None:
    corpus = prepare(open_source(str(folder / "a_train.bin.xz")), "bytes", tmp_path / "corpus")
    assert corpus.name == "a_train"
    assert len(corpus.split("val")) == 0


def test_text_beside_them_counts_more(folder: Path) -> None:
    (folder / "story.txt").write_text(TEXTS[0])
    assert [document.text for document in open_source(str(folder))] == TEXTS[:1]


def test_refusals(folder: Path, tmp_path: Path) -> None:
    source = open_source(str(folder))
    with pytest.raises(StepformerError, match="no text to train 'bpe:300' on"):
        prepare(source, "bpe:300", tmp_path / "corpus")
    with pytest.raises(StepformerError, match=r"'tokens' says itself which .* with 'val' in their names"):
        prepare(source, "bytes", tmp_path / "corpus", val_fraction=0.1)
    with pytest.raises(StepformerError, match="option 'limit' does not apply to ready-made tokens"):
        open_source(str(folder), limit=3)
    (folder / "c.bin").write_bytes(np.array([5, 300], "<u2").tobytes())
    with pytest.raises(StepformerError, match=r"c.bin' has the token 300, and tokenizer 'bytes' has 257"):
        prepare(open_source(str(folder)), "bytes", tmp_path / "corpus")
    (folder / "c.bin").write_bytes(b"abc")
    with pytest.raises(StepformerError, match=r"c.bin' is damaged: it ends inside of a token of 2 bytes"):
        prepare(open_source(str(folder)), "bytes", tmp_path / "corpus")
    (folder / "meta.pkl").write_bytes(b"whatever it is, it is not unpickled")
    with pytest.raises(StepformerError, match=r"meta.pkl' says that these tokens are characters .* prepare the text"):
        open_source(str(folder))
