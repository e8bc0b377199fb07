"""Linear layers with fp32 weight gradients and the MLP's fused activation, against plain PyTorch in fp64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draws import seeded, shifted
from helpers import tiny, tokens
from stepformer.model.engines.oracles import ACTIVATIONS
from stepformer.ops import Linear, kernels
from stepformer.ops import linear as linear_layer
from stepformer.oracles.mlp import MLP, GeluMLP, mlps

pytest.importorskip("triton")
layers = pytest.importorskip("stepformer.ops.linear_kernels")

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
in_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU in this process")

SINGLE = 1e-5  # fp32: sums in another order; exp2 and erf have some ulp
HALF = 2e-2  # bf16 operands and results have 8 bits, 4e-3 a rounding, and there are several

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": lambda h: F.gelu(h, approximate="tanh"),
    "relu2": lambda h: F.relu(h).square(),
    "swiglu": lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
}
KINDS = list(PLAIN)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 entries, so that tiny inputs have several."""
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(layers, name, {"BLOCK": 16, "num_warps": 4})


def apart(found: Tensor, expected: Tensor) -> float:
    """Relative distance; nan where something is."""
    return ((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def inputs(
    shape: tuple[int, ...], width: int, bias: bool, *, branches: int = 1, scale: float = 2.0, **options: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, an fp32 weight with `width` rows and perhaps a bias."""
    generator = seeded(sum(shape) + width)
    device = options.get("device", "cpu")
    x = (torch.randn(*shape, generator=generator) * scale).to(**options).requires_grad_()
    weight = torch.randn(width, shape[-1] // branches, generator=generator).to(device).requires_grad_()
    return x, weight, torch.randn(width, generator=generator).to(device).requires_grad_() if bias else None


def gradients(y: Tensor, *asked: Tensor | None) -> list[Tensor]:
    """y and the gradients of a sum of it, weighted by bf16 numbers."""
    factor = torch.linspace(-1, 1.3, y.numel()).bfloat16().view(y.shape).to(y)
    return [y, *torch.autograd.grad(y, [t for t in asked if t is not None], factor)]


def twin(x: Tensor, weight: Tensor, bias: Tensor | None, act: Callable[[Tensor], Tensor] | None) -> list[Tensor]:
    """The same in fp64 from the weight as it enters the product."""
    wide = [None if t is None else t.detach().to(x.dtype).double().requires_grad_() for t in (x, weight, bias)]
    x64, w64, b64 = wide
    assert x64 is not None
    assert w64 is not None
    return gradients(F.linear(x64 if act is None else act(x64), w64, b64), *wide)


def compare(found: list[Tensor], expected: list[Tensor], limit: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert apart(ours, theirs) < limit


@in_interpreter
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 7), (5, 16)])
def test_linear(shape: tuple[int, ...], bias: bool, poisoned: None) -> None:
    for dtype, limit in ((torch.float32, SINGLE), (torch.bfloat16, HALF)):
        x, weight, b = inputs(shape, 6, bias, dtype=dtype)
        found = gradients(layers.linear(x, weight, b), x, weight, b)
        assert [t.dtype for t in found[:3]] == [dtype, dtype, torch.float32]
        compare(found, twin(x, weight, b, None), limit)


@in_interpreter
def test_weight_gradient_is_not_rounded() -> None:
    """What the operator is for: dW of bf16 factors to fp32 digits, where plain autograd leaves 8 bits."""
    x, weight, _ = inputs((4, 8, 16), 6, False, dtype=torch.bfloat16)
    found = gradients(layers.linear(x, weight), weight)[1]
    assert apart(found, twin(x, weight, None, None)[2]) < SINGLE
    with torch.autocast("cpu", torch.bfloat16):
        plain = gradients(F.linear(x, weight), weight)[1]
    assert apart(found, plain) > 1e-4


@in_interpreter
def test_strided_tokens_and_weight() -> None:
    """Columns of a wider tensor, and a weight that is the transpose of another."""
    wide, weight, _ = inputs((3, 2, 12), 5, False, dtype=torch.float32)
    square = weight.detach()[:, :5].clone().requires_grad_()
    x = wide[..., 3:8]
    found = gradients(layers.linear(x, square.mT), x, square)
    expected = twin(x, square.mT, None, None)
    compare(found, [*expected[:2], expected[2].mT], SINGLE)
    found = gradients(layers.activated_linear(x, square, None, "gelu"), x, square)
    compare(found, twin(x, square, None, F.gelu), SINGLE)


@in_interpreter
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 10), (3, 16), (2, 64)])
def test_activated(shape: tuple[int, ...], kind: str, bias: bool, small_blocks: None, poisoned: None) -> None:
    """One entry, rests, whole blocks, several blocks in a row."""
    h, weight, b = inputs(shape, 6, bias, branches=2 if kind == "swiglu" else 1)
    found = gradients(layers.activated_linear(h, weight, b, kind), h, weight, b)
    compare(found, twin(h, weight, b, PLAIN[kind]), SINGLE)


@in_interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_own_blocks(kind: str, poisoned: None) -> None:
    """The settings that are launched, with more entries than a block."""
    hidden = layers.FORWARD["BLOCK"] + 3
    h, weight, _ = inputs((2, hidden * (2 if kind == "swiglu" else 1)), 2, False, branches=2 if kind == "swiglu" else 1)
    found = gradients(layers.activated_linear(h, weight, None, kind), h, weight)
    compare(found, twin(h, weight, None, PLAIN[kind]), SINGLE)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_entries(kind: str) -> None:
    """Every bf16 number from -5 to 5 of size above 2^-20: value and slope within one rounding of what they are."""
    device, rounding = ("cuda", 2**-9) if torch.cuda.is_available() else ("cpu", 2**-7)  # the interpreter truncates
    limit = rounding + 2e-3  # the tail of Phi
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.bfloat16).to(device)
    every = every[(every.abs() <= 5) & (every.abs() > 2**-20)]
    h = torch.stack([every, every.flip(0)]) if kind != "swiglu" else torch.cat([every, every.flip(0)])[None]
    a = layers.activate(h, kind)
    wide = h.double().requires_grad_()
    expected = PLAIN[kind](wide)
    (slope,) = torch.autograd.grad(expected.sum(), wide)
    dh, again = layers.activate_backward(h, torch.ones_like(a), kind, True)
    assert a.dtype == dh.dtype == torch.bfloat16
    assert torch.equal(a, again)  # dW sees the activation that the forward pass used
    assert ((a.double() - expected).abs() <= limit * expected.abs()).all()
    assert ((dh.double() - slope).abs() <= limit * slope.abs() + 1e-6).all()  # slopes cross 0


@in_interpreter
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "relu2"])
@pytest.mark.filterwarnings("ignore:overflow")  # NumPy says what fp32 does: exp2(-inf) = 0
def test_far_entries(kind: str) -> None:
    """Far from 0 nothing overflows: 0 on the left, the entry itself on the right, with slopes 0 and 1."""
    far = torch.tensor([-1e30, -100.0, 100.0, 1e30])
    for dtype in (torch.float32, torch.bfloat16):
        # squares and cubes of more than 1e19 have no place in fp32: the derivative of gelu-tanh needs both
        entries = far[1:3] if kind == "gelu-tanh" else far
        row = entries.to(dtype)
        h = torch.cat([row, torch.ones_like(row)])[None] if kind == "swiglu" else row[None]
        a = layers.activate(h, kind)[0].float()
        dh = layers.activate_backward(h, torch.ones_like(row)[None], kind, False)[0][0, : len(row)].float()
        assert torch.equal(a, row.float().clamp_min(0))
        assert torch.equal(dh, (row > 0).float())
    assert layers.activate(torch.full((1, 8), torch.nan), kind).isnan().all()


@in_interpreter
def test_only_what_is_asked_for(small_blocks: None) -> None:
    h, weight, bias = inputs((3, 10), 6, True)
    assert bias is not None
    for asked in ((h,), (weight,), (bias,), (h, bias)):
        fixed = [t if any(t is a for a in asked) else t.detach() for t in (h, weight, bias)]
        for operator, act in ((layers.linear, None), (layers.activated_linear, F.gelu)):
            more = () if act is None else ("gelu",)
            found = gradients(operator(*fixed, *more), *asked)
            all_of_them = dict(zip((id(h), id(weight), id(bias)), twin(h, weight, bias, act)[1:], strict=True))
            compare(found[1:], [all_of_them[id(t)] for t in asked], SINGLE)
    assert layers.linear(h[:0], weight, bias).shape == (0, 6)
    assert layers.activated_linear(h[:0], weight, bias, "gelu").shape == (0, 6)


@in_interpreter
def test_gradient_is_handed_over_and_adds_up() -> None:
    """The parameter's gradient is the product's own memory, no copy; a second backward adds to it."""
    x, weight, _ = inputs((4, 8), 6, False)
    made: list[int] = []
    real = layers.product

    def watched(*args: Any) -> Tensor:
        result: Tensor = real(*args)
        made.append(result.data_ptr())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "product", watched)
        layers.linear(x, weight).sum().backward()
    assert weight.grad is not None
    assert made == [weight.grad.data_ptr()]
    once = weight.grad.clone()
    layers.linear(x, weight).sum().backward()
    assert torch.equal(weight.grad, 2 * once)


@in_interpreter
def test_no_second_derivative() -> None:
    x, weight, _ = inputs((4, 8), 6, False)
    (dx,) = torch.autograd.grad(layers.linear(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_backward"):
        dx.square().sum().backward()


@in_interpreter
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_operators_are_well_formed(kind: str | None, small_blocks: None) -> None:
    x, weight, bias = inputs((3, 12), 6, True, branches=2 if kind == "swiglu" else 1)
    rounded = weight.detach().clone()
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    dy = torch.randn(3, 6)
    forward = layers._activated if kind else layers._linear
    torch.library.opcheck(forward, (x, weight, bias, rounded, kind), test_utils=checks)
    for needs in ((True, True, True), (True, False, False), (False, True, False)):
        more = (dy, x.detach(), rounded, torch.float32, kind, *needs)
        torch.library.opcheck(layers._backward, more, test_utils=checks[:2])


def mlp_of(name: str, bias: bool) -> tuple[MLP, Tensor]:
    torch.manual_seed(shifted(1))
    module = mlps[name].component(8, None, bias=bias)
    return module, torch.randn(2, 3, 8, requires_grad=True)


@in_interpreter
@pytest.mark.parametrize(
    ("name", "bias", "narrow"),
    [
        pytest.param(name, bias, narrow, marks=[] if narrow == (bias == (name == KINDS[0])) else [pytest.mark.slow])
        for name in KINDS
        for bias in (False, True)
        for narrow in (False, True)
    ],
)
def test_mlp_with_kernels(name: str, bias: bool, narrow: bool) -> None:
    """The module takes the operators where kernels may run, eager and compiled without a graph break."""
    module, u = mlp_of(name, bias)
    trained = (u, *module.parameters())
    assert {n for n, _ in module.named_parameters()} >= {"up.weight", "down.weight"}
    calls = ["stepformer.activated_linear.default"] + (["stepformer.linear.default"] if narrow else [])
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        plain = gradients(module(u), *trained)
        with kernels.interpreted():
            with Operators() as seen:
                fused = gradients(module(u), *trained)
            assert set(calls) <= seen.names
            torch._dynamo.reset()  # every case compiles the same function
            compiled = gradients(torch.compile(module, fullgraph=True, backend="aot_eager")(u), *trained)
            with Operators() as seen, torch.no_grad():
                module(u)
            assert not any("stepformer" in n for n in seen.names)
            with Operators() as seen, kernels.off():
                assert torch.equal(module(u), plain[0])
            assert not any("stepformer" in n for n in seen.names)
    assert [t.dtype for t in fused] == [t.dtype for t in plain]
    compare(fused, plain, 2 * HALF if narrow else SINGLE)  # both are rounded
    for a, b in zip(fused, compiled, strict=True):
        assert torch.equal(a, b)


class Operators(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@in_interpreter
def test_another_activation_stays_plain() -> None:
    """A class that inherits from a known MLP may have its own activation, and a layer may have been replaced."""

    class Squared(GeluMLP):
        def activation(self, h: Tensor) -> Tensor:
            return h.square()

    u = torch.randn(2, 3, 8)
    for module in (Squared(8, None, bias=False), GeluMLP(8, None, bias=False)):
        if type(module) is GeluMLP:
            module.down = nn.Linear(32, 8)
        expected = module(u)
        with kernels.interpreted():
            assert torch.equal(module(u), expected)
    assert set(ACTIVATIONS) == set(layers.CODES)


@in_interpreter
def test_map_takes_the_operator_only_where_it_gains() -> None:
    """fp32 weights that are trained under bf16 autocast; everything else is F.linear."""
    x, weight, _ = inputs((2, 3, 8), 6, False)
    with kernels.interpreted():
        for w, dtype, expected in (
            (weight, torch.bfloat16, True),
            (weight, None, False),
            (weight, torch.float16, False),
            (weight.detach(), torch.bfloat16, False),
            (weight.detach().bfloat16().requires_grad_(), torch.bfloat16, False),
        ):
            with Operators() as seen, torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                y = linear_layer(x, w)
            assert ("stepformer.linear.default" in seen.names) is expected
            assert y.dtype == (dtype or torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(linear_layer(x, weight), F.linear(x, weight))
            torch.func.grad(lambda t: linear_layer(t, weight).sum())(x)


@pytest.mark.parametrize("name", ["vanilla", "yurii"])
def test_on_the_cpu_nothing_changes(name: str) -> None:
    """Bit for bit what nn.Linear and the activation give, in fp32 and under autocast."""
    model = tiny(name, dtype=torch.float32)
    block, ids = model.blocks[0], tokens()
    assert any(isinstance(m, Linear) for m in model.modules())
    u = torch.randn(*ids.shape, model.config.d_model)
    for narrow in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow), Operators() as seen:
            found = block.mlp(u)
            expected = F.linear(F.gelu(F.linear(u, block.mlp.up.weight)), block.mlp.down.weight)
            assert torch.equal(found, expected)
            model(ids, tokens(seed=1)).loss.backward()
        assert not any("stepformer" in n for n in seen.names)


@in_interpreter
@pytest.mark.parametrize("name", ["vanilla", "symp-presymp-euler", "linear-symp-presymp-euler"])
def test_every_map_of_a_block(name: str) -> None:
    """The linear layers of all kinds of attention go through the operator, each with the gradient it has without."""
    block = tiny(name, dtype=torch.float32, n_layer=2).blocks[1]
    linear = [m for m in block.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
    assert len(linear) >= 3
    for module in linear:
        u = torch.randn(1, 4, module.in_features)
        with torch.autocast("cpu", torch.bfloat16):
            plain = gradients(module(u), module.weight)
            with kernels.interpreted(), Operators() as seen:
                found = gradients(module(u), module.weight)
        assert "stepformer.linear.default" in seen.names
        assert torch.equal(found[0], plain[0])
        assert apart(found[1], plain[1]) < HALF


@in_interpreter
def test_weights_are_rounded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as one by one, from one copy a weight; a forward pass leaves no copies behind."""
    model = tiny("verlet-ama", dtype=torch.float32, n_layer=1)  # two calls of the attention a layer
    ids, targets = tokens(1, 3), tokens(1, 3, seed=1)
    asked: list[int] = []
    rounded = layers.rounded_weight

    def counted(weight: Tensor, dtype: torch.dtype) -> Tensor:
        copy: Tensor = rounded(weight, dtype)
        asked.append(copy.data_ptr())
        return copy

    def results() -> list[Tensor]:
        asked.clear()
        with kernels.interpreted(), torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, targets).loss
        assert loss is not None
        return [loss.detach(), *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]

    monkeypatch.setattr(layers, "rounded_weight", counted)
    together = results()
    assert len(asked) == 6
    assert len(set(asked)) == 4
    assert layers._COPIES.get() is None
    monkeypatch.setattr("stepformer.model.model.rounded_weights", lambda *roots: contextlib.nullcontext())
    for found, expected in zip(together, results(), strict=True):
        assert torch.equal(found, expected)


@in_interpreter
def test_a_weight_that_a_hook_changes_is_rounded_again() -> None:
    """Copies are made before the first block runs; a hook may still renormalise a weight on the way."""
    model = tiny("vanilla", dtype=torch.float32)

    def halve(module: nn.Module, inputs: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(0.5)

    model.blocks[1].mlp.up.register_forward_pre_hook(halve)
    up = model.blocks[1].mlp.up.weight
    results = []
    for way in (kernels.interpreted, contextlib.nullcontext):
        kept = up.detach().clone()
        with way(), torch.autocast("cpu", torch.bfloat16):
            results.append(model(tokens()).logits.detach())
        with torch.no_grad():
            up.copy_(kept)
    assert apart(results[0], results[1]) < HALF


@in_interpreter
def test_models_without_parameters_of_their_own_or_without_memory() -> None:
    """Replicas hold plain tensors where parameters were, and shapes alone may be asked for on the meta device."""
    replica = tiny("vanilla", dtype=torch.float32)
    for module in replica.modules():
        for key, parameter in list(module._parameters.items()):
            del module._parameters[key]
            setattr(module, key, None if parameter is None else parameter.detach())
    assert not list(replica.parameters())
    assert replica(tokens()).logits.isfinite().all()
    shapes = tiny("vanilla").to("meta")(tokens().to("meta")).logits
    assert shapes.shape[:2] == tokens().shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
class TestOnTheGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize(("n", "d", "width"), [(1, 64, 32), (777, 96, 40), (4096, 768, 2304), (1001, 768, 768)])
    def test_linear(self, n: int, d: int, width: int, bias: bool, dtype: torch.dtype) -> None:
        x, weight, b = inputs((n, d), width, bias, device="cuda", dtype=dtype)
        found = gradients(layers.linear(x, weight, b), x, weight, b)
        assert found[2].dtype == torch.float32
        compare(found, twin(x, weight, b, None), SINGLE if dtype == torch.float32 else HALF)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("n", "hidden", "d"), [(1, 64, 32), (777, 72, 40), (2048, 3072, 768), (1001, 2048, 768)])
    def test_activated(self, n: int, hidden: int, d: int, kind: str, bias: bool, dtype: torch.dtype) -> None:
        branches = 2 if kind == "swiglu" else 1
        h, weight, b = inputs((n, branches * hidden), d, bias, branches=branches, device="cuda", dtype=dtype)
        held = [torch.full((1 << size,), torch.nan, device="cuda") for size in range(10, 25) for _ in range(2)]
        del held  # torch.empty hands out nan next
        found = gradients(layers.activated_linear(h, weight, b, kind), h, weight, b)
        compare(found, twin(h, weight, b, PLAIN[kind]), SINGLE if dtype == torch.float32 else HALF)
        again = gradients(layers.activated_linear(h, weight, b, kind), h, weight, b)
        for a, e in zip(found, again, strict=True):
            assert torch.equal(a, e)

    def test_mlp_keeps_less(self, bias: bool, dtype: torch.dtype) -> None:
        """h and u stay for the backward, the activation does not."""
        torch.manual_seed(shifted(0))
        module = GeluMLP(256, None, bias=bias).cuda()
        u = torch.randn(8192, 256, device="cuda").to(dtype)
        kept = {}
        for name, run in (("fused", contextlib.nullcontext), ("plain", kernels.off)):
            with run(), torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
                module(u).sum().backward()
                before = torch.cuda.memory_allocated()
                y = module(u)
                kept[name] = torch.cuda.memory_allocated() - before
            y.sum().backward()
            module.zero_grad()
            del y
        assert kept["plain"] - kept["fused"] > 0.8 * 8192 * 1024 * u.element_size()  # copies of weights count too
