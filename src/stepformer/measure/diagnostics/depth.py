"""Inside the network: what happens to the tokens from layer to layer.

For layer l, with x_l before it and x_{l+1} after it, over all tokens of the windows:

    norms          root mean square of x and of every stream, after the layer
    update_norm    root mean square of x_{l+1} - x_l
    cosine         mean over tokens of the cosine between x_{l+1} - x_l and x_l - x_{l-1}
    entropy        of attention, in nats, by head: mean over queries that see more than themselves
    readout_loss   of the model's own head, read right after the layer, in nats per token
    energy         of attention, mean over tokens and heads: see docs/inside-the-network.md
    capped_rows, bounded_scores    what constrained and Hamiltonian attention report (`Model.observe`)

Beside them stand the learned coefficients. `measure` looks at a run on fixed windows of its validation split;
`inside(model, windows)` does the same without a run.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from rich.console import Group, RenderableType
from torch import Tensor

from stepformer.base.settings import Settings, setting
from stepformer.measure import measured
from stepformer.measure.diagnostics.common import digits, kept, measured_on, windows_of
from stepformer.model import Model, Passage
from stepformer.present.style import COLOURS, DASHES, as_written, clean, new_figure, save_figure, titled
from stepformer.present.tables import of_texts
from stepformer.rules import State
from stepformer.training.loading import LoadedRun

__all__ = ["SETTINGS", "DepthSettings", "inside", "measure", "plot", "text"]

COLUMNS = {
    "readout_loss": "loss here",
    "update_norm": "|update|",
    "cosine": "cosine",
    "entropy": "entropy",
    "energy": "energy",
    "capped_rows": "capped",
    "bounded_scores": "bounded",
}
MOST_COEFFICIENTS = 9  # in one table; a wider one would be cut at the edge of the terminal
Sum = list[float]
"""[sum, how many]: what batches add up to, in fp64, since over a hundred thousand tokens fp32 loses digits."""


@dataclass(frozen=True)
class DepthSettings(Settings):
    """What `stepformer diagnose RUN --depth` can be asked."""

    section: ClassVar[str] = "depth"
    windows: int = setting(32, "windows of the validation split", least=1)
    window_batch: int = setting(4, "windows at a time; fewer need less memory", least=1)
    context: int | None = setting(None, "tokens of a window (unset: the model's context)", least=1)
    seed: int = setting(0, "of the windows", least=0)
    corpus: str | None = setting(None, "folder of another prepared corpus with the same tokenizer")


SETTINGS = DepthSettings


def measure(run: LoadedRun, settings: DepthSettings, *, quiet: bool = False) -> dict[str, Any]:
    """Norms, updates, entropies and losses by layer on fixed windows; interrupted, the same call continues."""
    windows, about = windows_of(run, settings)
    journal = measured.journal(run.folder.path, measured.kind_of("depth", run.model), about, quiet=quiet)
    batches = enumerate(windows.split(settings.window_batch))
    parts = {f"batch {number}": partial(_look, run.model, batch) for number, batch in batches}
    found = journal.each("inside the network", parts, quiet=quiet)
    result = {**_together(run.model, found), "windows_hash": about["windows_hash"], "settings": settings.to_dict()}
    return kept(run, settings, result)


def inside(model: Model, windows: Tensor) -> dict[str, Any]:
    """Norms, updates, entropies and losses by layer on windows (count, context + 1): inputs and, one later, targets."""
    return _together(model, [_look(model, windows)])


@torch.no_grad()
def _look(model: Model, windows: Tensor) -> dict[str, Any]:
    """What one batch adds to every sum."""
    windows = windows.to(model.embed.tok_emb.weight.device)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    start: dict[str, Any] = {}
    layers: list[dict[str, Any]] = []
    step_before: Tensor | None = None
    for at in model.passages(inputs, rows=True):
        if at.layer == 0:
            start = {"norms": _squares(at.before), "readout_loss": _loss(model, at.before, targets)}
        step = (at.after.x - at.before.x).double()
        cosine = None if step_before is None else F.cosine_similarity(step, step_before, dim=-1)
        layers.append(
            {
                "norms": _squares(at.after),
                "update_norm": _sum(step.square()),
                "cosine": None if cosine is None else _sum(cosine),
                "entropy": _entropies(at),
                "readout_loss": _loss(model, at.after, targets),
                "energy": _added([_sum(t.double()) for t in at.seen["energy"]]) if at.seen.get("energy") else None,
                "capped_rows": _shares(at, "capped_rows"),
                "bounded_scores": _shares(at, "bounded_scores"),
            }
        )
        step_before = step
    return {"tokens": inputs.numel(), "start": start, "layers": layers}


def _sum(t: Tensor) -> Sum:
    return [t.sum().item(), t.numel()]


def _squares(s: State) -> dict[str, Sum]:
    return {name: _sum(t.double().square()) for name, t in {"x": s.x, **s.streams}.items()}


def _loss(model: Model, s: State, targets: Tensor) -> Sum:
    """The cross-entropy of the head on x as it is here, summed over tokens."""
    logits = model.head(s.x)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return [F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum").item(), targets.numel()]


def _entropies(at: Passage) -> list[Sum] | None:
    """By head: a query that sees itself alone has no choice, so its zero is left out."""
    calls = at.seen.get("entropy")
    if not calls:
        return None
    chooses = (at.call.counts() > 1).expand(calls[0].shape[0], calls[0].shape[2])[:, None]
    count = int(chooses.sum())
    heads = [(entropy * chooses).double().sum(dim=(0, 2)).tolist() for entropy in calls]
    return [[math.fsum(sums), count * len(calls)] for sums in zip(*heads, strict=True)]


def _shares(at: Passage, name: str) -> Sum | None:
    """A share is already a mean; it counts by the tokens it is about."""
    found, rows = at.seen.get(name), at.before.x[..., 0].numel()
    return None if not found else [math.fsum(share.item() * rows for share in found), rows * len(found)]


def _added(sums: Sequence[Sum]) -> Sum:
    return [math.fsum(total for total, _ in sums), sum(int(count) for _, count in sums)]


def _mean(found: Sequence[Sum | None], of: Callable[[float], float] = float) -> float | None:
    """The mean over batches or its root; None if nothing was counted or it is infinite (a step size at the start)."""
    known = [one for one in found if one is not None]
    if not known or not all(math.isfinite(total) for total, _ in known):
        return None
    total, count = _added(known)
    return of(total / count) if count else None


def _together(model: Model, batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result from what the batches found."""

    def norms(parts: Sequence[dict[str, Any]]) -> dict[str, float | None]:
        return {name: _mean([part["norms"][name] for part in parts], math.sqrt) for name in parts[0]["norms"]}

    starts = [batch["start"] for batch in batches]
    rows = []
    for layer, coefficients in enumerate(model.coefficients()):
        parts = [batch["layers"][layer] for batch in batches]
        heads = parts[0]["entropy"]
        rows.append(
            {
                "layer": layer,
                "coefficients": coefficients,
                "norms": norms(parts),
                "update_norm": _mean([part["update_norm"] for part in parts], math.sqrt),
                "entropy": heads and [_mean([part["entropy"][h] for part in parts]) for h in range(len(heads))],
                **{
                    key: _mean([part[key] for part in parts])
                    for key in ("cosine", "readout_loss", "energy", "capped_rows", "bounded_scores")
                },
            }
        )
    return {
        "layers": rows,
        "start": {"norms": norms(starts), "readout_loss": _mean([start["readout_loss"] for start in starts])},
        "tokens": sum(batch["tokens"] for batch in batches),
    }


def text(result: dict[str, Any]) -> RenderableType:
    """Tables of what the layers do, of the streams and of the learned coefficients, and what it was measured on."""
    layers, start = result["layers"], result["start"]
    shown = [key for key in COLUMNS if any(row[key] is not None for row in layers)]
    streams, after = list(start["norms"]), [{"layer": "start", **start}, *layers]
    doing = [[str(row["layer"]), *(_cell(row.get(key), key) for key in shown)] for row in after]
    sizes = [[str(row["layer"]), *(digits(row["norms"].get(name)) for name in streams)] for row in after]
    parts: list[RenderableType] = [
        *(of_texts(["after layer", *(COLUMNS[key] for key in shown)], doing), ""),
        *(of_texts(["after layer", *(f"|{name}|" for name in streams)], sizes), ""),
    ]
    names = list(dict.fromkeys(name for row in layers for name in row["coefficients"]))
    for begin in range(0, len(names), MOST_COEFFICIENTS):
        some = names[begin : begin + MOST_COEFFICIENTS]
        rows = [[str(row["layer"]), *(digits(row["coefficients"].get(name)) for name in some)] for row in layers]
        parts += [of_texts(["layer", *some], rows), ""]
    parts.append(
        f"{measured_on(result)}; norms are root mean squares, entropy is a mean over heads in nats\n"
        "loss here: of the head, read out after this layer; cosine: of successive updates of x; energy: of attention "
        "(docs/inside-the-network.md)"
    )
    return Group(*parts)


def _cell(value: Any, key: str) -> str:
    if isinstance(value, list):  # by head
        known = [one for one in value if one is not None]
        value = statistics.fmean(known) if known else None
    return f"{value:.1%}" if value is not None and key in ("capped_rows", "bounded_scores") else digits(value)


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Write a PNG: a panel for every kind of number, along depth."""
    layers, start = result["layers"], result["start"]
    of = {key: [row[key] for row in layers] for key in layers[0]}
    norms = {name: [first, *(norm.get(name) for norm in of["norms"])] for name, first in start["norms"].items()}
    heads = len(next((entropy for entropy in of["entropy"] if entropy), ()))
    panels: list[tuple[str, str, dict[str, list[Any]]]] = [
        ("Loss read out after each layer", "nats per token", {"": [start["readout_loss"], *of["readout_loss"]]}),
        ("Streams", "root mean square", {**norms, "update of x": of["update_norm"]}),
    ]
    if heads:
        each = {f"head {h}": [entropy and entropy[h] for entropy in of["entropy"]] for h in range(heads)}
        panels.append(("Entropy of attention, by head", "nats", each))
    panels.append(("Cosine of successive updates", "", {"": of["cosine"]}))
    if any(energy is not None for energy in of["energy"]):
        panels.append(("Energy of attention", "", {"": of["energy"]}))
    for kind, names in _families(layers).items():
        panels.append((f"Coefficient {kind}", "", {n: [row.get(n) for row in of["coefficients"]] for n in names}))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure((1 + 3.8 * columns, 0.6 + 2.9 * rows))
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (title, unit, lines) in zip(grid, panels, strict=False):
        _draw(axes, title, unit, lines, of["layer"])
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    save_figure(figure, path, f"by layer, -1 is the start; {measured_on(result)}")


def _families(layers: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Coefficients that differ by turn or head alone share a panel: mu_attn and mu_mlp, r[0] and r[1]."""
    families: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for row in layers for name in row["coefficients"]):
        families.setdefault(re.sub(r"(_attn|_mlp|_both)$|\[\d+\]$", "", name), []).append(name)
    return families


def _draw(axes: Any, title: str, unit: str, lines: dict[str, list[Any]], layers: list[int]) -> None:
    """Lines along depth; one with a value more than there are layers begins at the start."""
    for place, (label, y) in enumerate(lines.items()):
        cycle, colour = divmod(place, len(COLOURS))
        x = layers if len(y) == len(layers) else [-1, *layers]
        values = [float("nan") if value is None else value for value in y]
        looks = {"color": COLOURS[colour], "linestyle": DASHES[cycle % len(DASHES)]}
        axes.plot(x, values, marker="o", markersize=3.5, linewidth=1.5, label=label or None, **looks)
    if len(lines) > 1:
        as_written(axes.legend(frameon=False, fontsize=7, ncols=1 if len(lines) <= 5 else 2).get_texts())
    titled(axes, title)
    axes.set_ylabel(unit, fontsize=8)
    clean(axes)
    axes.xaxis.get_major_locator().set_params(integer=True)
