"""Models whose streams run through fused passes equal the same models without them, values and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import stepformer as sf
from draws import nudged
from helpers import shake, tiny, tokens
from stepformer.model.engines import turns as fused
from stepformer.ops import kernels
from stepformer.ops.common import Scalar
from stepformer.rules import State, Template
from stepformer.rules.first_order import Nesterov
from stepformer.rules.kronecker import SOAP, Shampoo
from stepformer.rules.spectral import Muon
from stepformer.rules.splittings import IMEX, LieTrotter, Substeps

SCHEMES = ("plain-euler", "presymp-euler", "exp-euler", "conformal-euler", "ab2", "etd-ab2")
SIZE = {"n_layer": 2, "n_head": 2, "d_model": 16, "context": 8, "vocab_size": 17}
FUSED = [
    *("vanilla", "hb", "yurii", "tmm", "rmsprop", "adam", "adamw", "ortho", "muon", "shampoo", "soap"),
    *("polyak-euler", "nesterov-euler", "symplectic-euler", "verlet-ama", "verlet-mam"),
    *("imex-k1-ama", "imex-ln-k1-mam", "imex-ln-k2-ama"),
]


HAMILTONIAN: dict[str, tuple[str, dict[str, object]]] = {
    **{f"{kind}symp-{scheme}": (f"{kind}symp-{scheme}", {}) for kind in ("", "linear-") for scheme in SCHEMES},
    "lawson": ("symp-etd-ab2", {"etd": "lawson"}),
    "one ratio, looking ahead": ("symp-ab2", {"history": "constant", "lookahead": True, "step_gradient": True}),
    "momentum from a table": ("symp-presymp-euler", {"aux_init": "embed", "damping": "linear", "norm": "rmsnorm"}),
    "a velocity of the MLP's own": ("symp-exp-euler", {"mlp_step": "C", "damping": "log"}),
    "linear, the MLP kicks y": ("linear-symp-ab2", {"mlp_step": "B"}),
}
STRANG = [f"{name} {order}" for name in ("ortho", "muon", "shampoo", "soap") for order in ("ama", "mam")]


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


QUICK = ("vanilla", "yurii", "adamw", "soap", "imex-ln-k2-ama")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in (*FUSED, *STRANG)]
)
def test_fused_equals_plain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 against the plain rule in fp64: 1e-5 of each gradient's norm for reordered sums and two divisions.

    Where the plain rule in fp32 is farther off itself (five Newton-Schulz steps of nearly singular matrices), ten times
    its error, the largest of eight copies whose weights differ by up to 7e-7: the error of one number is luck.
    Gradients that are pure rounding (gamma before a scale-free norm) get 1e-7 of the largest.
    """
    # a large eps, so that a norm which scales it shows
    name, _, order = name.partition(" ")
    changes = {"splitting": "strang", "order": order} if order else {}
    compare_with_plain(
        shake(tiny(name, dtype=torch.float32, norm_eps=1e-2, **SIZE, **changes), scale=0.05), monkeypatch
    )


def plain_errors(model: sf.Model, ids: Tensor, targets: Tensor) -> dict[str, float]:
    """How far the plain rule's fp32 gradients are from its fp64 ones: the most of eight copies, nudged."""
    worst: dict[str, float] = {}
    for moved in nudged(model, 7e-7):
        _, narrow = loss_and_gradients(moved, ids, targets)
        _, wide = loss_and_gradients(moved.double(), ids, targets)
        for key, gradient in wide.items():
            worst[key] = max(worst.get(key, 0.0), float((narrow[key] - gradient).norm()))
    return worst


def compare_with_plain(model: sf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, targets = tokens(1, 5, 17), tokens(1, 5, 17, seed=1)
    errors = plain_errors(model, ids, targets)
    expected, gradients = loss_and_gradients(copy.deepcopy(model).double(), ids, targets)
    seen = passes(monkeypatch)
    with kernels.interpreted():
        loss, found = loss_and_gradients(model, ids, targets)
    assert len(seen) >= model.config.n_layer
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert gradients.keys() <= found.keys()
    assert not any(found[key].any() for key in found.keys() - gradients.keys())
    largest = max(float(g.norm()) for g in gradients.values())
    for key, gradient in gradients.items():
        allowed = max(1e-5 * float(gradient.norm()), 10 * errors[key]) + 1e-7 * largest
        assert float((found[key] - gradient).norm()) <= allowed, key


FIRST_ONES = ("linear-symp-ab2",)


@pytest.mark.parametrize(
    "case", [n if n in FIRST_ONES else pytest.param(n, marks=pytest.mark.slow) for n in HAMILTONIAN]
)
def test_fused_integrators_equal_the_plain_ones(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, in three layers: the second and third have a past."""
    name, changes = HAMILTONIAN[case]
    model = shake(tiny(name, dtype=torch.float32, norm_eps=1e-2, **{**SIZE, "n_layer": 3}, **changes), scale=0.05)
    compare_with_plain(model, monkeypatch)


@pytest.mark.parametrize("name", ["yurii", "imex-ln-k1-mam", "imex-k2-ama", "symp-exp-euler"])
def test_positions_have_one_user(name: str) -> None:
    """Else autograd adds gradients of x in passes of its own; where x stays, it comes through the pass that looks."""
    model = tiny(name, dtype=torch.float32, **SIZE)
    ids, targets = tokens(1, 5, 17), tokens(1, 5, 17, seed=1)
    with kernels.interpreted():
        loss = model(ids, targets).loss
    assert loss is not None
    users: dict[tuple[object, int], int] = {}
    found, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        found.add(node)
        for before, output in node.next_functions:
            users[before, output] = users.get((before, output), 0) + 1
            waiting.append(before)
    positions = [n for (node, output), n in users.items() if output == 0 and any(w in str(node) for w in MOVERS)]
    assert len(positions) >= SIZE["n_layer"]
    assert set(positions) == {1}
    assert any("_Staying" in str(node) for node in found)  # at least before the first answer


MOVERS = ("_Staying", "velocity_pass", "integrator_pass", "stepformer_embed")  # x is their first output


def test_an_answer_asked_for_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """x that came through a pass without a graph must not replace the one that has one."""

    class Stopping(IMEX):
        name, deferrable = "imex", True

        def step(self, turns: Substeps, s: State) -> State:
            explicit, implicit = self.ordered(turns)
            half = explicit.kick(s, explicit.ask(s))
            new = implicit.kick(half, implicit.ask(half))
            with torch.no_grad():
                answer = implicit.ask(new)
            return implicit.drift(implicit.normalise(implicit.kick(half, answer)))

    model = shake(tiny("imex-k2-ama", dtype=torch.float32, norm_eps=1e-2, **SIZE), scale=0.05)
    for block in model.blocks:
        block.splitting.__class__ = Stopping
    compare_with_plain(model, monkeypatch)


def test_a_splitting_that_does_not_move_what_must_move() -> None:
    class Still(LieTrotter):
        name, deferrable = "lie-trotter", True

        def step(self, turns: Substeps, s: State) -> State:
            attention, mlp = turns["attn"], turns["mlp"]
            return mlp.take(attention.kick(s, attention.ask(s)))

    model = tiny("adam", dtype=torch.float32, **SIZE)
    for block in model.blocks:
        block.splitting.__class__ = Still
    with kernels.interpreted(), pytest.raises(sf.InputError, match="cannot be `deferrable`"):
        model(tokens(1, 5, 17), tokens(1, 5, 17, seed=1))


@pytest.mark.parametrize("order", [[1, 2], [2, 1, 0], [0, 1, 1, 2]])
def test_blocks_may_be_taken_out_turned_round_and_used_twice(order: list[int]) -> None:
    """The clock and the past go with the place of a layer in the model, not with its number."""
    model = shake(tiny("symp-ab2", dtype=torch.float32, **{**SIZE, "n_layer": 3}), scale=0.05)
    blocks = list(model.blocks)
    model.blocks = type(model.blocks)([blocks[i] for i in order])
    ids = tokens(1, 5, 17)
    expected = model(ids).logits
    with kernels.interpreted():
        found = model(ids).logits
    assert (found - expected).norm() <= 1e-5 * expected.norm()  # fp32 rounding


def test_layers_that_follow_different_rules_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("symp-etd-ab2", dtype=torch.float32, **SIZE)
    model.blocks[1].template.history = "constant"
    seen = passes(monkeypatch)
    with kernels.interpreted():
        model(tokens(1, 4, 17))
    assert not seen


@pytest.mark.parametrize("changes", [{"mlp_step": "A"}, {"mlp_step": "C", "lookahead": True}])
def test_integrators_without_a_pass(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("symp-presymp-euler", dtype=torch.float32, **SIZE, **changes)
    seen = passes(monkeypatch)
    with kernels.interpreted():
        model(tokens(1, 4, 17))
    assert not seen


def test_without_drift_in_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shake(tiny("symplectic-euler", dtype=torch.float32, final_drift=True, norm="rmsnorm", **SIZE), scale=0.05)
    ids = tokens(1, 4, 17)
    expected = model(ids).logits
    seen = passes(monkeypatch)
    with kernels.interpreted():
        logits = model(ids).logits
    assert seen
    assert (logits - expected).norm() <= 1e-5 * expected.norm()  # fp32 rounding


@pytest.mark.parametrize("why", ["pinned", "skip", "subclass", "splitting", "norm", "hook", "aux hook", "off", "fp64"])
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
    if why == "splitting":
        for block in model.blocks:
            block.splitting.__class__ = type("Mine", (LieTrotter,), {})
    if why == "norm":
        model.blocks[1].mlp_norm = nn.RMSNorm(16)
    if why == "aux hook":
        model.blocks[1].aux_norms["attn"].register_full_backward_hook(lambda module, before, after: None)
    if why == "hook":
        model.blocks[1].attn_norm.register_forward_hook(lambda module, inputs, output: 2 * output)
    seen = passes(monkeypatch)
    with kernels.interpreted():
        if why == "off":
            with kernels.off():
                model(tokens(1, 4, 17))
        else:
            model(tokens(1, 4, 17))
    assert not seen


def test_a_gain_of_zero_learns() -> None:
    """An auxiliary norm may have a gain of exactly 0: its gradient is that of the plain rule."""
    model = tiny("yurii", dtype=torch.float32, **SIZE)
    with torch.no_grad():
        model.blocks[0].aux_norms["attn"].weight[3] = 0.0
    ids, targets = tokens(1, 5, 17), tokens(1, 5, 17, seed=1)
    _, expected = loss_and_gradients(model, ids, targets)
    with kernels.interpreted():
        _, found = loss_and_gradients(model, ids, targets)
    key = "blocks.0.aux_norms.attn.weight"
    assert expected[key][3] != 0
    assert (found[key] - expected[key]).norm() <= 1e-5 * expected[key].norm()  # fp32 rounding


def test_tangents_are_not_lost() -> None:
    """Forward-mode derivatives take the plain rule: kernels have none."""
    model = tiny("vanilla", dtype=torch.float32, attention_backend="math", **SIZE)
    ids = tokens(1, 4, 17)
    weight = model.blocks[0].mlp.up.weight

    def tangent() -> Tensor:
        with forward_ad.dual_level(), torch.no_grad():
            dual = forward_ad.make_dual(weight.detach(), torch.ones_like(weight))
            named = {**dict(model.named_parameters()), "blocks.0.mlp.up.weight": dual}
            out = torch.func.functional_call(model, named, (ids,)).logits
            found = forward_ad.unpack_dual(out).tangent
            assert found is not None
            return found

    expected = tangent()
    with kernels.interpreted():
        assert torch.equal(tangent(), expected)
    assert expected.norm() > 0


def test_replaced_parameters() -> None:
    """`functional_call` puts plain tensors where parameters were."""
    model = tiny("yurii", dtype=torch.float32, **SIZE)
    ids = tokens(1, 4, 17)
    named = {name: p.detach() + 0.01 for name, p in model.named_parameters()}
    expected = torch.func.functional_call(model, named, (ids,)).logits
    with kernels.interpreted():
        found = torch.func.functional_call(model, named, (ids,)).logits
    assert (found - expected).norm() <= 1e-5 * expected.norm()  # fp32 rounding


@pytest.mark.parametrize("base", [Shampoo, SOAP, Muon])
def test_a_rule_of_ones_own_is_not_replaced_by_a_kernel(base: type[Template]) -> None:
    """A subclass of a rule that has a kernel keeps its own methods."""
    name = {Shampoo: "shampoo", SOAP: "soap", Muon: "muon"}[base]
    method = "orthogonal" if base is Muon else "whitened"
    model = tiny(name, dtype=torch.float32, **SIZE)
    asked: list[int] = []

    def mine(self: Template, g: Tensor, *rest: Any) -> Any:
        asked.append(1)
        return g if base is Muon else {"u": g}

    for block in model.blocks:
        block.template.__class__ = type("Mine", (base,), {method: mine})
    with kernels.interpreted():
        model(tokens(1, 4, 17))
    assert len(asked) == 2 * SIZE["n_layer"]


def test_streams_that_a_rule_adds() -> None:
    """A rule may leave a stream that the state did not begin with."""
    state = State(torch.zeros(1, 2, 4), {"v": torch.zeros(1, 2, 4, dtype=torch.bfloat16)})
    later = State(torch.zeros(1, 2, 4).double(), {"v": torch.ones(1, 2, 4), "new": torch.ones(1)})
    cast = later.in_dtypes_of(state)
    assert (cast.x.dtype, cast.v.dtype, cast.new.dtype) == (torch.float32, torch.bfloat16, torch.float32)


def test_scalar_values() -> None:
    raw = torch.tensor([0.3])
    assert Scalar(raw, "unit").times(-2.0).value() == -2 * torch.sigmoid(raw)
    assert Scalar().value() == 1.0
