"""Makes docs/figures/layer.svg: a layer of a plain GPT and one with momentum, each as a step of an optimizer.

    python docs/layer_figure.py

The paths on the right are computed: six steps of either method on one quadratic valley, with the coefficients that
contract it fastest in the worst case (`stepformer flow filter` has the same for a condition number of 100).
"""

from __future__ import annotations

from pathlib import Path

import vector

from stepformer.base.files import write_text

OUT = Path(__file__).resolve().parent / "figures" / "layer.svg"
Point = tuple[float, float]
LOW, HIGH = CURVATURES = (1.0, 12.0)  # of the valley, along and across
RATIO = (3 * HIGH / LOW + 1) ** 0.5
BETA = (RATIO - 2) / (RATIO + 2)
START, STEPS = (-10.0, 1.6), 6


def walk(gamma: float, beta: float) -> list[Point]:
    """v' = beta v - gamma g(x + beta v); x' = x + v'. Gradient descent has beta = 0."""
    coordinates = []
    for start, curvature in zip(START, CURVATURES, strict=True):
        places, v = [start], 0.0
        for _ in range(STEPS):
            v = beta * v - gamma * curvature * (places[-1] + beta * v)
            places.append(places[-1] + v)
        coordinates.append(places)
    return list(zip(*coordinates, strict=True))


def valley(points: list[Point], top: float, colour: str) -> list[str]:
    """Level lines, and a dot for each layer."""
    centre = (838.0, top + 78.0)

    def place(point: Point) -> Point:
        return centre[0] + 15 * point[0], centre[1] + 26 * point[1]

    shapes = [
        vector.shape(
            *("ellipse",),
            **{"cx": centre[0], "cy": centre[1], "rx": float(r), "ry": r * 26 / 15 / 12**0.5, "fill": "none"},
            style="stroke: var(--line)",
        )
        for r in (25, 60, 95, 130, 165)
    ]
    shapes.append(vector.path([place(p) for p in points], colour=colour, width=2))
    for p in points:
        x, y = place(p)
        shapes.append(vector.shape("circle", cx=x, cy=y, r=4, style=f"fill: var(--{colour})"))
    return shapes


def box(x: float, y: float, words: str) -> list[str]:
    look = "fill: var(--wash); stroke: var(--ink)"
    return [
        vector.shape("rect", x=x, y=y, width=110, height=36, rx=6, style=look, stroke_width=1.5),
        vector.text(x + 55, y + 23, words, size=15, text_anchor="middle"),
    ]


def plus(x: float, y: float, colour: str) -> list[str]:
    look = f"fill: var(--paper); stroke: var(--{colour})"
    circle = vector.shape("circle", cx=x, cy=y, r=9, style=look, stroke_width=2)
    return [circle, vector.text(x, y + 5, "+", size=16, colour=colour, text_anchor="middle")]


def number(x: float, y: float, words: str) -> list[str]:
    circle = vector.shape("circle", cx=x, cy=y, r=10, style="fill: var(--two)")
    return [circle, vector.text(x, y + 5, words, size=13, colour="paper", text_anchor="middle", font_weight="bold")]


def plain(top: float) -> list[str]:
    stream = top + 120
    shapes = [vector.path([(56, stream), (618, stream)], colour="one", width=3, arrow=True)]
    shapes.append(vector.text(24, stream + 6, "x", size=20, colour="one", font_style="italic"))
    for left, name in ((90, "attention"), (350, "MLP")):
        shapes.append(
            vector.path([(left, stream), (left, top + 56), (left + 40, top + 56)], colour="faint", arrow=True)
        )
        shapes += box(left + 42, top + 38, name)
        down = [(left + 152, top + 56), (left + 192, top + 56), (left + 192, stream - 10)]
        shapes.append(vector.path(down, colour="faint", arrow=True))
        shapes += plus(left + 192, stream, "one")
        shapes.append(vector.text(left + 97, stream + 28, f"x ← x + {name}(x)", size=15, text_anchor="middle"))
    return shapes


def momentum(top: float) -> list[str]:
    answer, velocity, stream = top + 56, top + 116, top + 176
    shapes = [
        vector.path([(56, velocity), (618, velocity)], colour="two", width=3, arrow=True),
        vector.path([(56, stream), (618, stream)], colour="one", width=3, arrow=True),
        vector.text(24, velocity + 6, "v", size=20, colour="two", font_style="italic"),
        vector.text(24, stream + 6, "x", size=20, colour="one", font_style="italic"),
    ]
    for left, name in ((90, "attention"), (350, "MLP")):
        shapes.append(vector.path([(left, stream), (left, answer), (left + 40, answer)], colour="faint", arrow=True))
        shapes += number(left, velocity, "1")
        shapes += box(left + 42, answer - 18, name)
        down = [(left + 152, answer), (left + 178, answer), (left + 178, velocity - 11)]
        shapes.append(vector.path(down, colour="faint", arrow=True))
        shapes += number(left + 178, velocity, "2")
        shapes.append(vector.path([(left + 208, velocity), (left + 208, stream - 11)], colour="two", arrow=True))
        shapes += number(left + 208, stream, "3")
    legend = (
        ("1", "look ahead: ask at x + μv"),
        ("2", "kick: v ← norm(βv + γ · answer)"),  # noqa: RUF001
        ("3", "drift: x ← x + v"),
    )
    for x, (sign, words) in zip((40, 264, 530), legend, strict=True):
        shapes += number(x, stream + 43, sign)
        shapes.append(vector.text(x + 17, stream + 48, words, size=14))
    return shapes


def figure() -> str:
    shapes = [
        vector.text(24, 38, "A layer of a plain GPT is a step of gradient descent", size=19, font_weight="bold"),
        *plain(28),
        *valley(walk(2 / (LOW + HIGH), 0.0), 30, "one"),
        vector.text(838, 208, "each dot is one step", size=13, colour="faint", text_anchor="middle"),
        vector.path([(24, 222), (1016, 222)], colour="line", width=1),
        vector.text(24, 258, "With momentum (Nesterov) it also carries a velocity v", size=19, font_weight="bold"),
        *momentum(248),
        *valley(walk(4 / (3 * HIGH + LOW), BETA), 258, "two"),
        vector.text(838, 436, "the same valley, as many steps", size=13, colour="faint", text_anchor="middle"),
    ]
    title = (
        "A plain GPT layer adds attention and MLP to x, as gradient descent does; a Nesterov layer carries a velocity."
    )
    return vector.picture(1040, 496, title, shapes)


if __name__ == "__main__":
    write_text(OUT, figure())
    print(f"written: {OUT}")
