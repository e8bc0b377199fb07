"""One look for all pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepformer.base.errors import StepformerError
from stepformer.base.files import writing

# Okabe and Ito's palette, black for the baseline; told apart with every common kind of colour blindness.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)))  # the second sign, once the colours are used up
GREY = "#666666"


def new_figure(size: tuple[float, float]) -> Any:
    """An empty matplotlib figure, inches wide and high."""
    try:
        from matplotlib.figure import Figure  # not pyplot: it would choose a backend for the whole process
    except ImportError:
        raise StepformerError("The plot needs matplotlib: pip install 'stepformer[plot]'.") from None
    return Figure(figsize=size, layout="constrained", facecolor="white")


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a PNG, whole or not at all."""
    with writing(Path(path)) as file:
        figure.savefig(file, format="png", dpi=150)


def looks(index: int) -> dict[str, Any]:
    """Colour and dashes of the architecture at this place; 0 is the baseline."""
    if index == 0:
        return {"color": COLOURS[0], "linestyle": DASHES[0]}
    cycle, position = divmod(index - 1, len(COLOURS) - 1)
    return {"color": COLOURS[1 + position], "linestyle": DASHES[cycle % len(DASHES)]}


def look_of(index: int) -> tuple[int, int]:
    """Which colour and which of three dashes an architecture has in a report, where a line that lies on top of another
    leaves gaps to see it through; of the baseline, 0, the colour alone counts.
    """
    cycle, place = divmod(max(index, 1) - 1, len(COLOURS) - 1)
    return (1 + place if index else 0), (place + cycle) % 3


def short_number(value: float) -> str:
    """1500 as 1.5k, 2e6 as 2M."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:g}"
