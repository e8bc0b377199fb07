"""Generated passes against plain PyTorch: plans of whole models in fp64, and kernels in Triton's interpreter.

fp64: 1e-12 of each gradient's norm for sums in another order (1e-14 measured), and 1e-14 of the largest one for those
that are themselves the rounding of a sum that nearly cancels, such as that of gamma before a norm which forgets it.
fp32: 1e-5 of the norm (measured 1e-6: sums of some hundred terms, two divisions). bf16: 1e-2, a rounding of 2^-9 in
what is written and in what the backward reads again.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
import forked
import stepformer as sf
from draws import seeded
from helpers import shake, tiny, tokens
from row_references import evaluate, named, phi, reference_numbers, reference_pass, run_plan
from stepformer.extras import extras
from stepformer.model.engines import fused
from stepformer.ops import kernels, row_passes
from stepformer.ops.numbers import lines_of, numbers_of
from stepformer.ops.phi import phi1, phi2
from stepformer.ops.row_passes import row_pass
from stepformer.ops.row_programs import Program, differentiate, extract
from stepformer.ops.symbols import FUNCTIONS, Symbol, UntraceableError, function, leaf, lift, standardise
from stepformer.oracles import attentions
from stepformer.rules import State, templates
from stepformer.rules.first_order import Nesterov

ROOT = Path(__file__).resolve().parents[2]
SIZE: dict[str, Any] = {"n_layer": 3, "n_head": 2, "d_model": 16, "context": 8, "vocab_size": 17}
EXTRAS: list[dict[str, Any]] = [
    {"value_residual": "free"}, {"embedding_skip": True}, {"positions": "rotary"}, {"qk_norm": True},
    {"norm": "rmsnorm"}, {"bias": True},
]  # fmt: skip
SINGLE, HALF = torch.float32, torch.bfloat16
FP64, FP32, BF16 = 1e-12, 1e-5, 1e-2
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def interpreted(poisoned: None) -> Iterator[None]:
    """Kernels take CPU tensors, and memory that nobody has written is NaN."""
    with kernels.interpreted():
        yield


# whole models: the plan as PyTorch against the blocks as they are written


def gradients(model: sf.Model, logits: Tensor) -> dict[str, Tensor]:
    """Of all parameters, for a gradient of the logits that is drawn."""
    weight = torch.randn(logits.shape, generator=seeded(5), dtype=torch.float64)
    model.zero_grad()
    logits.backward(weight.to(logits.dtype))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_plan(model: sf.Model, rounding: float = 1e-14) -> None:
    """Logits and gradients by the plan in fp64; `rounding` is what a gradient may miss, of the largest one."""
    assert fused.structural(model) is None
    ids = tokens(2, 8, 17)
    with kernels.off():
        expected = model(ids).logits
        slopes = gradients(model, expected)
        found = run_plan(model, ids)
        own = gradients(model, found)
    assert (found - expected).norm() <= FP64 * expected.norm()
    assert own.keys() == slopes.keys()
    largest = max(float(g.norm()) for g in slopes.values())
    for name, slope in slopes.items():
        error = float((own[name] - slope).norm())
        assert error <= FP64 * float(slope.norm()) + rounding * largest, name


def rounding_of(model: sf.Model) -> float:
    """Inverse roots of covariances that are nearly singular, and Newton-Schulz, which blows up small singular values
    by 3.4^5, carry a rounding into every gradient: 1e-14 of the largest was seen, 1e-12 is allowed."""
    return 1e-12 if model.config.template in ("shampoo", "soap", "muon", "ortho") else 1e-14


@pytest.mark.parametrize("name", sf.presets())
def test_plans_of_all_presets(name: str) -> None:
    model = shake(tiny(name, **SIZE))
    check_plan(model, rounding_of(model))


def with_extras(name: str, wanted: list[dict[str, Any]]) -> dict[str, Any]:
    """Those of the wanted changes that an architecture does not refuse."""
    config, changes = sf.preset(name).config.replace(**SIZE), {}
    for change in wanted:
        try:
            config = config.replace(**change)
        except sf.ConfigError:
            continue
        changes |= change
    return changes


@pytest.mark.parametrize("name", sf.presets())
def test_plans_of_all_presets_with_extras(name: str) -> None:
    """Everything at once that an architecture takes."""
    changes = with_extras(name, EXTRAS)
    assert changes
    model = shake(tiny(name, **SIZE, **changes))
    check_plan(model, rounding_of(model))


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: next(iter(extra)))
@pytest.mark.parametrize("name", sf.presets())
def test_plans_of_all_presets_with_one_extra(name: str, extra: dict[str, Any]) -> None:
    changes = with_extras(name, [extra])
    if not changes:
        pytest.skip("it refuses this")
    model = shake(tiny(name, **SIZE, **changes))
    check_plan(model, rounding_of(model))


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "learned steps": ("vanilla", {"learned_steps": True, "alpha": 0.7, "beta": 0.4}),
    "lawson": ("symp-etd-ab2", {"etd": "lawson"}),
    "one ratio, looking ahead": ("symp-ab2", {"history": "constant", "lookahead": True, "step_gradient": True}),
    "momentum at zero": ("symp-presymp-euler", {"aux_init": "zero", "damping": "linear"}),
    "a velocity of the MLP's own": ("symp-exp-euler", {"mlp_step": "C", "damping": "log", "lookahead": True}),
    "along the attention's motion": ("symp-exp-euler", {"mlp_step": "A"}),
    "along its motion, with a past": ("linear-symp-ab2", {"mlp_step": "A", "step_gradient": True}),
    "a last drift": ("symplectic-euler", {"final_drift": True}),
    "a value residual and two calls": ("verlet-ama", {"value_residual": "unit", "embedding_skip": True}),
    "half of the first values": ("imex-k2-mam", {"value_residual": "fixed"}),
    "strang, adamw": ("adamw", {"splitting": "strang", "order": "mam"}),
    "strang, muon": ("muon", {"splitting": "strang", "order": "ama"}),
    "strang, soap": ("soap", {"splitting": "strang", "order": "mam"}),
    "parallel, soap": ("soap", {"splitting": "parallel"}),
    "parallel, adam": ("adam", {"splitting": "parallel", "norm": "rmsnorm", "embedding_skip": True}),
    "a soft cap": ("yurii", {"logit_softcap": 3.0}),
    "documents": ("yurii", {"document_separator": 3}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_plans_with_options(case: str) -> None:
    name, changes = OTHERS[case]
    model = shake(tiny(name, **SIZE, **changes))
    check_plan(model, rounding_of(model))


@pytest.mark.parametrize("layers", [set(), {1}, {0, 2}])
def test_plans_of_hybrids(layers: set[int]) -> None:
    check_plan(shake(tiny("yurii", **SIZE)).hybrid(layers=layers))


# what a user writes


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that a test registers are gone after it."""
    for registry in (templates, extras, attentions):
        for table in ("_entries", "_aliases"):
            monkeypatch.setattr(registry, table, dict(getattr(registry, table)))


def documented(page: str, number: int) -> None:
    """Run a Python block of a page of the documentation."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.DOTALL)
    exec(compile(blocks[number], f"<{page}>", "exec"), {"__name__": __name__})


PLUGINS: dict[str, tuple[str, int, list[tuple[str, dict[str, Any]]]]] = {
    "qhm": (
        "write-your-own-rule", 0,
        [("vanilla", {"template": "qhm", **more}) for more in (
            {}, {"splitting": "parallel"}, {"splitting": "strang", "order": "mam"},
            {"embedding_skip": True, "value_residual": "unit"},
        )],
    ),
    "sigmoid": (
        "write-your-own-attention", 0,
        [("yurii", {"attention": "sigmoid"}), ("adam", {"attention": "sigmoid", "value_residual": "free"})],
    ),
    "kick-drift": (
        "write-your-own-attention", 1,
        [("symp-plain-euler", {"template": "kick-drift"}), ("linear-symp-ab2", {"template": "kick-drift"})],
    ),
    "echo": (
        "write-your-own-extra", 0,
        [(name, {"extras": ["echo"], "echo_start": 0.1}) for name in ("yurii", "vanilla", "symp-ab2", "soap")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("plugin", PLUGINS)
def test_what_the_documentation_writes_is_fused(plugin: str, registries: None) -> None:
    """By the plan in fp64, and the first of them by kernels in fp32: 1e-5 for sums in another order."""
    page, number, cases = PLUGINS[plugin]
    documented(page, number)
    for name, changes in cases:
        model = shake(tiny(name, **SIZE, **changes))
        check_plan(model, rounding_of(model))
    name, changes = cases[0]
    model, ids = shake(tiny(name, dtype=SINGLE, **SIZE | {"n_layer": 1}, **changes), scale=0.1), tokens(1, 3, 17)
    with kernels.off():
        expected = model(ids).logits
    assert (model(ids).logits - expected).norm() <= FP32 * expected.norm()


# programs by kernels


def programs_of(name: str, **changes: Any) -> list[Program]:
    """The different passes of a model."""
    plan = tiny(name, **SIZE, **changes).plan()
    return list({step.program.text: step.program for step in plan.passes()}.values())


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gd": ("vanilla", {}),
    "gd, gainless": ("vanilla", {"norm": "rmsnorm"}),
    "gd, biases": ("vanilla", {"bias": True}),
    "nesterov": ("yurii", {}),
    "nesterov, skip": ("yurii", {"embedding_skip": True}),
    "nesterov, two points": ("nesterov-euler", {}),
    "adam": ("adam", {}),
    "exp-euler": ("symp-exp-euler", {}),
    "etd-ab2": ("symp-etd-ab2", {}),
    "imex": ("imex-ln-k2-ama", {}),
}
CASES = [(case, i) for case, (name, changes) in MODELS.items() for i in range(len(programs_of(name, **changes)))]


def program(case: tuple[str, int]) -> Program:
    name, changes = MODELS[case[0]]
    return programs_of(name, **changes)[case[1]]


def draw(*shape: int, seed: int, dtype: torch.dtype = SINGLE, positive: bool = False, device: str = "cpu") -> Tensor:
    values = torch.randn(shape, generator=seeded(seed), dtype=torch.float64)
    values = values.abs() + 0.2 if positive else values
    return values.to(device, dtype).requires_grad_()


def inputs_of(
    program: Program, shape: tuple[int, ...], dtype: torch.dtype = SINGLE, device: str = "cpu"
) -> list[Tensor]:
    """What `row_pass` takes; roots are of positive rows, and numbers are positive."""
    counts, seeds = program.inputs, itertools.count()
    roots = "sqrt" in program.text
    rows = [draw(*shape, seed=next(seeds), dtype=dtype, positive=roots, device=device) for _ in range(counts["row"])]
    stats = [draw(*shape[:-1], seed=next(seeds), device=device) for _ in range(counts["stat"])]
    gains = [draw(shape[-1], seed=next(seeds), positive=True, device=device) for _ in range(counts["vec"])]
    line = [draw(program.numbers, seed=next(seeds), positive=True, device=device)] if counts["num"] else []
    return [*rows, *stats, *gains, *line]


def close(a: Tensor, b: Tensor, tolerance: float, what: object = "", least: float = 0.0) -> None:
    """To a share of the norm, or of `least` if that is more."""
    assert a.shape == b.shape
    error, size = float((a.detach().double() - b).norm()), max(float(b.norm()), least)
    assert error <= tolerance * size, (what, error / size if size else error)


def check_pass(
    program: Program,
    tensors: list[Tensor],
    *,
    carried: torch.dtype = SINGLE,
    point: torch.dtype = SINGLE,
    handed: tuple[str, ...] = (),
    arrive: Callable[[int], bool] = lambda i: True,
) -> None:
    """Outputs and all gradients of a pass; `arrive` says of which results a gradient comes back.

    Gradients of gains and numbers are sums that may cancel: they keep the rounding of terms that are as large as the
    gradients that arrive.
    """
    tolerance = FP32 if SINGLE == carried == point == tensors[0].dtype else BF16
    found, passed = row_pass(program, tensors, carried, point, handed)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    expected = reference_pass(program, wide)
    kinds = [carried] * (len(found) - program.points) + [point] * program.points
    assert [t.dtype for t in found] == kinds
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        close(a, b.detach(), tolerance, f"output {i}")
    assert tuple(passed) == handed
    for name, t in passed.items():
        assert torch.equal(t, tensors[int(name[1:])])
    results = [*found, *passed.values()]
    twins = [*expected, *(wide[int(name[1:])] for name in handed)]
    chosen = [i for i, t in enumerate(results) if arrive(i) and twins[i].requires_grad]
    device = tensors[0].device.type
    weights = [draw(*results[i].shape, seed=50 + i, dtype=results[i].dtype, device=device).detach() for i in chosen]
    arrived = math.sqrt(sum(float(w.double().square().sum()) for w in weights))
    asked = [i for i, t in enumerate(tensors) if t.requires_grad]
    slopes = torch.autograd.grad([results[i] for i in chosen], [tensors[i] for i in asked], weights, allow_unused=True)
    wanted = torch.autograd.grad(
        [twins[i] for i in chosen], [wide[i] for i in asked], [w.double() for w in weights], allow_unused=True
    )
    for i, a, b in zip(asked, slopes, wanted, strict=True):
        if b is None or not b.any():
            assert a is None or not a.any(), f"gradient of input {i}"
            continue
        assert a is not None, f"gradient of input {i}"
        assert a.dtype == tensors[i].dtype
        summed = i >= len(program.rows) + program.inputs["stat"]
        close(a, b, tolerance, f"gradient of input {i}", least=arrived if summed else 0.0)


FEW = [("gd", 1), ("nesterov", 1), ("nesterov, skip", 1), ("adam", 1), ("exp-euler", 1), ("nesterov, two points", 1)]
QUICK = [*FEW, ("gd, gainless", 1), ("gd, biases", 1), ("nesterov", 0), ("nesterov", 3)]


def quickly(quick: Sequence[Any], everything: Sequence[Any] = CASES) -> list[Any]:
    """All of them, slow but for some: the interpreter takes half a second for a pass over three rows."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in everything]


@pytest.mark.parametrize("case", quickly(QUICK), ids=str)
def test_kernels_in_fp32(case: tuple[str, int]) -> None:
    own = program(case)
    check_pass(own, inputs_of(own, (3, 20)))


@pytest.mark.parametrize("d", [48, 100, 300])
@pytest.mark.parametrize("case", quickly(FEW[1:2]), ids=str)
def test_other_widths(case: tuple[str, int], d: int) -> None:
    own = program(case)
    check_pass(own, inputs_of(own, (2, d)))


@pytest.mark.parametrize("point", [SINGLE, pytest.param(HALF, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("case", quickly(FEW), ids=str)
def test_kernels_in_bf16(case: tuple[str, int], point: torch.dtype) -> None:
    """Streams in bf16, or in fp32 while oracles read bf16."""
    own = program(case)
    carried = SINGLE if point == HALF else HALF
    check_pass(own, inputs_of(own, (3, 48), carried), carried=carried, point=point)


@pytest.mark.parametrize("dtypes", [(HALF, HALF), (HALF, SINGLE)], ids=str)
@pytest.mark.parametrize("case", quickly(FEW[1:2], FEW), ids=str)
def test_kernels_in_bf16_at_odd_widths(case: tuple[str, int], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Pairs of numbers are read as one where the width is even, single ones where it is not."""
    own = program(case)
    for d in (21, 100):
        check_pass(own, inputs_of(own, (2, d), HALF), carried=dtypes[0], point=dtypes[1])


@pytest.mark.parametrize("shape", [(3, 1, 20), (1, 1, 20), (1, 20), (20,), (2, 1, 2, 16)], ids=str)
@pytest.mark.parametrize("case", quickly(FEW[1:2], FEW), ids=str)
def test_shapes(case: tuple[str, int], shape: tuple[int, ...]) -> None:
    """One token, one row, no batch."""
    own = program(case)
    check_pass(own, inputs_of(own, shape))


@pytest.mark.parametrize("case", FEW, ids=str)
def test_no_rows(case: tuple[str, int]) -> None:
    """Results without rows, and gradients of zero for gains and numbers."""
    own = program(case)
    tensors = inputs_of(own, (0, 4, 20))
    found, _ = row_pass(own, tensors, SINGLE, SINGLE)
    assert all(t.shape == (0, 4, 20) for t in found)
    slopes = torch.autograd.grad(sum(t.sum() for t in found), tensors, allow_unused=True)
    for t, slope in zip(tensors, slopes, strict=True):
        assert slope is None or (slope.shape == t.shape and not slope.any())


@pytest.mark.parametrize("case", quickly(FEW), ids=str)
def test_rows_that_are_handed_on(case: tuple[str, int]) -> None:
    """A gradient that arrives for a row itself is added to its own; it may also be the only one."""
    own = program(case)
    check_pass(own, inputs_of(own, (3, 20)), handed=tuple(own.rows))
    count = len(own.outputs)
    check_pass(own, inputs_of(own, (3, 20)), handed=(own.rows[-1],), arrive=lambda i: i >= count)


@pytest.mark.parametrize("case", quickly(FEW[1:2]), ids=str)
def test_gradients_that_do_not_arrive(case: tuple[str, int]) -> None:
    """Of each output alone, with and without a row that is handed on."""
    own = program(case)
    for chosen in range(len(own.outputs) if len(own.outputs) > 1 else 0):
        check_pass(own, inputs_of(own, (3, 20)), arrive=lambda i, chosen=chosen: i == chosen)
        check_pass(own, inputs_of(own, (3, 20)), arrive=lambda i, chosen=chosen: i != chosen, handed=("r0",))


@pytest.mark.parametrize("case", quickly(FEW[:1], FEW), ids=str)
def test_inputs_that_need_no_gradient(case: tuple[str, int]) -> None:
    own = program(case)
    tensors = inputs_of(own, (3, 20))
    for alone in range(len(tensors)):
        for keep in (True, False):
            chosen = [t.detach().requires_grad_((i == alone) is keep) for i, t in enumerate(tensors)]
            if any(t.requires_grad for t in chosen):
                check_pass(own, chosen, handed=("r0",))


def test_nobody_needs_a_gradient() -> None:
    own = program(("nesterov", 1))
    tensors = [t.detach() for t in inputs_of(own, (3, 20))]
    found, passed = row_pass(own, tensors, SINGLE, SINGLE, ("r0",))
    assert passed["r0"] is tensors[0]
    with torch.no_grad():
        again, _ = row_pass(own, inputs_of(own, (3, 20)), SINGLE, SINGLE)
    for a, b, c in zip(found, again, reference_pass(own, [t.double() for t in tensors]), strict=True):
        assert not b.requires_grad
        assert torch.equal(a, b)
        close(a, c, FP32)


@pytest.mark.parametrize("case", quickly(FEW[1:2], FEW), ids=str)
def test_rows_that_do_not_lie_together(case: tuple[str, int]) -> None:
    """Views of larger tensors, gradients that are expanded."""
    own = program(case)
    tensors = inputs_of(own, (4, 20))
    rows = len(own.rows)
    apart = [torch.stack((t.detach(), t.detach()), -1)[..., 0].requires_grad_() for t in tensors[:rows]]
    assert not apart[0].is_contiguous()
    check_pass(own, [*apart, *tensors[rows:]])
    found, _ = row_pass(own, tensors, SINGLE, SINGLE)
    slopes = torch.autograd.grad(sum(t.sum() for t in found), tensors[:rows])
    wide = [t.detach().double().requires_grad_() for t in tensors]
    expected = sum(t.sum() for t in reference_pass(own, wide))
    largest = max(float(w.norm()) for w in torch.autograd.grad(expected, wide[:rows], retain_graph=True))
    for a, b in zip(slopes, torch.autograd.grad(expected, wide[:rows]), strict=True):
        assert float((a - b).norm()) <= FP32 * largest  # the sum of a norm's outputs is 0: only rounding may be left


@pytest.mark.parametrize("case", [("nesterov", 1), ("adam", 1)], ids=str)
def test_same_bits_again(case: tuple[str, int]) -> None:
    own = program(case)
    runs = []
    for _ in range(2):
        tensors = inputs_of(own, (4, 20))
        found, _ = row_pass(own, tensors, SINGLE, SINGLE)
        runs.append([*found, *torch.autograd.grad(sum(t.square().sum() for t in found), tensors)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("case", quickly(FEW[1:2]), ids=str)
def test_a_gain_of_zero(case: tuple[str, int]) -> None:
    """Where the backward finds a row by dividing through a gain, one that is 0 still has its gradient."""
    own = program(case)
    tensors = inputs_of(own, (3, 20))
    with torch.no_grad():
        for gain in tensors[len(own.rows) + own.inputs["stat"] :][: own.inputs["vec"]]:
            gain[3] = 0.0
    check_pass(own, tensors)


def test_a_single_column() -> None:
    """A row of one number: its mean is itself, and LayerNorm gives 0."""
    r = leaf("row", "r")
    own = extract([r * r + (r * r).mean(dim=-1, keepdim=True)], [], lambda n: False).program
    check_pass(own, [draw(5, 1, seed=0)])


# operations one by one


def softplus(a: Any) -> Any:
    return F.softplus(a)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(torch, name) for name in FUNCTIONS if name != "softplus"},
    "softplus": softplus,
    "clamp": lambda a: a.clamp(0.4, 1.1),
    "clamp from below": lambda a: a.clamp_min(0.5),
    "clamp from above": lambda a: torch.clamp(a, max=0.7),
    "clip": lambda a: torch.clip(a, -0.3, 0.9),
    "phi1": phi1,
    "phi2": phi2,
    "square": torch.square,
    "power 2": lambda a: a**2,
    "power 3": lambda a: a**3,
    "power -1": lambda a: a**-1,
    "power 1/2": lambda a: a**0.5,
    "power -1/2": lambda a: torch.pow(a, -0.5),
    "reciprocal": lambda a: a.reciprocal(),
    "quotient": lambda a: 2 / (1 + a) - a / 3,
    "negative": lambda a: 1 - (-a),
    "difference": lambda a: torch.sub(a, a * a),
    "lerp": lambda a: torch.lerp(a, a * a, 0.3),
    "weighted by itself": lambda a: a.lerp(2 * a, a),
    "mean": lambda a: a * a.mean(dim=-1, keepdim=True),
    "sum": lambda a: a / torch.sum(a, dim=-1, keepdim=True),
    "root mean square": lambda a: a * (a.square().mean(dim=-1, keepdim=True) + 0.1).rsqrt(),
    "norm by hand": lambda a: (2 * a - a.mean(dim=-1, keepdim=True)) * (0.05 * a.sum(dim=-1, keepdim=True)).tanh(),
    "softmax of a row": lambda a: torch.exp(a) / torch.exp(a).sum(dim=-1, keepdim=True),
    "exponential of a sum": lambda a: torch.exp(-a.sum(dim=-1, keepdim=True) * 0.1) * a,
    "ones and zeros": lambda a: torch.ones_like(a) * a + torch.zeros_like(a),
    "other dtypes": lambda a: 1.5 * a.to(a.dtype).contiguous().type_as(a),
}  # fmt: skip


def one_line(f: Callable[[Any], Any], row: Tensor) -> tuple[Program, list[Tensor], Callable[[Tensor], list[Tensor]]]:
    """f of a row, and a row times the mean of f over it, which meets what stands in columns that do not exist.

    As a program, with what it takes beside the row (numbers such as 1/d^2), and as a function of tensors.
    """

    def both(a: Any) -> list[Any]:
        return [f(a), a * f(a).mean(dim=-1, keepdim=True)]

    found = extract(both(leaf("row", "r")), [], lambda n: False)
    lines = reference_numbers([found.inputs["num"]] if found.inputs["num"] else [], {}, row.shape[-1])
    return found.program, [line.to(row) for line in lines], both


def check_operation(name: str, row: Tensor) -> None:
    """Value and derivative, against autograd: symbols in fp64 (1e-12), the kernel in fp32 (1e-5)."""
    own, numbers, both = one_line(OPERATIONS[name], row)
    wide = row.detach().double().requires_grad_()
    given = [wide, *(line.double() for line in numbers)]
    expected = both(wide)
    weights = [draw(*row.shape, seed=9 + i, device=row.device.type).detach() for i in range(2)]
    (slope,) = torch.autograd.grad(expected, wide, [w.double() for w in weights])
    for a, b in zip(reference_pass(own, given), expected, strict=True):
        close(a.detach(), b.detach(), FP32 if numbers else FP64)  # numbers are in fp32
    symbols = differentiate(own.names(), {"r0"}).rows
    if "r0" in symbols:
        arrived = {f"d_o{i}": w.double() for i, w in enumerate(weights)}
        (found,) = evaluate([symbols["r0"]], {k: t.detach() for k, t in (named(own, given) | arrived).items()})
        close(found, slope, FP32 if numbers else FP64)
    outs, _ = row_pass(own, [row, *numbers], SINGLE, SINGLE)
    for a, b in zip(outs, expected, strict=True):
        close(a, b.detach(), FP32)
    close(torch.autograd.grad(outs, row, weights)[0], slope, FP32)


@pytest.mark.parametrize("d", [20, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_on_rows(name: str, d: int) -> None:
    """Where rows are positive there are no poles, and no number of the draw stands at a bend."""
    check_operation(name, draw(3, d, seed=0, positive=True))


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "softplus", "abs", "sign", "relu", "exp", "expm1", "clip", "phi1"])
def test_an_operation_on_rows_of_both_signs(name: str) -> None:
    check_operation(name, draw(3, 20, seed=0))


EXTREMES = (-80.0, -20.0, -1.0, -1e-3, -1e-6, 0.0, 1e-6, 1e-3, 0.099, 0.101, 1.0, 12.0, 20.0, 80.0)


@pytest.mark.parametrize(
    ("name", "points"),
    [
        *((name, EXTREMES) for name in ("softplus", "sigmoid", "tanh", "relu", "sign", "abs", "exp", "expm1")),
        ("log1p", tuple(x for x in EXTREMES if x > -1)),
        *((name, tuple(x for x in EXTREMES if x >= -1)) for name in ("phi1", "phi2")),
        ("log", tuple(x for x in EXTREMES if x > 0)),
    ],
)
def test_functions_far_out_and_near_zero(name: str, points: tuple[float, ...]) -> None:
    """Every number by itself: small ones keep their digits, large ones do not overflow.

    1e-5 of each, since fp32 has 6e-8 and e^80 costs 80 times that anywhere. phi_2 in fp32 is divided by s = 0.1 twice,
    its slope three times: 1e-4. Slopes are found from the value, as torch finds them: those of sigmoid and tanh, which
    vanish where it is 1, to 1e-7 of their largest.
    """
    own = extract([OPERATIONS[name](leaf("row", "r"))], [], lambda n: False).program
    row = torch.tensor([points], requires_grad=True)
    wide = row.detach().double().requires_grad_()
    order = {"phi1": 1, "phi2": 2}.get(name)
    expected = OPERATIONS[name](wide) if order is None else phi(wide, order)
    if name == "softplus":
        expected = torch.logaddexp(wide, torch.zeros_like(wide))
    ((found,), _) = row_pass(own, [row], SINGLE, SINGLE)
    (slope,) = torch.autograd.grad(found.sum(), row, allow_unused=True)
    slope = torch.zeros_like(row) if slope is None else slope  # a sign hands nothing back
    (wanted,) = torch.autograd.grad(expected.sum(), wide)
    allowed = 1e-4 if order else 1e-5
    assert ((found.double() - expected).abs() <= allowed * expected.abs() + 1e-37).all(), found
    assert ((slope.double() - wanted).abs() <= allowed * wanted.abs() + 1e-7).all(), slope


def test_a_root_of_zero() -> None:
    """Its slope counts as 0: a moment that is exactly 0 would send an infinite one back."""
    r = leaf("row", "r")
    own = extract([torch.sqrt(r * r)], [], lambda n: False).program
    row = torch.tensor([[0.0, 2.0, -3.0]], requires_grad=True)
    ((found,), _) = row_pass(own, [row], SINGLE, SINGLE)
    assert torch.autograd.grad(found.sum(), row)[0].tolist() == [[0.0, 1.0, -1.0]]


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("factor", [1.0, 0.3, "sigmoid", "free"])
def test_norms(centred: bool, factor: float | str) -> None:
    """hat(c y; eps) with a large eps, and the gradients of c and of eps."""
    row, gain, eps = leaf("row", "y"), leaf("vec", "g"), leaf("num", "eps")
    c = factor if isinstance(factor, float) else leaf("num", "c")
    if factor == "sigmoid":
        c = function("sigmoid", c)
    found = extract([], [gain * standardise(c * row, eps, centred=centred)], lambda n: False)
    y, g = draw(5, 20, seed=0), draw(20, seed=1)
    raws = {"c": torch.tensor([-0.8], requires_grad=True), "eps": torch.tensor([0.7], requires_grad=True)}
    (line,) = table([found.inputs["num"]], raws, 20)
    ((out,), _) = row_pass(found.program, [y, g, line], SINGLE, SINGLE)
    wide = {k: t.detach().double().requires_grad_() for k, t in {**raws, "y": y, "g": g}.items()}
    scale = {"sigmoid": torch.sigmoid(wide["c"]), "free": wide["c"]}.get(factor, factor)  # type: ignore[call-overload]
    p = scale * wide["y"]
    p = p - p.mean(dim=-1, keepdim=True) if centred else p
    expected = wide["g"] * p * (p.square().mean(dim=-1, keepdim=True) + wide["eps"]).rsqrt()
    close(out, expected.detach(), FP32)
    weight = draw(5, 20, seed=2).detach()
    slopes = torch.autograd.grad(out, [y, g, *raws.values()], weight, allow_unused=True)
    wanted = torch.autograd.grad(
        expected, [wide[k] for k in ("y", "g", "c", "eps")], weight.double(), allow_unused=True
    )
    for a, b in zip(slopes, wanted, strict=True):
        if b is None:
            assert a is None or not a.any()
        else:
            assert a is not None
            close(a, b, FP32)


# numbers


def table(lines: Sequence[Sequence[Symbol]], raws: dict[str, Tensor], width: int = 16) -> list[Tensor]:
    """The lines of numbers by the kernel."""
    return lines_of(numbers_of(lines, list(raws), width), list(raws.values()), torch.device("cpu"))


SCALARS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: (lambda a, b, f=f: f(a)) for name, f in OPERATIONS.items() if name in FUNCTIONS},
    "product": lambda a, b: a * b,
    "quotient": lambda a, b: (a - 2 * b) / (a * b),
    "clamp": lambda a, b: (a * b).clamp(-0.5, 0.5) + a.clamp(-12.0, 12.0),
    "phi": lambda a, b: phi1(a) * phi2(b) + phi2(a),
    "detached": lambda a, b: a.detach() * b,
    "power": lambda a, b: a**3 + b**-0.5,
    "one raw alone": lambda a, b: b,
}


def on_numbers(f: Callable[[Any, Any], Any], a: float, b: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Value and gradient by `Numbers` and by torch in fp64."""
    raws = [torch.tensor([v], requires_grad=True) for v in (a, b)]
    (line,) = table([[lift(f(leaf("num", "a"), leaf("num", "b")))]], dict(zip("ab", raws, strict=True)))
    slopes = torch.cat(torch.autograd.grad(line[0], raws))
    wide = [raw.detach().double().requires_grad_() for raw in raws]
    expected = f(*wide)
    wanted = torch.autograd.grad(expected.sum(), wide, allow_unused=True)
    zeros = torch.zeros(1, dtype=torch.float64)
    return line[0].detach(), slopes, expected.detach()[0], torch.cat([zeros if w is None else w for w in wanted])


@pytest.mark.parametrize("name", SCALARS)
def test_numbers(name: str) -> None:
    """fp64 inside, so only the last rounding to fp32 counts: 6e-8, and 1e-6 is allowed."""
    for a, b in ((0.7, 1.3), (0.05, 0.3), (2.0, 12.0)):
        found, slopes, expected, wanted = on_numbers(SCALARS[name], a, b)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(slopes.double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("s", [0.0, 1e-12, 1e-6, 1e-3, 0.0999, 0.1001, 0.5, 3.0, 12.0, -1e-6, -0.2, -12.0])
def test_phi_near_zero_and_at_twelve(s: float, order: int) -> None:
    """Against a series of 24 terms below 1, in fp64: 1e-6 for the rounding to fp32."""
    raw = torch.tensor([s], requires_grad=True)
    (line,) = table([[function("phi", leaf("num", "s"), order)]], {"s": raw})
    (slope,) = torch.autograd.grad(line[0], raw)
    wide = raw.detach().double().requires_grad_()
    expected = phi(wide, order)
    (wanted,) = torch.autograd.grad(expected, wide)
    torch.testing.assert_close(line[:1].double(), expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(slope.double(), wanted, rtol=1e-6, atol=0)


def test_lines_of_numbers() -> None:
    """Each line begins at 16 bytes; gradients of what fills it up do not count, and a raw that nobody uses has 0."""
    a, b, c, unused = (leaf("num", name) for name in ("a", "b", "c", "unused"))
    width = leaf("row", "r").mean(dim=-1, keepdim=True).args[0]  # 1 / d
    lines = [[a * b], [a, b, c], [a + b, b - c, c * c, a * a], [a, a, a, a, a * c * width]]
    raws = {"a": 0.3, "b": -1.2, "c": 0.8, "unused": 5.0}
    tensors = {name: torch.tensor([value], requires_grad=True) for name, value in raws.items()}
    found = table(lines, tensors, 10)
    assert [len(line) for line in found] == [4, 4, 4, 8]
    assert all(line.data_ptr() % 16 == found[0].data_ptr() % 16 for line in found)
    wide = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    expected = reference_numbers(lines, wide, 10)
    weights = [draw(len(line), seed=i).detach() for i, line in enumerate(found)]
    for line, twin, symbols in zip(found, expected, lines, strict=True):
        torch.testing.assert_close(line[: len(symbols)].double(), twin[: len(symbols)], rtol=1e-6, atol=0)
    slopes = torch.autograd.grad(found, list(tensors.values()), weights)
    wanted = torch.autograd.grad(expected, [wide[k] for k in "abc"], [w.double() for w in weights])
    torch.testing.assert_close(torch.cat(slopes[:3]).double(), torch.cat(wanted), rtol=1e-6, atol=1e-7)
    assert slopes[3] == 0
    assert unused.kind == "num"


def test_numbers_without_coefficients() -> None:
    width = leaf("row", "r").mean(dim=-1, keepdim=True).args[0]
    (line,) = table([[width * 1.0]], {}, 20)
    assert line[0] == pytest.approx(1 / 20)
    assert table([], {}, 20) == []


def test_plans_have_their_numbers() -> None:
    """The table of a whole model against fp64, and the gradients of all raw coefficients: 1e-6 for the rounding."""
    model = shake(tiny("symp-etd-ab2", dtype=SINGLE, **SIZE))
    plan = model.plan()
    raws = [getattr(getattr(model.blocks[layer], bank), key) for layer, bank, key in plan.raws]
    found = table(plan.lines, dict(zip(plan.names, raws, strict=True)))
    wide = [raw.detach().double().requires_grad_() for raw in raws]
    expected = reference_numbers(plan.lines, dict(zip(plan.names, wide, strict=True)), 16)
    weights = [draw(len(line), seed=i).detach() for i, line in enumerate(found)]
    for line, twin, symbols in zip(found, expected, plan.lines, strict=True):
        torch.testing.assert_close(line[: len(symbols)].double(), twin[: len(symbols)], rtol=1e-6, atol=0)
    slopes = torch.autograd.grad(found, raws, weights, allow_unused=True)
    wanted = torch.autograd.grad(expected, wide, [w.double() for w in weights], allow_unused=True)
    largest = max(float(w.norm()) for w in wanted if w is not None)
    for a, b in zip(slopes, wanted, strict=True):
        assert a is not None
        b = torch.zeros_like(a, dtype=torch.float64) if b is None else b
        assert float((a - b).norm()) <= 1e-6 * (float(b.norm()) + largest)


# for compilers


CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


@pytest.mark.parametrize("case", quickly(FEW[1:2], FEW), ids=str)
def test_the_operators_are_registered_properly(case: tuple[str, int]) -> None:
    """Schema, fake tensors and autograd as torch checks them."""
    own = program(case)
    for keep in (True, False):
        arguments = (own.text, inputs_of(own, (1, 3, 20)), SINGLE, HALF, keep)
        torch.library.opcheck(torch.ops.stepformer.row_pass.default, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("case", quickly(FEW[1:2], FEW), ids=str)
def test_the_backward_operator(case: tuple[str, int]) -> None:
    """The same, and gradients by the operator are those of eager code."""
    own = program(case)
    tensors = inputs_of(own, (1, 3, 20))
    *outs, statistics = torch.ops.stepformer.row_pass(own.text, tensors, SINGLE, SINGLE, True)
    eager, _ = row_pass(own, tensors, SINGLE, SINGLE)
    weights = [draw(*t.shape, seed=60 + i).detach() for i, t in enumerate(outs)]
    for a, b in zip(
        torch.autograd.grad(outs, tensors, weights, retain_graph=True),
        torch.autograd.grad(eager, tensors, weights),
        strict=True,
    ):
        assert torch.equal(a, b)
    ready = row_passes.compiled(own.text)
    by_name = dict(zip([*ready.names, *ready.outputs], [*tensors, *outs], strict=True))
    arguments = (
        own.text, weights, " ".join(ready.outputs), [by_name[k].detach() for k in ready.kept], statistics.detach(),
        [by_name[k].detach() for k in ready.names if not k.startswith("r")],
        " ".join(ready.names), " ".join("float32" for _ in ready.names), [1, 3, 20],
    )  # fmt: skip
    torch.library.opcheck(torch.ops.stepformer.row_pass_backward.default, arguments, test_utils=CHECKS)


def test_the_operators_of_numbers() -> None:
    a, b = leaf("num", "a"), leaf("num", "b")
    key = numbers_of([[a * b, a + 1.0]], ["a", "b"], 16).key
    raw = draw(2, seed=0)
    torch.library.opcheck(torch.ops.stepformer.numbers.default, (key, raw), test_utils=CHECKS)
    arguments = (key, raw.detach(), draw(4, seed=1).detach())
    torch.library.opcheck(torch.ops.stepformer.numbers_backward.default, arguments, test_utils=CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["yurii", "symp-exp-euler"])
def test_a_compiled_model(name: str) -> None:
    """The same loss and gradients through the operators: 1e-5, since gradients of x are added elsewhere."""
    torch._dynamo.reset()
    model = shake(tiny(name, dtype=SINGLE, **{**SIZE, "n_layer": 1}), scale=0.1)
    ids = tokens(1, 4, 17)
    expected = model(ids).logits
    slopes = {k: g.clone() for k, g in gradients(model, expected).items()}
    compiled: Any = torch.compile(model, backend="aot_eager")
    found = compiled(ids).logits
    assert (found - expected).norm() <= FP32 * expected.norm()
    largest = max(float(g.norm()) for g in slopes.values())
    for key, slope in gradients(model, found).items():
        assert float((slope - slopes[key]).norm()) <= FP32 * float(slope.norm()) + 1e-6 * largest, key
    torch._dynamo.reset()


# what cannot be followed


def kicks() -> dict[str, tuple[Callable[..., Any], str]]:
    """Rules that no pass can be made of, and what is said about each."""

    def indexing(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + g[..., :1]

    def deciding(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + (g if c.beta else -g)

    def comparing(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + (g if bool((c.beta > 0.1).all()) else -g)

    def choosing(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return torch.where(torch.sign(g).bool(), s.v, g)

    def cumulative(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + torch.cumsum(g, dim=-1)

    def method(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + g.flip(-1)

    def without_gradients(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        with torch.no_grad():
            old = c.beta * s.v
        return old + g

    def detaching(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v.detach() + g

    def own_tensor(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + torch.linspace(0.5, 1.5, 16) * g

    def own_tensor_second(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + g * torch.linspace(0.5, 1.5, 16)

    def counting(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        self.count = getattr(self, "count", 0) + 1
        return c.beta * s.v + (1 + 0.01 * self.count) * g

    def other_power(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + g**4

    def over_tokens(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + g.mean(dim=-2, keepdim=True)

    def over_everything(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + g / (1 + g.square().sum())

    def heads(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + self.heads(g).flatten(-2)

    def carried_mean(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + g - 0.1 * s.v.mean(dim=-1, keepdim=True)

    return {
        "a mean that is carried": (carried_mean, "a number per token of it is carried from one answer to the next"),
        "indexing": (indexing, "it indexes a tensor"),
        "deciding": (deciding, "it decides by the value of a tensor"),
        "comparing": (comparing, "cannot be followed on symbols"),
        "choosing": (choosing, "it uses Tensor.bool"),
        "cumulative": (cumulative, "it calls torch's cumsum"),
        "method": (method, "it uses Tensor.flip"),
        "without gradients": (without_gradients, "it computes something without gradients"),
        "detaching": (detaching, "it detaches a row"),
        "a tensor of its own": (own_tensor, "it mixes in a Tensor"),
        "a tensor of its own, second": (own_tensor_second, "it mixes in a Tensor"),
        "counting": (counting, "its rule does something else from time to time"),
        "another power": (other_power, "it takes the power 4"),
        "over tokens": (over_tokens, "it sums over something else than a token's own row"),
        "over everything": (over_everything, "it sums over something else than a token's own row"),
        "heads": (heads, "it uses Tensor.unflatten"),
    }


@pytest.mark.parametrize("why", kicks())
def test_what_cannot_be_followed_runs_as_it_is_written(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kick, sentence = kicks()[why]

    class Mine(Nesterov):
        def kick(self, s: State, c: Any, g: Tensor, scale: float = 1.0) -> State:
            return s.replace(v=kick(self, s, c, g))

    model = shake(tiny("yurii", dtype=SINGLE, **SIZE), scale=0.1)
    for block in model.blocks:
        block.template.__class__ = Mine
    found = fused.structural(model)
    assert found is not None
    assert sentence in found
    monkeypatch.setattr(fused, "run", lambda *_: pytest.fail("it was fused"))
    logits = model(tokens(1, 4, 17)).logits
    assert logits.isfinite().all()
    if why != "counting":
        with kernels.off():
            assert (logits - model(tokens(1, 4, 17)).logits).norm() <= FP32 * logits.norm()


def test_what_symbols_refuse() -> None:
    """A sentence that ends "... since": it says why a rule runs as it is written."""
    row, number, other = leaf("row", "r"), leaf("num", "n"), leaf("other", "R")
    refused: list[Callable[[], Any]] = [
        lambda: row[0], lambda: bool(row), lambda: row**5, lambda: row.sum(), lambda: row.sum(dim=0, keepdim=True),
        lambda: number.sum(dim=-1, keepdim=True), lambda: row + "a", lambda: row.sort(), lambda: torch.fft.fft(row),
        lambda: other + row, lambda: row.detach(), lambda: torch.where(row, row, row), lambda: row + [1.0],
        lambda: row @ row, lambda: standardise(number, 1e-5, centred=True),
    ]  # fmt: skip
    for attempt in refused:
        with pytest.raises((UntraceableError, TypeError)):
            attempt()


# texts


TEXTS = """
import json, sys
import stepformer as sf
from stepformer.ops import row_passes
from stepformer.ops.row_passes import forward_tile, backward_tile

def texts(name, **changes):
    model = sf.build(name, seed=0, n_layer=3, n_head=2, d_model=16, context=8, vocab_size=17, **changes)
    found = []
    for step in model.plan().passes():
        own = row_passes.compiled(step.program.text, step.handed)
        needed = tuple(own.names)
        backward = own.backward(tuple(own.reached), needed, tuple("f" for _ in needed))
        printed = [own.forwards[keep].at(forward_tile(16))[0].text for keep in (True, False)]
        printed.append(backward.kernel.at(backward_tile(16, 4, 2, 8))[0].text)
        found.append([step.program.text, *printed])
    return [found, model.plan(ready=True).numbers.key]
"""
LOOKED_AT = ("yurii", "symp-etd-ab2")


def test_texts_do_not_depend_on_what_was_traced_before() -> None:
    """A fresh process writes the same programs and kernels, though many others were traced in this one."""
    alive = [tiny(name, **SIZE) for name in sf.presets()[::4]]
    assert all(fused.structural(model) is None for model in alive)
    scope: dict[str, Any] = {}
    exec(TEXTS, scope)
    code = TEXTS + f"print(json.dumps({{name: texts(name) for name in {LOOKED_AT!r}[::-1]}}))"
    done = forked.python(code, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    fresh = json.loads(done.stdout)
    for name in LOOKED_AT:
        assert scope["texts"](name) == fresh[name], name


def test_the_order_of_a_sum_is_ones_own() -> None:
    """The same program whether or not somebody has added, or multiplied, the other way round before."""

    def text(swapped: bool) -> str:
        a, b, c = (leaf("row", f"{name} {marker}") for name in "abc")
        first = (b + a) * (c * b) if swapped else (a + b) * (b * c)
        return extract([first + c], [], lambda n: False).program.text

    marker = "alone"
    alone = text(False)
    marker = "after"
    alive = [leaf("row", f"{name} after") for name in "abc"]
    kept = [alive[1] + alive[0], alive[2] * alive[1]]
    assert text(False) == alone
    assert len(kept) == 2


def test_the_same_rule_in_another_layer_is_the_same_program() -> None:
    plan = tiny("yurii", **{**SIZE, "n_layer": 6}).plan()
    assert len(plan.passes()) == 13
    assert len({step.program.text for step in plan.passes()}) <= 5


def test_passes_read_and_write_no_more_rows_than_they_must() -> None:
    """Between two answers gradient descent moves x; a momentum rule x and v, and reads what it has moved."""
    rows = {
        name: [(step.program.inputs["row"], len(step.program.outputs)) for step in tiny(name, **SIZE).plan().passes()]
        for name in ("vanilla", "yurii", "adam")
    }
    assert rows["vanilla"] == [(1, 1), *[(2, 2)] * 5, (2, 1)]
    assert rows["yurii"] == [(2, 1), *[(3, 3)] * 5, (3, 1)]
    assert rows["adam"][1:-1] == [(4, 4)] * 5
    assert math.prod(rows["adam"][-1]) == 4


class TestOnTheDevice:
    pytestmark = on_gpu

    @pytest.mark.parametrize("dtypes", [(SINGLE, SINGLE), (SINGLE, HALF), (HALF, HALF)], ids=str)
    @pytest.mark.parametrize("shape", [(2, 1024, 768), (3, 517, 300), (1, 20), (5, 2048), (999, 21)], ids=str)
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_kernels(
        self, case: tuple[str, int], shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]
    ) -> None:
        own = program(case)
        tensors = inputs_of(own, shape, dtypes[0], device="cuda")
        check_pass(own, tensors, carried=dtypes[0], point=dtypes[1], handed=tuple(own.rows))

    @pytest.mark.parametrize("name", OPERATIONS)
    def test_operations(self, name: str) -> None:
        check_operation(name, draw(77, 300, seed=0, positive=True, device="cuda"))

    def test_same_bits_again(self) -> None:
        own = program(("nesterov", 1))
        runs = []
        for _ in range(2):
            tensors = inputs_of(own, (8, 300, 768), HALF, device="cuda")
            found, _ = row_pass(own, tensors, HALF, HALF)
            runs.append([*found, *torch.autograd.grad(sum(t.float().square().sum() for t in found), tensors)])
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
