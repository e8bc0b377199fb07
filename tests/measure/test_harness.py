"""The adapter gives the numbers of the harness's own Hugging Face backend, and of a loop over tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stepformer as sf
from draws import shifted
from helpers import shake
from real_data import GPT2
from runs import make_corpus, small_run
from scoring_loop import REAL_TASKS, naive, needs_tasks
from stepformer.cli import main
from stepformer.data.tokenizers import ByteTokenizer, gpt2_tokenizer
from stepformer.measure.evaluation import tasks
from stepformer.measure.evaluation.adapter import Generating, adapter
from stepformer.measure.evaluation.harness import settled
from stepformer.measure.evaluation.scoring import Scorer, scorer_of
from stepformer.training import load_run, train

pytest.importorskip("lm_eval", reason="needs the extra eval")

EXACT = 1e-11  # two fp64 evaluations of one function in different shapes


def request(*args: Any) -> Any:
    """What the harness hands to a model, as far as a model looks at it."""
    return SimpleNamespace(args=args)


def bytes_model(name: str = "yurii", **changes: Any) -> sf.Model:
    """A byte-level model, fp64, with weights far from their start."""
    sizes = {"n_layer": 2, "n_head": 2, "d_model": 16, "context": 24, "vocab_size": 257, **changes}
    return shake(sf.build(name, seed=0, dtype=torch.float64, **sizes))


# against the harness's Hugging Face backend


@pytest.fixture(scope="module")
def twins() -> Iterator[tuple[Any, Any]]:
    """One set of weights twice: as our model behind our adapter, and as a GPT-2 of transformers behind HFLM."""
    transformers = pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    context = 256
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=context, vocab_size=50257)
    torch.manual_seed(shifted(0))
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ours = sf.build(
        *("gd-lie-trotter",),
        **{"n_layer": 2, "n_head": 2, "d_model": 32, "context": context, "vocab_size": 50257},
        **{"bias": True, "mlp": "gelu-tanh", "seed": 0},
    )
    names = {"blocks.": "h.", "embed.tok_emb": "wte", "embed.pos_emb": "wpe", "final_norm": "ln_f"}
    names |= {"attn.qkv": "attn.c_attn", "attn.out": "attn.c_proj", "attn_norm": "ln_1", "mlp_norm": "ln_2"}
    names |= {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # likelihoods of choices differ by whole nats
        weights = theirs.transformer.state_dict()
        for name, parameter in ours.named_parameters():
            for word, other in names.items():
                name = name.replace(word, other)
            parameter.copy_(weights[name].T if ".c_" in name and name.endswith("weight") else weights[name])
    bpe = Tokenizer(models.BPE.from_file(str(GPT2 / "encoder.json"), str(GPT2 / "vocab.bpe")))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    end = "<|endoftext|>"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=end, eos_token=end)
    with settled(quiet=True):
        backend = HFLM(pretrained=theirs, tokenizer=tokenizer, batch_size=8, max_length=context)
        yield adapter()(Scorer(ours), gpt2_tokenizer(str(GPT2))), backend


def agree(ours: Any, theirs: Any, name: str, shots: int, items: int) -> None:
    """Both models on the same requests of a task: every log-likelihood and every choice."""
    with settled(quiet=True), tasks.open_task(name, REAL_TASKS) as opened:
        (task,) = opened.objects
        task.set_config("num_fewshot", shots)
        task.set_fewshot_seed(1234)
        task.build_all_requests(limit=items)
        mine, other = ours.loglikelihood(task.instances), theirs.loglikelihood(task.instances, disable_tqdm=True)
    documents = [instance.doc_id for instance in task.instances]
    assert len(set(documents)) == items
    assert len({round(value, 2) for value, _ in mine}) > items  # not a model to which all is one
    # fp32 sums over up to 100 tokens in another order; 7e-5 was the largest difference seen
    assert max(abs(a - b) for (a, _), (b, _) in zip(mine, other, strict=True)) <= 1e-3
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in other]
    for lengths in (None, [len(instance.args[1]) for instance in task.instances]):  # acc and acc_norm
        chosen = []
        for found in (mine, other):
            best: dict[int, tuple[float, int]] = {}
            for i, (value, _) in enumerate(found):
                score = value if lengths is None else value / lengths[i]
                if documents[i] not in best or score > best[documents[i]][0] + 1e-5:  # ARC has items with equal choices
                    best[documents[i]] = (score, i)
            chosen.append({document: i for document, (_, i) in best.items()})
        assert chosen[0] == chosen[1]


@needs_tasks
@pytest.mark.parametrize(
    ("name", "shots", "items"),
    [
        pytest.param("hellaswag", 0, 25, marks=pytest.mark.slow),
        ("arc_easy", 0, 40),
        pytest.param("arc_easy", 10, 8, marks=pytest.mark.slow),
    ],
)
def test_scores_are_those_of_the_hugging_face_backend(
    twins: tuple[Any, Any], name: str, shots: int, items: int
) -> None:
    agree(*twins, name, shots, items)


@needs_tasks
def test_rolling_and_generation_are_those_of_the_hugging_face_backend(twins: tuple[Any, Any]) -> None:
    ours, theirs = twins
    long = "The quick brown fox jumps over the lazy dog, and the dog sleeps. " * 40  # about three windows
    for text in (long, "short", " a"):
        mine, other = (m.loglikelihood_rolling([request(text)], disable_tqdm=True)[0] for m in twins)
        assert mine == pytest.approx(other, abs=1e-2)  # 600 tokens in fp32
    for settings in ({"until": ["\n\n"], "max_gen_toks": 12}, {"until": [" the", "e"], "max_gen_toks": 12}):
        asked = [request(prompt, settings) for prompt in ("Question: why?\nAnswer:", long, "One")]
        assert ours.generate_until(asked) == [
            theirs.generate_until([each], disable_tqdm=True)[0]
            for each in asked  # alone, hence without padding
        ]


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A trained run behind our adapter, and its export, loaded by the harness by its folder's name."""
    pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    from stepformer.exchange.huggingface import export_run

    folder = tmp_path_factory.mktemp("shared")
    make_corpus(folder / "tales", count=200, tokenizer="bpe:1024")
    # rates at which the few steps move the choices apart
    sizes = {"context": 512, "batch": 4, "steps": 20, "precision": "fp32", "eval_every": 20, "eval_tokens": 512}
    rates = {"lr_embedding": 0.1, "lr_norm": 0.1, "lr": 0.2}
    train(small_run(folder / "tales", "triple-momentum", **sizes, **rates), folder / "run", quiet=True)
    export_run(folder / "run", folder / "exported")
    run = load_run(folder / "run")
    with settled(quiet=True):
        backend = HFLM(pretrained=str(folder / "exported"), device="cpu", dtype="float32", batch_size=8)
        assert backend.max_length == 512
        yield adapter()(scorer_of(run), run.tokenizer), backend


@needs_tasks
@pytest.mark.parametrize("items", [30, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "shots"),
    [
        pytest.param("hellaswag", 0, marks=pytest.mark.slow),
        pytest.param("hellaswag", 10, marks=pytest.mark.slow),
        ("arc_easy", 10),
        pytest.param("arc_easy", 0, marks=pytest.mark.slow),
    ],
)
def test_items_score_alike_in_the_run_and_its_export(
    shared_run: tuple[Any, Any], name: str, shots: int, items: int
) -> None:
    """Prompts with ten shots are longer than the context: both cut them at the same place."""
    agree(*shared_run, name, shots, items)


@pytest.mark.slow
def test_the_harness_s_own_command_gives_the_numbers_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lm_eval` on an exported folder, which it loads as remote code, and `stepformer eval` on the run."""
    pytest.importorskip("transformers")
    from stepformer.exchange.huggingface import export_run

    monkeypatch.chdir(tmp_path)
    make_corpus(tmp_path / "tales")
    train(small_run(tmp_path / "tales", context=256, steps=30, precision="fp32", lr=0.1), tmp_path / "run", quiet=True)
    export_run(tmp_path / "run", tmp_path / "exported")
    words = ["fox", "queen", "robot", "river", "mill", "girl", "boat", "owl", "cart", "moon", "bell", "king"]
    rows = [
        {"q": f"Once upon a time a {a}", "c": [" was", f" {a}", " and the"], "g": i % 3} for i, a in enumerate(words)
    ]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[8:]))
    files = {"data_files": {split: f"{split}.jsonl" for split in ("train", "test")}}
    common: dict[str, Any] = {"dataset_path": "json", "dataset_kwargs": files, "doc_to_text": "{{q}}"}
    common |= {"training_split": "train", "test_split": "test"}
    choice = {"output_type": "multiple_choice", "doc_to_choice": "c", "doc_to_target": "{{g}}"}
    choice |= {"metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
    word = {"output_type": "loglikelihood", "doc_to_target": "{{c[g]}}", "metric_list": [{"metric": "perplexity"}]}
    for name, kind in (("choice", choice), ("word", word)):
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **kind}))
    assert main(["eval", "run", "--tasks", "choice.yaml,word.yaml", "--shots", "0,2", "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)["tasks"]["tasks"]
    source = str(Path(sf.__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    for shots in (0, 2):
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--tasks", "choice.yaml,word.yaml"]
        command += ["--model_args", "pretrained=exported,dtype=float32,trust_remote_code=True", "--device", "cpu"]
        command += ["--num_fewshot", str(shots), "--batch_size", "4", "--output_path", f"out-{shots}.json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (path,) = tmp_path.glob(f"out-{shots}*.json")
        theirs = json.loads(path.read_text())["results"]
        for metric in ("acc", "acc_norm"):
            assert theirs["choice"][f"{metric},none"] == ours[f"choice@{shots}"][metric]
        # the exponential of a mean of log-likelihoods of a few tokens in fp32, each to 1e-5 or better
        found, expected = ours[f"word@{shots}"]["perplexity"], theirs["word"]["perplexity,none"]
        assert found == pytest.approx(expected, rel=1e-4)
    assert ours["word@0"]["perplexity"] != pytest.approx(ours["word@2"]["perplexity"], rel=1e-3)


# against a token-by-token loop


@pytest.mark.parametrize("name", ["yurii", "kl", "linear"])
def test_log_likelihoods_are_a_loop_over_tokens(name: str) -> None:
    model, tokenizer = bytes_model(name), ByteTokenizer()
    asked = [("ab", " cd"), ("", "xyz"), ("a question? ", "yes"), ("abc " * 9, "dd"), ("q", "e" * 24)]
    rows = [
        (b"ab", b" cd"),
        ([256], b"xyz"),
        (b"a question?", b" yes"),  # a blank goes with the word after it
        (b"abc " * 8 + b"abc", b" dd"),
        (b"q", b"e" * 24),
    ]
    found = adapter()(Scorer(model), tokenizer).loglikelihood([request(*each) for each in asked])
    for (value, greedy), (context, continuation) in zip(found, rows, strict=True):
        expected = naive(model, list(context), list(continuation))
        assert value == pytest.approx(expected[0], abs=EXACT * 100)  # a constrained row is solved to 1e-12 or so
        assert greedy == expected[1]


def test_greedy_continuations_are_recognised() -> None:
    model = bytes_model()
    prompt = list(b"once upon")
    made = model.generate([prompt], max_new_tokens=4, temperature=0.0).tokens[0]
    lm = adapter()(Scorer(model), ByteTokenizer())
    best = lm._loglikelihood_tokens([(None, prompt, made), (None, prompt, [made[0] ^ 1, *made[1:]])])
    assert [greedy for _, greedy in best] == [True, False]
    assert best[0][0] == pytest.approx(naive(model, prompt, made)[0], abs=EXACT)


def test_too_long_is_cut_and_counted() -> None:
    model = bytes_model()
    lm = adapter()(Scorer(model), ByteTokenizer())
    asked = [("a" * 30, "bc"), ("a" * 22, "bcd"), ("a" * 23, "bcd"), ("a", "b" * 60), ("a", "")]
    found = lm.loglikelihood([request(*each) for each in asked])
    assert lm.cut == 3  # the second has context + 1 tokens, which fits
    whole = list(b"a" + b"b" * 60)
    # the harness's windows: 24 tokens, then 24, then the last 12 with all the context that fits
    expected = sum(
        naive(model, whole[begin:first], whole[first:end])[0]
        for begin, first, end in ((0, 1, 25), (24, 25, 49), (36, 49, 61))
    )
    assert found[3][0] == pytest.approx(expected, abs=EXACT * 60)
    assert found[4] == (0.0, True)


def test_a_prompt_of_blanks_stands_behind_end_of_text() -> None:
    """The harness gives the blanks to the continuation, which leaves no context; the Hugging Face backend stops."""
    model = bytes_model()
    found = adapter()(Scorer(model), ByteTokenizer()).loglikelihood([request("  ", "ab"), request(" ", "b" * 30)])
    assert found[0][0] == pytest.approx(naive(model, [256], list(b"  ab"))[0], abs=EXACT)
    tail = naive(model, list((b" " + b"b" * 30)[6:24]), list(b"b" * 7))[0]
    assert found[1][0] == pytest.approx(naive(model, [256], list(b" " + b"b" * 23))[0] + tail, abs=EXACT * 30)


def test_rolling_scores_every_token_once() -> None:
    model = bytes_model()
    lm = adapter()(Scorer(model), ByteTokenizer())
    text = list(b"0123456789" * 3)
    whole = [256, *text]
    expected = naive(model, [256], text[:24])[0] + naive(model, whole[6:25], text[24:])[0]
    assert lm.loglikelihood_rolling([request("0123456789" * 3)])[0] == pytest.approx(expected, abs=EXACT * 30)
    assert lm.loglikelihood_rolling([request("")]) == [0]


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_batches_change_nothing(micro_batch: int) -> None:
    model = bytes_model()
    asked = [request("c" * n, "d" * (1 + n % 5)) for n in range(1, 20)]
    whole = adapter()(Scorer(model, None, 64), ByteTokenizer()).loglikelihood(asked)
    found = adapter()(Scorer(model, None, micro_batch), ByteTokenizer()).loglikelihood(asked)
    for (a, _), (b, _) in zip(whole, found, strict=True):
        assert a == pytest.approx(b, abs=EXACT)


def test_generation_stops_where_it_should() -> None:
    model, tokenizer = bytes_model(), ByteTokenizer()
    lm = adapter()(Scorer(model, None, 2), tokenizer)
    greedy = [
        tokenizer.decode(model.generate([list(p)], max_new_tokens=8, temperature=0.0).tokens[0]) for p in (b"ab", b"q")
    ]
    asked = [request("ab", {"max_gen_toks": 8}), request("q", {"max_new_tokens": 8})]
    assert lm.generate_until(asked) == greedy
    word = greedy[0][2:4]
    cut = lm.generate_until([request("ab", {"max_gen_toks": 8, "until": [word, "\u2603"]}), asked[1]])
    assert cut == [greedy[0].partition(word)[0], greedy[1]]
    drawn = [request("ab", {"do_sample": True, "max_gen_toks": 8})] * 2
    assert len(set(lm.generate_until(drawn))) == 2  # rows of one batch are drawn apart
    assert all(len(text.encode("utf-8", "replace")) <= 60 for text in lm.generate_until([request("ab" * 30, {})]))


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({}, Generating()),
        ({"until": "\n", "max_gen_toks": 9}, Generating(("\n",), 9)),
        ({"until": ["a", ""], "do_sample": False, "temperature": 0.7}, Generating(("a",))),
        ({"temperature": 0.7, "top_p": 0.9}, Generating((), 256, 0.7, None, 0.9)),
        ({"do_sample": True, "top_k": 5}, Generating((), 256, 1.0, 5)),
    ],
)
def test_generation_settings(given: dict[str, Any], read: Generating) -> None:
    assert Generating.read(given) == read
