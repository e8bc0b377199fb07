"""What a measurement was made with: versions, device and commit."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from typing import Any

import torch

from stepformer.base.version import PACKAGE, __version__
from stepformer.training.runs import cpu_name


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "stepformer": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for name in ("triton", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
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
    here = PACKAGE / "__init__.py"
    if _output("git", "-C", str(here.parent), "ls-files", "--error-unmatch", here.name) is None:
        return None
    found = _output("git", "-C", str(here.parent), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(here.parent), "status", "--porcelain", ".")
    return {"hash": found, "changed": bool(changed)}


def _output(*command: str) -> str | None:
    """What a command prints, None if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
