"""What Momentum Streams shows across runs: Jacobians against the loss, momentum by preconditioner, hybrid inference."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Sequence

from stepformer.base.errors import StepformerError
from stepformer.catalogue import closest_preset, preset
from stepformer.catalogue.recipes import load_recipe
from stepformer.pages.reports.agreement import facts_of
from stepformer.pages.reports.charts import Chart, Charts, Line
from stepformer.pages.reports.collect import RunData
from stepformer.pages.reports.parts import SUMMARY, generic_table, loss_at
from stepformer.pages.reports.published import losses_of, tokens_alike
from stepformer.pages.reports.values import grouped, real, records
from stepformer.present.tables import MINUS, NOTHING, Cell, Column, Table, listed, number, text
from stepformer.study.statistics import rank_correlation, summarise

DRAWN = ("persistence", "mean_stable_rank", "mean_spread", "sum_log_rms_gain")  # the first three are Figure 2
FEWEST = 3  # runs: of two every rank correlation is 1 or -1

PRECONDITIONERS = ("no preconditioner", "per coordinate", "spectral", "full matrix")
GRID = {  # momentum: a preset for each preconditioner
    "none": ("vanilla", "rmsprop", "ortho", "shampoo"),
    "heavy ball": ("hb", "adam", "muon", "soap"),
    "Nesterov": ("yurii", "", "", ""),
    "triple momentum": ("tmm", "", "", ""),
}
CELLS = {preset(name).name: name for row in GRID.values() for name in row if name}


def _alike(runs: Sequence[RunData], by: Callable[[RunData], Hashable]) -> tuple[list[RunData], list[str]]:
    """The most finished runs that agree in something, and a sentence about the others."""
    groups = sorted(grouped((by(run), run) for run in runs if run.record).values(), key=len, reverse=True)
    others = [run.name for group in groups[1:] for run in group]
    said = [f"Left out, as measured or trained on something else: {listed(others)}."] if others else []
    return groups[0] if groups else [], said


def propagation(runs: Sequence[RunData]) -> tuple[Table, Charts]:
    """Statistics of the blocks' Jacobians against the validation loss of the same weights: Figure 2 of the paper."""

    def measured_as(run: RunData) -> str:
        assert run.record is not None
        return json.dumps([facts_of(run, "jacobian"), run.record.val_tokens, run.record.val_hash], default=str)

    mine, notes = _alike([run for run in runs if run.result("jacobian")], measured_as)
    rows, charts = [], []
    for title, key, _ in SUMMARY:
        found = [(run, real(run.result("jacobian"), "summary", "block", key), loss_at(run, "jacobian")) for run in mine]
        points = [(run.label, run.seed, x, y) for run, x, y in found if x is not None and y is not None]
        if len(points) < FEWEST:
            continue
        means = grouped((label, (value, y)) for label, _, value, y in points)
        averaged = [[math.fsum(column) / len(pairs) for column in zip(*pairs, strict=True)] for pairs in means.values()]
        cells = [text(title)]
        for pairs in ([point[2:] for point in points], averaged):
            rho, p = rank_correlation(pairs) if len(pairs) >= FEWEST else (None, None)
            cells += [number(rho, "+.2f"), number(p, ".2g"), number(len(pairs), "d")]
        rows.append(cells)
        if key in DRAWN:
            lines = [Line(label, seed, [value], [y]) for label, seed, value, y in points]
            charts.append(Chart(f"Loss against {title}", title, "nats per token", lines, whole_x=False, points=True))
    chance = Column("p", True, "chance of one as far from zero if the order were random")
    once = "means over seeds first, so that seeds do not count as architectures"
    columns = [
        Column("of each block, over layers"),
        Column("rank correlation", True, "Spearman's, of runs with the loss"),
    ]
    columns += [chance, Column("runs", True), Column("of architectures", True, once), chance]
    columns += [Column("architectures", True)]
    notes = ["Above zero: runs with more of it have a higher loss. Few runs are soon in order by chance.", *notes]
    table = Table(columns, rows, "Jacobians against the loss", notes)
    if len({run.label for run in mine}) == len(mine):  # one seed of each: the same numbers twice
        table = table.without((4, 5, 6))
    return table, Charts(charts)


def factorial(runs: Sequence[RunData]) -> Table | None:
    """Best losses in the paper's grid of momentum by preconditioner, with published ones where a recipe has them."""

    def trained_as(run: RunData) -> Hashable:
        assert run.record is not None
        return run.record.tokens, run.record.val_tokens, run.record.val_hash

    mine, notes = _alike([run for run in runs if _cell(run)], trained_as)
    published, found = _beside_published(mine)
    losses = grouped(((_cell(run), run.label), loss) for run, loss in found)
    means = grouped((name, (label, summarise(found).mean)) for (name, label), found in losses.items())
    filled = [(row, place) for row, names in GRID.items() for place, name in enumerate(names) if name in means]
    if min(len({row for row, _ in filled}), len({place for _, place in filled})) < 2:
        return None

    def shown(name: str) -> Cell:
        words = ", ".join(f"{label} {mean:.4f}" for label, mean in means.get(name, ()))
        known = f" (published {published[name]:.4f})" if words and name in published else ""
        return Cell(words + known or NOTHING, min((mean for _, mean in means.get(name, ())), default=None))

    def effect(without: str, name: str) -> Cell:
        both = [means[n][0][1] for n in (without, name) if len(means.get(n, ())) == 1]
        return number(both[1] - both[0], "+.4f") if len(both) == 2 else Cell(NOTHING)

    rows = [[text(momentum), *map(shown, names)] for momentum, names in GRID.items()]
    rows.append([text(f"heavy ball {MINUS} none"), *map(effect, GRID["none"], GRID["heavy ball"])])
    columns = [Column("momentum"), *(Column(name, True) for name in PRECONDITIONERS)]
    about = "Lowest validation loss in nats per token, mean over seeds; the last row is the effect of momentum."
    about += " Published ones are of as many tokens." if published else ""
    return Table(columns, rows, "Momentum by preconditioner", [about, *notes])


def _cell(run: RunData) -> str:
    """Which architecture of the grid a run is, whatever its size and options; nothing if it is none."""
    row = closest_preset(run.config.model)[0] if run.config else None
    return CELLS.get(row.name, "") if row else ""


def _beside_published(runs: Sequence[RunData]) -> tuple[dict[str, float], list[tuple[RunData, float]]]:
    """Published losses by cell and ours of as many tokens, if one recipe made all runs and says both; else ours."""
    names = {run.config.recipe for run in runs if run.config}
    try:
        recipe = load_recipe(names.pop()) if len(names) == 1 and "" not in names else None
    except StepformerError:  # of another version
        recipe = None
    if recipe is not None:
        on = recipe.about.get("published_tokens")
        same = [key for key in recipe.runs if recipe.published_tokens(key) == on and "published" in recipe.runs[key]]
        theirs = {CELLS.get(preset(key).name, ""): recipe.runs[key]["published"] for key in same}
        ours = [(run, losses_of(run.record).get(tokens_alike(on, run) or 0)) for run in runs if run.record]
        found = [(run, losses[0]) for run, losses in ours if losses is not None and losses[0] is not None]
        if len(found) == len(runs):
            return theirs, found
    return {}, [(run, run.record.best_val_loss) for run in runs if run.record]


def hybrid_table(runs: Sequence[RunData]) -> Table:
    """What was measured with momentum in some layers only."""
    first = ("momentum in", "loss", "difference")
    rows = [(run.name, row) for run in runs for row in records(run.result("hybrid"), "rows")]
    keys = sorted({key for _, row in rows for key in row} - {*first})
    shown = [{"run": name, **{key: row[key] for key in (*first, *keys) if key in row}} for name, row in rows]
    return generic_table({"rows": shown}, "Hybrid inference: momentum in some layers only")
