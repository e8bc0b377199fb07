"""What acts around a layer or a turn: scaled residuals, DenseFormer, U-shaped skips.

Transcriptions agree to 1e-11 of the largest entry in fp64, values and gradients; identities hold to the bit.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import stepformer as sf
from helpers import copy_shared, shake, tiny, tokens
from stepformer.extras.scaled import layer_scale
from stepformer.model.engines import describe
from stepformer.model.roles import Role
from stepformer.oracles import fresh_call
from transcriptions import rivals

CLOSE = 1e-11
KINDS = ("rezero", "layerscale", "scalar")
AROUND: dict[str, dict[str, Any]] = {
    **{kind: {"scale": kind} for kind in KINDS},
    "denseformer": {"denseformer": True},
    "dilated": {"denseformer": True, "dilation": 2},
    "periodic": {"denseformer": True, "period": 2, "dilation": 3},
    "unet": {"unet": True},
    "all": {"scale": "scalar", "denseformer": True, "unet": True},
}


def same_gradients(model: sf.Model, independent: Tensor, ids: Tensor, targets: Tensor) -> None:
    """Values and gradients of a model against logits of its own parameters by another way."""
    output = model(ids, targets)
    assert (output.logits - independent).abs().max() <= CLOSE * output.logits.abs().max()
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    ours = torch.autograd.grad(output.loss, list(parameters.values()))
    loss = F.cross_entropy(independent.flatten(0, 1), targets.flatten())
    theirs = torch.autograd.grad(loss, list(parameters.values()))
    largest = max(float(g.abs().max()) for g in theirs)
    for name, a, b in zip(parameters, ours, theirs, strict=True):
        assert (a - b).abs().max() <= CLOSE * largest, name


def oracles_of(model: sf.Model, ids: Tensor) -> list[rivals.Function]:
    """Every oracle call of gradient descent under Lie-Trotter, each behind its norm."""
    call = fresh_call(ids)
    return [partial(block.ask, (turn,), call=call) for block in model.blocks for turn in ("attn", "mlp")]


def blocks_of(model: sf.Model, ids: Tensor) -> list[rivals.Function]:
    asked = oracles_of(model, ids)
    return [lambda x, i=i: rivals.vanilla(x, asked[2 * i : 2 * i + 2]) for i in range(len(model.blocks))]


def by_transcription(model: sf.Model, ids: Tensor) -> Tensor:
    config = model.config
    x = model.start(ids, fresh_call(ids).positions).x
    learned = [dict(block.extras.named_parameters()) for block in model.blocks]
    if config.denseformer:
        alpha = {i: {int(k[6:]): p for k, p in own.items()} for i, own in enumerate(learned, start=1)}
        x = rivals.denseformer(x, blocks_of(model, ids), alpha, config.dilation, config.period)
    elif config.unet:
        skips = [own["skip_unet"] for own in reversed(learned) if "skip_unet" in own]
        x = rivals.unet(x, blocks_of(model, ids), skips)
    else:
        calls = [
            {"s": own[f"scale_{turn}"], **({"a": own[f"keep_x_{turn}"]} if config.scale == "scalar" else {})}
            for own in learned
            for turn in ("attn", "mlp")
        ]
        x = rivals.scaled(x, oracles_of(model, ids), calls)
    return model.head(x)


@pytest.mark.parametrize("n_layer", [4, 5])
@pytest.mark.parametrize("name", [name for name in AROUND if name != "all"])
def test_equals_transcription(name: str, n_layer: int) -> None:
    model, ids = shake(tiny(n_layer=n_layer, **AROUND[name])), tokens()
    same_gradients(model, by_transcription(model, ids), ids, tokens(seed=1))


def test_a_velocity_is_kicked_by_scaled_answers_and_followed_from_scaled_x() -> None:
    """Nesterov: v' = LN_v(beta v + gamma s g(x + mu v)), x' = a x + v'."""
    model, ids = shake(tiny("yurii", scale="scalar", n_layer=3)), tokens()
    s = model.start(ids, fresh_call(ids).positions)
    x, v = s.x, s.v
    for block in model.blocks:
        own, around = block.coefficients.values(), block.extras
        for turn in ("attn", "mlp"):
            c = own[turn]
            g = block.ask((turn,), x + c.mu * v, call=fresh_call(ids))
            v = block.aux_norms[turn](c.beta * v + c.gamma * (around.value(f"scale_{turn}") * g))
            x = around.value(f"keep_x_{turn}") * x + v
    same_gradients(model, model.head(x), ids, tokens(seed=1))


def test_an_update_is_scaled_behind_its_norm() -> None:
    """Adam: x' = x + s gamma LN_u(m' / (sqrt(s') + eps)): at s = 0 a layer changes nothing."""
    model = tiny("adam", scale="rezero")
    ids = tokens()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model.head(model.start(ids, fresh_call(ids).positions).x))


@pytest.mark.parametrize("n_layer", [2, 3, 5])
@pytest.mark.parametrize("template", ["gd", "nesterov", "adam"])
@pytest.mark.parametrize(
    "settings",
    [{"scale": "scalar"}, {"denseformer": True}, {"denseformer": True, "period": 2}, {"unet": True, "unet_start": 0.0}],
    ids=str,
)
def test_at_their_start_they_are_nothing(settings: dict[str, Any], template: str, n_layer: int) -> None:
    """a = s = 1, alpha_ii = 1 and others 0, skips of 0: to the bit, after everything else has been moved."""
    plain = shake(tiny(template=template, n_layer=n_layer))
    other = tiny(template=template, n_layer=n_layer, **settings)
    copy_shared(plain, other)
    assert torch.equal(plain(tokens()).logits, other(tokens()).logits)


def test_rezero_and_layerscale_start_at_their_numbers() -> None:
    assert [layer_scale(n) for n in (1, 18, 19, 24, 25)] == [0.1, 0.1, 1e-5, 1e-5, 1e-6]
    for name, value in (("rezero", 0.0), ("layerscale", 0.1)):
        (attn, mlp) = (tiny(scale=name).blocks[1].extras.get_parameter(f"scale_{turn}") for turn in ("attn", "mlp"))
        assert attn.shape == mlp.shape == ((1,) if name == "rezero" else (12,))
        assert (attn == value).all()
    deep = tiny(scale="layerscale", n_layer=19, d_model=3)
    assert (deep.blocks[18].extras.get_parameter("scale_mlp") == 1e-5).all()


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        *(({"scale": kind}, count) for kind, count in zip(KINDS, (24, 18_432, 48), strict=True)),
        ({"scale": "rezero", "splitting": "parallel"}, 12),
        ({"denseformer": True}, 90),
        ({"denseformer": True, "dilation": 4, "period": 5}, rivals.denseformer_count(12, 4, 5)),
        ({"unet": True}, 6),
        ({"unet": True, "n_layer": 11}, 5),
    ],
    ids=str,
)
def test_counts_at_small(settings: dict[str, Any], count: int) -> None:
    """All of them coefficients, which do not decay."""
    without = {key: settings[key] for key in ("splitting", "n_layer") if key in settings}
    model, plain = sf.build("vanilla", device="meta", **settings), sf.build("vanilla", device="meta", **without)
    assert model.num_parameters() - plain.num_parameters() == count
    others = plain.roles().keys()
    assert {role for name, role in model.roles().items() if name not in others} == {Role.COEFFICIENT}


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("symp-ab2", {"scale": "rezero"}, "integrates the fields"),
        ("imex-k1-ama", {"scale": "scalar"}, "moves x once"),
        ("symplectic-euler", {"scale": "scalar"}, "moves x once"),
        ("vanilla", {"scale": "half"}, "scale"),
        ("vanilla", {"unet": True, "n_layer": 1}, "no halves"),
        ("vanilla", {"denseformer": True, "dilation": 13}, "nothing would be averaged"),
        ("vanilla", {"denseformer": True, "period": 13}, "nothing would be averaged"),
        ("vanilla", {"denseformer": True, "period": 0}, "period"),
    ],
)
def test_refusals(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(sf.ConfigError, match=words):
        sf.model_config(name, **settings)


@pytest.mark.parametrize("hook", ["enter", "leave", "drifting", "values"])
@pytest.mark.usefixtures("registries")
def test_an_extra_that_acts_on_x_needs_a_template_that_carries_its_tokens_in_x(hook: str) -> None:
    sf.register_extra("test-hook", equation="x = x")(type("Own", (sf.Extra,), {hook: lambda self, s, *others: s}))
    tiny("yurii", extras=["test-hook"])
    refused = pytest.raises(sf.ConfigError, match="'test-hook' acts on x, and template 'attnres' carries its tokens in")
    with contextlib.nullcontext() if hook == "values" else refused:
        tiny("attnres", extras=["test-hook"])


def test_two_parts_of_a_layer_name_no_coefficient_alike(registries: None) -> None:
    def beta(self: sf.Extra) -> dict[str, Any]:
        return {"beta": sf.free(0.0)}

    sentence = "The template 'nesterov' and the extra 'test-beta' both name a coefficient 'beta': call yours otherwise."
    for method in ("coefficients", "turn_coefficients"):
        sf.register_extra("test-beta", equation="x = x")(type("Beta", (sf.Extra,), {method: beta}))
        with pytest.raises(sf.StepformerError) as refused:
            sf.build("yurii", size="tiny", extras=["test-beta"])
        assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("method", "kind"), [("start", "dict"), ("enter", "State"), ("leave", "State"), ("drifting", "State")]
)
def test_what_an_extra_returns_is_checked(method: str, kind: str, registries: None) -> None:
    bad = {method: lambda self, s, *c: torch.zeros(1)}
    sf.register_extra("test-return", equation="x = x")(type("Bad", (sf.Extra,), bad))
    model = sf.build("yurii", size="tiny", n_layer=1, extras=["test-return"])
    with pytest.raises(sf.StepformerError, match=rf"^Bad\.{method}\(\) returns a Tensor; it should be a {kind}\.$"):
        model(torch.zeros(1, 4, dtype=torch.long))


def test_what_an_extra_remembers(registries: None) -> None:
    """What it writes before a layer is there after it, as fused passes have it; two extras share no name."""

    class Keeps(sf.Extra):
        def start(self, x: Tensor) -> dict[str, Tensor]:
            return {"kept": x}

        def enter(self, s: sf.State, c: sf.Values) -> sf.State:
            s.memory["kept"] = s.x
            return s

        def leave(self, s: sf.State, c: sf.Values) -> sf.State:
            return s.replace(x=s.x + 0.5 * s.memory["kept"])

    sf.register_extra("test-keeps", equation="x = x + x before / 2")(Keeps)
    sf.register_extra("test-again", equation="x = x + x before / 2")(type("Again", (Keeps,), {}))
    model, plain = (shake(tiny("vanilla", extras=extras)) for extras in (["test-keeps"], []))
    s, t = (m.start(tokens(), torch.arange(tokens().shape[1])) for m in (model, plain))
    call = fresh_call(tokens())
    for block, other in zip(model.blocks, plain.blocks, strict=True):
        expected = other(t, call).x + 0.5 * t.x
        s = block(s, call)
        assert torch.equal(s.x, expected)
        t = t.replace(x=expected)
    assert s.memory["kept"] is not s.x
    both = tiny("vanilla", extras=["test-keeps", "test-again"])
    with pytest.raises(sf.InputError, match="'test-keeps' and 'test-again' both remember something as 'kept'"):
        both(tokens())


def test_settings_of_what_is_off_do_not_change_the_hash() -> None:
    plain = sf.model_config("vanilla")
    assert plain.replace(dilation=2, period=3, unet_start=0.0).hash == plain.hash
    assert plain.replace(denseformer=True, dilation=2).hash != plain.replace(denseformer=True).hash


@pytest.mark.parametrize("settings", AROUND.values(), ids=AROUND)
def test_engines_know_them(settings: dict[str, Any]) -> None:
    for name in ("vanilla", "yurii", "nesterov-euler", "verlet-ama"):
        model = sf.build(name, device="meta", value_residual="free", embedding_skip=True, **settings)
        assert all(how.startswith("fused") for how in describe(model).values())


@pytest.mark.parametrize("settings", AROUND.values(), ids=AROUND)
def test_hybrids_keep_them(settings: dict[str, Any]) -> None:
    """Plain layers are scaled, averaged and skipped like the others: all plain, it is gradient descent with them."""
    momentum = shake(tiny("yurii", n_layer=4, **settings))
    plain = tiny(n_layer=4, **settings)
    copy_shared(momentum, plain)
    found, expected = momentum.hybrid(layers=[])(tokens()).logits, plain(tokens()).logits
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("settings", AROUND.values(), ids=AROUND)
def test_checkpointing_recomputes_the_same(settings: dict[str, Any]) -> None:
    """What layers hand on outside x survives: values and gradients."""
    models = [tiny("yurii", n_layer=4, activation_checkpointing=on, **settings).train() for on in (False, True)]
    ids, targets = tokens(), tokens(seed=1)
    slopes = []
    for model in map(shake, models):
        model(ids, targets).loss.backward()
        slopes.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(slopes[0]) == len(slopes[1])
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-15) for a, b in zip(*slopes, strict=True))


def test_coefficients_are_told() -> None:
    model = tiny(scale="layerscale", d_model=96, denseformer=True, n_head=3)
    told = model.coefficients()[0]
    assert told["rms(scale_attn)"] == pytest.approx(0.1)
    assert told["alpha_0"] == 0.0
    assert told["alpha_1"] == 1.0
