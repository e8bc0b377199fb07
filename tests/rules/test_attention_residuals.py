"""Attention residuals: where they are a plain GPT, what their blocks are, what is refused.

1e-12 in fp64 with norm_eps 1e-30: the same sums in another order (2e-16 seen).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_equations import assert_same

import stepformer as sf
from helpers import shake, tiny, tokens

SPLITTINGS = ("lie-trotter", "parallel")


def without_vectors(model: sf.Model) -> sf.Model:
    with torch.no_grad():
        for block in model.blocks:
            for w in block.arrays.parameters():
                w.zero_()
    return model


@pytest.mark.parametrize("blocks", range(9))
@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_with_vectors_of_zero_it_is_vanilla(splitting: str, blocks: int) -> None:
    """The mean of the sources times their number is their sum, the x of gradient descent."""
    own: dict[str, Any] = {"n_layer": 4, "norm_eps": 1e-30, "splitting": splitting}
    if blocks > (4 if splitting == "parallel" else 8):
        with pytest.raises(sf.ConfigError, match=f"blocks = {blocks} is more than the 4 oracle calls"):
            tiny(template="attnres", blocks=blocks, **own)
        return
    model = without_vectors(shake(tiny(template="attnres", blocks=blocks, **own)))
    plain = tiny(**own)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "arrays" not in k})
    ids, targets = tokens(), tokens(seed=1)
    ours, theirs = model(ids, targets), plain(ids, targets)
    assert (ours.logits - theirs.logits).abs().max() <= 1e-12 * theirs.logits.abs().max()
    for output in (ours, theirs):
        output.loss.backward()
    slopes = dict(model.named_parameters())
    for name, p in plain.named_parameters():
        assert (slopes[name].grad - p.grad).abs().max() <= 1e-12, name


def test_it_starts_as_vanilla() -> None:
    """With the norm_eps that everyone trains with: the point has the size of x, not of a mean of 24."""
    own = {"n_layer": 12, "d_model": 48, "dtype": torch.float64}
    ours, plain = tiny("attnres", **own), tiny(**own)
    assert all(not w.any() for block in ours.blocks for w in block.arrays.parameters())
    assert (ours(tokens()).logits - plain(tokens()).logits).abs().max() <= 1e-12


@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_as_many_blocks_as_calls_is_the_full_form(splitting: str) -> None:
    calls = 3 if splitting == "parallel" else 6
    full = shake(tiny("attnres", n_layer=3, splitting=splitting))
    blocks = tiny("attnres", n_layer=3, splitting=splitting, blocks=calls)
    blocks.load_state_dict(full.state_dict())
    assert torch.equal(full(tokens()).logits, blocks(tokens()).logits)


@pytest.mark.parametrize("settings", [{}, {"blocks": 4}, {"blocks": 8}, {"splitting": "parallel"}], ids=str)
def test_counts_at_small(settings: dict[str, Any]) -> None:
    model = sf.build("attnres", size="small", device="meta", **settings)
    plain = sf.build("vanilla", size="small", device="meta")
    calls = 12 if "splitting" in settings else 24
    assert model.num_parameters() - plain.num_parameters() == (calls + 1) * 768
    assert model.unused_parameters() == [f"blocks.0.arrays.{'w' if 'splitting' in settings else 'w_attn'}"]


@pytest.mark.parametrize("extra", [{"weight_sharing": "oracles"}, {"value_residual": "free"}, {"attention": "linear"}])
def test_it_composes(extra: dict[str, Any]) -> None:
    for blocks in (0, 3):
        assert_same(shake(tiny("attnres", n_layer=3, blocks=blocks, **extra)), tokens(2, 7), tokens(2, 7, seed=1))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"splitting": "strang"}, "splitting 'strang' takes fractions of steps"),
        ({"splitting": "imex"}, "works on a velocity stream"),
        ({"blocks": 5}, "blocks = 5 is more than the 4 oracle calls of this model"),
        ({"blocks": -1}, "blocks = -1 is below its minimum"),
        ({"embedding_skip": True}, "'embedding-skip' acts on x, and template 'attnres'"),
        ({"attention": "hamiltonian"}, "template 'attnres' does not integrate them"),
    ],
    ids=str,
)
def test_refusals(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(sf.ConfigError, match=sentence):
        tiny("attnres", **settings)


def test_hybrid_inference_is_refused() -> None:
    with pytest.raises(sf.InputError, match="this model has template 'attnres'"):
        tiny("attnres").hybrid(cutoff=1)
