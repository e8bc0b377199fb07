"""Triton kernels, each beside a plain PyTorch twin that computes the same thing; here it is decided which one runs.

Kernels run on CUDA tensors in fp32 or bf16 when Triton can be imported. Everything else takes the twin: the CPU, fp64,
second derivatives and function transforms (`torch.func`), which no kernel supports. `STEPFORMER_KERNELS=off` or
`with kernels.off():` switches them off; a test may run them on the CPU through Triton's interpreter
(`with kernels.interpreted():` in a process started with TRITON_INTERPRET=1).

The files of this package import Triton when they are imported, so they are imported by those who have asked `usable`
before. Every kernel is a `torch.library.custom_op` with its own backward operator: eager code, `torch.compile` and
CUDA graphs call the same thing. No kernel adds with atomics, so the same inputs give the same bits.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pkgutil
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = (torch.float32, torch.bfloat16)
F = TypeVar("F", bound=Callable[..., object])


def constant_result(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which would load the compiler and so double the start of a command."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class _Switch:
    """What `off` and `interpreted` change."""

    on = os.environ.get("STEPFORMER_KERNELS", "on").lower() not in ("off", "0", "false", "no")
    interpreting = False


_INSTALLED = importlib.util.find_spec("triton") is not None


def has_triton() -> bool:
    """Whether Triton is installed (not whether a GPU is there)."""
    return _INSTALLED


def switched_on() -> bool:
    """Whether anything beside the plain twins may run at all."""
    return _Switch.on


def interpreting() -> bool:
    """Whether kernels may take CPU tensors."""
    return _Switch.interpreting


def usable(*tensors: Tensor | None) -> bool:
    """Whether kernels may take these tensors."""
    if not _Switch.on:
        return False
    for t in tensors:
        if t is not None and (not (t.is_cuda or _Switch.interpreting) or t.dtype not in DTYPES):
            return False
    if not torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            return False
        # Triton launches on the current device
        if any(t is not None and t.is_cuda and t.device.index != torch.cuda.current_device() for t in tensors):
            return False
    return has_triton()


def may_replace(*modules: nn.Module) -> bool:
    """Whether a kernel may do the work of these modules without calling them: nobody has hung a hook on one."""
    return not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules
    )


def prepare_compiler(narrow: bool = False) -> None:
    """Tell inductor before it meets our operators that it is to call them as they are.

    It would find out by itself, but first describe them, with all that led to their inputs, in a message that nobody
    reads: in torch 2.11 its length doubles with every layer, and twelve layers never end.
    """
    if not _INSTALLED:
        return
    if narrow:
        # torch 2.11 with triton 3.6 cannot compile several rules at widths up to 128 otherwise (docs/lab-notebook.md)
        torch._inductor.config.triton.persistent_reductions = False
    from torch._inductor.lowering import lowerings, make_fallback

    for module in pkgutil.iter_modules([os.path.dirname(__file__)]):
        importlib.import_module(f"{__package__}.{module.name}")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("stepformer::"):
            op = getattr(torch.ops.stepformer, name.removeprefix("stepformer::")).default
            if op not in lowerings:
                make_fallback(op, warn=False)


@constant_result
def compiler_prepared(narrow: bool) -> bool:
    """`prepare_compiler` for a model that somebody compiles without us: called while it is traced."""
    prepare_compiler(narrow)
    return True


@contextlib.contextmanager
def _switched(name: str, value: bool) -> Iterator[None]:
    before = getattr(_Switch, name)
    setattr(_Switch, name, value)
    try:
        yield
    finally:
        setattr(_Switch, name, before)


def off() -> contextlib.AbstractContextManager[None]:
    """Only the PyTorch twins inside: for second derivatives, and to compare."""
    return _switched("on", False)


@contextlib.contextmanager
def twice_differentiable() -> Iterator[None]:
    """Only operations that have second derivatives inside: no kernels of ours, no fused attention of torch's."""
    with off(), sdpa_kernel(SDPBackend.MATH):
        yield


def interpreted() -> contextlib.AbstractContextManager[None]:
    """Let kernels take CPU tensors inside; they must have been imported under TRITON_INTERPRET=1."""
    return _switched("interpreting", True)


def failures() -> tuple[type[Exception], ...]:
    """What work on a GPU raises that cannot be done there: Triton's error for a kernel too large is no RuntimeError."""
    if not has_triton():
        return (RuntimeError,)
    from triton.runtime.errors import OutOfResources

    return RuntimeError, OutOfResources
