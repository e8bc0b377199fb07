"""Stepformer's cache where `transformers` expects one of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache as TransformersCache

from stepformer.base.errors import InputError
from stepformer.decoding.cache import Cache
from stepformer.model import Model


class StepformerCache(TransformersCache):
    """What a model remembers of past tokens, whatever its attention; made at its first use.

    `transformers` counts columns, padding included (`columns`); the cache inside counts each row's real tokens.
    """

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(layers=[])
        self.capacity = capacity  # tokens a row; None: the model's context
        self.columns = 0
        self.inner: Cache | None = None

    def open(self, model: Model, batch: int) -> Cache:
        """The cache inside, made for so many rows if there is none yet."""
        if self.inner is None:
            self.inner = model.new_cache(batch, self.capacity)
        return self.inner

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        return -1 if self.inner is None else self.inner.capacity

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.get_max_cache_shape()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.inner is not None:
            self.inner.select(beam_idx.to(self.inner.lengths.device).long())

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def reset(self) -> None:
        self.columns, self.inner = 0, None

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise InputError(
            "A stepformer cache cannot forget its last tokens, since some attentions keep sums of all of them: "
            "assisted and speculative decoding need another model."
        )

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise InputError("A stepformer cache is filled by the model's own forward pass, not by update().")

    def __len__(self) -> int:
        return 0 if self.inner is None else len(self.inner.slots)

    def __repr__(self) -> str:
        return f"StepformerCache(rows={self.batch_size}, columns={self.columns})"

    @property
    def batch_size(self) -> int:
        return -1 if self.inner is None else self.inner.batch

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.inner is not None
