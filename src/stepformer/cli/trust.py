"""`stepformer trust`."""

from __future__ import annotations

import argparse
from pathlib import Path

from stepformer.base.errors import InputError
from stepformer.base.plugins import files_at, place_of, trust, trusted
from stepformer.base.plugins.sources import hashed
from stepformer.base.plugins.trusting import place_of_list
from stepformer.cli.options import command, option
from stepformer.cli.show import console
from stepformer.present.tables import of_texts
from stepformer.training.runs import RunFolder


def run_trust(args: argparse.Namespace) -> int:
    for folder in args.folders:
        run = RunFolder(Path(folder)).read()
        files = [path for where in run.get("plugins", []) for path in files_at(place_of(where))]
        trained = {content for found in run.get("code", {}).values() for content in found.values()}
        for path, content in hashed(files).items():
            if trained and content not in trained:  # what an old run was trained with nobody knows
                raise InputError(
                    f"'{path}' (SHA-256 {content[:12]}) is not what the run '{folder}' was trained with: nothing is "
                    "trusted. The run keeps a copy of that in its folder 'plugins'."
                )
        trust(files)
        print(f"{folder}: {'trusted: ' + ', '.join(map(str, files)) if files else 'it has no plug-ins'}")
    if not args.folders:
        rows = [[known["name"], known["since"], content[:12]] for content, known in trusted().items()]
        console().print(of_texts(["file", "since", "SHA-256"], rows) if rows else "No plug-in is trusted yet.")
        print(f"the list: {place_of_list()}")
    return 0


add_trust = command(run_trust, option("folders RUN", "run folders", nargs="*"))
