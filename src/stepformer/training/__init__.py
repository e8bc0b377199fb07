"""Training: runs, checkpoints, evaluation, one process or many."""

from typing import TYPE_CHECKING

from stepformer.base.aliases import lazy

if TYPE_CHECKING:  # who wants only `training.speed` need not load the loop, nor what it shows
    from stepformer.training.config import DataConfig, RunConfig, TrainConfig, run_config
    from stepformer.training.loading import evaluate_run, load_run
    from stepformer.training.run import resume, train
    from stepformer.training.stopping import Stopped

__getattr__ = lazy(__name__)
__all__ = ["DataConfig", "RunConfig", "Stopped", "TrainConfig"]
__all__ += ["evaluate_run", "load_run", "resume", "run_config", "train"]
