"""Weights of a token's n streams by kernels (connection_kernels.py), with their gradients (connections.py has the
formulas, and plain PyTorch for them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from stepformer.ops import common
from stepformer.ops import connection_kernels as kernels
from stepformer.ops.common import dense
from stepformer.ops.operators import traced

MOST_STREAMS = 8
TILE = common.Tile(64, 64, 4)  # columns, rows and warps of the products
BACK = common.Tile(64, 64, 4, stages=3, programs=4)  # and of those backward
SINKHORN, PERMUTED = common.Tile(0, 32, 1), common.Tile(0, 16, 4)  # tokens of a program that makes weights


def supports(n: int, like: Tensor) -> bool:
    """Whether kernels take so many streams; the interpreter cannot multiply bf16, and a compiler has its own way."""
    able = like.is_cuda or like.dtype == torch.float32
    return able and n <= MOST_STREAMS and like.numel() > 0 and not traced(like)


class Streams:
    """n streams and their maps: (outputs, n d), those of all streams, or (outputs, d), the same for each.

    Of the first the products of all streams are added up, (1, tokens, width), of the others not, (n, tokens, width).
    """

    def __init__(self, rows: Sequence[Tensor], maps: Tensor) -> None:
        self.rows, self.maps = [h.contiguous() for h in rows], maps.to(rows[0].dtype).contiguous()
        self.d = rows[0].shape[-1]
        self.count, self.outputs = rows[0].numel() // self.d, len(maps)
        self.joined = maps.shape[1] > self.d
        self.wide = max(16, triton.next_power_of_2(self.outputs))

    def _places(self) -> list[tuple[int, Tensor]]:
        """Of each stream: where its products are, and its maps."""
        return [(0, self.maps[:, i * self.d :]) if self.joined else (i, self.maps) for i in range(len(self.rows))]

    def project(self, centred: bool) -> tuple[Tensor, Tensor]:
        """The products, and the sums of squares; `centred`: less the mean, of which the last map is."""
        kinds = 1 if self.joined else len(self.rows)
        products = self.maps.new_empty(kinds, self.count, self.wide, dtype=torch.float32)
        squares = self.maps.new_empty(kinds, self.count, dtype=torch.float32)
        for i, (row, (place, maps)) in enumerate(zip(self.rows, self._places(), strict=True)):
            kernels.project_kernel[(triton.cdiv(self.count, TILE.rows),)](
                row, maps, products[place], squares[place], self.count, D=self.d, JOINED=self.maps.shape[1],
                FIRST=i == 0 or not self.joined, OUTPUTS=self.outputs, WIDE=self.wide, CENTRED=centred,
                PRECISION="ieee", BLOCK_M=TILE.rows, BLOCK_K=TILE.chunk, num_warps=TILE.warps,
            )  # fmt: skip
        return products, squares

    def back(self, arrived: Sequence[Tensor | None], changed: Tensor, factor: Tensor) -> tuple[list[Tensor], Tensor]:
        """The gradients of the streams and of the maps from those of the products, and a multiple of each row."""
        columns, tiles = triton.cdiv(self.d, BACK.chunk), triton.cdiv(self.count, BACK.rows)
        splits = min(tiles, max(1, BACK.programs * common.multiprocessors(self.maps.device) // columns))
        found, of_maps = [], []
        for row, grad, (place, maps) in zip(self.rows, arrived, self._places(), strict=True):
            found.append(torch.empty_like(row))
            of_maps.append(self.maps.new_empty(splits, self.outputs * self.d, dtype=torch.float32))
            kernels.streams_backward_kernel[(columns, splits)](
                row, dense(grad), changed[place], factor[place], maps, found[-1], of_maps[-1], self.count,
                triton.cdiv(tiles, splits), D=self.d, JOINED=self.maps.shape[1], OUTPUTS=self.outputs, WIDE=self.wide,
                PRECISION="ieee", BLOCK_M=BACK.rows, BLOCK_K=BACK.chunk, STAGES=BACK.stages, num_warps=BACK.warps,
            )  # fmt: skip
        if not self.joined:
            return found, common.sum_lines(torch.cat(of_maps)).view(self.outputs, self.d)
        return found, torch.cat([common.sum_lines(lines).view(self.outputs, self.d) for lines in of_maps], dim=1)


class _Weights(torch.autograd.Function):
    """Streams, which are handed on, and the lines of their weights; `how` launches what lies between."""

    @staticmethod
    def forward(ctx: Any, how: Any, maps: Tensor, line: Tensor, *H: Tensor) -> Any:
        streams = Streams(H, maps)
        products, squares = streams.project(how.centred)
        line = line.float().contiguous()
        stats = products.new_empty(how.lines(streams), streams.count)
        how.forward(streams, products, squares, line, stats)
        ctx.how, ctx.kind = how, maps.dtype
        ctx.save_for_backward(products, squares, line, streams.maps, *streams.rows)
        ctx.set_materialize_grads(False)
        return *H, stats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        products, squares, line, maps, *rows = ctx.saved_tensors
        *arrived, of_stats = grads
        if of_stats is None:
            return None, None, None, *arrived
        streams = Streams(rows, maps)
        changed, factor = torch.empty_like(products, dtype=rows[0].dtype), torch.empty_like(squares)
        partial = ctx.how.backward(streams, products, squares, line, dense(of_stats), changed, factor)
        found, of_maps = streams.back(arrived, changed, factor)
        return None, of_maps.to(ctx.kind), common.sum_lines(partial)[: len(line)], *found


def _width(line: Tensor) -> int:
    return -(-len(line) // 8) * 8


class Constrained(NamedTuple):
    """Weights by Sinkhorn steps, or with none from a table of permutations."""

    eps: float
    steps: int
    table: Tensor | None
    centred: bool = False

    def sizes(self, streams: Streams) -> dict[str, int]:
        n = len(streams.rows)
        last, tile = streams.outputs - 2 * n, SINKHORN if self.steps else PERMUTED
        padded = {"NP": triton.next_power_of_2(n), "LP": triton.next_power_of_2(last)}
        sizes = {"D": streams.d, "N": n, "STEPS": self.steps, "LAST": last, "WIDE": streams.wide, **padded}
        return {**sizes, "BLOCK": tile.rows, "num_warps": tile.warps}

    def lines(self, streams: Streams) -> int:
        return 2 * len(streams.rows) + len(streams.rows) ** 2

    def forward(self, streams: Streams, products: Tensor, squares: Tensor, line: Tensor, stats: Tensor) -> None:
        sizes = self.sizes(streams)
        kernels.weights_kernel[(triton.cdiv(streams.count, sizes["BLOCK"]),)](
            products, squares, line, self.table, stats, streams.count, self.eps, **sizes
        )

    def backward(self, streams: Streams, products: Tensor, squares: Tensor, line: Tensor, *rest: Tensor) -> Tensor:
        sizes = self.sizes(streams)
        programs = triton.cdiv(streams.count, sizes["BLOCK"])
        partial = products.new_zeros(programs, _width(line))
        scratch = products.new_empty(programs, 2 * self.steps * sizes["NP"] * sizes["BLOCK"])
        kernels.weights_backward_kernel[(programs,)](
            products, squares, line, self.table, *rest, partial, scratch, streams.count, self.eps,
            WIDTH=_width(line), **sizes,
        )  # fmt: skip
        return partial


class Along(NamedTuple):
    """Weights by the stream's own direction, `each` of one stream."""

    eps: float
    each: int
    centred: bool

    def launch(self, streams: Streams) -> tuple[tuple[int, int], dict[str, Any]]:
        sizes = {"D": streams.d, "EACH": self.each, "WIDE": streams.wide, "CENTRED": self.centred, "BLOCK": TILE.rows}
        return (triton.cdiv(streams.count, TILE.rows), len(streams.rows)), sizes

    def lines(self, streams: Streams) -> int:
        return self.each * len(streams.rows)

    def forward(self, streams: Streams, products: Tensor, squares: Tensor, line: Tensor, stats: Tensor) -> None:
        grid, sizes = self.launch(streams)
        kernels.along_kernel[grid](products, squares, line, stats, streams.count, self.eps, **sizes)

    def backward(self, streams: Streams, products: Tensor, squares: Tensor, line: Tensor, *rest: Tensor) -> Tensor:
        grid, sizes = self.launch(streams)
        partial = products.new_zeros(grid[0] * grid[1], _width(line))
        kernels.along_backward_kernel[grid](
            products, squares, line, *rest, partial, streams.count, self.eps, WIDTH=_width(line), **sizes
        )
        return partial


def connections(
    H: Sequence[Tensor], maps: Tensor, line: Tensor, eps: float, steps: int, table: Tensor | None
) -> list[Tensor]:
    """As `connections.connections`, by so many Sinkhorn steps, or with none from a table of permutations."""
    return _given(Constrained(eps, steps, table), maps, line, H)


def along(H: Sequence[Tensor], maps: Tensor, line: Tensor, eps: float, centred: bool) -> list[Tensor]:
    """As `connections.along_rows`. A LayerNorm's (h - mean) . w is h . (w - mean of w); its mean is a map of ones."""
    each = len(maps)
    if centred:
        maps = torch.cat([maps - maps.mean(dim=1, keepdim=True), torch.ones_like(maps[:1])])
    return _given(Along(eps, each, centred), maps, line, H)


def _given(how: Constrained | Along, maps: Tensor, line: Tensor, H: Sequence[Tensor]) -> list[Tensor]:
    *rows, stats = _Weights.apply(how, maps, line, *H)
    return [*rows, *stats.view(-1, *rows[0].shape[:-1]).unbind(0)]
