"""TensorBoard and Weights & Biases, for those who ask; metrics.jsonl is always written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepformer.base.errors import StepformerError
from stepformer.training.config import RunConfig

BY_LAYER = ("coefficients", "gains", "norms")  # lists over layers in the lines of evaluations
_LEFT_OUT = {"kind", "step", "val_hash", "also", *BY_LAYER}


class Loggers:
    """Forwards metric lines to the services that the config names."""

    def __init__(self, config: RunConfig, folder: Path, identity: str) -> None:
        self._tensorboard: Any = None
        self._wandb: Any = None
        if config.train.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise StepformerError(
                    "train.tensorboard needs TensorBoard: pip install 'stepformer[tensorboard]'."
                ) from None
            self._tensorboard = SummaryWriter(str(folder / "tensorboard"))
        if config.train.wandb:
            try:
                import wandb  # type: ignore[import-not-found, unused-ignore]
            except ImportError:
                raise StepformerError("train.wandb needs Weights & Biases: pip install 'stepformer[wandb]'.") from None
            # one id per run, so that a resumed run continues its own curves and no other's
            self._wandb = wandb.init(
                project=config.train.wandb,
                name=folder.name,
                id=identity,
                dir=str(folder),
                resume="allow",
                config=config.to_dict(),
            )

    def write(self, line: dict[str, Any]) -> None:
        """Numbers of one metric line."""
        numbers = {f"{line['kind']}/{k}": v for k, v in line.items() if k not in _LEFT_OUT}
        for name, other in line.get("also", {}).items():
            numbers[f"{line['kind']}/{name}/val_loss"] = other["val_loss"]
        for what in BY_LAYER:
            for layer, values in enumerate(line.get(what, [])):
                numbers |= {f"{what}/{name}/layer {layer}": value for name, value in values.items()}
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, line["step"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=line["step"])

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
