"""The prepared corpus: its tokens across shards, what its manifest says, and that damage is named."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from stepformer import StepformerError
from stepformer.base import files
from stepformer.data import Corpus, corpus_folder, load_tokenizer, make_tokenizer, open_source
from stepformer.data.prepare import prepare
from stepformer.training.corpora import checked
from texts import documents, stories, write_rows


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    path = write_rows(tmp_path / "in" / "stories.jsonl", stories(400))
    return prepare(open_source(str(path)), "bytes", tmp_path / "corpus", shard_tokens=3000)


def test_tokens_across_shards(corpus: Corpus) -> None:
    train = corpus.split("train")
    shards = corpus.manifest["splits"]["train"]["shards"]
    assert len(shards) > 3
    raw = np.concatenate([np.fromfile(corpus.folder / shard["file"], "<u2") for shard in shards])
    assert len(train) == len(raw) == sum(shard["tokens"] for shard in shards)
    assert [shard["tokens"] for shard in shards[:-1]] == [3000] * (len(shards) - 1)
    for start, stop in ((0, len(raw)), (2990, 3010), (2999, 9001), (3000, 3001), (len(raw), len(raw)), (5, 5)):
        assert np.array_equal(train.tokens(start, stop), raw[start:stop])
    starts = np.array([0, 2995, 3000, 5999, len(raw) - 50])
    rows = train.gather(starts, 50)
    assert rows.dtype == np.int64
    assert np.array_equal(rows, np.stack([raw[s : s + 50] for s in starts]))
    for start, stop in ((-1, 5), (0, len(raw) + 1), (7, 6)):
        with pytest.raises(StepformerError, match="do not exist: it has"):
            train.tokens(start, stop)
    for starts in (np.array([-1]), np.array([0, len(raw) - 49])):
        with pytest.raises(StepformerError, match="do not all exist"):
            train.gather(starts, 50)
    assert train.gather(np.array([], dtype=np.int64), 5).shape == (0, 5)
    with pytest.raises(StepformerError, match="has no split 'test'; it has train, val"):
        corpus.split("test")


def test_a_half_has_the_entropy_of_its_own_tokens(corpus: Corpus) -> None:
    val = corpus.split("val")
    raw, middle = val.tokens(0, len(val)), len(val) // 2
    for which, part in (("all", raw), ("first", raw[:middle]), ("second", raw[middle:])):
        shares = [np.mean(part == token) for token in set(part.tolist())]
        assert val.half(which).entropy == pytest.approx(-sum(p * np.log(p) for p in shares), abs=1e-6)
    assert len({val.half(which).entropy for which in ("all", "first", "second")}) == 3


def test_the_hash_does_not_depend_on_the_shards(corpus: Corpus, tmp_path: Path) -> None:
    source = open_source(str(tmp_path / "in"))
    other = prepare(source, "bytes", tmp_path / "other")
    assert len(other.manifest["splits"]["train"]["shards"]) == 1
    for split in ("train", "val"):
        assert other.split(split).hash == corpus.split(split).hash
    assert corpus.split("train").hash != corpus.split("val").hash


def test_counts_and_entropy(corpus: Corpus) -> None:
    everything = [row["text"] for row in stories(400)]
    for split in ("train", "val"):
        found = documents(corpus, split)
        tokens = corpus.split(split)
        assert set(found) <= set(everything)
        assert (tokens.documents, tokens.bytes) == (len(found), sum(len(text.encode()) for text in found))
        assert len(tokens) == tokens.bytes + tokens.documents
        share = np.unique(tokens.tokens(0, len(tokens)), return_counts=True)[1] / len(tokens)
        assert tokens.entropy == pytest.approx(-(share * np.log(share)).sum(), abs=2e-6)  # six decimals
    assert sorted(documents(corpus, "train") + documents(corpus, "val")) == sorted(everything)


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepformer.data.tokenizers import ByteTokenizer

    def wide(self: ByteTokenizer, text: str) -> list[int]:
        return [70_000 for _ in text]

    monkeypatch.setattr(ByteTokenizer, "encode", wide)
    monkeypatch.setattr(ByteTokenizer, "vocab_size", property(lambda self: 70_001, lambda self, value: None), False)
    path = write_rows(tmp_path / "a.jsonl", stories(200))
    corpus = prepare(open_source(str(path)), "bytes", tmp_path / "out")
    assert corpus.manifest["dtype"] == "uint32"
    assert corpus.split("train").tokens(0, 5).tolist() == [70_000] * 5
    assert corpus.split("train").gather(np.array([3]), 2).tolist() == [[70_000] * 2]


def test_damaged_shards_are_named(corpus: Corpus) -> None:
    corpus.verify()
    shard = corpus.folder / "train-00001.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    damaged = Corpus(corpus.folder)  # the size is right
    with pytest.raises(StepformerError, match=r"Shard 'train-00001.bin' of '.*' is damaged: its checksum.*--force"):
        damaged.verify()
    shard.write_bytes(whole[:-2])
    with pytest.raises(
        StepformerError, match=r"Shard 'train-00001.bin' .* is damaged: it has 5,998 bytes instead of 6,000"
    ):
        Corpus(corpus.folder)
    shard.unlink()
    with pytest.raises(StepformerError, match=r"Shard 'train-00001.bin' .* is damaged: the file is missing"):
        Corpus(corpus.folder)
    shard.write_bytes(whole)
    read: list[int] = []
    Corpus(corpus.folder).verify(read.append)
    assert sum(read) == sum(p.stat().st_size for p in corpus.folder.glob("*.bin"))


def test_a_corpus_is_hashed_again_when_it_was_changed(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study opens its corpus for every run."""
    hashed: list[str] = []
    original = Corpus.verify
    monkeypatch.setattr(Corpus, "verify", lambda self: (hashed.append(self.name), original(self)))
    for _ in range(3):
        checked(Corpus(corpus.folder))
    assert len(hashed) == 1
    shard = corpus.folder / "train-00001.bin"
    whole, times = shard.read_bytes(), shard.stat()
    shard.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(StepformerError, match=r"Shard 'train-00001.bin' .* is damaged: its checksum"):
        checked(Corpus(corpus.folder))


def test_a_damaged_corpus_is_made_again_with_force(corpus: Corpus, tmp_path: Path) -> None:
    source = open_source(str(tmp_path / "in" / "stories.jsonl"))
    before = (corpus.folder / "manifest.json").read_bytes()
    (corpus.folder / "val-00000.bin").write_bytes(b"")
    with pytest.raises(StepformerError, match=r"'val-00000.bin' .* is damaged"):
        prepare(source, "bytes", corpus.folder, shard_tokens=3000)
    prepare(source, "bytes", corpus.folder, shard_tokens=3000, force=True).verify()
    assert (corpus.folder / "manifest.json").read_bytes() == before


def test_manifest_faults(corpus: Corpus, tmp_path: Path) -> None:
    path = corpus.folder / "manifest.json"
    whole = path.read_text()
    with pytest.raises(StepformerError, match=r"There is no corpus '.*nowhere'"):
        Corpus(tmp_path / "nowhere")
    for text, sentence in (
        (whole[:50], "not valid JSON"),
        ("[]", "it is not a JSON object"),
        (whole.replace('"format": 1', '"format": 2'), "has format 2; a newer stepformer wrote it"),
        ('{"format": 1}', "damaged: name is missing"),
    ):
        path.write_text(text)
        with pytest.raises(StepformerError, match=sentence):
            Corpus(corpus.folder)
    shards = {p.name: files.sha256(p) for p in corpus.folder.glob("*.bin")}
    path.unlink()
    with pytest.raises(StepformerError, match=r"was not finished \(no manifest.json\); run stepformer prepare again"):
        Corpus(corpus.folder)
    again = prepare(open_source(str(tmp_path / "in")), "bytes", corpus.folder, shard_tokens=3000)
    assert {p.name: files.sha256(p) for p in again.folder.glob("*.bin")} == shards


def test_tokenizer_mismatch(corpus: Corpus, tmp_path: Path) -> None:
    other = make_tokenizer("bpe:300", lambda: ["some text " * 50])
    with pytest.raises(StepformerError, match=r"were made by the tokenizer bytes .* not by bpe:300"):
        corpus.check_tokenizer(other)
    own = corpus.folder / "tokenizer"
    other.save(own)
    with pytest.raises(StepformerError, match=r"were made by the tokenizer bytes .* not by bpe:300"):
        _ = Corpus(corpus.folder).tokenizer
    with pytest.raises(StepformerError, match="were made by the tokenizer bytes"):
        Corpus(corpus.folder).verify()
    make_tokenizer("bytes").save(own)
    assert Corpus(corpus.folder).tokenizer.fingerprint == load_tokenizer(own).fingerprint
    assert len(Corpus(corpus.folder).split("train")) == len(corpus.split("train"))


def test_default_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STEPFORMER_HOME", raising=False)
    assert corpus_folder("tales", "bpe:1024") == Path("data/tales-bpe-1024")
    assert corpus_folder("a b/c", "gpt2:/x/y") == Path("data/a-b-c-gpt2")
    monkeypatch.setenv("STEPFORMER_HOME", str(tmp_path))
    assert corpus_folder("tales", "bytes") == tmp_path / "data" / "tales-bytes"
