"""What a recipe says, by hand: schedules, sharpness-aware steps, weight decay, clipping, Scion's start."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draws import seeded
from helpers import tiny
from stepformer.base.errors import ConfigError, InputError
from stepformer.model.roles import Role, declare
from stepformer.optim import OptimConfig, Optimizers, Schedule, global_norm, scion_init
from stepformer.training.config import RunConfig, run_config
from stepping import METHODS, batch_of, both_recipes, roles_of, trainable
from transcriptions import optimizers as naive

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
        ({"lr_head": 101}, "lr_head = 101 is no sensible rate"),
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


def test_an_untied_head_has_its_own_rate() -> None:
    """Unset it has that of the tables, decay too; Scion steps it by signs; a tied head has none to set."""
    model = tiny("vanilla", head="untied")

    def group(**settings: Any) -> dict[str, Any]:
        optimizers = Optimizers(model, OptimConfig(**settings), 10)
        (found,) = (group for group in optimizers.groups() if group["role"] == "head")
        assert found["params"] == [model.lm_head.weight]
        assert "lr_head" in OptimConfig(**settings).rates_text() or not settings.get("lr_head")
        return found

    assert (group()["peak"], group()["weight_decay"]) == (6e-4, 0.1)
    assert (group(lr_embedding=0.3)["peak"], group(wd_embedding=0.0)["weight_decay"]) == (0.3, 0.0)
    own = group(lr_embedding=0.3, lr_head=0.002, wd_head=0.5)
    assert (own["peak"], own["weight_decay"]) == (0.002, 0.5)
    assert group(name="scion", lr_head=1)["geometry"] == "sign"
    for key in ("lr_head", "wd_head"):
        with pytest.raises(ConfigError, match=f"{key} needs .model. head = 'untied'"):
            run_config("vanilla", **{key: 0.1})
    assert run_config("vanilla", head="untied", lr_head=0.1).optim.rate("head") == 0.1
    with pytest.raises(ConfigError, match="output_init = 'zero'"):
        run_config("vanilla", name="scion", own_init=True, output_init="zero")


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


def test_a_loop_that_leaves_out_what_a_step_needs_is_told() -> None:
    model = tiny()
    opt = Optimizers(model, OptimConfig(sam="decay", schedule="wsd", decay_start=1), 4)
    x, y = batch_of(0)
    model(x, y).loss.backward()
    opt.clip()
    opt.step(0)
    with pytest.raises(InputError, match=r"Step 1 is sharpness-aware .* `before = optimizers\.perturb\(\)`"):
        opt.step(1)
    with pytest.raises(InputError, match=r"optim\.sam = 'decay' needs the number of the step: call step\(t\)\."):
        opt.step()
    opt.restore(opt.perturb())
    opt.step(1)
    with pytest.raises(InputError, match="Step 2 is sharpness-aware"):  # each one needs its own
        opt.step(2)
    with pytest.raises(InputError, match=r"step\('2'\): give the number"):
        Optimizers(model, OptimConfig(), 4).step("2")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"the limit is the setting optim\.clip"):
        opt.clip(1.0)  # type: ignore[arg-type]


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
@pytest.mark.parametrize("qkv", ["fused", "split", "heads"])
def test_scion_start(qkv: str, geometry: str) -> None:
    model = tiny("yurii")
    before, roles = trainable(model), roles_of(model)
    scion_init(model, OptimConfig(name="scion", own_init=True, qkv=qkv, embedding_geometry=geometry))
    for n, p in model.named_parameters():
        w = p.detach()
        if roles[n] == "matrix":
            count = {"fused": 1, "split": 3, "heads": 3 * model.config.n_head}[qkv]
            for part in naive.parts_of(w, count if n.endswith("qkv.weight") else 1):
                wanted = math.sqrt(part.shape[0] / part.shape[1])
                assert float(torch.linalg.matrix_norm(part, 2)) == pytest.approx(wanted, rel=1e-9)
        elif roles[n] == "embedding":
            assert (w.square().mean(dim=1).sqrt() - 1).abs().max() < 1e-9
            if geometry == "sign":
                assert torch.equal(w, before[n].sign())
        else:
            assert torch.equal(w, before[n])


# Converged polar factors, which Scion and PolarGrad take unless told otherwise.


def test_polar_methods_when_unset() -> None:
    """Muon keeps its five steps; a run that was stored without the word keeps them, too, whatever its optimizer."""
    unset = {name: OptimConfig(name=name).polar for name in ("muon", "adamw", "scion", "polargrad")}
    converged = {"scion": "polar-express", "polargrad": "polar-express"}
    assert unset == {"muon": "newton-schulz", "adamw": "newton-schulz"} | converged
    for name, method in converged.items():
        run = run_config("vanilla", [f"optim.name={name}"])
        stored = run.to_dict()
        assert stored["optim"]["polar"] == method
        assert RunConfig.from_dict(stored) == run
        for old in ({**stored["optim"], "polar": "newton-schulz"}, without(stored["optim"], "polar")):
            again = RunConfig.from_dict({**stored, "optim": old})
            assert again.optim.polar == "newton-schulz"
            assert RunConfig.from_dict(again.to_dict()) == again


def without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k != key}


def scion_excess(**settings: Any) -> float:
    """The largest |W|_2 / (radius sqrt(out/in)) of any matrix in 60 steps that all go one way, from Scion's start."""
    model = tiny("yurii", dtype=torch.float32)
    config = OptimConfig(name="scion", radius=1.0, lr=0.2, schedule="constant", warmup=0, own_init=True, **settings)
    scion_init(model, config)
    opt = Optimizers(model, config, 60)
    matrices = [p.detach() for n, p in model.named_parameters() if roles_of(model)[n] == "matrix"]
    x, y = batch_of(0)
    model(x, y).loss.backward()  # the same gradient ever after: weights go to the border of the ball
    worst = 0.0
    for t in range(60):
        opt.step(t)
        norms = [float(torch.linalg.matrix_norm(p, 2)) / math.sqrt(p.shape[0] / p.shape[1]) for p in matrices]
        worst = max(worst, *norms)
    return worst


def test_scion_stays_in_its_ball_by_default() -> None:
    """W <- (1 - lr/r) W - lr sqrt(out/in) polar(M) keeps |W|_2 <= r sqrt(out/in); five Newton-Schulz steps do not."""
    assert 0.999 < scion_excess() < 1 + 1e-4  # fp32: polar factors err by 1e-5
    assert 0.999 < scion_excess(polar="svd") < 1 + 1e-5
    assert scion_excess(polar="newton-schulz") > 1.1


def test_polargrad_takes_the_nuclear_norm_by_default() -> None:
    """Its step along M is |M|_* polar(M), so that <M, step> = |M|_*^2; five Newton-Schulz steps find 0.83 to 0.86 of
    |M|_*, twice.
    """

    def share(**settings: Any) -> float:
        model = nn.Linear(256, 128, bias=False)
        start, grad = model.weight.detach().clone(), torch.randn(128, 256, generator=seeded(0))
        model.weight.grad = grad.clone()
        config = OptimConfig(name="polargrad", lr=1.0, momentum=0.0, schedule="constant", warmup=0, **settings)
        Optimizers(model, config, 10).step(0)
        nuclear = torch.linalg.svdvals(grad.double()).sum()
        return math.sqrt(((start - model.weight.detach()).double() * grad).sum() / nuclear**2)

    assert share() == pytest.approx(1.0, abs=1e-4)
    assert share(polar="svd") == pytest.approx(1.0, abs=1e-5)
    assert 0.8 < share(polar="newton-schulz") < 0.9
