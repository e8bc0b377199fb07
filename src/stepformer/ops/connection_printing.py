"""The kernels of hyper-connections that are printed for a number of streams (connection_passes.py launches them)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

from stepformer.ops import connection_kernels as kernels
from stepformer.ops.row_printing import load_kernel

Numbers = tuple[tuple[tuple[str, int], ...], ...]  # of each stream: lines of `stats`, and of `factor`


def numbers_of(n: int, joined: bool, weights: tuple[tuple[int | None, ...], ...]) -> Numbers:
    """What the backward kernel multiplies rows by, an even number for each stream; the factor of all streams is among
    the first one's."""
    found = []
    for i in range(n):
        own = [("stats", line) for lines in weights if (line := lines[i]) is not None]
        own += [("factor", i)] if i == 0 or not joined else []
        found.append((*own, *own[: len(own) % 2]))
    return tuple(found)


@cache
def pairing(numbers: Numbers) -> Any:
    """Numbers as `Streams.pair` gives them. With one load for two of them the backward kernel of four streams has 44
    instructions that load a tile instead of 67, and no register spills (triton 3.6, sm_90)."""
    lines = list(chain(*numbers))
    body = ["m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "which = tl.arange(0, 2)[None, :]"]
    for j, (source, line) in enumerate(lines):  # all are under way before the first is needed
        body.append(f"number{j} = tl.load({source} + {line} * count + m, mask=m < count)")
    for j in range(0, len(lines), 2):
        at = f"pairs + ({j // 2} * count + m[:, None]) * 2 + which"
        body.append(f"tl.store({at}, tl.join(number{j}, number{j + 1}), mask=(m < count)[:, None])")
    return printed("pairing_kernel", ["factor", "stats", "pairs", "count"], "BLOCK", body)


def printed(name: str, parameters: Sequence[str], sizes: str, body: Sequence[str]) -> Any:
    signature = ", ".join([*parameters, *(f"{size}: tl.constexpr" for size in sizes.split())])
    lines = ["@triton.jit", f"def {name}({signature}):", *(f"    {line}" for line in body)]
    return load_kernel(name, "\n".join(lines) + "\n", (kernels.project, kernels.store_products, kernels.per_token))


@cache
def projecting(n: int, joined: bool) -> Any:
    """The products of n streams with their maps: of all of them together, or of each."""
    begin = "total, square = tl.zeros((BLOCK_M, WIDE), tl.float32), tl.zeros((BLOCK_M, BLOCK_K // 8), tl.float32)"
    sizes = "D STRIDE LINES WIDE CENTRED PRECISION BLOCK_M BLOCK_K"
    body = []
    for i in range(n):
        place, maps = (0, f"maps + {i} * D") if joined else (i, "maps")
        if i == 0 or not joined:
            body.append(begin)
        body.append(f"total, square = project(h{i}, {maps}, sums, total, square, n, {', '.join(sizes.split())})")
        if i == n - 1 or not joined:
            at = f"out + {place} * n * WIDE, squares + {place} * n"
            body.append(f"store_products({at}, total, square, n, WIDE, BLOCK_M)")
    parameters = [*(f"h{i}" for i in range(n)), "maps", "sums", "out", "squares", "n"]
    return printed("project_kernel", parameters, sizes, body)


@cache
def backward(n: int, joined: bool, arrived: tuple[bool, ...], weights: tuple[tuple[int | None, ...], ...]) -> Any:
    """Some columns of all streams' gradients, what arrived + weighted rows + dP F + factor h, and of those of the maps,
    dP^T h, of which program (columns, s) adds up the tokens of every grid's s-th tile.

    Maps of each stream are taken for maps of all of them, with zeros: one tile of dP, whichever stream it is of. (The
    gradient of a centred stream's last one as a number per token took 278 us instead of 207.)
    """
    streams = [f"h{i}" for i in range(n)]
    parameters = [*streams, *(f"a{i}" for i in range(n) if arrived[i]), *(f"w{k}" for k in range(len(weights)))]
    parameters += [*(f"o{i}" for i in range(n)), "changed", "pairs", "maps", "partial", "count", "turns"]
    body = ["at, o = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, WIDE)"]
    for i in range(n):
        first, column = ("0", f"{i} * D") if joined else (f"{i} * LINES", "0")
        body += [
            f"own{i} = o - {first}",
            f"place{i} = own{i}[:, None] * STRIDE + at[None, :] + {column}",
            f"inside{i} = ((own{i} >= 0) & (own{i} < LINES))[:, None] & (at < D)[None, :]",
            f"tile{i} = tl.load(maps + place{i}, mask=inside{i}, other=0.0)",
            f"total{i} = tl.zeros((WIDE, BLOCK_K), tl.float32)",
        ]
    body.append("for turn in tl.range(0, turns, num_stages=STAGES):")
    loop = [
        "m = (turn * tl.num_programs(1) + tl.program_id(1)) * BLOCK_M + tl.arange(0, BLOCK_M)",
        "mask = (m < count)[:, None] & (at < D)[None, :]",
        "place = m[:, None] * D + at[None, :]",
        f"real = (m < count)[:, None] & (o < LINES * {1 if joined else n})[None, :]",
        "dp = tl.load(changed + m[:, None] * WIDE + o[None, :], mask=real, other=0.0)",
        *(f"weighted{k} = tl.load(w{k} + place, mask=mask, other=0.0).to(tl.float32)" for k in range(len(weights))),
    ]
    pair, by = 0, ""
    for i, own in enumerate(numbers_of(n, joined, weights)):
        for j in range(0, len(own), 2):
            loop.append(f"number{i}_{j}, number{i}_{j + 1} = per_token(pairs + {pair} * count, m, count)")
            pair += 1
        named = {which: f"number{i}_{j}" for j, which in enumerate(own)}
        by = named.get(("factor", i), by)
        loop.append(f"row = tl.load(h{i} + place, mask=mask, other=0.0)")
        loop.append(f"back = tl.dot(dp, tile{i}, input_precision=PRECISION) + {by} * row.to(tl.float32)")
        if arrived[i]:
            loop.append(f"back += tl.load(a{i} + place, mask=mask, other=0.0).to(tl.float32)")
        for k, numbers in enumerate(weights):
            if (number := numbers[i]) is not None:
                loop.append(f"back += {named['stats', number]} * weighted{k}")
        loop.append(f"tl.store(o{i} + place, back, mask=mask)")
        loop.append(f"total{i} = tl.dot(tl.trans(dp), row, total{i}, input_precision=PRECISION)")
    body += [f"    {line}" for line in loop]
    body.append(f"line = partial + tl.program_id(1).to(tl.int64) * (LINES * STRIDE * {1 if joined else n})")
    for i in range(n):
        line = "line" if joined else f"line + {i} * LINES * STRIDE"
        body.append(f"tl.store({line} + place{i}, total{i}, mask=inside{i})")
    sizes = "D STRIDE LINES PRECISION WIDE BLOCK_M BLOCK_K STAGES"
    return printed("streams_backward_kernel", parameters, sizes, body)
