"""Generated passes by kernels, in Triton's interpreter and on the device, against plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from helpers import shake, tiny, tokens
from row_cases import (
    BF16,
    CASES,
    CHECKS,
    FEW,
    FP32,
    HALF,
    QUICK,
    SINGLE,
    SIZE,
    check_pass,
    close,
    draw,
    gradients,
    inputs_of,
    on_gpu,
    program,
    quickly,
)
from row_references import evaluate, named, reference_pass
from stepformer.model.engines.planning import PassStep
from stepformer.ops import row_passes
from stepformer.ops.row_passes import row_pass
from stepformer.ops.row_programs import borrowing, extract
from stepformer.ops.symbols import leaf

pytestmark = pytest.mark.usefixtures("interpreted")


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
@pytest.mark.parametrize("case", quickly(FEW[1:4:2]), ids=str)
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


@pytest.mark.parametrize("case", quickly(FEW[1:3]), ids=str)
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


# for compilers


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


def test_the_backward_operator_gives_dense_gradients() -> None:
    """Also those that are what arrives, however that lies in memory: compilers were told so."""
    x, g, s = leaf("row", "x"), leaf("row", "g"), leaf("stat", "s")
    own = extract([x + s * g], [], lambda n: False).program
    rows, weight = [torch.randn(3, 2, 20) for _ in range(2)], torch.randn(3, 2)
    for arriving in (torch.randn(2, 3, 20).transpose(0, 1), torch.randn(20).expand(3, 2, 20)):
        arguments = (own.text, [arriving], "o0", rows[1:], rows[0].new_empty(0, 6), [weight], "r0 r1 s0")
        given = torch.ops.stepformer.row_pass_backward(*arguments, " ".join(["float32"] * 3), [3, 2, 20])
        assert all(t.is_contiguous() for t in given)
        assert torch.equal(given[0], arriving)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n_layer"), [("yurii", 1), ("symp-exp-euler", 1), ("denseformer", 4)])
def test_a_compiled_model(name: str, n_layer: int) -> None:
    """The same loss and gradients through the operators: 1e-5, since gradients of x are added elsewhere."""
    torch._dynamo.reset()
    model = shake(tiny(name, dtype=SINGLE, **{**SIZE, "n_layer": n_layer}), scale=0.1)
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


def lenders(name: str, **changes: Any) -> list[PassStep]:
    """Passes that lend rows to others, and perhaps borrow some."""
    return [step for step in tiny(name, **{**SIZE, "n_layer": 5}, **changes).plan().passes() if step.lends]


def check_loans(step: PassStep, shape: tuple[int, ...], dtype: torch.dtype = SINGLE, device: str = "cpu") -> None:
    """A pass whose borrowed rows arrive as they are and whose gradients are those of their multiples, and which is
    asked for the gradients of the multiples that it lends."""
    own, borrows = step.program, dict(step.borrows)
    tolerance = FP32 if dtype == SINGLE else BF16
    tensors = inputs_of(own, shape, dtype, device)
    found, passed = row_pass(own, tensors, dtype, dtype, step.handed, step.borrows)
    wide = [t.detach().double() for t in tensors]
    for name, k in borrows.items():
        wide[int(name[1:])] = wide[-1][k] * wide[int(name[1:])]
    wide = [t.requires_grad_() for t in wide]
    multiples = borrowing(own, step.borrows) if borrows else own
    expected = evaluate((*multiples.outputs, *multiples.lent().values()), named(multiples, wide))
    assert list(passed) == [*step.handed, *own.lent()]
    for a, b in zip(found, expected, strict=False):
        close(a, b.detach(), tolerance)
    lent = [passed[name] for name in own.lent()]
    results = [*found, *lent, *(passed[name] for name in step.handed)]
    twins = [*expected, *(wide[int(name[1:])] for name in step.handed)]
    weights = [draw(*t.shape, seed=50 + i, dtype=t.dtype, device=device).detach() for i, t in enumerate(results)]
    slopes = torch.autograd.grad(results, tensors, weights)
    wanted = torch.autograd.grad(twins, wide, [w.double() for w in weights])
    arrived = math.sqrt(sum(float(w.double().square().sum()) for w in weights))
    for i, (a, b) in enumerate(zip(slopes, wanted, strict=True)):
        close(a, b, tolerance, i, least=arrived if i >= len(own.rows) else 0.0)


@pytest.mark.parametrize("place", [0, 2])
def test_rows_that_are_lent(place: int) -> None:
    """From an input, and from an output of a pass that borrows others."""
    step = lenders("denseformer")[place]
    assert bool(step.borrows) == (place > 0)
    check_loans(step, (1, 3, 20))


def test_gradients_of_weighted_rows() -> None:
    """Rows times numbers of the token: each product has a gradient, the rows have none, and one that arrives as it is
    needed, or that several products have, is one tensor."""
    a, b, g = leaf("row", "a"), leaf("row", "b"), leaf("row", "g")
    s = [leaf("stat", f"s{i}") for i in range(4)]
    mixed = [s[0] * a + s[1] * b + g, torch.tanh(s[2] * a + s[3] * b)]
    own = extract(mixed, [], lambda n: False)
    names = {n.attr: f"{n.kind[0]}{i}" for kind in ("row", "stat") for i, n in enumerate(own.inputs[kind])}
    tensors = inputs_of(own.program, (3, 20))
    rows = {name: tensors[int(names[name][1:])] for name in "abg"}
    numbers = {f"s{i}": tensors[3 + int(names[f"s{i}"][1:])] for i in range(4)}
    pairs = [("a", "s0"), ("a", "s2"), ("b", "s1"), ("b", "s3")]
    shares = {(names[row], names[by]): torch.zeros(3, 20, requires_grad=True) for row, by in pairs}
    found, _ = row_pass(own.program, tensors, SINGLE, SINGLE, shares=shares)
    arriving = [draw(3, 20, seed=i).detach() for i in (50, 51)]
    asked = [*shares.values(), rows["g"], *numbers.values()]
    slopes = torch.autograd.grad(found, asked, arriving, retain_graph=True)
    products = {(row, by): (numbers[by][:, None] * rows[row]).detach().requires_grad_() for row, by in pairs}
    sums = [sum(products[row, by] for row, by in pairs if by in two) for two in (("s0", "s1"), ("s2", "s3"))]
    wanted = torch.autograd.grad([sums[0] + rows["g"], sums[1].tanh()], [*products.values(), rows["g"]], arriving)
    for i, slope in enumerate(wanted):
        close(slopes[i], slope, FP32, i)
    for (row, by), slope, own_slope in zip(pairs, wanted, [slopes[5 + int(by[1])] for _, by in pairs], strict=False):
        close(own_slope, (slope * rows[row]).sum(-1).detach(), FP32, by, least=float(arriving[0].norm()))
    assert slopes[0].data_ptr() == slopes[2].data_ptr() == arriving[0].data_ptr()
    assert slopes[1].data_ptr() == slopes[3].data_ptr() != arriving[1].data_ptr()
    assert torch.autograd.grad(found, [rows["a"], rows["b"]], arriving, allow_unused=True) == (None, None)


def test_a_gradient_that_arrives_as_it_is_needed_is_not_written_again() -> None:
    x, g, s = leaf("row", "x"), leaf("row", "g"), leaf("stat", "s")
    program = extract([x + s * g], [], lambda n: False).program
    given = [torch.randn(3, 20, requires_grad=True), torch.randn(3, 20, requires_grad=True)]
    weight = torch.randn(3, requires_grad=True)
    ((out,), _) = row_pass(program, [*given, weight], SINGLE, SINGLE)
    arriving = torch.randn_like(out)
    by_x, by_g, by_s = torch.autograd.grad(out, [*given, weight], arriving)
    assert by_x.data_ptr() == arriving.data_ptr()
    assert torch.allclose(by_g, weight[:, None] * arriving)
    assert torch.allclose(by_s, (given[1] * arriving).sum(-1), atol=1e-6)
    ((out,), _) = row_pass(program, [*given, weight], HALF, HALF)  # another dtype has to be written
    assert torch.autograd.grad(out, given[0], arriving.to(HALF))[0].dtype == SINGLE


def test_who_borrows_writes_one_gradient() -> None:
    """However many rows an average has: one gradient for those that are lent, one for what is new; and the backward
    reads none of them again."""
    plan = tiny("denseformer", **{**SIZE, "n_layer": 8}).plan()
    steps = [step for step in plan.passes() if step.borrows]
    assert [len(step.borrows) for step in steps] == [1, 2, 3, 4, 5, 6, 6, 6]
    for step in steps[:6]:
        own = row_passes.compiled(step.program.text, step.handed, step.borrows)
        stored = own.backward(dict.fromkeys(own.reached, SINGLE), tuple(own.names), (SINGLE,) * len(own.names)).stored
        borrowed = {name for name, _ in step.borrows}
        assert len({stored[name] for name in borrowed}) == 1
        assert len(set(stored.values())) == 2
        assert not borrowed & {*own.kept, *own.handed}


class TestOnTheDevice:
    pytestmark = on_gpu

    @pytest.mark.parametrize("dtypes", [(SINGLE, SINGLE), (SINGLE, HALF), (HALF, HALF)], ids=str)
    @pytest.mark.parametrize(
        ("case", "shape"),
        [
            pytest.param(case, shape, marks=[] if usual or case in FEW else [pytest.mark.slow], id=f"{case}-{shape}")
            for usual, shapes in ((True, [(2, 1024, 768), (3, 517, 300)]), (False, [(1, 20), (5, 2048), (999, 21)]))
            for shape in shapes
            for case in CASES
        ],
    )
    def test_kernels(
        self, case: tuple[str, int], shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]
    ) -> None:
        own = program(case)
        tensors = inputs_of(own, shape, dtypes[0], device="cuda")
        check_pass(own, tensors, carried=dtypes[0], point=dtypes[1], handed=tuple(own.rows))

    @pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
    def test_loans(self, dtype: torch.dtype) -> None:
        for step in lenders("denseformer"):
            check_loans(step, (2, 1024, 768), dtype, "cuda")

    def test_same_bits_again(self) -> None:
        own = program(("nesterov", 1))
        runs = []
        for _ in range(2):
            tensors = inputs_of(own, (8, 300, 768), HALF, device="cuda")
            found, _ = row_pass(own, tensors, HALF, HALF)
            runs.append([*found, *torch.autograd.grad(sum(t.float().square().sum() for t in found), tensors)])
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
