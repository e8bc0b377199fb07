"""Constrained attention with a prior: chains of calls through the kernels against chains through the twin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from draws import seeded
from helpers import in_documents, served, shake, tiny, tokens
from solved_rows import solve as twin_solve
from stepformer.ops import kernels
from stepformer.ops.constraint import BETA_MAX, constrained_softmax, unpacked
from stepformer.oracles.caches import fresh_call
from stepformer.oracles.constrained import ConstrainedAttention

if not kernels.has_triton():
    pytest.skip("needs Triton", allow_module_level=True)

from stepformer.ops import constrained

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NAMES = ("O", "ln a", "dq", "dk", "dv", "dradius", "dkeep")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on what the kernels mask afterwards


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """What torch.empty returns holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


Chain = Callable[..., tuple[Tensor, Tensor]]


def twin_chain(detach: bool = False, ceiling: float | None = None) -> Chain:
    def chain(q: Tensor, k: Tensor, v: Tensor, radius: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        visible = torch.ones(q.shape[3], q.shape[3], dtype=torch.bool, device=q.device).tril()
        outs: list[Tensor] = []
        below = None
        for layer in range(len(q)):
            scores = q[layer] @ k[layer].mT / math.sqrt(q.shape[-1])
            prior = None if below is None else keep[layer, :, None, None] * below
            solved = constrained_softmax(scores, radius[layer], visible, prior, ceiling=ceiling)
            below = solved.log_weights.detach() if detach else solved.log_weights
            outs.append(solved.weights @ v[layer])
        assert below is not None
        return torch.stack(outs), below

    return chain


def kernel_chain(packed: bool, detach: bool = False, ceiling: float | None = None) -> Chain:
    def chain(q: Tensor, k: Tensor, v: Tensor, radius: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        outs: list[Tensor] = []
        below = None
        for layer in range(len(q)):
            out, below = constrained.prior_attention(
                q[layer], k[layer], v[layer], radius[layer], below, keep[layer], ceiling, packed=packed
            )
            below = below.detach() if detach else below
            outs.append(out)
        assert below is not None
        return torch.stack(outs), unpacked(below).tril()

    return chain


def inputs(layers: int, heads: int, length: int, d: int, ratio: float, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v (layers, 2, H, T, d) as views of one projection, radii around ratio * ln t, keep."""
    generator = seeded(length + d)
    qkv = torch.randn(layers, 2, length, 3, heads, d, generator=generator).to(DEVICE, dtype)
    spread = 0.8 + 0.4 * torch.rand(layers, 2, heads, length, generator=generator)
    radius = ratio * spread * torch.arange(1, length + 1).log()
    keep = 0.3 + 0.7 * torch.rand(layers, heads, generator=generator)
    return [*(t.transpose(2, 3) for t in qkv.unbind(3)), radius.to(DEVICE), keep.to(DEVICE)]


def run(f: Chain, arguments: list[Tensor], last: bool = False) -> list[Tensor]:
    """O of all layers, ln a of the last, and the gradients of a random linear function: of all O, or of both."""
    leaves = [x.detach().requires_grad_() for x in arguments]
    out, log_a = f(*leaves)
    generator = seeded(1)
    loss = (out * torch.randn(out.shape, generator=generator).to(out)).sum()
    if last:
        loss = loss + 0.1 * (log_a * torch.randn(log_a.shape, generator=generator).to(log_a)).sum()
    return [out.detach(), log_a.detach(), *torch.autograd.grad(loss, leaves)]


def distance(x: Tensor, y: Tensor) -> float:
    return ((x.double() - y).norm() / y.norm().clamp_min(1e-30)).item()


def compare(arguments: list[Tensor], bound: float, *, packed: bool, last: bool = False, **how: Any) -> None:
    compare_with_twin(kernel_chain(packed, **how), twin_chain(**how), arguments, bound, last, NAMES)


def compare_with_twin(
    kernel: Chain, twin: Chain, arguments: list[Tensor], bound: float, last: bool, names: tuple[str, ...]
) -> None:
    found = run(kernel, arguments, last)
    expected = run(twin, [x.double() for x in arguments], last)
    plain = run(twin, [x.float() for x in arguments], last)
    # Gradients of short rows are differences that nearly vanish: the twin's own error in fp32 says what a case makes of
    # rounding. Sixteen times that, which is one draw. bf16's unit is 2^16 times coarser, but only weights and their
    # gradients are rounded to it, before they multiply: a quarter (a tenth and a fifth seen where the bound is passed).
    times = 2**14 if arguments[0].dtype == torch.bfloat16 else 16
    for name, x, y, p in zip(names, found, expected, plain, strict=True):
        assert x.isfinite().all(), name
        assert distance(x, y) <= max(bound, times * distance(p, y)), name


@pytest.mark.parametrize(
    ("heads", "length", "d", "ratio", "options"),
    [
        (1, 1, 32, 0.1, {}),
        (1, 2, 32, 0.1, {"last": True}),
        pytest.param(2, 21, 32, 0.1, {"last": True}, marks=pytest.mark.slow),
        pytest.param(1, 32, 64, 0.1, {}, marks=pytest.mark.slow),
        pytest.param(1, 17, 128, 0.02, {}, marks=pytest.mark.slow),
        pytest.param(1, 20, 32, 0.1, {"detach": True}, marks=pytest.mark.slow),
        (1, 20, 32, 0.1, {"last": True, "ceiling": 0.7}),
    ],
)
def test_chains_equal_the_twin(heads: int, length: int, d: int, ratio: float, options: dict[str, Any]) -> None:
    """fp32 everywhere: sums in another order; 5e-7 to 5e-6 measured."""
    compare(inputs(3, heads, length, d, ratio, torch.float32), 2e-5, packed=False, **options)


def test_the_ceiling_of_the_test_holds_some_rows() -> None:
    q, k, _, radius, keep = (x[0] for x in inputs(1, 1, 20, 32, 0.1, torch.float32))
    below = torch.zeros(2, 1, 20, 20, device=DEVICE)
    active = constrained.solve_with_prior(q, k, radius, below, keep, 0.7)[4, :, :, 1:] > 0
    assert 0.1 < active.float().mean() < 0.9


def twin_table(ceiling: float | None) -> Chain:
    def attend(q: Tensor, k: Tensor, v: Tensor, radius: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        length = q.shape[2]
        place = torch.arange(length, device=q.device)
        distance = place[:, None] - place
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        solved = constrained_softmax(scores, radius, distance >= 0, table[:, distance.clamp_min(0)], ceiling=ceiling)
        return solved.weights @ v, torch.zeros(())

    return attend


def kernel_table(ceiling: float | None) -> Chain:
    return lambda *arguments: (constrained.table_attention(*arguments, ceiling), torch.zeros(()))


def table_inputs(heads: int, length: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, radius of a call and a table (H, length + 3): sequences are shorter than a context."""
    first = [x[0] for x in inputs(1, heads, length, d, 0.1, dtype)[:4]]
    return [*first, 2 * torch.randn(heads, length + 3, generator=seeded(7)).to(DEVICE)]


TABLE_NAMES = ("O", "nothing", "dq", "dk", "dv", "dradius", "dtable")


@pytest.mark.parametrize(
    ("heads", "length", "d", "ceiling"),
    [
        (1, 1, 32, None),
        (1, 2, 32, None),
        pytest.param(2, 21, 32, None, marks=pytest.mark.slow),
        (1, 20, 16, 0.7),
        pytest.param(1, 32, 64, None, marks=pytest.mark.slow),  # a multiple of the blocks
    ],
)
def test_a_learned_prior_equals_the_twin(heads: int, length: int, d: int, ceiling: float | None) -> None:
    """fp32: sums in another order, as in a chain; entries of the table that no pair of tokens reaches get zero."""
    arguments = table_inputs(heads, length, d, torch.float32)
    compare_with_twin(kernel_table(ceiling), twin_table(ceiling), arguments, 2e-5, False, TABLE_NAMES)
    assert not run(kernel_table(ceiling), arguments)[6][:, length:].any()


@pytest.mark.parametrize("length", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_packed_chains_equal_the_twin(length: int) -> None:
    """ln a in fp16, 2^-11, its gradient in bf16, 2^-9, in three layers: 2e-4 (O) to 5e-3 measured."""
    compare(inputs(3, 1, length, 32, 0.1, torch.float32), 2e-2, packed=True)


@pytest.mark.slow
def test_blocks_of_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """More keys than queries in a block and the reverse, a length that is a multiple of one of them."""
    wide, tall = constrained.Tile(16, 32), constrained.Tile(32, 16)
    arguments = inputs(2, 1, 48, 32, 0.1, torch.float32)
    for one, two in ((wide, tall), (tall, wide)):
        monkeypatch.setattr(constrained, "INTERPRETED", constrained.Tiles(one, one, two, one, 16))
        compare(arguments, 2e-5, packed=False, last=True)


def special(
    scores: list[list[float]], radius: float, log_prior: list[list[float]], ceiling: float = math.inf
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The weights of the last row of several problems, beta there, and the gradients for q, radius, prior."""
    problems, t = len(scores), len(scores[0])
    s, p = torch.zeros(1, problems, 16, 16), torch.zeros(1, problems, 16, 16)
    s[0, :, t - 1, :t] = torch.tensor(scores) * 4
    p[0, :, t - 1, :t] = torch.tensor(log_prior)
    q, p = s.to(DEVICE).requires_grad_(), p.to(DEVICE).requires_grad_()
    eye = torch.eye(16, device=DEVICE).expand(s.shape)
    r = torch.full((1, problems, 16), radius, device=DEVICE, requires_grad=True)
    keep = torch.ones(problems, device=DEVICE)
    out, _, rows, log_a = constrained._forward(q, eye, eye, r, p, keep, ceiling, torch.float32)
    weight = torch.arange(1.0, 17, device=DEVICE) ** 2
    grads = torch.autograd.grad((out[:, t - 1] * weight).sum(), (q, r, p))
    weights = out[0, t - 1, :, :t].detach().cpu()
    # not normalised again as O is: at beta_max logits of 1e3 and their rounding
    torch.testing.assert_close(log_a[0, :, t - 1, :t].exp().cpu(), weights, rtol=0, atol=1e-4, equal_nan=True)
    return weights, 4 * rows[0, 0, :, t - 1].cpu(), [g[:, :, t - 1].cpu() for g in grads]


def test_rows_that_stay_at_the_prior() -> None:
    """A radius of zero or less, equal scores: beta = 0, no gradient to scores and radius; the prior still learns."""
    prior = [0.0, 0.5, 1.0]
    weight = torch.arange(1.0, 4) ** 2
    for scores, radius in (([1.0, 2.0, 4.0], 0.0), ([1.0, 2.0, 4.0], -0.3), ([2.0, 2.0, 2.0], 0.5)):
        weights, beta, (dq, dr, dp) = special([scores], radius, [prior])
        q = torch.tensor(prior).softmax(dim=-1)
        torch.testing.assert_close(weights[0], q, rtol=0, atol=1e-6)
        assert beta == 0
        assert not dq.any()
        assert not dr.any()
        torch.testing.assert_close(dp[0, 0, :3], q * (weight - (q * weight).sum()), rtol=1e-5, atol=1e-6)


def test_rows_at_the_ceiling() -> None:
    """Softmax of ln p + ceiling * s, equal scores included, no gradient to the radius; radius <= 0 stays at p."""
    prior = torch.tensor([0.0, 0.5, 1.0, -1.0], requires_grad=True)
    for scores in ([0.0, 4.0, 4.0, 1.0], [2.0, 2.0, 2.0, 2.0]):
        weights, beta, (dq, dr, dp) = special([scores], 2.0, [prior.tolist()], ceiling=0.5)
        assert beta == 0.5
        s = torch.tensor(scores, requires_grad=True)
        a = (prior + 0.5 * s).softmax(dim=-1)
        torch.testing.assert_close(weights[0], a.detach(), rtol=0, atol=1e-6)
        expected = torch.autograd.grad((a * torch.arange(1.0, 5) ** 2).sum(), (s, prior))
        torch.testing.assert_close(4 * dq[0, 0, :4], expected[0], rtol=1e-5, atol=1e-6)  # q = 4 s
        torch.testing.assert_close(dp[0, 0, :4], expected[1], rtol=1e-5, atol=1e-6)
        assert not dr.any()
    assert special([[0.0, 1.0]], 0.0, [[0.0, 1.0]], ceiling=0.5)[1] == 0


def test_rows_out_of_reach() -> None:
    """D cannot exceed -ln q(argmax set), two ties here: beyond, beta = beta_max, a constant."""
    scores = [0.0, 4.0, 4.0, 1.0]
    prior = torch.tensor([0.45, 0.05, 0.05, 0.45]).log().tolist()
    std = torch.tensor(scores).std(correction=0)
    for radius in (math.log(11), 5.0, math.inf):
        weights, beta, (_, dr, dp) = special([scores], radius, [prior])
        torch.testing.assert_close(beta[0], BETA_MAX / std, rtol=1e-5, atol=0)
        torch.testing.assert_close(weights[0], torch.tensor([0.0, 0.5, 0.5, 0.0]), rtol=0, atol=1e-6)
        assert not dr.any()
        assert dp.isfinite().all()
    weights, beta, (_, dr, _) = special([scores], math.log(9), [prior])
    assert beta[0] < 0.9 * BETA_MAX / std
    assert dr[0, 0] != 0
    q = torch.tensor(prior).exp()
    assert (weights[0] * (weights[0] / q).log()).sum() == pytest.approx(math.log(9), abs=1e-5)
    assert special([scores], math.nan, [prior])[0].isnan().all()


def test_hard_priors(monkeypatch: pytest.MonkeyPatch) -> None:
    """|KL - rho| <= 2e-4 nats, from priors nearly one-hot or with e^-300 at the top, as chains of layers make them.

    With the tolerance of bf16. Rows that the twin calls capped are capped here.
    """
    monkeypatch.setattr(constrained, "CHAINED_CLOSE", {torch.float32: constrained.CHAINED_CLOSE[torch.bfloat16]})
    monkeypatch.setattr(constrained, "INTERPRETED", constrained.Tiles(*4 * (constrained.Tile(64, 64),), 16))
    length = 64
    generator = seeded(0)
    scales = torch.tensor([0.3, 1.0, 3.0, 10.0, 30.0, 100.0])
    below = scales[:, None, None] * torch.randn(6, length, length, generator=generator)
    scores = torch.randn(6, length, length, generator=generator)
    scores[1::2] += 0.02 * below[1::2]  # a chain's scores are not independent of its prior
    q = scores[None].to(DEVICE).bfloat16().float()  # of which tf32 loses nothing
    k = torch.eye(length, device=DEVICE).expand(q.shape)
    below = below[None].log_softmax(dim=-1).to(DEVICE)
    t = torch.arange(1, length + 1, device=DEVICE).float()
    radius = (0.1 * t.log()).expand(q.shape[:3]).contiguous()
    rows = constrained.solve_with_prior(q, k, radius, below, torch.ones(6, device=DEVICE))
    hidden = t[None, :] > t[:, None]
    log_q = below.double().masked_fill(hidden, -math.inf).log_softmax(dim=-1)
    log_a = (log_q + q.double() * rows[0, ..., None].double()).log_softmax(dim=-1)
    kl = (log_a.exp() * (log_a - log_q).masked_fill(hidden, 0.0)).sum(dim=-1)
    active = rows[4] > 0
    error = (kl - radius.double()).abs()[active]
    assert error.max() <= 2e-4  # measured up to 6e-5
    _, reached, _ = twin_solve(q / 8, radius, ~hidden, below)
    assert torch.equal(active, reached)
    assert 0.5 < reached.double().mean() < 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "options"),
    [("kl-previous", {}), ("kl-carried", {}), ("kl-previous", {"constraint": "floor"}), ("kl", {"prior": "learned"})],
    ids=["previous", "carried", "floor", "learned"],
)
def test_models_use_the_kernels(preset: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and the gradients of all parameters, keep included, as without kernels, up to the rounding of ln a."""
    torch.use_deterministic_algorithms(False)  # the embedding's backward
    sizes = {"n_head": 1, "d_model": 32, "n_layer": 2, "context": 16}
    model = shake(tiny(preset, dtype=torch.float32, **sizes, **options), scale=0.1).to(DEVICE)
    ids = tokens(1, 16).to(DEVICE)
    asked = []
    learned = options.get("prior") == "learned"
    name = "table_attention" if learned else "prior_attention"
    kept = getattr(constrained, name)

    def counted(*arguments: Any, packed: bool = False) -> Any:
        asked.append(arguments[4] is not None)
        assert not packed  # fp32 keeps its digits
        return kept(*arguments) if learned else kept(*arguments, packed=packed)

    monkeypatch.setattr(constrained, name, counted)

    def results() -> list[Tensor]:
        logits = model(ids).logits
        names = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad((logits**2).sum(), names, allow_unused=True)
        return [logits.detach(), *(g for g in grads if g is not None)]

    with kernels.interpreted():
        found = results()
    assert asked == [learned, True]
    with kernels.off():
        expected = results()
    assert len(asked) == 2
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=4e-3 * y.abs().max().item())


def test_twin_and_kernels_read_each_other() -> None:
    """A call by the kernels, then one by the twin, and the reverse: values and gradients as by the twin alone."""
    arguments = inputs(2, 1, 20, 32, 0.1, torch.float32)

    def mixed(first: bool) -> Chain:
        def chain(q: Tensor, k: Tensor, v: Tensor, radius: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
            visible = torch.ones(20, 20, dtype=torch.bool, device=q.device).tril()
            outs, below = [], None
            for layer in range(2):
                if (layer == 0) == first:
                    out, below = constrained.prior_attention(
                        q[layer], k[layer], v[layer], radius[layer], below, keep[layer]
                    )
                else:
                    prior = None if below is None else keep[layer, :, None, None] * unpacked(below)
                    scores = q[layer] @ k[layer].mT / math.sqrt(32)
                    solved = constrained_softmax(scores, radius[layer], visible, prior)
                    out, below = solved.weights @ v[layer], solved.log_weights
                outs.append(out)
            assert below is not None
            return torch.stack(outs), unpacked(below).tril()

        return chain

    expected = run(twin_chain(), [x.double() for x in arguments])
    for first in (True, False):
        for name, x, y in zip(NAMES, run(mixed(first), arguments), expected, strict=True):
            assert distance(x, y) < 2e-2, (first, name)  # fp16 and bf16, as above


def test_the_twin_takes_what_kernels_do_not() -> None:
    model = tiny("kl-previous", dtype=torch.float32, n_head=1, d_model=32, n_layer=1)
    attention = next(m for m in model.modules() if isinstance(m, ConstrainedAttention))
    q = torch.randn(2, 1, 8, 32)
    long = torch.empty(1, 1, constrained.LONGEST + 1, 32)
    with kernels.interpreted():
        assert served(attention, q, q, q, fresh_call(tokens()))
        assert not served(attention, long, long, long, fresh_call(tokens()))
        assert not served(attention, q, q, q, in_documents(tokens()))  # documents


def test_the_operator_is_well_formed() -> None:
    torch.use_deterministic_algorithms(False)
    q, k, v, radius, keep = (x[0] for x in inputs(1, 1, 9, 16, 0.1, torch.float32))
    q, k, v, radius, keep = (x.detach().requires_grad_() for x in (q, k, v, radius, keep))
    below = torch.zeros(2, 1, 9, 9, device=DEVICE, requires_grad=True)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    for prior in ((None, None), (below, keep)):
        arguments = (q, k, v, radius, *prior, math.inf, torch.bfloat16)
        torch.library.opcheck(constrained._forward, arguments, test_utils=tests)


@pytest.mark.slow
def test_compiles_in_one_graph() -> None:
    arguments = inputs(2, 1, 20, 32, 0.1, torch.float32)
    chain = kernel_chain(packed=True)
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    for x, y in zip(run(compiled, arguments), run(chain, arguments), strict=True):
        assert torch.equal(x, y)


class TestOnTheGPU:
    pytestmark = on_gpu

    @pytest.mark.parametrize("d", [32, 64, 128])
    @pytest.mark.parametrize("length", [1, 5, 127, 256])
    def test_fp32(self, d: int, length: int) -> None:
        """Three tf32 products for one in fp32: 2^-22 per product, 1e-5 after two of them, a softmax and three calls."""
        compare(inputs(3, 2, length, d, 0.1, torch.float32), 2e-5, packed=False, last=True)

    @pytest.mark.parametrize("d", [32, 64, 128])
    @pytest.mark.parametrize("length", [1, 5, 127, 256, 600])
    def test_bf16(self, d: int, length: int) -> None:
        """Weights and their gradients rounded to bf16 before they multiply, and the gradient of ln a when stored."""
        compare(inputs(3, 2, length, d, 0.1, torch.bfloat16), 1.5e-2, packed=True)

    @pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 1.5e-2)])
    @pytest.mark.parametrize("d", [32, 64, 128])
    @pytest.mark.parametrize("length", [1, 127, 256, 600])
    @pytest.mark.parametrize("ceiling", [None, 0.7])
    def test_floors_and_learned_priors(
        self, d: int, length: int, dtype: torch.dtype, bound: float, ceiling: float | None
    ) -> None:
        arguments = table_inputs(2, length, d, dtype)
        compare_with_twin(kernel_table(ceiling), twin_table(ceiling), arguments, bound, False, TABLE_NAMES)
        if ceiling is not None:
            compare(inputs(3, 2, length, d, 0.1, dtype), bound, packed=dtype == torch.bfloat16, ceiling=ceiling)

    def test_the_same_bits_twice(self) -> None:
        arguments = inputs(2, 3, 500, 64, 0.1, torch.bfloat16)
        first, second = (run(kernel_chain(packed=True), arguments) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
