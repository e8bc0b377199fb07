"""What a layout is: a config, and for each of our parameters the name it has in the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stepformer.base.errors import InputError
from stepformer.model import Model
from stepformer.model.config import ModelConfig


@dataclass(frozen=True)
class Source:
    """Where a parameter is in the file; `transposed` as in GPT-2's Conv1D, `scalar` if () and (1,) are the same."""

    name: str
    transposed: bool = False
    scalar: bool = False


@dataclass
class Layout:
    """A recognised checkpoint: which architecture it is, and where its weights are."""

    kind: str
    config: ModelConfig
    sources: dict[str, Source]
    step: int = 0
    val_loss: float | None = None
    head: str | None = None  # the tied head, if the file has it a second time
    ignored: str = r"(?!)"  # buffers that are no weights
    notes: dict[str, Any] = field(default_factory=dict)


def carry(layout: Layout, tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Our parameters from a file's tensors, each of which is used exactly once; in fp32, or fp64 if it is."""
    wanted = {name: tuple(p.shape) for name, p in Model(layout.config, device="meta").named_parameters()}
    ignored = {name for name in tensors if re.fullmatch(layout.ignored, name)}
    used = {source.name for source in layout.sources.values()}
    assert wanted.keys() == layout.sources.keys()
    assert len(used) == len(layout.sources)
    missing = [f"'{s.name}' {wanted[ours]}" for ours, s in layout.sources.items() if s.name not in tensors]
    left = [f"'{name}' {tuple(tensors[name].shape)}" for name in tensors.keys() - used - ignored - {layout.head}]
    problems = []
    if missing:
        problems.append(f"it lacks {_some(missing)}")
    if left:
        problems.append(f"nothing here has a place for its {_some(sorted(left))}")
    carried = {}
    for ours, source in layout.sources.items():
        if source.name in tensors:
            value = tensors[source.name]
            if source.scalar and value.numel() == 1:
                value = value.reshape(1)
            value = value.mT if source.transposed and value.ndim == 2 else value
            if tuple(value.shape) != wanted[ours] or not value.is_floating_point():
                given = f"{value.dtype} {tuple(tensors[source.name].shape)}".removeprefix("torch.")
                shape = wanted[ours][::-1] if source.transposed else wanted[ours]
                problems.append(f"'{source.name}' is {given} instead of {shape}")
            else:
                wide = value if value.dtype == torch.float64 else value.float()
                carried[ours] = wide.contiguous()
    if problems:
        raise InputError(f"'{where}' looks like {layout.kind}, but {'; '.join(problems[:4])}.")
    table = layout.sources["embed.tok_emb.weight"].name
    if layout.head is not None and layout.head in tensors and not torch.equal(tensors[layout.head], tensors[table]):
        raise InputError(
            f"'{where}' has a head of its own ('{layout.head}' differs from '{table}'), and stepformer's is the token "
            "table: it cannot be imported."
        )
    return carried


def _some(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def rows_of(tensors: Mapping[str, Tensor], name: str, where: str) -> tuple[int, int]:
    """The shape of a table, from which sizes are read."""
    if name not in tensors or tensors[name].ndim != 2:
        raise InputError(f"'{where}' has no table '{name}', so its sizes cannot be read.")
    rows, columns = tensors[name].shape
    return rows, columns


def count_layers(tensors: Mapping[str, Tensor], pattern: str) -> int:
    """How many layers the names have; `pattern` captures their numbers, which must have no gaps."""
    found = {match[1] for name in tensors if (match := re.match(pattern, name))}
    if found != {str(i) for i in range(len(found))}:
        raise InputError(f"The layers of the weights are not numbered from 0 to {len(found) - 1}: some are missing.")
    return len(found)


def number(value: Any) -> float | None:
    """A loss as files hold it: a float, or a tensor of one."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e9 else None  # nanoGPT begins at 1e9


def whole_number(value: Any) -> int:
    found = number(value)
    return 0 if found is None else max(0, int(found))


def loss_notes(facts: Mapping[str, Any]) -> dict[str, Any]:
    """On what the loss in stepformer.json was measured."""
    return {key: facts[key] for key in ("val_tokens", "val_hash") if facts.get(key)}
