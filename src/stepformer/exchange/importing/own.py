"""Folders that `stepformer export` wrote, or `save_pretrained` of our Hugging Face class."""

from __future__ import annotations

import dataclasses

from stepformer.base.errors import ConfigError, InputError
from stepformer.exchange.importing.layouts import Layout, Source, count_layers, loss_notes, number, whole_number
from stepformer.exchange.importing.reading import Found
from stepformer.model import Model
from stepformer.model.config import ModelConfig


def exported(found: Found) -> Layout:
    """Our own names behind `model.`; step and loss from stepformer.json, if it is there."""
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    try:
        config = ModelConfig.from_dict({key: value for key, value in found.config.items() if key in known})
    except ConfigError as error:
        raise InputError(
            f"'{found.path}' describes a model that cannot be built here: {error.problems[0]} Rules of its own have "
            "to be imported first (--plugin)."
        ) from None
    layers = count_layers(found.tensors, r"model\.blocks\.(\d+)\.")
    if layers != config.n_layer:
        raise InputError(f"'{found.path}' says n_layer = {config.n_layer}, but its weights have {layers} layers.")
    names = [name for name, _ in Model(config, device="meta").named_parameters()]
    notes = loss_notes(found.facts) | {key: found.facts[key] for key in ("run", "corpus") if found.facts.get(key)}
    return Layout(
        "an exported stepformer model",
        config,
        {name: Source(f"model.{name}") for name in names},
        step=whole_number(found.facts.get("step")),
        val_loss=number(found.facts.get("val_loss")),
        notes=notes,
    )
