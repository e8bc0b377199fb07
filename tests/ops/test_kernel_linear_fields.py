"""Both sums of the linear Hamiltonian fields against sums written out in fp64, and the fields against their twin.

fp32: 1e-5 of the norm (measured 1e-6: sums of some hundred terms). bf16: 1e-2, up to five roundings of 2^-9 on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepformer as sf
from draws import seeded
from helpers import in_documents, shake, tiny, tokens
from stepformer.model.engines import fused
from stepformer.model.engines.oracles import FusedFields, FusedLinearFields
from stepformer.ops import kernels
from stepformer.oracles.caches import fresh_call
from stepformer.oracles.hamiltonian import HamiltonianAttention
from stepformer.oracles.linear import LinearFields, LinearHamiltonian

pytest.importorskip("triton")
from stepformer.ops import linear_fields, linear_flow
from stepformer.ops.token_rows import scale_rows

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FP32, BF16 = 1e-5, 1e-2
LINEAR = [name for name in sf.presets() if name.startswith("linear-symp-")]


@pytest.fixture
def interpreted() -> Iterator[None]:
    with kernels.interpreted():
        yield


def draw(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of `dtype`, held in fp64."""
    values = torch.randn(shape, generator=seeded(seed), dtype=torch.float64)
    return values.to(dtype).double().to(device)


def close(found: Any, expected: Any, bound: float, names: str = "") -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.isfinite().all(), (names, i)
        distance = (a.detach().double() - b.double()).norm() / b.double().norm()
        assert distance <= bound, (names, i, float(distance))


def gradients(outputs: Any, inputs: Any) -> tuple[Tensor, ...]:
    """Of all outputs with random weights."""
    total = torch.zeros((), dtype=torch.float64, device=inputs[0].device)
    for i, o in enumerate(outputs):
        total = total + (o.double() * draw(*o.shape, seed=90 + i, device=o.device.type)).sum()
    return torch.autograd.grad(total, inputs)


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """A list that grows with every call of a function of a module."""
    calls: list[Any] = []
    original = getattr(owner, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counting)
    return calls


# the operators


def written_out(p: Tensor, u: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (p @ u.mT).tril() @ y, (y @ y.mT).tril() @ u


def check_sums(
    batch: int,
    length: int,
    width: int,
    segment: int,
    chunk: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    used: slice = slice(None),
) -> None:
    """Values and gradients, the latter of those outputs that are used."""
    wide = [draw(batch, length, width, seed=i, device=device, dtype=dtype).requires_grad_() for i in range(3)]
    inputs = [t.detach().to(dtype).requires_grad_() for t in wide]
    expected = written_out(*wide)
    found = linear_flow.hamiltonian_sums(*inputs, segment=segment, chunk=chunk)
    assert all(t.dtype == dtype and t.shape == inputs[0].shape for t in found)
    bound = FP32 if dtype == torch.float32 else BF16
    close(found, expected, bound, "F, G")
    if used == slice(1, 2):  # G knows nothing of p
        wide, inputs = wide[1:], inputs[1:]
    close(gradients(found[used], inputs), gradients(expected[used], wide), bound, "gradients of p, u, y")


SUMS = [
    (2, 37, 8, 0, 16),
    (2, 37, 8, 10, 4),
    (1, 1, 4, 0, 8),
    (3, 1, 5, 7, 8),
    (2, 24, 6, 8, 8),
    (1, 9, 130, 4, 256),
    (2, 25, 7, 11, 3),
    (1, 33, 16, 16, 16),
]


@pytest.mark.parametrize(("batch", "length", "width", "segment", "chunk"), SUMS)
def test_both_sums(batch: int, length: int, width: int, segment: int, chunk: int, poisoned: None) -> None:
    check_sums(batch, length, width, segment, chunk)


@pytest.mark.parametrize("used", [slice(0, 1), slice(1, 2)], ids=["velocity", "force"])
@pytest.mark.parametrize("segment", [0, 5])
def test_one_of_them_used(used: slice, segment: int, poisoned: None) -> None:
    check_sums(2, 13, 6, segment, 4, used=used)


@pytest.mark.parametrize("segment", [0, 10])
def test_scores_that_are_not_kept(segment: int, monkeypatch: pytest.MonkeyPatch, poisoned: None) -> None:
    """One score more than fits, and the backward pass computes them again; both matrices count."""
    again = counted(monkeypatch, linear_flow, "scores_again")
    size = 2 * 2 * 40 * (segment or 40)
    monkeypatch.setattr(linear_flow, "KEPT", size)
    check_sums(2, 40, 8, segment, 4)
    assert not again
    monkeypatch.setattr(linear_flow, "KEPT", size - 1)
    check_sums(2, 40, 8, segment, 4)
    check_sums(2, 40, 8, segment, 4, used=slice(0, 1))
    assert [len(pairs) for pairs, *_ in again] == [2, 1]  # the velocity alone needs one of the matrices


def test_inputs_may_be_views() -> None:
    base = [draw(7, 2, 12, seed=i).float().requires_grad_() for i in range(3)]
    views = [t.transpose(0, 1)[..., 2:10] for t in base]
    wide = [t.detach().double().requires_grad_() for t in views]
    found, expected = linear_flow.hamiltonian_sums(*views, segment=3, chunk=2), written_out(*wide)
    close(found, expected, FP32)
    slopes = [t.transpose(0, 1)[..., 2:10] for t in gradients(found, base)]
    close(slopes, gradients(expected, wide), FP32)


def test_later_tokens_leave_no_trace() -> None:
    """Bit for bit, also where later tokens are NaN."""
    p, u, y = (draw(1, 40, 8, seed=i).float() for i in range(3))
    for segment in (0, 16):
        first = linear_flow.hamiltonian_sums(p, u, y, segment=segment, chunk=8)
        spoilt = [t.clone() for t in (p, u, y)]
        for t in spoilt:
            t[:, 32:] = torch.nan
        second = linear_flow.hamiltonian_sums(*spoilt, segment=segment, chunk=8)
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one[:, :32], other[:, :32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sum_of_linear_layers(dtype: torch.dtype, poisoned: None) -> None:
    """Gradients of weights are in fp32 and, in bf16, closer than a rounded one could be."""
    tokens_, weights = [draw(2, 3, 5, seed=i, dtype=dtype) for i in range(2)], [draw(4, 5, seed=i) for i in (2, 3)]
    inputs = [t.to(dtype).requires_grad_() for t in tokens_], [w.float().requires_grad_() for w in weights]
    (x, z), (v, a) = inputs
    found = linear_fields.sum_of_linear_layers(x, v, z, a)
    wide = [t.detach().to(dtype).double().requires_grad_() for t in (x, v, z, a)]
    expected = wide[0] @ wide[1].mT + wide[2] @ wide[3].mT
    assert found.dtype == dtype
    close([found], [expected], FP32 if dtype == torch.float32 else BF16)
    weight = draw(*found.shape, seed=7, dtype=dtype)
    slopes = torch.autograd.grad(found, (x, v, z, a), weight.to(dtype))
    wanted = torch.autograd.grad(expected, wide, weight)
    close(slopes[1::2], wanted[1::2], FP32)
    close(slopes[::2], wanted[::2], FP32 if dtype == torch.float32 else BF16)
    assert [t.dtype for t in slopes] == [dtype, torch.float32] * 2
    v.requires_grad_(False)
    x.requires_grad_(False)
    again = torch.autograd.grad(linear_fields.sum_of_linear_layers(x, v, z, a), (z, a), weight.to(dtype))
    assert all(torch.equal(s, t) for s, t in zip(again, slopes[2:], strict=True))


def test_the_operators_are_registered_properly() -> None:
    """Schema, fake tensors and autograd as torch checks them."""
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    p, u, y = (draw(2, 6, 4, seed=i).float().requires_grad_() for i in range(3))
    for segment, keep in ((6, True), (3, True), (3, False)):
        arguments = (p, u, y, segment, 2, keep, True)
        torch.library.opcheck(torch.ops.stepformer.causal_sums.default, arguments, test_utils=checks)
    v, a = (draw(4, 4, seed=i).float().requires_grad_() for i in (3, 4))
    fields = (u, y, a, a.detach().clone(), v, v.detach().clone(), draw(6).float(), 3, 2, True)
    torch.library.opcheck(torch.ops.stepformer.linear_fields.default, fields, test_utils=checks)
    layers = (u[0], v, v.detach().clone(), y[0], a, a.detach().clone())
    torch.library.opcheck(torch.ops.stepformer.sum_of_linear_layers.default, layers, test_utils=checks)


# the fields


def module(kind: Any, width: int, device: str = "cpu", **options: Any) -> Any:
    made = kind(width, 2, bias=False, rotary=False, **options).double()
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=20 + i) / width**0.5 + 0.1)
    return made.to(device)


def fields_at(made: Any, u: Tensor, y: Tensor) -> Any:
    return made.fields(u, y, fresh_call(torch.zeros(u.shape[:2], dtype=torch.long, device=u.device)))


def all_fields(made: Any, u: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """G first, F at the own momentum as one tensor and by parts, and F at a newer one."""
    field = fields_at(made, u, y)
    force, velocity = field.force(), field.velocity(y)
    by_parts = velocity
    if hasattr(field, "scaled_velocity"):
        rows, factor = field.scaled_velocity()
        if (factor.dtype, factor.shape) != (torch.float32, rows.shape[:-1]):  # no assert: it may be compiled
            raise AssertionError(factor.shape)
        by_parts = rows.float() * factor[..., None]
    return force, velocity, by_parts, field.velocity(y.flip(-1))


FIELDS: list[tuple[Any, dict[str, Any]]] = [
    (LinearHamiltonian, {}),
    (LinearHamiltonian, {"chunk": 7, "n0": 5}),
    (HamiltonianAttention, {}),
    (HamiltonianAttention, {"kernel": "per-head", "n0": 5}),
]


WAYS = [
    pytest.param(*fields, way, marks=[] if not fields[1] and way == "together" else [pytest.mark.slow])
    for fields in FIELDS
    for way in ("together", "hooked", "steered", "replaced", "later")
    if fields[0] is LinearHamiltonian or way == "together"  # the other's code does not know any of them
]


@pytest.mark.parametrize(("kind", "options", "way"), WAYS, ids=str)
def test_fields_equal_the_twin(kind: Any, options: dict[str, Any], way: str, interpreted: None, poisoned: None) -> None:
    """later: the integrator moves with a newer momentum, and sums are not shared. hooked: somebody watches a map.
    steered: somebody adds to what it gives. replaced: it is another module."""
    made = module(kind, 8, **options)
    made.moves_with_new_momentum = way == "later"
    if way == "hooked":
        seen: list[Any] = []
        made.value.register_forward_hook(lambda *a: seen.append(a))
    if way == "steered":
        made.kernel.register_forward_hook(lambda module, inputs, output: output + 0.3)
    if way == "replaced":
        made.kernel = nn.Linear(8, 8, dtype=torch.float64)
    u, y = (draw(2, 19, 8, seed=i).requires_grad_() for i in range(2))
    expected = all_fields(made, u, y)
    slopes = gradients(expected, (u, y, *made.parameters()))
    made.float()
    u, y = (t.detach().float().requires_grad_() for t in (u, y))
    assert isinstance(fields_at(made, u, y), FusedLinearFields if kind is LinearHamiltonian else FusedFields)
    found = all_fields(made, u, y)
    close(found, expected, FP32, "values")
    close(gradients(found, (u, y, *made.parameters())), slopes, FP32, "gradients")
    if way == "hooked":
        assert len(seen) == 2  # of the twin and of these


@pytest.mark.parametrize("segment", [0, 5])
@pytest.mark.parametrize("asked", ["velocity", "force"])
def test_one_field_used(asked: str, segment: int, interpreted: None, poisoned: None) -> None:
    """Gradients of what is used; a weight of the force alone has none where nobody uses the force."""
    made = module(LinearHamiltonian, 8, chunk=segment)
    slopes = []
    for dtype in (torch.float64, torch.float32):
        made.to(dtype)
        u, y = (draw(2, 13, 8, seed=i).to(dtype).requires_grad_() for i in range(2))
        field = fields_at(made, u, y)
        out = field.velocity(y) if asked == "velocity" else field.force()
        inputs = (u, y, made.kernel.weight, made.value.weight)
        slopes.append(torch.autograd.grad(out, inputs, draw(*out.shape, seed=5).to(dtype), allow_unused=True))
    assert [t is None for t in slopes[0]] == [t is None for t in slopes[1]] == [False] * 3 + [asked == "velocity"]
    close([t for t in slopes[1] if t is not None], [t for t in slopes[0] if t is not None], FP32)


def test_frozen_weights(interpreted: None) -> None:
    made = module(LinearHamiltonian, 8).float()
    u, y = (draw(2, 5, 8, seed=i).float().requires_grad_() for i in range(2))
    every = gradients(all_fields(made, u, y), (u, y, made.kernel.weight))
    made.value.weight.requires_grad_(False)
    assert all(map(torch.equal, gradients(all_fields(made, u, y), (u, y, made.kernel.weight)), every))
    made.kernel.weight.requires_grad_(False)
    assert all(map(torch.equal, gradients(all_fields(made, u, y), (u, y)), every))


def test_both_sums_are_computed_once(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, linear_fields, "linear_fields")
    made = module(LinearHamiltonian, 8).float()
    u, y = (draw(1, 5, 8, seed=i).float() for i in range(2))
    field = fields_at(made, u, y)
    assert not calls
    field.velocity(y), field.force(), field.scaled_velocity()
    assert len(calls) == 1
    made.moves_with_new_momentum = True
    field = fields_at(made, u, y)
    field.force(), field.velocity(2 * y)
    assert len(calls) == 1


def test_what_is_not_plain_takes_the_twin(interpreted: None) -> None:
    """Documents, an observer, a subclass, kernels switched off."""

    class Changed(LinearHamiltonian):
        def gather(self, *inputs: Any) -> Any:
            return super().gather(*inputs)

    u, y = (draw(1, 5, 8, seed=i).float() for i in range(2))
    made, call = module(LinearHamiltonian, 8).float(), fresh_call(torch.zeros(1, 5))
    assert isinstance(made.fields(u, y, call), FusedLinearFields)
    documents = in_documents(torch.tensor([[1, 0, 1, 1, 0]]))
    assert isinstance(made.fields(u, y, documents), LinearFields)
    assert isinstance(module(Changed, 8).float().fields(u, y, call), LinearFields)
    call.observe = lambda *_: None
    assert isinstance(made.fields(u, y, call), LinearFields)
    with kernels.off():
        assert isinstance(made.fields(u, y, fresh_call(torch.zeros(1, 5))), LinearFields)


def test_dtypes_under_autocast(interpreted: None) -> None:
    """The velocity in the dtype of the momentum, the force in that of the products; weights learn in fp32."""
    made = module(LinearHamiltonian, 8).float()
    for dtype in (torch.float32, torch.bfloat16):
        u, y = (draw(1, 5, 8, seed=i).to(dtype).requires_grad_() for i in range(2))
        with torch.autocast("cpu", torch.bfloat16):
            field = fields_at(made, u, y)
            velocity, force = field.velocity(y), field.force()
            with kernels.off():
                twin = fields_at(made, u, y)
                plain = twin.velocity(y), twin.force()
        assert (velocity.dtype, force.dtype) == (plain[0].dtype, plain[1].dtype) == (dtype, torch.bfloat16)
        slopes = gradients((velocity, force), (u, y, *made.parameters()))
        assert [t.dtype for t in slopes] == [dtype, dtype, torch.float32, torch.float32]
        close((velocity, force), plain, 2 * BF16)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n.endswith(("exp-euler", "-ab2")) else [pytest.mark.slow]) for n in LINEAR]
)
def test_presets_equal_the_twin(name: str, interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and gradients of two layers with the plain rule for the streams, so that the fields alone differ.

    fp32: 1e-4 of each, as errors of 1e-6 pass norms with small rows, or 1e-6 of the largest, for sums that cancel.
    """
    monkeypatch.setattr(fused, "refusal", lambda *_: "only the fields are to differ")
    model = shake(tiny(name, dtype=torch.float32), 0.1)
    ids = tokens()
    results = []
    for off in (False, True):
        if off:
            with kernels.off():
                logits = model(ids).logits
        else:
            logits = model(ids).logits
        weight = draw(*logits.shape).float()
        used = [p for p in model.parameters() if p.requires_grad]
        slopes = torch.autograd.grad((logits * weight).sum(), used, allow_unused=True)
        results.append((logits, *(torch.zeros_like(p) if g is None else g for g, p in zip(slopes, used, strict=True))))
    largest = max(t.detach().norm() for t in results[1])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= 1e-4 * expected.norm() + 1e-6 * largest


def test_compiled_without_a_break(interpreted: None) -> None:
    torch._dynamo.reset()
    made = module(LinearHamiltonian, 8).float()
    u, y = (draw(1, 9, 8, seed=i).float().requires_grad_() for i in range(2))
    results = []
    for function in (all_fields, torch.compile(all_fields, backend="aot_eager", fullgraph=True)):
        out = function(made, u, y)
        results.append((*out, *gradients(out, (u, y, *made.parameters()))))
    close(results[1], results[0], 1e-6)


# on the GPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "length", "width", "segment", "chunk"),
    [
        (2, 1024, 768, 0, 256),
        (2, 2500, 768, 1024, 256),
        (3, 517, 96, 100, 64),
        (3, 33, 31, 0, 16),
        (1, 1, 128, 0, 256),
        (2, 300, 64, 128, 512),
    ],
)
class TestOnTheDevice:
    pytestmark = on_gpu

    def test_both_sums(self, batch: int, length: int, width: int, segment: int, chunk: int, dtype: torch.dtype) -> None:
        check_sums(batch, length, width, segment, chunk, dtype, "cuda")
        check_sums(batch, length, width, segment, chunk, dtype, "cuda", used=slice(0, 1))

    def test_same_bits_again(
        self, batch: int, length: int, width: int, segment: int, chunk: int, dtype: torch.dtype
    ) -> None:
        inputs = [draw(batch, length, width, seed=i, device="cuda").to(dtype).requires_grad_() for i in range(3)]
        runs = []
        for _ in range(2):
            out = linear_flow.hamiltonian_sums(*inputs, segment=segment, chunk=chunk)
            runs.append((*out, *gradients(out, inputs)))
        assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


class TestAutocast:
    pytestmark = on_gpu

    @pytest.mark.parametrize(("kind", "options"), FIELDS, ids=str)
    def test_scaled_velocity(self, kind: Any, options: dict[str, Any]) -> None:
        """Rows times factors are the velocity, bit for bit where it is written in the same dtype."""
        made = module(kind, 128, "cuda", **options).float()
        u, y = (draw(2, 300, 128, seed=i, device="cuda").bfloat16() for i in range(2))
        with torch.autocast("cuda", torch.bfloat16):
            field = fields_at(made, u, y)
            rows, factor = field.scaled_velocity()
            assert torch.equal(scale_rows(rows, factor), field.velocity(y))
