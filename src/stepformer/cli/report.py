"""`stepformer report`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stepformer.base.errors import InputError
from stepformer.base.files import write_text
from stepformer.base.progress import counting
from stepformer.cli.options import CONFIDENCE, QUIET, check, command, given, option


def run_report(args: argparse.Namespace) -> int:
    from stepformer.pages.reports.collect import gather
    from stepformer.pages.reports.contents import build
    from stepformer.pages.reports.page import page_html
    from stepformer.pages.reports.paper import DRAWN, claim, files_of, hold, no_pictures, refuse_foreign, write_paper
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
    settings = given(args, "baseline", "confidence")
    refuse_foreign(out, files_of(build(gathered, **settings)))  # what is wrong is told before the work
    hold(out)
    with counting("asking the models", len(gathered.runs), quiet=args.quiet) as count:
        ask_models(gathered.runs, samples, out / ".cache", device=args.device, progress=count)
    report = build(gathered, **settings, samples=samples, title=args.title or None)
    names = files_of(report)
    claim(out, names)
    with counting("writing", 1 + sum(Path(name).suffix in DRAWN for name in names), quiet=args.quiet) as count:
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
    check(args, "tokens")
    if not args.temperature >= 0:
        raise InputError(f"--temperature {args.temperature} should be 0 or more.")
    if args.no_samples and args.prompt:
        raise InputError("--prompt asks for text and --no-samples for none: give one of them.")
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise InputError(f"--out '{out}' is a file: name a folder.")
    if (out / "run.json").exists():
        raise InputError(f"--out '{out}' is a run's folder: name another, e.g. '{out / 'report'}'.")


add_report = command(
    run_report,
    option("runs RUN", "run folders, and folders of `compare` or `sweep`", nargs="+"),
    option("--out DIR", "folder of the report (report)", default="report"),
    option("--title WORDS", "instead of the names of the architectures"),
    option("--baseline NAME", "what the others are compared with (default: the study's)"),
    CONFIDENCE,
    option("--prompt TEXT", "text to continue (default: beginnings of validation texts)", action="append"),
    option("--tokens N", "at most so many new tokens of text (120)", type=int, default=120),
    option("--temperature T", "0 is greedy (0.8)", type=float, default=0.8),
    option("--seed", "of the text, the same for every run (0)", type=int, default=0),
    option("--no-samples", "no text"),
    option("--device", "where text is made", choices=("auto", "cpu", "cuda"), default="auto"),
    QUIET,
)
