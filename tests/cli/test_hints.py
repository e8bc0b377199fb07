"""Commands that messages suggest can be copied into a shell, whatever the folders are called."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import stepformer
from runs import make_corpus, small_run
from stepformer.base.errors import InputError, command_line
from stepformer.cli import main
from stepformer.cli.main import parser
from stepformer.cli.prepare import print_corpus
from stepformer.cli.show import console
from stepformer.cli.train import print_result
from stepformer.data.corpus import Corpus
from stepformer.measure import measured
from stepformer.study import finetune_study
from stepformer.training import checkpoints, resume, train
from stepformer.training.config import DataConfig
from stepformer.training.corpora import check_tokenizers, open_corpus
from stepformer.training.finetuning import warm_start
from stepformer.training.parallel import World
from stepformer.training.runs import RunFolder

NAME = "it's [my] $HOME"


def commands(said: str) -> list[list[str]]:
    """The words of every command between backticks, as a shell takes them."""
    return [shlex.split(found) for found in re.findall("`(stepformer [^`]*)`", said)]


def test_words_of_a_command() -> None:
    assert command_line("resume", Path("runs/a")) == "stepformer resume runs/a"
    assert shlex.split(command_line("train", "yurii", f"corpus={NAME}")) == [
        "stepformer",
        "train",
        "yurii",
        f"corpus={NAME}",
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("hints")
    data = make_corpus(base / NAME / "corpus").folder
    train(small_run(data, steps=2, eval_every=1), base / NAME / "run", quiet=True)
    return base / NAME / "run"


def test_a_run_that_is_there(trained: Path) -> None:
    folder = RunFolder(trained)
    assert commands(folder.taken(folder.config())) == []  # it is finished
    folder.result.rename(trained / "kept")
    try:
        assert commands(folder.taken(folder.config())) == [["stepformer", "resume", str(trained)]]
    finally:
        (trained / "kept").rename(folder.result)


def test_a_run_that_is_not_finished(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune_study, "checkpoint_of", lambda *args: (trained, {"step": 1}))
    (trained / "result.json").rename(trained / "kept")
    try:
        with pytest.raises(InputError) as found:
            finetune_study.open_pretrained(trained)
    finally:
        (trained / "kept").rename(trained / "result.json")
    assert commands(str(found.value)) == [["stepformer", "resume", str(trained)]]


def test_a_run_that_was_imported(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, config = RunFolder(trained).opened()
    monkeypatch.setattr(RunFolder, "opened", lambda self: ({**record, "corpus": None}, config))
    with pytest.raises(InputError) as found:
        resume(trained)
    assert shlex.split(str(found.value).rpartition(" with ")[2].rstrip(".")) == [f"init={trained}"]


def test_tokenizers_that_differ(trained: Path, tmp_path: Path) -> None:
    record, config = RunFolder(trained).opened()
    other = {**record["corpus"]["tokenizer"], "fingerprint": "other"}
    with pytest.raises(InputError) as found:
        warm_start(str(trained), config, other, World(0, 1, checkpoints.torch.device("cpu")))
    assert commands(str(found.value)) == [["stepformer", "prepare", "SOURCE", "--tokenizer", str(trained)]]
    one, two = (
        SimpleNamespace(folder=tmp_path / NAME, manifest={"tokenizer": {**other, "fingerprint": f}}) for f in "ab"
    )
    with pytest.raises(InputError) as found:
        check_tokenizers(one, two)  # type: ignore[arg-type]
    assert commands(str(found.value)) == [["stepformer", "prepare", "SOURCE", "--tokenizer", str(tmp_path / NAME)]]


def test_corpora_that_are_not_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{NAME}.txt").write_text("One.\n")
    monkeypatch.setenv("STEPFORMER_DATA", str(tmp_path / "data"))
    corpus = str(tmp_path / f"{NAME}.txt")
    with pytest.raises(InputError) as found:
        open_corpus(DataConfig(corpus=corpus, tokenizer="bytes"), World(0, 1, checkpoints.torch.device("cpu")))
    assert commands(str(found.value)) == [["stepformer", "prepare", corpus, "--tokenizer", "bytes"]]


def test_what_is_printed_at_the_end(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    print_result({**measured.files.read_json(trained / "result.json", "result"), "folder": str(trained)}, 5000.0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=2)[2].strip() for line in lines if line.startswith("in all ")] == [
        "83.3 min, with starting, evaluating and saving"
    ]
    (line,) = (line for line in lines if line.startswith("try "))
    assert shlex.split(line)[1:] == ["stepformer", "generate", str(trained), "Once upon a time"]
    print_corpus(console(), Corpus(trained.parent / "corpus"))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("train on it: "))
    assert shlex.split(line.removeprefix("train on it: ")) == [
        "stepformer", "train", "glide", f"corpus={trained.parent / 'corpus'}",
    ]  # fmt: skip


def test_the_command_of_a_measurement(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["diagnose", str(trained), "--depth"]
    monkeypatch.setattr(sys, "argv", ["/bin/stepformer", *words])
    path = measured.save(trained, "hints", step=1, settings={}, result={})
    assert shlex.split(measured.files.read_json(path, "it")["command"]) == ["stepformer", *words]


COMMAND = re.compile(rf"\bstepformer ({'|'.join(parser()._subparsers._group_actions[0].choices)}) [^`;.]*$")  # type: ignore[union-attr]


def suggested(tree: ast.AST) -> list[ast.FormattedValue]:
    """What f-strings put into a command of ours."""
    found = []
    for node in ast.walk(tree):
        before = ""
        for part in node.values if isinstance(node, ast.JoinedStr) else ():
            if isinstance(part, ast.Constant):
                before += str(part.value)
            elif isinstance(part, ast.FormattedValue):
                if COMMAND.search(before.rpartition("`")[2]):
                    found.append(part)
                before += "{}"
    return found


def quoted(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("shlex.quote", "shlex.join", "command_line")


def test_no_message_puts_a_path_into_a_command_as_it_is() -> None:
    assert len(suggested(ast.parse('f"do `stepformer resume {folder}` or {that}"'))) == 1
    assert not suggested(ast.parse('f"this stepformer reads format {FORMAT}"'))
    source = Path(stepformer.__file__).parent
    plain = [
        f"{path.relative_to(source)}:{part.lineno}"
        for path in sorted(source.rglob("*.py"))
        for part in suggested(ast.parse(path.read_text()))
        if not quoted(part.value)
    ]
    assert not plain, plain


def test_a_recipe_is_no_architecture_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "yuriiformer-tinystories"]) == 2
    assert "is a recipe: `stepformer recipes yuriiformer-tinystories` shows it." in capsys.readouterr().err
