"""`stepformer claims`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.markup import escape

from stepformer.base.errors import InputError
from stepformer.base.version import PACKAGE
from stepformer.cli.options import JSON, command, drawn, group, option, pairs
from stepformer.cli.show import console
from stepformer.study.ledger import Claim, changed, ledger
from stepformer.study.ledger_views import as_data, counted, ledger_table, parts_table, plot_ledger


def run_claims(args: argparse.Namespace) -> int:
    if args.check:
        return _check()
    claims = ledger()
    numbers = {str(claim.number): claim for claim in claims}
    if unknown := [word for word in args.numbers if word not in numbers]:
        raise InputError(f"There is no claim {', '.join(unknown)}: they are numbered from 1 to {len(numbers)}.")
    chosen = [numbers[word] for word in args.numbers] or claims
    if args.plot:
        print(f"written: {', '.join(map(str, drawn(plot_ledger, chosen, Path(args.plot))))}")
    elif args.json:
        print(json.dumps([as_data(claim) for claim in chosen], indent=2))
    elif args.numbers:
        for claim in chosen:
            _show(claim)
    else:
        console().print(ledger_table(chosen))
    return 0


def _check() -> int:
    """Whether the numbers are those of the raw files: here, or where the package comes from."""
    roots = [root for root in (Path.cwd(), PACKAGE.parents[1]) if (root / "docs" / "raw").is_dir()]
    if not roots:
        raise InputError("There is no docs/raw here: the raw files are in the repository, so run this in a checkout.")
    found = changed(roots[0])
    for sentence in found:
        print(sentence)
    print(f"{len(found)} numbers differ" if found else f"every number is that of its raw file: {counted(ledger())}")
    return 1 if found else 0


def _show(claim: Claim) -> None:
    out = console()
    out.print(f"[bold]{claim.number}. {escape(claim.claim)}[/bold]")
    sources = {found.source.name: found.source for part in claim.parts for found in part.evidence}
    out.print(
        pairs(
            [
                ("verdict", claim.verdict),
                ("document", escape(f"{claim.document}, {claim.section}")),
                ("published", escape(claim.published)),
                *([("out of reach", escape(claim.out_of_reach))] if claim.out_of_reach else []),
                *([("remark", escape(claim.remark))] if claim.remark else []),
            ]
        )
    )
    if claim.parts:
        out.print()
        out.print(parts_table(claim))
    for name, source in sources.items():
        out.print(f"\n[bold]{name}[/bold]  {', '.join(source.raw)}", soft_wrap=True)
        for line in source.commands:
            out.print(f"  $ {line}", markup=False, soft_wrap=True)
    out.print("\n[bold]to test it[/bold]")
    for line in claim.commands:
        out.print(f"  $ {line}", markup=False, soft_wrap=True)
    out.print()


add_claims = command(
    run_claims,
    option("numbers N", "claims to show with all their evidence", nargs="*"),
    group(
        "",
        JSON,
        option("--check", "read the raw files again: are the numbers still theirs?"),
        option("--plot FILE", "draw every interval as a PNG"),
    ),
)
