"""The pairs that a byte-level BPE joins, from its pieces alone."""

from __future__ import annotations

from collections.abc import Sequence

from stepformer.base.errors import InputError


def merges_of(pieces: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The pairs in the order in which they are joined, given the pieces by rank: each piece's last two parts."""
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    merges = []
    for rank, piece in enumerate(pieces):
        if len(piece) == 1:
            continue
        parts = [bytes([byte]) for byte in piece]
        while len(parts) > 2:
            joined = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
            first = min(joined)
            if first >= rank:
                raise InputError(f"The piece {piece!r} of this BPE cannot be made by joining two earlier ones.")
            at = joined.index(first)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        merges.append((parts[0], parts[1]))
    return merges
