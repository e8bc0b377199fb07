"""`stepformer export` and `stepformer import`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stepformer.cli.options import CHECKPOINT, JSON, RUN, command, given, option
from stepformer.training.runs import RunFolder


def run_export(args: argparse.Namespace) -> int:
    from stepformer.exchange.huggingface import export_run

    chosen = given(args, "dtype", "allow_nan")
    out = export_run(args.folder, args.out, args.checkpoint, form=args.format, **chosen)
    print(f"written: {', '.join(sorted(path.name for path in out.iterdir()))}")
    where = json.dumps(str(out), ensure_ascii=False)
    print("load it in Python (README.md says more, and wants a licence):")
    if args.format == "stepformer":
        print("  import stepformer.exchange.huggingface")
        for plugin in RunFolder(Path(args.folder)).read().get("plugins", ()):
            print(f"  stepformer.base.plugins.load_plugin({json.dumps(plugin, ensure_ascii=False)})")
    print("  from transformers import AutoModelForCausalLM, AutoTokenizer")
    print(f"  model, tokenizer = AutoModelForCausalLM.from_pretrained({where}), AutoTokenizer.from_pretrained({where})")
    return 0


def run_import(args: argparse.Namespace) -> int:
    from stepformer.exchange.importing import import_checkpoint

    made = import_checkpoint(
        args.source, args.out, tokenizer=args.tokenizer, heads=args.heads, plugins=tuple(args.plugin)
    )
    if args.json:
        facts = {"run": str(made.folder), "title": made.title, "parameters": made.parameters}
        print(json.dumps({**facts, "imported": made.record}))
        return 0
    loss = ""
    if made.record["val_loss"] is not None:
        tokens = made.record.get("val_tokens")
        on = f"on {tokens:,} tokens" if isinstance(tokens, int) else "tokens not recorded"
        loss = f", validation loss {made.record['val_loss']:.4f} as recorded, {on}"
    print(f"{args.source} is {made.record['kind']}: {made.title}, {made.parameters:,} parameters")
    step = made.record["step"]
    print(f"{'step not recorded' if step is None else f'step {step:,}'}{loss}")
    if "heads" in made.record:
        print(f"heads: {made.record['heads']} (the file does not say)")
    if "biases" in made.record:
        print(f"biases: {made.record['biases']}")
    print(f"written: {made.folder}")
    return 0


add_export = command(
    run_export,
    RUN,
    option("--out DIR", "folder to write; an earlier export is replaced", required=True),
    CHECKPOINT,
    option("--dtype", "of the weights in the file (as they are)", choices=("fp32", "bf16")),
    option(
        "--format",
        "gpt2: a plain GPT as GPT2LMHeadModel, to be loaded without stepformer (stepformer)",
        choices=("stepformer", "gpt2"),
        default="stepformer",
    ),
    option("--allow-nan", "also weights that are not finite numbers"),
)

add_import = command(
    run_import,
    option("source SOURCE", "a .pt file, or a folder with config.json and weights"),
    option("--out RUN", "run folder to make", required=True),
    option("--tokenizer NAME|DIR", "gpt2, bytes or a folder with a tokenizer (default: the source's own)"),
    option("--heads N", "attention heads, for files that do not say (width / 64)", type=int),
    JSON,
)
