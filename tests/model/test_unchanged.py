"""Every architecture computes what it computed when `tests/recorded/architectures.json` was written."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import stepformer as sf
import unchanged

RECORDED = json.loads(unchanged.RECORDED.read_text())
SAME_MACHINE = RECORDED["machine"] == unchanged.machine()
CASES = unchanged.cases()


def test_all_are_recorded() -> None:
    assert list(RECORDED["architectures"]) == list(CASES)


def same(name: str, found: list[Any], recorded: list[Any], scale: float) -> None:
    """The same bits with the same torch on the same CPU; elsewhere sums and norms to 1e-11: their order differs.

    A digest that is null was not recorded on that machine.
    """
    if SAME_MACHINE and torch.get_num_threads() == 1 and recorded[0] is not None:
        assert found[0] == recorded[0], name
    for a, b in zip(found[1:], recorded[1:], strict=True):
        assert abs(a - b) <= 1e-11 * max(1.0, scale), name


@pytest.mark.parametrize(
    "case", [c if c in sf.presets() or c.endswith(" all") else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_as_recorded(case: str) -> None:
    recorded, found = RECORDED["architectures"][case], unchanged.facts(*CASES[case])
    assert found["hash"] == recorded["hash"]
    assert found["without gradient"] == recorded["without gradient"]
    assert list(found["gradients"]) == list(recorded["gradients"])
    same("logits", found["logits"], recorded["logits"], recorded["logits"][2])
    for name, summary in recorded["gradients"].items():
        same(name, found["gradients"][name], summary, summary[2])
    assert found["greedy"] == recorded["greedy"]
