"""The trust-region optimizer: factors, steps, what they are special cases of, radius, memory; and that it learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

import stepformer as sf
from draws import seeded
from helpers import shake, tiny, tokens
from runs import make_corpus, small_run, stop_after
from stepformer.base.errors import ConfigError, DivergedError, InputError
from stepformer.model.roles import Role, named_roles
from stepformer.ops.dtypes import matmul_precision
from stepformer.ops.graphs import capturable
from stepformer.optim import OptimConfig, Optimizers
from stepformer.optim.trust import region, row_change
from stepformer.optim.trust.factors import Stack, factors, inverse_root, kronecker, rounded_products, stacks
from stepformer.optim.trust.observing import observe
from stepformer.optim.trust.region import TrustRegion
from stepformer.training import Stopped, load_run, resume, train
from stepformer.training.metrics import read_metrics
from transcriptions import trust_layers
from transcriptions import trust_region as naive

X, Y = tokens(8, 8), tokens(8, 8, seed=1)


def optimizers(model: sf.Model, **settings: Any) -> Optimizers:
    usual: dict[str, Any] = {"name": "trust", "warmup": 0, "schedule": "constant", "momentum": 0.0, "nesterov": False}
    return Optimizers(
        model, OptimConfig(**{**usual, "lr": 1e-3, "factor_damping": 0.0, **settings}), 10, lambda *_: (X, Y)
    )


def gradients(model: sf.Model) -> dict[str, Tensor]:
    model.zero_grad()
    model(X, Y).loss.backward()
    return {n: p.grad.clone() for n, p, role in named_roles(model) if role is Role.MATRIX and p.grad is not None}


def step_with(
    model: sf.Model, given: dict[str, tuple[Tensor, Tensor]] | None = None, **settings: Any
) -> dict[str, Tensor]:
    """What one step of eta = 1 does to the matrices, with factors that are given or those of X."""
    opt = optimizers(model, **settings)
    trust = opt.trust
    assert isinstance(trust, TrustRegion)
    gradients(model)
    params = trust.param_groups[0]["params"]
    for p in params:
        trust.create(p)
    trust.learn(factors(model, observe(model, X, inputs=True)) if given is None else given)
    found = trust._directions(0, [p.grad for p in params], trust.param_groups[0]["parts"])
    return {s[0].name: -step for s, (step, _) in zip(trust.param_groups[0]["parts"], found, strict=True)}


# (a) Unit RMS change of a layer's own output is Muon.


@pytest.mark.parametrize("method", ["svd", "newton-schulz", "polar-express"])
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_unit_rms_of_outputs_is_muon(method: str, mlp: str) -> None:
    model, other = (tiny("vanilla", mlp=mlp, mlp_hidden=20) for _ in range(2))
    eye = torch.eye(64, dtype=torch.float64)
    given, count = {}, 0
    for s in stacks(model):
        (n, left, _), (m, right, _) = s.shapes()
        given[s.key] = eye[:left, :left].expand(n, -1, -1) / s.rows, eye[:right, :right].expand(m, -1, -1)
        count += s.count
    step = step_with(model, given, norm="spectral", polar=method)
    config = OptimConfig(lr=1 / count**0.5, polar=method, qkv="heads", momentum=0.0, nesterov=False, warmup=0)
    muon = Optimizers(other, config.replace(schedule="constant"), 10)
    before = {n: p.detach().clone() for n, p in other.named_parameters()}
    gradients(other)
    muon.step(0)
    after = dict(other.named_parameters())
    for name, value in step.items():
        torch.testing.assert_close(value, after[name].detach() - before[name], atol=1e-12, rtol=0)


# (b) The Frobenius step is the minimiser.


def test_frobenius_step_is_the_best_feasible_one() -> None:
    model = shake(tiny("vanilla", norm="rmsnorm"), 0.1)
    step, grads = step_with(model, norm="frobenius"), gradients(model)
    given = factors(model, observe(model, X, inputs=True))

    own = list(stacks(model))

    def parts(d: dict[str, Tensor], s: Stack) -> Tensor:
        return d[s.name][:, s.begin : s.begin + s.count * s.rows].unflatten(1, (s.count, s.rows))

    def sizes(d: dict[str, Tensor]) -> Tensor:
        return sum((kronecker(*given[s.key], parts(d, s)).sum(dim=1) for s in own), torch.zeros(()))

    def gains(d: dict[str, Tensor]) -> Tensor:
        return sum(((grads[name] * value).sum(dim=(1, 2)) for name, value in d.items()), torch.zeros(()))

    alone = {name: value[None] for name, value in step.items()}
    assert float(sizes(alone)) == pytest.approx(1.0, rel=1e-6)
    best = float(gains(alone))
    roots = {s.key: [inverse_root(f, 0.0) for f in given[s.key]] for s in own}
    generator = torch.Generator().manual_seed(0)
    for trial in range(20):  # of 500 directions: white, near the solution, white in the coordinates of the region
        noise = {n: torch.randn(500, *g.shape, generator=generator, dtype=g.dtype) for n, g in step.items()}
        if trial % 3 == 1:
            noise = {n: step[n] + 0.1 * step[n].std() * value for n, value in noise.items()}
        elif trial % 3 == 2:
            for s in own:
                left, right = roots[s.key]
                part = parts(noise, s)
                part.copy_((left.mT @ part if left.shape[-1] > 1 else left * part) @ right)
        assert float((gains(noise).abs() / sizes(noise).sqrt()).max()) < -best


def test_frobenius_step_is_a_solvers() -> None:
    """All matrices of a small model against SLSQP."""
    model = shake(tiny("vanilla", norm="rmsnorm", n_layer=1, d_model=4, n_head=2, mlp_hidden=3), 0.1)
    step, grads = step_with(model, norm="frobenius"), gradients(model)
    given, own = factors(model, observe(model, X, inputs=True)), list(stacks(model))

    def split(flat: Any) -> dict[str, Tensor]:
        parts = torch.as_tensor(flat).split([g.numel() for g in grads.values()])
        return {n: part.view_as(g) for (n, g), part in zip(grads.items(), parts, strict=True)}

    def flat(d: dict[str, Tensor]) -> Any:
        return torch.cat([d[n].reshape(-1) for n in grads]).detach().numpy()

    def room(x: Any) -> float:
        d = split(x)
        return 1 - float(sum(kronecker(*given[s.key], s.of(d[s.name])).sum() for s in own))

    def slope(x: Any) -> Any:
        d, found = split(x), {n: torch.zeros_like(g) for n, g in grads.items()}
        for s in own:
            left, right = given[s.key]
            part = s.of(d[s.name])
            part = (left @ part if left.shape[-1] > 1 else left * part) @ right
            found[s.name][s.begin : s.begin + s.count * s.rows] = -2 * part.flatten(0, 1)
        return flat(found)

    target = flat(grads)
    begin = flat({n: -g / 1e3 for n, g in grads.items()})
    bound = {"type": "ineq", "fun": room, "jac": slope}
    options = {"maxiter": 2000, "ftol": 1e-15}
    found = minimize(lambda x: float(x @ target), begin, jac=lambda x: target, constraints=[bound], options=options)
    assert float(flat(step) @ target) == pytest.approx(found.fun, rel=1e-5)
    assert float(flat(step) @ target) <= found.fun * (1 - 1e-9) or room(found.x) > -1e-6


# (d) What the network does not see does not matter.


@pytest.mark.parametrize("norm", ["frobenius", "spectral"])
@pytest.mark.parametrize("rotary", [False, True])
def test_gauge_invariance(norm: str, rotary: bool) -> None:
    """W_Q -> M W_Q, W_K -> M^-T W_K and W_V -> N W_V, W_O -> W_O N^-1 change no score and no answer of the step."""
    positions = "rotary" if rotary else "learned"
    one, two = (shake(tiny("vanilla", norm="rmsnorm", positions=positions, d_model=8, n_head=2), 0.3) for _ in range(2))
    heads, width = 2, 4
    generator = torch.Generator().manual_seed(3)
    maps = []
    with torch.no_grad():
        for block in two.blocks:
            q, k, v = (t.unflatten(0, (heads, width)) for t in block.attn.qkv.weight.chunk(3))
            m, n = (torch.randn(heads, width, width, generator=generator, dtype=torch.float64) for _ in range(2))
            if rotary:  # what commutes with rotations of the pairs (i, i + width / 2): complex numbers
                re, im = (torch.diag_embed(torch.randn(heads, 2, generator=generator).double()) for _ in range(2))
                m = torch.cat([torch.cat([re, -im], -1), torch.cat([im, re], -1)], -2)
            k.copy_(torch.linalg.inv(m).mT @ k)
            q.copy_(m @ q)
            v.copy_(n @ v)
            out = block.attn.out.weight.unflatten(1, (heads, width)).transpose(0, 1)
            out.copy_(out @ torch.linalg.inv(n))
            maps.append((m, n))
    torch.testing.assert_close(one(X).logits, two(X).logits, atol=1e-10, rtol=0)
    here, there = (step_with(model, norm=norm, polar="svd") for model in (one, two))
    worst = 0.0
    for i, (m, n) in enumerate(maps):
        a, b = (
            [t.unflatten(0, (heads, width)) for t in s[f"blocks.{i}.attn.qkv.weight"].chunk(3)] for s in (here, there)
        )
        for mine, theirs, g in zip(b, a, (m, torch.linalg.inv(m).mT, n), strict=True):
            worst = max(float((mine - g @ theirs).abs().max() / (g @ theirs).abs().max()), worst)
        a, b = (s[f"blocks.{i}.attn.out.weight"].unflatten(1, (heads, width)).transpose(0, 1) for s in (here, there))
        worst = max(float((b - a @ torch.linalg.inv(n)).abs().max() / a.abs().max()), worst)
    assert 0 < worst < 1e-6  # the undamped factors are nearly singular: 1e-16 times their condition


# The factors and steps against the transcription.

SETTINGS: list[dict[str, Any]] = [
    {},
    {"positions": "rotary"},
    {"qk_norm": True},
    {"qk_norm": True, "positions": "rotary", "norm": "rmsnorm"},
    {"norm": "rmsnorm", "attention": "entropy"},
    {"norm": "rmsnorm", "attention": "kl", "qk_norm": True},
    {"attention": "entropy", "constraint": "floor", "ratio": 0.7, "positions": "rotary"},
    {"mlp": "swiglu", "alpha": 0.7, "beta": 0.4},
]


def transcribed(model: sf.Model, x: Tensor, lambda_attn: float) -> dict[str, naive.Factors]:
    """Of the first layer, in the transcription's names."""
    return naive.averaged(transcribed_layers(model, x, lambda_attn))


def transcribed_layers(model: sf.Model, x: Tensor, lambda_attn: float = 1.0) -> list[trust_layers.Layer]:
    config, block = model.config, model.blocks[0]
    rule = {"attention": "floor" if config.options.get("constraint") == "floor" else config.attention}
    rule |= {"norm": config.norm, "qk_norm": config.option("qk_norm"), "rotary": config.positions == "rotary"}
    rule |= {"mlp": config.mlp, "alpha": config.option("alpha"), "b": config.option("beta"), "eps": config.norm_eps}
    rule |= {"lambda_attn": lambda_attn}
    if config.attention != "softmax":
        rule["ratio"] = config.option("ratio")
    heads = config.n_head
    weights: dict[str, Any] = {}
    for name, part in zip(("W_Q", "W_K", "W_V"), block.attn.qkv.weight.detach().chunk(3), strict=True):
        weights[name] = part.chunk(heads)
    weights["W_O"] = block.attn.out.weight.detach().chunk(heads, dim=1)
    *gate, weights["W_up"] = block.mlp.up.weight.detach().chunk(block.mlp.branches)
    weights |= {"W_gate": gate[0]} if gate else {}
    weights["W_down"] = block.mlp.down.weight.detach()
    if config.norm == "layernorm":
        weights |= {f"{turn}_norm": getattr(block, f"{turn}_norm").weight.detach() for turn in ("attn", "mlp")}
    with torch.no_grad():
        start = model.start(x, torch.arange(x.shape[1])).x
    return [trust_layers.run_layer(list(row), weights, rule) for row in start]


@pytest.mark.parametrize("settings", SETTINGS)
def test_factors_are_those_of_the_transcription(settings: dict[str, Any]) -> None:
    model = shake(tiny("vanilla", **settings), 0.3)
    x = X[:3]
    found, expected = factors(model, observe(model, x, inputs=True), 0.7), transcribed(model, x, 0.7)
    words = {".q": "W_Q", ".k": "W_K", ".v": "W_V", ".gate": "W_gate", ".up": "W_up"}
    modules = {"out": "W_O", "up": "W_up", "down": "W_down"}
    for s in stacks(model):
        if not s.name.startswith("blocks.0."):
            continue
        name = words[s.part] if s.part else modules[s.name.split(".")[-2]]
        left, right = found[s.key]
        for h in range(s.count):
            other = expected[f"{name}.{h}" if name in ("W_Q", "W_K", "W_V") else name]
            mine = left[h % len(left)] * (torch.eye(s.rows).double() if s.left == 1 else 1)
            # alpha^2 stands on either side: the product is what counts
            scale = float(other["L"].trace() / mine.trace())
            torch.testing.assert_close(mine * scale, other["L"], atol=0, rtol=1e-6, msg=lambda m, s=s: f"{s.key} L {m}")
            torch.testing.assert_close(
                right[h % len(right)] / scale, other["R"], atol=1e-10, rtol=1e-6, msg=lambda m, s=s: f"{s.key} R {m}"
            )


def test_the_key_factor_of_constrained_rows_has_the_right_size() -> None:
    """tr(L) tr(R) is the mean of beta^2 |q|^2 tr Cov_a(u) less what the rows do not see, however large a beta is."""
    model = shake(tiny("vanilla", attention="entropy"), 0.3)
    layers = transcribed_layers(model, X[:3])
    left, right = factors(model, observe(model, X[:3], inputs=True))["blocks.0.attn.qkv.weight.k"]
    for h in range(len(left)):
        terms = []
        for layer in layers:
            head = layer.heads[h]
            for i in layer.queries:
                u, s = torch.stack(layer.u[: i + 1]), head.s[i]
                c = trust_layers.covariance(head.a[i], u, s)
                seen = trust_layers.covariance(head.a[i], u, u).trace()
                if head.bound[i]:
                    seen = seen - c.square().sum() / trust_layers.covariance(head.a[i], s, s)
                terms.append(naive.attention_scale(layer, head) * head.beta[i] ** 2 * head.q[i].square().sum() * seen)
        assert float(left[h].trace() * right[h].trace()) == pytest.approx(float(sum(terms) / len(terms)), rel=1e-6)


@pytest.mark.parametrize("gap", [1e-3, 1e-5])  # in fp32 the second is one unit in the last place
def test_near_ties_leave_the_factors_positive(gap: float) -> None:
    """A constrained row of two keys whose scores are large and differ by little has a very large beta and nothing that
    its queries could change: what is left is rounding, which must not outweigh the other rows.
    """
    model = shake(tiny("vanilla", attention="entropy"), 0.3).float()
    x = X[:1]
    attention = model.blocks[0].attn
    with torch.no_grad():
        seen = observe(model, x, inputs=True).inputs[0]
        first, second = seen.qkv[0, :2].chunk(3, dim=-1)[1].unflatten(-1, (attention.n_head, -1))[:, 0].double()
        across = first - second
        along = first - across * (first @ across) / (across @ across)  # the same product with both keys
        query = (300 * along / (along @ along) + gap * across / (across @ across)).float()
        u = seen.attention_input[0, 1]
        rows = attention.qkv.weight[: attention.head_dim]
        rows += torch.outer(query - rows @ u, u) / (u @ u)
    at = observe(model, x, inputs=True)
    assert at.rows[0].beta[0, 0, 1] > 0.1 / gap
    left, _ = factors(model, at)["blocks.0.attn.qkv.weight.q"]
    values = torch.linalg.eigvalsh(left[0].double())
    assert values[0] > -1e-3 * values.mean()  # a hundredth of the default damping


@pytest.mark.parametrize("norm", ["frobenius", "spectral"])
def test_steps_are_those_of_the_transcription(norm: str) -> None:
    model = shake(tiny("vanilla", norm="rmsnorm"), 0.1)
    grads, given, groups, own = gradients(model), factors(model, observe(model, X, inputs=True)), {}, {}
    for s in stacks(model):
        for h in range(s.count):
            left, right = (f[h % len(f)] for f in given[s.key])
            left = left * torch.eye(s.rows).double() if s.left == 1 else naive.damped(left)
            groups[f"{s.key}.{h}"] = {"L": left, "R": naive.damped(right)}
            own[f"{s.key}.{h}"] = s.of(grads[s.name])[h]
    expected = (naive.spectral_steps if norm == "spectral" else naive.frobenius_steps)(groups, own, 1.0)
    step = step_with(model, norm=norm, polar="svd", factor_damping=0.01)
    for s in stacks(model):
        for h in range(s.count):
            torch.testing.assert_close(s.of(step[s.name])[h], expected[f"{s.key}.{h}"], atol=1e-9, rtol=1e-6)


# Refusals, in a sentence each.


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"template": "nesterov"}, "template"),
        ({"splitting": "parallel"}, "splitting"),
        ({"attention": "linear"}, "linear"),
        ({"attention": "kl", "prior": "previous"}, "previous"),
        ({"attention": "entropy", "target": "token"}, "token"),
        ({"value_residual": "fixed"}, "value_residual"),
        ({"embedding_skip": True}, "embedding_skip"),
        ({"weight_sharing": "attention"}, "weight_sharing"),
        ({"output_init": "zero"}, "output_init"),
    ],
)
def test_architectures_without_factors_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        small_run(Path("nowhere"), "vanilla", **{"optim.name": "trust", **settings})
    with pytest.raises(ConfigError, match=word):
        optimizers(tiny("vanilla", **settings))


def test_a_refused_preset_is_told_what_trains_it() -> None:
    with pytest.raises(ConfigError) as refused:
        small_run(Path("nowhere"), "glide", **{"optim.name": "trust"})
    assert "plain residual layers only, those of a GPT (vanilla), and these are others" in str(refused.value)
    assert str(refused.value).splitlines()[0].endswith("Train them with optim.name = 'muon'.")


def test_settings_belong_to_their_optimizer() -> None:
    with pytest.raises(ConfigError, match="probe = 64 belongs to name = 'trust'; this is 'muon'"):
        OptimConfig(probe=64)
    with pytest.raises(ConfigError, match="every head by itself"):
        OptimConfig(name="trust", qkv="split")
    with pytest.raises(InputError, match="probe"):
        Optimizers(tiny("vanilla"), OptimConfig(name="trust"), 10)
    run = small_run(Path("nowhere"), "vanilla", **{"norm": "rmsnorm", "optim.norm": "spectral", "optim.name": "trust"})
    assert (run.model.norm, run.optim.norm) == ("rmsnorm", "spectral")


# Runs: learning, the radius, resuming.


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=40).folder


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("vanilla", "frobenius"),
        pytest.param("kl", "spectral", marks=pytest.mark.slow),
        pytest.param("vanilla", "spectral", marks=pytest.mark.slow),
        pytest.param("kl", "frobenius", marks=pytest.mark.slow),
    ],
)
def test_models_learn(corpus: Path, tmp_path: Path, name: str, norm: str) -> None:
    changes = {"steps": 40, "eval_every": 40, "save_every": 40, "precision": "fp32", "d_model": 32, "context": 32}
    settings = {**changes, "optim.name": "trust", "optim.norm": norm, "qk_norm": name == "kl"}
    train(small_run(corpus, name, **settings), tmp_path / "run", quiet=True)
    lines = list(read_metrics(tmp_path / "run/metrics.jsonl"))
    losses = [line["val_loss"] for line in lines if line["kind"] == "eval"]
    assert losses[-1] < 3.5 < 5 < losses[0]
    looks = [line for line in lines if "r1" in line]
    assert [line["step"] for line in looks] == [*range(1, 12), 21, 31]
    assert all(0 < line["eta"] <= 0.1 and np.isfinite([line["r1"], line["r2"]]).all() for line in looks)
    assert set(looks[0]["changes"][0]) == {"kl[0]", "kl[1]", "attn", "mlp"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("norm", ["frobenius", "spectral"])
@pytest.mark.parametrize("name", ["vanilla", "kl"])
def test_models_learn_on_a_gpu(corpus: Path, tmp_path: Path, name: str, norm: str) -> None:
    """In bf16, beside a recorded pass that reads the weights where they are."""
    changes = {"steps": 60, "eval_every": 60, "save_every": 60, "precision": "bf16", "d_model": 64, "context": 64}
    settings = {**changes, "device": "cuda", "optim.name": "trust", "optim.norm": norm, "optim.lr": 0.025}
    train(small_run(corpus, name, **settings), tmp_path / "run", quiet=True)
    lines = list(read_metrics(tmp_path / "run/metrics.jsonl"))
    losses = [line["val_loss"] for line in lines if line["kind"] == "eval"]
    assert losses[-1] < 3.3 < 5 < losses[0]
    looks = [line for line in lines if "r1" in line]
    # The first step is so small that it does what was predicted. On a CPU in bf16, four seeds: decrease of the loss
    # 0.997 to 1.002, change of vanilla 0.995 to 1.005; that of kl, whose first rows are near their limits, up to 2.
    assert abs(looks[0]["r2"] - 1) < 0.02
    assert name == "kl" or abs(looks[0]["r1"] - 1) < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("norm", ["frobenius", "spectral"])
def test_recorded_steps_are_the_steps(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph and one by one, through looks and new roots; fp32, sums in any order."""

    def weights(recorded: bool) -> list[Tensor]:
        monkeypatch.setattr(region, "capturable", lambda t: recorded and capturable(t))
        model = sf.build("vanilla", size="tiny", seed=0, device="cuda")
        x, y = (torch.randint(256, (2, 64), generator=seeded(k)).cuda() for k in (1, 2))
        config = OptimConfig(name="trust", norm=norm, probe_every=3, factor_every=6, warmup=0, schedule="constant")
        trust = Optimizers(model, config, 20, lambda *_: (x, y))
        for t in range(16):
            model.zero_grad()
            model(x, y).loss.backward()
            trust.step(t)
        return [p.detach() for p in model.parameters()]

    for one, other in zip(weights(True), weights(False), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("norm", ["frobenius", pytest.param("spectral", marks=pytest.mark.slow)])
def test_resumed_run_is_the_uninterrupted_one(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: str
) -> None:
    settings = {"optim.name": "trust", "optim.norm": norm, "probe_every": 3, "factor_every": 6, "steps": 14}
    train(small_run(corpus, "vanilla", **settings), tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        with pytest.raises(Stopped):
            train(small_run(corpus, "vanilla", **settings), tmp_path / "cut", quiet=True)
    resume(tmp_path / "cut", quiet=True)
    one, two = (dict(load_run(tmp_path / name, "last").model.named_parameters()) for name in ("whole", "cut"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    whole, cut = (
        [{k: v for k, v in line.items() if k in ("eta", "r1", "r2", "loss", "changes")} for line in read_metrics(file)]
        for file in (tmp_path / "whole/metrics.jsonl", tmp_path / "cut/metrics.jsonl")
    )
    assert [line for line in whole if line] == [line for line in cut if line]


def test_rows_that_stand_out_do_not_change_the_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of a head whose predicted change is a million times too large, as where two scores are nearly equal."""
    plain = row_change

    def with_one_large(rows: Any, *args: Any) -> Tensor:
        found = plain(rows, *args).clone()
        found[0, :, -1] *= 1e6
        return found

    ratios = []
    for large in (False, True):
        model = shake(tiny("vanilla", attention="entropy"), 0.1)
        opt = optimizers(model, lr=0.01, schedule="constant", warmup=0, probe_every=1)
        if large:
            monkeypatch.setattr("stepformer.optim.trust.changes.row_change", with_one_large)
        gradients(model)
        opt.step(0)
        assert opt.trust is not None
        ratios.append(
            [float(opt.trust.kept(s, "ratio")[0].max()) for s in opt.trust.stacks_of_all if s.part in (".q", ".k")]
        )
    for one, other in zip(*ratios, strict=True):
        assert one <= other <= 20 * one  # a row among eight counts at most 50 quartiles


def test_a_rate_of_zero_moves_nothing() -> None:
    model = tiny("vanilla")
    before = [p.detach().clone() for p in model.blocks.parameters()]
    opt = optimizers(model, lr=0.0, lr_norm=0.0, schedule="constant", warmup=0, probe_every=1)
    gradients(model)
    opt.step(0)
    matrices = [(p, old) for p, old in zip(model.blocks.parameters(), before, strict=True) if p.ndim == 2]
    assert all(torch.equal(p, old) for p, old in matrices)


def test_the_radius_obeys_its_rules() -> None:
    model = tiny("vanilla")
    opt = optimizers(model, lr=0.5, schedule="cosine", warmup=2, probe_every=1, factor_damping=0.01)
    trust = opt.trust
    assert trust is not None
    expected = 0.5
    for t in range(8):
        gradients(model)
        opt.step(t)
        report, cap = trust.report, 0.5 * opt.schedule.factor(t)
        assert report["eta"] == pytest.approx(expected / 0.5 * cap)
        if report["r1"] > 1.5 or report["r2"] < 0.25:
            expected /= 1.2
        elif report["r1"] < 1.2 and report["r2"] > 0.6:
            expected = min(expected * 1.05, 0.5)
        assert float(trust.state[trust.param_groups[0]["params"][0]]["radius"]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("r2", "sentence"), [(-1.0, "radius of the trust region fell to"), (float("nan"), "not finite")]
)
def test_a_collapse_stops_with_a_sentence_and_loses_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, r2: float, sentence: str
) -> None:
    monkeypatch.setattr(TrustRegion, "_ratios", lambda *_: (1.0, r2))
    settings = {"optim.name": "trust", "probe_every": 1, "steps": 100, "eval_every": 100, "save_every": 100}
    with pytest.raises(DivergedError, match=sentence):
        train(small_run(corpus, "vanilla", **settings), tmp_path / "run", quiet=True)
    step = max(line["step"] for line in read_metrics(tmp_path / "run/metrics.jsonl"))
    found = json.loads((tmp_path / f"run/checkpoints/step-{step:08d}/manifest.json").read_text())
    assert found["state"]["step"] == step
    assert step == 1 or r2 == -1.0


@pytest.mark.parametrize("how", ["medium", "high", "highest", "tf32", "ieee"])
def test_how_matrices_are_multiplied_is_left_as_it_was(how: str) -> None:
    """Set by either of torch's two ways, of which the older one fails once it differs from the newer."""
    products, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    if how in ("tf32", "ieee"):
        products.fp32_precision = how
    else:
        torch.set_float32_matmul_precision(how)
    try:
        known = matmul_precision(), products.fp32_precision
        with rounded_products(), rounded_products():
            assert products.fp32_precision == "tf32"
        with pytest.raises(ZeroDivisionError), rounded_products():
            raise ZeroDivisionError
        assert (matmul_precision(), products.fp32_precision) == known
    finally:
        torch.set_float32_matmul_precision("highest")
        products.fp32_precision = before


def test_stacks_cover_every_matrix() -> None:
    for settings in ({}, {"mlp": "swiglu"}, {"attention": "kl"}):
        model = tiny("vanilla", **settings)
        covered: dict[str, int] = {}
        for s in stacks(model):
            assert isinstance(s, Stack)
            covered[s.name] = covered.get(s.name, 0) + s.count * s.rows
        wanted = {n: p.shape[0] for n, p, role in named_roles(model) if role is Role.MATRIX}
        assert covered == wanted
