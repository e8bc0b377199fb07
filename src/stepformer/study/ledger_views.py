"""The ledger of claims as tables and as a picture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepformer.present import style
from stepformer.present.tables import Column, Table, columns, text
from stepformer.study.ledger import CONFIRMED, OPEN, REFUTED, VERDICTS, Claim, Evidence, Part

HUES = {CONFIRMED: "green", REFUTED: "red"}  # in a terminal
COLOURS = {CONFIRMED: style.COLOURS[3], REFUTED: style.COLOURS[2], OPEN: style.GREY}
NOTES = (
    "A verdict holds at the scale beside it, the largest that was tried, and not at the document's; of a claim "
    "with several parts that are all confirmed it is the scale of the part with the smallest. "
    "`stepformer claims N` shows everything of one claim.",
    "Every interval has 95 % on its own; over all of them some miss.",
)


def counted(claims: Sequence[Claim]) -> str:
    """How many claims have which verdict."""
    found = Counter(claim.verdict for claim in claims)
    return ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS)


def ledger_table(claims: Sequence[Claim]) -> Table:
    """A line for each claim, with the test that decides it."""
    rows = []
    for claim in claims:
        part = claim.deciding
        best = part.decisive[0] if part and part.evidence else None
        held = sum(part.verdict == CONFIRMED for part in claim.counted)
        parts = f" ({held} of {len(claim.counted)} parts confirmed)" if len(claim.counted) > 1 else ""
        cells = (claim.claim, f"{claim.verdict}{parts}", f"{part.test}: {best}" if part and best else "")
        scale = f"{best.source.short}; {best.pairs}" if best else ""
        rows.append([text(claim.number, style=HUES.get(claim.verdict, "")), *map(text, (*cells, scale))])
    titles = columns(Column("", numeric=True), "claim", "verdict", "what decides", "scale")
    return Table(titles, rows, "Claims of the documents", [f"{counted(claims)}.", *NOTES])


def parts_table(claim: Claim) -> Table:
    """A line for each test of a claim at each scale, the one that decides first."""
    rows = []
    for part in claim.parts:
        for found in part.evidence:
            hue = HUES.get(found.verdict, "") if found in part.decisive else "dim"
            cells = (part, found, found.source.scale, found.pairs, found.verdict, found.source.name)
            rows.append([text(cell, style=hue) for cell in cells])
        if not part.evidence:
            rows.append([text(part), *(text("") for _ in range(3)), text(OPEN), text("")])
    return Table(columns("test", "measured", "scale", "n", "verdict", "source"), rows)


def as_data(claim: Claim) -> dict[str, Any]:
    """Everything of a claim as JSON values."""
    return {
        **{name: getattr(claim, name) for name in ("number", "document", "section", "claim", "published", "verdict")},
        **{name: getattr(claim, name) for name in ("out_of_reach", "remark") if getattr(claim, name)},
        "commands": list(claim.commands),
        "parts": [
            {
                **{name: getattr(part, name) for name in ("test", "quantity", "what", "counts", "verdict")},
                "evidence": [_evidence(part, found) for found in part.evidence],
            }
            for part in claim.parts
        ],
    }


def _evidence(part: Part, found: Evidence) -> dict[str, Any]:
    source = found.source
    return {
        **{name: getattr(found.measured, name) for name in ("n", "mean", "low", "high")},
        "verdict": found.verdict,
        "decides": found in part.decisive,
        "source": source.name,
        "scale": source.scale,
        "parameters": source.parameters,
        "tokens": source.tokens,
        "raw": list(source.raw),
        "commands": list(source.commands),
    }


def plot_ledger(claims: Sequence[Claim], path: str | Path) -> None:
    """Write a PNG of every interval: differences in nats on the left, ratios on the right."""
    sides: dict[str, list[tuple[str, Evidence]]] = {"difference": [], "ratio": []}
    for claim in claims:
        for part in claim.parts:
            for found in part.evidence:
                if not found.source.exact:
                    words = f"{claim.number}  {part.test.partition(' in ')[0]}"
                    quantity = "" if part.quantity in ("loss", "value", "forgetting") else f", {part.quantity}"
                    side = "difference" if found.test.kind == "difference" else "ratio"
                    sides[side].append((f"{words}{quantity}  ({found.source.name})", found))
    figure = style.new_figure((15, 1.6 + 0.19 * max(map(len, sides.values()))))
    axes = dict(zip(sides, figure.subplots(1, 2), strict=True))
    for side, rows in sides.items():
        _draw(axes[side], rows)
    axes["difference"].set_xscale("symlog", linthresh=0.01)
    style.titled(axes["difference"], "Differences of loss and forgetting", "nats per token, linear within 0.01 of zero")
    axes["ratio"].set_xscale("log")
    style.titled(axes["ratio"], "Ratios", "ratio")
    below = "confirmed (green), refuted (orange), open (grey); shaded: where the claim has it; hollow: one measurement"
    style.save_figure(figure, path, f"95 % intervals, paired; {below}. {counted(claims)}.")


def _draw(axes: Any, rows: Sequence[tuple[str, Evidence]]) -> None:
    ends = [value for _, found in rows for value in (found.measured.low, found.measured.high, found.measured.mean)]
    least, most = (choose(value for value in ends if value is not None) for choose in (min, max))
    ratio = rows[0][1].test.kind != "difference"
    left, right = (0.7 * least, 1.4 * most) if ratio else (1.4 * min(least, -0.01), 1.4 * most)
    for place, (_, found) in enumerate(rows):
        bounds = [
            min(max(end, left), right) if math.isfinite(end) else left if end < 0 else right
            for end in (found.test.low, found.test.high)
        ]
        axes.fill_betweenx([place - 0.4, place + 0.4], *bounds, color="#EEF3EE", linewidth=0, zorder=0)
        colour, measured = COLOURS[found.verdict], found.measured
        if measured.low is not None:
            axes.plot([measured.low, measured.high], [place, place], color=colour, linewidth=2, solid_capstyle="butt")
        face = "white" if measured.low is None else colour
        axes.plot(measured.mean, place, "o", markersize=4.5, color=colour, markerfacecolor=face)
    axes.axvline(1 if ratio else 0, color=style.COLOURS[0], linewidth=1, zorder=1)
    style.name_rows(axes, [name for name, _ in rows])
    axes.tick_params(axis="y", labelsize=7.5)
    axes.set_xlim(left, right)
    style.clean(axes, lines="x")
