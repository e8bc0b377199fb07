"""Where the tests get their random numbers: `STEPFORMER_TEST_SEED` shifts every seed, for `make test-shaken`.

Nothing that a test asserts may hold for one draw alone; what does is a number found by luck.
"""

from __future__ import annotations

import os

import torch

SHIFT = 1000 * int(os.environ.get("STEPFORMER_TEST_SEED", "0"))


def shifted(seed: int) -> int:
    return seed + SHIFT


def fixed(seed: int) -> int:
    """A seed that stays: of an example chosen for what it shows (a text that varies, beams that part)."""
    return seed - SHIFT


def seeded(seed: int = 0, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(shifted(seed))
