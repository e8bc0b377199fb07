"""Measures one checkout on the CPU in a process of its own; run as a file, so that it can measure any other checkout.

It uses only what every version of the package has had: `build`, `ParallelModel`, `Optimizers` and `generate`. The job
comes as JSON in the first argument, the result goes to standard output.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    job = json.loads(sys.argv[1])
    import torch

    import stepformer as sf
    from stepformer.optim import OptimConfig, Optimizers
    from stepformer.training.parallel import ParallelModel, World

    found: dict[str, Any] = {"where": sf.__file__, "results": {}}
    for name in job["names"]:
        model = sf.build(name, size=job["size"], seed=0, **job["settings"])
        config = model.config
        micro_batch = job["micro_batch"] or max(1, 1024 // config.context)
        window = torch.randint(
            config.vocab_size, (micro_batch, config.context + 1), generator=torch.Generator().manual_seed(0)
        )
        optimizers = Optimizers(model, OptimConfig(), 1000)
        inputs, targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()
        parallel = ParallelModel(model, World(0, 1, torch.device("cpu")), "ddp", False)  # the loss as trainers take it

        def gradients(loss: Any = parallel.loss, batch: Any = (inputs, targets), optimizers: Any = optimizers) -> None:
            optimizers.zero_grad()
            loss(*batch).backward()

        def update(optimizers: Any = optimizers) -> None:
            optimizers.clip()
            optimizers.step(0)

        def decode(model: Any = model, window: Any = window) -> None:
            model.generate([window[0, :8].tolist()], max_new_tokens=24, temperature=0.0)

        times = {"forward + backward": milliseconds(gradients, job["steps"])}
        times["optimizer"] = milliseconds(update, job["steps"])
        if job["decode"]:
            times["decode 24 tokens"] = milliseconds(decode, max(3, job["steps"] // 3))
        found["results"][name] = times
    print(json.dumps(found))


def milliseconds(work: Callable[[], None], count: int) -> float:
    """The median of `count` calls, after two that do not count."""
    times = []
    for i in range(count + 2):
        began = time.perf_counter()
        work()
        if i >= 2:
            times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


if __name__ == "__main__":
    main()
