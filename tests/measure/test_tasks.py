"""Downstream tasks of runs: prompts equal to those of the harness's own tasks, results, journals, bad input."""

from __future__ import annotations

import json
import lzma
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from runs import make_corpus, small_run
from scoring_loop import REAL_TASKS, naive, needs_tasks
from stepformer.base.errors import InputError, StepformerError
from stepformer.cli import main
from stepformer.measure import measured
from stepformer.measure.evaluation import measure_tasks, tasks
from stepformer.measure.evaluation.harness import notes, read_metrics, settled, with_error, with_shots
from stepformer.measure.evaluation.scoring import Scorer
from stepformer.measure.evaluation.tasks import open_task
from stepformer.training import load_run, train
from stepformer.training.loading import LoadedRun

pytest.importorskip("lm_eval", reason="needs the extra eval")


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
@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
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
@pytest.mark.parametrize("name", ["arc_easy", pytest.param("arc_challenge", marks=pytest.mark.slow)])
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
    trial = measure_tasks(run, ["arc_easy"], shots=[0, 1], limit=4, data=data, quiet=True)
    more = trial["tasks"]
    assert (more["arc_easy@0"]["items"], more["arc_easy@0"]["of"]) == (4, 9)
    assert trial["not_kept"] == ["arc_easy@0"]  # a trial on a few items does not replace what all of them took
    assert notes(trial)[-1] == "not kept, since there are numbers of more items: arc_easy@0"
    kept = measured.load(run.folder.path, "tasks")
    assert kept is not None
    assert kept["result"]["tasks"] == {**found, "arc_easy@1": more["arc_easy@1"]}
    whole = measure_tasks(run, ["arc_easy"], shots=[1], data=data, quiet=True)
    kept = measured.load(run.folder.path, "tasks")
    assert kept is not None
    assert kept["result"]["tasks"] == {**found, **whole["tasks"]}
    assert "not_kept" not in whole


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


def test_an_interrupted_task_continues(
    run: LoadedRun, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    measure_tasks(run, ["arc_easy"], shots=[0], data=data, quiet=True)  # finishes meanwhile, and leaves the journal
    between = sum(calls)
    capsys.readouterr()
    assert main([*words, "--micro-batch", "4"]) == 0
    assert capsys.readouterr().err.count("hellaswag 2-shot continues: 20 of 48 requests were kept") == 1
    assert sum(calls) == between + 28
    kept = measured.load(run.folder.path, "tasks")
    assert kept is not None
    assert kept["result"]["tasks"]["hellaswag@2"] == whole["tasks"]["hellaswag@2"]
    assert not (run.folder.path / "measured" / "tasks.jsonl").exists()


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


def test_shots_that_are_asked_for_win_over_those_of_a_task_file(
    run: LoadedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also over a 0, which the harness by itself keeps whatever is asked."""
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(tmp_path)
    rows = [{"q": f"{i} is", "c": [" odd", " even"], "g": (i + 1) % 2} for i in range(6)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common: dict[str, Any] = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "d.jsonl"}}}
    common |= {"test_split": "test", "fewshot_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{q}}"}
    common |= {"doc_to_choice": "c", "doc_to_target": "{{g}}", "metric_list": [{"metric": "acc"}]}
    (tmp_path / "y").mkdir()
    for name, own in (("none", {}), ("zero", {"num_fewshot": 0}), ("three", {"num_fewshot": 3})):
        (tmp_path / "y" / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **own}))
    mean = {"aggregate_metric_list": [{"metric": "acc", "aggregation": "mean"}]}
    (tmp_path / "y" / "all.yaml").write_text(json.dumps({"group": "all", "task": ["none", "zero", "three"], **mean}))
    files = ["y/none.yaml", "y/zero.yaml", "y/three.yaml"]
    assert list(measure_tasks(run, files, quiet=True)["tasks"]) == ["none@0", "zero@0", "three@3"]
    prompts: list[str] = []
    score = Scorer.score

    def watching(self: Scorer, parts: Any) -> Any:
        prompts.extend(run.tokenizer.decode(list(part.row)) for part in parts)
        return score(self, parts)

    monkeypatch.setattr(Scorer, "score", watching)
    assert list(measure_tasks(run, files, shots=[2], quiet=True)["tasks"]) == ["none@2", "zero@2", "three@2"]
    assert {prompt.count("\n\n") for prompt in prompts} == {2}
    few = TaskManager(include_path=str(tmp_path / "y"), include_defaults=False)
    monkeypatch.setattr(tasks, "all_tasks", lambda: few)
    found = measure_tasks(run, ["all"], shots=[0, 1], quiet=True)["tasks"]
    assert set(found) == {f"{name}@{n}" for name in ("none", "zero", "three", "all") for n in (0, 1)}
    assert main(["eval", str(run.folder.path), "--tasks", "y/zero.yaml", "--shots", "6"]) == 2
    said = capsys.readouterr().err
    assert said == "stepformer: The task 'zero' has 5 examples to show, not 6: ask for fewer (--shots).\n"


def test_metrics_are_renamed() -> None:
    given = {"alias": "x", "acc,none": 0.5, "acc_stderr,none": "N/A", "f1,strict": 1, "ppl,none": float("nan")}
    given |= {"by_class,none": {"a": 1}}
    assert read_metrics(given) == {"acc": 0.5, "f1[strict]": 1.0, "ppl": None}


def test_numbers_have_as_many_digits_as_they_are_worth() -> None:
    known = {"perplexity": 4895388781.938, "perplexity_stderr": 776143954357.16, "acc": 0.25, "acc_stderr": 0.0993}
    assert with_error(known, "perplexity", 1) == "4.895e+09 (error unknown)"
    assert with_error({**known, "perplexity_stderr": 4.1e8}, "perplexity", 1) == "4.895e+09 ± 4.1e+08"
    assert with_error({"perplexity": 26.0213}, "perplexity", 1) == "26.02"
    assert with_error({"mcc": 0.01, "mcc_stderr": 0.03}, "mcc", 1) == "0.01 ± 0.03"  # may be on both sides of zero
    assert with_error(known, "acc", 100) == "25.00 ± 9.93"
    assert with_error(known, "acc_norm", 100) == ""


# bad input


def test_the_command_prints_a_table(run: LoadedRun, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(run.folder.path), "--tasks", "arc_easy", "--data", str(data), "--limit", "3", "--shots", "1"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "the first 3 of 9 items" in printed
    assert printed.count("± is one standard error; chance is 25 % for arc_easy\n") == 1
    assert "examples from arc_easy_test.jsonl, never the item itself" in printed
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["tasks"]["tasks"]["arc_easy@1"]["items"] == 3
    assert captured.err == ""


def test_every_task_may_have_its_own_shots(run: LoadedRun, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(run.folder.path), "--data", str(data), "--limit", "2", "--json", "--tasks"]
    for named, more, found in (
        ("hellaswag:1,arc_easy:2", [], ["hellaswag@1", "arc_easy@2"]),
        ("hellaswag:0,hellaswag:1,hellaswag:0", [], ["hellaswag@0", "hellaswag@1"]),
        ("hellaswag:1,arc_easy", ["--shots", "0,2"], ["hellaswag@1", "arc_easy@0", "arc_easy@2"]),
    ):
        assert main([*words, named, *more]) == 0
        assert list(json.loads(capsys.readouterr().out)["tasks"]["tasks"]) == found
    assert with_shots("hellaswag") == [("hellaswag", 10)]
    assert with_shots("arc_easy:3", [1]) == [("arc_easy", 3)]
    assert with_shots("a:b/mine.yaml", [1]) == [("a:b/mine.yaml", 1)]
    assert with_shots("mine.yaml:4") == [("mine.yaml", 4)]
    for named, more, sentence in (
        ("hellaswag:ten", [], "'hellaswag:ten' should be a task and its number of shots, as in hellaswag:10."),
        ("hellaswag:-1", [], "'hellaswag:-1' should be a task and its number of shots, as in hellaswag:10."),
        ("hellaswag:1", ["--shots", "2"], "--shots is for tasks without a number of their own, and all of these have"),
    ):
        assert main([*words, named, *more]) == 2
        assert sentence in capsys.readouterr().err


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


def test_a_task_of_the_hub_says_so_and_gives_up_early(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub.utils import http_backoff

    class Manager:
        all_tasks: ClassVar = ["arc_easy", "piqa"]

        def load(self, names: list[str]) -> Any:
            assert http_backoff.__kwdefaults__["max_retries"] == 1
            raise ConnectionError("no network")

    before = http_backoff.__kwdefaults__["max_retries"]
    monkeypatch.delenv("STEPFORMER_DATA", raising=False)
    monkeypatch.setattr(tasks, "all_tasks", Manager)
    for name, hint in (("arc_easy", "; local files can be given with --data DIR"), ("piqa", "")):
        with pytest.raises(StepformerError, match="no network"), open_task(name):
            pass
        assert f"reading {name} from the Hugging Face Hub{hint}\n" in capsys.readouterr().err
    assert http_backoff.__kwdefaults__["max_retries"] == before > 1


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


@pytest.mark.slow
def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, stepformer, stepformer.cli.main\n"
        "import stepformer.measure.evaluation.harness, stepformer.measure.evaluation.adapter\n"
        "from stepformer.cli.main import parser; parser().format_help()\n"
        "print([m for m in ('lm_eval', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
