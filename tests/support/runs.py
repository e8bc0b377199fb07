"""Small runs for the tests of training: a corpus of bytes and a model of a few thousand parameters."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from stepformer.data.corpus import Corpus
from stepformer.data.opening import open_source
from stepformer.data.prepare import prepare
from stepformer.optim import Optimizers
from stepformer.training import RunConfig, run_config, train
from stepformer.training.metrics import read_metrics
from stepformer.training.stopping import Watch

SMALL: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 2,
    "d_model": 16,
    "context": 16,
    "steps": 12,
    "batch": 8,
    "eval_every": 4,
    "eval_tokens": 512,
    "save_every": 3,
    "precision": "fp64",
    "device": "cpu",
}


def make_corpus(folder: Path, count: int = 40, tokenizer: str = "bytes", force: bool = False, **asked: Any) -> Corpus:
    """A few tales as bytes; the split is by the tail of each story or by hash, whatever prepare chooses."""
    return prepare(
        open_source("tales", count=count, **asked), tokenizer, folder, val_fraction=0.2, workers=1, force=force
    )


def small_run(data: Path, name: str = "yurii", **changes: Any) -> RunConfig:
    """The config of a run that takes well under a second."""
    return run_config(name, **{**SMALL, "corpus": str(data), **changes})


def go(data: Path, out: Path, name: str = "yurii", **changes: Any) -> dict[str, Any]:
    return train(small_run(data, name, **changes), out, quiet=True)


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]


def tensors(folder: Path) -> dict[str, Tensor]:
    last = sorted((folder / "checkpoints").glob("step-*"))[-1]
    return load_file(last / "model.safetensors")


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGTERM) -> None:
    """Make the watch ask for a stop once so many steps are done."""
    taken = [0]
    original = Optimizers.step

    def counting(self: Optimizers, t: int) -> None:
        original(self, t)
        taken[0] += 1

    monkeypatch.setattr(Optimizers, "step", counting)
    monkeypatch.setattr(Watch, "asked", lambda self: int(number) if taken[0] == step else 0)
