"""The same search for every row before it is compared: a baseline that nobody tuned is easily beaten.

Every row is trained at every point of one grid for a tuning budget, with seed 1000, and judged on the first
half of the validation split. Then it is trained anew at its best point, and the table shows losses on the second half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepformer.base.errors import InputError, suggestion
from stepformer.base.words import parse_override
from stepformer.study.comparison import all_points, at_the_edge
from stepformer.study.records import RunRecord
from stepformer.study.study import Planned, plan_runs
from stepformer.training import RunConfig

FIRST_SEED = 1000


@dataclass(frozen=True)
class Grid:
    """What is searched, `lr,lr_norm=0.01,0.02`: each key takes each value; `2x` is twice what the row has."""

    axes: Mapping[str, tuple[str, ...]]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Grid:
        axes: dict[str, tuple[str, ...]] = {}
        for text in texts:
            keys, _, values = text.partition("=")
            found = tuple(value for value in values.split(",") if value)
            if not keys or len(found) < 2:
                raise InputError(f"--tune {text}: write KEY=a,b,c or KEY,KEY=a,b,c with two values or more.")
            axes |= dict.fromkeys((key for key in keys.split(",") if key), found)
        return cls(axes)

    def points(self) -> list[dict[str, str]]:
        return all_points(self.axes)


def applied(config: RunConfig, point: Mapping[str, str]) -> RunConfig:
    """A row at a point of the grid."""
    settings = config.to_dict()
    for word, text in point.items():
        key = word.rpartition(".")[2]
        optim = settings["optim"]
        if key not in optim:
            raise InputError(f"--tune {word}: only keys of [optim] can be tuned.{suggestion(key, optim)}")
        value: Any = parse_override(f"{key}={text}")[1]
        if text.endswith("x"):
            try:
                value = optim[key] * float(text[:-1])
            except (TypeError, ValueError):
                raise InputError(f"--tune {word}: '{text}' is no multiple of {optim[key]!r}.") from None
        optim[key] = value
    return RunConfig.from_dict(settings)


def planned(
    folder: Path,
    variants: Mapping[str, RunConfig],
    grid: Grid,
    tokens: int,
    *,
    quiet: bool = False,
    allowed: Sequence[str] = (),
) -> dict[str, list[tuple[dict[str, str], Planned]]]:
    """The search: for every row its points, each with its run."""
    listed: list[tuple[str, RunConfig]] = []
    for label, config in variants.items():
        steps = round(tokens / config.step_tokens)
        if steps < 1:
            raise InputError(f"--budget-tune {tokens:,} is less than half a step of {config.step_tokens:,} tokens.")
        for number, point in enumerate(grid.points()):
            settings = applied(config, point).to_dict()
            for key in ("warmup", "decay_start"):  # as large a part of the shorter run
                if settings["optim"][key] is not None:
                    settings["optim"][key] = round(settings["optim"][key] * steps / config.train.steps)
            settings["train"] |= {"steps": steps, "eval_half": "first", "seed": FIRST_SEED}
            listed.append((f"{label}-{number}", RunConfig.from_dict(settings)))
    runs = iter(plan_runs(folder, listed, quiet=quiet, allowed=allowed))
    return {label: [(point, next(runs)) for point in grid.points()] for label in variants}


def chosen(
    variants: Mapping[str, RunConfig], grid: Grid, search: Mapping[str, Sequence[tuple[dict[str, str], Planned]]]
) -> tuple[dict[str, RunConfig], list[str]]:
    """Every row at its best point, to be judged on the other half, and a sentence on what was chosen."""
    rows, said = {}, []
    for label, points in search.items():
        losses = [(RunRecord.load(run.folder.path).val_loss, point) for point, run in points if run.finished]
        if not losses:
            raise InputError(f"No run of the search for '{label}' finished: nothing can be chosen.")
        diverged = len(points) - len(losses)
        loss, best = min(losses, key=lambda pair: pair[0])
        settings = applied(variants[label], best).to_dict()
        settings["train"]["eval_half"] = "second"
        rows[label] = RunConfig.from_dict(settings)
        words = ", ".join(f"{key} {_shown(settings['optim'][key.rpartition('.')[2]])}" for key in best)
        edge = at_the_edge(grid.axes, best)
        said.append(
            f"{label}: tuned to {words} ({loss:.4f} on the other half, the best of {len(points)} points"
            + (f", {diverged} of which diverged)" if diverged else ")")
            + (f"; at the edge of the grid of {', '.join(edge)}: a better value may lie beyond." if edge else ".")
        )
    return rows, said


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
