"""`stepformer generate`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from stepformer.base.errors import InputError
from stepformer.training import load_run
from stepformer.training.choices import precision_of
from stepformer.training.run import LoadedRun
from stepformer.training.text import continue_text, prompt_ids, readable


def add_generate(commands: Any, common: argparse.ArgumentParser) -> None:
    sub = commands.add_parser(
        "generate",
        parents=[common],
        description="Continue a prompt with the run's own tokenizer; the text appears as it is made.",
    )
    sub.add_argument("folder", metavar="RUN", help="run folder")
    sub.add_argument(
        "prompt", nargs="?", default="", metavar="PROMPT", help="text to continue (default: a new document)"
    )
    sub.add_argument("--tokens", type=int, default=200, metavar="N", help="at most so many new tokens (200)")
    sub.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (0.8)")
    sub.add_argument("--top-k", type=int, metavar="K", help="draw from the K most likely tokens")
    sub.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens that make up P")
    sub.add_argument("--seed", type=int, help="for the same text again")
    sub.add_argument("--samples", type=int, default=1, metavar="N", help="how many continuations (1)")
    sub.add_argument("--beams", type=int, metavar="N", help="draw nothing: the best text a search with N beams finds")
    sub.add_argument(
        "--length-penalty", type=float, metavar="P", help="with --beams: scores are divided by length^P (default: 1)"
    )
    sub.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    sub.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp32"),
        default="auto",
        help="of the weights; auto: bf16 on a GPU for a run that was trained so, else as they are",
    )
    sub.add_argument("--checkpoint", choices=("best", "last"), default="best", help="which weights (best)")
    sub.set_defaults(run=run_generate)


def run_generate(args: argparse.Namespace) -> int:
    run = load_run(args.folder, args.checkpoint, args.device)
    set_precision(run, args.precision)
    if args.samples < 1:
        raise InputError(f"--samples {args.samples} should be at least 1.")
    if args.beams is not None:
        if args.samples > 1:
            raise InputError(f"Beam search has one result: --samples {args.samples} does not go with --beams.")
        drawing = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "seed")}
        given = {name: value for name, value in drawing.items() if value is not None}
        ids, stop = prompt_ids(run, args.prompt), run.tokenizer.eot
        if args.length_penalty is not None:
            given["length_penalty"] = args.length_penalty
        made = run.model.generate([ids], beams=args.beams, max_new_tokens=args.tokens, stop=stop, **given)
        print(args.prompt + readable(run, made.tokens[0]))
        return 0
    if args.length_penalty is not None:
        raise InputError("--length-penalty belongs to a search: give --beams as well.")
    for i in range(args.samples):
        seed = None if args.seed is None else args.seed + i
        if args.samples > 1:
            print(f"{'' if i == 0 else chr(10)}-- sample {i + 1}")
        for piece in continue_text(
            run,
            args.prompt,
            max_new_tokens=args.tokens,
            temperature=0.8 if args.temperature is None else args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=seed,
        ):
            sys.stdout.write(piece)
            sys.stdout.flush()
        print()
    return 0


def set_precision(run: LoadedRun, asked: str) -> None:
    """Cast the weights for decoding, which reads all of them for every token; on a GPU, say which were chosen."""
    device = run.device
    if asked == "auto":
        asked = precision_of(run.config, device) if device.type == "cuda" else "as stored"
    if asked in ("bf16", "fp32"):
        run.model.to(torch.bfloat16 if asked == "bf16" else torch.float32)
    if device.type == "cuda":
        print(f"decoding on {device} with weights in {asked}", file=sys.stderr)
