"""Contraction of one step over the curvature, computed from the templates themselves.

Writes depth_filter.png and depth_filter.json beside this file. Needs matplotlib.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from stepformer.schemes import State, Substep, Values, templates

M, L = 0.01, 1.0
ROOT = math.sqrt(L / M)
RHO = 1 - 1 / ROOT
NAG = (ROOT - 1) / (ROOT + 1)
METHODS: dict[str, dict[str, float]] = {
    "gd": {"gamma": 2 / (M + L)},
    "heavy-ball": {"gamma": 4 / (math.sqrt(L) + math.sqrt(M)) ** 2, "beta": NAG**2},
    "nesterov": {"gamma": 1 / L, "beta": NAG, "mu": NAG},
    "triple-momentum": {
        "gamma": (1 + RHO) / L,
        "beta": RHO**2 / (2 - RHO),
        "mu": RHO**2 / ((1 + RHO) * (2 - RHO)),
        "nu": 1.0,
    },
}


def contraction(name: str, curvature: float, c: dict[str, float]) -> float:
    """Spectral radius of one step on a mode with this curvature."""
    values = {k: torch.tensor(v, dtype=torch.float64) for k, v in c.items()}
    if name == "gd":
        values = {"step": values["gamma"]}
    turn = Substep(templates[name].component(1, 1), lambda x: -curvature * x, Values(values), None)
    columns = []
    for e, v in ((1.0, 0.0), (0.0, 1.0)):
        streams = {} if name == "gd" else {"v": torch.tensor([v], dtype=torch.float64)}
        s = turn.take(State(torch.tensor([e], dtype=torch.float64), streams))
        columns.append(torch.cat([s.x, *s.streams.values()]))
    matrix = torch.stack(columns[: 1 if name == "gd" else 2], dim=1)
    return torch.linalg.eigvals(matrix).abs().max().item()


def main() -> None:
    curvatures = torch.logspace(math.log10(M), math.log10(L), 301, dtype=torch.float64).tolist()
    curves = {name: [contraction(name, x, c) for x in curvatures] for name, c in METHODS.items()}
    folder = Path(__file__).parent
    rounded = {name: [round(y, 6) for y in ys] for name, ys in curves.items()}
    record = {"curvatures": [round(x, 6) for x in curvatures], "contraction": rounded, "coefficients": METHODS}
    (folder / "depth_filter.json").write_text(json.dumps(record) + "\n")
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for name, ys in curves.items():
        axes.semilogx(curvatures, ys, label=f"{name} (worst {max(ys):.3f})", linewidth=2)
    axes.set(xlabel="curvature of the token energy", ylabel="error left after one step", ylim=(0, 1.02))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "depth_filter.png", dpi=150)
    for name, ys in curves.items():
        print(f"{name:<16} worst contraction {max(ys):.4f}")


if __name__ == "__main__":
    main()
