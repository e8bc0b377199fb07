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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stepformer.base.settings import Settings, setting
from stepformer.measure import measured
from stepformer.measure.diagnostics.depth_view import plot, text
from stepformer.measure.diagnostics.windows import windows_of
from stepformer.model import Model, Passage
from stepformer.rules import State
from stepformer.training.run import LoadedRun

__all__ = ["SETTINGS", "DepthSettings", "inside", "measure", "plot", "text"]

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
    journal = measured.journal(run.folder.path, "depth", about, quiet=quiet)
    batches = enumerate(windows.split(settings.window_batch))
    parts = {f"batch {number}": partial(_look, run.model, batch) for number, batch in batches}
    found = journal.each("inside the network", parts, quiet=quiet)
    result = {**_together(run.model, found), "windows_hash": about["windows_hash"], "settings": settings.to_dict()}
    return measured.finish(run.folder.path, "depth", step=run.step, settings=settings.to_dict(), result=result)


def inside(model: Model, windows: Tensor) -> dict[str, Any]:
    """The same for windows (count, context + 1) of your own: inputs, and targets one token later."""
    return _together(model, [_look(model, windows)])


@torch.no_grad()
def _look(model: Model, windows: Tensor) -> dict[str, Any]:
    """What one batch adds to every sum."""
    windows = windows.to(model.embed.tok_emb.weight.device)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    start: dict[str, Any] = {}
    layers = []
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
                "energy": _sums(at.seen.get("energy")),
                "capped_rows": _shares(at, "capped_rows"),
                "bounded_scores": _shares(at, "bounded_scores"),
            }
        )
        step_before = step
    return {"tokens": inputs.numel(), "start": start, "layers": layers}


def _sum(t: Tensor) -> Sum:
    return [t.sum().item(), t.numel()]


def _sums(tensors: Iterable[Tensor] | None) -> Sum | None:
    """Over all calls of the layer; None if there were none."""
    return None if not tensors else _added([_sum(t.double()) for t in tensors])


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


def _mean(found: Sequence[Sum | None]) -> float | None:
    """The mean over batches; None if nothing was counted or it is not finite (a step size before the first step)."""
    known = [one for one in found if one is not None]
    if not known or not all(math.isfinite(total) for total, _ in known):
        return None
    total, count = _added(known)
    return total / count if count else None


def _root(found: Sequence[Sum | None]) -> float | None:
    mean = _mean(found)
    return None if mean is None else math.sqrt(mean)


def _together(model: Model, batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result from what the batches found."""

    def norms(parts: Sequence[dict[str, Any]]) -> dict[str, float | None]:
        return {name: _root([part["norms"][name] for part in parts]) for name in parts[0]["norms"]}

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
                "update_norm": _root([part["update_norm"] for part in parts]),
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
