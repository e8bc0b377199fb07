"""The model: counts, initial weights, roles, loss, memory, precision, bad input."""

from __future__ import annotations

import cmath
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import stepformer as sf
from architectures import covering_presets
from draws import seeded, shifted
from helpers import shake, tiny, tokens
from stepformer.model.roles import declare, named_roles
from stepformer.ops.matrix_functions import inverse_square_root, polar_steps
from stepformer.ops.scores import rotate
from stepformer.oracles.mlp import MLP
from stepformer.oracles.softmax import SoftmaxAttention
from stepformer.training.memory import estimate_memory

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
    assert len(sf.presets()) == 55
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


def test_output_and_loss() -> None:
    model = shake(tiny("yurii"))
    ids, targets = tokens(), tokens(seed=1)
    assert model(ids).loss is None
    targets[0, :3] = -100
    output = model(ids, targets)
    kept = targets != -100
    by_hand = -output.logits.log_softmax(-1)[kept].gather(-1, targets[kept][:, None]).mean()
    assert output.loss is not None
    assert output.loss.item() == pytest.approx(by_hand.item(), abs=1e-12)


def test_symplectic_last_block_is_declared_unused() -> None:
    model = tiny("symplectic-euler")
    assert model.unused_parameters() == [
        "blocks.1.aux_norms.mlp.weight",
        "blocks.1.coefficients.gamma_mlp",
        "blocks.1.mlp.down.weight",
        "blocks.1.mlp.up.weight",
        "blocks.1.mlp_norm.weight",
    ]
    assert not any(model.get_parameter(name).requires_grad for name in model.unused_parameters())
    model.requires_grad_(False)  # freezing is not the same as being unused
    assert len(model.unused_parameters()) == 5
    assert tiny("symplectic-euler", final_drift=True).unused_parameters() == []
    small = sf.build("symplectic-euler", size="small", device="meta")
    assert sum(p.numel() for p in small.parameters() if not p.requires_grad) == 4_720_129


@pytest.mark.parametrize("name", ["vanilla", "yurii", "soap", "verlet-ama", "imex-ln-k2-mam"])
def test_activation_checkpointing_changes_nothing_but_memory(name: str) -> None:
    plain, saving = shake(tiny(name)), shake(tiny(name, activation_checkpointing=True))
    results = []
    for model in (plain, saving):
        loss = model(tokens(), tokens(seed=1)).loss
        assert loss is not None
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert estimate_memory(saving.config, 4).activations < estimate_memory(plain.config, 4).activations


@pytest.mark.parametrize("name", ["vanilla", "yurii", "verlet-ama", "muon", "soap"])
def test_memory_estimate_equals_what_autograd_saves(name: str) -> None:
    model = tiny(name, dtype=torch.float32)
    saved: dict[int, tuple[torch.Tensor, int]] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved[t.untyped_storage().data_ptr()] = (t, t.untyped_storage().nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        pack(model(tokens(3), tokens(3, seed=1)).logits)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    measured = sum(size for key, (_, size) in saved.items() if key not in weights)
    estimate = estimate_memory(model.config, 3)
    assert estimate.activations == measured
    assert estimate.parameters == 4 * model.num_parameters()
    calls = 2 if name == "verlet-ama" else 1
    assert estimate.cache == 2 * calls * 3 * 8 * 12 * 4 * 2  # layers, calls, batch, context, width, bytes, k and v


def test_memory_estimate_knows_bf16_autocast() -> None:
    config = sf.model_config("yurii", size="tiny")
    assert estimate_memory(config, 2, autocast=torch.bfloat16).activations < estimate_memory(config, 2).activations
    assert "GiB" in str(estimate_memory(config, 2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint16, torch.uint32])
def test_any_integer_type_will_do(dtype: torch.dtype) -> None:
    model = shake(tiny("yurii"))
    ids, targets = tokens(), tokens(seed=1)
    expected = model(ids, targets)
    found = model(ids.to(dtype), targets.to(dtype))
    assert torch.equal(found.logits, expected.logits)
    assert found.loss == expected.loss
    assert sf.record(model)(ids.to(dtype), targets.to(dtype)) == expected.loss
    assert model.stream_norms(ids.to(dtype)) == model.stream_norms(ids)
    assert model.generate(ids.to(dtype), seed=0, max_new_tokens=2) == model.generate(ids, seed=0, max_new_tokens=2)


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (
            tokens().float(),
            r"^Targets should be a tensor of integers of .*, not torch\.float32 of shape \(\d+, \d+\)\.$",
        ),
        (tokens().bool(), r"^Targets should be a tensor of integers .* torch\.bool"),
        (tokens().tolist(), r"^Targets should be a tensor of integers .*, not list\.$"),
        (tokens()[0], r": targets\[None\] is a batch of one row\.$"),
        (tokens() - 99, r"Found target id -\d+, .*: a target that is to be ignored is -100\.$"),
    ],
)
def test_bad_targets_are_refused(targets: Any, sentence: str) -> None:
    with pytest.raises(sf.InputError, match=sentence):
        tiny()(tokens(), targets)


def test_tokens_of_one_row_and_of_too_many_columns() -> None:
    with pytest.raises(
        sf.InputError, match=r"not torch\.int64 of shape \(5,\): tokens\[None\] is a batch of one row\.$"
    ):
        tiny()(tokens(1, 5)[0])
    with pytest.raises(sf.InputError, match=r"context is 8: cut it, or build the model with context=9\.$"):
        tiny(context=8)(tokens(1, 9))


def test_bad_lengths_are_refused() -> None:
    model, ids = tiny(), tokens(2, 4)
    for lengths, sentence in (
        ([1, 2], "tensor of integers"),
        (torch.tensor([1.0, 2.0]), "tensor of integers"),
        (torch.tensor([1, 2, 3]), "one entry per row"),
        (torch.tensor([0, 2]), "between 1 and 4"),
        (torch.tensor([5, 2]), "between 1 and 4"),
    ):
        with pytest.raises(sf.InputError, match=sentence):
            model(ids, lengths=lengths)
    with pytest.raises(sf.InputError, match="last_only"):
        model(ids, ids, last_only=True)


def test_per_sample_gradients_by_vmap() -> None:
    model = shake(tiny("yurii", attention_backend="math"))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    ids, targets = tokens(3), tokens(3, seed=1)

    def loss(weights: dict[str, torch.Tensor], row: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (row[None], target[None])).loss

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, ids, targets)
    one = torch.func.grad(loss)(parameters, ids[1], targets[1])
    for name, gradient in one.items():
        assert (each[name][1] - gradient).abs().max() < 1e-12


@pytest.mark.parametrize("name", covering_presets())
def test_bf16_parameters(name: str) -> None:
    """Weights, streams and answers all in bf16 (8 bits): close to fp32 and finite in both directions."""
    ids, targets = tokens(), tokens(seed=1)
    exact = tiny(name, dtype=torch.float32)(ids, targets).loss
    model = tiny(name, dtype=torch.bfloat16)
    loss = model(ids, targets).loss
    assert exact is not None
    assert loss is not None
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["muon", "ortho", "soap", "shampoo"])
def test_matrix_updates_ignore_autocast(name: str) -> None:
    """From one and the same answer g, the update is the same to the bit inside and outside bf16 autocast."""
    model = shake(tiny(name, dtype=torch.float32))
    block = model.blocks[0]
    s = model.start(tokens(), torch.arange(8))
    values = block.coefficients.values()["attn"]
    g = torch.randn(s.x.shape, generator=seeded(0))
    plain = block.template.kick(s, values, g)
    with torch.autocast("cpu", torch.bfloat16):
        cast = block.template.kick(s, values, g)
    assert all(torch.equal(cast.streams[key], plain.streams[key]) for key in plain.streams)


def test_norm_eps_reaches_every_norm() -> None:
    model = tiny("yurii", norm_eps=0.5)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert len(norms) == 9
    assert all(norm.eps == 0.5 for norm in norms)
    assert tiny(norm="rmsnorm", norm_eps=0.5).final_norm.eps == 0.5


def test_rotary_angles() -> None:
    """Pair i of position t is turned by t / 10000^(i / half), written out with complex numbers."""
    t = torch.randn(1, 1, 5, 8, dtype=torch.float64, generator=seeded(0))
    turned = rotate(t, torch.arange(3, 8))
    for row in range(5):
        for i in range(4):
            z = complex(t[0, 0, row, i], t[0, 0, row, i + 4]) * cmath.exp(1j * (row + 3) / 10_000 ** (i / 4))
            assert turned[0, 0, row, i].item() == pytest.approx(z.real, abs=1e-12)
            assert turned[0, 0, row, i + 4].item() == pytest.approx(z.imag, abs=1e-12)


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


def test_an_mlp_receives_its_options() -> None:
    class Leaky(MLP):
        options = {"slope": sf.Option(0.1, "slope below zero")}
        slope: float

        def activation(self, h: torch.Tensor) -> torch.Tensor:
            return F.leaky_relu(h, self.slope)

    sf.register_mlp("leaky-test", equation="test")(Leaky)
    assert tiny(mlp="leaky-test", slope=2).blocks[0].mlp.slope == 2.0


def test_pins_follow_the_model() -> None:
    model = tiny("yurii")
    model.pin_coefficients(mu=0.25)
    model.float()
    assert model(tokens()).logits.dtype == torch.float32
    model.unpin_coefficients()
    assert model.coefficients()[0]["mu_attn"] == 0.5


@pytest.mark.parametrize("name", ["vanilla", "yurii", "adamw", "muon", "shampoo"])
def test_bf16_autocast_trains(name: str) -> None:
    """bf16 has 8 bits: the loss agrees to a percent, and everything stays finite."""
    model = tiny(name, dtype=torch.float32)
    ids, targets = tokens(), tokens(seed=1)
    exact = model(ids, targets).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, targets).loss
    assert exact is not None
    assert loss is not None
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_inverse_square_root_ignores_autocast() -> None:
    a = torch.randn(3, 8, 8, generator=seeded(0))
    r = a @ a.mT + torch.eye(8)
    plain = inverse_square_root(r)
    with torch.autocast("cpu", torch.bfloat16):
        cast = inverse_square_root(r)
        half = inverse_square_root(r.bfloat16())
    assert torch.equal(cast, plain)
    assert half.dtype == torch.float32
    model = shake(tiny("soap", dtype=torch.float32))
    s = model.start(tokens(), torch.arange(8))
    with torch.autocast("cpu", torch.bfloat16):
        after = model.blocks[0](s, sf.oracles.Call(torch.arange(8)))
    assert after.R.dtype == torch.float32


def test_newton_schulz_works_in_the_left_gram_space() -> None:
    """12 heads of 64: 12x64x12 + 12x12x12 + 12x12x64 products a step, not 64x12x64 + ... of the right Gram form."""
    y = torch.randn(7, 12, 64)
    with FlopCounterMode(display=False) as counter:
        polar_steps(y)
    assert counter.get_total_flops() == 7 * 5 * 2 * (12 * 64 * 12 + 12 * 12 * 12 + 12 * 12 * 64)


def test_newton_schulz_precision_is_an_option() -> None:
    exact = shake(tiny("muon", dtype=torch.float32))
    rough = shake(tiny("muon", dtype=torch.float32, newton_schulz_dtype="bfloat16"))
    ids = tokens()
    difference = (exact(ids).logits - rough(ids).logits).abs().max()
    assert 0 < difference < 0.7 * exact(ids).logits.abs().max()  # 0.2 seen: small singular values lose their direction
    with pytest.raises(sf.ConfigError, match="newton_schulz_dtype"):
        tiny("yurii", newton_schulz_dtype="bfloat16")


@pytest.mark.parametrize("name", ["vanilla", "yurii", "adam", "muon", "soap", "symplectic-euler", "imex-ln-k2-ama"])
def test_math_attention_has_second_derivatives(name: str) -> None:
    """Hessian-vector product by double backward against central differences of the gradient, fp64."""
    model = shake(tiny(name, attention_backend="math"), scale=0.1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    generator = seeded(0)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]

    def gradient(create_graph: bool = False) -> tuple[torch.Tensor, ...]:
        loss = model(tokens(), tokens(seed=1)).loss
        assert loss is not None
        return torch.autograd.grad(loss, parameters, create_graph=create_graph)

    first = gradient(create_graph=True)
    dot = torch.stack([(g * d).sum() for g, d in zip(first, direction, strict=True)]).sum()
    product = torch.autograd.grad(dot, parameters)
    step, sides = 1e-6, []
    for move in (-2, 1, 2, 1):  # to -2, -1, 1 and 2 steps
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(d, alpha=move * step)
        sides.append(gradient())
    largest = max(p.abs().max() for p in product)
    for exact, a, b, c, d in zip(product, *sides, strict=True):
        # Rounding eps/h = 1e-10; of fourth order, because Muon's third derivatives are large: 1e-7 seen
        assert (exact - (a - 8 * b + 8 * c - d) / (12 * step)).abs().max() <= 1e-6 * largest


def test_rotary_scores_depend_on_distance_only() -> None:
    model = shake(tiny("vanilla", positions="rotary", n_head=2, n_layer=1, context=16))
    assert model.embed.pos_emb is None
    ids = tokens(1, 8)
    with torch.no_grad():
        here = model.blocks[0](model.start(ids, torch.arange(8)), sf.oracles.Call(torch.arange(8))).x
        there = model.blocks[0](model.start(ids, torch.arange(8)), sf.oracles.Call(torch.arange(5, 13))).x
    assert (here - there).abs().max() < 1e-12


def test_mlps_are_what_they_say() -> None:
    u = torch.randn(2, 3, 12, dtype=torch.float64)
    mlp = tiny(mlp="swiglu").blocks[0].mlp
    gate, value = (mlp.up.weight[:32], mlp.up.weight[32:])
    assert torch.allclose(mlp(u), (F.silu(u @ gate.T) * (u @ value.T)) @ mlp.down.weight.T)
    mlp = tiny(mlp="gelu-tanh").blocks[0].mlp
    h = u @ mlp.up.weight.T
    tanh = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
    assert torch.allclose(mlp(u), tanh @ mlp.down.weight.T)
    mlp = tiny(mlp="relu2").blocks[0].mlp
    h = u @ mlp.up.weight.T
    assert torch.allclose(mlp(u), (h * h * (h > 0)) @ mlp.down.weight.T)


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


@pytest.mark.parametrize(
    ("ids", "targets", "sentence"),
    [
        (torch.tensor([[3, 11]]), None, "id 11, but the vocabulary has ids 0 to 10"),
        (torch.tensor([[3, -1]]), None, "id -1"),
        (torch.zeros(1, 9, dtype=torch.long), None, "9 tokens, but the model's context is 8"),
        (torch.zeros(1, 0, dtype=torch.long), None, "no tokens"),
        (torch.zeros(4, dtype=torch.long), None, "shape"),
        (torch.zeros(1, 4), None, "integers"),
        ([[1, 2]], None, "not list"),
        (torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long), "Targets have shape"),
        (torch.zeros(1, 1, dtype=torch.long), torch.tensor([[11]]), "target id 11"),
    ],
)
def test_bad_tokens_are_refused(ids: Any, targets: Any, sentence: str) -> None:
    with pytest.raises(sf.InputError, match=sentence):
        tiny()(ids, targets)


def test_hybrid_refuses_what_it_is_not_for() -> None:
    for name in ("vanilla", "adam", "verlet-ama", "nesterov-euler"):
        with pytest.raises(sf.InputError, match=r"Hybrid inference .* a stream called 'v'"):
            tiny(name).hybrid(cutoff=1)
    model = tiny("yurii")
    for arguments, sentence in (
        ({}, "either"),
        ({"layers": {0}, "cutoff": 1}, "either"),
        ({"layers": {2}}, "0 to 1"),
        ({"cutoff": 3}, "between 0 and 2"),
    ):
        with pytest.raises(sf.InputError, match=sentence):
            model.hybrid(**arguments)


def test_unknown_coefficient_is_refused() -> None:
    with pytest.raises(sf.InputError, match="Did you mean 'beta'"):
        tiny("yurii").pin_coefficients(betta=0.1)
    with pytest.raises(sf.InputError, match="not finite"):
        tiny("yurii").pin_coefficients(beta=float("nan"))


def test_a_missing_gpu_is_one_sentence() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(sf.InputError, match="sees no CUDA device"):
            tiny(device="cuda")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"device": "gpu"}, r"device = 'gpu' is none of torch's: give 'cpu', 'cuda'"),
        ({"dtype": "bf16"}, r"dtype = 'bf16' should be a dtype of torch such as torch\.bfloat16\."),
        ({"dtype": torch.int64}, r"dtype = torch\.int64 should be"),
    ],
)
def test_a_device_and_a_dtype_that_torch_does_not_know(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(sf.InputError, match=sentence):
        tiny(**given)


def test_recording_takes_a_dtype_of_torch() -> None:
    with pytest.raises(sf.InputError, match=r"autocast = 'bf16' should be a dtype of torch such as torch\.bfloat16\."):
        sf.record(tiny(), autocast="bf16")  # type: ignore[arg-type]


def test_state_dict_round_trip() -> None:
    model = shake(tiny("soap"))
    twin = tiny("soap", seed=1)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens()).logits, twin(tokens()).logits)
