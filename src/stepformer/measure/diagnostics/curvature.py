"""How curved the loss is around a run's weights: eigenvalues and trace of the Hessian, loss along random directions.

    H v = grad (grad L . v)       lambda_i: eigenvalues of H of largest magnitude      tr(H) = E[z.H z], z random signs

`measure` looks at a run on fixed windows of its validation split. Without a run:

    operator = HessianOperator(model, [(inputs, targets)])
    operator.check()
    found, products = lanczos(operator.product, operator.start, count=3, iterations=30, tolerance=1e-3)
    samples = [probe(operator, number) for number in range(16)]
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from rich.console import Group, RenderableType

from stepformer.base.errors import InputError, StepformerError
from stepformer.base.progress import counting
from stepformer.base.settings import Settings, setting
from stepformer.measure import measured
from stepformer.measure.diagnostics.common import DTYPES, kept, measured_on, windows_of
from stepformer.measure.diagnostics.hessian import Batch, HessianOperator, batches_of, direction, grid, loss_at
from stepformer.measure.diagnostics.lanczos import Eigenpair, dot, lanczos, power
from stepformer.present.style import COLOURS, GREY, new_figure, save_figure, titled
from stepformer.present.tables import of_texts
from stepformer.training.loading import LoadedRun

__all__ = [
    "SETTINGS",
    "Batch",
    "CurvatureSettings",
    "Eigenpair",
    "HessianOperator",
    "batches_of",
    "direction",
    "lanczos",
    "loss_at",
    "measure",
    "plot",
    "power",
    "probe",
    "text",
]

METHODS = {"lanczos": lanczos, "power": power}


LONGEST = 1 << 62
DEFAULTS = ("windows", "window_batch", "context", "method", "eigenvalues", "iterations", "probes")
PROTOCOLS: dict[str, dict[str, Any]] = {
    "ours": dict(zip(DEFAULTS, (32, 4, LONGEST, "lanczos", 3, 30, 16), strict=True)),
    # what the published sharpness of the momentum-stream models was measured with: 2 batches of 2 x 512 tokens
    "legacy": dict(zip(DEFAULTS, (4, 2, 512, "power", 1, 15, 10), strict=True)),
}


@dataclass(frozen=True)
class CurvatureSettings(Settings):
    """What `stepformer diagnose RUN --hessian` can be asked; the protocol decides what is not set."""

    section: ClassVar[str] = "hessian"
    protocol: Literal["ours", "legacy"] = setting("ours", "what is not set: ours, or as published (legacy)")
    windows: int | None = setting(None, "windows of the validation split (32; legacy 4)", least=1)
    window_batch: int | None = setting(None, "windows at a time; fewer need less memory (4; legacy 2)", least=1)
    context: int | None = setting(None, "tokens of a window (the model's context; legacy at most 512)", least=1)
    seed: int = setting(0, "of the windows and of all random vectors", least=0)
    corpus: str | None = setting(None, "folder of another prepared corpus with the same tokenizer")
    method: Literal["lanczos", "power"] | None = setting(None, "for the eigenvalues (lanczos; legacy power)")
    eigenvalues: int | None = setting(None, "how many, by magnitude; 0: none (3; legacy 1)", least=0)
    iterations: int | None = setting(None, "at most; with power for each eigenvalue (30; legacy 15)", least=2)
    tolerance: float = setting(1e-3, "of the residual (lanczos) or of changes (power), relative", above=0)
    probes: int | None = setting(None, "random sign vectors for the trace; 0: none (16; legacy 10)", least=0)
    curve: int = setting(11, "points of the loss curve, an odd number; 0: none", least=0)
    reach: float = setting(0.5, "curve and surface go from -reach to reach", above=0)
    surface: int = setting(0, "points a side of the loss in two directions, an odd number; 0: none", least=0)
    normalise: Literal["tensor", "filter"] = setting("tensor", "a direction has each tensor's norm, or each row's")
    precision: Literal["fp32", "fp64"] = setting("fp32", "of all computations")

    def problems(self) -> list[str]:
        return [
            f"{name} = {value} should be an odd number from 3 on, so that its middle is the run itself, or 0."
            for name, value in (("curve", self.curve), ("surface", self.surface))
            if value and (value < 3 or value % 2 == 0)
        ]

    def plan(self, longest: int) -> Any:
        """These settings for a model of context `longest`, with the protocol's in place of what was not set."""
        if self.context is not None and self.context > longest:
            raise InputError(f"context = {self.context} is longer than the model's context, {longest}.")
        protocol = {**PROTOCOLS[self.protocol], "context": min(PROTOCOLS[self.protocol]["context"], longest)}
        return self.replace(**{name: value for name, value in protocol.items() if getattr(self, name) is None})


SETTINGS = CurvatureSettings


def measure(run: LoadedRun, settings: CurvatureSettings, *, quiet: bool = False) -> dict[str, Any]:
    """Eigenvalues, trace and loss curve of a run on fixed windows; interrupted, the same call continues."""
    plan = settings.plan(run.config.model.context)
    windows, seen = windows_of(run, plan)
    operator = HessianOperator(run.model, batches_of(windows, plan.window_batch), dtype=DTYPES[settings.precision])
    found: dict[str, Any] = {
        "parameters": run.model.num_parameters(),
        "parameters_measured": operator.size,
        "tokens": operator.tokens,
        "windows_hash": seen["windows_hash"],
        "settings": plan.to_dict(),
    }
    about = {**found, "run": run.record.get("id"), "step": run.step}
    journal = measured.journal(run.folder.path, measured.kind_of("hessian", run.model), about, quiet=quiet)
    pieces = _Pieces(operator, plan, journal, quiet)
    found["loss"] = pieces.journal.get("loss", pieces.loss)
    found["check"] = pieces.journal.get("check", partial(operator.check, settings.seed))
    found |= pieces.eigenvalues()
    found["trace"] = pieces.trace()
    found["trace_per_parameter"] = found["trace"] and found["trace"]["mean"] / found["parameters"]
    found["curve"] = pieces.landscape("curve", settings.curve, 1)
    found["surface"] = pieces.landscape("surface", settings.surface, 2)
    return kept(run, settings, found)


def probe(operator: HessianOperator, number: int, seed: int = 0) -> float:
    """One sample z.H z of the trace; z has independent random signs, so its expectation is tr(H)."""
    z = operator.draw("signs", seed, f"probe {number}")
    return dot(z, operator @ z)


@dataclass(frozen=True)
class _Pieces:
    """The parts of a measurement; each is kept in the journal as soon as it is known."""

    operator: HessianOperator
    plan: Any  # settings of which nothing is unset
    journal: measured.Journal
    quiet: bool

    def loss(self) -> float:
        loss = self.operator.loss()
        if not math.isfinite(loss):
            raise StepformerError(f"The loss on these windows is {loss}: there is no curvature to measure.")
        return loss

    def eigenvalues(self) -> dict[str, Any]:
        """One piece: the vectors on the way are too large for a journal."""
        count = min(self.plan.eigenvalues, self.operator.size)
        if not count:
            return {"eigenvalues": [], "method": self.plan.method, "iterations": 0}
        return dict(self.journal.get("eigenvalues", partial(self._find, count)))

    def _find(self, count: int) -> dict[str, Any]:
        plan, by_power = self.plan, self.plan.method == "power"
        check_memory(self.operator, count + 1 if by_power else plan.iterations + 1)
        find = partial(METHODS[plan.method], self.operator.product, partial(self.operator.start, seed=plan.seed))
        with counting("eigenvalues", plan.iterations * (count if by_power else 1), quiet=self.quiet) as step:
            pairs, steps = find(count=count, iterations=plan.iterations, tolerance=plan.tolerance, progress=step)
        values = [{"value": p.value, "residual": p.residual, "converged": p.converged(plan.tolerance)} for p in pairs]
        return {"eigenvalues": values, "method": plan.method, "iterations": steps}

    def trace(self) -> dict[str, Any] | None:
        if not self.plan.probes:
            return None
        parts = {f"probe {n}": partial(probe, self.operator, n, self.plan.seed) for n in range(self.plan.probes)}
        samples = self.journal.each("trace", parts, quiet=self.quiet)
        error = statistics.stdev(samples) / math.sqrt(len(samples)) if len(samples) > 1 else None
        mean, std = statistics.fmean(samples), statistics.pstdev(samples)
        return {"mean": mean, "standard_error": error, "std": std, "probes": samples}

    def landscape(self, name: str, side: int, directions: int) -> dict[str, Any] | None:
        """Losses on a grid of `side` points a direction; rows go with the first direction, which all have in common."""
        if not side:
            return None
        alpha, how = grid(side, self.plan.reach), {"seed": self.plan.seed, "normalise": self.plan.normalise}
        along = [direction(self.operator, number, **how) for number in range(directions)]
        places = enumerate(itertools.product(alpha, repeat=directions))
        parts = {f"{name} {i}": partial(_finite_loss, self.operator, along, place) for i, place in places}
        losses = self.journal.each(f"loss {name}", parts, quiet=self.quiet)
        rows = losses if directions == 1 else [losses[begin : begin + side] for begin in range(0, len(losses), side)]
        spread = None if None in losses else max(losses) - min(losses)
        return {"alpha": alpha, "loss": rows, "range": spread, "normalise": self.plan.normalise}


def check_memory(operator: HessianOperator, vectors: int) -> None:
    """Refuse to begin what cannot fit."""
    needed = vectors * operator.size * operator.dtype.itemsize
    if operator.device.type == "cuda":
        there = torch.cuda.mem_get_info(operator.device)[1]
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise InputError(
            f"The eigenvalues need {vectors} vectors of {operator.size:,} numbers, {needed / 1e9:.0f} GB, and there "
            f"are {there / 1e9:.0f} GB: use fewer iterations, or method=power, which keeps one for each eigenvalue."
        )


def _finite_loss(operator: HessianOperator, along: Sequence[torch.Tensor], by: Sequence[float]) -> float | None:
    """The loss at a point of the curve or surface; None where it is not finite."""
    loss = loss_at(operator, along, by)
    return loss if math.isfinite(loss) else None


def text(result: dict[str, Any]) -> RenderableType:
    """What was found, what it was measured on, and whether the products could be trusted."""
    rows = [("loss", f"{result['loss']:.4f}", f"on {measured_on(result)}")]
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
    painters = {"curve": _draw_curve, "eigenvalues": _draw_eigenvalues, "trace": _draw_trace, "surface": _draw_surface}
    shown = [name for name in painters if result[name]]
    figure = new_figure((1 + 3.6 * max(1, len(shown)), 3.9))
    for axes, name in zip(figure.subplots(1, len(shown), squeeze=False)[0] if shown else [], shown, strict=True):
        painters[name](figure, axes, result[name])
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path, f"loss {result['loss']:.4f} on {measured_on(result)}")


def _draw_curve(figure: Any, axes: Any, curve: Any) -> None:
    losses = [math.nan if loss is None else loss for loss in curve["loss"]]
    axes.plot(curve["alpha"], losses, "o-", color=COLOURS[0], markersize=4)
    spread = "not finite" if curve["range"] is None else f"{curve['range']:.3g}"
    titled(axes, f"Loss at theta + alpha d, range {spread}", "alpha", "loss (nats per token)")


def _draw_eigenvalues(figure: Any, axes: Any, eigenvalues: Any) -> None:
    axes.axhline(0, color=GREY, linewidth=0.8)
    for i, found in enumerate(eigenvalues, start=1):
        colour = COLOURS[1] if found["value"] >= 0 else COLOURS[2]
        face = colour if found["converged"] else "white"  # hollow: its residual is above the tolerance
        axes.errorbar(i, found["value"], yerr=found["residual"], fmt="o", color=colour, mfc=face, capsize=4)
    axes.set_xticks(range(1, len(eigenvalues) + 1))
    axes.margins(x=0.2)
    hollow = "" if all(found["converged"] for found in eigenvalues) else " (hollow: not converged)"
    titled(axes, f"Eigenvalues ± residual{hollow}", "number, by magnitude")


def _draw_trace(figure: Any, axes: Any, trace: Any) -> None:
    axes.plot(range(1, len(trace["probes"]) + 1), trace["probes"], "o", color=COLOURS[6], markersize=4)
    axes.axhline(trace["mean"], color=COLOURS[0], linewidth=1.5)
    if trace["standard_error"] is not None:
        low, high = (trace["mean"] + sign * trace["standard_error"] for sign in (-1, 1))
        axes.axhspan(low, high, color=COLOURS[0], alpha=0.15, linewidth=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    titled(axes, "tr(H): mean ± standard error, probes", "probe")


def _draw_surface(figure: Any, axes: Any, surface: Any) -> None:
    losses = [[math.nan if loss is None else loss for loss in row] for row in surface["loss"]]
    # rows of the result go with the first direction, which is drawn to the right
    filled = axes.contourf(surface["alpha"], surface["alpha"], list(zip(*losses, strict=True)), levels=14)
    axes.plot(0, 0, "+", color="white", markersize=9)
    figure.colorbar(filled, ax=axes)
    titled(axes, "Loss in two directions", "first direction", "second direction")
