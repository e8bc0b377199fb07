"""All measurements of one process, with what they were made with: versions, device and commit."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch

from stepformer.base.version import PACKAGE, __version__
from stepformer.measure.benchmark.measuring import measure
from stepformer.measure.benchmark.planning import BASELINE, BenchSettings, Case
from stepformer.measure.benchmark.timing import product_rate
from stepformer.training.runs import cpu_name


def carry_out(
    cases: Sequence[Case], settings: BenchSettings, save: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any], bool]:
    """Measure every case; `save` is called after each one. Returns the process's entry and whether Ctrl-C ended it."""
    todo = [*cases, *([replace(cases[0], label=f"{BASELINE} (again)")] if settings.again else [])]
    progress, interrupted = Progress(len(todo)), False
    process: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "device": device_facts(settings.device),
        "settings": settings.to_dict(),
        "product": product_rate(settings.device),
        "results": [],
    }
    save(process)  # a file that cannot be written is better known now
    baselines: dict[tuple[Any, ...], Any] = {}
    for case in todo:
        record: dict[str, Any] = {}
        progress.begin(case)
        beside, rate = baselines.get(case.frame), process["product"]["flops"]
        try:
            step = measure(case, settings, rate, record, stage=progress.stage, beside=beside)
            if case.label == BASELINE:
                baselines[case.frame] = step
        except KeyboardInterrupt:
            interrupted = True
            record.get("notes", []).append("interrupted")
        process["results"] += [record] if record else []
        save(process)
        if interrupted:
            break
        progress.done(record)
    progress.show()
    return process, interrupted


class Progress:
    """One line on a terminal that says what is going on; elsewhere one line per finished architecture."""

    def __init__(self, total: int) -> None:
        self.total, self.number, self.label = total, 0, ""
        self.live, self.began = sys.stderr.isatty(), time.perf_counter()

    def begin(self, case: Case) -> None:
        self.number += 1
        ways = ["kernels off"] if case.kernels == "off" else []
        ways += ["fp32 streams"] if case.streams == "fp32" and case.kernels != "none" else []
        self.label = ", ".join((case.label, *ways, f"T = {case.config.context}"))
        self.stage("building")

    def stage(self, text: str) -> None:
        self.show(f"{self.number}/{self.total}  {self.label}: {text}  ({time.perf_counter() - self.began:.0f} s)")

    def done(self, record: dict[str, Any]) -> None:
        if not self.live:
            speed = record.get("tokens_per_second")
            what = record["error"] or (f"{speed / 1000:,.1f} ktok/s" if speed else "nothing measured")
            text = f"{self.number}/{self.total}  {self.label}: {what}  ({record['seconds']:.0f} s)"
            print(text, file=sys.stderr, flush=True)

    def show(self, text: str = "") -> None:
        """Instead of what the terminal's line said."""
        if self.live:
            print(f"\r\033[K{text[:118]}", end="", file=sys.stderr, flush=True)


def versions() -> dict[str, str | None]:
    own = {"stepformer": __version__, "python": platform.python_version(), "platform": platform.platform()}
    found = {**own, "torch": torch.__version__, "cuda": torch.version.cuda, "triton": None, "numpy": None}
    for name in ("triton", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def device_facts(device: torch.device) -> dict[str, Any]:
    """The device's name; for a GPU also its memory and driver, for the CPU the threads that torch uses."""
    if device.type != "cuda":
        return {"kind": "cpu", "name": cpu_name(), "threads": torch.get_num_threads()}
    facts = torch.cuda.get_device_properties(device)
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "kind": "cuda",
        "name": facts.name,
        "memory_bytes": facts.total_memory,
        "capability": f"{facts.major}.{facts.minor}",
        "driver": driver.splitlines()[0] if driver else None,
    }


def commit() -> dict[str, Any] | None:
    """The commit of the checkout this package runs from, and whether its files were changed; None outside of one."""
    git = ("git", "-C", str(PACKAGE))
    if _output(*git, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return {"hash": _output(*git, "rev-parse", "HEAD"), "changed": bool(_output(*git, "status", "--porcelain", "."))}


def _output(*command: str) -> str | None:
    """What a command prints, None if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
