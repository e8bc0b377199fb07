"""Curvature for the eye: a table for the terminal and a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from stepformer.present.style import COLOURS, GREY, new_figure, save_figure
from stepformer.present.tables import of_texts

POSITIVE, NEGATIVE = COLOURS[1], COLOURS[2]


def text(result: dict[str, Any]) -> RenderableType:
    """What was found, what it was measured on, and whether the products could be trusted."""
    rows = [("loss", f"{result['loss']:.4f}", f"on {result['tokens']:,} tokens, windows {result['windows_hash']}")]
    for i, found in enumerate(result["eigenvalues"], start=1):
        state = "" if found["converged"] else ", not converged"
        rows.append((f"lambda {i}", f"{found['value']:.6g}", f"residual {found['residual']:.2g}{state}"))
    trace = result["trace"]
    if trace:
        error = trace["standard_error"]
        spread = f"± {error:.3g} (standard error), " if error is not None else ""
        share = f", {abs(trace['std'] / trace['mean']):.0%} of the mean" if trace["mean"] else ""
        drawn = len(trace["probes"])
        probes = f"{drawn} probes, std {trace['std']:.3g}{share}" if drawn > 1 else "1 probe, of unknown error"
        rows.append(("tr(H)", f"{trace['mean']:.6g}", spread + probes))
        count = f"N = {result['parameters']:,}, all parameters"
        rows.append(("tr(H) / N", f"{result['trace_per_parameter']:.4g}", count))
    for name in ("curve", "surface"):
        shown = result[name]
        if shown:
            low, high = shown["alpha"][0], shown["alpha"][-1]
            value = "not finite" if shown["range"] is None else f"{shown['range']:.4f}"
            how = f"range for alpha from {low:g} to {high:g}, directions by {shown['normalise']}"
            rows.append((f"loss {name}", value, how))
    check = result["check"]
    lines = [
        f"check: product twice {check['repeat']:.0e}, finite differences {check['finite_difference']:.0e}, "
        f"symmetry {check['symmetry']:.0e}"
    ]
    if result["eigenvalues"]:
        lines.append(f"{result['method']}: {result['iterations']} products; residual = |H v - lambda v| for |v| = 1")
    return Group(of_texts(("curvature", "value", "how"), rows, words=("how",)), "", *lines)


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Write a PNG: the loss curve, eigenvalues and the trace's probes, and the surface if there is one."""
    painters = {
        "curve": _draw_curve,
        "eigenvalues": _draw_eigenvalues,
        "trace": _draw_trace,
        "surface": _draw_surface,
    }
    panels = [draw for name, draw in painters.items() if result[name]]
    figure = new_figure((1 + 3.6 * max(1, len(panels)), 3.9))
    for axes, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0] if panels else [], panels, strict=True):
        draw(figure, axes, result)
    measured_on = f"on {result['tokens']:,} tokens, windows {result['windows_hash']}"
    save_figure(figure, path, f"loss {result['loss']:.4f} {measured_on}")


def _draw_curve(figure: Any, axes: Any, result: dict[str, Any]) -> None:
    curve = result["curve"]
    losses = [math.nan if loss is None else loss for loss in curve["loss"]]
    axes.plot(curve["alpha"], losses, "o-", color=COLOURS[0], markersize=4)
    axes.set_xlabel("alpha")
    axes.set_ylabel("loss (nats per token)")
    spread = "not finite" if curve["range"] is None else f"{curve['range']:.3g}"
    _title(axes, f"Loss at theta + alpha d, range {spread}")


def _draw_eigenvalues(figure: Any, axes: Any, result: dict[str, Any]) -> None:
    axes.axhline(0, color=GREY, linewidth=0.8)
    for i, found in enumerate(result["eigenvalues"], start=1):
        colour = POSITIVE if found["value"] >= 0 else NEGATIVE
        face = colour if found["converged"] else "white"  # hollow: its residual is above the tolerance
        axes.errorbar(i, found["value"], yerr=found["residual"], fmt="o", color=colour, mfc=face, capsize=4)
    axes.set_xticks(range(1, len(result["eigenvalues"]) + 1))
    axes.margins(x=0.2)
    axes.set_xlabel("number, by magnitude")
    hollow = any(not found["converged"] for found in result["eigenvalues"])
    _title(axes, "Eigenvalues ± residual" + (" (hollow: not converged)" if hollow else ""))


def _draw_trace(figure: Any, axes: Any, result: dict[str, Any]) -> None:
    trace = result["trace"]
    axes.plot(range(1, len(trace["probes"]) + 1), trace["probes"], "o", color=COLOURS[6], markersize=4)
    axes.axhline(trace["mean"], color=COLOURS[0], linewidth=1.5)
    if trace["standard_error"] is not None:
        low, high = (trace["mean"] + sign * trace["standard_error"] for sign in (-1, 1))
        axes.axhspan(low, high, color=COLOURS[0], alpha=0.15, linewidth=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("probe")
    _title(axes, "tr(H): mean ± standard error, probes")


def _draw_surface(figure: Any, axes: Any, result: dict[str, Any]) -> None:
    surface = result["surface"]
    losses = [[math.nan if loss is None else loss for loss in row] for row in surface["loss"]]
    # rows of the result go with the first direction, which is drawn to the right
    filled = axes.contourf(surface["alpha"], surface["alpha"], list(zip(*losses, strict=True)), levels=14)
    axes.plot(0, 0, "+", color="white", markersize=9)
    figure.colorbar(filled, ax=axes)
    axes.set_xlabel("first direction")
    axes.set_ylabel("second direction")
    _title(axes, "Loss in two directions")


def _title(axes: Any, words: str) -> None:
    axes.set_title(words, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
