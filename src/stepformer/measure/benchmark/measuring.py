"""One architecture measured: forward and backward pass, optimizer, whole step, memory, decoding."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from stepformer.decoding.sampling import Generation, stream
from stepformer.measure.benchmark.planning import BenchSettings, Case
from stepformer.measure.benchmark.timing import Limit, profile, spread, timed
from stepformer.model import Model
from stepformer.model.engines.steps import BEHIND
from stepformer.ops import kernels
from stepformer.ops.pass_graphs import CapturedPass
from stepformer.optim import OptimConfig, Optimizers
from stepformer.training.evaluation import autocasting
from stepformer.training.memory import estimate_memory
from stepformer.training.parallel import ParallelModel, World, prepare_compiler
from stepformer.training.speed import flops_per_token, peak_flops

WARM_TOKENS = 24
DOCUMENT = 300  # tokens in a document on average, where the architecture knows documents
BATCHES = 4  # different inputs in turn, so that no step finds its data in a cache
Stage = Callable[[str], None]
Work = Callable[[], Any]


def measure(
    case: Case,
    settings: BenchSettings,
    product: float,
    record: dict[str, Any],
    *,
    stage: Stage = lambda _: None,
    beside: Work | None = None,
) -> Work | None:
    """Fill `record` step by step, so that whatever ends this early leaves what was measured before.

    `beside` is the baseline's step, taken in turn with every timed step. On the CPU, which other programs use as well,
    a ratio means nothing otherwise. Returns this one's step for others to be measured beside; None on CUDA, where the
    device is ours and its memory is needed, and when compiled, since compiled code is forgotten in between.
    """
    limit, notes = Limit(settings.seconds), list[str]()
    while True:
        record.clear()
        record |= {"label": case.label, "config": case.config.to_dict(), "hash": case.config.hash}
        record |= {"context": case.config.context, "micro_batch": case.micro_batch, "kernels": case.kernels}
        record |= {"streams": case.streams, "compiled": case.compiled(settings), "graph": settings.graph}
        record |= {"notes": [*notes], "error": None}
        free(settings)
        try:
            with kernels.off() if case.kernels == "off" else contextlib.nullcontext():
                return _Bench(case, settings, product, record, stage, limit, beside).run()
        except torch.OutOfMemoryError:
            tried, smaller = case.micro_batch, case.micro_batch // 2
        except Exception as error:
            record["error"] = _sentence(error, case.compiled(settings) and "compile_seconds" not in record)
            return None
        finally:
            record["seconds"] = round(limit.used, 2)
        if settings.micro_batch is not None or not smaller:
            record["error"] = f"out of memory at micro-batch {tried}."
            return None
        case = replace(case, micro_batch=smaller)
        notes = [f"micro-batch {tried} did not fit; measured at {smaller}"]


def free(settings: BenchSettings) -> None:
    """Forget compiled code and give memory back before the next architecture."""
    if settings.compile is not False:
        torch._dynamo.reset()
    gc.collect()
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass
class _Bench:
    """A built model and what is measured on it."""

    case: Case
    settings: BenchSettings
    product: float
    record: dict[str, Any]
    stage: Stage
    limit: Limit
    beside: Work | None

    def __post_init__(self) -> None:
        case, settings = self.case, self.settings
        self.device = settings.device
        self.on_cuda = self.device.type == "cuda"
        self.autocast = torch.bfloat16 if self.on_cuda else None
        self.tokens = case.micro_batch * case.config.context
        self.held = torch.cuda.memory_allocated() if self.on_cuda else 0
        self.model = Model(case.config, seed=0, device=self.device)
        self.model.stream_dtype = torch.bfloat16 if case.streams == "bf16" else torch.float32
        self.parallel = ParallelModel(self.model, World(0, 1, self.device), "ddp", compiled=False)
        self.compiled = case.compiled(settings)
        if self.compiled:
            prepare_compiler(self.model, self.device)
            self.parallel.run = torch.compile(self.model, fullgraph=True, dynamic=False)
        self.captured: CapturedPass | None = None
        if settings.graph:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.captured = CapturedPass(self.parallel.loss, trained, lambda: autocasting(self.device, self.autocast))
        generator = torch.Generator().manual_seed(0)
        shape = (BATCHES, case.micro_batch, case.config.context + 1)
        windows = torch.randint(case.config.real_vocab or case.config.vocab_size, shape, generator=generator)
        separator = case.config.document_separator
        if separator is not None:
            windows = windows.masked_fill(torch.rand(shape, generator=generator) < 1 / DOCUMENT, separator)
        self.batches = [[half.contiguous().to(self.device) for half in (w[:, :-1], w[:, 1:])] for w in windows]
        self.turn = self.updates = 0
        self.optimizers = Optimizers(self.model, OptimConfig(name=settings.optimizer), steps=1000)  # type: ignore[arg-type]
        self.record |= {"parameters": self.model.num_parameters(), "flops_per_token": flops_per_token(self.model)}

    def run(self) -> Work | None:
        """Measure everything that is asked for; returns the step where others may be measured beside it."""
        self.forward_backward()
        if self.settings.profile and self.time_left("profile"):
            self.profiled()
        if self.settings.full_step and self.time_left("full step"):
            self.full_step()
        if self.settings.decode_tokens and self.time_left("decoding"):
            self.decoding()
        return None if self.on_cuda or self.compiled else self.fresh_gradients

    def time_left(self, what: str) -> bool:
        if self.limit.passed:
            self.note(f"{what} not measured: the limit of {self.limit.seconds:g} s was reached")
        return not self.limit.passed

    def note(self, text: str) -> None:
        self.record["notes"].append(text)

    def gradients(self, first: bool = False) -> Tensor:
        """Forward pass, loss and backward pass of one micro-batch, as the trainer runs them."""
        inputs, targets = self.batches[self.turn % BATCHES]
        self.turn += 1
        if self.captured is not None:
            return self.captured.run(inputs, targets, first)
        with autocasting(self.device, self.autocast):
            loss = self.parallel.loss(inputs, targets)
        loss.backward()
        return loss.detach()

    def fresh_gradients(self) -> Tensor:
        self.optimizers.zero_grad()
        return self.gradients(first=True)

    def update(self) -> None:
        self.optimizers.clip()
        self.optimizers.step(self.updates)
        self.updates += 1

    def whole_step(self) -> None:
        self.fresh_gradients()
        self.update()

    def repeat(self, work: Work, count: int) -> dict[str, Any]:
        """Times of `work`, as often as asked or as the limit affords."""
        first = timed(work, 1, self.device)[0]
        return spread(timed(work, self.limit.affords(count, first), self.device))

    def in_turn(self, beside: Work) -> dict[str, Any]:
        """Times of our steps, each after one of the baseline's, which are kept too."""
        times: tuple[list[float], list[float]] = ([], [])
        pair = [timed(work, 1, self.device)[0] for work in (beside, self.fresh_gradients)]
        for _ in range(self.limit.affords(self.settings.steps, sum(pair))):
            for kept, work in zip(times, (beside, self.fresh_gradients), strict=True):
                kept += timed(work, 1, self.device)
        self.record["beside"] = spread(times[0])
        return spread(times[1])

    def forward_backward(self) -> None:
        record, settings = self.record, self.settings
        self.stage("compiling" if self.compiled else "warming up")
        began = time.perf_counter()
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        loss = self.fresh_gradients()
        record["loss"] = float(loss)
        record["compile_seconds" if self.compiled else "first_step_seconds"] = time.perf_counter() - began
        timed(self.fresh_gradients, settings.warmup, self.device)
        self.stage("forward + backward")
        if self.on_cuda and self.captured is None:  # a replay allocates nothing: its peak is that of the recording
            self.optimizers.zero_grad()
            torch.cuda.reset_peak_memory_stats()
        work, beside = self.fresh_gradients, self.beside
        found = self.repeat(work, settings.steps) if beside is None else self.in_turn(beside)
        record["forward_backward"] = found
        if self.on_cuda:
            peak_bytes = torch.cuda.max_memory_allocated() - self.held
            record["memory"] = {"peak_bytes": peak_bytes, "how": "measured", "held_before_bytes": self.held}
        else:
            estimate = estimate_memory(self.case.config, self.case.micro_batch, optimizer_copies=0)
            record["memory"] = {"peak_bytes": estimate.training, "how": "estimated"}
        speed = record["tokens_per_second"] = 1000 * self.tokens / found["median_ms"]
        rate = record["flops_per_token"] * speed
        peak, source = peak_flops(self.device)
        record |= {"mfu": rate / peak, "mfu_of": source, "of_product": rate / self.product}
        if not torch.isfinite(loss):
            self.note(f"the loss is {float(loss):g}")

    def full_step(self) -> None:
        """The optimizer alone, then whole steps, then micro-batches whose gradients are added up."""
        record, settings = self.record, self.settings
        self.stage("optimizer")
        self.fresh_gradients()
        timed(self.update, 2, self.device)  # the first one makes its memory
        count = max(3, settings.steps // 2)
        optimizer = record["optimizer"] = {"name": settings.optimizer, **self.repeat(self.update, count)}
        self.stage("full step")
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        whole = record["full_step"] = self.repeat(self.whole_step, count)
        whole["tokens_per_second"] = 1000 * self.tokens / whole["median_ms"]
        if self.on_cuda:
            whole["peak_bytes"] = torch.cuda.max_memory_allocated() - self.held
        adding = record["accumulating"] = self.repeat(self.gradients, count)
        parts = max(1, round(settings.batch_tokens / self.tokens))
        # the first micro-batch of a step writes its gradients, the others add to them
        ms = record["forward_backward"]["median_ms"] + (parts - 1) * adding["median_ms"] + optimizer["median_ms"]
        rates = {"tokens_per_second": 1000 * parts * self.tokens / ms, "optimizer_share": optimizer["median_ms"] / ms}
        record["batch"] = {"tokens": parts * self.tokens, "micro_batches": parts, "ms": ms, **rates}

    def decoding(self) -> None:
        """Greedy, cached, one row or several: the time between tokens, after a prompt that is not counted.

        On CUDA the weights are made bf16, as a trained model is served; it is the last thing they are used for.
        """
        settings, context = self.settings, self.case.config.context
        self.stage("decoding")
        self.optimizers.zero_grad()
        if self.on_cuda:
            self.model.to(torch.bfloat16)
        prompt = min(settings.prompt_tokens, context // 2)
        count = min(settings.decode_tokens, context - prompt)
        some = torch.cat([tokens for tokens, _ in self.batches])
        ids = some[: settings.decode_rows, :prompt].tolist()
        self.decoded(ids, count, WARM_TOKENS)
        marks, ordinary = self.decoded(ids, count, count)
        ms = [1000 * (b - a) for a, b in pairwise(marks)]
        if not ms:
            return
        # a recorded step runs ahead of who reads the tokens: so many were made before the first was seen
        ahead = 0 if ordinary else min(BEHIND, len(ms) - 1)
        self.record["decode"] = {
            "prompt": prompt,
            "rows": len(ids),
            "tokens": len(marks),
            "tokens_per_second": 1000 * len(ids) * (len(ms) - ahead) / sum(ms),
            "ordinary": ordinary,
            **spread(ms),
        }
        if self.on_cuda and ordinary and self.case.kernels == "on":
            self.note(f"decoded without a recorded step: {ordinary}")

    def decoded(self, ids: list[list[int]], count: int, enough: int) -> tuple[list[float], str | None]:
        """When each token came, until there are `enough` or the limit is reached; and why no recording was used."""
        result, marks = Generation([], []), []
        steps = stream(self.model, ids, max_new_tokens=count, temperature=0, result=result)
        for _ in steps:
            marks.append(time.perf_counter())
            if len(marks) >= enough:
                break
            if self.limit.passed and len(marks) >= WARM_TOKENS:
                self.note(f"decoding ended after {len(marks)} tokens: the limit was reached")
                break
        steps.close()  # type: ignore[attr-defined]
        return marks, result.ordinary

    def profiled(self) -> None:
        self.stage("profiling")
        try:
            self.record["profile"] = profile(self.fresh_gradients, self.device, "forward + backward")
            if self.settings.full_step:
                self.whole_step()
                self.record["profile_optimizer"] = profile(self.update, self.device, "optimizer")
        except RuntimeError as error:
            self.note(f"no profile: {str(error).splitlines()[0]}")


def _sentence(error: Exception, compiling: bool) -> str:
    """An exception as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return f"{'compiling failed' if compiling else 'failed'}: {type(error).__name__}: {text[:200]}"
