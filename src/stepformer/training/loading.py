"""Read runs: their model with its tokenizer, and what it loses on a text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stepformer.base.arguments import checks
from stepformer.base.errors import InputError, StepformerError
from stepformer.base.plugins import load_plugins
from stepformer.base.progress import counting
from stepformer.data.corpus import Corpus
from stepformer.data.tokenizers import Tokenizer
from stepformer.model import Model
from stepformer.training import checkpoints as stored
from stepformer.training.checkpoints import Checkpoints
from stepformer.training.config import RunConfig
from stepformer.training.corpora import checked, same_corpus
from stepformer.training.evaluation import Evaluation, check_blocks, evaluate
from stepformer.training.parallel import ALONE, World, choose_device
from stepformer.training.runs import RunFolder, checkpoint_of


@dataclass(frozen=True, repr=False)
class LoadedRun:
    """A trained model with what it needs to read and write text."""

    model: Model
    tokenizer: Tokenizer
    config: RunConfig
    record: dict[str, Any]
    step: int
    folder: RunFolder
    newest: int = 0
    """The last step that had a checkpoint when this one was read."""

    def __repr__(self) -> str:  # a prompt shows it as a part of `evaluate_run`; the fields fill pages
        return f"LoadedRun('{self.folder.path}', step={self.step}, {self.model.num_parameters():,} parameters)"

    @property
    def known_step(self) -> int | None:
        """`step`, or None if these are imported weights whose source did not say it."""
        imported = self.record.get("imported")
        return self.step if not imported or imported.get("step") else None

    @property
    def device(self) -> torch.device:
        return self.model.embed.tok_emb.weight.device

    def hybrid(self, *, layers: Collection[int] | None = None, cutoff: int | None = None) -> LoadedRun:
        """The same run with momentum in some layers only (`Model.hybrid`)."""
        return replace(self, model=self.model.hybrid(layers=layers, cutoff=cutoff))


ATTEMPTS = 20  # at reading a checkpoint before the next one takes its place


def load_run(
    path: str | Path, which: str = "best", device: str = "auto", *, allow_nan: bool = False, plugins: Sequence[str] = ()
) -> LoadedRun:
    """The model of a run with its tokenizer and config.

    A training may take a checkpoint away while it is read: then the one that it has now is read.

    Args:
        path: The run's folder.
        which: "best" for the weights of the lowest validation loss, "last" for the newest.
        device: "auto", "cpu", "cuda", ...
        allow_nan: Load weights that are not finite numbers, too.
        plugins: Files or modules with rules of your own that the run needs, at their present places; they are imported.
    """
    if not isinstance(path, str | Path):
        raise InputError(f"This takes a run's folder, not {type(path).__name__}: of a loaded run, run.folder.path.")
    load_plugins(plugins)
    folder = RunFolder(Path(path))
    kept = Checkpoints(folder.checkpoints)
    for _ in range(ATTEMPTS):
        before = kept.names("step", "best")
        try:
            return _loaded(folder, which, device, allow_nan)
        except BaseException as error:  # those of torch.distributed.checkpoint are no Exceptions
            if isinstance(error, KeyboardInterrupt | SystemExit) or kept.names("step", "best") == before:
                raise
    raise StepformerError(
        f"'{folder.path}' replaces its checkpoints faster than they can be read: try again, or train with a larger "
        "save_every or keep."
    )


def _loaded(folder: RunFolder, which: str, device: str, allow_nan: bool) -> LoadedRun:
    record, config = folder.opened()
    on = choose_device(device)
    checkpoint, state = checkpoint_of(folder, which, (record, config))
    stored.check_fits(checkpoint, config.model)
    tokenizer = folder.read_tokenizer(record)
    model = Model(config.model, seed=0, device=on, dtype=config.dtype_on(on))
    model.stream_dtype = config.stream_dtype
    stored.load(checkpoint, "model", dict(model.named_parameters()))
    if not allow_nan:
        stored.refuse_nan(model.named_parameters(), f"The checkpoint '{checkpoint}'")
    newest = max(Checkpoints(folder.checkpoints).steps(), default=0)
    return LoadedRun(model.eval(), tokenizer, config, record, int(state["step"]), folder, newest)


def trained_on(folder: RunFolder, record: dict[str, Any]) -> Corpus:
    """The corpus of a run, where its record says it is."""
    if not record.get("corpus"):
        how = "`stepformer eval --corpus DIR` takes a prepared one, everything else corpus=DIR"
        raise InputError(f"'{folder.path}' came without a corpus: {how}.")
    return same_corpus(record["corpus"], folder, RunConfig.from_dict(record["config"]), ALONE, None)


def corpus_of(run: LoadedRun, given: str | Path | None = None) -> Corpus:
    """The corpus that a run was trained on, or another prepared one that its tokenizer can read."""
    opened = checked(Corpus(given)) if given else trained_on(run.folder, run.record)
    opened.check_tokenizer(run.tokenizer)
    return opened


@checks(tokens=1, micro_batch=1)
def evaluate_run(
    path: str | Path,
    *,
    which: str = "best",
    corpus: str | Path | None = None,
    tokens: int | None = None,
    micro_batch: int = 8,
    device: str = "auto",
    quiet: bool = True,
    plugins: Sequence[str] = (),
) -> tuple[Evaluation, LoadedRun]:
    """The loss of a run's checkpoint on its own validation split, or on that of another prepared corpus.

    Args:
        path: The run's folder.
        which: "best" or "last".
        corpus: The folder of another prepared corpus, which the run's tokenizer can read.
        tokens: How many tokens, from the first on; by default as many as in training.
        micro_batch: Sequences at a time.
        device: "auto", "cpu", "cuda", ...
        quiet: Show no progress.
        plugins: Files or modules with rules of your own that the run needs, at their present places; they are imported.

    Returns:
        The loss and what it was measured on, and the run as `load_run` gives it.
    """
    run = load_run(path, which, device, plugins=plugins)
    return validation_loss(run, corpus=corpus, tokens=tokens, micro_batch=micro_batch, quiet=quiet), run


def validation_loss(
    run: LoadedRun,
    *,
    corpus: str | Path | None = None,
    tokens: int | None = None,
    micro_batch: int = 8,
    quiet: bool = True,
) -> Evaluation:
    """The same for a run that is loaded, a hybrid say."""
    split, context = corpus_of(run, corpus).split("val"), run.config.model.context
    split = split if corpus else split.half(run.config.train.eval_half)
    first = () if corpus or tokens else run.config.train.first
    tokens = run.config.train.eval_tokens if tokens is None else tokens
    with counting("validation loss", check_blocks(split, context, tokens), quiet=quiet) as count:
        return evaluate(
            run.model,
            split,
            context=context,
            tokens=tokens,
            micro_batch=micro_batch,
            world=World(0, 1, run.device),
            first=first,
            autocast=run.config.autocast_on(run.device),
            progress=count,
        )
