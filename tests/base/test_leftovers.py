"""What a killed export, import or report leaves beside its place is cleared by the next one, and nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runs import make_corpus, small_run
from stepformer.base import files
from stepformer.base.errors import StepformerError
from stepformer.cli import main
from stepformer.pages.reports.paper import claim
from stepformer.training import train


@pytest.fixture(scope="module")
def dead() -> int:
    """The number of a process that is no more."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


@pytest.fixture(scope="module")
def alive() -> Iterator[int]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("leftovers")
    train(small_run(make_corpus(base / "corpus").folder, steps=2, eval_every=1), base / "run", quiet=True)
    return base / "run"


def left(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "half").write_text(name)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_cleared_and_what_is_not(tmp_path: Path, dead: int, alive: int) -> None:
    gone = [f".tmp-{dead}-out", f".tmp-old-{dead}-out", f".tmp-{os.getpid()}-out", f".tmp-{10**30}-out"]
    stays = [f".tmp-{alive}-out", f".tmp-old-{alive}-out", f".tmp-{dead}-out2", f".tmp-{dead}-2-out", ".tmp-out", "out"]
    left(tmp_path, *gone, *stays)
    (tmp_path / f".tmp-old-{os.getpid()}-out").symlink_to(tmp_path / "out")
    files.clear_left(tmp_path / "out")
    assert names(tmp_path) == sorted(stays)
    assert (tmp_path / "out" / "half").read_text() == "out"
    files.clear_left(tmp_path / "nowhere" / "out")


def test_what_was_set_aside_gets_its_name_back(tmp_path: Path, dead: int) -> None:
    left(tmp_path, f".tmp-{dead}-out", f".tmp-old-{dead}-out")
    files.clear_left(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "half").read_text() == f".tmp-old-{dead}-out"


def test_an_export_after_one_that_was_killed(
    run: Path, tmp_path: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from stepformer.exchange.huggingface import export, export_run

    out = tmp_path / "model"
    export_run(run, out)
    (out / "README.md").write_text("the first one")
    files.rename(out, tmp_path / f".tmp-old-{dead}-model")  # killed between its renames
    left(tmp_path, f".tmp-{dead}-model")

    def fails(*args: Any, **kwargs: Any) -> str:
        raise StepformerError("no card today")

    with monkeypatch.context() as patch:
        patch.setattr(export, "model_card", fails)
        with pytest.raises(StepformerError, match="no card today"):
            export_run(run, out)
    assert names(tmp_path) == ["model"]
    assert (out / "README.md").read_text() == "the first one"
    left(tmp_path, f".tmp-{dead}-model", f".tmp-old-{dead}-model")
    export_run(run, out)
    assert names(tmp_path) == ["model"]
    assert (out / "README.md").read_text() != "the first one"


def test_an_import_after_one_that_was_killed(run: Path, tmp_path: Path, dead: int, alive: int) -> None:
    pytest.importorskip("transformers")
    from stepformer.exchange.huggingface import export_run

    export_run(run, tmp_path / "exported")
    left(tmp_path / "runs", f".tmp-{dead}-again", f".tmp-{alive}-again", f".tmp-{dead}-other")
    assert main(["import", str(tmp_path / "exported"), "--out", str(tmp_path / "runs" / "again")]) == 0
    assert names(tmp_path / "runs") == sorted([f".tmp-{alive}-again", f".tmp-{dead}-other", "again"])


def test_a_report_after_one_that_was_killed(
    run: Path, tmp_path: Path, dead: int, alive: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # pictures take seconds
    (tmp_path / ".cache").mkdir()
    for place in (
        f".tmp-{dead}-index.html",
        f".tmp-{dead}-mine",
        f".tmp-{alive}-report.md",
        f".cache/.tmp-{dead}-files.json",
    ):
        (tmp_path / place).write_text("half")
    assert main(["report", str(run), "--out", str(tmp_path), "--no-samples", "--quiet"]) == 0
    assert {name for name in names(tmp_path) if name.startswith(".tmp")} == {
        f".tmp-{dead}-mine",
        f".tmp-{alive}-report.md",
    }
    assert names(tmp_path / ".cache") == ["files.json", "models.jsonl"]
    (tmp_path / f".tmp-{dead}-curves.png").write_text("half")
    claim(tmp_path, ["curves.png"])
    assert not (tmp_path / f".tmp-{dead}-curves.png").exists()


# Forks for every operation of `whole`, dies before or after it, and does what the next export does first.
KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
from stepformer.base import files
from stepformer.exchange import whole

base, results = Path(sys.argv[1]), []
operations = ((files, "sync"), (files, "make_ordinary"), (files, "rename"), (shutil, "rmtree"))


def write(out, text):
    with whole(out) as folder:
        for name in ("a", "b"):
            (folder / name).write_text(text)


def die_at(number):
    passed = [0]

    def wrapped(original):
        def call(*args, **kwargs):
            for act in (lambda: None, lambda: original(*args, **kwargs)):
                act()
                if passed[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                passed[0] += 1
        return call

    for owner, name in operations:
        setattr(owner, name, wrapped(getattr(owner, name)))


for number in range(100):
    out = base / str(number) / "out"
    write(out, "old")
    child = os.fork()
    if child == 0:
        die_at(number)
        write(out, "new")
        os._exit(0)
    killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    there = out.is_dir()
    files.clear_left(out)
    found = sorted(path.read_text() for path in out.iterdir()) if out.is_dir() else []
    results.append([killed, there, found, [path.name for path in out.parent.iterdir()]])
    if not killed:
        break
print(json.dumps(results))
"""


@pytest.mark.slow
def test_killed_before_and_after_every_operation(tmp_path: Path) -> None:
    """The place holds the old export or the new one, whole, and nothing lies beside it."""
    pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout)
    assert len(results) > 12
    assert any(not there for _, there, _, _ in results), "none died between the two renames"
    for killed, _, found, beside in results:
        assert found in ([["new", "new"]] if not killed else [["old", "old"], ["new", "new"]])
        assert beside == ["out"]


@pytest.mark.slow
def test_a_session_of_tests_leaves_no_folder_of_its_own(tmp_path: Path) -> None:
    quick = Path(__file__).parents[1] / "data/test_batches.py"
    words = ["-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", str(quick)]
    subprocess.run([sys.executable, *words], env={**os.environ, "TMPDIR": str(tmp_path)}, check=True)
    assert not [*tmp_path.glob("stepformer-*")]
