"""Settings as people write them: TOML files and `key=value` words."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from stepformer.base import files
from stepformer.base.errors import InputError

# What other trainers call our keys, and what is not the same.
SYNONYMS = {
    "learning_rate": ("lr", "the peak rate of the block matrices"),
    "batch_size": ("micro_batch", "the sequences of one pass; 'batch' counts those of a whole step"),
    "gradient_accumulation_steps": ("batch", "the sequences of a whole step: so many times 'micro_batch'"),
    "max_iters": ("steps", ""),
    "max_steps": ("steps", ""),
    "lr_decay_iters": ("steps", "with which the schedule ends"),
    "block_size": ("context", ""),
    "n_embd": ("d_model", ""),
    "weight_decay": ("wd_matrix", "beside 'wd_embedding' for the tables"),
    "warmup_iters": ("warmup", ""),
    "grad_clip": ("clip", ""),
    "eval_interval": ("eval_every", ""),
    "eval_iters": ("eval_tokens", "a number of tokens, not of batches"),
    "log_interval": ("log_every", ""),
    "dataset": ("corpus", ""),
    "min_lr": ("floor", "a fraction of the peak rate"),
    "dtype": ("precision", ""),
    "out_dir": ("--out", "an option"),
    "init_from": ("init", "the folder of a run; `stepformer resume RUN` continues one"),
}


PARTED = r"(?!true|false)[A-Za-z_][\w.]* ([-+.\d][\w.+-]*|true|false)"  # a key and what can only be its value


def translated(key: str, known: Collection[str] | None = None) -> str:
    """A sentence on what another trainer's key is here, if it is one (of those that are `known`); else nothing."""
    ours, meaning = SYNONYMS.get(key, ("", ""))
    if not ours or (known is not None and ours not in known):
        return ""
    return f" Here it is '{ours}'{', ' if meaning else ''}{meaning}."


def read_toml(path: str | Path) -> dict[str, Any]:
    """A TOML file as nested dictionaries, with a sentence instead of a traceback when that fails."""
    path = Path(path)
    if path.is_dir():
        raise InputError(f"'{path}' is a folder, not a config file.")
    text = files.read_text(path, "config file")
    try:
        return tomllib.loads(text.replace("\r\n", "\n"))
    except RecursionError:
        raise InputError(f"'{path}' is not valid TOML: it is nested too deeply.") from None
    except ValueError as error:  # a number of thousands of digits, too
        raise InputError(f"'{path}' is not valid TOML: {str(error).rstrip('.')}.") from None


def parse_override(word: str) -> tuple[str, Any]:
    """`key=value`, the value as TOML, .5 or True; a bare word is a string (`template=nesterov`)."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        path = f" A corpus is named corpus={word}." if "/" in word else ""
        raise InputError(f"'{word}' is not of the form key=value.{path}")
    if text in ("True", "False"):
        return key, text == "True"
    number = re.sub(r"^([-+]?)\.(?=\d)", r"\g<1>0.", text)  # TOML has no .5
    try:
        return key, tomllib.loads(f"value = {number}")["value"]
    except (ValueError, RecursionError):
        return key, text


def refuse_parted(words: Sequence[str]) -> None:
    """A key and its value given as two words."""
    found = [f"{key}={value}" for key, value in pairwise(words) if re.fullmatch(PARTED, f"{key} {value}")]
    if found:
        raise InputError(f"A setting is one word: write {' '.join(found)}.")


def parse_overrides(words: Iterable[str], problems: list[str] | None = None) -> list[tuple[str, Any]]:
    """All words; those that are not of the form key=value go to `problems`, or are refused together."""
    if isinstance(words, str):
        raise InputError(f"Settings are a list of words: give [{words!r}] instead of {words!r}.")
    if isinstance(words, Mapping):
        raise InputError(f"Settings are a list of words, or keywords: give **{dict(words)!r}.")
    words, found, bad = list(words), [], []
    refuse_parted(words)
    if "=" in words[1:-1]:
        at = words.index("=", 1)
        bad.append(f"A setting has no blanks around '=': write {words[at - 1]}={words[at + 1]}.")
        del words[at - 1 : at + 2]
    for word in words:
        try:
            found.append(parse_override(word))
        except InputError as error:
            bad.append(str(error))
    if problems is not None:
        problems += bad
    elif bad:
        raise InputError("\n".join(bad))
    return found


def merge(
    base: Mapping[str, Any], overrides: Iterable[str], section: str, problems: list[str] | None = None
) -> dict[str, Any]:
    """Apply `key=value` or `section.key=value` words to one section's values."""
    given = parse_overrides(overrides, problems)
    return {**base, **{key.removeprefix(f"{section}."): value for key, value in given}}
