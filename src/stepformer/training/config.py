"""A run in four sections, `[model]`, `[data]`, `[optim]`, `[train]`, from a name, a recipe or a TOML file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from stepformer.base.errors import ConfigError, InputError, UnknownNameError, command_line, independent, suggestion
from stepformer.base.registry import clashes
from stepformer.base.settings import Settings, setting
from stepformer.base.words import SYNONYMS, parse_overrides, translated
from stepformer.catalogue import before_size, closest_preset, model_config, preset
from stepformer.data.corpus import Corpus
from stepformer.data.sources import TALES_COUNT
from stepformer.model.config import ModelConfig, selected
from stepformer.optim import OptimConfig, Schedule
from stepformer.optim.config import without_foreign
from stepformer.optim.trust.factors import refusals
from stepformer.training.parallel import World

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
    eval_first: int | str | None = setting(
        None, "evaluations also say the loss of their first so many tokens; several with commas between", least=1
    )
    eval_whole: bool = setting(False, "the last evaluation also says the loss of the whole validation split")
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

    @property
    def first(self) -> list[int]:
        """The numbers that eval_first asks for."""
        return [] if self.eval_first is None else [int(word) for word in str(self.eval_first).split(",")]

    def problems(self) -> list[str]:
        problems = []
        try:
            good = all(n > 0 for n in self.first)
        except ValueError:
            good = False
        if not good:
            problems.append(f"eval_first = '{self.eval_first}' should be a number of tokens, or several with commas.")
        if self.micro_batch is not None and self.batch % self.micro_batch:
            problems.append(
                f"micro_batch = {self.micro_batch} does not divide the {self.batch} sequences of a step (batch)."
            )
        if self.stream_norms and self.parallel == "fsdp":
            problems.append("stream_norms = true needs the whole model on a rank: parallel = 'ddp', not 'fsdp'.")
        return problems


SECTIONS: dict[str, type[Settings]] = {"data": DataConfig, "optim": OptimConfig, "train": TrainConfig}


NAMED_APART = ("mlp",)  # a kind of component that a run's name says like any setting: modern-mlp=swiglu

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
        *("steps", "batch", "seed", "eval_every", "eval_tokens", "precision", "deterministic", "compile", "max_loss"),
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
        problems = clashes(selected(self.model), {key for kind in SECTIONS.values() for key in kind.field_names()})
        for key in ("lr_head", "wd_head") if self.model.head == "tied" else ():
            if getattr(self.optim, key) is not None:
                problems.append(f"[optim] {key} needs [model] head = 'untied': a tied head is the token table.")
        if self.model.output_init == "zero" and self.optim.own_init:
            problems.append(
                "[optim] own_init = true starts output layers on a unit ball: leave output_init = 'zero' out."
            )
        if self.optim.name == "trust":
            problems += [f"[model] {problem}" for problem in refusals(self.model)]
        if problems:
            raise ConfigError(problems)

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
        optim = {"polar": "newton-schulz", **without_foreign(values["optim"])}  # what runs without the word used
        values = {**values, "optim": optim}
        built = _built(values, lambda: ModelConfig.from_dict(values["model"]), "[model] {}".format)
        own, recipe = bool(values.get("own_vocabulary", True)), str(values.get("recipe", ""))
        return cls(**built, own_vocabulary=own, recipe=recipe)

    def for_vocabulary(self, real: int) -> RunConfig:
        """This run on a tokenizer with `real` ids; a model that fixed its own vocabulary must have room for them."""
        if self.own_vocabulary:
            if self.model.vocab_size < real:
                problem = f"vocab_size = {self.model.vocab_size} is smaller than the corpus's vocabulary of {real} ids"
                raise ConfigError([f"[model] {problem}: leave it out, or make it at least that."])
            size = self.model.vocab_size
        else:
            size = -(-real // 64) * 64  # whole tiles for the matrix units: GPT-2's 50,257 become 50,304
        model = self.model.replace(vocab_size=size, real_vocab=real if real < size else None)
        return dataclasses.replace(self, model=model, own_vocabulary=True)

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
        row, differing = closest_preset(self.model, NAMED_APART)
        if row is None:
            words = [self.model.template, self.model.splitting, self.model.attention]
            plain = ("lie-trotter", "softmax")
            return "-".join([*words[:1], *(word for word in words[1:] if word not in plain), self.model.hash[:6]])
        differing = {k: "+".join(map(str, v)) if isinstance(v, tuple | list) else v for k, v in differing.items()}
        more = "".join(f"-{key}={value}" for key, value in sorted(differing.items()))
        return self.base + (more if len(more) <= 40 else f"-{self.model.hash[:6]}")

    @property
    def base(self) -> str:
        """The shortest name of the closest preset, or of the template when no preset has these components."""
        row, _ = closest_preset(self.model, NAMED_APART)
        return self.model.template if row is None else min((row.name, *row.aliases), key=len)

    @property
    def step_tokens(self) -> int:
        return self.train.batch * self.model.context

    # What it leaves open, decided by its length, its data and its device.

    def pairing(self, corpus: Corpus) -> str:
        """Runs with one pairing and one seed saw the same batches; it names the data, the budget and the evaluation."""
        splits, train = f"{corpus.split('train').hash}/{corpus.split('val').hash}", self.train
        return f"{splits}/{self.model.context}x{train.batch}x{train.steps}/{train.eval_tokens}"

    def precision_on(self, device: torch.device) -> str:
        """What auto means: bf16 autocast on CUDA, fp32 on the CPU, where bf16 is slower by orders of magnitude."""
        automatic = "bf16" if device.type == "cuda" else "fp32"
        return automatic if self.train.precision == "auto" else self.train.precision

    def autocast_on(self, device: torch.device) -> torch.dtype | None:
        return torch.bfloat16 if self.precision_on(device) == "bf16" else None

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """Of the weights; bf16 is of what is computed with them."""
        return torch.float64 if self.precision_on(device) == "fp64" else torch.float32

    @property
    def stream_dtype(self) -> torch.dtype | None:
        """What x and the velocities are carried in under autocast; auto is left to the model (`carried_in`)."""
        return {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32}[self.train.streams]

    def eval_every(self, eval_tokens: int) -> int:
        """Steps between evaluations: as asked, or ten in a run; fewer, but four, if they would read more than half as
        many tokens as training does."""
        affordable = self.train.steps * self.step_tokens / (2 * eval_tokens)
        return self.train.eval_every or max(1, self.train.steps // max(4, min(10, int(affordable))))

    def evaluations(self, eval_tokens: int) -> int:
        """How many a whole run has: at the start, on the way and at the end, there on training tokens too."""
        return 3 + (self.train.steps - 1) // self.eval_every(eval_tokens) if eval_tokens else 0

    @property
    def max_loss(self) -> float:
        """The loss above which a run has diverged: ln V is what knowing nothing costs. Scion's own start is above."""
        usual = math.inf if self.optim.own_init else math.log(self.model.vocab_size) + 4
        return usual if self.train.max_loss is None else self.train.max_loss

    def micro_batch(self, world: World) -> int:
        """Sequences per forward pass; it must divide each rank's share of the batch."""
        share, rest = divmod(self.train.batch, world.size)
        if rest:
            problem = f"batch = {self.train.batch} cannot be shared by {world.size} ranks: it does not divide."
            raise ConfigError([f"[train] {problem}"])
        chosen = self.train.micro_batch
        if chosen is None:  # tokens in a forward pass that keep the device busy without filling its memory
            room = max(1, (32_768 if world.device.type == "cuda" else 4_096) // self.model.context)
            return max(n for n in range(1, min(share, room) + 1) if share % n == 0)
        if share % chosen:
            problem = f"micro_batch = {chosen} does not divide the {share} sequences of a step on each rank."
            raise ConfigError([f"[train] {problem}"])
        return chosen


def run_config(what: str | Path, overrides: Iterable[str] = (), **more: Any) -> RunConfig:
    """The run behind a preset, a template, a recipe or a TOML file, with `key=value` words applied.

    A preset alone trains the tiny size on tales.

    Args:
        what: The name or the file.
        overrides: Words `section.key=value`, or `key=value` alone: keys of data, optim and train are found by name,
            all others are the model's.
        more: Such keys as Python values; `**{"optim.name": "adamw"}` where a dot is needed.
    """
    from stepformer.catalogue.recipes import load_recipe, read_recipe, recipe_names

    if not isinstance(what, str | Path):
        how = "; `stepformer.compare` takes a ModelConfig" * isinstance(what, ModelConfig)
        raise InputError(f"`run_config` takes a name or a TOML file, not {type(what).__name__}{how}.")
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
    words = [(place(key), value) for key, value in [*parse_overrides(overrides, problems), *more.items()]]
    sections["model"] = before_size(sections["model"], [key for (section, key), _ in words if section == "model"])
    for (section, key), value in words:
        sections[section][key] = value
    values = dict(sections["model"])
    whose, size = str(values.pop("preset", "vanilla")), str(values.pop("size", "small"))
    try:
        built = _built(sections, lambda: model_config(whose, size=size, **values), _elsewhere)
    except ConfigError as error:
        problems += [problem for problem in error.problems if problem != f"[model] {unknown}"]
    if os.path.isfile(Path(name) / "run.json"):
        raise InputError(
            f"'{name}' is a run, not the name of an architecture: `{command_line('resume', name)}` continues it, and "
            "`stepformer compare --runs` compares runs."
        )
    if unknown:
        if "=" not in name:
            unknown += f" No recipe has that name either.{suggestion(name, recipe_names())}"
        raise ConfigError([unknown, *problems]) if problems else UnknownNameError(unknown)
    if problems:
        raise ConfigError(problems)
    return RunConfig(**built, own_vocabulary="vocab_size" in values, recipe=recipe)


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


def place(word: str) -> tuple[str, str]:
    """Section and key of an override's left side."""
    section, dot, key = word.partition(".")
    if dot and section in ("model", *SECTIONS):
        return section, key
    if word in ModelConfig.__dataclass_fields__:  # an optimizer's norm is optim.norm
        return "model", word
    owners = [name for name, kind in SECTIONS.items() if word in kind.field_names()]
    return (owners[0], word) if owners else ("model", word)


def _built(
    sections: Mapping[str, Mapping[str, Any]], model: Callable[[], ModelConfig], told: Callable[[str], str]
) -> dict[str, Any]:
    """The four sections; all that is wrong with each of them at once, and what is wrong between the others."""
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
    try:
        Schedule(built["optim"], built["train"].steps)
    except ConfigError as error:
        problems += independent(error.problems, wrong)
    try:
        built["model"] = model()
    except ConfigError as error:
        problems += map(told, error.problems)
    if problems:
        raise ConfigError(problems)
    return built


def _elsewhere(problem: str) -> str:
    """The model's complaint about an unknown key, with a suggestion from the other sections when it has none."""
    foreign = any(f"Unknown key '{word}'" in problem for word in SYNONYMS)
    if not problem.startswith("Unknown key '") or ("Did you mean" in problem and not foreign):
        return f"[model] {problem}"
    key, known = problem.split("'")[1], [key for kind in SECTIONS.values() for key in kind.field_names()]
    guess = translated(key) or suggestion(key, known)
    return f"Unknown key '{key}'.{guess}" if guess else f"[model] {problem}"
