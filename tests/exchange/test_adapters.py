"""PEFT's adapters: what they add is seen wherever a weight is read, and what cannot be seen is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stepformer as sf
from draws import seeded
from helpers import shake, tiny, tokens
from stepformer.exchange.huggingface import StepformerForCausalLM
from stepformer.model.engines import steps as decoding
from stepformer.ops import kernels
from stepformer.ops.adapters import is_adapted

peft = pytest.importorskip("peft")

HAMILTONIAN: dict[str, Any] = {"template": "ab2", "attention": "hamiltonian"}
ATTENTIONS: list[dict[str, Any]] = [
    {},
    {"attention": "linear"},
    {"attention": "entropy", "target": "token"},
    {"attention": "kl", "prior": "carried"},
    {"template": "conformal-euler", "attention": "linear-hamiltonian"},
    HAMILTONIAN,
    {**HAMILTONIAN, "weight_sharing": "oracles"},
    {**HAMILTONIAN, "metric": "derived"},
    {**HAMILTONIAN, "metric": "derived", "symmetric": True},
    {**HAMILTONIAN, "kernel": "per-head", "positions": "rotary", "force": "query"},
]
# fp32: the adapter adds B A u where the merged weight has (W + B A) u, sums of 12 terms in another order, 1e-7 of
# activations of order one, through four to twelve oracle calls
MERGED = 1e-5
# The polynomial that makes a matrix orthogonal multiplies what is small in it, rounding included, by up to 500; and
# near the largest entropy that a row can have, a rounding of it moves the temperature far.
AMPLIFIED = {name: 1e-4 for name in sf.presets() if name in ("ortho", "muon") or name.startswith("entropy")}


def adapted(name: str = "vanilla", *, dtype: torch.dtype = torch.float32, adapter: Any = None, **settings: Any) -> Any:
    """A model with plain LoRA of rank 4 around all its maps, A and B far from zero; or with another adapter."""
    model = StepformerForCausalLM.of(shake(tiny(name, dtype=dtype, **{"context": 16, **settings}), 0.05))
    model = peft.get_peft_model(model, adapter or lora())
    return moved(model).eval()


def lora(**settings: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 4, "target_modules": "all-linear", **settings})


def moved(model: Any) -> Any:
    """The model with every number of its adapters drawn anew."""
    generator = seeded(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(word in name for word in ("lora_", "ia3_", "vera_lambda")):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.2 * noise.to(parameter.dtype))
    return model


def inner(model: Any) -> sf.Model:
    """Our model inside theirs inside PEFT's."""
    found: sf.Model = model.base_model.model.model
    return found


def merged(model: Any) -> Any:
    return copy.deepcopy(model).merge_and_unload()


@torch.no_grad()
def logits(model: Any, ids: Tensor | None = None) -> Tensor:
    found: Tensor = model(input_ids=tokens() if ids is None else ids).logits
    return found


def distance(model: Any, other: Any) -> float:
    return float((logits(model) - logits(other)).abs().max())


def assert_is_merged(model: Any, bound: float) -> None:
    with model.disable_adapter():
        base = logits(model)
    assert (logits(model) - base).abs().max() > 0.01, "the adapter should matter"
    assert distance(model, merged(model)) <= bound


@pytest.mark.parametrize("settings", ATTENTIONS, ids=lambda s: "-".join(map(str, s.values())) or "softmax")
def test_an_adapter_of_every_attention_is_its_merged_weights(settings: dict[str, Any]) -> None:
    assert_is_merged(adapted(**settings), MERGED)


@pytest.mark.slow
@pytest.mark.parametrize("name", sf.presets())
def test_an_adapter_of_every_preset_is_its_merged_weights(name: str) -> None:
    assert_is_merged(adapted(name), AMPLIFIED.get(name, MERGED))
    assert_is_merged(adapted(name, dtype=torch.float64), 1e-10)


def assert_learns(model: Any) -> None:
    """With s = alpha / r: dL/dB = s dL/dW A^T and dL/dA = s B^T dL/dW, dL/dW from the merged model."""
    ids, plain = tokens(), merged(model)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    for parameter in plain.parameters():
        parameter.requires_grad_(True)
    plain.train()(input_ids=ids, labels=ids).loss.backward()
    unused = {f"model.{name}" for name in plain.model.unused_parameters()}
    seen = 0
    for name, layer in model.base_model.model.named_modules():
        if not is_adapted(layer):
            continue
        a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
        if f"{name}.weight" in unused:
            continue
        dw = plain.get_parameter(f"{name}.weight").grad
        s = layer.scaling["default"]
        for found, expected in ((b.grad, s * dw @ a.T), (a.grad, s * b.T @ dw)):
            assert expected.abs().max() > 0
            torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-8)  # fp64, sums in another order
            seen += 1
    assert seen > 8


@pytest.mark.parametrize("settings", [{}, HAMILTONIAN, ATTENTIONS[-2], ATTENTIONS[4]], ids=str)
def test_gradients_reach_adapters(settings: dict[str, Any]) -> None:
    assert_learns(adapted(dtype=torch.float64, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("name", sf.presets())
def test_gradients_reach_adapters_of_every_preset(name: str) -> None:
    assert_learns(adapted(name, dtype=torch.float64))


@pytest.mark.parametrize("settings", [{}, HAMILTONIAN, ATTENTIONS[-2], ATTENTIONS[4]], ids=str)
def test_cached_decoding_with_an_adapter_is_that_of_merged_weights(settings: dict[str, Any]) -> None:
    model = adapted(dtype=torch.float64, **settings)  # fp64: greedy choices do not turn on rounding
    words = {"do_sample": False, "max_new_tokens": 6, "attention_mask": torch.ones_like(tokens())}
    made = model.generate(input_ids=tokens(), **words)
    assert torch.equal(made, model.generate(input_ids=tokens(), **words, use_cache=False))
    assert torch.equal(made, merged(model).generate(tokens(), **words))
    ours = inner(model)
    assert made[:, 8:].tolist() == ours.generate(tokens(), temperature=0, max_new_tokens=6).tokens
    ids = tokens(3)
    cache = ours.new_cache(3)
    pieces = [ours(part, cache=cache).logits for part in ids.split([5, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), logits(model, ids), atol=1e-10, rtol=0)


def test_recorded_steps_do_not_read_past_an_adapter() -> None:
    """Their kernels take weights, not modules, and a recording would not notice that adapters are switched."""
    with decoding.anywhere():
        assert decoding.refusal(inner(adapted()), 32) == "its adapters may be switched between two texts"
        assert decoding.refusal(merged(adapted()).model, 32) is None


@pytest.fixture
def interpreted() -> Iterator[None]:
    pytest.importorskip("triton")
    with kernels.interpreted():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, HAMILTONIAN, ATTENTIONS[-2], ATTENTIONS[4]], ids=str)
def test_kernels_do_not_read_past_an_adapter(settings: dict[str, Any], interpreted: None) -> None:
    model = adapted(**settings, adapter=lora(target_modules=["tok_emb", *maps(settings)]))
    assert distance(model, merged(model)) <= MERGED
    found, expected = (each(tokens(), tokens(), loss_only=True).loss for each in (inner(model), merged(model).model))
    assert found.requires_grad
    assert float((found - expected).abs()) <= MERGED


def maps(settings: dict[str, Any]) -> list[str]:
    kinds = {"hamiltonian": ["query", "root", "value"], "linear-hamiltonian": ["kernel", "value"]}
    return [*kinds.get(settings.get("attention", ""), ["qkv", "out"]), "up", "down"]


def test_adapters_are_switched_merged_and_added() -> None:
    model = adapted(**HAMILTONIAN)
    alone, base = logits(model), logits(StepformerForCausalLM.of(tiny_base()))
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    model.merge_adapter()
    assert (logits(model) - alone).abs().max() <= MERGED
    with model.disable_adapter():  # takes the adapters out of the weights again
        assert (logits(model) - base).abs().max() <= MERGED
    assert not any(layer.merged for layer in model.modules() if is_adapted(layer))
    model.add_adapter("second", lora(r=2))
    moved(model)
    alone = logits(model)
    model.base_model.set_adapter(["default", "second"])
    both = logits(model)
    assert (both - alone).abs().max() > 0.01
    assert (both - logits(merged(model))).abs().max() <= MERGED


def tiny_base() -> sf.Model:
    return shake(tiny("vanilla", dtype=torch.float32, context=16, **HAMILTONIAN), 0.05).eval()


def test_the_token_table_is_adapted_as_input_and_as_head() -> None:
    for target in (["tok_emb"], ["tok_emb", "qkv"]):
        assert_is_merged(adapted(adapter=lora(target_modules=target)), MERGED)
    whole = adapted(adapter=lora(target_modules=["qkv"], modules_to_save=["tok_emb"]))
    table = inner(whole).embed.tok_emb
    with torch.no_grad():
        table.modules_to_save.default.weight.mul_(1.5)
    assert_is_merged(whole, MERGED)
    assert torch.equal(inner(whole).table(), table.modules_to_save.default.weight)


REFUSED: list[tuple[Any, str]] = [
    (lora(lora_dropout=0.1), r"this one has dropout \(set lora_dropout=0\)"),
    (lora(use_dora=True), "DoRA and other variants are not"),
    (lora(lora_bias=True), "this one has a bias"),
    (peft.IA3Config(target_modules=["query"], feedforward_modules=[]), "'peft.tuners.ia3.layer' is not"),
    (peft.VeraConfig(r=4, target_modules=["root"]), "'peft.tuners.vera.layer' is not"),
    (peft.OFTConfig(target_modules=["root"], r=0, oft_block_size=4), "'peft.tuners.oft.layer' is not"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")  # that a bias cannot be merged
@pytest.mark.parametrize(("adapter", "why"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_not_added_is_refused_where_weights_are_multiplied(adapter: Any, why: str) -> None:
    model = adapted(adapter=copy.deepcopy(adapter), **HAMILTONIAN)
    for mode in (model.eval, model.train):
        with pytest.raises(sf.InputError, match=why) as caught:
            mode()(input_ids=tokens())
        sentence = str(caught.value)
        assert sentence.startswith("Hamiltonian attention multiplies the weight of '")
        assert sentence.endswith("target modules.")
        assert "\n" not in sentence


def test_what_else_is_refused() -> None:
    model = adapted(**HAMILTONIAN)
    with pytest.raises(sf.InputError, match="adapter_names, or another hook, gives each row its own"):
        model(input_ids=tokens(), adapter_names=["default", "__base__"])
    some = adapted(adapter=lora(target_modules=["qkv"], trainable_token_indices={"tok_emb": [1, 2]}))
    with pytest.raises(sf.InputError, match=r"^The token table is also the head, .*'TrainableTokensWrapper' is not"):
        some(input_ids=tokens())


@pytest.mark.parametrize("settings", [{}, {"template": "ab2", "attention": "linear-hamiltonian"}], ids=str)
def test_maps_that_are_called_take_any_adapter(settings: dict[str, Any]) -> None:
    names = maps(settings)
    for adapter in (
        lora(use_dora=True, lora_dropout=0.1),
        peft.IA3Config(target_modules=names, feedforward_modules=[]),
    ):
        model = adapted(**settings, adapter=adapter)
        assert distance(model, merged(model)) <= MERGED
        assert logits(model.train()).isfinite().all()


def test_dropout_is_the_same_when_a_layer_is_computed_again() -> None:
    model = adapted("yurii", dtype=torch.float64, adapter=lora(lora_dropout=0.4)).train()
    found = []
    for again in (False, True):
        if again:
            model.base_model.model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(3)
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert found[0]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_adapter_is_saved_beside_an_exported_model(tmp_path: Path) -> None:
    model = adapted(**HAMILTONIAN)
    model.save_pretrained(tmp_path / "adapter")
    StepformerForCausalLM.of(tiny_base()).save_pretrained(tmp_path / "model")
    base = StepformerForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()), logits(model))
