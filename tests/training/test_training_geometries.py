"""Training the new attentions: resume to the bit, what the run reports, stability, text from a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import stepformer as sf
from runs import make_corpus, small_run, stop_after
from stepformer.training import Stopped, load_run, resume, train
from stepformer.training.metrics import read_metrics

NEW = [name for name in sf.presets() if sf.preset(name).config.attention != "softmax"]


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "symp-etd-ab2"},
        {"name": "linear-symp-conformal-euler", "embedding_skip": True},
        pytest.param({"name": "kl-carried", "value_residual": "unit", "target": "token"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_resume_and_generate(
    settings: dict[str, Any], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after five steps and resumed, it ends with the same weights; then it writes text."""
    whole = train(small_run(corpus, **settings), tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Stopped):
            train(small_run(corpus, **settings), tmp_path / "halves", quiet=True)
    assert resume(tmp_path / "halves", quiet=True)["weights_sha256"] == whole["weights_sha256"]
    model = load_run(tmp_path / "halves").model
    text = model.generate([[1, 2, 3], [4]], max_new_tokens=6, seed=0)
    assert [len(row) for row in text.tokens] == [6, 6]


def test_evaluations_report_what_oracles_see(corpus: Path, tmp_path: Path) -> None:
    """A share of rows out of reach for constrained attention, of scores beyond their bound for Hamiltonian."""
    for name, key in (("entropy", "capped_rows"), ("symp-plain-euler", "bounded_scores")):
        train(small_run(corpus, name), tmp_path / name, quiet=True)
        lines = [m for m in read_metrics(tmp_path / name / "metrics.jsonl") if m["kind"] == "eval"]
        assert lines
        assert all(0 <= line[key] <= 1 for line in lines)
    train(small_run(corpus, "vanilla"), tmp_path / "vanilla", quiet=True)
    lines = [m for m in read_metrics(tmp_path / "vanilla" / "metrics.jsonl") if m["kind"] == "eval"]
    assert not any("capped_rows" in line or "bounded_scores" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEW)
def test_500_steps_on_tales(name: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """Default settings, a small model in fp32: no NaN, and below the unigram entropy of the validation split."""
    corpus = make_corpus(tmp_path, count=400)
    small = {"n_layer": 3, "n_head": 4, "d_model": 48, "context": 64, "steps": 500, "batch": 8, "precision": "fp32"}
    result = train(
        small_run(corpus.folder, name, **small, eval_every=250, save_every=500, eval_tokens=20_000),
        tmp_path / "run",
        quiet=True,
    )
    tokens = torch.from_numpy(corpus.split("val").gather(torch.zeros(1, dtype=torch.long).numpy(), 20_000)).flatten()
    shares = torch.bincount(tokens).double() / len(tokens)
    entropy = -(shares[shares > 0] * shares[shares > 0].log()).sum().item()
    assert result["val_loss"] < entropy - 0.5
