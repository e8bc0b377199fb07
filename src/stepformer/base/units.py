"""Amounts as people say them."""

from __future__ import annotations


def memory(size: float) -> str:
    """An amount of memory: 33.90 GiB, 4.20 MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.2f} MiB"


def duration(seconds: float) -> str:
    """One number with the unit that suits it: 4.2 s, 3.3 min, 2.1 h, 5.0 days."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"


def hours_and_minutes(seconds: float) -> str:
    """Two units: 4.2 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
