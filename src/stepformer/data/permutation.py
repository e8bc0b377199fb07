"""A random permutation that is a formula: position -> index, with no table and no random stream.

A Feistel network permutes the numbers below the next power of four; numbers that fall outside the wanted range are
sent through it again until they fall inside (cycle walking). It is our own, so that no library update can reorder an
old run's data.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
_WORD = NDArray[np.uint64]


def key_of(*parts: object) -> int:
    """Sixty-four bits that depend on every part, e.g. `key_of("blocks", seed, epoch)`."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big")


def permute(positions: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """The entries at `positions` of the permutation of range(size) that `key` names."""
    half_bits = max(1, ((max(size, 2) - 1).bit_length() + 1) // 2)
    keys = [np.uint64(key_of(key, r)) for r in range(ROUNDS)]
    found = _feistel(positions.astype(np.uint64), half_bits, keys)
    outside = found >= size
    while outside.any():  # each pass lets at most three quarters stay outside, on average
        found[outside] = _feistel(found[outside], half_bits, keys)
        outside = found >= size
    return found.astype(np.int64)


def _feistel(x: _WORD, half_bits: int, keys: list[np.uint64]) -> _WORD:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(x: _WORD) -> _WORD:
    """A 64-bit finaliser (the constants of splitmix64): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
