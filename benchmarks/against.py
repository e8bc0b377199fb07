"""This checkout against another one on the CPU: two processes take steps in turn, so that a busy machine troubles both.

Each round starts two fresh processes. For every architecture and kind of work they take one step each, in the order
A B, then B A, and so on. A step that follows one of the same process finds its caches warm, and may take two thirds of
the time; so a ratio is that of four steps A B B A, in which both have one of each.

    python benchmarks/against.py ../old/src                    vanilla, yurii and muon at size tiny
    python benchmarks/against.py ../old/src adam context=256   others, and settings for all of them
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepformer.base.errors import InputError, StepformerError
from stepformer.base.files import write_text
from stepformer.base.version import PACKAGE
from stepformer.base.words import merge
from stepformer.catalogue import model_config
from stepformer.measure.benchmark.table import made
from stepformer.present.tables import Table

KINDS = ("forward + backward", "optimizer", "16 tokens decoded")
WARMUP = 2
SAYING = (
    "Ratio: time there / time here, so above 1 this checkout is faster; the median over four steps A B B A, "
    "in brackets the lowest and the highest median of a round. Where 1 lies between these, nothing can be told apart. "
    "Fastest: the ratio of the fastest steps, which a busy machine disturbs least."
)


@dataclass(frozen=True)
class Job:
    """What both checkouts measure."""

    names: list[str]
    words: list[str]
    size: str
    micro_batch: int | None
    steps: int
    kinds: tuple[str, ...] = KINDS


class Worker:
    """A process that measures one checkout when it is asked to."""

    def __init__(self, source: Path, process: subprocess.Popen[str]) -> None:
        self.source, self.process = source, process
        where = Path(self.answer())
        if not where.resolve().is_relative_to(source.resolve()):
            raise StepformerError(
                f"'{source}' was to be measured, but Python imported the stepformer of another folder."
            )

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            said = self.process.communicate()[1].strip().splitlines()
            raise StepformerError(f"Measuring '{self.source}' failed: {said[-1] if said else 'it said nothing'}")
        return json.loads(line)

    def step(self, name: str, kind: str) -> float:
        """Milliseconds of one step."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"name": name, "kind": kind}) + "\n")
        self.process.stdin.flush()
        return float(self.answer())


@contextmanager
def worker(source: Path, job: Job, settings: dict[str, Any]) -> Iterator[Worker]:
    environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "CUDA_VISIBLE_DEVICES": ""}
    # -P: the folder of the probe is no place to import from
    command = [sys.executable, "-P", str(Path(__file__).with_name("probe.py"))]
    process = subprocess.Popen(
        [*command, json.dumps({**asdict(job), "settings": settings})],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield Worker(source, process)
    finally:
        process.kill()
        process.communicate()


def compare(job: Job, other: Path, rounds: int) -> dict[str, Any]:
    """All times of both, by round, architecture and kind of work."""
    if not (other / "stepformer" / "__init__.py").is_file():
        raise InputError(f"There is no package stepformer in '{other}': give another checkout's src folder.")
    settings = merge({}, job.words, "model")
    for name in job.names:
        model_config(name, size=job.size, **settings)  # a wrong name is said here, not by a process
    here = PACKAGE.parent
    found = []
    for number in range(rounds):
        with worker(other, job, settings) as there, worker(here, job, settings) as now:
            for name in job.names:
                print(f"round {number + 1}/{rounds}: {name}", file=sys.stderr, flush=True)
                for kind in job.kinds:
                    found.append({"round": number, "name": name, "kind": kind, **_in_turn(there, now, name, kind, job)})
    return {"job": asdict(job), "rounds": rounds, "measured": found}


def _in_turn(there: Worker, here: Worker, name: str, kind: str, job: Job) -> dict[str, list[float]]:
    sides = [("there_ms", there), ("here_ms", here)]
    times: dict[str, list[float]] = {side: [] for side, _ in sides}
    for step in range(WARMUP + job.steps):
        for side, process in sides if step % 2 == 0 else sides[::-1]:
            ms = process.step(name, kind)
            if step >= WARMUP:
                times[side].append(round(ms, 4))
    return times


def in_twos(times: Sequence[float]) -> list[float]:
    """Means of a step after the other process and one after the same."""
    return [(one + two) / 2 for one, two in zip(times[::2], times[1::2], strict=False)]


def ratios(entry: dict[str, Any]) -> list[float]:
    """Of four steps taken in the order A B B A."""
    both = zip(in_twos(entry["there_ms"]), in_twos(entry["here_ms"]), strict=True)
    return [there / here for there, here in both]


def table(found: dict[str, Any]) -> Table:
    rows = []
    for name, kind in dict.fromkeys((entry["name"], entry["kind"]) for entry in found["measured"]):
        entries = [entry for entry in found["measured"] if (entry["name"], entry["kind"]) == (name, kind)]
        sides = ("there_ms", "here_ms")
        there, here = (statistics.median(ms for e in entries for ms in in_twos(e[side])) for side in sides)
        medians = [statistics.median(ratios(entry)) for entry in entries]
        middle = statistics.median(ratio for entry in entries for ratio in ratios(entry))
        spread = f"{middle:.3f} [{min(medians):.3f}, {max(medians):.3f}]"
        best = [min(ms for entry in entries for ms in entry[side]) for side in ("there_ms", "here_ms")]
        rows.append([name, kind, f"{there:.2f}", f"{here:.2f}", spread, f"{best[0] / best[1]:.3f}"])
    return made(["architecture", "work", "there ms", "here ms", "ratio [low, high]", "fastest"], rows, left=2)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", metavar="SRC", help="another checkout's src")
    parser.add_argument("names", nargs="*", metavar="NAME", help="presets or templates; key=value applies to all")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--micro-batch", type=int, metavar="N")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="timed steps (16)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="fresh pairs of processes (3)")
    parser.add_argument("--kinds", type=int, default=len(KINDS), metavar="N", help=f"the first N of {', '.join(KINDS)}")
    parser.add_argument("--json", metavar="FILE", help="all times")
    args = parser.parse_intermixed_args(argv)
    if args.steps < 2:
        parser.error("--steps: a ratio takes two steps of each checkout")
    names = [word for word in args.names if "=" not in word] or ["vanilla", "yurii", "muon"]
    words = [word for word in args.names if "=" in word]
    job = Job(names, words, args.size, args.micro_batch, args.steps, KINDS[: args.kinds])
    try:
        found = compare(job, Path(args.other), args.rounds)
    except StepformerError as error:
        print(f"against: {error}", file=sys.stderr)
        return 2
    print(table(found).markdown())
    print("\n" + textwrap.fill(SAYING, 118))
    if args.json:
        write_text(Path(args.json), json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
