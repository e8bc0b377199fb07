"""Measures one checkout on the CPU, a step whenever it is told to; run as a file, so that it can be any checkout's.

It uses only what every version of the package has had: `build`, `ParallelModel`, `Optimizers` and `generate`. The job
is JSON in the first argument. Every line of standard input asks for one measurement, {"name": ..., "kind": ...}; the
answer is a line with its milliseconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import stepformer as sf
from stepformer.optim import OptimConfig, Optimizers
from stepformer.training.parallel import ParallelModel, World


def work_of(name: str, job: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """What can be measured of an architecture, by kind."""
    model = sf.build(name, size=job["size"], seed=0, **job["settings"])
    config = model.config
    micro_batch = job["micro_batch"] or max(1, 1024 // config.context)
    generator = torch.Generator().manual_seed(0)
    window = torch.randint(config.vocab_size, (micro_batch, config.context + 1), generator=generator)
    inputs, targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()
    parallel = ParallelModel(model, World(0, 1, torch.device("cpu")), "ddp", False)  # the loss as trainers take it
    optimizers = Optimizers(model, OptimConfig(), 1000)

    def gradients() -> None:
        optimizers.zero_grad()
        parallel.loss(inputs, targets).backward()

    def update() -> None:
        optimizers.clip()
        optimizers.step(0)

    def decode() -> None:
        model.generate([inputs[0, :8].tolist()], max_new_tokens=16, temperature=0.0)

    return {"forward + backward": gradients, "optimizer": update, "16 tokens decoded": decode}


def main() -> None:
    job = json.loads(sys.argv[1])
    print(json.dumps(sf.__file__), flush=True)
    name, works = "", {}
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["name"] != name:
            name, works = asked["name"], work_of(asked["name"], job)
        began = time.perf_counter()
        works[asked["kind"]]()
        print(json.dumps(1000 * (time.perf_counter() - began)), flush=True)


if __name__ == "__main__":
    main()
