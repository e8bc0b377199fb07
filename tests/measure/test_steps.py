"""`diagnose --steps`: the step is the one that training would take, and nothing is written but what it did."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import shake, tiny, tokens
from runs import make_corpus, small_run, stop_after
from stepformer.base.errors import InputError
from stepformer.cli import main
from stepformer.measure import measured
from stepformer.measure.diagnostics.steps import look, plot, text
from stepformer.training import load_run, train
from stepformer.training.run import at_last_checkpoint
from stepformer.training.stopping import Stopped


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and "measured" not in path.parts]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_the_step_is_the_one_that_resume_takes(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_corpus(tmp_path / "tales")
    whole = small_run(tmp_path / "tales", "yurii", save_every=1, keep=20, **{"optim.name": optimizer})
    train(whole, tmp_path / "whole", quiet=True)
    stop_after(monkeypatch, 5)
    with pytest.raises(Stopped):
        train(whole, tmp_path / "stopped", quiet=True)
    before = contents(tmp_path / "stopped")
    trainer = at_last_checkpoint(tmp_path / "stopped", "cpu")
    assert trainer.step == 5
    trainer.update()
    trainer.batches.close()
    expected = load_file(tmp_path / "whole" / "checkpoints" / "step-00000006" / "model.safetensors")
    assert all(torch.equal(p, expected[name]) for name, p in trainer.model.named_parameters())
    assert contents(tmp_path / "stopped") == before


def test_the_command_prints_draws_and_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    make_corpus(tmp_path / "tales")
    folder = tmp_path / "run"
    train(small_run(tmp_path / "tales", "vanilla"), folder, quiet=True)
    before = contents(folder)
    words = ["diagnose", str(folder), "--steps", "windows=4", "rows=4", "sweep=5", "--quiet"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    for word in ("KL of attention by head", "RMS mlp predicted", "-<G, dW>", "held out", "step 13 of muon"):
        assert word in printed
    assert contents(folder) == before
    assert (folder / "measured" / "steps.png").stat().st_size > 1000
    found = measured.load(folder, "steps")
    assert found is not None
    result = found["result"]
    assert (found["step"], result["queries"], result["tokens"]) == (12, 16, 64)
    assert [point["scale"] for point in result["sweep"]] == [0.25, 0.5, 1, 2, 4]
    assert abs(result["sweep"][0]["r1"] - 1) < abs(result["sweep"][-1]["r1"] - 1)
    assert result["loss"]["own batch"]["r2"] == pytest.approx(1, abs=0.3)
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"]["r1"] == result["r1"]


def test_attention_without_rows_has_streams(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model, ids = shake(tiny("linear")), tokens()
    step = {"blocks.0.mlp.up.weight": torch.full_like(model.blocks[0].mlp.up.weight, 1e-4)}
    result = look(model, step, (ids, ids), sweep=3)
    assert result["layers"][0]["kl"]["measured"] == []
    assert result["r1"] == pytest.approx(1, abs=1e-2)
    assert text(result) is not None
    plot(result, tmp_path / "steps.png")


def test_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_corpus(tmp_path / "tales")
    train(small_run(tmp_path / "tales", "yurii", steps=2), tmp_path / "run", quiet=True)
    assert main(["diagnose", str(tmp_path / "run"), "--steps", "--cutoff", "1", "--quiet"]) == 2
    assert "knows no hybrids" in capsys.readouterr().err
    loaded = load_run(tmp_path / "run")
    record = tmp_path / "run" / "run.json"
    stored = {key: value for key, value in json.loads(record.read_text()).items() if key not in ("corpus", "checksum")}
    record.write_text(json.dumps(stored))
    with pytest.raises(InputError, match="came as weights alone"):
        at_last_checkpoint(loaded.folder.path, "cpu")
