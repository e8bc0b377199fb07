"""The JSON files that the package writes and reads again, each described once.

Whoever reads one calls `read`: it has the checksum that was written with it, the version and every field that the
description names, or there is one sentence that says what is wrong. Files of version 0.5.0 have no checksums yet; they
are taken with a note.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from stepformer.base import files
from stepformer.base.described import Limits, problem
from stepformer.base.errors import InputError, StepformerWarning

Count = Annotated[int, Limits(least=0)]
Positive = Annotated[int, Limits(least=1)]
Seconds = Annotated[float, Limits(least=0)]
Loss = Annotated[float, Limits(least=0, most=1e6)]
Hex = Annotated[str, Limits(form=r"[0-9a-f]*", longest=64, called="a checksum")]
Sha256 = Annotated[str, Limits(form=r"[0-9a-f]{64}", called="a SHA-256")]
Inside = Annotated[
    str, Limits(form=r"(?!\.)[\w.=+-]+(/(?!\.)[\w.=+-]+)?", longest=255, called="a file inside the folder")
]
Scalar = str | int | float | bool | None
Precision = Literal["fp32", "bf16", "fp64"]


class TokenizerFacts(TypedDict):
    kind: Literal["bytes", "gpt2", "bpe"]
    name: str
    fingerprint: Hex
    vocab_size: Positive
    eot: Count


class TokenizerFile(TokenizerFacts):
    format: int


class SplitFacts(TypedDict):
    hash: Hex
    tokens: Count


class CorpusFacts(TypedDict):
    folder: str
    tokenizer: TokenizerFacts
    splits: dict[str, SplitFacts]


class Config(TypedDict):
    """Sections of settings; what is in them is the config's own business."""

    model: dict[str, Any]
    data: dict[str, Any]
    optim: dict[str, Any]
    train: dict[str, Any]
    own_vocabulary: NotRequired[bool]
    recipe: NotRequired[str]


class Start(TypedDict):
    run: str
    id: str
    config_hash: Hex
    step: Count
    checkpoint: NotRequired[str]
    weights: NotRequired[Hex]


class Run(TypedDict):
    """run.json"""

    format: int
    stepformer: str
    id: NotRequired[Hex]
    label: NotRequired[str]
    config: Config
    precision: NotRequired[Precision]
    tokenizer: NotRequired[TokenizerFacts]
    corpus: NotRequired[CorpusFacts]
    also: NotRequired[dict[str, CorpusFacts]]
    init: NotRequired[Start]
    parent: NotRequired[Start]
    imported: NotRequired[dict[str, Any]]
    plugins: NotRequired[list[str]]
    code: NotRequired[dict[str, dict[str, Hex]]]


class Best(TypedDict):
    val_loss: Loss
    step: Count


class State(TypedDict):
    """Of a checkpoint: where its run was, and which run it was."""

    step: Count
    seconds: Seconds
    best: Best | None
    config: Config
    run: NotRequired[Hex]
    logged: NotRequired[Count]


class StoredFile(TypedDict):
    bytes: Count
    sha256: Sha256


class Checkpoint(TypedDict):
    """manifest.json of a checkpoint"""

    format: int
    files: dict[Inside, StoredFile]
    state: State


class Shard(TypedDict):
    file: Inside
    tokens: Count
    bytes: Count
    sha256: Sha256


class Split(TypedDict):
    shards: list[Shard]
    hash: Hex
    entropy: Annotated[float, Limits(least=0)]
    tokens: Count
    documents: Count
    bytes: Count


class Corpus(TypedDict):
    """manifest.json of a corpus"""

    format: int
    name: str
    job: Hex
    source: dict[str, Any]
    pinned: NotRequired[Any]
    shard_tokens: Positive
    split_rule: dict[str, Any]
    tokenizer: TokenizerFacts
    dtype: Literal["uint16", "uint32"]
    splits: dict[Literal["train", "val"], Split]
    stepformer: str


class Evaluated(TypedDict):
    val_loss: Loss
    val_tokens: Count
    val_hash: Hex


class Evaluation(TypedDict):
    """A line of metrics.jsonl with kind = eval"""

    kind: Literal["eval"]
    step: Count
    tokens: Count
    seconds: NotRequired[Seconds]
    val_loss: Loss
    val_tokens: NotRequired[Count]
    val_hash: NotRequired[Hex]
    also: NotRequired[dict[str, Evaluated]]
    coefficients: NotRequired[list[dict[str, Any]]]
    gains: NotRequired[list[dict[str, Any]]]
    norms: NotRequired[list[dict[str, Any]]]


class Result(TypedDict):
    """result.json"""

    format: int
    title: str
    preset: str
    label: str
    recipe: NotRequired[str]
    seed: int
    config_hash: Hex
    pairing: str
    steps: Positive
    tokens: Positive
    val_loss: Loss
    val_tokens: Count
    val_hash: Hex
    also: NotRequired[dict[str, Evaluated]]
    best_val_loss: Loss
    best_step: Count
    train_seconds: Annotated[float, Limits(least=1e-9)]
    tokens_per_second: Annotated[float, Limits(least=1e-9)]
    parameters: Positive
    unigram_entropy: NotRequired[float | None]
    weights_sha256: Sha256
    precision: NotRequired[Precision]
    device: NotRequired[str]
    ranks: NotRequired[Positive]
    metrics: NotRequired[Hex]
    run: NotRequired[Hex]
    status: Literal["finished"]


class Export(TypedDict):
    """stepformer.json of an exported model"""

    format: int
    stepformer: str
    form: NotRequired[Literal["stepformer", "gpt2"]]
    model: NotRequired[dict[str, Any]]
    title: NotRequired[str]
    run: NotRequired[str]
    step: NotRequired[Count]
    val_loss: NotRequired[Loss | None]
    val_tokens: NotRequired[Count | None]
    val_hash: NotRequired[str | None]
    tokenizer: NotRequired[TokenizerFacts]
    corpus: NotRequired[dict[str, Any]]
    weights_sha256: NotRequired[Sha256]
    files: NotRequired[dict[Inside, Sha256]]


class Spell(TypedDict):
    """What trained a run, from some step on."""

    versions: NotRequired[dict[str, str]]
    platform: NotRequired[str]
    device: NotRequired[dict[str, Scalar]]
    threads: NotRequired[Positive]
    kernels: NotRequired[str]
    ranks: NotRequired[Positive]
    variables: NotRequired[dict[str, str]]
    plugins: NotRequired[dict[str, dict[str, Hex]]]
    git: NotRequired[dict[str, Scalar] | None]


class Resumed(Spell):
    step: Count
    changes: NotRequired[dict[str, Scalar]]


class Environment(Spell):
    """environment.json"""

    command: NotRequired[list[str]]
    resumed: NotRequired[list[Resumed]]


class Measurement(TypedDict):
    """One of measured/*.json"""

    format: int
    stepformer: str
    kind: str
    step: Count
    run: NotRequired[Hex]
    command: NotRequired[str]
    settings: dict[str, Any]
    result: dict[str, Any]


class PlannedRun(TypedDict):
    label: str
    seed: int
    config: NotRequired[Hex]


class Study(TypedDict):
    """study.json"""

    format: int
    runs: list[PlannedRun]
    facts: NotRequired[dict[str, Any]]


class MatchedBaseline(TypedDict):
    what: Literal["parameters", "flops", "time"]
    candidate: str
    label: str
    config: Config
    wanted: float
    found: float


class Matches(TypedDict):
    """matches.json of a study"""

    of: dict[str, str]
    baseline: str
    matches: list[MatchedBaseline]


class Preparation(TypedDict):
    """job.json of a corpus that is being prepared"""

    job: Hex
    rule: str
    pinned: Any


class TrustedFile(TypedDict):
    name: str
    since: str


class Trusted(TypedDict):
    """The user's list of plug-ins that may be imported."""

    format: int
    files: dict[Sha256, TrustedFile]


@dataclass(frozen=True)
class Kind:
    """A file of ours: what a sentence calls it, its description and the version that is read here."""

    called: str
    described: Any
    format: int | None = 1
    sealed: bool = True


RUN = Kind("run record", Run)
CHECKPOINT = Kind("checkpoint manifest", Checkpoint)
CORPUS = Kind("manifest", Corpus)
TOKENIZER = Kind("tokenizer", TokenizerFile)
RESULT = Kind("result of a finished run", Result)
EXPORT = Kind("record of an export", Export)
ENVIRONMENT = Kind("record of an environment", Environment, None)
STUDY = Kind("study", Study)
MEASUREMENT = Kind("measurement", Measurement)
MATCHES = Kind("record of matched baselines", Matches, None)
PREPARATION = Kind("state of the preparation", Preparation, None)
TRUSTED = Kind("list of trusted plug-ins", Trusted, sealed=False)
FORGETTING = Kind("table of forgetting", dict[str, Any], None)
CORPORA = Kind("record of the corpora", dict[str, Any], None)


def read(path: Path, kind: Kind) -> dict[str, Any]:
    """The content of a file, once it is known to be whole, of this version and as described."""
    value = files.read_json(path, kind.called, sealed=False)
    if not isinstance(value, dict):
        raise InputError(f"The {kind.called} '{path}' is damaged: it is not a JSON object.")
    version = value.get("format")
    if kind.format is not None and (version != kind.format or isinstance(version, bool)):
        newer = isinstance(version, int) and version > kind.format
        advice = "a newer stepformer wrote it: update this one" if newer else f"this stepformer reads {kind.format}"
        raise InputError(f"The {kind.called} '{path}' has format {str(version)[:20]}; {advice}.")
    sealed = files.CHECKSUM in value
    value = files.unsealed(value, path, kind.called)
    fault = problem(value, kind.described)
    if fault:
        raise InputError(f"The {kind.called} '{path}' is damaged: {fault}.")
    if kind.sealed and not sealed:
        # without its name, so that of a hundred old runs one note is printed
        warnings.warn(
            f"There is a {kind.called} without a checksum, as in version 0.5.0: a change would not be noticed.",
            StepformerWarning,
            stacklevel=1,
        )
    return value
