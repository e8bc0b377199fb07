"""`stepformer bench` without its looks: arguments, plan, measuring, writing."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stepformer.base.errors import InputError
from stepformer.base.files import write_text
from stepformer.catalogue import SIZES, preset, presets
from stepformer.measure.benchmark import machine, records
from stepformer.measure.benchmark.measuring import measure
from stepformer.measure.benchmark.planning import (
    BASELINE,
    USUAL,
    BenchSettings,
    Case,
    Wanted,
    choose_kernels,
    choose_streams,
    introduction,
    plan,
)
from stepformer.measure.benchmark.table import legend, page, profile_table, speed_table
from stepformer.measure.benchmark.timing import product_rate
from stepformer.present.tables import Table
from stepformer.training.parallel import choose_device

DESCRIPTION = """\
How fast are architectures on this machine? Forward and backward pass, whole step with optimizer, memory, MFU, decoding,
each as a ratio to vanilla, which is measured first in the same process. Without NAMES: one architecture of each family.
"""
EPILOG = """\
examples:
  stepformer bench                               a minute on a CPU: size tiny; on a GPU: size small
  stepformer bench yurii muon --json speed.json  these, with every step's time in a file
  stepformer bench yurii splitting=strang --profile
  stepformer bench --all --append speed.json     every preset, added to what the file holds
  stepformer bench yurii --kernels both          with our kernels and with plain PyTorch
  stepformer bench --table FOLDER -o README.md   a Markdown page from stored results
"""
Show = Callable[[Table], None]


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "names", nargs="*", metavar="NAME", help="presets, templates or config.toml; key=value applies to all of them"
    )
    what = sub.add_argument_group("what")
    what.add_argument("--all", action="store_true", help="every preset")
    what.add_argument("--no-step", action="store_true", help="no optimizer and no whole step")
    what.add_argument("--no-decode", action="store_true", help="no decoding")
    what.add_argument("--profile", action="store_true", help="also where the time goes, by kind of kernel")
    what.add_argument("--again", action="store_true", help="vanilla once more at the end: did the machine drift?")
    how = sub.add_argument_group("how")
    how.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    how.add_argument("--size", choices=list(SIZES), help="(CPU: tiny, CUDA: small)")
    how.add_argument("--context", type=int, metavar="T", help="tokens in a sequence (that of the size)")
    how.add_argument("--micro-batch", type=int, metavar="N", help="sequences (CUDA: 32,768 tokens, CPU: 1,024)")
    how.add_argument("--steps", type=int, metavar="N", help="timed steps (CUDA: 20, CPU: 15)")
    how.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="torch.compile (default: on CUDA Hamiltonian integrators without kernels)",
    )
    how.add_argument(
        "--graph", action=argparse.BooleanOptionalAction, help="replay steps as a CUDA graph (default on CUDA: yes)"
    )
    how.add_argument("--kernels", choices=("on", "off", "both"), default="on", help="our Triton kernels (on)")
    how.add_argument(
        "--streams",
        choices=("auto", "fp32", "bf16", "both"),
        default="auto",
        help="what x and velocities are carried in",
    )
    how.add_argument("--optimizer", choices=("muon", "adamw", "scion", "polargrad"), default="muon", help="(muon)")
    how.add_argument("--batch-tokens", type=int, metavar="N", help="tokens in a whole step (CUDA: 491,520, CPU: 4,096)")
    how.add_argument("--decode-tokens", type=int, metavar="N", help="tokens to decode (CUDA: 512, CPU: 48)")
    how.add_argument("--seconds", type=float, metavar="S", help="limit per architecture; the rest of it is left out")
    out = sub.add_argument_group("output")
    out.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="all numbers as JSON, into a file or (-) here"
    )
    out.add_argument("--append", metavar="FILE", help="add to the results in FILE")
    out.add_argument("--table", metavar="FOLDER", help="measure nothing: a page from the results in a folder or file")
    out.add_argument("-o", "--out", metavar="FILE", help="--table: where the page goes (standard output)")


def run(args: argparse.Namespace, show: Show) -> int:
    """Carry out a parsed command; `show` prints a table."""
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
    cases = plan(_wanted(args), settings)
    save = writer(args)
    if args.json != "-":
        print(introduction(cases, settings), flush=True)
    process, interrupted = carry_out(cases, settings, save)
    if args.json == "-":
        print(records.as_json([process]), end="")
    else:
        _present(process, show)
    if interrupted:
        whole = sum("interrupted" not in record["notes"] for record in process["results"])
        print(f"stepformer: interrupted after {whole} of {len(cases)} measurements", file=sys.stderr)
        return 130
    return 1 if any(record["error"] for record in process["results"]) else 0


def check(args: argparse.Namespace) -> None:
    """Refuse what does not go together, in a sentence."""
    limits = {"context": 2, "micro_batch": 1, "steps": 3, "decode_tokens": 2, "batch_tokens": 1}
    for option, least in limits.items():
        value = getattr(args, option)
        if value is not None and value < least:
            raise InputError(f"--{option.replace('_', '-')} {value} should be at least {least}.")
    if args.seconds is not None and not args.seconds > 0:
        raise InputError(f"--seconds {args.seconds:g} should be above 0.")
    if args.json not in (None, "-") and not args.json.endswith(".json"):
        raise InputError(f"--json {args.json}: the file's name should end in .json (names of architectures go first).")
    if args.json and args.append:
        raise InputError("Give --json for a new file or --append to add to one, not both.")
    if args.out and not args.table:
        raise InputError("-o belongs to --table; --json FILE writes the measurements.")
    given = [word for word in ("all", "table") if getattr(args, word)]
    if len(given) > 1 or (given and args.names):
        other = "names" if args.names else f"--{given[1]}"
        raise InputError(f"Give --{given[0]} or {other}, not both.")


def settings_of(args: argparse.Namespace) -> BenchSettings:
    """Settings with the defaults of the device."""
    device = choose_device(args.device)
    on_cuda = device.type == "cuda"
    decode = args.decode_tokens or (512 if on_cuda else 48)
    return BenchSettings(
        device=device,
        size=args.size or ("small" if on_cuda else "tiny"),
        steps=args.steps or (20 if on_cuda else 15),
        warmup=5 if on_cuda else 2,
        compile=args.compile if on_cuda else bool(args.compile),
        graph=on_cuda and args.graph is not False,
        kernels=choose_kernels(args.kernels, device),
        streams=choose_streams(args.streams, device),
        micro_batch=args.micro_batch,
        batch_tokens=args.batch_tokens or (491_520 if on_cuda else 4_096),
        optimizer=args.optimizer,
        full_step=not args.no_step,
        decode_tokens=0 if args.no_decode else decode,
        prompt_tokens=64 if on_cuda else 16,
        profile=args.profile,
        seconds=args.seconds,
        again=args.again,
    )


def _wanted(args: argparse.Namespace) -> list[Wanted]:
    names = [word for word in args.names if "=" not in word]
    words = tuple(word for word in args.names if "=" in word)
    if args.all:
        catalogue = [preset(name) for name in presets()]
        names = [BASELINE, *(min((row.name, *row.aliases), key=len) for row in catalogue)]
    elif not names:
        names = list(USUAL)
    return [Wanted(name, words, args.context) for name in names]


def carry_out(
    cases: Sequence[Case], settings: BenchSettings, save: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any], bool]:
    """Measure every case; `save` is called after each one. Returns the process's entry and whether Ctrl-C ended it."""
    progress = Progress(len(cases) + settings.again)
    process: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "versions": machine.versions(),
        "device": machine.device_facts(settings.device),
        "settings": settings.to_dict(),
        "product": product_rate(settings.device),
        "results": [],
    }
    save(process)  # a file that cannot be written is better known now
    todo = [*cases]
    if settings.again:
        todo.append(replace(cases[0], label=f"{BASELINE} (again)"))
    baselines: dict[tuple[Any, ...], Any] = {}
    for case in todo:
        record: dict[str, Any] = {}
        progress.begin(case)
        beside, rate = baselines.get(case.frame), process["product"]["flops"]
        try:
            step = measure(case, settings, rate, record, stage=progress.stage, beside=beside)
            if case.label == BASELINE:
                baselines[case.frame] = step
        except KeyboardInterrupt:
            if record:
                record["notes"].append("interrupted")
                process["results"].append(record)
            save(process)
            progress.show()
            return process, True
        process["results"].append(record)
        save(process)
        progress.done(record)
    progress.show()
    return process, False


def writer(args: argparse.Namespace) -> Callable[[dict[str, Any]], None]:
    """Writes the whole file after every architecture: whatever ends the process leaves the rest."""
    path = args.append or (args.json if args.json != "-" else None)
    if path is None:
        return lambda process: None
    before = records.read(Path(path)) if args.append and Path(path).exists() else []
    return lambda process: records.write(Path(path), [*before, process])


def _present(process: dict[str, Any], show: Show) -> None:
    measured = list(records.pairs(process["results"]))
    if not measured:
        return
    table = speed_table(measured)
    show(table)
    if len(table.columns) > 1:
        print("\n" + textwrap.fill(legend(process, table), 118))
    times = profile_table(measured)
    if times is not None:
        print()
        show(times)


class Progress:
    """One line on a terminal that says what is going on; elsewhere one line per finished architecture."""

    def __init__(self, total: int) -> None:
        self.total, self.number, self.label = total, 0, ""
        self.live = sys.stderr.isatty()
        self.began = time.perf_counter()

    def begin(self, case: Case) -> None:
        self.number += 1
        ways = ["kernels off"] if case.kernels == "off" else []
        ways += ["fp32 streams"] if case.streams == "fp32" and case.kernels != "none" else []
        self.label = ", ".join((case.label, *ways, f"T = {case.config.context}"))
        self.stage("building")

    def stage(self, text: str) -> None:
        self.show(f"{self.number}/{self.total}  {self.label}: {text}  ({time.perf_counter() - self.began:.0f} s)")

    def done(self, record: dict[str, Any]) -> None:
        if self.live:
            return
        speed = record.get("tokens_per_second")
        what = record["error"] or (f"{speed / 1000:,.1f} ktok/s" if speed else "nothing measured")
        text = f"{self.number}/{self.total}  {self.label}: {what}  ({record['seconds']:.0f} s)"
        print(text, file=sys.stderr, flush=True)

    def show(self, text: str = "") -> None:
        """Instead of what the terminal's line said."""
        if self.live:
            print(f"\r\033[K{text[:118]}", end="", file=sys.stderr, flush=True)
