"""Balance of second moments: how far a diagonal preconditioner is from a scalar (Momentum Streams, appendix E).

Adam and RMSProp divide by a root mean square, coordinate by coordinate: D = diag(d_j), d_j = 1 / (sqrt(s_j) + eps).
With

    1 + delta = (max_j (sqrt(s_j) + eps) / min_j (sqrt(s_j) + eps))^2,        c = min_j d_j

D differs from a scalar by  |D / c - I| = sqrt(1 + delta) - 1 <= delta / 2,  and LN_u removes the scalar.

    oracle    s_j is the mean of g_j^2 over all tokens, g the answers of attention or MLP: of any architecture
    stream    s is what each token carries, after each turn: of rmsprop, adam and adamw, with means over tokens

    ratio       1 + delta, the largest second moment over the smallest
    distance    |D / c - I|, the spectral norm above, and its bound delta / 2
    deviation   the least |D - c I| / |D| over all c in the Frobenius norm: an outlier counts as one coordinate
    cosine      mean over tokens of the cosine between p and D p less their means, which is all that LN_u leaves of
                them; p is g for the oracle, for the stream what the rule divides (g; Adam: m')

`measure` looks at a run on fixed windows of its validation split; `balance(model, batches)` does without a run.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Group, RenderableType
from rich.text import Text
from torch import Tensor

from stepformer.base.progress import counting
from stepformer.measure.diagnostics.common import digits, kept, measured_on, windows_of
from stepformer.measure.diagnostics.depth import DepthSettings
from stepformer.model import Model
from stepformer.model.block import Block
from stepformer.oracles import Call
from stepformer.present.style import COLOURS, clean, new_figure, save_figure, titled
from stepformer.present.tables import of_texts
from stepformer.rules import State, Substep
from stepformer.rules.adaptive import EPS, RMSProp
from stepformer.training.loading import LoadedRun

TITLES = {
    "oracle": "oracle: D from the mean square of the answers over all tokens",
    "stream": "stream: D of each token, means over tokens",
}
COLUMNS = {name: name for name in ("ratio", "distance", "bound", "deviation", "cosine")}
COLUMNS |= {"ratio": "max s / min s", "bound": "delta / 2"}
Place = tuple[int, str, str]
"""Layer, oracle or stream, and whose turn it was."""


class BalanceSettings(DepthSettings):
    """What `stepformer diagnose RUN --balance` can be asked."""

    section: ClassVar[str] = "balance"


SETTINGS = BalanceSettings


def measure(run: LoadedRun, settings: BalanceSettings, *, quiet: bool = False) -> dict[str, Any]:
    """Balance by layer and turn on fixed windows."""
    windows, about = windows_of(run, settings)
    batches = windows[:, :-1].split(settings.window_batch)
    with counting("balance", 2 * len(batches), quiet=quiet) as step:
        result = balance(run.model, batches, step)
    result |= {"windows_hash": about["windows_hash"], "settings": settings.to_dict()}
    return kept(run, settings, result)


@torch.no_grad()
def balance(
    model: Model, batches: Sequence[Tensor], step: Callable[[int], None] = lambda amount: None
) -> dict[str, Any]:
    """The same for batches of tokens (B, T): once through the model for the moments, once more for what they do."""
    squares: dict[Place, Tensor] = {}
    counts: defaultdict[Place, int] = defaultdict(int)
    sums: defaultdict[Place, dict[str, float]] = defaultdict(lambda: dict.fromkeys(COLUMNS, 0.0))

    def add_squares(place: Place, p: Tensor, s: Tensor | None) -> None:
        squares[place] = squares.get(place, 0) + p.square().flatten(0, -2).sum(dim=0)
        counts[place] += p[..., 0].numel()

    def add_statistics(place: Place, p: Tensor, s: Tensor | None) -> None:
        for name, value in statistics_of(squares[place] / counts[place] if s is None else s, p).items():
            sums[place][name] += value.expand(p.shape[:-1]).sum().item() / counts[place]

    for note in (add_squares, add_statistics):
        for tokens in batches:
            _listen(model, tokens.to(model.device), note)
            step(1)
    layers: list[dict[str, Any]] = [{"layer": i, "oracle": {}, "stream": {}} for i in range(model.config.n_layer)]
    for (layer, kind, turn), means in sums.items():
        layers[layer][kind][turn] = means
    summary = {}
    for kind in TITLES:
        rows = [row for layer in layers for row in layer[kind].values()]
        summary[kind] = {name: statistics.fmean(row[name] for row in rows) for name in COLUMNS} if rows else None
    return {"layers": layers, "summary": summary, "tokens": sum(tokens.numel() for tokens in batches)}


def statistics_of(s: Tensor, p: Tensor) -> dict[str, Tensor]:
    """The numbers above for moments s, (d,) or (..., d), and what they divide, p (..., d)."""
    root = s.sqrt() + EPS
    d, apart = 1 / root, root.amax(dim=-1) / root.amin(dim=-1)
    scalar = d.mean(dim=-1).square() / d.square().mean(dim=-1)
    before, after = (t - t.mean(dim=-1, keepdim=True) for t in (p, d * p))
    return {
        "ratio": apart.square(),
        "distance": apart - 1,
        "bound": (apart.square() - 1) / 2,
        "deviation": (1 - scalar).clamp_min(0).sqrt(),
        "cosine": F.cosine_similarity(before, after, dim=-1),
    }


Note = Callable[[Place, Tensor, Tensor | None], None]
"""What is told the answers p of an oracle, or what a rule divides, p, and by the root of which moments."""


class _Listening(Substep):
    """A turn that tells its answers, and under rules that divide by second moments these."""

    def __init__(self, turn: Substep, layer: int, name: str, note: Note) -> None:
        vars(self).update(vars(turn))
        self.layer, self.name, self.note = layer, name, note

    def kick(self, s: State, g: Tensor, scale: float = 1.0) -> State:
        after = super().kick(s, g, scale)
        self.note((self.layer, "oracle", self.name), g.double(), None)
        if isinstance(self.template, RMSProp):
            second = after.s.double()
            self.note((self.layer, "stream", self.name), after.u.double() * (second.sqrt() + EPS), second)
        return after


def _listen(model: Model, tokens: Tensor, note: Note) -> None:
    """Send tokens through the model and tell `note` what happens in every turn."""

    def turns(block: Block, layer: int, call: Call) -> dict[str, Substep]:
        return {name: _Listening(turn, layer, name, note) for name, turn in Block.turns(block, call).items()}

    with contextlib.ExitStack() as stack:
        for layer, block in enumerate(model.blocks):
            stack.enter_context(mock.patch.object(block, "turns", partial(turns, block, layer)))
        for _ in model.passages(tokens):
            pass


def text(result: dict[str, Any]) -> RenderableType:
    """A table for the oracles, one for the streams if there are any, and what it was measured on."""
    parts: list[RenderableType] = []
    for kind, title in TITLES.items():
        rows = [
            [str(layer["layer"]), turn, *(digits(found[name]) for name in COLUMNS)]
            for layer in result["layers"]
            for turn, found in layer[kind].items()
        ]
        if rows:
            mean = ["mean", "", *(digits(result["summary"][kind][name]) for name in COLUMNS)]
            table = of_texts(["layer", "turn", *COLUMNS.values()], [*rows, mean], words=("turn",))
            parts += [Text(title, style="bold"), table, ""]
    parts.append(
        f"{measured_on(result)}; D = diag(1 / (sqrt(s) + eps)), distance |D / c - I|, cosine of the update with and "
        "without D, less their means (docs/inside-the-network.md)"
    )
    return Group(*parts)


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Write a PNG: distance, deviation and cosine by layer and turn."""
    figure = new_figure((11, 3.4))
    for axes, name in zip(figure.subplots(1, 3), ("distance", "deviation", "cosine"), strict=True):
        lines = dict.fromkeys((kind, turn) for row in result["layers"] for kind in TITLES for turn in row[kind])
        for place, (kind, turn) in enumerate(lines):
            known = [(row["layer"], row[kind][turn][name]) for row in result["layers"] if turn in row[kind]]
            axes.plot(*zip(*known, strict=True), "o-", color=COLOURS[place], markersize=3.5, label=f"{kind}, {turn}")
        titled(axes, name, "layer")
        clean(axes)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_yscale("log" if name == "distance" else "linear")
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path, f"distance of the diagonal preconditioner from a scalar; {measured_on(result)}")
