"""What is told while a run trains: a live line on a terminal, plain lines elsewhere, and curves for those who ask.

TensorBoard and Weights & Biases get what metrics.jsonl, which is always written, gets as well.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stepformer.base.errors import StepformerError
from stepformer.training.config import RunConfig

BY_LAYER = ("coefficients", "gains", "norms")  # lists over layers in the lines of evaluations
_LEFT_OUT = {"kind", "step", "val_hash", "also", *BY_LAYER}


class Display:
    """Progress of one run; silent on all ranks but the main one."""

    def __init__(self, title: str, *, quiet: bool = False, lines: int = 10) -> None:
        self.title, self.quiet, self.lines = title, quiet, lines
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._steps = 1
        self._last_line = time.monotonic()

    def begin(self, steps: int, done: int) -> None:
        self._steps = steps
        if self.quiet or not sys.stderr.isatty():
            return
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._bar.add_task(self.title, total=steps, completed=done, numbers="")
        self._bar.start()

    def step(self, step: int, loss: float, norm: float, tokens_per_second: float, mfu: float) -> None:
        """A step is done. On a terminal the line is updated, elsewhere about `lines` lines are printed per run."""
        numbers = f"loss {loss:.4f}  |g| {norm:.2f}  {tokens_per_second:,.0f} tok/s  MFU {100 * mfu:.0f} %"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, numbers=numbers)
            return
        often = step % max(1, self._steps // self.lines) == 0 or step == self._steps
        if often or time.monotonic() - self._last_line > 60:
            self._last_line = time.monotonic()
            self.note(f"{self.title}  step {step}/{self._steps}  {numbers}")

    def note(self, text: str) -> None:
        """A line that stays."""
        if not self.quiet:
            self.console.print(text, markup=False)

    def waiting(self, what: str) -> None:
        """Say what takes long between steps."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], numbers=what)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Loggers:
    """Forwards metric lines to the services that the config names."""

    def __init__(self, config: RunConfig, folder: Path, identity: str) -> None:
        self._tensorboard: Any = None
        self._wandb: Any = None
        if config.train.tensorboard:
            module = _imported("torch.utils.tensorboard", "tensorboard", "TensorBoard")
            self._tensorboard = module.SummaryWriter(str(folder / "tensorboard"))
        if config.train.wandb:
            # one id per run, so that a resumed run continues its own curves and no other's
            self._wandb = _imported("wandb", "wandb", "Weights & Biases").init(
                project=config.train.wandb,
                name=folder.name,
                id=identity,
                dir=str(folder),
                resume="allow",
                config=config.to_dict(),
            )

    def write(self, line: dict[str, Any]) -> None:
        """Numbers of one metric line."""
        numbers = {f"{line['kind']}/{k}": v for k, v in line.items() if k not in _LEFT_OUT}
        for name, other in line.get("also", {}).items():
            numbers[f"{line['kind']}/{name}/val_loss"] = other["val_loss"]
        for what in BY_LAYER:
            for layer, values in enumerate(line.get(what, [])):
                numbers |= {f"{what}/{name}/layer {layer}": value for name, value in values.items()}
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, line["step"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=line["step"])

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _imported(module: str, extra: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise StepformerError(f"train.{extra} needs {name}: pip install 'stepformer[{extra}]'.") from None
