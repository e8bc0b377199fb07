"""Our models inside `transformers`: the same logits, and `generate` the same with a cache and without one.

Models are fp64, so that greedy choices cannot differ by rounding: cached and whole passes agree to about 1e-14, and
ties at that level do not occur in random models.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

pytest.importorskip("transformers")

import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

import stepformer as sf
from architectures import covering_presets
from decoded import ARCHITECTURES, lively
from draws import shifted
from helpers import shake, tiny, tokens
from stepformer.exchange.huggingface import StepformerCache, StepformerConfig, StepformerForCausalLM

transformers.utils.logging.disable_progress_bar()
TOLERANCE = 1e-10  # fp64, and sums in another order
WORDS = [[3, 1, 4], [1, 5, 8, 2, 6, 5], [7]]
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


def wrapped(name: str = "yurii", **overrides: Any) -> StepformerForCausalLM:
    model = shake(tiny(name, **{"context": 16, **overrides}))
    return StepformerForCausalLM.of(model).eval()


def padded(rows: list[list[int]], side: str = "left", pad: int = 0) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        fill = width - len(row)
        ids.append([pad] * fill + row if side == "left" else row + [pad] * fill)
        mask.append([0] * fill + [1] * len(row) if side == "left" else [1] * len(row) + [0] * fill)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("name", covering_presets())
def test_generate_with_cache_is_generate_without_is_ours(name: str) -> None:
    model = wrapped(name, real_vocab=9)
    batch = padded(WORDS)
    cached = model.generate(**batch, **GREEDY, max_new_tokens=6)
    assert torch.equal(cached, model.generate(**batch, **GREEDY, max_new_tokens=6, use_cache=False))
    assert cached[:, 6:].tolist() == model.model.generate(WORDS, temperature=0, max_new_tokens=6).tokens


@pytest.mark.parametrize("name", ["yurii", "linear-symp-conformal-euler", "kl-previous", "adam"])
def test_a_padded_batch_is_each_prompt_alone(name: str) -> None:
    model = wrapped(name)
    together = model.generate(**padded(WORDS), **GREEDY, max_new_tokens=9)[:, 6:].tolist()
    alone = [model.generate(**padded([row]), **GREEDY, max_new_tokens=9)[0, len(row) :].tolist() for row in WORDS]
    assert together == alone


@pytest.mark.parametrize("settings", [{"document_separator": 5}, {"value_tables": True}, {"embedding_skip": True}])
@pytest.mark.parametrize("name", ["vanilla", "linear-yurii"])
def test_generate_with_extras(name: str, settings: dict[str, Any]) -> None:
    model = wrapped(name, **settings)
    batch = padded(WORDS)
    cached = model.generate(**batch, **GREEDY, max_new_tokens=9)
    assert torch.equal(cached, model.generate(**batch, **GREEDY, max_new_tokens=9, use_cache=False))
    assert cached[:, 6:].tolist() == model.model.generate(WORDS, temperature=0, max_new_tokens=9).tokens


@pytest.mark.parametrize(
    "architecture",  # every third, the others slow: `test_beam.py` has them all
    [pytest.param(a, marks=[pytest.mark.slow] if i % 3 else []) for i, a in enumerate(ARCHITECTURES)],
    ids=lambda a: "-".join(map(str, a.values())),
)
def test_beams_with_cache_are_beams_without_are_ours(architecture: dict[str, Any]) -> None:
    """Comparable while no hypothesis ends early: rules for ended ones differ between the two libraries."""
    ours = lively(**architecture, real_vocab=9)
    model = StepformerForCausalLM.of(ours).eval()
    prompts = [[1], [2, 3, 4, 5, 6], [7, 8], [3, 2, 1]]
    settings = {**GREEDY, "num_beams": 4, "max_new_tokens": 7, "return_dict_in_generate": True, "output_scores": True}
    cached = model.generate(**padded(prompts), **settings)
    plain = model.generate(**padded(prompts), **settings, use_cache=False)
    assert torch.equal(cached.sequences, plain.sequences)
    search = ours.generate(prompts, beams=4, max_new_tokens=7)
    assert cached.sequences[:, 5:].tolist() == search.tokens
    greedy = ours.generate(prompts, temperature=0, max_new_tokens=7)
    assert search.tokens != greedy.tokens, "beams should overtake each other here"
    # their scores are kept in fp32: seven terms of a few units
    assert cached.sequences_scores.tolist() == pytest.approx(search.scores, abs=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["vanilla", "linear-symp-conformal-euler", "kl-previous"])
def test_logits_of_padded_rows_are_those_of_each_row_alone(name: str, side: str) -> None:
    model = wrapped(name)
    batch = padded(WORDS, side, pad=10)
    found = model(**batch).logits
    for row, logits, mask in zip(WORDS, found, batch["attention_mask"], strict=True):
        alone = model.model(torch.tensor([row])).logits[0]
        torch.testing.assert_close(logits[mask.bool()], alone, atol=TOLERANCE, rtol=0)
        assert not logits[~mask.bool()].any()


def test_padding_may_be_anywhere_and_its_id_need_not_exist() -> None:
    model = wrapped()
    ids = torch.tensor([[-1, 3, 99, 1, -100, 4]])
    mask = torch.tensor([[0, 1, 0, 1, 0, 1]])
    alone = model.model(torch.tensor([[3, 1, 4]])).logits[0]
    torch.testing.assert_close(model(ids, mask).logits[0, [1, 3, 5]], alone, atol=TOLERANCE, rtol=0)
    nothing = model(torch.tensor([[3, 1], [0, 0]]), torch.tensor([[1, 1], [0, 0]])).logits
    assert not nothing[1].any()


def test_generate_continues_prompts_padded_on_the_right() -> None:
    model = wrapped()
    made = model.generate(**padded(WORDS, "right"), **GREEDY, max_new_tokens=5)
    assert made[:, 6:].tolist() == model.model.generate(WORDS, temperature=0, max_new_tokens=5).tokens


@pytest.mark.parametrize("name", ["yurii", "linear", "symp-ab2"])
def test_a_cache_is_continued_by_forward(name: str) -> None:
    """Pieces of different length in every row, with padding in the second piece too."""
    model = wrapped(name)
    rows = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
    first, second = [row[:-1] for row in rows], [[row[-1], 7] if len(row) > 2 else [row[-1]] for row in rows]
    start, rest = padded(first), padded(second)
    with torch.no_grad():
        held = model(**start, use_cache=True)
    mask = torch.cat([start["attention_mask"], rest["attention_mask"]], dim=1)
    found = model(rest["input_ids"], attention_mask=mask, past_key_values=held.past_key_values)
    assert found.past_key_values.get_seq_length() == mask.shape[1]
    for i, (begin, end) in enumerate(zip(first, second, strict=True)):
        alone = model.model(torch.tensor([begin + end])).logits[0, len(begin) :]
        torch.testing.assert_close(found.logits[i, -len(end) :], alone, atol=TOLERANCE, rtol=0)


def test_a_cache_is_continued_by_generate_and_can_be_copied() -> None:
    model = wrapped()
    ids = torch.tensor([[3, 1, 4]])
    settings = {"do_sample": False, "max_new_tokens": 4}
    first = model.generate(ids, **settings, return_dict_in_generate=True)
    assert isinstance(first.past_key_values, StepformerCache)
    kept = copy.deepcopy(first.past_key_values)
    more = torch.cat([first.sequences, torch.tensor([[8, 8]])], dim=1)
    whole = model.generate(more, **settings)
    assert torch.equal(model.generate(more, **settings, past_key_values=first.past_key_values), whole)
    assert torch.equal(model.generate(more, **settings, past_key_values=kept), whole)


def test_a_prompt_may_be_read_in_chunks() -> None:
    model = wrapped()
    ids = tokens(2, 7)
    chunked = model.generate(ids, do_sample=False, max_new_tokens=4, prefill_chunk_size=3)
    assert torch.equal(chunked, model.generate(ids, do_sample=False, max_new_tokens=4))


def test_sampling_is_the_same_with_and_without_cache() -> None:
    model = wrapped("adam")
    batch, made = padded(WORDS), []
    for use_cache in (True, False):
        torch.manual_seed(shifted(5))
        settings = {"do_sample": True, "top_p": 0.95, "temperature": 1.3, "num_return_sequences": 3, "pad_token_id": 0}
        made.append(model.generate(**batch, **settings, max_new_tokens=8, use_cache=use_cache))
    assert torch.equal(*made)
    assert len({tuple(row) for row in made[0].tolist()}) > 3


def test_ids_that_pad_the_vocabulary_are_never_generated_but_have_logits() -> None:
    ours = shake(tiny("vanilla", context=16, real_vocab=7))
    with torch.no_grad():
        ours.embed.tok_emb.weight[7:] *= 30  # they would win most of the time
    model = StepformerForCausalLM.of(ours).eval()
    ids = tokens(8, 4, vocab=7)
    assert (model(ids).logits.argmax(dim=-1) >= 7).any()
    torch.manual_seed(shifted(0))
    for settings in ({"do_sample": False}, {"do_sample": True, "top_k": 0}, {"num_beams": 3, "do_sample": False}):
        made = model.generate(ids, **settings, max_new_tokens=8)
        assert int(made.max()) < 7, settings


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("beams", [1, 2])
def test_generation_ends_with_the_context(use_cache: bool, beams: int) -> None:
    model = wrapped(context=8)
    for length in (3, 8):  # a full context still has a next token
        made = model.generate(
            tokens(1, length), do_sample=False, num_beams=beams, max_new_tokens=50, use_cache=use_cache
        )
        assert made.shape == (1, 9)
    assert model.generate(tokens(1, 3), do_sample=False, num_beams=beams, use_cache=use_cache).shape[1] <= 9
    own = model.model.generate(tokens(1, 3).tolist(), temperature=0, max_new_tokens=50)
    assert own.finish == ["context"]
    if beams == 1:
        short = model.generate(tokens(1, 3), do_sample=False, max_new_tokens=50, use_cache=use_cache)
        assert short[0, 3:].tolist() == own.tokens[0]
    with pytest.raises(sf.InputError, match="9 tokens, but the model's context is 8"):
        model.generate(tokens(1, 9), **GREEDY, max_new_tokens=1)


def test_rows_end_at_the_end_of_text() -> None:
    model = wrapped()
    free = model.generate(**padded(WORDS), **GREEDY, max_new_tokens=8)
    stop = int(free[0, 8])
    made = model.generate(**padded(WORDS), do_sample=False, pad_token_id=0, eos_token_id=stop, max_new_tokens=8)
    own = model.model.generate(WORDS, temperature=0, max_new_tokens=8, stop=stop)
    assert "stop" in own.finish
    for row, expected in zip(made[:, 6:].tolist(), own.tokens, strict=True):
        assert row[: len(expected)] == expected
        assert not any(row[len(expected) :])


def test_labels_are_shifted_inside_and_gradients_are_the_models_own() -> None:
    model = wrapped("tmm").train()
    ids = tokens(3, 8)
    labels = ids.clone()
    labels[0, 3:5] = -100
    output = model(ids, labels=labels)
    output.loss.backward()
    found = {name: p.grad.clone() for name, p in model.model.named_parameters() if p.grad is not None}
    model.zero_grad()
    targets = torch.cat([labels[:, 1:], torch.full((3, 1), -100)], dim=1)
    loss = model.model(ids, targets).loss
    assert loss is not None
    loss.backward()
    torch.testing.assert_close(output.loss, loss, atol=1e-12, rtol=0)
    assert found.keys() == {name for name, p in model.model.named_parameters() if p.requires_grad}
    for name, p in model.model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, atol=1e-12, rtol=0)
    assert output.past_key_values is None
    counted = model(ids, labels=labels, num_items_in_batch=torch.tensor(10)).loss
    torch.testing.assert_close(counted, output.loss.detach() * int((labels[:, 1:] != -100).sum()) / 10)
    assert output.logits is None
    model.keep_logits = True
    kept = model(ids, labels=labels)
    torch.testing.assert_close(kept.loss, output.loss, atol=1e-12, rtol=0)
    assert kept.logits.shape == (3, 8, 11)
    with pytest.raises(sf.InputError, match="Labels have shape"):
        wrapped("tmm").train()(ids, labels=labels[:, 1:])


def test_a_cache_is_not_made_while_training() -> None:
    model = wrapped().train()
    output = model(tokens(), labels=tokens(), use_cache=True)
    assert output.past_key_values is None
    assert output.loss.requires_grad
    assert model.eval()(tokens(), use_cache=True).past_key_values is not None


def test_padding_neither_tells_nor_learns() -> None:
    """A padded column before a row's first token must not have seen that row."""
    model = wrapped()
    batch = padded(WORDS)
    output = model(**batch, labels=batch["input_ids"])
    whole = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    torch.testing.assert_close(output.loss, whole)
    parts = [model(torch.tensor([row]), labels=torch.tensor([row])).loss * (len(row) - 1) for row in WORDS[:2]]
    uniform = torch.log(torch.tensor(11.0, dtype=torch.float64)) * (15 - 2 - 5)  # what a column of zeros costs
    torch.testing.assert_close(output.loss * 15, parts[0] + parts[1] + uniform, atol=TOLERANCE, rtol=0)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    model = wrapped("soap").train()
    grads = []
    for _ in range(2):
        model.zero_grad()
        model(tokens(), labels=tokens()).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


OWN_HEAD = {"head": "untied", "mlp": "relu2", "output_init": "zero", "value_tables": True}


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, {}) for name in ("symp-etd-ab2", "kl-carried", "imex-ln-k2-mam", "adamw")), ("tables", OWN_HEAD)],
)
def test_saved_and_loaded_again(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = wrapped(name, **settings)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is StepformerForCausalLM
    assert loaded.model.config == model.model.config
    assert loaded.config.tie_word_embeddings is (settings.get("head") != "untied")
    assert loaded.get_output_embeddings() is loaded.model.lm_head
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    frozen = {n for n, p in loaded.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, p in model.named_parameters() if not p.requires_grad}
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        tables = [name for name in file.keys() if "tok_emb" in name]  # noqa: SIM118
    assert len(tables) == 1 + len(model.model.aux_embed), "the tied table is stored once"


def test_dtypes_and_shards(tmp_path: Path) -> None:
    model = wrapped("yurii")
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    logits = model(tokens()).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)(tokens()).logits, logits)
    single = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single(tokens()).logits.double(), logits, atol=1e-4, rtol=0)  # fp32 has 1e-7 a step
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half(tokens()).logits.dtype == torch.bfloat16
    # 8 bits of mantissa through four oracle calls: a few per cent of the largest logit
    assert (half(tokens()).logits.double() - logits).abs().max() < 0.1 * logits.abs().max()
    assert half.generate(tokens(), **GREEDY, max_new_tokens=4).shape == (2, 12)


def test_a_config_is_checked_as_everywhere() -> None:
    config = StepformerConfig(template="nesterov", splitting="imex", k=2, hidden_size=24, num_attention_heads=3)
    assert (config.d_model, config.options) == (24, {"k": 2})
    assert config.model_config() == sf.ModelConfig.from_dict(
        {"template": "nesterov", "splitting": "imex", "k": 2, "d_model": 24, "n_head": 3}
    )
    with pytest.raises(sf.ConfigError, match=r"Unknown template 'nestrov'.*\n.*n_head = 5 does not divide d_model"):
        StepformerConfig(n_head=5, template="nestrov")
    again = StepformerConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))
    assert again.model_config() == config.model_config()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    wrapped("vanilla").save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"template": "gd"', '"template": "nesterov"'))
    with pytest.raises(sf.InputError, match="belong to another model: it lacks 'model"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"inputs_embeds": torch.zeros(1, 2, 12)}, "reads `input_ids`"),
    ({"input_ids": tokens(), "position_ids": tokens()}, "does not take `position_ids`"),
    ({"input_ids": tokens(), "output_hidden_states": True}, "does not take `output_hidden_states`"),
    ({"input_ids": tokens(), "attention_mask": torch.ones(2, 3)}, "one column for each token"),
    ({"input_ids": tokens(), "labels": tokens(1)}, "Labels have shape"),
    ({"input_ids": tokens(), "labels": tokens().float()}, "Labels should be a tensor of integers"),
    ({"input_ids": tokens(), "labels": tokens().bool()}, "Labels should be a tensor of integers"),
    ({"input_ids": tokens().float()}, "input_ids should be a tensor of integers"),
    ({"input_ids": tokens(), "past_key_values": ((),)}, "should be the StepformerCache"),
    ({"input_ids": tokens(1, 2), "attention_mask": torch.zeros(1, 2), "use_cache": True}, "padding only"),
    ({"input_ids": tokens(1, 17)}, "the model's context is 16"),
]


@pytest.mark.parametrize(("inputs", "sentence"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_a_forward_pass_refuses(inputs: dict[str, Any], sentence: str) -> None:
    for training in (False, True) if "labels" in inputs else (False,):
        with pytest.raises(sf.InputError, match=sentence):
            wrapped().train(training)(**inputs)


@pytest.mark.parametrize("training", [False, True])
def test_unsigned_ids_and_labels(training: bool) -> None:
    model, ids = wrapped().train(training), tokens()
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    for more in ({}, {"attention_mask": mask}):
        expected = model(ids, labels=ids, **more).loss
        assert model(ids.to(torch.uint16), labels=ids.to(torch.uint16), **more).loss == expected


def test_what_else_is_refused() -> None:
    model = wrapped()
    with pytest.raises(sf.InputError, match="keeps its vocabulary of 11 ids; 20 were asked for"):
        model.resize_token_embeddings(20)
    assert model.resize_token_embeddings(11) is model.get_input_embeddings()
    with pytest.raises(sf.InputError, match="brings its own cache"):
        model.generate(tokens(), **GREEDY, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(sf.InputError, match="should be the StepformerCache"):
        model.generate(tokens(), **GREEDY, max_new_tokens=2, past_key_values=transformers.DynamicCache())
    with pytest.raises(sf.InputError, match="cannot forget its last tokens"):
        StepformerCache().crop(1)
    with pytest.raises(ValueError, match="typo_of_an_argument"):
        model.generate(tokens(), **GREEDY, max_new_tokens=2, typo_of_an_argument=1)


IGNORED: list[tuple[dict[str, Any], str]] = [
    ({"output_attentions": True}, "does not take `output_attentions`: `model.model.observe"),
    ({"output_hidden_states": True}, "does not take `output_hidden_states`: "),
    ({"position_ids": tokens()}, "does not take `position_ids`: positions are counted"),
    ({"is_causal": True}, "does not take `is_causal`"),
]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("words", "sentence"), IGNORED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_generate_would_ignore_is_refused(words: dict[str, Any], sentence: str, use_cache: bool) -> None:
    model = wrapped()
    for more in ({"num_beams": 2}, {"return_dict_in_generate": True}):
        with pytest.raises(sf.InputError, match=sentence):
            model.generate(tokens(), **GREEDY, max_new_tokens=2, use_cache=use_cache, **more, **words)
    with pytest.raises(sf.InputError, match=sentence):
        model(tokens(), **words)


@pytest.mark.parametrize("key", ["output_attentions", "output_hidden_states"])
def test_what_a_config_asks_for_is_not_ignored_either(key: str) -> None:
    model = wrapped()
    setattr(model.config, key, True)
    for words in ({}, {key: None}):
        with pytest.raises(sf.InputError, match=f"does not take `{key}`"):
            model(tokens(), **words)
    assert model(tokens(), **{key: False}).logits.shape == (2, 8, 11)
    setattr(model.config, key, False)
    given = GenerationConfig(max_new_tokens=2, do_sample=False, return_dict_in_generate=True, **{key: True})
    with pytest.raises(sf.InputError, match=f"does not take `{key}`"):
        model.generate(tokens(), generation_config=given)


def test_a_generation_config_of_ones_own_keeps_everything() -> None:
    model = wrapped(real_vocab=9)
    given = GenerationConfig(max_new_tokens=4, do_sample=False)
    made = model.generate(tokens(vocab=9), generation_config=given)
    assert made[:, 8:].tolist() == model.model.generate(tokens(vocab=9), temperature=0, max_new_tokens=4).tokens


ROWS = [{"input_ids": row, "labels": row} for row in tokens(16, 8, seed=1)]


def trainer_of(model: Any, folder: Path, **changes: Any) -> transformers.Trainer:
    """A Trainer that learns sixteen fixed rows by heart."""
    pytest.importorskip("accelerate")
    settings: dict[str, Any] = {
        **{"output_dir": str(folder), "max_steps": 30, "per_device_train_batch_size": 8, "save_strategy": "no"},
        **{"learning_rate": 1e-2, "lr_scheduler_type": "constant", "disable_tqdm": True, "report_to": []},
    }
    arguments = transformers.TrainingArguments(use_cpu=True, **{**settings, **changes})
    return transformers.Trainer(model=model, args=arguments, train_dataset=ROWS)


@torch.no_grad()
def loss_of_rows(model: Any) -> float:
    return float(model(**{key: torch.stack([row[key] for row in ROWS]) for key in ("input_ids", "labels")}).loss)


ACCUMULATED = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}
SMOOTHED = {"label_smoothing_factor": 0.1}
WAYS = [ACCUMULATED, SMOOTHED, pytest.param({**ACCUMULATED, **SMOOTHED, "bf16": True}, marks=pytest.mark.slow)]


@pytest.mark.parametrize("changes", WAYS, ids=lambda x: "-".join(x))
def test_trainer_trains(changes: dict[str, Any], tmp_path: Path) -> None:
    model = StepformerForCausalLM.of(tiny("yurii", context=8, dtype=torch.float32))
    before = loss_of_rows(model)
    trainer_of(model, tmp_path, **changes).train()
    assert model.is_gradient_checkpointing == ("gradient_checkpointing" in changes)
    assert loss_of_rows(model) < before - 0.5, before


def smoothed(model: Any, epsilon: float, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(1 - e) (-ln p of the label) + e (mean over the vocabulary of -ln p), of every label given what stands before."""
    found = []
    for row, wanted in zip(model(ids).logits, labels, strict=True):
        for place, label in enumerate(wanted[1:].tolist()):
            if label != -100:
                p = -torch.log_softmax(row[place], dim=-1)
                found.append((1 - epsilon) * p[label] + epsilon * p.mean())
    return torch.stack(found).mean()


@pytest.mark.parametrize("adapter", [False, True], ids=["model", "adapter"])
def test_trainer_smooths_the_labels_of_next_tokens(adapter: bool, tmp_path: Path) -> None:
    model: Any = wrapped()
    if adapter:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    labels = tokens().clone()
    labels[0, 2:4] = -100
    trainer = trainer_of(model, tmp_path, label_smoothing_factor=0.2)
    found = trainer.compute_loss(model, {"input_ids": tokens(), "labels": labels})
    expected = smoothed(model, 0.2, tokens(), labels)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)  # Trainer sums over the vocabulary in fp32


@pytest.mark.parametrize("name", ["yurii", pytest.param("symp-ab2", marks=pytest.mark.slow)])
def test_a_resumed_trainer_ends_with_the_weights_of_one_that_never_stopped(name: str, tmp_path: Path) -> None:
    changes = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "label_smoothing_factor": 0.1}
    ended = []
    for start in (None, str(tmp_path / "checkpoint-3")):
        model = StepformerForCausalLM.of(tiny(name, context=8, dtype=torch.float32, seed=0 if start is None else 1))
        trainer_of(model, tmp_path, **changes).train(resume_from_checkpoint=start)
        ended.append(model.state_dict())
    assert ended[0].keys() == ended[1].keys()
    assert all(torch.equal(ended[0][key], ended[1][key]) for key in ended[0])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    assert torch.equal(loaded(tokens()).logits, StepformerForCausalLM.eval(model)(tokens()).logits)


def run(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Another Python, offline, in a folder, with this source."""
    source = str(Path(sf.__file__).resolve().parents[1])
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_loading_without_importing_us_first(tmp_path: Path) -> None:
    """`trust_remote_code` runs the two-line file of the folder, which finds the installed package."""
    model = wrapped("muon")
    model.save_pretrained(tmp_path / "folder")
    torch.save(model(tokens()).logits, tmp_path / "logits.pt")
    torch.save(tokens(), tmp_path / "tokens.pt")
    code = (
        "import torch; from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('folder', trust_remote_code=True)\n"
        "assert torch.equal(model(torch.load('tokens.pt')).logits, torch.load('logits.pt'))\n"
        "model.save_pretrained('again')\n"
        "from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal\n"
        "assert model._get_name() in causal.values()\n"
    )
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    listed = {path.name for path in (tmp_path / "again").iterdir()}
    assert listed == {path.name for path in (tmp_path / "folder").iterdir()}
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "folder" / "config.json").read_text()
    assert (tmp_path / "again" / "modeling_stepformer.py").read_text().count("import") == 1


def test_the_package_and_the_command_line_do_without_transformers(tmp_path: Path) -> None:
    code = (
        "import sys, stepformer, stepformer.exchange.importing, stepformer.cli\n"
        "assert 'transformers' not in sys.modules\n"
        "sys.modules['transformers'] = None\n"
        "try: stepformer.cli.main(['export', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(stepformer.cli.main(['export', 'run', '--out', 'x']))"
    )
    done = run(code, tmp_path)
    assert done.returncode == 2, done.stderr
    assert "pip install 'stepformer[hub]'" in done.stderr
    assert "Traceback" not in done.stderr
