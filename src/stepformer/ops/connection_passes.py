"""Weights of a token's n streams by kernels (connection_kernels.py), with their gradients (connections.py has the
formulas, and plain PyTorch for them).

Passes that mix the streams by these weights leave the gradient of the streams to this one (row_passes.py): it reads
what arrived for the mixtures, and writes the gradient of every stream once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from stepformer.ops import common
from stepformer.ops import connection_kernels as kernels
from stepformer.ops.common import dense
from stepformer.ops.connection_printing import Numbers, backward, numbers_of, pairing, projecting
from stepformer.ops.operators import traced

Shares = tuple[tuple[int, int], ...]  # which streams and which numbers per token later passes multiply
MOST_STREAMS, MOST_PERMUTED = 8, 4  # more are computed by plain PyTorch
# Of the products: 16 rows, which are multiplied synchronously. With 64 rows and four warps they are not, and Triton
# overwrites rows, which are squared as well, while they are read (tests/support/pipelines.py): gradients of eight
# streams were wrong by 7 %.
TILE = common.Tile(128, 16, 1, stages=3)
BACK = common.Tile(64, 64, 8, stages=3, programs=1)  # the best of 12 on an H200: 32,768 rows of 768, four streams, bf16
# Tokens of a program that makes weights.
SINKHORN, PERMUTED, ALONG = common.Tile(0, 32, 1), common.Tile(0, 16, 4), common.Tile(0, 128, 4)


def supports(n: int, like: Tensor, most: int = MOST_STREAMS) -> bool:
    """Whether kernels take so many streams; the interpreter cannot multiply bf16, and a compiler has its own way."""
    able = like.is_cuda or like.dtype == torch.float32
    numbers = like.numel() // like.shape[-1] * max(like.shape[-1], 128)  # of a stream or its products: 32-bit places
    return able and n <= most and 0 < numbers < 2**31 and not traced(like)


class Streams:
    """n streams and their maps: (outputs, n d), those of all streams, or (outputs, d), the same for each.

    Of the first the products of all streams are added up, (1, tokens, width), of the others not, (n, tokens, width).
    Those of `centred` streams are of the differences from their mean, which is behind them; their last map is of ones.
    """

    def __init__(self, rows: Sequence[Tensor], maps: Tensor, centred: bool = False) -> None:
        self.rows, self.maps = [h.contiguous() for h in rows], maps.to(rows[0].dtype).contiguous()
        self.d = rows[0].shape[-1]
        self.count, self.outputs, self.centred = rows[0].numel() // self.d, len(maps), centred
        self.joined = maps.shape[1] > self.d
        self.wide = max(16, triton.next_power_of_2(self.outputs))
        self.whole = self.wide if self.joined else max(16, triton.next_power_of_2(len(rows) * self.outputs))

    @property
    def sizes(self) -> dict[str, Any]:
        """Of the printed kernels."""
        return {"D": self.d, "STRIDE": self.maps.shape[1], "LINES": self.outputs, "PRECISION": "ieee"}

    def project(self, sums: Tensor | None) -> tuple[Tensor, Tensor]:
        """The products and the sums of squares; for centred streams the `sums` of the maps are needed."""
        kinds = 1 if self.joined else len(self.rows)
        products = self.maps.new_empty(kinds, self.count, self.wide, dtype=torch.float32)
        squares = self.maps.new_empty(kinds, self.count, dtype=torch.float32)
        tile = self.project_tile()
        projecting(len(self.rows), self.joined)[(triton.cdiv(self.count, tile.rows),)](
            *self.rows, self.maps, sums, products, squares, self.count, **self.sizes, WIDE=self.wide,
            CENTRED=self.centred, BLOCK_M=tile.rows, BLOCK_K=tile.chunk, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return products, squares

    def project_tile(self) -> common.Tile:
        """The tile of `project`: rows and maps of a stream are there once for each stage on its way."""

        def taken(tile: common.Tile) -> int:
            return (tile.stages - 1) * (tile.rows + self.wide) * tile.chunk * self.maps.element_size()

        return fitting(TILE, taken, self.maps.device, least=2)

    def back_tile(self, arrived: int, weights: Sequence[tuple[int | None, ...]]) -> common.Tile:
        """The tile of `back`: rows, numbers and products are there once for each stage on its way, the maps once, and
        what is multiplied and stored in another order than it was loaded. That is 1.0 to 1.8 times what Triton takes (n
        up to 8, sm_90), and once, of a tile of 32 x 32, 6 KiB less."""
        n, item = len(self.rows), self.maps.element_size()
        numbers = sum(map(len, numbers_of(n, self.joined, tuple(weights))))

        def taken(tile: common.Tile) -> int:
            rows = (n + arrived + len(weights)) * tile.rows * tile.chunk * item
            stage = rows + tile.rows * self.whole * item + numbers * tile.rows * 4
            other = tile.rows * (tile.chunk * (4 + item) + self.whole * item)
            return (tile.stages - 1) * stage + n * self.whole * tile.chunk * item + other + 8192

        return fitting(BACK, taken, self.maps.device)

    def back(
        self, arrived: Sequence[Tensor | None], weighted: Weighted, changed: Tensor, factor: Tensor, stats: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """The gradients of the streams and of the maps: what arrived, `weighted` rows times lines of `stats`, what the
        gradients of the products give (`changed`, those of all streams side by side), and a multiple of each row."""
        tile = self.back_tile(sum(grad is not None for grad in arrived), [lines for _, lines in weighted])
        columns, tiles = triton.cdiv(self.d, tile.chunk), triton.cdiv(self.count, tile.rows)
        splits = min(tiles, max(1, tile.programs * common.multiprocessors(self.maps.device) // columns))
        found = [torch.empty_like(row) for row in self.rows]
        lines = splits if self.joined else splits * len(self.rows)
        partial = self.maps.new_empty(lines, self.maps.numel(), dtype=torch.float32)
        given, weights = tuple(grad is not None for grad in arrived), tuple(w for _, w in weighted)
        kernel = backward(len(self.rows), self.joined, given, weights)
        pairs = self.pair(numbers_of(len(self.rows), self.joined, weights), factor, stats)
        kernel[(columns, splits)](
            *self.rows, *(dense(grad) for grad in arrived if grad is not None), *(dense(t) for t, _ in weighted),
            *found, changed, pairs, self.maps, partial, self.count, triton.cdiv(tiles, splits),
            **self.sizes, WIDE=self.whole, BLOCK_M=tile.rows, BLOCK_K=tile.chunk, STAGES=tile.stages,
            num_warps=tile.warps,
        )  # fmt: skip
        return found, self.add_up(partial) if self.centred else common.sum_lines(partial).view_as(self.maps)

    def add_up(self, partial: Tensor) -> Tensor:
        """The sum over the lines, of each map but the last without its mean."""
        total = partial.new_empty(len(self.maps) - 1, self.d)
        columns = triton.next_power_of_2(self.d)
        rows = max(1, 8192 // columns)
        kernels.centred_sum_kernel[(len(total),)](
            partial, total, len(partial), WIDTH=self.maps.numel(), D=self.d, TURNS=triton.cdiv(len(partial), rows),
            ROWS=rows, COLUMNS=columns, num_warps=8,
        )  # fmt: skip
        return total

    def pair(self, numbers: Numbers, factor: Tensor, stats: Tensor) -> Tensor:
        """All numbers of a token that `back` reads, two of a stream side by side."""
        pairs = stats.new_empty(sum(map(len, numbers)) // 2, self.count, 2)
        pairing(numbers)[(triton.cdiv(self.count, 256),)](factor, stats, pairs, self.count, BLOCK=256)
        return pairs.view(torch.int64)


# A row, and for each stream the line of numbers by which its gradient has it, or None.
Weighted = Sequence[tuple[Tensor, tuple[int | None, ...]]]


class _Weights(torch.autograd.Function):
    """Streams, which are handed on, the lines of their weights, and rows that take the gradients of what later passes
    make of both (`shares`: which stream and which line); `how` launches what lies between."""

    @staticmethod
    def forward(ctx: Any, how: Any, shares: Shares, maps: Tensor, line: Tensor, *H: Tensor) -> Any:
        rounded, sums = rounded_maps(maps, H[0].dtype) if how.centred else (maps, None)
        streams = Streams(H, rounded, how.centred)
        products, squares = streams.project(sums)
        line = line.float().contiguous()
        stats = products.new_empty(how.lines(streams), streams.count)
        how.forward(streams, products, squares, line, stats)
        ctx.how, ctx.kind, ctx.shares = how, maps.dtype, shares
        ctx.save_for_backward(products, squares, line, stats, streams.maps, sums, *streams.rows)
        ctx.set_materialize_grads(False)
        return *H, stats, *(H[row].detach() for row, _ in shares)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        products, squares, line, stats, maps, sums, *rows = ctx.saved_tensors
        arrived, of_stats, of_shares = grads[: len(rows)], grads[len(rows)], grads[len(rows) + 1 :]
        streams = Streams(rows, maps, ctx.how.centred)
        changed, factor = rows[0].new_empty(streams.count, streams.whole), torch.empty_like(squares)
        of_stats = torch.zeros_like(stats) if of_stats is None else dense(of_stats)
        partial = ctx.how.backward(streams, products, squares, sums, line, of_stats, changed, factor)
        weighted = gathered(ctx.shares, of_shares, len(rows))
        found, slopes = streams.back(arrived, weighted, changed, factor, stats)
        return None, None, slopes.to(ctx.kind), common.sum_lines(partial)[: len(line)], *found


def fitting(
    tile: common.Tile, taken: Callable[[common.Tile], int], device: torch.device, least: int = 1
) -> common.Tile:
    """The tile, with fewer stages (at `least` so many) or smaller where shared memory has no room for what it takes."""
    room = common.shared_memory(device)
    while taken(tile) > room:
        if tile.stages > least:
            tile = tile._replace(stages=tile.stages - 1)
        elif tile.rows > 16 or tile.chunk > 16:
            tile = tile._replace(rows=max(16, tile.rows // 2), chunk=max(16, tile.chunk // 2))
        else:
            break
    return tile


def rounded_maps(maps: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """In this precision, with a map of ones behind them, and the sum of each."""
    count, d = maps.shape
    rounded, sums = maps.new_empty(count + 1, d, dtype=dtype), maps.new_empty(count + 1, dtype=torch.float32)
    columns = triton.next_power_of_2(d)
    kernels.rounded_kernel[(count + 1,)](maps.contiguous(), rounded, sums, count, D=d, COLUMNS=columns)
    return rounded, sums


def gathered(shares: Shares, grads: Sequence[Tensor | None], n: int) -> list[tuple[Tensor, tuple[int | None, ...]]]:
    """Each gradient once, with the line of every stream that has it: passes give one tensor for several products."""
    found: list[tuple[Tensor, list[int | None]]] = []
    for (stream, line), grad in zip(shares, grads, strict=True):
        if grad is None:
            continue
        fits = [lines for t, lines in found if same_memory(t, grad) and lines[stream] is None]
        if not fits:
            fits = [[None] * n]
            found.append((grad, fits[0]))
        fits[0][stream] = line
    return [(grad, tuple(lines)) for grad, lines in found]


def same_memory(one: Tensor, two: Tensor) -> bool:
    return one.data_ptr() == two.data_ptr() and one.stride() == two.stride() and one.dtype == two.dtype


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

    def backward(
        self, streams: Streams, products: Tensor, squares: Tensor, sums: Tensor | None, line: Tensor, *rest: Tensor
    ) -> Tensor:
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
        sizes = {"D": streams.d, "EACH": self.each, "WIDE": streams.wide, "CENTRED": self.centred}
        grid = triton.cdiv(streams.count, ALONG.rows), len(streams.rows)
        return grid, {**sizes, "BLOCK": ALONG.rows, "num_warps": ALONG.warps}

    def lines(self, streams: Streams) -> int:
        return self.each * len(streams.rows)

    def forward(self, streams: Streams, products: Tensor, squares: Tensor, line: Tensor, stats: Tensor) -> None:
        grid, sizes = self.launch(streams)
        kernels.along_kernel[grid](products, squares, line, stats, streams.count, self.eps, **sizes)

    def backward(
        self, streams: Streams, products: Tensor, squares: Tensor, sums: Tensor | None, line: Tensor, *rest: Tensor
    ) -> Tensor:
        grid, sizes = self.launch(streams)
        partial = products.new_empty(grid[0] * grid[1], _width(line))
        kernels.along_backward_kernel[grid](
            products, squares, sums, line, *rest, partial, streams.count, self.eps, WIDTH=_width(line),
            PADDED=triton.next_power_of_2(_width(line)), WHOLE=streams.whole, **sizes,
        )  # fmt: skip
        return partial


def connections(
    H: Sequence[Tensor], maps: Tensor, line: Tensor, eps: float, steps: int, table: Tensor | None, shares: Shares = ()
) -> list[Tensor]:
    """As `connections.connections`, by so many Sinkhorn steps, or with none from a table of permutations."""
    return _given(Constrained(eps, steps, table), maps, line, H, shares)


def along(
    H: Sequence[Tensor], maps: Tensor, line: Tensor, eps: float, centred: bool, shares: Shares = ()
) -> list[Tensor]:
    """As `connections.along_rows`."""
    return _given(Along(eps, len(maps), centred), maps, line, H, shares)


def _given(how: Constrained | Along, maps: Tensor, line: Tensor, H: Sequence[Tensor], shares: Shares) -> list[Tensor]:
    n = len(H)
    found = _Weights.apply(how, tuple((row, weight - n) for row, weight in shares), maps, line, *H)
    return [*found[:n], *found[n].view(-1, *H[0].shape[:-1]).unbind(0), *found[n + 1 :]]
