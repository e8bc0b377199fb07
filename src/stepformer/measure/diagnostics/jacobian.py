"""How perturbations of the tokens travel through depth: singular values of every layer's Jacobian.

    J_block = dx'/dx,    J_oracle = dR/dX,    J_joint = d(x', streams')/d(x, streams)       (layer_maps.py)

The linearised variable is the whole tensor, (B, T, d) flattened, so J is a square matrix of B T d rows that is never
formed (sketching.py). `measure` looks at a run on fixed windows of its validation split. Without a run:

    maps = LayerMaps(model, tokens)
    found = spectrum(maps.jacobian(3, "block"), rank=64, oversampling=10, iterations=8, probes=8, generator=generator)

Every statistic is computed for each batch of windows and then averaged over the batches.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from rich.console import Group, RenderableType
from rich.text import Text
from torch import Tensor

from stepformer.base.errors import InputError
from stepformer.base.progress import counting
from stepformer.base.settings import Settings, setting
from stepformer.measure import measured
from stepformer.measure.diagnostics.common import DTYPES, digits, generator_of, kept, measured_on, windows_of
from stepformer.measure.diagnostics.layer_maps import KINDS, LayerMaps, Linearised, why_no_oracle
from stepformer.measure.diagnostics.sketching import Spectrum, spectrum
from stepformer.model import Model
from stepformer.present.style import COLOURS, GREY, clean, new_figure, save_figure, titled
from stepformer.present.tables import of_texts
from stepformer.training.loading import LoadedRun

__all__ = [
    "SETTINGS",
    "JacobianSettings",
    "LayerMaps",
    "Linearised",
    "Spectrum",
    "measure",
    "over_batches",
    "over_layers",
    "plot",
    "spectrum",
    "text",
]

MEANS = ("spread", "stable_rank", "rms_gain", "frobenius")
LARGEST = ("change", "change_of_largest", "error", "rounds")
TITLES = {
    "block": "block: x to x', streams held",
    "oracle": "oracle: X to R(X)",
    "joint": "joint: x and all streams",
}
PER_LAYER = ("sigma_max", "sigma_k", "spread", "stable_rank", "rms_gain")
OVER_LAYERS = {
    "persistence": "persistence, sum of log sigma_k",
    "sum_log_rms_gain": "sum of log rms gain",
    "mean_sigma_max": "mean sigma_1",
    "mean_sigma_k": "mean sigma_k",
    "mean_spread": "mean spread",
    "max_spread": "largest spread",
    "mean_stable_rank": "mean stable rank",
}
LEGACY = 11  # the singular value that published tables, sorted the wrong way, give as the 64th


@dataclass(frozen=True)
class JacobianSettings(Settings):
    """What `stepformer diagnose RUN --jacobian` can be asked."""

    section: ClassVar[str] = "jacobian"
    windows: int = setting(16, "windows of the validation split", least=1)
    window_batch: int = setting(2, "windows in one Jacobian; statistics are means over the batches", least=1)
    context: int | None = setting(None, "tokens of a window (unset: the model's context)", least=1)
    rank: int = setting(64, "k: how many singular values", least=1)
    oversampling: int = setting(10, "random directions beyond k", least=0)
    iterations: int = setting(8, "rounds after the first sketch, at most; 0: as published", least=0)
    tolerance: float = setting(0.01, "relative error of the values at which rounds stop", least=0)
    probes: int = setting(8, "random sign vectors for the Frobenius norm", least=1)
    operators: str = setting("block,oracle,joint", "which Jacobians, with commas between")
    seed: int = setting(0, "of the windows and of all random vectors", least=0)
    corpus: str | None = setting(None, "folder of another prepared corpus with the same tokenizer")
    precision: Literal["fp32", "fp64"] = setting("fp32", "of all computations")

    def problems(self) -> list[str]:
        unknown = [kind for kind in self.kinds() if kind not in KINDS]
        return [f"operators = '{self.operators}' should name some of {', '.join(KINDS)}."] if unknown else []

    def kinds(self) -> list[str]:
        return list(dict.fromkeys(word.strip() for word in self.operators.split(",")))


SETTINGS = JacobianSettings


def measure(run: LoadedRun, settings: JacobianSettings, *, quiet: bool = False) -> dict[str, Any]:
    """Singular values by layer on fixed windows; interrupted, the same call continues."""
    model, (windows, about) = run.model, windows_of(run, settings)
    batches = list(windows[:, :-1].split(settings.window_batch))
    if len(batches) > 1 and len(batches[-1]) < settings.window_batch:
        raise InputError(
            f"windows = {settings.windows} is no multiple of window_batch = {settings.window_batch}: the last batch "
            "would be smaller, and Jacobians of different size have no common mean."
        )
    journal = measured.journal(run.folder.path, measured.kind_of("jacobian", run.model), about, quiet=quiet)
    pieces: defaultdict[tuple[int, str], list[Spectrum]] = defaultdict(list)
    layers, kinds = range(len(model.blocks)), settings.kinds()
    with counting("Jacobians", len(batches) * len(layers) * len(kinds), quiet=quiet) as step:
        for number, tokens in enumerate(batches):
            batch = _Batch(model, tokens, number, settings)
            notes = journal.get("notes", batch.notes)
            for layer, kind in itertools.product(layers, kinds):
                found = journal.get(f"layer {layer} {kind} batch {number}", partial(batch.find, layer, kind))
                pieces[layer, kind] += [] if found is None else [Spectrum(**found)]
                step(1)
    of = {kind: [over_batches(pieces[layer, kind]) for layer in layers] for kind in KINDS}
    result: dict[str, Any] = {
        "layers": [{"layer": layer, **{kind: of[kind][layer] for kind in KINDS}} for layer in layers],
        "summary": {kind: over_layers(of[kind]) for kind in KINDS},
        "notes": notes,
        "tokens": windows[:, :-1].numel(),
        "batches": len(batches),
        "windows_hash": about["windows_hash"],
        "settings": settings.to_dict(),
    }
    return kept(run, settings, result)


@dataclass
class _Batch:
    """Windows that make one Jacobian for each layer and kind."""

    model: Model
    tokens: Tensor
    number: int
    settings: JacobianSettings
    done: dict[tuple[int, str], dict[str, Any] | None] = field(default_factory=dict)

    @functools.cached_property
    def maps(self) -> LayerMaps:
        """Made once something of this batch is not in the journal."""
        return LayerMaps(self.model, self.tokens, dtype=DTYPES[self.settings.precision])

    def find(self, layer: int, kind: str) -> dict[str, Any] | None:
        if kind == "joint" and self.maps.has_only_x(layer):
            kind = "block"
        if (layer, kind) not in self.done:
            jacobian, s = self.maps.jacobian(layer, kind), self.settings
            sizes = {name: getattr(s, name) for name in ("rank", "oversampling", "iterations", "tolerance", "probes")}
            generator = generator_of(s.seed, layer, kind, self.number)
            found = None if jacobian is None else asdict(spectrum(jacobian, **sizes, generator=generator))
            self.done[layer, kind] = found
        return self.done[layer, kind]

    def notes(self) -> list[str]:
        """What a reader of the numbers should know about this architecture."""
        notes: list[str] = []
        kinds, model = self.settings.kinds(), self.maps.model
        if "oracle" in kinds:
            reasons = [why_no_oracle(block, i in model.plain_layers) for i, block in enumerate(model.blocks)]
            notes += dict.fromkeys(reason for reason in reasons if reason)
        if "joint" in kinds:
            parts, others = self.maps.parts(), ", ".join(self.maps.left_out())
            notes.append(
                f"The joint state is ({', '.join(parts)}), in the Euclidean norm of all its numbers together."
                if len(parts) > 1
                else "Nothing but x reaches the next layer: the joint Jacobian is the block's."
            )
            notes += [f"Streams left out of it, as they are the same for all tokens: {others}."] if others else []
        return notes


def over_batches(found: Sequence[Spectrum]) -> dict[str, Any] | None:
    """The statistics of one layer as means over batches; None if there are none."""
    if not found:
        return None
    values = [statistics.fmean(column) for column in zip(*(one.values for one in found), strict=True)]

    def over(how: Callable[[Any], Any], key: str) -> Any:
        return _over(how, [getattr(one, key) for one in found])

    row: dict[str, Any] = {
        "singular_values": values,
        "sigma_max": values[0],
        "sigma_k": values[-1],
        "k": len(values),
        **{key: over(statistics.fmean, key) for key in MEANS},
        # of the mean over batches, from the probes alone
        "frobenius_standard_error": over(lambda e: math.sqrt(math.fsum(x**2 for x in e)) / len(e), "frobenius_error"),
        "converged": over(all, "settled"),
        **{key: over(max, key) for key in LARGEST},
        "dimension": found[0].dimension,
    }
    if len(values) >= LEGACY:
        spreads = [one.values[0] / one.values[LEGACY - 1] if one.values[LEGACY - 1] > 0 else None for one in found]
        row["legacy"] = {f"sigma_{LEGACY}": values[LEGACY - 1], "spread": _over(statistics.fmean, spreads)}
    return row


def over_layers(rows: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """One number per statistic: means, the largest spread, and sums of logarithms, those of products along depth."""
    known = [row for row in rows if row is not None]
    if not known:
        return None
    of = {key: [row[key] for row in known] for key in known[0] if key != "legacy"}
    summary: dict[str, Any] = {
        "persistence": _sum_of_logs(of["sigma_k"]),
        "mean_spread": _over(statistics.fmean, of["spread"]),
        "max_spread": _over(max, of["spread"]),
        **{f"mean_{key}": _over(statistics.fmean, of[key]) for key in ("stable_rank", "sigma_max", "sigma_k")},
        "sum_log_rms_gain": _sum_of_logs(of["rms_gain"]),
        "layers": len(known),
    }
    if all("legacy" in row for row in known):
        summary["legacy"] = {
            "persistence": _sum_of_logs([row["legacy"][f"sigma_{LEGACY}"] for row in known]),
            "mean_spread": _over(statistics.fmean, [row["legacy"]["spread"] for row in known]),
        }
    return summary


def _over(how: Callable[[Any], Any], values: Sequence[Any]) -> Any:
    """A mean, say; None if a value is missing, as one over the others would be about something else."""
    return None if None in values else how(values)


def _sum_of_logs(values: Sequence[float]) -> float | None:
    return math.fsum(map(math.log, values)) if min(values) > 0 else None


def text(result: dict[str, Any]) -> RenderableType:
    """A table for each Jacobian, the sums over depth, and the notes."""
    shown: list[RenderableType] = []
    kinds = [kind for kind in TITLES if result["summary"][kind] is not None]
    same = all(row["joint"] == row["block"] for row in result["layers"])  # as a note says
    for kind in (kind for kind in kinds if not (kind == "joint" and same)):
        found = {str(row["layer"]): row[kind] for row in result["layers"] if row[kind] is not None}
        first = next(iter(found.values()))
        k = first["k"]
        names = ["layer", "sigma_1", f"sigma_{k}", f"sigma_1/sigma_{k}", "stable rank", "rms gain", "error"]
        cells = [
            [layer, *(digits(of[key]) for key in PER_LAYER), "-" if of["error"] is None else f"{of['error']:.1%}"]
            for layer, of in found.items()
        ]
        title = f"{TITLES[kind]}, dimension {first['dimension']:,}"
        shown += [Text(title, style="bold"), of_texts(names, cells), ""]
    if kinds:
        of = result["summary"]
        rows = [[title, *(digits(of[kind][key]) for kind in kinds)] for key, title in OVER_LAYERS.items()]
        if all("legacy" in of[kind] for kind in kinds):
            legacy = (digits(of[kind]["legacy"]["persistence"]) for kind in kinds)
            rows.append(["legacy persistence, sum of log sigma_11", *legacy])
        shown += [of_texts(["over all layers", *kinds], rows), ""]
    settings = result["settings"]
    how = f"at most {settings['iterations']} rounds, {settings['probes']} probes, {settings['precision']}"
    shown.append(f"{measured_on(result)}; {how}")
    shown.append("error: the values are estimates from below; the last of them may be too low by so much")
    shown.append("persistence, spread and the rest: docs/jacobian.md")
    return Group(*shown, *result["notes"])


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Write a PNG: the singular values of every layer for each Jacobian, and gains along depth."""
    kinds = [kind for kind in TITLES if result["summary"][kind] is not None]
    columns = max(1, len(kinds))
    figure = new_figure((1 + 3.6 * columns, 6.6))
    panels = figure.subplots(2, columns, squeeze=False)
    for above, below, kind in zip(*panels, kinds, strict=False):
        found = {row["layer"]: row[kind] for row in result["layers"] if row[kind] is not None}
        _draw_spectra(above, {layer: of["singular_values"] for layer, of in found.items()})
        titled(above, TITLES[kind], "index", "singular value")
        _draw_gains(below, found)
        for axes in (above, below):
            axes.set_yscale("log")
            clean(axes)
    save_figure(figure, path, measured_on(result))


NAMED = 5  # layers whose lines all have their number in the legend


def _draw_spectra(axes: Any, spectra: dict[int, list[float]]) -> None:
    """From light blue at the first layer to black at the last."""
    last = len(spectra) - 1
    blue = [int(COLOURS[6][i : i + 2], 16) / 255 for i in (1, 3, 5)]
    for place, (layer, values) in enumerate(spectra.items()):
        colour = [part * (1 - place / max(1, last)) for part in blue]
        named = place in (0, last) or len(spectra) <= NAMED
        label = f"layer {layer}" if named else "those between" if place == (last + 1) // 2 else None
        axes.plot(range(1, len(values) + 1), values, color=colour, linewidth=1.6, label=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=8)


def _draw_gains(axes: Any, found: dict[int, dict[str, Any]]) -> None:
    layers, k = list(found), next(iter(found.values()))["k"]
    shown = {"sigma_max": "sigma_1", "sigma_k": f"sigma_{k}", "rms_gain": "rms gain"}
    for (key, label), colour in zip(shown.items(), COLOURS[1:], strict=False):
        axes.plot(layers, [of[key] for of in found.values()], "o-", color=colour, markersize=4, label=label)
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xticks(layers if len(layers) <= 12 else layers[:: len(layers) // 8])
    axes.set_xlabel("layer")
    axes.legend(frameon=False, fontsize=8)
