"""Methods that mean what is written, and that somebody may carry out faster.

A rule or an oracle marks such a method as `operation` and says no more about it. A fast version is registered from
outside, with the methods whose meaning it has: an object whose class has overridden one of them is not served, so a
subclass that changes an equation simply runs as written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from stepformer.ops import kernels

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Fast:
    """A faster way to the same result, for calls that it does not refuse."""

    run: Callable[..., Any]
    means: tuple[Callable[..., Any], ...]
    refusal: Callable[..., str | None]

    def serves(self, owner: Any, *inputs: Any, **named: Any) -> bool:
        kind = type(owner)
        if any(getattr(kind, method.__name__, None) is not method for method in self.means):
            return False
        return self.refusal(owner, *inputs, **named) is None


def operation(meaning: F) -> F:
    """A method whose first argument is a tensor; where kernels may take that, a registered fast version may run."""
    versions: list[Fast] = []

    @functools.wraps(meaning)
    def run(self: Any, first: Any, *others: Any, **named: Any) -> Any:
        if (first.is_cuda or kernels.interpreting()) and kernels.usable(first):
            for fast in versions:
                if fast.serves(self, first, *others, **named):
                    return fast.run(self, first, *others, **named)
        return meaning(self, first, *others, **named)

    run.versions = versions  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def faster(
    method: Callable[..., Any], *, also: tuple[Callable[..., Any], ...] = (), unless: Callable[..., str | None]
) -> Callable[[F], F]:
    """Register a fast version of an operation: it also has the meaning of the methods `also`, which that calls.

    `unless` takes the same arguments and gives the reason why this call is not served, or None.
    """

    def add(run: F) -> F:
        method.versions.append(Fast(run, (method, *also), unless))  # type: ignore[attr-defined]
        return run

    return add
