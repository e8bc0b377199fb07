"""All numbers that the passes of a model read, from all of its coefficients: one kernel forward, one backward.

What a pass multiplies rows by is rarely a coefficient itself: it is a ratio of two, an eps over a square, a weight of
an integrator at a time that the steps before it have made. These are expressions over scalars, some hundreds of them
in a model, and a launch for each would take longer than the model's matrices. So one program of one warp computes them
all, in fp64, and writes a table in fp32 with a line for every pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepformer.ops.operators import differentiable, operator
from stepformer.ops.row_printing import load_kernel
from stepformer.ops.row_programs import aligned, pulls
from stepformer.ops.scalar_functions import printed
from stepformer.ops.symbol_graphs import topological
from stepformer.ops.symbols import Symbol, add, leaf


class Numbers(NamedTuple):
    """The table of a model: the key of its kernels, and how long each line is."""

    key: str
    sizes: tuple[int, ...]


def numbers_of(lines: Sequence[Sequence[Symbol]], raws: Sequence[str], width: int) -> Numbers:
    """Expressions for each pass over raw coefficients (leaves of kind num, by name), for rows of `width` columns."""
    outputs: dict[int, Symbol] = {}
    at = 0
    for line in lines:
        outputs |= {at + k: n for k, n in enumerate(line)}
        at += aligned(len(line))
    return Numbers(register(outputs, list(raws), at, width) if at else "", tuple(aligned(len(line)) for line in lines))


def lines_of(numbers: Numbers, raws: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The line of each pass, up to whole 16 bytes, from the coefficients in the order of their names."""
    if not numbers.key:
        return []
    raw = torch.cat([raw.reshape(-1) for raw in raws]) if raws else torch.zeros(1, device=device)
    return list(torch.ops.stepformer.numbers(numbers.key, raw).split(list(numbers.sizes)))


_kernels: dict[str, tuple[Any, Any, int]] = {}


def register(outputs: dict[int, Symbol], raws: list[str], total: int, width: int) -> str:
    """The kernels of these expressions under a key made from their text."""
    places = {name: k for k, name in enumerate(raws)}
    forward = _printed("numbers_forward", {f"table + {k}": n for k, n in outputs.items()}, places, width, "raw, table")
    found = _differentiated(outputs)
    stores = {f"change + {place}": found[name] for name, place in places.items() if name in found}
    missing = [f"    tl.store(change + {place}, 0.0)" for name, place in places.items() if name not in found]
    backward = _printed("numbers_backward", stores, places, width, "raw, grads, change")
    backward += "".join(f"{line}\n" for line in missing)
    key = hashlib.sha1((forward + backward).encode()).hexdigest()
    if key not in _kernels:
        kernels = load_kernel("numbers_forward", forward), load_kernel("numbers_backward", backward)
        _kernels[key] = *kernels, total
    return key


def _differentiated(outputs: dict[int, Symbol]) -> dict[str, Symbol]:
    """The gradient of every raw coefficient by name, over leaves d0, d1, ... for those of the outputs."""
    order = topological(outputs.values())
    bars: dict[Symbol, Symbol] = {}
    for k, n in outputs.items():
        arrived = leaf("num", f"d{k}")
        bars[n] = add(bars[n], arrived) if n in bars else arrived
    for n in reversed(order):
        if n.args and n in bars:
            for to, what in pulls(n, bars[n]):
                bars[to] = add(bars[to], what) if to in bars else what
    return {n.attr: bars[n] for n in order if n.op == "in" and n in bars}


def _printed(name: str, stores: dict[str, Symbol], raws: dict[str, int], width: int, parameters: str) -> str:
    names: dict[Symbol, str] = {}
    lines = ["@triton.jit", f"def {name}({parameters}):"]
    for n in topological(stores.values()):
        if n.op == "const":
            names[n] = repr(n.attr)
            continue
        args = [names[a] for a in n.args]
        if n.op == "inv_d":
            form = repr(1.0 / width)
        elif n.args:
            form = printed(n.op, n.attr, args)
        elif n.attr in raws:
            form = f"tl.load(raw + {raws[n.attr]}).to(tl.float64)"
        else:
            form = f"tl.load(grads + {n.attr[1:]}).to(tl.float64)"
        names[n] = f"t{len(names)}"
        lines.append(f"    {names[n]} = {form}")
    lines += [f"    tl.store({where}, {names[n]})" for where, n in stores.items()]
    return "\n".join([*lines, "    pass\n"])


def _fake(key: str, raw: Tensor) -> Tensor:
    return raw.new_empty(_kernels[key][2], dtype=torch.float32)


@operator("numbers", fake=_fake)
def _forward(key: str, raw: Tensor) -> Tensor:
    table = _fake(key, raw)
    _kernels[key][0][(1,)](raw, table, num_warps=1)
    return table


@operator("numbers_backward", fake=lambda key, raw, grads: torch.empty_like(raw))
def _backward(key: str, raw: Tensor, grads: Tensor) -> Tensor:
    change = torch.empty_like(raw)
    _kernels[key][1][(1,)](raw, grads.contiguous(), change, num_warps=1)
    return change


differentiable(
    _forward,
    lambda inputs, _: (inputs[1:], inputs[:1]),
    lambda needs, kept, constants, grads: (None, _backward(*constants, *kept, grads)),
)
