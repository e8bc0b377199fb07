"""Shampoo's and SOAP's kick as a kernel against the plain rule in fp64: values, gradients, streams, compilation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from draws import seeded, shifted
from stepformer.ops import kernels
from stepformer.rules.coefficients import Values
from stepformer.rules.kronecker import SOAP, Shampoo
from stepformer.rules.state import State

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run on the CPU too, and whatever they allocate holds NaN until they write it."""
    empty = Tensor.new_empty

    def poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return empty(self, *args, **kwargs).fill_(torch.nan)

    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    with kernels.interpreted():
        yield


def history(shape: tuple[int, ...], n_head: int, k: int, updates: int) -> Tensor:
    """A covariance as a few layers leave it: an identity that has met some random answers."""
    r = torch.eye(k, dtype=torch.float64).expand(*shape, k, k)
    for _ in range(updates):
        g = torch.randn(*shape, n_head, k, dtype=torch.float64)
        r = 0.5 * r + 0.5 * g.mT @ g
    return r


def make(shape: tuple[int, ...], n_head: int, k: int, updates: int = 1) -> dict[str, Tensor]:
    """Answer, mean, covariance and coefficients in fp64; one token's answer is zero."""
    torch.manual_seed(shifted(0))
    g = torch.randn(*shape, n_head * k, dtype=torch.float64)
    g.view(-1, n_head * k)[0] = 0
    return {
        "g": g,
        "m": torch.randn_like(g),
        "R": history(shape, n_head, k, updates),
        "beta1": torch.tensor([0.7], dtype=torch.float64),
        "betaR": torch.tensor([0.4], dtype=torch.float64),
    }


def kick(rule: type[Shampoo], at: dict[str, Tensor], n_head: int, x_dtype: torch.dtype) -> dict[str, Tensor]:
    """The streams after one kick, from leaves or from what a kick before has made of them."""
    k = at["R"].shape[-1]
    streams = {"R": at["R"]} if rule is Shampoo else {"R": at["R"], "m": at["m"]}
    state = State(torch.zeros((), dtype=x_dtype, device=at["g"].device), streams)
    c = Values({"beta1": at["beta1"], "betaR": at["betaR"]})
    return rule(n_head, k).kick(state, c, at["g"]).streams


def measured(
    rule: type[Shampoo],
    at: dict[str, Tensor],
    n_head: int,
    dtype: torch.dtype,
    *,
    kicks: int = 1,
    fixed: tuple[str, ...] = (),
    wide: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Streams and gradients of all inputs, for losses that weigh every output with fixed random numbers.

    `dtype` is the answer's, `wide` that of everything else. Only the symmetric part of dR counts.
    """
    wide = wide or dtype
    device = "cpu" if dtype == torch.float64 else DEVICE
    names = [name for name in at if rule is SOAP or name not in ("m", "beta1")]
    at = {name: at[name].to(device, dtype if name == "g" else wide) for name in at}
    leaves = {name: at[name].clone() if name != "R" or name not in fixed else at[name] for name in names}
    for name in names:
        if name not in fixed:
            leaves[name].requires_grad_()
    now = {**at, **leaves}
    for _ in range(kicks):
        out = kick(rule, now, n_head, wide)
        now.update(out)
        now["g"] = (leaves["g"] + out["u"]).to(dtype)
    weights = seeded(1)
    loss = torch.zeros((), dtype=wide, device=device)
    for name in sorted(out):
        weight = torch.randn(out[name].shape, generator=weights, dtype=torch.float64)
        loss = loss + (out[name] * weight.to(device, wide)).sum()
    wanted = [name for name in names if name not in fixed]
    grads = dict(zip(wanted, torch.autograd.grad(loss, [leaves[name] for name in wanted]), strict=True))
    if "R" in grads:
        grads["R"] = (grads["R"] + grads["R"].mT) / 2
    return {**{n: t.detach() for n, t in out.items()}, **{f"d{n}": t for n, t in grads.items()}}


def errors(found: dict[str, Tensor], expected: dict[str, Tensor], at: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of each tensor, as a norm.

    The gradient of a coefficient is a scalar product with its stream, in which terms of both signs may cancel: its
    error counts relative to the norms of the two.
    """
    result = {}
    for name, there in expected.items():
        here = found[name].cpu().double()
        assert here.shape == there.shape
        assert here.isfinite().all(), name
        size = there.norm()
        stream = {"dbeta1": "m", "dbetaR": "R"}.get(name, "")
        if f"d{stream}" in expected:
            size = torch.maximum(size, expected[f"d{stream}"].norm() * at[stream].norm())
        result[name] = float((here - there).norm() / size)
    return result


# fp32 keeps 6e-8 of a number; ten steps and eigenvalues of 0.5 % of the norm (one update) amplify it about 50 times.
TOLERANCE = 2e-5  # 4e-6 seen


@pytest.mark.parametrize("rule", [Shampoo, SOAP])
@pytest.mark.parametrize(
    ("shape", "n_head", "k"),
    [((1, 3), 3, 16), ((1,), 20, 16), ((2, 1), 5, 32), ((1, 2), 12, 64)],
    ids=str,
)
def test_kernel_equals_rule(rule: type[Shampoo], shape: tuple[int, ...], n_head: int, k: int) -> None:
    """More tokens than programs, padded heads, a token whose answer is zero."""
    at = make(shape, n_head, k)
    found = measured(rule, at, n_head, torch.float32)
    assert max(errors(found, measured(rule, at, n_head, torch.float64), at).values()) < TOLERANCE
    assert found["R"].dtype == torch.float32


def test_the_kernel_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests would pass without any kernel."""
    from stepformer.ops import whitening

    def stop(*args: Any) -> Any:
        raise InterruptedError

    monkeypatch.setattr(whitening, "_whiten", stop)
    at = make((1,), 2, 16)
    for rule in (Shampoo, SOAP):
        with pytest.raises(InterruptedError):
            measured(rule, at, 2, torch.float32)
        with kernels.off():
            measured(rule, at, 2, torch.float32)
        measured(rule, make((1,), 2, 128), 2, torch.float32)  # too large for it


def test_an_expanded_identity_is_read_in_place() -> None:
    """The covariance before the first layer: one matrix for all tokens, and nobody wants its gradient."""
    at = make((1, 3), 3, 16, updates=0)
    assert at["R"].stride()[:2] == (0, 0)
    found = measured(SOAP, at, 3, torch.float32, fixed=("R",))
    expected = measured(SOAP, at, 3, torch.float64, fixed=("R",))
    assert max(errors(found, expected, at).values()) < TOLERANCE


def test_two_kicks_in_a_row() -> None:
    """The gradient of R' enters the kick before, where its symmetric part is all that counts."""
    at = make((2,), 3, 16)
    found = measured(SOAP, at, 3, torch.float32, kicks=2)
    assert max(errors(found, measured(SOAP, at, 3, torch.float64, kicks=2), at).values()) < 2 * TOLERANCE


def test_an_ill_conditioned_covariance() -> None:
    """Where rounding alone spoils the digits, the kernel spoils at most 1.5 times as many as the rule in fp32."""
    at = make((2,), 4, 32)
    spread = torch.logspace(0, -2, 32, dtype=torch.float64)  # condition 1e4
    at["R"] = spread[:, None] * at["R"] * spread
    at["g"] = (at["g"].unflatten(-1, (4, 32)) * spread).flatten(-2)
    expected = measured(SOAP, at, 4, torch.float64)
    found = errors(measured(SOAP, at, 4, torch.float32), expected, at)
    with kernels.off():
        plain = errors(measured(SOAP, at, 4, torch.float32), expected, at)
    for name, error in found.items():
        assert error < max(1.5 * plain[name], TOLERANCE), name


def test_what_bf16_answers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """11 bits in most products; their own 8 bits are the larger error (measured in ops/whitening.py)."""
    from stepformer.ops import whitening

    assert whitening.exact_steps(torch.bfloat16) == (0, 4)
    monkeypatch.setattr(whitening, "exact_steps", lambda dtype: (0, 4))
    at = make((3,), 5, 32)
    at["g"] = at["g"].bfloat16().double()
    found = errors(measured(SOAP, at, 5, torch.float32), measured(SOAP, at, 5, torch.float64), at)
    assert found["R"] < 1e-6  # exact products of bf16 numbers
    assert max(found.values()) < 2e-3


def test_no_tokens() -> None:
    at = {name: t[:0] if t.dim() > 1 else t for name, t in make((1,), 3, 16).items()}
    found = measured(SOAP, at, 3, torch.float32)
    assert found["u"].shape == (0, 48)
    assert found["dbetaR"].item() == 0


def test_operators_and_compilation() -> None:
    """Schema, fake tensors and autograd registration; one graph, and u in the dtype of x."""
    from stepformer.ops import whitening

    at = {name: t.float().to(DEVICE).clone().requires_grad_() for name, t in make((1, 1), 2, 16).items()}
    args = (at["g"], at["m"], at["R"], at["betaR"], at["beta1"], 2, torch.float32, 10, 10)
    torch.library.opcheck(
        whitening._whiten, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )

    def step(at: dict[str, Tensor]) -> Tensor:
        out = kick(SOAP, at, 2, torch.bfloat16)
        return out["u"].float().sum() + out["R"].sum() + out["m"].square().sum()

    assert kick(SOAP, at, 2, torch.bfloat16)["u"].dtype == torch.bfloat16
    torch._dynamo.reset()
    names = list(at)
    eager = torch.autograd.grad(step(at), [at[name] for name in names])
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(at), [at[name] for name in names])
    for a, b in zip(eager, found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rule", [Shampoo, SOAP])
@pytest.mark.parametrize(
    ("shape", "n_head", "k"), [((3, 333), 12, 64), ((1000,), 1, 32), ((129,), 20, 64), ((77,), 3, 16)], ids=str
)
class TestOnTheDevice:
    pytestmark = needs_gpu

    def test_fp32(self, rule: type[Shampoo], shape: tuple[int, ...], n_head: int, k: int) -> None:
        at = make(shape, n_head, k, updates=3)
        expected = measured(rule, at, n_head, torch.float64)
        found = errors(measured(rule, at, n_head, torch.float32), expected, at)
        with kernels.off():
            plain = errors(measured(rule, at, n_head, torch.float32), expected, at)
        # three tf32 products for one in fp32 leave 2^-22 where fp32 leaves 2^-24
        for name, error in found.items():
            assert error < max(4 * plain[name], TOLERANCE), name

    def test_bf16(self, rule: type[Shampoo], shape: tuple[int, ...], n_head: int, k: int) -> None:
        """bf16 answers, fp32 streams. dg is rounded to bf16 as well."""
        at = make(shape, n_head, k, updates=3)
        at["g"] = at["g"].bfloat16().double()
        expected = measured(rule, at, n_head, torch.float64)
        found = errors(measured(rule, at, n_head, torch.bfloat16, wide=torch.float32), expected, at)
        assert max(found.values()) < 1e-2

    def test_the_same_inputs_give_the_same_bits(
        self, rule: type[Shampoo], shape: tuple[int, ...], n_head: int, k: int
    ) -> None:
        at = make(shape, n_head, k)
        first, second = (measured(rule, at, n_head, torch.float32) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)
