"""A model under DDP and FSDP2 computes the gradients of one process (two processes on CPU)."""

from __future__ import annotations

import copy
import faulthandler
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stepformer as sf
from forked import two_ranks
from helpers import tiny, tokens
from stepformer.training.parallel import ParallelModel, World

ARCHITECTURES: tuple[dict[str, Any], ...] = (
    *({"name": name} for name in ("vanilla", "yurii", "symplectic-euler", "imex-k2-mam", "soap")),
    *({"name": name} for name in ("symp-etd-ab2", "linear-symp-conformal-euler", "entropy-token")),
    {"name": "tables", "value_tables": True, "head": "untied", "mlp": "relu2"},
    {"name": "symp-etd-ab2", "weight_sharing": "oracles"},
    {"name": "hyper", "dynamic": True, "weight_sharing": "oracles"},
    {"name": "mhc", "splitting": "parallel"},
    {"name": "kl-carried", "value_residual": "unit", "embedding_skip": True, "logit_softcap": 5.0},
)


def gradients(model: sf.Model) -> dict[str, Any]:
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def worker(rank: int, kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    stuck = Path(folder, f"stuck-{rank}").open("w")  # noqa: SIM115  (open until the process ends)
    faulthandler.dump_traceback_later(150, file=stuck)
    meeting_point = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    differences = []
    for architecture in ARCHITECTURES:
        whole, targets = tokens(4), tokens(4, seed=1)
        single = tiny(**architecture, seed=0)
        model = copy.deepcopy(single)
        loss = single(whole, targets).loss
        assert loss is not None
        loss.backward()
        run: Any = model
        if kind == "ddp":
            run = DistributedDataParallel(model)
        elif kind == "fsdp":
            mesh = init_device_mesh("cpu", (2,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        mine = slice(2 * rank, 2 * rank + 2)
        run(whole[mine], targets[mine]).loss.backward()
        if kind == "after the pass":  # as ranks that replay a recorded pass exchange them
            ranks = ParallelModel(model, World(rank, 2, torch.device("cpu")), "ddp", False, replay=True)
            assert ranks.run is model
            ranks.average(list(model.parameters()))
        expected, found = gradients(single), gradients(model)
        assert expected.keys() == found.keys()
        differences += [(found[n] - expected[n]).abs().max() for n in expected]
    if rank == 0:
        Path(folder, "worst").write_text(str(torch.stack(differences).max().item()))
    dist.barrier()
    # This test hung twice on busy cores (torch 2.13), cause unknown; the first time one process had ended and the other
    # had not. All work is done at this point, so the tear-down of gloo, a suspect, is skipped.
    os._exit(0)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "after the pass"])
def test_two_processes_compute_the_gradients_of_one(kind: str, tmp_path: Path) -> None:
    two_ranks(worker, (kind, str(tmp_path)), tmp_path)
    worst = float((tmp_path / "worst").read_text())
    assert worst < 1e-12  # fp64: two halves averaged against one mean
