"""Calls of the decoding kernels (row_kernels.py): what they take, in which sizes they run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepformer.ops import common
from stepformer.ops.row_kernels import (
    ask_weights,
    attend_all_kernel,
    attend_kernel,
    await_others,
    embed_kernel,
    finish_kernel,
    finish_product,
    linear_kernel,
    many_rows_kernel,
)
from stepformer.ops.row_printing import StepPrinter, load_kernel
from stepformer.ops.row_programs import Program, by_text

ACTIVATIONS = {"": 0, "gelu": 1, "gelu-tanh": 2, "swiglu": 3, "sigmoid": 4, "relu2": 5}
FEW = 4  # rows up to which a product takes them one by one, and beyond which matrices are faster
WIDEST = 2048  # vectors that a product computes for itself are at most so long
TILE = 8192  # numbers of a weight that one program of 128 threads holds at once
KEYS = 128  # keys that one program looks at
STRETCHES = 16  # at most so many programs share a row's keys
WARPS = 4
WIDE = 4096  # so much of a row of a weight is asked for at once
SPARE = 32_768  # bytes of shared memory that a compiler may take for itself


class Launching:
    """How these kernels are launched on a GPU that can (OVERLAP of row_kernels.py)."""

    overlap = 2


def overlap(like: Tensor) -> int:
    """OVERLAP of a launch: none in the interpreter, or before compute capability 9."""
    nvidia = like.is_cuda and torch.version.hip is None and hasattr(tl.extra.cuda, "gdc_wait")
    able = nvidia and torch.cuda.get_device_capability(like.device)[0] >= 9
    return Launching.overlap if able else 0


def dependent(like: Tensor, rows: int = 1) -> dict[str, Any]:
    """The arguments of a launch that may begin before its predecessor ends.

    Kernels of many rows fill the device: more than two of them at a time get in each other's way (16 rows of vanilla on
    an H200: 349 us a step with two at a time, 408 with as many as fit, 410 without overlap).
    """
    how = min(overlap(like), 1 if rows > FEW else 2)
    return {"OVERLAP": how, "launch_pdl": True} if how else {"OVERLAP": 0}


@dataclass
class Pending:
    """A pass that has not run: a product may compute it for itself. `named`: its rows, gains and numbers by name.

    `wanted` names the outputs that somebody reads later; `outs` has those that have been computed.
    """

    program: Program
    named: dict[str, Tensor]
    wanted: list[str]
    point: torch.dtype  # of outputs that an oracle reads
    outs: dict[str, Tensor] = field(default_factory=dict)

    @property
    def like(self) -> Tensor:
        return self.named["r0"]

    def missing(self, *more: str) -> tuple[str, ...]:
        return tuple(name for name in dict.fromkeys([*self.wanted, *more]) if name not in self.outs)

    def arguments(self, printer: StepPrinter) -> list[Any]:
        """What a kernel reads and stores, its outputs in new memory."""
        outputs = self.program.names()
        points = list(outputs)[len(outputs) - self.program.points :]
        for name in printer.stored:
            like = self.like if outputs[name].kind == "row" else self.like[:, 0]
            self.outs[name] = torch.empty_like(like, dtype=self.point if name in points else torch.float32)
        tensors = {f"p_{k}": t for k, t in self.named.items()} | {f"o_{k}": t for k, t in self.outs.items()}
        tensors["scalars"] = self.named.get("scalars", self.like)
        return [tensors[name] for name in printer.parameters if name.startswith(("p_", "o_", "scalars"))]

    def run(self, *names: str) -> dict[str, Tensor]:
        """These outputs and all that are wanted, by a kernel of its own where they are not there."""
        missing = self.missing(*names)
        if missing:
            rows, d = self.like.shape
            printer, kernel = step_kernel(self.program.text, missing, None)
            chunk = triton.next_power_of_2(d)
            kernel[(rows,)](
                *self.arguments(printer), rows, D=d, CHUNK=chunk,
                num_warps=min(16, max(WARPS, chunk // 256)), **dependent(self.like, rows),
            )  # fmt: skip
        return self.outs


@cache
def step_kernel(text: str, stored: tuple[str, ...], into: str | None) -> tuple[StepPrinter, Any]:
    """The kernel that stores these outputs of a program, alone or in front of a product."""
    outputs = by_text(text).names()
    names = dict.fromkeys([*stored, *([into] if into else [])])
    printer = StepPrinter({name: outputs[name] for name in names}, stored, into)
    return printer, load_kernel("step_kernel", printer.text, (ask_weights, await_others, finish_product))


@dataclass
class Point:
    """The vector that a product takes from a pass: its output `name`."""

    of: Pending
    name: str

    def stored(self) -> Tensor:
        """The vector itself, which a product stores on the way if it is asked to before (`Pending.wanted`)."""
        return self.of.run(self.name)[self.name]


@dataclass
class Stretches:
    """What the programs of `attend` found: sums of values (B, H, S, head_dim), their largest scores and weights."""

    parts: Tensor
    tops: Tensor
    sums: Tensor


class Best(NamedTuple):
    """Each program's largest output, where it is, and NaN if an output is not finite: (B, programs) each."""

    values: Tensor
    where: Tensor
    bad: Tensor


def linear(
    source: Tensor | Point | Stretches,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    second: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    """act(W u + bias) for the u of some rows, (B, N) in fp32; for "swiglu" W holds the gate's rows, then the others.

    W and the bias are asked for before the kernels before it have ended, so no kernel of this step may write them.
    `second`: another weight with as many columns, whose outputs follow those of the first.
    """
    if isinstance(source, Point):
        few = source.of.like.shape[0] <= FEW and source.of.like.shape[-1] <= WIDEST
        if few and source.name not in source.of.outs:
            return _after_pass(source, weight, bias, second, ACTIVATIONS[activation])
        source = source.stored()
    if second is not None and source.shape[0] <= FEW:  # type: ignore[union-attr]
        return torch.cat([linear(source, weight), linear(source, second)], dim=-1)
    return _product(source, weight, bias, second, act=ACTIVATIONS[activation])[0]


def logits(u: Tensor, table: Tensor, cap: float | None = None, real: int | None = None) -> tuple[Tensor, Best]:
    """The logits (B, V) of some rows, softly capped if asked, and the best of the first `real` ones."""
    return _product(u, table, cap=cap, real=real or len(table))


def joined(weight: Tensor, second: Tensor | None, act: int) -> tuple[int, int, int]:
    """How many outputs there are, how many of them the first weight gives, and how far behind it the second lies."""
    if second is None:
        n = len(weight) // (2 if act == 3 else 1)
        return n, n, 0
    apart = (second.data_ptr() - weight.data_ptr()) // weight.element_size() - weight.numel()
    return len(weight) + len(second), len(weight), apart


def _after_pass(source: Point, weight: Tensor, bias: Tensor | None, second: Tensor | None, act: int) -> Tensor:
    own = source.of
    printer, kernel = step_kernel(own.program.text, own.missing(), source.name)
    n, first, apart = joined(weight, second, act)
    k, rows = weight.shape[1], own.like.shape[0]
    chunk = triton.next_power_of_2(k)
    block_n = outputs_per_program(n, chunk) if weight.is_cuda else 32  # the interpreter is slow per program
    out = torch.empty(rows, n, dtype=torch.float32, device=weight.device)
    kernel[(triton.cdiv(n, block_n), rows)](
        weight, out if bias is None else bias, out, apart, *own.arguments(printer), rows,
        N=n, FIRST=first, ACT=act, BIAS=bias is not None, BLOCK_N=block_n, D=k, CHUNK=chunk,
        num_warps=warps_for(chunk), **dependent(weight),
    )  # fmt: skip
    return out


def _product(
    source: Any, weight: Tensor, bias: Tensor | None = None, second: Tensor | None = None, *,
    act: int = 0, cap: float | None = None, real: int = 0,
) -> tuple[Tensor, Best]:  # fmt: skip
    (n, first, apart), k = joined(weight, second, act), weight.shape[1]
    like = source.parts if isinstance(source, Stretches) else source
    rows, whole = like.shape[0], triton.next_power_of_2(k)
    many = rows > FEW
    block_k = whole if isinstance(source, Stretches) else min(whole, WIDE)
    block_n = outputs_per_program(n, block_k) if weight.is_cuda else 32
    tile = many_rows_tile(rows, n, weight, like, act == 3) if many else {}
    programs = triton.cdiv(n, tile.get("BLOCK_N", block_n))
    # what only another product reads is as wide as its weights where there are many rows
    narrow = many and act in (1, 2, 3, 5)
    out = torch.empty(rows, n, dtype=weight.dtype if narrow else torch.float32, device=weight.device)
    best, bad = (torch.empty(rows, programs, dtype=torch.float32, device=out.device) for _ in range(2))
    place = torch.empty(rows, programs, dtype=torch.long, device=out.device)
    found = {"best": best, "where": place, "bad": bad, "cap": cap or 1.0}
    sizes = {"N": n, "K": k, "BIAS": bias is not None, "ACT": act, "CAP": cap is not None, "REAL": real}
    sizes |= {"BLOCK_N": block_n, "BLOCK_K": block_k, **dependent(weight, rows), **tile}
    offsets = out if bias is None else bias
    if many:
        precision = "tf32x3" if weight.dtype == torch.float32 else "tf32"
        many_rows_kernel[(programs,)](
            weight, offsets, out, source, apart, rows=rows, FIRST=first, PRECISION=precision, **found, **sizes
        )
    else:
        split, head = source.parts.shape[-2:] if isinstance(source, Stretches) else (0, 1)
        tops, sums = (source.tops, source.sums) if split else (out, out)
        linear_kernel[(programs, rows)](
            weight, offsets, out, like, tops, sums, HEAD=head, SPLIT=split, num_warps=warps_for(block_k),
            **found, **sizes,
        )  # fmt: skip
    return out, Best(best, place, bad)


def many_rows_tile(rows: int, n: int, weight: Tensor, source: Tensor, gated: bool) -> dict[str, int]:
    """The tile of a product of many rows: measured on an H200 for widths of 768 and 3072, 16 and 64 rows."""
    block_m, wide = max(16, triton.next_power_of_2(rows)), n >= 2048
    long, block_n = weight.shape[1] > 1024 and block_m <= 16, 32 if wide else 16
    block_k = 512 if long else 128 if wide and block_m <= 16 else 256
    stages, warps = 4 if block_m <= 16 else 3, 2 if long else WARPS
    column = stages * (block_m * source.element_size() + block_n * weight.element_size() * (2 if gated else 1))
    column += block_m * weight.element_size()  # the source again, as it is multiplied
    while block_k > 32 and column * block_k + SPARE > common.shared_memory(weight.device):
        block_k //= 2
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": stages, "num_warps": warps}


def outputs_per_program(n: int, block_k: int) -> int:
    """As few as keep some hundred programs busy, as many as the registers hold: 4, 8 or 16 at width 768."""
    wanted = 4 if n <= 1536 else 8 if n <= 16_384 else 16
    tile = TILE * warps_for(block_k) // WARPS
    return max(1, min(wanted, 2 * tile // block_k if wanted == 16 else tile // block_k))


def warps_for(block_k: int) -> int:
    return WARPS if block_k <= 2048 else 2 * WARPS


@dataclass
class Where:
    """Where the new tokens stand: positions and origins of documents, (B, 1) and (B,), and a rotary table if any."""

    positions: Tensor
    origins: Tensor
    documents: bool
    angles: tuple[Tensor, Tensor] | None = None  # cosines and sines of rotary positions, (capacity, head_dim / 2)


class Mix(NamedTuple):
    """Values that are mixed into an attention's own: (B, d), their rows apart from each other; and both weights."""

    earlier: Tensor
    weights: Tensor


def attend(
    qkv: Tensor, keys: Tensor, values: Tensor, where: Where, mix: Mix | None = None, qk_eps: float | None = None
) -> Stretches | Tensor:
    """Attention of one new token per row over its past; its key and value are written to the cache.

    qkv (B, 3 d) fp32; keys and values (B, H, capacity, head_dim); qk_eps: of the norm of queries and keys, if any. For
    many rows one program looks at all keys of a head, and the result is (B, d).
    """
    rows, heads, capacity, head_dim = keys.shape
    arguments = [qkv, keys, values, where.positions, where.origins, *heads_arguments(qkv, where, mix)]
    numbers = (head_dim**-0.5, qk_eps or 0.0, 0 if mix is None else mix.earlier.stride(0))
    block = min(KEYS, triton.next_power_of_2(capacity))
    sizes: dict[str, Any] = {"H": heads, "D": head_dim, "CAPACITY": capacity, "ROTARY": where.angles is not None}
    sizes |= {"QK_NORM": qk_eps is not None, "MIXED": mix is not None, "DOCUMENTS": where.documents}
    sizes |= {"num_warps": WARPS, **dependent(qkv, rows)}
    if rows > FEW and head_dim >= 16:
        out = torch.empty(rows, heads * head_dim, dtype=keys.dtype, device=qkv.device)
        precision = "tf32x3" if keys.dtype == torch.float32 else "tf32"
        while block > 16 and 2 * block * head_dim * keys.element_size() + SPARE > common.shared_memory(qkv.device):
            block //= 2
        attend_all_kernel[(rows * heads,)](
            *arguments, out, *numbers, PRECISION=precision, BLOCK=max(16, block), STAGES=2, **sizes
        )
        return out
    blocks = triton.cdiv(triton.cdiv(capacity, block), STRETCHES)
    split = triton.cdiv(capacity, block * blocks)
    parts = torch.empty(rows, heads, split, head_dim, dtype=torch.float32, device=qkv.device)
    tops, sums = (torch.empty(rows, heads, split, dtype=torch.float32, device=qkv.device) for _ in range(2))
    attend_kernel[(split, rows * heads)](*arguments, parts, tops, sums, *numbers, BLOCK=block, BLOCKS=blocks, **sizes)
    if rows <= FEW:
        return Stretches(parts, tops, sums)
    shares = torch.exp(tops - tops.amax(dim=-1, keepdim=True))
    merged = (shares[..., None] * parts).sum(dim=2) / (shares * sums).sum(dim=-1, keepdim=True)
    return merged.view(rows, -1)


def heads_arguments(like: Tensor, where: Where, mix: Mix | None) -> list[Tensor]:
    """Cosines, sines, earlier values and the weights of a mixture; anything where there are none."""
    return [*(where.angles or (like, like)), *(mix or (like, like))]


def embed(
    tokens: Tensor, where: Where, given: Tensor, lengths: Tensor, tok: Tensor, pos: Tensor | None, good: Tensor,
    separator: int | None = None,
) -> Tensor:  # fmt: skip
    """The sum of a token table's and a position table's rows, (B, d) in fp32.

    Row b's token at a position below lengths[b] is the one in `given` (B, C), else the one in `tokens` (B, 1); where it
    is the separator, the row's document begins. `good` (1,) is set to 1.
    """
    rows, k = tokens.shape[0], tok.shape[1]
    out = torch.empty(rows, k, dtype=torch.float32, device=tok.device)
    table = tok if pos is None else pos
    embed_kernel[(rows,)](
        tokens, where.positions, where.origins, given, lengths, tok, table, out, good,
        K=k, VOCABULARY=len(tok), CONTEXT=len(table), GIVEN=given.shape[1], LEARNED=pos is not None,
        SEPARATOR=-1 if separator is None else separator, OVERLAP=dependent(tok, rows)["OVERLAP"],
        BLOCK_K=triton.next_power_of_2(k),
    )  # fmt: skip
    return out


def finish(best: Best, tokens: Tensor, positions: Tensor, out: Tensor) -> None:
    """Greedy choice: writes tokens (B, 1), the next positions (B, 1) and `out` (B + 1,) as a decoder has them.

    The last number of `out` was 1 before, and stays so if all logits are finite.
    """
    rows, parts = best.values.shape
    block = triton.next_power_of_2(parts)
    sizes = {"ROWS": rows, "PARTS": parts, "BLOCK": block}
    finish_kernel[(rows,)](*best, tokens, positions, out, num_warps=8, **sizes, **dependent(tokens, rows))
