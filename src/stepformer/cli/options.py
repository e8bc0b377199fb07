"""How commands are declared: their words and options, those that many share, and what is checked and told alike."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from rich.table import Table

from stepformer.base.errors import InputError, StepformerError
from stepformer.base.settings import type_hints
from stepformer.cli.main import first_rank, texts
from stepformer.model.config import ModelConfig
from stepformer.training import Stopped

Addition = Callable[[Any], object]
"""What adds something to a parser or to a group of its options."""


def command(
    run: Callable[[argparse.Namespace], int], *options: Addition, **insertions: Callable[[], str]
) -> Callable[[Any, argparse.ArgumentParser], None]:
    """What adds the command that `run_NAME` carries out. Its words are in commands.toml, where `{key}` stands for what
    an insertion makes; with an epilog they are shown as they are written.
    """

    def carried_out(args: argparse.Namespace) -> int:
        check(args, "jobs")
        try:
            return run(args)
        except Stopped as stopped:  # of a study, which notes what there is
            if first_rank():
                said = "; ".join([str(stopped), *stopped.__notes__])
                print(f"stepformer: {said}. The same command continues.", file=sys.stderr)
            return stopped.status

    def add(commands: Any, common: argparse.ArgumentParser) -> None:
        name = run.__name__.removeprefix("run_")
        words = dict(texts()[name])
        for key, made in insertions.items():
            words = {part: text.replace(f"{{{key}}}", made()) for part, text in words.items()}
        look = argparse.RawDescriptionHelpFormatter if "epilog" in words else argparse.HelpFormatter
        sub: argparse.ArgumentParser = commands.add_parser(
            name, parents=[common], formatter_class=look, allow_abbrev=False, **words
        )
        for option in options:
            option(sub)
        sub.set_defaults(run=carried_out, parser=sub)

    return add


def option(words: str, help: str | None = None, **more: Any) -> Addition:
    """`folder RUN` is an argument, `--tokens N` an option with a value, `--json` one without; `-o,--out FILE`."""
    name, _, metavar = words.partition(" ")
    if metavar:
        more["metavar"] = metavar
    elif not more:
        more["action"] = "store_true"
    if more.get("nargs") == "*" and not name.startswith("-"):  # without a default argparse calls it required
        return lambda parser: parser.add_argument(*name.split(","), help=help, **{"default": [], **more})
    return lambda parser: parser.add_argument(*name.split(","), help=help, **more)


def repeated(words: str, help: str, **more: Any) -> Addition:
    """An option that may be given several times."""
    return option(words, f"{help}; may be repeated", action="append", default=[], **more)


def group(title: str, *options: Addition) -> Addition:
    """Options under a title of their own; without one, only one of them may be given."""

    def add(parser: argparse.ArgumentParser) -> None:
        into = parser.add_argument_group(title) if title else parser.add_mutually_exclusive_group()
        for option in options:
            option(into)

    return add


RUN = option("folder RUN", "run folder")
SETTINGS = option("overrides key=value", "settings to change", nargs="*")
CHECKPOINT = option("--checkpoint", "which weights (best)", choices=("best", "last"), default="best")
DEVICE = option("--device", choices=("auto", "cpu", "cuda"), default="auto")
JSON = option("--json", "machine-readable output")
QUIET = option("--quiet", "no progress")
NO_DISPLAY = option("--quiet", "no progress display")
MAX_TIME = option("--max-time TIME", "save and stop after e.g. 90s, 15m, 1h30m (exit status 142)")
CONFIDENCE = option("--confidence", "of the intervals (0.95)", type=float, default=0.95)
JOBS = option("--jobs N", "runs at once (default: one per GPU, or one)", type=int)


def check(args: argparse.Namespace, *positive: str) -> None:
    """Refuse a confidence that is none, and numbers that should be at least 1."""
    if "confidence" in args and not 0 < args.confidence < 1:
        raise InputError(f"--confidence {args.confidence} should lie between 0 and 1.")
    for name in positive:
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value} should be at least 1.")


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Some of the options, to be passed on under their names."""
    return {name: getattr(args, name) for name in names}


def fields_help(kind: Any, width: int, *, with_choices: bool = True) -> str:
    """Every key of a section with its choices, if they are wanted, and its default, for `--help`."""
    lines = []
    for field in dataclasses.fields(kind):
        hint = type_hints(kind)[field.name]
        literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
        choices = f" {{{','.join(map(str, get_args(literals[0])))}}}" if literals and with_choices else ""
        value = str(field.default).lower() if isinstance(field.default, bool) else field.default
        default = "" if field.default is None else f" ({value})"
        lines.append(f"  {field.name:<{width}} {field.metadata['help']}{choices}{default}")
    return "\n".join(lines)


def pairs(rows: Iterable[tuple[str, str]], overflow: Literal["fold", "ellipsis"] = "fold") -> Table:
    """Words and what they mean, for a terminal."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow=overflow)
    for row in rows:
        table.add_row(*row)
    return table


CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # but tabs and ends of lines


def harmless(text: str) -> str:
    """Text that a model wrote: as it is, on a terminal with \\x1b in the place of what the terminal would obey."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text) if sys.stdout.isatty() else text


def drawn(draw: Callable[[Any, Path], None], what: Any, path: Path) -> list[Path]:
    """The picture, or a note that there is none."""
    try:
        draw(what, path)
    except StepformerError as error:
        print(f"note: no plot: {error}", file=sys.stderr)
        return []
    return [path]


def tell_idle(model: ModelConfig, overrides: Iterable[str]) -> None:
    """A sentence for each of these settings that changes nothing in this model."""
    for word in overrides if first_rank() else ():
        key, _, value = word.partition("=")
        if reason := model.idle.get(key.removeprefix("model.")):
            print(f"note: {key} = {value} changes nothing: {reason}.", file=sys.stderr)


def tell_faults(name: str, model: ModelConfig) -> None:
    """A sentence about a rule that is not the package's and would not pass its audit."""
    from stepformer.measure.diagnostics.audit import first_look

    if first_rank() and (fault := first_look(model)):
        print(f"note: {name}: {fault}", file=sys.stderr)


def tell_failed(failed: dict[str, str]) -> bool:
    """A sentence for each run that failed; whether any did."""
    for name, problem in failed.items() if first_rank() else ():
        print(f"stepformer: {name} failed: {problem}", file=sys.stderr)
    return bool(failed)
