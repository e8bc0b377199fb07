"""Layers that share their oracles: one set of weights with one name, the function of as many equal copies."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import stepformer as sf
from helpers import shake, tiny, tokens
from runs import make_corpus
from stepformer.training import load_run, run_config, train
from stepformer.training.speed import flops_per_token

SHARED = {"attention": ("attn",), "oracles": ("attn", "mlp")}


@pytest.mark.parametrize("sharing", SHARED)
@pytest.mark.parametrize("name", ["vanilla", "yurii", "symp-etd-ab2", "linear-symp-plain-euler", "kl-carried"])
def test_it_is_the_model_whose_layers_have_equal_weights(name: str, sharing: str) -> None:
    """The same logits to the bit, and as gradient the sum over the copies; fp64 sums of three terms: 1e-14."""
    shared = shake(tiny(name, n_layer=3, weight_sharing=sharing))
    apart = tiny(name, n_layer=3)
    own = {key for key, _ in shared.named_parameters()}
    with torch.no_grad():
        for key, parameter in apart.named_parameters():
            place = key if key in own else ".".join(["shared", *key.split(".")[2:]])
            parameter.copy_(shared.get_parameter(place)).requires_grad_(True)
    ids, targets = tokens(), tokens(seed=1)
    found, expected = shared(ids, targets), apart(ids, targets)
    assert torch.equal(found.logits, expected.logits)
    found.loss.backward()
    expected.loss.backward()
    for key, parameter in shared.named_parameters():
        places = [key.replace("shared", f"blocks.{i}") for i in range(3)] if key.startswith("shared.") else [key]
        gradients = [apart.get_parameter(place).grad for place in places]
        if parameter.grad is not None:
            total = sum(g for g in gradients if g is not None)
            assert (parameter.grad - total).abs().max() <= 1e-14 * max(1.0, float(total.abs().max())), key


@pytest.mark.parametrize("sharing", SHARED)
def test_counts_names_and_copies(sharing: str) -> None:
    plain, shared = tiny("yurii", n_layer=4), tiny("yurii", n_layer=4, weight_sharing=sharing)
    saved = 3 * sum(p.numel() for oracle in SHARED[sharing] for p in getattr(plain.blocks[0], oracle).parameters())
    assert plain.num_parameters() - shared.num_parameters() == saved
    assert list(shared.state_dict()) == [name for name, _ in shared.named_parameters()]
    assert flops_per_token(shared) == flops_per_token(plain)
    twin = copy.deepcopy(shared)
    assert all(block.attn is twin.shared["attn"] for block in twin.blocks)
    assert twin.shared["attn"] is not shared.shared["attn"]
    assert (twin.blocks[1].mlp is twin.blocks[2].mlp) == (sharing == "oracles")
    std = 0.02 / math.sqrt(2 * 4)  # output maps start smaller with depth
    assert tiny("vanilla", n_layer=4, d_model=96, weight_sharing=sharing).shared["attn"].out.weight.std().item() == (
        pytest.approx(std, rel=0.05)
    )


def test_what_some_layer_uses_is_trained() -> None:
    """B does nothing in the first layer of symp-*, and V nothing in the last of linear-symp-*: shared, both learn."""
    for name in ("symp-exp-euler", "linear-symp-exp-euler"):
        model = tiny(name, weight_sharing="oracles")
        assert not any(re.match(r"blocks\.\d+\.(attn|mlp)\.", unused) for unused in model.unused_parameters())
        assert all(p.requires_grad for p in model.shared.parameters())


def test_one_layer_shares_with_nobody() -> None:
    model = tiny("vanilla", n_layer=1, weight_sharing="oracles")
    assert not model.shared
    assert torch.equal(model(tokens()).logits, tiny("vanilla", n_layer=1)(tokens()).logits)


@pytest.mark.parametrize(
    "settings", [{}, {"norm": "rmsnorm"}, {"preset": "symp-etd-ab2", "activation_checkpointing": True}]
)
def test_trained_saved_and_loaded(settings: dict[str, Any], tmp_path: Path) -> None:
    """Also where a layer has no parameter of its own: plain steps under gainless norms."""
    corpus = make_corpus(tmp_path / "corpus")
    small = {"n_layer": 3, "n_head": 2, "d_model": 16, "context": 16, "batch": 2, "steps": 3, "eval_tokens": 64}
    small |= {"preset": "vanilla", "weight_sharing": "oracles", "corpus": str(corpus.folder), "device": "cpu"}
    facts = train(run_config("vanilla", **{**small, "size": "tiny", **settings}), tmp_path / "run", quiet=True)
    run = load_run(tmp_path / "run", "last")
    assert facts["parameters"] == run.model.num_parameters()
    assert all(block.attn is run.model.shared["attn"] for block in run.model.blocks)
    assert math.isfinite(facts["val_loss"])


def test_through_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from stepformer.exchange.huggingface import StepformerForCausalLM

    model = StepformerForCausalLM.of(shake(tiny("yurii", dtype=torch.float32, weight_sharing="oracles")))
    model.save_pretrained(tmp_path)
    loaded = StepformerForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    assert loaded.model.blocks[1].attn is loaded.model.shared["attn"]


def test_only_known_ways_of_sharing() -> None:
    with pytest.raises(sf.ConfigError, match="weight_sharing"):
        sf.model_config("vanilla", weight_sharing="all")
