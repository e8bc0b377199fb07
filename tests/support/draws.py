"""Where the tests get their random numbers: `STEPFORMER_TEST_SEED` shifts every seed, for `make test-shaken`.

Nothing that a test asserts may hold for one draw alone; what does is a number found by luck.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import TypeVar

import torch

M = TypeVar("M", bound=torch.nn.Module)

SHIFT = 1000 * int(os.environ.get("STEPFORMER_TEST_SEED", "0"))


def shifted(seed: int) -> int:
    return seed + SHIFT


def fixed(seed: int) -> int:
    """A seed that stays: of an example chosen for what it shows (a text that varies, beams that part)."""
    return seed - SHIFT


def seeded(seed: int = 0, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(shifted(seed))


def nudged(model: M, relative: float, copies: int = 8) -> Iterator[M]:
    """The model, then copies whose weights moved by up to `relative`: the error at one point alone is luck."""
    for draw in range(copies):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for i, weight in enumerate(moved.parameters()):
                step = 2 * torch.rand(weight.shape, generator=seeded(100 * draw + i), dtype=weight.dtype) - 1
                weight.mul_(1 + (relative * step if draw else 0))
        yield moved
