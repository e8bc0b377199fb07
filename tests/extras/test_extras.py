"""Constrained attention in a model, and the extras: value residual, embedding skip, soft cap, QK-norm, documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import stepformer as sf
from draws import seeded
from helpers import copy_shared, shake, tiny, tokens
from stepformer.oracles import fresh_call
from stepformer.oracles.norms import make_norm

EXACT = 1e-12  # two fp64 evaluations of one function in different order


def same(a: sf.Model, b: sf.Model, tolerance: float = EXACT) -> bool:
    with torch.no_grad():
        return bool((a(tokens()).logits - b(tokens()).logits).abs().max() <= tolerance)


def pair(first: dict[str, Any], second: dict[str, Any]) -> tuple[sf.Model, sf.Model]:
    """Two architectures with equal values in all parameters they share."""
    a, b = shake(tiny(**first)), shake(tiny(**second), seed=1)
    copy_shared(a, b)
    return a, b


def test_kl_with_uniform_prior_is_entropy() -> None:
    """D = ln t - H: radius 0.3 ln t is entropy 0.7 ln t."""
    assert same(*pair({"name": "kl", "ratio": 0.3}, {"name": "entropy", "ratio": 0.7}))


def test_an_inactive_floor_is_softmax() -> None:
    floor, plain = pair({"name": "entropy-floor", "ratio": 0.001}, {"name": "vanilla", "norm": "rmsnorm"})
    assert same(floor, plain, 1e-11)


def test_a_floor_of_kl() -> None:
    """With a uniform prior it is that of the entropy, h = (1 - r) ln t; some rows are held, others are not."""
    kl, entropy = {"name": "kl", "ratio": 0.05}, {"name": "entropy", "ratio": 0.95}
    assert same(*pair({**kl, "constraint": "floor"}, {**entropy, "constraint": "floor"}))
    floor, equality = pair({**kl, "constraint": "floor"}, kl)
    held = torch.cat([layer["beta"][0] for layer in floor.observe(tokens())])[..., 1:] < 1
    assert 0.05 < held.double().mean() < 0.95
    assert not same(floor, equality, 1e-6)


def test_a_learned_prior() -> None:
    """It starts at the uniform one. A head whose table falls by c with every token adds -c (i - j) to its logits: with
    an inactive floor that is softmax attention with a linear bias. What lies beyond the context is no part of it.
    """
    start = tiny("kl", prior="learned")
    assert all(not block.attn.prior_table.any() for block in start.blocks)
    assert start.blocks[0].attn.prior_table.shape == (3, 8)
    learned, uniform = pair({"name": "kl", "prior": "learned"}, {"name": "kl"})
    assert not same(learned, uniform, 1e-6)
    for block in learned.blocks:
        block.attn.prior_table.data.zero_()
    assert same(learned, uniform, 1e-11)

    model = shake(tiny("kl", prior="learned", constraint="floor", ratio=0.999, n_layer=1, context=12))
    attn, u = model.blocks[0].attn, 0.1 * torch.randn(1, 8, 12, generator=seeded(5), dtype=torch.float64)
    slopes, steps = torch.tensor([0.1, 1.0, -0.3], dtype=torch.float64), torch.arange(12)
    attn.prior_table.data = -slopes[:, None] * steps
    q, k, v = (t.unflatten(-1, (3, -1)).transpose(1, 2) for t in attn.qkv(u).chunk(3, dim=-1))
    away = steps[:8, None] - steps[:8]
    logits = q @ k.mT / 2 - slopes[:, None, None] * away
    expected = logits.masked_fill(away < 0, -torch.inf).softmax(dim=-1) @ v
    found = attn(u, fresh_call(tokens(1, 8)))
    assert (found - attn.out(expected.transpose(1, 2).flatten(-2))).abs().max() < 1e-11


@pytest.mark.parametrize(("keep", "other"), [(1.0, "kl-previous"), (0.0, "kl")])
def test_the_carried_prior_lies_between(keep: float, other: str) -> None:
    carried, limit = pair({"name": "kl-carried"}, {"name": other})
    assert not same(carried, limit, 1e-6)
    carried.pin_coefficients(keep=keep)
    assert same(carried, limit, 1e-11)


def test_a_chain_of_previous_priors_accumulates_logits() -> None:
    """a_l = softmax(sum of beta_i s_i): recompute the second layer's weights from both layers' scores."""
    model = shake(tiny("kl-previous", n_head=1, ratio=0.05))
    seen: dict[str, torch.Tensor] = {}
    handles = [
        block.attn.qkv.register_forward_hook(lambda m, a, out, i=i: seen.__setitem__(f"qkv{i}", out))
        for i, block in enumerate(model.blocks)
    ]
    ids = tokens()
    betas = [layer["beta"][0] for layer in model.observe(ids)]
    logits = 0.0
    for i, beta in enumerate(betas):
        q, k, _ = seen[f"qkv{i}"].chunk(3, dim=-1)
        logits = logits + beta[:, 0, :, None] * (q @ k.mT / 12**0.5)
    visible = torch.ones(8, 8, dtype=torch.bool).tril()
    weights = torch.softmax(logits.masked_fill(~visible, -torch.inf), dim=-1)
    values = seen["qkv1"].chunk(3, dim=-1)[2]
    expected = F.linear(weights @ values, model.blocks[1].attn.out.weight)
    got: list[torch.Tensor] = []
    handles.append(model.blocks[1].attn.register_forward_hook(lambda m, a, out: got.append(out)))
    model(ids)
    for handle in handles:
        handle.remove()
    assert (got[0] - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_scale_of_the_scores_does_not_matter() -> None:
    """Doubling W_Q leaves entropy-constrained attention as it is."""
    model, twin = shake(tiny("entropy")), shake(tiny("entropy"))
    with torch.no_grad():
        for block in twin.blocks:
            block.attn.qkv.weight[:12] *= 2
    assert same(model, twin, 1e-11)


def test_unreachable_targets_are_reported() -> None:
    """A ratio near 0 asks for more sharpness than beta_max gives; at 0.9 every row but the first is reachable."""
    ids = tokens()
    hard = shake(tiny("entropy", ratio=1e-30)).observe(ids)
    easy = shake(tiny("entropy", ratio=0.9)).observe(ids)
    assert hard[0]["capped_rows"][0] > 0.5
    assert all(layer["capped_rows"][0] == 0 for layer in easy)


def test_observations_are_one_per_call() -> None:
    """Also where queries are treated some at a time: the same numbers, (B, H, T)."""
    whole, pieces = (shake(tiny("kl", query_chunk=c)).observe(tokens()) for c in (0, 3))
    for a, b in zip(whole, pieces, strict=True):
        assert [t.shape for t in b["beta"]] == [(2, 3, 8)]
        assert torch.allclose(a["beta"][0], b["beta"][0])
        assert a["capped_rows"] == b["capped_rows"]


def test_gainless_norm_is_the_projection_on_the_sphere() -> None:
    """Idempotent, blind to scale, and no point of the unit-RMS sphere is closer to x."""
    norm = make_norm("rmsnorm", 12, eps=1e-30)
    x = torch.randn(5, 12, generator=seeded(0), dtype=torch.float64)
    on = norm(x)
    assert torch.allclose(norm(on), on, rtol=1e-14)
    assert torch.allclose(norm(7.3 * x), on, rtol=1e-14)
    others = torch.randn(4000, 12, generator=seeded(1), dtype=torch.float64)
    others = others / others.square().mean(dim=-1, keepdim=True).sqrt()
    nearest = (others[None] - x[:, None]).norm(dim=-1).min(dim=1).values
    assert bool(((on - x).norm(dim=-1) < nearest).all())
    assert list(norm.parameters()) == []


def test_a_residual_step_minimises_its_proximal_problem() -> None:
    """x' = x + alpha g is where |z - x|^2 / (2 alpha) - <g, z>, a convex function of z, has slope zero."""
    model = shake(tiny("vanilla", alpha=0.3, n_layer=1))
    s = model.start(tokens(), torch.arange(8))
    call = fresh_call(tokens())
    g = model.blocks[0].ask(("attn",), s.x, call=call)
    turn = model.blocks[0].turns(fresh_call(tokens()))["attn"]
    z = turn.take(s).x.detach().requires_grad_()
    objective = (z - s.x.detach()).square().sum() / (2 * 0.3) - (g.detach() * z).sum()
    (slope,) = torch.autograd.grad(objective, z)
    assert slope.abs().max() <= 1e-12


@pytest.mark.parametrize("name", ["vanilla", "verlet-ama", "adam", "linear", "entropy", "kl-carried"])
def test_neutral_extras_change_nothing(name: str) -> None:
    """lambda = 0 and an embedding skip of [1, 0] are the model without them."""
    plain, extra = pair({"name": name}, {"name": name, "value_residual": "free", "embedding_skip": True})
    extra.pin_coefficients(lambda_v=0.0, skip_x=1.0, skip_x0=0.0)
    assert same(plain, extra)
    extra.pin_coefficients(lambda_v=0.5)
    assert not same(plain, extra, 1e-6)


def test_value_tables_add_to_the_values_of_every_layer() -> None:
    """lambda = 0 is the model without them; what they add is as a bias of the values where all tokens are alike."""
    plain, tabled = pair({"name": "vanilla", "bias": True}, {"name": "value-tables", "bias": True})
    tabled.pin_coefficients(lambda_table=0.0)
    assert same(plain, tabled)
    tabled.unpin_coefficients()
    assert not same(plain, tabled, 1e-3)
    tables = tabled.aux_embed["value_tables"]
    with torch.no_grad():
        tables.pos_emb.weight.zero_()
        tables.tok_emb.weight.copy_(tables.tok_emb.weight[:1].expand(11, -1))
        for values, mine, theirs in zip(tabled.coefficients(), tabled.blocks, plain.blocks, strict=True):
            theirs.attn.qkv.bias.copy_(mine.attn.qkv.bias)
            theirs.attn.qkv.bias[24:] += values["lambda_table"] * tables.tok_emb.weight[0]
    assert same(plain, tabled)


def test_values_of_the_first_layer_reach_the_others() -> None:
    """lambda = 1: the second layer gathers the first layer's values; its own value map has no effect."""
    model = shake(tiny("vanilla", value_residual="unit"))
    model.pin_coefficients(lambda_v=1.0)
    before = model(tokens()).logits
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[24:] += 1.0
    assert torch.equal(model(tokens()).logits, before)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[24:] += 1.0
    assert not torch.equal(model(tokens()).logits, before)


def test_the_first_lambda_is_declared_unused_unless_it_acts() -> None:
    model = tiny("vanilla", value_residual="free")
    assert model.unused_parameters() == ["blocks.0.extras.lambda_v"]
    assert ["lambda_v" in values for values in model.coefficients()] == [False, True]
    assert tiny("verlet-ama", value_residual="free").unused_parameters() == []  # its second call blends with the first


def test_soft_cap_bounds_the_logits_everywhere() -> None:
    plain, capped = pair({"name": "vanilla"}, {"name": "vanilla", "logit_softcap": 0.5})
    logits, expected = capped(tokens()).logits, 0.5 * torch.tanh(plain(tokens()).logits / 0.5)
    assert torch.allclose(logits, expected, rtol=1e-14)
    assert logits.abs().max() < 0.5
    loss = capped(tokens(), tokens(seed=1)).loss
    assert loss is not None
    assert loss.item() == pytest.approx(F.cross_entropy(expected.flatten(0, 1), tokens(seed=1).flatten()).item())
    half = tiny("vanilla", logit_softcap=30.0, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert half(tokens()).logits.dtype == torch.float32


@pytest.mark.parametrize("name", ["vanilla", "yurii", "verlet-ama", "entropy-token", "kl-carried", "symp-etd-ab2"])
def test_a_document_does_not_see_the_one_before(name: str) -> None:
    """With rotary positions, which are relative, a packed document equals the same document alone."""
    model = shake(tiny(name, positions="rotary", n_head=2, document_separator=0, context=16, norm="layernorm"))
    first, second = torch.tensor([[3, 1, 4]]), torch.tensor([[0, 5, 9, 2, 6]])
    packed = torch.cat([first, second], dim=1)
    assert (model(packed).logits[:, 3:] - model(second).logits).abs().max() <= 1e-11
    alone = tiny(name, positions="rotary", n_head=2, context=16, norm="layernorm")
    copy_shared(model, alone)
    assert (alone(packed).logits[:, 3:] - model(second).logits).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["linear", "linear-symp-conformal-euler"])
def test_a_linear_state_restarts_with_the_document(name: str) -> None:
    model = shake(tiny(name, document_separator=0, context=16))
    with torch.no_grad():
        for tables in (model.embed, *model.aux_embed.values()):
            tables.pos_emb.weight.zero_()
    first, second = torch.tensor([[3, 1, 4]]), torch.tensor([[0, 5, 9, 2, 6]])
    packed = torch.cat([first, second], dim=1)
    assert (model(packed).logits[:, 3:] - model(second).logits).abs().max() <= 1e-11


def test_qk_norm_is_blind_to_the_scale_of_queries_and_keys() -> None:
    model, twin = (shake(tiny("vanilla", qk_norm=True)) for _ in range(2))
    with torch.no_grad():
        for block in (*model.blocks, *twin.blocks):
            block.attn.qkv.weight[:24] *= 1e3
        for block in twin.blocks:
            block.attn.qkv.weight[:24] *= 3
    # up to the norm's epsilon, 1e-5 beside mean squares of queries and keys of about 1e6
    assert same(model, twin, 1e-8)
    assert not same(*pair({"name": "vanilla"}, {"name": "vanilla", "qk_norm": True}), 1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "vanilla", "value_residual": "unit", "embedding_skip": True},
        {"name": "kl-carried", "value_residual": "fixed"},
        {"name": "value-tables", "template": "tables"},
        {"name": "symp-etd-ab2", "embedding_skip": True},
        {"name": "linear-symp-ab2"},
        {"name": "entropy-token", "query_chunk": 3},
    ],
    ids=str,
)
def test_checkpointing_recomputes_what_layers_hand_on(settings: dict[str, Any]) -> None:
    """The oracles' memory (x_0, v_1, priors) and the integrators' history survive recomputation: equal gradients."""
    plain, again = (shake(tiny(**settings, activation_checkpointing=on)).train() for on in (False, True))
    for model in (plain, again):
        loss = model(tokens(), tokens(seed=1)).loss
        assert loss is not None
        loss.backward()
    for (name, a), b in zip(plain.named_parameters(), again.parameters(), strict=True):
        if a.grad is not None:
            assert b.grad is not None, name
            assert torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"logit_softcap": 0.0}, "above 0"),
        ({"document_separator": 99_999}, "no id of a vocabulary"),
        ({"value_residual": "half"}, "value_residual"),
        ({"attention": "entropy", "ratio": 1.0}, "strictly between 0 and 1"),
        ({"attention": "kl", "ratio": 0.0}, "strictly between 0 and 1"),
        ({"splitting": "parallel", "beta": 2.0}, "leave beta out"),
        ({"prior": "previous"}, "has no meaning here"),
        ({"attention": "kl", "prior": "learned", "detach_prior": True}, "detach_prior = true would leave the table"),
        ({"embedding_skip": True, "embedding_skip_start": float("nan")}, "finite"),
    ],
    ids=str,
)
def test_bad_settings(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(sf.ConfigError) as caught:
        sf.model_config("vanilla", **settings)
    assert any(sentence in problem for problem in caught.value.problems)


def test_coefficients_of_heads_are_named_and_pinned() -> None:
    model = tiny("kl-carried", target="head", ratio=0.2)
    assert model.coefficients()[0] == pytest.approx({"r[0]": 0.2, "r[1]": 0.2, "r[2]": 0.2})  # nothing to keep yet
    assert model.coefficients()[1] == pytest.approx(
        {"r[0]": 0.2, "r[1]": 0.2, "r[2]": 0.2, "keep[0]": 0.5, "keep[1]": 0.5, "keep[2]": 0.5}
    )
    model.pin_coefficients(layer=1, r=0.4)
    assert model.coefficients()[1]["r[2]"] == pytest.approx(0.4)
