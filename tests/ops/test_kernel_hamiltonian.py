"""Kernels of Hamiltonian and linear attention against sums written out in fp64 and against their twins.

fp32: 1e-5 of the norm (measured 1e-6: sums of some hundred terms, exponentials to 2e-7). bf16: 1e-2, four roundings
of 2^-9 on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from draws import seeded
from stepformer.model.engines.oracles import FusedFields
from stepformer.ops import kernels
from stepformer.oracles.caches import fresh_call
from stepformer.oracles.hamiltonian import HamiltonianAttention
from stepformer.oracles.linear import LinearAttention, LinearHamiltonian

pytest.importorskip("triton")
from stepformer.ops import hamiltonian, linear_flow

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FP32, BF16 = 1e-5, 1e-2


@pytest.fixture
def interpreted() -> Iterator[None]:
    with kernels.interpreted():
        yield


def draw(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of `dtype`, held in fp64."""
    values = torch.randn(shape, generator=seeded(seed), dtype=torch.float64)
    return values.to(dtype).double().to(device)


def close(found: Any, expected: Any, bound: float, names: str = "", plain: Any = None) -> None:
    """Within `bound` of the norm, or half as far again as `plain` is."""
    for i, (a, b, c) in enumerate(zip(found, expected, expected if plain is None else plain, strict=True)):
        assert a.isfinite().all(), (names, i)
        distance, allowed = ((t.detach().double() - b.double()).norm() / b.double().norm() for t in (a, c))
        assert distance <= max(bound, 1.5 * allowed), (names, i, float(distance), float(allowed))


def gradients(outputs: Any, inputs: Any, expected: Any) -> tuple[Tensor, ...]:
    """Of all outputs with fixed weights: random, and along the outputs so that the one of a scalar does not cancel."""
    total = torch.zeros((), dtype=torch.float64, device=inputs[0].device)
    for i, (o, e) in enumerate(zip(outputs, expected, strict=True)):
        e = e.detach().double()
        weight = draw(*o.shape, seed=90 + i, device=o.device.type) + e / e.square().mean().sqrt()
        total = total + (o.double() * weight).sum()
    return torch.autograd.grad(total, inputs)


# the operators against sums


def written_out(
    q: Tensor, k: Tensor, a: Tensor, kappa: Tensor, tau: float, bound: float, n0: int, factor: float, keys: bool
) -> tuple[Tensor, Tensor]:
    length = q.shape[2]
    scores = tau * q @ k.mT
    scores = bound * torch.tanh(scores / bound) if bound else scores
    e = torch.exp(scores).tril()
    n = torch.arange(1, length + 1, dtype=q.dtype, device=q.device) if n0 == 0 else q.new_full((length,), n0)
    z = e.sum(dim=-1) / n
    r = a[:, None] / (2 * z.square())
    omega = r[..., :, None] + kappa + (r[..., None, :] if keys else 0.0)
    return (factor / n[:, None] * e * omega) @ k, z.log()


def check_force(
    shape: tuple[int, int, int, int], bound: float, n0: int, keys: bool, chunk: int, dtype: torch.dtype, device: str
) -> None:
    batch, _, length, width = shape
    q, k = (draw(*shape, seed=i, device=device, dtype=dtype).requires_grad_() for i in range(2))
    a = draw(batch, length, seed=2, device=device).abs().requires_grad_()
    kappa = draw(1, seed=3, device=device).abs().requires_grad_()
    constants: dict[str, Any] = {"tau": 1.3 / width**0.5, "bound": bound, "n0": n0, "factor": 0.3, "keys": keys}
    expected = written_out(q, k, a, kappa, **constants)
    inputs = [t.detach().to(d).requires_grad_() for t, d in ((q, dtype), (k, dtype), (a, None), (kappa, None))]
    inputs[2:] = [t.detach().float().requires_grad_() for t in inputs[2:]]
    found = hamiltonian.force_and_log_z(*inputs, chunk=chunk, **constants)
    tolerance = FP32 if dtype == torch.float32 else BF16
    close(found, expected, tolerance, "values")
    close(
        gradients(found, inputs, expected),
        gradients(expected, (q, k, a, kappa), expected),
        tolerance,
        "gradients of q, k, a, kappa",
    )


FORCES = [
    ((2, 1, 37, 8), 3.0, 0, True, 16),
    ((1, 2, 21, 32), 0.0, 7, True, 16),
    ((1, 1, 33, 64), 12.0, 0, False, 0),
    ((1, 1, 17, 128), 12.0, 0, True, 256),
    ((2, 1, 1, 4), 12.0, 0, True, 256),
]


@pytest.mark.parametrize(("shape", "bound", "n0", "keys", "chunk"), FORCES, ids=str)
def test_force(shape: Any, bound: float, n0: int, keys: bool, chunk: int, poisoned: None) -> None:
    check_force(shape, bound, n0, keys, chunk, torch.float32, "cpu")


@pytest.mark.parametrize("changed", [("KEPT", 0), ("SLAB", 1)], ids=str)
def test_what_is_not_kept_is_computed_again(
    changed: tuple[str, int], monkeypatch: pytest.MonkeyPatch, poisoned: None
) -> None:
    """Exponentials computed in the backward pass, and rows of the batch one after the other."""
    monkeypatch.setattr(hamiltonian, *changed)
    check_force((2, 1, 20, 8), 3.0, 0, True, 16, torch.float32, "cpu")


SUMS = [(2, 37, 8, 0, 16), (2, 37, 8, 10, 4), (1, 1, 4, 0, 8), (2, 24, 6, 8, 8), (1, 9, 130, 4, 256)]


def check_sum(
    batch: int, length: int, width: int, segment: int, chunk: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    q, k, v = (draw(batch, length, width, seed=i, device=device, dtype=dtype).requires_grad_() for i in range(3))
    expected = ((q @ k.mT).tril() @ v,)
    inputs = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    found = (linear_flow.causal_sum(*inputs, segment=segment, chunk=chunk),)
    tolerance = FP32 if dtype == torch.float32 else BF16
    close(found, expected, tolerance, "values")
    close(
        gradients(found, inputs, expected), gradients(expected, (q, k, v), expected), tolerance, "gradients of q, k, v"
    )


@pytest.mark.parametrize(("batch", "length", "width", "segment", "chunk"), SUMS)
def test_causal_sum(batch: int, length: int, width: int, segment: int, chunk: int, poisoned: None) -> None:
    check_sum(batch, length, width, segment, chunk, torch.float32)


def test_causal_sum_without_kept_scores(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> None:
    monkeypatch.setattr(linear_flow, "KEPT", 0)
    check_sum(2, 37, 8, 10, 4, torch.float32)


def test_the_operators_are_registered_properly() -> None:
    """Schema, fake tensors and autograd as torch checks them; the last output must have no gradient."""
    q, k = (draw(1, 2, 5, 4, seed=i).float().requires_grad_() for i in range(2))
    a, kappa = draw(1, 5, seed=2).float().abs().requires_grad_(), torch.ones((), requires_grad=True)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = (q, k, a, kappa, 0.5, 3.0, 0, 1.0, True, 16)
    torch.library.opcheck(torch.ops.stepformer.hamiltonian.default, (*arguments, True), test_utils=checks)
    alone = (q[0], k[0], q[0], 5, 2, True, False)
    torch.library.opcheck(torch.ops.stepformer.causal_sums.default, alone, test_utils=checks)


def test_later_tokens_leave_no_trace() -> None:
    """Bit for bit, also where later tokens are NaN, which a product with a zero weight would spread."""
    q, k = (draw(1, 1, 40, 8, seed=i).float() for i in range(2))
    a, kappa = draw(1, 40, seed=2).float().abs(), torch.ones(())
    first = hamiltonian.force_and_log_z(q, k, a, kappa, tau=0.5, bound=3.0, chunk=16)
    for t in (q, k):
        t[:, :, 32:] = torch.nan  # two whole chunks before it
    a[:, 32:] = torch.nan
    second = hamiltonian.force_and_log_z(q, k, a, kappa, tau=0.5, bound=3.0, chunk=16)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one[:, :, :32], other[:, :, :32])


# the oracles against their twins


def module(kind: Any, width: int, device: str = "cpu", **options: Any) -> Any:
    made = kind(width, 2, bias=False, **{"rotary": False, **options}).double()
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=20 + i) / width**0.5 + 0.1)
    return made.to(device)


def fields(made: Any, u: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """F at y and at a newer momentum, and G."""
    field = made.fields(u, y, fresh_call(torch.zeros(u.shape[:2], dtype=torch.long, device=u.device)))
    return field.velocity(y), field.force(), field.velocity(y.flip(-1))


ORACLES: list[tuple[Any, dict[str, Any]]] = [
    (HamiltonianAttention, {"query_chunk": 16, "learned_kappa": True}),
    (HamiltonianAttention, {"force": "query", "symmetric": True, "score_bound": 1.0, "kappa": 0.5}),
    (HamiltonianAttention, {"kernel": "per-head", "rotary": True, "system": "particles", "n0": 5, "query_chunk": 0}),
    (HamiltonianAttention, {"metric": "derived", "score_bound": 0.0}),
    (LinearHamiltonian, {}),
    (LinearHamiltonian, {"chunk": 7, "n0": 5}),
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [pytest.param(*oracle, marks=[] if i == 2 else [pytest.mark.slow]) for i, oracle in enumerate(ORACLES)],
    ids=str,
)
def test_fields_equal_the_twin(kind: Any, options: dict[str, Any], interpreted: None, poisoned: None) -> None:
    """The twin in fp64. `derived` inverts a matrix of condition 1e3: 1e-3 there."""
    made = module(kind, 8, **options)
    u, y = (draw(2, 19, 8, seed=i).requires_grad_() for i in range(2))
    expected = fields(made, u, y)
    slopes = gradients(expected, (u, y, *made.parameters()), expected)
    made.float()
    u, y = (t.detach().float().requires_grad_() for t in (u, y))
    if kind is HamiltonianAttention:
        assert isinstance(made.fields(u, y, fresh_call(torch.zeros(2, 19))), FusedFields)
    found = fields(made, u, y)
    bound = 1e-3 if options.get("metric") == "derived" else FP32
    close(found, expected, bound, "values")
    close(gradients(found, (u, y, *made.parameters()), expected), slopes, bound, "gradients")


def test_linear_attention_equals_the_twin(interpreted: None) -> None:
    made = module(LinearAttention, 8, chunk=7)
    u = draw(2, 19, 8).requires_grad_()
    call = fresh_call(torch.zeros(2, 19))
    expected = (made(u, call),)
    slopes = gradients(expected, (u, *made.parameters()), expected)
    made.float()
    u = u.detach().float().requires_grad_()
    found = (made(u, call),)
    close(found, expected, FP32)
    close(gradients(found, (u, *made.parameters()), expected), slopes, FP32)


@pytest.mark.parametrize("kind", [pytest.param(HamiltonianAttention, marks=pytest.mark.slow), LinearHamiltonian])
def test_compiled_without_a_break(kind: Any, interpreted: None) -> None:
    """One graph through the operators, forward and backward; 1e-6: fp32 sums in another order."""
    torch._dynamo.reset()
    made = module(kind, 8).float()
    u, y = (draw(1, 9, 8, seed=i).float().requires_grad_() for i in range(2))
    results = []
    for function in (fields, torch.compile(fields, backend="aot_eager", fullgraph=True)):
        out = function(made, u, y)
        results.append((*out, *gradients(out, (u, y, *made.parameters()), out)))
    close(results[1], results[0], 1e-6)


# on the GPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        ((2, 1, 1024, 768), 256),
        ((3, 1, 517, 96), 128),
        ((1, 4, 300, 64), 256),
        ((2, 3, 33, 32), 16),
        ((1, 1, 1, 128), 256),
        ((1, 1, 3001, 64), 512),
    ],
    ids=str,
)
class TestOnTheDevice:
    pytestmark = on_gpu

    @pytest.mark.parametrize("keys", [True, False])
    def test_force(self, shape: Any, chunk: int, dtype: torch.dtype, keys: bool) -> None:
        check_force(shape, 12.0, 0, keys, chunk, dtype, "cuda")

    def test_causal_sum(self, shape: Any, chunk: int, dtype: torch.dtype) -> None:
        batch, heads, length, width = shape
        for segment in (0, chunk):
            check_sum(batch * heads, length, width, segment, max(16, chunk // 2), dtype, "cuda")

    def test_same_bits_again(self, shape: Any, chunk: int, dtype: torch.dtype) -> None:
        q, k = (draw(*shape, seed=i, device="cuda").to(dtype).requires_grad_() for i in range(2))
        a, kappa = draw(shape[0], shape[2], seed=2, device="cuda").float().abs(), torch.ones((), device="cuda")
        runs = []
        for _ in range(2):
            out = hamiltonian.force_and_log_z(q, k, a, kappa, tau=0.1, bound=12.0, chunk=chunk)
            runs.append((*out, *gradients(out, (q, k), out)))
        assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


class TestAutocast:
    pytestmark = on_gpu

    @pytest.mark.parametrize(("kind", "options"), [*ORACLES[:3], *ORACLES[4:]], ids=str)
    def test_fields(self, kind: Any, options: dict[str, Any]) -> None:
        """bf16 products against the twin in fp64: values and gradients within 1e-2 of the norm, or half as far again as
        the twin under autocast is: both read projections in bf16, and some fields are differences of them."""
        made = module(kind, 128, "cuda", **options)
        u, y = (draw(2, 300, 128, seed=i, device="cuda").requires_grad_() for i in range(2))
        with kernels.off():
            expected = fields(made, u, y)
        slopes = gradients(expected, (u, y, *made.parameters()), expected)
        made.float()
        u, y = (t.detach().float().requires_grad_() for t in (u, y))
        with torch.autocast("cuda", torch.bfloat16):
            found = fields(made, u, y)
            with kernels.off():
                plain = fields(made, u, y)
        close(found, expected, BF16, "values", plain)
        found, plain = (gradients(f, (u, y, *made.parameters()), expected) for f in (found, plain))
        close(found, slopes, BF16, "gradients", plain)
