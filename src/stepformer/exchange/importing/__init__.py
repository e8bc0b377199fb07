"""Weights from elsewhere as run folders that other commands accept: checkpoints of other programs, exported ones of
ours, and models of a loop of one's own.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepformer.base import files
from stepformer.base.errors import InputError, StepformerWarning
from stepformer.base.plugins import lasting
from stepformer.data.tokenizers import Tokenizer
from stepformer.exchange import whole
from stepformer.exchange.importing.layouts import Layout, Source, carry, recognise
from stepformer.exchange.importing.reading import RECORD, number, open_source
from stepformer.exchange.importing.vocabulary import choose_tokenizer
from stepformer.model import Model, ModelConfig
from stepformer.model.engines.rows import is_pinned
from stepformer.ops.sharding import is_sharded
from stepformer.training.checkpoints import Checkpoints, refuse_nan, step_name, weights_sha256
from stepformer.training.config import RunConfig, TrainConfig
from stepformer.training.runs import RunFolder, new_id


@dataclass(frozen=True)
class Imported:
    """What was imported into which folder; `record` is what run.json remembers of it."""

    folder: Path
    title: str
    parameters: int
    record: dict[str, Any]


def import_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str | None = None,
    heads: int | None = None,
    plugins: Sequence[str] = (),
) -> Imported:
    """Make the run folder `out` from a checkpoint of another program, or from an exported model of ours.

    `tokenizer` is gpt2, bytes or a folder; by default the source's own. `heads` is for files that do not say how many
    they have. Nothing in the source is executed, and every tensor in it must find its place.
    """
    out = Path(out)
    if heads is not None and heads < 1:
        raise InputError(f"heads = {heads} should be at least 1.")
    _refuse_taken(out)
    found = open_source(Path(source))
    layout = recognise(found, heads)
    if heads not in (None, layout.config.n_head):
        raise InputError(f"'{source}' says that it has {layout.config.n_head} heads: leave out heads = {heads}.")
    weights = carry(layout, found.tensors, str(source))
    if found.path.is_dir() and not found.facts:
        warnings.warn(
            f"'{found.path}' has no {RECORD}: nothing tells whether its files are what was written.",
            StepformerWarning,
            stacklevel=2,
        )
    refuse_nan(weights.items(), f"'{source}'")
    told = found.facts.get("weights_sha256")
    if told is not None and found.config.get("model_type") == "stepformer":
        stored = {ours: found.tensors[where.name] for ours, where in layout.sources.items()}
        if weights_sha256(stored) != told:
            raise InputError(
                f"The weights of '{source}' are not those that were exported: their checksum is another one."
            )
    reader = choose_tokenizer(tokenizer, found.path, layout.config.vocab_size, found.facts)
    said = {**found.beside, **found.facts}
    at = number(said.get(layout.step))
    record = {
        "kind": layout.kind,
        "files": found.files,
        "step": None if at is None else max(0, int(at)),
        "val_loss": number(said.get(layout.val_loss)),
        **{key: found.facts[key] for key in ("val_tokens", "val_hash") if found.facts.get(key)},
        **layout.notes,
    }
    config = _make(out, layout.config, weights, reader, record, plugins)
    return Imported(out, config.title, sum(value.numel() for value in weights.values()), record)


def save_run(
    model: Model,
    out: str | Path,
    tokenizer: str | Path | Tokenizer,
    *,
    step: int | None = None,
    plugins: Sequence[str] = (),
) -> Path:
    """Make a run folder of a model that was trained in a loop of one's own; returns the folder.

    It is a run like an imported one: `load_run` and the commands take it, but it has no training to resume. The folder
    appears whole or not at all; one that is there already must be empty.

    Args:
        model: The model itself, not what wraps it.
        out: The run's folder.
        tokenizer: What made its ids: `gpt2`, `bytes`, the folder of a corpus or of a run, or a corpus's `tokenizer`.
        step: How many steps it was trained for, to be told beside its numbers.
        plugins: The files or modules with rules of your own, for the record.

    Examples:
        >>> import stepformer as sf
        >>> model = sf.build("yurii", size="tiny", vocab_size=257)
        >>> folder = sf.save_run(model, "runs/mine", "bytes", step=1000)  # doctest: +SKIP
    """
    if not isinstance(model, Model):
        raise InputError(f"`save_run` takes the model itself, not {type(model).__name__}.")
    if not isinstance(out, str | Path):
        raise InputError(
            f"`out` should be the run's folder, not {type(out).__name__}: save_run(model, out, tokenizer)."
        )
    out = Path(out)
    if not isinstance(tokenizer, str | Path | Tokenizer):
        known = "'gpt2', 'bytes', a folder or a tokenizer of stepformer, such as corpus.tokenizer"
        raise InputError(f"`tokenizer` should be {known}, not {type(tokenizer).__name__}.")
    if step is not None and not (isinstance(step, Integral) and step >= 0):
        raise InputError(f"step = {step!r} should be a whole number from 0 on.")
    if is_pinned(model) or model.plain_layers:
        raise InputError(
            "A run keeps neither pinned coefficients nor plain layers: save the model without them "
            "(`unpin_coefficients`, the model that `hybrid` was called on), and set them again after `load_run`."
        )
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    away = [name for name, value in tensors.items() if is_sharded(value) or value.is_meta]
    if away:
        raise InputError(f"'{away[0]}' is not whole on this rank, so the model cannot be saved as a run.")
    _refuse_taken(out)
    kind = "a stepformer model of a loop of one's own"
    wanted = dict(Model(model.config, device="meta").named_parameters())
    weights = carry(Layout(kind, model.config, {name: Source(name) for name in wanted}), tensors, "model")
    refuse_nan(weights.items(), "The model")
    reader = choose_tokenizer(tokenizer, out, model.config.vocab_size, {})
    _make(out, model.config, weights, reader, {"kind": kind, "step": None if step is None else int(step)}, plugins)
    return out


def _refuse_taken(out: Path) -> None:
    files.clear_left(out.resolve())
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"'{out}' is there already and not empty: choose another place.")


def _make(
    out: Path,
    model: ModelConfig,
    weights: dict[str, Tensor],
    reader: Tokenizer,
    record: dict[str, Any],
    plugins: Sequence[str],
) -> RunConfig:
    """Write the run folder of some weights, whole or not at all."""
    real = reader.vocab_size if reader.vocab_size < model.vocab_size else None
    fp64 = all(value.dtype == torch.float64 for value in weights.values())
    config = RunConfig(
        model.replace(real_vocab=real),
        train=TrainConfig(precision="fp64" if fp64 else "auto"),
        own_vocabulary=True,
    )
    own, step = new_id(), record["step"] or 0
    with whole(out.resolve()) as temporary, tempfile.TemporaryDirectory() as saved:  # a link stays one
        folder = RunFolder(temporary)
        state = {"step": step, "seconds": 0.0, "best": None, "config": config.to_dict(), "run": own}
        Checkpoints(folder.checkpoints).save(step_name(step, "best"), {"model": weights}, state)
        reader.save(Path(saved))
        facts = {"id": own, "label": config.title, "imported": record, "precision": "fp64" if fp64 else "fp32"}
        folder.create(config, facts, Path(saved), lasting(plugins))
    return config
