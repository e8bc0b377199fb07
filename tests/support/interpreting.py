"""Triton's interpreter without what it does again and again.

A launch replaces the functions of `triton.language` by interpreted ones. Each call of a function inside a kernel does
so once more, though they are replaced already: it looks through all members of the language, which takes longer than
most of what is called.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

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
