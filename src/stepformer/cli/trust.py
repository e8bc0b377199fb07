"""`stepformer trust`."""

from __future__ import annotations

import argparse
from pathlib import Path

from stepformer.base.plugins import files_at, place_of, trust, trusted
from stepformer.base.plugins.trusting import place_of_list
from stepformer.cli.options import command, option
from stepformer.cli.show import console
from stepformer.present.tables import of_texts
from stepformer.training.runs import RunFolder


def run_trust(args: argparse.Namespace) -> int:
    for folder in args.folders:
        plugins = RunFolder(Path(folder)).read().get("plugins", [])
        files = [path for where in plugins for path in files_at(place_of(where))]
        trust(files)
        print(f"{folder}: {'trusted: ' + ', '.join(map(str, files)) if files else 'it has no plug-ins'}")
    if not args.folders:
        rows = [[known["name"], known["since"], content[:12]] for content, known in trusted().items()]
        console().print(of_texts(["file", "since", "SHA-256"], rows) if rows else "No plug-in is trusted yet.")
        print(f"the list: {place_of_list()}")
    return 0


add_trust = command(run_trust, option("folders RUN", "run folders", nargs="*"))
