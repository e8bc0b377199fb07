"""Documents from every kind of source, and their split into training and validation."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when those packages are imported

import numpy as np
import pytest

from stepformer import StepformerError
from stepformer.base.errors import StepformerWarning
from stepformer.cli.main import main
from stepformer.data import make_tokenizer, open_source
from stepformer.data import readers as readers_module
from stepformer.data.pieces import divide, encode, segments_of
from stepformer.data.readers import Document
from stepformer.data.token_files import TokenFiles
from stepformer.measure.evaluation.texts import first_file
from stepformer.training.corpora import part_of_corpus, shares_passages
from texts import PACK, documents, stories, tree, write_rows

prepare_module = importlib.import_module("stepformer.data.prepare")
prepare = prepare_module.prepare

DOCUMENTS = ["The first.\nTwo lines.", "Zweites — naïve 日本\u2028 語", "third <|endoftext|> inside"]


def texts(spec: Path | str, **options: Any) -> list[str]:
    return [document.text for document in open_source(str(spec), **options)]


@pytest.mark.parametrize("packing", list(PACK))
@pytest.mark.parametrize("form", [".txt", ".jsonl", ".ndjson", ".json", ".parquet"])
def test_every_format_and_packing(form: str, packing: str, tmp_path: Path) -> None:
    rows = [{"text": text} for text in [*DOCUMENTS, "", "  \n "]]
    path = write_rows(tmp_path / f"some.data{form}{packing}", rows)
    assert texts(path) == DOCUMENTS
    assert texts(tmp_path) == DOCUMENTS


@pytest.mark.parametrize("packing", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("form", [".txt", ".jsonl", ".parquet"])
def test_a_truncated_or_wrong_packing_is_one_sentence(form: str, packing: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / f"data{form}{packing}", stories(3000))
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) * 2 // 3], whole[:-3], b"plainly not packed"):
        path.write_bytes(damaged)
        with pytest.raises(StepformerError, match=re.escape(f"'{path}' is damaged: ")) as error:
            texts(path)
        assert "\n" not in str(error.value)


def test_folders_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b/z.jsonl", "a.parquet", "b/a.txt.gz", "c.jsonl.zst"):
        write_rows(tmp_path / name, [{"text": name}])
    for name in ("README.txt", ".hidden.txt", ".git/x.txt", "picture.png", "LICENSE.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("not data")
    source = open_source(str(tmp_path))
    assert [document.text for document in source] == ["a.parquet", "b/a.txt.gz", "b/z.jsonl", "c.jsonl.zst"]
    assert [f["name"] for f in source.description["files"]] == ["a.parquet", "b/a.txt.gz", "b/z.jsonl", "c.jsonl.zst"]
    assert str(tmp_path) not in json.dumps(source.description)
    before = source.fingerprint
    assert open_source(str(tmp_path)).fingerprint == before
    os.utime(tmp_path / "a.parquet", (1, 1))  # the content counts, not the time
    assert open_source(str(tmp_path)).fingerprint == before
    (tmp_path / "b" / "z.jsonl").write_text('{"text": "b/z.jsonk"}\n')
    assert open_source(str(tmp_path)).fingerprint != before
    assert open_source(str(tmp_path), field="other").fingerprint != open_source(str(tmp_path)).fingerprint


def test_markdown_is_text_in_a_folder_and_nothing_beside_data(tmp_path: Path) -> None:
    """Notes beside a dataset, tokens or an excerpt to be evaluated are about them, as they always were."""
    (tmp_path / "in" / "c").mkdir(parents=True)
    for name in ("a.txt", "b.md", "README.md"):
        (tmp_path / "in" / name).write_text(name)
    (tmp_path / "in" / "c" / "d.MD.gz").write_bytes(PACK[".gz"](b"c/d.MD.gz"))
    assert texts(tmp_path / "in") == ["a.txt", "b.md", "c/d.MD.gz"]
    corpus = prepare(open_source(str(tmp_path / "in")), "bytes", tmp_path / "corpus", workers=1)
    (tmp_path / "in" / "a.txt").unlink()
    assert texts(tmp_path / "in") == ["b.md", "c/d.MD.gz"]
    assert part_of_corpus(str(tmp_path / "in" / "c"), {"folder": str(corpus.folder)})
    write_rows(tmp_path / "rows" / "a.jsonl", [{"text": "a", "held": True}])
    (tmp_path / "rows" / "b.md").write_text("about them")
    assert texts(tmp_path / "rows", val_field="held") == ["a"]
    (tmp_path / "in" / "train.bin").write_bytes(b"ab")
    assert isinstance(open_source(str(tmp_path / "in")), TokenFiles)
    assert open_source(f"hf:{tmp_path / 'in'}").description["files"] == []
    excerpt = write_rows(tmp_path / "in" / "wiki.txt", [{"text": "wiki"}])
    assert first_file(tmp_path, "in") == excerpt


def test_training_text_is_known_in_other_files_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passages of it are looked for, also where they lie across two pieces of the search and two shards."""
    words = [["river", "stone", "lamp", "field", "bread", "cloud"][n * n % 37 % 6] + str(n) for n in range(6000)]
    documents = [" ".join(words[start : start + 60]) for start in range(0, 6000, 60)]
    write_rows(tmp_path / "in" / "a.jsonl", [{"text": text} for text in documents[:80]])
    corpus = prepare(open_source(str(tmp_path / "in")), "bytes", tmp_path / "corpus", workers=1, shard_tokens=900)
    facts = {"folder": str(corpus.folder)}

    def tokens(some: list[str]) -> np.ndarray:
        return np.concatenate([[*text.encode(), 256] for text in some])

    for searched in (1 << 24, 100):
        monkeypatch.setattr("stepformer.data.corpus.SEARCHED", searched)
        assert shares_passages(tokens(documents[20:40]), facts)
        assert shares_passages(tokens(documents[65:85]), facts)
        assert not shares_passages(tokens(documents[75:95]), facts)
        assert not shares_passages(tokens(documents[80:]), facts)
    assert not shares_passages(tokens(["short"]), facts)
    assert not shares_passages(tokens(documents[:40]), {"folder": str(tmp_path / "gone")})
    assert not shares_passages(tokens(documents[:40]), {})


def test_several_sources_are_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("in/c.txt", "in/more/b.txt", "in/more/a.txt", "other/a.txt"):
        write_rows(tmp_path / name, [{"text": f"The text of {name}. " * 9}])
    (tmp_path / "in" / "more" / "d.log").write_text("not read")
    whole = open_source("in")
    parts = open_source("in/more", "in/c.txt", str(tmp_path / "in/c.txt"), "./in/more/a.txt")
    assert parts.description == whole.description
    assert list(parts) == list(whole)
    assert parts.passed_over == {".log": 1}  # type: ignore[attr-defined]
    one, two = (open_source(*words) for words in (("in/c.txt", "in/more/a.txt"), ("in/more/a.txt", "in/c.txt")))
    assert (one.name, one.description) == (two.name, two.description)
    assert one.name == "c-and-1-more"
    alike = open_source("other/a.txt", "in/more/a.txt")
    assert [file["name"] for file in alike.description["files"]] == ["in/more/a.txt", "other/a.txt"]
    assert main(["prepare", "in/more", "in/c.txt", "--tokenizer", "bytes"]) == 0
    both = prepare(whole, "bytes", tmp_path / "whole")
    assert tree(Path("data/c-and-1-more-bytes"))["train-00000.bin"] == tree(both.folder)["train-00000.bin"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("a.txt tales", "must be files and folders of text, which 'tales' is not: prepare it alone."),
        ("hf:some/where a.txt", "which 'hf:some/where' is not: prepare it alone."),
        ("train.bin val.bin", "which 'train.bin' is not: of ready-made tokens name the folder."),
        ("tales b.txt", "There is no source 'b.txt'"),
        ("tales tokenizer=bytes", "An option is written --tokenizer bytes."),
        ("a.txt a.txt --field story", "does not apply to 'a.txt', 'a.txt', which is read as text"),
    ],
)
def test_several_sources_that_do_not_go_together(
    words: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "train.bin", "val.bin"):
        (tmp_path / name).write_text("ab")
    assert main(["prepare", *words.split()]) == 2
    assert sentence in capsys.readouterr().err


ROWS = '{"text": "a"}\n{"text": "b"}\n'


@pytest.mark.parametrize(
    ("content", "field", "skipped"),
    [
        ('{\n  "name": "mine",\n  "text": "no document"\n}\n', "text", True),
        ('{"name": "mine"}\n', "text", True),
        ('[{"text": "a"}]\n', "text", True),
        (ROWS, "text", False),
        (ROWS[:14], "text", False),
        ("", "text", False),
        ('{"story": "a"}\n', "story", False),
    ],
)
def test_settings_between_texts_are_left_out(content: str, field: str, skipped: bool, tmp_path: Path) -> None:
    write_rows(tmp_path / "b.jsonl", [{field: "of b"}])
    (tmp_path / "package.json").write_text(content)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        source = open_source(str(tmp_path), field=field)
    said = [str(warning.message) for warning in told]
    assert [path.name for path in source.paths] == ["b.jsonl", *["package.json"] * (not skipped)]  # type: ignore[attr-defined]
    assert len(list(source)) == 1 + (0 if skipped else content.count("\n"))
    rows = f"a .json must have one object to a line, with the text in the field '{field}'"
    assert said == [f"Not read: '{tmp_path}/package.json'; {rows}."] * skipped


def test_json_that_may_be_data_is_not_left_out(tmp_path: Path) -> None:
    """Rows with the text in another field, and the only kind of file there: a sentence says what is wrong."""
    (tmp_path / "a.json").write_text('{"name": "mine"}\n' * 2)
    (tmp_path / "c.txt").write_text("text")
    with pytest.raises(StepformerError, match=r"Line 1 of '.*a.json' has no field 'text' .* it has name"):
        texts(tmp_path)
    (tmp_path / "a.json").write_text('{\n"name": "mine"\n}')
    with pytest.warns(StepformerWarning, match="Not read: '.*a.json'"):
        assert texts(tmp_path) == ["text"]
    (tmp_path / "c.txt").unlink()
    (tmp_path / "d.json").write_text(ROWS)
    with pytest.raises(StepformerError, match=r"Line 1 of '.*a.json' is not valid JSON"):
        texts(tmp_path)


def test_what_a_document_is(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffOne.\r\nStill one.\n\nTwo.\n\n\nThree.\n".encode())
    assert texts(path) == texts(path, document="file") == ["One.\nStill one.\n\nTwo.\n\n\nThree.\n"]
    assert texts(path, document="line") == ["One.", "Still one.", "Two.", "Three."]
    assert texts(path, document="paragraph") == ["One.\nStill one.", "Two.", "Three."]
    path.write_text("One.\n<|endoftext|>\nTwo\n<|endoftext|> is inside.\n<|endoftext|>\n")
    assert texts(path) == ["One.", "Two\n<|endoftext|> is inside."]
    assert len(texts(path, document="file")) == 1


def test_rows(tmp_path: Path) -> None:
    rows = [{"story": "a", "held": True}, {"story": "b", "held": False}, {"story": None, "held": True}]
    for name in ("x.jsonl", "x.parquet"):
        source = open_source(str(write_rows(tmp_path / name, rows)), field="story", val_field="held")
        assert list(source) == [Document("a", "val"), Document("b", "train")]
        assert source.marked
    (tmp_path / "s.jsonl").write_text('{"text": "lone \\ud800 surrogate"}\n\n')
    assert texts(tmp_path / "s.jsonl") == ["lone \ufffd surrogate"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"text": "a"', "Line 3 of '{path}' is not valid JSON"),
        ('["a"]', "Line 3 of '{path}' is not an object"),
        ('{"txt": "a", "b": 1}', "Line 3 of '{path}' has no field 'text' (a text field); it has txt, b. Did you mean"),
        ('{"text": 5}', "holds int, not text: line 3 of '{path}'"),
        ('"\udcff"', "Line 3 of '{path}' is not valid JSON"),
    ],
)
def test_a_bad_line_is_named(line: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line.encode("utf-8", "surrogateescape") + b'\n{"text": "fine"}\n')
    with pytest.raises(StepformerError, match=re.escape(sentence.format(path=path))):
        texts(path)


def test_faults_in_files_and_names(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "table.parquet").write_bytes(b"PAR1 not a table PAR1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "a.txt").symlink_to(tmp_path / "nowhere")
    write_rows(tmp_path / "good.parquet", [{"text": "a", "n": 1}])
    write_rows(tmp_path / "good.jsonl", [{"text": "a", "n": "maybe"}])
    for spec, options, sentence in (
        ("latin.txt", {}, "latin.txt' is not UTF-8 text"),
        ("table.parquet", {}, "table.parquet' is damaged: "),
        ("empty", {}, "There is nothing to read in the folder"),
        ("gone", {}, "a.txt' cannot be read: No such file"),
        ("missing.txt", {}, "There is no source"),
        ("good.parquet", {"field": "texte"}, "has no field 'texte' (a text field); it has text, n."),
        ("good.parquet", {"val_field": "held"}, "has no field 'held' (a field that marks validation)"),
        ("good.jsonl", {"val_field": "n"}, "must be true or false, not 'maybe': line 1"),
        ("latin.txt", {"val_field": "n"}, "plain text, which has no field 'n'"),
        ("latin.txt", {"document": "lines"}, "Did you mean 'line'?"),
        ("latin.txt", {"dialect": "space"}, "'dialect' does not apply to files"),
    ):
        with pytest.raises(StepformerError, match=re.escape(sentence)):
            texts(tmp_path / spec, **options)
    for spec, options, sentence in (
        ("tales", {"field": "x"}, "'field' does not apply to the tales"),
        ("tales", {"dialect": "vilage"}, "Did you mean 'village'?"),
        ("tales", {"count": 0}, "must be at least 1"),
        ("hf:", {}, "hf: needs a dataset"),
        ("tinystory", {}, "Did you mean 'tinystories'?"),
    ):
        with pytest.raises(StepformerError, match=re.escape(sentence)):
            open_source(spec, **options)  # type: ignore[arg-type]


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = (write_rows(tmp_path / "in" / name, stories(200)) for name in ("a.jsonl", "b.jsonl"))
    source = open_source(str(tmp_path / "in"))
    real = readers_module.opened

    def refuse(path: Path) -> Any:
        if path == bad:
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(readers_module, "opened", refuse)
    with pytest.raises(StepformerError, match=re.escape(f"'{bad}' cannot be read: Permission denied.")):
        prepare(source, "bytes", tmp_path / "out")
    assert len(list((tmp_path / "out" / ".parts").glob("000000-*.part"))) == 1  # what was read before is kept
    monkeypatch.undo()
    assert prepare(source, "bytes", tmp_path / "out").split("train").documents > 300
    assert good.exists()


def test_a_missing_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in ("a.parquet", "a.txt.zst"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(StepformerError, match=r"'pyarrow' is needed .* pip install 'stepformer\[data\]'"):
            texts(tmp_path / name)
    (tmp_path / "folder").mkdir()
    with pytest.raises(StepformerError, match=r"'datasets' is needed .* pip install 'stepformer\[data\]'"):
        texts(f"hf:{tmp_path / 'folder'}")


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A dataset as the Hub lays it out: two files of training rows, one of validation rows."""
    for split, shard, rows in (("train", 0, 60), ("train", 1, 50), ("validation", 0, 7)):
        name = f"data/{split}-{shard:05d}-of-{2 if split == 'train' else 1:05d}.parquet"
        write_rows(tmp_path / "Stories" / name, [{"text": f"{split} {shard}.{i}", "id": i} for i in range(rows)])
    return tmp_path / "Stories"


def test_hugging_face_folder(hub: Path, tmp_path: Path) -> None:
    source = open_source(f"hf:{hub}")
    assert (source.name, source.marked, len(source.units())) == ("Stories", True, 3)
    found = list(source)
    assert [d.text for d in found if d.split == "val"] == [f"validation 0.{i}" for i in range(7)]
    train = [d.text for d in found if d.split == "train"]
    assert train == [f"train 0.{i}" for i in range(60)] + [f"train 1.{i}" for i in range(50)]
    corpus = prepare(open_source(f"hf:{hub}"), "bytes", tmp_path / "out", workers=1)
    assert (corpus.split("train").documents, corpus.split("val").documents) == (110, 7)
    assert corpus.manifest["split_rule"]["rule"] == "marked"
    assert documents(corpus, "val")[:2] == ["validation 0.0", "validation 0.1"]


def test_hugging_face_faults(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with pytest.raises(StepformerError, match=r"The dataset 'nobody/nothing' cannot be reached: .*nobody/nothing"):
        prepare(open_source("hf:nobody/nothing"), "bytes", out)
    assert not out.exists()
    with pytest.raises(StepformerError, match=r"Row 1 of train 1/2 .* has no field 'story'.* it has text, id"):
        list(open_source(f"hf:{hub}", field="story"))
    (hub / "data" / "train-00001-of-00002.parquet").write_bytes(b"PAR1 broken PAR1")
    # threads for processes, which take seconds to start
    monkeypatch.setattr(prepare_module.pieces, "start_workers", lambda number, folder: ThreadPoolExecutor(number))
    monkeypatch.setattr(prepare_module.pieces, "encode_in_worker", lambda piece: encode(make_tokenizer("bytes"), piece))
    with pytest.raises(StepformerError, match=r"Reading train 2/2 .* failed after 0 rows .* same command continues"):
        prepare(open_source(f"hf:{hub}"), "bytes", out, workers=2)
    assert [p.name for p in (out / ".parts").glob("[0-9]*.part")] == ["000000-000000.part"]
    monkeypatch.undo()
    import datasets

    def scripted(*args: Any, **options: Any) -> None:
        raise RuntimeError("Dataset scripts are no longer supported, but found x.py")

    with monkeypatch.context() as patched:
        patched.setattr(datasets, "load_dataset", scripted)
        with pytest.raises(StepformerError, match=r"'some/script' is a program, which is not run here: .*parquet"):
            list(open_source("hf:some/script"))
    write_rows(tmp_path / "only" / "data" / "test-00000-of-00001.parquet", stories(3))
    with pytest.raises(StepformerError, match="has no split 'train'; it has test"):
        list(open_source(f"hf:{tmp_path / 'only'}"))
    (tmp_path / "nil").mkdir()
    with pytest.raises(StepformerError, match=r"The dataset '.*nil' cannot be opened"):
        list(open_source(f"hf:{tmp_path / 'nil'}"))


@pytest.mark.parametrize(
    ("spec", "dataset", "config", "name"),
    [
        ("tinystories", "roneneldan/TinyStories", None, "tinystories"),
        ("openwebtext", "Skylion007/openwebtext", None, "openwebtext"),
        ("fineweb", "HuggingFaceFW/fineweb", "sample-10BT", "fineweb"),
        ("wikitext", "Salesforce/wikitext", "wikitext-103-v1", "wikitext"),
        ("c4", "allenai/c4", "en", "c4"),
        ("hf:some/where:de", "some/where", "de", "where-de"),
    ],
)
def test_datasets_by_name(
    spec: str, dataset: str, config: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import huggingface_hub

    asked: list[Any] = []

    def load(path: str, config: str | None, *, data_dir: None, streaming: bool, revision: str | None) -> Any:
        asked.append((path, config, streaming, revision))
        return {"train": datasets.Dataset.from_list(stories(300)).to_iterable_dataset(num_shards=3)}

    class Info:
        sha = "abc123"

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *args, **named: Info)
    source = open_source(spec)
    corpus = prepare(source, "bytes", tmp_path / "out", workers=1)
    assert source.name == corpus.name == name
    assert set(asked) == {(dataset, config, True, "abc123")}
    assert corpus.manifest["pinned"] == {"revision": "abc123"}
    assert corpus.manifest["split_rule"]["rule"] == "hash"
    assert corpus.split("train").documents + corpus.split("val").documents == 300
    asked.clear()
    prepare(open_source(spec), "bytes", tmp_path / "out", workers=1)
    assert not asked  # a finished corpus needs no network


def test_the_split_is_by_text_alone() -> None:
    rows = [Document(f"text number {i}", None) for i in range(20_000)]
    val = {d.text for d in rows if divide(d, "hash", 0.05)[0][0] == "val"}
    assert 0.045 < len(val) / len(rows) < 0.055  # margin: a hash, the same everywhere
    assert {d.text for d in reversed(rows) if divide(d, "hash", 0.05) == [("val", d.text)]} == val
    assert val < {d.text for d in rows if divide(d, "hash", 0.2)[0][0] == "val"}
    assert not any(divide(d, "hash", 0.0)[0][0] == "val" for d in rows[:100])
    assert divide(Document("x", "val"), "hash", 0.0) == [("val", "x")]


def test_duplicates_stay_together(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", stories(150) * 3)
    corpus = prepare(open_source(str(path)), "bytes", tmp_path / "out", val_fraction=0.2)
    train, val = ({*documents(corpus, split)} for split in ("train", "val"))
    assert len(train) + len(val) == 150
    assert not train & val
    assert corpus.split("val").documents == 3 * len(val) > 0


def test_few_documents_give_their_tails(tmp_path: Path) -> None:
    lines = "".join(f"Line {i} of the book.\n" for i in range(1000))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(lines)
    (tmp_path / "in" / "b.txt").write_text("word " * 1000)
    (tmp_path / "in" / "c.txt").write_text("tiny")
    corpus = prepare(open_source(str(tmp_path / "in")), "bytes", tmp_path / "out", val_fraction=0.1)
    assert corpus.manifest["split_rule"]["rule"] == "tail"
    train, val = documents(corpus, "train"), documents(corpus, "val")
    assert [train[0] + val[0], train[1] + val[1], train[2]] == [lines, "word " * 1000, "tiny"]
    assert (len(train), len(val)) == (3, 2)
    assert val[0].startswith("Line ")
    assert val[1].startswith(" word")
    assert all(0.09 < len(tail) / (len(head) + len(tail)) < 0.16 for head, tail in zip(train, val, strict=False))
    none = prepare(open_source(str(tmp_path / "in")), "bytes", tmp_path / "none", val_fraction=0.0)
    assert (len(none.split("val")), documents(none, "train")[0]) == (0, lines)


def test_long_texts_are_cut_where_the_tokens_allow() -> None:
    text = "".join(f"Sentence {i}, isn't it?\n{'  ' * (i % 3)}And more.  " for i in range(3000))
    parts = segments_of(text, 5000)
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 5000
    assert len(parts) < len(text) / 4000
    tokenizer = make_tokenizer("bpe:500", lambda: [text])
    assert [i for part in parts for i in tokenizer.encode(part)] == tokenizer.encode(text)
    assert segments_of("x" * 12, 5) == ["xxxxx", "xxxxx", "xx"]


def test_tales(tmp_path: Path) -> None:
    source = open_source("tales", count=1500, seed=3)
    found = [document.text for document in source]
    assert len(found) == 1500 == len(set(found))
    assert len(source.units()) == 2
    assert texts("tales", count=1200, seed=3) == found[:1200]
    names = {open_source("tales", **options).name for options in ({}, {"count": 5}, {"seed": 1})}  # type: ignore[arg-type]
    assert len(names) == 3
    assert source.fingerprint != open_source("tales", count=1500, seed=4).fingerprint
    corpus = prepare(open_source("tales", count=300), "bpe:300", tmp_path / "out")
    assert corpus.vocab_size == 300
    assert documents(corpus, "train")[0] in texts("tales", count=300)


def test_importing_the_package_stays_light() -> None:
    import subprocess

    code = (
        "import sys, stepformer, stepformer.data\n"
        "print([m for m in ('tiktoken', 'tokenizers', 'datasets', 'pyarrow') if m in sys.modules])\n"
        "assert stepformer.data.Corpus.__name__ == 'Corpus'\n"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
