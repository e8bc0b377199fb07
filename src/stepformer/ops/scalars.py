"""Learned scalars behind maps, and pins that put a value in a map's place."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from stepformer.base.errors import InputError
from stepformer.ops.sharding import whole

LISTED = 64  # numbers of a vector that are told one by one, at most


class LearnedScalars(nn.Module):
    """Raw parameters by key, each of which is read through the map of its specification, or pinned.

    A specification (`rules.Coefficient`) has a `size`, a `raw_start`, and the map `value` from raw to what is read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.specs: dict[str, Any] = {}
        self.pinned: dict[str, Tensor] = {}

    def add(self, key: str, spec: Any) -> None:
        self.specs[key] = spec
        self.register_parameter(key, nn.Parameter(torch.empty(spec.size)))

    def initialise(self) -> None:
        for key, spec in self.specs.items():
            raw, start = self.get_parameter(key), spec.raw_start
            raw.copy_(raw.new_tensor(start)) if isinstance(start, tuple) else raw.fill_(start)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Let pinned values follow `.to()`, `.cuda()`, `.double()`."""
        super()._apply(fn, recurse)
        self.pinned = {key: fn(value) for key, value in self.pinned.items()}
        return self

    def value(self, key: str) -> Tensor:
        if key in self.pinned:
            return self.pinned[key]
        mapped: Tensor = self.specs[key].value(getattr(self, key))
        return mapped

    def named_values(self, without: Container[str] = ()) -> dict[str, float]:
        """The value of each scalar, `r[3]` of head 3, of a longer vector its root mean square; where they are spread
        over ranks, all of these ask together."""
        values: dict[str, float] = {}
        for key, spec in self.specs.items():
            if key in without:
                continue
            if spec.size > LISTED:
                values[f"rms({key})"] = float(whole(self.value(key).detach()).double().square().mean().sqrt())
                continue
            names = [key] if spec.size == 1 else [f"{key}[{i}]" for i in range(spec.size)]
            values.update(zip(names, whole(self.value(key).detach()).tolist(), strict=True))
        return values

    def pin_keys(self, keys: Iterable[str], word: str, value: float | Tensor) -> int:
        """Read this value under these keys from now on; returns how many they are. `word` is what a caller says."""
        pinned = {}
        for key in keys:
            raw = self.get_parameter(key)
            try:
                pinned[key] = torch.as_tensor(value, dtype=raw.dtype, device=raw.device).expand(raw.shape)
            except (TypeError, ValueError, RuntimeError):
                each = f", or a tensor of {raw.numel()}" if raw.numel() > 1 else ""
                raise InputError(f"{word} = {value!r} should be a number{each}.") from None
            if not bool(pinned[key].isfinite().all()):
                raise InputError(f"{word} = {value} is not finite.")
        self.pinned |= pinned
        return len(pinned)
