"""Datasets by name, from copies that are laid out as on the Hub: which files, splits, documents and revisions."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when those packages are imported

import pytest

from stepformer import StepformerError
from stepformer.cli.main import main
from stepformer.data import open_source
from stepformer.data.sources import DATASETS, PARQUET
from texts import copies_of_datasets, documents, stories, write_rows

prepare = importlib.import_module("stepformer.data.prepare").prepare


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copies_of_datasets(tmp_path_factory.mktemp("hub"))


def texts(spec: str, **options: Any) -> list[str]:
    return [document.text for document in open_source(spec, **options)]


def test_tinystories_has_a_split_of_its_own(copies: Path, tmp_path: Path) -> None:
    """Momentum Streams takes the splits of the dataset, YuriiFormer 0.5 % of its training split."""
    corpus = prepare(open_source("tinystories", local=copies / "tinystories"), "bytes", tmp_path / "own", workers=1)
    assert (corpus.name, corpus.manifest["split_rule"]["rule"]) == ("tinystories", "marked")
    assert documents(corpus, "train") == [f"train {s} {i}" for s, n in ((0, 60), (1, 50)) for i in range(n)]
    assert documents(corpus, "val") == [f"validation {i}" for i in range(7)]
    source = open_source("tinystories", local=copies / "tinystories", split="train")
    corpus = prepare(source, "bytes", tmp_path / "carved", val_fraction=0.2, workers=1)
    assert (corpus.name, corpus.manifest["split_rule"]["rule"]) == ("tinystories-train", "hash")
    assert {*documents(corpus, "train"), *documents(corpus, "val")} == {
        f"train {s} {i}" for s, n in ((0, 60), (1, 50)) for i in range(n)
    }
    assert 10 < corpus.split("val").documents < 35  # margin: a hash, the same everywhere


def test_tinystories_as_text_files(tmp_path: Path) -> None:
    """The Hub also has them as text, with <|endoftext|> between stories of several lines."""
    several = [{"text": "One day\n\na fox\nran."}, {"text": "The end."}]
    for split, rows in (("train", several * 60), ("valid", several)):
        write_rows(tmp_path / "in" / f"TinyStories-{split}.txt", rows)
    corpus = prepare(open_source("tinystories", local=tmp_path / "in"), "bytes", tmp_path / "out", workers=1)
    assert documents(corpus, "train") == [row["text"] for row in several * 60]
    assert documents(corpus, "val") == [row["text"] for row in several]
    lines = texts("tinystories", local=tmp_path / "in", split="validation", document="line")
    assert lines == ["One day", "a fox", "ran.", "<|endoftext|>", "The end."]


@pytest.mark.parametrize("layout", ["plain_text/train-{:05d}-of-00002.parquet", "plain_text/train/{:04d}.parquet"])
def test_openwebtext_in_both_layouts(layout: str, tmp_path: Path) -> None:
    """Of its own repository and of the Hub's copy: one split, of which a twentieth is kept for validation."""
    rows = stories(400)
    for shard in range(2):
        write_rows(tmp_path / "in" / layout.format(shard), rows[200 * shard : 200 * (shard + 1)])
    source = open_source("openwebtext", local=tmp_path / "in")
    assert len(source.units()) == 2
    corpus = prepare(source, "bytes", tmp_path / "out", workers=1)
    train, val = documents(corpus, "train"), documents(corpus, "val")
    assert sorted([*train, *val]) == sorted(row["text"] for row in rows)
    assert 8 < len(val) < 35  # margin: a hash, the same everywhere
    assert corpus.manifest["split_rule"]["rule"] == "hash"


@pytest.mark.parametrize("readme", [True, False])
def test_configs_of_a_local_copy(readme: bool, tmp_path: Path) -> None:
    """A README may say where a config lies; without one its folder has its name, or is given itself."""
    copies_of_datasets(tmp_path)
    if readme:
        files = "  data_files:\n  - split: train\n    path: wikitext-103-v1/train-*\n"
        (tmp_path / "wikitext" / "README.md").write_text(f"---\nconfigs:\n- config_name: wikitext-103-v1\n{files}---\n")
    for folder in ("wikitext", "wikitext/wikitext-103-v1"):
        found = texts("wikitext", local=tmp_path / folder, split="validation")
        assert found == [" = wikitext-103-v1 = \n", " A validation of wikitext-103-v1 . \n"]
    assert texts("lambada", local=tmp_path / "lambada", split="test") == [f"passage default {i}" for i in range(5)]
    assert texts(f"hf:{tmp_path / 'c4' / 'en'}", split="train")[3:5] == ["train 0 3", "train 1 0"]


def test_a_fraction_that_cannot_apply_is_refused(
    copies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = r"fraction of 0\.\d+ cannot apply: 'tinystories' says itself which documents .* \(--split train\)"
    local, out = copies / "tinystories", tmp_path / "out"
    with pytest.raises(StepformerError, match=refused):
        prepare(open_source("tinystories", local=local), "bytes", out, val_fraction=0.3)
    assert not out.exists()
    prepare(open_source("tinystories", local=local), "bytes", out)
    for fraction in (0.05, 0.3):  # the default as well: the finished corpus does not have it
        with pytest.raises(StepformerError, match=refused):
            prepare(open_source("tinystories", local=local), "bytes", out, val_fraction=fraction)
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": f"row {i}", "held": i < 9} for i in range(200)])
    words = [
        "prepare",
        str(rows),
        "--workers",
        "1",
        "--tokenizer",
        "bytes",
        "--out",
        str(tmp_path / "rows"),
        "--val-fraction",
        "0.1",
    ]
    assert main([*words, "--val-field", "held"]) == 2
    assert "fraction of 0.1 cannot apply: 'rows' says itself" in capsys.readouterr().err
    assert main(words) == 0
    words = ["prepare", "tinystories", "--local", str(local), "--workers", "1", "--tokenizer", "bytes"]
    words += ["--out", str(tmp_path / "alone")]
    assert main([*words, "--val-fraction", "0.1"]) == 2
    assert "cannot apply" in capsys.readouterr().err
    assert main([*words, "--val-fraction", "0.1", "--split", "train", "--limit", "105"]) == 0
    assert "tinystories-train-105 with tokenizer bytes" in capsys.readouterr().out


def test_the_first_documents(copies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = copies / "tinystories"
    source = open_source("tinystories", local=local, limit=62)
    assert (source.name, list(source.units())) == ("tinystories-62", ["train 1/1", "validation 1/1"])
    corpus = prepare(source, "bytes", tmp_path / "both", workers=1)
    expected = [*(f"train 0 {i}" for i in range(60)), "train 1 0", "train 1 1"]
    assert documents(corpus, "train") == expected
    assert corpus.split("val").documents == 7
    assert len({open_source("tinystories", local=local, limit=n).fingerprint for n in (None, 61, 62)}) == 3
    # blank rows are no documents, here as everywhere
    assert len(texts("wikitext", local=copies / "wikitext", split="train", limit=2)) == 2
    write_rows(tmp_path / "files" / "a.jsonl", [{"text": ""}, *stories(3)])
    write_rows(tmp_path / "files" / "b.jsonl", stories(9)[3:])
    assert texts(str(tmp_path / "files"), limit=5) == [row["text"] for row in stories(5)]
    assert texts(str(tmp_path / "files"), limit=99) == [row["text"] for row in stories(9)]
    # stopped in the middle, it goes on in the middle
    module = importlib.import_module("stepformer.data.prepare")
    monkeypatch.setattr(module, "PIECE_SEGMENTS", 20)
    whole = prepare(open_source("tinystories", local=local, limit=62), "bytes", tmp_path / "whole", workers=1)
    write, written = module.pieces.write_part, []

    def stopped(path: Path, *rest: Any) -> Any:
        written.append(path.name)
        if len(written) == 3:
            raise KeyboardInterrupt
        return write(path, *rest)

    monkeypatch.setattr(module.pieces, "write_part", stopped)
    with pytest.raises(KeyboardInterrupt):
        prepare(open_source("tinystories", local=local, limit=62), "bytes", tmp_path / "again", workers=1)
    again = prepare(open_source("tinystories", local=local, limit=62), "bytes", tmp_path / "again", workers=1)
    assert [again.split(name).hash for name in ("train", "val")] == [whole.split(n).hash for n in ("train", "val")]
    assert len(written) == len(set(written)) + 1


def test_a_copy_that_is_only_a_beginning(tmp_path: Path) -> None:
    """The Hub converts the first 5 GB of a split and calls it partial-train, which `datasets` takes for train."""
    write_rows(tmp_path / "plain_text" / "partial-train" / "0000.parquet", stories(9))
    with pytest.raises(StepformerError, match=r"only a beginning here .*partial-.*--limit"):
        texts("openwebtext", local=tmp_path)
    assert texts("openwebtext", local=tmp_path, limit=2) == [row["text"] for row in stories(2)]


class Hub:
    """What the Hub was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...] = ()) -> None:
        import datasets
        import huggingface_hub

        self.loaded: list[dict[str, Any]] = []
        self.revisions: list[str | None] = []

        def load(path: str, name: str | None, **options: Any) -> Any:
            self.loaded.append({"path": path, "name": name, **options})
            return dict.fromkeys(("train", "test"), datasets.Dataset.from_list(stories(300)).to_iterable_dataset())

        def info(api: Any, path: str, revision: str | None, timeout: float) -> Any:
            self.revisions.append(revision)
            return huggingface_hub.DatasetInfo(id=path, sha=f"sha of {revision}", private=False, tags=[])

        monkeypatch.setattr(datasets, "load_dataset", load)
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda api, path, **options: files)


@pytest.mark.parametrize("kind", ["ConnectError", "ConnectTimeout", "ReadTimeout"])
def test_without_a_network_the_hub_is_not_asked_for_long(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow answer is no missing network: then its client tries as often as it always does."""
    import datasets
    import huggingface_hub

    def info(*args: Any, **options: Any) -> None:
        raise type(kind, (Exception,), {})("[Errno -2] Name or service not known")

    def load(*args: Any, **options: Any) -> None:
        seen.append(patience["max_retries"])
        raise ConnectionError("Couldn't reach 'some/where' on the Hub")

    patience = huggingface_hub.utils.http_backoff.__kwdefaults__
    usual, seen = patience["max_retries"], []
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    with pytest.raises(
        StepformerError, match="The dataset 'some/where' cannot be reached: Couldn't reach 'some/where'"
    ):
        prepare(open_source("hf:some/where"), "bytes", tmp_path / "out", workers=1)
    assert seen == [usual if kind == "ReadTimeout" else 1]
    assert patience["max_retries"] == usual > 1


def test_revisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch)
    corpus = prepare(open_source("openwebtext"), "bytes", tmp_path / "a", workers=1)
    assert hub.revisions == [DATASETS["openwebtext"].revision]
    assert corpus.manifest["pinned"] == {"revision": f"sha of {DATASETS['openwebtext'].revision}"}
    assert hub.loaded[0]["revision"] == corpus.manifest["pinned"]["revision"]
    corpus = prepare(open_source("openwebtext", revision="main"), "bytes", tmp_path / "b", workers=1)
    assert (hub.revisions[-1], hub.loaded[-1]["revision"]) == ("main", "sha of main")
    assert corpus.manifest["source"]["revision"] == "main"
    with pytest.raises(StepformerError, match="made with another revision: "):
        prepare(open_source("openwebtext"), "bytes", tmp_path / "b")
    # the Hub's copy has no README: a config is a folder there
    list(open_source("hf:some/where:de", revision=PARQUET))
    assert (hub.loaded[-1]["name"], hub.loaded[-1]["data_dir"]) == (None, "de")
    list(open_source("hf:some/where:de", revision="v2"))
    assert (hub.loaded[-1]["name"], hub.loaded[-1]["data_dir"]) == ("de", None)
    source = open_source("lambada", split="test")
    assert source.pin({}) == {"revision": f"sha of {PARQUET}"}
    assert len(list(source)) == 300
    assert hub.loaded[-1]["data_dir"] == "default"
    for files, refused in ((("en/partial-train/0000.parquet",), True), (("de/partial-train/0000.parquet",), False)):
        Hub(monkeypatch, files)
        if refused:
            with pytest.raises(StepformerError, match="only a beginning"):
                texts("hf:allenai/c4:en", revision=PARQUET)
        else:
            assert len(texts("hf:allenai/c4:en", revision=PARQUET)) == 300


@pytest.mark.parametrize(
    ("spec", "options", "sentence"),
    [
        ("tinystories", {"local": "nowhere"}, "There is no folder 'nowhere' with the files of 'tinystories'"),
        ("tinystories", {"local": ".", "revision": "main"}, "'revision' does not apply to local copies of datasets"),
        ("tinystories", {"document": "line"}, "'document' does not apply to datasets"),
        ("tinystories", {"limit": 0}, "limit of documents must be at least 1, not 0"),
        ("tales", {"limit": 5}, "'limit' does not apply to the tales"),
        ("FILE", {"revision": "main"}, "'revision' does not apply to files"),
        ("FILE", {"split": "train"}, "'split' does not apply to files"),
        ("FILE", {"local": "."}, "'local' does not apply to files"),
        ("hf:", {}, "hf: needs a dataset"),
        ("hf::de", {}, "hf: needs a dataset"),
    ],
)
def test_words_that_do_not_apply(spec: str, options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    spec = str(write_rows(tmp_path / "a.jsonl", stories(2))) if spec == "FILE" else spec
    with pytest.raises(StepformerError, match=sentence):
        open_source(spec, **options)


def test_a_split_that_is_not_there(copies: Path) -> None:
    with pytest.raises(StepformerError, match="has no split 'validation'; it has train"):
        texts("openwebtext", local=copies / "openwebtext", split="validation")


@pytest.mark.parametrize(
    ("spec", "fingerprint"),
    [
        ("tinystories", "698cbc694d45890b"),
        ("openwebtext", "fe4a53bbd81aaebc"),
        ("fineweb", "1d061749293a8caa"),
        ("hf:some/where:de", "8ec29c73f8fa308f"),
    ],
)
def test_corpora_of_earlier_versions_are_still_theirs(spec: str, fingerprint: str) -> None:
    assert open_source(spec).fingerprint == fingerprint
