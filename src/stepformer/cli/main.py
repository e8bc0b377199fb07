"""The `stepformer` command."""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import importlib
import io
import itertools
import os
import re
import shlex
import sys
import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepformer.base.errors import ConfigError, StepformerError, StepformerWarning, suggestion
from stepformer.base.version import __version__

DESCRIPTION = """\
Transformers whose layers are steps of an optimizer.

A preset is a named point in template x splitting x attention; change one word and get another architecture:
  stepformer demo                              train a plain GPT, a Nesterov one and our recipe, in minutes
  stepformer list                              every preset with its equation
  stepformer show yurii                        equations, coefficients, parameter counts
  stepformer show yurii splitting=strang       the same template under another splitting
  stepformer audit yurii                       is it causal, does cached decoding agree, are its gradients right?
  stepformer bench yurii                       how fast is it here, against a plain GPT?
  stepformer train yurii                       train it (tiny, on the embedded tales; see train --help)
  stepformer compare vanilla yurii --seeds 3   is the difference real? paired seeds, intervals, a plot
  stepformer eval RUN --tasks hellaswag        how good is it? tasks, perplexity on other texts
  stepformer diagnose RUN --hessian --depth    why? curvature, Jacobians, what happens inside
  stepformer finetune RUN... --on CORPUS       what does it forget while it learns something else?
  stepformer report RUNS...                    one page to show: tables, curves, spectra, samples
  stepformer serve RUN [RUN2]                  type a prompt, compare two checkpoints token by token, watch a training
  stepformer export RUN --out DIR              to Hugging Face; `stepformer import` reads others' checkpoints
  stepformer flow                              the particle systems behind attention: energies, orders, pictures
  stepformer claims                            what the documents claim, what was measured, and the verdict
"""


COMMANDS = {  # name: who adds it
    "prepare": "prepare.add_prepare",
    "train": "train.add_train",
    "resume": "train.add_resume",
    "extend": "train.add_extend",
    "eval": "evaluate.add_eval",
    "generate": "runs.add_generate",
    "serve": "serve.add_serve",
    "compare": "compare.add_compare",
    "sweep": "compare.add_sweep",
    "demo": "compare.add_demo",
    "diagnose": "diagnose.add_diagnose",
    "finetune": "finetune.add_finetune",
    "report": "report.add_report",
    "export": "share.add_export",
    "import": "share.add_import",
    "trust": "trust.add_trust",
    "recipes": "train.add_recipes",
    "list": "show.add_list",
    "show": "show.add_show",
    "audit": "audit.add_audit",
    "bench": "bench.add_bench",
    "flow": "flow.add_flow",
    "claims": "claims.add_claims",
}


@functools.cache
def texts() -> dict[str, dict[str, str]]:
    """What `stepformer NAME --help` says, by command."""
    return tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line; `only` the command named, if one is, knows its arguments.

    A command's module imports torch and more, which takes seconds; `--help` and `--version` need none of them.
    """
    top = argparse.ArgumentParser(
        prog="stepformer",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"stepformer {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="FILE|MODULE",
        help="import rules of your own first (docs/write-your-own-rule.md); may be repeated",
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, adder in COMMANDS.items():
        if only in (None, name):
            module, function = adder.split(".")
            getattr(importlib.import_module(f"stepformer.cli.{module}"), function)(commands, common)
        else:
            commands.add_parser(name, help=texts()[name]["help"])
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0 good, 1 a check failed, 2 bad input."""
    if sys.stdout is None:  # closed, as by `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a letter shows a question mark
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        if not first_rank():
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        warnings.showwarning = _note
        return _run(argv)


def first_rank() -> bool:
    """Whether this is the process that prints, of all that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a command line."""
    given = sys.argv[1:] if argv is None else argv
    asked = next((word for word in given if not word.startswith("-")), "")
    top = parser(only=asked if asked in COMMANDS else "")
    if not given:
        top.print_help(sys.stderr)
        raise SystemExit(2)
    if asked and asked not in COMMANDS:
        top.error(f"there is no command '{asked}'.{suggestion(asked, COMMANDS)} `stepformer --help` lists them all.")
    args, extra = top.parse_known_args(argv)
    # argparse takes key=value words only before the first option; people write them anywhere
    words = getattr(args, "overrides", getattr(args, "names", None))
    unknown = [w for w in extra if words is None or w.startswith("-") or not ("names" in args or "=" in w)]
    if unknown:
        known = [option for action in args.parser._actions for option in action.option_strings]
        settings = [] if words is None else [_as_setting(word, given, args.parser) for word in unknown]
        setting = next(filter(None, settings), "")
        word = unknown[0].partition("=")[0]
        near = suggestion(word, [option for option in known if option.startswith(word)] or known, 0.75)
        guess = setting or near or ELSEWHERE.get((asked, word if word.startswith("-") else ""), "")
        top.error(f"unrecognized arguments: {' '.join(unknown)}.{guess}")
    if words is not None:
        words += extra
    return args


ELSEWHERE = {
    ("eval", ""): " Texts are named with --on.",
    ("generate", ""): " A prompt of several words is written in quotes.",
    ("generate", "--max-new-tokens"): " Did you mean --tokens?",
    ("generate", "--prompt"): " The prompt comes after RUN, without an option.",
}


def _as_setting(word: str, argv: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """How a setting is written that was given as an option: `--steps 10` is `steps=10`. Empty if it is none."""
    from stepformer.base.words import translated
    from stepformer.model.config import REGISTRIES, ModelConfig
    from stepformer.training.config import SECTIONS

    option, equals, value = word.partition("=")
    key = option.lstrip("-").replace("-", "_")
    known = {"preset", "size", *ModelConfig.__dataclass_fields__}
    known |= {name for registry in REGISTRIES.values() for entry in registry for name in entry.component.options}
    known |= {name for kind in SECTIONS.values() for name in kind.field_names()}
    known |= {*re.findall(r"^  (\w+)(?:=| )", parser.epilog or "", re.MULTILINE)}  # of `diagnose`: its help lists them
    if option.startswith("--") and (said := translated(key)):
        return f" Unknown key '{key}'.{said} Settings are written key=value, without dashes."
    if f"{option}s" in parser._option_string_actions:  # the seed of one run, the seeds of a comparison
        return f" Did you mean {option}s?"
    if not option.startswith("--") or key not in {"set", *known}:
        return ""
    if not equals:
        value = next((after for before, after in itertools.pairwise(argv) if before == word), "VALUE")
    if key == "set":
        key, _, value = value.partition("=")
    return f" Settings are written key=value, without dashes: {shlex.quote(f'{key}={value}')}."


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = _parsed(argv)
        if args.plugin:
            from stepformer.base.plugins import load_plugins

            load_plugins(args.plugin)
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except StepformerError as error:
        # another rank may print it; before the ranks have met, the first one of a machine does
        several, rank = int(os.environ.get("WORLD_SIZE", "1")) > 1, int(os.environ.get("LOCAL_RANK", "0"))
        if not (several and rank > 0 if error.told is None else error.told):
            for problem in error.problems if isinstance(error, ConfigError) else [error]:
                print(f"stepformer: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stepformer: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `stepformer list | head`: the reader has gone
        _drop_output()
        return 0
    except OSError as error:
        what = f"'{error.filename}' cannot be used" if error.filename else "The system refused something"
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF):
            _drop_output()
            what = "The output could not be written"
        print(f"stepformer: {what}: {error.strerror or error}.", file=sys.stderr)
        return 2
    except Exception as error:
        from stepformer.base.plugins import comes_from_plugin, explained

        if not comes_from_plugin(error):
            raise
        print(f"stepformer: {explained(error)}", file=sys.stderr)
        return 2


def _drop_output() -> None:
    """Keep the interpreter's last flush quiet."""
    with contextlib.suppress(OSError):  # one that is no file needs no flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _note(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
    """Warnings as lines for people: ours as they are, those of libraries with their kind."""
    kind = "" if issubclass(category, StepformerWarning) else f"{category.__name__}: "
    print(f"note: {kind}{message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
