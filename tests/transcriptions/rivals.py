"""Other ways to carry information through depth, one function per equation; nothing here mixes tokens but the oracles.

Notation
    x        the token's embedding, (T, d) or (B, T, d); every product below is taken token by token
    T_l      oracles, l = 0, 1, ...: attention or MLP with its own pre-norm, or their sum (one call per layer)
    Block_i  blocks: any functions of x
    H        n streams, a list of n tensors like x: the rows of the (n x d) matrix of every token

Every function that carries a state through all calls returns what the final norm reads. `index` is the call's l.
Arrays are named as in the equations; scalars may be tensors or numbers. Autograd flows through everything.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
Call = dict[str, Any]
Streams = list[Tensor]

SINKHORN = 20


def vanilla(x: Tensor, oracles: Sequence[Function]) -> Tensor:
    """x' = x + T_l(x)."""
    for T in oracles:
        x = x + T(x)
    return x


def rms_norm(v: Tensor, eps: float) -> Tensor:
    """v / sqrt(mean(v^2) + eps), no gain."""
    return v / torch.sqrt((v * v).mean(dim=-1, keepdim=True) + eps)


# Scaled residuals.


def scaled(x: Tensor, oracles: Sequence[Function], calls: Sequence[Call]) -> Tensor:
    """x' = a_l x + s_l .* T_l(x), s_l a scalar or (d,); a_l = 1 where a call has none."""
    for T, call in zip(oracles, calls, strict=True):
        x = call.get("a", 1.0) * x + call["s"] * T(x)
    return x


def scaled_start(scale: str, d: int, blocks: int) -> Call:
    """rezero s = 0;  layerscale s = 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 beyond;  scalar a = s = 1."""
    if scale == "rezero":
        return {"s": torch.zeros(1, dtype=torch.float64)}
    if scale == "layerscale":
        value = 0.1 if blocks <= 18 else 1e-5 if blocks <= 24 else 1e-6
        return {"s": torch.full((d,), value, dtype=torch.float64)}
    return {"a": torch.ones(1, dtype=torch.float64), "s": torch.ones(1, dtype=torch.float64)}


# DenseFormer, arXiv 2402.02622.


def dense_sources(i: int, k: int) -> list[int]:
    """The j <= i with j = i (mod k)."""
    return [j for j in range(i + 1) if (i - j) % k == 0]


def denseformer(
    x: Tensor, blocks: Sequence[Function], alpha: dict[int, dict[int, Any]], k: int = 1, p: int = 1
) -> Tensor:
    """X_0 = Y_0 = x;  X_i = Block_i(Y_{i-1});  Y_i = sum_j alpha_ij X_j if p divides i, else Y_i = X_i;  Y_L is read.

    Blocks count from 1, and alpha[i][j] is alpha_ij.
    """
    X, Y = [x], [x]
    for i, block in enumerate(blocks, start=1):
        X.append(block(Y[i - 1]))
        if i % p == 0:
            average = torch.zeros_like(x)
            for j in dense_sources(i, k):
                average = average + alpha[i][j] * X[j]
            Y.append(average)
        else:
            Y.append(X[i])
    return Y[-1]


def denseformer_start(L: int, k: int = 1, p: int = 1) -> dict[int, dict[int, Tensor]]:
    """alpha_ii = 1, others 0."""
    return {
        i: {j: torch.tensor(float(i == j), dtype=torch.float64) for j in dense_sources(i, k)}
        for i in range(1, L + 1)
        if i % p == 0
    }


# Hyper-connections, arXiv 2409.19606.


def copies(x: Tensor, n: int) -> Streams:
    """H_0: n copies of the embedding."""
    return [x for _ in range(n)]


def sum_of_rows(H: Streams) -> Tensor:
    total = torch.zeros_like(H[0])
    for row in H:
        total = total + row
    return total


def hyper_static_matrices(H: Streams, call: Call) -> tuple[list[Any], list[list[Any]], list[Any]]:
    """A_m (n x 1), A_r (n x n), B (1 x n) as they stand, entry by entry."""
    n = len(H)
    A_m = [call["A_m"][i, 0] for i in range(n)]
    A_r = [[call["A_r"][i, j] for j in range(n)] for i in range(n)]
    B = [call["B"][0, j] for j in range(n)]
    return A_m, A_r, B


def hyper_dynamic_matrices(
    H: Streams, call: Call, norm: Function
) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
    """Hbar = norm(H) row by row;  A_m = s_a tanh(Hbar W_m) + static, A_r = s_a tanh(Hbar W_r) + static,

    B = s_b tanh(Hbar W_b)^T + static, with W_m, W_b (d x 1), W_r (d x n). Every entry has a trailing axis of one.
    """
    n = len(H)
    static_m, static_r, static_b = hyper_static_matrices(H, call)
    bar = [norm(row) for row in H]

    def along(i: int, column: Tensor) -> Tensor:
        return torch.tanh((bar[i] * column).sum(dim=-1, keepdim=True))

    A_m = [call["s_a"] * along(i, call["W_m"][:, 0]) + static_m[i] for i in range(n)]
    A_r = [[call["s_a"] * along(i, call["W_r"][:, j]) + static_r[i][j] for j in range(n)] for i in range(n)]
    B = [call["s_b"] * along(i, call["W_b"][:, 0]) + static_b[i] for i in range(n)]
    return A_m, A_r, B


def hyper_call(H: Streams, T: Function, A_m: list[Any], A_r: list[list[Any]], B: list[Any]) -> Streams:
    """h = A_m^T H;  H' = A_r^T H + B^T T(h)^T: h = sum_i A_m[i] H_i, H'_j = sum_i A_r[i, j] H_i + B[j] T(h)."""
    n = len(H)
    h = torch.zeros_like(H[0])
    for i in range(n):
        h = h + A_m[i] * H[i]
    answer = T(h)
    after = []
    for j in range(n):
        row = B[j] * answer
        for i in range(n):
            row = row + A_r[i][j] * H[i]
        after.append(row)
    return after


def hyper(
    x: Tensor, oracles: Sequence[Function], calls: Sequence[Call], n: int, norms: Sequence[Function] | None = None
) -> Tensor:
    """n copies of x, one call after the other, the sum of the rows; dynamic if the norms of the calls are given."""
    H = copies(x, n)
    for index, (T, call) in enumerate(zip(oracles, calls, strict=True)):
        if norms is None:
            H = hyper_call(H, T, *hyper_static_matrices(H, call))
        else:
            H = hyper_call(H, T, *hyper_dynamic_matrices(H, call, norms[index]))
    return sum_of_rows(H)


def hyper_start(index: int, n: int, d: int | None = None) -> Call:
    """B = ones, A_m = e_{l mod n}, A_r = I; with d also the dynamic part: W = 0, s_a = s_b = 0.01."""
    A_m = torch.zeros(n, 1, dtype=torch.float64)
    A_m[index % n, 0] = 1.0
    static = {"A_m": A_m, "A_r": torch.eye(n, dtype=torch.float64), "B": torch.ones(1, n, dtype=torch.float64)}
    if d is None:
        return static
    shapes = {"W_m": (d, 1), "W_r": (d, n), "W_b": (d, 1)}
    maps = {name: torch.zeros(*shape, dtype=torch.float64) for name, shape in shapes.items()}
    scales = {name: torch.tensor(0.01, dtype=torch.float64) for name in ("s_a", "s_b")}
    return {**static, **maps, **scales}


# Manifold-constrained hyper-connections, arXiv 2512.24880, and the lighter form, arXiv 2601.05732.


def mhc_logits(H: Streams, call: Call, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """z = RMSNorm(vec H), stream after stream;  pre~ = a1 z F1 + b1, post~ = a2 z F2 + b2, res~ = a3 z F3 + b3.

    The last axis of res~ has n^2 entries, row after row, or n!.
    """
    z = rms_norm(torch.cat(H, dim=-1), eps)
    pre = call["a1"] * (z @ call["F1"]) + call["b1"]
    post = call["a2"] * (z @ call["F2"]) + call["b2"]
    res = call["a3"] * (z @ call["F3"]) + call["b3"].flatten()
    return pre, post, res


def sinkhorn(res: Tensor, n: int) -> list[list[Tensor]]:
    """R from exp(mat(res~)): 20 times every column divided by its sum, then every row divided by its sum."""
    R = [[torch.exp(res[..., n * i + j : n * i + j + 1]) for j in range(n)] for i in range(n)]
    for _ in range(SINKHORN):
        columns = [sum(R[i][j] for i in range(n)) for j in range(n)]
        R = [[R[i][j] / columns[j] for j in range(n)] for i in range(n)]
        rows = [sum(R[i][j] for j in range(n)) for i in range(n)]
        R = [[R[i][j] / rows[i] for j in range(n)] for i in range(n)]
    return R


def permutations(n: int) -> list[tuple[int, ...]]:
    """All n! of them in lexicographic order, the identity first; P_k has its ones at (i, permutation[i])."""
    return list(itertools.permutations(range(n)))


def permuted(res: Tensor, n: int) -> list[list[Tensor]]:
    """R = sum_k c_k P_k, c = softmax(res~)."""
    c = torch.exp(res - torch.logsumexp(res, dim=-1, keepdim=True))
    R = [[torch.zeros_like(c[..., :1]) for _ in range(n)] for _ in range(n)]
    for k, permutation in enumerate(permutations(n)):
        for i in range(n):
            R[i][permutation[i]] = R[i][permutation[i]] + c[..., k : k + 1]
    return R


def mhc_call(H: Streams, T: Function, call: Call, mixing: str, eps: float) -> Streams:
    """pre = sigma(pre~), post = 2 sigma(post~);  h = pre H;  H' = R H + post^T T(h)^T."""
    n = len(H)
    pre_logits, post_logits, res_logits = mhc_logits(H, call, eps)
    pre = 1.0 / (1.0 + torch.exp(-pre_logits))
    post = 2.0 / (1.0 + torch.exp(-post_logits))
    R = sinkhorn(res_logits, n) if mixing == "sinkhorn" else permuted(res_logits, n)
    h = torch.zeros_like(H[0])
    for i in range(n):
        h = h + pre[..., i : i + 1] * H[i]
    answer = T(h)
    after = []
    for i in range(n):
        row = post[..., i : i + 1] * answer
        for j in range(n):
            row = row + R[i][j] * H[j]
        after.append(row)
    return after


def mhc(
    x: Tensor,
    oracles: Sequence[Function],
    calls: Sequence[Call],
    n: int,
    mixing: str = "sinkhorn",
    eps: float = 1e-5,
) -> Tensor:
    """n copies of x, one call after the other, the sum of the rows; mixing "sinkhorn" or "permutations"."""
    H = copies(x, n)
    for T, call in zip(oracles, calls, strict=True):
        H = mhc_call(H, T, call, mixing, eps)
    return sum_of_rows(H)


def mhc_start(index: int, n: int, d: int, mixing: str = "sinkhorn") -> Call:
    """a = 0.01, F = 0, b1 = b2 = -1 but +1 at stream l mod n; b3 = 0 on the diagonal and -8 elsewhere, or 0 for the

    identity and -8 for the other permutations.
    """
    gates = torch.full((n,), -1.0, dtype=torch.float64)
    gates[index % n] = 1.0
    if mixing == "sinkhorn":
        b3 = torch.full((n, n), -8.0, dtype=torch.float64)
        for i in range(n):
            b3[i, i] = 0.0
    else:
        b3 = torch.full((math.factorial(n),), -8.0, dtype=torch.float64)
        b3[permutations(n).index(tuple(range(n)))] = 0.0
    wide = b3.numel()
    maps = {f"F{m}": torch.zeros(n * d, out, dtype=torch.float64) for m, out in ((1, n), (2, n), (3, wide))}
    scales = {f"a{m}": torch.tensor(0.01, dtype=torch.float64) for m in (1, 2, 3)}
    return {**maps, **scales, "b1": gates, "b2": gates.clone(), "b3": b3}


# Attention residuals, arXiv 2603.15031.


def attended_sources(
    sources: Sequence[Tensor], w: Tensor, eps: float, gain: Tensor | float = 1.0, times_sources: bool = False
) -> Tensor:
    """h = sum_i c_i v_i, c_i = softmax_i(w . (gain .* RMSNorm(v_i))); `times_sources`: number of sources times that."""
    scores = [(w * (gain * rms_norm(v, eps))).sum(dim=-1, keepdim=True) for v in sources]
    total = torch.logsumexp(torch.stack(scores), dim=0)
    h = torch.zeros_like(sources[0])
    for v, score in zip(sources, scores, strict=True):
        h = h + torch.exp(score - total) * v
    return len(sources) * h if times_sources else h


def attnres(
    x: Tensor,
    oracles: Sequence[Function],
    w: Sequence[Tensor],
    eps: float = 1e-5,
    gains: Sequence[Tensor] | None = None,
    times_sources: bool = False,
) -> Tensor:
    """v_0 = x;  h_l = sum_i c_il v_i over v_0 .. v_l, v_{l+1} = T_l(h_l); one more sum, with the last w, is read.

    w has one vector per call and one for the final sum.
    """
    assert len(w) == len(oracles) + 1
    v = [x]
    for index, T in enumerate(oracles):
        v.append(T(attended_sources(v, w[index], eps, 1.0 if gains is None else gains[index], times_sources)))
    return attended_sources(v, w[-1], eps, 1.0 if gains is None else gains[-1], times_sources)


def block_sizes(calls: int, N: int) -> list[int]:
    """N blocks of floor(calls / N) calls, the last takes the rest."""
    size = calls // N
    return [size] * (N - 1) + [calls - size * (N - 1)]


def attnres_blocks(
    x: Tensor,
    oracles: Sequence[Function],
    w: Sequence[Tensor],
    N: int,
    eps: float = 1e-5,
    gains: Sequence[Tensor] | None = None,
    times_sources: bool = False,
) -> Tensor:
    """b_0 = x, b_n the sum of the answers of block n.

    A call of block n reads b_0 .. b_{n-1} and, from the block's second call on, the running sum; b_0 .. b_N are read
    at the end.
    """
    assert len(w) == len(oracles) + 1
    b = [x]
    index = 0
    for size in block_sizes(len(oracles), N):
        running: Tensor | None = None
        for _ in range(size):
            sources = b if running is None else [*b, running]
            gain = 1.0 if gains is None else gains[index]
            answer = oracles[index](attended_sources(sources, w[index], eps, gain, times_sources))
            running = answer if running is None else running + answer
            index += 1
        assert running is not None
        b.append(running)
    return attended_sources(b, w[-1], eps, 1.0 if gains is None else gains[-1], times_sources)


# U-shaped skips.


def unet(x: Tensor, blocks: Sequence[Function], s: Sequence[Any]) -> Tensor:
    """X_i the output of block i of the first half (blocks count from 0); before block L-1-i: x' = x + s_i X_i."""
    L = len(blocks)
    X: list[Tensor] = []
    for block_number, block in enumerate(blocks):
        i = L - 1 - block_number
        if i < L // 2:
            x = x + s[i] * X[i]
        x = block(x)
        if block_number < L // 2:
            X.append(x)
    return x


# Parameters beside those of vanilla: `calls` oracle calls of width d, L blocks, n streams.


def scaled_count(scale: str, calls: int, d: int) -> int:
    """1, d or 2 per call."""
    return calls * {"rezero": 1, "layerscale": d, "scalar": 2}[scale]


def denseformer_count(L: int, k: int = 1, p: int = 1) -> int:
    """floor(i/k) + 1 for every block i that p divides."""
    return sum(i // k + 1 for i in range(1, L + 1) if i % p == 0)


def hyper_static_count(calls: int, n: int) -> int:
    """n (n + 2) per call."""
    return calls * n * (n + 2)


def hyper_dynamic_count(calls: int, n: int, d: int, gain: bool = False) -> int:
    """d (n + 2) + n (n + 2) + 2 per call, plus d if the norm has a gain."""
    return calls * (d * (n + 2) + n * (n + 2) + 2 + (d if gain else 0))


def mhc_count(calls: int, n: int, d: int, mixing: str = "sinkhorn") -> int:
    """(n^2 + 2n)(nd + 1) + 3 per call; with permutations (2n + n!)(nd + 1) + 3."""
    wide = n * n if mixing == "sinkhorn" else math.factorial(n)
    return calls * ((2 * n + wide) * (n * d + 1) + 3)


def attnres_count(calls: int, d: int, gain: bool = False) -> int:
    """d per call and d for the final sum; twice that with the gain of the key norm."""
    return (calls + 1) * d * (2 if gain else 1)


def unet_count(L: int) -> int:
    """L/2 in all."""
    return L // 2
