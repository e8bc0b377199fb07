"""The fast tests under what differs between machines: `make test-shaken`, or `python tests/support/shaken.py [NAME]`.

Each variation sets several things at once (kinds of kernels, threads, oneDNN, order, the numbers that tests draw, the
version of torch), chosen so that every setting meets most others without the product of all. At the end: a table of the
variations, and every tolerance of which one used more than a third. Both make it fail: a bound that was nearly reached
on one machine is broken on another. A line that says `# margin: why` is one that cannot be wider.

This file is also the plug-in that the tests are run with, for what no environment variable sets.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
OUT = TESTS.parent / "build" / "shaken"
OLDEST, NEWEST = "2.9.1", "2.14.1"  # of the versions of torch that pyproject.toml allows
WIDEST = 1 / 3

# Older kinds of processor that OpenBLAS and MKL keep kernels for; what a machine does not know it ignores.
OLDER = [
    {"OPENBLAS_CORETYPE": core, "MKL_ENABLE_INSTRUCTIONS": instructions}
    for core, instructions in (
        [("CORTEXA53", ""), ("ARMV8", ""), ("NEOVERSEN1", "")]
        if platform.machine() in ("aarch64", "arm64")
        else [("NEHALEM", "SSE4_2"), ("SANDYBRIDGE", "AVX"), ("HASWELL", "AVX2")]
    )
]


@dataclass(frozen=True)
class Variation:
    """One run of the tests. `seed` shifts what the tests draw and, if it is not 0, orders them at random."""

    simd: str = "native"
    blas: dict[str, str] = field(default_factory=dict)
    threads: int = 1
    onednn: bool = True
    seed: int = 0
    torch: str = ""

    def cells(self) -> list[str]:
        return [
            self.simd,
            self.blas.get("OPENBLAS_CORETYPE", "native").lower(),
            str(self.threads),
            "on" if self.onednn else "off",
            f"random {self.seed}" if self.seed else "as written",
            str(self.seed),
            self.torch or torch.__version__.partition("+")[0],
        ]


VARIATIONS = {
    "plain": Variation(),
    "oldest-core": Variation(simd="default", blas=OLDER[0], onednn=False, seed=1),
    "older-core": Variation(blas=OLDER[1], threads=2, seed=2),
    "threads": Variation(simd="default", threads=2, onednn=False, seed=3),
    "oldest-torch": Variation(blas=OLDER[2], seed=4, torch=OLDEST),
    "newest-torch": Variation(simd="default", onednn=False, seed=5, torch=NEWEST),
}


def environment(variation: Variation) -> dict[str, str]:
    found = {
        **os.environ,
        **variation.blas,
        "OMP_NUM_THREADS": str(variation.threads),
        "OMP_WAIT_POLICY": "passive",  # workers that spin would take each other's cores
        "STEPFORMER_TEST_SEED": str(variation.seed),
        "STEPFORMER_TEST_ONEDNN": "on" if variation.onednn else "off",
        # pytest rewrites the tests so that passed assertions are heard of, and keeps what it wrote
        "PYTHONPYCACHEPREFIX": str(OUT / "pycache"),
    }
    paths = [str(Path(__file__).parent)]  # where this file and margins.py are plug-ins of pytest
    if variation.torch:
        paths.insert(0, str(OUT / f"torch-{variation.torch}"))
    found["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    found.pop("ATEN_CPU_CAPABILITY", None)
    if variation.simd != "native":
        found["ATEN_CPU_CAPABILITY"] = variation.simd
    return found


def fetch(version: str) -> str:
    """A torch beside the installed one, to go before it on the path; why not, where there is no wheel."""
    folder = OUT / f"torch-{version}"
    if (folder / "torch" / "version.py").is_file():
        return ""
    building = OUT / f"torch-{version}.unfinished"
    shutil.rmtree(building, ignore_errors=True)
    print(f"fetching torch {version}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(building), f"torch=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    building.rename(folder)
    return ""


def run(name: str, variation: Variation, workers: int, extra: list[str]) -> dict[str, Any]:
    """One variation: counts, minutes and failed tests."""
    if variation.torch and (problem := fetch(variation.torch)):
        return {"absent": problem}
    for old in OUT.glob(f"{name}.margins.*"):
        old.unlink()
    command = [
        *(sys.executable, "-m", "pytest", "-n", str(workers), "--dist", "worksteal", "-p", "margins", "-p", "shaken"),
        *("-o", "enable_assertion_pass_hook=true", "--margins", str(OUT / f"{name}.margins"), "-rfE"),
        *(["--order", str(variation.seed)] if variation.seed else []),
        *extra,
    ]
    begin = time.monotonic()
    with (OUT / f"{name}.log").open("w") as log:
        status = subprocess.run(
            command, cwd=TESTS.parent, env=environment(variation), stdout=log, stderr=log, check=False
        ).returncode
    text = (OUT / f"{name}.log").read_text()
    last = (text.strip().splitlines() or [""])[-1]
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", text, flags=re.MULTILINE)
    return {"status": status, "counts": counts, "failed": failed, "minutes": (time.monotonic() - begin) / 60}


def read_margins(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        for line in path.read_text().splitlines():
            yield json.loads(line)


def worst_margins(names: list[str]) -> list[dict[str, Any]]:
    """The places where a variation used most of a bound, each with its worst variation, worst first."""
    worst: dict[tuple[str, int, str], dict[str, Any]] = {}
    for name in names:
        for row in read_margins(OUT.glob(f"{name}.margins.*")):
            place = (row["file"], row["line"], row["how"])
            if place not in worst or row["share"] > worst[place]["share"]:
                worst[place] = {**row, "variation": name}
    return sorted(worst.values(), key=lambda row: -row["share"])


def excused(row: dict[str, Any]) -> bool:
    lines = (TESTS / row["file"]).read_text().splitlines()
    return any("# margin: " in line for line in lines[max(0, row["line"] - 3) : row["line"]])


def main() -> int:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"variations: {', '.join(VARIATIONS)} (default: all)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pytest", default="", metavar="WORDS", help="more words for pytest, e.g. a file")
    args = parser.parse_args()
    unknown = set(args.names) - set(VARIATIONS)
    if unknown:
        parser.error(f"no variation is called {', '.join(sorted(unknown))}; there are {', '.join(VARIATIONS)}")
    names = args.names or list(VARIATIONS)
    OUT.mkdir(parents=True, exist_ok=True)
    table = Table(box=None, pad_edge=False)
    for column in ("variation", "ATen", "BLAS", "threads", "oneDNN", "order", "data", "torch", "result", "minutes"):
        table.add_column(column)
    green = True
    for name in names:
        print(f"{name}: running, log in {OUT / (name + '.log')}", flush=True)
        found = run(name, VARIATIONS[name], args.workers, args.pytest.split())
        if "absent" in found:
            result, minutes = f"not run: {found['absent']}", ""
        else:
            green &= found["status"] == 0
            result = ", ".join(f"{n} {word}" for word, n in found["counts"].items()) or "no result"
            minutes = f"{found['minutes']:.1f}"
            for test in found["failed"]:
                print(f"  failed: {test}")
        print(f"{name}: {result}, {minutes} minutes", flush=True)
        table.add_row(name, *VARIATIONS[name].cells(), result, minutes)
    rows = worst_margins(names)
    tight = [row for row in rows if row["share"] > WIDEST]
    console = Console(width=160)
    console.print(table)
    print(f"{len(rows)} tolerances seen, {len(tight)} used by more than a third")
    for row in tight:
        why = " (said why)" if excused(row) else ""
        print(
            f"  {row['share']:.2f} of {row['bound']:.1e}  {row['file']}:{row['line']} {row['how']}  {row['variation']}"
            f"  {row['test'].rpartition('/')[2]}{why}"
        )
    return 0 if green and all(excused(row) for row in tight) else 1


# The plug-in.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order", type=int, metavar="SEED", help="random order of files, and of tests within a file")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("STEPFORMER_TEST_ONEDNN") == "off":
        torch.backends.mkldnn.set_flags(False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files in random order, then tests in a file: fixtures of a file are still made once."""
    seed = config.getoption("--order")
    if seed is None:
        return
    draw = random.Random(seed)
    rank = {path: draw.random() for path in sorted({str(item.path) for item in items})}
    items.sort(key=lambda item: (rank[str(item.path)], draw.random()))


if __name__ == "__main__":
    sys.exit(main())
