"""Rows of a token table plus rows of a position table, which start a stream, and their gradients without atomics.

Tokens k (B, T), tables E (V, d) and, with learned positions, P (context, d):

    out_bt = E[k_bt] + P[t],    dE[j] = sum over (b, t) with k_bt = j of dout_bt,    dP[t] = sum_b dout_bt.

The sum is made in fp32 and rounded once to the dtype of the stream; both gradients are sums in fp32. Positions are
0 .. T-1. For dE the tokens are sorted once, for all tables of a model. The sorted sequence is cut into chunks of
`CHUNK` tokens, and each runs through its rows of dout. A run of equal tokens that begins in the chunk is written to
its row of dE, even where the run goes on behind the chunk. A run that began before the chunk leaves its sum in
`heads` (chunks, d). A second kernel adds the heads that follow each other with one token to the row they belong to:
one program for every such row and stretch of columns, in order, so the same tokens give the same bits.

Traffic for N = B T tokens, a bf16 stream and fp32 tables: forward 4 N d bytes read (E) and 2 N d written, 150 MB at
N = 32,768 and d = 768. Backward 2 N d read for each of dE and dP, 4 V d to fill dE with zeros and at most 4 N d for its
rows: 355 MB at V = 50,304, of which the zeros are 155. The heads add at most 4 N d / CHUNK written and read again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepformer.ops.operators import Kept, differentiable, operator

CHUNK = 16  # tokens of the sorted sequence that are added one after another
LANES = 2  # chunks that one program runs through side by side
RUN_WARPS = 1  # one warp holds whole rows: nothing is exchanged through shared memory
ROWS = 8  # rows of the batch that one program of the forward pass looks up
HEADS = 32  # heads that are added at once
SHORT = 1 << 16  # vocabularies up to here sort as 16 bits, in a quarter of the passes that 64 bits need


class Order(NamedTuple):
    """Sorted tokens (N,) as keys of 16 or 32 bits, and where each stood; None where no gradient is asked for."""

    keys: Tensor | None
    places: Tensor | None


@triton.jit
def _lookup_kernel(  # type: ignore[no-untyped-def]
    tokens, table, positions, out, batch, time,
    V: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    """Tokens of ROWS sequences at one position, so that its row of P is read once."""
    STRETCHES: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    pid = tl.program_id(0)
    t = (pid // STRETCHES) % time
    rows = (pid // STRETCHES) // time * ROWS + tl.arange(0, ROWS)
    columns = pid % STRETCHES * COLUMNS + tl.arange(0, COLUMNS)
    at = rows.to(tl.int64) * time + t
    token = tl.load(tokens + at, mask=rows < batch, other=0)
    known = (rows < batch) & (token >= 0) & (token < V)
    value = tl.load(
        table + token[:, None] * D + columns[None, :], mask=known[:, None] & (columns < D)[None, :], other=0.0
    ).to(tl.float32)
    value = tl.where(known[:, None], value, float("nan"))  # the run stops there, instead of learning from nothing
    if LEARNED:
        value += tl.load(positions + t * D + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    inside = (rows < batch)[:, None] & (columns < D)[None, :]
    tl.store(out + at[:, None] * D + columns[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _token(keys, i, n):  # type: ignore[no-untyped-def]
    """Token i of the sorted sequence; -1 outside of it."""
    key = tl.load(keys + i, mask=(i >= 0) & (i < n), other=0)
    token = key.to(tl.int32)
    if key.dtype == tl.int16:
        token = token & 0xFFFF
    return tl.where((i >= 0) & (i < n), token, -1)


@triton.jit
def _runs_kernel(  # type: ignore[no-untyped-def]
    dout, keys, places, dtable, heads, n,
    V: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """LANES chunks side by side: sums of runs that begin here to dtable, that of a run from before to heads."""
    STRETCHES: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    pid = tl.program_id(0)
    columns = pid % STRETCHES * COLUMNS + tl.arange(0, COLUMNS)
    wide = (columns < D)[None, :]
    chunk = pid // STRETCHES * LANES + tl.arange(0, LANES)
    begin = chunk * CHUNK
    current = _token(keys, begin, n)
    starts = _token(keys, begin - 1, n) != current
    total = tl.zeros((LANES, COLUMNS), tl.float32)
    to_head = heads + chunk.to(tl.int64)[:, None] * D + columns[None, :]
    for r in range(0, CHUNK):
        i = begin + r
        token = _token(keys, i, n)
        place = tl.load(places + i, mask=i < n, other=0)
        row = tl.load(dout + place[:, None] * D + columns[None, :], mask=(i < n)[:, None] & wide, other=0.0)
        ends = token != current
        written = ends & starts & (current >= 0) & (current < V)
        to_row = dtable + current.to(tl.int64)[:, None] * D + columns[None, :]
        tl.store(to_row, total, mask=written[:, None] & wide)
        tl.store(to_head, total, mask=(ends & (starts == 0))[:, None] & wide)
        total = tl.where(ends[:, None], 0.0, total) + row.to(tl.float32)
        starts = starts | ends
        current = token
    written = starts & (current >= 0) & (current < V)
    to_row = dtable + current.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(to_row, total, mask=written[:, None] & wide)
    tl.store(to_head, total, mask=((starts == 0) & (begin < n))[:, None] & wide)


@triton.jit
def _heads_kernel(  # type: ignore[no-untyped-def]
    keys, heads, dtable, n,
    V: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the heads of one token, where this chunk's is the first of them, to its row."""
    STRETCHES: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    pid = tl.program_id(0)
    first = pid // STRETCHES
    token = _token(keys, first * CHUNK, n)
    goes_on = _token(keys, first * CHUNK - 1, n) == token
    # sorted: a token that stands before the chunk before fills that chunk, which has a head of its own then
    is_first = _token(keys, (first - 1) * CHUNK - 1, n) != token
    if goes_on & is_first & (token >= 0) & (token < V):
        columns = pid % STRETCHES * COLUMNS + tl.arange(0, COLUMNS)
        wide = columns < D
        to_row = dtable + token.to(tl.int64) * D + columns
        total = tl.load(to_row, mask=wide, other=0.0)
        chunk = first + tl.arange(0, HEADS)
        same = _token(keys, chunk * CHUNK, n) == token
        found = tl.sum(same.to(tl.int32), axis=0)
        while found > 0:
            part = tl.load(
                heads + chunk.to(tl.int64)[:, None] * D + columns[None, :],
                mask=same[:, None] & wide[None, :],
                other=0.0,
            )
            total += tl.sum(part, axis=0)
            chunk += HEADS
            same = _token(keys, chunk * CHUNK, n) == token
            found = tl.sum(same.to(tl.int32), axis=0)
        tl.store(to_row, total, mask=wide)


@triton.jit
def _positions_kernel(  # type: ignore[no-untyped-def]
    dout, dpositions,
    USED: tl.constexpr, SIZE: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums over the batch of (BATCH, USED), USED = T d, and zeros behind them up to SIZE = context d."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for b in range(0, BATCH, ROWS):
        rows = b + tl.arange(0, ROWS)
        inside = (rows < BATCH)[:, None] & (at < USED)[None, :]
        total += tl.load(dout + rows.to(tl.int64)[:, None] * USED + at[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(dpositions + at, tl.sum(total, axis=0), mask=at < SIZE)


def stretch(d: int, most: int) -> int:
    """Columns of a program."""
    return min(most, int(triton.next_power_of_2(d)))


def _sorted(tokens: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    keys = tokens.new_empty(tokens.numel(), dtype=torch.int16 if vocabulary <= SHORT else torch.int32)
    return keys, tokens.new_empty(tokens.numel(), dtype=torch.int64)


@operator("token_order", fake=_sorted)
def _order(tokens: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    # what matters is that equal tokens meet: 16 bits may become negative
    keys = tokens.flatten().to(torch.int16 if vocabulary <= SHORT else torch.int32)
    keys, places = torch.sort(keys, stable=True)
    return keys, places


@operator(
    "embed",
    fake=lambda tokens, keys, places, table, *others: table.new_empty(*tokens.shape, table.shape[1], dtype=others[-1]),
)
def _embed(
    tokens: Tensor, keys: Tensor | None, places: Tensor | None, table: Tensor, positions: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    (batch, time), (vocabulary, d) = tokens.shape, table.shape
    out = torch.empty(batch, time, d, dtype=dtype, device=table.device)
    if positions is None:  # every token alike: one long column of them
        batch, time = batch * time, 1
    columns = stretch(d, 256)
    _lookup_kernel[(triton.cdiv(d, columns) * time * triton.cdiv(batch, ROWS),)](
        tokens.contiguous(), table.contiguous(), out if positions is None else positions.contiguous(), out, batch, time,
        V=vocabulary, D=d, ROWS=ROWS, COLUMNS=columns, LEARNED=positions is not None, num_warps=4,
    )  # fmt: skip
    return out


def _gradients(
    dout: Tensor, keys: Tensor | None, places: Tensor | None, vocabulary: int, context: int
) -> tuple[Tensor, Tensor]:
    """Unwritten memory for dE and dP."""
    rows = (0 if keys is None else vocabulary, context)
    dtable, dpositions = (dout.new_empty(n, dout.shape[2], dtype=torch.float32) for n in rows)
    return dtable, dpositions


@operator("embed_backward", fake=_gradients)
def _embed_backward(
    dout: Tensor, keys: Tensor | None, places: Tensor | None, vocabulary: int, context: int
) -> tuple[Tensor, Tensor]:
    """dE (vocabulary, d) where there are keys, dP (context, d), both in fp32; without rows where not wanted."""
    dout = dout.contiguous()
    batch, time, d = dout.shape
    n = batch * time
    dtable = torch.zeros(0 if keys is None else vocabulary, d, dtype=torch.float32, device=dout.device)
    dpositions = torch.empty(context, d, dtype=torch.float32, device=dout.device)
    if context > 0:
        block = stretch(context * d, 1024)
        _positions_kernel[(triton.cdiv(context * d, block),)](
            dout, dpositions, USED=time * d, SIZE=context * d, BATCH=batch, ROWS=4, BLOCK=block, num_warps=4
        )
    if keys is not None and places is not None:
        chunks = triton.cdiv(n, CHUNK)
        heads = torch.empty(chunks, d, dtype=torch.float32, device=dout.device)
        columns = stretch(d, 256)
        _runs_kernel[(triton.cdiv(d, columns) * triton.cdiv(chunks, LANES),)](
            dout, keys, places, dtable, heads, n,
            V=vocabulary, D=d, CHUNK=CHUNK, LANES=LANES, COLUMNS=columns, num_warps=RUN_WARPS,
        )  # fmt: skip
        columns = stretch(d, 128)
        if chunks > 1:
            _heads_kernel[(triton.cdiv(d, columns) * chunks,)](
                keys, heads, dtable, n, V=vocabulary, D=d, CHUNK=CHUNK, HEADS=HEADS, COLUMNS=columns, num_warps=4
            )
    return dtable, dpositions


def _keep(inputs: tuple[Any, ...], output: Tensor) -> Kept:
    _, keys, places, table, positions, _ = inputs
    about = (0, None) if positions is None else (len(positions), positions.dtype)
    return (keys, places), (len(table), table.dtype, *about)


def _backward(needs: Any, order: Any, constants: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    vocabulary, table_dtype, context, position_dtype = constants
    _, _, _, train_table, train_positions, _ = needs
    keys, places = order if train_table else (None, None)
    dtable, dpositions = _embed_backward(dout, keys, places, vocabulary, context if train_positions else 0)
    positions = dpositions.to(position_dtype) if train_positions else None
    return None, None, None, dtable.to(table_dtype) if train_table else None, positions


differentiable(_embed, _keep, _backward)


def token_order(tokens: Tensor, vocabulary: int, *, train: bool = True) -> Order:
    """What the gradients of all token tables need to know about tokens (B, T); nothing where none is trained."""
    if not (train and torch.is_grad_enabled()):
        return Order(None, None)
    return Order(*_order(tokens, vocabulary))


def embed(tokens: Tensor, table: Tensor, positions: Tensor | None, order: Order, dtype: torch.dtype) -> Tensor:
    """table[tokens] + positions[0 .. T-1], (B, T, d), in `dtype`. A token outside the vocabulary gives a row of NaN.

    `order`: that of these tokens. A table that is trained needs it.
    """
    if order.keys is None and table.requires_grad and torch.is_grad_enabled():
        order = token_order(tokens, len(table))
    out: Tensor = _embed(tokens.long(), order.keys, order.places, table, positions, dtype)
    return out
