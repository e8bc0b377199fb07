"""Attention inside documents by kernels against a masked softmax in fp64, in Triton's interpreter and on a GPU.

fp32: 1e-5 of the norm (measured 2e-7). fp16, which the interpreter can multiply, and bf16: 1e-2, a rounding of weights
and of what is written, 2^-11 and 2^-9.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
from draws import seeded
from helpers import in_documents, shake, tiny, tokens
from stepformer.ops import document_attention as fast
from stepformer.ops import kernels
from stepformer.ops.constrained import Tile
from stepformer.ops.document_attention import document_attention
from stepformer.oracles import Call, fresh_call
from stepformer.oracles.softmax import SoftmaxAttention

SINGLE, HALF = 1e-5, 1e-2
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on what the kernels mask afterwards


@pytest.fixture(autouse=True)
def interpreted(poisoned: None) -> Iterator[None]:
    """Kernels take CPU tensors, and memory that nobody has written is NaN."""
    with kernels.interpreted():
        yield


def packed(batch: int, length: int, documents: int | list[int], device: str = "cpu") -> Call:
    """Documents of these lengths, again and again, or of a mean length drawn for each row; every row its own ones."""
    if isinstance(documents, list):
        begins = torch.zeros(batch, length, dtype=torch.bool)
        for row in range(batch):
            at, turn = 0, row
            while at < length:
                begins[row, at] = True
                at, turn = at + documents[turn % len(documents)], turn + 1
    else:
        begins = torch.rand(batch, length, generator=seeded(length)) < 1 / documents
    return in_documents((~begins).long().to(device))


def inputs(batch: int, heads: int, length: int, d: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """q, k, v as views of one projection, and what arrives for the output."""
    qkv = torch.randn(batch, length, 3, heads, d, generator=seeded(length + d)).to(device, dtype)
    slope = torch.randn(batch, heads, length, d, generator=seeded(1)).to(device, dtype)
    return [*(t.transpose(1, 2) for t in qkv.unbind(2)), slope]


def masked(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ v


def run(given: list[Tensor], call: Call, visible: Tensor | None = None) -> list[Tensor]:
    """The output and the gradients for q, k and v; by the kernels, unless a mask is given."""
    *leaves, slope = (t.detach() for t in given)
    for leaf in leaves:
        leaf.requires_grad_()
    if visible is not None:
        out = masked(*leaves, visible)
    else:
        assert call.documents is not None
        out = document_attention(*leaves, call.documents.origins, call.documents.ends())
        assert out.transpose(1, 2).is_contiguous()
    return [out.detach(), *torch.autograd.grad(out, leaves, slope)]


def check(given: list[Tensor], call: Call, bound: float, visible: Tensor | None = None) -> None:
    found = run(given, call)
    mask = call.mask if visible is None else visible
    assert mask is not None
    expected = run([t.double() for t in given], call, mask)
    for name, a, b in zip(("O", "dq", "dk", "dv"), found, expected, strict=True):
        assert a.dtype == given[0].dtype
        assert a.shape == b.shape
        # a token alone sends nothing to queries and keys: what is left is a rounding of dO.v
        floor = 1e-2 * float(expected[3].norm())
        assert float((a.double() - b).norm()) <= bound * max(float(b.norm()), floor), name


@pytest.mark.parametrize("length", [1, 17, *(pytest.param(n, marks=pytest.mark.slow) for n in (65, 200))])
@pytest.mark.parametrize("documents", [[1000], [1], [5, 40, 1, 16, 70], 20], ids=["one", "tokens", "mixed", "drawn"])
def test_equals_a_masked_softmax(length: int, documents: int | list[int]) -> None:
    """One document, documents of one token, those of different lengths; every row has others."""
    check(inputs(2, 2 if length < 100 else 1, length, 16, torch.float32), packed(2, length, documents), SINGLE)


@pytest.mark.parametrize("d", [32, 64, 128])
def test_widths(d: int) -> None:
    check(inputs(1, 2, 33, d, torch.float32), packed(1, 33, [7, 20]), SINGLE)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(*shapes, marks=pytest.mark.slow)
        for shapes in (((16, 32), (32, 16)), ((32, 16), (16, 32)), ((64, 16), (16, 64)))
    ],
    ids=str,
)
def test_blocks_of_other_shapes(one: tuple[int, int], other: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """More keys than queries in a block and the reverse; borders on the edge of a block and beside it."""
    monkeypatch.setattr(fast, "INTERPRETED", (Tile(*one), Tile(*other), Tile(*one)))
    for length, documents in ((128, [16, 48, 33, 31]), (130, [64]), (101, [3, 50])):
        check(inputs(2, 1, length, 16, torch.float32), packed(2, length, documents), SINGLE)


def test_half_precision() -> None:
    check(inputs(2, 2, 65, 32, torch.float16), packed(2, 65, [20, 9]), HALF)


def test_one_document_is_causal_attention() -> None:
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    check(inputs(1, 2, 40, 16, torch.float32), packed(1, 40, [1000]), SINGLE, causal)


def test_inputs_that_lie_anyhow() -> None:
    """Widths that are not dense, gradients that are expanded."""
    q, k, v, slope = inputs(2, 2, 33, 16, torch.float32)
    call = packed(2, 33, [7, 20])
    q, k = q.mT.contiguous().mT, k.contiguous()
    check([q, k, v, slope[:, :1, :1, :1].expand(slope.shape)], call, SINGLE)


def test_large_scores() -> None:
    """What a token does not see would overflow beside what it sees."""
    q, k, v, slope = inputs(1, 1, 65, 16, torch.float32)
    call = packed(1, 65, [20])
    assert call.origins is not None
    k = torch.where((call.origins < 20)[:, None, :, None], 300 * k, k)
    check([q, k, v, slope], call, 1e-4)  # scores of 1e3 in fp32


def test_no_rows() -> None:
    given = inputs(0, 2, 5, 16, torch.float32)
    assert all(t.shape == (0, 2, 5, 16) for t in run(given, packed(0, 5, [2])))


def test_same_bits_again() -> None:
    given, call = inputs(2, 1, 65, 16, torch.float32), packed(2, 65, [20, 9])
    assert all(torch.equal(a, b) for a, b in zip(run(given, call), run(given, call), strict=True))


def test_the_operators_are_registered_properly() -> None:
    """Schema, fake tensors and autograd as torch checks them."""
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    (q, k, v, slope), call = inputs(1, 2, 17, 16, torch.float32), packed(1, 17, [7])
    assert call.documents is not None
    spans = (call.documents.origins, call.documents.ends())
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    torch.library.opcheck(torch.ops.stepformer.document_attention.default, (*leaves, *spans), test_utils=checks)
    out, lse = torch.ops.stepformer.document_attention(q, k, v, *spans)
    given = (slope, q, k, v, *spans, out, lse)
    torch.library.opcheck(torch.ops.stepformer.document_attention_backward.default, given, test_utils=checks)


# who sees whom


def test_ends_and_mask_of_documents() -> None:
    call = in_documents(torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]]))
    assert call.documents is not None
    assert call.documents.ends().tolist() == [[2, 2, 4, 4, 5], [5, 5, 5, 5, 5]]
    assert call.restricted
    assert "mask" not in call.documents.made
    assert call.mask is not None
    assert call.mask is call.mask
    assert call.mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


# inside a model

SIZE = {"n_layer": 2, "n_head": 1, "d_model": 16, "context": 40, "vocab_size": 17}


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.slow), {"qk_norm": True, "positions": "rotary", "value_residual": "unit"}],
    ids=str,
)
def test_models_use_it(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each call of an attention, without a mask; fp32 rounding, 1e-5 and 1e-6 of the largest gradient."""
    calls: list[int] = []
    original = fast.document_attention

    def counted(*args: Any) -> Any:
        calls.append(1)
        return original(*args)

    monkeypatch.setattr(fast, "document_attention", counted)
    model = shake(tiny("vanilla", dtype=torch.float32, document_separator=3, **SIZE, **changes), scale=0.1)
    ids = tokens(2, 6, 17)
    ids[0, 2] = ids[1, 4] = 3

    def slopes() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        loss = model(ids, tokens(2, 6, 17, seed=1)).loss
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    with monkeypatch.context() as patch:
        patch.setattr("stepformer.ops.visibility.Confined.mask", lambda _: pytest.fail("a mask was made"))
        loss, found = slopes()
    assert len(calls) == 2
    with kernels.off():
        wanted, expected = slopes()
    assert len(calls) == 2
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    largest = max(float(g.norm()) for g in expected.values())
    for name, slope in expected.items():
        assert float((found[name] - slope).norm()) <= SINGLE * float(slope.norm()) + 1e-6 * largest, name


def test_who_does_without_it() -> None:
    attention = tiny("vanilla", dtype=torch.float32, n_head=2, d_model=32, n_layer=1).blocks[0].attn
    versions = SoftmaxAttention.attend.versions  # type: ignore[attr-defined]
    q = torch.randn(2, 2, 8, 16)
    call = in_documents(tokens())

    def served(q: Tensor, k: Tensor, call: Call) -> bool:
        return any(version.serves(attention, q, k, k, call) for version in versions)

    assert served(q, q, call)
    assert not served(q, q, fresh_call(tokens()))  # no documents
    assert not served(q.double(), q.double(), call)
    assert not served(q.bfloat16(), q.bfloat16(), call)  # which the interpreter cannot multiply
    assert not served(q[:, :, -1:], q, call)  # fewer queries than keys
    assert not served(q[..., :12], q[..., :12], call)  # no power of two
    with kernels.off():
        assert not served(q, q, call)
    call.observe = lambda name, value: None
    assert not served(q, q, call)
    call = in_documents(tokens())
    call.slots = []
    assert not served(q, q, call)  # a cache
    attention.attention_backend = "math"
    assert not served(q, q, in_documents(tokens()))


class TestOnTheDevice:
    pytestmark = on_gpu

    @pytest.fixture(autouse=True)
    def free(self, interpreted: None) -> None:
        """References and models may take products and sums that torch does not call deterministic."""
        torch.use_deterministic_algorithms(False)

    @pytest.mark.parametrize("length", [1, 17, 65, 200, 1024])
    @pytest.mark.parametrize("documents", [[1000], [1], [5, 40, 1, 16, 70, 128], 20, 300], ids=str)
    @pytest.mark.parametrize("d", [16, 32, 64, 128])
    def test_equals_a_masked_softmax(self, length: int, documents: int | list[int], d: int) -> None:
        given = inputs(2, 3, length, d, torch.bfloat16, "cuda")
        check(given, packed(2, length, documents, "cuda"), HALF)

    def test_equals_the_twin(self) -> None:
        """As far from fp64 as torch's own attention with the mask, up to a factor."""
        given, call = inputs(4, 12, 1024, 64, torch.bfloat16, "cuda"), packed(4, 1024, 300, "cuda")
        check(given, call, HALF)
        *leaves, slope = given
        leaves = [t.detach().requires_grad_() for t in leaves]
        out = F.scaled_dot_product_attention(*leaves, attn_mask=call.mask)
        twin = [out.detach(), *torch.autograd.grad(out, leaves, slope)]
        for a, b in zip(run(given, call), twin, strict=True):
            assert float((a.double() - b.double()).norm()) <= HALF * float(b.double().norm())

    def test_same_bits_again(self) -> None:
        given, call = inputs(4, 12, 1000, 64, torch.bfloat16, "cuda"), packed(4, 1000, 100, "cuda")
        assert all(torch.equal(a, b) for a, b in zip(run(given, call), run(given, call), strict=True))

    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    def test_models(self, compiled: bool) -> None:
        """A model under autocast, with kernels and without: bf16 rounding in two layers."""
        size = {**SIZE, "n_head": 2, "d_model": 128, "context": 256}
        model = shake(tiny("vanilla", dtype=torch.float32, document_separator=3, **size), scale=0.1).cuda()
        ids, targets = tokens(2, 256, 17).cuda(), tokens(2, 256, 17, seed=1).cuda()

        def slopes(run: Any) -> list[Tensor]:
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = run(ids, targets).loss
            loss.backward()
            return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

        found = slopes(torch.compile(model) if compiled else model)
        with kernels.off():
            expected = slopes(model)
        largest = max(float(b.norm()) for b in expected)
        for a, b in zip(found, expected, strict=True):
            assert float((a - b).norm()) <= 5e-2 * float(b.norm()) + 1e-2 * largest

    def test_a_graph_records_it(self) -> None:
        """Ends, values and gradients follow the documents in a recording: nothing is asked on the host."""
        given = inputs(2, 3, 256, 64, torch.bfloat16, "cuda")
        ids = torch.ones(2, 256, dtype=torch.long, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(given, in_documents(ids))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(given, in_documents(ids))
        ids[:, ::50] = 0
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(found, run(given, in_documents(ids)), strict=True):
            assert torch.equal(a, b)
