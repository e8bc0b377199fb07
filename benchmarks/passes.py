"""How long the generated passes of architectures take, and the pass from the joint product to the heads.

A pass is what happens to the streams between two oracle calls (docs/performance.md). Each one that a model runs more
than once is timed forward and backward for 32 sequences of 1,024 tokens, width 768, in bf16, ten launches as one CUDA
graph.

    python benchmarks/passes.py                                   gd, yurii, adam, muon, two integrators
    python benchmarks/passes.py yurii embedding_skip=true         others, and settings for all of them
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

import torch

import stepformer as sf
from stepformer.base.words import merge
from stepformer.ops.graphs import Recorder
from stepformer.ops.heads_pass import How
from stepformer.ops.row_passes import Pass, compiled

USUAL = ("vanilla", "yurii", "adam", "muon", "symp-exp-euler", "symp-ab2")
BATCH, TIME, WIDTH, HEADS = 32, 1024, 768, 12
NARROW = torch.bfloat16
LAUNCHES = 10


def microseconds(work: Callable[[], object]) -> float:
    """Of one launch, the mean of two replays of several."""
    replay, _ = Recorder().record(lambda: [work() for _ in range(LAUNCHES)], warm_up=1)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replay()
    begin.record()
    for _ in range(2):
        replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end) / (2 * LAUNCHES)


def rows(count: int) -> list[torch.Tensor]:
    return [torch.randn(BATCH, TIME, WIDTH, device="cuda", dtype=NARROW) for _ in range(count)]


def measured(own: Pass) -> tuple[float, float]:
    """Forward and backward, in microseconds."""
    tensors = rows(len(own.rows)) + [torch.rand(BATCH, TIME, device="cuda") for _ in own.stats]
    tensors += [torch.rand(WIDTH, device="cuda") + 0.5 for _ in own.vectors]
    tensors += [torch.rand(own.program.numbers, device="cuda") + 0.5] if own.count else []
    outs, statistics = own.forward(tensors, NARROW, NARROW, True)
    named = {**dict(zip(own.names, tensors, strict=True)), **dict(zip(own.outputs, outs, strict=True))}
    kept = [named[k] for k in own.kept]
    parameters = {k: named[k] for k in own.names if not k.startswith("r")}
    grads = dict(zip(own.reached, rows(len(own.reached)), strict=True))
    dtypes, shape = tuple(t.dtype for t in tensors), (BATCH, TIME, WIDTH)
    return (
        microseconds(lambda: own.forward(tensors, NARROW, NARROW, True)),
        microseconds(lambda: own.gradients(grads, kept, statistics, parameters, tuple(own.names), dtypes, shape)),
    )


def main(words: list[str]) -> None:
    settings = merge({}, [word for word in words if "=" in word], "model")
    for name in [word for word in words if "=" not in word] or USUAL:
        model = sf.build(
            name, n_layer=4, n_head=HEADS, d_model=WIDTH, context=TIME, vocab_size=128, device="meta", **settings
        )
        plan = model.plan()
        if isinstance(plan, str):
            print(f"{name}: as written, since {plan}")
            continue
        alike = Counter((step.program.text, step.handed, step.borrows) for step in plan.passes())
        for (text, handed, borrows), count in alike.items():
            if count > 1 or borrows:
                own = compiled(text, handed, borrows)
                forward, backward = measured(own)
                vectors = f"{len(own.rows)} rows in, {len(own.outputs)} out, {len(own.kept)} kept"
                print(f"{name:20} {vectors:28} forward {forward:6.1f} us, backward {backward:6.1f} us", flush=True)
    product, weights, (earlier, *grads) = torch.cat(rows(3), dim=-1), torch.rand(4, device="cuda"), rows(4)
    print(f"{'joining dq, dk, dv':49} {'':14} backward {microseconds(lambda: torch.cat(grads, -1)):6.1f} us")
    for what, eps, rotary, mixed in (
        ("rotation", None, True, False),
        ("QK-norm", 1e-5, False, False),
        ("both", 1e-5, True, False),
        ("value residual", None, False, True),
        ("all three", 1e-5, True, True),
    ):
        how, mix = How(HEADS, eps, rotary), (weights, earlier) if mixed else (None, None)
        _, scales = how.forward(product, *mix)
        forward = microseconds(lambda how=how, mix=mix: how.forward(product, *mix))  # type: ignore[misc]
        backward = microseconds(
            lambda how=how, mix=mix, scales=scales: how.backward([*grads], mix[1], product, *mix, scales)  # type: ignore[misc]
        )
        print(f"{what:49} forward {forward:6.1f} us, backward {backward:6.1f} us", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
