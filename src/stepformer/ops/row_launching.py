"""How the kernels of row programs are launched: tiles, and a grid of as many programs as a GPU has room for."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from stepformer.ops import common
from stepformer.ops.common import Tile
from stepformer.ops.row_printing import Printer, Task, load_kernel

LIGHT = 4  # rows that a backward pass reads, at most, to have registers left for the next ones
MANY = 4  # gains to sum, for which threads of eight numbers of a row each have the registers
MEETINGS = 16  # sums over a row, for which fewer warps should wait for each other
MOST_PROGRAMS = 16  # of a multiprocessor


def forward_tile(d: int) -> Tile:
    """One row of a program, in a grid of all rows."""
    return common.row_tile(d)._replace(programs=0)


def backward_tile(d: int, reads: int, sums: int, width: int, stats: int = 0, room: int = common.ROOM) -> Tile:
    """A whole row of a program, the next ones on their way through shared memory while it is computed.

    `reads`, `sums` and `stats` count the rows that are read, the gains that are summed and the sums over a row, `width`
    is the bytes of a column in all of what is read, `room` those of shared memory. A pass of few rows has registers
    left for the next one instead, one that sums many gains has more threads to hold them. On an H200 (32,768 rows of
    768 in bf16) Nesterov took 94 us so, 129 with a warp for a row; gradient descent 52; four streams mixed by weights
    of the token 183 with two warps, 248 with four, 205 with one.
    """
    chunk = max(16, triton.next_power_of_2(d))
    numbers = 512 if stats >= MEETINGS else 256 if sums <= MANY else 128  # of a warp
    warps = min(16, max(1, chunk // numbers))
    if reads < LIGHT and sums < 2 and d <= 4096:
        return Tile(chunk, 1, warps, programs=max(1, 32 // warps), ahead=True, hold=True)
    fits = (common.STAGES - 1) * width * chunk + 4096 <= room
    return Tile(chunk, 1, warps, stages=common.STAGES if fits else 1, programs=MOST_PROGRAMS, hold=True)


class Kernel:
    """A task as text and as the functions that were compiled from it, one for each way of launching it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.made: dict[tuple[bool, bool, bool], tuple[Printer, Any]] = {}
        self.resident: dict[Any, int] = {}

    def at(self, tile: Tile) -> tuple[Printer, Any]:
        key = (tile.programs > 0, tile.hold, tile.ahead)
        if key not in self.made:
            printer = Printer(self.task, loops=tile.programs > 0, hold=tile.hold, ahead=tile.ahead)
            self.made[key] = printer, load_kernel(self.task.name, printer.text)
        return self.made[key]

    def launch(self, tensors: dict[str, Any], n: int, d: int, tile: Tile, width: int = 0) -> Tensor | None:
        """With tensors by name of the parameters; the partial sums, if there are any."""
        printer, function = self.at(tile)
        arguments = [tensors.get(name) for name in printer.parameters[:-3]]
        first = next(t for t in arguments if t is not None)
        meta = {"STAGES": tile.stages, "WIDTH": width, **tile.options(d)}
        tiles = max(1, triton.cdiv(n, tile.rows))
        if not tile.programs:
            function[(tiles,)](*arguments, None, n, 1, **meta)
            return None
        if tile.programs == MOST_PROGRAMS:
            tile = tile._replace(programs=self.programs(function, arguments, n, tiles, tile, meta, first))
        programs, turns = common.persistent(n, tile, first.device)
        partial = torch.empty((programs, width), dtype=torch.float32, device=first.device) if width else None
        function[(programs,)](*arguments, partial, n, turns, **meta)
        return partial

    def programs(
        self, function: Any, arguments: list[Any], n: int, tiles: int, tile: Tile, meta: dict[str, Any], like: Tensor
    ) -> int:
        """How many programs a multiprocessor has room for, by the registers and the memory that they take.

        One more than that would wait until another has gone through all of its rows.
        """
        if not like.is_cuda:
            return 2  # in the interpreter, so that there are several
        key = (like.device, meta["D"], *(None if t is None else t.dtype for t in arguments))
        if key not in self.resident:
            partial = torch.empty(8, dtype=torch.float32, device=like.device) if meta["WIDTH"] else None
            kernel = function.warmup(*arguments, partial, n, max(2, tiles), grid=(1,), **meta)
            kernel._init_handles()
            card = torch.cuda.get_device_properties(like.device)
            threads = 32 * tile.warps
            registers = getattr(card, "regs_per_multiprocessor", 65_536) // (8 * -(-kernel.n_regs // 8) * threads)
            memory = card.shared_memory_per_multiprocessor // (kernel.metadata.shared + 1024)
            self.resident[key] = max(1, min(registers, memory, MOST_PROGRAMS - 1))
        return self.resident[key]
