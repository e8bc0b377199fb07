"""What a model is not given: bad tokens, targets, lengths, devices; a sentence for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stepformer as sf
from helpers import tiny, tokens


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (
            tokens().float(),
            r"^Targets should be a tensor of integers of .*, not torch\.float32 of shape \(\d+, \d+\)\.$",
        ),
        (tokens().bool(), r"^Targets should be a tensor of integers .* torch\.bool"),
        (tokens().tolist(), r"^Targets should be a tensor of integers .*, not list\.$"),
        (tokens()[0], r": targets\[None\] is a batch of one row\.$"),
        (tokens() - 99, r"Found target id -\d+, .*: a target that is to be ignored is -100\.$"),
    ],
)
def test_bad_targets_are_refused(targets: Any, sentence: str) -> None:
    with pytest.raises(sf.InputError, match=sentence):
        tiny()(tokens(), targets)


def test_what_streams_are_carried_in_is_a_dtype() -> None:
    model = tiny()
    for wrong in ("fp32", torch.int64):
        model.stream_dtype = wrong  # type: ignore[assignment]
        with pytest.raises(sf.InputError, match=rf"^stream_dtype = {wrong!r} should be a dtype of torch"):
            model(tokens())


def test_tokens_of_one_row_and_of_too_many_columns() -> None:
    with pytest.raises(
        sf.InputError, match=r"not torch\.int64 of shape \(5,\): tokens\[None\] is a batch of one row\.$"
    ):
        tiny()(tokens(1, 5)[0])
    with pytest.raises(sf.InputError, match=r"context is 8: cut it, or build the model with context=9\.$"):
        tiny(context=8)(tokens(1, 9))


def test_bad_lengths_are_refused() -> None:
    model, ids = tiny(), tokens(2, 4)
    for lengths, sentence in (
        ([1, 2], "tensor of integers"),
        (torch.tensor([1.0, 2.0]), "tensor of integers"),
        (torch.tensor([1, 2, 3]), "one entry per row"),
        (torch.tensor([0, 2]), "between 1 and 4"),
        (torch.tensor([5, 2]), "between 1 and 4"),
    ):
        with pytest.raises(sf.InputError, match=sentence):
            model(ids, lengths=lengths)
    with pytest.raises(sf.InputError, match="last_only"):
        model(ids, ids, last_only=True)


@pytest.mark.parametrize(
    ("ids", "targets", "sentence"),
    [
        (torch.tensor([[3, 11]]), None, "id 11, but the vocabulary has ids 0 to 10"),
        (torch.tensor([[3, -1]]), None, "id -1"),
        (torch.zeros(1, 9, dtype=torch.long), None, "9 tokens, but the model's context is 8"),
        (torch.zeros(1, 0, dtype=torch.long), None, "no tokens"),
        (torch.zeros(4, dtype=torch.long), None, "shape"),
        (torch.zeros(1, 4), None, "integers"),
        ([[1, 2]], None, "not list"),
        (torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long), "Targets have shape"),
        (torch.zeros(1, 1, dtype=torch.long), torch.tensor([[11]]), "target id 11"),
    ],
)
def test_bad_tokens_are_refused(ids: Any, targets: Any, sentence: str) -> None:
    with pytest.raises(sf.InputError, match=sentence):
        tiny()(ids, targets)


def test_hybrid_refuses_what_it_is_not_for() -> None:
    for name in ("vanilla", "adam", "verlet-ama", "nesterov-euler"):
        with pytest.raises(sf.InputError, match=r"Hybrid inference .* a stream called 'v'"):
            tiny(name).hybrid(cutoff=1)
    model = tiny("yurii")
    for arguments, sentence in (
        ({}, "either"),
        ({"layers": {0}, "cutoff": 1}, "either"),
        ({"layers": {2}}, "0 to 1"),
        ({"cutoff": 3}, "between 0 and 2"),
        ({"cutoff": "x"}, "^cutoff = 'x' should be of type int.$"),
        ({"layers": 1}, "^layers = 1 should be of type Collection.$"),
        ({"layers": "01"}, "^layers = '0' should be of type int.$"),
    ):
        with pytest.raises(sf.InputError, match=sentence):
            model.hybrid(**arguments)


def test_unknown_coefficient_is_refused() -> None:
    with pytest.raises(sf.InputError, match="Did you mean 'beta'"):
        tiny("yurii").pin_coefficients(betta=0.1)
    with pytest.raises(sf.InputError, match="not finite"):
        tiny("yurii").pin_coefficients(beta=float("nan"))
    for value in ("x", None, torch.zeros(2)):
        with pytest.raises(sf.InputError, match=r"^beta = .* should be a number\.$"):
            tiny("yurii").pin_coefficients(beta=value)  # type: ignore[arg-type]


def test_a_cache_of_no_number_of_rows_is_refused() -> None:
    for given, sentence in (
        (("x",), "^batch = 'x' should be of type int.$"),
        ((1, "x"), "^capacity = 'x' should be of type int.$"),
        ((1, 9), "holds 1 to 8 tokens"),
    ):
        with pytest.raises(sf.InputError, match=sentence):
            tiny().new_cache(*given)


def test_a_missing_gpu_is_one_sentence() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(sf.InputError, match="sees no CUDA device"):
            tiny(device="cuda")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"device": "gpu"}, r"device = 'gpu' is none of torch's: give 'cpu', 'cuda'"),
        ({"dtype": "bf16"}, r"dtype = 'bf16' should be a dtype of torch such as torch\.bfloat16\."),
        ({"dtype": torch.int64}, r"dtype = torch\.int64 should be"),
    ],
)
def test_a_device_and_a_dtype_that_torch_does_not_know(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(sf.InputError, match=sentence):
        tiny(**given)


def test_recording_takes_a_dtype_of_torch() -> None:
    with pytest.raises(sf.InputError, match=r"autocast = 'bf16' should be a dtype of torch such as torch\.bfloat16\."):
        sf.record(tiny(), autocast="bf16")  # type: ignore[arg-type]
