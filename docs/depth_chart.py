"""The picture of docs/ways-through-depth.md: what each rule gains or loses, and what it costs in time on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import vector

WIDTH, HEIGHT = 1040, 560
LEFT, RIGHT, TOP, BOTTOM = 96, 1016, 64, 490
AS_FAST = 1.05  # up to this many times vanilla's time a rule is called as fast


@dataclass(frozen=True)
class Point:
    """A rule: its time for a step over vanilla's, and the difference of its loss with the interval."""

    name: str
    time: float
    loss: float
    low: float
    high: float


Box = tuple[float, float, float, float]
HALO = {"colour": "paper", "stroke": "var(--paper)", "stroke_width": 4, "stroke_opacity": 0.7}
BASELINE = "plain GPT (vanilla)"


def ticks(low: float, high: float, step: float) -> list[float]:
    return [
        i * step for i in range(round(low / step - 0.499), round(high / step + 0.499) + 1) if low <= i * step <= high
    ]


def apart(one: Box, other: Box) -> bool:
    return one[2] < other[0] or other[2] < one[0] or one[3] < other[1] or other[3] < one[1]


def label_places(bars: Mapping[str, Box], taken: Sequence[Box]) -> dict[str, tuple[float, float, str]]:
    """Beside, above or below each point (x, its bar's top, y, its bottom): where a name meets no bar and no other name,
    and if it can be none of the lines that are taken. A name that is in the way of a later one is moved once more."""
    walls = [(x - 11, top, x + 11, bottom) for x, top, _, bottom in bars.values()]
    found: dict[str, tuple[float, float, str]] = {}
    boxes: dict[str, Box] = {}
    for name in 4 * [*bars]:
        x, top, y, bottom = bars[name]
        wide = 8.2 * len(name)
        others = walls + [box for other, box in boxes.items() if other != name]
        tried = []
        for side, base, anchor in (
            *((x + 12, y + 5, "start"), (x - 12, y + 5, "end"), (x, top - 7, "middle"), (x, bottom + 17, "middle")),
            *((x - 12, y - 13, "end"), (x - 12, y + 23, "end"), (x + 12, y - 13, "start"), (x + 12, y + 23, "start")),
            *((x + 11, top - 7, "end"), (x + 11, bottom + 17, "end"), (x - 11, top - 7, "start")),
        ):
            left = side - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
            box = (left, base - 12, left + wide, base + 4)
            met = 5 * sum(not apart(box, other) for other in others) + sum(not apart(box, other) for other in taken)
            met += 99 * (left < LEFT or left + wide > RIGHT)
            tried.append((met, len(tried), (side, base, anchor), box))
        _, _, found[name], boxes[name] = min(tried)
    return found


def chart(points: Sequence[Point], below: str) -> str:
    """Loss against time, lower left is better; `below` says what was measured."""
    slowest = max(AS_FAST, *(p.time for p in points)) + 0.04
    worst = max(0.0, *(p.high for p in points)) + 0.03
    best = min(0.0, *(p.low for p in points)) - 0.03
    fastest = min(1.0, *(p.time for p in points)) - 0.1

    def across(time: float) -> float:
        return LEFT + (time - fastest) / (slowest - fastest) * (RIGHT - LEFT)

    def down(loss: float) -> float:
        return TOP + (worst - loss) / (worst - best) * (BOTTOM - TOP)

    zero, border = down(0), across(AS_FAST)
    shapes = [
        vector.text(LEFT, 34, "Does it learn better, and what does it cost?", size=19, font_weight="bold"),
        vector.shape(
            *("rect",),
            **{"x": float(LEFT), "y": zero, "width": border - LEFT, "height": BOTTOM - zero},
            style="fill: var(--wash-good)",
        ),
    ]
    for value in ticks(fastest, slowest, 0.1):
        shapes.append(vector.path([(across(value), TOP), (across(value), BOTTOM)], colour="line", width=1))
        shapes.append(vector.text(across(value), BOTTOM + 20, f"{value:.1f} x", text_anchor="middle"))
    for value in ticks(best, worst, 0.05):
        shapes.append(vector.path([(LEFT, down(value)), (RIGHT, down(value))], colour="line", width=1))
        shapes.append(vector.text(LEFT - 8, down(value) + 5, f"{value:+.2f}" if value else "0", text_anchor="end"))
    shapes += [
        vector.path([(LEFT, zero), (RIGHT, zero)], width=1.5),
        vector.path([(border, TOP), (border, BOTTOM)], colour="faint", width=1.5, dashes="5 4"),
    ]
    named = {
        "worse, as fast": (LEFT + 8, TOP + 20, "start", "faint"),
        "worse and slower": (RIGHT - 8, TOP + 20, "end", "faint"),
        "better and as fast": (LEFT + 8, BOTTOM - 12, "start", "good"),
        "better, but slower": (RIGHT - 8, BOTTOM - 12, "end", "faint"),
    }
    for words, (x, y, anchor, colour) in named.items():
        shapes.append(vector.text(x, y, words, size=15, colour=colour, text_anchor=anchor, font_weight="bold"))
    start = across(1)
    bars = {BASELINE: (start, zero - 7, zero, zero + 7)}
    bars |= {p.name: (across(p.time), down(p.high), down(p.loss), down(p.low)) for p in points}
    taken = [(LEFT, zero - 1, RIGHT, zero + 1), (border - 1, TOP, border + 1, BOTTOM)]
    for p in points:
        x, y = across(p.time), down(p.loss)
        colour = "good" if p.high < 0 else "two" if p.low > 0 else "faint"
        for value in (p.low, p.high):
            shapes.append(vector.path([(x - 5, down(value)), (x + 5, down(value))], colour=colour))
        shapes.append(vector.path([(x, down(p.low)), (x, down(p.high))], colour=colour))
        shapes.append(vector.shape("circle", cx=x, cy=y, r=5, style=f"fill: var(--{colour})"))
    shapes.append(vector.shape("rect", x=start - 7, y=zero - 7, width=14, height=14, style="fill: var(--ink)"))
    for name, (x, y, anchor) in label_places(bars, taken).items():
        shapes += [vector.text(x, y, name, size=15, text_anchor=anchor, **halo) for halo in (HALO, {})]
    turned = f"rotate(-90 24 {(TOP + BOTTOM) / 2:.0f})"
    side = "loss minus vanilla's, nats (lower is better)"
    bottom = "GPU time of a training step, as a multiple of vanilla's (left is faster)"
    middle = (LEFT + RIGHT) / 2
    shapes += [
        vector.text(24, (TOP + BOTTOM) / 2, side, text_anchor="middle", transform=turned),
        vector.text(middle, BOTTOM + 42, bottom, text_anchor="middle"),
        vector.text(middle, BOTTOM + 62, below, size=12, colour="faint", text_anchor="middle"),
    ]
    return vector.picture(WIDTH, HEIGHT, "Loss against GPU time of the ways through depth, relative to vanilla", shapes)
