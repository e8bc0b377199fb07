"""Charts of a report as data: the page draws them with its script, the paper with matplotlib.

Measurements are read by the names they are known to have. What is missing, or is no number, leaves out that line or
that chart and nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepformer.pages.reports.collect import RunData

RMS = "root mean square"


@dataclass(frozen=True)
class Line:
    """One line: of which run (no seed: the mean of several), and of which thing where a chart shows one at a time."""

    label: str
    seed: int | None
    x: list[float]
    y: list[float]
    choice: str = ""
    on: str = ""  # hash of what it was measured on, where that is known


@dataclass(frozen=True)
class Chart:
    title: str
    x: str
    y: str
    lines: list[Line]
    log: bool = False  # whether y is better read on a logarithmic axis
    whole_x: bool = True  # layers and indices: ticks at whole numbers only

    @property
    def choices(self) -> list[str]:
        return list(dict.fromkeys(line.choice for line in self.lines))


@dataclass(frozen=True)
class Surface:
    """The loss over a plane: a row for each y, which is the second direction; None where it is not finite."""

    label: str
    seed: int
    x: list[float]
    y: list[float]
    loss: list[list[float | None]]


@dataclass
class Charts:
    """The charts of one part of the report."""

    charts: list[Chart] = field(default_factory=list)
    surfaces: list[Surface] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.charts or self.surfaces)


def real(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def reals(values: Any) -> list[float]:
    """A list of finite numbers, or nothing if one of them is not."""
    found = [real(value) for value in values] if isinstance(values, list) else []
    return [value for value in found if value is not None] if None not in found else []


def inside(value: Any, *path: str) -> Any:
    """The value under nested keys, or None."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def result(run: RunData, kind: str) -> dict[str, Any]:
    found = run.measured.get(kind, {}).get("result")
    return found if isinstance(found, dict) else {}


def layers_of(run: RunData, kind: str) -> list[dict[str, Any]]:
    layers = result(run, kind).get("layers")
    return [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []


def windows_of(run: RunData, kind: str) -> str:
    return str(result(run, kind).get("windows_hash") or "")


def _line(run: RunData, points: Iterable[tuple[Any, Any]], choice: str = "", on: str = "") -> Line | None:
    """A line through the points that are numbers; None if none is."""
    pairs = [(real(x), real(y)) for x, y in points]
    whole = [(x, y) for x, y in pairs if x is not None and y is not None]
    return Line(run.label, run.seed, [x for x, _ in whole], [y for _, y in whole], choice, on) if whole else None


def _by_layer(run: RunData, kind: str, value: Callable[[dict[str, Any]], Any], choice: str = "") -> Line | None:
    """A line over the layers of a measurement, beginning with its start, layer -1, where that has the value."""
    start = result(run, kind).get("start")
    layers = [{**start, "layer": -1}] if isinstance(start, dict) else []
    layers += [{"layer": place, **layer} for place, layer in enumerate(layers_of(run, kind))]
    return _line(run, ((layer["layer"], value(layer)) for layer in layers), choice, windows_of(run, kind))


def _chart(title: str, y: str, lines: Iterable[Line | None], **more: Any) -> list[Chart]:
    """A chart by layer, or none if no run has a line."""
    kept = [line for line in lines if line is not None]
    if any(line.x[0] == -1 for line in kept) and "x" not in more:
        more["x"] = "layer (\N{MINUS SIGN}1: before the first)"
    return [Chart(title, more.pop("x", "layer"), y, with_means(kept), **more)] if kept else []


def with_means(lines: Sequence[Line]) -> list[Line]:
    """The lines, and after those of several runs of one architecture their mean, if they are at the same places.

    Of runs that were measured on different windows there is no mean.
    """
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.choice, line.label), []).append(line)
    found: list[Line] = []
    for (choice, label), members in groups.items():
        found += members
        if len(members) > 1 and all((line.x, line.on) == (members[0].x, members[0].on) for line in members):
            columns = zip(*(member.y for member in members), strict=True)
            found.append(Line(label, None, members[0].x, [math.fsum(c) / len(c) for c in columns], choice))
    return found


def coefficient_charts(runs: Sequence[RunData]) -> Charts:
    """One chart for each learned coefficient; of those that every head has one of, the mean."""
    values: dict[str, dict[int, list[float]]] = {}
    heads: dict[str, int] = {}
    for number, run in enumerate(runs):
        for coefficients in coefficients_of(run):
            grouped: dict[str, list[float]] = {}
            for key, value in coefficients.items():
                if (known := real(value)) is not None:
                    grouped.setdefault(re.sub(r"\[\d+\]$", "", key), []).append(known)
            for name, members in grouped.items():
                heads[name] = max(heads.get(name, 1), len(members))
                values.setdefault(name, {}).setdefault(number, []).append(math.fsum(members) / len(members))
    charts = []
    for name, by_run in sorted(values.items()):
        title = f"{name}, mean of {heads[name]}" if heads[name] > 1 else name
        lines = [Line(runs[n].label, runs[n].seed, [float(i) for i in range(len(ys))], ys) for n, ys in by_run.items()]
        charts.append(Chart(title, "layer", "", with_means(lines)))
    charts += history_charts(runs, "coefficients", "{} during training")
    return Charts([*charts, *history_charts(runs, "gains", "Gain of {} during training")])


def history_charts(runs: Sequence[RunData], what: str, title: str) -> list[Chart]:
    """What layers had at each evaluation: a chart for each name, of one layer at a time; of several heads the mean."""
    lines: dict[str, list[Line]] = {}
    for run in runs:
        points: dict[tuple[str, int], dict[int, list[float]]] = {}
        for tokens, layers in run.history.get(what, []):
            for layer, values in enumerate(layers):
                for key, value in values.items():
                    if (known := real(value)) is not None:
                        name = re.sub(r"\[\d+\]$", "", key)
                        points.setdefault((name, layer), {}).setdefault(tokens, []).append(known)
        for (name, layer), by_tokens in points.items():
            y = [math.fsum(values) / len(values) for values in by_tokens.values()]
            line = Line(run.label, run.seed, list(map(float, by_tokens)), y, f"layer {layer}")
            lines.setdefault(name, []).append(line)
    return [
        Chart(title.format(name), "training tokens", "", with_means(found), whole_x=False)
        for name, found in sorted(lines.items())
    ]


def coefficients_of(run: RunData) -> list[dict[str, Any]]:
    """Layer by layer as measured, else as read from the checkpoint."""
    listed = [layer.get("coefficients") for layer in layers_of(run, "depth")]
    found: list[dict[str, Any]] = [layer for layer in listed if isinstance(layer, dict)]
    return found if any(found) else list(run.coefficients or [])


def depth_charts(runs: Sequence[RunData]) -> Charts:
    """What happens to the streams from layer to layer."""
    measured = [run for run in runs if layers_of(run, "depth")]

    def lines(value: Callable[[dict[str, Any]], Any]) -> list[Line | None]:
        return [_by_layer(run, "depth", value) for run in measured]

    streams = sorted(
        {
            name
            for run in measured
            for layer in layers_of(run, "depth")
            if isinstance(layer.get("norms"), dict)
            for name in layer["norms"]
        },
        key=lambda name: (name != "x", name),
    )
    charts: list[Chart] = []
    charts += _chart("Loss read out after each layer", "nats per token", lines(lambda layer: layer.get("readout_loss")))
    for stream in streams:
        charts += _chart(f"Norm of {stream}", RMS, lines(lambda layer, s=stream: inside(layer, "norms", s)))  # type: ignore[misc]
    for key, title, unit in (
        ("update_norm", "Norm of the update", RMS),
        ("cosine", "Similarity of successive updates", "cosine"),
        ("energy", "Energy of attention", ""),
        ("capped_rows", "Attention rows out of reach", "share of rows"),
        ("bounded_scores", "Scores beyond their bound", "share of scores"),
    ):
        charts += _chart(title, unit, lines(lambda layer, k=key: layer.get(k)))  # type: ignore[misc]
    charts += _chart("Entropy of attention, mean over heads", "nats", lines(lambda layer: _mean(layer.get("entropy"))))
    return Charts([*charts, *history_charts(runs, "norms", "Norm of {} during training")])


def _mean(values: Any) -> float | None:
    found = reals(values)
    return math.fsum(found) / len(found) if found else real(values)


PARTS = {"block": "whole block", "oracle": "oracle alone", "joint": "all streams"}


def jacobian_charts(runs: Sequence[RunData]) -> Charts:
    """Singular values of each layer's Jacobian, and what sums them up."""
    measured = [run for run in runs if layers_of(run, "jacobian")]
    charts: list[Chart] = []
    spectra: list[Line | None] = []
    for run in measured:
        for place, layer in enumerate(layers_of(run, "jacobian")):
            values = reals(inside(layer, "block", "singular_values"))
            if values:
                number = real(layer.get("layer"))
                name = f"layer {place if number is None else number:g}"
                places = [i + 1.0 for i in range(len(values))]
                spectra.append(Line(run.label, run.seed, places, values, name, windows_of(run, "jacobian")))
    charts += _chart("Spectrum of a block", "singular value", spectra, x="index", log=True)
    for key, title, unit in (
        ("sigma_max", "Largest singular value", ""),
        ("spread", "Spread of the spectrum", "first over last singular value"),
        ("stable_rank", "Stable rank", ""),
        ("rms_gain", "Mean gain", RMS),
    ):
        lines = [
            _by_layer(run, "jacobian", lambda layer, p=part, k=key: inside(layer, p, k), choice)  # type: ignore[misc]
            for part, choice in PARTS.items()
            for run in measured
        ]
        charts += _chart(title, unit, lines)
    return Charts(charts)


ALPHA = "alpha, in lengths of the weights"


def hessian_charts(runs: Sequence[RunData]) -> Charts:
    """Eigenvalues, the loss along a line, and over a plane where that was measured."""
    eigenvalues: list[Line | None] = []
    along: list[Line | None] = []
    surfaces = []
    for run in runs:
        found, on = result(run, "hessian"), windows_of(run, "hessian")
        listed = found.get("eigenvalues")
        values = reals([inside(entry, "value") for entry in listed]) if isinstance(listed, list) else []
        if values:
            eigenvalues.append(Line(run.label, run.seed, [i + 1.0 for i in range(len(values))], values, on=on))
        x, y = inside(found, "curve", "alpha"), inside(found, "curve", "loss")
        if isinstance(x, list) and isinstance(y, list):
            along.append(_line(run, zip(x, y, strict=False), on=on))
        surface = surface_of(run, found.get("surface"))
        if surface:
            surfaces.append(surface)
    charts = _chart("Largest eigenvalues of the Hessian", "", eigenvalues, x="index")
    charts += _chart("Loss along a random direction", "nats per token", along, x=ALPHA, whole_x=False)
    return Charts(charts, surfaces)


def surface_of(run: RunData, found: Any) -> Surface | None:
    """A surface whose rows and columns fit each other. Its rows go with the first direction, which is drawn as x."""
    alpha, rows = reals(inside(found, "alpha")), inside(found, "loss")
    loss = [[real(value) for value in row] for row in rows if isinstance(row, list)] if isinstance(rows, list) else []
    fits = bool(alpha) and len(loss) == len(alpha) and all(len(row) == len(alpha) for row in loss)
    if not fits or all(value is None for row in loss for value in row):
        return None
    return Surface(run.label, run.seed, alpha, alpha, [list(column) for column in zip(*loss, strict=True)])


def forgetting_charts(runs: Sequence[RunData], tables: Sequence[Any]) -> Charts:
    """The loss on the old corpus and on the new one while the new one is learned."""
    lines: dict[str, list[Line | None]] = {"source_loss": [], "target_loss": []}
    for found in tables:
        listed = inside(found, "runs")
        for entry in listed if isinstance(listed, list) else []:
            run = _run_of(inside(entry, "folder"), runs)
            steps = inside(entry, "steps")
            for key, drawn in lines.items():
                losses = inside(entry, key)
                if run is not None and isinstance(steps, list) and isinstance(losses, list):
                    drawn.append(_line(run, zip(steps, losses, strict=False), str(inside(entry, "direction") or "")))
    charts = _chart("Loss on the first corpus", "nats per token", lines["source_loss"], x="step of fine-tuning")
    charts += _chart("Loss on the second corpus", "nats per token", lines["target_loss"], x="step of fine-tuning")
    return Charts(charts)


def _run_of(folder: Any, runs: Sequence[RunData]) -> RunData | None:
    """The run in a folder that may have been moved since it was written down, with its study or alone."""
    parts = Path(str(folder)).parts
    for count in (2, 1):
        found = [run for run in runs if run.folder.resolve().parts[-count:] == parts[-count:]]
        if len(found) == 1:
            return found[0]
    return None
