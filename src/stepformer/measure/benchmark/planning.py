"""What will be measured, in which order: every architecture after the vanilla model it is compared with."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stepformer.base.errors import InputError
from stepformer.base.words import merge
from stepformer.catalogue import SIZES, load_config, model_config
from stepformer.model.config import ModelConfig
from stepformer.rules import templates

BASELINE = "vanilla"
SHAPE = (*SIZES["small"], "activation_checkpointing")  # settings that the baseline shares with whom it is compared to
MICRO_BATCH_TOKENS = {"cuda": 32_768, "cpu": 1_024}
# one of each family, for who names nothing
USUAL = ("vanilla", "yurii", "tmm", "adam", "muon", "symp-etd-ab2", "linear", "entropy")
HOW_COMPILED = {None: "compiled where that is faster", True: "compiled", False: "eager"}


@dataclass(frozen=True)
class BenchSettings:
    """How everything is measured; `kernels` and `streams` list the ways to measure each architecture in."""

    device: torch.device
    size: str
    steps: int
    warmup: int
    compile: bool | None  # None: on a GPU, Hamiltonian integrators without kernels
    graph: bool = False  # steps replayed as a CUDA graph, as the trainer does on one GPU
    kernels: tuple[str, ...] = ("on",)  # on, off; none where they cannot run
    streams: tuple[str, ...] = ("fp32",)  # what x and the velocities are carried in: fp32, bf16
    micro_batch: int | None = None
    batch_tokens: int = 491_520
    optimizer: str = "muon"
    full_step: bool = True
    decode_tokens: int = 256  # 0: decoding is not measured
    decode_rows: int = 1  # prompts at once
    prompt_tokens: int = 64
    profile: bool = False
    seconds: float | None = None
    again: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "device": self.device.type, "kernels": list(self.kernels), "streams": list(self.streams)}


@dataclass(frozen=True)
class Wanted:
    """An architecture that someone asked for; `context` None is that of the size."""

    name: str
    words: tuple[str, ...] = ()
    context: int | None = None


@dataclass(frozen=True)
class Case:
    """One measurement."""

    label: str
    config: ModelConfig
    micro_batch: int
    kernels: str
    streams: str

    def compiled(self, settings: BenchSettings) -> bool:
        """Whether this one is compiled: as asked, or if it integrates Hamiltonian fields without kernels."""
        if settings.compile is not None:
            return settings.compile
        integrates = templates[self.config.template].component.integrates
        return settings.device.type == "cuda" and integrates and self.kernels != "on"

    @property
    def frame(self) -> tuple[Any, ...]:
        """What a ratio keeps equal: the shape of the model and how it is run."""
        shape = tuple(getattr(self.config, key) for key in SHAPE)
        return (shape, self.kernels, self.streams)


def plan(wanted: Iterable[Wanted], settings: BenchSettings) -> list[Case]:
    """Every case after its baseline; architectures that are the same are measured once."""
    configs: list[tuple[str, ModelConfig]] = []
    for each in wanted:
        config = resolve(each, settings.size)
        if config not in (known for _, known in configs):
            # the baseline has the shape too, so a name need not tell it
            words = [word for word in each.words if word.partition("=")[0].removeprefix("model.") not in SHAPE]
            configs.append((" ".join((Path(each.name).stem, *words)), config))
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for way, streams, (label, config) in itertools.product(settings.kernels, settings.streams, configs):
        usual = max(1, MICRO_BATCH_TOKENS[settings.device.type] // config.context)
        case = Case(label, config, settings.micro_batch or usual, way, streams)
        shape = {key: getattr(config, key) for key in SHAPE}  # vanilla in that of the other architecture
        baseline = replace(case, label=BASELINE, config=model_config(BASELINE, size=settings.size, **shape))
        group = groups.setdefault(case.frame, [baseline])
        if config != baseline.config:
            group.append(case)
    return [case for group in groups.values() for case in group]


def resolve(wanted: Wanted, size: str) -> ModelConfig:
    """The config behind a preset, template or TOML file with `key=value` words."""
    words, values = [*wanted.words], merge({}, wanted.words, "model")
    if "size" in values:
        raise InputError(f"Give the size with --size {values['size']}: the baseline has it too.")
    if wanted.context is not None:
        if "context" in values:
            raise InputError("Two contexts were given: with --context and with context=.")
        values["context"] = wanted.context
        words.append(f"context={wanted.context}")
    if wanted.name.endswith(".toml"):
        return load_config(wanted.name, [f"size={size}", *words])
    if "preset" in values:
        raise InputError("`preset` is the NAME itself: write `stepformer bench NAME key=value ...`.")
    return model_config(wanted.name, size=size, **values)


def introduction(cases: Sequence[Case], settings: BenchSettings) -> str:
    """What will be measured and on what, for the first line."""
    if settings.device.type == "cuda":
        where = f"Measuring on {torch.cuda.get_device_name(settings.device)}"
        have = {"on": "with kernels", "off": "without kernels", "none": "without kernels (Triton is not installed)"}
        how = " and ".join(have[way] for way in settings.kernels)
    else:
        threads = torch.get_num_threads()
        begin = "Measuring" if torch.cuda.is_available() else "No CUDA device: measuring"
        where, how = f"{begin} on {threads} CPU thread{'s' * (threads > 1)}", "kernels are not used here"
    labels = list(dict.fromkeys(case.label for case in cases))
    config = cases[0].config
    batches = dict.fromkeys(f"{case.micro_batch} x {case.config.context} tokens" for case in cases)
    return (
        f"{where} at size {settings.size} ({config.n_layer} layers, width {config.d_model}), micro-batches of "
        f"{' and '.join(batches)}; {HOW_COMPILED[settings.compile]}, {how}.\n"
        f"{len(cases)} measurement{'s' * (len(cases) > 1)} of {len(labels)} architecture{'s' * (len(labels) > 1)}: "
        f"{', '.join(labels)}."
    )
