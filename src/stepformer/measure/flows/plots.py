"""The experiments as pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stepformer.measure.flows.results import Result
from stepformer.present.style import COLOURS, GREY, clean, new_figure, save_figure, titled

LOOKS: dict[str, dict[str, Any]] = {
    "standard": {"color": COLOURS[0], "linewidth": 2.4},
    "gd": {"color": COLOURS[0], "linewidth": 2.4},
    "rk4": {"color": GREY, "linestyle": (0, (4, 2))},
    "plain-euler": {"color": COLOURS[6], "linewidth": 3.6},
    "presymp-euler": {"color": COLOURS[1], "linestyle": (0, (2, 1.5))},
    "exp-euler": {"color": COLOURS[5]},
    "conformal-euler": {"color": COLOURS[3]},
    "ab2": {"color": COLOURS[2]},
    "etd-ab2": {"color": COLOURS[4]},
    "etd-ab2 etd=lawson": {"color": COLOURS[4], "linestyle": (0, (2, 1.5))},
    "ab2, alternating h": {"color": COLOURS[2], "linestyle": (0, (6, 1.5, 1, 1.5))},
    "etd-ab2, alternating h": {"color": COLOURS[4], "linestyle": (0, (6, 1.5, 1, 1.5))},
    "etd-ab2 etd=lawson, alternating h": {"color": COLOURS[4], "linestyle": (0, (1, 1))},
    "ab2 history=constant, alternating h": {"color": COLOURS[2], "linestyle": (0, (1, 1))},
    "heavy-ball": {"color": COLOURS[2]},
    "nesterov": {"color": COLOURS[1]},
    "triple-momentum": {"color": COLOURS[3], "linestyle": (0, (5, 1.5))},
}


def draw(name: str, result: Result, path: Path) -> None:
    """Write the picture of one experiment as PNG."""
    size, painter = PAINTERS[name]
    figure = new_figure(size)
    painter(figure, result)
    save_figure(figure, path)


def _finish(axes: Any, title: str, xlabel: str, ylabel: str) -> None:
    titled(axes, title, xlabel, ylabel)
    clean(axes, width=0.7)


def _line(axes: Any, label: str, x: Any, y: Any, **more: Any) -> None:
    looks = LOOKS.get(label.rpartition("accelerated, ")[2].rpartition("standard, ")[2], {})
    axes.plot(x, y, label=label, **{"linewidth": 1.6, **looks, **more})


def _powers(axes: Any, sizes: list[float]) -> None:
    """Logarithmic axes with the step sizes themselves as ticks."""
    axes.loglog()
    axes.minorticks_off()
    axes.set_xticks(sizes, [f"1/{round(1 / h)}" for h in sizes])


def _below(figure: Any, axes: Any, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)


def _energy(figure: Any, result: Result) -> None:
    every = figure.subplots(2, 2).flatten()
    for axes, (name, problem) in zip(every, result.curves.items(), strict=True):
        for label, path in problem["paths"].items():
            _line(axes, label, range(len(path)), path)
        bounded = problem["infimum"] is not None
        if bounded:
            axes.set_yscale("log")
        _finish(axes, name, "steps", "U - inf U per token" if bounded else "U per token (no lower bound)")
    _below(figure, every[0], 7)


def _order(figure: Any, result: Result) -> None:
    pair = figure.subplots(1, 2, sharey=True)
    for axes, (name, curves) in zip(pair, result.curves.items(), strict=True):
        sizes = curves["h"]
        for label, errors in curves["errors"].items():
            _line(axes, label, sizes, errors, marker="o", markersize=3)
        for p, top in ((1, 0.12), (2, 0.03)):
            axes.plot(sizes, [top * (h / sizes[0]) ** p for h in sizes], color=GREY, linewidth=0.8, zorder=1)
            axes.annotate(f"h^{p}" if p > 1 else "h", (sizes[0], top), color=GREY, fontsize=9)
        _powers(axes, sizes)
        _finish(axes, f"{name} attention", "step size h", "relative error at the end")
    _below(figure, pair[0], 4)


def _ellipse(figure: Any, result: Result) -> None:
    *clouds, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.2))
    angles = np.linspace(0, 2 * np.pi, 121)
    circle = 2 * np.array([np.cos(angles), np.sin(angles)])
    for axes, (name, picture) in zip(clouds, result.curves["pictures"].items(), strict=True):
        for index, time in enumerate(picture["time"]):
            colour = COLOURS[(0, 6, 1, 2)[index % 4]]
            axes.scatter(*zip(*picture["tokens"][index], strict=True), s=7, color=colour, alpha=0.7, linewidths=0)
            # (x - m).S^-1 (x - m) = 4, from the Cholesky factor of S
            mean, factor = np.array(picture["mean"][index]), np.linalg.cholesky(picture["covariance"][index])
            axes.plot(*(mean[:, None] + factor @ circle), color=colour, linewidth=1.4, label=f"t = {time:.2g}")
        axes.set_aspect("equal", adjustable="datalim")
        axes.legend(frameon=False, fontsize=8)
        _finish(axes, f"{name}: tokens, ODE's 2-sigma ellipse", "", "")
    for label, errors in result.curves["errors"].items():
        marker = "s" if label.startswith("standard") else "o"
        _line(right, label, [1 / n for n in result.curves["steps"]], errors, marker=marker, markersize=3)
    _powers(right, [1 / n for n in result.curves["steps"]])
    _finish(right, "moments of the tokens against their ODEs", "1 / steps", "largest relative error")
    _below(figure, right, 5)


def _hamiltonian(figure: Any, result: Result) -> None:
    left, right = figure.subplots(1, 2)
    for index, (label, errors) in enumerate(result.curves["errors"].items()):
        looks = {"color": COLOURS[(1, 6, 2, 5)[index]], "marker": "o", "markersize": 3, "linewidth": 1.6}
        left.plot(result.curves["width"], errors, label=label, **looks)
    left.loglog()
    left.legend(frameon=False, fontsize=8)
    _finish(left, "closed form against central differences of H", "width of the difference", "relative difference")
    drift = result.curves["drift"]
    for label, path in drift["paths"].items():
        _line(right, label, [k * drift["h"] for k in range(1, len(path))], [abs(value) for value in path[1:]])
    right.set_yscale("log")
    right.legend(frameon=False, fontsize=8, ncols=2)
    _finish(right, f"softmax, kappa = -1, no friction, h = {drift['h']:g}", "time", "|H - H(0)| / |H(0)|")


def _filter(figure: Any, result: Result) -> None:
    left, right = figure.subplots(1, 2)
    curvature, depth = result.curves["curvature"], result.settings["depth"]
    for axes, what in ((left, "contraction"), (right, "gain")):
        for label, values in result.curves[what].items():
            _line(axes, label, curvature, values)
        axes.set_xscale("log")
        axes.axhline(1, color=GREY, linewidth=0.8, zorder=1)
        axes.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8.5, loc="lower left")
    _finish(left, "contraction per step, in the long run", "curvature", "spectral radius")
    _finish(right, f"what {depth} steps from rest leave", "curvature", f"|e_{depth} / e_0|")


def _threshold(figure: Any, result: Result) -> None:
    left, right = figure.subplots(1, 2)
    for label, values in result.curves["left"].items():
        _line(left, label, range(len(values)), values)
    for label, depths in result.curves["threshold"].items():
        _line(right, label, result.curves["condition"], depths, marker="o", markersize=3)
    left.set_yscale("log")
    left.legend(frameon=False, fontsize=8.5, loc="lower left")
    right.loglog()
    _finish(
        left, f"condition {result.settings['shown']}: what is left of the worst mode", "depth", "largest |e| / |e_0|"
    )
    _finish(right, "depth from which on momentum leaves less", "condition number", "depth")


def _best(figure: Any, result: Result) -> None:
    axes = figure.subplots()
    for place, (label, values) in enumerate(result.curves["gain"].items()):
        more = {"color": COLOURS[6], "linestyle": (0, (1, 1))} if place == 4 else {}
        _line(axes, label, result.curves["curvature"], values, **more)
    axes.set_xscale("log")
    axes.legend(frameon=False, fontsize=8.5)
    _finish(axes, f"the best filters of {result.settings['depth']} layers", "curvature", "|e / e_0|")


Painter = Callable[[Any, Result], None]
PAINTERS: dict[str, tuple[tuple[float, float], Painter]] = {
    "energy": ((9, 6.6), _energy),
    "order": ((9, 5), _order),
    "ellipse": ((12, 4.6), _ellipse),
    "hamiltonian": ((9, 3.8), _hamiltonian),
    "filter": ((9, 3.6), _filter),
    "threshold": ((9, 3.6), _threshold),
    "best": ((6, 3.8), _best),
}
