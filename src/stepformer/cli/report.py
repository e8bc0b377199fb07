"""`stepformer report`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from stepformer.base.errors import InputError
from stepformer.base.files import write_text
from stepformer.base.progress import counting


def add_report(commands: Any, common: argparse.ArgumentParser) -> None:
    sub = commands.add_parser(
        "report",
        parents=[common],
        description="Write DIR/index.html, a page that needs nothing but itself, and DIR/report.md with pictures, CSV "
        "and LaTeX for a paper. Runs that cannot be paired are shown without differences, unfinished ones with a mark. "
        "What `diagnose` and the evaluations left in RUN/measured/ is shown too.",
        epilog="examples:\n"
        "  stepformer report runs/compare-tales-vanilla-yurii --out report\n"
        "  stepformer report runs/a runs/b --baseline vanilla --prompt 'One morning' --prompt 'The old'\n"
        "  stepformer report runs/a --no-samples",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.add_argument("runs", nargs="+", metavar="RUN", help="run folders, and folders of `compare` or `sweep`")
    sub.add_argument("--out", default="report", metavar="DIR", help="folder of the report (report)")
    sub.add_argument("--title", metavar="WORDS", help="instead of the names of the architectures")
    sub.add_argument("--baseline", metavar="NAME", help="what the others are compared with (default: the study's)")
    sub.add_argument("--confidence", type=float, default=0.95, help="of the intervals (0.95)")
    sub.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to continue (default: beginnings of validation texts)"
    )
    sub.add_argument("--tokens", type=int, default=120, metavar="N", help="at most so many new tokens of text (120)")
    sub.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (0.8)")
    sub.add_argument("--seed", type=int, default=0, help="of the text, the same for every run (0)")
    sub.add_argument("--no-samples", action="store_true", help="no text")
    sub.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where text is made")
    sub.add_argument("--quiet", action="store_true", help="no progress")
    sub.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    from stepformer.pages.reports.collect import gather
    from stepformer.pages.reports.contents import build
    from stepformer.pages.reports.folder import claim, hold, refuse_foreign
    from stepformer.pages.reports.page import page_html
    from stepformer.pages.reports.paper import files_of, no_pictures, write_paper
    from stepformer.pages.reports.samples import Drawing, Samples, ask_models, default_prompts

    _check(args)
    out = Path(args.out)
    refuse_foreign(out, ["index.html", "report.md"])
    with counting("reading", len(args.runs), quiet=args.quiet) as count:
        gathered = gather(args.runs)
        count(len(args.runs))
    samples = None
    if not args.no_samples:
        prompts, notes = (args.prompt, []) if args.prompt else default_prompts(gathered.runs)
        drawing = Drawing(args.tokens, args.temperature, args.seed)
        samples = Samples(list(dict.fromkeys(prompts)), drawing, notes=notes)
    first = build(gathered, baseline=args.baseline, confidence=args.confidence)  # what is wrong is told before the work
    refuse_foreign(out, files_of(first))
    hold(out)
    with counting("asking the models", len(gathered.runs), quiet=args.quiet) as count:
        ask_models(gathered.runs, samples, out / ".cache", device=args.device, progress=count)
    report = build(
        gathered, baseline=args.baseline, confidence=args.confidence, samples=samples, title=args.title or None
    )
    names = files_of(report)
    claim(out, names)
    with counting("writing", 1 + sum(name.endswith(".png") for name in names), quiet=args.quiet) as count:
        write_text(out / "index.html", page_html(report))
        count(1)
        written = write_paper(report, out, count)
    for run in report.runs:
        for said in filter(None, (run.state, *run.notes)):
            print(f"note: {run.name}: {said}", file=sys.stderr)
    if problem := no_pictures():
        print(f"note: {problem}", file=sys.stderr)
    print(report.verdict)
    print(f"written: {', '.join(str(path) for path in (out / 'index.html', *written))}")
    return 0


def _check(args: argparse.Namespace) -> None:
    if not 0 < args.confidence < 1:
        raise InputError(f"--confidence {args.confidence} should lie between 0 and 1.")
    if args.tokens < 1:
        raise InputError(f"--tokens {args.tokens} should be at least 1.")
    if not args.temperature >= 0:
        raise InputError(f"--temperature {args.temperature} should be 0 or more.")
    if args.no_samples and args.prompt:
        raise InputError("--prompt asks for text and --no-samples for none: give one of them.")
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise InputError(f"--out '{out}' is a file: name a folder.")
    if (out / "run.json").exists():
        raise InputError(f"--out '{out}' is a run's folder: name another, e.g. '{out / 'report'}'.")
