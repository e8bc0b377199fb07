"""What stops a run: NaN, divergence, too little memory, a full disk, a folder that goes away; and nothing is lost."""

from __future__ import annotations

import errno
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import forked
import stepformer as sf
from runs import go, small_run
from stepformer.base import files
from stepformer.base.errors import DivergedError
from stepformer.optim import Optimizers
from stepformer.training import checkpoints, load_run, memory, resume, train
from stepformer.training.loop import Trainer
from stepformer.training.memory import estimate_memory
from stepformer.training.parallel import ParallelModel, World
from stepformer.training.runs import RunFolder


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("gradient", "the gradient of 'blocks.0.attn.qkv.weight' is not finite"),
        ("weight", "the parameter 'blocks.1.mlp.up.weight' is not finite"),
        ("output", "the output of 'blocks.0.mlp' is not finite"),
    ],
)
def test_nan_stops_before_it_spoils_the_weights(
    corpus: Path, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, sentence: str
) -> None:
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
        patch.setattr(memory, "refuse_hopeless", lambda *given: None)
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
    corpus: Path, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    original, run = Optimizers.step, tmp_path / "run"

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


def test_divergence_stops(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(sf.StepformerError, match=r"the loss is \d+\.\d+, above max_loss = 3\.00: the run has diverged"):
        go(corpus, tmp_path / "run", max_loss=3.0)
    assert RunFolder(tmp_path / "run").exists


@pytest.mark.parametrize("number", [3, 6, 8])
def test_a_full_disk_loses_nothing(
    corpus: Path, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
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


def test_what_needs_twice_the_memory_is_refused_before_it_begins(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run(corpus, steps=1, batch=64, micro_batch=64, d_model=64, context=64, precision="fp32")
    needed = memory.run_memory(config, torch.device("cpu"), 64).training
    monkeypatch.setattr(memory, "free_memory", lambda device: needed / 3)
    with pytest.raises(sf.StepformerError, match=r"^Out of memory: 64 sequences in one pass .* micro_batch="):
        train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "run.json").exists()
    monkeypatch.setattr(memory, "free_memory", lambda device: 0.6 * needed)  # an estimate may err
    assert train(config, tmp_path / "run", quiet=True)["steps"] == 1


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
