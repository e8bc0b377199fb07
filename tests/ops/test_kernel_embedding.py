"""The kernels that look tokens and positions up against F.embedding, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draws import seeded
from helpers import shake, tiny, tokens
from stepformer.ops import kernels

pytest.importorskip("triton")
embedding = pytest.importorskip("stepformer.ops.embedding")
embed, token_order = embedding.embed, embedding.token_order

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
in_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU in this process")

SINGLE = 1e-6  # fp32 sums, at most 16 terms at a time before they meet others; the values are one rounding from fp64
LONG = 3e-6  # sums of tens of thousands of terms


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 tokens and stretches of 8 columns, so that tiny inputs have several; 3 and more heads to a token."""
    monkeypatch.setattr(embedding, "CHUNK", 4)
    monkeypatch.setattr(embedding, "HEADS", 2)
    monkeypatch.setattr(embedding, "stretch", lambda size, most: 8)


def apart(found: Tensor, expected: Tensor) -> float:
    """Relative distance; nan where something is."""
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit; but Triton's interpreter cuts bf16 off where a GPU rounds, so up to one unit there."""
    if found.dtype == torch.bfloat16 and not found.is_cuda:
        return bool(((found.double() - expected.double()).abs() <= 2**-7 * expected.double().abs()).all())
    return torch.equal(found, expected)


def ids_of(kind: str, batch: int, time: int, vocabulary: int) -> Tensor:
    generator = seeded(batch + 10 * time)
    n = batch * time
    if kind == "equal":
        flat = torch.full((n,), vocabulary - 1)
    elif kind == "different":
        flat = torch.randperm(vocabulary, generator=generator)[:n]
    elif kind == "runs":  # lengths 1, 2, 3, ...: beginnings and ends at every place of a chunk
        flat = torch.arange(n).mul(2).sqrt().round().long() % vocabulary
        flat = flat[torch.randperm(n, generator=generator)]
    elif kind == "zipf":
        share = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
        flat = torch.multinomial(share, n, replacement=True, generator=generator)
    else:
        flat = torch.randint(vocabulary, (n,), generator=generator)
    return flat.view(batch, time)


def check(
    ids: Tensor,
    vocabulary: int,
    d: int,
    *,
    context: int | None,
    dtype: torch.dtype = torch.float32,
    bound: float = SINGLE,
) -> None:
    """Values bit for bit as PyTorch rounds them; gradients within `bound` of fp64."""
    generator = seeded(d)
    device = ids.device
    table = torch.randn(vocabulary, d, generator=generator).to(device).requires_grad_()
    positions = None if context is None else torch.randn(context, d, generator=generator).to(device).requires_grad_()
    trained = [t for t in (table, positions) if t is not None]
    out = embed(ids, table, positions, token_order(ids, vocabulary), dtype)
    plain = F.embedding(ids, table)
    if positions is not None:
        plain = plain + positions[: ids.shape[1]]
    assert out.dtype == dtype
    assert same(out, plain.to(dtype))
    dout = torch.randn(out.shape, generator=generator).to(device, dtype)
    found = torch.autograd.grad(out, trained, dout)
    wide = [t.detach().double().requires_grad_() for t in trained]
    x = F.embedding(ids, wide[0])
    if positions is not None:
        x = x + wide[1][: ids.shape[1]]
    expected = torch.autograd.grad(x, wide, dout.double())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert ours.shape == theirs.shape
        assert apart(ours, theirs) < bound
        assert not ours[theirs == 0].any()  # rows of tokens that do not occur, and of positions that are not used


@in_interpreter
@pytest.mark.parametrize("kind", ["random", "equal", "different", "runs", "zipf"])
@pytest.mark.parametrize(("batch", "time", "d"), [(3, 15, 16), pytest.param(5, 8, 12, marks=pytest.mark.slow)])
def test_values_and_gradients(kind: str, batch: int, time: int, d: int, small_chunks: None, poisoned: None) -> None:
    """Runs inside a chunk, across one border and across many; a last chunk that is not full."""
    check(ids_of(kind, batch, time, 61), 61, d, context=time + 2)


@in_interpreter
@pytest.mark.parametrize(
    ("batch", "time", "vocabulary", "d", "context"),
    [
        (1, 1, 1, 3, 1),
        (1, 1, 5, 8, None),
        (2, 1, 5, 7, 4),
        (1, 17, 5, 33, 17),
        (9, 3, 4, 8, None),
        (2, 9, 70_001, 4, 9),
    ],
)
def test_odd_sizes_and_own_settings(
    batch: int, time: int, vocabulary: int, d: int, context: int | None, poisoned: None
) -> None:
    """The settings that are launched; one token, one row, no positions, more tokens than 16 bits can count."""
    check(ids_of("random", batch, time, vocabulary), vocabulary, d, context=context)


@in_interpreter
def test_many_heads_to_a_token(poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """More chunks of one token than are added at once."""
    monkeypatch.setattr(embedding, "CHUNK", 2)
    n = embedding.CHUNK * (embedding.HEADS + 2) + 5
    check(ids_of("equal", 1, n, 3), 3, 4, context=None)


@in_interpreter
def test_keys_beyond_fifteen_bits(small_chunks: None) -> None:
    """Tokens from 32,768 on are negative as 16-bit keys."""
    ids = torch.tensor([[32_767, 32_768, 50_303, 0, 50_303, 1, 32_768, 50_303]])
    check(ids, 50_304, 4, context=8)


@in_interpreter
def test_narrow_stream(small_chunks: None, poisoned: None) -> None:
    """A bf16 stream from fp32 tables: one rounding of the sum; gradients in fp32 from the rounded ones."""
    check(ids_of("runs", 3, 11, 20), 20, 12, context=11, dtype=torch.bfloat16)


@in_interpreter
def test_bf16_tables() -> None:
    """Gradients in the dtype of the tables."""
    ids = ids_of("random", 2, 5, 7)
    tables = [torch.randn(7, 4).bfloat16().requires_grad_(), torch.randn(5, 4).bfloat16().requires_grad_()]
    out = embed(ids, *tables, token_order(ids, 7), torch.bfloat16)
    assert same(out, F.embedding(ids, tables[0]) + tables[1])
    assert [g.dtype for g in torch.autograd.grad(out.sum(), tables)] == [torch.bfloat16] * 2


@in_interpreter
def test_strided_inputs(small_chunks: None) -> None:
    """Tokens and incoming gradients that are views of something else."""
    ids = ids_of("random", 5, 3, 9).t()
    assert not ids.is_contiguous()
    check(ids, 9, 8, context=5)
    table = torch.randn(9, 8, requires_grad=True)
    embed(ids, table, None, token_order(ids, 9), torch.float32).sum().backward()  # an expanded 1
    assert table.grad is not None
    assert torch.equal(table.grad, torch.bincount(ids.flatten(), minlength=9)[:, None].expand(9, 8).float())


@in_interpreter
def test_only_what_is_trained(small_chunks: None) -> None:
    """Frozen tables get no gradient; without any the tokens are not sorted, and a forgotten order is made up for."""
    ids = ids_of("random", 2, 6, 7)
    table, positions = torch.randn(7, 8), torch.randn(6, 8, requires_grad=True)
    dout = torch.randn(2, 6, 8)
    assert token_order(ids, 7, train=False).keys is None
    with torch.no_grad():
        assert token_order(ids, 7).keys is None
        assert not embed(ids, table, positions, token_order(ids, 7), torch.float32).requires_grad
    out = embed(ids, table, positions, token_order(ids, 7), torch.float32)
    (found,) = torch.autograd.grad(out, positions, dout)
    assert apart(found, dout.double().sum(0)) < SINGLE
    table.requires_grad_()
    out = embed(ids, table, positions.detach(), token_order(ids, 7, train=False), torch.float32)
    (found,) = torch.autograd.grad(out, table, dout)
    assert apart(found, torch.zeros(7, 8).double().index_add(0, ids.flatten(), dout.double().flatten(0, 1))) < SINGLE


@in_interpreter
def test_tokens_outside_the_vocabulary(small_chunks: None) -> None:
    """No memory beside the tables is touched: NaN comes out, and the other tokens are as always."""
    ids = torch.tensor([[0, 7, 3, -1], [2**40, 3, 8, 5]])
    table = torch.randn(7, 8, requires_grad=True)
    out = embed(ids, table, None, token_order(ids, 7), torch.float32)
    wrong = (ids < 0) | (ids >= 7)
    assert out[wrong].isnan().all()
    assert torch.equal(out[~wrong], table[ids[~wrong]])
    out[:, 1:3].sum().backward()
    assert table.grad is not None
    assert table.grad[3, 0] == 2


@in_interpreter
def test_the_same_bits_twice() -> None:
    ids = ids_of("zipf", 3, 20, 9)
    table = torch.randn(9, 8, requires_grad=True)
    dout = torch.randn(3, 20, 8)
    first, second = (
        torch.autograd.grad(embed(ids, table, None, token_order(ids, 9), torch.float32), table, dout)[0]
        for _ in range(2)
    )
    assert torch.equal(first, second)


@in_interpreter
def test_operators_are_well_formed(small_chunks: None) -> None:
    ids = ids_of("random", 2, 6, 7)
    table, positions = torch.randn(7, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(embedding._order, (ids, 7), test_utils=checks)
    keys, places = token_order(ids, 7)
    torch.library.opcheck(embedding._embed, (ids, keys, places, table, positions, torch.float32), test_utils=checks)
    torch.library.opcheck(embedding._embed, (ids, keys, places, table, None, torch.bfloat16), test_utils=checks)
    dout = torch.randn(2, 6, 8)
    torch.library.opcheck(embedding._embed_backward, (dout, keys, places, 7, 9), test_utils=checks)
    torch.library.opcheck(embedding._embed_backward, (dout, None, None, 7, 0), test_utils=checks)


@in_interpreter
def test_compiled_without_a_graph_break(small_chunks: None) -> None:
    ids = ids_of("random", 2, 6, 7)
    trained = (torch.randn(7, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True))

    def look_up(ids: Tensor, table: Tensor, positions: Tensor) -> Tensor:
        result: Tensor = embed(ids, table, positions, token_order(ids, 7), torch.float32) * 2
        return result

    compiled, eager = torch.compile(look_up, fullgraph=True, backend="aot_eager")(ids, *trained), look_up(ids, *trained)
    assert torch.equal(compiled, eager)
    dout = torch.randn(2, 6, 8)
    for a, b in zip(
        torch.autograd.grad(compiled, trained, dout), torch.autograd.grad(eager, trained, dout), strict=True
    ):
        assert torch.equal(a, b)


def recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of every call of an operator from now on."""
    calls: list[tuple[Any, ...]] = []
    real = getattr(embedding, name)

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(embedding, name, call)
    return calls


@in_interpreter
@pytest.mark.parametrize(("name", "settings"), [("vanilla", {}), ("yurii", {}), ("yurii", {"positions": "rotary"})])
def test_model_with_the_kernel(name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass from position 0 looks up through the kernel, with one sort for all tables; a cache does not."""
    sorts = recorded("_order", monkeypatch)
    lookups = recorded("_embed", monkeypatch)
    model = shake(tiny(name, dtype=torch.float32, d_model=24, **settings))
    ids = tokens()
    positions = torch.arange(ids.shape[1])
    trained = [*model.embed.parameters(), *model.aux_embed.parameters()]
    tables = len(model.aux_embed) + 1
    assert tables == (1 if name == "vanilla" else 2)
    weights = torch.randn(2, *ids.shape, 24)

    def gradients(from_zero: bool) -> tuple[Tensor, ...]:
        s = model.start(ids, positions, from_zero=from_zero)
        streams = [s.x, *(s.streams[stream] for stream in model.aux_embed)]
        total = sum((stream.float() * w).sum() for stream, w in zip(streams, weights, strict=False))
        return (*streams, *torch.autograd.grad(total, trained))

    plain = gradients(True)  # on the CPU
    assert not sorts
    with kernels.interpreted():
        assert all(torch.equal(a, b) for a, b in zip(gradients(False), plain, strict=True))
        with kernels.off():
            gradients(True)
        with torch.no_grad():
            model(ids[:, :3], cache=model.new_cache(2))
        assert (len(sorts), len(lookups)) == (0, 0)
        fused = gradients(True)
        assert (len(sorts), len(lookups)) == (1, tables)
        for i, (a, b) in enumerate(zip(fused, plain, strict=True)):
            assert same(a, b) if i < tables else apart(a, b.double()) < SINGLE
        model.stream_dtype = torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            fused = gradients(True)
            assert [call[-1] for call in lookups[tables:]] == [torch.bfloat16] * tables
        with kernels.off(), torch.autocast("cpu", torch.bfloat16):
            for i, (a, b) in enumerate(zip(fused, gradients(True), strict=True)):
                assert same(a, b) if i < tables else apart(a, b.double()) < SINGLE


@in_interpreter
def test_whole_model_asks_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = recorded("_embed", monkeypatch)
    model = tiny("vanilla", dtype=torch.float32, n_layer=1)
    with torch.no_grad():
        plain = model(tokens()).logits
        assert not lookups
        with kernels.interpreted():
            assert apart(model(tokens()).logits, plain.double()) < 1e-5  # the fused layer sums in another order
    assert len(lookups) == 1


def poison() -> None:
    """Leave nan in the memory that torch.empty hands out next."""
    held = [torch.full((1 << size,), torch.nan, device="cuda") for size in range(8, 27) for _ in range(2)]
    del held


class TestOnTheGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("kind", ["random", "equal", "runs", "zipf"])
    @pytest.mark.parametrize(
        ("batch", "time", "vocabulary", "d", "context"),
        [(1, 1, 5, 7, 4), (3, 517, 1003, 96, 600), (7, 1024, 50_304, 768, 1024), (5, 100, 70_001, 130, None)],
    )
    def test_values_and_gradients(
        self, batch: int, time: int, vocabulary: int, d: int, context: int | None, kind: str, dtype: torch.dtype
    ) -> None:
        poison()
        ids = ids_of(kind, batch, time, vocabulary).cuda()
        check(ids, vocabulary, d, context=context, dtype=dtype, bound=LONG)

    def test_graph_capture(self) -> None:
        """No value is asked for on the host, and a replay sees new tokens."""
        ids = ids_of("zipf", 4, 300, 1000).cuda()
        table = torch.randn(1000, 64, device="cuda", requires_grad=True)
        dout = torch.randn(4, 300, 64, device="cuda").bfloat16()

        def step() -> Tensor:
            out = embed(ids, table, None, token_order(ids, 1000), torch.bfloat16)
            (gradient,) = torch.autograd.grad(out, table, dout)
            return gradient

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        ids.copy_(ids_of("random", 4, 300, 1000))
        graph.replay()
        assert torch.equal(found, step())

    @pytest.mark.parametrize("name", ["vanilla", "yurii"])
    def test_compiled_step(self, name: str) -> None:
        """A compiled model under autocast: the table's gradient as that of plain PyTorch."""
        model = tiny(name, dtype=torch.float32, d_model=96, vocab_size=1003).cuda()
        ids, targets = tokens(4, 8, 1003).cuda(), tokens(4, 8, 1003, seed=1).cuda()
        model.stream_dtype = torch.bfloat16
        table = model.embed.tok_emb.weight
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.compile(model, fullgraph=True)(ids, targets, loss_only=True).loss
            with kernels.off():
                plain = model(ids, targets, loss_only=True).loss
        (found,), (expected,) = torch.autograd.grad(loss, table), torch.autograd.grad(plain, table)
        assert apart(found, expected.double()) < 2e-2  # bf16 rounds in another order all the way back
