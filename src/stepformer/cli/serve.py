"""`stepformer serve`."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import webbrowser

from stepformer.base.errors import InputError
from stepformer.cli.options import DEVICE, command, option


def run_serve(args: argparse.Namespace) -> int:
    from stepformer.pages.serving import PageServer, ServedRun
    from stepformer.pages.serving.runs import place

    if len(args.names) > 2:
        raise InputError(f"The page shows one run or two, not {len(args.names)}.")
    runs = [ServedRun(*place(word, args.checkpoint), args.device) for word in args.names]
    token = "" if args.no_token else os.environ.get("STEPFORMER_SERVE_TOKEN") or None
    server = PageServer(runs, args.port, token)  # before the weights are read: a taken port shows at once
    with server:
        for run in runs:
            if run.newest() is None:
                print(f"{run.folder.path}: no checkpoint yet; the page shows its training and takes the first one then")
                continue
            kind, step = run.load()
            when = "as imported" if run.ready().known_step is None else f"step {step:,}"
            print(f"{run.folder.path}: {run.config.title}, {kind} weights, {when}")
        if server.apart:
            print(f"note: {server.apart}", file=sys.stderr)
        print(f"{server.url}  (for this machine alone; Ctrl-C ends it)", flush=True)
        screen = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if screen and not args.no_browser:  # without one the browser that would open is one inside this terminal
            threading.Thread(target=webbrowser.open, args=(server.url_for_one_visit(),), daemon=True).start()
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            ended = server.stop()
            print("\nstepformer: the page is closed", file=sys.stderr, flush=True)
            if not ended:
                os._exit(0)  # a thread that still answers would take the interpreter down less quietly
    return 0


add_serve = command(
    run_serve,
    option("names RUN", "one run folder or two; RUN@best, RUN@last: its weights", nargs="+"),
    option("--checkpoint", "weights where RUN says none (best)", choices=("best", "last"), default="best"),
    option("--port N", "0: any free one (8765)", type=int, default=8765),
    option("--no-browser", "print the address only"),
    option("--no-token", "answer everybody who has an account on this machine"),
    DEVICE,
)
