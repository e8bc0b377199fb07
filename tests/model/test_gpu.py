"""What only a GPU can show. `make test-gpu PYTHON=...` runs these with a CUDA build of torch."""

from __future__ import annotations

import contextlib
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

import stepformer as sf
from helpers import shake, tiny, tokens
from runs import make_corpus, small_run
from stepformer.ops import kernels
from stepformer.ops.pass_graphs import CapturedPass
from stepformer.optim import OptimConfig, Optimizers
from stepformer.training import Stopped, checkpoints, resume, train
from stepformer.training.memory import estimate_memory
from stepformer.training.stopping import Watch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Width 256: at 128 and below triton 3.6 fails to compile some of inductor's fused norms (docs/lab-notebook.md).
HEADS = {"n_head": 4, "d_model": 256, "context": 64, "vocab_size": 101}


@pytest.mark.parametrize("name", sf.presets())
def test_cuda_equals_cpu(name: str) -> None:
    """fp32 without tf32: reordered sums, 1e-4 relative after two layers and five Newton-Schulz steps."""
    ids = tokens(2, 64, 101)
    model = shake(tiny(name, dtype=torch.float32, **HEADS), scale=0.05)
    expected = model(ids).logits
    logits = model.cuda()(ids.cuda()).logits.cpu()
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", sf.presets())
def test_bf16_step_without_synchronisation(name: str) -> None:
    """A training step under bf16 autocast never asks the device for a value."""
    model = tiny(name, dtype=torch.float32, **HEADS).cuda()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    ids, targets = tokens(4, 64, 101).cuda(), tokens(4, 64, 101, seed=1).cuda()
    losses = []
    for attempt in range(3):
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")  # the first step may initialise libraries
        try:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(ids, targets, loss_only=True).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(losses).isfinite().all()


@pytest.mark.parametrize(
    "name",
    [
        *("vanilla", "yurii", "verlet-ama", "imex-ln-k2-mam", "symplectic-euler", "adamw", "muon", "soap"),
        *("symp-etd-ab2", "symp-conformal-euler", "linear-yurii", "linear-symp-ab2", "entropy-token", "kl-carried"),
    ],
)
def test_compiled_step_equals_eager(name: str) -> None:
    """inductor, fp32, no graph break, no recompilation while the weights change."""
    torch._dynamo.reset()
    eager = shake(tiny(name, dtype=torch.float32, **HEADS), scale=0.05).cuda()
    twin = shake(tiny(name, dtype=torch.float32, **HEADS), scale=0.05).cuda()
    kernels.prepare_compiler()
    compiled = torch.compile(twin, fullgraph=True)
    ids, targets = tokens(4, 64, 101).cuda(), tokens(4, 64, 101, seed=1).cuda()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            losses = []
            for model in (eager, compiled):
                loss = model(ids, targets, loss_only=True).loss
                loss.backward()
                losses.append(loss.item())
            assert losses[1] == pytest.approx(losses[0], rel=1e-4)
            with torch.no_grad():
                for a, b in zip(eager.parameters(), twin.parameters(), strict=True):
                    if a.grad is not None and b.grad is not None:
                        a -= 1e-2 * a.grad
                        b -= 1e-2 * b.grad
                        a.grad = b.grad = None


@pytest.mark.parametrize("name", ["vanilla", "yurii", "verlet-ama", "imex-k2-mam", "soap"])
def test_cached_decoding(name: str) -> None:
    model = shake(tiny(name, dtype=torch.float64, **HEADS), scale=0.05).cuda()
    ids = tokens(3, 64, 101).cuda()
    with torch.no_grad():
        full = model(ids).logits
        cache = model.new_cache(3)
        lengths = torch.tensor([5, 20, 11], device="cuda")
        model(ids[:, :20], cache=cache, lengths=lengths)
        rows = torch.arange(3, device="cuda")
        for step in range(20):
            at = lengths + step
            logits = model(ids[rows, at][:, None], cache=cache).logits
            assert (logits[:, 0] - full[rows, at]).abs().max() <= 1e-10


def test_bf16_generation() -> None:
    model = tiny("yurii", dtype=torch.float32, **HEADS).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        result = model.generate([[1, 2, 3], [4]], max_new_tokens=20, seed=0)
    assert [len(row) for row in result.tokens] == [20, 20]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["vanilla", "yurii", "muon"])
def test_memory_estimate_is_near_the_measured_peak(name: str, checkpointing: bool) -> None:
    """Eager step at the small size: kernels' temporary buffers come on top of the estimate, so 15 % are allowed."""
    batch = 8
    config = sf.model_config(name, size="small", activation_checkpointing=checkpointing)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = sf.Model(config, device="cuda", seed=0)
    ids = tokens(batch, 1024, 50_000).cuda()
    with torch.autocast("cuda", torch.bfloat16), kernels.off():  # kernels keep less: the estimate is a bound then
        loss = model(ids, ids).loss
        loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    estimate = estimate_memory(config, batch, autocast=torch.bfloat16, optimizer_copies=0).training
    print(f"{name} checkpointing={checkpointing}: estimate {estimate / 2**30:.2f} GiB, peak {peak / 2**30:.2f} GiB")
    assert 0.85 <= estimate / peak <= 1.15


@pytest.mark.parametrize(
    "changes",
    [{}, {"optim.name": "adamw", "sam": "always"}, {"optim.name": "scion", "micro_batch": 2}],
    ids=["muon", "adamw-sam", "scion"],
)
def test_a_resumed_run_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """bf16 autocast, fused AdamW, checkpoints written in the background, deterministic kernels."""
    corpus = make_corpus(tmp_path / "corpus", count=4).folder
    settings = {"device": "cuda", "precision": "bf16", "deterministic": True, "d_model": 64, **changes}
    try:
        whole = train(small_run(corpus, **settings), tmp_path / "whole", quiet=True)
        calls = [0]

        def asked(self: Watch) -> int:
            calls[0] += 1
            return 15 if calls[0] == 5 else 0

        with monkeypatch.context() as patch:
            patch.setattr(Watch, "asked", asked)
            with pytest.raises(Stopped):
                train(small_run(corpus, **settings), tmp_path / "cut", quiet=True)
        checkpoints.verify(tmp_path / "cut" / "checkpoints" / "step-00000005")
        assert resume(tmp_path / "cut", quiet=True)["weights_sha256"] == whole["weights_sha256"]
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_run_on_cuda_follows_the_one_on_the_cpu(tmp_path: Path) -> None:
    """fp64 on both: the same losses to 1e-9, so that nothing but rounding depends on the device."""
    corpus = make_corpus(tmp_path / "corpus", count=4).folder
    losses = [
        train(small_run(corpus, device=device, polar_dtype="fp64"), tmp_path / device, quiet=True)["val_loss"]
        for device in ("cpu", "cuda")
    ]
    assert abs(losses[0] - losses[1]) < 1e-9


def test_a_compiled_run(tmp_path: Path) -> None:
    """At width 64, where triton 3.6 fails unless the trainer helps it; the losses stay those of the eager run."""
    torch._dynamo.reset()
    corpus = make_corpus(tmp_path / "corpus", count=4).folder
    settings = {"device": "cuda", "precision": "fp32", "d_model": 64}
    losses = [
        train(small_run(corpus, compile=compiled, **settings), tmp_path / str(compiled), quiet=True)["val_loss"]
        for compiled in (False, True)
    ]
    assert abs(losses[0] - losses[1]) < 1e-3  # fp32, 12 steps through bf16 Newton-Schulz


def test_the_optimizer_step_does_not_wait_for_the_device() -> None:
    model = tiny("yurii", dtype=torch.float32, **HEADS).cuda()
    optimizers = Optimizers(model, OptimConfig(), 10)
    ids = tokens(4, 64, 101).cuda()
    for t in range(3):
        loss = model(ids, ids).loss
        assert loss is not None
        loss.backward()
        torch.cuda.set_sync_debug_mode("error" if t else "default")
        try:
            optimizers.clip()
            optimizers.step(t)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizers.zero_grad()


def gradients_of(model: sf.Model, ids: torch.Tensor, targets: torch.Tensor) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = model(ids, targets, loss_only=True).loss
    assert loss is not None
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", sf.presets())
def test_kernels_equal_the_plain_step(name: str) -> None:
    """The whole gradient against the plain step in fp64, in fp32 within 1e-5 and under bf16 autocast within 1e-2.

    Some architectures magnify rounding more, by one batch as much as by another (near ties of scores, say). There the
    medians over batches count: at most three times as far as the plain step of the same precision, since kernels
    multiply weights and running sums in bf16 (fp32: as three tf32 products) that the plain step keeps in fp32.
    """
    model = shake(tiny(name, dtype=torch.float32, **HEADS), scale=0.05).cuda()
    errors: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for seed in range(5):
        ids, targets = (tokens(3, 64, 101, seed=2 * seed + k).cuda() for k in range(2))
        with kernels.off():
            expected_loss, expected = gradients_of(model.double(), ids, targets)
        model.float()
        for bf16, tolerance in ((False, 1e-5), (True, 1e-2)):
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                loss, found = gradients_of(model, ids, targets)
                with kernels.off():
                    _, plain = gradients_of(model, ids, targets)
            assert loss == pytest.approx(expected_loss, rel=tolerance)
            found, plain = ((g - expected).norm() / expected.norm() for g in (found, plain))
            errors[bf16].append((float(found), float(plain)))
    for bf16, tolerance in ((False, 1e-5), (True, 1e-2)):
        error, allowed = (statistics.median(e) for e in zip(*errors[bf16], strict=True))
        print(f"{name}, bf16 {bf16}: kernels {error:.1e}, plain {allowed:.1e}")
        assert error <= max(tolerance, 3 * allowed), f"bf16 {bf16}: {error:.1e}, plain {allowed:.1e}"


@pytest.mark.parametrize("extra", [{"value_residual": "unit"}, {"value_tables": True}], ids=str)
def test_mixed_values_under_autocast(extra: dict[str, Any]) -> None:
    """They stay in bf16: fused attention reads queries, keys and values in one dtype."""
    changes = {**HEADS, **extra}
    model = shake(tiny("vanilla", dtype=torch.float32, **changes), scale=0.05).cuda()
    ids, targets = tokens(3, 64, 101).cuda(), tokens(3, 64, 101, seed=1).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss, found = gradients_of(model, ids, targets)
        with kernels.off():
            expected_loss, expected = gradients_of(model, ids, targets)
    assert loss == pytest.approx(expected_loss, rel=4e-3)
    assert float((found - expected).norm() / expected.norm()) <= 4e-2


@pytest.mark.parametrize("name", ["vanilla", "yurii", "muon", "soap", "symp-etd-ab2", "entropy-token", "kl-carried"])
def test_a_recorded_pass_equals_the_step(name: str) -> None:
    """The same kernels on other batches, also when gradients are added; fp32, where no kernel adds in random order."""
    model = shake(tiny(name, dtype=torch.float32, **HEADS), scale=0.05).cuda()
    trained = [p for p in model.parameters() if p.requires_grad]

    def loss_of(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(ids, targets, loss_only=True).loss
        assert loss is not None
        return loss

    captured = CapturedPass(loss_of, trained, contextlib.nullcontext)
    batches = [(tokens(2, 64, 101, seed=i).cuda(), tokens(2, 64, 101, seed=i + 9).cuda()) for i in range(3)]
    for ids, targets in batches:
        losses = [captured.run(ids, targets, first=True).item(), captured.run(*batches[0], first=False).item()]
        found = torch.cat([p.grad.flatten() for p in trained if p.grad is not None])
        loss, first = gradients_of(model, ids, targets)
        other, second = gradients_of(model, *batches[0])
        assert losses == pytest.approx([loss, other], rel=1e-6)
        assert (found - first - second).norm() <= 1e-5 * (first + second).norm()
