"""Several ranks end together: none before the last save is on disk, all with one status, the reason said once."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agent import Agent, Rank
from forked import Running, begin, start
from runs import SMALL, small_run
from stepformer.base.errors import InputError
from stepformer.study.study import carry_out
from stepformer.training import RunConfig, resume, stopping, train
from stepformer.training.checkpoints import verify
from stepformer.training.runs import RunFolder
from stepformer.training.stopping import LostRankError

SETTINGS = {**SMALL, "steps": 8, "eval_every": 8, "save_every": 2}

# What is wrong, in a process that knows its rank.
STOP = """
def asked(self, calls=[]):
    calls.append(0)
    return 15 if len(calls) == 5 and rank == 1 else 0
Watch.asked = asked
"""
NAN = """
original = Trainer._gradients
def poisoned(self, t):
    loss = original(self, t)
    return loss * math.nan if t == 5 else loss
Trainer._gradients = poisoned
"""
SLOW = """
rename = files.rename
def slowly(source, target):
    time.sleep(2.5 if target.name == "step-0000000" + sys.argv[1] else 0)
    rename(source, target)
files.rename = slowly
"""
READ = """
read = LocalBatches.read
def unreadable(self, t):
    if t == 3 and rank == 1:
        raise InputError("The shard 'train-000.bin' cannot be read: Input/output error.")
    return read(self, t)
LocalBatches.read = unreadable
"""
MEMORY = """
loss_of = ParallelModel.loss
def short(self, inputs, targets, calls=[]):
    calls.append(0)
    if len(calls) == 4 and rank == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return loss_of(self, inputs, targets)
ParallelModel.loss = short
"""
BUG = MEMORY.replace("torch.OutOfMemoryError", "ZeroDivisionError")
DISK = """
sync = files.sync
def full(file):
    if "step-00000004" in file.name:
        raise OSError(28, "No space left on device")
    sync(file)
files.sync = full
"""
HANG = """
read = LocalBatches.read
def hanging(self, t):
    time.sleep(1000 if t == 3 and rank == 1 else 0)
    return read(self, t)
LocalBatches.read = hanging
"""
DIE = """
step = Optimizers.step
def dying(self, t):
    step(self, t)
    if t == 4 and rank == int(sys.argv[1]):
        os.kill(os.getpid(), 9)
Optimizers.step = dying
"""
SLOWER = SLOW.replace('target.name == "step-0000000" + sys.argv[1]', 'target.name > "step-00000004"')
SLOWER += "loop.SLOW_SAVE = 0.1"
PROGRAM = """
import math, os, sys, time
import torch
from stepformer.base import files
from stepformer.cli.main import main
from stepformer.base.errors import InputError
from stepformer.optim import Optimizers
from stepformer.training import loop, stopping
from stepformer.training.loop import Trainer
from stepformer.training.parallel import LocalBatches, ParallelModel
from stepformer.training.stopping import Watch
torch.set_num_threads(1)
stopping.GRACE, stopping.EVERY = 1.0, 0.1
rank = int(os.environ["RANK"])
sys.argv = ["stepformer", {argument!r}]
{fault}
sys.exit(main({words!r}))
"""


class Pair:
    """`stepformer train` on two ranks, under an agent with little patience."""

    def __init__(
        self,
        corpus: Path,
        folder: Path,
        fault: str,
        argument: Any = "",
        *more: str,
        patience: float = 1.0,
        **changes: Any,
    ) -> None:
        self.folder = RunFolder(folder)
        words = [f"{key}={value}" for key, value in {**SETTINGS, "corpus": corpus, **changes}.items()]
        words = ["train", "yurii", *words, "--out", str(folder), "--quiet", *more]
        code = PROGRAM.format(fault=fault, words=words, argument=str(argument))
        self.processes: list[Running] = []

        def start(rank: int, env: dict[str, str]) -> Rank:
            self.processes.append(begin(code, cwd=folder.parent, env={**os.environ, **env}))
            return self.processes[-1]

        self.agent = Agent(start, patience=patience)

    def said(self) -> list[str]:
        """What each rank has said, our sentences without what libraries say."""
        return [
            "\n".join(line for line in process.wait().stderr.splitlines() if line.startswith(("stepformer:", "note:")))
            for process in self.processes
        ]

    def steps(self) -> list[str]:
        return [path.name for path in sorted(self.folder.checkpoints.glob("step-*")) if verify(path)]


def after(pair: Pair, step: int) -> None:
    """Wait until a checkpoint is there."""
    deadline = time.monotonic() + 120
    while not (pair.folder.checkpoints / f"step-{step:08d}").is_dir() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("fault", "slow", "more", "statuses", "sentence"),
    [
        pytest.param(STOP, 5, [], [143, 143], "stopped by SIGTERM after step 5; saved", id="signal"),
        pytest.param(
            "", 1, ["--max-time", "0"], [142, 142], "out of time after step 1", id="time", marks=pytest.mark.slow
        ),
        pytest.param(
            NAN, 5, [], [2, 2], "in step 6: the loss is not finite (loss nan", id="nan", marks=pytest.mark.slow
        ),
    ],
)
def test_no_rank_leaves_before_the_last_save_is_on_disk(
    corpus: Path, tmp_path: Path, fault: str, slow: int, more: list[str], statuses: list[int], sentence: str
) -> None:
    """The save takes 2.5 s; who is left 1 s after the first has gone is killed (torchrun: 30 s)."""
    pair = Pair(corpus, tmp_path / "run", SLOW + fault, slow, *more)
    assert pair.agent.wait() == statuses
    assert pair.steps()[-1] == f"step-{slow:08d}"
    first, second = pair.said()
    assert first.count("stepformer:") == 1
    assert sentence in first
    assert second == ""


@pytest.mark.parametrize(
    ("fault", "changes", "statuses", "sentence"),
    [
        pytest.param(READ, {}, [2, 2], "The shard 'train-000.bin' cannot be read", id="a shard"),
        pytest.param(MEMORY, {}, [2, 2], "Out of memory: 4 sequences in one pass", id="memory", marks=pytest.mark.slow),
        pytest.param(DISK, {}, [2, 2], "The disk is full: '", id="disk", marks=pytest.mark.slow),
        pytest.param(
            DISK, {"parallel": "fsdp"}, [2, 2], "The disk is full: '", id="disk under fsdp", marks=pytest.mark.slow
        ),
        pytest.param(
            BUG, {}, [1, 1], "Rank 1 failed with ZeroDivisionError: CUDA out", id="bug", marks=pytest.mark.slow
        ),
        pytest.param("", {"batch": 7}, [2, 2], "batch = 7 cannot be shared", id="setting", marks=pytest.mark.slow),
        pytest.param(
            HANG, {"collective_timeout": 3}, [2, 2], "did not answer for 3 s", id="hangs", marks=pytest.mark.slow
        ),
    ],
)
def test_what_goes_wrong_on_one_rank_ends_both_with_one_sentence(
    corpus: Path, tmp_path: Path, fault: str, changes: dict[str, Any], statuses: list[int], sentence: str
) -> None:
    pair = Pair(corpus, tmp_path / "run", fault, **changes)
    assert pair.agent.wait(60) == statuses
    first, second = pair.said()
    assert first.count("stepformer:") == 1
    assert sentence in first
    assert second == ""
    lasting = statuses == [2, 2] and "answer" not in sentence and "batch" not in sentence
    assert pair.folder.failure.exists() == (lasting and fault != "")
    if lasting:
        assert sentence in pair.folder.failure.read_text()
        assert pair.steps() == ["step-00000002"]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_ends_the_other_within_seconds(corpus: Path, tmp_path: Path, lost: int) -> None:
    """By itself: the agent would wait longer than the test does."""
    pair = Pair(corpus, tmp_path / "run", DIE, lost, patience=300)
    begun = time.monotonic()
    statuses = pair.agent.wait()
    assert statuses[lost] == -signal.SIGKILL
    assert statuses[1 - lost] == 2
    assert time.monotonic() - begun < 100
    said = pair.said()[1 - lost]
    assert said.startswith("stepformer: Another rank was lost (killed, or its machine is gone)")
    assert not pair.folder.failure.exists()  # a script may start it again
    assert pair.steps()[-1] == "step-00000004"


@pytest.mark.slow
def test_a_save_that_takes_longer_than_torchrun_waits(corpus: Path, tmp_path: Path) -> None:
    """torchrun is told to end: the checkpoint before stands, and the note says how to give it more time."""
    whole = train(small_run(corpus, **{**SETTINGS, "steps": 60}), tmp_path / "whole", quiet=True)
    pair = Pair(corpus, tmp_path / "run", SLOWER, steps=60)
    after(pair, 4)
    assert pair.agent.terminate() == [-signal.SIGKILL, -signal.SIGKILL]
    first, second = pair.said()
    assert "note: Saving step" in first
    assert "torchrun --shutdown-timeout SECONDS" in first
    assert second == ""
    assert pair.steps() == ["step-00000002", "step-00000004"]
    again = resume(tmp_path / "run", quiet=True)
    assert again["val_loss"] == pytest.approx(whole["val_loss"], abs=1e-9)  # fp64, other sums on one rank than on two


TORCHRUN = """
import sys, time
from pathlib import Path
from stepformer.base import files
from stepformer.cli.main import main
sync = files.sync
def slowly(file):
    time.sleep(45 if Path(sys.argv[1]).exists() and file.name.endswith("model.safetensors") else 0)
    sync(file)
files.sync = slowly
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_a_save_of_45_seconds_under_torchrun(corpus: Path, tmp_path: Path) -> None:
    """The real one, whose patience of 30 s begins when the first rank leaves: a rank is sent SIGTERM."""
    script = tmp_path / "slow_disk.py"
    script.write_text(TORCHRUN)
    settings = {**SETTINGS, "steps": 100_000, "save_every": 100_000, "eval_every": 100_000, "corpus": corpus}
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    command += [str(tmp_path / "slow"), "train", "yurii", *words, "--out", str(tmp_path / "run"), "--quiet"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") > 5):
        time.sleep(0.2)
    (tmp_path / "slow").touch()
    ranks = subprocess.run(["pgrep", "-P", str(running.pid)], capture_output=True, text=True, check=True).stdout.split()
    assert len(ranks) == 2
    os.kill(int(ranks[1]), signal.SIGTERM)
    _, said = running.communicate(timeout=300)
    assert said.count("stopped by SIGTERM after step") == 1
    assert "Traceback" not in said.partition("stopped by")[0]
    kept = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert f"after step {verify(kept)['step']};" in said


def test_of_a_study_the_first_rank_prints(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of ranks follow each other in one process, one for each run; the table is printed and written once."""
    settings = {**SETTINGS, "steps": 2, "n_layer": 1, "eval_tokens": 64, "corpus": corpus}
    words = ["compare", "vanilla", "yurii", "tmm", *(f"{key}={value}" for key, value in settings.items())]
    words += ["--out", str(tmp_path / "study"), "--quiet"]
    agent = Agent(lambda rank, env: start(*words, env={**os.environ, **env}))
    assert agent.wait(100) == [0, 0]
    first, second = (rank.wait() for rank in agent.ranks)
    assert first.stdout.count("written: ") == 1
    assert second.stdout == second.stderr == ""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="processes train one run together: --jobs 2 does not go with it"):
        carry_out([], jobs=2)


def test_the_timeout_of_collectives_is_no_part_of_a_run(corpus: Path) -> None:
    plain, patient = small_run(corpus), small_run(corpus, collective_timeout=60)
    assert plain.hash == patient.hash
    older = plain.to_dict()
    del older["train"]["collective_timeout"]
    assert RunConfig.from_dict(older) == plain


def test_what_a_rank_has_said_it_says_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """While its watch thread ends the process, its main thread hears only that the other rank has gone."""
    ended = list[int]()

    class Store:
        def __getattr__(self, name: str) -> Any:
            reason = json.dumps(dataclasses.asdict(stopping.Reason.of(InputError("It was full."), 1)))
            return lambda *given: {"check": True, "get": reason, "add": 1}.get(name)

    def end(status: int) -> None:
        time.sleep(0.2)
        ended.append(status)

    for name in ("EVERY", "GRACE"):
        monkeypatch.setattr(stopping, name, 0.01)
    monkeypatch.setattr(stopping.os, "_exit", end)
    ending = stopping.Ending(0, 2, Store(), 1)
    assert ending._going.wait(10)
    ending.leave(LostRankError("Another rank was lost."))
    assert ended == [2]
    assert capsys.readouterr().err == "stepformer: It was full.\n"
