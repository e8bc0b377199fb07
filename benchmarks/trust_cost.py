"""What the trust region costs: time of a whole step with muon and with trust in both norms, at the size small.

    python benchmarks/trust_cost.py                  # on a GPU: 480 sequences of 1024 tokens a step, 15 micro-batches
    python benchmarks/trust_cost.py --size tiny --batch 4 --micro-batch 4 --probe 128 --device cpu

The passes are timed once; an optimizer is timed over one period of its factors (50 steps), after the first looks, which
come with every step. "look" is one with statistics and radius, "roots" one that also inverts the factors.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import stepformer as sf
from stepformer.ops.pass_graphs import CapturedPass
from stepformer.optim import OptimConfig, Optimizers
from stepformer.training.evaluation import autocasting

WARM_UP = 12  # steps: those in which every one is a look, and two more


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    begin = now()
    work()
    return now() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vanilla")
    parser.add_argument("--size", default="small")
    parser.add_argument("--batch", type=int, default=480, help="sequences in a step")
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--probe", type=int, default=2048, help="tokens of a look")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device)
    autocast = torch.bfloat16 if device.type == "cuda" else None
    cases: dict[str, dict[str, Any]] = {"muon": {"name": "muon", "qkv": "split"}}
    cases |= {
        f"trust, {norm}": {"name": "trust", "norm": norm, "probe": args.probe} for norm in ("frobenius", "spectral")
    }
    print(f"{args.model}, {args.size}, {args.batch} sequences a step; torch {torch.__version__}")
    if device.type == "cuda":
        print(torch.cuda.get_device_name(device))
    print("| optimizer | passes ms | optimizer ms | share % | plain ms | look ms | roots ms | GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for label, settings in cases.items():
        model = sf.build(args.model, size=args.size, seed=0, device=device)
        config = OptimConfig(**settings)
        rows = torch.randint(model.config.real_vocab or model.config.vocab_size, (64, model.config.context + 1))
        tokens, targets = rows[:, :-1].to(device), rows[:, 1:].to(device)
        count = max(1, config.probe // model.config.context)
        optimizers = Optimizers(model, config, 10_000, lambda *_, x=tokens, y=targets, n=count: (x[:n], y[:n]))
        trained = [p for p in model.parameters() if p.requires_grad]

        def loss_of(x: torch.Tensor, y: torch.Tensor, model: sf.Model = model) -> torch.Tensor:
            loss = model(x, y, loss_only=True).loss
            assert loss is not None
            return loss

        captured = CapturedPass(loss_of, trained, lambda: autocasting(device, autocast))
        micro = tokens[: args.micro_batch], targets[: args.micro_batch]

        def passes(micro: Any = micro, captured: CapturedPass = captured, trained: Any = trained) -> None:
            for i in range(-(-args.batch // args.micro_batch)):
                if device.type == "cuda":
                    captured.run(*micro, first=i == 0)
                    continue
                if i == 0:
                    for p in trained:
                        p.grad = None
                captured.loss_of(*micro).backward()

        passes()
        once = min(seconds(passes, device) for _ in range(3))
        times: dict[str, list[float]] = {"plain": [], "look": [], "roots": []}
        period = config.factor_every
        for t in [*range(WARM_UP), *range(period, 2 * period)]:
            if t < WARM_UP:
                passes()
            elif t == period and optimizers.trust is not None:  # as late in a run, when not every look inverts
                optimizers.trust.state[optimizers.trust.param_groups[0]["params"][0]]["looks"].fill_(1000)
            took = seconds(lambda t=t, o=optimizers: (o.clip(), o.step(t)), device)
            kind = "plain" if t % config.probe_every or optimizers.trust is None else "look" if t % period else "roots"
            if t >= period:
                times[kind].append(took)
        mean = sum(map(sum, times.values())) / period
        each = [f"{1e3 * sum(own) / len(own):.1f}" if own else "-" for own in times.values()]
        memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        share = 100 * mean / (mean + once)
        print(f"| {label} | {1e3 * once:.1f} | {1e3 * mean:.1f} | {share:.2f} | {' | '.join(each)} | {memory:.1f} |")
        del model, optimizers, captured, trained
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
