"""`gd-lie-trotter` is the GPT everyone knows, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers import TINY, shake, tiny, tokens
from transcriptions.plain_gpt import PlainGPT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forward_and_gradients_are_bit_equal(dtype: torch.dtype) -> None:
    ours = shake(tiny("gd-lie-trotter", dtype=dtype))
    plain = PlainGPT(**TINY).to(dtype)
    plain.load_state_dict({name.removeprefix("embed."): value for name, value in ours.state_dict().items()})
    ids, targets = tokens(3), tokens(3, seed=1)

    output = ours(ids, targets)
    logits = plain(ids)
    assert torch.equal(output.logits, logits)

    assert output.loss is not None
    output.loss.backward()
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter.grad, theirs[name.removeprefix("embed.")].grad), name
