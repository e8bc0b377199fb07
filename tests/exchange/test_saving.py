"""`save_run`: a model of a loop of one's own becomes a run, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stepformer as sf
from helpers import shake, tiny, tokens
from runs import make_corpus
from stepformer.cli import main
from stepformer.training.runs import RunFolder


def test_a_model_is_saved_as_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without transformers; what the command line says of it, and weights and tokenizer as they were."""
    model, corpus = shake(tiny("yurii", vocab_size=300)), make_corpus(tmp_path / "corpus", tokenizer="bpe:290")
    step: Any = np.int64(7)
    run = sf.save_run(model, tmp_path / "run", corpus.tokenizer, step=step)
    loaded = sf.load_run(run, device="cpu")
    assert torch.equal(loaded.model(tokens()).logits, model.eval()(tokens()).logits)
    assert (loaded.step, loaded.config.model.real_vocab) == (7, 290)
    assert loaded.tokenizer.fingerprint == corpus.tokenizer.fingerprint
    assert main(["eval", str(run), "--corpus", str(corpus.folder), "--quiet", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("yurii after step 7: loss ")
    assert main(["generate", str(run), "Hi", "--tokens", "2", "--device", "cpu"]) == 0
    sf.save_run(model.bfloat16(), tmp_path / "again", run)  # the tokenizer of a run
    assert main(["compare", "--runs", str(run), str(tmp_path / "again")]) == 2
    assert "came as weights alone, and a comparison is of trainings" in capsys.readouterr().err
    again = sf.load_run(tmp_path / "again", device="cpu")
    assert (again.known_step, again.model.embed.tok_emb.weight.dtype) == (None, torch.float32)


def test_what_nobody_recorded_is_not_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of another loop has no optimizer, seed or length here, whatever their defaults are."""
    out = sf.save_run(tiny("yurii", vocab_size=257), tmp_path / "mine", "bytes", step=99)
    assert (out / "config.toml").read_text().count("[") == 1
    assert main(["show", str(out)]) == 0
    assert "not recorded: these are weights alone" in capsys.readouterr().out
    assert main(["show", str(out), "--cite"]) == 0
    assert "muon" not in capsys.readouterr().out
    assert main(["report", str(out), "--out", str(tmp_path / "page"), "--no-samples"]) == 0
    page = (tmp_path / "page" / "index.html").read_text()
    assert "yurii: Weights alone, after step 99: how they were trained is not recorded." in page
    assert not any(word in page for word in ("Unfinished", "1,000 steps", "Optimizer: ", "Seeds: ", "optim.lr"))
    titles, cells = ((tmp_path / "page" / "runs.csv").read_text().splitlines())[:2]
    row = dict(zip(titles.split(","), cells.split(","), strict=True))
    count = str(sf.load_run(out).model.num_parameters())
    assert (row["seed"], row["state"], row["steps"], row["parameters"]) == ("", "weights alone", "99", count)


def test_what_cannot_be_saved_as_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(sentence: str, model: Any, tokenizer: Any = "bytes", out: str = "run", **more: Any) -> None:
        with pytest.raises(sf.InputError, match=sentence) as found:
            sf.save_run(model, tmp_path / out, tokenizer, **more)
        assert "\n" not in str(found.value)

    model = shake(tiny("yurii", vocab_size=257))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").touch()
    refused("'.*taken' is there already and not empty: choose another place", model, out="taken")
    refused("takes the model itself, not Linear", nn.Linear(2, 2))
    refused("`tokenizer` should be 'gpt2', .*, not dict", model, {})
    refused("has 257 ids, but the model's table has 256 rows", tiny("yurii", vocab_size=256))
    for step in (-1, 1.5, "last"):
        refused(f"step = {step!r} should be a whole number", model, step=step)
    refused("neither pinned coefficients nor plain layers", model.hybrid(cutoff=1))
    model.pin_coefficients(mu=0.0)
    refused("neither pinned coefficients nor plain layers", model)
    model.unpin_coefficients()
    refused("is not whole on this rank", sf.Model(model.config, device="meta"))
    with torch.no_grad():
        model.final_norm.weight[0] = torch.nan
    refused(r"The model has weights that are not finite numbers, the first in 'final_norm\.weight'", model)
    model.final_norm.weight.data.fill_(1)
    model.final_norm.bias = nn.Parameter(torch.zeros(12))
    refused(r"nothing here has a place for its 'final_norm\.bias' \(12,\)", model)
    model.final_norm.bias = None
    monkeypatch.setattr(RunFolder, "create", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(sf.StepformerError, match="The disk is full"):
        sf.save_run(model, tmp_path / "run", "bytes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]
