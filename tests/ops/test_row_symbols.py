"""What symbols become, one operation and one number at a time: kernels against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
from helpers import shake, tiny
from row_cases import CHECKS, FP32, FP64, SINGLE, SIZE, close, draw, on_gpu
from row_references import evaluate, named, phi, reference_numbers, reference_pass
from stepformer.ops.numbers import lines_of, numbers_of
from stepformer.ops.phi import phi1, phi2
from stepformer.ops.row_passes import row_pass
from stepformer.ops.row_programs import Program, differentiate, extract
from stepformer.ops.symbols import FUNCTIONS, Symbol, function, leaf, lift, standardise

pytestmark = pytest.mark.usefixtures("interpreted")


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
    "mean over a place": lambda a: a * a.mean(-1, keepdim=True),
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


def test_the_operators_of_numbers() -> None:
    a, b = leaf("num", "a"), leaf("num", "b")
    key = numbers_of([[a * b, a + 1.0]], ["a", "b"], 16).key
    raw = draw(2, seed=0)
    torch.library.opcheck(torch.ops.stepformer.numbers.default, (key, raw), test_utils=CHECKS)
    arguments = (key, raw.detach(), draw(4, seed=1).detach())
    torch.library.opcheck(torch.ops.stepformer.numbers_backward.default, arguments, test_utils=CHECKS)


class TestOnTheDevice:
    pytestmark = on_gpu

    @pytest.mark.parametrize("name", OPERATIONS)
    def test_operations(self, name: str) -> None:
        check_operation(name, draw(77, 300, seed=0, positive=True, device="cuda"))
