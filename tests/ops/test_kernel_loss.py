"""The fused output projection and cross-entropy against plain PyTorch on whole logits, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draws import seeded
from helpers import tiny, tokens
from stepformer.base.errors import InputError, StepformerError
from stepformer.model import IGNORE
from stepformer.ops import kernels

pytest.importorskip("triton")
loss_file = pytest.importorskip("stepformer.ops.loss")
linear_cross_entropy = loss_file.linear_cross_entropy

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
in_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU in this process")

SINGLE = 1e-5  # fp32: sums of at most 50,304 terms in another order; exp2 has 2 ulp
HALF = 1e-2  # bf16 operands and results have 8 bits, 4e-3; errors of single entries average out in a norm


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 columns and chunks of 3 rows, so that tiny inputs have several of both."""
    monkeypatch.setattr(loss_file, "row_settings", lambda v, size: {"LANES": 4, "VECTORS": 4, "num_warps": 4})
    monkeypatch.setattr(loss_file, "chunk_rows", lambda rows, width, size, limit: min(rows, 3))


def inputs(n: int, d: int, v: int, *, ignored: int = 0, scale: float = 1.0, **options: Any) -> tuple[Tensor, ...]:
    generator = seeded(n + 10 * d + 100 * v)
    h = (torch.randn(n, d, generator=generator) * scale).to(**options).requires_grad_()
    table = torch.randn(v, d, generator=generator).to(options.get("device", "cpu")).requires_grad_()
    targets = torch.randint(v, (n,), generator=generator)
    targets[torch.randperm(n, generator=generator)[:ignored]] = IGNORE
    return h, table, targets.to(options.get("device", "cpu"))


def twin(h: Tensor, table: Tensor, targets: Tensor, cap: float | None, factor: float = 1.0) -> tuple[Tensor, ...]:
    """Loss, dh and dW in fp64 from whole logits."""
    h, table = (t.detach().double().requires_grad_() for t in (h, table))
    z = F.linear(h, table)
    u = z if cap is None else cap * torch.tanh(z / cap)
    loss = F.cross_entropy(u, targets, ignore_index=IGNORE) * factor
    return (loss.detach(), *torch.autograd.grad(loss, (h, table)))


def apart(found: Tensor, expected: Tensor) -> float:
    """Relative distance; nan where something is."""
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


@in_interpreter
@pytest.mark.parametrize("cap", [None, 30.0, 2.0, 60.0])
@pytest.mark.parametrize(("n", "d", "v", "ignored"), [(1, 8, 5, 0), (7, 16, 37, 2), (4, 3, 32, 0), (5, 8, 48, 4)])
def test_values_and_gradients(
    n: int, d: int, v: int, ignored: int, cap: float | None, small_tiles: None, poisoned: None
) -> None:
    """Full tiles, a rest, a rest alone, rows whose length is no multiple of 16 bytes, a last chunk of one row."""
    h, table, targets = inputs(n, d, v, ignored=ignored)
    loss = linear_cross_entropy(h, table, targets, cap) * 0.3
    found = torch.autograd.grad(loss, (h, table))
    for ours, theirs in zip((loss, *found), twin(h, table, targets, cap, 0.3), strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == torch.float32
        assert apart(ours, theirs) < SINGLE


@in_interpreter
@pytest.mark.slow
def test_own_tiles(poisoned: None) -> None:
    """The settings that are launched, at a vocabulary of more than one tile."""
    v = 2100
    assert loss_file.row_settings(v, 4)["VECTORS"] * 4 < v
    h, table, targets = inputs(2, 8, v)
    loss = linear_cross_entropy(h, table, targets)
    for ours, theirs in zip((loss, *torch.autograd.grad(loss, (h, table))), twin(h, table, targets, None), strict=True):
        assert apart(ours, theirs) < SINGLE


@in_interpreter
def test_large_logits(small_tiles: None) -> None:
    """Logits of some thousands, whose own rounding is 1e-4: the softmax is shifted by its maximum; a cap holds them."""
    h, table, targets = inputs(4, 8, 21, scale=1000.0)
    loss = linear_cross_entropy(h, table, targets)
    for ours, theirs in zip((loss, *torch.autograd.grad(loss, (h, table))), twin(h, table, targets, None), strict=True):
        assert apart(ours, theirs) < 1e-3
    loss = linear_cross_entropy(h, table, targets, 30.0)
    assert apart(loss, twin(h, table, targets, 30.0)[0]) < SINGLE
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (h, table)))


@in_interpreter
def test_all_logits_far_below_zero(small_tiles: None) -> None:
    """What fills the rows up to a multiple of 16 bytes would win every softmax here; it takes no part."""
    h, table, targets = inputs(4, 8, 21)
    h, table = (h.detach().abs() + 30).requires_grad_(), (table.detach() / 30 - 1).requires_grad_()
    loss = linear_cross_entropy(h, table, targets)
    for ours, theirs in zip((loss, *torch.autograd.grad(loss, (h, table))), twin(h, table, targets, None), strict=True):
        assert apart(ours, theirs) < 3e-4  # logits near -250 have lost 1e-5 each


@in_interpreter
def test_every_target_ignored(small_tiles: None) -> None:
    """As F.cross_entropy: the mean of nothing is nan, and its gradient 0."""
    h, table, targets = inputs(4, 8, 21, ignored=4)
    loss = linear_cross_entropy(h, table, targets)
    dh, dtable = torch.autograd.grad(loss, (h, table))
    assert loss.isnan()
    assert twin(h, table, targets, None)[0].isnan()
    assert torch.equal(dh, torch.zeros_like(dh))
    assert torch.equal(dtable, torch.zeros_like(dtable))


@in_interpreter
@pytest.mark.parametrize("wrong", [21, -1, 2**40])
def test_target_outside_the_vocabulary(wrong: int, small_tiles: None) -> None:
    h, table, targets = inputs(4, 8, 21)
    targets[2] = wrong
    assert linear_cross_entropy(h, table, targets).isnan()


@in_interpreter
def test_without_gradients(small_tiles: None) -> None:
    """No gradient is computed where none can be asked for, and only what can be asked for elsewhere."""
    h, table, targets = inputs(4, 8, 21, ignored=1)
    expected, dh, dtable = twin(h, table, targets, None)
    with torch.no_grad():
        alone = linear_cross_entropy(h, table, targets)
    assert not alone.requires_grad
    assert apart(alone, expected) < SINGLE
    assert not linear_cross_entropy(h.detach(), table.detach(), targets).requires_grad
    (found,) = torch.autograd.grad(linear_cross_entropy(h, table.detach(), targets), h)
    assert apart(found, dh) < SINGLE
    (found,) = torch.autograd.grad(linear_cross_entropy(h.detach(), table, targets), table)
    assert apart(found, dtable) < SINGLE


@in_interpreter
def test_backward_twice_and_second_derivatives(small_tiles: None) -> None:
    h, table, targets = inputs(4, 8, 21)
    loss = linear_cross_entropy(h, table, targets)
    (loss / 3).backward(retain_graph=True)
    (loss / 3).backward()
    assert h.grad is not None
    assert apart(h.grad, twin(h, table, targets, None, 2 / 3)[1]) < SINGLE
    loss = linear_cross_entropy(h, table, targets)
    (dh,) = torch.autograd.grad(loss, h, create_graph=True)
    with pytest.raises(StepformerError, match="second derivative"):
        dh.square().sum().backward()


@in_interpreter
@pytest.mark.parametrize("train", [False, True])
def test_operators_are_well_formed(train: bool, small_tiles: None) -> None:
    h, table, targets = inputs(4, 8, 21)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    if not train:
        h, table = h.detach(), table.detach()
    torch.library.opcheck(loss_file._loss, (h, table, targets, 30.0, train, train), test_utils=checks)


@in_interpreter
def test_compiled_without_a_graph_break(small_tiles: None) -> None:
    h, table, targets = inputs(4, 8, 21)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    loss = compiled(h, table, targets, 30.0)
    eager = linear_cross_entropy(h, table, targets, 30.0)
    assert torch.equal(loss, eager)
    for a, b in zip(torch.autograd.grad(loss, (h, table)), torch.autograd.grad(eager, (h, table)), strict=True):
        assert torch.equal(a, b)


def test_chunks_are_equal_and_within_the_limit() -> None:
    chunk_rows = loss_file.chunk_rows
    assert chunk_rows(32_768, 50_304, 2, loss_file.CHUNK_BYTES) == 5_504
    assert chunk_rows(100, 50_304, 2, loss_file.CHUNK_BYTES) == 100
    assert chunk_rows(1000, 10**9, 4, 10) == 128
    for rows in (129, 5000, 40_000):
        chunk = chunk_rows(rows, 1000, 4, 4_000_000)
        assert chunk * 1000 * 4 <= 4_000_000
        assert chunk % 128 == 0 or chunk == rows


@pytest.mark.parametrize("name", ["vanilla", "yurii"])
def test_loss_only_on_the_cpu(name: str) -> None:
    """The plain path, bit for bit: runs on the CPU resume exactly."""
    model = tiny(name, dtype=torch.float32)
    ids, targets = tokens(), tokens(seed=1)
    output = model(ids, targets, loss_only=True)
    assert output.logits is None
    assert torch.equal(output.loss, model(ids, targets).loss)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(ids, targets, loss_only=True).loss, model(ids, targets).loss)
    with pytest.raises(InputError, match="needs targets"):
        model(ids, loss_only=True)


@in_interpreter
@pytest.mark.parametrize(("cap", "head"), [(None, "tied"), (0.5, "tied"), (None, "untied")])
def test_model_with_the_kernel(
    cap: float | None, head: str, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of a model reaches the kernel where kernels may run, with the plain gradients."""
    calls: list[int] = []
    real = loss_file._loss

    def counted(*args: Any) -> tuple[Tensor, ...]:
        calls.append(1)
        return real(*args)

    monkeypatch.setattr(loss_file, "_loss", counted)
    model = tiny("vanilla", dtype=torch.float32, logit_softcap=cap, head=head)
    targets = tokens(seed=1)
    targets[0, :3] = IGNORE
    h = torch.randn(*targets.shape, model.config.d_model, requires_grad=True)
    trained = (h, model.embed.tok_emb.weight if model.lm_head is None else model.lm_head.weight)
    plain = model._loss(h, targets)
    with kernels.off(), kernels.interpreted():
        assert torch.equal(model._loss(h, targets), plain)
    assert not calls
    with kernels.interpreted():
        loss = model._loss(h, targets)
    assert calls == [1]
    assert apart(loss, plain.double()) < SINGLE
    for a, b in zip(torch.autograd.grad(loss, trained), torch.autograd.grad(plain, trained), strict=True):
        assert apart(a, b.double()) < SINGLE


def poison(device: str = "cuda") -> None:
    """Leave nan in the memory that torch.empty hands out next."""
    held = [torch.full((1 << size,), torch.nan, device=device) for size in range(10, 28) for _ in range(2)]
    del held


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "d", "v", "ignored"),
    [(1, 64, 101, 0), (1, 768, 50_304, 0), (777, 96, 50_257, 100), (300, 64, 256, 299), (25_001, 128, 50_304, 1000)],
)
class TestOnTheGpu:
    pytestmark = on_gpu

    def test_values_and_gradients(
        self, n: int, d: int, v: int, ignored: int, dtype: torch.dtype, cap: float | None
    ) -> None:
        """Against fp64 from the same rounded h and table; 25,001 rows are several chunks.

        A logit of 20 in bf16 is off by 0.04, and so is its probability: that averages out over rows, but a single one
        is as far away as what autocast makes of it.
        """
        h, table, targets = inputs(n, d, v, ignored=ignored, scale=0.2, device="cuda", dtype=dtype)
        rounded = table.detach().to(dtype)
        poison()
        loss = linear_cross_entropy(h, table, targets, cap) * 0.3
        found = torch.autograd.grad(loss, (h, table))
        assert [g.dtype for g in found] == [dtype, torch.float32]
        half = dtype == torch.bfloat16
        expected = twin_in_parts(h, rounded, targets, cap, 0.3)
        bounds = [1e-3, HALF, HALF] if half else [SINGLE] * 3
        if half and n == 1:
            logits = F.linear(h, rounded.requires_grad_()).float()
            plain = F.cross_entropy(logits if cap is None else cap * torch.tanh(logits / cap), targets) * 0.3
            theirs = (plain, *torch.autograd.grad(plain, (h, rounded)))
            bounds = [max(b, 1.5 * apart(t, e)) for b, t, e in zip(bounds, theirs, expected, strict=True)]
        for ours, exact, bound in zip((loss, *found), expected, bounds, strict=True):
            assert apart(ours, exact) < bound


def twin_in_parts(h: Tensor, table: Tensor, targets: Tensor, cap: float | None, factor: float) -> tuple[Tensor, ...]:
    """`twin` for rows whose fp64 logits would not fit at once."""
    count = (targets != IGNORE).sum()
    loss = torch.zeros((), dtype=torch.float64, device=h.device)
    dh, dtable = torch.zeros_like(h, dtype=torch.float64), torch.zeros_like(table, dtype=torch.float64)
    for begin in range(0, len(h), 4096):
        part = slice(begin, begin + 4096)
        valid = (targets[part] != IGNORE).sum()
        if valid:
            found = twin(h[part], table, targets[part], cap, float(factor * valid / count))
            loss += found[0]
            dh[part] = found[1]
            dtable += found[2]
    return loss, dh, dtable


class TestModelOnTheGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("cap", [None, 30.0])
    def test_autocast_step(self, cap: float | None) -> None:
        """bf16 autocast, eager and compiled, against the plain loss of the same model: both round the same logits."""
        model = tiny(
            "vanilla", dtype=torch.float32, d_model=256, n_head=4, context=16, vocab_size=1003, logit_softcap=cap
        )
        model = model.cuda()
        ids, targets = tokens(4, 16, 1003).cuda(), tokens(4, 16, 1003, seed=1).cuda()
        targets[1, 3:9] = IGNORE
        table = model.embed.tok_emb.weight
        compiled = torch.compile(model, fullgraph=True)
        with torch.autocast("cuda", torch.bfloat16):
            plain = model(ids, targets).loss
            losses = [run(ids, targets, loss_only=True).loss for run in (model, compiled)]
            with torch.no_grad():
                losses.append(model(ids, targets, loss_only=True).loss)
        (expected,) = torch.autograd.grad(plain, table)
        for loss in losses:
            assert apart(loss, plain.double()) < 1e-3
        for loss in losses[:2]:
            (found,) = torch.autograd.grad(loss, table)
            assert found.dtype == torch.float32
            assert apart(found, expected.double()) < HALF

    def test_small_peak(self) -> None:
        """32,768 rows need one chunk, dW, a bf16 table and dh, far less than the 3.3 GB of bf16 logits."""
        h, table, targets = inputs(32_768, 768, 50_304, scale=0.2, device="cuda", dtype=torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(h, table, targets)
        assert torch.cuda.max_memory_allocated() - before < loss_file.CHUNK_BYTES + 350_000_000

    def test_graph_capture(self) -> None:
        """No value is asked for on the host, and a replay sees new targets."""
        h, table, targets = inputs(300, 64, 1000, scale=0.2, device="cuda", dtype=torch.bfloat16)
        linear_cross_entropy(h, table, targets).backward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = linear_cross_entropy(h, table, targets)
        targets[:250] = IGNORE
        graph.replay()
        assert apart(loss, linear_cross_entropy(h, table, targets).double()) < 1e-6
