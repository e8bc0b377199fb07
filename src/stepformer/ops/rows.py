"""Calls of the decoding kernels (row_kernels.py): what they take, in which sizes they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from stepformer.ops.row_kernels import attend_kernel, embed_kernel, finish_kernel, linear_kernel, point_kernel

ACTIVATIONS = {"": 0, "gelu": 1, "gelu-tanh": 2, "swiglu": 3}
TILE = 8192  # numbers of a weight that one program of 128 threads holds at once
KEYS = 128  # keys that one program looks at
STRETCHES = 16  # at most so many programs share a row's keys
WARPS = 4
WIDE = 4096  # so much of a row of a weight is asked for at once


class Launching:
    """How these kernels are launched on a GPU that can (OVERLAP and AT_ONCE of row_kernels.py)."""

    overlap = 2
    at_once = True


def overlap(like: Tensor) -> int:
    """OVERLAP of a launch: none in the interpreter, or before compute capability 9."""
    nvidia = like.is_cuda and torch.version.hip is None and hasattr(tl.extra.cuda, "gdc_wait")
    able = nvidia and torch.cuda.get_device_capability(like.device)[0] >= 9
    return Launching.overlap if able else 0


def dependent(like: Tensor) -> dict[str, Any]:
    """The arguments of a launch that may begin before its predecessor ends."""
    how = overlap(like)
    return {"OVERLAP": how, "launch_pdl": True} if how else {"OVERLAP": 0}


@dataclass
class Point:
    """Where an oracle looks: norm(x' + m v'), with x' and v' as in row_kernels.py.

    x (B, d); v, or None without look-ahead and without velocity in the update; g and new_x where an update is pending,
    new_v where it is one of the velocity; numbers: (4,) a, b, c, m; v_gain: that of LN_v; norm: LayerNorm, RMSNorm or
    None. Streams are fp32.
    """

    x: Tensor
    numbers: Tensor
    norm: nn.Module | None
    v: Tensor | None = None
    ahead: bool = False
    g: Tensor | None = None
    new_x: Tensor | None = None
    new_v: Tensor | None = None
    v_gain: Tensor | None = None
    v_eps: float | None = None

    def arguments(self) -> dict[str, Any]:
        x, norm = self.x, self.norm
        gain, shift = (getattr(norm, name, None) for name in ("weight", "bias"))
        eps = self.v_eps if norm is None else norm.eps
        return {
            "x": x,
            "v": x if self.v is None else self.v,
            "new_x": x if self.new_x is None else self.new_x,
            "new_v": x if self.new_v is None else self.new_v,
            "numbers": self.numbers,
            "v_gain": x if self.v_gain is None else self.v_gain,
            "gain": x if gain is None else gain,
            "shift": x if shift is None else shift,
            "eps": 1e-5 if eps is None else eps,
            "PENDING": self.g is not None,
            "VELOCITY": self.new_v is not None,
            "AHEAD": self.ahead,
            "V_NORM": self.v_gain is not None,
            "NORM": 0 if norm is None else 1 if isinstance(norm, nn.LayerNorm) else 2,
            "GAIN": gain is not None,
            "SHIFT": shift is not None,
            "AT_ONCE": Launching.at_once,
        }


@dataclass
class Stretches:
    """What the programs of `attend` found: sums of values (B, H, S, head_dim), their largest scores and weights."""

    parts: Tensor
    tops: Tensor
    sums: Tensor


POINTERS = ("x", "v", "new_x", "new_v", "numbers", "v_gain", "gain", "shift")
NOWHERE: dict[str, Any] = {
    **dict.fromkeys(("PENDING", "VELOCITY", "AHEAD", "V_NORM", "GAIN", "SHIFT", "AT_ONCE"), False),
    "NORM": 0,
    "eps": 0.0,
}


class Best(NamedTuple):
    """Each program's largest output, where it is, and NaN if an output is not finite: (B, programs) each."""

    values: Tensor
    where: Tensor
    bad: Tensor


def linear(
    source: Tensor | Point | Stretches, weight: Tensor, bias: Tensor | None = None, *, activation: str = ""
) -> Tensor:
    """act(W u + bias) for the u of few rows, (B, N) in fp32; for "swiglu" W holds the gate's rows, then the others."""
    return _product(source, weight, bias, activation=activation)[0]


def logits(u: Tensor, table: Tensor, cap: float | None = None, real: int | None = None) -> tuple[Tensor, Best]:
    """The logits (B, V) of few rows, softly capped if asked, and the best of the first `real` ones."""
    return _product(u, table, cap=cap, real=real or len(table))


def _product(
    source: Tensor | Point | Stretches,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "",
    cap: float | None = None,
    real: int = 0,
) -> tuple[Tensor, Best]:
    act = ACTIVATIONS[activation]
    n, k = weight.shape[0] // (2 if act == 3 else 1), weight.shape[1]
    whole = triton.next_power_of_2(k)
    block_k = whole if not isinstance(source, Tensor) else min(whole, WIDE)
    block_n = outputs_per_program(n, block_k) if weight.is_cuda else 32  # the interpreter is slow per program
    like = source if isinstance(source, Tensor) else source.x if isinstance(source, Point) else source.parts
    rows, programs = like.shape[0], triton.cdiv(n, block_n)
    out = torch.empty(rows, n, dtype=torch.float32, device=weight.device)
    arguments: dict[str, Any] = dict.fromkeys(POINTERS, out)
    arguments |= {**NOWHERE, "source": like, "tops": out, "sums": out, "HOW": 0, "HEAD": 1, "SPLIT": 1}
    if isinstance(source, Point):
        arguments |= source.arguments() | {"source": like if source.g is None else source.g, "HOW": 1}
    elif isinstance(source, Stretches):
        split, head = source.parts.shape[-2:]
        arguments |= {"tops": source.tops, "sums": source.sums, "HOW": 2, "HEAD": head, "SPLIT": split}
    best, bad = (torch.empty(rows, programs, dtype=torch.float32, device=out.device) for _ in range(2))
    where = torch.empty(rows, programs, dtype=torch.long, device=out.device)
    linear_kernel[(programs, rows)](
        weight, out if bias is None else bias, out, best=best, where=where, bad=bad, cap=cap or 1.0, N=n, K=k,
        BIAS=bias is not None, ACT=act, CAP=cap is not None, REAL=real, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps_for(block_k), **dependent(weight), **arguments,
    )  # fmt: skip
    return out, Best(best, where, bad)


def outputs_per_program(n: int, block_k: int) -> int:
    """As few as keep some hundred programs busy, as many as the registers hold: 4, 8 or 16 at width 768."""
    wanted = 4 if n <= 1536 else 8 if n <= 16_384 else 16
    tile = TILE * warps_for(block_k) // WARPS
    return max(1, min(wanted, 2 * tile // block_k if wanted == 16 else tile // block_k))


def warps_for(block_k: int) -> int:
    return WARPS if block_k <= 2048 else 2 * WARPS


def point(source: Point) -> Tensor:
    """The next point of the streams, (B, d), stored by itself; the update is stored as well."""
    u = torch.empty_like(source.x)
    rows, k = u.shape
    g = source.x if source.g is None else source.g
    block = triton.next_power_of_2(k)
    point_kernel[(rows,)](g, u=u, K=k, BLOCK_K=block, num_warps=WARPS, **dependent(u), **source.arguments())
    return u


def attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    turns: tuple[Tensor, Tensor] | None = None,
    qk_eps: float | None = None,
) -> Stretches:
    """Attention of one new token per row over its past; its key and value are written to the cache.

    qkv (B, 3 d) fp32; keys and values (B, H, capacity, head_dim); positions (B, 1): where the new tokens stand. turns:
    cosines and sines of rotary positions, (capacity, head_dim / 2); qk_eps: of the norm of queries and keys, if any.
    """
    rows, heads, capacity, head_dim = keys.shape
    blocks = triton.cdiv(triton.cdiv(capacity, KEYS), STRETCHES)
    split = triton.cdiv(capacity, KEYS * blocks)
    parts = torch.empty(rows, heads, split, head_dim, dtype=torch.float32, device=qkv.device)
    tops, sums = (torch.empty(rows, heads, split, dtype=torch.float32, device=qkv.device) for _ in range(2))
    cosines, sines = (qkv, qkv) if turns is None else turns
    attend_kernel[(split, rows * heads)](
        qkv, keys, values, positions, cosines, sines, parts, tops, sums, head_dim**-0.5, qk_eps or 0.0,
        H=heads, D=head_dim, CAPACITY=capacity, ROTARY=turns is not None, QK_NORM=qk_eps is not None,
        BLOCK=min(KEYS, triton.next_power_of_2(capacity)), BLOCKS=blocks, num_warps=WARPS, **dependent(qkv),
    )  # fmt: skip
    return Stretches(parts, tops, sums)


def embed(tokens: Tensor, positions: Tensor, given: Tensor, lengths: Tensor, tok: Tensor, pos: Tensor | None) -> Tensor:
    """The sum of a token table's and a position table's rows, (B, d) in fp32.

    Row b's token at a position below lengths[b] is the one in `given` (B, C), else the one in `tokens` (B, 1).
    """
    rows, k = tokens.shape[0], tok.shape[1]
    out = torch.empty(rows, k, dtype=torch.float32, device=tok.device)
    table = tok if pos is None else pos
    embed_kernel[(rows,)](
        tokens, positions, given, lengths, tok, table, out,
        K=k, VOCABULARY=len(tok), CONTEXT=len(table), GIVEN=given.shape[1], LEARNED=pos is not None,
        OVERLAP=overlap(tok), BLOCK_K=triton.next_power_of_2(k),
    )  # fmt: skip
    return out


def finish(best: Best, tokens: Tensor, positions: Tensor, out: Tensor) -> None:
    """Greedy choice: writes tokens (B, 1), the next positions (B, 1) and `out` (B + 1,) as a decoder has them."""
    rows, parts = best.values.shape
    block = triton.next_power_of_2(parts)
    sizes = {"ROWS": rows, "PARTS": parts, "BLOCK": block}
    finish_kernel[(1,)](*best, tokens, positions, out, num_warps=8, **sizes, **dependent(tokens))
