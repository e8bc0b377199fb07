"""Checkpoints of other programs, and exported ones of ours, as run folders that other commands accept."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stepformer.base import files
from stepformer.base.errors import InputError, StepformerWarning
from stepformer.base.plugins import lasting
from stepformer.exchange import whole
from stepformer.exchange.importing.layouts import carry, recognise
from stepformer.exchange.importing.reading import RECORD, number, open_source
from stepformer.exchange.importing.vocabulary import choose_tokenizer
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
    place = out.resolve()  # a link stays one
    if heads is not None and heads < 1:
        raise InputError(f"heads = {heads} should be at least 1.")
    files.clear_left(place)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"'{out}' is there already and not empty: choose another --out.")
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
    real = reader.vocab_size if reader.vocab_size < layout.config.vocab_size else None
    fp64 = all(value.dtype == torch.float64 for value in weights.values())
    config = RunConfig(
        layout.config.replace(real_vocab=real),
        train=TrainConfig(precision="fp64" if fp64 else "auto"),
        own_vocabulary=True,
    )
    said = {**found.beside, **found.facts}
    at, own = number(said.get(layout.step)), new_id()
    step = 0 if at is None else max(0, int(at))
    record = {
        "kind": layout.kind,
        "files": found.files,
        "step": None if at is None else step,
        "val_loss": number(said.get(layout.val_loss)),
        **{key: found.facts[key] for key in ("val_tokens", "val_hash") if found.facts.get(key)},
        **layout.notes,
    }
    with whole(place) as temporary, tempfile.TemporaryDirectory() as saved:
        folder = RunFolder(temporary)
        state = {"step": step, "seconds": 0.0, "best": None, "config": config.to_dict(), "run": own}
        Checkpoints(folder.checkpoints).save(step_name(step, "best"), {"model": weights}, state)
        reader.save(Path(saved))
        facts = {"id": own, "label": config.title, "imported": record, "precision": "fp64" if fp64 else "fp32"}
        folder.create(config, facts, Path(saved), lasting(plugins))
    return Imported(out, config.title, sum(value.numel() for value in weights.values()), record)
