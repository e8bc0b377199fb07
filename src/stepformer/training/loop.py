"""The training loop.

A step is a pure function of the weights, the optimizer's memory and the step number: batches and rates are computed
from it, and no random numbers are drawn. That is why a resumed run ends with the weights of an uninterrupted one.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from stepformer.base.errors import DivergedError, StepformerError
from stepformer.base.files import identity, remove_unfinished, write_json
from stepformer.catalogue import preset_of
from stepformer.data.batches import Batches
from stepformer.data.corpus import Corpus, TokenSplit
from stepformer.model import Model
from stepformer.ops.pass_graphs import CapturedPass
from stepformer.optim import Optimizers, scion_init
from stepformer.training import checkpoints as stored
from stepformer.training import evaluation
from stepformer.training.config import RunConfig
from stepformer.training.evaluation import Evaluation, autocasting
from stepformer.training.metrics import Clock, Display, Loggers, Metrics
from stepformer.training.parallel import LocalBatches, ParallelModel, World
from stepformer.training.runs import RunFolder
from stepformer.training.speed import flops_per_token, peak_flops
from stepformer.training.stopping import Stopped, Watch, warn_of_torchrun

NORM_WINDOWS = 8  # of the validation split that norms of streams are taken on
SLOW_SAVE = 5.0  # seconds after which somebody who waits for a stop is told about torchrun's patience


class Trainer:
    """One run: model, optimizer, data and folder, from wherever its last checkpoint left it."""

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        folder: RunFolder,
        world: World,
        label: str,
        also: Mapping[str, Corpus],
        *,
        quiet: bool,
    ) -> None:
        self.config, self.corpus, self.folder, self.world = config, corpus, folder, world
        self.label = label or config.title
        self.display = Display(f"{self.label} s{config.train.seed}", quiet=quiet or not world.is_main)
        self.config_hash = config.hash  # of what was asked for; a resumed run may compute it in other pieces
        train, device = config.train, world.device
        torch.use_deterministic_algorithms(train.deterministic)
        self.precision, self.autocast = config.precision_on(device), config.autocast_on(device)
        self.micro_batch = config.micro_batch(world)
        self.accumulation = train.batch // (world.size * self.micro_batch)
        rows = Batches(corpus.split("train"), config.model.context, train.batch, train.seed)
        self.batches = LocalBatches(rows, world, train.steps)
        self.val = corpus.split("val").half(train.eval_half)
        self.also = {name: other.split("val") for name, other in also.items()}
        evaluated = (self.val, *self.also.values())
        blocks = sum(evaluation.check_blocks(split, config.model.context, train.eval_tokens) for split in evaluated)
        self.eval_tokens = blocks * config.model.context
        self.eval_every = config.eval_every(self.eval_tokens)
        evaluation.check_blocks(self.val, config.model.context, min(train.first, default=train.eval_tokens))

        self.model = Model(config.model, seed=train.seed, device=device, dtype=config.dtype_on(device))
        self.model.stream_dtype = config.stream_dtype
        if config.optim.own_init:
            scion_init(self.model, config.optim)
        self.flops, self.peak = flops_per_token(self.model), peak_flops(device)[0] * world.size
        self.num_parameters = self.model.num_parameters()
        self.parallel = ParallelModel(self.model, world, train.parallel, train.compile, self._replays())
        self.optimizers = Optimizers(self.model, config.optim, train.steps, self.batches.first)
        self.captured = self._captured_pass()
        # where the decay of wsd begins a run can go on in other ways (stepformer.training.extending)
        self.branches = self.optimizers.schedule.decay_start if config.optim.schedule == "wsd" else None
        self.checkpoints = stored.Checkpoints(folder.checkpoints, world, keep=train.keep, stays=self.branches)
        self.metrics: Metrics | None = None  # of the main rank, while it trains
        self.loggers: Loggers | None = None
        self.logged = 0  # lines with losses that it had at the checkpoint
        self.run_id = ""
        self.step = 0  # completed steps
        self.clock = Clock()
        self._home: tuple[int, int] | None = None  # what the folder is, beside its name
        self.best: dict[str, Any] | None = None  # val_loss and step of the best evaluation
        self.last: Evaluation | None = None
        self.beside: dict[str, Any] = {}  # the losses on the other corpora, for metrics and result

    def begin_with(self, checkpoint: Path) -> None:
        """Take the weights of a checkpoint, perhaps of another run."""
        stored.load(checkpoint, "model", dict(self.model.named_parameters()))

    def load_latest(self) -> bool:
        """Continue from the newest whole checkpoint; False if there is none yet."""
        if self.world.is_main:
            remove_unfinished(self.folder.checkpoints)
        self.world.barrier()
        found = self.world.on_main(self.checkpoints.latest)
        if found is not None:
            path, state = found
            self.begin_with(path)
            stored.load(path, "optimizer", self.optimizers.tensors(create=True))
            self.step, self.clock = state["step"], Clock.of(state)
            self.best = self.world.on_main(partial(self.checkpoints.whole_best, state["best"]))
            self.logged = state.get("logged", 0) if self.step else 0
        if self.world.is_main:
            self.checkpoints.remove_after(self.step if found else -1)
        self.world.barrier()
        return found is not None

    def fit(self, watch: Watch) -> dict[str, Any]:
        """Train to the end; returns the result. Raises Stopped when the watch asks, after saving."""
        train, save_every = self.config.train, self.config.train.save_every or self.eval_every
        if self.world.is_main:
            # a run that starts again drops all lines of its first attempt, the evaluation before its first step too
            self.metrics = Metrics(self.folder.metrics, self.step or -1, self.logged)
            self.run_id = str(self.folder.read().get("id", ""))
            self.loggers = Loggers(self.config, self.folder.path, self.run_id)
            self.checkpoints.on_disk = self.metrics.saved
        self._home = identity(self.folder.path)
        self.display.begin(train.steps, self.step)
        separator, eot = self.config.model.document_separator, self.corpus.manifest["tokenizer"].get("eot")
        if separator is not None and eot is not None and separator != eot:
            self.display.note(
                f"{self.display.title}  document_separator = {separator} is not the corpus's end-of-text token, {eot}: "
                "documents begin somewhere else"
            )
        try:
            if self.step == 0:
                self._evaluate()
            while self.step < train.steps:
                self._train_step()
                if self.step % self.eval_every == 0 or self.step == train.steps:
                    self._evaluate()
                self._check_folder()
                asked = self.world.largest(watch.asked()) if self.step < train.steps else 0
                if asked:
                    self._stop(asked)
                if self.step % save_every == 0 or self.step in (train.steps, self.branches):
                    self.save()
            if self.last is None:
                self.display.note(f"{self.display.title}  was finished already; it is evaluated once more")
                self._evaluate(logged=False)
            self.checkpoints.wait()
            return self._result()
        finally:
            self.display.close()
            self.batches.close()
            self.checkpoints.settle()
            if self.metrics is not None and self.loggers is not None:
                self.metrics.close()
                self.loggers.close()

    def _stop(self, asked: int) -> NoReturn:
        """Save and stop; no rank leaves before the save is on disk, for torchrun then kills the others."""
        late = threading.Timer(SLOW_SAVE, warn_of_torchrun, [self.step])
        if self.world.is_main and "TORCHELASTIC_RUN_ID" in os.environ and asked != signal.SIGALRM:
            late.start()
        try:
            self.save()
            self.checkpoints.wait()
        finally:
            late.cancel()
        raise Stopped(asked, self.step, self.folder.path)

    def _check_folder(self) -> None:
        """Notice a folder that was moved or deleted: nothing must be written where it was."""
        if self.world.is_main and not self.in_place:
            raise StepformerError(
                f"The run folder '{self.folder.path}' was moved or deleted while the run trained, so nothing more can "
                "be saved: `stepformer resume` continues it from its last checkpoint where it is now."
            )

    @property
    def in_place(self) -> bool:
        """Whether the run's folder is still the one that training began in."""
        return self._home is None or self._home == identity(self.folder.path)

    def _train_step(self) -> None:
        begin, config = time.perf_counter(), self.config
        loss_now, norm_now = self.update()
        took = time.perf_counter() - begin
        self.clock.add(took)
        speed = config.step_tokens / took
        self.peak = max(self.peak, self.flops * speed)  # a peak measured on a busy CPU may be too low
        mfu = self.flops * speed / self.peak
        self.display.step(self.step, loss_now, norm_now, speed, mfu)
        if self.step % config.train.log_every == 0 or self.step == config.train.steps:
            numbers = {"loss": loss_now, "grad_norm": norm_now, **self.optimizers.report()}
            self._log("train", {**numbers, "tokens_per_second": speed, "mfu": mfu})
        if self.optimizers.problem:
            self._fail(f"after step {self.step}", self.optimizers.problem, diagnose=False)

    def update(self) -> tuple[float, float]:
        """One step of the optimizer, without a note of it; returns loss and gradient norm of its batch."""
        t = self.step
        self.optimizers.zero_grad()
        loss = self._gradients(t)
        norm, loss_now, norm_now = self._measured(loss)
        if self.optimizers.schedule.perturbs(t):
            before = self.optimizers.perturb()
            self.optimizers.zero_grad()
            self._gradients(t)  # of the same micro-batches, at the perturbed weights
            self.optimizers.restore(before)
            norm, loss_now, norm_now = self._measured(loss)
        self.optimizers.clip(norm)
        self.optimizers.step(t)
        self.step = t + 1
        return loss_now, norm_now

    def _measured(self, loss: Tensor) -> tuple[Tensor, float, float]:
        """The gradient norm that clipping uses, and loss and norm as numbers, once they are known to be good."""
        norm = self.optimizers.norm()
        everything = norm if self.config.optim.clip_coefficients else self.optimizers.norm(everything=True)
        loss_now, norm_now, all_now = torch.stack([loss.double(), norm.double(), everything.double()]).tolist()
        limit = self.config.max_loss
        if not (math.isfinite(loss_now) and math.isfinite(all_now)):
            numbers = f"(loss {loss_now:g}, gradient norm {all_now:g})"
            self._fail(f"in step {self.step + 1}", numbers, overflow=math.isfinite(loss_now))
        if loss_now > limit:
            what = f"the loss is {loss_now:.2f}, above max_loss = {limit:.2f}: the run has diverged"
            self._fail(f"in step {self.step + 1}", what, diagnose=False)
        return norm, loss_now, norm_now

    def _gradients(self, t: int) -> Tensor:
        """Add the mean gradient of step t's batch to the parameters; returns its mean loss, over all ranks."""
        inputs, targets = self.batches.at(t)
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        if self.captured is not None and not self.captured.recorded:
            self._record(inputs, targets)
        for i in range(self.accumulation):
            rows = slice(i * self.micro_batch, (i + 1) * self.micro_batch)
            if self.captured is not None:
                total += self.captured.run(inputs[rows], targets[rows], first=i == 0)
                continue
            with self.parallel.micro_batch(last=i + 1 == self.accumulation):
                with autocasting(self.world.device, self.autocast):
                    # divided by this rank's micro-batches only: DDP and FSDP2 average over ranks themselves
                    loss = self.parallel.loss(inputs[rows], targets[rows]) / self.accumulation
                loss.backward()
            total += loss.detach()
        if self.captured is not None:
            self.parallel.average(self.captured.parameters)
        return self.world.sum(total) / self.world.size

    def _replays(self) -> bool:
        """Whether the pass may be a CUDA graph: on GPUs, with whole weights, and no activations computed twice."""
        shards = self.world.size > 1 and self.config.train.parallel == "fsdp"
        wanted = self.config.train.graph and not self.config.model.activation_checkpointing
        return self.world.device.type == "cuda" and wanted and not shards

    def _captured_pass(self) -> CapturedPass | None:
        if not self._replays():
            return None
        return CapturedPass(
            lambda inputs, targets: self.parallel.loss(inputs, targets) / self.accumulation,
            [p for p in self.model.parameters() if p.requires_grad],
            lambda: autocasting(self.world.device, self.autocast),
        )

    def _record(self, inputs: Tensor, targets: Tensor) -> None:
        """Record the pass; what one rank cannot record (an oracle asks the device, memory is short) runs as it is."""
        assert self.captured is not None
        reason = ""
        try:
            self.captured.record(inputs[: self.micro_batch], targets[: self.micro_batch], self.accumulation > 1)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
        if self.world.largest(int(bool(reason))):
            reason = reason or "another rank could not"
            self.display.note(f"{self.display.title}  runs without a CUDA graph, which could not be recorded: {reason}")
            self.captured = None
            self.optimizers.zero_grad()
            torch.cuda.empty_cache()
            self.parallel.replicate()

    def _log(self, kind: str, numbers: Mapping[str, Any]) -> None:
        """Write a line of metrics, on the main rank."""
        if self.metrics is not None and self.loggers is not None:
            where = {"step": self.step, "tokens": self.step * self.config.step_tokens}
            line = {"kind": kind, **where, "seconds": round(self.clock.seconds, 3), **numbers}
            self.metrics.write(**line)
            self.loggers.write(line)

    def _evaluate(self, *, logged: bool = True) -> None:
        self.display.waiting("evaluating")
        found = self.last = self._evaluation(self.val, first=self.config.train.first)
        others = {name: self._evaluation(split) for name, split in self.also.items()}
        self.beside = {"also": {name: other.to_dict() for name, other in others.items()}} if others else {}
        said: dict[str, Any] = evaluation.reported(self.model, self.val, self.parallel, self.autocast)
        learned = {"coefficients": self.model.coefficients(), "gains": self.model.gains()}  # all ranks ask together
        for each in (found, *others.values()):
            if not math.isfinite(each.val_loss):
                self._fail(f"after step {self.step}", f"(validation loss {each.val_loss:g})")
        if logged and self.world.is_main:
            line = {**found.to_dict(), **said, **self.beside}
            line |= {name: layers for name, layers in learned.items() if any(layers)}
            if self.config.train.stream_norms:
                windows = evaluation.first_windows(self.model, self.val, NORM_WINDOWS)
                line["norms"] = self.model.stream_norms(windows)
            self._log("eval", line)
        capped = said.get("capped_rows", 0)
        remark = f"  (attention rows whose target is out of reach: {capped:.1%})" if capped >= 0.001 else ""
        remark = found.remark + "".join(f", {name} {o.val_loss:.4f}" for name, o in others.items()) + remark
        self.display.note(f"{self.display.title}  step {self.step:>6}  validation loss {found.val_loss:.4f}{remark}")
        if self.step and (self.best is None or found.val_loss < self.best["val_loss"]):
            self.best = {"val_loss": found.val_loss, "step": self.step}
            self._save_part(stored.step_name(self.step, "best"), {"model": dict(self.model.named_parameters())})

    def _evaluation(self, split: TokenSplit, **asked: Any) -> Evaluation:
        asked = {"tokens": self.config.train.eval_tokens, "context": self.config.model.context, **asked}
        run = partial(evaluation.evaluate, self.model, split, **asked)
        try:
            return run(micro_batch=self.micro_batch, world=self.world, autocast=self.autocast)
        except torch.OutOfMemoryError:
            if self.captured is None or not self.captured.recorded or self.world.size > 1:  # all ranks or none
                raise
            # the recorded pass keeps the memory of a whole step; it is recorded again when training goes on
            self.captured.forget()
            torch.cuda.empty_cache()
            return run(micro_batch=self.micro_batch, world=self.world, autocast=self.autocast)

    def save(self) -> None:
        """Everything that the rest of the run depends on."""
        weights, memory = dict(self.model.named_parameters()), self.optimizers.tensors(create=True)
        self._save_part(stored.step_name(self.step), {"model": weights, "optimizer": memory})

    def _save_part(self, name: str, parts: dict[str, dict[str, Any]]) -> None:
        self.display.waiting("saving")
        state: dict[str, Any] = {"step": self.step, **self.clock.state(), "best": self.best}
        state |= {"config": self.config.to_dict(), **({"run": self.run_id} if self.run_id else {})}
        if self.metrics is not None:
            self.metrics.sync()
            state["logged"] = self.metrics.logged
        try:
            self.checkpoints.save(name, parts, state)
        except StepformerError:
            self._check_folder()  # if it was moved, that is the reason
            raise

    def _fail(self, when: str, what: str, *, diagnose: bool = True, overflow: bool = False) -> NoReturn:
        """Stop with a sentence and good weights: those before the update that would have spoilt them, if they are.

        overflow: if no tensor is bad, the norm of the gradients is too large a number.
        """
        culprit, good = "", True
        if diagnose:
            inputs, targets = self.batches.at(min(self.step, self.config.train.steps - 1))
            parts = list(zip(inputs.split(self.micro_batch), targets.split(self.micro_batch), strict=True))
            culprit, good = evaluation.first_bad(self.model, self.world, parts, self.autocast)
        name = stored.step_name(self.step)
        self.checkpoints.wait()
        whole = self.world.on_main(lambda: self.checkpoints.names("step"))
        if good and name not in whole:
            self.save()
            self.checkpoints.wait()
        if good:
            where = f"The weights from before it are in '{self.folder.checkpoints / name}'"
        elif whole:
            where = f"The last whole checkpoint is '{self.folder.checkpoints / whole[-1]}'"
        else:
            where = "There was no checkpoint yet"
        why = f"{culprit or 'the loss'} is not finite {what}" if diagnose else what
        if overflow and not culprit:
            dtype = "fp64" if self.precision == "fp64" else "fp32"
            why = f"every gradient is finite, but their norm is too large a number for {dtype} {what}"
        first = "no step was taken yet, so the reason is the architecture or its first weights, not a rate"
        advice = "try a lower rate, a longer warm-up or more frequent checkpoints" if self.step else first
        raise DivergedError(f"Training stopped {when}: {why}. {where}; {advice}.")

    def _result(self) -> dict[str, Any]:
        assert self.last is not None
        assert self.best is not None
        config, weights = self.config, stored.weights_sha256(dict(self.model.named_parameters()))
        self.display.waiting("evaluating")
        whole = self.val if config.train.eval_whole and len(self.val) > config.train.eval_tokens else None
        record = {
            "format": 1,
            "title": config.title,
            "preset": row.name if (row := preset_of(config.model)) else "",
            "label": self.label,
            "recipe": config.recipe,
            "seed": config.train.seed,
            "config_hash": self.config_hash,
            "pairing": config.pairing(self.corpus),
            "steps": self.step,
            "tokens": self.step * config.step_tokens,
            **self.last.to_dict(),
            **self.beside,
            **evaluation.measured_once(self._evaluation, self.last, self.corpus.split("train"), whole),
            "best_val_loss": self.best["val_loss"],
            "best_step": self.best["step"],
            **self.clock.result(),
            "tokens_per_second": self.step * config.step_tokens / self.clock.seconds,
            "parameters": self.num_parameters,
            "unigram_entropy": self.val.entropy,
            "weights_sha256": weights,
            "precision": self.precision,
            "device": str(self.world.device.type),
            "ranks": self.world.size,
            "status": "finished",
        }
        if self.metrics is not None:
            record["metrics"] = f"{self.metrics.check:08x}"
            record |= {"run": self.run_id} if self.run_id else {}
        self._check_folder()
        if self.world.is_main:
            write_json(self.folder.result, record)
        return {**record, "folder": str(self.folder.path)}
