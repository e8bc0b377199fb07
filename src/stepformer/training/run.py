"""Start and continue runs: what the command line and a notebook both call."""

from __future__ import annotations

import contextlib
import shlex
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stepformer.base.arguments import checks
from stepformer.base.errors import (
    ConfigError,
    DivergedError,
    InputError,
    StepformerError,
    StepformerWarning,
    command_line,
    suggestion,
)
from stepformer.base.files import write_text
from stepformer.base.plugins import comes_from_plugin, lasting, load_plugins
from stepformer.base.units import duration
from stepformer.catalogue import SIZES
from stepformer.data.corpus import FEW_WINDOWS
from stepformer.training import checkpoints as stored
from stepformer.training import memory
from stepformer.training.checkpoints import Checkpoints
from stepformer.training.config import SECTIONS, RunConfig, run_config
from stepformer.training.corpora import (
    corpus_facts,
    open_also,
    open_corpus,
    same_also,
    same_corpus,
)
from stepformer.training.evaluation import check_blocks
from stepformer.training.finetuning import same_start, warm_start
from stepformer.training.loading import trained_on
from stepformer.training.loop import Trainer
from stepformer.training.parallel import World, choose_device, joined_world
from stepformer.training.runs import DIVERGED, MAY_CHANGE, RunFolder, checkpoint_of
from stepformer.training.speed import FORWARD, forecast
from stepformer.training.stopping import Reason, Watch


@checks()
def train(
    config: RunConfig | str | Path,
    out: str | Path | None = None,
    *,
    max_seconds: float | None = None,
    quiet: bool = False,
    label: str = "",
    plugins: Sequence[str] = (),
    watch: Watch | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a new run and return its result. Under torchrun every rank calls it.

    Args:
        config: What `run_config` gives, or the name or file that it would be given.
        out: The run's folder, which must not hold a run yet; by default runs/NAME-CORPUS-sSEED.
        max_seconds: Stop after so long, as a signal would.
        quiet: Print nothing.
        label: What a comparison calls it.
        plugins: The files or modules with rules of your own, which are also recorded.
        watch: What looks out for signals and the time limit, where several runs share one.
        settings: With a name or file: what `run_config` takes, such as `steps=500` or `size="small"`.

    Returns:
        What the run's result.json holds: `steps`, `val_loss`, `best_val_loss`, ...

    Raises:
        Stopped: A signal or the time limit has ended it early, after saving; `resume` continues it.

    Examples:
        >>> import stepformer as sf
        >>> result = sf.train("yurii", "runs/yurii", steps=500)  # doctest: +SKIP
    """
    if isinstance(config, str | Path):
        load_plugins(plugins)
        config = run_config(config, **settings)
    elif not isinstance(config, RunConfig):
        raise InputError(f"`train` takes a name or what `run_config` gives, not {type(config).__name__}.")
    elif settings:
        raise InputError(f"`train` was given a config, which settles {', '.join(settings)}: give them to `run_config`.")
    with joined_world(config.train.device, config.train.collective_timeout) as world:
        corpus = open_corpus(config.data, world, quiet=quiet)
        config = config.for_vocabulary(corpus.vocab_size)
        also = open_also(config.data.also, corpus)
        init, tokenizer = config.train.init, corpus.manifest["tokenizer"]
        start = None if init is None else warm_start(init, config, tokenizer, world)
        what = f"{config.recipe}-{config.base}" if config.recipe else config.title
        folder = RunFolder(Path(out or f"runs/{what}-{corpus.folder.name}-s{config.train.seed}"))
        with folder.locked() if world.is_main else contextlib.nullcontext():
            if world.on_main(lambda: folder.exists):
                raise InputError(folder.taken(config))
            memory.refuse_hopeless(config, world, folder.path)
            with memory.explained(config, world, folder.path):
                trainer = Trainer(config, corpus, folder, world, label, also, quiet=quiet)
            if start is not None:
                trainer.begin_with(start[0])
            if world.is_main:
                facts = {"label": label or config.title, "corpus": corpus_facts(corpus), "precision": trainer.precision}
                facts |= {"also": {name: corpus_facts(other) for name, other in also.items()}} if also else {}
                facts |= {"init": start[1]} if start is not None else {}
                folder.create(config, facts, corpus.folder / "tokenizer", lasting(plugins))
            trainer.display.note(f"{trainer.display.title}  {_cost(trainer)}")
            trainer.display.note(f"{trainer.display.title}  in {folder.path}")
            for remark in _about_evaluations(trainer):
                trainer.display.note(f"{trainer.display.title}  {remark}")
            world.barrier()
            try:
                return _fit(trainer, watch or Watch(max_seconds))
            except Exception as error:
                if world.is_main and trainer.step == 0 and comes_from_plugin(error):
                    (folder.path / "run.json").unlink(missing_ok=True)  # no run yet: the mended rule may begin one here
                raise


LONG_STEP = 0.1  # seconds


def _cost(trainer: Trainer) -> str:
    """What a training is about to take, for who has not set its size."""
    config, model = trainer.config, trainer.config.model
    keys = ("n_layer", "n_head", "d_model", "context")
    named = [name for name, size in SIZES.items() if all(size[key] == getattr(model, key) for key in keys)]
    size = "".join(f"size {name}, " for name in named) + f"{model.n_layer} layers of width {model.d_model}"
    epochs = config.train.steps * config.step_tokens / len(trainer.corpus.split("train"))
    amount = f"{config.train.steps:,} steps of {config.step_tokens:,} tokens ({epochs:.2f} epochs)"
    expected = forecast(config, trainer.world.device, trainer.world.size, eval_tokens=trainer.eval_tokens, longest=0)
    # of smaller steps other things than operations take the time
    time = f", about {duration(expected.run)} if it reaches 30 % of this device's peak" * (expected.step >= LONG_STEP)
    return f"{size}: {trainer.num_parameters:,} parameters; {amount}{time}"


ENOUGH = 16_384  # tokens of an evaluation that show how a small run goes


def _about_evaluations(trainer: Trainer) -> Iterator[str]:
    """What there is to say of losses that will be noisy, or slow to have."""
    config = trainer.config
    windows = check_blocks(trainer.val, config.model.context, len(trainer.val))
    if windows < FEW_WINDOWS:
        said = f"the validation text has {windows} window{'s' * (windows > 1)} of {config.model.context} tokens"
        yield f"{said}: losses on it are noisy"
    trained = config.train.steps * config.step_tokens
    read = trainer.eval_tokens * config.evaluations(trainer.eval_tokens)
    if config.train.eval_tokens > ENOUGH and read > FORWARD * trained:
        said = f"evaluations read {read:,} tokens, which takes longer than training on {trained:,}"
        yield f"{said}: eval_tokens={ENOUGH} is faster, and noisier"


PIECES = ("micro_batch", "device", "parallel", "compile")  # what changes the result by rounding, and the time


@checks()
def resume(
    path: str | Path,
    *,
    max_seconds: float | None = None,
    quiet: bool = False,
    watch: Watch | None = None,
    corpus: str | Path | None = None,
    also: str | None = None,
    restart: bool = False,
    plugins: Sequence[str] = (),
    **changes: Any,
) -> dict[str, Any]:
    """Continue a run from its last checkpoint, on any number of ranks, and return its result.

    Args:
        path: The run's folder.
        max_seconds: Stop after so long, as a signal would.
        quiet: Print nothing.
        watch: What looks out for signals and the time limit, where several runs share one.
        corpus: Where the same corpus is now, if it was moved.
        also: The same for the other corpora that it is evaluated on.
        restart: If the newest checkpoint that was saved is gone, go on from an earlier one.
        plugins: Files or modules with rules of your own that the run needs, at their present places; they are imported.
        changes: Keys of [train] that change the result by rounding at most, such as micro_batch, device or keep; the
            precision stays what it was.
    """
    load_plugins(plugins)
    folder = RunFolder(Path(path))
    record, config = folder.opened()
    refused = sorted(set(changes) - set(MAY_CHANGE))
    if refused:
        other = "train a new one, or branch off it (`stepformer extend --help`)"
        if config.optim.schedule == "cosine":  # which has fallen
            other = (
                f"begin a new run with its weights, `train ... {shlex.quote(f'init={folder.path}')}` (`extend` "
                "makes one with schedule=wsd longer)"
            )
        known = {key for section in SECTIONS.values() for key in section.field_names()}
        may = f"It may change {', '.join(MAY_CHANGE)}, `corpus` and `also`, the places of the same ones."
        raise ConfigError(
            f"Unknown key '{key}'.{guess} {may}"
            if key not in known and (guess := suggestion(key, MAY_CHANGE))  # it may be one of a model
            else f"A run cannot change '{key}' when it is resumed: {other}. {may}"
            for key in refused
        )
    if not record.get("corpus"):
        how = f"begin a new run with {shlex.quote(f'init={folder.path}')}"
        raise InputError(f"'{folder.path}' came as weights alone and has no training to continue: {how}.")
    saved, there = folder.last_saved(), Checkpoints(folder.checkpoints).steps()
    if saved is not None and max(there, default=-1) < saved and not restart:
        left = f"after step {max(there)}, its newest one left" if there else "at its beginning"
        raise InputError(
            f"The checkpoint of step {saved} of '{folder.path}' was saved and is gone: put it back, or let the run "
            f"start again {left} with --restart."
        )
    result = folder.read_result(record, config)
    if result is not None and not restart:  # nothing to do, and nothing to write again
        for fault in folder.kept(record, config).faults():
            again = f"`{command_line('resume', folder.path, '--restart')}` makes it again from the newest whole one"
            warnings.warn(f"{fault} The result stands; {again}.", StepformerWarning, stacklevel=2)
        return {**result, "folder": str(folder.path)}
    told, kept = config, {"precision": record.get("precision", config.train.precision)}
    config = RunConfig.from_dict({**config.to_dict(), "train": {**config.train.to_dict(), **kept, **changes}})
    with (
        joined_world(config.train.device, config.train.collective_timeout) as world,
        folder.locked() if world.is_main else contextlib.nullcontext(),
    ):
        own = folder.kept(record, told)
        own.check(config.model)
        opened = same_corpus(record["corpus"], folder, config, world, corpus)
        others = same_also(record.get("also", {}), folder, opened, also)
        with memory.explained(config, world, folder.path):
            trainer = Trainer(config, opened, folder, world, str(record.get("label", "")), others, quiet=quiet)
        trainer.config_hash, trainer.checkpoints.owner = told.hash, own.owner
        begun = trainer.load_latest()
        if restart and world.is_main and trainer.step < config.train.steps:
            folder.result.unlink(missing_ok=True)  # it tells of what is gone
        if begun:
            trainer.display.note(f"{trainer.display.title}  continues after step {trainer.step}")
        else:
            if "init" in record:
                trainer.begin_with(same_start(config, record["init"], opened.manifest["tokenizer"], folder, world))
            trainer.display.note(f"{trainer.display.title}  has no checkpoint yet: it starts again")
        if world.is_main:
            folder.note_resumed(trainer.step, {k: v for k, v in changes.items() if k in PIECES})
        return _fit(trainer, watch or Watch(max_seconds))


def at_last_checkpoint(path: str | Path, device: str = "auto") -> Trainer:
    """The trainer of a run as its newest checkpoint left it, on one device, to look at: nothing is written.

    Its `update` is the step that `resume` would take next; of a finished run, one more at the last rates.
    """
    folder = RunFolder(Path(path))
    record, config = folder.opened()
    if not record.get("corpus"):
        raise InputError(
            f"'{folder.path}' came as weights alone and has no training, whose next step could be looked at."
        )
    checkpoint, state = checkpoint_of(folder, "last", (record, config))
    stored.check_fits(checkpoint, config.model)
    world = World(0, 1, choose_device(device))
    precision = record.get("precision", config.train.precision)
    if world.device.type == "cpu" and precision == "bf16":
        precision = "fp32"  # a CPU takes hours for what is a look
    own = {"precision": precision, "device": device, "compile": False}
    config = RunConfig.from_dict({**config.to_dict(), "train": {**config.train.to_dict(), **own}})
    trainer = Trainer(config, trained_on(folder, record), folder, world, "", {}, quiet=True)
    trainer.begin_with(checkpoint)
    stored.load(checkpoint, "optimizer", trainer.optimizers.tensors(create=True))
    trainer.step = int(state["step"])
    trainer.batches.steps = max(trainer.batches.steps, trainer.step + 1)
    return trainer


def _fit(trainer: Trainer, watch: Watch) -> dict[str, Any]:
    """Train; a run that cannot go on leaves a note, so that a script does not start it again and again."""
    world, folder = trainer.world, trainer.folder

    def note_failure(text: str) -> None:
        if world.is_main and trainer.in_place:
            with contextlib.suppress(StepformerError):  # a full disk, say: the error itself matters more
                write_text(folder.failure, f"{text}\n")

    def end_for_another(reason: Reason) -> None:
        """What the main rank does before it ends because of another one, while its own thread waits for that one."""
        trainer.display.close()
        trainer.checkpoints.abandon()
        if reason.lasting:
            note_failure(reason.sentence)

    if world.is_main:
        folder.failure.unlink(missing_ok=True)
    if world.ending is not None:
        world.ending.before = end_for_another
    try:
        with watch, memory.explained(trainer.config, world, folder.path):
            result = trainer.fit(watch)
            world.barrier()  # what comes next on another rank may read this run
        return result
    except StepformerError as error:
        note_failure(f"{DIVERGED if isinstance(error, DivergedError) else ''}{error}")
        raise
    finally:
        if world.ending is not None:
            world.ending.before = lambda reason: None
