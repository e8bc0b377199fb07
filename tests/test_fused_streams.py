"""Models whose streams run through fused passes equal the same models without them, values and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import stepformer as sf
from helpers import shake, tiny, tokens
from stepformer import kernels
from stepformer.kernels.common import Scalar
from stepformer.schemes import fused
from stepformer.schemes.first_order import Nesterov

SIZE = {"n_layer": 2, "n_head": 2, "d_model": 16, "context": 8, "vocab_size": 17}
FUSED = [
    *("vanilla", "hb", "yurii", "tmm", "rmsprop", "adam", "adamw", "ortho", "muon", "shampoo", "soap"),
    *("polyak-euler", "nesterov-euler", "symplectic-euler", "verlet-ama", "verlet-mam"),
    *("imex-k1-ama", "imex-ln-k1-mam", "imex-ln-k2-ama"),
]


def loss_and_gradients(model: sf.Model, ids: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(ids, targets).loss
    assert loss is not None
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by one family at every fused pass."""
    seen: list[str] = []
    settle = fused.FusedSubstep.settle

    def counted(self: fused.FusedSubstep, *args: object) -> object:
        seen.append(self.family)
        return settle(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(fused.FusedSubstep, "settle", counted)
    return seen


@pytest.mark.parametrize("name", FUSED)
def test_fused_equals_plain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 against the plain rule in fp64: 1e-5 of each gradient's norm for reordered sums and two divisions.

    Where the plain rule in fp32 is farther off itself (five Newton-Schulz steps of nearly singular matrices), three
    times its error; gradients that are pure rounding (gamma before a scale-free norm) get 1e-7 of the largest.
    """
    model = shake(tiny(name, dtype=torch.float32, **SIZE), scale=0.05)
    ids, targets = tokens(1, 5, 17), tokens(1, 5, 17, seed=1)
    _, narrow = loss_and_gradients(model, ids, targets)
    expected, gradients = loss_and_gradients(copy.deepcopy(model).double(), ids, targets)
    seen = passes(monkeypatch)
    with kernels.interpreted():
        loss, found = loss_and_gradients(model, ids, targets)
    assert len(seen) >= SIZE["n_layer"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert found.keys() == gradients.keys()
    largest = max(float(g.norm()) for g in gradients.values())
    for key, gradient in gradients.items():
        allowed = max(1e-5 * float(gradient.norm()), 3 * float((narrow[key] - gradient).norm())) + 1e-7 * largest
        assert float((found[key] - gradient).norm()) <= allowed, key


def test_without_drift_in_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shake(tiny("symplectic-euler", dtype=torch.float32, final_drift=True, norm="rmsnorm", **SIZE), scale=0.05)
    ids = tokens(1, 4, 17)
    expected = model(ids).logits
    seen = passes(monkeypatch)
    with kernels.interpreted():
        logits = model(ids).logits
    assert seen
    assert (logits - expected).norm() <= 1e-5 * expected.norm()  # fp32 rounding


@pytest.mark.parametrize("why", ["pinned", "skip", "subclass", "off", "fp64"])
def test_what_is_not_fused(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a fused pass would compute something else, or cannot, the plain rule runs."""
    changes = {"embedding_skip": True} if why == "skip" else {}
    dtype = torch.float64 if why == "fp64" else torch.float32
    model = tiny("yurii", dtype=dtype, **SIZE, **changes)
    if why == "pinned":
        model.pin_coefficients(beta=0.0)
    if why == "subclass":
        for block in model.blocks:
            block.template.__class__ = type("Mine", (Nesterov,), {})
    seen = passes(monkeypatch)
    with kernels.interpreted():
        if why == "off":
            with kernels.off():
                model(tokens(1, 4, 17))
        else:
            model(tokens(1, 4, 17))
    assert not seen


def test_scalar_values() -> None:
    raw = torch.tensor([0.3])
    assert Scalar(raw, "unit").times(-2.0).value() == -2 * torch.sigmoid(raw)
    assert Scalar().value() == 1.0
