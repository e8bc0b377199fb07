"""Decoding kernels against the model's own blocks: logits, cache and choice of every step."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import stepformer as sf
from draws import seeded
from helpers import shake
from stepformer.decoding.sampling import encode
from stepformer.model.engines import rows as decoding_rows
from stepformer.model.engines import steps as decoding
from stepformer.ops import common, kernels
from stepformer.ops import rows as row_launches

SMALL: dict[str, Any] = {"n_layer": 2, "n_head": 2, "d_model": 32, "context": 12, "vocab_size": 29}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [3, 3], [2, 1], [7, 7, 7]]
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter was not chosen")


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def poison(device: str) -> None:
    """Memory that torch.empty hands out next holds NaN."""
    blocks = [torch.full((1 << 16,), torch.nan, device=device) for _ in range(16)]
    del blocks


def worst_error(model: sf.Model, rows: int, steps: int, temperature: float = 0.0) -> float:
    """The largest relative error of logits and cache over some steps; the chosen tokens and positions are compared."""
    device = model.embed.tok_emb.weight.device
    seen: list[Tensor] = []
    with torch.no_grad(), kernels.interpreted(), decoding.anywhere():
        with kernels.off():
            cache, logits = encode(model, PROMPTS[:rows], model.config.context)
        decoder = decoding.Decoder(model, rows, model.config.context, decoding.Sampling(temperature), record=False)
        assert decoder.unfused is None
        decoder.load(cache)
        decoder.choose(logits[:, -1])
        from stepformer.ops import rows as row_kernels

        with pytest.MonkeyPatch.context() as patch:
            original = row_kernels.logits

            def watched(*args: Any) -> Any:
                found = original(*args)
                seen.append(found[0])
                return found

            patch.setattr(row_kernels, "logits", watched)
            worst = 0.0
            for _ in range(steps):
                with kernels.off():
                    expected = model(decoder.tokens, cache=cache).logits[:, -1]
                poison(str(device))
                decoder.advance()
                worst = max(worst, relative(seen[-1], expected))
                assert decoder.out[-1] == 1
                assert torch.equal(decoder.positions[:, 0], cache.lengths)
                assert torch.equal(decoder.out[:-1], decoder.tokens[:, 0])
                if temperature == 0:
                    best = seen[-1][:, : model.config.real_vocab].argmax(dim=-1)
                    assert torch.equal(decoder.tokens[:, 0], best)
                for mine, theirs in zip(decoder.cache.slots, cache.slots, strict=True):
                    for slot, other in zip(mine, theirs, strict=True):
                        pairs = zip(slot.tensors(), other.tensors(), strict=True)
                        worst = max(worst, *(relative(a, b) for a, b in pairs))
    return worst


def rounding(model: sf.Model, rows: int) -> float:
    """How far the plain step after the prompts lies from that of the same weights in fp64."""
    with torch.no_grad(), kernels.off():
        cache, logits = encode(model, PROMPTS[:rows], model.config.context)
        exact = copy.deepcopy(model).double()
        exact_cache, _ = encode(exact, PROMPTS[:rows], model.config.context)
        best = logits[:, -1:, : model.config.real_vocab].argmax(dim=-1)
        return relative(model(best, cache=cache).logits, exact(best, cache=exact_cache).logits)


EXTRAS = {
    "positions": "rotary", "qk_norm": True, "value_residual": "free", "embedding_skip": True, "norm": "rmsnorm",
}  # fmt: skip
CASES = [
    ("gd-lie-trotter", {"norm": "rmsnorm", "learned_steps": True, "real_vocab": 20}),
    ("tmm", {"positions": "rotary", "qk_norm": True, "n_head": 1}),
    ("polyak-euler", {"bias": True, "mlp": "swiglu"}),
    ("imex-ln-k2-mam", {"mlp": "gelu-tanh", "logit_softcap": 5.0}),
    ("symplectic-euler", {"d_model": 24, "n_head": 3, "aux_init": "zero"}),
]
# what has steps of its own, or none: other attentions, extras, functions that no pass can do, many rows
FAMILIES = [
    ("yurii", EXTRAS, 1),
    ("adam", {**EXTRAS, "document_separator": 3}, 2),
    ("vanilla", {"splitting": "parallel", "mlp": "swiglu", "bias": True, "logit_softcap": 5.0}, 2),
    ("muon", {}, 1),
    ("soap", {"n_layer": 1}, 1),
    ("vanilla", {"n_head": 2, "d_model": 24}, 2),
    ("vanilla", {"mlp": "swiglu", "bias": True, "value_residual": "unit"}, 6),
    ("tables", {"mlp": "relu2", "head": "untied", "value_tables": True}, 2),
    ("hyper", {"n_layer": 1}, 1),
    ("hyper", {"dynamic": True, "n": 2}, 2),
    ("hyper", {"dynamic": True, "n": 3, "norm": "rmsnorm", "splitting": "parallel"}, 6),
    ("mhc", {"n": 2, "tables": 1}, 1),
    ("mhc", {"mixing": "permutations", "n": 3}, 6),
    ("mhc", {**EXTRAS, "embedding_skip": False, "output_norm": True, "n": 2}, 2),
    ("vanilla", {**EXTRAS, "output_norm": True}, 2),
    ("value-tables", {"mlp": "relu2", "head": "untied", "positions": "rotary", "document_separator": 3}, 6),
    ("linear", {"value_tables": True}, 1),
    ("scaled", {"scale": "layerscale", "value_residual": "free"}, 2),
    ("denseformer", {"scale": "scalar", "unet": True, "n_layer": 4}, 2),
    ("entropy", {**EXTRAS, "document_separator": 3}, 2),
    ("entropy-token", {"target_form": "support"}, 2),
    ("entropy-floor", {}, 2),
    ("entropy-head", {}, 5),
    ("kl", {}, 2),
    ("kl-previous", {}, 2),
    ("kl-carried", {"splitting": "strang"}, 2),
    ("kl-carried", {"constraint": "floor", "ratio": 0.02}, 5),
    ("kl-previous", {"prior": "learned", "document_separator": 3}, 5),
    ("linear", {"value_residual": "free", "document_separator": 3}, 2),
    ("linear-yurii", {"n0": 7}, 5),
    ("linear-symp-ab2", {}, 1),
    ("linear-symp-exp-euler", {"n0": 7}, 2),
    ("symp-exp-euler", {}, 2),
    ("symp-ab2", {"kernel": "per-head", "learned_kappa": True, "document_separator": 3}, 2),
    ("symp-plain-euler", {"force": "query", "symmetric": True, "score_bound": 0.0, "n0": 7}, 2),
    ("symp-presymp-euler", {"system": "particles", "n0": 7, "t0": 2.5, "weight_sharing": "oracles"}, 2),
    ("linear-symp-plain-euler", {"memory": "nesterov", "weight_sharing": "attention"}, 2),
    ("symp-conformal-euler", {"metric": "derived"}, 5),
    ("symp-etd-ab2", {"positions": "rotary"}, 2),
]
QUICK = [("yurii", 1), ("vanilla", 6), ("linear", 2), ("hyper", 2), ("mhc", 1)]


@NO_GPU
@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(*case, marks=[] if "euler" in case[0] else [pytest.mark.slow]) for case in CASES],
    ids=[name for name, _ in CASES],
)
def test_steps_in_the_interpreter(name: str, options: dict[str, Any]) -> None:
    """fp32 sums in another order: 1e-6 in two layers, 1e-5 allowed."""
    model = shake(sf.build(name, seed=0, dtype=torch.float32, **{**SMALL, **options}), scale=0.1).eval()
    assert worst_error(model, 2, 2) < 1e-5


@NO_GPU
@pytest.mark.parametrize(
    ("name", "options", "rows"),
    [pytest.param(*case, marks=[] if case[::2] in QUICK else [pytest.mark.slow]) for case in FAMILIES],
    ids=[f"{name} {rows}" for name, _, rows in FAMILIES],
)
def test_all_families_in_the_interpreter(name: str, options: dict[str, Any], rows: int) -> None:
    """As above; a temperature is solved for in 8 steps, which leaves 2e-6."""
    model = shake(sf.build(name, seed=0, dtype=torch.float32, **{**SMALL, **options}), scale=0.1).eval()
    assert worst_error(model, rows, 2) < 1e-5


@NO_GPU
@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [("mhc", {}, torch.float32), pytest.param("hyper", {"dynamic": True}, torch.bfloat16, marks=pytest.mark.slow)],
)
def test_more_streams_than_their_kernels_take(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Their weights are then columns of one array, and found in the dtype of the streams."""
    model = shake(sf.build(name, seed=0, dtype=dtype, **{**SMALL, "n_layer": 1, "n": 9, **options}), scale=0.1).eval()
    assert worst_error(model, 2, 2) < (1e-5 if dtype == torch.float32 else 2e-2)


@NO_GPU
def test_a_plug_in_is_decoded_by_kernels(registries: None) -> None:
    """A rule and an MLP that no kernel knows: the first is generated, the other is called."""

    @sf.register_template("test-decoded", equation="v' = LN_v(beta v + gamma g);  x' = x + nu v' + (1 - nu) g")
    class Mixed(sf.Template):
        """Move along a mix of the velocity and the answer."""

        streams = {"v": sf.Stream("embed", "velocity")}
        coefficients = {"beta": sf.unit(0.5, "memory"), "gamma": sf.positive(), "nu": sf.unit(0.7, "drift")}
        normalises = "v"

        def kick(self, s: Any, c: Any, g: Any, scale: float = 1.0) -> Any:
            return s.replace(v=c.beta * s.v + scale * c.gamma * g, u=scale * g)

        def drift(self, s: Any, c: Any, scale: float = 1.0) -> Any:
            return s.without("u").replace(x=s.x + c.nu * s.v + (1 - c.nu) * s.u)

    @sf.register_mlp("test-decoded", equation="g = W_2 relu(W_1 u)^2")
    class Square(sf.MLP):
        """An activation of its own."""

        def activation(self, h: Tensor) -> Tensor:
            return torch.relu(h) ** 2

    options = {"template": "test-decoded", "mlp": "test-decoded", "value_residual": "free"}
    model = shake(sf.build("vanilla", seed=0, dtype=torch.float32, **{**SMALL, **options}), scale=0.1).eval()
    assert worst_error(model, 2, 2) < 1e-5


@NO_GPU
def test_a_hybrid_in_the_interpreter_and_sampling() -> None:
    model = shake(sf.build("yurii", seed=0, dtype=torch.float32, **SMALL), scale=0.1).eval().hybrid(layers={1})
    assert worst_error(model, 1, 2, temperature=1.0) < 1e-5


@NO_GPU
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("linear", {"temperature": 0}),
        *(pytest.param("yurii", how, marks=pytest.mark.slow) for how in ({"seed": 3}, {"temperature": 0})),
    ],
    ids=str,
)
def test_steps_read_short_prompts(name: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens after a pass over the whole prompt; a draw sees a rounding of 1e-6 in one case of 1e6."""
    monkeypatch.setattr(decoding, "SEVERAL", 2)
    model = shake(sf.build(name, seed=0, dtype=torch.float32, **{**SMALL, "n_layer": 1}), scale=0.1).eval()
    prompts, settings = [[1, 2, 3, 4], [9, 8, 7, 6]], {"max_new_tokens": 3, **how}
    plain = model.generate(prompts, **settings)
    with kernels.interpreted(), decoding.anywhere(), monkeypatch.context() as patch:
        patch.setattr("stepformer.decoding.sampling.encode", lambda *_: pytest.fail("a pass over the prompts"))
        fixed = [model.generate(prompts, **settings) for _ in range(2)]  # the second after what the first left
    assert all(made.ordinary is None for made in fixed)
    assert all((made.tokens, made.finish) == (plain.tokens, plain.finish) for made in fixed)


@NO_GPU
def test_logits_that_are_not_finite_are_flagged() -> None:
    from stepformer.ops import rows

    table = torch.randn(40, 16)
    for value, good in ((1.0, 1), (float("nan"), 0), (float("inf"), 0)):
        u = torch.ones(2, 16)
        u[1, 3] = value
        tokens, positions, out = (torch.zeros(shape, dtype=torch.long) for shape in ((2, 1), (2, 1), (3,)))
        out[-1] = 1
        rows.finish(rows.logits(u, table, real=30)[1], tokens, positions, out)
        assert out[-1] == good
        assert out[0] == tokens[0, 0] == table[:30].sum(dim=1).argmax()
        assert positions.tolist() == [[1], [1]]


def test_who_is_refused() -> None:
    """What no plan describes keeps its own blocks."""
    with kernels.interpreted():
        build = lambda name, **options: sf.build(name, dtype=torch.float32, **{**SMALL, **options})  # noqa: E731
        for name in ("yurii", "adam", "muon", "entropy", "linear-symp-ab2"):
            assert decoding_rows.refusal(build(name), 64) is None
        for name, options, rows, sentence in (
            ("yurii", {}, 65, "more than 64 rows"),
            ("symp-exp-euler", {"positions": "rotary", "document_separator": 0}, 1, "within documents"),
        ):
            assert sentence in (decoding_rows.refusal(build(name, **options), rows) or "")
        pinned = build("yurii")
        pinned.pin_coefficients(mu=0.0, layer=1)
        assert "pinned" in (decoding_rows.refusal(pinned, 1) or "")
        pinned = build("entropy-head")
        pinned.blocks[0].attn.coefficients.pin_keys(["r"], "r", 0.3)
        assert "pinned" in (decoding_rows.refusal(pinned, 1) or "")
        turned = build("yurii")
        weight = turned.blocks[0].mlp.up.weight
        weight.data = weight.data.t().contiguous().t()
        assert "another order" in (decoding_rows.refusal(turned, 1) or "")
    assert "cannot take" in (decoding_rows.refusal(build("yurii"), 1) or "")


def test_extras_without_such_a_step_are_refused(registries: None) -> None:
    @sf.register_extra("test-number", equation="x = x + mean(x_0)")
    class Number(sf.Extra):
        """Remembers one number per token."""

        def start(self, x: Tensor) -> dict[str, Tensor]:
            return {"mean": x.mean(dim=-1, keepdim=True)}

        def enter(self, s: Any, c: Any) -> Any:
            return s.replace(x=s.x + s.memory["mean"])

    @sf.register_extra("test-cap", equation="logits = tanh(logits)")
    class Cap(sf.Extra):
        """A second cap."""

        cap = 1.0

        def logits(self, logits: Tensor) -> Tensor:
            return torch.tanh(logits)

    with kernels.interpreted():
        model = sf.build("vanilla", dtype=torch.float32, extras=["test-number"], **SMALL)
        assert "'mean' is not one row per token" in (decoding_rows.refusal(model, 1) or "")
        model = sf.build("vanilla", dtype=torch.float32, extras=["test-cap"], logit_softcap=5.0, **SMALL)
        assert "test-cap" in (decoding_rows.refusal(model, 1) or "")
        assert decoding_rows.refusal(sf.build("vanilla", dtype=torch.float32, extras=["test-cap"], **SMALL), 1) is None


@NO_GPU
@pytest.mark.parametrize("layer", ["mlp.up", "attn.qkv"])
def test_a_layer_in_the_place_of_another_is_called(layer: str) -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = shake(sf.build("vanilla", seed=0, dtype=torch.float32, **SMALL), scale=0.1).eval()
    block = model.blocks[0]
    old = block.get_submodule(layer)
    new = Doubled(old.in_features, old.out_features, bias=False)
    new.load_state_dict(old.state_dict())
    block.set_submodule(layer, new)
    assert worst_error(model, 2, 2) < 1e-5


@NO_GPU
@pytest.mark.slow
@pytest.mark.parametrize("name", ["vanilla", "linear"])
def test_a_text_that_went_wrong_leaves_nothing_behind(name: str) -> None:
    """Heads of width 12 are called as they are written: what they may not see counts 0 times its value."""
    model = shake(sf.build(name, seed=0, dtype=torch.float32, **{**SMALL, "d_model": 24}), scale=0.1).eval()
    weight = model.embed.tok_emb.weight
    with torch.no_grad(), kernels.interpreted(), decoding.anywhere():
        decoder = decoding.Decoder(model, 1, 12, decoding.Sampling(0.0), record=False)
        good, kept = list(decoder.after([[1, 2, 3]], 4)), weight.clone()
        weight.fill_(torch.nan)
        with pytest.raises(sf.StepformerError, match="not finite"):
            list(decoder.after([[1, 2, 3]], 8))
        weight.copy_(kept)
        assert list(decoder.after([[1, 2, 3]], 4)) == good


def test_a_decoder_notices_settings_that_change() -> None:
    model = sf.build("entropy", seed=0, dtype=torch.float32, **SMALL)
    with kernels.interpreted(), decoding.anywhere():
        decoder = decoding.Decoder(model, 1, 12, decoding.Sampling(0.0), record=False)
        settings = (model, 1, 12, decoding.Sampling(0.0))
        assert decoder.fits(*settings)
        for owner, name, value in ((model.blocks[1].attn_norm, "eps", 0.1), (model.blocks[0].attn, "ratio", 0.7)):
            before = getattr(owner, name)
            setattr(owner, name, value)
            assert not decoder.fits(*settings)
            setattr(owner, name, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [5, 16, 32, 64])
def test_tiles_of_many_rows_fit(rows: int, dtype: torch.dtype) -> None:
    """What a compiler needs at most, for every width: all stages of both factors, and the source once more."""
    for n, k, gated in (
        (768, 768, False),
        (3072, 768, True),
        (8192, 2048, True),
        (2048, 8192, False),
        (50304, 64, False),
    ):
        for kind in (torch.float32, dtype):
            weight, source = torch.empty(1, k, dtype=dtype), torch.empty(1, 1, dtype=kind)
            tile = row_launches.many_rows_tile(rows, n, weight, source, gated)
            factors = tile["BLOCK_M"] * source.element_size() + tile["BLOCK_N"] * weight.element_size() * (1 + gated)
            more = tile["BLOCK_M"] * weight.element_size()
            assert (tile["STAGES"] * factors + more) * tile["BLOCK_K"] < common.shared_memory(weight.device) - 32_000


@contextlib.contextmanager
def checked_addresses() -> Iterator[list[str]]:
    """Inside, whatever a kernel reads or writes in the interpreter lies in one of its arguments; else it is an error.

    The interpreter itself reads whatever memory is there; a GPU stops with an illegal access, or does not. Yields the
    names of the kernels that were launched.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    launched: list[str] = []
    allowed: list[tuple[int, int]] = []

    def check(pointers: Any, mask: Any) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        everywhere, wanted = np.broadcast_arrays(pointers.data, mask.data)
        for address in {int(a) for a in everywhere[wanted.astype(bool)].ravel()}:
            inside = any(begin <= address and address + size <= end for begin, end in allowed)
            assert inside, f"{launched[-1]} leaves its arguments"

    with pytest.MonkeyPatch.context() as patch:
        executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
        prepare, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store

        def prepared(self: Any, given: Any, named: Any) -> Any:
            found = prepare(self, given, named)
            launched.append(self.fn.__name__)
            tensors = [t for t in (*found[0], *found[1].values()) if isinstance(t, Tensor)]
            lengths = [1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) for t in tensors]
            begins = [t.data_ptr() for t in tensors]
            allowed[:] = [
                (b, b + n * t.element_size()) for b, n, t in zip(begins, lengths, tensors, strict=True) if t.numel()
            ]
            return found

        def loaded(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            check(pointers, mask)
            return load(self, pointers, mask, *rest)

        def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            check(pointers, mask)
            return store(self, pointers, value, mask, *rest)

        patch.setattr(executor, "_init_args_hst", prepared)
        patch.setattr(builder, "create_masked_load", loaded)
        patch.setattr(builder, "create_masked_store", stored)
        yield launched


@NO_GPU
@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(*case, marks=[] if case[0] == "tmm" else pytest.mark.slow) for case in CASES],
    ids=[name for name, _ in CASES],
)
def test_no_address_lies_outside_the_arguments(name: str, options: dict[str, Any]) -> None:
    """Also after steps too many, for tokens that do not exist, and with logits that are not numbers."""
    model = shake(sf.build(name, seed=0, dtype=torch.float32, **{**SMALL, **options}), scale=0.1).eval()
    with torch.no_grad(), kernels.interpreted(), decoding.anywhere(), checked_addresses() as launched:
        decoder = decoding.Decoder(model, 2, 12, decoding.Sampling(0.0), record=False)
        assert decoder.unfused is None
        decoder.positions.copy_(torch.tensor([[11], [3]]))
        decoder.advance()
        decoder.tokens.copy_(torch.tensor([[10**12], [-(10**12)]]))  # the first row's position is 12 now
        decoder.advance()
        decoder.positions.copy_(torch.tensor([[10**12], [-5]]))
        model.embed.tok_emb.weight[:, 0].fill_(torch.nan)
        decoder.advance()
        assert decoder.out[-1] == 0
        assert 0 <= int(decoder.tokens.min()) <= int(decoder.tokens.max()) < (model.config.real_vocab or 29)
    assert {"embed_kernel", "linear_kernel", "attend_kernel", "step_kernel", "finish_kernel"} <= set(launched)


@NO_GPU
def test_addresses_outside_are_seen() -> None:
    from stepformer.ops.row_kernels import embed_kernel

    table, tokens, out = torch.ones(5, 16), torch.tensor([[5]]), torch.empty(1, 16)
    given, length = torch.ones(1, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    sizes = {"K": 16, "CONTEXT": 1, "GIVEN": 1, "LEARNED": False, "SEPARATOR": -1, "OVERLAP": 0, "BLOCK_K": 16}
    where, good = (tokens, tokens.clone()), length.clone()
    with checked_addresses():
        embed_kernel[(1,)](tokens, *where, given, length, table, table, out, good, VOCABULARY=5, **sizes)
        with pytest.raises(Exception, match="leaves its arguments"):
            embed_kernel[(1,)](tokens, *where, given, length, table, table, out, good, VOCABULARY=6, **sizes)


@NO_GPU
def test_a_decoder_keeps_what_its_step_looks_up() -> None:
    """A recording knows addresses only; the step itself is gone by then."""
    model = sf.build("yurii", seed=0, dtype=torch.float32, positions="rotary", **SMALL)
    with torch.no_grad(), kernels.interpreted(), decoding.anywhere():
        decoder: Any = decoding.Decoder(model, 1, 12, decoding.Sampling(0.0), record=False)
        decoder.advance()
    step = decoder.advance
    held = [weakref.ref(t) for t in (*step.where.angles, *step.starts.values(), *(t for t, _ in step.made.values()))]
    assert len(held) == 3
    decoder.advance = decoder.advance_several = None
    owner = weakref.ref(model)
    del step, model
    gc.collect()
    assert all(ref() is not None for ref in held)
    assert owner() is None


class TestOnTheGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("head_dim", [32, 64, 128])
    @pytest.mark.parametrize("name", ["vanilla", "yurii", "tmm", "symplectic-euler", "imex-k2-ama", "verlet-mam"])
    def test_steps(self, name: str, head_dim: int, dtype: torch.dtype) -> None:
        """fp32: 1e-5. bf16: the ordinary step rounds every stream to 8 bits, these keep fp32: 2e-2 between them."""
        sizes = {"n_layer": 2, "n_head": 3, "d_model": 3 * head_dim, "context": 300, "vocab_size": 1001}
        model = shake(sf.build(name, seed=0, dtype=torch.float32, **sizes), scale=0.02).eval().cuda().to(dtype)
        with torch.no_grad():
            assert worst_error(model, 3, 5) < (1e-5 if dtype == torch.float32 else 2e-2)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        ("name", "options", "rows"), FAMILIES, ids=[f"{name} {rows}" for name, _, rows in FAMILIES]
    )
    def test_families(self, name: str, options: dict[str, Any], rows: int, dtype: torch.dtype) -> None:
        """fp32: 1e-5, products of matrices by three of tf32 2e-5. bf16: both ways round, in other places.

        The plain way rounds scores to bf16. Where a constraint tells two tokens of nearly equal scores apart, that
        alone is far from fp64 (0.12 for the learned prior with documents): the two ways may be twice as far apart.
        """
        sizes = {"n_layer": 2, "n_head": 4, "d_model": 256, "context": 300, "vocab_size": 1001}
        changed = {key: value for key, value in options.items() if key not in ("d_model", "n_head")}
        model = shake(sf.build(name, seed=0, dtype=torch.float32, **{**sizes, **changed}), scale=0.02).eval().cuda()
        bound = 2e-5 if dtype == torch.float32 else max(4e-2, 2 * rounding(model.to(dtype), rows))
        with torch.no_grad():
            assert worst_error(model.to(dtype), rows, 5) < bound

    @pytest.mark.parametrize(("name", "options"), CASES, ids=[name for name, _ in CASES])
    def test_options(self, name: str, options: dict[str, Any]) -> None:
        sizes = {"n_layer": 2, "n_head": 4, "d_model": 256, "context": 1000, "vocab_size": 3001}
        changed = {key: value for key, value in options.items() if key not in ("d_model", "n_head")}
        model = shake(sf.build(name, seed=0, dtype=torch.float32, **{**sizes, **changed}), scale=0.02).eval().cuda()
        assert worst_error(model, 4, 5) < 1e-5

    @pytest.mark.parametrize("prompt", [1, 127, 128, 129, 640, 1000])
    def test_long_caches(self, prompt: int) -> None:
        """Stretches of keys that are full, empty, or end with the new key."""
        sizes = {"n_layer": 2, "n_head": 4, "d_model": 256, "context": 1024, "vocab_size": 101}
        model = shake(sf.build("yurii", seed=0, dtype=torch.float32, **sizes), scale=0.02).eval().cuda()
        ids = torch.randint(101, (prompt,), generator=seeded(0)).tolist()
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "PROMPTS", [ids, [5]])
            assert worst_error(model, 2, 4) < 1e-5

    @pytest.mark.parametrize("name", ["vanilla", "yurii", "polyak-euler", "adam", "entropy", "linear", "symp-ab2"])
    def test_kernels_that_overlap_compute_the_same_bits(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever is read too early, or written, shows here: all keys and values of 500 steps are compared."""
        from stepformer.ops.rows import Launching

        sizes = {"n_layer": 6, "n_head": 12, "d_model": 768, "context": 512, "vocab_size": 5003}
        model = shake(sf.build(name, seed=0, dtype=torch.float32, **sizes), scale=0.02).eval().cuda()
        model.to(torch.bfloat16)
        found: list[list[Tensor]] = []
        for overlap in (0, 1, 2, 2):
            monkeypatch.setattr(Launching, "overlap", overlap)
            with torch.no_grad():
                decoder = decoding.Decoder(model, 1, 512, decoding.Sampling(0.0))
                decoder.positions.zero_()
                decoder.tokens.fill_(1)
                for _ in range(62):
                    decoder.advance_several()
                tensors = (t for slots in decoder.cache.slots for s in slots for t in s.tensors())
                written = (t[:, :, :496] if t.ndim == 4 else t for t in tensors)
                found.append([t.clone() for t in written])
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))

    def test_steps_too_many_and_logits_that_are_not_numbers(self) -> None:
        """Nothing that a device computes leads outside its memory."""
        model = sf.build("yurii", seed=0, dtype=torch.float32, **{**SMALL, "d_model": 64}).eval().cuda()
        with torch.no_grad():
            decoder = decoding.Decoder(model, 2, 12, decoding.Sampling(0.0))
            for _ in range(30):
                decoder.advance()
            model.final_norm.weight.fill_(torch.nan)
            decoder.tokens.fill_(10**12)
            for _ in range(3):
                decoder.advance()
        assert decoder.out[-1] == 0
        assert 0 <= int(decoder.tokens.min()) <= int(decoder.tokens.max()) < 29
