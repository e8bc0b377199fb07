"""Triton's interpreter without what it does again and again.

A launch replaces the functions of `triton.language` by interpreted ones. Each call of a function inside a kernel does
so once more, though they are replaced already: it looks through all members of the language, which takes longer than
most of what is called. A reduction by a function of ours goes number by number; here by halves, as a device does.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


@cache
def languages(fn: Any) -> tuple[Any, ...]:
    """The modules of the language that a function sees."""
    return tuple(value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core))


def install() -> None:
    """Let functions inside kernels be called at once where the language is replaced already."""
    plain = interpreter.InterpretedFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(tl.core.is_builtin(language.load) for language in languages(self.fn)):
            return plain(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call

    by_numbers = interpreter.ReduceOps.generic_reduce

    def by_halves(self: Any, given: tuple[Any, ...]) -> list[Any]:
        parts, kinds = [part.handle.data for part in given], [part.dtype for part in given]
        if self.axis is None or parts[0].shape[self.axis] & (parts[0].shape[self.axis] - 1):
            return by_numbers(self, given)
        while parts[0].shape[self.axis] > 1:
            halves = zip(*(np.split(part, 2, self.axis) for part in parts), strict=True)
            both = [self.to_tensor(half, kind) for side in halves for half, kind in zip(side, kinds, strict=True)]
            found = self.combine_fn.fn(*both)
            parts = [part.handle.data for part in (found if isinstance(found, tuple) else (found,))]
        if not self.keep_dims:
            parts = [part.squeeze(self.axis) for part in parts]
        return [self.to_tensor(part, kind) for part, kind in zip(parts, kinds, strict=True)]

    interpreter.ReduceOps.generic_reduce = by_halves
