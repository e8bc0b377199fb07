"""What is told while a run trains: metrics.jsonl, a display for persons, and curves for those who ask.

metrics.jsonl has one JSON object a line, appended as the run goes on. Every line ends with a check of itself and of all
lines before it, so that a changed, lost or doubled line is noticed. A line `saved` follows each checkpoint once it is
on disk: the file never knows less than the checkpoints do.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from stepformer.base import files
from stepformer.base.errors import InputError, StepformerError, StepformerWarning
from stepformer.base.units import duration
from stepformer.training.config import RunConfig

BY_LAYER = ("coefficients", "gains", "norms", "changes")  # lists over layers; the last in lines of training
_LEFT_OUT = {"kind", "step", "val_hash", "also", "first", *BY_LAYER}
KINDS = ("train", "eval", "saved")
WIDE = 100  # columns of a terminal that show everything beside a bar
LONGEST = 1 << 24  # bytes of a line: coefficients of every layer are in some


@dataclass(frozen=True)
class Line:
    """A line as it stands there, its entry if it has one, and what is wrong with it."""

    body: bytes  # without its check
    checked: bool
    entry: dict[str, Any] | None
    fault: str
    check: int  # of all lines so far


def _lines(path: Path) -> Iterator[Line]:
    """Every line of a metrics file in turn; a last one cut by a kill is left out."""
    check, started = 0, False
    try:
        with files.opened(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST), b""), 1):
                if not line.endswith(b"\n"):
                    if len(line) == LONGEST:
                        yield Line(line, False, None, f"line {number} has no end", check)
                    continue
                body, told = files.parted(line[:-1])
                entry, fault = _entry(body), ""
                check = files.chained(body, check)
                if entry is None:
                    fault = f"line {number} is damaged"
                elif told is None and started:
                    fault = f"line {number} has no check"
                elif told is not None and told != check:
                    fault, check = f"line {number} was changed, or does not follow the line before it", told
                started = started or told is not None
                yield Line(body, told is not None, entry, fault, check)
    except FileNotFoundError:
        raise InputError(f"There is no metrics file '{path}'.") from None
    except OSError as error:
        raise InputError(f"The metrics file '{path}' cannot be read: {error.strerror}.") from None


def _entry(body: bytes) -> dict[str, Any] | None:
    try:
        entry = files.loads(body.decode(), "")
    except (InputError, UnicodeDecodeError):
        return None
    if not isinstance(entry, dict) or entry.get("kind") not in KINDS:
        return None
    step = entry.get("step")
    return entry if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 1 << 53 else None


@dataclass
class Lines:
    """What a metrics file holds: its entries, and sentences about what is wrong."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    check: int = 0  # of the last line
    unchecked: bool = False  # as in version 0.5.0


def read_lines(path: Path) -> Lines:
    found = Lines()
    for line in _lines(path):
        found.entries += [line.entry] if line.entry is not None else []
        found.faults += [line.fault] if line.fault else []
        found.unchecked = found.unchecked or not line.checked
        found.check = line.check
    return found


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a metrics file, once it is known to be whole; a last line cut by a kill is left out."""
    lines = read_lines(path)
    if lines.faults:
        raise InputError(f"The metrics file '{path}' is damaged: {lines.faults[0]}.")
    warn_unchecked(lines)
    return iter(lines.entries)


def warn_unchecked(lines: Lines) -> None:
    if lines.unchecked:
        warnings.warn(
            "Lines of a metrics file have no checks, as in version 0.5.0: a change to them would not be noticed.",
            StepformerWarning,
            stacklevel=1,
        )


def last_saved(path: Path) -> int | None:
    """The newest step that a checkpoint was written of."""
    entries = (line.entry for line in _lines(path)) if path.is_file() else ()
    return max((entry["step"] for entry in entries if entry is not None and entry["kind"] == "saved"), default=None)


def copy_until(path: Path, target: Path, step: int, logged: int = 0) -> tuple[int, int]:
    """Write the lines up to a step; returns their check and how many of them log a loss, at least `logged`. What is
    damaged after the last of them does not matter.

    They are chained anew: a checkpoint that was written in the background has its line after later steps.
    """
    kept, fault, found = list[Line](), "", ""
    for line in _lines(path):
        fault = fault or line.fault
        if line.entry is not None and line.entry["step"] <= step:
            kept.append(line)
            found = fault
    if found:
        raise InputError(f"The metrics file '{path}' is damaged: {found}.")
    losses = sum(line.entry is not None and line.entry["kind"] != "saved" for line in kept)
    if losses < logged:
        raise InputError(
            f"The metrics file '{path}' is damaged: up to step {step} it had {logged:,} lines with losses, and "
            f"{losses:,} are left. Put it back."
        )
    check = 0
    with files.writing(target) as file:
        for line in kept:
            check = files.chained(line.body, check)
            file.write(files.checked_line(line.body, check) if line.checked else line.body + b"\n")
    return check, losses


class Metrics:
    """The file of a run that trains, opened for more; lines beyond a resumed step are dropped."""

    def __init__(self, path: Path, step: int, logged: int = 0) -> None:
        self.path = path
        self.check, self.logged = copy_until(path, path, step, logged) if path.exists() or logged else (0, 0)
        self._lock = threading.Lock()  # a checkpoint is written by another thread
        with files.explained(path):
            self._file = path.open("ab")

    def write(self, **values: Any) -> None:
        body = json.dumps(values).encode()
        with files.explained(self.path), self._lock:
            self.check = files.chained(body, self.check)
            self._file.write(files.checked_line(body, self.check))
            self._file.flush()
            self.logged += values["kind"] != "saved"

    def sync(self) -> None:
        """Hand all lines to the disk."""
        with files.explained(self.path), self._lock:
            os.fsync(self._file.fileno())

    def saved(self, name: str) -> None:
        """Note a checkpoint that is on disk, if a run can continue from it."""
        kind, _, step = name.partition("-")
        if kind == "step":
            self.write(kind="saved", step=int(step))
            self.sync()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


STARTING = 3  # steps after a start that compile, load kernels and record graphs


@dataclass
class Clock:
    """Seconds spent in training steps; those of the first few after every start are also counted apart."""

    seconds: float = 0.0
    start_steps: int = 0
    start_seconds: float = 0.0
    starting: int = STARTING  # steps left of this start

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Clock:
        """As a checkpoint has it, which may be older than starts are."""
        return cls(state["seconds"], state.get("start_steps", 0), state.get("start_seconds", 0.0))

    def add(self, took: float) -> None:
        self.seconds += took
        if self.starting:
            self.starting -= 1
            self.start_steps, self.start_seconds = self.start_steps + 1, self.start_seconds + took

    def state(self) -> dict[str, float]:
        return {"seconds": self.seconds, "start_steps": self.start_steps, "start_seconds": self.start_seconds}

    def result(self) -> dict[str, float]:
        own = {name: round(value, 3) for name, value in self.state().items()}
        return {"train_seconds": own.pop("seconds"), **own}


class Display:
    """Progress of one run, a live line on a terminal, plain lines elsewhere; silent on all ranks but the main one."""

    def __init__(self, title: str, *, quiet: bool = False, lines: int = 10) -> None:
        self.title, self.quiet, self.lines = title, quiet, lines
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._steps, self._warm, self._since = 1, STARTING, 0.0
        self._last_line = time.monotonic()

    def begin(self, steps: int, done: int) -> None:
        self._steps, self._warm = steps, done + STARTING
        if self.quiet or not sys.stderr.isatty():
            return
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
        )
        self._bar.add_task(self.title, total=steps, completed=done, numbers="", left="")
        self._bar.start()

    def step(self, step: int, loss: float, norm: float, tokens_per_second: float, mfu: float) -> None:
        """A step is done. On a terminal the line is updated, elsewhere about `lines` lines are printed per run."""
        speed = f"{tokens_per_second:,.0f} tok/s"
        numbers, left = f"loss {loss:.4f}  |g| {norm:.2f}  {speed}  MFU {100 * mfu:.0f} %", self._left(step)
        if self._bar is not None:
            if self.console.width < WIDE:
                numbers = f"loss {loss:.4f}  {speed}"
            self._bar.update(self._bar.task_ids[0], completed=step, numbers=numbers, left=left)
            return
        often = step % max(1, self._steps // self.lines) == 0 or step == self._steps
        if often or time.monotonic() - self._last_line > 60:
            self._last_line = time.monotonic()
            self.note(f"{self.title}  step {step}/{self._steps}  {numbers}{'  ' * bool(left)}{left}")

    def _left(self, step: int) -> str:
        """How long the rest takes at the pace since the run has warmed up, evaluations included; nothing before."""
        if step <= self._warm:
            self._since = time.monotonic()
        measured = step - self._warm
        if measured < STARTING or step == self._steps:
            return ""
        return f"{duration((time.monotonic() - self._since) / measured * (self._steps - step))} left"

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
    """Forwards metric lines to TensorBoard and Weights & Biases, as the config asks."""

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
        for tokens, loss in line.get("first", {}).items():
            numbers[f"{line['kind']}/first {tokens} tokens/val_loss"] = loss
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
