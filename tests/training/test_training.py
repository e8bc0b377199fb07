"""The training loop: exact resume, accumulation, evaluation, bad input, nothing lost."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import re
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import forked
import stepformer as sf
from runs import make_corpus, small_run, stop_after
from stepformer.base import files
from stepformer.base.errors import DivergedError
from stepformer.base.files import write_json
from stepformer.data.corpus import Corpus
from stepformer.optim import Optimizers
from stepformer.study import RunRecord
from stepformer.training import Stopped, checkpoints, evaluate_run, load_run, memory, resume, run_config, train
from stepformer.training.evaluation import evaluate
from stepformer.training.loop import Trainer
from stepformer.training.memory import estimate_memory
from stepformer.training.metrics import read_metrics
from stepformer.training.parallel import LocalBatches, ParallelModel, World
from stepformer.training.runs import RunFolder
from stepformer.training.stopping import seconds

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=4).folder


def go(data: Path, out: Path, name: str = "yurii", **changes: Any) -> dict[str, Any]:
    return train(small_run(data, name, **changes), out, quiet=True)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim.name": "adamw", "schedule": "wsd", "decay_start": 8},
        {"sam": "always", "rho": 0.1},
        pytest.param({"sam": "decay", "schedule": "wsd", "decay_start": 6}, marks=pytest.mark.slow),
        pytest.param({"optim.name": "polargrad", "momentum_warmup": 9, "qkv": "split"}, marks=pytest.mark.slow),
        {"batch": 24, "micro_batch": 2, "seed": 3},
    ],
    ids=["muon", "adamw-wsd", "sam", "sawd", "polargrad", "accumulation"],
)
@pytest.mark.parametrize("steps", [[5], pytest.param([1, 7], marks=pytest.mark.slow)], ids=str)
def test_a_stopped_and_resumed_run_is_the_uninterrupted_one(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], steps: list[int]
) -> None:
    whole = go(corpus, tmp_path / "whole", **changes)
    for step in steps:
        halves = tmp_path / f"halves-{step}"
        with monkeypatch.context() as patch:
            stop_after(patch, step)
            with pytest.raises(Stopped) as stopped:
                go(corpus, halves, **changes)
        assert stopped.value.status == 128 + signal.SIGTERM
        assert stopped.value.command == f"stepformer resume {halves}"
        again = resume(halves, quiet=True)
        assert again["weights_sha256"] == whole["weights_sha256"]
        assert (again["val_loss"], again["best_val_loss"]) == (whole["val_loss"], whole["best_val_loss"])
        lines = [
            [(m["kind"], m["step"]) for m in read_metrics(f / "metrics.jsonl") if m["kind"] != "saved"]
            for f in (tmp_path / "whole", halves)
        ]
        assert lines[0] == lines[1]


def test_the_runs_above_stop_in_the_middle_of_epochs_and_cross_their_ends(corpus: Path) -> None:
    blocks = (len(Corpus(corpus).split("train")) - 16) // 16
    assert 7 * 24 < blocks < 12 * 24  # the accumulating run: the second epoch begins after the last stop
    assert blocks % 24  # inside a batch


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    last = sorted((folder / "checkpoints").glob("step-*"))[-1]
    return load_file(last / "model.safetensors")


@pytest.mark.parametrize("steps", [8, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sam", ["off", "always"])
def test_accumulation_changes_nothing(
    corpus: Path, tmp_path: Path, sam: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 x 2 and 2 x 4, also changed in the middle of a run: fp64, 1e-9 (measured 1e-15)."""
    common = {"steps": steps, "batch": 8, "sam": sam, "clip": 0.3, "save_every": steps // 2}
    go(corpus, tmp_path / "a", micro_batch=4, **common)
    go(corpus, tmp_path / "b", micro_batch=2, **common)
    with monkeypatch.context() as patch:
        stop_after(patch, steps // 2 - 1)
        with pytest.raises(Stopped):
            go(corpus, tmp_path / "c", micro_batch=4, **common)
    resume(tmp_path / "c", quiet=True, micro_batch=2)
    for other in ("b", "c"):
        np.testing.assert_allclose(losses(tmp_path / "a"), losses(tmp_path / other), atol=1e-9, rtol=0)
        a, b = tensors(tmp_path / "a"), tensors(tmp_path / other)
        assert max(float((a[n] - b[n]).abs().max()) for n in a) < 1e-9


def test_clipping_was_active_above(corpus: Path, tmp_path: Path) -> None:
    go(corpus, tmp_path / "a", steps=2)
    norms = [line["grad_norm"] for line in read_metrics(tmp_path / "a" / "metrics.jsonl") if line["kind"] == "train"]
    assert min(norms) > 0.3


@pytest.mark.parametrize("sam", ["off", "always"])
def test_one_step_is_what_the_parts_say(corpus: Path, tmp_path: Path, sam: str) -> None:
    """The loop against its pieces put together by hand: batch, loss, clip, optimizer; with SAM a second gradient."""
    settings = {"steps": 3, "sam": sam, "rho": 0.5, "clip": 0.2}
    config = small_run(corpus, **settings).for_vocabulary(257)
    opened = Corpus(corpus)
    from stepformer.data.batches import Batches

    batches = Batches(opened.split("train"), 16, 8, config.train.seed)
    model = sf.Model(config.model, seed=config.train.seed, dtype=torch.float64)
    optimizers = Optimizers(model, config.optim, 3)
    seen = []
    for t in range(3):
        optimizers.zero_grad()
        loss = model(*batches.batch(t)).loss
        assert loss is not None
        loss.backward()
        if sam == "always":
            before = optimizers.perturb()
            optimizers.zero_grad()
            model(*batches.batch(t)).loss.backward()
            optimizers.restore(before)
        optimizers.clip()
        optimizers.step(t)
        seen.append(loss.item())
    go(corpus, tmp_path / "run", **settings)
    np.testing.assert_allclose(losses(tmp_path / "run"), seen, atol=1e-12)
    trained = tensors(tmp_path / "run")
    assert max(float((trained[n] - p.detach()).abs().max()) for n, p in model.named_parameters()) < 1e-12


def test_two_architectures_see_the_same_batches(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[torch.Tensor]] = {"vanilla": [], "tmm": []}
    for name, rows in seen.items():
        original = LocalBatches.read

        def reading(self: LocalBatches, t: int, rows: list[torch.Tensor] = rows, original: Any = original) -> Any:
            found = original(self, t)
            rows.append(found[0])
            return found

        with monkeypatch.context() as patch:
            patch.setattr(LocalBatches, "read", reading)
            go(corpus, tmp_path / name, name, steps=4)
    assert all(torch.equal(a, b) for a, b in zip(*seen.values(), strict=True))


def test_evaluation_does_not_depend_on_the_micro_batch(corpus: Path, tmp_path: Path) -> None:
    go(corpus, tmp_path / "run", precision="fp32", steps=4)
    found = [evaluate_run(tmp_path / "run", micro_batch=n)[0] for n in (1, 3, 8)]
    assert len({(f.val_tokens, f.val_hash) for f in found}) == 1
    assert max(abs(f.val_loss - found[0].val_loss) for f in found) < 1e-6


def test_evaluation_is_full_blocks_from_the_first_token(corpus: Path) -> None:
    opened = Corpus(corpus)
    val, config = opened.split("val"), small_run(corpus).for_vocabulary(257)
    model = sf.Model(config.model, seed=1, dtype=torch.float64)
    found = evaluate(model, val, context=16, tokens=100, micro_batch=4, world=ALONE)
    assert found.val_tokens == 96  # six blocks; four tokens are dropped
    by_hand = []
    with torch.no_grad():
        for block in range(6):
            row = torch.from_numpy(val.tokens(16 * block, 16 * block + 17).astype(np.int64))[None]
            by_hand.append(model(row[:, :-1], row[:, 1:]).loss.item())
    assert abs(found.val_loss - np.mean(by_hand)) < 1e-12
    whole = evaluate(model, val, context=16, tokens=10**9, micro_batch=4, world=ALONE)
    assert whole.val_tokens == (len(val) - 1) // 16 * 16
    with pytest.raises(sf.InputError, match="too few for one block of 16"):
        evaluate(model, val, context=16, tokens=15, micro_batch=4, world=ALONE)


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("gradient", "the gradient of 'blocks.0.attn.qkv.weight' is not finite"),
        ("weight", "the parameter 'blocks.1.mlp.up.weight' is not finite"),
        ("output", "the output of 'blocks.0.mlp' is not finite"),
    ],
)
def test_nan_stops_before_it_spoils_the_weights(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, sentence: str
) -> None:
    whole = go(corpus, tmp_path / "whole")
    original = Trainer._gradients

    def poisoned(self: Trainer, t: int) -> torch.Tensor:
        parameters = dict(self.model.named_parameters())
        if t == 7 and where == "weight":
            with torch.no_grad():
                parameters["blocks.1.mlp.up.weight"][0, 0] = math.nan
        if t == 7 and where == "output":  # the hook stays: the diagnosis runs the model once more
            self.model.blocks[0].mlp.register_forward_hook(lambda m, a, out: out * math.inf)
        loss = original(self, t)
        if t == 7 and where == "gradient":
            gradient = parameters["blocks.0.attn.qkv.weight"].grad
            assert gradient is not None
            gradient[1, 1] = math.inf
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_gradients", poisoned)
        with pytest.raises(sf.StepformerError, match=f"stopped in step 8: {sentence}") as raised:
            go(corpus, tmp_path / "bad")
    # weights that are already bad are not saved: the last good checkpoint is named instead
    assert ("step-00000006" if where == "weight" else "step-00000007") in str(raised.value)
    assert (tmp_path / "bad" / "failed.txt").read_text().strip() == f"Diverged: {raised.value}"
    for folder in (tmp_path / "bad" / "checkpoints").glob("step-*"):
        assert all(t.isfinite().all() for t in load_file(folder / "model.safetensors").values())
    # without the poison the run goes on as if nothing had happened
    assert resume(tmp_path / "bad", quiet=True)["weights_sha256"] == whole["weights_sha256"]
    assert not (tmp_path / "bad" / "failed.txt").exists()


def test_a_norm_that_overflows_is_called_that(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of 1e25 are finite in fp32, their squares are not: no tensor and no loss is to blame."""
    original = Trainer._gradients

    def steep(self: Trainer, t: int) -> torch.Tensor:
        loss = original(self, t)
        gradient = self.model.blocks[0].attn.qkv.weight.grad
        assert gradient is not None
        if t == 4:
            gradient.fill_(1e25)
        return loss

    monkeypatch.setattr(Trainer, "_gradients", steep)
    with pytest.raises(
        DivergedError, match="in step 5: every gradient is finite, but their norm is too large"
    ) as found:
        go(corpus, tmp_path / "run", precision="fp32")
    assert re.search(
        r"for fp32 \(loss \d\.\d+, gradient norm inf\)\. The weights from before it are in", str(found.value)
    )


OF_CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
OF_CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you")


@pytest.mark.parametrize(
    ("error", "room"),
    [
        pytest.param(OF_CPU, 0.03, id="cpu"),
        pytest.param(OF_CUDA, 0.03, id="cuda", marks=pytest.mark.slow),
        pytest.param(OF_CPU, 0.001, id="too little", marks=pytest.mark.slow),
    ],
)
def test_out_of_memory_says_what_would_fit(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, room: float
) -> None:
    def short(self: ParallelModel, *args: Any) -> torch.Tensor:
        raise error

    config = small_run(corpus, steps=1, batch=64, micro_batch=64, d_model=64, context=64, precision="fp32")
    with monkeypatch.context() as patch:
        patch.setattr(ParallelModel, "loss", short)
        patch.setattr(memory, "free_memory", lambda device: room * 2**30)
        with pytest.raises(sf.StepformerError, match=r"^Out of memory: 64 sequences in one pass") as found:
            train(config, tmp_path / "run", quiet=True)
    said = str(found.value)
    assert f"`stepformer show {tmp_path}/run/config.toml --batch N`" in said
    assert (tmp_path / "run" / "failed.txt").read_text() == f"{said}\n"
    if room < 0.01:
        assert "too little for fewer of them, too: train with activation_checkpointing=true" in said
        return
    suggested = re.search(r"resume (\S+) micro_batch=(\d+)`", said)
    assert suggested is not None
    fits, less = int(suggested[2]), small_run(corpus, d_model=64, context=64).for_vocabulary(257)
    needed = [estimate_memory(less.model, n, optimizer_copies=2).training / 2**30 for n in (fits, 2 * fits)]
    assert needed[0] < room < needed[1] / 0.9  # the largest that fits, a tenth left free
    assert resume(suggested[1], quiet=True, micro_batch=fits)["steps"] == 1


def test_a_batch_whose_tokens_do_not_fit(corpus: Path, tmp_path: Path) -> None:
    config = small_run(corpus, steps=1, batch=10**12, micro_batch=8)
    said = memory.shortage(config, World(0, 1, torch.device("cpu")), tmp_path)
    assert said.startswith("Out of memory: the tokens of a batch of 1,000,000,000,000 sequences need")


@pytest.mark.slow
def test_what_is_said_to_fit_does(corpus: Path, tmp_path: Path) -> None:
    """A process may have 600 MiB more than it has now: a micro-batch of 1024 does not fit, the suggested one does."""
    words = [f"corpus={corpus}", "n_layer=2", "n_head=2", "d_model=64", "context=64", "steps=1", "eval_tokens=512"]
    words += ["batch=1024", "micro_batch=1024", "device=cpu", "--out", str(tmp_path / "run"), "--quiet"]
    code = f"""
import re, resource, sys
from pathlib import Path
import torch._subclasses.fake_tensor
from stepformer.cli.main import main
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 600 * 2**20,) * 2)
assert main(["train", "yurii", *{words!r}]) == 2
fits = re.search(r"micro_batch=(\\d+)`", Path({str(tmp_path)!r}, "run", "failed.txt").read_text())[1]
sys.exit(main(["resume", {str(tmp_path / "run")!r}, "micro_batch=" + fits, "--quiet"]))
"""
    done = forked.python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "stepformer: Out of memory: 1024 sequences in one pass" in done.stderr


@pytest.mark.parametrize(
    "change", ["moved", *(pytest.param(x, marks=pytest.mark.slow) for x in ("deleted", "replaced"))]
)
def test_a_folder_that_goes_away_is_not_made_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    original, run = Optimizers.step, tmp_path / "run"
    whole = go(corpus, tmp_path / "whole")

    def moving(self: Optimizers, t: int) -> None:
        original(self, t)
        if t == 4 and change == "deleted":
            shutil.rmtree(run)
        elif t == 4:
            run.rename(tmp_path / "elsewhere")
            if change == "replaced":
                run.mkdir()

    with monkeypatch.context() as patch:
        patch.setattr(Optimizers, "step", moving)
        with pytest.raises(sf.StepformerError, match="/run' was moved or deleted while the run trained"):
            go(corpus, run)
    assert not run.exists() or list(run.iterdir()) == []
    if change != "deleted":
        assert resume(tmp_path / "elsewhere", quiet=True)["weights_sha256"] == whole["weights_sha256"]


def test_a_folder_that_goes_away_during_a_save(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = checkpoints.save_file

    def moving(tensors: Any, path: Path) -> None:
        original(tensors, path)
        if "step-00000006" in str(path):
            (tmp_path / "run").rename(tmp_path / "elsewhere")

    monkeypatch.setattr(checkpoints, "save_file", moving)
    with pytest.raises(sf.StepformerError, match="/run' was moved or deleted while the run trained"):
        go(corpus, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_nan_in_coefficients_that_are_not_clipped_is_seen(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Trainer._gradients

    def poisoned(self: Trainer, t: int) -> torch.Tensor:
        loss = original(self, t)
        gradient = dict(self.model.named_parameters())["blocks.0.coefficients.mu_attn"].grad
        assert gradient is not None
        if t == 4:
            gradient.fill_(math.nan)
        return loss

    monkeypatch.setattr(Trainer, "_gradients", poisoned)
    with pytest.raises(sf.StepformerError, match=r"in step 5: the gradient of 'blocks.0.coefficients.mu_attn' is not"):
        go(corpus, tmp_path / "run", clip_coefficients=False)


def test_nan_that_an_evaluation_finds_first(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last update spoils the weights: no NaN is written, none becomes the best, the good checkpoint stays."""
    original = Optimizers.step

    def spoil(self: Optimizers, t: int) -> None:
        original(self, t)
        if t == 11:
            with torch.no_grad():
                self.parameters[0].fill_(math.nan)

    monkeypatch.setattr(Optimizers, "step", spoil)
    with pytest.raises(sf.StepformerError, match=r"after step 12: the parameter .* is not finite .*step-00000009"):
        go(corpus, tmp_path / "run")
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert load_run(tmp_path / "run").step == 8


def test_the_best_evaluation_is_the_best(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations that go down and up: the lowest one counts, also when the run was stopped after it."""
    from stepformer.training import evaluation

    table = {0: 9.0, 2: 5.0, 4: 3.0, 6: 4.0, 8: 3.5, 10: 3.1, 12: 3.2}
    numbers = iter([*table.values(), 2.0] * 2)  # of each run the last one is of training tokens
    original = evaluation.evaluate

    def evaluated(*args: Any, **kwargs: Any) -> Any:
        return dataclasses.replace(original(*args, **kwargs), val_loss=next(numbers))

    monkeypatch.setattr(evaluation, "evaluate", evaluated)
    whole = go(corpus, tmp_path / "whole", eval_every=2)
    assert (whole["best_step"], whole["best_val_loss"]) == (4, 3.0)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Stopped):
            go(corpus, tmp_path / "halves", eval_every=2)
    again = resume(tmp_path / "halves", quiet=True)
    assert (again["best_step"], again["best_val_loss"]) == (4, 3.0)
    assert load_run(tmp_path / "halves").step == 4


def test_scion_with_its_own_start_is_no_divergence(corpus: Path, tmp_path: Path) -> None:
    assert go(corpus, tmp_path / "run", **{"optim.name": "scion"}, own_init=True)["steps"] == 12


def test_divergence_stops(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(sf.StepformerError, match=r"the loss is \d+\.\d+, above max_loss = 3\.00: the run has diverged"):
        go(corpus, tmp_path / "run", max_loss=3.0)
    assert RunFolder(tmp_path / "run").exists


def test_keep_and_best(corpus: Path, tmp_path: Path) -> None:
    result = go(corpus, tmp_path / "run", keep=3, save_every=2)
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == [f"best-{result['best_step']:08d}", "step-00000008", "step-00000010", "step-00000012"]
    assert load_run(tmp_path / "run", "best").step == result["best_step"]
    assert load_run(tmp_path / "run", "last").step == 12


def test_damaged_checkpoints_are_named_and_the_one_before_is_used(corpus: Path, tmp_path: Path) -> None:
    whole = go(corpus, tmp_path / "run")
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


def test_a_checkpoint_without_manifest_does_not_count(corpus: Path, tmp_path: Path) -> None:
    whole = go(corpus, tmp_path / "run")
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


@pytest.mark.parametrize("number", [3, 6, 8])
def test_a_full_disk_loses_nothing(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    whole = go(corpus, tmp_path / "whole")
    calls, original = [0], files.sync

    def full(file: Any) -> None:
        calls[0] += 1
        if calls[0] > number:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(file)

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", full)
        with pytest.raises(
            sf.StepformerError, match=r"The disk is full: .* could not be written; older files are whole"
        ):
            go(corpus, tmp_path / "run")
    if RunFolder(tmp_path / "run").exists:
        again = resume(tmp_path / "run", quiet=True)
    else:
        again = go(corpus, tmp_path / "run")
    assert again["weights_sha256"] == whole["weights_sha256"]
    assert not list((tmp_path / "run").rglob(".tmp-*"))


def test_a_full_disk_leaves_no_half_checkpoint(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = files.write_json

    def full(path: Path, value: Any) -> None:
        if path.name == "manifest.json" and "step-00000006" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        original(path, value)

    monkeypatch.setattr(files, "write_json", full)
    with pytest.raises(sf.StepformerError, match="disk is full"):
        go(corpus, tmp_path / "run")
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["best-00000004", "step-00000003"]


def test_a_full_disk_inside_safetensors(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    def full(*args: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(sf.StepformerError, match="The disk is full"):
        go(corpus, tmp_path / "run")


def test_a_second_process_is_refused(corpus: Path, tmp_path: Path) -> None:
    go(corpus, tmp_path / "run")
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
    with pytest.raises(sf.InputError, match="already holds a run: continue it with `stepformer resume"):
        go(corpus, tmp_path / "run", steps=2)
    with pytest.raises(sf.InputError, match=r"already holds a run with another train.steps: choose another --out"):
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


def test_one_pass_tells_the_loss_of_the_first_tokens_and_of_all(corpus: Path, tmp_path: Path) -> None:
    """Beginnings of the split that end inside a micro-batch, the whole split and training tokens, each by hand."""
    result = go(corpus, tmp_path / "run", eval_first="112, 20, 4_000_000", eval_whole=True, micro_batch=4)
    run, opened = load_run(tmp_path / "run", "last", "cpu"), Corpus(corpus)

    def by_hand(split: str, tokens: int) -> float:
        losses = []
        with torch.no_grad():
            for block in range(tokens // 16):
                row = torch.from_numpy(opened.split(split).tokens(16 * block, 16 * block + 17).astype(np.int64))[None]
                losses.append(torch.nn.functional.cross_entropy(run.model(row[:, :-1]).logits[0], row[0, 1:]).item())
        return float(np.mean(losses))

    whole = (len(opened.split("val")) - 1) // 16 * 16
    assert result["val_tokens"] == 512 < whole
    assert result["val_loss"] == pytest.approx(by_hand("val", 512), abs=1e-12)
    assert result["first"] == pytest.approx({str(n): by_hand("val", n) for n in (16, 112, whole)}, abs=1e-12)
    assert (result["train_tokens"], result["train_hash"]) == (512, opened.split("train").hash)
    assert result["train_loss"] == pytest.approx(by_hand("train", 512), abs=1e-12)
    lines = [m for m in read_metrics(tmp_path / "run" / "metrics.jsonl") if m["kind"] == "eval"]
    assert [list(m["first"]) for m in lines] == [["16", "112"]] * 4
    record = RunRecord.load(tmp_path / "run")
    assert record.train_loss == result["train_loss"]
    for tokens in (16, 112):
        best = min(m["first"][str(tokens)] for m in lines[1:])
        assert record.first[tokens] == (best, result["first"][str(tokens)])
    assert record.first[whole] == (None, result["first"][str(whole)])
    assert evaluate_run(tmp_path / "run", which="last")[0].first == pytest.approx(lines[-1]["first"], abs=1e-12)
    plain = go(corpus, tmp_path / "plain", micro_batch=4)
    assert plain["weights_sha256"] == result["weights_sha256"]
    assert "first" not in plain


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


def start(corpus: Path, out: Path, *words: str) -> forked.Running:
    settings = {**{"n_layer": 2, "n_head": 2, "d_model": 16, "context": 16, "batch": 8, "device": "cpu"}}
    command = [
        "train",
        "yurii",
        f"corpus={corpus}",
        *(f"{k}={v}" for k, v in settings.items()),
        "--out",
        str(out),
        *words,
    ]
    return forked.start(*command)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_save_and_say_how_to_go_on(corpus: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = start(corpus, tmp_path / "run", "steps=100000", "eval_every=100000", "save_every=100000")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 100
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.running, process.wait().stderr
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    done = process.wait(60)
    said = done.stderr
    assert done.returncode == 128 + number, said
    assert f"stopped by {number.name}" in said
    assert f"stepformer resume {tmp_path / 'run'}" in said
    steps = [m["step"] for m in read_metrics(metrics)]
    assert checkpoints.verify(next((tmp_path / "run" / "checkpoints").glob("step-*")))["step"] == steps[-1]


def test_max_time(corpus: Path, tmp_path: Path) -> None:
    process = start(corpus, tmp_path / "run", "steps=100000", "eval_every=100000", "--max-time", "1s")
    done = process.wait(100)
    assert done.returncode == 128 + signal.SIGALRM, done.stderr
    assert "out of time after step" in done.stderr
    for text, number in (("90", 90), ("90s", 90), ("1h30m", 5400), ("1.5m", 90), ("2d", 172_800)):
        assert seconds(text) == number
    for text in ("soon", "", ".s", "1h30x", "²"):
        with pytest.raises(sf.StepformerError, match="is not a time"):
            seconds(text)


@pytest.mark.slow
def test_a_compiled_run_is_close_to_the_eager_one(corpus: Path, tmp_path: Path) -> None:
    """inductor on the CPU reorders sums: fp32, twelve steps."""
    eager = go(corpus, tmp_path / "eager", precision="fp32")
    compiled = go(corpus, tmp_path / "compiled", precision="fp32", compile=True)
    assert abs(eager["val_loss"] - compiled["val_loss"]) < 1e-4


def test_a_rule_of_ones_own_is_resumed_from_anywhere(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plug-in's path is stored whole, so that another working folder does not matter."""
    (tmp_path / "own.py").write_text(
        "import stepformer as sf\n"
        "from stepformer.rules.first_order import Nesterov\n"
        "@sf.register_template('own-nesterov', equation='as nesterov')\n"
        "class OwnNesterov(Nesterov):\n    pass\n"
    )
    small = ["n_layer=1", "n_head=2", "d_model=16", "context=16", "batch=4", "steps=2", "eval_tokens=256", "device=cpu"]
    for folder, words in (
        (tmp_path, ["train", "own-nesterov", f"corpus={corpus}", "--out", "run", "--plugin", "own.py", *small]),
        (corpus, ["eval", str(tmp_path / "run")]),
    ):
        done = forked.stepformer(*words, cwd=folder)
        assert done.returncode == 0, done.stderr
