"""Jacobians along depth: against dense ones, finite differences and theory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import stepformer as sf
from architectures import covering_presets
from draws import seeded
from helpers import shake, tiny, tokens
from runs import make_corpus, small_run
from stepformer.base.errors import ConfigError, InputError
from stepformer.measure import measured
from stepformer.measure.diagnostics import jacobian, layer_maps
from stepformer.measure.diagnostics.common import fixed_windows, generator_of
from stepformer.measure.diagnostics.jacobian import JacobianSettings
from stepformer.measure.diagnostics.layer_maps import KINDS, LayerMaps, Linearised, twice_differentiable
from stepformer.measure.diagnostics.sketching import Spectrum, spectrum
from stepformer.oracles import fresh_call
from stepformer.rules import State
from stepformer.training import load_run, train
from stepformer.training.loading import LoadedRun, corpus_of

PLACES = [(layer, kind) for layer in (0, 1) for kind in KINDS]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


def dense(run: Any, point: Sequence[Tensor]) -> Tensor:
    """The Jacobian of run(*point), a tuple of tensors, as one matrix, by torch's own reverse mode."""
    sizes = [t.numel() for t in point]

    def flat(v: Tensor) -> Tensor:
        parts = [part.view(t.shape) for part, t in zip(v.split(sizes), point, strict=True)]
        return torch.cat([t.reshape(-1) for t in run(*parts)])

    here = torch.cat([t.reshape(-1) for t in point])
    found = torch.autograd.functional.jacobian(flat, here, vectorize=True)
    assert isinstance(found, Tensor)
    return found


def states_before(model: sf.Model, ids: Tensor) -> list[State]:
    """The state before every layer, by a loop written here."""
    call = fresh_call(ids)
    s = model.start(ids, call.positions)
    states = []
    for block in model.blocks:
        states.append(State(s.x.detach(), {k: t.detach() for k, t in s.streams.items()}, dict(s.memory)))
        s = block(s, call)
    return states


# the products, on all architectures


@pytest.mark.parametrize("name", covering_presets())
def test_products_with_the_jacobian_and_its_transpose(name: str) -> None:
    """<u, J v> = <J^T u, v>, and J v is the central difference of the map along v."""
    maps = LayerMaps(shake(tiny(name)), tokens(), dtype=torch.float64)
    for layer, kind in PLACES:
        map, point = getattr(maps, kind)(layer)
        if map is None:
            assert maps.jacobian(layer, kind) is None
            continue
        operator = Linearised(map, point)
        u, v = normal(3, operator.shape[0], seed=1), normal(3, operator.shape[1], seed=2)
        pushed, pulled = operator.push(v), operator.pull(u)
        # fp64, sums of up to 600 terms
        assert torch.allclose((u * pushed).sum(1), (pulled * v).sum(1), rtol=1e-10, atol=1e-10 * pushed.norm().item())
        step = 1e-6
        moved = []
        for sign in (1, -1):
            parts = v[0].split([t.numel() for t in point])
            with torch.no_grad():
                out = map([t + sign * step * part.view(t.shape) for t, part in zip(point, parts, strict=True)])
            moved.append(torch.cat([t.reshape(-1) for t in out]))
        difference = (moved[0] - moved[1]) / (2 * step)
        # truncation is 1e-12 times a third derivative, which Newton-Schulz steps have large (1e-7); rounding 1e-9
        assert close(pushed[0], difference, 1e-6), (layer, kind)


def test_vectors_may_go_one_by_one_or_together(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = LayerMaps(shake(tiny("kl")), tokens(), dtype=torch.float64).jacobian(1, "joint")
    assert operator is not None
    v = normal(7, operator.shape[1])
    together = operator.push(v), operator.pull(v)
    monkeypatch.setitem(layer_maps.AT_ONCE, "cpu", 1)
    assert close(operator.push(v), together[0], 1e-12)
    assert close(operator.pull(v), together[1], 1e-12)


# singular values against dense Jacobians

WIDER: dict[str, Any] = {"n_layer": 2, "n_head": 4, "d_model": 16, "context": 8, "vocab_size": 11}
COMPARED: list[Any] = ["muon", "symp-ab2"]
COMPARED += [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("vanilla", "entropy", "yurii", "linear", "tmm", "adam", "soap", "kl-previous")
]


@pytest.mark.parametrize("name", COMPARED)
def test_first_singular_values_are_those_of_the_dense_jacobian(name: str) -> None:
    """The defaults on 256 dimensions and more, which the sketch of 222 directions does not span."""
    model = shake(sf.build(name, seed=0, dtype=torch.float64, **WIDER), 0.2)
    ids = tokens()
    maps = LayerMaps(model, ids, dtype=torch.float64)
    at, block, call = states_before(model, ids)[1], model.blocks[1], fresh_call(ids)
    streams = [key for key, t in at.streams.items() if t.ndim > 1]
    memory = list(at.memory)

    def joint(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip([*streams, *memory], rest, strict=True))
        held = {k: t for k, t in at.streams.items() if k not in given}
        s = State(x, {**held, **{k: given[k] for k in streams}}, {k: given[k] for k in memory})
        new = block(s, call)
        return (new.x, *(new.streams[k] for k in streams), *new.memory.values())

    def x_alone(x: Tensor) -> tuple[Tensor]:
        return (block(at.replace(x=x), call).x,)

    def oracle(x: Tensor) -> tuple[Tensor]:
        here = replace(call, memory=dict(at.memory))
        a = block.attn(block.attn_norm(x), here)
        return (a + block.mlp(block.mlp_norm(x + a)),)

    maps_of: dict[str, tuple[Any, list[Tensor]]] = {
        "block": (x_alone, [at.x]),
        "joint": (joint, [at.x, *(at.streams[k] for k in streams), *(t.detach() for t in at.memory.values())]),
    }
    if not model.blocks[1].attn.has_fields:
        looks_ahead = "mu_attn" in model.coefficients()[1]
        looked_at = at.x + model.coefficients()[1]["mu_attn"] * at.v if looks_ahead else at.x
        maps_of["oracle"] = (oracle, [looked_at])
    for kind, (run, point) in maps_of.items():
        truth = torch.linalg.svdvals(dense(run, point))
        operator = maps.jacobian(1, kind)
        assert operator is not None
        assert min(operator.shape) > 222
        found = spectrum(operator, rank=64, oversampling=10, iterations=2, probes=8, generator=seeded())
        values = torch.tensor(found.values, dtype=torch.float64)
        assert len(values) == 64
        assert (values.diff() <= 0).all()
        assert ((values - truth[:64]) / truth[:64])[:16].abs().max() < 0.01, kind
        # the whole list is from below, and misses about what its changes tell
        assert found.error is not None
        missing = ((truth[:64] - values) / truth[:64]).max().item()
        assert -1e-9 < missing < max(2 * found.error, 1e-9)
        square = truth.square().sum().item()
        assert found.frobenius_squared_error is not None
        # margin: 5 standard errors with 7 degrees of freedom are left once in 600
        assert abs(found.frobenius_squared - square) < 5 * found.frobenius_squared_error + 1e-9 * square


def test_vanilla_block_is_identity_plus_oracle() -> None:
    maps = LayerMaps(shake(tiny("vanilla")), tokens(), dtype=torch.float64)
    for layer in (0, 1):
        block, oracle = maps.jacobian(layer, "block"), maps.jacobian(layer, "oracle")
        assert block is not None
        assert oracle is not None
        eye = torch.eye(block.shape[1], dtype=torch.float64)
        assert close(block.push(eye), eye + oracle.push(eye), 1e-12)
    parallel = LayerMaps(shake(tiny("gd-euler")), tokens(), dtype=torch.float64)
    block, oracle = parallel.jacobian(1, "block"), parallel.jacobian(1, "oracle")
    assert block is not None
    assert oracle is not None
    v = normal(2, block.shape[1])
    assert close(block.push(v), v + oracle.push(v), 1e-12)


class LinearOracle(sf.Attention):
    """g = -H u, token by token."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix)

    def forward(self, u: Tensor, call: Any) -> Tensor:
        return -u @ self.matrix.mT


class Nothing(nn.Module):
    def forward(self, u: Tensor) -> Tensor:
        return torch.zeros_like(u)


def test_heavy_ball_on_a_linear_oracle_without_norms() -> None:
    """v' = beta v - gamma lambda x, x' = x + v': [[1 - gamma lambda, beta], [-gamma lambda, beta]] for each mode."""
    model = tiny("polyak-euler", n_layer=1)
    beta, gamma = 0.8, 0.37
    curvatures = torch.linspace(0.1, 3.0, 12, dtype=torch.float64)
    q = torch.linalg.qr(normal(12, 12)).Q
    block = model.blocks[0]
    block.attn = LinearOracle(q * curvatures @ q.mT)
    block.mlp = Nothing()  # type: ignore[assignment]
    block.attn_norm, block.mlp_norm = nn.Identity(), nn.Identity()
    block.aux_norms = nn.ModuleDict({key: nn.Identity() for key in block.aux_norms})
    model.pin_coefficients(beta=beta, gamma=gamma)
    operator = LayerMaps(model, tokens(), dtype=torch.float64).jacobian(0, "joint")
    assert operator is not None
    modes = torch.stack(
        [torch.tensor([[1 - gamma * c, beta], [-gamma * c, beta]], dtype=torch.float64) for c in curvatures.tolist()]
    )
    expected = torch.linalg.svdvals(modes).flatten().repeat(16).sort(descending=True).values  # 16 tokens
    found = spectrum(operator, rank=384, oversampling=10, iterations=2, probes=2, generator=seeded())
    assert torch.allclose(torch.tensor(found.values, dtype=torch.float64), expected, rtol=1e-9)
    top = spectrum(operator, rank=64, oversampling=10, iterations=4, probes=2, generator=seeded())
    # every mode comes 16 times, so that the first 64 are four values with little between them
    assert torch.allclose(torch.tensor(top.values, dtype=torch.float64), expected[:64], rtol=0.01)


# what is linearised, and what is left alone


def test_the_state_that_is_joint() -> None:
    parts = {name: LayerMaps(tiny(name), tokens()).parts() for name in ("vanilla", "adam", "soap", "kl-carried")}
    assert parts["vanilla"] == ["x"]
    assert parts["adam"] == ["x", "m", "s"]
    assert parts["soap"] == ["x", "m", "R"]
    assert parts["kl-carried"] == ["x", "log_prior"]
    clocked = LayerMaps(tiny("symp-ab2"), tokens())
    assert clocked.parts() == ["x", "y", "fx", "fy"]
    assert clocked.left_out() == ["hx", "hy", "t"]
    extras = LayerMaps(tiny("yurii", value_residual="unit", embedding_skip=True), tokens())
    assert extras.parts() == ["x", "v", "x0", "v1"]
    first, second = extras.jacobian(0, "joint"), extras.jacobian(1, "joint")
    assert first is not None
    assert second is not None
    # 16 tokens of width 12: the first layer makes v1, later ones receive it
    assert first.shape == (4 * 192, 3 * 192)
    assert second.shape == (4 * 192, 4 * 192)


def test_clocks_do_not_hear_from_tokens() -> None:
    """Why they are left out: what a token does cannot reach them."""
    model = shake(tiny("symp-etd-ab2"))
    ids = tokens()
    call = fresh_call(ids)
    at = states_before(model, ids)[1]
    new = model.blocks[1](at.replace(x=at.x.requires_grad_()), call)
    heard = {
        name: stream.requires_grad and torch.autograd.grad(stream.sum(), at.x, allow_unused=True, retain_graph=True)[0]
        for name, stream in new.streams.items()
    }
    assert {name for name, gradient in heard.items() if isinstance(gradient, Tensor)} == {"y", "fx", "fy"}


def test_the_model_stays_as_it_is() -> None:
    model = shake(tiny("kl-previous", detach_prior=True, dtype=torch.float32))
    model.train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    grads = [p.requires_grad for p in model.parameters()]
    maps = LayerMaps(model, tokens(), dtype=torch.float64)
    operator = maps.jacobian(1, "joint")
    assert operator is not None
    operator.push(normal(2, operator.shape[1]))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == grads
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert model.blocks[0].attn.detach_prior is True
    assert next(model.parameters()).dtype == torch.float32
    assert not list(model.blocks[0].attn_norm._forward_pre_hooks)
    softmax = tiny("vanilla")
    LayerMaps(softmax, tokens())
    assert softmax.blocks[0].attn.attention_backend == "sdpa"
    assert twice_differentiable(softmax, torch.float64).blocks[0].attn.attention_backend == "math"


def test_a_stopped_gradient_flows_here() -> None:
    """`detach_prior` is about training: the function, and so its Jacobian, is the same without it."""
    stopped, flowing = (shake(tiny("kl-previous", detach_prior=flag)) for flag in (True, False))
    a, b = (LayerMaps(model, tokens(), dtype=torch.float64).jacobian(1, "joint") for model in (stopped, flowing))
    assert a is not None
    assert b is not None
    v = normal(2, a.shape[1])
    assert torch.equal(a.push(v), b.push(v))


def test_a_hybrid_is_measured_as_one() -> None:
    """In a plain layer the block is x + R(x), whatever the template."""
    hybrid = shake(tiny("yurii")).hybrid(layers={0})
    maps = LayerMaps(hybrid, tokens(), dtype=torch.float64)
    block, oracle = maps.jacobian(1, "block"), maps.jacobian(1, "oracle")
    assert block is not None
    assert oracle is not None
    v = normal(2, block.shape[1])
    assert close(block.push(v), v + oracle.push(v), 1e-12)


def test_bad_words_are_explained() -> None:
    maps = LayerMaps(tiny(), tokens())
    with pytest.raises(InputError, match="none of block, oracle, joint"):
        maps.jacobian(0, "blok")
    with pytest.raises(InputError, match="context"):
        LayerMaps(tiny(), tokens(2, 9))
    with pytest.raises(ConfigError, match=r"\[jacobian\] operators = 'block,all' should name some of"):
        JacobianSettings(operators="block,all")
    with pytest.raises(ConfigError, match="rank = 0"):
        JacobianSettings(rank=0)


# runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    folder = tmp_path_factory.mktemp("jacobian")
    make_corpus(folder / "data")
    train(small_run(folder / "data", "yurii"), folder / "run", quiet=True)
    return load_run(folder / "run", device="cpu")


SETTINGS = JacobianSettings(windows=4, window_batch=2, rank=12, oversampling=4, iterations=1, probes=3)


def test_a_run_is_measured(run: LoadedRun, tmp_path: Path) -> None:
    result = jacobian.measure(run, SETTINGS, quiet=True)
    assert result["tokens"] == 4 * 16
    assert result["batches"] == 2
    assert [row["layer"] for row in result["layers"]] == [0, 1]
    for row in result["layers"]:
        for kind in KINDS:
            assert row[kind]["k"] == 12
            assert row[kind]["singular_values"] == sorted(row[kind]["singular_values"], reverse=True)
            assert row[kind]["dimension"] == 2 * 16 * 16 * (2 if kind == "joint" else 1)
    assert "legacy" in result["summary"]["block"]
    assert not (run.folder.path / measured.FOLDER / "jacobian.jsonl").exists()
    # the mean over the batches of what the plain functions find
    windows = fixed_windows(corpus_of(run).split("val"), 4, 16, 0)
    found = []
    for batch in (0, 1):
        operator = LayerMaps(run.model, windows[2 * batch : 2 * batch + 2, :-1]).jacobian(1, "block")
        assert operator is not None
        generator = generator_of(0, 1, "block", batch)
        found.append(spectrum(operator, rank=12, oversampling=4, iterations=1, probes=3, generator=generator))
    means = [(a + b) / 2 for a, b in zip(found[0].values, found[1].values, strict=True)]
    assert result["layers"][1]["block"]["singular_values"] == pytest.approx(means, rel=1e-12)

    console = Console(width=120, record=True, file=(tmp_path / "out.txt").open("w"))
    console.print(jacobian.text(result))
    printed = console.export_text()
    assert f"{result['layers'][0]['block']['sigma_max']:.4g}" in printed
    assert f"{result['summary']['joint']['persistence']:.4g}" in printed
    assert "The joint state is (x, v)" in printed
    jacobian.plot(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_an_interrupted_measurement_continues(run: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece is computed once, and the result is that of an uninterrupted measurement to the bit."""
    whole = jacobian.measure(run, SETTINGS, quiet=True)
    done: list[int] = []

    def counted(limit: int, operator: Any, **sizes: Any) -> Spectrum:
        if len(done) == limit:
            raise KeyboardInterrupt
        done.append(1)
        return spectrum(operator, **sizes)

    monkeypatch.setattr(jacobian, "spectrum", partial(counted, 7))
    with pytest.raises(KeyboardInterrupt):
        jacobian.measure(run, SETTINGS, quiet=True)
    monkeypatch.setattr(jacobian, "spectrum", partial(counted, -1))
    assert jacobian.measure(run, SETTINGS, quiet=True) == whole
    assert len(done) == 2 * 2 * 3  # batches, layers, operators


def test_some_operators_and_bad_sizes(run: LoadedRun) -> None:
    result = jacobian.measure(run, SETTINGS.replace(operators="joint", windows=1, precision="fp64"), quiet=True)
    assert result["batches"] == 1
    assert result["summary"]["block"] is None
    assert result["layers"][0]["oracle"] is None
    assert result["summary"]["joint"]["layers"] == 2
    with pytest.raises(InputError, match="multiple of window_batch"):
        jacobian.measure(run, SETTINGS.replace(windows=3), quiet=True)
    with pytest.raises(InputError, match="context = 17 is longer"):
        jacobian.measure(run, SETTINGS.replace(context=17), quiet=True)


def test_what_has_no_oracle_says_so() -> None:
    assert layer_maps.why_no_oracle(tiny("yurii").blocks[0]) is None
    for name, word in (("symp-ab2", "two fields"), ("verlet-ama", "strang"), ("imex-k1-ama", "imex")):
        reason = layer_maps.why_no_oracle(tiny(name).blocks[0])
        assert reason is not None
        assert word in reason
