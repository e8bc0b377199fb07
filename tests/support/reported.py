"""A study to report on, runs changed in their files, and measurements, for the tests of reports."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from runs import make_corpus, small_run
from stepformer.base.files import write_json
from stepformer.measure import measured
from stepformer.pages.reports.collect import gather
from stepformer.pages.reports.contents import Report, build
from stepformer.study.study import carry_out, plan

NAMES = ("vanilla", "yurii", "tmm")
LIMIT = 5_000_000  # bytes of a page


def make_study(root: Path) -> Path:
    """Three architectures with two seeds each, really trained."""
    data = make_corpus(root / "tales-bytes").folder
    variants = {name: small_run(data, name) for name in NAMES}
    runs = plan(root / "study", variants, [42, 43], quiet=True)
    assert not carry_out(runs, jobs=1, quiet=True)[1]
    return root / "study"


def copied(study: Path, target: Path, name: str = "yurii-s42") -> Path:
    return Path(shutil.copytree(study / name, target / name))


def changed(path: Path, **values: Any) -> None:
    """Give a JSON file other values, and a checksum to match; None takes one away."""
    whole = json.loads(path.read_text()) | values
    write_json(path, {key: value for key, value in whole.items() if value is not None})


def report_of(*folders: Path, **settings: Any) -> Report:
    return build(gather(folders), **settings)


def measurements(layers: int = 2) -> dict[str, dict[str, Any]]:
    """One result of every kind, by the schemas of the commands that make them."""
    values = [3.0 * math.exp(-k / 4) for k in range(12)]
    part = {"singular_values": values, "sigma_max": 3.0, "spread": 15.6, "stable_rank": 2.5, "rms_gain": 1.1}
    part |= {"k": 12, "converged": False}
    reach = [-1.0, -0.5, 0.0, 0.5, 1.0]
    even = {"ratio": 4.0, "distance": 1.0, "bound": 1.5, "deviation": 0.2, "cosine": 0.97}
    summary = {"persistence": 0.8, "mean_spread": 15.6, "max_spread": 16.0, "mean_stable_rank": 2.5}
    return {
        "hessian": {
            "loss": 2.5,
            "parameters": 1000,
            "tokens": 4096,
            "eigenvalues": [{"value": 20.0 - k, "residual": 1e-3, "converged": k < 3} for k in range(4)],
            "trace": {"mean": 310.5, "standard_error": 12.0, "std": 100.0, "probes": 64},
            "trace_per_parameter": 0.31,
            "curve": {"alpha": reach, "loss": [2.5 + a * a for a in reach], "range": 1.0, "normalise": "tensor"},
            "surface": {"alpha": reach, "loss": [[2.5 + a * a + b for b in reach] for a in reach], "range": 3.0},
        },
        "jacobian": {
            "layers": [{"layer": i, "block": part, "oracle": None, "joint": part} for i in range(layers)],
            "summary": {"block": summary, "joint": summary},
        },
        "depth": {
            "layers": [
                {
                    "layer": i,
                    "coefficients": {"mu_attn": 0.9 - 0.1 * i, "r[0]": 0.1, "r[1]": 0.3},
                    "norms": {"x": 1.0 + i, "v": 0.5},
                    "update_norm": 0.3,
                    "entropy": [1.0, 2.0],
                    "cosine": 0.9,
                    "readout_loss": 3.0 - i,
                    "energy": -1.0,
                    "capped_rows": 0.0,
                }
                for i in range(layers)
            ],
            "start": {"norms": {"x": 0.5}},
        },
        "balance": {
            "layers": [{"layer": i, "oracle": {"attn": even, "mlp": even}, "stream": {}} for i in range(layers)],
            "summary": {"oracle": even, "stream": None},
        },
        "perplexity": {
            "texts": [{"name": "tales", "mode": "blocks", "nats": 2.5, "perplexity": 12.182, "tokens": 512}],
            "mean_perplexity": 12.182,
        },
        "tasks": {"tasks": {"choice": {"shots": 0, "items": 40, "acc": 0.325, "acc_stderr": 0.074}}},
        "hybrid": {"rows": [{"momentum in": "all layers", "loss": 2.5}, {"momentum in": "cutoff 1", "loss": 2.75}]},
    }


def with_measurements(folder: Path) -> Path:
    for kind, result in measurements().items():
        measured.save(folder, kind, step=12, settings={}, result=result)
    return folder


def measured_as(folder: Path, **results: dict[str, Any]) -> Path:
    """A run with one result of every kind, changed in the fields that are given for a kind."""
    for kind, result in measurements().items():
        measured.save(folder, kind, step=12, settings={}, result=result | results.get(kind, {}))
    return folder
