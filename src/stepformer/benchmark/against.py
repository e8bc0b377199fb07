"""This checkout against another one on the CPU: processes in turn, A B A B, so that a busy machine troubles both."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import stepformer
from stepformer.benchmark.table import Table
from stepformer.catalogue import model_config
from stepformer.config import merge
from stepformer.errors import InputError, StepformerError

SAYING = (
    "Ratio: time there / time here, so above 1 means that this checkout is faster; the median over the rounds, in "
    "brackets the lowest and the highest. Where these lie on both sides of 1 nothing can be told apart."
)


@dataclass(frozen=True)
class Job:
    """What both checkouts measure."""

    names: list[str]
    words: list[str]
    size: str
    micro_batch: int | None
    steps: int
    decode: bool


def compare(job: Job, other: Path, rounds: int) -> dict[str, Any]:
    """Median times of both in each round, and their ratios."""
    if not (other / "stepformer" / "__init__.py").is_file():
        raise InputError(f"There is no package stepformer in '{other}': --against takes another checkout's src folder.")
    settings = merge({}, job.words, "model")
    for name in job.names:
        model_config(name, size=job.size, **settings)  # a wrong name is said here, not by a process
    here = Path(stepformer.__file__).parents[1]
    times: dict[str, list[dict[str, dict[str, float]]]] = {"here": [], "there": []}
    for number in range(rounds):
        order = (("there", other), ("here", here))
        for side, source in order if number % 2 == 0 else reversed(order):
            print(f"round {number + 1}/{rounds}: {side}", file=sys.stderr, flush=True)
            times[side].append(_measure(job, settings, source))
    ratios: dict[str, dict[str, list[float]]] = {}
    for there, now in zip(times["there"], times["here"], strict=True):
        for name, kinds in now.items():
            for kind, ms in kinds.items():
                ratios.setdefault(name, {}).setdefault(kind, []).append(there[name][kind] / ms)
    return {"job": asdict(job), "rounds": rounds, "times_ms": times, "ratios": ratios}


def _measure(job: Job, settings: dict[str, Any], source: Path) -> dict[str, dict[str, float]]:
    environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "CUDA_VISIBLE_DEVICES": ""}
    probe = Path(__file__).with_name("probe.py")
    command = [sys.executable, "-P", str(probe), json.dumps({**asdict(job), "settings": settings})]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise StepformerError(f"Measuring '{source}' failed: {last}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if not Path(found["where"]).is_relative_to(source.resolve()):
        raise StepformerError(f"'{source}' was to be measured, but Python imported another stepformer.")
    results: dict[str, dict[str, float]] = found["results"]
    return results


def table(found: dict[str, Any]) -> Table:
    rows = []
    for name, kinds in found["ratios"].items():
        for kind, ratios in kinds.items():
            ms = {
                side: statistics.median(each[name][kind] for each in found["times_ms"][side])
                for side in ("there", "here")
            }
            spread = f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"
            rows.append([name, kind, f"{ms['there']:.2f}", f"{ms['here']:.2f}", spread])
    return Table(["architecture", "work", "there ms", "here ms", "ratio [low, high]"], rows, left=2)
