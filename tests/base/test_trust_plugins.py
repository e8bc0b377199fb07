"""Plug-ins and rules from Python: whatever they change, rows that had another code are not taken for equals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

import forked
import stepformer as sf
from runs import make_corpus, small_run
from stepformer.base.errors import ChangedRuleError, InputError
from stepformer.base.plugins import files_of, load_plugin, loaded
from stepformer.cli import main
from stepformer.rules import templates
from stepformer.study import compare, load_records

SMALL = ["n_layer=1", "n_head=2", "d_model=16", "context=16", "batch=4", "eval_tokens=256", "device=cpu", "steps=3"]
RULE = """
import stepformer as sf
IMPORTS

@sf.register_template("NAME", equation="x' = x + c g")
class Rule(sf.Template):
    def kick(self, s, c, g, scale=1.0):
        return s.replace(u=scale * FACTOR * g)

    def drift(self, s, c, scale=1.0):
        return s.without("u").replace(x=s.x + s.u)
"""
# Halves what every MLP does, and registers nothing.
PATCH = """
import torch.nn.functional as F
kept = F.gelu
F.gelu = lambda *args, **named: 0.5 * kept(*args, **named)
"""


@pytest.fixture
def gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as before when the test is over."""
    monkeypatch.setattr(F, "gelu", F.gelu)


def rule(path: Path, name: str, factor: str = "0.5", imports: str = "") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(RULE.replace("NAME", name).replace("FACTOR", factor).replace("IMPORTS", imports))
    return path


def command(corpus: Path, *words: str) -> int:
    return main([*words, f"corpus={corpus}", *SMALL, "--quiet"])


def code_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "run.json").read_text())["code"]
    return found


@pytest.mark.usefixtures("gelu")
def test_a_plugin_that_only_some_rows_had_is_told(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patch, study = tmp_path / "patching.py", str(tmp_path / "study")
    patch.write_text(PATCH)
    beside = "code.beside plug-in 'patching.py' ("
    assert command(corpus, "compare", "vanilla", "yurii", "--out", study) == 0
    assert beside not in capsys.readouterr().out
    # more rows, or more seeds, with the plug-in
    assert command(corpus, "compare", "vanilla", "yurii", "hb", "--plugin", str(patch), "--out", study) == 0
    assert f"The rows also differ in {beside}vanilla unset, yurii unset, hb " in said(capsys)
    assert command(corpus, "compare", "vanilla", "yurii", "--seeds", "2", "--plugin", str(patch), "--out", study) == 0
    assert f"The seeds of vanilla differ in {beside}seed 42 unset, seed 43 " in said(capsys)
    assert command(corpus, "train", "vanilla", "--plugin", str(patch), "--out", str(tmp_path / "patched")) == 0
    runs = [str(tmp_path / "patched"), str(tmp_path / "study" / "yurii-s42")]
    assert main(["compare", "--runs", *runs, "--out", str(tmp_path / "both"), "--quiet"]) == 0
    assert f"The rows also differ in {beside}" in said(capsys)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("gelu")
def test_a_plugin_that_came_with_another_run_is_written_down(corpus: Path, tmp_path: Path) -> None:
    """Opening a run imports its plug-in; what is trained after that has it, too."""
    patch = tmp_path / "patching.py"
    patch.write_text(PATCH)
    config = small_run(corpus, "vanilla", steps=3)
    before = sf.train(config, tmp_path / "before", quiet=True)
    load_plugin(str(patch))
    after = sf.train(config, tmp_path / "after", quiet=True, label="after")
    assert after["weights_sha256"] != before["weights_sha256"]
    table = compare(load_records([tmp_path / "before", tmp_path / "after"]), "vanilla")
    (told,) = [found for found in table.differences if found.key.startswith("code.")]
    assert (told.key, told.meant) == ("code.beside plug-in 'patching.py'", False)


def test_a_row_that_uses_a_plugin_stands_beside_rows_without_it(corpus: Path, tmp_path: Path) -> None:
    """The usual order of work: first the baselines, then a rule of one's own, in the same study."""
    own = rule(tmp_path / "own.py", "of-its-own")
    study = str(tmp_path / "study")
    assert command(corpus, "compare", "vanilla", "yurii", "--out", study) == 0
    assert command(corpus, "compare", "vanilla", "yurii", "of-its-own", "--plugin", str(own), "--out", study) == 0
    assert "template 'of-its-own'" in code_of(tmp_path / "study" / "of-its-own-s42")


def test_one_process_has_one_rule_of_a_name(corpus: Path, tmp_path: Path) -> None:
    def registered(factor: float) -> None:
        @sf.register_template("with-a-factor", equation="x' = x + c g")
        class WithAFactor(sf.Template):
            def kick(self, s: Any, c: Any, g: Any, scale: float = 1.0) -> Any:
                return s.replace(u=scale * factor * g)

            def drift(self, s: Any, c: Any, scale: float = 1.0) -> Any:
                return s.without("u").replace(x=s.x + s.u)

    for number, factor in enumerate((1.0, 1.0, 9.0)):
        registered(factor)
        config = small_run(corpus, "with-a-factor", steps=3)
        if factor == 1.0:
            sf.train(config, tmp_path / str(number), quiet=True)
        else:
            with pytest.raises(ChangedRuleError, match="already used another template 'with-a-factor'"):
                sf.train(config, tmp_path / str(number), quiet=True)


def test_a_dot_in_the_name_of_a_file_is_told(tmp_path: Path) -> None:
    path = rule(tmp_path / "own.v2.py", "with-a-dot")
    with pytest.raises(InputError, match=r"'own\.v2\.py' has a dot in its name, .* call it own_v2\.py\."):
        load_plugin(str(path))


WAYS = (
    "from HELPER import K",
    "import importlib\nK = importlib.import_module('HELPER').K",
    "K = __import__('HELPER').K",
)


@pytest.mark.parametrize("number", range(len(WAYS)))
def test_files_beside_a_plugin_can_be_imported_in_every_way(number: int, tmp_path: Path) -> None:
    name = f"helper_number_{number}"
    path = rule(tmp_path / "own.py", name, "K", WAYS[number].replace("HELPER", name))
    (tmp_path / f"{name}.py").write_text("K = 0.5\n")
    assert {file.name for file in files_of(load_plugin(str(path)))} == {"own.py", f"{name}.py"}
    assert {*loaded()["plug-in 'own.py'"]} == {"own.py", f"{name}.py"}


@pytest.mark.parametrize("order", ["first.py second.py", "second.py first.py"])
def test_a_plugin_may_import_another_one(order: str, tmp_path: Path) -> None:
    number = order.index("first")
    one, two = (f"{word}_of_{number}" for word in ("first", "second"))
    rule(tmp_path / f"{one}.py", one)
    rule(tmp_path / f"{two}.py", two, imports=f"from {one} import Rule as Base")
    for word in order.replace("first", one).replace("second", two).split():
        load_plugin(str(tmp_path / word))
    assert {one, two} <= {*templates.names()}


@pytest.mark.slow
def test_a_rule_may_count(corpus: Path, tmp_path: Path) -> None:
    """What a class remembers while it runs does not make it another rule."""
    path = rule(tmp_path / "counting.py", "counting", "(len(Rule.seen.setdefault(id(s), [])) + 0.5)")
    path.write_text(path.read_text().replace("    def kick", "    seen = {}\n\n    def kick", 1))
    study = str(tmp_path / "study")
    assert command(corpus, "compare", "vanilla", "counting", "--seeds", "2", "--plugin", str(path), "--out", study) == 0


@pytest.mark.slow
def test_an_interrupted_fine_tuning_goes_on_with_a_plugin(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by a path from here, and by the runs by the whole one."""
    monkeypatch.chdir(tmp_path)
    rule(tmp_path / "mine.py", "in-finetuning")
    study = ["compare", "vanilla", "in-finetuning", "--seeds", "2", "--plugin", "mine.py", "--out", "study"]
    assert command(corpus, *study) == 0
    other = make_corpus(tmp_path / "other", count=5).folder
    runs = [f"study/{name}-s{seed}" for name in ("vanilla", "in-finetuning") for seed in (42, 43)]
    tune = ["finetune", *runs, "--on", str(other), "--plugin", "mine.py", "--out", "tuned", "--quiet", "steps=2"]
    tune += ["eval_tokens=64", "device=cpu"]
    assert main(tune) == 0
    shutil.rmtree("tuned/in-finetuning-s43")
    assert main(tune) == 0
    assert len(code_of(tmp_path / "tuned" / "in-finetuning-s43")) == 2  # the plug-in and its rule


def test_a_helper_of_another_plugin_is_not_taken(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        path = rule(tmp_path / folder / "own.py", f"of-{folder}", "K", "from a_helper_of_two import K")
        (path.parent / "a_helper_of_two.py").write_text("K = 0.5\n")
    load_plugin(str(tmp_path / "one" / "own.py"))
    with pytest.raises(InputError, match=r"got '.*one.a_helper_of_two.py', not the one beside it"):
        load_plugin(str(tmp_path / "two" / "own.py"))


@pytest.mark.slow
def test_bytecode_of_another_file_is_not_taken(tmp_path: Path) -> None:
    """Same size, same second: Python itself would take the old one."""
    path = rule(tmp_path / "own.py", "of-bytecode", "K", "from helper_of_bytecode import K")
    helper = tmp_path / "helper_of_bytecode.py"
    say = f"from stepformer.base.plugins import load_plugin; print(load_plugin({str(path)!r}).K)"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    for factor in ("1.0", "9.0"):
        helper.write_text(f"K = {factor}\n")
        os.utime(helper, (1_700_000_000, 1_700_000_000))
        plainly = [sys.executable, "-c", "import helper_of_bytecode"]  # leaves its bytecode, or trusts it
        subprocess.run(plainly, cwd=tmp_path, env=environment, check=True)
        said = subprocess.run([sys.executable, "-c", say], env=environment, capture_output=True, text=True, check=True)
        assert said.stdout.strip() == factor


@pytest.mark.slow
@pytest.mark.parametrize("start", ["standard input", "a command"])
def test_a_rule_without_a_file(start: str, corpus: Path, tmp_path: Path) -> None:
    words = ", ".join(repr(word) for word in (f"corpus={corpus}", *SMALL))
    body = RULE.replace("NAME", "fileless").replace("FACTOR", "0.5").replace("IMPORTS", "")
    program = f"{body}\nsf.train(sf.run_config('fileless', [{words}]), {str(tmp_path / 'run')!r}, quiet=True)\n"
    words_of = [sys.executable, "-"] if start == "standard input" else [sys.executable, "-c", program]
    done = subprocess.run(words_of, input=program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {*code_of(tmp_path / "run")} == {"template 'fileless'"}


@pytest.mark.slow
def test_the_source_that_a_run_keeps_can_be_used(corpus: Path, tmp_path: Path) -> None:
    """A copy under another name is the same rule; a run of an imported rule says where its source lies."""

    def words(*given: str) -> str:
        done = forked.stepformer(*given, cwd=tmp_path)
        assert "Traceback" not in done.stderr
        return f"{done.stdout}{done.stderr}"

    path = rule(tmp_path / "kept_rule.py", "kept-rule")
    words("train", "kept-rule", "--plugin", "kept_rule.py", "--out", "run", f"corpus={corpus}", *SMALL, "--quiet")
    given = ", ".join(repr(word) for word in (f"corpus={corpus}", *SMALL))
    program = f"import kept_rule, stepformer as sf\nsf.train(sf.run_config('kept-rule', [{given}]), 'own', quiet=True)"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, check=True)
    path.unlink()
    assert f"A copy of it lies in '{Path('run') / 'plugins'}': save its .py.txt as .py." in words("eval", "run")
    assert "its source lies in 'own/plugins/0/kept_rule.py.txt'. Read it" in words("eval", "own")
    source = (tmp_path / "run/plugins/0/kept_rule.py.txt").read_text()
    (tmp_path / "mine.py").write_text(source)
    for run in ("run", "own"):
        assert "kept-rule after step" in words("eval", run, "--plugin", "mine.py")
    (tmp_path / "run/plugins/0/linked.py.txt").symlink_to(corpus / "manifest.json")
    words("export", "run", "--out", "export", "--plugin", "mine.py")
    assert (tmp_path / "export/plugins/0/kept_rule.py.txt").read_text() == source
    assert not (tmp_path / "export/plugins/0/linked.py.txt").exists()
    card = (tmp_path / "export/README.md").read_text()
    assert "```python\nimport kept_rule  # the rule, before the model\nimport stepformer" in card
    assert "saved without .txt: `plugins/0/kept_rule.py.txt`." in card
    assert " --plugin kept_rule.py\n" in card
    (tmp_path / "mine.py").write_text(f"{source}\n# changed\n")
    assert "copy its .py.txt to .py and name that with --plugin." in words("eval", "own", "--plugin", "mine.py")
