"""Quadratics of a parameter step: against loops, against measured changes, against matrices that move alone."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import stepformer as sf
from draws import seeded
from helpers import shake, tiny, tokens
from stepformer.base.errors import InputError
from stepformer.model.roles import Role, named_roles
from stepformer.optim.trust import Change, change, local, moved, observe, row_change, stream_change, tangent
from stepformer.optim.trust.changes import bounded
from transcriptions import trust_layers
from transcriptions import trust_region as naive

IDS, TARGETS = tokens(3, 8), tokens(3, 8, seed=5)
HEADS, WIDTH = 3, 12
ATTENTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "rmsnorm": {"norm": "rmsnorm"},
    "entropy": {"attention": "entropy"},
    "entropy-head": {"attention": "entropy", "target": "head"},
    "entropy-token": {"attention": "entropy", "target": "token"},
    "kl": {"attention": "kl"},
    "floor": {"attention": "entropy", "constraint": "floor", "ratio": 0.6, "tau": 0.25},
    "previous": {"attention": "kl", "prior": "previous", "ratio": 0.05},
    "carried": {"attention": "kl", "prior": "carried", "ratio": 0.05},
    "learned": {"attention": "kl", "prior": "learned"},
    "rotary": {"positions": "rotary", "qk_norm": True, "value_residual": "unit", "mlp": "swiglu"},
    "documents": {"document_separator": 0},
}


def model_with(**options: Any) -> sf.Model:
    return shake(tiny("vanilla", **options))


def draw(model: sf.Model, scale: float = 1.0, seed: int = 3) -> dict[str, Tensor]:
    """A random change of every parameter that is trained."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return {
        n: scale * torch.randn(p.shape, generator=seeded(seed + i), dtype=p.dtype) for i, (n, p) in enumerate(named)
    }


def of_length(model: sf.Model, eta: float) -> dict[str, Tensor]:
    """A random step, as long as the prediction says eta."""
    direction = draw(model, 1e-4)
    scale = eta / tangent(model, IDS, direction).total().sqrt().item()
    return {name: scale * value for name, value in direction.items()}


def ratios(model: sf.Model, *etas: float) -> list[tuple[float, float]]:
    """How far measured / predicted is from 1 along one direction: of the total, and of the worst head or stream."""
    direction, before = draw(model, 1e-4), observe(model, IDS)
    predicted = tangent(model, IDS, direction, at=before)
    total, found = predicted.total().item(), []
    for eta in etas:
        scale = eta / math.sqrt(total)
        with moved(model, direction, scale):
            measured = change(before, observe(model, IDS))
        parts = [measured.kl / predicted.kl, *(measured.rms[b] / predicted.rms[b] for b in predicted.rms)]
        worst = max((part / scale**2 - 1).abs().nan_to_num().max().item() for part in parts if part.numel())
        found.append((abs(measured.total().item() / (scale**2 * total) - 1), worst))
    return found


# Single rows and streams, by loops.


def naive_row(a: list[float], s: list[float], ds: list[float], beta: float, active: bool) -> float:
    """beta^2/2 [Var_a(ds) - Cov_a(ds, s)^2 / Var_a(s)], the second term where the constraint decides."""

    def covariance(x: list[float], y: list[float]) -> float:
        mean_x, mean_y = (sum(p * v for p, v in zip(a, z, strict=True)) for z in (x, y))
        return sum(p * (v - mean_x) * (w - mean_y) for p, v, w in zip(a, x, y, strict=True))

    found = covariance(ds, ds)
    if active:
        found -= covariance(ds, s) ** 2 / covariance(s, s)
    return beta**2 / 2 * found


@pytest.mark.parametrize("kind", ["softmax", "entropy", "kl", "floor"])
def test_rows_are_those_of_the_loops(kind: str) -> None:
    seen = observe(model_with(**ATTENTIONS[kind]), IDS)
    activity = set()
    for rows in seen.rows:
        ds = torch.randn(rows.scores.shape, generator=seeded(1), dtype=torch.float64)
        found = row_change(rows, ds)
        for h, i in itertools.product(range(HEADS), range(8)):
            beta, active = rows.beta[1, h, i].item(), bool(rows.active[1, h, i])
            activity.add(active)
            row = [t[1, h, i, : i + 1].tolist() for t in (rows.weights, rows.scores, ds)]
            scale = beta**2 * sum(change**2 for change in row[2])  # of what cancels
            assert found[1, h, i].item() == pytest.approx(naive_row(*row, beta, active), rel=1e-9, abs=1e-12 * scale)
            if not active and i:
                assert beta == {"softmax": 1, "floor": 4}[kind]
    assert activity == ({False} if kind == "softmax" else {False, True})


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_streams_are_those_of_the_loops(norm: str) -> None:
    seen = observe(model_with(norm=norm), IDS)
    assert [(stream.layer, stream.branch) for stream in seen.streams] == [
        (0, "attn"),
        (0, "mlp"),
        (1, "attn"),
        (1, "mlp"),
    ]
    stream = seen.streams[2]
    dx = torch.randn(stream.x.shape, generator=seeded(2), dtype=torch.float64)
    h, away = 1e-6, []
    for sign in (1, -1):
        x = stream.x[1, 5] + sign * h * dx[1, 5]
        x = x - x.mean() if norm == "layernorm" else x
        away.append(x / torch.sqrt((x * x).sum() / WIDTH + stream.eps))
    expected = ((away[0] - away[1]) / (2 * h)).square().mean().item()
    assert stream_change(stream, dx)[1, 5].item() == pytest.approx(expected, rel=1e-7)
    # without the radial term
    outside = dx[1, 5] - dx[1, 5].mean() if norm == "layernorm" else dx[1, 5]
    assert expected < outside.square().mean().item() / stream.square[1, 5].item()


@pytest.mark.parametrize("kind", ["entropy", "kl", "floor", "previous"])
def test_nothing_happens_along_the_scores(kind: str) -> None:
    """A constraint takes the scale of the scores away: queries twice as long give the same rows."""
    model = model_with(**ATTENTIONS[kind])
    seen = observe(model, IDS)
    rows = seen.rows[0]
    whole = rows.beta.square() * (rows.weights * rows.scores.square()).sum(dim=-1)
    assert (row_change(rows, 0.3 * rows.scores)[rows.active] <= 1e-13 * whole[rows.active]).all()
    weight = model.blocks[0].attn.qkv.weight
    step = {"blocks.0.attn.qkv.weight": torch.cat([weight.detach()[:WIDTH], torch.zeros(2 * WIDTH, WIDTH)])}
    with moved(model, step):
        after = observe(model, IDS).rows[0]
    still = rows.active & after.active
    assert still.any()
    assert (after.log_weights - rows.log_weights)[still].abs().max() <= 1e-8
    if kind != "floor":
        assert change(seen, observe(model, IDS)).total() == 0
        assert tangent(model, IDS, step).kl[0].max() < 1e-16


# The whole network.


@pytest.mark.parametrize(
    "kind", [k if i % 3 == 0 else pytest.param(k, marks=pytest.mark.slow) for i, k in enumerate(ATTENTIONS)]
)
def test_predicted_is_measured_at_small_steps(kind: str) -> None:
    """Within 1 % at eta = 1e-3; the median of three, as two scores of a constrained row may just change places."""
    models = (shake(tiny("vanilla", seed=seed, **ATTENTIONS[kind]), 0.1, seed=seed) for seed in range(3))
    near, nearer = zip(*(ratios(model, 1e-3, 1e-5) for model in models), strict=True)
    assert statistics.median(total for total, _ in near) < 1e-2
    assert statistics.median(total for total, _ in nearer) < 2e-4
    assert statistics.median(worst for _, worst in nearer) < 2e-3


def test_the_predicted_loss_is_that_of_the_gradient() -> None:
    model = model_with()
    step = draw(model, 1e-4)
    gradients = torch.autograd.grad(model(IDS, TARGETS).loss, [dict(model.named_parameters())[name] for name in step])
    slope = sum((g * d).sum().item() for g, d in zip(gradients, step.values(), strict=True))
    predicted = tangent(model, IDS, step, targets=TARGETS).loss
    assert predicted is not None
    assert predicted.item() == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize(
    "name", ["gd-euler", "tmm", "verlet-ama", "imex-k2-mam", "symplectic-euler", "adam", "linear", "symp-ab2"]
)
def test_other_rules_are_served(name: str) -> None:
    model = shake(tiny(name))
    (near, _), (nearer, _) = ratios(model, 1e-3, 1e-5)
    assert near < 0.05
    assert nearer < 1e-3
    assert len(observe(model, IDS).rows) == (0 if name in ("linear", "symp-ab2") else sum(model.attention_calls()))


@pytest.mark.parametrize("kind", ["softmax", "entropy", "carried"])
def test_some_rows_are_those_of_all(kind: str) -> None:
    model = model_with(**ATTENTIONS[kind])
    whole, some = observe(model, IDS, TARGETS), observe(model, IDS, rows=[3, 6])
    assert torch.allclose(whole.loss, model(IDS, TARGETS).loss, rtol=1e-12)
    for one, other in zip(whole.rows, some.rows, strict=True):
        assert torch.allclose(one.weights[:, :, [3, 6]], other.weights, rtol=0, atol=1e-12)
    for one, other in zip(whole.streams, some.streams, strict=True):
        assert torch.equal(one.normalised[:, [3, 6]], other.normalised)
    step = draw(model, 1e-4)
    alone = tangent(model, IDS, step, rows=[3, 6])
    assert alone.kl.isfinite().all()
    assert not torch.allclose(alone.kl, tangent(model, IDS, step).kl)


def test_fp32_predicts_what_fp64_does() -> None:
    model = model_with(attention="entropy")
    step = of_length(model, 1e-2)
    exact = tangent(model, IDS, step).total().item()
    rounded = tangent(model.float(), IDS, {name: value.float() for name, value in step.items()}).total().item()
    assert rounded == pytest.approx(exact, rel=5e-2)


# Single matrices.


def alone(name: str, step: dict[str, Tensor], part: str, head: int | None) -> dict[str, Tensor]:
    """One matrix of a step: of a head, if there is one, or of a gated MLP."""
    value, found = step[name], torch.zeros_like(step[name])
    if head is not None:
        begin = "qkv".index(part) * WIDTH + head * WIDTH // HEADS
        found[begin : begin + WIDTH // HEADS] = value[begin : begin + WIDTH // HEADS]
        return {name: found}
    pieces = {"gate": slice(0, len(value) // 2), "up": slice(len(value) // 2, None), "": slice(None)}
    found[pieces[part]] = value[pieces[part]]
    return {name: found}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mlp": "swiglu", "norm": "rmsnorm", "alpha": 0.5, "beta": 0.7},
        {"attention": "entropy", "positions": "rotary", "qk_norm": True, "learned_steps": True},
        {"attention": "kl", "prior": "carried", "ratio": 0.05, "value_residual": "unit"},
    ],
)
def test_matrices_that_move_alone(options: dict[str, Any]) -> None:
    model = model_with(**options)
    step = {n: v for n, v in draw(model, 1e-6).items() if model.roles()[n] is Role.MATRIX}
    before = observe(model, IDS)
    found = local(model, IDS, step, lambda_attn=0.7)
    gated = options.get("mlp") == "swiglu"
    assert len(found) == 2 * (7 if gated else 6)
    for key, value in found.items():
        name, _, part = key.partition(".weight")
        part, layer = part.removeprefix("."), int(key.split(".")[1])
        for head in range(HEADS) if part in ("q", "k", "v") else (None,):
            with moved(model, alone(f"{name}.weight", step, part, head)):
                after = change(before, observe(model, IDS))
            if part in ("q", "k"):
                measured = 0.7 * after.kl[layer, head or 0] / HEADS
            else:
                measured = after.rms["attn" if ".attn." in key else "mlp"][layer]
            expected = value if head is None else value[head]
            assert measured.item() == pytest.approx(expected.item(), rel=2e-3), (key, head)


def test_shared_matrices_count_in_every_layer() -> None:
    model = model_with(weight_sharing="oracles")
    found = local(model, IDS, draw(model, 1e-3))
    assert {name.split(".")[0] for name in found} == {"shared"}
    assert found["shared.attn.qkv.weight.q"].shape == (HEADS,)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("tmm", {}, "template = 'gd'"),
        ("gd-euler", {}, "splitting = 'lie-trotter'"),
        ("linear", {}, "has no rows"),
        ("vanilla", {"embedding_skip": True}, "changes x between the layers"),
    ],
)
def test_what_single_matrices_do_not_know(name: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        local(tiny(name, **options), IDS, {})


# The transcription of a whole network, one row after the other.

TRANSCRIBED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax": ({}, {"norm": "layernorm"}),
    "gated": (
        {"mlp": "swiglu", "norm": "rmsnorm", "positions": "rotary", "alpha": 0.5, "beta": 0.7},
        {"mlp": "swiglu", "rotary": True, "alpha": 0.5, "b": 0.7},
    ),
    "entropy": ({"attention": "entropy"}, {"norm": "layernorm", "attention": "entropy", "ratio": 0.5}),
    "kl": ({"attention": "kl", "norm": "rmsnorm"}, {"attention": "kl", "ratio": 0.1}),
    "floor": (
        {**ATTENTIONS["floor"], "norm": "rmsnorm"},
        {"attention": "floor", "ratio": 0.6, "tau": 0.25},
    ),
}


def in_groups(parameters: Mapping[str, Tensor], layer: int) -> dict[str, Any]:
    """Weights of a layer, or a step of them, as the transcription names them."""
    own = {name.removeprefix(f"blocks.{layer}."): p.detach() for name, p in parameters.items()}
    found: dict[str, Any] = {}
    for name, stacked in zip(("W_Q", "W_K", "W_V"), own["attn.qkv.weight"].chunk(3), strict=True):
        found[name] = list(stacked.chunk(HEADS))
    found["W_O"] = list(own["attn.out.weight"].chunk(HEADS, dim=1))
    *gate, found["W_up"] = own["mlp.up.weight"].split(own["mlp.down.weight"].shape[1])
    found |= {"W_down": own["mlp.down.weight"], **({"W_gate": gate[0]} if gate else {})}
    return found | {name: own[f"{name}.weight"] for name in ("attn_norm", "mlp_norm") if f"{name}.weight" in own}


def transcribed(model: sf.Model, rule: dict[str, Any]) -> list[trust_layers.Layer]:
    x = list(model.start(IDS[:1], torch.arange(8)).x[0].detach())
    layers = []
    for layer in range(2):
        layers.append(trust_layers.run_layer(x, in_groups(dict(model.named_parameters()), layer), rule))
        x = layers[-1].x_m
    return layers


@pytest.mark.parametrize("kind", TRANSCRIBED)
def test_all_of_it_is_as_transcribed(kind: str) -> None:
    options, rule = TRANSCRIBED[kind]
    model, rule = model_with(norm_eps=1e-12, **options), {**rule, "eps": 1e-12, "lambda_attn": 0.7}
    step = {n: v for n, v in draw(model, 1e-3).items() if model.roles()[n] is Role.MATRIX}
    ids, at = IDS[:1], transcribed(model, rule)
    before = observe(model, ids)
    with moved(model, step):
        after, measured = transcribed(model, rule), change(before, observe(model, ids)).total(0.7)
    assert measured.item() == pytest.approx(naive.measured_change(at, after).item(), rel=1e-6)
    h, both_ways = 1e-3, []
    for sign in (1, -1):
        with moved(model, step, sign * h):
            both_ways.append(transcribed(model, rule))
    expected = naive.predicted_change(at, *both_ways, h).item()
    assert tangent(model, ids, step).total(0.7).item() == pytest.approx(expected, rel=1e-4)
    found = local(model, ids, step, lambda_attn=0.7)
    for number, layer in enumerate(at):
        dW, attn, none = in_groups(step, number), f"blocks.{number}.attn", [None] * HEADS
        for h in range(HEADS):
            only = [[dW[name][h] if head == h else None for head in range(HEADS)] for name in ("W_Q", "W_K", "W_V")]
            numbers = [
                naive.exact_attention(layer, only[0], none),
                naive.exact_attention(layer, none, only[1]),
                naive.exact_attention_stream(layer, only[2], none),
            ]
            ours = [found[f"{attn}.qkv.weight.{part}"][h].item() for part in "qkv"]
            assert ours == pytest.approx([n.item() for n in numbers], rel=1e-5, abs=1e-18)
        mlp = f"blocks.{number}.mlp"
        numbers = [
            naive.exact_attention_stream(layer, none, dW["W_O"]),
            naive.exact_mlp_stream(layer, None, dW["W_down"]),
            naive.exact_mlp_stream(layer, dW["W_up"], None),
        ]
        keys = [f"{attn}.out.weight", f"{mlp}.down.weight", f"{mlp}.up.weight"]
        if "W_gate" in dW:
            numbers.append(naive.exact_mlp_stream(layer, None, None, dW["W_gate"]))
            keys[2:] = [f"{mlp}.up.weight.up", f"{mlp}.up.weight.gate"]
        assert [found[key].item() for key in keys] == pytest.approx([n.item() for n in numbers], rel=1e-5)


# Nothing is left behind.


def test_a_look_leaves_the_model_as_it_is() -> None:
    model = model_with(attention="kl", prior="previous")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    logits = model(IDS).logits
    tangent(model, IDS, draw(model, 1e-2), targets=TARGETS)
    local(model, IDS, draw(model, 1e-2))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(model(IDS).logits, logits)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert "attend" not in vars(model.blocks[0].attn)
    assert "logits_of" not in vars(model)
    assert all(p.requires_grad for _, p, role in named_roles(model) if role is Role.MATRIX)


def test_a_step_of_another_model_is_refused() -> None:
    with pytest.raises(InputError, match="no parameter of this model"):
        tangent(tiny(), IDS, {"blocks.9.attn.qkv.weight": torch.zeros(1)})


def test_the_total_counts_heads_once() -> None:
    found = Change(torch.tensor([[1.0, 3.0]]), {"attn": torch.tensor([0.5]), "mlp": torch.tensor([0.25])}, None)
    assert found.total(2.0).item() == pytest.approx(2 * 2 + 0.75)
    assert math.isfinite(Change(torch.zeros(1, 0), {"both": torch.tensor([0.5])}, None).total().item())


def test_one_row_does_not_decide_a_mean() -> None:
    """A constrained row counts at most so many quartiles of its head and sequence; rows of softmax as they are."""
    kl = torch.ones(len(IDS), HEADS, IDS.shape[1]).double()
    kl[1, 2, 5] = 1e9
    constrained, softmax = (observe(model_with(**ATTENTIONS[kind]), IDS).rows[0] for kind in ("entropy", "softmax"))
    found = bounded(constrained, kl, 100.0)
    assert found[1, 2, 5] == 100
    assert (found == kl).sum() == kl.numel() - 1
    assert torch.equal(bounded(softmax, kl, 100.0), kl)
    kl[..., :5] = 0.0  # most rows have two keys or fewer
    assert bounded(constrained, kl, 100.0)[..., 5:].min() == 1
    assert torch.equal(bounded(constrained, kl, None), kl)


def test_bounded_rows_are_the_exact_ones_where_none_stands_out() -> None:
    model = model_with(attention="entropy")
    step = of_length(model, 1e-3)
    for key, value in local(model, IDS, step, largest=1e6).items():
        torch.testing.assert_close(value, local(model, IDS, step)[key], rtol=0, atol=0)
    assert any(
        not torch.equal(local(model, IDS, step, largest=1.0)[key], value)
        for key, value in local(model, IDS, step).items()
    )
