"""Beam search equals a naive one without a cache, and the truth where all continuations can be listed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import stepformer as sf
from decoded import ARCHITECTURES, lively
from draws import shifted
from helpers import shake, tiny
from runs import make_corpus, small_run
from stepformer.cli import main
from stepformer.training import load_run, train

PROMPTS = [[1], [2, 3, 4, 5, 6], [7, 8], [3, 2, 1]]
TOLERANCE = 1e-9


def log_probabilities(model: sf.Model, row: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits[0, -1, : model.config.real_vocab]
    return logits.log_softmax(dim=0).tolist()


def score_of(model: sf.Model, prompt: list[int], tokens: list[int], penalty: float) -> float:
    total = sum(log_probabilities(model, prompt + tokens[:i])[token] for i, token in enumerate(tokens))
    return total / len(tokens) ** penalty


def naive(
    model: sf.Model, prompt: list[int], beams: int, penalty: float, n: int, stops: set[int]
) -> tuple[list[int], float]:
    """The definition, one prompt at a time, everything recomputed in every step."""
    growing: dict[tuple[int, ...], float] = {(): 0.0}
    ended: dict[tuple[int, ...], float] = {}
    while growing:
        candidates = {
            (*tokens, token): total + p
            for tokens, total in growing.items()
            for token, p in enumerate(log_probabilities(model, prompt + list(tokens)))
        }
        growing = {}
        for tokens in sorted(candidates, key=lambda c: candidates[c], reverse=True)[: beams - len(ended)]:
            over = tokens[-1] in stops or len(tokens) == n or len(prompt) + len(tokens) > model.config.context
            (ended if over else growing)[tokens] = candidates[tokens]
    scores = {tokens: total / len(tokens) ** penalty for tokens, total in ended.items()}
    best = max(scores, key=lambda t: scores[t])
    return list(best), scores[best]


def assert_same(found: sf.generation.Generation, expected: list[tuple[list[int], float]]) -> None:
    assert found.tokens == [tokens for tokens, _ in expected]
    assert found.scores == pytest.approx([score for _, score in expected], abs=TOLERANCE, rel=0)


# rows that solve a problem are searched among the slow tests
QUICKER = [pytest.param(a, marks=pytest.mark.slow if a["name"].startswith("kl") else []) for a in ARCHITECTURES]


@pytest.mark.parametrize(
    ("beams", "penalty", "stop"),
    [
        (3, 0.0, 4),
        (5, 1.0, [0, 9]),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1.0, None), (14, 2.0, 4))),
    ],
)
@pytest.mark.parametrize("architecture", QUICKER, ids=lambda a: "-".join(map(str, a.values())))
def test_equals_a_naive_search(architecture: dict[str, Any], beams: int, penalty: float, stop: Any) -> None:
    model = lively(**architecture)
    found = model.generate(PROMPTS, beams=beams, length_penalty=penalty, max_new_tokens=7, stop=stop)
    stops = set(stop) if isinstance(stop, list) else {stop}
    assert_same(found, [naive(model, prompt, beams, penalty, 7, stops) for prompt in PROMPTS])


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: "-".join(map(str, a.values())))
def test_the_comparison_has_teeth(architecture: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams do overtake each other here: a memory that keeps its order gives something else."""
    model = lively(**architecture)
    search = lambda: model.generate(PROMPTS, beams=5, max_new_tokens=7)  # noqa: E731
    right, greedy = search(), model.generate(PROMPTS, max_new_tokens=7, temperature=0)
    assert right.tokens != greedy.tokens
    kinds = {type(slot) for layer in model.new_cache(1).slots for slot in layer}
    for kind in kinds:
        select = kind.select
        monkeypatch.setattr(kind, "select", lambda slot, rows, select=select: select(slot, rows.sort().values))
    assert search().scores != pytest.approx(right.scores, abs=1e-6, rel=0)


def test_the_second_memory_of_a_block_is_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively(name="verlet-ama")
    right = model.generate(PROMPTS, beams=5, max_new_tokens=7)
    new_cache = sf.Model.new_cache

    def spoilt(self: sf.Model, *args: Any) -> Any:
        cache = new_cache(self, *args)
        for _, second in cache.slots:
            second.select = lambda rows, select=second.select: select(rows.sort().values)
        return cache

    monkeypatch.setattr(sf.Model, "new_cache", spoilt)
    assert model.generate(PROMPTS, beams=5, max_new_tokens=7).scores != pytest.approx(right.scores, abs=1e-6, rel=0)


@pytest.mark.parametrize("stop", [None, 3])
def test_one_beam_is_greedy(stop: int | None) -> None:
    model = lively(context=8)
    found = model.generate(PROMPTS, beams=1, max_new_tokens=7, stop=stop)
    greedy = model.generate(PROMPTS, temperature=0, max_new_tokens=7, stop=stop)
    assert (found.tokens, found.finish) == (greedy.tokens, greedy.finish)
    assert {"length", "context"} <= set(found.finish)
    assert ("stop" in found.finish) == (stop is not None)
    scores = [score_of(model, prompt, tokens, 1.0) for prompt, tokens in zip(PROMPTS, greedy.tokens, strict=True)]
    assert found.scores == pytest.approx(scores, abs=TOLERANCE, rel=0)
    assert greedy.scores == []


@pytest.mark.parametrize("penalty", [-1.0, 0.7, *(pytest.param(p, marks=pytest.mark.slow) for p in (0.0, 1.0, 2.0))])
@pytest.mark.parametrize("stops", [(), (2,)])
def test_enough_beams_find_the_truth(penalty: float, stops: tuple[int, ...]) -> None:
    """With V**n beams nothing is lost: the best of all continuations, listed one by one."""
    model, vocab, n = lively(vocab_size=4), 4, 3
    prompts = [[1], [3, 0, 2], [0, 0]]
    found = model.generate(prompts, beams=vocab**n, length_penalty=penalty, max_new_tokens=n, stop=stops)
    for prompt, tokens, score in zip(prompts, found.tokens, found.scores, strict=True):
        texts = [
            list(text)
            for length in range(1, n + 1)
            for text in itertools.product(range(vocab), repeat=length)
            if not set(text[:-1]) & set(stops) and (length == n or text[-1] in stops)
        ]
        scores = [score_of(model, prompt, text, penalty) for text in texts]
        assert tokens == texts[scores.index(max(scores))]
        assert score == pytest.approx(max(scores), abs=TOLERANCE, rel=0)


def test_more_beams_find_more_than_greedy_and_the_penalty_prefers_length() -> None:
    model = lively(vocab_size=4)
    prompts = [[a, b] for a in range(4) for b in range(4)]
    few, many = (model.generate(prompts, beams=k, length_penalty=0.0, max_new_tokens=3) for k in (1, 64))
    gains = [b - a for a, b in zip(few.scores, many.scores, strict=True)]
    assert min(gains) >= -TOLERANCE
    assert max(gains) > 0.01
    lengths = [
        sum(map(len, model.generate(prompts, beams=64, length_penalty=p, max_new_tokens=3, stop=2).tokens))
        for p in (-1.0, 0.0, 1.0, 2.0)
    ]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


@pytest.mark.parametrize("form", [int, lambda t: [t], lambda t: torch.tensor([t])])
def test_a_stop_token_ends_a_beam_and_not_the_others(form: Any) -> None:
    model, stop = lively(), 1
    found = model.generate(PROMPTS, beams=3, max_new_tokens=8, stop=form(stop), length_penalty=0.0)
    assert_same(found, [naive(model, prompt, 3, 0.0, 8, {stop}) for prompt in PROMPTS])
    assert set(found.finish) == {"stop", "length"}
    for tokens, finish in zip(found.tokens, found.finish, strict=True):
        assert stop not in tokens[:-1]
        assert (tokens[-1] == stop) == (finish == "stop")
        assert finish == "stop" or len(tokens) == 8


def test_a_batch_is_each_prompt_alone() -> None:
    model = lively(context=8)
    whole = model.generate(PROMPTS, beams=4, max_new_tokens=6, stop=4)
    for b, prompt in enumerate(PROMPTS):
        alone = model.generate(prompt, beams=4, max_new_tokens=6, stop=4)
        assert (alone.tokens[0], alone.finish[0]) == (whole.tokens[b], whole.finish[b])
        assert alone.scores[0] == pytest.approx(whole.scores[b], abs=TOLERANCE, rel=0)


def test_context_end_stops_long_prompts_and_lets_short_ones_finish() -> None:
    model = lively(context=8)
    prompts = [[1, 2, 3, 4, 5, 6], [1], list(range(8)), [1, 2]]
    found = model.generate(prompts, beams=4, max_new_tokens=7)
    assert found.finish == ["context", "length", "context", "length"]
    assert list(map(len, found.tokens)) == [3, 7, 1, 7]  # as in sampling: one token beyond the context
    assert_same(found, [naive(model, prompt, 4, 1.0, 7, set()) for prompt in prompts])


def test_padded_ids_do_not_exist() -> None:
    model = shake(tiny("vanilla", real_vocab=5))
    with torch.no_grad():
        model.embed.tok_emb.weight[5:] *= 1000  # their logits dwarf the others, of both signs
    prompts = [[1], [2, 3]]
    found = model.generate(prompts, beams=8, max_new_tokens=6)
    assert all(token < 5 for row in found.tokens for token in row)
    assert_same(found, [naive(model, prompt, 8, 1.0, 6, set()) for prompt in prompts])


def test_nothing_is_random_and_nothing_is_left_behind() -> None:
    model = lively(dtype=torch.float32).train()
    state = torch.get_rng_state()
    first = model.generate(PROMPTS, beams=4, max_new_tokens=9)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(shifted(1))
    assert model.generate(PROMPTS, beams=4, max_new_tokens=9) == first
    assert model.training


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"beams": 0}, "beams = 0 should be an integer, at least 1"),
        ({"beams": -2}, "beams = -2"),
        ({"beams": 2.0}, "beams = 2.0"),
        ({"beams": 2, "length_penalty": float("nan")}, "length_penalty = nan should lie between"),
        ({"beams": 2, "length_penalty": 11}, "length_penalty = 11"),
        ({"length_penalty": 0.5}, "needs `beams`"),
        ({"beams": 2, "temperature": 0.0}, "draws nothing"),
        ({"beams": 2, "top_k": 3}, "draws nothing"),
        ({"beams": 2, "top_p": 0.5}, "draws nothing"),
        ({"beams": 2, "seed": 1}, "draws nothing"),
        ({"beams": 2, "on_context_end": "slide"}, "cannot slide"),
        ({"beams": 2, "on_context_end": "wrap"}, "on_context_end = 'wrap'"),
        ({"beams": 2, "max_new_tokens": 0}, "max_new_tokens = 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(sf.InputError, match=sentence):
        tiny().generate([1], **settings)


def test_bad_prompts_and_logits_are_refused() -> None:
    model = tiny()
    for prompts, sentence in (([[1], []], "at least one token"), ([99], "id 99"), (list(range(9)), "context is 8")):
        with pytest.raises(sf.InputError, match=sentence):
            model.generate(prompts, beams=2)
    with torch.no_grad():
        model.final_norm.weight[0] = float("nan")
    with pytest.raises(sf.StepformerError, match="not finite"):
        model.generate([1], beams=2)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, folder = make_corpus(tmp_path / "corpus", count=4).folder, tmp_path / "run"
    train(small_run(data, context=32), folder)
    command = ["generate", str(folder), "Once", "--tokens", "20", "--device", "cpu"]
    capsys.readouterr()
    assert main([*command, "--beams", "3"]) == 0
    printed = capsys.readouterr().out
    run = load_run(folder, "best", "cpu")
    ids = [run.tokenizer.eot, *run.tokenizer.encode("Once")]
    found = run.model.generate([ids], beams=3, max_new_tokens=20, stop=run.tokenizer.eot)
    new = run.tokenizer.decode([token for token in found.tokens[0] if token != run.tokenizer.eot])
    assert printed == f"Once{new.rstrip(chr(0xFFFD))}\n"
    assert len(new) > 3
    for more, sentence in (
        (["--beams", "0"], "beams = 0"),
        (["--beams", "2", "--temperature", "0.8"], "draws nothing"),
        (["--beams", "2", "--seed", "1"], "draws nothing"),
        (["--beams", "2", "--samples", "2"], "--samples 2 does not go with --beams"),
    ):
        assert main([*command, *more]) == 2
        said = capsys.readouterr()
        assert sentence in said.err
        assert said.out == ""
