"""A norm on the oracles' answers: identities to the bit, counts, refusals. Its transcription is that of all extras."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import stepformer as sf
from helpers import copy_shared, shake, tiny, tokens
from stepformer.base.errors import ConfigError
from stepformer.model.roles import Role, named_roles
from stepformer.oracles import fresh_call

NORMED: dict[str, Any] = {"output_norm": True, "output_norm_gain": 0.05}


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_equals_its_equation(norm: str) -> None:
    """x' = x + s .* norm(T(x)), written out."""
    model, ids = shake(tiny(output_norm=True, norm=norm, n_layer=3)), tokens()
    x, call = model.start(ids, fresh_call(ids).positions).x, fresh_call(ids)
    for block in model.blocks:
        for turn in ("attn", "mlp"):
            g = block.ask((turn,), x, call=call)
            mean = g.mean(-1, keepdim=True) if norm == "layernorm" else 0.0
            deviation = ((g - mean).square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt()
            x = x + block.extras.value(f"output_gain_{turn}") * (g - mean) / deviation
    # two orders of the same few operations in fp64
    assert (model(ids).logits - model.head(x)).abs().max() <= 1e-12


@pytest.mark.parametrize("splitting", ["lie-trotter", "parallel"])
def test_a_velocity_that_forgets_is_its_norm(splitting: str) -> None:
    """Heavy ball with beta = 0 and gamma = 1: v' = LN_v(g), x' = x + v', to the bit."""
    gd = shake(tiny(splitting=splitting, **NORMED))
    ball = tiny("hb", splitting=splitting)
    copy_shared(gd, ball)
    with torch.no_grad():
        for own, other in zip(ball.blocks, gd.blocks, strict=True):
            own.coefficients.pin("beta", 0.0)
            own.coefficients.pin("gamma", 1.0)
            for key, norm in own.aux_norms.items():
                gain = "output_gain" if splitting == "parallel" else f"output_gain_{key}"
                norm.weight.copy_(other.extras.get_parameter(gain))
    assert torch.equal(ball(tokens()).logits, gd(tokens()).logits)


def test_a_larger_answer_makes_no_longer_step() -> None:
    """Ten times the output layers: the same function, up to norm_eps."""
    model = tiny(**NORMED, norm_eps=1e-14)
    before = model(tokens()).logits
    with torch.no_grad():
        for block in model.blocks:
            block.attn.out.weight.mul_(10.0)
            block.mlp.down.weight.mul_(10.0)
    # the squares of answers are 1e-4 and more here, norm_eps is 1e-10 of that
    assert (model(tokens()).logits - before).abs().max() <= 1e-8


def test_gains_are_those_of_a_norm() -> None:
    model = tiny(**NORMED)
    gains = {name: (p, role) for name, p, role in named_roles(model) if "output_gain" in name}
    assert len(gains) == 2 * len(model.blocks)
    for p, role in gains.values():
        assert role == Role.NORM
        assert torch.equal(p, torch.full_like(p, 0.05))


@pytest.mark.parametrize(("settings", "count"), [({}, 18_432), ({"splitting": "parallel"}, 9_216)])
def test_counts_at_small(settings: dict[str, Any], count: int) -> None:
    plain = sf.build("vanilla", size="small", device="meta", **settings).num_parameters()
    assert (
        sf.build("vanilla", size="small", device="meta", output_norm=True, **settings).num_parameters() - plain == count
    )


def test_refusals_and_what_is_not_the_function() -> None:
    with pytest.raises(ConfigError, match="integrates the fields of its attention"):
        tiny("symp-exp-euler", output_norm=True)
    with pytest.raises(ConfigError, match="output_norm_gain"):
        tiny(output_norm=True, output_norm_gain=0.0)
    assert tiny(output_norm_gain=0.3).config.hash == tiny().config.hash
    assert tiny(output_norm=True, output_norm_gain=0.3).config.hash != tiny(output_norm=True).config.hash


def test_a_rule_with_scale_hears_the_scaled_norm() -> None:
    """A velocity is kicked by s_scale (s .* norm(T)): at a scale of 0 nothing of the answer is left."""
    model = shake(tiny("hb", **NORMED, scale="rezero"))
    with torch.no_grad():
        for block in model.blocks:
            for turn in ("attn", "mlp"):
                block.extras.get_parameter(f"scale_{turn}").zero_()
    ids = tokens()
    s = model.start(ids, fresh_call(ids).positions)
    x, v = s.x, s.v
    for block in model.blocks:
        for turn in ("attn", "mlp"):
            v = F.layer_norm(block.coefficients.values()[turn].beta * v, v.shape[-1:], block.aux_norms[turn].weight)
            x = x + v
    assert (model(ids).logits - model.head(x)).abs().max() <= 1e-12
