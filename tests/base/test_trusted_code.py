"""A run folder never runs code by itself: what a stranger's folder names is imported once it is named or trusted."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forked
import runs
import stepformer as sf
from runs import small_run
from stepformer.base.errors import InputError
from stepformer.base.files import write_json
from stepformer.base.plugins import UntrustedError, load_plugin, trusting
from stepformer.base.plugins.sources import files_at, place_of
from stepformer.cli import main
from stepformer.rules import templates
from stepformer.study.study import STEPFORMER, SlurmRun
from stepformer.training import evaluate_run, load_run, resume, train

RULE = """
import stepformer as sf
from pathlib import Path
Path(__file__).with_name("ran").touch()
{more}
@sf.register_template("{name}", equation="x' = x + g")
class Rule(sf.Template):
    def kick(self, s, c, g, scale=1.0):
        return s.replace(u=scale * g)

    def drift(self, s, c, scale=1.0):
        return s.without("u").replace(x=s.x + s.u)
"""
SMALL = {"n_layer": 1, "steps": 2, "save_every": 1, "eval_every": 1, "eval_tokens": 64, "precision": "fp32"}


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers and imports is gone when it is over."""
    for table in ("_entries", "_aliases"):
        monkeypatch.setattr(templates, table, dict(getattr(templates, table)))
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if name.startswith(("stepformer_file_", "own_", "helper_")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def original(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and the code it was made with, by another process."""
    folder = tmp_path_factory.mktemp("original")
    (folder / "own_rule.py").write_text(RULE.format(name="stranger", more=""))
    words = [f"{key}={value}" for key, value in {**runs.SMALL, **SMALL, "corpus": corpus}.items()]
    command = ["train", "stranger", "--plugin", str(folder / "own_rule.py"), *words, "--out", str(folder / "run")]
    done = subprocess.run([*STEPFORMER, *command, "--quiet"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (folder / "ran").unlink()
    return folder


@pytest.fixture
def stranger(original: Path, tmp_path: Path) -> Path:
    """That folder at another place; this process has seen nothing of it, and its user has not either."""
    folder = Path(shutil.copytree(original, tmp_path / "stranger"))
    record = json.loads((folder / "run/run.json").read_text())
    write_json(folder / "run/run.json", {**record, "plugins": [str(folder / "own_rule.py")]})
    return folder


def commands(stranger: Path, corpus: Path) -> dict[str, list[str]]:
    run, out = str(stranger / "run"), str(stranger.parent / "out")
    return {
        "eval": ["eval", run],
        "generate": ["generate", run, "One", "--tokens", "2"],
        "export": ["export", run, "--out", out],
        "resume": ["resume", run, "--quiet"],
        "extend": ["extend", run, "steps=4", "--out", out],
        "diagnose": ["diagnose", run, "--depth"],
        "serve": ["serve", run, "--port", "0"],
        "finetune": ["finetune", run, "--on", str(corpus), "--out", out, "--quiet"],
        "warm start": ["train", "vanilla", f"init={run}", f"corpus={corpus}", "--out", out, "--quiet"],
        "sweep": ["finetune", run, "--both", str(corpus), "--out", out, "--quiet"],
    }


def test_no_command_runs_the_code_of_a_run(stranger: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in commands(stranger, corpus).items():
        try:
            status = main(words)
        except SystemExit as error:  # argparse
            status = int(error.code or 0)
        errors = capsys.readouterr().err
        assert status == 2, name
        assert not (stranger / "ran").exists(), name
        if name != "sweep":
            assert f"'{stranger / 'own_rule.py'}' (SHA-256" in errors, name
            assert f"stepformer trust {stranger / 'run'}" in errors
            assert len([line for line in errors.splitlines() if line.startswith("stepformer:")]) == 1, name


@pytest.mark.usefixtures("few_charts")
def test_results_are_read_without_the_code(stranger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(stranger / "run", tmp_path / "other")
    assert main(["compare", "--runs", str(stranger / "run"), "--out", str(tmp_path / "table")]) == 0
    assert "stranger" in capsys.readouterr().out
    assert main(["report", str(stranger / "run"), "--out", str(tmp_path / "page"), "--quiet", "--no-samples"]) == 0
    assert "which you have not trusted" in capsys.readouterr().err
    assert not (stranger / "ran").exists()


def test_trust_lets_it_run_until_it_is_changed(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, rule = stranger / "run", stranger / "own_rule.py"
    assert main(["trust", str(run)]) == 0
    assert str(rule) in capsys.readouterr().out
    assert not (stranger / "ran").exists()
    assert main(["trust"]) == 0
    assert "own_rule.py" in capsys.readouterr().out.replace("\n", "")
    rule.write_text(rule.read_text() + "# more\n")
    assert main(["eval", str(run)]) == 2
    assert "was made with another plug-in 'own_rule.py': SHA-256" in capsys.readouterr().err
    assert main(["trust", str(run)]) == 2
    assert "is not what the run" in capsys.readouterr().err
    assert not (stranger / "ran").exists()
    rule.write_text(rule.read_text().removesuffix("# more\n"))
    assert main(["eval", str(run)]) == 0
    assert (stranger / "ran").exists()


def test_naming_it_is_enough_also_from_another_place(stranger: Path, tmp_path: Path) -> None:
    moved = tmp_path / "own_rule.py"
    shutil.move(stranger / "own_rule.py", moved)
    with pytest.raises(InputError, match=r"There is no plug-in file '.*own_rule\.py': if it was moved, say where"):
        load_run(stranger / "run")
    assert main(["eval", str(stranger / "run"), "--plugin", str(moved)]) == 0
    assert load_run(stranger / "run").record["plugins"] == [str(moved)]


@pytest.mark.parametrize("reads", [evaluate_run, resume])
def test_whatever_opens_a_run_takes_its_plugins(stranger: Path, tmp_path: Path, reads: Callable[..., Any]) -> None:
    moved = tmp_path / "own_rule.py"
    shutil.move(stranger / "own_rule.py", moved)
    with pytest.raises(InputError, match=r"There is no plug-in file '.*own_rule\.py': if it was moved, say where"):
        reads(stranger / "run")
    assert reads(stranger / "run", plugins=[str(moved)])


def test_naming_it_is_enough_in_python_too(stranger: Path, tmp_path: Path) -> None:
    moved = tmp_path / "own_rule.py"
    shutil.move(stranger / "own_rule.py", moved)
    with pytest.raises(InputError, match=r"with --plugin \(in Python: plugins=\[\.\.\.\]\)\."):
        load_run(stranger / "run")
    with pytest.raises(InputError, match=r"There is no plug-in file 'own_rule\.py'"):
        load_run(stranger / "run", plugins="own_rule.py")  # of another folder; one file is a list of one
    assert load_run(stranger / "run", plugins=[str(moved)]).record["plugins"] == [str(moved)]


def test_a_saved_model_knows_its_rule(stranger: Path, tmp_path: Path) -> None:
    rule = str(stranger / "own_rule.py")
    load_plugin(rule)
    model = sf.build("stranger", n_layer=1, n_head=2, d_model=8, context=8, vocab_size=257)
    sf.save_run(model, tmp_path / "saved", "bytes", plugins=[rule])
    done = forked.stepformer("generate", "saved", "Hi", "--tokens", "2", "--plugin", rule, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved/plugins/0/own_rule.py.txt").read_text() == (stranger / "own_rule.py").read_text()
    assert load_run(tmp_path / "saved").record["plugins"] == [rule]


def test_a_changed_record_does_not_help(stranger: Path) -> None:
    """Other code under a name that the user trusts, and a record that knows its hash."""
    run, rule = stranger / "run", stranger / "own_rule.py"
    assert main(["trust", str(run)]) == 0
    rule.write_text(rule.read_text() + "# more\n")
    record = json.loads((run / "run.json").read_text())
    for name in record["code"]:
        record["code"][name] = {"own_rule.py": __import__("hashlib").sha256(rule.read_bytes()).hexdigest()}
    write_json(run / "run.json", record)
    with pytest.raises(UntrustedError, match="which you have not trusted"):
        load_run(run)
    write_json(run / "run.json", {key: value for key, value in record.items() if key != "code"})  # as in 0.5.0
    with pytest.warns(UserWarning, match="does not say what its plug-ins were"), pytest.raises(UntrustedError):
        load_run(run)
    assert not (stranger / "ran").exists()


def test_a_module_on_the_path_is_not_imported_either(stranger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(stranger))
    record = json.loads((stranger / "run/run.json").read_text())
    write_json(stranger / "run/run.json", {**record, "plugins": ["own_rule"], "code": {}})
    with (
        pytest.warns(UserWarning, match="does not say what"),
        pytest.raises(UntrustedError, match=r"own_rule\.py' \(SHA-256"),
    ):
        load_run(stranger / "run")
    assert not (stranger / "ran").exists()
    (stranger / "own_package").mkdir()
    (stranger / "own_package/__init__.py").write_text("open(__file__ + '.ran', 'w').close()")
    (stranger / "own_package/rules.py").write_text("")
    write_json(stranger / "run/run.json", {**record, "plugins": ["own_package.rules"], "code": {}})
    with (
        pytest.warns(UserWarning, match="does not say what"),
        pytest.raises(UntrustedError, match=r"__init__\.py' \(SHA-256"),
    ):
        load_run(stranger / "run")
    assert not (stranger / "own_package/__init__.py.ran").exists()


def test_what_lies_beside_a_plugin_is_not_on_pythons_path(tmp_path: Path) -> None:
    """Else a stranger could leave a `wandb.py` beside a rule that everybody trusts."""
    (tmp_path / "own_beside.py").write_text(RULE.format(name="beside", more="import helper_wanted"))
    (tmp_path / "helper_wanted.py").write_text("K = 1")
    (tmp_path / "helper_unasked.py").write_text("K = 2")
    assert load_plugin(str(tmp_path / "own_beside.py")).helper_wanted.K == 1
    with pytest.raises(ImportError):
        __import__("helper_unasked")
    assert str(tmp_path) not in sys.path


def test_a_helper_is_part_of_what_is_trusted(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "own_helped.py").write_text(RULE.format(name="helped", more="import helper_of_mine"))
    (folder / "helper_of_mine.py").write_text("K = 1\n")
    load_plugin(str(folder / "own_helped.py"))
    config = small_run(corpus, "helped", **SMALL)
    train(config, tmp_path / "run", quiet=True, plugins=[str(folder / "own_helped.py")])
    names = {Path(known["name"]).name for known in trusting.trusted().values()}
    assert names == {"own_helped.py", "helper_of_mine.py"}
    trusting._NAMED.clear()
    assert load_run(tmp_path / "run").step  # who has trained with it need not name it again


def test_bytecode_beside_a_helper_is_not_run(tmp_path: Path) -> None:
    """Not even that of one that is imported while the rule is used."""
    import importlib._bootstrap_external as external

    lazy = "def late():\n    import helper_lazy\n    return helper_lazy.K\n"
    (tmp_path / "own_lazy.py").write_text(RULE.format(name="lazy", more=lazy))
    helper = tmp_path / "helper_lazy.py"
    helper.write_text("K = 1\n")
    cached = Path(importlib.util.cache_from_source(str(helper)))
    cached.parent.mkdir()
    other = compile("K = 2\n", str(helper), "exec")
    cached.write_bytes(external._code_to_hash_pyc(other, bytes(8), False))  # Python would not even look at the source
    assert load_plugin(str(tmp_path / "own_lazy.py")).late() == 1


@pytest.mark.parametrize(
    ("first", "line"),
    [
        ('__all__ = ["inner"]', "from pkg import *"),
        ("", 'import importlib\ninner = importlib.import_module(".inner", "pkg")'),
        ('import importlib\ninner = importlib.import_module(".inner", __name__)', "from pkg import inner"),
    ],
    ids=["star", "two names", "own name"],
)
def test_modules_that_are_named_otherwise_are_part_of_a_plugin(tmp_path: Path, first: str, line: str) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text(f"{first}\n")
    (tmp_path / "pkg/inner.py").write_text("GAIN = 1.0\n")
    (tmp_path / "mine.py").write_text(f"{line}\n")
    assert tmp_path / "pkg/inner.py" in files_at(place_of(str(tmp_path / "mine.py")))


def test_modules_that_show_only_while_it_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit/__init__.py").write_text("")
    (tmp_path / "kit/hidden.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "mine.py").write_text("import importlib, kit\nimportlib.import_module('kit.' + 'hidden')\n")
    with pytest.raises(InputError, match="name it in an import statement"):
        load_plugin(str(tmp_path / "mine.py"))
    assert not (tmp_path / "ran").exists()


def test_a_damaged_list_stops_nobody_who_needs_it_not(corpus: Path, tmp_path: Path) -> None:
    trusting.place_of_list().write_text("{")
    train(small_run(corpus, **SMALL), tmp_path / "run", quiet=True)
    assert load_run(tmp_path / "run").step
    (tmp_path / "own_more.py").write_text(RULE.format(name="more", more=""))
    load_plugin(str(tmp_path / "own_more.py"))
    with pytest.warns(UserWarning, match="Plug-ins have to be named with --plugin again"):
        train(small_run(corpus, "more", **SMALL), tmp_path / "own", quiet=True, plugins=[str(tmp_path / "own_more.py")])


def test_a_user_may_take_a_file_off_the_list(stranger: Path) -> None:
    assert main(["trust", str(stranger / "run")]) == 0
    path = trusting.place_of_list()
    write_json(path, {**json.loads(path.read_text()), "files": {}}, sealed=False)
    with pytest.raises(UntrustedError):
        load_run(stranger / "run")


def test_python_users_are_told_the_same(stranger: Path) -> None:
    with pytest.raises(sf.InputError, match="needs code of its own"):
        sf.load_run(stranger / "run")


def test_plugins_are_passed_on_to_a_job_that_is_queued_again(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text("{}")
    words = ["train", "x.toml", "--quiet", "--plugin", "a.py", "--plugin", "b.py"]
    again = SlurmRun(str(tmp_path / "run"), words).checkpoint().function
    assert again.words == ["resume", str(tmp_path / "run"), "--quiet", "--plugin", "a.py", "--plugin", "b.py"]


def test_processes_of_a_study_do_not_import_from_the_folder_they_are_in(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("open('ran', 'w').close()")
    done = subprocess.run([*STEPFORMER, "--version"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert not (tmp_path / "ran").exists()


def test_a_hostile_export_runs_nothing(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small_run(corpus, **SMALL), tmp_path / "run", quiet=True)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "export")]) == 0
    mark = tmp_path / "ran"
    for name in ("modeling_stepformer.py", "configuration_stepformer.py", "tokenization.py", "conftest.py"):
        (tmp_path / "export" / name).write_text(f"open({str(mark)!r}, 'w').close()")
    config = json.loads((tmp_path / "export/config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_stepformer.Model"}
    (tmp_path / "export/config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert main(["import", str(tmp_path / "export"), "--out", str(tmp_path / "again")]) == 2
    assert "is not what was exported" in capsys.readouterr().err
    (tmp_path / "export/stepformer.json").unlink()
    assert main(["import", str(tmp_path / "export"), "--out", str(tmp_path / "again")]) == 0
    assert "nothing tells whether its files are what was written" in capsys.readouterr().err
    assert not mark.exists()
