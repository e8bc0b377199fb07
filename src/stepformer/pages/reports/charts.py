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
from stepformer.pages.reports.values import grouped, inside, real, reals, record, records, values

RMS = "root mean square"
Reader = Callable[..., float | None]
"""What takes a number out of nested values."""


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
    points: bool = False  # one point of each run, not a line

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


def _line(run: RunData, points: Iterable[tuple[Any, Any]], choice: str = "", on: str = "") -> Line | None:
    """A line through the points that are numbers; None if none is."""
    pairs = [(real(x), real(y)) for x, y in points]
    whole = [(x, y) for x, y in pairs if x is not None and y is not None]
    return Line(run.label, run.seed, [x for x, _ in whole], [y for _, y in whole], choice, on) if whole else None


def _by_layer(run: RunData, kind: str, path: tuple[str, ...], choice: str = "", read: Reader = real) -> Line | None:
    """A line over the layers of a measurement, beginning with its start, layer -1, where that has the value."""
    start = run.result(kind).get("start")
    layers = [{**start, "layer": -1}] if isinstance(start, dict) else []
    layers += [{"layer": place, **layer} for place, layer in enumerate(run.layers(kind))]
    return _line(run, ((layer["layer"], read(layer, *path)) for layer in layers), choice, run.windows(kind))


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
    found: list[Line] = []
    for (choice, label), members in grouped(((line.choice, line.label), line) for line in lines).items():
        found += members
        if len(members) > 1 and all((line.x, line.on) == (members[0].x, members[0].on) for line in members):
            columns = zip(*(member.y for member in members), strict=True)
            found.append(Line(label, None, members[0].x, [math.fsum(c) / len(c) for c in columns], choice))
    return found


def coefficient_charts(runs: Sequence[RunData]) -> Charts:
    """One chart for each learned coefficient; of those that every head has one of, the mean."""
    found: list[tuple[str, Line]] = []
    heads: dict[str, int] = {}
    for run in runs:
        layers = [
            (name, (float(layer), members))
            for layer, coefficients in enumerate(coefficients_of(run))
            for name, members in by_head(coefficients).items()
        ]
        for name, by_layer in grouped(layers).items():
            heads[name] = max(heads.get(name, 1), *(len(members) for _, members in by_layer))
            y = [math.fsum(members) / len(members) for _, members in by_layer]
            found.append((name, Line(run.label, run.seed, [layer for layer, _ in by_layer], y)))
    charts = [
        Chart(f"{name}, mean of {heads[name]}" if heads[name] > 1 else name, "layer", "", with_means(lines))
        for name, lines in sorted(grouped(found).items())
    ]
    charts += history_charts(runs, "coefficients", "{} during training")
    charts += history_charts(runs, "gains", "Gain of {} during training")
    return Charts([*charts, *history_charts(runs, "changes", "What steps change during training: {}")])


def history_charts(runs: Sequence[RunData], what: str, title: str) -> list[Chart]:
    """What layers had at each evaluation: a chart for each name, of one layer at a time; of several heads the mean."""
    lines: list[tuple[str, Line]] = []
    for run in runs:
        points = grouped(
            ((name, layer), (tokens, math.fsum(members) / len(members)))
            for tokens, layers in run.history.get(what, [])
            for layer, known in enumerate(layers)
            for name, members in by_head(known).items()
        )
        for (name, layer), pairs in points.items():
            by_tokens = dict(pairs)
            x, y = list(map(float, by_tokens)), list(by_tokens.values())
            lines.append((name, Line(run.label, run.seed, x, y, f"layer {layer}")))
    return [
        Chart(title.format(name), "training tokens", "", with_means(found), whole_x=False)
        for name, found in sorted(grouped(lines).items())
    ]


def by_head(coefficients: dict[str, Any]) -> dict[str, list[float]]:
    """The numbers of each coefficient, one or as many as there are heads: r[0] and r[1] are r."""
    known = ((re.sub(r"\[\d+\]$", "", key), real(value)) for key, value in coefficients.items())
    return grouped((name, value) for name, value in known if value is not None)


def coefficients_of(run: RunData) -> list[dict[str, Any]]:
    """Layer by layer as measured, else as read from the checkpoint."""
    found = [layer["coefficients"] for layer in run.layers("depth") if isinstance(layer.get("coefficients"), dict)]
    return found if any(found) else list(run.coefficients or [])


def depth_charts(runs: Sequence[RunData]) -> Charts:
    """What happens to the streams from layer to layer."""
    measured = [run for run in runs if run.layers("depth")]
    streams = {name for run in measured for layer in run.layers("depth") for name in record(layer, "norms")}
    charts: list[Chart] = []
    for path, title, unit in (
        (("readout_loss",), "Loss read out after each layer", "nats per token"),
        *((("norms", name), f"Norm of {name}", RMS) for name in sorted(streams, key=lambda name: (name != "x", name))),
        (("update_norm",), "Norm of the update", RMS),
        (("cosine",), "Similarity of successive updates", "cosine"),
        (("energy",), "Energy of attention", ""),
        (("capped_rows",), "Attention rows out of reach", "share of rows"),
        (("bounded_scores",), "Scores beyond their bound", "share of scores"),
        (("entropy",), "Entropy of attention, mean over heads", "nats"),
    ):
        read = _mean if path == ("entropy",) else real
        charts += _chart(title, unit, [_by_layer(run, "depth", path, read=read) for run in measured])
    return Charts([*charts, *history_charts(runs, "norms", "Norm of {} during training")])


def _mean(value: Any, *path: str) -> float | None:
    """A number, or the mean of several."""
    found = reals(value, *path)
    return math.fsum(found) / len(found) if found else real(value, *path)


PARTS = {"block": "whole block", "oracle": "oracle alone", "joint": "all streams"}


def jacobian_charts(runs: Sequence[RunData]) -> Charts:
    """Singular values of each layer's Jacobian, and what sums them up."""
    measured = [run for run in runs if run.layers("jacobian")]
    spectra: list[Line | None] = []
    for run in measured:
        for place, layer in enumerate(run.layers("jacobian")):
            number = real(layer, "layer")
            name = f"layer {place if number is None else number:g}"
            ranked = enumerate(reals(layer, "block", "singular_values"), start=1)
            spectra.append(_line(run, ranked, name, run.windows("jacobian")))
    charts = _chart("Spectrum of a block", "singular value", spectra, x="index", log=True)
    for key, title, unit in (
        ("sigma_max", "Largest singular value", ""),
        ("spread", "Spread of the spectrum", "first over last singular value"),
        ("stable_rank", "Stable rank", ""),
        ("rms_gain", "Mean gain", RMS),
    ):
        lines = [_by_layer(run, "jacobian", (part, key), choice) for part, choice in PARTS.items() for run in measured]
        charts += _chart(title, unit, lines)
    return Charts(charts)


def balance_charts(runs: Sequence[RunData]) -> Charts:
    """How far a diagonal preconditioner is from a scalar, layer by layer."""
    charts: list[Chart] = []
    measured = [run for run in runs if run.layers("balance")]
    turns = [(kind, turn) for kind in ("oracle", "stream") for turn in ("attn", "mlp", "both")]
    for key, title in (
        ("distance", "Distance of D from a scalar"),
        ("deviation", "Deviation of D from a scalar, Frobenius norm"),
        ("cosine", "Cosine of the update with and without D"),
    ):
        lines = [
            _by_layer(run, "balance", (kind, turn, key), f"{kind}, {turn}") for kind, turn in turns for run in measured
        ]
        charts += _chart(title, "", lines, log=key == "distance")
    return Charts(charts)


ALPHA = "alpha, in lengths of the weights"


def hessian_charts(runs: Sequence[RunData]) -> Charts:
    """Eigenvalues, the loss along a line, and over a plane where that was measured."""
    eigenvalues: list[Line | None] = []
    along: list[Line | None] = []
    surfaces = []
    for run in runs:
        found, on = run.result("hessian"), run.windows("hessian")
        ranked = enumerate(reals([inside(e, "value") for e in values(found, "eigenvalues")]), start=1)
        eigenvalues.append(_line(run, ranked, on=on))
        curve = zip(values(found, "curve", "alpha"), values(found, "curve", "loss"), strict=False)
        along.append(_line(run, curve, on=on))
        if surface := surface_of(run, found.get("surface")):
            surfaces.append(surface)
    charts = _chart("Largest eigenvalues of the Hessian", "", eigenvalues, x="index")
    charts += _chart("Loss along a random direction", "nats per token", along, x=ALPHA, whole_x=False)
    return Charts(charts, surfaces)


def surface_of(run: RunData, found: Any) -> Surface | None:
    """A surface whose rows and columns fit each other. Its rows go with the first direction, which is drawn as x."""
    alpha = reals(found, "alpha")
    loss = [[real(value) for value in row] for row in values(found, "loss") if isinstance(row, list)]
    fits = bool(alpha) and len(loss) == len(alpha) and all(len(row) == len(alpha) for row in loss)
    if not fits or all(value is None for row in loss for value in row):
        return None
    return Surface(run.label, run.seed, alpha, alpha, [list(column) for column in zip(*loss, strict=True)])


def forgetting_charts(runs: Sequence[RunData], tables: Sequence[Any]) -> Charts:
    """The loss on the old corpus and on the new one while the new one is learned."""
    charts = []
    for key, corpus in (("source_loss", "first"), ("target_loss", "second")):
        lines = [
            _line(run, zip(values(entry, "steps"), values(entry, key), strict=False), str(entry.get("direction") or ""))
            for found in tables
            for entry in records(found, "runs")
            if (run := _run_of(entry.get("folder"), runs))
        ]
        charts += _chart(f"Loss on the {corpus} corpus", "nats per token", lines, x="step of fine-tuning")
    return Charts(charts)


def _run_of(folder: Any, runs: Sequence[RunData]) -> RunData | None:
    """The run in a folder that may have been moved since it was written down, with its study or alone."""
    parts = Path(str(folder)).parts
    for count in (2, 1):
        found = [run for run in runs if run.folder.resolve().parts[-count:] == parts[-count:]]
        if len(found) == 1:
            return found[0]
    return None
