"""Batches are a pure function of seed, step, global batch and data."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import stepformer as sf
from draws import shifted
from stepformer.data.batches import Batches, key_of, permute


class Row:
    """Tokens 0, 1, 2, ...: a token is its own position."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def gather(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        assert starts.min() >= 0
        assert starts.max() + length <= self.length
        return starts[:, None] + np.arange(length)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 63, 100, 1000, 4097])
def test_permutations_visit_everything_once(size: int) -> None:
    for key in range(5):
        assert sorted(permute(np.arange(size), size, key)) == list(range(size))


def test_an_entry_does_not_depend_on_which_others_are_asked_for() -> None:
    whole = permute(np.arange(500), 500, 7)
    assert permute(np.array([3, 499, 0]), 500, 7).tolist() == [whole[3], whole[499], whole[0]]


def test_permutations_look_random() -> None:
    """Every position is equally likely to hold every index, and neighbours are not related."""
    size, keys = 16, 4000
    table = np.stack([permute(np.arange(size), size, key) for key in range(keys)])
    counts = np.stack([np.bincount(table[:, i], minlength=size) for i in range(size)])
    expected = keys / size
    chi2 = ((counts - expected) ** 2 / expected).sum()
    degrees = (size - 1) ** 2
    assert abs(chi2 - degrees) < 5 * np.sqrt(2 * degrees)  # five standard deviations of chi-squared
    steps = np.diff(permute(np.arange(100_000), 100_000, 1))
    assert abs(np.corrcoef(steps[:-1], steps[1:])[0, 1] + 0.5) < 0.02  # -1/2 for independent positions
    assert (np.abs(steps) == 1).mean() < 1e-3


def test_the_order_never_changes_silently() -> None:
    """An old run must be repeatable for ever: these numbers may only change with a new format of the run."""
    assert key_of("order", 42, 0) == 3713479588716902998
    batches = Batches(Row(10_000), context=16, batch=8, seed=42)
    digest = hashlib.sha256(np.concatenate([batches.starts(t) for t in range(300)]).tobytes()).hexdigest()
    assert digest[:16] == "c0d6c8c4063fed9c"


def test_an_epoch_visits_every_block_once() -> None:
    batches = Batches(Row(1000), context=16, batch=7, seed=3)
    assert batches.blocks == (1000 - 16) // 16
    numbers = np.concatenate([batches.starts(t) for t in range(40)])
    seen = []
    for epoch in range(4):
        part = np.sort(numbers[epoch * batches.blocks : (epoch + 1) * batches.blocks])
        assert (np.diff(part) == 16).all()  # no overlap, no gap
        assert 0 <= part[0] < 16
        seen.append((int(part[0]), numbers[epoch * batches.blocks : (epoch + 1) * batches.blocks].tolist()))
    assert len({offset for offset, _ in seen}) > 1  # boundaries move
    assert seen[0][1] != seen[1][1]  # order is drawn anew


def test_a_batch_straddles_two_epochs() -> None:
    batches = Batches(Row(100), context=16, batch=4, seed=0)  # 5 blocks an epoch
    starts = np.concatenate([batches.starts(t) for t in range(5)])
    first, second = starts[:5], starts[5:10]
    assert len(set(first)) == 5
    assert len(set(second)) == 5


@pytest.mark.parametrize("cuts", [[8], [4, 4], [2, 2, 2, 2], [1] * 8, [3, 5]])
def test_ranks_and_micro_batches_are_slices(cuts: list[int]) -> None:
    batches = Batches(Row(5000), context=16, batch=8, seed=1)
    inputs, targets = batches.batch(9)
    ends = np.cumsum(cuts)
    pieces = [batches.rows(9, int(end - size), int(end)) for end, size in zip(ends, cuts, strict=True)]
    assert torch.equal(torch.cat([x for x, _ in pieces]), inputs)
    assert torch.equal(torch.cat([y for _, y in pieces]), targets)
    assert torch.equal(targets, inputs + 1)  # the next token of every token


def test_no_global_random_numbers_are_drawn() -> None:
    torch.manual_seed(shifted(0))
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["pos"]  # type: ignore[index,call-overload]
    a = Batches(Row(5000), context=16, batch=8, seed=1).batch(3)[0]
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.random.get_state(legacy=False)["state"]["pos"] == before[1]  # type: ignore[index,call-overload]
    torch.manual_seed(shifted(99))
    np.random.seed(99)
    assert torch.equal(a, Batches(Row(5000), context=16, batch=8, seed=1).batch(3)[0])
    assert not torch.equal(a, Batches(Row(5000), context=16, batch=8, seed=2).batch(3)[0])


def test_too_little_data_is_a_sentence() -> None:
    with pytest.raises(sf.InputError, match=r"31 tokens: too few for a context of 16 \(at least 32 are needed\)"):
        Batches(Row(31), context=16, batch=1, seed=0)
    Batches(Row(32), context=16, batch=1, seed=0).batch(5)
