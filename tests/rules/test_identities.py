"""Identities between special cases (momentum-streams 1.14). Numbers in the names are those of that list.

Two sides that perform the same operations are compared to the bit; others to 1e-12 relative (fp64, reordered sums).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import stepformer as sf
from draws import seeded
from helpers import copy_shared, shake, tiny, tokens
from stepformer.ops.matrix_functions import NEWTON_SCHULZ, inverse_square_root, polar_steps

SPLITTINGS: list[dict[str, Any]] = [
    {"splitting": "lie-trotter"},
    {"splitting": "parallel"},
    {"splitting": "strang", "order": "ama"},
    {"splitting": "strang", "order": "mam"},
]
splitting = pytest.mark.parametrize("how", SPLITTINGS, ids=lambda how: "-".join(how.values()))


def pair(left: str, right: str, **how: Any) -> tuple[sf.Model, sf.Model]:
    a, b = shake(tiny(left, **how)), shake(tiny(right, **how), seed=1)
    copy_shared(a, b)
    return a, b


def assert_equal(a: sf.Model, b: sf.Model, *, exact: bool = False) -> None:
    ids = tokens()
    left, right = a(ids).logits, b(ids).logits
    assert left.isfinite().all()
    if exact:
        assert torch.equal(left, right)
    else:
        assert (left - right).abs().max() <= 1e-12 * left.abs().max()


@splitting
def test_1_tmm_with_nu_1_is_yurii(how: dict[str, Any]) -> None:
    tmm, yurii = pair("tmm", "nesterov", **how)
    tmm.pin_coefficients(nu=1.0)
    assert_equal(tmm, yurii, exact=True)


@splitting
def test_2_without_look_ahead_yurii_is_heavy_ball(how: dict[str, Any]) -> None:
    yurii, heavy_ball = pair("nesterov", "heavy-ball", **how)
    yurii.pin_coefficients(mu=0.0)
    assert_equal(yurii, heavy_ball, exact=True)
    tmm, heavy_ball = pair("tmm", "heavy-ball", **how)
    tmm.pin_coefficients(mu=0.0, nu=1.0)
    assert_equal(tmm, heavy_ball, exact=True)


@splitting
def test_3_adam_without_first_moment_is_rmsprop_and_adamw_without_decay_is_adam(how: dict[str, Any]) -> None:
    adam, rmsprop = pair("adam", "rmsprop", **how)
    adam.pin_coefficients(beta1=0.0)
    assert_equal(adam, rmsprop)
    with torch.no_grad():  # independent of the m table
        adam.aux_embed["m"].tok_emb.weight.normal_()
    assert_equal(adam, rmsprop)
    adamw, adam = pair("adamw", "adam", **how)
    adamw.pin_coefficients(lam=0.0)
    assert_equal(adamw, adam, exact=True)


@splitting
def test_4_without_momentum_muon_is_ortho_and_soap_is_shampoo(how: dict[str, Any]) -> None:
    muon, ortho = pair("muon", "ortho", **how)
    muon.pin_coefficients(beta=0.0)
    assert_equal(muon, ortho)
    soap, shampoo = pair("soap", "shampoo", **how)
    soap.pin_coefficients(beta1=0.0)
    assert_equal(soap, shampoo)


def test_5_frozen_second_moment() -> None:
    """beta2 = 1 keeps s at one: RMSProp becomes x + gamma LN_u(g), Adam the same along m' / (1 + eps)."""
    model = shake(tiny("rmsprop"))
    model.pin_coefficients(beta2=1.0)
    ids = tokens()
    s = model.start(ids, torch.arange(ids.shape[1]))
    call = sf.oracles.Call(torch.arange(ids.shape[1]))
    block = model.blocks[0]
    x = s.x
    for name in ("attn", "mlp"):
        gamma = block.coefficients.value(f"gamma_{name}")
        x = x + gamma * block.aux_norms[name](block.ask((name,), x, call=call))
    after = block(s, call)
    assert (after.x - x).abs().max() < 1e-7  # 1 + eps in the denominator, eps = 1e-8
    assert torch.equal(after.s, torch.ones_like(after.s))

    adam = shake(tiny("adam"))
    adam.pin_coefficients(beta2=1.0)
    s, block = adam.start(ids, torch.arange(ids.shape[1])), adam.blocks[0]
    x, m = s.x, s.m
    for name in ("attn", "mlp"):
        beta1, gamma = (block.coefficients.value(f"{key}_{name}") for key in ("beta1", "gamma"))
        m = beta1 * m + (1 - beta1) * block.ask((name,), x, call=call)
        x = x + gamma * block.aux_norms[name](m / (1 + 1e-8))
    after = block(s, call)
    assert torch.equal(after.s, torch.ones_like(after.s))
    assert (after.x - x).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "muon", "ortho", "soap", "shampoo"])
def test_6_gamma_is_redundant_beside_the_update_norm(name: str) -> None:
    model = shake(tiny(name))
    twin = shake(tiny(name))
    with torch.no_grad():
        for block in twin.blocks:
            for key, norm in block.aux_norms.items():
                norm.weight *= block.coefficients.value(f"gamma_{key}")
    twin.pin_coefficients(gamma=1.0)
    assert_equal(model, twin)


@pytest.mark.parametrize("name", ["heavy-ball", "nesterov", "tmm"])
def test_7_only_the_ratio_of_beta_and_gamma_matters(name: str) -> None:
    """LN_v(c beta v + c gamma g) = LN_v(beta v + gamma g) once eps is scaled by c^2."""
    model, twin, c = shake(tiny(name)), shake(tiny(name)), 0.25
    for i, block in enumerate(twin.blocks):
        for key in block.coefficients.specs:
            if key.startswith(("beta", "gamma")):
                twin.pin_coefficients(layer=i, **{key: c * block.coefficients.value(key).detach()})
        for norm in block.aux_norms.values():
            norm.eps *= c * c
    assert_equal(model, twin)
    for block in twin.blocks:  # and the scaling of eps is not decoration
        for norm in block.aux_norms.values():
            norm.eps = 1e-5
    ids = tokens()
    assert (model(ids).logits - twin(ids).logits).abs().max() > 1e-9


def test_8_tmm_is_yurii_reparameterised() -> None:
    """With u_k = nu_k v_k: LN_v gain times nu_k; mu, beta of the next substep over nu_k; gamma unchanged."""
    tmm = shake(tiny("tmm", n_layer=6, n_head=3))  # 12 substeps
    yurii = shake(tiny("nesterov", n_layer=6, n_head=3), seed=1)
    copy_shared(tmm, yurii)
    nu_before = None
    for i, (theirs, ours) in enumerate(zip(tmm.blocks, yurii.blocks, strict=True)):
        for turn in ("attn", "mlp"):
            c = {key: theirs.coefficients.value(f"{key}_{turn}").detach() for key in ("mu", "beta", "gamma", "nu")}
            if nu_before is not None:
                c["mu"], c["beta"] = c["mu"] / nu_before, c["beta"] / nu_before
            yurii.pin_coefficients(layer=i, **{f"{key}_{turn}": c[key] for key in ("mu", "beta", "gamma")})
            with torch.no_grad():
                ours.aux_norms[turn].weight.copy_(theirs.aux_norms[turn].weight * c["nu"])
            nu_before = c["nu"]
    assert_equal(tmm, yurii)


def test_9_vanilla_is_heavy_ball_only_without_the_velocity_norm() -> None:
    vanilla, heavy_ball = pair("vanilla", "heavy-ball")
    heavy_ball.pin_coefficients(beta=0.0, gamma=1.0)
    ids = tokens()
    assert (vanilla(ids).logits - heavy_ball(ids).logits).abs().max() > 1e-3
    for block in heavy_ball.blocks:
        block.aux_norms["attn"], block.aux_norms["mlp"] = nn.Identity(), nn.Identity()
    assert_equal(vanilla, heavy_ball)


def test_10_newton_schulz_is_scale_free_and_left_gram_equals_right_gram() -> None:
    y = torch.randn(5, 12, 64, dtype=torch.float64, generator=seeded(0))
    assert torch.allclose(polar_steps(y), polar_steps(7.3 * y), rtol=1e-12, atol=1e-13)
    a, b, c = NEWTON_SCHULZ
    z = y / y.flatten(1).norm(dim=1)[:, None, None]
    for _ in range(5):
        right = z.mT @ z
        z = a * z + b * z @ right + c * z @ right @ right
    assert torch.allclose(polar_steps(y), z, rtol=1e-10, atol=1e-12)


def test_10_newton_schulz_maps_singular_values_into_the_published_band() -> None:
    """s in [0.01, 1] -> [0.68, 1.13]; 1e-3 -> 0.47; 1e-4 -> 0.05 (two decimals)."""
    largest = torch.tensor(1.0, dtype=torch.float64)
    for s, low, high in ((1e-2, 0.67, 1.14), (0.1, 0.67, 1.14), (0.7, 0.67, 1.14), (1e-3, 0.46, 0.48)):
        values = torch.diag(torch.stack([torch.sqrt(1 - largest * s**2), largest * s]))
        image = torch.linalg.svdvals(polar_steps(values))
        assert low <= image.min() <= high, (s, image)
    image = polar_steps(torch.diag(torch.tensor([1.0, 1e-4], dtype=torch.float64)))[1, 1]
    assert abs(image - 0.05) < 0.005


def test_12_inverse_square_root() -> None:
    eye = torch.eye(16, dtype=torch.float64)
    assert (inverse_square_root(eye) - eye / math.sqrt(1 + 1e-6)).abs().max() < 1e-12  # its damping
    generator = seeded(0)
    basis = torch.linalg.qr(torch.randn(4, 16, 16, dtype=torch.float64, generator=generator)).Q
    eigenvalues = torch.rand(4, 16, dtype=torch.float64, generator=generator) * 0.9 + 0.1
    r = basis @ torch.diag_embed(eigenvalues) @ basis.mT
    assert (eigenvalues.min(-1).values >= 1e-2 * r.flatten(1).norm(dim=1)).all()
    exact = basis @ torch.diag_embed((eigenvalues + 1e-6).rsqrt()) @ basis.mT
    root = inverse_square_root(r)
    assert (root - exact).abs().max() < 1e-3
    assert (root - root.mT).abs().max() < 1e-12


def test_12_inverse_square_root_resolution() -> None:
    """Relative eigenvalue 1e-3 -> 0.976 of the true inverse root, 3e-4 -> 0.787, 1e-4 -> 0.53, 1e-5 -> 0.18."""
    for ratio, fraction in ((1e-3, 0.976), (3e-4, 0.787), (1e-4, 0.53), (1e-5, 0.18)):
        r = 1e3 * torch.diag(torch.tensor([1.0, ratio], dtype=torch.float64))  # large, so that 1e-6 I is negligible
        root = inverse_square_root(r)
        assert root[1, 1].item() * math.sqrt(1e3 * ratio) == pytest.approx(fraction, abs=5e-3)


def test_14_initial_values() -> None:
    raw_and_value = {
        "tmm": {"mu": (0.0, 0.5), "beta": (0.0, 0.5), "gamma": (0.0, math.log(2)), "nu": (0.5413248546, 1.0)},
        "adamw": {"beta1": (0.0, 0.5), "beta2": (0.0, 0.5), "gamma": (0.0, math.log(2)), "lam": (-5.0, 0.0066928509)},
        "soap": {"beta1": (0.0, 0.5), "betaR": (0.0, 0.5), "gamma": (0.0, math.log(2))},
        "symplectic-euler": {"mu": (0.0, 0.5), "beta": (0.0, 0.5), "delta": (0.5413248546, 1.0)},
    }
    for name, expected in raw_and_value.items():
        model = tiny(name)
        for values, block in zip(model.coefficients(), model.blocks, strict=True):
            for key, value in values.items():
                word = key.split("_")[0]
                if word in expected:
                    raw, mapped = expected[word]
                    assert block.coefficients.get_parameter(key).item() == pytest.approx(raw, abs=1e-10)
                    assert value == pytest.approx(mapped, abs=1e-9)


def test_15_initial_loss_of_small() -> None:
    """At the start logits are N(0, 0.02^2 d), so the loss is ln V + 0.02^2 d / 2 = 10.98 (published step 0: 10.99)."""
    model = sf.build("vanilla", size="small", n_layer=2, seed=0)
    ids = tokens(1, 257, model.config.vocab_size)
    with torch.no_grad():
        loss = model(ids[:, :-1], ids[:, 1:]).loss
    assert loss is not None
    # 256 targets with logit std 0.55: standard error 0.035
    assert loss.item() == pytest.approx(math.log(50_304) + 0.02**2 * 768 / 2, abs=0.11)


def test_16_hybrid_with_all_layers_is_the_model_and_with_none_is_vanilla() -> None:
    yurii = shake(tiny("yurii"))
    assert_equal(yurii, yurii.hybrid(layers={0, 1}), exact=True)
    assert_equal(yurii, yurii.hybrid(cutoff=2), exact=True)
    vanilla = tiny("vanilla")
    copy_shared(yurii, vanilla)
    assert_equal(vanilla, yurii.hybrid(layers=set()), exact=True)
    assert_equal(yurii.hybrid(cutoff=1), yurii.hybrid(layers={0}), exact=True)


@splitting
def test_tables_are_a_look_ahead_without_dynamics(how: dict[str, Any]) -> None:
    """mu = 0 is vanilla, to the bit; no layer changes w; with one layer's tables at zero it is vanilla too."""
    tables, vanilla = pair("tables", "gd", **how)
    ids, call = tokens(), sf.oracles.Call(torch.arange(8))
    s = tables.start(ids, torch.arange(8))
    assert tables.blocks[0](s, call).w is s.w
    assert (tables(ids).logits - vanilla(ids).logits).abs().max() > 1e-3
    tables.pin_coefficients(mu=0.0)
    assert_equal(tables, vanilla, exact=True)
    tables.unpin_coefficients()
    with torch.no_grad():
        for table in tables.aux_embed["w"].parameters():
            table.zero_()
    assert_equal(tables, vanilla, exact=True)
