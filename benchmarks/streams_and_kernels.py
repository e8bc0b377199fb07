"""300 training steps of one architecture with and without kernels, and with bf16 and fp32 streams, on paired seeds.

python benchmarks/streams_and_kernels.py CORPUS [--name yurii] [--with key=value ...] [--steps 300] [--seeds 3]

CORPUS is a folder made by `stepformer prepare`. Every seed draws the weights and the order of the data; the variants
of one seed differ in nothing else. Noise is what the seeds show, and what two runs of the same variant show.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stepformer as sf
from stepformer.data.batches import Batches
from stepformer.data.corpus import Corpus
from stepformer.ops import kernels
from stepformer.ops.pass_graphs import CapturedPass
from stepformer.optim import OptimConfig, Optimizers
from stepformer.training.evaluation import evaluate
from stepformer.training.parallel import World

VARIANTS = {
    "kernels, bf16 streams": (True, torch.bfloat16),
    "kernels, fp32 streams": (True, torch.float32),
    "plain, fp32 streams": (False, torch.float32),
    "plain, fp32 streams, again": (False, torch.float32),
}


def train(args: argparse.Namespace, corpus: Corpus, seed: int, fused: bool, streams: torch.dtype) -> Any:
    device = torch.device("cuda")
    words = {
        key: tomllib.loads(f"value = {value}")["value"] for key, _, value in (w.partition("=") for w in args.words)
    }
    config = sf.model_config(args.name, **{"size": args.size, "vocab_size": 50_304, **words})
    model = sf.Model(config, seed=seed, device=device)
    model.stream_dtype = streams
    optimizers = Optimizers(model, OptimConfig(lr_embedding=3e-3, lr_norm=3e-3, warmup=args.steps // 10), args.steps)
    batches = Batches(corpus.split("train"), config.context, args.batch, seed)
    losses = []

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(inputs, targets, loss_only=True).loss
        assert loss is not None
        return loss

    trained = [p for p in model.parameters() if p.requires_grad]
    recorded = CapturedPass(loss_of, trained, lambda: torch.autocast("cuda", torch.bfloat16))
    begin = time.perf_counter()
    with contextlib.nullcontext() if fused else kernels.off():
        for t in range(args.steps):
            inputs, targets = (part.to(device) for part in batches.rows(t, 0, args.batch))
            losses.append(recorded.run(inputs, targets, first=True).clone())
            optimizers.clip()
            optimizers.step(t)
        took = time.perf_counter() - begin
        found = evaluate(
            model,
            corpus.split("val"),
            context=config.context,
            tokens=args.eval_tokens,
            micro_batch=args.batch,
            world=World(0, 1, device),
            autocast=torch.bfloat16,
        )
    return {"losses": torch.stack(losses).tolist(), "val_loss": found.val_loss, "seconds": took}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("corpus")
    parser.add_argument("--name", default="yurii")
    parser.add_argument(
        "--with",
        dest="words",
        nargs="*",
        default=[],
        metavar="key=value",
        help="settings of the model, in TOML: words in quotes",
    )
    parser.add_argument("--size", default="small")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--eval-tokens", type=int, default=131_072)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    corpus = Corpus(args.corpus)
    runs: dict[str, list[Any]] = {name: [] for name in VARIANTS}
    for seed in range(args.seeds):
        for name, (fused, streams) in VARIANTS.items():
            runs[name].append(train(args, corpus, seed, fused, streams))
            last = runs[name][-1]
            print(f"seed {seed}  {name:28s} validation {last['val_loss']:.4f}  {last['seconds']:.0f} s", flush=True)
            if args.out:
                args.out.write_text(json.dumps({"settings": vars(args) | {"out": None}, "runs": runs}, default=str))
    base = "plain, fp32 streams"
    print(f"\n{args.name}, {args.size}, {args.steps} steps of {args.batch} sequences, {args.seeds} paired seeds, nats:")
    for name in VARIANTS:
        if name == base:
            continue
        pairs = list(zip(runs[name], runs[base], strict=True))
        val = [a["val_loss"] - b["val_loss"] for a, b in pairs]
        tail = [np.mean(np.subtract(a["losses"], b["losses"])[-50:]) for a, b in pairs]
        largest = max(float(np.abs(np.subtract(a["losses"], b["losses"])).max()) for a, b in pairs)
        spread = statistics.stdev(val) if len(val) > 1 else float("nan")
        print(
            f"{name:28s} minus {base}: validation {statistics.mean(val):+.4f} (std {spread:.4f}), last 50 steps "
            f"{statistics.mean(map(float, tail)):+.4f}, largest difference of a step {largest:.3f}"
        )
    values = [run["val_loss"] for run in runs[base]]
    if len(values) > 1:
        print(f"between seeds: std of the validation loss {statistics.stdev(values):.4f}")


if __name__ == "__main__":
    main()
