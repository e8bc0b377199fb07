"""The model: loss, memory, precision, options."""

from __future__ import annotations

import cmath

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import stepformer as sf
from architectures import covering_presets
from draws import seeded
from helpers import shake, tiny, tokens
from stepformer.ops.matrix_functions import inverse_square_root, polar_steps
from stepformer.ops.scores import rotate
from stepformer.oracles.mlp import MLP
from stepformer.training.memory import estimate_memory


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
    assert "MiB" in str(estimate_memory(config, 2))


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
    with_momentum, plain = model.hybrid(cutoff=1).coefficients()
    assert (with_momentum, plain) == (model.coefficients()[0], {})  # a plain layer reads none of the rule's


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


def test_state_dict_round_trip() -> None:
    model = shake(tiny("soap"))
    twin = tiny("soap", seed=1)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens()).logits, twin(tokens()).logits)
