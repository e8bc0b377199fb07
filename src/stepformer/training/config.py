"""A run in four sections, `[model]`, `[data]`, `[optim]`, `[train]`, from a name, a recipe or a TOML file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stepformer.base.errors import ConfigError, UnknownNameError, independent, suggestion
from stepformer.base.settings import Settings, setting
from stepformer.base.words import parse_overrides
from stepformer.catalogue import closest_preset, model_config, preset
from stepformer.data.sources import TALES_COUNT
from stepformer.model.config import ModelConfig
from stepformer.optim import OptimConfig, Schedule

EVAL_TOKENS = 4_915_200  # what YuriiFormer evaluates on: 160 batches of 30 x 1024


@dataclass(frozen=True)
class DataConfig(Settings):
    """What is read."""

    section = "data"

    corpus: str = setting("tales", "name of a corpus (`stepformer prepare` makes it) or the folder of a prepared one")
    tokenizer: str | None = setting(
        None, "gpt2, bytes, bpe:N or the folder of a run or corpus that has it; unset: gpt2, for tales bpe:1024"
    )
    dialect: str | None = setting(None, "tales: which dialect (unset: the first)")
    count: int = setting(TALES_COUNT, "tales: how many stories", least=1)
    also: str | None = setting(
        None, "folders of other prepared corpora, with commas between: every evaluation measures their loss too"
    )

    def problems(self) -> list[str]:
        if self.corpus != "tales" and (self.dialect is not None or self.count != TALES_COUNT):
            return [f"dialect and count belong to corpus = 'tales'; this is '{self.corpus}'."]
        return []


@dataclass(frozen=True)
class TrainConfig(Settings):
    """How long, in which pieces, and what is kept."""

    section = "train"

    steps: int = setting(1_000, "optimizer steps", least=1)
    batch: int = setting(32, "sequences in a step, over all ranks and micro-batches", least=1)
    micro_batch: int | None = setting(None, "sequences in one forward pass (unset: chosen by device)", least=1)
    seed: int = setting(42, "of initial weights and data order", least=0)
    init: str | None = setting(None, "folder of a run whose best weights are the initial ones (unset: random ones)")
    eval_every: int | None = setting(
        None, "steps between evaluations (unset: ten in a run, four if it is short)", least=1
    )
    eval_tokens: int = setting(EVAL_TOKENS, "tokens of an evaluation, or the whole split if it is smaller", least=1)
    eval_half: Literal["all", "first", "second"] = setting(
        "all", "the part of the validation split that is read: tuning chooses on the first half, tables show the second"
    )
    save_every: int | None = setting(None, "steps between checkpoints (unset: as evaluations)", least=1)
    keep: int = setting(2, "how many of the latest checkpoints stay; the best stays besides", least=1)
    log_every: int = setting(1, "steps between lines of metrics.jsonl", least=1)
    precision: Literal["auto", "fp32", "bf16", "fp64"] = setting("auto", "bf16 autocast on CUDA, fp32 on CPU")
    streams: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "what the residual stream and velocities are carried in under bf16 autocast (auto: bf16 on CUDA)"
    )
    deterministic: bool = setting(
        False, "on CUDA: the same bits every time, at some cost in speed (CPU runs always are)"
    )
    compile: bool = setting(False, "torch.compile the training step")
    graph: bool = setting(True, "on one GPU: replay the training step as a CUDA graph")
    parallel: Literal["ddp", "fsdp"] = setting("ddp", "on several ranks: replicate the model, or shard it")
    collective_timeout: int | None = setting(
        None, "on several ranks: seconds that one waits for the others, longer than any save (unset: 1800)", least=1
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "CUDA when it is there")
    max_loss: float | None = setting(None, "a training loss above it stops the run (unset: ln V + 4)", above=0)
    stream_norms: bool = setting(False, "at evaluations also write the root mean square of every stream by layer")
    tensorboard: bool = setting(False, "also write TensorBoard files (extra: tensorboard)")
    wandb: str | None = setting(None, "also log to this Weights & Biases project (extra: wandb)")

    def problems(self) -> list[str]:
        problems = []
        if self.micro_batch is not None and self.batch % self.micro_batch:
            problems.append(
                f"micro_batch = {self.micro_batch} does not divide the {self.batch} sequences of a step (batch)."
            )
        if self.stream_norms and self.parallel == "fsdp":
            problems.append("stream_norms = true needs the whole model on a rank: parallel = 'ddp', not 'fsdp'.")
        return problems


SECTIONS: dict[str, type[Settings]] = {"data": DataConfig, "optim": OptimConfig, "train": TrainConfig}


# What a run's hash is of. These keys have always been in it, whatever their value; a younger one is in it when it is
# not at its default, so that the hashes of older runs stay. The others do not decide the result.
OLDEST: dict[str, Sequence[str]] = {
    "data": ("corpus", "tokenizer", "dialect", "count"),
    "optim": (
        *("name", "lr", "lr_embedding", "lr_norm", "lr_coefficient", "wd_matrix", "wd_embedding", "wd_norm"),
        *("wd_coefficient", "beta1", "beta2", "eps", "momentum", "nesterov", "momentum_start"),
        *("momentum_warmup", "polar", "polar_dtype", "scaling", "qkv", "embedding_geometry", "radius"),
        *("own_init", "clip", "clip_coefficients", "schedule", "warmup", "legacy_warmup", "floor"),
        *("decay_start", "sam", "rho"),
    ),
    "train": (
        *("steps", "batch", "seed", "eval_every", "eval_tokens", "precision", "deterministic", "compile"),
        "max_loss",
    ),
}
NOT_HASHED = (
    *("micro_batch", "device", "log_every", "save_every", "keep", "stream_norms", "tensorboard", "wandb"),
    *("parallel", "graph", "collective_timeout"),
)


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run computes."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    own_vocabulary: bool = False  # the model section sets vocab_size; otherwise the corpus does
    recipe: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "optim", self.optim.for_run(**self._shape))
        Schedule(self.optim, self.train.steps)  # refuses schedules that do not fit the length

    @property
    def _shape(self) -> dict[str, int]:
        """What unset rates depend on."""
        train, model = self.train, self.model
        return {"steps": train.steps, "batch": train.batch, "width": model.d_model, "depth": model.n_layer}

    def with_rates_of(self, other: RunConfig) -> RunConfig:
        """This run under the optimizer of another: what it leaves unset is what the other has, whatever its size."""
        optim = self.optim.for_run(**other._shape).with_rates_of(other.optim)
        return dataclasses.replace(self, optim=optim)

    def to_dict(self) -> dict[str, Any]:
        sections = {name: getattr(self, name).to_dict() for name in ("model", "data", "optim", "train")}
        return {**sections, "own_vocabulary": self.own_vocabulary, "recipe": self.recipe}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """The inverse of `to_dict`."""
        built, problems = _built(values)
        try:
            built["model"] = ModelConfig.from_dict(values["model"])
        except ConfigError as error:
            problems += [f"[model] {problem}" for problem in error.problems]
        if problems:
            raise ConfigError(problems)
        return cls(
            own_vocabulary=bool(values.get("own_vocabulary", True)), recipe=str(values.get("recipe", "")), **built
        )

    def for_vocabulary(self, real: int) -> RunConfig:
        """This run on a tokenizer with `real` ids; a model that fixed its own vocabulary must have room for them."""
        if self.own_vocabulary:
            if self.model.vocab_size < real:
                raise ConfigError(
                    [
                        f"[model] vocab_size = {self.model.vocab_size} is smaller than the corpus's vocabulary of "
                        f"{real} ids: leave it out, or make it at least that."
                    ]
                )
            model = self.model.replace(real_vocab=real if real < self.model.vocab_size else None)
        else:
            padded = -(-real // 64) * 64  # whole tiles for the matrix units: GPT-2's 50,257 become 50,304
            model = self.model.replace(vocab_size=padded, real_vocab=real if real < padded else None)
        return RunConfig(model, self.data, self.optim, self.train, own_vocabulary=True, recipe=self.recipe)

    @property
    def hash(self) -> str:
        """Twelve hex digits of what decides the result: not the devices, the micro-batch, or what is logged."""
        values: dict[str, Any] = {"model": self.model.hash}
        for section in SECTIONS:
            settings = getattr(self, section)
            values[section] = {
                f.name: getattr(settings, f.name)
                for f in dataclasses.fields(settings)
                if f.name in OLDEST[section] or (f.name not in NOT_HASHED and getattr(settings, f.name) != f.default)
            }
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def title(self) -> str:
        """A short name for tables and folders: the closest preset and what differs from it."""
        row, differing = closest_preset(self.model)
        if row is None:
            words = [self.model.template, self.model.splitting, self.model.attention]
            plain = ("lie-trotter", "softmax")
            return "-".join([*words[:1], *(word for word in words[1:] if word not in plain), self.model.hash[:6]])
        name = self.base
        more = "".join(f"-{key}={value}" for key, value in sorted(differing.items()))
        return name + (more if len(more) <= 40 else f"-{self.model.hash[:6]}")

    @property
    def base(self) -> str:
        """The shortest name of the closest preset, or of the template when no preset has these components."""
        row, _ = closest_preset(self.model)
        return self.model.template if row is None else min((row.name, *row.aliases), key=len)

    @property
    def step_tokens(self) -> int:
        return self.train.batch * self.model.context


def run_config(what: str | Path, overrides: Iterable[str] = (), **more: Any) -> RunConfig:
    """The run behind a preset, a template, a recipe or a TOML file, with `key=value` words applied.

    A word is `section.key=value`, or `key=value` alone: keys of data, optim and train are found by name, all others
    are the model's. `more` are such keys as Python values. A preset alone trains the tiny size on tales.
    """
    from stepformer.catalogue.recipes import load_recipe, read_recipe, recipe_names

    name = str(what)
    problems: list[str] = []
    unknown = ""
    if name.endswith(".toml"):
        read = read_recipe(Path(name))
        origin = str(read.about.get("name", ""))
        document, recipe = read.document, origin if origin in recipe_names() else ""
    elif name in recipe_names():
        document, recipe = load_recipe(name).document, name
    else:
        document, recipe = {"model": {"preset": name, "size": "tiny"}}, ""
        try:
            preset(name)
        except UnknownNameError as error:
            unknown = str(error)
    sections = _sections(document, name, problems)
    for key, value in [*parse_overrides(overrides, problems), *more.items()]:
        section, key = _place(key)
        sections[section][key] = value
    try:
        config = _assemble(sections, recipe)
    except ConfigError as error:
        problems += [problem for problem in error.problems if problem != f"[model] {unknown}"]
    if unknown:
        unknown += f" No recipe has that name either.{suggestion(name, recipe_names())}"
        raise ConfigError([unknown, *problems]) if problems else UnknownNameError(unknown)
    if problems:
        raise ConfigError(problems)
    return config


def _sections(document: Mapping[str, Any], where: str, problems: list[str]) -> dict[str, dict[str, Any]]:
    """The four sections of a document; what is no section of ours is a problem."""
    known = ["model", *SECTIONS]
    problems += [
        f"'{key}' in {where} stands outside a section: put it under one of [{'], ['.join(known)}]."
        if not isinstance(value, dict)
        else f"Unknown section '[{key}]' in {where}.{suggestion(key, known)} Known: [{'], ['.join(known)}]."
        for key, value in document.items()
        if key not in known or not isinstance(value, dict)
    ]
    found = {key: document.get(key) for key in known}
    return {key: dict(values) if isinstance(values, dict) else {} for key, values in found.items()}


def _place(word: str) -> tuple[str, str]:
    """Section and key of an override's left side."""
    section, dot, key = word.partition(".")
    if dot and section in ("model", *SECTIONS):
        return section, key
    owners = [name for name, kind in SECTIONS.items() if word in kind.field_names()]
    return (owners[0], word) if owners else ("model", word)


def _built(sections: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The sections besides the model's, what is wrong with each, and what is wrong between the rest of them."""
    built: dict[str, Any] = {}
    problems: list[str] = []
    wrong: set[str] = set()
    for name, kind in SECTIONS.items():
        try:
            built[name] = kind.from_dict(sections[name])
        except ConfigError as error:
            problems += error.problems
            bad = {key for key in sections[name] if independent(error.problems, [key]) != [*error.problems]}
            built[name] = kind.from_dict({key: value for key, value in sections[name].items() if key not in bad})
            wrong |= bad
    return built, problems + independent(schedule_problems(built["optim"], built["train"].steps), wrong)


def schedule_problems(optim: OptimConfig, steps: int) -> tuple[str, ...]:
    """Why a schedule does not fit the length of a run."""
    try:
        Schedule(optim, steps)
    except ConfigError as error:
        return error.problems
    return ()


def _assemble(sections: Mapping[str, Mapping[str, Any]], recipe: str) -> RunConfig:
    built, problems = _built(sections)
    values = dict(sections["model"])
    name, size = str(values.pop("preset", "vanilla")), str(values.pop("size", "small"))
    try:
        built["model"] = model_config(name, size=size, **values)
    except ConfigError as error:
        known = [key for kind in SECTIONS.values() for key in kind.field_names()]
        problems += [_elsewhere(problem, known) for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return RunConfig(**built, own_vocabulary="vocab_size" in values, recipe=recipe)


# What other trainers call our keys.
SYNONYMS = {
    "learning_rate": "lr",
    "batch_size": "batch",
    "max_iters": "steps",
    "max_steps": "steps",
    "block_size": "context",
    "n_embd": "d_model",
    "weight_decay": "wd_matrix",
    "warmup_iters": "warmup",
    "grad_clip": "clip",
    "eval_interval": "eval_every",
    "dataset": "corpus",
}


def _elsewhere(problem: str, known: list[str]) -> str:
    """The model's complaint about an unknown key, with a suggestion from the other sections when it has none."""
    foreign = any(f"Unknown key '{word}'" in problem for word in SYNONYMS)
    if not problem.startswith("Unknown key '") or ("Did you mean" in problem and not foreign):
        return f"[model] {problem}"
    key = problem.split("'")[1]
    guess = f" Here it is called '{SYNONYMS[key]}'." if key in SYNONYMS else suggestion(key, known)
    return f"Unknown key '{key}'.{guess}" if guess else f"[model] {problem}"
