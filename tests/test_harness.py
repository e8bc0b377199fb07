"""Downstream tasks: the same numbers as the harness's own Hugging Face backend, the same prompts as its own tasks."""

from __future__ import annotations

import json
import lzma
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stepformer as sf
from helpers import shake
from real_data import GPT2, REAL
from runs import make_corpus, small_run
from stepformer import measured
from stepformer.cli import main
from stepformer.data.tokenizers import ByteTokenizer, gpt2_tokenizer
from stepformer.errors import InputError, StepformerError
from stepformer.evaluation import measure_tasks, tasks
from stepformer.evaluation.adapter import Generating, adapter
from stepformer.evaluation.harness import read_metrics, settled
from stepformer.evaluation.scoring import Scorer, scorer_of
from stepformer.training import load_run, train
from stepformer.training.run import LoadedRun

pytest.importorskip("lm_eval", reason="needs the extra eval")

REAL_TASKS = REAL / "eval"
needs_tasks = pytest.mark.skipif(
    not (GPT2.is_dir() and (REAL_TASKS / "hellaswag").is_dir()), reason="needs HellaSwag and ARC: set STEPFORMER_DATA"
)
EXACT = 1e-11  # two fp64 evaluations of one function in different shapes


def request(*args: Any) -> Any:
    """What the harness hands to a model, as far as a model looks at it."""
    return SimpleNamespace(args=args)


def bytes_model(name: str = "yurii", **changes: Any) -> sf.Model:
    """A byte-level model, fp64, with weights far from their start."""
    sizes = {"n_layer": 2, "n_head": 2, "d_model": 16, "context": 24, "vocab_size": 257, **changes}
    return shake(sf.build(name, seed=0, dtype=torch.float64, **sizes))


def naive(model: sf.Model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """ln p of the continuation and whether it is greedy, a token at a time, with the last tokens that fit."""
    total, greedy = 0.0, True
    for i, token in enumerate(continuation):
        # the window of the whole prompt: its last context + 1 tokens, of which the last is never an input
        row = (context + continuation)[-model.config.context - 1 :]
        place = len(row) - len(continuation) + i
        with torch.no_grad():
            logits = model(torch.tensor([row[:place]])).logits[0, -1]
        total += float(torch.log_softmax(logits, dim=-1)[token])
        greedy = greedy and int(logits.argmax()) == token
    return total, greedy


# against the harness's Hugging Face backend


@pytest.fixture(scope="module")
def twins() -> Iterator[tuple[Any, Any]]:
    """One set of weights twice: as our model behind our adapter, and as a GPT-2 of transformers behind HFLM."""
    transformers = pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    context = 256
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=context, vocab_size=50257)
    torch.manual_seed(0)
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
    # fp32 sums over up to 100 tokens in another order; 4e-5 was the largest difference seen
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
@pytest.mark.parametrize(("name", "shots", "items"), [("hellaswag", 0, 25), ("arc_easy", 0, 40), ("arc_easy", 10, 8)])
def test_scores_are_those_of_the_hugging_face_backend(
    twins: tuple[Any, Any], name: str, shots: int, items: int
) -> None:
    agree(*twins, name, shots, items)


@needs_tasks
@pytest.mark.slow
@pytest.mark.parametrize("name", ["hellaswag", "arc_easy"])
@pytest.mark.parametrize("shots", [0, 10])
def test_scores_of_two_hundred_items(twins: tuple[Any, Any], name: str, shots: int) -> None:
    agree(*twins, name, shots, 200)


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


@needs_tasks
@pytest.mark.parametrize("name", ["triple-momentum"])
def test_scores_of_an_exported_run_are_those_of_the_run(name: str, tmp_path: Path) -> None:
    """A run with GPT-2 tokens, exported, loaded by the harness by its folder's name, against the run itself."""
    pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    from stepformer.huggingface import export_run

    make_corpus(tmp_path / "tales", tokenizer=f"gpt2:{GPT2}")
    sizes = {"context": 128, "batch": 4, "steps": 6, "precision": "fp32", "eval_every": 6, "eval_tokens": 256}
    train(small_run(tmp_path / "tales", name, **sizes), tmp_path / "run", quiet=True)
    export_run(tmp_path / "run", tmp_path / "exported")
    run = load_run(tmp_path / "run")
    with settled(quiet=True):
        backend = HFLM(pretrained=str(tmp_path / "exported"), device="cpu", dtype="float32", batch_size=8)
        ours = adapter()(scorer_of(run), run.tokenizer)
        assert backend.max_length == 128
        for task, shots, items in (("hellaswag", 10, 6), ("arc_easy", 0, 20)):
            agree(ours, backend, task, shots, items)


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


# prompts


def theirs(name: str, folder: str, files: dict[str, Path], place: Path, **changes: Any) -> Any:
    """The harness's own definition of a task over local files."""
    import lm_eval.tasks

    home = Path(lm_eval.tasks.__file__).parent
    place.mkdir()
    data = {"data_files": {split: str(path) for split, path in files.items()}, "cache_dir": str(place / "cache")}
    own = {"include": str(home / folder / f"{name}.yaml"), "task": name, "dataset_path": "json", "dataset_name": None}
    (place / "task.yaml").write_text(json.dumps({**own, "dataset_kwargs": data, **changes}))
    with settled(quiet=True):
        return lm_eval.tasks.TaskManager(include_path=str(place), include_defaults=False).load([name])["tasks"][name]


def prompts(task: Any, shots: int, items: int | None = None) -> list[Any]:
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(1234)
    with settled(quiet=True):
        task.build_all_requests(limit=items)
    return [(instance.args, task.doc_to_target(instance.doc)) for instance in task.instances]


def real_rows(path: Path, begin: int, end: int) -> str:
    text = lzma.decompress(path.read_bytes()).decode() if path.suffix == ".xz" else path.read_text()
    return "".join(line + "\n" for line in text.splitlines()[begin:end])


@needs_tasks
@pytest.mark.parametrize("train", [True, False], ids=["train", "no-train"])
def test_hellaswag_prompts_are_the_harness_s(train: bool, tmp_path: Path) -> None:
    source = REAL_TASKS / "hellaswag" / "hellaswag_val.jsonl.xz"
    folder = tmp_path / "data" / "hellaswag"
    folder.mkdir(parents=True)
    files = {"validation": folder / "hellaswag_val.jsonl"}
    files["validation"].write_text(real_rows(source, 0, 20) + real_rows(source, 9000, 9020))  # ActivityNet and WikiHow
    if train:
        files["train"] = folder / "hellaswag_train.jsonl"
        files["train"].write_text(real_rows(source, 5000, 5100))
    changes: dict[str, Any] = {} if train else {"training_split": None}
    own = theirs("hellaswag", "hellaswag", files, tmp_path / "own", **changes)
    for shots in (0, 5):
        with tasks.open_task("hellaswag", tmp_path / "data") as opened:
            found = prompts(opened.objects[0], shots)
        assert [args for args, _ in found] == [args for args, _ in prompts(own, shots)]
        assert [str(gold) for _, gold in found] == [str(gold) for _, gold in prompts(own, 0)]
        assert len(found) == 160


@needs_tasks
@pytest.mark.parametrize("name", ["arc_easy", "arc_challenge"])
def test_arc_prompts_are_the_harness_s(name: str, tmp_path: Path) -> None:
    source = REAL_TASKS / "arc" / "arc_easy_validation.jsonl"  # in the original layout, as on the hub
    folder = tmp_path / "data" / "arc"
    folder.mkdir(parents=True)
    files = {split: folder / f"{name}_{split}.jsonl" for split in ("train", "validation", "test")}
    for i, path in enumerate(files.values()):
        path.write_text(real_rows(source, 150 * i, 150 * i + 150))
    own = theirs(name, "arc", files, tmp_path / "own")
    for shots, items in ((0, 150), (25, 6)):
        with tasks.open_task(name, tmp_path / "data") as opened:
            found = prompts(opened.objects[0], shots, items)
        assert found == prompts(own, shots, items)


@needs_tasks
def test_lambada_prompts_are_the_harness_s(tmp_path: Path) -> None:
    rows = [
        json.loads(line) for line in real_rows(REAL_TASKS / "lambada" / "lambada_openai.jsonl.xz", 0, 200).splitlines()
    ]
    (tmp_path / "t.jsonl").write_text(
        "".join(json.dumps({"text": f"{row['context']} {row['continuation']}"}) + "\n" for row in rows)
    )
    own = theirs("lambada_openai", "lambada", {"test": tmp_path / "t.jsonl"}, tmp_path / "own")
    with tasks.open_task("lambada_openai", REAL_TASKS) as opened:
        assert prompts(opened.objects[0], 0, 200) == prompts(own, 0)


def test_the_two_layouts_of_arc_are_one() -> None:
    original = {"question": "Why?", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"}
    made = {"query": "Question: Why?", "choices": ["a", "b"], "gold": 1}
    expected = {"query": "Question: Why?\nAnswer:", "choices": ["a", "b"], "gold": 1}
    assert tasks.arc(original) == tasks.arc(made) == expected


# runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_corpus(folder / "tales")
    train(small_run(folder / "tales", context=64, steps=2), folder / "yurii", quiet=True)
    return folder / "yurii"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> LoadedRun:
    return load_run(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up items in the layouts of the real ones."""
    folder = tmp_path_factory.mktemp("eval")
    for name in ("hellaswag", "arc"):
        (folder / name).mkdir()
    swag = [
        {
            "activity_label": "Cooking",
            "ctx_a": f"A man [title] has {i} eggs.",
            "ctx_b": "he",
            "endings": [f"eats [x] {j}  of them." for j in range(4)],
            "label": str(i % 4),
        }
        for i in range(12)
    ]
    with lzma.open(folder / "hellaswag" / "hellaswag_val.jsonl.xz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in swag))
    arc = [{"query": f"Question: {i} + 1?", "choices": [str(i), str(i + 1)], "gold": 1} for i in range(9)]
    (folder / "arc" / "arc_easy_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in arc))
    return folder


def test_a_run_is_measured_and_kept(run: LoadedRun, data: Path) -> None:
    found = measure_tasks(run, ["hellaswag", "arc_easy"], shots=[0, 3], data=data, quiet=True)["tasks"]
    assert list(found) == ["hellaswag@0", "hellaswag@3", "arc_easy@0", "arc_easy@3"]
    for entry in found.values():
        assert entry["items"] == (12 if entry["task"] == "hellaswag" else 9)
        for metric in ("acc", "acc_norm"):
            p, n = entry[metric], entry["items"]
            assert 0 <= p <= 1
            assert entry[f"{metric}_stderr"] == pytest.approx((p * (1 - p) / (n - 1)) ** 0.5)
    assert found["hellaswag@3"]["cut"] == 48
    assert found["arc_easy@3"]["source"]["shots_from"] == "arc_easy_test.jsonl, never the item itself"
    kept = measured.load(run.folder.path, "tasks")
    assert kept is not None
    assert kept["result"]["tasks"] == found
    assert kept["settings"]["fewshot_random_seed"] == 1234
    assert not (run.folder.path / "measured" / "tasks.jsonl").exists()
    more = measure_tasks(run, ["arc_easy"], shots=[0, 1], limit=4, data=data, quiet=True)["tasks"]
    kept = measured.load(run.folder.path, "tasks")
    assert kept is not None
    assert kept["result"]["tasks"] == {**found, **more}
    assert (more["arc_easy@0"]["items"], more["arc_easy@0"]["of"]) == (4, 9)


def test_accuracy_is_the_likeliest_choice(run: LoadedRun, data: Path) -> None:
    """The harness's accuracy, from our own loop over choices."""
    found = measure_tasks(run, ["hellaswag"], shots=[0], data=data, quiet=True)["tasks"]["hellaswag@0"]
    right = right_by_length = 0
    for i in range(12):
        context = list(f"Cooking: A man.  has {i} eggs. He".replace("  ", " ").encode())
        choices = [f" eats {j} of them." for j in range(4)]
        values = [naive(run.model, context, list(choice.encode()))[0] for choice in choices]
        right += values.index(max(values)) == i % 4
        by_length = [v / (len(choice) - 1) for v, choice in zip(values, choices, strict=True)]
        right_by_length += by_length.index(max(by_length)) == i % 4
    assert (found["acc"], found["acc_norm"]) == (right / 12, right_by_length / 12)


def test_an_item_is_never_its_own_example(run: LoadedRun, data: Path) -> None:
    for name, count in (("hellaswag", 12), ("arc_easy", 9)):
        with tasks.open_task(name, data) as opened:
            for (context, _), _ in prompts(opened.objects[0], count - 1):
                questions = context.split("\n\n")
                assert len(questions) == count
                assert not any(shown.startswith(questions[-1] + " ") for shown in questions[:-1])


def test_an_interrupted_task_continues(run: LoadedRun, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure_tasks(run, ["hellaswag"], shots=[2], data=data, micro_batch=4, quiet=True)
    (run.folder.path / "measured" / "tasks.json").unlink()
    calls: list[int] = []
    score = Scorer.score

    def stopping(self: Scorer, parts: Any) -> Any:
        if len(calls) == 5:
            calls.append(0)
            raise KeyboardInterrupt
        calls.append(len(parts))
        return score(self, parts)

    monkeypatch.setattr(Scorer, "score", stopping)
    words = ["eval", str(run.folder.path), "--tasks", "hellaswag", "--shots", "2", "--data", str(data)]
    assert main([*words, "--micro-batch", "4", "--quiet"]) == 130
    assert sum(calls) == 20
    assert main([*words, "--micro-batch", "4", "--quiet"]) == 0
    assert sum(calls) == 48
    kept = measured.load(run.folder.path, "tasks")
    assert kept is not None
    assert kept["result"] == whole


def test_tasks_that_make_text_and_score_documents(
    run: LoadedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own YAML files over a local dataset: the other two kinds of requests."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text('{"text": "one two"}\n{"text": "three"}\n')
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "d.jsonl"}}, "test_split": "test"}
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    metrics = [{"metric": "byte_perplexity"}]
    (tmp_path / "r.yaml").write_text(json.dumps({"task": "mine", **common, **rolling, "metric_list": metrics}))
    until = {"output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{text}}"}
    until["generation_kwargs"] = {"until": ["e"], "max_gen_toks": 5}  # type: ignore[assignment]
    metrics = [{"metric": "exact_match"}]
    (tmp_path / "g.yaml").write_text(json.dumps({"task": "made", **common, **until, "metric_list": metrics}))
    found = measure_tasks(run, ["r.yaml", "g.yaml"], quiet=True)["tasks"]
    texts = [list(b"one two"), list(b"three")]
    nats = -sum(naive(run.model, [256], text)[0] for text in texts)
    assert found["mine@0"]["byte_perplexity"] == pytest.approx(math.exp(nats / 12), rel=1e-9)
    assert found["made@0"]["exact_match"] == 0


def test_groups_and_tags(run: LoadedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text('{"q": "one", "c": ["a", "b"], "g": 1}\n{"q": "one", "c": ["a", "b"], "g": 0}\n')
    common: dict[str, Any] = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "d.jsonl"}}}
    common |= {"test_split": "test", "output_type": "multiple_choice", "tag": "ours", "doc_to_text": "{{q}}"}
    common |= {"doc_to_choice": "c", "doc_to_target": "{{g}}", "metric_list": [{"metric": "acc"}]}
    (tmp_path / "y").mkdir()
    for name in ("one", "two"):
        (tmp_path / "y" / f"{name}.yaml").write_text(json.dumps({"task": name, **common}))
    mean = {"aggregate_metric_list": [{"metric": "acc", "aggregation": "mean"}]}
    (tmp_path / "y" / "both.yaml").write_text(json.dumps({"group": "both", "task": ["one", "two"], **mean}))
    few = TaskManager(include_path=str(tmp_path / "y"), include_defaults=False)
    monkeypatch.setattr(tasks, "all_tasks", lambda: few)
    found = measure_tasks(run, ["both"], quiet=True)["tasks"]
    assert {name: entry["acc"] for name, entry in found.items()} == {"one@0": 0.5, "two@0": 0.5, "both@0": 0.5}
    assert found["both@0"]["items"] is None
    assert list(measure_tasks(run, ["ours"], quiet=True)["tasks"]) == ["one@0", "two@0"]


def test_metrics_are_renamed() -> None:
    given = {"alias": "x", "acc,none": 0.5, "acc_stderr,none": "N/A", "f1,strict": 1, "ppl,none": float("nan")}
    assert read_metrics(given) == {"acc": 0.5, "f1[strict]": 1.0, "ppl": None}


# bad input


def test_the_command_prints_a_table(run: LoadedRun, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(run.folder.path), "--tasks", "arc_easy", "--data", str(data), "--limit", "3", "--shots", "1"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "the first 3 of 9 items" in printed
    assert "examples from arc_easy_test.jsonl, never the item itself" in printed
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["tasks"]["tasks"]["arc_easy@1"]["items"] == 3
    assert captured.err == ""


def test_sentences_for_what_is_wrong(run: LoadedRun, data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no data folder"):
        measure_tasks(run, ["hellaswag"], data=tmp_path / "nothing", quiet=True)
    with pytest.raises(InputError, match=r"'arc/arc_challenge_test\.jsonl' is missing"):
        measure_tasks(run, ["arc_challenge"], data=data, quiet=True)
    with pytest.raises(InputError, match="no task file"):
        measure_tasks(run, ["mine.yaml"], quiet=True)
    with pytest.raises(InputError, match="limit = 0"):
        measure_tasks(run, ["hellaswag"], limit=0, data=data, quiet=True)
    with pytest.raises(InputError, match="shots = -1"):
        measure_tasks(run, ["hellaswag"], shots=[-1], data=data, quiet=True)
    with pytest.raises(InputError, match="no task to measure"):
        measure_tasks(run, [], quiet=True)
    assert main(["eval", str(run.folder.path), "--tasks", "hellaswag", "--shots", "many"]) == 2
    (tmp_path / "hellaswag").mkdir()
    (tmp_path / "hellaswag" / "hellaswag_val.jsonl").write_text('{"ctx_a": "x"}\n')
    with pytest.raises(InputError, match=r"Line 1 of .* not in a layout"):
        measure_tasks(run, ["hellaswag"], data=tmp_path, quiet=True)
    (tmp_path / "hellaswag" / "hellaswag_val.jsonl").write_text("")
    with pytest.raises(InputError, match="has no rows"):
        measure_tasks(run, ["hellaswag"], data=tmp_path, quiet=True)
    (tmp_path / "bad.yaml").write_text("task: bad\ndataset_path: json\ndataset_kwargs: {data_files: nothing.jsonl}\n")
    with pytest.raises(StepformerError, match="could not load the task"):
        measure_tasks(run, [str(tmp_path / "bad.yaml")], quiet=True)


def test_an_unknown_task_has_a_suggestion(run: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small part of the harness's list: all of it takes some 10 s to read."""
    monkeypatch.delenv("STEPFORMER_DATA", raising=False)
    import lm_eval.tasks

    home = Path(lm_eval.tasks.__file__).parent
    few = lm_eval.tasks.TaskManager(include_path=str(home / "piqa"), include_defaults=False)
    monkeypatch.setattr(tasks, "all_tasks", lambda: few)
    with pytest.raises(InputError, match=r"no task 'piqqa'\. Did you mean 'piqa'\?"):
        measure_tasks(run, ["piqqa"], quiet=True)
    with pytest.raises(InputError, match="Did you mean 'hellaswag'"):
        measure_tasks(run, ["hellaswagg"], quiet=True)


def test_without_the_extra_one_sentence_says_so(
    run: LoadedRun, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", str(run.folder.path), "--tasks", "hellaswag", "--data", str(data)]) == 2
    said = capsys.readouterr().err
    assert said == (
        "stepformer: The package 'lm_eval' is needed for this and is not installed: pip install 'stepformer[eval]'.\n"
    )


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, stepformer, stepformer.evaluation.harness, stepformer.evaluation.adapter, stepformer.cli.main\n"
        "from stepformer.cli.main import parser; parser().format_help()\n"
        "print([m for m in ('lm_eval', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
