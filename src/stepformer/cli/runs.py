"""`stepformer generate`."""

from __future__ import annotations

import argparse
import sys

import torch

from stepformer.base.errors import InputError
from stepformer.cli.hybrids import HYBRID, hybrid_of
from stepformer.cli.options import CHECKPOINT, DEVICE, RUN, check, command, given, harmless, option, tell_faults
from stepformer.training import load_run
from stepformer.training.loading import LoadedRun
from stepformer.training.text import continue_text, prompt_ids, readable


def run_generate(args: argparse.Namespace) -> int:
    run = hybrid_of(args, load_run(args.folder, args.checkpoint, args.device))
    tell_faults(args.folder, run.model.config)
    args.prompt = sys.stdin.read().rstrip("\n") if args.prompt == "-" else args.prompt
    set_precision(run, args.precision)
    check(args, "samples")
    if args.beams is not None:
        if args.samples > 1:
            raise InputError(f"Beam search has one result: --samples {args.samples} does not go with --beams.")
        named = given(args, "temperature", "top_k", "top_p", "seed", "length_penalty")
        asked = {name: value for name, value in named.items() if value is not None}
        ids, stop = prompt_ids(run, args.prompt), run.tokenizer.eot
        made = run.model.generate([ids], beams=args.beams, max_new_tokens=args.tokens, stop=stop, **asked)
        print(harmless(args.prompt + readable(run, made.tokens[0])))
        return 0
    if args.length_penalty is not None:
        raise InputError("--length-penalty belongs to a search: give --beams as well.")
    for i in range(args.samples):
        seed = None if args.seed is None else args.seed + i
        if args.samples > 1:
            print(f"{'' if i == 0 else chr(10)}-- sample {i + 1}")
        drawing = given(args, "top_k", "top_p") | {"temperature": 0.8 if args.temperature is None else args.temperature}
        for piece in continue_text(run, args.prompt, max_new_tokens=args.tokens, seed=seed, **drawing):
            sys.stdout.write(harmless(piece))
            sys.stdout.flush()
        print()
    return 0


def set_precision(run: LoadedRun, asked: str) -> None:
    """Cast the weights for decoding, which reads all of them for every token; on a GPU, say which were chosen."""
    device = run.device
    if asked == "auto":
        asked = run.config.precision_on(device) if device.type == "cuda" else "as stored"
    if asked in ("bf16", "fp32"):
        run.model.to(torch.bfloat16 if asked == "bf16" else torch.float32)
    if device.type == "cuda":
        print(f"decoding on {device} with weights in {asked}", file=sys.stderr)


add_generate = command(
    run_generate,
    RUN,
    option(
        "prompt PROMPT",
        "text to continue, as the beginning of a document (default: a new document; -: what is piped in)",
        nargs="?",
        default="",
    ),
    option("--tokens N", "at most so many new tokens (200)", type=int, default=200),
    option("--temperature T", "0 is greedy (0.8)", type=float),
    option("--top-k K", "draw from the K most likely tokens", type=int),
    option("--top-p P", "draw from the likeliest tokens that make up P", type=float),
    option("--seed", "for the same text again", type=int),
    option("--samples N", "how many continuations (1)", type=int, default=1),
    option("--beams N", "draw nothing: the best text a search with N beams finds", type=int),
    option("--length-penalty P", "with --beams: scores are divided by length^P (default: 1)", type=float),
    DEVICE,
    option(
        "--precision",
        "of the weights; auto: bf16 on a GPU for a run that was trained so, else as they are",
        choices=("auto", "bf16", "fp32"),
        default="auto",
    ),
    CHECKPOINT,
    HYBRID,
)
