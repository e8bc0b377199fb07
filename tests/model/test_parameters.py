"""The model's parameters: how many, their roles, how they start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stepformer as sf
from draws import shifted
from helpers import shake, tiny, tokens
from stepformer.model.roles import declare, named_roles
from stepformer.oracles.softmax import SoftmaxAttention

INTEGRATORS = ("presymp-euler", "exp-euler", "conformal-euler", "ab2", "etd-ab2")  # those with friction

COUNTS = {  # as published; counted by hand from the equations where the papers are silent
    "vanilla": 124_373_760,
    "yurii": 163_812_168,
    "tmm": 163_812_192,
    "tmm-zero": 124_392_288,
    "hb": 163_812_144,
    "adam": 163_812_168,
    "adamw": 163_812_192,
    "muon": 163_812_144,
    "soap": 163_812_168,
    "rmsprop": 124_392_240,
    "ortho": 124_392_216,
    "shampoo": 124_392_240,
    "gd-euler": 124_373_760,
    "polyak-euler": 163_802_904,
    "nesterov-euler": 163_802_916,
    "symplectic-euler": 163_812_156,
    **{f"imex-k{k}-{order}": 163_802_940 for k in (1, 2) for order in ("ama", "mam")},
    **{f"imex-ln-k{k}-{order}": 163_812_156 for k in (1, 2) for order in ("ama", "mam")},
    "verlet-ama": 163_812_156,
    "verlet-mam": 163_812_156,
    # Vanilla and one pair of tables; a norm of d = 768 and one mu in each of the 24 calls, or one lambda in each layer.
    "tables": 124_373_760 + (50_304 + 1024) * 768 + 24 * (768 + 1),
    "value-tables": 124_373_760 + (50_304 + 1024) * 768 + 12,
    "attnres": 124_373_760 + 19_200,  # one vector of 768 in each of the 24 calls, and one for the last sum
    # Vanilla and, in each of the 24 calls, the weights of n = 4 streams (tests/rules/test_hyper.py).
    **{name: 124_373_760 + more for name, more in (("scaled", 24), ("denseformer", 90), ("unet", 6))},
    "hyper": 124_373_760 + 576,
    "mhc": 124_373_760 + 1_770_120,
    # No table of positions, 25 norms without gain, and 3 coefficients in each of 12 layers, or 24 norms of answers, the
    # weights of streams and one coefficient in each layer.
    "modern": 124_373_760 - 1024 * 768 - 25 * 768 + 12 * 3,
    "glide": 124_373_760 - 1024 * 768 - 25 * 768 + 24 * 768 + 576 + 12,
    # By hand, d = 768, 12 layers: one pair of tables 39,419,904; per layer MLP 8 d^2, norms d each, and attention
    # W_Q, W_K, C (Hamiltonian), A, V (linear) or 4 d^2; gainless norms have none. Coefficients per layer: h_x, h_y,
    # mu, beta, gamma and alpha, or c_log and c_lin; h of linear attention; r and keep per head; a map r of d x heads.
    "symp-plain-euler": 117_314_376,
    **{f"symp-{name}": 117_314_388 for name in INTEGRATORS},
    "linear": 110_217_996,
    "linear-yurii": 149_656_404,
    "linear-symp-plain-euler": 149_656_392,
    **{f"linear-symp-{name}": 149_656_404 for name in INTEGRATORS},
    "entropy": 124_354_560,
    "entropy-head": 124_354_704,
    "entropy-token": 124_465_296,
    "entropy-floor": 124_354_560,
    "kl": 124_354_560,
    "kl-previous": 124_354_560,
    "kl-carried": 124_354_704,
}


def test_counts_cover_the_catalogue() -> None:
    assert {sf.preset(name).name for name in COUNTS} == set(sf.presets())
    assert len(sf.presets()) == 57
    assert (COUNTS["tables"], COUNTS["value-tables"]) == (163_812_120, 163_793_676)


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count_at_small(name: str) -> None:
    assert sf.build(name, size="small", device="meta").num_parameters() == COUNTS[name]


def test_other_counts() -> None:
    wide = sf.build("vanilla", size="small", d_model=900, device="meta")
    assert wide.num_parameters() == 162_857_700
    assert sf.build("vanilla", size="small", n_layer=18, device="meta").num_parameters() == 166_850_304
    small, medium = (sf.build("vanilla", size=size, device="meta") for size in ("small", "medium"))
    assert round(small.num_parameters("non-positional") / 1e6, 1) == 123.6
    assert round(medium.num_parameters("non-positional") / 1e6, 1) == 353.6
    yurii = sf.build("yurii", size="small", device="meta")
    assert yurii.num_parameters("non-positional") == 162_239_304
    assert yurii.num_parameters("non-embedding") == 84_972_360
    with pytest.raises(sf.InputError, match="convention"):
        yurii.num_parameters("trainable")  # type: ignore[arg-type]


def test_13_tensors_by_role() -> None:
    """48 matrices for Muon; 2 or 4 tables; 25 norms, or 49 with the auxiliary ones."""
    for name, tables, norms, coefficients in (("vanilla", 2, 25, 0), ("yurii", 4, 49, 72), ("tmm-zero", 2, 49, 96)):
        roles = list(sf.build(name, size="small", device="meta").roles().values())
        assert roles.count(sf.Role.MATRIX) == 48
        assert roles.count(sf.Role.EMBEDDING) == tables
        assert roles.count(sf.Role.NORM) == norms
        assert roles.count(sf.Role.COEFFICIENT) == coefficients


def test_a_parameter_without_a_role_is_an_error() -> None:
    model = tiny()
    model.blocks[0].mystery = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(sf.StepformerError, match=r"blocks\.0\.mystery"):
        model.roles()


def test_initial_weights() -> None:
    model = sf.build("yurii", size="tiny", seed=0)
    for name, parameter, role in named_roles(model):
        if role is sf.Role.NORM:
            assert (parameter == 1).all()
        elif role is not sf.Role.COEFFICIENT:
            residual = name.endswith(("out.weight", "down.weight"))
            std = 0.02 / (8**0.5 if residual else 1)  # sqrt(2 L), four layers
            # 16,384 entries or more: the standard error of a std is at most 0.6 %
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            # margin: four standard errors
            assert abs(parameter.mean().item()) < 4 * std / parameter.numel() ** 0.5


def test_one_seed_gives_architectures_the_same_shared_weights() -> None:
    """A comparison is paired from the first step; the global generator is left alone."""
    state = torch.get_rng_state()
    vanilla, soap, again = (tiny(name, seed=7) for name in ("vanilla", "soap", "vanilla"))
    assert torch.equal(torch.get_rng_state(), state)
    theirs = dict(soap.named_parameters())
    for name, parameter in vanilla.named_parameters():
        assert torch.equal(parameter, theirs[name])
    other = dict(tiny("vanilla", seed=8).named_parameters())
    assert not torch.equal(vanilla.embed.tok_emb.weight, other["embed.tok_emb.weight"])
    assert all(torch.equal(a, b) for a, b in zip(vanilla.parameters(), again.parameters(), strict=True))
    assert not torch.equal(vanilla.blocks[0].attn.qkv.weight, vanilla.blocks[1].attn.qkv.weight)


def test_without_a_seed_the_global_generator_decides() -> None:
    torch.manual_seed(shifted(5))
    first = tiny(seed=None)
    torch.manual_seed(shifted(5))
    second = tiny(seed=None)
    third = tiny(seed=None)
    assert torch.equal(first.embed.tok_emb.weight, second.embed.tok_emb.weight)
    assert not torch.equal(third.embed.tok_emb.weight, second.embed.tok_emb.weight)


def test_auxiliary_gain_is_a_setting() -> None:
    model = tiny("yurii", aux_norm_gain=0.05)
    gains = [norm.weight for block in model.blocks for norm in block.aux_norms.values()]
    assert len(gains) == 4
    assert all((gain == 0.05).all() for gain in gains)
    assert all((block.attn_norm.weight == 1).all() for block in model.blocks)


def test_a_component_can_set_its_own_initial_values() -> None:
    class Scaled(SoftmaxAttention):
        options = {**SoftmaxAttention.options, "gain": sf.Option(0.5, "initial scale of the answer")}

        def __init__(self, *args: Any, gain: float = 0.5, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.start = gain
            self.lam = torch.nn.Parameter(torch.empty(1))
            self.register_buffer("constant", torch.empty(1))
            declare(self, lam=sf.Role.COEFFICIENT)

        def initialise(self) -> None:
            self.lam.fill_(self.start)
            self.constant.fill_(30.0)

    class Forgetful(Scaled):
        def initialise(self) -> None:
            self.lam.fill_(self.start)

    sf.register_attention("scaled-test", equation="test")(Scaled)
    sf.register_attention("forgetful-test", equation="test")(Forgetful)
    attention = tiny(attention="scaled-test", gain=0.25).blocks[1].attn
    assert (attention.lam.item(), attention.constant.item()) == (0.25, 30.0)
    with pytest.raises(sf.StepformerError, match=r"attn\.constant' has no initial value"):
        tiny(attention="forgetful-test")


def test_an_untied_head() -> None:
    """V d parameters with a role of their own; with the token table in its place it is the tied model."""
    tied, untied = (sf.build("vanilla", size="small", head=head, device="meta") for head in ("tied", "untied"))
    assert untied.num_parameters() - tied.num_parameters() == 50_304 * 768
    assert untied.roles().keys() - tied.roles().keys() == {"lm_head.weight"}
    assert untied.roles()["lm_head.weight"] is sf.Role.HEAD
    tied, untied = shake(tiny("yurii")), shake(tiny("yurii", head="untied"), seed=1)
    untied.load_state_dict({**tied.state_dict(), "lm_head.weight": tied.embed.tok_emb.weight})
    assert torch.equal(untied(tokens()).logits, tied(tokens()).logits)
    with torch.no_grad():
        untied.embed.tok_emb.weight.zero_()
    assert untied(tokens()).logits.abs().max() > 0


def test_output_layers_may_start_at_zero() -> None:
    """Then x stays at the embedding at first; other weights are as they were; from an untied head all logits are 0."""
    usual, zero = tiny("vanilla"), tiny("vanilla", output_init="zero")
    names = {name for name, p in zero.named_parameters() if not p.any()}
    assert names == {f"blocks.{i}.{layer}.weight" for i in (0, 1) for layer in ("attn.out", "mlp.down")}
    others = dict(zero.named_parameters())
    assert all(torch.equal(p, others[name]) for name, p in usual.named_parameters() if name not in names)
    call = zero.call_of(tokens())
    s = zero.start(tokens(), call.positions)
    assert torch.equal(zero.blocks[1](zero.blocks[0](s, call), call).x, s.x)
    assert not tiny("vanilla", output_init="zero", head="untied")(tokens()).logits.any()
    assert tiny("linear", output_init="zero").blocks[0].attn.value.weight.any()  # it has no output layer


def test_biases_are_an_option() -> None:
    names = [name for name, _ in tiny(bias=True).named_parameters()]
    assert "blocks.0.attn.qkv.bias" in names
    assert "final_norm.bias" in names
    assert not any(name.endswith("bias") for name, _ in tiny().named_parameters())
    yurii = tiny("yurii", bias=True)
    assert not any("aux_norms" in name and "bias" in name for name, _ in yurii.named_parameters())
    assert all((p == 0).all() for name, p in yurii.named_parameters() if name.endswith("bias"))
