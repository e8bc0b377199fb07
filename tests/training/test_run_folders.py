"""Folders of runs: what they hold, checkpoints and data that are damaged or not theirs, settings that cannot work."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import stepformer as sf
from runs import go, make_corpus
from stepformer.base.files import write_json
from stepformer.cli import main
from stepformer.data import open_source
from stepformer.data.prepare import prepare
from stepformer.training import checkpoints, evaluate_run, load_run, resume, run_config, train
from stepformer.training.extending import extend
from stepformer.training.metrics import read_metrics
from stepformer.training.runs import RunFolder


def test_keep_and_best(corpus: Path, tmp_path: Path) -> None:
    result = go(corpus, tmp_path / "run", keep=3, save_every=2)
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == [f"best-{result['best_step']:08d}", "step-00000008", "step-00000010", "step-00000012"]
    assert load_run(tmp_path / "run", "best").step == result["best_step"]
    assert load_run(tmp_path / "run", "last").step == 12


def test_damaged_checkpoints_are_named_and_the_one_before_is_used(whole: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(whole["folder"], tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    last = tmp_path / "run" / "checkpoints" / "step-00000012"
    model = last / "model.safetensors"
    data = model.read_bytes()
    for damaged, sentence in (
        (data[:-8], "has .* bytes, not"),
        (data[:-1] + bytes([data[-1] ^ 1]), "the checksum of 'model.safetensors' does not match"),
    ):
        model.write_bytes(damaged)
        with pytest.raises(sf.InputError, match=f"step-00000012' is damaged: .*{sentence}"):
            checkpoints.verify(last)
    with pytest.warns(UserWarning, match="step-00000012' is damaged.*Going back to 'step-00000009'"):
        again = resume(tmp_path / "run", quiet=True)
    assert again["weights_sha256"] == whole["weights_sha256"]
    checkpoints.verify(last)  # it was written anew
    last.rename(last.with_name("step-00000012.bak"))  # a copy of one's own does not disturb
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(sf.InputError, match=r"of step 12 .* is gone: .* start again after step 9, .* with --restart"):
        resume(tmp_path / "run", quiet=True)
    assert resume(tmp_path / "run", quiet=True, restart=True)["weights_sha256"] == whole["weights_sha256"]
    (tmp_path / "run" / "result.json").unlink()
    for folder in (tmp_path / "run" / "checkpoints").glob("step-*"):
        (folder / "optimizer.safetensors").unlink()
    with pytest.raises(sf.InputError, match=r"'optimizer.safetensors' is missing"):
        resume(tmp_path / "run", quiet=True)


@pytest.mark.parametrize("lost", [("step",), ("best",), ("step", "best")])
def test_a_finished_run_with_damaged_weights_says_how_to_have_them_again(
    lost: tuple[str, ...], whole: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole["folder"], run)
    for kind in lost:
        newest = max((run / "checkpoints").glob(f"{kind}-*"))
        (newest / "model.safetensors").write_bytes(b"short")
    if "best" in lost:
        with pytest.raises(sf.InputError, match=r"is damaged: .* bytes, not .*`--checkpoint last` takes the newest"):
            load_run(run)
    with pytest.warns(UserWarning, match=r"is damaged: .*The result stands; `stepformer resume .* --restart` makes it"):
        assert resume(run, quiet=True) == whole | {"folder": str(run)}
    with pytest.warns(UserWarning, match="is damaged: "):
        again = resume(run, quiet=True, restart=True)
    assert again["weights_sha256"] == whole["weights_sha256"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_run(run).step == again["best_step"]
        assert load_run(run, "last").step == 12


def test_a_checkpoint_without_manifest_does_not_count(whole: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(whole["folder"], tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-00000012" / "manifest.json").unlink()
    with pytest.raises(sf.InputError, match=r"of step 12 .* is gone"):
        resume(tmp_path / "run", quiet=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resume(tmp_path / "run", quiet=True, restart=True)["weights_sha256"] == whole["weights_sha256"]


def test_other_formats_are_refused(corpus: Path, tmp_path: Path) -> None:
    go(corpus, tmp_path / "run", keep=1)
    (tmp_path / "run" / "result.json").unlink()
    path = next((tmp_path / "run" / "checkpoints").glob("step-*")) / "manifest.json"
    manifest = json.loads(path.read_text())
    for version, sentence in ((99, "a newer stepformer wrote it"), (0, "this stepformer reads 1")):
        write_json(path, {**manifest, "format": version})
        with pytest.raises(sf.InputError, match=f"has format {version}; {sentence}"):
            resume(tmp_path / "run", quiet=True)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    write_json(tmp_path / "run" / "run.json", {**record, "format": 7})
    with pytest.raises(sf.InputError, match="has format 7; a newer stepformer wrote it"):
        resume(tmp_path / "run", quiet=True)


def test_a_second_process_is_refused(corpus: Path, whole: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(whole["folder"], tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with RunFolder(tmp_path / "run").locked():
        with pytest.raises(sf.StepformerError, match="Another process is training in"):
            resume(tmp_path / "run", quiet=True)
        with pytest.raises(sf.StepformerError, match="Another process is training in"):
            go(corpus, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_folder_is_used_once(corpus: Path, tmp_path: Path) -> None:
    go(corpus, tmp_path / "run", steps=2)
    with pytest.raises(sf.InputError, match="already holds a run, and it is finished: choose another place"):
        go(corpus, tmp_path / "run", steps=2)
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(sf.InputError, match="already holds a run: continue it with `stepformer resume"):
        go(corpus, tmp_path / "run", steps=2)
    free = str(tmp_path / "run-2")
    with pytest.raises(sf.InputError, match=rf"with another train.steps: choose another place, for instance {free} \("):
        go(corpus, tmp_path / "run", steps=3)
    Path(free).mkdir()
    with pytest.raises(sf.InputError, match=rf"another place, for instance {tmp_path / 'run-3'} \(--out on"):
        go(corpus, tmp_path / "run", steps=3)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    with pytest.raises(sf.InputError, match=r"holds other files \('thesis.tex'\)"):
        go(corpus, tmp_path / "other")
    assert (tmp_path / "other" / "thesis.tex").read_text() == "precious"


def test_other_data_is_refused(corpus: Path, tmp_path: Path) -> None:
    go(corpus, tmp_path / "run", steps=2)
    (tmp_path / "run" / "result.json").unlink()
    other = make_corpus(tmp_path / "other", count=41).folder
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record["corpus"]["folder"] = str(other)
    write_json(tmp_path / "run" / "run.json", record)
    with pytest.raises(sf.InputError, match="was trained on other data: the train split"):
        resume(tmp_path / "run", quiet=True)
    words = make_corpus(tmp_path / "words", tokenizer="bpe:300").folder
    with pytest.raises(sf.InputError, match="were made by the tokenizer bpe:300"):
        evaluate_run(tmp_path / "run", corpus=words)
    with pytest.raises(sf.ConfigError, match="vocab_size = 256 is smaller than the corpus's vocabulary of 257"):
        go(corpus, tmp_path / "small", vocab_size=256)


def test_data_that_was_damaged_or_moved_since(corpus: Path, tmp_path: Path) -> None:
    own = make_corpus(tmp_path / "own", count=4).folder
    go(own, tmp_path / "run", steps=2)
    (tmp_path / "run" / "result.json").unlink()
    own.rename(tmp_path / "moved")
    with pytest.raises(sf.InputError, match=r"is not in '.*own': say where it is with corpus=DIR"):
        resume(tmp_path / "run", quiet=True)
    assert resume(tmp_path / "run", quiet=True, corpus=tmp_path / "moved")["steps"] == 2
    (tmp_path / "run" / "result.json").unlink()
    shard = tmp_path / "moved" / "train-00000.bin"
    shard.write_bytes(bytes(100) + shard.read_bytes()[100:])
    with pytest.raises(sf.InputError, match=r"Shard 'train-00000.bin' .* is damaged"):
        resume(tmp_path / "run", quiet=True, corpus=tmp_path / "moved")


def test_a_damaged_shard_stops_before_training(corpus: Path, tmp_path: Path) -> None:
    broken = make_corpus(tmp_path / "broken").folder
    shard = broken / "train-00000.bin"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(sf.InputError, match=r"Shard 'train-00000.bin' .* is damaged"):
        go(broken, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"eval_first": "many"}, "eval_first = 'many' should be a number of tokens, or several with commas"),
        ({"eval_first": "32,0"}, "eval_first = '32,0' should be a number of tokens, or several with commas"),
        ({"eval_first": 8}, "too few for one block of 16"),
        ({"corpus": "no-such-corpus"}, "There is no source 'no-such-corpus': it is neither a file or folder nor"),
        ({"corpus": "tinystories"}, "is not prepared .* run `stepformer prepare tinystories --tokenizer gpt2` first"),
        ({"eval_tokens": 8}, "too few for one block of 16"),
        ({"lr": 1e38}, "is no sensible rate"),
        ({"micro_batch": 3}, "micro_batch = 3 does not divide the 8 sequences"),
        ({"tokenizer": "gpt2"}, "was prepared with 'bytes'"),
        ({"count": 3}, "dialect and count belong to corpus = 'tales'"),
        ({"context": 100_000}, "too few for a context of 100000"),
    ],
)
def test_runs_that_cannot_work(corpus: Path, tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises((sf.InputError, sf.ConfigError), match=sentence):
        go(corpus, tmp_path / "run", **changes)
    assert not RunFolder(tmp_path / "run").exists


def test_what_may_not_change_in_a_resumed_run(corpus: Path, tmp_path: Path) -> None:
    go(corpus, tmp_path / "run", steps=2)
    with pytest.raises(sf.ConfigError, match="A run cannot change 'batch' when it is resumed"):
        resume(tmp_path / "run", batch=4)
    with pytest.raises(
        sf.ConfigError, match=r"'steps' .* with its weights, .* \(`extend` makes one with schedule=wsd longer\)"
    ):
        resume(tmp_path / "run", steps=4)
    with pytest.raises(sf.ConfigError, match=r"^Unknown key 'micro_bach'\. Did you mean 'micro_batch'\? It may change"):
        resume(tmp_path / "run", micro_bach=1)
    with pytest.raises(sf.InputError, match="There is no run folder"):
        resume(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(sf.InputError, match=r"is not a run: it has no run.json"):
        resume(tmp_path / "empty")


def test_the_run_folder_tells_everything(corpus: Path, tmp_path: Path) -> None:
    result = go(corpus, tmp_path / "run")
    again = run_config(tmp_path / "run" / "config.toml")
    assert again.hash == RunFolder(tmp_path / "run").config().hash
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["git"] is None or len(environment["git"]["revision"]) == 40
    repeated = train(again, tmp_path / "again", quiet=True)
    assert repeated["weights_sha256"] == result["weights_sha256"]
    evaluations = [m for m in read_metrics(tmp_path / "run" / "metrics.jsonl") if m["kind"] == "eval"]
    assert [m["step"] for m in evaluations] == [0, 4, 8, 12]
    assert all(m["val_tokens"] == 512 and m["val_hash"] == result["val_hash"] for m in evaluations)


def test_tensorboard(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    go(corpus, tmp_path / "run", steps=2, tensorboard=True)
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def test_missing_wandb_names_the_extra(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(sf.StepformerError, match=r"pip install 'stepformer\[wandb\]'"):
        go(corpus, tmp_path / "run", wandb="project")


def test_a_project_that_was_moved_as_a_whole_finds_its_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    make_corpus(old / "data" / "own", count=4)
    monkeypatch.chdir(old)
    go(Path("data/own"), Path("runs/one"), steps=2)
    monkeypatch.chdir(tmp_path)
    old.rename(new)
    with pytest.raises(sf.InputError, match="say where it is with corpus=DIR"):
        evaluate_run(new / "runs" / "one")
    monkeypatch.chdir(new)
    assert evaluate_run("runs/one")[0].val_loss > 0
    make_corpus(tmp_path / "other", count=5)
    (new / "data" / "own").rename(tmp_path / "gone")
    (tmp_path / "other").rename(new / "data" / "own")  # other data in its place is not taken for it
    with pytest.raises(sf.InputError, match=r"is not in '.*old/data/own': say where it is with corpus=DIR"):
        evaluate_run("runs/one")


def test_where_the_corpus_is_moved_runs_are_extended_and_texts_keep_what_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, run, text = tmp_path / "own", tmp_path / "run", tmp_path / "texts" / "a.txt"
    text.parent.mkdir()
    for number, name in enumerate("abcdefgh"):
        (text.parent / f"{name}.txt").write_text(f"Some words of the text with the number {number}. " * 40)
    prepare(open_source(str(text.parent)), "bytes", own, val_fraction=0.3, workers=1)
    go(own, run, steps=2, schedule="wsd", decay_start=2)
    marks = []
    for _ in range(2):
        assert main(["eval", str(run), "--on", str(text), "--quiet"]) == 0
        marks.append(json.loads((run / "measured" / "perplexity.json").read_text())["result"]["texts"][0]["seen"])
        if own.is_dir():
            assert "is not known" not in capsys.readouterr().err
            own.rename(tmp_path / "moved")
    assert marks == [True, True]
    assert f"whether the run was trained on {text} is not known: its corpus is not in" in capsys.readouterr().err
    with pytest.raises(sf.InputError, match="say where it is with corpus=DIR"):
        extend(run, tmp_path / "longer", steps=4, quiet=True)
    assert not (tmp_path / "longer").exists()
    extend(run, tmp_path / "longer", steps=4, quiet=True, corpus=str(tmp_path / "moved"))
    assert evaluate_run(tmp_path / "longer")[0].val_loss > 0
