"""The fused stream passes against plain equations: values and gradients of every input and parameter.

Without CUDA the kernels run in Triton's interpreter, in fp32 on tiny shapes. The twin runs in fp64, so the error is
that of the kernel: sums of at most 1,100 fp32 numbers and a few roundings, below 1e-5 of the norm of each tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import stream_references
from draws import seeded
from stepformer.base.errors import InputError
from stepformer.ops import adaptive, common, kernels, velocity
from stepformer.ops.common import Scalar
from stepformer.rules import State, templates
from stepformer.rules.coefficients import Values

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
Build = Callable[["Parts"], dict[str, Any]]


class Parts:
    """Random leaves that a case asks for by name, the same numbers in every dtype."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, streams: dict[str, Any] | None = None
    ):
        self.shape, self.dtype, self.seed = shape, dtype, seed
        self.streams = streams or {}
        self.leaves: dict[str, Tensor] = {}

    def draw(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, change: Callable[[Tensor], Tensor]) -> Tensor:
        if name not in self.leaves:
            generator = seeded(sum(map(ord, name)) + self.seed)
            numbers = change(torch.randn(shape, generator=generator)).to(self.streams.get(name, torch.float32))
            self.leaves[name] = numbers.to(DEVICE, dtype).requires_grad_()
        return self.leaves[name]

    def rows(self, name: str) -> Tensor:
        dtype = self.dtype if self.dtype == torch.float64 else self.streams.get(name, self.dtype)
        return self.draw(name, self.shape, dtype, lambda t: t + 0.3)

    def positive(self, name: str) -> Tensor:
        dtype = self.dtype if self.dtype == torch.float64 else self.streams.get(name, self.dtype)
        return self.draw(name, self.shape, dtype, lambda t: t.abs() + 0.01)

    def vector(self, name: str) -> Tensor:
        return self.draw(name, self.shape[-1:], self.dtype, lambda t: 1 + 0.3 * t)

    def scalar(self, name: str, kind: common.Range, constant: float = 1.0) -> Scalar:
        return Scalar(self.draw(name, (1,), self.dtype, lambda t: t), kind, constant)


def nesterov(p: Parts) -> dict[str, Any]:
    return {
        "g": p.rows("g"), "x": p.rows("x"), "V": p.rows("V"), "gamma": p.scalar("gamma", "positive"),
        "gain_v": p.vector("gain_v"), "eps_v": 1e-2, "mu_next": p.scalar("mu", "unit"),
        "beta_next": p.scalar("beta", "unit"), "gamma_next": p.scalar("gamma_next", "positive"),
        "norms": ((p.vector("gain_a"), None),),
    }  # fmt: skip


def gd(p: Parts) -> dict[str, Any]:
    return {"g": p.rows("g"), "x": p.rows("x"), "norms": ((p.vector("gain_a"), None),)}


def tail(p: Parts) -> dict[str, Any]:
    """The end of a rule with an update of its own: LN_u, drift by half a learned step, decay, two outputs."""
    return {
        "g": p.rows("g"), "g2": p.rows("g2"), "x": p.rows("x"), "gain_v": p.vector("gain_v"),
        "nu": p.scalar("gamma", "positive", 0.5), "lam": p.scalar("lam", "unit"),
        "norms": ((p.vector("gain_a"), p.vector("bias_a")), (p.vector("gain_b"), p.vector("bias_b"))),
    }  # fmt: skip


VELOCITY: dict[str, Build] = {
    "gd": gd,
    "gd, constant step": lambda p: gd(p) | {"gamma": Scalar(constant=0.7)},
    "gd, learned half step": lambda p: gd(p) | {"gamma": p.scalar("gamma", "positive"), "scale": 0.5},
    "gd, two answers and outputs": lambda p: gd(p)
    | {"g2": p.rows("g2"), "norms": ((None, None), (None, p.vector("bias_b")))},
    "nesterov": nesterov,
    "triple momentum, half steps": lambda p: nesterov(p)
    | {"nu": p.scalar("nu", "positive"), "scale": 0.5, "scale_next": -0.5},
    "subtracting": lambda p: nesterov(p) | {"scale": -1.0, "g2": p.rows("g2")},
    "decay and free scalars": lambda p: nesterov(p)
    | {"lam": p.scalar("lam", "unit"), "nu": p.scalar("nu", "free"), "mu_next": p.scalar("mu", "free")},
    "first pass": lambda p: nesterov(p) | {"V": None},
    "last pass": lambda p: nesterov(p) | {"mu_next": None, "beta_next": None, "gamma_next": None},
    "rmsnorm": lambda p: nesterov(p) | {"norm_kind": "rmsnorm", "norms": ((None, None),)},
    "velocity without norm": lambda p: nesterov(p) | {"gain_v": None},
    "no drift": lambda p: nesterov(p) | {"drift": False},
    "no output": lambda p: nesterov(p) | {"norms": ()},
    "only a kick": lambda p: nesterov(p) | {"norms": (), "drift": False, "gain_v": None},
    "before the first answer": lambda p: nesterov(p)
    | {"g": p.rows("v"), "V": None, "gain_v": None, "gamma": Scalar(), "drift": False},
    "before the first answer, without a velocity": lambda p: {
        "g": None, "x": p.rows("x"), "drift": False, "norms": ((p.vector("gain_a"), None), (p.vector("gain_b"), None))
    },
    "constants": lambda p: nesterov(p)
    | {"gamma": Scalar(constant=0.4), "mu_next": Scalar(constant=0.9), "beta_next": Scalar(constant=0.8)},
    "tail": tail,
}  # fmt: skip


def adam(p: Parts) -> dict[str, Any]:
    return {
        "g": p.rows("g"), "x": p.rows("x"), "m": p.rows("m"), "s": p.positive("s"), "beta1": p.scalar("beta1", "unit"),
        "beta2": p.scalar("beta2", "unit"), "gamma": p.scalar("gamma", "positive"), "gain_v": p.vector("gain_v"),
        "norms": ((p.vector("gain_a"), None),),
    }  # fmt: skip


ADAPTIVE: dict[str, Build] = {
    "adam": adam,
    "rmsprop, half step": lambda p: adam(p) | {"m": None, "beta1": None, "scale": 0.5},
    "adamw, two answers and outputs": lambda p: (
        adam(p)
        | {
            "lam": p.scalar("lam", "unit"),
            "g2": p.rows("g2"),
            "norms": ((p.vector("gain_a"), p.vector("bias_a")), (p.vector("gain_b"), None)),
        }
    ),
    "no output": lambda p: adam(p) | {"norms": ()},
    "rmsnorm, constants": lambda p: (
        adam(p)
        | {
            "norm_kind": "rmsnorm",
            "norms": ((None, None),),
            "beta1": Scalar(constant=0.9),
            "gamma": Scalar(constant=0.3),
        }
    ),
}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that a kernel should have written is NaN until it has; few programs, so that each has several tiles."""
    poison(monkeypatch)
    if not CUDA:
        monkeypatch.setattr(velocity, "backward_tile", lambda d, light, width: common.row_tile(d, rows=2, programs=2))
        monkeypatch.setattr(adaptive, "backward_tile", lambda d, width: common.row_tile(d, rows=2, programs=2))
    with kernels.interpreted():
        yield


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that `new_empty` gives is NaN until somebody has written it."""
    plain = Tensor.new_empty

    def poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = plain(self, *args, **kwargs)
        return made if torch.compiler.is_compiling() or not made.is_floating_point() else made.fill_(float("nan"))

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


def off_by(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def compare(
    run: Callable[..., Any], twin: Callable[..., Any], build: Build, shape: tuple[int, ...], bound: float, *,
    dtype: torch.dtype = torch.float32, seed: int = 0, used: Callable[[int], bool] = lambda k: True,
    toward: dict[int, str] | None = None, **options: Any,
) -> None:  # fmt: skip
    """Outputs and gradients of a pass and its twin in fp64 on the same (rounded) numbers.

    The loss weighs each output by random numbers plus what the output is, so that the sum behind the gradient of a
    scalar does not nearly cancel. Where the output is a norm and cannot grow, `toward` names an input to take instead.
    """
    streams = options.pop("streams", None)
    ours, theirs = Parts(shape, dtype, seed, streams), Parts(shape, torch.float64, seed, streams)
    inputs, expected_inputs = build(ours), build(theirs)
    outputs = run(inputs.pop("g"), **inputs, **options)
    expected = twin(expected_inputs.pop("g"), **expected_inputs, **options)
    assert [o is None for o in outputs] == [e is None for e in expected]
    generator = seeded(seed + 1)
    directions = [theirs.leaves[toward[k]] if toward and k in toward else e for k, e in enumerate(expected)]
    weights = [
        None if e is None else (torch.randn(e.shape, generator=generator).to(e) + e.detach()).to(o)
        for o, e in zip(outputs, directions, strict=True)
    ]
    loss = expected_loss = torch.zeros((), device=DEVICE, dtype=torch.float64)
    for k, (o, e, w) in enumerate(zip(outputs, expected, weights, strict=True)):
        if o is not None and w is not None:
            assert off_by(o, e) < bound, f"output {k}"
            if used(k):
                loss = loss + (o * w).sum(dtype=torch.float64)
                expected_loss = expected_loss + (e * w.double()).sum()
    loss.backward()
    expected_loss.backward()
    compare_gradients(ours.leaves, theirs.leaves, bound)


def compare_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> None:
    scalars: list[tuple[Tensor, Tensor]] = []
    for name, leaf in ours.items():
        reference = theirs[name].grad
        if reference is None:
            assert leaf.grad is None or not leaf.grad.any(), name
            continue
        assert leaf.grad is not None, name
        assert leaf.grad.dtype == leaf.dtype
        assert leaf.grad.shape == leaf.shape
        if leaf.numel() > 1:
            assert off_by(leaf.grad, reference) < bound, f"gradient of {name}"
        else:
            scalars.append((leaf.grad.double(), reference))
    if scalars:  # together: the sum behind one of them may nearly cancel
        assert off_by(torch.cat([s for s, _ in scalars]), torch.cat([s for _, s in scalars])) < bound


def _passes() -> Iterator[Any]:
    for name, build in VELOCITY.items():
        yield pytest.param(velocity.velocity_pass, stream_references.velocity_pass_reference, build, id=name)
    for name, build in ADAPTIVE.items():
        yield pytest.param(
            adaptive.adaptive_pass, stream_references.adaptive_pass_reference, build, id=f"adaptive: {name}"
        )


PASSES = list(_passes())


@pytest.mark.parametrize(("run", "twin", "build"), PASSES)
def test_a_pass_equals_its_equations(run: Any, twin: Any, build: Build) -> None:
    compare(run, twin, build, (3, 3, 48), 1e-5)


@pytest.mark.parametrize(("shape"), [(1, 16), (2, 50), (2, 300), (2, 768), (1, 1100)])
def test_widths(shape: tuple[int, ...]) -> None:
    """One row, odd widths, several chunks (with an empty one at 768), more than one warp per row."""
    compare(velocity.velocity_pass, stream_references.velocity_pass_reference, nesterov, shape, 1e-5, seed=3)
    compare(adaptive.adaptive_pass, stream_references.adaptive_pass_reference, adam, shape, 1e-5, seed=3)


@pytest.mark.parametrize("output", [0, 1, 2])
def test_outputs_that_nobody_uses(output: int) -> None:
    """A missing gradient is not asked for as a tensor of zeros."""
    only: dict[str, Any] = {"used": lambda k: k == output}
    norm = {2: "V"}  # the norm alone: toward itself, the sums behind the scalars' gradients cancel to a hundredth
    twin = stream_references.velocity_pass_reference
    compare(velocity.velocity_pass, twin, nesterov, (5, 32), 1e-5, toward=norm, **only)
    compare(adaptive.adaptive_pass, stream_references.adaptive_pass_reference, adam, (5, 32), 1e-5, **only)


@pytest.mark.parametrize(("x", "stream"), list(itertools.product([torch.float32, torch.bfloat16], repeat=2)))
def test_dtypes_are_independent(x: torch.dtype, stream: torch.dtype) -> None:
    """bf16 has 8 bits: each rounding is 4e-3 at most, 2e-3 on average; gradients of scalars cancel a little more."""
    streams = {"x": x, "V": stream, "m": stream, "s": torch.float32, "g": torch.bfloat16}
    bound = 4e-2 if torch.bfloat16 in (x, stream) else 2e-2  # a quarter of it seen
    options: dict[str, Any] = {"streams": streams, "out_dtype": torch.bfloat16}
    compare(velocity.velocity_pass, stream_references.velocity_pass_reference, nesterov, (5, 48), bound, **options)
    compare(adaptive.adaptive_pass, stream_references.adaptive_pass_reference, adam, (5, 48), bound, **options)


@pytest.mark.parametrize("raw", [-30.0, -8.0, 0.0, 3.0, 60.0])
@pytest.mark.parametrize("kind", ["unit", "positive"])
def test_scalars_are_mapped_as_in_the_rules(raw: float, kind: common.Range) -> None:
    """Also where log(1 + e) or 1 - sigmoid loses its digits: 1e-6 relative, an exp of fp32."""
    leaf = torch.tensor([raw], device=DEVICE, requires_grad=True)
    ones = torch.ones(1, 16, device=DEVICE)
    x, *_ = velocity.velocity_pass(ones, x=0 * ones, gamma=Scalar(leaf, kind))
    x.sum().backward()
    twin = torch.tensor([raw], dtype=torch.float64, requires_grad=True)
    value = Scalar(twin, kind).value()
    assert isinstance(value, Tensor)
    value.sum().backward()
    assert twin.grad is not None
    assert leaf.grad is not None
    assert off_by(x[0, :1].cpu(), value.detach()) < 2e-6
    assert float(leaf.grad / 16) == pytest.approx(float(twin.grad), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", ["heavy-ball", "triple-momentum"])
def test_chained_passes_are_the_rule(name: str) -> None:
    """Three turns of the template, the second a half step and the third a subtraction, against three passes."""
    template = templates[name].component(2, 8)
    coefficients = template.coefficients
    scales = (1.0, 0.5, -1.0)

    def leaves(dtype: torch.dtype) -> dict[str, Tensor]:
        p = Parts((3, 16), dtype)
        rows = {k: p.rows(k) for k in ("x", "v", "A", "B", "C")}
        vectors = {k: p.vector(k) for k in ("gain_0", "gain_1", "gain_2", "norm_1", "norm_2", "norm_3")}
        raws = {f"{c}_{k}": p.scalar(f"{c}_{k}", "free").raw for c in coefficients for k in range(3)}
        return {**rows, **vectors, **raws}  # type: ignore[dict-item]

    def norm(t: Tensor, gain: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(t, t.shape[-1:], gain, None, 1e-3)

    def by_rule(t: dict[str, Tensor]) -> list[Tensor]:
        s = State(t["x"], {"v": t["v"]})
        values = [Values({c: spec.value(t[f"{c}_{k}"]) for c, spec in coefficients.items()}) for k in range(3)]
        u = norm(template.query(s, values[0]), t["norm_1"])
        outs = []
        for k, weight in enumerate("ABC"):
            s = template.kick(s, values[k], torch.tanh(u) * t[weight], scales[k])
            s = s.replace(v=norm(s.v, t[f"gain_{k}"]))
            s = template.drift(s, values[k], scales[k])
            u = norm(template.query(s, values[k + 1]) if k < 2 else s.x, t["norm_2" if k == 0 else "norm_3"])
            outs.append(u)
        return [s.x, s.v, *outs]

    def by_passes(t: dict[str, Tensor]) -> list[Tensor]:
        def scalar(c: str, k: int) -> Scalar | None:
            return Scalar(t[f"{c}_{k}"], coefficients[c].range) if c in coefficients and k < 3 else None

        c0 = {c: spec.value(t[f"{c}_0"]) for c, spec in coefficients.items()}
        x, V = t["x"], t["v"] * (c0["beta"] / (scales[0] * c0["gamma"]))
        u = norm(x + c0["mu"] * t["v"] if "mu" in c0 else x, t["norm_1"])
        outs = []
        for k, weight in enumerate("ABC"):
            gamma = scalar("gamma", k)
            assert gamma is not None
            x, V, u, _ = velocity.velocity_pass(  # type: ignore[assignment]
                torch.tanh(u) * t[weight], x=x, V=V, gamma=gamma, scale=scales[k], gain_v=t[f"gain_{k}"], eps_v=1e-3,
                nu=scalar("nu", k), mu_next=scalar("mu", k + 1), beta_next=scalar("beta", k + 1),
                gamma_next=scalar("gamma", k + 1), scale_next=scales[k + 1] if k < 2 else 1.0,
                norms=((t["norm_2" if k == 0 else "norm_3"], None),), eps=1e-3,
            )  # fmt: skip
            outs.append(u)
        return [x, V, *outs]

    exact, ours = leaves(torch.float64), leaves(torch.float32)
    expected, got = by_rule(exact), by_passes(ours)
    for a, b in zip(got, expected, strict=True):
        assert off_by(a, b) < 1e-5
        weight = torch.linspace(-1, 1, a.numel(), device=DEVICE).view_as(a)
        (a * weight).sum().backward(retain_graph=True)
        (b * weight).sum().backward(retain_graph=True)
    compare_gradients(ours, exact, 1e-5)


def test_without_an_answer_nothing_moves() -> None:
    with pytest.raises(InputError, match="only normalises"):
        velocity.velocity_pass(None, x=torch.ones(1, 16, device=DEVICE))


@pytest.mark.parametrize("width", [47, 48])
@pytest.mark.parametrize(("run", "build"), [(velocity.velocity_pass, nesterov), (adaptive.adaptive_pass, adam)])
def test_every_way_through_the_rows_is_the_same(
    monkeypatch: pytest.MonkeyPatch, run: Any, build: Build, width: int
) -> None:
    """Rows loaded one ahead, or gains held in registers; bf16 in pairs, or alone where the width is odd.

    The same operations in the same order: a compiler may fuse others, so a few numbers round the other way (1e-3).
    """
    results = []
    for options in ({}, {"ahead": True}, {"hold": True, "stages": 3}):
        tile = common.row_tile(width, rows=2, programs=2)._replace(**options)  # type: ignore[arg-type]
        monkeypatch.setattr(velocity, "backward_tile", lambda d, light, width, tile=tile: tile)
        monkeypatch.setattr(adaptive, "backward_tile", lambda d, width, tile=tile: tile)
        p = Parts((7, width), torch.float32, streams=dict.fromkeys(("g", "x", "V", "m", "s"), torch.bfloat16))
        inputs = build(p)
        outputs = [o for o in run(inputs.pop("g"), **inputs) if o is not None]
        sum((o.float() * o.float()).sum() for o in outputs).backward()  # type: ignore[union-attr]
        results.append({name: leaf.grad for name, leaf in p.leaves.items()})
    for other in results[1:]:
        for name, grad in results[0].items():
            assert off_by(other[name], grad) < 1e-3, name  # type: ignore[arg-type]


def test_degenerate_rows_and_gains_stay_finite() -> None:
    """A constant answer, a gain of exactly 0, a memory of exactly 0, a second moment of exactly 0."""
    p = Parts((2, 16), torch.float32)
    inputs = nesterov(p) | {"beta_next": Scalar(constant=0.0)}
    with torch.no_grad():
        p.leaves["g"][0] = 2.0
        p.leaves["V"][0] = 0.0
        p.leaves["gain_v"][3] = 0.0
    outputs = velocity.velocity_pass(inputs.pop("g"), **inputs)
    sum(o.sum() for o in outputs if o is not None).backward()  # type: ignore[union-attr]
    q = Parts((2, 16), torch.float32)
    inputs = adam(q)
    with torch.no_grad():
        q.leaves["g"][0, 5:] = 0.0
        q.leaves["s"][0, 5:] = 0.0
    results = adaptive.adaptive_pass(inputs.pop("g"), **inputs)
    sum(o.sum() for o in results if o is not None).backward()  # type: ignore[union-attr]
    for leaf in (*p.leaves.values(), *q.leaves.values()):
        assert leaf.grad is None or leaf.grad.isfinite().all()


def test_views_and_repeatability() -> None:
    """Non-contiguous inputs give the numbers of contiguous ones, and the same call the same bits."""
    p = Parts((4, 32), torch.float32)
    inputs = nesterov(p)
    g = inputs.pop("g")
    first = velocity.velocity_pass(g, **inputs)
    strided = {k: inputs[k].detach().t().contiguous().t() for k in ("x", "V")}
    second = velocity.velocity_pass(g.detach().t().contiguous().t(), **(inputs | strided))
    grads = [torch.autograd.grad((o[0] * o[0]).sum() + o[2].sum(), inputs["gain_v"])[0] for o in (first, second)]  # type: ignore[union-attr]
    assert torch.equal(grads[0], grads[1])
    assert all(torch.equal(a, b) for a, b in zip(first[:3], second[:3], strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run", "build"),
    [
        (velocity.velocity_pass, nesterov),
        (velocity.velocity_pass, VELOCITY["no drift"]),
        (adaptive.adaptive_pass, adam),
    ],
)
def test_traces_without_graph_break(run: Any, build: Build) -> None:
    def loss(p: Parts) -> Tensor:
        inputs = build(p)
        outputs = run(inputs.pop("g"), **inputs)
        return sum((o * o).sum() for o in outputs if o is not None)

    eager, traced = Parts((3, 32), torch.float32), Parts((3, 32), torch.float32)
    build(traced)  # draws the leaves outside of the graph
    loss(eager).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(traced).backward()
    for name, leaf in eager.leaves.items():
        assert torch.equal(leaf.grad, traced.leaves[name].grad), name  # type: ignore[arg-type]


def test_operators_are_what_they_declare() -> None:
    """Fake shapes and dtypes, no aliasing, registered autograd."""
    p = Parts((3, 16), torch.float32)
    n, a = nesterov(p), adam(p)
    raws = [n["gamma"].raw, None, None, n["mu_next"].raw, n["beta_next"].raw, n["gamma_next"].raw]
    tensors = (n["g"], n["x"], n["V"], None, n["gain_v"], n["norms"][0][0], None, None, None, *raws)
    numbers = ([2, -2, -2, 1, 1, 2], [1.0] * 6, 1e-5, 1e-5, 1, True, True, True, torch.float32)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.stepformer.velocity_pass.default, (*tensors, *numbers), test_utils=checks)
    raws = [a["beta1"].raw, a["beta2"].raw, a["gamma"].raw, None]
    tensors = (a["g"], a["x"], a["m"], a["s"], None, a["gain_v"], a["norms"][0][0], None, None, None, *raws)
    numbers = ([1, 1, 2, -2], [1.0] * 4, 1e-5, 1e-5, 1, True, torch.float32)  # type: ignore[assignment]
    torch.library.opcheck(torch.ops.stepformer.adaptive_pass.default, (*tensors, *numbers), test_utils=checks)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize(("run", "twin", "build"), PASSES)
@pytest.mark.parametrize("shape", [(1, 768), (4, 257, 768), (3001, 1024), (33, 100), (7, 4096)])
def test_large_on_the_gpu(run: Any, twin: Any, build: Build, shape: tuple[int, ...]) -> None:
    """fp32 1e-5; bf16 streams 1e-2 (scalars and gains average over rows, rounding does too)."""
    compare(run, twin, build, shape, 1e-5)
    streams = dict.fromkeys(("g", "g2", "x", "V", "m"), torch.bfloat16)
    bound = 1e-2 if shape[0] > 1 else 3e-2
    compare(run, twin, build, shape, bound, streams=streams, out_dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("d", [6000, 9000])
def test_wide_rows_on_the_gpu(d: int) -> None:
    """More columns than one tile has: the launch must still fit into a multiprocessor."""
    compare(velocity.velocity_pass, stream_references.velocity_pass_reference, nesterov, (3, d), 1e-5)
    compare(adaptive.adaptive_pass, stream_references.adaptive_pass_reference, adam, (3, d), 1e-5)
