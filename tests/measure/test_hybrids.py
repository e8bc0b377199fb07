"""Hybrid and pinned models: their numbers are their own and leave the run's alone; tables over cut-offs; bad words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import shake, tiny
from runs import make_corpus, small_run
from stepformer.base.errors import InputError
from stepformer.cli import hybrids, main
from stepformer.measure import measured
from stepformer.measure.diagnostics import depth
from stepformer.measure.evaluation.harness import save_tasks
from stepformer.measure.evaluation.perplexity import Reading, measure_texts
from stepformer.measure.evaluation.texts import Text, as_text
from stepformer.pages.reports.collect import read_run
from stepformer.training import evaluate_run, load_run, train
from stepformer.training.loading import LoadedRun, validation_loss
from stepformer.training.text import continue_text

EXACT = 1e-11  # two fp64 evaluations of one function in different shapes


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hybrids")
    make_corpus(root / "tales")
    for name in ("yurii", "vanilla"):
        train(small_run(root / "tales", name, n_layer=3), root / name, quiet=True)
    return root


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> LoadedRun:
    """The trained run, far from its start, in a folder of this test's own."""
    return load_run(shutil.copytree(trained / "yurii", tmp_path / "run"), device="cpu")


def story(run: LoadedRun) -> Text:
    return as_text("story", ["One day, a fox went home. " * 9], run.tokenizer, "story.txt")


def kept(run: LoadedRun, kind: str) -> dict[str, Any]:
    found = measured.load(run.folder.path, kind)
    assert found is not None
    return found


def test_a_variant_has_a_name_of_its_own() -> None:
    model = shake(tiny("yurii", n_layer=4))
    assert measured.variant_of(model) == {}
    assert measured.kind_of("depth", model) == "depth"
    for layers, name in (({0, 1}, "cutoff-2"), (set(), "cutoff-0"), ({0, 3}, "layers-0-3")):
        assert measured.kind_of("depth", model.hybrid(layers=layers)) == f"depth@{name}"
    assert measured.variant_of(model.hybrid(cutoff=4)) == measured.variant_of(model.hybrid(layers=range(4))) == {}
    names = {measured.kind_of("depth", model.hybrid(cutoff=2))}
    for value in (0.0, 0.25):
        model.pin_coefficients(layer=1, mu=value)
        assert measured.variant_of(model)["pinned"] == {"1.mu_attn": [value], "1.mu_mlp": [value]}
        names |= {measured.kind_of("depth", model), measured.kind_of("depth", model.hybrid(cutoff=2))}
    assert len(names) == 5
    model.unpin_coefficients()
    assert measured.variant_of(model) == {}
    deep = tiny("yurii", n_layer=90).hybrid(layers=range(0, 90, 2))
    assert len(measured.kind_of("perplexity", deep)) < 40


def test_measuring_a_hybrid_leaves_the_perplexity_of_the_run(run: LoadedRun) -> None:
    """The case of an audit: the numbers of a hybrid had replaced the run's own."""
    text = story(run)
    own = measure_texts(run, [text], Reading(), quiet=True)["texts"][0]
    before = kept(run, "perplexity")
    hybrid = measure_texts(run.hybrid(cutoff=1), [text], Reading(), quiet=True)["texts"][0]
    run.model.pin_coefficients(beta=0.0)
    pinned = measure_texts(run, [text], Reading(), quiet=True)["texts"][0]
    name = measured.kind_of("perplexity", run.model)
    run.model.unpin_coefficients()
    assert len({entry["perplexity"] for entry in (own, hybrid, pinned)}) == 3
    assert kept(run, "perplexity") == before
    assert kept(run, "perplexity@cutoff-1")["result"]["texts"] == [hybrid]
    assert kept(run, "perplexity@cutoff-1")["settings"]["momentum_layers"] == [0]
    assert kept(run, name)["result"]["texts"] == [pinned]
    assert read_run(run.folder.path).result("perplexity")["texts"] == [own]


def test_so_do_tasks_and_diagnostics(run: LoadedRun) -> None:
    entry = {"choice@0": {"task": "choice", "items": 4, "source": {}, "acc": 0.5}}
    for each in (run, run.hybrid(layers={0, 2})):
        assert save_tasks(each, {}, entry)
        depth.measure(each, depth.DepthSettings(windows=2), quiet=True)
    for kind in ("tasks", "depth"):
        assert (run.folder.path / "measured" / f"{kind}.json").is_file()
        assert (run.folder.path / "measured" / f"{kind}@layers-0-2.json").is_file()
    own, hybrid = kept(run, "depth"), kept(run, "depth@layers-0-2")
    assert "momentum_layers" not in own["settings"]
    assert hybrid["settings"]["momentum_layers"] == [0, 2]
    assert own["result"]["layers"][1]["norms"] != hybrid["result"]["layers"][1]["norms"]
    assert own["result"]["layers"][0]["norms"] == hybrid["result"]["layers"][0]["norms"]


def test_the_loss_of_a_hybrid_is_that_of_its_logits(run: LoadedRun, capsys: pytest.CaptureFixture[str]) -> None:
    split = json.loads((run.folder.path / "run.json").read_text())["corpus"]["folder"]
    assert main(["eval", str(run.folder.path), "--layers", "0,2", "--json", "--tokens", "64"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["momentum_layers"] == [0, 2]
    assert evaluate_run(run.folder.path, corpus=split, tokens=64)[0].val_loss != found["val_loss"]
    hybrid = validation_loss(run.hybrid(layers={2, 0}), tokens=64)
    assert found["val_loss"] == pytest.approx(hybrid.val_loss, abs=EXACT)
    assert main(["eval", str(run.folder.path), "--cutoff", "1"]) == 0
    assert capsys.readouterr().out.startswith("yurii, cutoff 1, after step 12: loss ")


def test_a_table_over_cutoffs(run: LoadedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(run.folder.path)
    assert main(["eval", folder, "--cutoff", "all", "--layers", "0,2", "--layers", "none", "--quiet"]) == 0
    printed = capsys.readouterr().out
    rows = kept(run, "hybrid")["result"]["rows"]
    # cut-off 3 is the model itself, and no layer is cut-off 0
    assert [row["momentum in"] for row in rows] == ["all layers", "cutoff 0", "cutoff 1", "cutoff 2", "layers 0,2"]
    for row, layers in zip(rows, (range(3), (), (0,), (0, 1), (0, 2)), strict=True):
        expected = validation_loss(run.hybrid(layers=layers))
        assert row["loss"] == pytest.approx(expected.val_loss, abs=EXACT)
        assert (row["tokens"], row["split"]) == (expected.val_tokens, expected.val_hash)
        assert row["difference"] == pytest.approx(row["loss"] - rows[0]["loss"], abs=EXACT)
        assert f"{row['loss']:.4f}" in printed
    (tmp_path / "book.txt").write_text("One day, a fox went home. " * 9)
    assert main(["eval", folder, "--cutoff", "0,3", "--on", str(tmp_path / "book.txt"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    for row, kind in zip(rows, ("perplexity", "perplexity@cutoff-0"), strict=True):
        assert row["perplexity of book"] == kept(run, kind)["result"]["texts"][0]["perplexity"]


def test_an_interrupted_table_continues(run: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["eval", str(run.folder.path), "--cutoff", "all", "--quiet"]
    asked: list[str] = []
    original = hybrids.over_hybrids

    def failing(args: Any, run: LoadedRun, measure: Any) -> Any:
        def counted(each: LoadedRun) -> Any:
            asked.append(measured.called(each.model))
            if len(asked) == 3:
                raise KeyboardInterrupt
            return measure(each)

        return original(args, run, counted)

    monkeypatch.setattr("stepformer.cli.evaluate.over_hybrids", failing)
    assert main(words) == 130
    assert main(words) == 0
    assert asked == ["", "cutoff 0", "cutoff 1", "cutoff 1", "cutoff 2"]
    assert not (run.folder.path / "measured" / "hybrid.jsonl").exists()


def test_text_of_a_hybrid(run: LoadedRun, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(run.folder.path), "One", "--tokens", "12", "--temperature", "0"]
    assert main([*words, "--cutoff", "0"]) == 0
    said = capsys.readouterr().out
    drawn = {"max_new_tokens": 12, "temperature": 0.0}
    assert said == "".join(continue_text(run.hybrid(cutoff=0), "One", **drawn)) + "\n"
    ids = torch.tensor([[run.tokenizer.eot, *run.tokenizer.encode("One")]])
    logits = run.model.hybrid(cutoff=0)(ids).logits
    assert said.startswith("One" + run.tokenizer.decode([int(logits[0, -1].argmax())]))


def test_a_hybrid_is_diagnosed_as_one(run: LoadedRun, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["diagnose", str(run.folder.path), "--depth", "--layers", "1", "windows=1", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["momentum_layers"] == [1]
    assert kept(run, "depth@layers-1")["result"] == found["depth"]
    assert not (run.folder.path / "measured" / "depth.json").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["eval", "yurii", "--cutoff", "4"], "cutoff = 4 should lie between 0 and 3"),
        (["eval", "yurii", "--layers", "0,3"], "Layers are numbered 0 to 2"),
        (["eval", "yurii", "--cutoff", "half"], "--cutoff half should be numbers of layers: --cutoff 6"),
        (["eval", "yurii", "--cutoff", ""], "--cutoff  should be numbers"),
        (["eval", "yurii", "--layers", "1,x"], "--layers 1,x should be numbers of layers: --layers 0,11"),
        (["eval", "vanilla", "--cutoff", "1"], "this model has template 'gd'"),
        (["generate", "yurii", "One", "--cutoff", "0,1"], "Give one --cutoff or one --layers here"),
        (["diagnose", "yurii", "--depth", "--layers", "0", "--layers", "1"], "`stepformer eval` makes a table"),
    ],
)
def test_bad_words_are_sentences(
    words: list[str], sentence: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, name, *rest = words
    assert main([command, str(trained / name), *rest]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("layer", [3, -1])
def test_a_pin_in_a_layer_that_is_not_there_is_refused(layer: int) -> None:
    model = tiny("yurii")
    with pytest.raises(InputError, match="Layers are numbered 0 to 1"):
        model.pin_coefficients(layer=layer, mu=0.5)
