"""Training: runs, checkpoints, evaluation, one process or many."""

from stepformer.training.config import DataConfig, RunConfig, TrainConfig, run_config
from stepformer.training.run import evaluate_run, load_run, resume, train
from stepformer.training.stopping import Stopped

__all__ = [
    "DataConfig",
    "RunConfig",
    "Stopped",
    "TrainConfig",
    "evaluate_run",
    "load_run",
    "resume",
    "run_config",
    "train",
]
