"""Parameter optimizers: schedules by hand, polar factors, Muon against torch, all of them against naive fp64 code."""

from __future__ import annotations

import contextlib
import importlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import stepformer as sf
from helpers import tiny, tokens
from stepformer import kernels
from stepformer.errors import ConfigError, InputError
from stepformer.optim import (
    LmoOptimizer,
    OptimConfig,
    Optimizers,
    Schedule,
    global_norm,
    lmo,
    polar,
    recordings,
    scion_init,
)
from stepformer.optim.polar import quintics
from stepformer.optim.recordings import MOST, Recordings
from stepformer.roles import Role, declare, named_roles, stacked_parts
from transcriptions import optimizers as naive

polar_file = importlib.import_module("stepformer.optim.polar")  # the function of its name hides it

METHODS = ("newton-schulz", "polar-express", "svd")
SAFETY = 1.01  # the Polar Express quintics are stored as p(x / 1.01)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_values(rows: int, cols: int, values: list[float], seed: int = 0) -> Tensor:
    """A random matrix with these singular values, the rest zero."""
    k = len(values)
    u, v = torch.linalg.qr(normal(rows, k, seed=seed))[0], torch.linalg.qr(normal(cols, k, seed=seed + 1))[0]
    return u @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ v.T


# Schedules. The numbers are worked out by hand.


@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        # 0.1 + 0.45 (1 + cos(pi (t-10)/100)): pi/4 at 35, pi/2 at 60, 3 pi/5 at 70, 3 pi/4 at 85
        ({"warmup": 10}, 110, {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 35: 0.868198051533946, 60: 0.55, 70: 0.41094235253}),
        ({"warmup": 10}, 110, {85: 0.231801948466054, 110: 0.1}),
        ({"warmup": 10, "legacy_warmup": True}, 110, {0: 0.0, 1: 0.1, 5: 0.5, 9: 0.9, 10: 1.0, 60: 0.55}),
        ({"warmup": 10, "floor": 0.0}, 110, {0: 0.1, 10: 1.0, 60: 0.5, 85: 0.146446609406726}),
        ({"warmup": 0}, 100, {0: 1.0, 50: 0.55}),
        ({"warmup": 0, "legacy_warmup": True}, 100, {0: 1.0, 50: 0.55}),
        ({}, 1000, {0: 0.01, 49: 0.5, 99: 1.0, 100: 1.0, 550: 0.55}),  # a tenth: W = 100
        (
            {"schedule": "wsd", "warmup": 1000, "decay_start": 8300},
            10_000,
            {0: 0.001, 8299: 1.0, 8300: 1.0, 9150: 0.55},
        ),
        ({"schedule": "wsd", "warmup": 1000, "decay_start": 8300}, 10_000, {8810: 0.73, 9999: 0.100529411764706}),
        ({"schedule": "wsd"}, 30_000, {2999: 1.0, 25_000: 1.0, 25_001: 0.99982, 27_500: 0.55, 29_999: 0.10018}),
        ({"schedule": "wsd"}, 100, {82: 1.0, 83: 1.0, 84: 1 - 0.9 / 17}),  # 83.33 -> 83
        ({"schedule": "wsd"}, 10, {7: 1.0, 8: 1.0, 9: 0.55}),  # 8.33 -> 8
        ({"schedule": "wsd"}, 11, {8: 1.0, 9: 1.0, 10: 0.55}),  # 9.17 -> 9
        ({"schedule": "wsd"}, 22, {18: 1.0, 19: 0.775, 21: 0.325}),  # 18.33 -> 18, in steps of 0.225
        ({"schedule": "wsd", "floor": 0.0, "decay_start": 6}, 10, {6: 1.0, 7: 0.75, 8: 0.5, 9: 0.25}),
        ({"schedule": "constant", "warmup": 4}, 20, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 19: 1.0}),
    ],
)
def test_schedule_by_hand(settings: dict[str, Any], steps: int, expected: dict[int, float]) -> None:
    schedule = Schedule(OptimConfig(**settings), steps)
    for t, value in expected.items():
        assert schedule.factor(t) == pytest.approx(value, abs=1e-11), t  # the digits written above


def test_momentum_warmup_by_hand() -> None:
    schedule = Schedule(OptimConfig(momentum_warmup=500), 2000)
    for t, value in {0: 0.85, 1: 0.8502, 100: 0.87, 250: 0.9, 499: 0.9498, 500: 0.95, 1999: 0.95}.items():
        assert schedule.momentum(t) == pytest.approx(value, abs=1e-14), t
    assert Schedule(OptimConfig(), 2000).momentum(0) == 0.95
    other = Schedule(OptimConfig(momentum=0.9, momentum_start=0.5, momentum_warmup=4), 10)
    assert [other.momentum(t) for t in range(5)] == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9], abs=1e-14)


def test_when_sam_perturbs() -> None:
    def steps(**settings: Any) -> list[int]:
        schedule = Schedule(OptimConfig(**settings), 12)
        return [t for t in range(12) if schedule.perturbs(t)]

    assert steps() == []
    assert steps(schedule="wsd") == []
    assert steps(sam="always") == list(range(12))
    assert steps(sam="always", schedule="wsd") == list(range(12))
    assert steps(sam="decay", schedule="wsd") == [10, 11]
    assert steps(sam="decay", schedule="wsd", decay_start=7) == [7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"schedule": "wsd", "decay_start": 101}, "decay_start = 101 should lie between the end of the warm-up, 10,"),
        ({"schedule": "wsd", "decay_start": 9}, "decay_start = 9 should lie between the end of the warm-up, 10,"),
        ({"schedule": "wsd", "warmup": 40, "decay_start": 39}, "between the end of the warm-up, 40,"),
        ({"warmup": 101}, "warmup = 101 is longer than the run of 100 steps"),
        ({"schedule": "constant", "warmup": 101}, "warmup = 101 is longer than the run of 100 steps"),
        ({"sam": "decay"}, "sam = 'decay' needs schedule = 'wsd'"),
        ({"sam": "decay", "schedule": "constant"}, "sam = 'decay' needs schedule = 'wsd'"),
        ({"decay_start": 50}, "decay_start belongs to schedule = 'wsd'"),
        ({"beta1": 1.0}, "beta1 = 1.0 should be below 1"),
        ({"beta2": 1.5}, "beta2 = 1.5 should be below 1"),
        ({"momentum": 1}, "momentum = 1 should be below 1"),
        ({"momentum_start": 2.0}, "momentum_start = 2.0 should be below 1"),
        ({"floor": 1.5}, "floor = 1.5 should be at most 1"),
        ({"eps": 0.0}, "eps = 0.0 should be above 0"),
        ({"lr": -0.1}, "lr = -0.1 should be at least 0"),
        ({"lr_norm": float("nan")}, "lr_norm = nan is not finite"),
        ({"name": "moun"}, "Did you mean 'muon'?"),
        ({"schedule": "cosin"}, "Did you mean 'cosine'?"),
        ({"polar": "newton-shulz"}, "Did you mean 'newton-schulz'?"),
        ({"scaling": "jordon"}, "Did you mean 'jordan'?"),
        ({"qkv": "spit"}, "Did you mean 'split'?"),
        ({"lr_embeding": 1.0}, "Unknown key 'lr_embeding'. Did you mean 'lr_embedding'?"),
        ({"radius": 5.0}, "radius = 5.0 belongs to name = 'scion'"),
        ({"name": "scion", "radius": 5.0, "wd_matrix": 0.1}, "give one of them"),
    ],
)
def test_refusals(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Schedule(OptimConfig.from_dict(settings), 100)
    assert sentence in str(caught.value)


# Polar factors.

CASES: dict[str, Callable[[], Tensor]] = {
    "square": lambda: normal(12, 12),
    "tall": lambda: normal(20, 7),
    "wide": lambda: normal(7, 20),
    "batch": lambda: normal(4, 9, 5),
    "batch of batches": lambda: normal(2, 3, 5, 9),
    "condition 1e4": lambda: with_values(12, 12, torch.logspace(0, -4, 12).tolist()),
    "condition 1e4, wide": lambda: with_values(8, 16, torch.logspace(0, -4, 8).tolist()),
    "rank 3": lambda: with_values(10, 14, [3.0, 2.0, 0.5]),
    "rank 1": lambda: with_values(14, 10, [2.0]),
    "1 x 1": lambda: torch.tensor([[-0.3]], dtype=torch.float64),
    "1 x n": lambda: normal(1, 9),
    "n x 1": lambda: normal(9, 1),
    "large": lambda: 1e6 * normal(6, 8),
    "small": lambda: 1e-6 * normal(6, 8),
    "mixed sizes in a batch": lambda: normal(3, 6, 4) * torch.tensor([1e-5, 1.0, 1e5]).view(3, 1, 1).double(),
}


def each(function: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """One matrix at a time."""
    flat = batch.reshape(-1, *batch.shape[-2:])
    return torch.stack([function(matrix) for matrix in flat]).reshape(batch.shape)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", ["newton-schulz", "polar-express"])
def test_iterations_act_on_singular_values_alone(method: str, case: str) -> None:
    matrix = CASES[case]()
    before = matrix.clone()
    ours = polar(matrix, method, dtype=torch.float64)
    expected = each(lambda m: naive.polar_by_svd(m, quintics(method)), matrix)
    # 5 to 8 fp64 quintics with slopes up to 8.4: a few hundred ulps
    assert (ours - expected).abs().max() < 1e-10
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("case", CASES)
def test_svd_gives_the_polar_factor(case: str) -> None:
    matrix = CASES[case]()
    factor = polar(matrix, "svd", dtype=torch.float64)
    flat, factors = matrix.reshape(-1, *matrix.shape[-2:]), factor.reshape(-1, *matrix.shape[-2:])
    for m, p in zip(flat, factors, strict=True):
        assert (p - naive.polar_by_svd(m)).abs().max() < 1e-10
        values = torch.linalg.svdvals(m)
        if values[-1] > 1e-6 * values[0]:
            gram = p @ p.T if p.shape[0] <= p.shape[1] else p.T @ p
            assert (gram - torch.eye(len(gram), dtype=torch.float64)).abs().max() < 1e-10
        stretch = p.T @ m  # M = P H with H symmetric and positive, trace = nuclear norm
        size = float(values[0])
        assert (stretch - stretch.T).abs().max() < 1e-10 * size
        assert (p @ stretch - m).abs().max() < 1e-10 * size
        assert abs(float(stretch.trace() - values.sum())) < 1e-10 * size * len(values)


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (5, 3), (1, 1), (2, 4, 3)])
@pytest.mark.parametrize("method", METHODS)
def test_polar_of_zero_is_zero(method: str, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(polar(torch.zeros(shape, dtype=dtype), method), torch.zeros(shape, dtype=dtype))


def test_a_zero_in_a_batch_stays_alone() -> None:
    batch = torch.stack([normal(4, 6), torch.zeros(4, 6, dtype=torch.float64), normal(4, 6, seed=1)])
    for method in METHODS:
        factors = polar(batch, method)
        assert torch.equal(factors[1], torch.zeros_like(factors[1]))
        for i in (0, 2):
            assert (factors[i] - polar(batch[i], method)).abs().max() < 1e-12  # batched products may sum in other order


def test_newton_schulz_bounds() -> None:
    assert tuple(quintics("newton-schulz")) == tuple(naive.JORDAN)
    x = torch.logspace(math.log10(3e-3), 0, 100_001, dtype=torch.float64)
    image = naive.compose(quintics("newton-schulz"), x)
    assert image.min() > 0.68
    assert image.max() < 1.21
    # and on a matrix whose Frobenius norm is 1
    values = [0.003, 0.01, 0.1, 0.3]
    values.append(math.sqrt(1 - sum(v * v for v in values)))
    found = torch.linalg.svdvals(polar(with_values(9, 7, values), "newton-schulz"))[:5]
    assert found.min() > 0.68
    assert found.max() < 1.21


def test_polar_express_bounds() -> None:
    x = torch.logspace(-3, 0, 100_001, dtype=torch.float64)
    assert (naive.compose(quintics("polar-express"), x) - 1).abs().max() < 1e-5
    values = [0.001, 0.003, 0.01, 0.1, 0.3]
    values.append(math.sqrt(1 - sum(v * v for v in values)))
    matrix = with_values(6, 11, values)
    found = polar(matrix, "polar-express")
    assert (torch.linalg.svdvals(found) - 1).abs().max() < 1e-5
    assert (found - naive.polar_by_svd(matrix)).norm(2) < 1e-5


def test_polar_express_quintics_are_minimax() -> None:
    """Each is the best odd quintic for 1 on what the ones before it left of [1e-3, 1], before the safety factor.

    Proof by alternation, see `extremes`; a Remez exchange of our own gives the first one again.
    """
    low, high = 1e-3, 1.0
    for i, (a, b, c) in enumerate(quintics("polar-express")):
        best = (a * SAFETY, b * SAFETY**3, c * SAFETY**5)
        if high - low > 1e-3:  # afterwards errors are below 1e-8 and the quintic is the limit (15, -10, 3) / 8
            errors = naive.extremes(best, low, high)
            size = max(map(abs, errors))
            assert len(errors) == 4, i
            # grid of 2e5 points: an extreme is missed by at most curvature * (h/2)^2, 1e-9 of it; 1e-15 is rounding
            assert all(abs(abs(e) - size) < 1e-8 * size + 2e-15 for e in errors), (i, errors)
        else:
            assert torch.allclose(torch.tensor(best), torch.tensor([1.875, -1.25, 0.375]), atol=1e-4)
            size = max(map(abs, naive.extremes(best, low, high)))
        low = float(naive.compose([(a, b, c)], torch.tensor(low, dtype=torch.float64)))
        high = 1 + size
    first = remez(1e-3, 1.0)
    stored = [x * SAFETY**k for x, k in zip(quintics("polar-express")[0], (1, 3, 5), strict=True)]
    assert stored == pytest.approx(first, rel=1e-7)


def remez(low: float, high: float) -> list[float]:
    """Exchange on four points, two of them the ends: solve p(x_i) - 1 = (-1)^(i+1) E, move the inner two to p' = 0."""
    inner = [low + (high - low) / 4, low + 3 * (high - low) / 4]
    a = b = c = 0.0
    for _ in range(60):
        points = torch.tensor([low, *inner, high], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        system = torch.stack([points, points**3, points**5, signs], dim=1)
        a, b, c, _ = torch.linalg.solve(system, torch.ones(4, dtype=torch.float64)).tolist()
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = sorted(math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1))
    return [a, b, c]


@pytest.mark.parametrize("method", METHODS)
def test_polar_dtypes(method: str) -> None:
    matrix = normal(8, 12)
    exact = polar(matrix, method, dtype=torch.float64)
    for given in (torch.float64, torch.float32, torch.bfloat16):
        assert polar(matrix.to(given), method).dtype == given
        assert polar(matrix.to(given), method, dtype=torch.float32).dtype == given
    assert (polar(matrix, method) - exact).abs().max() == 0  # fp64 matrices: fp64 unless told otherwise
    rough = (polar(matrix, method, dtype=torch.float32) - exact).abs().max()
    assert 1e-12 < rough < 3e-5  # really fp32, and fp32 rounding (6e-8) times the slopes of the composition
    assert (polar(matrix.float(), method).double() - exact).abs().max() < 3e-5
    if method != "svd":
        rougher = (polar(matrix.float(), method, dtype=torch.bfloat16).double() - exact).abs().max()
        assert 1e-4 < rougher < 0.1  # bf16 rounds at 4e-3


def test_unknown_polar_method() -> None:
    with pytest.raises(InputError, match="Did you mean 'svd'"):
        polar(torch.eye(2), "svdd")


def test_polar_leaves_no_graph() -> None:
    matrix = nn.Parameter(normal(3, 4))
    opt = LmoOptimizer([{"params": [matrix]}], lr=0.1)
    matrix.grad = normal(3, 4, seed=1)
    opt.step()
    assert matrix.requires_grad
    assert matrix.is_leaf


# Muon against torch.


def precise_newton_schulz(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """In place of torch's bf16 iteration: the same one, right to fp32 rounding."""
    a, b, c = coefficients
    x = grad.double() / max(float(grad.double().norm()), eps)
    for _ in range(steps):
        x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
    return x.to(grad.dtype)


def muon_pair(
    scaling: tuple[str, str], shapes: list[tuple[int, int]], wd: float, nesterov: bool, steps: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(torch's weight, ours, start) after some steps of |W A - C|^2, whose gradients depend on the weights."""
    common: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "nesterov": nesterov, "weight_decay": wd}
    starts = [normal(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate(shapes)]
    inputs = [normal(shape[1], shape[1], seed=50 + i, dtype=torch.float32) for i, shape in enumerate(shapes)]
    goals = [normal(*shape, seed=100 + i, dtype=torch.float32) for i, shape in enumerate(shapes)]
    runs = []
    for make in (
        lambda params: torch.optim.Muon(params, adjust_lr_fn=scaling[0], **common),
        lambda params: LmoOptimizer([{"params": params}], scaling=scaling[1], **common),
    ):
        params = [nn.Parameter(start.clone()) for start in starts]
        opt = make(params)
        for _ in range(steps):
            opt.zero_grad()
            sum(((w @ x - y) ** 2).mean() for w, x, y in zip(params, inputs, goals, strict=True)).backward()
            opt.step()
        runs.append([p.detach() for p in params])
    return list(zip(runs[0], runs[1], starts, strict=True))


MUON = [
    (("original", "jordan"), 0.0, True),
    (("original", "jordan"), 0.1, True),
    (("original", "jordan"), 0.1, False),
    (("match_rms_adamw", "rms"), 0.1, True),
    (("match_rms_adamw", "rms"), 0.0, False),
]


@pytest.mark.parametrize(("scaling", "wd", "nesterov"), MUON)
def test_muon_is_torch_muon(
    scaling: tuple[str, str], wd: float, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", precise_newton_schulz)
    for theirs, ours, start in muon_pair(scaling, [(12, 5), (5, 12), (8, 8), (24, 6)], wd, nesterov, steps=8):
        assert (theirs - ours).abs().max() < 1e-5  # fp32 weights of size 3, eight steps
        assert (theirs - start).abs().max() > 0.1


@pytest.mark.parametrize(("scaling", "wd", "nesterov"), MUON[1:4:2])
def test_muon_is_torch_muon_in_bf16(scaling: tuple[str, str], wd: float, nesterov: bool) -> None:
    for theirs, ours, start in muon_pair(scaling, [(12, 5), (5, 12)], wd, nesterov, steps=3):
        # relative to the distance moved: bf16 rounds at 4e-3, and small singular values amplify it
        assert (theirs - ours).norm() / (theirs - start).norm() < 3e-2


def test_muon_defaults_are_the_recipe() -> None:
    (group,) = LmoOptimizer([{"params": [nn.Parameter(normal(3, 4))]}]).param_groups
    assert group["lr"] == 0.02
    assert group["momentum"] == 0.95
    assert group["nesterov"] is True
    assert group["weight_decay"] == 0.0
    assert group["scaling"] == "jordan"


def test_muon_step_time() -> None:
    params = [nn.Parameter(normal(128, 512, seed=i, dtype=torch.float32)) for i in range(16)]
    opt = LmoOptimizer([{"params": params}])
    for i, p in enumerate(params):
        p.grad = normal(128, 512, seed=100 + i, dtype=torch.float32)
    opt.step()
    medians = []
    while len(medians) < 4 and min(medians, default=1.0) > 0.1:  # again if another process had the cores
        times = []
        for _ in range(5):
            start = time.perf_counter()
            opt.step()
            times.append(time.perf_counter() - start)
        medians.append(sorted(times)[2])
    assert medians[-1] <= 0.1, medians  # 3 GFLOP of products


# All optimizers on a model, against the transcription.

LR = {"matrix": 0.03, "embedding": 0.004, "norm": 0.005, "coefficient": 0.02}
WD = {"matrix": 0.3, "embedding": 0.2, "norm": 0.15, "coefficient": 0.1}
QUINTICS = {"svd": None, "newton-schulz": naive.JORDAN, "polar-express": quintics("polar-express")}
SCALING = {"muon": "jordan", "scion": "spectral", "polargrad": "none", "adamw": "none"}


def both_recipes(
    name: str,
    *,
    polar: str = "svd",
    split: bool = False,
    steps: int = 8,
    wd: dict[str, float] | None = None,
    **other: Any,
) -> tuple[OptimConfig, naive.Recipe]:
    """The same numbers for the library and for the transcription; `other` has keys that both spell alike."""
    decay, table = {**WD, **(wd or {})}, other.pop("table", None)
    scaling = other.pop("scaling", None)
    shared: dict[str, Any] = {
        "warmup": 3, "momentum": 0.9, "momentum_start": 0.6, "momentum_warmup": 4, "clip": 0.5, "floor": 0.2, **other,
    }  # fmt: skip
    config = OptimConfig(
        name=name, polar=polar, qkv="split" if split else "fused", beta1=0.8, beta2=0.9, eps=1e-6,
        lr=LR["matrix"], **{f"lr_{role}": LR[role] for role in LR if role != "matrix"},
        **{f"wd_{role}": value for role, value in decay.items()},
        **({"embedding_geometry": table} if table else {}), **({"scaling": scaling} if scaling else {}), **shared,
    )  # fmt: skip
    recipe = naive.Recipe(
        name=name, lr=LR, wd=decay, steps=steps, betas=(0.8, 0.9), eps=1e-6, quintics=QUINTICS[polar],
        scaling=scaling or SCALING[name], split=split, table=table or "row", **shared,
    )  # fmt: skip
    return config, recipe


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def roles_of(model: nn.Module) -> dict[str, str]:
    return {name: str(role) for name, _, role in named_roles(model)}


def batch_of(t: int) -> tuple[Tensor, Tensor]:
    return tokens(3, seed=2 * t), tokens(3, seed=2 * t + 1)


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
    theirs = naive.Naive(recipe, roles, {n: 3 for n in roles if n.endswith("qkv.weight")})
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
    for role in Role:
        moved = min(float((weights[n] - start[n]).abs().max()) for n, r in roles.items() if r == role)
        assert moved > 1e-4 * LR[role], role
    return worst


# fp64 against fp64: 1e-16 amplified by the polar factor of badly conditioned momenta and by five steps of training.
AGREE = 1e-10


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
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
def test_optimizer_is_its_transcription(settings: dict[str, Any], split: bool) -> None:
    assert compare(**settings, split=split) < AGREE


def test_split_and_fused_differ() -> None:
    """The comparison above could not tell them apart if they did not."""

    def after(qkv: str) -> dict[str, Tensor]:
        model = tiny("yurii")
        opt = Optimizers(model, OptimConfig(qkv=qkv, warmup=0, schedule="constant"), 10)
        x, y = batch_of(0)
        model(x, y).loss.backward()
        opt.step(0)
        return trainable(model)

    fused, split = after("fused"), after("split")
    assert set(stacked_parts(tiny("yurii"))) == {n for n in fused if n.endswith("qkv.weight")}
    for name in fused:
        assert torch.equal(fused[name], split[name]) != name.endswith("qkv.weight")


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


def test_lmo_geometries_by_hand() -> None:
    grad = torch.tensor([[3.0, -4.0], [0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    rms = math.sqrt(12.5)

    def moved(**group: Any) -> Tensor:
        w = nn.Parameter(torch.zeros_like(grad))
        w.grad = grad.clone()
        LmoOptimizer([{"params": [w], **group}], lr=0.5, momentum=0.0, nesterov=False).step()
        return -w.detach() / 0.5

    row = torch.tensor([[3 / rms, -4 / rms], [0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    assert (moved(geometry="row", scaling="none") - row).abs().max() < 1e-12
    assert torch.equal(moved(geometry="sign", scaling="none"), grad.sign())
    # columns (3, 0, 1) and (-4, 0, 1): Gram matrix [[10, -11], [-11, 17]], nuclear norm sqrt(27 + 2 sqrt(49)) = sqrt 41
    plain, nuclear = moved(scaling="none", method="svd"), moved(scaling="none", method="svd", nuclear=True)
    assert (nuclear - math.sqrt(41) * plain).abs().max() < 1e-12
    assert (moved(scaling="jordan", method="svd") - math.sqrt(1.5) * plain).abs().max() < 1e-12
    assert (moved(scaling="spectral", method="svd") - math.sqrt(1.5) * plain).abs().max() < 1e-12
    assert (moved(scaling="rms", method="svd") - 0.2 * math.sqrt(3) * plain).abs().max() < 1e-12


def test_gradients_stay_and_go() -> None:
    model = tiny("yurii")
    opt = Optimizers(model, OptimConfig(), 10)
    x, y = batch_of(0)
    model(x, y).loss.backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    opt.step(0)
    assert all(torch.equal(p.grad, before[n]) for n, p in model.named_parameters())
    opt.zero_grad()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


# Sharpness-aware steps.


class Two(nn.Module):
    """f = a^2/2 + b^2, one parameter a norm and one a coefficient."""

    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([a], dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor([b], dtype=torch.float64))
        declare(self, a=Role.NORM, b=Role.COEFFICIENT)

    def forward(self) -> Tensor:
        return (self.a**2 / 2 + self.b**2).sum()


@pytest.mark.parametrize("clip_coefficients", [True, False])
def test_sam_by_hand(clip_coefficients: bool) -> None:
    model = Two(3.0, 2.0)  # gradient (3, 4), norm 5, whoever takes part in clipping
    opt = Optimizers(model, OptimConfig(sam="always", rho=0.05, clip_coefficients=clip_coefficients), 10)
    model().backward()
    saved = opt.perturb()
    assert model.a.item() == pytest.approx(3.03, abs=1e-12)  # 1e-12 in the denominator moves it by 1e-14
    assert model.b.item() == pytest.approx(2.04, abs=1e-12)
    opt.zero_grad()
    model().backward()
    assert model.a.grad.item() == pytest.approx(3.03, abs=1e-12)
    assert model.b.grad.item() == pytest.approx(4.08, abs=1e-12)
    opt.restore(saved)
    assert (model.a.item(), model.b.item()) == (3.0, 2.0)
    assert model.a.grad.item() == pytest.approx(3.03, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sam_restores_to_the_bit(dtype: torch.dtype) -> None:
    model = tiny("yurii", dtype=dtype)
    start = trainable(model)
    opt = Optimizers(model, OptimConfig(sam="always", rho=0.37), 10)
    x, y = batch_of(0)
    model(x, y).loss.backward()
    saved = opt.perturb()
    moved = {n: not torch.equal(p, start[n]) for n, p in model.named_parameters()}
    assert all(moved.values())
    opt.restore(saved)
    assert all(torch.equal(p, start[n]) for n, p in model.named_parameters())


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


# Weight decay, unused parameters, clipping, Scion's start.


@pytest.mark.parametrize("name", ["muon", "adamw", "scion", "polargrad"])
@pytest.mark.parametrize("method", METHODS)
def test_decay_alone(name: str, method: str) -> None:
    model = tiny("yurii")
    start, roles = trainable(model), roles_of(model)
    config, _ = both_recipes(name, polar=method, schedule="constant", warmup=0)
    opt = Optimizers(model, config, 10)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for t in range(7):
        opt.clip()
        opt.step(t)
    # by hand: (1 - 0.03 0.3)^7, (1 - 0.004 0.2)^7, (1 - 0.005 0.15)^7, (1 - 0.02 0.1)^7
    left = {
        "matrix": 0.938675713,
        "embedding": 0.994413422,
        "norm": 0.994761798,
        "coefficient": 0.986083721,
    }
    for n, p in model.named_parameters():
        assert (p - left[roles[n]] * start[n]).abs().max() <= 1e-9 * start[n].abs().max(), n  # nine digits above


def test_decay_of_a_radius() -> None:
    model = tiny("yurii")
    start, roles = trainable(model), roles_of(model)
    config = OptimConfig(name="scion", lr=0.1, radius=4.0, schedule="constant", warmup=0, polar="svd")
    opt = Optimizers(model, config, 10)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step(0)
    opt.step(1)
    for n, p in model.named_parameters():
        left = 0.950625 if roles[n] == "matrix" else 1.0  # (1 - 0.1/4)^2
        assert (p - left * start[n]).abs().max() < 1e-12


def test_default_decays_follow_the_recipe() -> None:
    wanted = {"muon": (0.0, 0.1), "polargrad": (0.0, 0.1), "adamw": (0.1, 0.1), "scion": (0.0, 0.0)}
    for name, (matrix, embedding) in wanted.items():
        config = OptimConfig(name=name)
        assert (config.decay("matrix"), config.decay("embedding")) == (matrix, embedding)
        assert (config.decay("norm"), config.decay("coefficient")) == (0.0, 0.0)
    recipe = OptimConfig()
    assert [recipe.rate(r) for r in ("matrix", "embedding", "norm", "coefficient")] == [0.02, 6e-4, 6e-4, 3e-3]
    assert (recipe.beta1, recipe.beta2, recipe.eps, recipe.clip, recipe.floor) == (0.9, 0.95, 1e-8, 1.0, 0.1)
    assert OptimConfig(name="adamw").rate("coefficient") == 3e-3


@pytest.mark.parametrize("name", ["muon", "adamw", "scion", "polargrad"])
def test_unused_parameters_are_never_touched(name: str) -> None:
    model = tiny("symplectic-euler")
    unused = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    start = trainable(model)
    assert {roles_of(model)[n] for n in unused} == {"matrix", "norm", "coefficient"}
    opt = Optimizers(model, both_recipes(name)[0].replace(sam="always"), 8)
    x, y = batch_of(0)
    for t in range(3):
        opt.zero_grad()
        model(x, y).loss.backward()
        saved = opt.perturb()
        opt.zero_grad()
        model(x, y).loss.backward()
        opt.restore(saved)
        opt.clip()
        opt.step(t)
    now = dict(model.named_parameters())
    assert all(torch.equal(now[n], value) for n, value in unused.items())
    assert all(now[n].grad is None for n in unused)
    assert all(not torch.equal(now[n], value) for n, value in start.items())
    stepped = {id(p) for group in opt.groups() for p in group["params"]}
    assert stepped == {id(now[n]) for n in start}
    kept = opt.tensors()
    assert kept
    assert not [key for key in kept for n in unused if key.startswith(f"{n}.")]
    assert all(any(key.startswith(f"{n}.") for key in kept) for n in start)


def clip_two(a: float, b: float, **settings: Any) -> tuple[float, float, float]:
    """Norm before, then both gradients after, of gradients (a, b)."""
    model = Two(0.0, 0.0)
    opt = Optimizers(model, OptimConfig(**settings), 10)
    model.a.grad, model.b.grad = torch.full_like(model.a, a), torch.full_like(model.b, b)
    norm = opt.clip()
    return float(norm), model.a.grad.item(), model.b.grad.item()


def test_clip_by_hand() -> None:
    exact = {"abs": 1e-14}
    # 1/(5 + 1e-6) = 0.19999996000000800
    assert clip_two(3.0, 4.0) == pytest.approx((5.0, 0.599999880000024, 0.799999840000032), **exact)
    # coefficients stay out: 1/(3 + 1e-6) = 0.33333322222225926
    assert clip_two(3.0, 4.0, clip_coefficients=False) == pytest.approx((3.0, 0.99999966666677778, 4.0), **exact)
    assert clip_two(-3.0, 4.0, clip=2.5) == pytest.approx((5.0, -1.49999970000006, 1.99999960000008), **exact)
    assert clip_two(0.3, 0.4) == (pytest.approx(0.5, abs=1e-15), 0.3, 0.4)  # nothing to clip: the same bits
    assert clip_two(0.3, 40.0, clip_coefficients=False) == (0.3, 0.3, 40.0)
    assert clip_two(3.0, 4.0, clip=0.0) == (5.0, 3.0, 4.0)
    assert clip_two(0.0, 0.0) == (0.0, 0.0, 0.0)


def test_global_norm_by_hand() -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([[2.0], [4.0]]), torch.tensor(0.0)]
    assert float(global_norm(tensors)) == 5.0


def test_clip_skips_missing_gradients() -> None:
    model = Two(0.0, 0.0)
    opt = Optimizers(model, OptimConfig(), 10)
    model.a.grad = torch.full_like(model.a, 4.0)
    assert float(opt.clip()) == 4.0
    opt.step(0)
    assert model.b.item() == 0.0


@pytest.mark.parametrize("geometry", ["row", "sign"])
@pytest.mark.parametrize("qkv", ["fused", "split"])
def test_scion_start(qkv: str, geometry: str) -> None:
    model = tiny("yurii")
    before, roles = trainable(model), roles_of(model)
    scion_init(model, OptimConfig(name="scion", own_init=True, qkv=qkv, embedding_geometry=geometry))
    for n, p in model.named_parameters():
        w = p.detach()
        if roles[n] == "matrix":
            for part in naive.parts_of(w, 3 if qkv == "split" and n.endswith("qkv.weight") else 1):
                wanted = math.sqrt(part.shape[0] / part.shape[1])
                assert float(torch.linalg.matrix_norm(part, 2)) == pytest.approx(wanted, rel=1e-9)
        elif roles[n] == "embedding":
            assert (w.square().mean(dim=1).sqrt() - 1).abs().max() < 1e-9
            if geometry == "sign":
                assert torch.equal(w, before[n].sign())
        else:
            assert torch.equal(w, before[n])


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


# What a GPU does otherwise: tall matrices from the right, stacks that stay, recorded work.


@pytest.mark.parametrize("method", ["newton-schulz", "polar-express"])
@pytest.mark.parametrize("shape", [(9, 4), (3, 9, 4), (2, 3, 9, 4), (3, 4, 9), (3, 5, 5)])
def test_tall_matrices_from_the_right(monkeypatch: pytest.MonkeyPatch, method: str, shape: tuple[int, ...]) -> None:
    matrix = normal(*shape)
    turned = polar(matrix, method)
    monkeypatch.setattr(polar_file, "stays_tall", lambda matrix: True)
    as_it_is = polar(matrix, method)
    assert as_it_is.is_contiguous()
    assert (as_it_is - turned).abs().max() < 1e-12  # fp64, five or eight steps of a growth of at most 4


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("qkv", ["fused", "split"])
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
        stacked_parts(tiny("yurii")).get(n, 1) if qkv == "split" else 1
        for n, _, role in named_roles(tiny("yurii"))
        if role is Role.MATRIX
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
    plain = Recordings()
    for _ in range(3):
        plain.run("a", 1, lambda: runs.append("plain"), here)
    assert (runs, plain.known) == (["plain"] * 3, {})  # a CPU has no graphs

    monkeypatch.setattr(recordings, "recordable", lambda tensor: True)
    graph, made = Replayed(), []
    recorded = Recordings()
    monkeypatch.setattr(recorded, "_record", lambda work: made.append(1) or graph)
    runs.clear()
    for key in [1, 1, 1, 1, 2, 2, 2, 1]:
        recorded.run("a", key, lambda: runs.append("plain"), here)
    assert (len(runs), len(made), graph.count) == (3, 2, 5)  # each change of the key runs plainly once

    refusing = Recordings()
    refusing.count = MOST
    runs.clear()
    for _ in range(4):
        refusing.run("a", 1, lambda: runs.append("plain"), here)
    assert len(runs) == 4  # work that is not recorded is done all the same
    assert refusing.known["a"].refused


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def cuda_steps(plain: bool, moving: bool, steps: int = 7, **settings: Any) -> tuple[dict[str, Tensor], Optimizers]:
    """Weights and memory after steps along random gradients, and the last norm."""
    model = tiny("yurii", dtype=torch.float32, d_model=128, n_head=2).cuda()
    opt = Optimizers(model, OptimConfig(schedule="wsd", warmup=3, decay_start=5, momentum_warmup=4, **settings), steps)
    generator = torch.Generator("cuda").manual_seed(0)
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
    assert not any(known.graph for known in plain.recordings.known.values())
    graphs = {name for name, known in recorded.recordings.known.items() if known.graph is not None}
    assert graphs == ({"polar 0"} if moving else {"polar 0", "norm", "clip"})
    assert recorded.recordings.count == len(graphs)  # the schedule recorded nothing again
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_a_step_inside_another_recording(device: str) -> None:
    matrix = nn.Parameter(torch.randn(128, 64, device=device))
    matrix.grad = torch.randn_like(matrix)
    opt = LmoOptimizer([{"params": [matrix]}])
    for _ in range(3):
        opt.step()
    assert opt.recordings.known["polar 0"].graph is not None
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
