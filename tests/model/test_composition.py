"""Templates x splittings: what has meaning builds, trains and compiles; the rest is refused with its sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stepformer as sf
from architectures import accepted
from helpers import ACCEPTED, REFUSED, TINY, pair_id, shake, tiny, tokens
from stepformer.rules import splittings, templates


def train_step(model: Any, optimizer: torch.optim.Optimizer) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One step on fixed data; returns the loss and the gradients."""
    loss = model(tokens(2), tokens(2, seed=1)).loss
    optimizer.zero_grad()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    return loss.detach(), gradients


def optimizer_of(model: sf.Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)


STARTS = {
    ("embed", "layernorm"): [],
    ("zero", "rmsnorm"): [],
    ("embed", "rmsnorm"): [pytest.mark.slow],
    ("zero", "layernorm"): [pytest.mark.slow],
}


@pytest.mark.parametrize(
    ("pair", "aux_init", "norm"),
    [
        pytest.param(pair, aux_init, norm, marks=marks, id=f"{pair_id(pair)}-{aux_init}-{norm}")
        for pair in ACCEPTED
        for (aux_init, norm), marks in STARTS.items()
        if accepted({**pair, "aux_init": aux_init})
    ],
)
def test_accepted_pair_takes_a_training_step(pair: dict[str, Any], aux_init: str, norm: str) -> None:
    """A step of length 1e-8 against the gradient lowers the loss by what the gradient promises, within 1 %.

    So short because scale-free updates (Newton-Schulz of small answers) are strongly curved at the start; fp64 still
    resolves the change to 1e-8.
    """
    model = tiny(**pair, aux_init=aux_init, norm=norm)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    loss = model(tokens(2), tokens(2, seed=1)).loss
    assert loss is not None
    loss.backward()
    length = torch.stack([p.grad.norm() for p in trained]).norm()
    assert length.isfinite()
    optimizer.param_groups[0]["lr"] = 1e-8 / length.item()
    optimizer.step()
    after = model(tokens(2), tokens(2, seed=1)).loss
    assert after is not None
    # 0.3 % of curvature seen
    assert (loss - after).item() == pytest.approx(1e-8 * length.item(), rel=0.03)


@pytest.mark.parametrize(("pair", "sentence"), REFUSED, ids=[pair_id(pair) for pair, _ in REFUSED])
def test_refused_pair_says_why(pair: dict[str, Any], sentence: str) -> None:
    with pytest.raises(sf.ConfigError) as caught:
        sf.ModelConfig.from_dict(pair)
    neither = sentence == "integrates the two fields" and pair["splitting"] != "lie-trotter"
    assert len(caught.value.problems) == 1 + neither  # nor can another splitting divide them
    assert sentence in caught.value.problems[0]
    assert all(problem.endswith(".") for problem in caught.value.problems)


def test_the_table_covers_every_registered_pair() -> None:
    """A new template or splitting must be added to the table of pairs, accepted or refused."""
    covered = {(p["template"], p["splitting"]) for p in ACCEPTED}
    covered |= {(p["template"], p["splitting"]) for p, _ in REFUSED if "splitting" in p}
    shipped = [e for e in templates if e.component.__module__.startswith("stepformer.")]
    assert covered == {(t.name, s.name) for t in shipped for s in splittings}


def compare_compiled(pair: dict[str, Any], backend: str, tolerance: float) -> None:
    """Loss and gradients of a compiled step against eager. No graph break is allowed."""
    torch._dynamo.reset()
    eager = shake(tiny(**pair, dtype=torch.float32), scale=0.1)
    twin = shake(tiny(**pair, dtype=torch.float32), scale=0.1)
    loss, gradients = train_step(eager, optimizer_of(eager))
    compiled = torch.compile(twin, backend=backend, fullgraph=True)
    other, others = train_step(compiled, optimizer_of(twin))
    assert other == pytest.approx(loss.item(), rel=tolerance)
    largest = max(g.abs().max() for g in gradients)
    for a, b in zip(gradients, others, strict=True):
        assert (a - b).abs().max() <= tolerance * largest


@pytest.mark.slow
@pytest.mark.parametrize("pair", ACCEPTED, ids=pair_id)
def test_aot_eager_equals_eager(pair: dict[str, Any]) -> None:
    """The same operators in the same order, but decompositions may round differently: 1e-5 in fp32."""
    compare_compiled(pair, "aot_eager", 1e-5)


REPRESENTATIVES: list[dict[str, Any]] = [
    {"template": "gd", "splitting": "lie-trotter"},
    {"template": "nesterov", "splitting": "lie-trotter"},
    {"template": "tables", "splitting": "lie-trotter", "value_tables": True, "mlp": "relu2", "head": "untied"},
    {"template": "triple-momentum", "splitting": "strang", "order": "ama"},
    {"template": "heavy-ball", "splitting": "parallel"},
    {"template": "nesterov", "splitting": "imex", "order": "mam", "k": 2, "velocity_norm": "every"},
    {"template": "nesterov", "splitting": "symplectic-euler"},
    {"template": "adamw", "splitting": "lie-trotter"},
    {"template": "muon", "splitting": "parallel"},
    {"template": "soap", "splitting": "lie-trotter"},
]


@pytest.mark.slow
@pytest.mark.parametrize("pair", REPRESENTATIVES, ids=pair_id)
def test_inductor_equals_eager(pair: dict[str, Any]) -> None:
    """Fused kernels reassociate sums: 1e-4 of the largest gradient in fp32."""
    compare_compiled(pair, "inductor", 1e-4)


def test_aot_eager_equals_eager_for_one_pair() -> None:
    """The fast set's sample of the two tests above."""
    compare_compiled({"template": "nesterov", "splitting": "lie-trotter"}, "aot_eager", 1e-5)


@pytest.mark.parametrize(
    "name", ["vanilla", *(pytest.param(n, marks=pytest.mark.slow) for n in sf.presets() if n != "vanilla")]
)
def test_other_lengths_compile(name: str) -> None:
    """Lengths that vary are symbols under torch.compile, which not every operator takes; the same sums, in fp32."""
    torch._dynamo.reset()
    model = tiny(name, dtype=torch.float32)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for length in (5, 7, 8):
        x = tokens(2, length)
        assert torch.allclose(compiled(x).logits, model(x).logits, atol=1e-5)


def test_options_survive_only_with_their_component() -> None:
    config = sf.model_config("imex-k2-mam", **TINY)
    assert config.replace(velocity_norm="every").option("k") == 2
    strang = config.replace(splitting="strang")
    assert strang.option("order") == "mam"
    assert "k" not in strang.options
