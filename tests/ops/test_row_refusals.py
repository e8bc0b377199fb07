"""Rules that cannot be followed on symbols run as they are written, and say why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
from helpers import shake, tiny, tokens
from row_cases import FP32, SINGLE, SIZE
from stepformer.model.engines import fused
from stepformer.ops import kernels
from stepformer.ops.symbols import UntraceableError, leaf, standardise
from stepformer.rules import State
from stepformer.rules.first_order import Nesterov

pytestmark = pytest.mark.usefixtures("interpreted")


def kicks() -> dict[str, tuple[Callable[..., Any], str]]:
    """Rules that no pass can be made of, and what is said about each."""

    def indexing(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + g[..., :1]

    def deciding(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + (g if c.beta else -g)

    def comparing(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + (g if bool((c.beta > 0.1).all()) else -g)

    def where(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + torch.where(g > 0, g, 0.1 * g)

    def equal(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + g + (g == g) * g  # false of symbols, which are compared as objects

    def where_equal(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + torch.where(s.v == s.v, g, 0.1 * g)

    def length(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + g / g.shape[1]

    def sharp(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + F.softplus(g, beta=2.0)

    def in_place(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + F.relu(g + 0.0, inplace=True)

    def no_eps(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + F.rms_norm(g, g.shape[-1:])

    def choosing(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return torch.where(torch.sign(g).bool(), s.v, g)

    def cumulative(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + torch.cumsum(g, dim=-1)

    def method(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + g.flip(-1)

    def without_gradients(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        with torch.no_grad():
            old = c.beta * s.v
        return old + g

    def detaching(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v.detach() + g

    def own_tensor(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + torch.linspace(0.5, 1.5, 16) * g

    def own_tensor_second(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + g * torch.linspace(0.5, 1.5, 16)

    def counting(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        self.count = getattr(self, "count", 0) + 1
        return c.beta * s.v + (1 + 0.01 * self.count) * g

    def other_power(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + g**4

    def over_tokens(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + g.mean(dim=-2, keepdim=True)

    def over_everything(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + g / (1 + g.square().sum())

    def heads(self: Any, s: State, c: Any, g: Tensor) -> Tensor:
        return c.beta * s.v + self.heads(g).flatten(-2)

    return {
        "indexing": (indexing, "it indexes a tensor"),
        "deciding": (deciding, "it decides by the value of a tensor"),
        "comparing": (comparing, "it compares values of a tensor"),
        "where": (where, "it compares values of a tensor"),
        "equal": (equal, "it computes with a truth value"),
        "where equal": (where_equal, "cannot be followed on symbols (TypeError: where() received"),
        "tokens": (length, "it asks how many tokens there are"),
        "another softplus": (sharp, "it calls softplus with a beta"),
        "in place": (in_place, "it changes a tensor in place"),
        "rms_norm without eps": (no_eps, "depends on the dtype: rms_norm takes one, eps=1e-6"),
        "choosing": (choosing, "it uses Tensor.bool"),
        "cumulative": (cumulative, "it calls torch's cumsum"),
        "method": (method, "it uses Tensor.flip"),
        "without gradients": (without_gradients, "it computes something without gradients"),
        "detaching": (detaching, "it detaches a row"),
        "a tensor of its own": (own_tensor, "it mixes in a Tensor"),
        "a tensor of its own, second": (own_tensor_second, "it mixes in a Tensor"),
        "counting": (counting, "its rule does something else from time to time"),
        "another power": (other_power, "it takes the power 4"),
        "over tokens": (over_tokens, "it sums over something else than a token's own row"),
        "over everything": (over_everything, "it sums over something else than a token's own row"),
        "heads": (heads, "it uses Tensor.unflatten"),
    }


@pytest.mark.parametrize("why", kicks())
def test_what_cannot_be_followed_runs_as_it_is_written(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kick, sentence = kicks()[why]

    class Mine(Nesterov):
        def kick(self, s: State, c: Any, g: Tensor, scale: float = 1.0) -> State:
            return s.replace(v=kick(self, s, c, g))

    model = shake(tiny("yurii", dtype=SINGLE, **SIZE), scale=0.1)
    for block in model.blocks:
        block.template.__class__ = Mine
    found = fused.structural(model)
    assert found is not None
    assert sentence in found
    monkeypatch.setattr(fused, "run", lambda *_: pytest.fail("it was fused"))
    logits = model(tokens(1, 4, 17)).logits
    assert logits.isfinite().all()
    if why != "counting":
        with kernels.off():
            assert (logits - model(tokens(1, 4, 17)).logits).norm() <= FP32 * logits.norm()


FOLLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda g: F.layer_norm(g, g.shape[-1:]),
    "layer_norm with an eps": lambda g: F.layer_norm(g, (g.shape[-1],), eps=1e-3),
    "rms_norm": lambda g: F.rms_norm(g, (g.shape[-1],), eps=1e-6),
    "relu": lambda g: F.relu(g),
    "softplus": lambda g: F.softplus(g),
    "width": lambda g: g / g.shape[-1] ** 0.5 + g.shape[2] * 0.01 * g,
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_usual_spellings_are_followed(name: str) -> None:
    class Mine(Nesterov):
        def kick(self, s: State, c: Any, g: Tensor, scale: float = 1.0) -> State:
            return s.replace(v=c.beta * s.v + FOLLOWED[name](g))

    model = shake(tiny("yurii", dtype=SINGLE, **SIZE), scale=0.1)
    for block in model.blocks:
        block.template.__class__ = Mine
    assert fused.structural(model) is None
    logits = model(tokens(1, 4, 17)).logits
    with kernels.off():
        assert (logits - model(tokens(1, 4, 17)).logits).norm() <= FP32 * logits.norm()


def test_what_symbols_refuse() -> None:
    """A sentence that ends "... since": it says why a rule runs as it is written."""
    row, number, other = leaf("row", "r"), leaf("num", "n"), leaf("other", "R")
    refused: list[Callable[[], Any]] = [
        lambda: row[0], lambda: bool(row), lambda: row**5, lambda: row.sum(), lambda: row.sum(dim=0, keepdim=True),
        lambda: number.sum(dim=-1, keepdim=True), lambda: row + "a", lambda: row.sort(), lambda: torch.fft.fft(row),
        lambda: other + row, lambda: row.detach(), lambda: torch.where(row, row, row), lambda: row + [1.0],
        lambda: row @ row, lambda: standardise(number, 1e-5, centred=True),
    ]  # fmt: skip
    for attempt in refused:
        with pytest.raises((UntraceableError, TypeError)):
            attempt()
