"""Queries, keys and values in one pass, in Triton's interpreter, against `MultiHeadAttention.in_heads` in fp64.

fp32: 1e-5 of the norm (measured 1e-7: sums over a head, cosines of small positions). bf16: 1e-2, a rounding of 2^-9 of
what is written, and of what the backward reads again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import stepformer as sf
from draws import seeded
from helpers import shake, tiny, tokens
from stepformer.ops import heads_pass as fast
from stepformer.ops import kernels
from stepformer.ops.heads_pass import heads_pass
from stepformer.oracles import fresh_call
from stepformer.oracles.caches import Mixed
from stepformer.oracles.softmax import QK_NORM_EPS, SoftmaxAttention

SINGLE, HALF = torch.float32, torch.bfloat16
FP32, BF16 = 1e-5, 1e-2
WAYS = list(itertools.product((False, True), repeat=3))
RESULTS = ("q", "k", "v", "earlier")
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def interpreted(poisoned: None) -> Iterator[None]:
    """Kernels take CPU tensors, and memory that nobody has written is NaN."""
    with kernels.interpreted():
        yield


def draw(*shape: int, seed: int, dtype: torch.dtype = SINGLE, device: str = "cpu") -> Tensor:
    values = torch.randn(shape, generator=seeded(seed), dtype=torch.float64)
    return values.to(device, dtype).requires_grad_()


def plain(
    qkv: Tensor, heads: int, norm: bool, rotary: bool, weights: Tensor | None, earlier: Tensor | None
) -> tuple[Tensor, ...]:
    """The attention's own method, as it is written; what later calls mix in is the fourth result."""
    attention = SoftmaxAttention(
        qkv.shape[-1] // 3, heads, bias=False, rotary=rotary, qk_norm=norm, attention_backend="math"
    )
    call = fresh_call(qkv[..., 0])
    call.mixed = Mixed(weights, earlier)
    with kernels.off():
        found = attention.in_heads(qkv, call)
    assert call.mixed.earlier is not None
    return *found, call.mixed.earlier


def check(
    shape: tuple[int, int, int, int],
    norm: bool,
    rotary: bool,
    mix: bool,
    *,
    dtype: torch.dtype = SINGLE,
    arrive: str = "qkve",
    learned: tuple[bool, bool, bool] = (True, True, True),
    device: str = "cpu",
    rows: bool = False,
) -> None:
    """Results and gradients for (batch, time, heads, width of a head); `arrive` names the results that have a user."""
    batch, time, heads, width = shape
    tolerance = FP32 if dtype == SINGLE else BF16
    qkv = draw(batch, time, 3 * heads * width, seed=0, dtype=dtype, device=device)
    weights = torch.tensor([0.7, -0.4, 9.0, 9.0], device=device).requires_grad_() if mix else None  # two are padding
    mixed_in = (batch, time, heads * width) if rows else (batch, heads, time, width)
    earlier = draw(*mixed_in, seed=1, dtype=dtype, device=device) if mix else None
    given = [qkv, weights, earlier]
    given = [None if t is None else t.detach().requires_grad_(need) for t, need in zip(given, learned, strict=True)]
    wide = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in given]
    product = given[0].clone()  # type: ignore[union-attr]  # it is written over
    found = heads_pass(
        product, heads, eps=QK_NORM_EPS if norm else None, rotary=rotary, weights=given[1], earlier=given[2]
    )
    expected = plain(wide[0], heads, norm, rotary, wide[1], wide[2])  # type: ignore[arg-type]
    for name, a, b in zip(RESULTS, found, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == dtype
        assert float((a.detach().double() - b.detach()).norm()) <= tolerance * float(b.detach().norm()), name
    chosen = [i for i, name in enumerate(RESULTS) if name[0] in arrive and expected[i].requires_grad]
    slopes = [draw(*found[i].shape, seed=10 + i, dtype=dtype, device=device).detach() for i in chosen]
    asked = [i for i, t in enumerate(given) if t is not None and t.requires_grad]
    if not chosen or not asked:
        return
    own: list[Any] = [given[i] for i in asked]
    gradients = torch.autograd.grad([found[i] for i in chosen], own, slopes, allow_unused=True)
    twins: list[Any] = [wide[i] for i in asked]
    wanted = torch.autograd.grad([expected[i] for i in chosen], twins, [s.double() for s in slopes], allow_unused=True)
    for i, a, b in zip(asked, gradients, wanted, strict=True):
        name = ("joint product", "weights", "earlier")[i]
        if b is None or not b.any():
            assert a is None or not a.any(), name
            continue
        assert a is not None, name
        assert a.dtype == own[asked.index(i)].dtype
        assert a.shape == b.shape
        assert float((a.double() - b).norm()) <= tolerance * float(b.norm()), name


def way(norm: bool, rotary: bool, mix: bool) -> str:
    return "-".join(word for word, on in (("norm", norm), ("rotary", rotary), ("mix", mix)) if on) or "nothing"


ALL_WAYS = pytest.mark.parametrize(("norm", "rotary", "mix"), WAYS, ids=[way(*w) for w in WAYS])


@ALL_WAYS
@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
def test_all_ways(norm: bool, rotary: bool, mix: bool, dtype: torch.dtype) -> None:
    """An odd number of heads whose halves are no power of two."""
    check((2, 3, 3, 6), norm, rotary, mix, dtype=dtype)


@ALL_WAYS
@pytest.mark.parametrize(
    "shape", [(1, 5, 1, 2), (2, 1, 5, 16), (1, 9, 2, 16), (3, 1, 1, 6), (1, 1, 1, 2), (1, 13, 7, 6)], ids=str
)
def test_shapes(shape: tuple[int, int, int, int], norm: bool, rotary: bool, mix: bool) -> None:
    """One token, one head, pairs; more tokens than a program has, and fewer."""
    check(shape, norm, rotary, mix)


@ALL_WAYS
@pytest.mark.parametrize("arrive", ["q", "k", "v", "e", "qk", "ve", "qe"])
def test_gradients_that_do_not_arrive(arrive: str, norm: bool, rotary: bool, mix: bool) -> None:
    check((1, 3, 3, 6), norm, rotary, mix, arrive=arrive)


@ALL_WAYS
@pytest.mark.parametrize("learned", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_inputs_that_need_no_gradient(learned: tuple[bool, bool, bool], norm: bool, rotary: bool, mix: bool) -> None:
    check((1, 3, 3, 6), norm, rotary, mix, learned=learned)


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("arrive", ["qkve", "v", "qe"])
def test_rows_in_the_place_of_earlier_values(arrive: str, dtype: torch.dtype) -> None:
    check((2, 3, 3, 6), True, True, True, rows=True, arrive=arrive, dtype=dtype)


@ALL_WAYS
def test_no_tokens(norm: bool, rotary: bool, mix: bool) -> None:
    qkv = draw(0, 4, 36, seed=0)
    weights = torch.ones(4, requires_grad=True) if mix else None
    earlier = draw(0, 2, 4, 6, seed=1) if mix else None
    found = heads_pass(qkv.clone(), 2, eps=1e-5 if norm else None, rotary=rotary, weights=weights, earlier=earlier)
    assert all(t.shape == (0, 2, 4, 6) for t in found)
    asked = [t for t in (qkv, weights, earlier) if t is not None]
    slopes = torch.autograd.grad(sum(t.sum() for t in found), asked)
    assert all(a.shape == t.shape and not a.any() for a, t in zip(slopes, asked, strict=True))


def test_values_that_do_not_lie_together() -> None:
    """Earlier values as another pass gives them, a view of its joint product, and gradients that are expanded."""
    first, second = draw(2, 3, 36, seed=0), draw(2, 3, 36, seed=1)
    weights = torch.tensor([0.3, 0.7, 0.0, 0.0], requires_grad=True)
    results = []
    for run in (heads_pass, None):
        a, b, w = (t.detach().double() if run is None else t.detach() for t in (first, second, weights))
        leaves = [t.requires_grad_() for t in (a, b, w)]
        if run is None:
            *_, earlier = plain(a, 2, True, True, None, None)
            found = plain(b, 2, True, True, w, earlier)
        else:
            *_, earlier = heads_pass(a.clone(), 2, eps=QK_NORM_EPS, rotary=True)
            found = heads_pass(b.clone(), 2, eps=QK_NORM_EPS, rotary=True, weights=w, earlier=earlier)
        total = found[2].sum() + (found[3] * found[3]).sum() + found[0].square()[..., 0].sum()
        results.append([total.detach(), *torch.autograd.grad(total, leaves)])
    for a, b in zip(*results, strict=True):
        assert float((a.double() - b).norm()) <= FP32 * float(b.norm())


def test_same_bits_again() -> None:
    runs = []
    for _ in range(2):
        qkv, earlier = draw(2, 5, 36, seed=0), draw(2, 2, 5, 6, seed=1)
        weights = torch.tensor([0.3, 0.7, 0.0, 0.0], requires_grad=True)
        found = heads_pass(qkv.clone(), 2, eps=1e-5, rotary=True, weights=weights, earlier=earlier)
        total = sum(t.square().sum() for t in found)
        runs.append([*found, *torch.autograd.grad(total, [qkv, weights, earlier])])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_joint_product_is_written_over() -> None:
    """No copy of it is made, and the values in it stay."""
    qkv = draw(1, 3, 36, seed=0).detach()
    before = qkv.clone()
    q, k, v, earlier = heads_pass(qkv, 2, eps=1e-5, rotary=True)
    assert q.data_ptr() == qkv.data_ptr()
    assert not torch.equal(qkv[..., :24], before[..., :24])
    assert torch.equal(qkv[..., 24:], before[..., 24:])
    assert torch.equal(v, earlier)
    assert k.shape == (1, 2, 3, 6)


# for compilers


@ALL_WAYS
def test_the_operators_are_registered_properly(norm: bool, rotary: bool, mix: bool) -> None:
    """Schema, fake tensors and autograd as torch checks them, of the pass and of its gradient."""
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    qkv = draw(1, 3, 36, seed=0)
    weights, earlier = (torch.ones(4, requires_grad=True), draw(1, 3, 12, seed=1)) if mix else (None, None)
    options = (2, 1e-5 if norm else None, rotary)
    torch.library.opcheck(torch.ops.stepformer.heads.default, (qkv, weights, earlier, *options), test_utils=checks)
    turned, _, scales = torch.ops.stepformer.heads(qkv, weights, earlier, *options)
    dv = draw(1, 3, 12, seed=2).detach() if mix else None
    detached = [None if t is None else t.detach() for t in (turned, scales, weights, earlier)]
    arguments = (draw(1, 3, 36, seed=3).detach(), dv, *detached, *options)
    torch.library.opcheck(torch.ops.stepformer.heads_backward.default, arguments, test_utils=checks)


@ALL_WAYS
def test_the_operator_equals_eager_code(norm: bool, rotary: bool, mix: bool) -> None:
    """Bit for bit where the same sums are done; what arrives for earlier values is added by autograd there."""
    qkv, heads, eps = draw(1, 3, 36, seed=0), 2, 1e-5 if norm else None
    weights = torch.tensor([0.3, 0.7, 0.0, 0.0], requires_grad=True) if mix else None
    earlier = draw(1, heads, 3, 6, seed=1) if mix else None
    asked = [t for t in (qkv, weights, earlier) if t is not None]
    found = heads_pass(qkv.clone(), heads, eps=eps, rotary=rotary, weights=weights, earlier=earlier)[:3]
    flat = None if earlier is None else earlier.transpose(1, 2).flatten(-2).contiguous()
    turned, mixed, _ = torch.ops.stepformer.heads(qkv, weights, flat, heads, eps, rotary)
    others = fast.split(turned, heads)
    if mix:
        others[2] = mixed.unflatten(-1, (heads, -1)).transpose(1, 2)
    slopes = [draw(*t.shape, seed=5 + i).detach() for i, t in enumerate(found)]
    for a, b in zip(found, others, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(torch.autograd.grad(found, asked, slopes), torch.autograd.grad(others, asked, slopes), strict=True):
        assert torch.equal(a, b)


# inside a model


CHANGES: list[dict[str, Any]] = [
    {"qk_norm": True},
    {"positions": "rotary"},
    {"value_residual": "free"},
    {"value_tables": True},
    {"qk_norm": True, "positions": "rotary", "value_residual": "unit"},
]


@pytest.mark.parametrize(
    "changes", [CHANGES[-1], *(pytest.param(c, marks=pytest.mark.slow) for c in CHANGES[:-1])], ids="-".join
)
def test_models_use_it(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass for each call of an attention; fp32 rounding, 1e-5 and 1e-6 of the largest gradient."""
    calls: list[int] = []
    original = fast.heads_pass

    def counted(*args: Any, **named: Any) -> Any:
        calls.append(1)
        return original(*args, **named)

    monkeypatch.setattr(fast, "heads_pass", counted)
    size = {"n_layer": 2, "n_head": 2, "d_model": 12, "context": 8, "vocab_size": 17}
    model = shake(tiny("vanilla", dtype=SINGLE, **size, **changes), scale=0.1)

    def slopes() -> dict[str, Tensor]:
        model.zero_grad()
        model(tokens(1, 3, 17), tokens(1, 3, 17, seed=1)).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    found = slopes()
    assert len(calls) == 2
    with kernels.off():
        expected = slopes()
    assert len(calls) == 2
    largest = max(float(g.norm()) for g in expected.values())
    for name, slope in expected.items():
        assert float((found[name] - slope).norm()) <= FP32 * float(slope.norm()) + 1e-6 * largest, name


@pytest.mark.parametrize("why", ["nothing to do", "odd heads", "a hook", "a cache"])
def test_who_does_without_it(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {} if why == "nothing to do" else {"qk_norm": True}
    size = {"n_layer": 1, "n_head": 2, "d_model": 6 if why == "odd heads" else 8, "context": 8, "vocab_size": 17}
    model: sf.Model = tiny("vanilla", dtype=SINGLE, **size, **changes)
    if why == "a hook":
        model.blocks[0].attn.qkv.register_forward_hook(lambda module, inputs, output: None)
    monkeypatch.setattr(fast, "heads_pass", lambda *_, **__: pytest.fail("it was used"))
    cache = model.new_cache(1) if why == "a cache" else None
    assert model(tokens(1, 3, 17), cache=cache).logits.isfinite().all()


class TestOnTheDevice:
    pytestmark = on_gpu

    @ALL_WAYS
    @pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
    @pytest.mark.parametrize("shape", [(2, 517, 12, 64), (1, 1, 3, 6), (3, 100, 5, 48), (1, 9, 1, 2)], ids=str)
    def test_all_ways(
        self, shape: tuple[int, int, int, int], norm: bool, rotary: bool, mix: bool, dtype: torch.dtype
    ) -> None:
        check(shape, norm, rotary, mix, dtype=dtype, device="cuda")
