"""`stepformer bench`."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepformer.base.errors import InputError
from stepformer.base.files import write_text
from stepformer.catalogue import SIZES, preset, presets
from stepformer.cli.options import DEVICE, command, given, group, option
from stepformer.cli.show import console
from stepformer.measure.benchmark import drawing, records
from stepformer.measure.benchmark.planning import BASELINE, USUAL, BenchSettings, Wanted, introduction, plan
from stepformer.measure.benchmark.process import carry_out
from stepformer.measure.benchmark.table import legend, page, profile_table, speed_table
from stepformer.ops import kernels
from stepformer.present.tables import GAP, Table
from stepformer.training.parallel import choose_device

LEAST = {"random": 1, "context": 2, "micro_batch": 1, "steps": 3, "batch_tokens": 1}
LEAST |= {"decode_tokens": 2, "decode_rows": 1}
DEFAULTS: dict[str, dict[str, Any]] = {  # of options that are left out, by device
    "cpu": {"size": "tiny", "steps": 15, "batch_tokens": 4_096, "decode_tokens": 48},
    "cuda": {"size": "small", "steps": 20, "batch_tokens": 491_520, "decode_tokens": 512},
}
# on CUDA; `auto` is what training does there
STREAMS = {"auto": ("bf16",), "fp32": ("fp32",), "bf16": ("bf16",), "both": ("bf16", "fp32")}
KERNELS = {"on": ("on",), "off": ("off",), "both": ("on", "off")}


def run_bench(args: argparse.Namespace) -> int:
    check(args)
    if args.table:
        text = page(records.read_all(Path(args.table)))
        if args.out is None:
            print(text, end="")
        else:
            write_text(Path(args.out), text)
            print(f"written: {args.out}")
        return 0
    settings = settings_of(args)
    drawn = drawing.draw(args.random, args.seed, args.context) if args.random else []
    cases = plan(drawing.wanted(drawn) if drawn else wanted(args), settings)
    save = writer(args)
    if args.json != "-":
        print(introduction(cases, settings), flush=True)
    process, interrupted = carry_out(cases, settings, save)
    measured = records.pairs(process["results"])
    if args.json == "-":
        print(records.as_json([process]), end="")
    elif measured:
        table = speed_table(measured)
        show(table)
        if len(table.columns) > 1:
            print("\n" + textwrap.fill(legend(process, table), 118))
        if drawn:
            print()
            show(
                drawing.composition(drawn, {record["label"]: records.ratio(record, base) for record, base in measured})
            )
        times = profile_table(measured)
        if times is not None:
            print()
            show(times)
    if interrupted:
        whole = sum("interrupted" not in record["notes"] for record in process["results"])
        print(f"stepformer: interrupted after {whole} of {len(cases)} measurements", file=sys.stderr)
        return 130
    return 1 if any(record["error"] for record in process["results"]) else 0


def check(args: argparse.Namespace) -> None:
    """Refuse what does not go together, in a sentence."""
    for name, least in LEAST.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} {value} should be at least {least}.")
    if args.seconds is not None and not args.seconds > 0:
        raise InputError(f"--seconds {args.seconds:g} should be above 0.")
    if args.json not in (None, "-") and not args.json.endswith(".json"):
        raise InputError(f"--json {args.json}: the file's name should end in .json (names of architectures go first).")
    if args.json and args.append:
        raise InputError("Give --json for a new file or --append to add to one, not both.")
    if args.out and not args.table:
        raise InputError("-o belongs to --table; --json FILE writes the measurements.")
    asked = [f"--{word}" for word in ("all", "random", "table") if getattr(args, word)] + ["names"] * bool(args.names)
    if len(asked) > 1:
        raise InputError(f"Give {asked[0]} or {asked[-1]}, not both.")


def settings_of(args: argparse.Namespace) -> BenchSettings:
    """Settings with the defaults of the device."""
    device = choose_device(args.device)
    on_cuda = device.type == "cuda"
    if not on_cuda and args.streams in ("bf16", "both"):
        raise InputError(f"--streams {args.streams}: on the CPU nothing runs in bf16; leave it out.")
    chosen = {key: getattr(args, key) or usual for key, usual in DEFAULTS[device.type].items()}
    return BenchSettings(
        device=device,
        **chosen | ({"decode_tokens": 0} if args.no_decode or args.random else {}),
        **given(args, "micro_batch", "decode_rows", "optimizer", "profile", "seconds", "again"),
        warmup=5 if on_cuda else 2,
        compile=args.compile if on_cuda else bool(args.compile),
        graph=on_cuda and args.graph is not False,
        kernels=KERNELS[args.kernels] if on_cuda and kernels.has_triton() else ("none",),
        streams=STREAMS[args.streams] if on_cuda else ("fp32",),
        full_step=not args.no_step and not args.random,
        prompt_tokens=64 if on_cuda else 16,
    )


def wanted(args: argparse.Namespace) -> list[Wanted]:
    names: Sequence[str] = [word for word in args.names if "=" not in word] or USUAL
    words = tuple(word for word in args.names if "=" in word)
    if args.all:
        catalogue = [preset(name) for name in presets()]
        names = [BASELINE, *(min((row.name, *row.aliases), key=len) for row in catalogue)]
    return [Wanted(name, words, args.context) for name in names]


def writer(args: argparse.Namespace) -> Callable[[dict[str, Any]], None]:
    """Writes the whole file after every architecture: whatever ends the process leaves the rest."""
    path = args.append or (args.json if args.json != "-" else None)
    if path is None:
        return lambda process: None
    before = records.read(Path(path)) if args.append and Path(path).exists() else []
    return lambda process: records.write(Path(path), [*before, process])


def show(table: Table) -> None:
    """A table in the terminal's own colours; a file takes any width."""
    out = console()
    if not sys.stdout.isatty():
        out.width = max(out.width, sum(table.widths()) + GAP * len(table.columns))
    out.print(table.rich(out.width, rule=False))


YES_NO = argparse.BooleanOptionalAction
add_bench = command(
    run_bench,
    option("names NAME", "presets, templates or config.toml; key=value applies to all of them", nargs="*"),
    group(
        "what",
        option("--all", "every preset"),
        option("--random N", "N random combinations, against the product of what their parts have alone", type=int),
        option("--seed S", "--random: which ones (0)", type=int, default=0),
        option("--no-step", "no optimizer and no whole step"),
        option("--no-decode", "no decoding"),
        option("--profile", "also where the time goes, by kind of kernel"),
        option("--again", "vanilla once more at the end: did the machine drift?"),
    ),
    group(
        "how",
        DEVICE,
        option("--size", "(CPU: tiny, CUDA: small)", choices=list(SIZES)),
        option("--context T", "tokens in a sequence (that of the size)", type=int),
        option("--micro-batch N", "sequences (CUDA: 32,768 tokens, CPU: 1,024)", type=int),
        option("--steps N", "timed steps (CUDA: 20, CPU: 15)", type=int),
        option("--compile", "torch.compile (default: on CUDA Hamiltonian integrators without kernels)", action=YES_NO),
        option("--graph", "replay steps as a CUDA graph (default on CUDA: yes)", action=YES_NO),
        option("--kernels", "our Triton kernels (on)", choices=list(KERNELS), default="on"),
        option("--streams", "what x and velocities are carried in", choices=list(STREAMS), default="auto"),
        option("--optimizer", "(muon)", choices=("muon", "adamw", "scion", "polargrad"), default="muon"),
        option("--batch-tokens N", "tokens in a whole step (CUDA: 491,520, CPU: 4,096)", type=int),
        option("--decode-tokens N", "tokens to decode (CUDA: 512, CPU: 48)", type=int),
        option("--decode-rows N", "prompts to decode at once (1)", type=int, default=1),
        option("--seconds S", "limit per architecture; the rest of it is left out", type=float),
    ),
    group(
        "output",
        option("--json FILE", "all numbers as JSON, into a file or (-) here", nargs="?", const="-"),
        option("--append FILE", "add to the results in FILE"),
        option("--table FOLDER", "measure nothing: a page from the results in a folder or file"),
        option("-o,--out FILE", "--table: where the page goes (standard output)"),
    ),
)
