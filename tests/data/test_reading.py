"""A run is read while it trains: a checkpoint that is taken away in the middle gives way to the next one."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import make_corpus, small_run
from stepformer.base import files
from stepformer.base.errors import InputError, StepformerError
from stepformer.cli import main
from stepformer.pages.reports.collect import read_run
from stepformer.training import checkpoints, load_run, train
from stepformer.training.checkpoints import Checkpoints, step_name
from stepformer.training.parallel import World
from stepformer.training.runs import RunFolder

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("reading")
    train(small_run(make_corpus(base / "corpus").folder, steps=4, eval_every=2), base / "run", quiet=True)
    return base / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    copied = Path(shutil.copytree(trained, tmp_path / "run"))
    (copied / "result.json").unlink()  # what still trains has none
    return copied


def supersede(run: Path, step: int, **settings: Any) -> None:
    """What a training does: a new best and a new last checkpoint, whose weights are all `step`, and the others go."""
    kept = Checkpoints(RunFolder(run).checkpoints, ALONE, **settings)
    model = load_shapes(run)
    (newest,) = sorted(RunFolder(run).checkpoints.glob("step-*/manifest.json"))[-1:]
    state = {**json.loads(newest.read_text())["state"], "step": step, "best": None}
    for kind in ("best", "step"):
        kept.save(
            step_name(step, kind), {"model": {name: torch.full_like(t, step) for name, t in model.items()}}, state
        )


def load_shapes(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (newest,) = sorted(RunFolder(run).checkpoints.glob("step-*/model.safetensors"))[-1:]
    return load_file(newest)


def whole(loaded: Any) -> bool:
    """Are all weights of the checkpoint that it says it is of?"""
    return all(bool((p == loaded.step).all()) for p in loaded.model.parameters())


def interrupted(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], None], times: int = 1) -> list[int]:
    """`act` happens just before the first calls of a function of `checkpoints`; returns the calls."""
    original, calls = getattr(checkpoints, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) <= times:
            act()
        return original(*args, **kwargs)

    monkeypatch.setattr(checkpoints, name, call)
    return calls


@pytest.mark.parametrize("where", ["verify", "load"])
@pytest.mark.parametrize("which", ["best", "last"])
def test_the_next_checkpoint_is_read(run: Path, monkeypatch: pytest.MonkeyPatch, where: str, which: str) -> None:
    calls = interrupted(monkeypatch, where, lambda: supersede(run, 9, keep=1))
    loaded = load_run(run, which, "cpu")
    assert (loaded.step, whole(loaded), len(calls)) == (9, True, 2)


COMMANDS = {
    "eval": ["--tokens", "64"],
    "generate": ["Once", "--tokens", "2"],
    "export": ["--out", "{}/exported"],
    "report": ["--out", "{}/report", "--no-samples", "--quiet"],
    "diagnose": ["--depth", "windows=1", "--quiet"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_do_not_notice(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    if command == "export":
        pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # pictures take seconds
    calls = interrupted(monkeypatch, "load", lambda: supersede(run, 9, keep=1))
    words = [word.format(tmp_path) for word in COMMANDS[command]]
    assert main([command, str(run), *words]) == 0
    assert len(calls) == 2
    assert "could not be asked" not in capsys.readouterr().out
    if command == "report":
        assert "could not be asked" not in (tmp_path / "report" / "report.md").read_text()


def test_an_older_checkpoint_that_stays_is_no_remedy(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest is gone, one that is kept for good is not: the reader wants the newer one, not that."""
    first = min(Checkpoints(RunFolder(run).checkpoints, ALONE).names("step"))
    stays = int(first.partition("-")[2])
    interrupted(monkeypatch, "verify", lambda: supersede(run, 9, keep=1, stays=stays))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_run(run, "last", "cpu").step == 9
    assert (RunFolder(run).checkpoints / first).is_dir()


def test_a_run_that_is_faster_than_its_reader_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(9, 1000))
    interrupted(monkeypatch, "load", lambda: supersede(run, next(steps), keep=1), times=1000)
    with pytest.raises(StepformerError, match="replaces its checkpoints faster than they can be read: try again"):
        load_run(run, device="cpu")


def test_damage_is_not_tried_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in RunFolder(run).checkpoints.glob("best-*/model.safetensors"):
        path.write_bytes(b"x" + path.read_bytes()[1:])
    calls = interrupted(monkeypatch, "verify", lambda: None)
    with pytest.raises(InputError, match=r"is damaged: the checksum of 'model\.safetensors'"):
        load_run(run, device="cpu")
    assert len(calls) == len(list(RunFolder(run).checkpoints.glob("best-*")))


def test_a_reader_beside_a_training_that_saves_all_the_time(run: Path) -> None:
    supersede(run, 9)
    problems: list[BaseException] = []
    done = threading.Event()

    def save() -> None:
        try:
            step = 10
            while not done.wait(0.01):
                supersede(run, step)
                step += 1
        except BaseException as error:
            problems.append(error)

    writer = threading.Thread(target=save)
    writer.start()
    try:
        found = [load_run(run, which, "cpu") for _ in range(8) for which in ("best", "last")]
    finally:
        done.set()
        writer.join()
    assert not problems
    assert all(map(whole, found))
    assert found[-1].step > found[0].step, "the training went on meanwhile"


def test_half_a_checkpoint_never_has_its_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a resumed run drops those that it will write again."""
    deleted: list[str] = []
    original = shutil.rmtree
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, *a, **k: (deleted.append(Path(path).name), original(path, *a, **k))
    )
    kept = Checkpoints(RunFolder(run).checkpoints, ALONE)
    kept.remove_after(0)
    assert kept.names("step") == kept.names("best") == []
    assert len(deleted) >= 3
    assert all(name.startswith(files.TEMPORARY) for name in deleted)
    assert list(RunFolder(run).checkpoints.iterdir()) == []


def test_a_note_of_a_failure_that_goes_while_it_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run removes it."""
    (run / "failed.txt").write_text("The disk is full.\n")
    assert read_run(run).state == "Failed after step 4 of 4: The disk is full."
    original = Path.read_text

    def read(self: Path, *args: Any, **kwargs: Any) -> str:
        if self.name == "failed.txt":
            self.unlink()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read)
    assert read_run(run).state == "Unfinished: step 4 of 4."
