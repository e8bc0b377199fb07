"""`stepformer export` and `stepformer import`."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_export(commands: Any, common: argparse.ArgumentParser) -> None:
    sub = commands.add_parser(
        "export",
        parents=[common],
        description="Write a run's weights, tokenizer and a model card with its numbers into a folder that "
        "transformers loads and `stepformer import` reads again.",
        epilog="examples:\n  stepformer export runs/yurii-tales-s42 --out yurii-tales\n"
        "  stepformer export runs/vanilla-tales-s42 --out plain-gpt --format gpt2 --dtype bf16",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.add_argument("folder", metavar="RUN", help="run folder")
    sub.add_argument("--out", required=True, metavar="DIR", help="folder to write; an earlier export is replaced")
    sub.add_argument("--checkpoint", choices=("best", "last"), default="best", help="which weights (best)")
    sub.add_argument("--dtype", choices=("fp32", "bf16"), help="of the weights in the file (as they are)")
    sub.add_argument(
        "--format",
        choices=("stepformer", "gpt2"),
        default="stepformer",
        help="gpt2: a plain GPT as GPT2LMHeadModel, to be loaded without stepformer (stepformer)",
    )
    sub.add_argument("--allow-nan", action="store_true", help="also weights that are not finite numbers")
    sub.set_defaults(run=run_export)


def add_import(commands: Any, common: argparse.ArgumentParser) -> None:
    sub = commands.add_parser(
        "import",
        parents=[common],
        description="Make a run from a checkpoint of another program, to generate from, evaluate, diagnose or train "
        "on. Files are read without running anything in them, and every tensor must find its place.",
        epilog="examples:\n  stepformer import out/ckpt.pt --out runs/nanogpt\n"
        "  stepformer import best.pt --out runs/adam --tokenizer gpt2\n"
        "  stepformer import gpt2-folder --out runs/gpt2\n  stepformer import exported --out runs/again",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.add_argument("source", metavar="SOURCE", help="a .pt file, or a folder with config.json and weights")
    sub.add_argument("--out", required=True, metavar="RUN", help="run folder to make")
    sub.add_argument(
        "--tokenizer", metavar="NAME|DIR", help="gpt2, bytes or a folder with a tokenizer (default: the source's own)"
    )
    sub.add_argument("--heads", type=int, metavar="N", help="attention heads, for files that do not say (width / 64)")
    sub.add_argument("--json", action="store_true", help="machine-readable output")
    sub.set_defaults(run=run_import)


def run_export(args: argparse.Namespace) -> int:
    from stepformer.exchange.huggingface import export_run

    out = export_run(
        args.folder, args.out, args.checkpoint, dtype=args.dtype, form=args.format, allow_nan=args.allow_nan
    )
    print(f"written: {', '.join(sorted(path.name for path in out.iterdir()))}")
    where = json.dumps(str(out), ensure_ascii=False)
    print(f"load it with AutoModelForCausalLM.from_pretrained({where}); README.md says how, and wants a licence")
    return 0


def run_import(args: argparse.Namespace) -> int:
    from stepformer.exchange.importing import import_checkpoint

    made = import_checkpoint(
        args.source, args.out, tokenizer=args.tokenizer, heads=args.heads, plugins=tuple(args.plugin)
    )
    if args.json:
        print(
            json.dumps(
                {"run": str(made.folder), "title": made.title, "parameters": made.parameters, "imported": made.record}
            )
        )
        return 0
    loss = ""
    if made.record["val_loss"] is not None:
        tokens = made.record.get("val_tokens")
        on = f"on {tokens:,} tokens" if isinstance(tokens, int) else "tokens not recorded"
        loss = f", validation loss {made.record['val_loss']:.4f} as recorded, {on}"
    print(f"{args.source} is {made.record['kind']}: {made.title}, {made.parameters:,} parameters")
    print(f"step {made.record['step']:,}{loss}")
    if "heads" in made.record:
        print(f"heads: {made.record['heads']} (the file does not say)")
    if "biases" in made.record:
        print(f"biases: {made.record['biases']}")
    print(f"written: {made.folder}")
    return 0
