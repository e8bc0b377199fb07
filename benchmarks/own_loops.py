"""Loops of one's own beside the trainer, on one GPU: size small, 32 sequences of 1,024 tokens, bf16 autocast.

    python benchmarks/own_loops.py [vanilla,yurii] [--steps 30] [--out FILE.json]

`trainer` is what `stepformer train` does: a recorded pass and our optimizers. All others take AdamW of torch, fused:
`recorded` a plain loop with `sf.record`, `compiled` one with `torch.compile(model)`, `eager` one with neither;
`transformers` its Trainer with torch_compile, `unfiltered` the same without logging_nan_inf_filter, which waits for the
GPU in every step; `lightning` its Trainer around the compiled model. Ratios: to `trainer`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stepformer as sf
from stepformer.ops.pass_graphs import CapturedPass
from stepformer.optim import OptimConfig, Optimizers

ROWS, CONTEXT, VOCABULARY, WARM_UP = 32, 1024, 50_304, 5
Step = Callable[[], Any]


def made(name: str) -> Any:
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return sf.build(name, size="small", device="cuda", seed=0)


def data() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(0)).cuda()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def timed(step: Step, steps: int) -> float:
    """Thousand tokens a second of whole steps."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return 1e-3 * ROWS * CONTEXT * steps / (time.perf_counter() - begin)


def loss_of(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        loss: Tensor = model(tokens, targets, loss_only=True).loss
    return loss


def trainer(name: str, steps: int) -> float:
    model, (tokens, targets) = made(name), data()
    optimizers = Optimizers(model, OptimConfig(), steps=1000)
    trained = [p for p in model.parameters() if p.requires_grad]
    own = CapturedPass(
        lambda x, y: model(x, y, loss_only=True).loss, trained, lambda: torch.autocast("cuda", torch.bfloat16)
    )
    done = 0

    def step() -> None:
        nonlocal done
        own.run(tokens, targets, True)
        optimizers.clip()
        optimizers.step(done)
        done += 1

    return timed(step, steps)


def recorded(name: str, steps: int) -> float:
    model, (tokens, targets) = made(name), data()
    optimizer, run = adamw(model), sf.record(model, autocast=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad()
        run(tokens, targets)
        optimizer.step()

    return timed(step, steps)


def plain(name: str, steps: int, compiled: bool) -> float:
    model, (tokens, targets) = made(name), data()
    optimizer, run = adamw(model), torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad()
        loss_of(run, tokens, targets).backward()
        optimizer.step()

    return timed(step, steps)


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The same batch of tokens again and again."""

    def __init__(self, count: int) -> None:
        self.tokens, self.count = data()[0].cpu(), count

    def __len__(self) -> int:
        return self.count * ROWS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[i % ROWS], "labels": self.tokens[i % ROWS]}


class Clock:
    """When steps end, the first ones left out."""

    def __init__(self) -> None:
        self.begin, self.steps = 0.0, 0

    def tick(self, step: int) -> None:
        if step == WARM_UP:
            torch.cuda.synchronize()
            self.begin = time.perf_counter()

    def speed(self, steps: int) -> float:
        torch.cuda.synchronize()
        return 1e-3 * ROWS * CONTEXT * steps / (time.perf_counter() - self.begin)


def transformers(name: str, steps: int, **more: Any) -> float:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from stepformer.exchange.huggingface.modeling import StepformerForCausalLM

    clock = Clock()

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.tick(state.global_step)

    model = StepformerForCausalLM.of(made(name))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps + WARM_UP, per_device_train_batch_size=ROWS, bf16=True,
            torch_compile=True, optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_steps=1000,
            dataloader_num_workers=2, disable_tqdm=True, max_grad_norm=0.0, **more,
        )  # fmt: skip
        run = Trainer(model=model, args=arguments, train_dataset=Windows(steps + WARM_UP), callbacks=[Watch()])
        run.train()
    return clock.speed(steps)


def lightning(name: str, steps: int) -> float:
    import pytorch_lightning as pl

    clock, compiled = Clock(), torch.compile(made(name))

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = compiled

        def training_step(self, batch: dict[str, Tensor], _: int) -> Any:
            clock.tick(self.global_step)
            tokens = batch["input_ids"]
            return self.model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), loss_only=True).loss

        def configure_optimizers(self) -> Any:
            return adamw(self.model)

    class Longer(Windows):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            self.tokens = torch.cat([self.tokens, self.tokens[:, :1]], dim=1)

    loader = torch.utils.data.DataLoader(Longer(steps + WARM_UP), batch_size=ROWS, num_workers=2, pin_memory=True)
    run = pl.Trainer(
        max_steps=steps + WARM_UP, precision="bf16-mixed", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="gpu", devices=1,
    )  # fmt: skip
    run.fit(Module(), loader)
    return clock.speed(steps)


WAYS: dict[str, Callable[[str, int], float]] = {
    "trainer": trainer,
    "recorded": recorded,
    "compiled": lambda name, steps: plain(name, steps, True),
    "eager": lambda name, steps: plain(name, steps, False),
    "transformers": transformers,
    "unfiltered": lambda name, steps: transformers(name, steps, logging_nan_inf_filter=False),
    "lightning": lightning,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="?", default="vanilla,yurii", help="presets, a,b")
    parser.add_argument("--ways", default=",".join(WAYS), help="some of the ways, a,b")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", metavar="FILE", help="all numbers as JSON")
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for name in args.names.split(","):
        own = found.setdefault(name, {})
        for way in args.ways.split(","):
            begin = time.perf_counter()
            try:
                own[way] = WAYS[way](name, args.steps)
            except Exception as error:  # the others are still worth their time
                print(f"{name} {way}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                continue
            ratio = own[way] / own["trainer"] if "trainer" in own else float("nan")
            took = time.perf_counter() - begin
            print(
                f"{name:10s} {way:12s} {own[way]:7.1f} ktok/s  {ratio:.3f} of the trainer  ({took:.0f} s)", flush=True
            )
            if args.out:  # after every row: what is measured stays
                device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
                text = json.dumps({**device, "steps": args.steps, "ktok/s": found}, indent=1)
                Path(args.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
