"""Finds kernels in which a copy may overwrite what an asynchronous product still reads, in Triton's intermediate code.

Triton loads the tiles of later turns of a loop into buffers while the product of this turn is computed. On a Hopper
GPU a product (wgmma) reads buffers after it was issued. In triton 3.6 and 3.7 the tile of a product that something else
reads too has one buffer too few: its next copy goes where the product is reading, and results are wrong now and then.

    python tests/support/pipelines.py FILE       the kernels in Triton's cache that are newer than this file
    python tests/support/pipelines.py FOLDER     files .ttgir under a folder
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BUFFERS = re.compile(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+")
MADE = re.compile(r"\s*(%\w+)(?::\d+)? = ")
VIEW = re.compile(r"\s*(%\w+) = ttg\.memdesc_(?:index|trans|subslice|reinterpret) (%\w+)")
PRODUCT = re.compile(r"ttng\.warp_group_dot (%\w+), (%\w+),.*isAsync = true")
WAIT = re.compile(r"warp_group_dot_wait .*pendings = (\d+)")
COPY = re.compile(r"ttg\.async_copy_global_to_local .*?, (%\w+)")
TURNS = 8  # more than there are buffers


def races(text: str) -> list[str]:
    """A sentence for every buffer of a loop that is overwritten too early."""
    lines = text.splitlines()
    found: dict[str, None] = {}
    for begin, end in _innermost(lines):
        buffers = {name: int(count) for name, count in BUFFERS.findall("\n".join(lines[:begin]))}
        ahead = Counter(to for kind, to in _events(lines[:begin], buffers) if kind == "copy")
        flight: list[tuple[int, set[str]]] = []  # products that were issued: in which turn, and what they read
        for turn in range(TURNS):
            for kind, what in _events(lines[begin + 1 : end], buffers):
                if kind == "product":
                    flight.append((turn, what))
                elif kind == "wait":
                    del flight[: max(0, len(flight) - what)]
                else:
                    count, far = buffers[what], ahead[what]
                    if any(what in read and (turn + far - then) % count == 0 for then, read in flight):
                        found[f"{what} has {count} buffers, and is copied {far} turns ahead"] = None
    return list(found)


def _innermost(lines: list[str]) -> Iterator[tuple[int, int]]:
    """First and last lines of loops without loops in them."""
    begun: list[tuple[int, str]] = []
    inner = True
    for number, line in enumerate(lines):
        if "scf.for" in line:
            begun.append((number, line[: len(line) - len(line.lstrip())] + "}"))
            inner = True
        elif begun and line.startswith(begun[-1][1]):
            if inner:
                yield begun[-1][0], number
            begun.pop()
            inner = False


def _events(lines: list[str], buffers: dict[str, int]) -> Iterator[tuple[str, Any]]:
    """Copies, products and waits in their order; buffers by their names, through views of them."""
    views: dict[str, str] = {}

    def root(name: str) -> str:
        while name in views:
            name = views[name]
        return name

    for line in lines:
        if made := MADE.match(line):  # maybe a name that another part of the kernel has used
            views.pop(made[1], None)
        if view := VIEW.match(line):
            views[view[1]] = view[2]
        elif product := PRODUCT.search(line):
            yield "product", {root(product[1]), root(product[2])} & {*buffers}
        elif wait := WAIT.search(line):
            yield "wait", int(wait[1])
        elif (copy := COPY.search(line)) and root(copy[1]) in buffers:
            yield "copy", root(copy[1])


def main() -> None:
    given, cache = Path(sys.argv[1]), Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton/cache"))
    since = 0.0 if given.is_dir() else given.stat().st_mtime
    files = sorted((given if given.is_dir() else cache).rglob("*.ttgir"))
    files = [path for path in files if path.stat().st_mtime >= since]
    found = [f"{path.name}: {sentence}" for path in files for sentence in races(path.read_text())]
    print(*found, f"{len(files)} kernels, {len(found)} buffers that are overwritten too early", sep="\n")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
