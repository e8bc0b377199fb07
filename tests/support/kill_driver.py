"""Kills training runs at chosen calls and continues them; started by test_kill.py as a program of its own.

It imports the package once and forks for every run, so that a fault point costs a fraction of a second. A child that is
told to die wraps one function and sends itself SIGKILL before or after the n-th call. Two ranks are forked under an
agent that does what torchrun does, and are killed once they have written so many lines of metrics.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process loads it, a second or more: once here, not in every child

from agent import Agent
from runs import small_run
from stepformer.base import files
from stepformer.base.errors import StepformerError
from stepformer.optim import Optimizers
from stepformer.training import RunConfig, Stopped, checkpoints, resume, train
from stepformer.training.loop import Trainer
from stepformer.training.metrics import Metrics
from stepformer.training.runs import RunFolder

POINTS: dict[str, tuple[Any, str]] = {
    "sync": (files, "sync"),
    "rename": (files, "rename"),
    "manifest": (files, "write_json"),
    "tensors": (checkpoints, "save_file"),
    "tidy": (files, "remove_unfinished"),
    "gradients": (Trainer, "_gradients"),
    "update": (Optimizers, "step"),
    "restore": (Optimizers, "restore"),
    "metrics": (Metrics, "write"),
    "create": (RunFolder, "create"),
}


def wrapped(original: Callable[..., Any], act: Callable[[str], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        act("before")
        result = original(*args, **kwargs)
        act("after")
        return result

    return call


def arm(point: str, when: str, number: int) -> None:
    """Die at the `number`-th call (from 0) of a point."""
    owner, name = POINTS[point]
    calls = {"before": 0, "after": 0}

    def act(now: str) -> None:
        if now == when and calls[now] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        calls[now] += 1

    setattr(owner, name, wrapped(getattr(owner, name), act))


def in_child(work: Callable[[], None], kill_after: float | None = None) -> int:
    """Run `work` in a forked process; returns its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(Exception):
            work()
            status = 0
        os._exit(status)
    if kill_after is not None:
        time.sleep(kill_after)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def go_on(config: RunConfig, folder: Path) -> None:
    """What a user does after a kill: resume, or start again if the run had not even begun."""
    if RunFolder(folder).exists:
        resume(folder, quiet=True)
    else:
        train(config, folder, quiet=True)


def counted(config: RunConfig, folder: Path) -> tuple[dict[str, int], tuple[float, float]]:
    """How often each point is passed in an uninterrupted run; when its first step begins and when it ends."""
    counts = dict.fromkeys(POINTS, 0)
    times: list[float] = []
    begin = time.monotonic()

    def work() -> None:
        for point, (owner, name) in POINTS.items():

            def act(now: str, point: str = point) -> None:
                counts[point] += now == "before"
                if point == "gradients":
                    times.append(time.monotonic() - begin)

            setattr(owner, name, wrapped(getattr(owner, name), act))
        train(config, folder, quiet=True)
        record = {"counts": counts, "first": times[0], "end": time.monotonic() - begin}
        (folder.parent / "counts.json").write_text(json.dumps(record))

    assert in_child(work) == 0
    found = json.loads((folder.parent / "counts.json").read_text())
    return found["counts"], (found["first"], found["end"])


class Forked:
    """One rank; its exit status is that of the command line."""

    def __init__(self, work: Callable[[], None], env: dict[str, str]) -> None:
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.update(env)
            faulthandler.dump_traceback_later(100)  # in case they wait for each other
            status = 1
            try:
                work()
                status = 0
            except Stopped as stopped:
                status = stopped.status
            except StepformerError:
                status = 2
            finally:
                os._exit(status)

    @property
    def status(self) -> int | None:
        if self._status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if ended else None
        return self._status


def disturbed(config: RunConfig, folder: Path, kind: str, lines: int, delay: float) -> tuple[list[int], bool]:
    """Two ranks that are killed in one of torchrun's ways; their exit statuses, and whether a stop lost steps."""
    path, begun = folder / "metrics.jsonl", time.monotonic()
    if path.exists():  # at once would be before it trains again, when a signal has nobody to hear it
        lines = max(lines, len(metrics(folder, whole=False)) + 1)
    agent = Agent(lambda rank, env: Forked(lambda: go_on(config, folder), env))
    while not path.exists() or len(metrics(folder, whole=False)) < lines:
        if time.monotonic() > begun + 120:
            raise TimeoutError(f"{folder.name}: no {lines} lines of metrics")
        if any(rank.status is not None for rank in agent.ranks):
            break
        time.sleep(0.002)
    time.sleep(delay)
    if kind == "torchrun":
        statuses = agent.terminate()
    else:
        number = signal.SIGKILL if kind.startswith("kill") else signal.SIGTERM
        agent.signal(number, int(kind[-1]) if kind[-1].isdigit() else None)
        statuses = agent.wait()
    stopped = statuses == [128 + signal.SIGTERM] * 2
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1:]
    return statuses, stopped and [f"step-{metrics(folder)[-1][1]:08d}"] != [path.name for path in newest]


def weights(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["weights_sha256"])


def metrics(folder: Path, whole: bool = True) -> list[Any]:
    """Kinds, steps and losses of all lines: what does not depend on time. A killed run's last line may be cut, and one
    that was killed right after a save does not have the line that tells of it.
    """
    text = (folder / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in (text if whole else text[:-1])]
    lines = [line for line in lines if line["kind"] != "saved"]
    return [[line["kind"], line["step"], line.get("loss", line.get("val_loss"))] for line in lines]


def pairs(job: dict[str, Any], config: RunConfig, base: Path) -> list[Any]:
    """Runs of two ranks, each disturbed several times and then finished, against one that was left alone."""

    def finish(folder: Path) -> bool:
        return Agent(lambda rank, env: Forked(lambda: go_on(config, folder), env)).wait() == [0, 0]

    assert finish(base / "whole")
    reference, lines, results = weights(base / "whole"), metrics(base / "whole"), []
    for name, kills in job["pairs"]:
        folder = base / name
        found = [[kind, *disturbed(config, folder, kind, *when)] for kind, *when in kills]
        finished = finish(folder)
        results.append([name, found, finished and weights(folder) == reference and metrics(folder) == lines])
    return results


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(sys.argv[1])
    base = Path(job["folder"])
    config = small_run(Path(job["corpus"]), **job["settings"])
    if "pairs" in job:
        print(json.dumps({"results": pairs(job, config, base)}))
        return
    counts, (first, end) = counted(config, base / "whole")
    reference, lines = weights(base / "whole"), metrics(base / "whole")
    results = []
    for point, when, number in job["points"]:
        count = counts[point]
        number = number if number >= 0 else count + number
        if not 0 <= number < count:
            continue
        folder = base / f"{point}-{when}-{number}"

        def dying(point: str = point, when: str = when, number: int = number, folder: Path = folder) -> None:
            arm(point, when, number)
            train(config, folder, quiet=True)

        killed = in_child(dying)
        finished = in_child(lambda folder=folder: go_on(config, folder))  # type: ignore[misc]
        same = finished == 0 and weights(folder) == reference and metrics(folder) == lines
        results.append([f"{point} {when} {number}", killed == -signal.SIGKILL, finished, same])
    for name, moments in job["random"]:
        folder = base / name
        landed = 0  # kills between the first step and the end
        for moment in moments:  # 0 is the first step of a new run, 1 its end
            delay = max(0.0, first + moment * (end - first))
            status = in_child(lambda folder=folder: go_on(config, folder), kill_after=delay)  # type: ignore[misc]
            stepped = (folder / "metrics.jsonl").exists() and len(metrics(folder, whole=False)) > 1
            landed += status == -signal.SIGKILL and stepped
        finished = in_child(lambda folder=folder: go_on(config, folder))  # type: ignore[misc]
        same = finished == 0 and weights(folder) == reference and metrics(folder) == lines
        results.append([name, landed, finished, same])
    print(json.dumps({"counts": counts, "results": results}))


if __name__ == "__main__":
    main()
