"""Starting from the weights of another run instead of random ones; fine-tuning on a second corpus.

A run remembers where its weights came from by that run's id, config hash, step and weights (`init` in run.json).
After its first checkpoint it does not need them any more.

Fine-tuning measures what is forgotten of the first corpus and what is learned of the second. One fixed AdamW for all
parameters and all architectures, so that what differs is the architecture and not the optimizer it was pretrained with:
Momentum Streams' protocol, whose numbers are the defaults at the size of its models.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepformer.base.errors import ConfigError, InputError, command_line
from stepformer.base.settings import Settings, setting
from stepformer.catalogue import size_settings
from stepformer.optim import OptimConfig
from stepformer.training.checkpoints import check_fits, refuse_nan, stored_weights, weights_of
from stepformer.training.config import DataConfig, RunConfig
from stepformer.training.parallel import World
from stepformer.training.runs import RunFolder, checkpoint_of

PUBLISHED: dict[str, Any] = {"steps": 1_000, "batch": 480, "lr": 1e-4, "eval_tokens": 409_600}
# At 1e-4 a hundred small steps change next to nothing. Tables train ten times as fast at the tiny size as in the paper
# (`rate_factor`), and so does everything here.
SMALL: dict[str, Any] = {"steps": 100, "lr": 1e-3, "eval_tokens": 16_384}
ADAMW: dict[str, float] = {"weight_decay": 0.01, "beta1": 0.9, "beta2": 0.95}
DIVISOR = 6.0
RATES = ("lr", "lr_embedding", "lr_norm", "lr_coefficient")
DECAYS = ("wd_matrix", "wd_embedding", "wd_norm", "wd_coefficient")


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
        if not self.native:
            return [] if self.divisor is None else ["divisor belongs to --native."]
        why = "belongs to the one AdamW: with --native the runs' own rates are divided by 'divisor'."
        return [f"{key} {why}" for key in ("lr", *ADAMW) if getattr(self, key) is not None]

    def settled(self, sources: Sequence[RunConfig]) -> FinetuneConfig:
        """These settings with nothing left unset that decides a number, the same for all runs."""
        published = all(source.model.d_model >= size_settings("small")["d_model"] for source in sources)
        usual = dict(PUBLISHED if published else SMALL)
        if self.batch is None and not published:
            batches = sorted({source.train.batch for source in sources})
            if len(batches) > 1:
                problem = f"The runs were trained with batches of {' and '.join(map(str, batches))} sequences"
                raise ConfigError([f"[finetune] {problem}: say finetune.batch=N."])
            usual["batch"] = batches[0]
        usual |= {"divisor": DIVISOR, "lr": None} if self.native else ADAMW
        steps = self.steps or usual["steps"]
        usual |= {"warmup": steps // 20, "eval_every": max(1, steps // 10)}
        return self.replace(**{key: value for key, value in usual.items() if getattr(self, key) is None})


def finetune_config(source: RunConfig, run: Path, corpus: Path, target: Path, settings: FinetuneConfig) -> RunConfig:
    """The run that fine-tunes `run`, trained as `source` says on `corpus`, on the corpus in the folder `target`."""
    same = ("steps", "batch", "eval_every", "eval_tokens", "micro_batch", "compile")
    changes = {key: getattr(settings, key) for key in same}
    changes |= {"init": str(run), "device": settings.device or source.train.device, "save_every": None, "keep": 1}
    changes |= {"max_loss": None, "tensorboard": False, "wandb": None, "eval_first": None, "eval_whole": False}
    train, data = source.train.replace(**changes), DataConfig(corpus=str(target), also=str(corpus))
    return RunConfig(source.model, data, _optimizer(source.optim, settings), train, own_vocabulary=True)


def _optimizer(own: OptimConfig, settings: FinetuneConfig) -> OptimConfig:
    """One AdamW with one rate and one decay for every parameter, norms and coefficients included; or the optimizer of
    the run itself at a fraction of its rates, decays as they were; no sharpness-aware steps.
    """
    schedule = {"schedule": "cosine", "decay_start": None, "legacy_warmup": False}
    schedule |= {key: getattr(settings, key) for key in ("warmup", "floor", "clip")}
    if settings.native:
        assert settings.divisor is not None
        rates = {key: getattr(own, key) for key in (*RATES, "lr_head")}
        slower = {key: rate / settings.divisor for key, rate in rates.items() if rate is not None}
        return own.replace(**slower, **schedule, momentum_warmup=0, own_init=False, sam="off")
    rates = {**dict.fromkeys(RATES, settings.lr), **dict.fromkeys(DECAYS, settings.weight_decay)}
    betas = {"beta1": settings.beta1, "beta2": settings.beta2}
    return OptimConfig.from_dict({"name": "adamw", **rates, **betas, **schedule})


def warm_start(init: str, config: RunConfig, tokenizer: Mapping[str, Any], world: World) -> tuple[Path, dict[str, Any]]:
    """The best checkpoint of the run in the folder `init`, to train `config` from, and whose it is.

    The model and the tokenizer (as a corpus's manifest describes it) must be that run's own.
    """
    folder = RunFolder(Path(init).expanduser())
    record, source = folder.opened()
    known = folder.read_tokenizer(record)
    if known.fingerprint != tokenizer["fingerprint"]:
        raise InputError(
            f"init = '{folder.path}' reads tokens of {known.name} with fingerprint {known.fingerprint}, but the corpus "
            f"has those of {tokenizer['name']} with fingerprint {tokenizer['fingerprint']}: prepare it with "
            f"`{command_line('prepare', 'SOURCE', '--tokenizer', folder.path)}`."
        )
    if source.model.hash != config.model.hash:
        ours, theirs = config.model.to_dict(), source.model.to_dict()
        differ = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
        words = shlex.join(f"{key}={theirs[key]}" for key in differ if theirs.get(key) is not None)
        raise InputError(
            f"init = '{folder.path}' has the weights of another architecture: its {differ[0]} is "
            f"{theirs.get(differ[0], 'unset')}, this run's {ours.get(differ[0], 'unset')}"
            + (f" (also different: {', '.join(differ[1:4])})." if differ[1:] else ".")
            + (f" It was made with: {words}." if words else "")
        )

    def best() -> tuple[Path, dict[str, Any]]:
        checkpoint, state = checkpoint_of(folder, "best", (record, source))
        check_fits(checkpoint, source.model)
        refuse_nan(stored_weights(checkpoint), f"The checkpoint '{checkpoint}'")
        return checkpoint, {"checkpoint": checkpoint.name, "step": state["step"], "weights": weights_of(checkpoint)}

    checkpoint, facts = world.on_main(best)
    whose = {"run": str(folder.path.resolve()), "id": record.get("id", ""), "config_hash": source.hash}
    return checkpoint, {**whose, **facts}


def same_start(
    config: RunConfig, known: Mapping[str, Any], tokenizer: Mapping[str, Any], folder: RunFolder, world: World
) -> Path:
    """The start that run.json tells of, for a run stopped before its first checkpoint; other weights are refused."""
    checkpoint, facts = warm_start(str(known["run"]), config, tokenizer, world)
    for key in ("id", "config_hash", "step", "weights"):
        if facts[key] != known.get(key, facts[key]):
            raise InputError(
                f"'{folder.path}' has no checkpoint yet and began with other weights than '{known['run']}' has now "
                f"({key} {known[key]} then, {facts[key]} now): train a new run."
            )
    return checkpoint
