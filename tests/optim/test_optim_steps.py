"""Whole steps: all optimizers against naive fp64 code, then compiled, stacked and recorded ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import stepformer as sf
from draws import seeded
from helpers import tiny, tokens
from stepformer.base.errors import ConfigError
from stepformer.model.roles import Role, named_roles
from stepformer.ops import graphs as cuda_graphs
from stepformer.ops import kernels
from stepformer.ops.graphs import MOST, CudaGraphs
from stepformer.optim import LmoOptimizer, OptimConfig, Optimizers, lmo, polar
from stepformer.optim.build import stacked_parts
from stepping import LR, METHODS, batch_of, both_recipes, polar_file, roles_of, trainable
from transcriptions import optimizers as naive

# All optimizers on a model, against the transcription.


def loss_of(model: sf.Model, t: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """The loss of batch t as a function of weights, for the transcription."""
    x, y = batch_of(t)
    return lambda weights: functional_call(model, dict(weights), (x, y)).loss


def compare(name: str, **settings: Any) -> float:
    """The largest difference of any weight in 5 steps; clipping must have bitten, every role must have moved."""
    config, recipe = both_recipes(name, **settings)
    model, reference = tiny("yurii"), tiny("yurii")
    start, roles = trainable(model), roles_of(model)
    opt = Optimizers(model, config, recipe.steps)
    count = 3 * (model.config.n_head if config.qkv == "heads" else 1)
    theirs = naive.Naive(recipe, roles, {n: count for n in roles if n.endswith("qkv.weight")})
    weights, worst, bitten = trainable(reference), 0.0, 0
    for t in range(5):
        opt.zero_grad()
        x, y = batch_of(t)
        model(x, y).loss.backward()
        norm = float(opt.clip())
        opt.step(t)
        grads, expected_norm = naive.clipped(recipe, naive.gradients(loss_of(reference, t), weights), roles)
        weights = theirs.step(t, weights, grads)
        assert norm == pytest.approx(expected_norm, rel=1e-10)
        bitten += expected_norm > recipe.clip > 0
        worst = max(worst, *(float((p.detach() - weights[n]).abs().max()) for n, p in model.named_parameters()))
    assert bitten == 5 or recipe.clip == 0
    for role in set(roles.values()):
        moved = min(float((weights[n] - start[n]).abs().max()) for n, r in roles.items() if r == role)
        assert moved > 1e-4 * LR[role], role
    return worst


# fp64 against fp64: 1e-16 amplified by the polar factor of badly conditioned momenta and by five steps of training.
AGREE = 1e-10


@pytest.mark.parametrize("qkv", ["fused", "split", "heads"])
@pytest.mark.parametrize(
    "settings",
    [
        {"name": "muon", "polar": "svd"},
        {"name": "muon", "polar": "newton-schulz"},
        {"name": "muon", "polar": "polar-express", "scaling": "rms", "nesterov": False},
        {"name": "muon", "polar": "newton-schulz", "scaling": "spectral", "schedule": "wsd", "decay_start": 3},
        {"name": "adamw", "clip_coefficients": False},
        {"name": "adamw", "schedule": "constant", "clip": 0.0},
        {"name": "scion", "polar": "svd"},
        {"name": "scion", "polar": "newton-schulz", "table": "sign"},
        {"name": "scion", "polar": "polar-express", "radius": 0.7, "wd": {"matrix": 0.0}},
        {"name": "polargrad", "polar": "svd"},
        {"name": "polargrad", "polar": "newton-schulz", "nesterov": False},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values() if not isinstance(value, dict)),
)
def test_optimizer_is_its_transcription(settings: dict[str, Any], qkv: str) -> None:
    assert compare(**settings, qkv=qkv) < AGREE


def test_fused_split_and_heads_differ() -> None:
    """The comparison above could not tell them apart if they did not."""

    def after(qkv: str) -> dict[str, Tensor]:
        model = tiny("yurii")
        opt = Optimizers(model, OptimConfig(qkv=qkv, warmup=0, schedule="constant"), 10)
        x, y = batch_of(0)
        model(x, y).loss.backward()
        opt.step(0)
        return trainable(model)

    fused, split, heads = after("fused"), after("split"), after("heads")
    assert set(stacked_parts(tiny("yurii"), "split")) == {n for n in fused if n.endswith("qkv.weight")}
    for name in fused:
        assert torch.equal(fused[name], split[name]) != name.endswith("qkv.weight")
        assert torch.equal(split[name], heads[name]) != name.endswith("qkv.weight")


def test_matrices_of_heads() -> None:
    """Queries, keys and values of every head; the two branches of a gated MLP have no heads."""
    model = tiny("yurii", mlp="swiglu")
    counts = {"attn.qkv.weight": 3 * model.config.n_head, "mlp.up.weight": 2}
    assert stacked_parts(model, "heads") == {f"blocks.{i}.{n}": c for i in range(2) for n, c in counts.items()}
    assert stacked_parts(model, "fused") == {}


@pytest.mark.parametrize("polar_dtype", ["auto", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("method", METHODS)
def test_polar_dtype_of_a_config(method: str, polar_dtype: str) -> None:
    """What a config accepts must step; how far it is from fp64 tells what it was computed in."""
    try:
        config = OptimConfig(polar=method, polar_dtype=polar_dtype, warmup=0, lr=1.0, momentum=0.0, scaling="none")
    except ConfigError:
        assert (method, polar_dtype) == ("svd", "bf16")
        return
    model = tiny("yurii")
    x, y = batch_of(0)
    model(x, y).loss.backward()
    start = trainable(model)
    Optimizers(model, config, 10).step(0)
    error = 0.0
    for n, p, role in named_roles(model):
        if role is Role.MATRIX:
            error = max(error, float((start[n] - p.detach() - polar(p.grad, method, dtype=torch.float64)).abs().max()))
    # rounding of bf16 (4e-3) and fp32 (6e-8), amplified by the iteration; weights here are below 1
    low, high = {"bf16": (1e-4, 1.0), "fp32": (1e-9, 1e-2)}.get(polar_dtype, (0.0, 1e-12))
    assert low <= error <= high


def test_what_optimizers_are_made_from() -> None:
    model, config = tiny(), sf.run_config("yurii")
    with pytest.raises(sf.InputError, match=r"OptimConfig, not RunConfig: of a run's config it is config\.optim\.$"):
        Optimizers(model, config, steps=3)  # type: ignore[arg-type]
    with pytest.raises(sf.InputError, match=r"^`Optimizers` takes the model itself, not generator: "):
        Optimizers(model.parameters(), config.optim, steps=3)  # type: ignore[arg-type]


def steps(model: sf.Model, opt: Optimizers, *numbers: int | None) -> None:
    for t in numbers:
        opt.zero_grad()
        model(*batch_of(t or 0)).loss.backward()
        opt.step(t)


@pytest.mark.parametrize("name", ["muon", "adamw", "scion", "polargrad"])
def test_a_loop_continues_from_its_state(name: str, tmp_path: Path) -> None:
    (model, opt), (twin, other) = (
        (m, Optimizers(m, OptimConfig(name=name), 6)) for m in (tiny("yurii"), tiny("yurii"))
    )
    steps(model, opt, 0, 1, 2)
    torch.save(opt.state_dict(), tmp_path / "optimizers.pt")
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(torch.load(tmp_path / "optimizers.pt", weights_only=True))
    assert other.rates() == opt.rates()
    steps(model, opt, 3, 4, 5)
    steps(twin, other, 3, 4, 5)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_state_of_another_is_refused() -> None:
    state = Optimizers(tiny("yurii"), OptimConfig(name="muon"), 6).state_dict()
    for model, name in ((tiny("yurii"), "polargrad"), (tiny("vanilla"), "muon"), (tiny("yurii", context=9), "muon")):
        with pytest.raises(sf.InputError, match=r"of these optimizers: another `optim\.name` or another model made it"):
            Optimizers(model, OptimConfig(name=name), 6).load_state_dict(state)
    with pytest.raises(sf.InputError, match="no state of these optimizers"):
        Optimizers(tiny("yurii"), OptimConfig(), 6).load_state_dict(state["parts"])


def test_rates_of_a_scheduler_of_torch() -> None:
    """Without a number a step takes the rates that the groups have; half of the schedule's here."""
    models = [tiny("yurii") for _ in range(2)]
    constant = OptimConfig(warmup=0, schedule="constant")
    ours, theirs = (Optimizers(model, constant, 4) for model in models)
    schedulers = [torch.optim.lr_scheduler.StepLR(part, 1, gamma=0.5) for part in theirs.parts]
    for t in range(3):
        steps(models[1], theirs, None)
        assert [group["lr"] for group in theirs.param_groups] == [g["peak"] * 0.5**t for g in theirs.param_groups]
        for scheduler in schedulers:
            scheduler.step()
        ours.zero_grad()
        models[0](*batch_of(0)).loss.backward()
        for group in ours.param_groups:
            group["lr"] = group["peak"] * 0.5**t
        for part in ours.parts:
            part.step()
    assert all(map(torch.equal, *(model.parameters() for model in models)))
    for wrong in (-1, 0.5, "0"):
        with pytest.raises(sf.InputError, match=rf"^step\({wrong!r}\): give the number of the step"):
            ours.step(wrong)  # type: ignore[arg-type]


def test_gradients_stay_and_go() -> None:
    model = tiny("yurii")
    opt = Optimizers(model, OptimConfig(), 10)
    x, y = batch_of(0)
    model(x, y).loss.backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    opt.step(0)
    assert all(torch.equal(p.grad, before[n]) for n, p in model.named_parameters())
    opt.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_sam_step_is_its_transcription() -> None:
    """First gradient, perturbation, second gradient, clipping and step, twice."""
    config, recipe = both_recipes("muon")
    config = config.replace(sam="always", rho=0.2)
    model, reference = tiny("yurii"), tiny("yurii")
    roles = roles_of(model)
    opt, theirs = Optimizers(model, config, recipe.steps), naive.Naive(recipe, roles, {})
    weights = trainable(reference)
    for t in range(2):
        x, y = batch_of(t)
        opt.zero_grad()
        model(x, y).loss.backward()
        saved = opt.perturb()
        raised = naive.sam_point(weights, naive.gradients(loss_of(reference, t), weights), 0.2)
        for n, p in model.named_parameters():
            assert (p - raised[n]).abs().max() < AGREE
        opt.zero_grad()
        model(x, y).loss.backward()
        second = naive.gradients(loss_of(reference, t), raised)
        for n, p in model.named_parameters():
            assert (p.grad - second[n]).abs().max() < AGREE
        opt.restore(saved)
        opt.clip()
        opt.step(t)
        weights = theirs.step(t, weights, naive.clipped(recipe, second, roles)[0])
        for n, p in model.named_parameters():
            assert (p - weights[n]).abs().max() < AGREE


# Compiled models.


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_a_schedule_compiles_nothing_again(device: str) -> None:
    """Warm-up of rate and momentum, plateau and decay: after its first step a compiled model is never traced again."""
    torch._dynamo.reset()
    sizes = {"d_model": 256, "n_head": 4} if device == "cuda" else {}
    model = tiny("yurii", dtype=torch.float32, **sizes).to(device)
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    settings = {"schedule": "wsd", "warmup": 3, "decay_start": 6, "momentum_warmup": 4}
    optimizers = Optimizers(model, OptimConfig(**settings), 10)
    inputs, targets = tokens(2).to(device), tokens(2, seed=1).to(device)
    rates = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in range(10):
            optimizers.zero_grad()
            loss = compiled(inputs, targets).loss
            loss.backward()
            optimizers.clip()
            optimizers.step(t)
            rates.append(optimizers.groups()[0]["lr"])
    assert len(set(rates)) >= 6
    assert loss.isfinite()


# What a GPU does otherwise: stacks that stay, recorded work.


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("qkv", ["fused", "split", "heads"])
def test_stacks_that_stay(monkeypatch: pytest.MonkeyPatch, qkv: str, nesterov: bool) -> None:
    """Stacks in fixed memory are a way to the same steps; gradients and averages stay as they are."""

    def after() -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
        model = tiny("yurii")
        opt = Optimizers(model, OptimConfig(qkv=qkv, nesterov=nesterov, wd_matrix=0.1, momentum_warmup=3), 10)
        for t in range(3):
            opt.zero_grad()
            x, y = batch_of(t)
            model(x, y).loss.backward()
            before = {n: p.grad.clone() for n, p in model.named_parameters()}
            opt.step(t)
            assert all(torch.equal(p.grad, before[n]) for n, p in model.named_parameters())
        return trainable(model), opt.tensors(), next(iter(opt.parts[0].stacks.values()), [])

    plain, state, none = after()
    monkeypatch.setattr(lmo, "_narrow", lambda matrix, group: matrix.dtype)
    monkeypatch.setattr(polar_file, "stays_tall", lambda matrix: True)
    fixed, fixed_state, stacks = after()
    assert not none
    matrices = sum(
        stacked_parts(tiny("yurii"), qkv).get(n, 1) for n, _, role in named_roles(tiny("yurii")) if role is Role.MATRIX
    )
    assert sum(len(stack) for stack in stacks) == matrices
    for n in plain:
        assert (plain[n] - fixed[n]).abs().max() < 1e-11, n  # fp64; later gradients follow the first differences
    for key in state:
        assert (state[key] - fixed_state[key]).abs().max() < 1e-11, key


class Replayed:
    """A graph that counts."""

    def __init__(self) -> None:
        self.count = 0

    def replay(self) -> None:
        self.count += 1


def test_what_is_recorded_when(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    here = torch.zeros(1)
    plain = CudaGraphs()
    for _ in range(3):
        plain.run("a", 1, lambda: runs.append("plain"), here)
    assert (runs, plain.keys) == (["plain"] * 3, {})  # a CPU has no graphs

    monkeypatch.setattr(cuda_graphs, "capturable", lambda tensor: True)
    graph, made = Replayed(), []
    recorded = CudaGraphs()
    monkeypatch.setattr(recorded, "_capture", lambda work: made.append(1) or graph.replay)
    runs.clear()
    for key in [1, 1, 1, 1, 2, 2, 2, 1]:
        recorded.run("a", key, lambda: runs.append("plain"), here)
    assert (len(runs), len(made), graph.count) == (3, 2, 5)  # each change of the key runs plainly once

    refusing = CudaGraphs()
    refusing.count = MOST
    runs.clear()
    for _ in range(4):
        refusing.run("a", 1, lambda: runs.append("plain"), here)
    assert len(runs) == 4  # work that is not recorded is done all the same
    assert refusing.captured == {"a": None}


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def cuda_steps(plain: bool, moving: bool, steps: int = 7, **settings: Any) -> tuple[dict[str, Tensor], Optimizers]:
    """Weights and memory after steps along random gradients, and the last norm."""
    model = tiny("yurii", dtype=torch.float32, d_model=128, n_head=2).cuda()
    opt = Optimizers(model, OptimConfig(schedule="wsd", warmup=3, decay_start=5, momentum_warmup=4, **settings), steps)
    generator = seeded(0, "cuda")
    kept: list[Tensor] = []
    norm = torch.zeros(())
    for t in range(steps):
        for p in opt.parameters:
            noise = torch.randn(p.shape, generator=generator, device="cuda")
            if p.grad is None or moving:
                kept.append(noise)  # so that the next one lies elsewhere
                p.grad = noise
            else:
                p.grad.copy_(noise)
        torch.cuda.set_sync_debug_mode("error" if t > 1 else "default")  # recorded in the second step
        try:
            with kernels.off() if plain else contextlib.nullcontext():
                norm = opt.norm()
                opt.clip(norm)
                opt.step(t)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {**trainable(model), **opt.tensors(), "norm": norm}, opt


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"qkv": "split", "nesterov": False, "wd_matrix": 0.1}, {"polar": "polar-express", "polar_dtype": "bf16"}],
    ids=["usual", "split", "express"],
)
def test_recorded_steps_are_the_plain_ones(device: str, settings: dict[str, Any], moving: bool) -> None:
    """To the bit, over a schedule of rates and momentum, without waiting for the device."""
    expected, plain = cuda_steps(True, moving, **settings)
    found, recorded = cuda_steps(False, moving, **settings)
    assert not any(plain.graphs.captured.values())
    graphs = {name for name, graph in recorded.graphs.captured.items() if graph is not None}
    assert graphs == ({"polar 0"} if moving else {"polar 0", "norm", "clip"})
    assert recorded.graphs.count == len(graphs)  # the schedule recorded nothing again
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_a_step_inside_another_recording(device: str) -> None:
    matrix = nn.Parameter(torch.randn(128, 64, device=device))
    matrix.grad = torch.randn_like(matrix)
    opt = LmoOptimizer([{"params": [matrix]}])
    for _ in range(3):
        opt.step()
    assert opt.graphs.captured["polar 0"] is not None
    start, memory = matrix.detach().clone(), opt.state[matrix]["momentum"].clone()
    opt.step()
    expected = matrix.detach().clone()
    with torch.no_grad():
        matrix.copy_(start)
        opt.state[matrix]["momentum"].copy_(memory)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.step()
    assert torch.equal(matrix, start)
    graph.replay()
    assert torch.equal(matrix, expected)
