"""Decoding in fixed steps equals decoding as it comes, on a GPU with recorded graphs too."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import stepformer as sf
from architectures import covering_presets
from decoded import varied
from draws import seeded
from helpers import shake, tiny
from stepformer.decoding.sampling import Generation, encode, sample, stream
from stepformer.model.engines import rows as decoding_rows
from stepformer.model.engines import steps as decoding
from stepformer.ops import kernels


def both_ways(model: sf.Model, prompts: Any, **settings: Any) -> Generation:
    """The ordinary result, after a look that fixed steps give the same."""
    plain = model.generate(prompts, **settings)
    with decoding.anywhere():
        fixed = model.generate(prompts, **settings)
    assert plain.ordinary is not None
    assert fixed.ordinary is None
    assert (fixed.tokens, fixed.finish) == (plain.tokens, plain.finish)
    return plain


RAGGED = [[1], [2, 3, 4, 5], [6, 7]]


@pytest.mark.parametrize("name", covering_presets())
def test_fixed_steps_of_every_preset(name: str) -> None:
    """fp64, rows of different length that slide: sums in another order cannot change an argmax."""
    both_ways(shake(tiny(name), scale=0.5), RAGGED, max_new_tokens=9, temperature=0, on_context_end="slide")


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "rotary", "n_head": 2},
        {"value_residual": "free"},
        {"value_tables": True},
        {"embedding_skip": True},
        {"document_separator": 3},
        {"bias": True, "mlp": "swiglu", "logit_softcap": 2.0},
        {"attention": "linear", "document_separator": 3},
        {"attention": "kl", "prior": "carried", "splitting": "strang"},
    ],
    ids=str,
)
def test_fixed_steps_with_options(options: dict[str, Any]) -> None:
    model = shake(tiny("yurii", **options), scale=0.5)
    both_ways(model, RAGGED, max_new_tokens=12, temperature=0, on_context_end="slide")


def test_fixed_steps_of_a_hybrid_and_pinned_model() -> None:
    model = varied(n_layer=3)
    model.pin_coefficients(mu=0.0, layer=1)
    both_ways(model.hybrid(layers={0, 2}), RAGGED, max_new_tokens=9, temperature=0)


@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 0.7, "top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.9, "temperature": 3.0}],
    ids=str,
)
def test_fixed_steps_draw_the_same_tokens(how: dict[str, Any]) -> None:
    made = both_ways(varied(context=16), RAGGED, max_new_tokens=20, seed=5, on_context_end="slide", **how)
    assert len({token for row in made.tokens for token in row}) > 2


def test_fixed_steps_stop() -> None:
    model = varied(context=16)
    free = model.generate(RAGGED, max_new_tokens=12, temperature=0)
    stop = [free.tokens[0][4], free.tokens[2][2]]
    made = both_ways(model, RAGGED, max_new_tokens=12, temperature=0, stop=stop)
    assert "stop" in made.finish
    both_ways(model, RAGGED, max_new_tokens=40, temperature=0, stop=stop)


def test_a_draw_is_a_sample() -> None:
    """What torch.multinomial does for one draw, from the same numbers."""
    logits = torch.randn(50, 11, generator=seeded(0))
    for how in (
        decoding.Sampling(),
        decoding.Sampling(0.5, 4),
        decoding.Sampling(2.0, None, 0.7),
        decoding.Sampling(0.0),
    ):
        generators = [seeded(1) for _ in range(2)]
        for _ in range(3):
            assert torch.equal(
                decoding_rows.draw(logits, 9, how, generators[0]), sample(logits, 9, *how, generators[1])
            )
        assert torch.equal(*(g.get_state() for g in generators))


def test_fixed_steps_see_logits_that_are_not_finite() -> None:
    model = tiny()
    with torch.no_grad():
        model.final_norm.weight[0] = float("nan")
    with decoding.anywhere(), pytest.raises(sf.StepformerError, match="not finite"):
        model.generate([1], temperature=0)


def test_why_steps_are_not_fixed() -> None:
    model = tiny("yurii", dtype=torch.float32)
    assert "no CUDA graphs on 'cpu'" in (decoding.refusal(model, 100) or "")
    with decoding.anywhere():
        assert decoding.refusal(model, 100) is None
        with kernels.off():
            assert "switched off" in (decoding.refusal(model, 100) or "")
        with torch.autocast("cpu", torch.bfloat16):
            assert "bf16" in (decoding.refusal(model, 100) or "")
        handle = model.blocks[0].mlp.register_forward_hook(lambda *_: None)
        assert "hook" in (decoding.refusal(model, 100) or "")
        handle.remove()
        looked = Generation([], [])
        list(stream(model, [1], max_new_tokens=2, result=looked, look=lambda _: None))
        assert "looks" in (looked.ordinary or "")


def test_a_kernel_too_large_for_the_device_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's error is no RuntimeError; tokens are decoded in the ordinary way."""
    errors = pytest.importorskip("triton.runtime.errors")
    model = tiny()
    free = model.generate([1, 2], max_new_tokens=3, temperature=0)

    def fails(*_: Any, **__: Any) -> None:
        raise errors.OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(decoding, "Decoder", fails)
    with decoding.anywhere():
        made = model.generate([1, 2], max_new_tokens=3, temperature=0)
    assert "shared memory" in (made.ordinary or "")
    assert made.tokens == free.tokens


def test_no_step_runs_ahead_of_the_capacity() -> None:
    """The last token of a full context is still decoded, one more is refused, and a step too many does no harm."""
    model = varied()
    with torch.no_grad():
        decoder = decoding.Decoder(model, 2, 8, decoding.Sampling(0.0), record=False)
        cache, logits = encode(model, [[1, 2, 3], [4, 5]], 8)
        assert len(list(decoder.stretch(cache, logits, 6))) == 6
        assert decoder.positions.tolist() == [[8], [7]]
        for _ in range(decoding.BEHIND):
            decoder.advance()
        assert decoder.out[-1] == 1
        with pytest.raises(sf.StepformerError, match="cannot decode 7 more"):
            next(decoder.stretch(cache, logits, 7))
        with pytest.raises(sf.StepformerError, match="cache of 2 rows and 6 tokens"):
            next(decoder.stretch(encode(model, [[1], [4]], 6)[0], logits, 2))


@pytest.mark.parametrize("count", [1, 2, 4, 5, 7])
def test_several_steps_at_once_are_as_many_single_ones(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "SEVERAL", 3)
    model = varied(context=16)
    with torch.no_grad():
        decoder = decoding.Decoder(model, 2, 16, decoding.Sampling(0.0), record=False)
        calls: list[int] = []
        for name, steps in (("advance", 1), ("advance_several", 3)):
            original = getattr(decoder, name)
            monkeypatch.setattr(decoder, name, lambda o=original, n=steps: (calls.append(n), o()))
        prompts = [[1, 2, 3], [4, 5]]
        found = list(decoder.stretch(*encode(model, prompts, 16), count))
    assert calls == [3] * ((count - 1) // 3) + [1] * ((count - 1) % 3)
    assert [list(row) for row in zip(*found, strict=True)] == model.generate(
        prompts, max_new_tokens=count, temperature=0
    ).tokens


def test_tokens_before_logits_that_are_not_finite_are_received(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "SEVERAL", 3)
    decoder = decoding.Decoder(varied(), 2, 8, decoding.Sampling(0.0), record=False)
    decoder.host[0, :, :3] = torch.tensor([[5, 3, 1], [6, 3, 0], [7, 3, 1]])
    received = decoder._received(0, 3)
    assert next(received) == [5, 3]
    with pytest.raises(sf.StepformerError, match="not finite"):
        next(received)


def test_a_decoder_takes_the_coefficients_as_they_are() -> None:
    model = varied()
    decoder = decoding.Decoder(model, 1, 8, decoding.Sampling(0.0), record=False)
    shake(model, scale=0.5, seed=9)
    model.pin_coefficients(mu=0.25, layer=1)
    with torch.no_grad():
        decoder.load(model.new_cache(1, 8))
        values = [(value, bank.value(key)) for (bank, key), value in decoder.coefficients.items()]
    assert any(float(value) == 0.25 for value, _ in values)
    assert len(values) > 8
    torch.testing.assert_close(*map(torch.cat, zip(*values, strict=True)), rtol=1e-14, atol=0)


def test_capacities_are_rounded_up_to_the_context() -> None:
    assert decoding.capacity_for(5, 40, 1024) == 64
    assert decoding.capacity_for(5, 60, 1024) == 128
    assert decoding.capacity_for(1000, 500, 1024) == 1024
    assert decoding.capacity_for(1, 1, 8) == 8


on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU_SIZES = {"n_head": 4, "d_model": 256, "context": 64, "vocab_size": 101, "dtype": torch.float32}


def recorded_and_ordinary(model: sf.Model, prompts: Any, **settings: Any) -> None:
    recorded = model.generate(prompts, **settings)
    with kernels.off():
        plain = model.generate(prompts, **settings)
    assert recorded.ordinary is None
    assert plain.ordinary is not None
    assert (recorded.tokens, recorded.finish) == (plain.tokens, plain.finish)


class TestRecorded:
    """Recorded steps on a GPU, fp32: identical tokens, as two likeliest tokens are never within rounding here."""

    pytestmark = on_gpu

    @pytest.mark.parametrize("name", sf.presets())
    def test_greedy(self, name: str) -> None:
        model = shake(tiny(name, **GPU_SIZES), scale=0.1).cuda()
        for prompts in ([[1, 2, 3]], RAGGED):
            recorded_and_ordinary(model, prompts, max_new_tokens=100, temperature=0, on_context_end="slide")

    @pytest.mark.parametrize("name", ["vanilla", "yurii", "adam", "linear-yurii"])
    @pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "top_k": 30}, {"top_p": 0.9}], ids=str)
    def test_sampling(self, name: str, how: dict[str, Any]) -> None:
        """The same seed draws the same numbers; probabilities differ by rounding, which moves hardly any draw."""
        model = shake(tiny(name, **GPU_SIZES), scale=0.1).cuda()
        for seed in (1, 2):
            recorded_and_ordinary(model, RAGGED, max_new_tokens=40, seed=seed, **how)

    def test_stops_and_many_rows(self) -> None:
        model = shake(tiny("yurii", **GPU_SIZES), scale=0.1).cuda()
        prompts = [[i + 1, 2] for i in range(7)]
        with kernels.off():
            free = model.generate(prompts, max_new_tokens=30, temperature=0)
        recorded_and_ordinary(model, prompts, max_new_tokens=30, temperature=0, stop=[row[9] for row in free.tokens])

    def test_a_recording_follows_the_weights(self) -> None:
        model = shake(tiny("tmm", **GPU_SIZES), scale=0.1).cuda()
        settings = {"max_new_tokens": 40, "temperature": 0}
        recorded_and_ordinary(model, [[1, 2]], **settings)
        first = decoding._kept[model]
        before = [p.data for p in model.parameters()]  # kept, so that the allocator cannot give it again
        shake(model.cpu(), seed=1, scale=0.1).cuda()
        assert before[0].data_ptr() != next(model.parameters()).data_ptr()
        recorded_and_ordinary(model, [[1, 2]], **settings)
        assert decoding._kept[model] is not first
        second = decoding._kept[model]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))  # in place: the same recording
        recorded_and_ordinary(model, [[1, 2]], **settings)
        assert decoding._kept[model] is second

    def test_two_streams_at_once(self) -> None:
        model = shake(tiny("yurii", **GPU_SIZES), scale=0.1).cuda()
        alone = [model.generate([[t]], max_new_tokens=30, temperature=0).tokens[0] for t in (1, 2)]
        both = list(zip(*(stream(model, [[t]], max_new_tokens=30, temperature=0) for t in (1, 2)), strict=True))
        assert [[step[i][0] for step in both] for i in range(2)] == alone

    def test_a_recording_does_not_keep_the_model(self) -> None:
        model = tiny("yurii", **GPU_SIZES).cuda()
        model.generate([[1]], max_new_tokens=20)
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None

    @pytest.mark.parametrize("name", ["vanilla", "yurii", "symplectic-euler", "adam", "symp-ab2", "entropy"])
    def test_bf16(self, name: str) -> None:
        model = tiny(name, **GPU_SIZES).cuda().to(torch.bfloat16)
        made = model.generate(RAGGED, max_new_tokens=30, seed=0)
        assert made.ordinary is None
        assert [len(row) for row in made.tokens] == [30, 30, 30]

    def test_what_cannot_be_recorded_takes_the_ordinary_way(self) -> None:
        model = tiny("symp-ab2", metric="derived", **GPU_SIZES).cuda()  # solves linear systems, which waits
        recorded = model.generate([[1, 2]], max_new_tokens=20, temperature=0)
        with kernels.off():
            assert recorded.tokens == model.generate([[1, 2]], max_new_tokens=20, temperature=0).tokens
