"""Small vector pictures as text: shapes, and a page that follows the reader's light or dark mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
  svg { --ink: #1f2328; --faint: #59636e; --line: #d1d9e0; --paper: #ffffff; --wash: #f0f3f6;
        --one: #0969da; --two: #bc4c00; --good: #1a7f37; --wash-good: #dafbe1; }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #e6edf3; --faint: #9198a1; --line: #3d444d; --paper: #0d1117; --wash: #1c2128;
          --one: #58a6ff; --two: #f0883e; --good: #3fb950; --wash-good: #12261e; }
  }
  text { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); }
"""


def shape(tag: str, content: str = "", /, **attributes: object) -> str:
    """One element; `stroke_width` is written `stroke-width`, and numbers with at most one decimal."""
    written = "".join(
        f' {key.strip("_").replace("_", "-")}="{f"{value:.1f}" if isinstance(value, float) else value}"'
        for key, value in attributes.items()
    )
    return f"<{tag}{written}>{content}</{tag}>" if content else f"<{tag}{written}/>"


def text(x: float, y: float, words: str, *, size: int = 14, colour: str = "ink", **attributes: object) -> str:
    style = f"fill: var(--{colour})"
    return shape("text", escape(words), x=float(x), y=float(y), font_size=size, style=style, **attributes)


def path(
    points: Sequence[tuple[float, float]],
    *,
    colour: str = "ink",
    width: float = 2,
    arrow: bool = False,
    dashes: str = "",
) -> str:
    """A line through points, with a head at its end if it is an arrow."""
    places = "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    more = ({"marker_end": f"url(#head-{colour})"} if arrow else {}) | ({"stroke_dasharray": dashes} if dashes else {})
    return shape("path", d=places, fill="none", style=f"stroke: var(--{colour})", stroke_width=float(width), **more)


def picture(width: int, height: int, title: str, shapes: Iterable[str]) -> str:
    """The whole file, on a sheet of its own colour, so that it is readable on any page."""
    heads = "".join(
        shape(
            *("marker", shape("path", d="M0,0 L8,4 L0,8 z", style=f"fill: var(--{colour})")),
            **{"id": f"head-{colour}", "refX": 7, "refY": 4, "markerWidth": 8, "markerHeight": 8, "orient": "auto"},
            markerUnits="userSpaceOnUse",
        )
        for colour in ("ink", "faint", "one", "two")
    )
    sheet = shape("rect", width=width, height=height, rx=8, style="fill: var(--paper)")
    name = escape(title, quote=True)
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{name}">'
    return "\n".join([start, shape("style", STYLE), shape("defs", heads), sheet, *shapes, "</svg>", ""])
