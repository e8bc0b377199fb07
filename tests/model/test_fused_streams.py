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
from stepformer.model.engines import fused
from stepformer.model.engines.planning import Plan
from stepformer.ops import kernels
from stepformer.rules import State, Template
from stepformer.rules.coefficients import Values
from stepformer.rules.first_order import Nesterov
from stepformer.rules.kronecker import SOAP, Shampoo
from stepformer.rules.spectral import Muon
from stepformer.rules.splittings import IMEX, LieTrotter, Substeps

pytestmark = pytest.mark.usefixtures("poisoned")  # memory that nobody has written is NaN
SCHEMES = ("plain-euler", "presymp-euler", "exp-euler", "conformal-euler", "ab2", "etd-ab2")
SIZE = {"n_layer": 2, "n_head": 2, "d_model": 16, "context": 8, "vocab_size": 17}
FUSED = [
    *("vanilla", "hb", "yurii", "tmm", "tables", "rmsprop", "adam", "adamw", "ortho", "muon", "shampoo", "soap"),
    *("polyak-euler", "nesterov-euler", "symplectic-euler", "verlet-ama", "verlet-mam"),
    *("imex-k1-ama", "imex-ln-k1-mam", "imex-ln-k2-ama", "linear", "entropy", "kl-carried", "attnres", "hyper", "mhc"),
]


HAMILTONIAN: dict[str, tuple[str, dict[str, object]]] = {
    **{f"{kind}symp-{scheme}": (f"{kind}symp-{scheme}", {}) for kind in ("", "linear-") for scheme in SCHEMES},
    "cox-matthews": ("symp-etd-ab2", {"etd": "cox-matthews"}),
    "alpha of Nesterov": ("symp-plain-euler", {"memory": "nesterov", "aux_init": "embed"}),
    "another clock": ("linear-symp-presymp-euler", {"t0": 2.5, "lookahead": True}),
    "particles": ("symp-presymp-euler", {"system": "particles", "n0": 8, "score_bound": 0.0}),
    "shared layers": ("symp-exp-euler", {"weight_sharing": "oracles"}),
    "one ratio, looking ahead": ("symp-ab2", {"history": "constant", "lookahead": True, "step_gradient": True}),
    "momentum from a table": ("symp-presymp-euler", {"aux_init": "embed", "damping": "linear", "norm": "rmsnorm"}),
    "a velocity of the MLP's own": ("symp-exp-euler", {"mlp_step": "C", "damping": "log"}),
    "linear, the MLP kicks y": ("linear-symp-ab2", {"mlp_step": "B"}),
    "along the attention's motion": ("symp-presymp-euler", {"mlp_step": "A"}),
    "looking ahead, a velocity of the MLP's own": ("symp-presymp-euler", {"mlp_step": "C", "lookahead": True}),
}
STRANG = [f"{name} {order}" for name in ("ortho", "muon", "shampoo", "soap") for order in ("ama", "mam")]
EXTRAS: dict[str, tuple[str, dict[str, object]]] = {
    "embedding skip": ("yurii", {"embedding_skip": True, "embedding_skip_start": 0.2}),
    "value residual": ("vanilla", {"value_residual": "free"}),
    "value residual, two calls": ("verlet-ama", {"value_residual": "unit"}),
    "value tables": ("value-tables", {"mlp": "relu2", "head": "untied"}),
    "value tables and a value residual": ("vanilla", {"value_tables": True, "value_residual": "free"}),
    "rotary and QK-norm": ("adam", {"positions": "rotary", "qk_norm": True}),
    "documents and a soft cap": ("yurii", {"document_separator": 3, "logit_softcap": 4.0}),
    "biases": ("yurii", {"bias": True}),
    "shared layers": ("yurii", {"weight_sharing": "oracles", "value_residual": "free"}),
    "scaled answers": ("scaled", {}),
    "normalised answers": ("hb", {"output_norm": True, "embedding_skip": True, "norm": "rmsnorm"}),
    "both of them": ("nesterov-euler", {"output_norm": True, "scale": "layerscale"}),
    "vectors on answers": ("nesterov-euler", {"scale": "layerscale"}),
    "an average of earlier layers": ("denseformer", {"n_layer": 4, "value_residual": "free"}),
    "every second of them": ("yurii", {"denseformer": True, "dilation": 2, "n_layer": 4}),
    "U-shaped skips": ("unet", {"n_layer": 5}),
    "all around": ("verlet-ama", {"scale": "scalar", "denseformer": True, "unet": True, "embedding_skip": True}),
    "attention over blocks of depth": ("attnres", {"blocks": 2, "value_residual": "free"}),
    "attention over depth, one call a layer": ("attnres", {"splitting": "parallel", "norm": "rmsnorm"}),
    "everything": (
        "nesterov-euler",
        {"embedding_skip": True, "value_residual": "free", "qk_norm": True, "positions": "rotary", "norm": "rmsnorm"},
    ),
}


def loss_and_gradients(model: sf.Model, ids: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(ids, targets).loss
    assert loss is not None
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by the text of its program at every fused pass."""
    seen: list[str] = []
    own = fused.Run._pass

    def counted(self: fused.Run, step: Any) -> None:
        seen.append(step.program.text)
        own(self, step)

    monkeypatch.setattr(fused.Run, "_pass", counted)
    return seen


QUICK = ("yurii", "tables", "adamw", "attnres", "hyper")


def quickly(names: Any, quick: Any) -> list[Any]:
    """All of them, slow but for some: the interpreter takes a second for a layer."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", quickly((*FUSED, *STRANG), QUICK))
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


def compare_with_plain(model: sf.Model, monkeypatch: pytest.MonkeyPatch, *, unfused: bool = False) -> None:
    """Loss and gradients; every pass of the plan runs once, or none if the model is one that is not fused."""
    ids, targets = tokens(1, 2, 17), tokens(1, 2, 17, seed=1)
    errors = plain_errors(model, ids, targets)
    expected, gradients = loss_and_gradients(copy.deepcopy(model).double(), ids, targets)
    seen = passes(monkeypatch)
    with kernels.interpreted():
        loss, found = loss_and_gradients(model, ids, targets)
    if unfused:
        assert not seen
    else:
        assert len(seen) == len(model.plan().passes()) > len(model.blocks)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert gradients.keys() <= found.keys()
    assert not any(found[key].any() for key in found.keys() - gradients.keys())
    largest = max(float(g.norm()) for g in gradients.values())
    for key, gradient in gradients.items():
        allowed = max(1e-5 * float(gradient.norm()), 10 * errors[key]) + 1e-7 * largest
        assert float((found[key] - gradient).norm()) <= allowed, key


def compare_logits(model: sf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """1e-5 of their norm for fp32 rounding; every pass of the plan runs once."""
    ids = tokens(1, 2, 17)
    expected = model(ids).logits
    seen = passes(monkeypatch)
    with kernels.interpreted():
        found = model(ids).logits
    assert len(seen) == len(model.plan().passes()) > len(model.blocks)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("case", quickly(HAMILTONIAN, ("linear-symp-ab2", "alpha of Nesterov")))
def test_fused_integrators_equal_the_plain_ones(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, in three layers: the second and third have a past."""
    name, changes = HAMILTONIAN[case]
    model = shake(tiny(name, dtype=torch.float32, norm_eps=1e-2, **{**SIZE, "n_layer": 3}, **changes), scale=0.05)
    compare_with_plain(model, monkeypatch)


@pytest.mark.parametrize("case", quickly(EXTRAS, ("everything", "value tables", "attention over blocks of depth")))
def test_fused_extras_equal_the_plain_ones(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes = EXTRAS[case]
    compare_with_plain(shake(tiny(name, dtype=torch.float32, **{**SIZE, **changes}), scale=0.05), monkeypatch)


def users_of(loss: Tensor) -> dict[tuple[Any, int], list[Any]]:
    """Which nodes of the autograd graph read each output of each node."""
    users: dict[tuple[Any, int], list[Any]] = {}
    found, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        found.add(node)
        for before, output in node.next_functions:
            users.setdefault((before, output), []).append(node)
            waiting.append(before)
    return users


def is_pass(node: Any) -> bool:
    return "_RowPass" in str(node)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("yurii", {}), ("imex-k2-ama", {}), ("symp-exp-euler", {}), ("adam", {}),
        ("yurii", {"embedding_skip": True}), ("nesterov-euler", {}), ("tables", {}), ("value-tables", {}),
    ],
    ids=str,
)  # fmt: skip
def test_rows_have_one_user(name: str, changes: dict[str, Any]) -> None:
    """Else autograd adds their gradients in passes of its own; who is read again comes through the pass that reads.

    That holds for all that a pass reads, except gains and lines of numbers, and for all that it writes, except what a
    Hamiltonian attention reads: it multiplies the same rows by several matrices.
    """
    model = tiny(name, dtype=torch.float32, **SIZE, **changes)
    with kernels.interpreted():
        loss = model(tokens(1, 2, 17), tokens(1, 2, 17, seed=1)).loss
    assert loss is not None
    users, planned = users_of(loss), {step.program.text for step in model.plan().passes()}

    def is_planned(node: Any) -> bool:  # not an inner product of a Hamiltonian attention
        return is_pass(node) and node.own.program.text in planned

    nodes = {node for node, _ in users if is_planned(node)}
    assert len(nodes) == len(model.plan().passes())
    for (before, output), readers in users.items():
        if before is not None and "AccumulateGrad" not in str(before):
            assert sum(map(is_planned, readers)) <= 1, (str(before), output)
    written = {key: readers for key, readers in users.items() if is_planned(key[0]) or "embed" in str(key[0])}
    assert len(written) > 3 * SIZE["n_layer"]
    if model.config.attention != "hamiltonian":
        assert {len(readers) for readers in written.values()} == {1}


def test_an_answer_asked_for_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stops gradients runs as it is written: a pass would not stop them."""

    class Stopping(IMEX):
        name = "imex"

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
    assert fused.structural(model) == "it computes something without gradients"
    compare_with_plain(model, monkeypatch, unfused=True)


@pytest.mark.parametrize(
    "order", [[1, 2], *(pytest.param(o, marks=pytest.mark.slow) for o in ([2, 1, 0], [0, 1, 1, 2]))]
)
def test_blocks_may_be_taken_out_turned_round_and_used_twice(order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock and the past go with the place of a layer in the model, not with its number."""
    model = shake(tiny("symp-ab2", dtype=torch.float32, **{**SIZE, "n_layer": 3}), scale=0.05)
    assert fused.structural(model) is None  # what was planned for the blocks before
    blocks = list(model.blocks)
    model.blocks = type(model.blocks)([blocks[i] for i in order])
    compare_logits(model, monkeypatch)


def test_layers_that_follow_different_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is made of what each layer does."""
    model = shake(tiny("symp-etd-ab2", dtype=torch.float32, **SIZE), scale=0.05)
    model.blocks[1].template.history = "constant"
    compare_logits(model, monkeypatch)


def test_a_norm_that_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was planned before is not what runs."""
    model = shake(tiny("yurii", dtype=torch.float32, **SIZE), scale=0.05)
    assert fused.structural(model) is None
    model.blocks[1].mlp_norm = nn.RMSNorm(16, eps=0.1)
    model.final_norm = nn.LayerNorm(16, eps=0.3)
    compare_logits(model, monkeypatch)


class Lazy(Nesterov):
    """A rule that inherits all but one line."""

    def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
        return s.replace(v=c.beta * s.v + scale * c.gamma * torch.tanh(g) - 0.1 * g.mean(dim=-1, keepdim=True))


class Twice(LieTrotter):
    """The attention's turn once more after the MLP's; the velocity of the first is forgotten."""

    def step(self, turns: Substeps, s: State) -> State:
        s = turns["mlp"].take(turns["attn"].take(s, 0.5).replace(v=s.v), 0.7)
        return turns["attn"].take(s, 0.25)

    def calls(self) -> dict[str, int]:
        return {"attn": 2, "mlp": 1}


@pytest.mark.parametrize("what", quickly(["rule", "splitting", "both"], ["both"]))
def test_subclasses_are_followed_themselves(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are made of a class's own methods, not of those that it inherits from."""
    model = shake(tiny("yurii", dtype=torch.float32, **SIZE), scale=0.05)
    ids = tokens(1, 3, 17)
    before = model(ids).logits
    for block in model.blocks:
        if what != "splitting":
            block.template.__class__ = Lazy
        if what != "rule":
            block.splitting.__class__ = Twice
    assert (model(ids).logits - before).norm() > 1e-3 * before.norm()
    compare_with_plain(model, monkeypatch)


@pytest.mark.parametrize("base", quickly([Shampoo, SOAP, Muon], [Muon]))
def test_a_rule_of_ones_own_is_not_replaced_by_a_kernel(base: type[Template], monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass of a rule that has a kernel keeps its own methods."""
    name = {Shampoo: "shampoo", SOAP: "soap", Muon: "muon"}[base]
    method = "orthogonal" if base is Muon else "whitened"
    model = shake(tiny(name, dtype=torch.float32, **SIZE), scale=0.05)

    def mine(self: Template, g: Tensor, *rest: Any) -> Any:
        return g if base is Muon else {"u": g}

    for block in model.blocks:
        block.template.__class__ = type("Mine", (base,), {method: mine})
    compare_logits(model, monkeypatch)


def test_without_drift_in_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shake(tiny("symplectic-euler", dtype=torch.float32, final_drift=True, norm="rmsnorm", **SIZE), scale=0.05)
    compare_logits(model, monkeypatch)


class OwnNorm(nn.LayerNorm):
    def forward(self, p: Tensor) -> Tensor:
        return 2 * super().forward(p)


NOT_FUSED = (
    *("pinned", "pinned extra", "norm", "norm's eps", "hook", "aux hook", "block hook", "final hook", "off", "fp64"),
    *("watched", "checkpointing"),
)


@pytest.mark.parametrize("why", NOT_FUSED)
def test_what_is_not_fused(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a fused pass would compute something else, or cannot, the plain rule runs; else the same model is fused."""
    changes: dict[str, Any] = {"activation_checkpointing": True} if why == "checkpointing" else {}
    dtype = torch.float64 if why == "fp64" else torch.float32
    model = tiny("yurii", dtype=dtype, **SIZE, value_residual="unit", **changes)
    seen, ids = passes(monkeypatch), tokens(1, 1, 17)
    if why == "pinned":
        model.pin_coefficients(beta=0.0)
    if why == "pinned extra":
        model.pin_coefficients(lambda_v=0.0)
    if why == "norm":
        model.blocks[1].mlp_norm = OwnNorm(16)
    if why == "norm's eps":
        model.blocks[1].mlp_norm = nn.RMSNorm(16)
    if why == "aux hook":
        model.blocks[1].aux_norms["attn"].register_full_backward_hook(lambda module, before, after: None)
    if why == "hook":
        model.blocks[1].attn_norm.register_forward_hook(lambda module, inputs, output: 2 * output)
    if why == "block hook":
        model.blocks[1].register_forward_pre_hook(lambda module, inputs: None)
    if why == "final hook":
        model.final_norm.register_forward_hook(lambda module, inputs, output: 2 * output)
    with kernels.interpreted():
        if why == "off":
            with kernels.off():
                model(ids)
        elif why == "watched":
            model.observe(ids)
        else:
            model(ids)
        assert not seen
        model.unpin_coefficients()
        model.eval()
        if why in ("pinned", "pinned extra", "off", "watched", "checkpointing"):
            model(ids)
            assert len(seen) == len(model.plan().passes())


def test_pins_do_not_stay_in_a_plan() -> None:
    """A model is planned once, whatever its coefficients are: pinned, free, and trained on."""
    model, ids = shake(tiny("yurii", dtype=torch.float32, **SIZE), scale=0.05), tokens(1, 2, 17)
    for change in ("none", "pinned", "unpinned", "trained"):
        if change == "pinned":
            model.pin_coefficients(beta=0.0)
        if change == "unpinned":
            model.unpin_coefficients()
        if change == "trained":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.3)
        expected = model(ids).logits
        with kernels.interpreted():
            found = model(ids).logits
        assert (found - expected).norm() <= 1e-5 * expected.norm(), change  # fp32 rounding


def test_a_gain_of_zero_learns() -> None:
    """An auxiliary norm may have a gain of exactly 0: its gradient is that of the plain rule."""
    model = tiny("yurii", dtype=torch.float32, **SIZE)
    with torch.no_grad():
        model.blocks[0].aux_norms["attn"].weight[3] = 0.0
    ids, targets = tokens(1, 3, 17), tokens(1, 3, 17, seed=1)
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


def test_replaced_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """`functional_call` puts plain tensors where parameters were: gains, coefficients and tables."""
    model = tiny("yurii", dtype=torch.float32, **SIZE)
    ids = tokens(1, 2, 17)
    named = {name: p.detach() + 0.01 for name, p in model.named_parameters()}
    expected = torch.func.functional_call(model, named, (ids,)).logits
    seen = passes(monkeypatch)
    with kernels.interpreted():
        found = torch.func.functional_call(model, named, (ids,)).logits
    assert seen
    assert (found - expected).norm() <= 1e-5 * expected.norm()  # fp32 rounding


@pytest.mark.parametrize("layers", [set(), {1}])
def test_hybrids(layers: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a hybrid is its own, beside that of the model whose weights it shares."""
    model, ids = shake(tiny("yurii", dtype=torch.float32, **SIZE), scale=0.05), tokens(1, 2, 17)
    twin = model.hybrid(layers=layers)
    expected = twin(ids).logits, model(ids).logits
    seen = passes(monkeypatch)
    with kernels.interpreted():
        found = twin(ids).logits, model(ids).logits
    assert len(seen) == len(twin.plan().passes()) + len(model.plan().passes())
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()  # fp32 rounding


@pytest.mark.parametrize("name", ["yurii", pytest.param("linear-symp-ab2", marks=pytest.mark.slow)])
def test_with_a_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that continue those of a cache, and the prompt before them."""
    model, ids = shake(tiny(name, dtype=torch.float32, **SIZE), scale=0.05), tokens(1, 3, 17)
    expected = model(ids).logits[:, -1]
    seen, cache = passes(monkeypatch), model.new_cache(1)
    with kernels.interpreted():
        model(ids[:, :2], cache=cache)
        found = model(ids[:, 2:], cache=cache).logits[:, -1]
    assert seen
    assert (found - expected).norm() <= 1e-5 * expected.norm()  # fp32 rounding


def test_streams_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast oracles read bf16, and streams are carried as the model says.

    5e-2 of the logits in fp32, for a dozen roundings of 2^-8 on the way.
    """
    model, ids = shake(tiny("yurii", dtype=torch.float32, **SIZE), scale=0.05), tokens(1, 3, 17)
    expected = model(ids).logits
    for dtype in (None, torch.bfloat16):
        model.stream_dtype = dtype
        with torch.autocast("cpu", torch.bfloat16):
            plain = model(ids).logits
            seen = passes(monkeypatch)
            with kernels.interpreted():
                found = model(ids).logits
        assert seen
        assert (plain - expected).norm() <= 5e-2 * expected.norm()
        assert (found - expected).norm() <= 5e-2 * expected.norm()


def test_copies_plan_for_themselves() -> None:
    model = tiny("yurii", dtype=torch.float32, **SIZE)
    assert isinstance(model.plan(), Plan)
    assert model.plan() is model.plan()
    assert not copy.deepcopy(model).plans


def test_settings_changed_after_a_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan holds the eps of norms and the numbers of a rule: it is made anew with other ones, and else stays."""

    class Scaled(Nesterov):
        factor = 1.0

        def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
            return s.replace(v=c.beta * s.v + self.factor * c.gamma * g)

    model, ids = shake(tiny("yurii", dtype=torch.float32, **SIZE), scale=0.05), tokens(1, 2, 17)
    block = model.blocks[0]
    block.template.__class__ = Scaled
    changes = [
        ("nothing", block, "layer", 0), ("attn_norm", block.attn_norm, "eps", 0.5),
        ("aux_norms", block.aux_norms["attn"], "eps", 0.5), ("final_norm", model.final_norm, "eps", 0.5),
        ("template", block.template, "factor", 3.0),
    ]  # fmt: skip
    seen, before = passes(monkeypatch), torch.zeros(())
    for name, owner, attribute, value in changes:
        setattr(owner, attribute, value)
        expected = model(ids).logits
        with kernels.interpreted():
            found = model(ids).logits
        assert (expected - before).norm() > 1e-3 * expected.norm(), name  # it matters
        assert (found - expected).norm() <= 1e-5 * expected.norm(), name  # fp32 rounding
        before = expected
    assert len(seen) == len(changes) * len(model.plan().passes())
    assert model.plan() is model.plan()


@pytest.mark.parametrize("part", ["template", "splitting", "attn", "mlp"])
def test_our_own_faults_are_not_taken_for_a_rule(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails while a rule of ours is followed is told; a rule of somebody else runs as it is written."""

    def fails(trace: Any) -> Plan:
        raise TypeError("a fault")

    monkeypatch.setattr(fused, "plan_of", fails)
    model = tiny("yurii", **SIZE)
    with pytest.raises(TypeError, match="a fault"):
        fused.structural(model)
    own = getattr(model.blocks[1], part)
    own.__class__ = type("Mine", (type(own),), {"__module__": __name__})
    assert fused.structural(model) == "its rule cannot be followed on symbols (TypeError: a fault)"


def test_streams_that_a_rule_adds() -> None:
    """A rule may leave a stream that the state did not begin with."""
    state = State(torch.zeros(1, 2, 4), {"v": torch.zeros(1, 2, 4, dtype=torch.bfloat16)})
    later = State(torch.zeros(1, 2, 4).double(), {"v": torch.ones(1, 2, 4), "new": torch.ones(1)})
    cast = later.in_dtypes_of(state)
    assert (cast.x.dtype, cast.v.dtype, cast.new.dtype) == (torch.float32, torch.bfloat16, torch.float32)


def test_a_stream_of_ones_own_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that a rule leaves in one turn and reads in the next layer."""

    class Remembering(Nesterov):
        def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
            past = s.streams.get("past", s.x)
            return s.replace(v=c.beta * s.v + c.gamma * g + 0.2 * past, past=0.5 * (past + g))

    model = shake(tiny("yurii", dtype=torch.float32, **SIZE), scale=0.05)
    for block in model.blocks:
        block.template.__class__ = Remembering
    compare_logits(model, monkeypatch)
