"""In which precision something is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from stepformer.base.errors import InputError


def refuse_no_dtype(name: str, value: object) -> None:
    """A sentence for what is neither None nor a dtype of floating-point numbers."""
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise InputError(f"{name} = {value!r} should be a dtype of torch such as torch.bfloat16.")


def working_dtype(dtype: torch.dtype, low: torch.dtype = torch.float32) -> torch.dtype:
    """fp64 stays fp64 (tests, diagnostics); everything else is computed in `low`, whatever autocast says."""
    return dtype if dtype == torch.float64 else low


def at_least_fp32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same tensors in fp32, or in fp64 if they are."""
    return tuple(t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors)


def product_dtype(*tensors: Tensor) -> torch.dtype:
    """In which matrix products of these tensors run here: that of autocast, or else the widest among them."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def as_products(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same tensors in the dtype of their products."""
    dtype = product_dtype(*tensors)
    return tuple(t.to(dtype) for t in tensors)


def matmul_precision() -> str:
    """How fp32 matrices are multiplied, as torch words it: its older function fails where the newer one was used."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision)
