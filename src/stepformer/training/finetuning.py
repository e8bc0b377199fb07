"""Fine-tuning on a second corpus, to measure what is forgotten of the first and what is learned of the second.

One fixed AdamW for all parameters and all architectures, so that what differs is the architecture and not the optimizer
it was pretrained with: Momentum Streams' protocol, whose numbers are the defaults at the size of its models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepformer.base.errors import ConfigError
from stepformer.base.settings import Settings, setting
from stepformer.catalogue import size_settings
from stepformer.optim import OptimConfig
from stepformer.training.config import DataConfig, RunConfig

PUBLISHED: dict[str, Any] = {"steps": 1_000, "batch": 480, "lr": 1e-4, "eval_tokens": 409_600}
# At 1e-4 a hundred small steps change next to nothing. Tables train ten times as fast at the tiny size as in the paper
# (`rate_factor`), and so does everything here.
SMALL: dict[str, Any] = {"steps": 100, "lr": 1e-3, "eval_tokens": 16_384}
ADAMW: dict[str, float] = {"weight_decay": 0.01, "beta1": 0.9, "beta2": 0.95}
DIVISOR = 6.0
ROLES = ("matrix", "embedding", "norm", "coefficient")


@dataclass(frozen=True)
class FinetuneConfig(Settings):
    """How runs are fine-tuned. Keys left unset take the published value, or a smaller one for smaller models."""

    section = "finetune"

    steps: int | None = setting(None, "optimizer steps (unset: 1000; below width 768: 100)", least=1)
    batch: int | None = setting(None, "sequences in a step (unset: 480; below width 768: as in pretraining)", least=1)
    lr: float | None = setting(None, "peak rate of all parameters (unset: 1e-4; below width 768: 1e-3)", above=0)
    weight_decay: float | None = setting(None, "decay of all parameters, norms and coefficients too (0.01)", least=0)
    beta1: float | None = setting(None, "AdamW's memory of the gradient (0.9)", least=0)
    beta2: float | None = setting(None, "AdamW's memory of its square (0.95)", least=0)
    warmup: int | None = setting(None, "steps of linear warm-up (unset: a twentieth of all)", least=0)
    floor: float = setting(0.1, "last rate of the cosine as a fraction of the peak", least=0)
    clip: float = setting(1.0, "largest global gradient norm (0: no clipping)", least=0)
    native: bool = setting(False, "each run's own optimizer instead of the one AdamW; the option --native")
    divisor: float | None = setting(None, "native: the run's rates are divided by it (6)", above=0)
    eval_every: int | None = setting(None, "steps between evaluations (unset: a tenth of all)", least=1)
    eval_tokens: int | None = setting(
        None,
        "validation tokens of each corpus (unset: 409,600; below width 768: 16,384; all if there are fewer)",
        least=1,
    )
    micro_batch: int | None = setting(None, "sequences in one forward pass (unset: chosen by device)", least=1)
    device: Literal["auto", "cpu", "cuda"] | None = setting(None, "unset: as in pretraining")
    compile: bool = setting(False, "torch.compile the training step")

    def problems(self) -> list[str]:
        problems = []
        if self.native:
            problems += [
                f"{key} belongs to the one AdamW: with --native the runs' own rates are divided by 'divisor'."
                for key in ("lr", *ADAMW)
                if getattr(self, key) is not None
            ]
        elif self.divisor is not None:
            problems.append("divisor belongs to --native.")
        return problems

    def settled(self, sources: Sequence[RunConfig]) -> FinetuneConfig:
        """These settings with nothing left unset that decides a number, the same for all runs."""
        published = all(source.model.d_model >= size_settings("small")["d_model"] for source in sources)
        usual = dict(PUBLISHED if published else SMALL)
        if self.batch is None and not published:
            batches = sorted({source.train.batch for source in sources})
            if len(batches) > 1:
                sizes = " and ".join(map(str, batches))
                raise ConfigError(
                    [f"[finetune] The runs were trained with batches of {sizes} sequences: say finetune.batch=N."]
                )
            usual["batch"] = batches[0]
        if self.native:
            usual |= {"divisor": DIVISOR}
            del usual["lr"]
        else:
            usual |= ADAMW
        steps = self.steps or usual["steps"]
        usual |= {"warmup": steps // 20, "eval_every": max(1, steps // 10)}
        return self.replace(**{key: value for key, value in usual.items() if getattr(self, key) is None})


def finetune_config(source: RunConfig, run: Path, corpus: Path, target: Path, settings: FinetuneConfig) -> RunConfig:
    """The run that fine-tunes `run`, trained as `source` says on `corpus`, on the corpus in the folder `target`."""
    changes = {
        "steps": settings.steps,
        "batch": settings.batch,
        "init": str(run),
        "eval_every": settings.eval_every,
        "eval_tokens": settings.eval_tokens,
        "micro_batch": settings.micro_batch,
        "device": settings.device or source.train.device,
        "compile": settings.compile,
        "save_every": None,
        "keep": 1,
        "max_loss": None,
        "tensorboard": False,
        "wandb": None,
    }
    return RunConfig(
        source.model,
        DataConfig(corpus=str(target), also=str(corpus)),
        _native(source.optim, settings) if settings.native else _adamw(settings),
        source.train.replace(**changes),
        own_vocabulary=True,
    )


def _adamw(settings: FinetuneConfig) -> OptimConfig:
    """One AdamW with one rate and one decay for every parameter, norms and coefficients included."""
    rates = {"lr" if role == "matrix" else f"lr_{role}": settings.lr for role in ROLES}
    decays = {f"wd_{role}": settings.weight_decay for role in ROLES}
    betas = {"beta1": settings.beta1, "beta2": settings.beta2}
    return OptimConfig.from_dict({"name": "adamw", **rates, **decays, **betas, **_schedule(settings)})


def _native(optim: OptimConfig, settings: FinetuneConfig) -> OptimConfig:
    """The optimizer of the run itself at a fraction of its rates, decays as they were; no sharpness-aware steps."""
    assert settings.divisor is not None
    keys = ("lr" if role == "matrix" else f"lr_{role}" for role in ROLES)
    rates = {key: getattr(optim, key) / settings.divisor for key in keys}
    fresh = {"momentum_warmup": 0, "own_init": False, "sam": "off"}
    return optim.replace(**rates, **fresh, **_schedule(settings))


def _schedule(settings: FinetuneConfig) -> dict[str, Any]:
    return {
        "schedule": "cosine",
        "decay_start": None,
        "warmup": settings.warmup,
        "legacy_warmup": False,
        "floor": settings.floor,
        "clip": settings.clip,
    }
