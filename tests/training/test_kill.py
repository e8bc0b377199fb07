"""A run killed at any moment and resumed ends with the weights of one that was left alone, to the bit."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draws import shifted
from runs import make_corpus

HERE = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus")).folder


def drive(corpus: Path, folder: Path, points: list[Any], moments: list[Any], **settings: Any) -> dict[str, Any]:
    return driven(corpus, folder, settings, points=points, random=moments)


def driven(corpus: Path, folder: Path, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    job = {"corpus": str(corpus), "folder": str(folder), "settings": settings, **more}
    done = subprocess.run(
        [sys.executable, str(HERE / "kill_driver.py"), json.dumps(job)],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any], expected: int) -> None:
    assert len(found["results"]) >= expected, found["counts"]
    wrong = [name for name, killed, finished, same in found["results"] if not (killed and finished == 0 and same)]
    assert not wrong, wrong


def every(point: str, numbers: range | list[int]) -> list[list[Any]]:
    return [[point, when, n] for n in numbers for when in ("before", "after")]


SHORT = {"steps": 6, "save_every": 2, "eval_every": 3}


@pytest.mark.parametrize("every_so_many", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_stage_of_a_save_and_of_a_step(corpus: Path, tmp_path: Path, every_so_many: int) -> None:
    """Every file operation of a new run's first two saves, the last ones of all, and steps around their updates."""
    points = [
        *(["sync", "before", n] for n in range(12)),
        *(["rename", "before", n] for n in range(12)),
        *(["tensors", "after", n] for n in range(4)),
        ["create", "before", 0],
        ["create", "after", 0],
        ["tidy", "before", 2],
        *every("gradients", [0, 3]),
        *every("update", [3, 5]),
        *every("metrics", [0, 4]),
        *every("rename", [-1]),
    ]
    check(drive(corpus, tmp_path, points[::every_so_many], [], **SHORT), 40 // every_so_many)


@pytest.mark.slow
def test_killed_before_and_after_every_call(corpus: Path, tmp_path: Path) -> None:
    names = ("sync", "rename", "tensors", "manifest", "tidy", "gradients", "update", "metrics")
    points = [point for name in names for point in every(name, range(24))]
    check(drive(corpus, tmp_path, points, []), 200)


@pytest.mark.slow
def test_killed_at_random_moments(corpus: Path, tmp_path: Path) -> None:
    """Two kills each, at moments drawn with a fixed seed between the first step and the end of an undisturbed run."""
    generator = random.Random(shifted(0))
    moments = [[f"random-{i}", [generator.uniform(-0.2, 0.9) for _ in range(2)]] for i in range(8)]
    found = drive(corpus, tmp_path, [], moments, steps=20)
    assert sum(landed for _, landed, _, _ in found["results"]) >= 4, found[
        "results"
    ]  # some are early, by chance or load
    wrong = [name for name, _, finished, same in found["results"] if finished or not same]
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "runs"), [("ddp", 8), ("fsdp", 4)])
def test_two_ranks_killed(corpus: Path, tmp_path: Path, kind: str, runs: int) -> None:
    """Two kills each of one rank, of all, or of torchrun, at lines of metrics drawn with a fixed seed.

    Whoever is asked to stop has saved what was done; all ranks end with one status, but those that were killed.
    """
    generator = random.Random(shifted(len(kind)))
    ways = ["kill 0", "kill 1", "torchrun", "stop all", "stop 0", "stop 1"]
    settings = {"steps": 24, "eval_every": 8, "save_every": 5, "parallel": kind}
    pairs = []
    for i in range(runs):
        moments = [(generator.randrange(1, 10), generator.uniform(0, 0.03)) for _ in range(2)]
        kills = [[ways[(2 * i + j) % len(ways)], 10 * j + lines, delay] for j, (lines, delay) in enumerate(moments)]
        pairs.append([f"pair-{i}", kills])
    found = driven(corpus, tmp_path, settings, pairs=pairs)["results"]
    disturbed = [kill for _, kills, _ in found for kill in kills]
    print({way: [statuses for what, statuses, _ in disturbed if what == way] for way in ways})
    assert len(disturbed) == 2 * runs
    for way, statuses, lost in disturbed:
        assert not lost, (way, statuses)
        if way.startswith("kill"):
            killed = int(way[-1])
            assert (statuses[killed], statuses[1 - killed]) == (-9, 2)
        else:
            assert statuses == [143, 143], way
    assert [name for name, _, same in found if not same] == []


@pytest.mark.parametrize(
    ("settings", "every_so_many"),
    [
        pytest.param({"sam": "always"}, 5, id="sam, some", marks=pytest.mark.slow),
        pytest.param({"sam": "always"}, 1, id="sam", marks=pytest.mark.slow),
        pytest.param({"optim.name": "adamw", "batch": 16, "micro_batch": 4}, 1, id="adamw", marks=pytest.mark.slow),
        pytest.param(
            {"optim.name": "scion", "save_every": 5, "schedule": "wsd"}, 1, id="scion", marks=pytest.mark.slow
        ),
    ],
)
def test_other_optimizers_and_sam(corpus: Path, tmp_path: Path, settings: dict[str, Any], every_so_many: int) -> None:
    points = [*every("gradients", [5]), *every("restore", [2]), *every("update", [4]), *every("rename", [9])]
    check(drive(corpus, tmp_path, points[::every_so_many], [], **{**SHORT, **settings}), 6 // every_so_many)
