"""The JSON files that the package writes and reads again, each described once.

Whoever reads one calls `read`: it has the checksum that was written with it, the version and every field that the
description names, or there is one sentence that says what is wrong. Files of version 0.5.0 have no checksums yet; they
are taken with a note.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepformer.base import files
from stepformer.base.described import Fields, Limits, problem
from stepformer.base.errors import InputError, StepformerWarning

COUNT = Limits(int, least=0)
POSITIVE = Limits(int, least=1)
SECONDS = Limits(float, least=0)
ABOVE_ZERO = Limits(float, least=1e-9)
LOSS = Limits(float, least=0, most=1e6)
HEX = Limits(str, form=r"[0-9a-f]*", longest=64, called="a checksum")
SHA256 = Limits(str, form=r"[0-9a-f]{64}", called="a SHA-256")
INSIDE = Limits(str, form=r"(?!\.)[\w.=+-]+(/(?!\.)[\w.=+-]+)?", longest=255, called="a file inside the folder")
COUNTED = Limits(str, form=r"[0-9]{1,18}", called="a number of tokens")
SCALAR = (str, int, float, bool, None)
PRECISION = Literal["fp32", "bf16", "fp64"]
ANYTHING = {str: Any}
CODE = {str: {str: HEX}}

TOKENIZER_FACTS = Fields(
    {"kind": Literal["bytes", "gpt2", "bpe"], "name": str, "fingerprint": HEX, "vocab_size": POSITIVE, "eot": COUNT}
)
SPLITS_FACTS = {str: Fields({"hash": HEX, "tokens": COUNT})}
CORPUS_FACTS = Fields({"folder": str, "tokenizer": TOKENIZER_FACTS, "splits": SPLITS_FACTS})
# what is in the sections is the config's own business
CONFIG = Fields({"model data optim train": ANYTHING}, {"own_vocabulary": bool, "recipe": str})
START = Fields({"run id": str, "config_hash": HEX, "step": COUNT}, {"checkpoint": str, "weights": HEX})
# of a checkpoint: where its run was, and which run it was
STATE = Fields(
    {"step": COUNT, "seconds": SECONDS, "best": (Fields({"val_loss": LOSS, "step": COUNT}), None), "config": CONFIG},
    {"run": HEX, "logged start_steps": COUNT, "start_seconds": SECONDS},
)
SHARD = Fields({"file": INSIDE, "tokens bytes": COUNT, "sha256": SHA256})
FIRST = {COUNTED: LOSS}  # of the first so many tokens
SPLIT = Fields({"shards": [SHARD], "hash": HEX, "entropy": SECONDS, "tokens documents bytes": COUNT})
EVALUATED = Fields({"val_loss": LOSS, "val_tokens": COUNT, "val_hash": HEX}, {"first": FIRST})
EVALUATION = Fields(  # a line of metrics.jsonl with kind = eval
    {"kind": Literal["eval"], "step tokens": COUNT, "val_loss": LOSS},
    {
        "seconds": SECONDS,
        "val_tokens": COUNT,
        "val_hash": HEX,
        "also": {str: EVALUATED},
        "first": FIRST,
        "coefficients gains norms": [ANYTHING],
    },
)
# what trained a run, from some step on
SPELL = Fields(
    {},
    {
        "versions variables": {str: str},
        "platform kernels": str,
        "device": {str: SCALAR},
        "threads ranks": POSITIVE,
        "sharing": COUNT,
        "plugins": CODE,
        "git": ({str: SCALAR}, None),
    },
)
RESUMED = Fields({"step": COUNT}, {"changes": {str: SCALAR}}, beside=SPELL)
MATCHED_BASELINE = Fields(
    {"what": Literal["parameters", "flops", "time"], "candidate label": str, "config": CONFIG, "wanted found": float}
)


@dataclass(frozen=True)
class Kind:
    """A file of ours: what a sentence calls it, its description and the version that is read here."""

    called: str
    described: Any
    format: int | None = 1
    sealed: bool = True


RUN = Kind(
    "run record",
    Fields(
        {"format": int, "stepformer": str, "config": CONFIG},
        {
            "id": HEX,
            "label": str,
            "precision": PRECISION,
            "tokenizer": TOKENIZER_FACTS,
            "corpus": CORPUS_FACTS,
            "also": {str: CORPUS_FACTS},
            "init parent": START,
            "imported": ANYTHING,
            "plugins": [str],
            "code": CODE,
        },
    ),
)
CHECKPOINT = Kind(
    "checkpoint manifest",
    Fields({"format": int, "files": {INSIDE: Fields({"bytes": COUNT, "sha256": SHA256})}, "state": STATE}),
)
CORPUS = Kind(
    "manifest",
    Fields(
        {
            "format": int,
            "name stepformer": str,
            "job": HEX,
            "source split_rule": ANYTHING,
            "shard_tokens": POSITIVE,
            "tokenizer": TOKENIZER_FACTS,
            "dtype": Literal["uint16", "uint32"],
            "splits": {Literal["train", "val"]: SPLIT},
        },
        {"pinned": Any},
    ),
)
TOKENIZER = Kind("tokenizer", Fields({"format": int}, beside=TOKENIZER_FACTS))
RESULT = Kind(
    "result of a finished run",
    Fields(
        {
            "format seed": int,
            "title preset label pairing": str,
            "config_hash": HEX,
            "steps tokens parameters": POSITIVE,
            "best_val_loss": LOSS,
            "best_step": COUNT,
            "train_seconds tokens_per_second": ABOVE_ZERO,
            "weights_sha256": SHA256,
            "status": Literal["finished"],
        },
        {
            "recipe device": str,
            "also": {str: EVALUATED},
            "train_loss": LOSS,
            "train_tokens start_steps": COUNT,
            "start_seconds": SECONDS,
            "train_hash": HEX,
            "unigram_entropy": (float, None),
            "precision": PRECISION,
            "ranks": POSITIVE,
            "metrics run": HEX,
        },
        beside=EVALUATED,
    ),
)
EXPORT = Kind(
    "record of an export",
    Fields(
        {"format": int, "stepformer": str},
        {
            "form": Literal["stepformer", "gpt2"],
            "model corpus": ANYTHING,
            "title run": str,
            "step": COUNT,
            "val_loss": (LOSS, None),
            "val_tokens": (COUNT, None),
            "val_hash": (str, None),
            "tokenizer": TOKENIZER_FACTS,
            "weights_sha256": SHA256,
            "files": {INSIDE: SHA256},
        },
    ),
)
ENVIRONMENT = Kind("record of an environment", Fields({}, {"command": [str], "resumed": [RESUMED]}, beside=SPELL), None)
STUDY = Kind(
    "study",
    Fields({"format": int, "runs": [Fields({"label": str, "seed": int}, {"config": HEX})]}, {"facts": ANYTHING}),
)
MEASUREMENT = Kind(
    "measurement",
    Fields(
        {"format": int, "stepformer kind": str, "step": COUNT, "settings result": ANYTHING},
        {"run": HEX, "command": str},
    ),
)
MATCHES = Kind(
    "record of matched baselines", Fields({"of": {str: str}, "baseline": str, "matches": [MATCHED_BASELINE]}), None
)
PREPARATION = Kind("state of the preparation", Fields({"job": HEX, "rule": str, "pinned": Any}), None)
TRUSTED = Kind(
    "list of trusted plug-ins",
    Fields({"format": int, "files": {SHA256: Fields({"name since": str})}}),
    sealed=False,  # the user's own
)
FORGETTING = Kind("table of forgetting", ANYTHING, None)
CORPORA = Kind("record of the corpora", ANYTHING, None)


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
