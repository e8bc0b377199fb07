"""The transcriptions of the other ways through depth keep what their equations promise, before anything is compared.

Small random oracles in fp64, with norms whose epsilon is 1e-30: a norm is then scale-free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from draws import seeded
from transcriptions import rivals

D, T_LENGTH, CALLS, EPS = 5, 4, 7, 1e-30


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def norm(v: Tensor) -> Tensor:
    return rivals.rms_norm(v, EPS)


def oracle(seed: int, eps: float = EPS) -> rivals.Function:
    """A causal mean and a tanh, behind a norm."""
    first, second = normal(D, D, seed=seed), normal(D, D, seed=seed + 100)

    def answer(v: Tensor) -> Tensor:
        u = rivals.rms_norm(v, eps)
        past = torch.cumsum(u, dim=-2) / torch.arange(1, v.shape[-2] + 1, dtype=v.dtype).unsqueeze(-1)
        return torch.tanh((u + past) @ first) @ second

    return answer


def oracles(count: int = CALLS, eps: float = EPS) -> list[rivals.Function]:
    return [oracle(seed, eps) for seed in range(count)]


def blocks(count: int = CALLS) -> list[rivals.Function]:
    def block(seed: int) -> rivals.Function:
        answer = oracle(seed)
        return lambda v: v + answer(v)

    return [block(seed) for seed in range(count)]


X = normal(2, T_LENGTH, D, seed=999)


def assert_vanilla(read: Tensor, calls: int = CALLS, tolerance: float = 1e-12) -> None:
    expected = norm(rivals.vanilla(X, oracles(calls)))
    assert (norm(read) - expected).abs().max() <= tolerance


def random_call(start: dict[str, Any], seed: int) -> dict[str, Any]:
    return {name: value + 0.5 * normal(*value.shape, seed=seed + i) for i, (name, value) in enumerate(start.items())}


def test_scaled_at_one_and_denseformer_and_unet_are_vanilla_to_the_bit() -> None:
    plain = rivals.vanilla(X, oracles())
    assert torch.equal(rivals.scaled(X, oracles(), [rivals.scaled_start("scalar", D, 4)] * CALLS), plain)
    for k, p in ((1, 1), (2, 1), (3, 2), (2, 4)):
        assert torch.equal(rivals.denseformer(X, blocks(), rivals.denseformer_start(CALLS, k, p), k, p), plain)
    assert torch.equal(rivals.unet(X, blocks(), [0.0] * 3), plain)
    assert torch.equal(rivals.scaled(X, oracles(), [rivals.scaled_start("rezero", D, 4)] * CALLS), X)


def test_layerscale_starts_by_depth() -> None:
    values = {L: float(rivals.scaled_start("layerscale", D, L)["s"][0]) for L in (12, 18, 19, 24, 25)}
    assert values == {12: 0.1, 18: 0.1, 19: 1e-5, 24: 1e-5, 25: 1e-6}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_hyper_at_its_start_is_vanilla(n: int) -> None:
    assert_vanilla(rivals.hyper(X, oracles(), [rivals.hyper_start(index, n) for index in range(CALLS)], n))
    dynamic = [rivals.hyper_start(index, n, D) for index in range(CALLS)]
    assert_vanilla(rivals.hyper(X, oracles(), dynamic, n, [norm] * CALLS))


def test_hyper_with_one_stream_of_ones_is_vanilla_at_any_epsilon() -> None:
    asked = oracles(eps=0.1)
    read = rivals.hyper(X, asked, [rivals.hyper_start(index, 1) for index in range(CALLS)], 1)
    assert (read - rivals.vanilla(X, asked)).abs().max() <= 1e-12


@pytest.mark.parametrize("mixing", ["sinkhorn", "permutations"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_mhc_without_maps_and_with_half_open_posts_is_vanilla(n: int, mixing: str) -> None:
    calls = [rivals.mhc_start(index, n, D, mixing) for index in range(CALLS)]
    for index, call in enumerate(calls):
        call["b1"] = normal(n, seed=index)
        call["b2"] = torch.zeros(n, dtype=torch.float64)
        call["b3"] = normal(*call["b3"].shape, seed=50 + index)
    assert_vanilla(rivals.mhc(X, oracles(), calls, n, mixing, EPS))


@pytest.mark.parametrize("times_sources", [False, True])
def test_attention_residuals_at_zero_are_vanilla(times_sources: bool) -> None:
    zeros = [torch.zeros(D, dtype=torch.float64)] * (CALLS + 1)
    assert_vanilla(rivals.attnres(X, oracles(), zeros, EPS, times_sources=times_sources))
    for N in range(1, CALLS + 1):
        assert_vanilla(rivals.attnres_blocks(X, oracles(), zeros, N, EPS, times_sources=times_sources))


def test_one_block_per_call_is_the_full_form_and_the_last_block_takes_the_rest() -> None:
    w = [normal(D, seed=index) for index in range(CALLS + 1)]
    gains = [1 + 0.3 * normal(D, seed=40 + index) for index in range(CALLS + 1)]
    full = rivals.attnres(X, oracles(), w, EPS, gains)
    assert (rivals.attnres_blocks(X, oracles(), w, CALLS, EPS, gains) - full).abs().max() <= 1e-12
    folded = rivals.attnres(X, oracles(), [v * g for v, g in zip(w, gains, strict=True)], EPS)
    assert (folded - full).abs().max() <= 1e-12
    many = rivals.attnres(X, oracles(), w, EPS, gains, times_sources=True)
    assert (norm(many) - norm(full)).abs().max() <= 1e-12
    assert rivals.block_sizes(24, 8) == [3] * 8
    assert rivals.block_sizes(7, 3) == [2, 2, 3]


def test_rows_and_columns_of_the_mixings_sum_to_one() -> None:
    for n in (2, 3, 4):
        exact = rivals.permuted(normal(6, len(rivals.permutations(n)), seed=n), n)
        scaled = rivals.sinkhorn(0.3 * normal(6, n * n, seed=n), n)
        for R, tolerance in ((exact, 1e-14), (scaled, 1e-5)):
            for i in range(n):
                assert (sum(R[i]) - 1).abs().max() <= 1e-14
                assert (sum(R[j][i] for j in range(n)) - 1).abs().max() <= tolerance


def test_two_streams_reach_the_same_matrices_by_both_mixings() -> None:
    b = normal(6, 2, seed=3)  # of the identity and the exchange
    res = torch.stack([b[:, 0], b[:, 1], b[:, 1], b[:, 0]], dim=-1)
    for one, other in zip(rivals.permuted(b, 2), rivals.sinkhorn(res, 2), strict=True):
        for c, r in zip(one, other, strict=True):
            assert (c - r).abs().max() <= 1e-12


def test_stacked_oracles_see_the_right_streams() -> None:
    """The dynamic call with full matrices, by matrix products at one token."""
    n, call = 3, random_call(rivals.hyper_start(1, 3, D), seed=7)
    H = [normal(1, D, seed=20 + i) for i in range(n)]
    matrix = torch.cat(H)
    bar = torch.cat([norm(row) for row in H])
    A_m = call["s_a"] * torch.tanh(bar @ call["W_m"]) + call["A_m"]
    A_r = call["s_a"] * torch.tanh(bar @ call["W_r"]) + call["A_r"]
    B = call["s_b"] * torch.tanh(bar @ call["W_b"]).T + call["B"]
    ask = oracle(3)
    expected = A_r.T @ matrix + B.T @ ask(A_m.T @ matrix)
    ours = rivals.hyper_call(H, ask, *rivals.hyper_dynamic_matrices(H, call, norm))
    assert (torch.cat(ours) - expected).abs().max() <= 1e-12


def stacked(start: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    return [random_call(start(index), seed=10 * index) for index in range(3)]


CASES: dict[str, tuple[Any, Callable[[Any], Tensor]]] = {
    "layerscale": (
        stacked(lambda index: rivals.scaled_start("layerscale", D, 4)),
        lambda calls: rivals.scaled(X, oracles(3), calls),
    ),
    "hyper": (
        stacked(lambda index: rivals.hyper_start(index, 2, D)),
        lambda calls: rivals.hyper(X, oracles(3), calls, 2, [norm] * 3),
    ),
    "mhc": (
        stacked(lambda index: rivals.mhc_start(index, 2, D)),
        lambda calls: rivals.mhc(X, oracles(3), calls, 2, eps=EPS),
    ),
    "permutations": (
        stacked(lambda index: rivals.mhc_start(index, 3, D, "permutations")),
        lambda calls: rivals.mhc(X, oracles(3), calls, 3, "permutations", EPS),
    ),
    "attnres": (
        [{"w": normal(D, seed=index)} for index in range(4)],
        lambda calls: rivals.attnres_blocks(X, oracles(3), [call["w"] for call in calls], 2, EPS),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_by_central_differences(name: str) -> None:
    calls, read = CASES[name]
    leaves = [(call, key) for call in calls for key in call]
    for call, key in leaves:
        call[key] = call[key].clone().requires_grad_()
    upstream = normal(2, T_LENGTH, D, seed=5)
    loss = (read(calls) * upstream).sum()
    values = [call[key] for call, key in leaves]
    grads = torch.autograd.grad(loss, values, allow_unused=True)
    directions = [normal(*v.shape, seed=300 + i) for i, v in enumerate(values)]
    slope = sum(float((g * e).sum()) for g, e in zip(grads, directions, strict=True) if g is not None)

    def moved(t: float) -> float:
        for (call, key), value, direction in zip(leaves, values, directions, strict=True):
            call[key] = (value + t * direction).detach()
        return float((read(calls) * upstream).sum())

    step = 1e-6
    assert abs((moved(step) - moved(-step)) / (2 * step) - slope) <= 1e-7 * abs(slope) + 1e-7


def test_counts_at_small() -> None:
    calls, L, d, n = 24, 12, 768, 4
    assert [rivals.scaled_count(scale, calls, d) for scale in ("rezero", "layerscale", "scalar")] == [24, 18432, 48]
    assert rivals.denseformer_count(L) == 90 == L * (L + 3) // 2
    assert rivals.hyper_static_count(calls, n) == 576
    assert rivals.hyper_dynamic_count(calls, n, d) == 111_216
    assert rivals.mhc_count(calls, n, d) == 1_770_120
    assert rivals.mhc_count(calls, n, d, "permutations") == 2_360_136
    assert rivals.attnres_count(calls, d) == 19_200
    assert rivals.attnres_count(calls, d, gain=True) == 38_400
    assert rivals.unet_count(L) == 6


def test_counts_are_those_of_the_arrays() -> None:
    def size(calls: list[dict[str, Tensor]]) -> int:
        return sum(value.numel() for call in calls for value in call.values())

    assert size([rivals.hyper_start(index, 3) for index in range(2)]) == rivals.hyper_static_count(2, 3)
    assert size([rivals.hyper_start(index, 3, D) for index in range(2)]) == rivals.hyper_dynamic_count(2, 3, D)
    for mixing in ("sinkhorn", "permutations"):
        assert size([rivals.mhc_start(index, 3, D, mixing) for index in range(2)]) == rivals.mhc_count(2, 3, D, mixing)
    for k, p in ((1, 1), (2, 1), (3, 2), (2, 4)):
        alpha = rivals.denseformer_start(12, k, p)
        assert sum(len(row) for row in alpha.values()) == rivals.denseformer_count(12, k, p)
