"""Training on two ranks is training on one: same batches, same losses, same weights; checkpoints change worlds."""

from __future__ import annotations

import faulthandler
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from forked import two_ranks
from runs import small_run
from stepformer.base.errors import StepformerError
from stepformer.training import Stopped, load_run, resume, train
from stepformer.training.checkpoints import Checkpoints
from stepformer.training.loop import Trainer
from stepformer.training.metrics import read_metrics
from stepformer.training.stopping import Watch

# 37 blocks of evaluation: the last round is ragged on one rank and idle on the other
SETTINGS: dict[str, Any] = {"steps": 20, "clip": 0.3, "eval_every": 10, "save_every": 5, "eval_tokens": 37 * 16}
SETTINGS |= {"eval_first": 11 * 16}


def worker(rank: int, jobs: list[dict[str, Any]], folder: str) -> None:
    """One of two ranks: carries out the jobs, each a run to train or to continue."""
    torch.set_num_threads(1)
    stuck = Path(folder, f"stuck-{rank}").open("w")  # noqa: SIM115  (open until the process ends)
    faulthandler.dump_traceback_later(200, file=stuck)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for job in jobs:
        if "stop_after" in job:
            calls = [0]

            def asked(self: Watch, calls: list[int] = calls, job: dict[str, Any] = job) -> int:
                calls[0] += 1
                return 15 if calls[0] == job["stop_after"] and rank == 1 else 0  # only one rank hears it

            Watch.asked = asked  # type: ignore[method-assign]
        if job.get("poison"):
            poison()
        if job.get("linger") and rank == 0:
            linger()
        try:
            if job["do"] == "train":
                train(small_run(Path(job["corpus"]), **job["settings"]), job["out"], quiet=True)
            else:
                resume(job["out"], quiet=True)
        except Stopped as stopped:
            if stopped.step != job["stop_after"]:
                raise
        except StepformerError as error:
            Path(folder, f"error-{rank}").write_text(str(error))
        Watch.asked = lambda self: 0  # type: ignore[method-assign]
    dist.barrier()
    Path(folder, f"done-{rank}").touch()
    os._exit(0)  # the tear-down of gloo hung on busy cores before (see test_parallel.py); the work is done


def linger() -> None:
    """The main rank is late with its best checkpoint: another one that goes on meanwhile would not see it."""
    original = Checkpoints.save

    def slowly(self: Checkpoints, name: str, *args: Any) -> None:
        time.sleep(2 if name.startswith("best") else 0)
        original(self, name, *args)

    Checkpoints.save = slowly  # type: ignore[method-assign]


def poison() -> None:
    """One element of one weight becomes NaN in step 4; under FSDP only one rank holds it."""
    original = Trainer._gradients

    def poisoned(self: Trainer, t: int) -> torch.Tensor:
        if t == 3:
            weight = dict(self.model.named_parameters())["blocks.1.mlp.up.weight"]
            local = getattr(weight, "to_local", lambda: weight)()
            with torch.no_grad():
                if self.world.rank == 1 or local is weight:
                    local[-1, -1] = float("nan")
        return original(self, t)

    Trainer._gradients = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_agree_on_what_went_wrong(corpus: Path, tmp_path: Path, kind: str) -> None:
    settings = {**SETTINGS, "parallel": kind, "save_every": 2}
    job = {"do": "train", "corpus": str(corpus), "out": str(tmp_path / "run"), "settings": settings, "poison": True}
    on_two_ranks([job], tmp_path / "ranks")
    said = {file.read_text() for file in (tmp_path / "ranks").glob("error-*")}
    assert len(said) == 1
    assert "in step 4: the parameter 'blocks.1.mlp.up.weight' is not finite" in said.pop()


def on_two_ranks(jobs: list[dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    two_ranks(worker, (jobs, str(folder)), folder)
    assert len(list(folder.glob("done-*"))) == 2


def numbers(folder: Path) -> list[float]:
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] != "saved"]
    found = [line.get("loss", line.get("val_loss")) for line in lines]
    found += [loss for line in lines for loss in line.get("first", {}).values()]
    return [*found, json.loads((folder / "result.json").read_text())["train_loss"]]


def norms(folder: Path) -> list[float]:
    return [line["grad_norm"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]


def distance(a: Path, b: Path) -> float:
    one, two = (dict(load_run(folder, "last").model.named_parameters()) for folder in (a, b))
    return max(float((one[name] - two[name]).detach().abs().max()) for name in one)


VARIANTS: dict[str, dict[str, Any]] = {
    "muon": {},
    "sam": {"sam": "always", "optim.name": "adamw", "micro_batch": 2},
    "scion": {"optim.name": "scion", "qkv": "split", "clip_coefficients": False},
    "trust": {"name": "vanilla", "optim.name": "trust", "probe": 48, "probe_every": 2, "factor_every": 4},
    "trust-spectral": {"name": "vanilla", "optim.name": "trust", "optim.norm": "spectral", "probe": 48},
}


@pytest.mark.parametrize(
    ("kind", "variants", "steps"),
    [
        ("ddp", ["trust"], 10),
        ("fsdp", ["muon"], 10),
        *(pytest.param(kind, list(VARIANTS), 20, marks=pytest.mark.slow, id=kind) for kind in ("ddp", "fsdp")),
    ],
)
def test_two_ranks_take_the_steps_of_one(
    corpus: Path, tmp_path: Path, kind: str, variants: list[str], steps: int
) -> None:
    """fp64, clipping active: 1e-9 (measured 1e-14). The same after a stop, and from one world to another."""
    jobs, first = [], {**SETTINGS, "steps": steps, **VARIANTS[variants[0]]}
    for name in variants:
        settings = {**SETTINGS, "steps": steps, **VARIANTS[name]}
        train(small_run(corpus, **settings), tmp_path / f"one-{name}", quiet=True)
        jobs.append({"do": "train", "out": str(tmp_path / f"two-{name}"), "settings": {**settings, "parallel": kind}})
    # stopped on two ranks after seven steps, to be continued on one
    jobs.append({"do": "train", "out": str(tmp_path / "cut"), "settings": {**first, "parallel": kind}, "stop_after": 7})
    # stopped on one rank after seven steps, to be continued on two
    with pytest.MonkeyPatch.context() as patch:
        calls = [0]

        def asked(self: Watch) -> int:
            calls[0] += 1
            return 15 if calls[0] == 7 else 0

        patch.setattr(Watch, "asked", asked)
        with pytest.raises(Stopped):
            train(small_run(corpus, **first, parallel=kind), tmp_path / "grown", quiet=True)
    jobs.append({"do": "resume", "out": str(tmp_path / "grown"), "settings": {}})
    on_two_ranks([{"corpus": str(corpus), **job} for job in jobs], tmp_path / "ranks")
    resume(tmp_path / "cut", quiet=True)

    for name in variants:
        one, two = tmp_path / f"one-{name}", tmp_path / f"two-{name}"
        np.testing.assert_allclose(numbers(two), numbers(one), atol=1e-9, rtol=0)
        np.testing.assert_allclose(norms(two), norms(one), atol=1e-9, rtol=0)
        assert min(norms(one)) > 0.3  # clipping was active
        assert distance(one, two) < 1e-9
    uncut = tmp_path / f"one-{variants[0]}"
    for name in ("cut", "grown"):
        np.testing.assert_allclose(numbers(tmp_path / name), numbers(uncut), atol=1e-9, rtol=0)
        assert distance(tmp_path / name, uncut) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_begin_with_the_weights_of_another_run(corpus: Path, tmp_path: Path, kind: str) -> None:
    """A run that two ranks wrote, sharded or not, is the start of a run on two ranks and of the same run on one."""
    first = {**SETTINGS, "steps": 10, "parallel": kind}
    warm = {**SETTINGS, "steps": 6, "eval_every": 3, "optim.name": "adamw", "lr": 0.01, "parallel": kind}
    warm |= {"init": str(tmp_path / "source"), "also": str(corpus), "seed": 7}
    jobs: list[dict[str, Any]] = [
        {"do": "train", "out": str(tmp_path / "source"), "settings": first, "linger": True},
        {"do": "train", "out": str(tmp_path / "two"), "settings": warm},
    ]
    on_two_ranks([{"corpus": str(corpus), **job} for job in jobs], tmp_path / "ranks")
    train(small_run(corpus, **warm), tmp_path / "one", quiet=True)
    np.testing.assert_allclose(numbers(tmp_path / "two"), numbers(tmp_path / "one"), atol=1e-9, rtol=0)
    assert distance(tmp_path / "one", tmp_path / "two") < 1e-9
    ended = [line["val_loss"] for line in read_metrics(tmp_path / "source/metrics.jsonl") if line["kind"] == "eval"]
    begun = next(line for line in read_metrics(tmp_path / "two/metrics.jsonl") if line["kind"] == "eval")
    assert begun["val_loss"] == pytest.approx(ended[-1], abs=1e-12)  # fp64, the same weights and tokens
    assert begun["also"][corpus.name]["val_loss"] == begun["val_loss"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-9), ("fp32", 2e-3)])
def test_two_ranks_share_a_card(corpus: Path, tmp_path: Path, precision: str, tolerance: float) -> None:
    """Both replay a recorded pass and average the gradients after it (gloo: NCCL wants a card for each).

    fp64 as above. In fp32 kernels run too, and Muon divides errors of 1e-6 in a gradient by its small singular values.
    """
    settings = {**SETTINGS, "steps": 10, "device": "cuda", "precision": precision}
    train(small_run(corpus, **settings), tmp_path / "one", quiet=True)
    job = {"do": "train", "corpus": str(corpus), "out": str(tmp_path / "two"), "settings": settings}
    on_two_ranks([job], tmp_path / "ranks")
    assert not list((tmp_path / "ranks").glob("error-*"))
    np.testing.assert_allclose(numbers(tmp_path / "two"), numbers(tmp_path / "one"), atol=tolerance, rtol=0)
    assert distance(tmp_path / "one", tmp_path / "two") < tolerance
