"""What the architectures should reach on one H200: size small, context 1024, micro-batch 32, bf16 autocast.

Each row names presets and a bound on one measured quantity. Ratios are to vanilla in the same process.

    python benchmarks/targets.py                           measure every row on this GPU, and judge
    python benchmarks/targets.py muon,symp --append FILE   some rows, added to the results in FILE
    python benchmarks/targets.py muon --no-step --no-decode     options of `stepformer bench`
    python benchmarks/targets.py --results benchmarks/results -o benchmarks/TARGETS.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepformer.base.errors import InputError, StepformerError, UnknownNameError, suggestion
from stepformer.base.files import write_text
from stepformer.catalogue import preset
from stepformer.cli import bench
from stepformer.cli.main import parser as command_line
from stepformer.measure.benchmark import records
from stepformer.measure.benchmark.planning import Wanted, plan
from stepformer.measure.benchmark.process import carry_out
from stepformer.measure.benchmark.records import Process, judged_ones, value_of
from stepformer.measure.benchmark.table import made
from stepformer.present.tables import Table

MOMENTUM = ("hb", "yurii", "tmm", "symplectic-euler", "polyak-euler", "nesterov-euler")
IMEX_K1 = ("imex-k1-ama", "imex-k1-mam", "imex-ln-k1-ama", "imex-ln-k1-mam")
IMEX_K2 = ("imex-k2-ama", "imex-k2-mam", "imex-ln-k2-ama", "imex-ln-k2-mam")
SCHEMES = ("plain-euler", "presymp-euler", "exp-euler", "conformal-euler", "ab2", "etd-ab2")
ROTARY, QK_NORM, RMSNORM = ("positions=rotary",), ("qk_norm=true",), ("norm=rmsnorm",)
VALUES, SKIP = ("value_residual=free",), ("embedding_skip=true",)
LINEAR = ("linear", "linear-yurii", *(f"linear-symp-{scheme}" for scheme in SCHEMES))


@dataclass(frozen=True)
class Target:
    """A row: `presets` should have `quantity` of at least (or at most) `bound`."""

    row: str
    presets: tuple[str, ...]
    quantity: str
    bound: float
    at_most: bool = False
    context: int = 1024
    words: tuple[str, ...] = ()  # settings of all of them

    def label(self, name: str) -> str:
        return " ".join((name, *self.words))

    def holds(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound


TARGETS = (
    Target("vanilla", ("vanilla",), "ktok/s", 600.0),
    Target("vanilla-memory", ("vanilla",), "peak GiB", 10.0, at_most=True),
    Target("momentum", (*MOMENTUM, *IMEX_K1), "ratio", 0.96),
    Target("rmsprop", ("rmsprop",), "ratio", 0.93),
    Target("adam", ("adam", "adamw"), "ratio", 0.90),
    Target("muon", ("muon", "ortho"), "ratio", 0.75),
    Target("two-calls", ("verlet-ama", "verlet-mam", *IMEX_K2), "ratio by FLOPs", 0.95),
    Target("soap", ("soap", "shampoo"), "ratio", 0.10),
    Target("symp", tuple(f"symp-{scheme}" for scheme in SCHEMES), "ratio", 0.80),
    Target("linear", LINEAR, "ratio", 0.85),
    Target("linear-8192", LINEAR, "ratio", 1.2, context=8192),
    Target("entropy", ("entropy", "entropy-head", "entropy-token", "entropy-floor", "kl"), "ratio", 0.70),
    Target("prior", ("kl-previous", "kl-carried"), "ratio", 0.50),
    Target("optimizer", ("vanilla",), "optimizer % of a step", 1.0, at_most=True),
    Target("decode", ("vanilla",), "decode tok/s", 4500.0),
    Target("decode-momentum", ("hb", "yurii", "tmm"), "decode ratio", 0.90),
    Target("decode-first-order", (*MOMENTUM, *IMEX_K1, "rmsprop", "adam", "adamw"), "decode tok/s", 4500.0),
    Target(
        "decode-extras", ("yurii", "adam"), "decode tok/s", 4500.0, words=(*ROTARY, *RMSNORM, *QK_NORM, *VALUES, *SKIP)
    ),
    Target("decode-muon", ("muon", "ortho"), "decode tok/s", 3000.0),
    Target("decode-symp", tuple(f"symp-{scheme}" for scheme in SCHEMES), "decode tok/s", 2500.0),
    Target("decode-constrained", ("entropy", "kl"), "decode tok/s", 2000.0),
    Target("decode-prior", ("kl-previous",), "decode tok/s", 1000.0),
    Target("decode-linear", ("linear",), "decode tok/s", 5000.0),
    Target("rotary", ("vanilla",), "ratio", 0.97, words=ROTARY),
    Target("qk-norm", ("vanilla",), "ratio", 0.975, words=QK_NORM),
    Target("rotary-qk-norm", ("vanilla",), "ratio", 0.965, words=(*ROTARY, *QK_NORM)),
    Target("value-residual", ("vanilla",), "ratio", 0.975, words=VALUES),
    Target("embedding-skip", ("vanilla",), "ratio", 0.98, words=SKIP),
    Target("rmsnorm", ("vanilla",), "ratio", 0.99, words=RMSNORM),
    Target("swiglu", ("vanilla",), "ratio", 0.99, words=("mlp=swiglu",)),
    Target("relu2", ("vanilla",), "ratio", 0.97, words=("mlp=relu2",)),
    Target("untied", ("vanilla",), "ratio", 0.97, words=("head=untied",)),
    Target("tables", ("tables", "value-tables"), "ratio", 0.96),
    Target("around", ("scaled", "unet"), "ratio", 0.98),
    Target("denseformer", ("denseformer",), "ratio", 0.90),
    Target("hyper", ("hyper",), "ratio", 0.85),
    Target("hyper-dynamic", ("hyper",), "ratio", 0.80, words=("dynamic=true",)),
    Target("mhc", ("mhc",), "ratio", 0.78),
    Target("attnres", ("attnres",), "ratio", 0.72),
    Target("attnres-8", ("attnres",), "ratio", 0.86, words=("blocks=8",)),
    Target("attnres-4", ("attnres",), "ratio", 0.90, words=("blocks=4",)),
    Target("soft-cap", ("vanilla",), "ratio", 0.99, words=("logit_softcap=30",)),
    Target("documents", ("vanilla",), "ratio", 0.93, words=("document_separator=0",)),
    Target("all-extras", ("yurii",), "ratio", 0.91, words=(*ROTARY, *RMSNORM, *QK_NORM, *VALUES, *SKIP)),
    Target("recipe", ("modern", "glide"), "ratio", 0.91),
    Target(
        "all-extras-memory", ("yurii",), "peak GiB", 12.0, True, words=(*ROTARY, *RMSNORM, *QK_NORM, *VALUES, *SKIP)
    ),
)


def select(words: str | None) -> list[Target]:
    """The rows that a comma-separated list names; None or `all` is every row."""
    if words in (None, "all"):
        return list(TARGETS)
    rows = {target.row: target for target in TARGETS}
    found = []
    for word in str(words).split(","):
        if word not in rows:
            raise UnknownNameError(
                f"There is no target row '{word}'.{suggestion(word, rows)} The rows are {', '.join(rows)}."
            )
        found.append(rows[word])
    return found


def wanted(targets: Iterable[Target]) -> list[Wanted]:
    """The architectures that the rows are about."""
    return list(
        dict.fromkeys(Wanted(name, target.words, target.context) for target in targets for name in target.presets)
    )


@dataclass(frozen=True)
class Verdict:
    """A row for one preset: what was measured (None: not yet) and what it should be."""

    target: Target
    preset: str
    value: float | None
    reached: bool | None


def _canonical(label: str) -> str:
    """One name for a preset, whichever of its names was given; other labels are no preset's."""
    try:
        return preset(label).name
    except UnknownNameError:
        return label


def verdicts(targets: Iterable[Target], pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> list[Verdict]:
    """One verdict per row and preset, from (record, its baseline) pairs; the last that measured it counts."""
    known: dict[tuple[str, int], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for record, baseline in pairs:
        known.setdefault((_canonical(record["label"]), record["context"]), []).append((record, baseline))
    found = []
    for target in targets:
        for name in target.presets:
            key = (_canonical(target.label(name)), target.context)
            values = [value_of(target.quantity, *pair) for pair in known.get(key, [])]
            value = next((v for v in reversed(values) if v is not None), None)
            found.append(Verdict(target, target.label(name), value, None if value is None else target.holds(value)))
    return found


def judged(processes: Iterable[Process], targets: Iterable[Target] = TARGETS) -> list[Verdict]:
    """Verdicts on measurements at the size and with the settings that the targets are for; the last one counts."""
    return verdicts(targets, judged_ones(processes))


def target_table(found: Iterable[Verdict]) -> Table:
    rows = []
    for verdict in found:
        target = verdict.target
        number = "" if verdict.value is None else _amount(verdict.value)
        word = {True: "reached", False: "NOT reached", None: "not measured"}[verdict.reached]
        sign = "<=" if target.at_most else ">="
        where = "" if target.context == 1024 else f" at T = {target.context}"
        rows.append(
            [target.row, verdict.preset, f"{target.quantity}{where}", word, f"{sign} {_amount(target.bound)}", number]
        )
    return made(["row", "architecture", "quantity", "verdict", "target", "measured"], rows, left=4)


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 20 else f"{value:.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="?", metavar="ROWS", help="rows of the table, a,b (all of them)")
    parser.add_argument("--results", metavar="FOLDER", help="measure nothing: judge the results in a folder or file")
    parser.add_argument("--append", metavar="FILE", help="add what is measured to the results in FILE")
    parser.add_argument("-o", "--out", metavar="FILE", help="--results: where the table goes as Markdown")
    args, others = parser.parse_known_args(argv)  # the others are those of `stepformer bench`
    try:
        rows = select(args.rows)
        if args.results:
            table = target_table(judged(records.read_all(Path(args.results)), rows))
            if args.out:
                made_by = "`python benchmarks/targets.py --results benchmarks/results -o benchmarks/TARGETS.md`"
                write_text(Path(args.out), f"# Targets on one H200\n\nMade by {made_by}.\n\n{table.markdown()}\n")
            else:
                print(table.markdown())
            return 0
        words = ["bench", *(["--append", args.append] if args.append else [])]
        given = command_line("bench").parse_args([*words, *others])
        settings = bench.settings_of(given)
        if settings.device.type != "cuda":
            raise InputError("The targets are for a GPU: `stepformer bench` measures on a CPU.")
        process, interrupted = carry_out(plan(wanted(rows), settings), settings, bench.writer(given))
        print(target_table(judged([process], rows)).markdown())
        return 130 if interrupted else 0
    except StepformerError as error:
        print(f"targets: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
