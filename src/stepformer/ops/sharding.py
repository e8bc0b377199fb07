"""Tensors that are spread over ranks, for code that mostly sees ordinary ones.

torch.distributed.tensor takes more than half a second to load, a fifth of what any command needs to start, and is
needed under FSDP only. A sharded tensor exists only once that module is loaded, so nobody else has to load it.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor: a part of it here, the rest on other ranks."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_managed(module: nn.Module) -> bool:
    """Whether FSDP puts this module's parameters together and apart as it is called."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor on every rank; all ranks must ask together."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full


def like(value: Tensor, target: Any) -> Any:
    """A whole tensor cut like the sharded `target`, which every rank has: nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
