"""How hyper-connections weigh a token's n streams: maps of each, or of all of them, and doubly stochastic matrices.

Dynamic ones take tanh(norm(h) . w) of every stream h and each of their vectors w (`along`); constrained ones

    z = RMSNorm(vec H);  y = a z F + b, the gate a of its part;  pre = sigmoid(y1), post = 2 sigmoid(y2), R from y3

Sinkhorn: 20 times every column of exp(y3) is divided by its sum, then every row. The first division makes the largest
number of a column irrelevant, so it is taken off before the exponential. Permutations: R = sum_k softmax(y3)_k P_k.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stepformer.ops import kernels
from stepformer.ops.dtypes import working_dtype
from stepformer.ops.symbols import Symbol, record

if TYPE_CHECKING:
    from stepformer.ops.connection_passes import Shares

SINKHORN = 20
GATES = 3


def mixtures(lines: Sequence[Sequence[Any]], rows: Sequence[Any]) -> Sequence[Any]:
    """The sum of all rows by the weights of every line.

    Weights that are numbers are one matrix on a CPU: term by term each would take a pass over its row, and in the
    backward pass a sum over it.
    """
    weights, row = [weight for line in lines for weight in line], rows[0]
    plain = isinstance(row, Tensor) and row.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    if plain and all(isinstance(w, Tensor) and w.numel() == 1 and w.dtype is row.dtype for w in weights):
        matrix = torch.cat([w.reshape(1) for w in weights]).view(-1, len(rows))
        return (matrix @ torch.stack(list(rows)).flatten(1)).unflatten(1, row.shape).unbind()
    sums = [[weight * row for weight, row in zip(line, rows, strict=True)] for line in lines]
    return [sum(others, first) for first, *others in sums]


def along(H: list[Any], maps: Any, scales: Any, starts: Any, eps: float, centred: bool) -> tuple[list[Any], list[Any]]:
    """The streams (..., d), and of each start + scale tanh(norm(h) . w), (..., 1), for every line w of `maps`.

    The second line, that of the weights of the answer, has the second scale, all others the first.
    """
    n, each = len(H), len(starts[0])
    if not isinstance(maps, Symbol):
        norm = F.layer_norm if centred else F.rms_norm
        along = [torch.tanh(F.linear(norm(h, h.shape[-1:], eps=eps), maps)).split(1, dim=-1) for h in H]
        return H, [[scales[int(k == 1)] * t + starts[i][k] for k, t in enumerate(line)] for i, line in enumerate(along)]
    numbers = [*scales, *(number for line in starts for number in line)]
    found = record("along", [*H, maps], ["row"] * n + ["stat"] * n * each, numbers, eps=eps, centred=centred)
    return found[:n], [found[n + i * each :][:each] for i in range(n)]


def along_rows(*tensors: Tensor, eps: float, centred: bool, dtype: torch.dtype, shares: Shares = ()) -> list[Tensor]:
    """The same from n streams, the maps and a line of numbers: the streams, and one number per token each (...).

    `shares`: which rows and numbers, counted in what is given here, later passes multiply. Kernels give one more row
    for each, which takes the gradient of that product; its values mean nothing.
    """
    *H, maps, line = tensors
    if kernels.usable(*H, maps):
        from stepformer.ops import connection_passes as fast

        if fast.supports(len(H), H[0]):
            return fast.along(H, maps, line[: 2 + len(H) * len(maps)], eps, centred, shares)
    starts = line[2 : 2 + len(H) * len(maps), None].unflatten(0, (len(H), -1))  # not numbers: their dtype counts
    found = along(H, maps.to(H[0].dtype), line[:2, None], starts, eps, centred)[1]
    return [*H, *(t.squeeze(-1) for own in found for t in own)]


def read(H: list[Any], maps: Any, numbers: Sequence[Any], eps: float, mixing: str) -> tuple[list[Any], Sequence[Any]]:
    """The streams (..., d) and pre, (..., 1) each; `maps` (2n + n^2 or 2n + n!, n d); `numbers`: a, b1, b2, b3."""
    n = len(H)
    if isinstance(maps, Symbol):
        found = _recorded(H, maps, numbers, eps, mixing)
        return found[:n], found[n : 2 * n]
    line = torch.cat(list(numbers))
    y = logits(H, maps[:n], eps) * line[:1] + line[GATES : GATES + n]
    return H, torch.sigmoid(y).to(maps.dtype).split(1, dim=-1)


def mix(
    H: list[Any], maps: Any, numbers: Sequence[Any], eps: float, mixing: str
) -> tuple[list[Any], Sequence[Sequence[Any]], Sequence[Any]]:
    """The streams, R line by line, and post, (..., 1) each."""
    n = len(H)
    if isinstance(maps, Symbol):
        found = _recorded(H, maps, numbers, eps, mixing)
        return found[:n], [found[3 * n + i * n :][:n] for i in range(n)], found[2 * n : 3 * n]
    line = torch.cat(list(numbers))
    y = logits(H, maps[n:], eps)
    post = 2 * torch.sigmoid(y[..., :n] * line[1:2] + line[GATES + n : GATES + 2 * n])
    R = doubly_stochastic(y[..., n:] * line[2:3] + line[GATES + 2 * n :], n, mixing).to(maps.dtype)
    post = post.to(maps.dtype)
    return H, [R[..., i, :].split(1, dim=-1) for i in range(n)], post.split(1, dim=-1)


def _recorded(H: list[Any], maps: Symbol, numbers: Sequence[Any], eps: float, mixing: str) -> list[Any]:
    n = len(H)
    kinds = ["row"] * n + ["stat"] * (2 * n + n * n)
    return record("connections", [*H, maps], kinds, numbers, eps=eps, mixing=mixing)


def connections(*tensors: Tensor, eps: float, mixing: str, dtype: torch.dtype, shares: Shares = ()) -> list[Tensor]:
    """The streams, pre, post and R, one number per token each (...), from n streams, the maps and a line of numbers.

    `shares`: as of `along_rows`.
    """
    *H, maps, line = tensors
    n = len(H)
    line = line[: GATES + len(maps)]
    if kernels.usable(*H, maps):
        from stepformer.ops import connection_passes as fast

        if mixing == "sinkhorn" and fast.supports(n, H[0]):
            return fast.connections(H, maps, line, eps, SINKHORN, None, shares)
        if mixing != "sinkhorn" and fast.supports(n, H[0], fast.MOST_PERMUTED):
            return fast.connections(H, maps, line, eps, 0, permutations(n, line.device), shares)
    y = logits(H, maps.to(H[0].dtype), eps)
    gates = torch.cat([line[i : i + 1].expand(k) for i, k in enumerate((n, n, len(maps) - 2 * n))])
    y = y * gates + line[GATES:]
    R = doubly_stochastic(y[..., 2 * n :], n, mixing).flatten(-2)
    return [*H, *torch.cat([torch.sigmoid(y[..., :n]), 2 * torch.sigmoid(y[..., n : 2 * n]), R], dim=-1).unbind(-1)]


def logits(H: Sequence[Tensor], maps: Tensor, eps: float) -> Tensor:
    """z F (..., outputs) of the streams as one vector, in fp32 at least."""
    joined = torch.cat(list(H), dim=-1)
    return F.linear(F.rms_norm(joined, joined.shape[-1:], eps=eps), maps).to(working_dtype(joined.dtype))


def doubly_stochastic(y: Tensor, n: int, mixing: str) -> Tensor:
    """R (..., n, n) from its logits (..., n^2), row after row, or (..., n!)."""
    if mixing == "permutations":
        return (torch.softmax(y, dim=-1) @ permutations(n, y.device).to(y.dtype)).unflatten(-1, (n, n))
    y = y.unflatten(-1, (n, n))
    R = torch.exp(y - y.detach().amax(dim=-2, keepdim=True))
    for _ in range(SINKHORN):
        R = R / R.sum(dim=-2, keepdim=True)
        R = R / R.sum(dim=-1, keepdim=True)
    return R


@cache
def permutations(n: int, device: torch.device) -> Tensor:
    """The n! permutation matrices (n!, n^2), the identity first, then in lexicographic order."""
    with torch.inference_mode(False):  # whoever asks first, others may want gradients
        return torch.stack([torch.eye(n)[list(p)].flatten() for p in itertools.permutations(range(n))]).to(device)
