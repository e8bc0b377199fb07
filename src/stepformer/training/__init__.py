"""Training: runs, checkpoints, evaluation, one process or many."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepformer.training.config import DataConfig, RunConfig, TrainConfig, run_config
    from stepformer.training.run import evaluate_run, load_run, resume, train
    from stepformer.training.stopping import Stopped

_HOMES = {
    "config": ("DataConfig", "RunConfig", "TrainConfig", "run_config"),
    "run": ("evaluate_run", "load_run", "resume", "train"),
    "stopping": ("Stopped",),
}


def __getattr__(name: str) -> Any:
    """Imported when first asked for: who wants only `training.speed` need not load the loop, nor what it shows."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"stepformer.training.{home}"), name)
    raise AttributeError(f"module 'stepformer.training' has no attribute '{name}'")


__all__ = ["DataConfig", "RunConfig", "Stopped", "TrainConfig"]
__all__ += ["evaluate_run", "load_run", "resume", "run_config", "train"]
