"""What a step of the optimizer does to the network, predicted to second order and measured (docs/trust-region.md).

    kl      KL(a || a') of attention rows, by layer and head, mean over queries
    rms     root mean square change of x / rho, what the norms make of the stream after each branch, by layer
    eta     sqrt(lambda_attn * mean KL over heads + rms^2, summed over layers and branches)
    r1      measured / predicted eta^2: 1 where the network is linear in the step
    loss    decrease, predicted -<G, dW> and obtained; on the step's own batch and on held-out text; r2 their ratio

The step is the next one of a run: its last checkpoint has weights and the optimizer's memory, and batches are a
function of the step's number. Predictions are those of the whole network, all parameters moved together. The sweep
takes the same direction at other lengths. `measure` looks at a run; `look(model, step, ...)` does without one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from rich.console import Group, RenderableType
from rich.text import Text
from torch import Tensor

from stepformer.base.errors import InputError
from stepformer.base.progress import counting
from stepformer.base.settings import Settings, setting
from stepformer.measure import measured
from stepformer.measure.diagnostics.common import DTYPES, digits, fixed_windows, kept, measured_on, twin
from stepformer.model import Model
from stepformer.optim.trust import change, moved, observe, tangent
from stepformer.present.style import COLOURS, GREY, clean, new_figure, save_figure, titled
from stepformer.present.tables import of_texts
from stepformer.training.loading import LoadedRun, corpus_of
from stepformer.training.run import at_last_checkpoint

MOST_HEADS = 4  # in one table; a wider one would be cut at the edge of the terminal


@dataclass(frozen=True)
class StepsSettings(Settings):
    """What `stepformer diagnose RUN --steps` can be asked."""

    section: ClassVar[str] = "steps"
    windows: int = setting(8, "sequences of the step's own batch, and windows of the validation split", least=1)
    rows: int = setting(64, "queries of each that rows and streams are looked at for, evenly spaced; 0: all", least=0)
    lambda_attn: float = setting(1.0, "weight of the KL beside the squared changes of streams", least=0)
    sweep: int = setting(9, "lengths of the step, each twice the last, its own in the middle; 0: none", least=0)
    seed: int = setting(0, "of the windows", least=0)
    corpus: str | None = setting(None, "folder of another prepared corpus for the held-out windows")
    precision: Literal["fp32", "fp64"] = setting("fp64", "of the look at the step; it is taken in the run's own")


SETTINGS = StepsSettings
Batch = tuple[Tensor, Tensor]


def measure(run: LoadedRun, settings: StepsSettings, *, quiet: bool = False) -> dict[str, Any]:
    """Take the run's next step and look at what it did; of it nothing is kept."""
    if measured.variant_of(run.model):
        raise InputError("--steps looks at a run's training, which knows no hybrids: leave --cutoff and --layers out.")
    trainer = at_last_checkpoint(run.folder.path, run.device.type)
    number = trainer.step
    try:
        inputs, targets = trainer.batches.at(number)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.update()
    finally:
        trainer.batches.close()
    model = twin(trainer.model, DTYPES[settings.precision], frozen=True)
    now = dict(model.named_parameters())
    step = {name: now[name] - value.to(now[name].dtype) for name, value in before.items()}
    with torch.no_grad():
        for name, value in before.items():
            now[name].copy_(value)
    windows = fixed_windows(
        corpus_of(run, settings.corpus).split("val"), settings.windows, run.config.model.context, settings.seed
    ).to(run.device)
    own = inputs[: settings.windows], targets[: settings.windows]
    held_out = windows[:, :-1], windows[:, 1:]
    with counting("steps", 6 + max(0, settings.sweep - 1), quiet=quiet) as count:
        result = look(
            model,
            step,
            own,
            held_out,
            rows=settings.rows,
            lambda_attn=settings.lambda_attn,
            sweep=settings.sweep,
            progress=count,
        )
    optimizer = run.config.optim
    result |= {"step": number, "optimizer": optimizer.name, "factor": trainer.optimizers.schedule.factor(number)}
    return kept(dataclasses.replace(run, step=number), settings, result | {"settings": settings.to_dict()})


@torch.no_grad()
def look(
    model: Model,
    step: Mapping[str, Tensor],
    own: Batch,
    held_out: Batch | None = None,
    *,
    rows: int = 0,
    lambda_attn: float = 1.0,
    sweep: int = 9,
    progress: Callable[[int], None] = lambda amount: None,
) -> dict[str, Any]:
    """What a step (parameter names and their changes) does on inputs and targets (B, T), its own and others."""
    length = own[0].shape[1]
    # the last of equal stretches each: early queries see few keys
    some = None if not rows or rows >= length else [(i + 1) * length // rows - 1 for i in range(rows)]
    before = observe(model, *own, rows=some)
    progress(1)
    predicted = tangent(model, own[0], step, targets=own[1], rows=some, at=before)
    progress(2)

    def after(scale: float) -> Any:
        with moved(model, step, scale):
            found = change(before, observe(model, *own, rows=some))
        progress(1)
        return found

    whole = after(1.0)
    total = predicted.total(lambda_attn).item()
    points = []
    for scale in (2.0 ** (k - sweep // 2) for k in range(sweep)):
        there = after(scale) if scale != 1 else whole
        expected = scale**2 * total
        points.append(
            {
                "scale": scale,
                "eta": math.sqrt(expected),
                "r1": _ratio(there.total(lambda_attn).item(), expected),
                "r2": _ratio(there.loss.item(), scale * predicted.loss.item()),  # type: ignore[union-attr]
            }
        )
    losses = {"own batch": (predicted.loss, whole.loss)}
    if held_out is not None:
        at = observe(model, *held_out, rows=[0])
        slope = tangent(model, held_out[0], step, targets=held_out[1], rows=[0], at=at).loss
        with moved(model, step):
            losses["held out"] = slope, change(at, observe(model, *held_out, rows=[0])).loss
        progress(2)
    both = {"predicted": predicted, "measured": whole}
    layers = [
        {
            "layer": layer,
            "kl": {name: one.kl[layer].tolist() for name, one in both.items()},
            "rms": {
                branch: {name: one.rms[branch][layer].clamp_min(0).sqrt().item() for name, one in both.items()}
                for branch in predicted.rms
            },
        }
        for layer in range(before.layers)
    ]
    found = whole.total(lambda_attn).item()
    return {
        "layers": layers,
        "eta": {"predicted": math.sqrt(total), "measured": math.sqrt(found)},
        "r1": _ratio(found, total),
        "loss": {
            name: {"predicted": -a.item(), "obtained": -b.item(), "r2": _ratio(b.item(), a.item())}  # type: ignore[union-attr]
            for name, (a, b) in losses.items()
        },
        "sweep": points,
        "lambda_attn": lambda_attn,
        "tokens": own[0].numel(),
        "queries": own[0].numel() if some is None else len(own[0]) * len(some),
    }


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def text(result: dict[str, Any]) -> RenderableType:
    """Tables by layer and by head, of the loss, and what it was measured on."""
    layers = result["layers"]
    heads, branches = len(layers[0]["kl"]["measured"]), list(layers[0]["rms"])
    header = ["layer", *(["KL predicted", "measured", "ratio"] if heads else [])]
    header += [word for branch in branches for word in (f"RMS {branch} predicted", "measured")]
    rows = []
    for layer in layers:
        kl = [sum(layer["kl"][name]) / heads for name in ("predicted", "measured")] if heads else []
        cells = [str(layer["layer"]), *map(digits, [*kl, _ratio(kl[1], kl[0])] if kl else [])]
        rows.append([*cells, *(digits(layer["rms"][b][name]) for b in branches for name in ("predicted", "measured"))])
    parts: list[RenderableType] = [of_texts(header, rows), ""]
    if not heads:
        parts += ["This attention has no rows of weights: only the streams are looked at.", ""]
    for begin in range(0, heads, MOST_HEADS):
        some = range(begin, min(begin + MOST_HEADS, heads))
        by_head = []
        for layer in layers:
            expected, found = (layer["kl"][name] for name in ("predicted", "measured"))
            by_head.append([str(layer["layer"]), *(f"{expected[h]:.2e} {found[h]:.2e}" for h in some)])
        title = Text("KL of attention by head: predicted, measured", style="bold")
        parts += [title, of_texts(["layer", *(f"head {h}" for h in some)], by_head), ""]
    keys = ("predicted", "obtained", "r2")
    loss = [[name, *(digits(one[key]) for key in keys)] for name, one in result["loss"].items()]
    parts += [of_texts(["decrease of the loss", "-<G, dW>", "obtained", "r2"], loss), ""]
    eta = result["eta"]
    about = f"step {result['step'] + 1} of {result['optimizer']}; " if "step" in result else ""
    parts.append(
        f"{about}eta {digits(eta['measured'])} measured, {digits(eta['predicted'])} predicted: r1 = "
        f"{digits(result['r1'])}; {measured_on(result)}, {result['queries']:,} queries, lambda_attn "
        f"{result['lambda_attn']:g} (docs/trust-region.md)"
    )
    return Group(*parts)


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Write a PNG: KL by layer and head, RMS by layer, and measured over predicted at other lengths of the step."""
    layers, numbers = result["layers"], [layer["layer"] for layer in result["layers"]]
    heads = len(layers[0]["kl"]["measured"])
    figure = new_figure((14, 3.6))
    kl, rms, sweep, loss = figure.subplots(1, 4)
    looks = {"predicted": "--", "measured": "-"}
    for name, dash in looks.items() if heads else ():
        mean = [sum(layer["kl"][name]) / heads for layer in layers]
        kl.plot(numbers, mean, dash, color=COLOURS[0], label=f"{name}, mean")
    for head in range(heads):
        each = [layer["kl"]["measured"][head] for layer in layers]
        kl.plot(numbers, each, "o", color=COLOURS[1], markersize=3, label="measured, a head" if not head else None)
    titled(kl, "KL of attention rows" if heads else "attention without rows", "layer", "nats")
    for place, branch in enumerate(layers[0]["rms"]):
        for name, dash in looks.items():
            values = [layer["rms"][branch][name] for layer in layers]
            rms.plot(numbers, values, dash, color=COLOURS[place + 1], label=f"{branch}, {name}")
    titled(rms, "change of the normalised stream", "layer", "root mean square")
    for axes, key, title in (
        (sweep, "r1", "measured / predicted change"),
        (loss, "r2", "obtained / predicted decrease"),
    ):
        draw_sweep(axes, result["sweep"], key)
        titled(axes, title, "eta of the prediction")
    for axes in (kl, rms):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_yscale("log")
    for axes in (kl, rms, sweep, loss):
        clean(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    about = f"step {result['step'] + 1} of {result['optimizer']}; " if "step" in result else ""
    save_figure(figure, path, f"{about}{measured_on(result)}, {result['queries']:,} queries")


def draw_sweep(axes: Any, points: Sequence[Mapping[str, Any]], key: str = "r1", **look: Any) -> None:
    """Measured over predicted against the length of a step, both logarithmic; the step's own length has a ring."""
    known = [(point["eta"], point[key]) for point in points if (point[key] or 0) > 0]
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log" if key == "r1" else "linear")
    ratios = [ratio for _, ratio in known]
    if key == "r1" and max(ratios, default=1) < 10 * min(ratios, default=1):  # too few powers of ten to be the labels
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
    if known:
        axes.plot(*zip(*known, strict=True), "o-", **{"color": COLOURS[2], "markersize": 3.5, **look})
    for point in points:
        if point["scale"] == 1 and (point[key] or 0) > 0:
            axes.plot(
                point["eta"], point[key], "o", markersize=9, fillstyle="none", color=COLOURS[0], label="this step"
            )
