"""In which settings the rows of a comparison differ, and which of these differences were meant.

A comparison is about architectures: components, their options and extras may differ from row to row. Whatever else
decides a loss or a time (sizes, data, optimizer, length, code, machine) is the same in all rows, or is named by whoever
wants it otherwise.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepformer.base import documents
from stepformer.base.errors import ConfigError, suggestion
from stepformer.base.plugins import digest
from stepformer.model.config import NOT_THE_FUNCTION, declared_options
from stepformer.optim.config import foreign
from stepformer.training.config import SECTIONS, RunConfig
from stepformer.training.runs import RunFolder

SIZES = ("n_layer", "n_head", "d_model", "context", "vocab_size", "real_vocab", "mlp_hidden")
MATCHED = ("d_model", "mlp_hidden")  # of those, what a baseline is made larger by
HOW = (*NOT_THE_FUNCTION, "norm_eps")  # of [model], but not what a row is named for
# Seeds pair the runs; the others say what is written down, and when.
WRITTEN = (
    "seed",
    "log_every",
    "save_every",
    "keep",
    "stream_norms",
    "tensorboard",
    "wandb",
    "eval_first",
    "eval_whole",
)
NOT_COMPARED = frozenset(f"train.{key}" for key in WRITTEN)

BUDGET = {"steps", "train.steps"}  # allowed, rows have budgets of their own
LATER = {"stepformer", "code.stepformer", "precision", "train.precision"}  # what is compared once runs are there

Flat = Mapping[str, Any]
PLUGIN = "plug-in "  # begins the name of one
BESIDE = "code.beside "
LISTED = ("machine.", BESIDE)  # of these a table tells, and nothing is refused


def flat(config: RunConfig) -> dict[str, Any]:
    """Every setting of a run under one key, `optim.lr` say, defaults and component options filled in."""
    model = {f.name: getattr(config.model, f.name) for f in dataclasses.fields(config.model) if f.name != "options"}
    model |= {name: config.model.option(name) for name in declared_options(config.model)}
    if not config.own_vocabulary:  # the corpus decides
        del model["vocab_size"], model["real_vocab"]
    sections = {"model": model, **{name: getattr(config, name).to_dict() for name in ("data", "optim", "train")}}
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


def recorded(folder: Path) -> dict[str, Any]:
    """The settings of a run, of its code and of its machine, as its folder tells them."""
    record = RunFolder(folder).read()
    config: dict[str, dict[str, Any]] = record["config"]
    settings = {f"model.{key}": value for key, value in config["model"].items()}
    for section, kind in SECTIONS.items():
        defaults = {f.name: f.default for f in dataclasses.fields(kind)}  # of keys that are younger than the run
        settings |= {f"{section}.{key}": value for key, value in {**defaults, **config[section]}.items()}
    if record.get("corpus"):
        settings |= what_was_read(record["corpus"])
    if record.get("init"):
        known = ("id", "config_hash", "step", "weights")
        settings["train.init"] = " ".join(str(record["init"][key]) for key in known if key in record["init"])
    path = folder / "environment.json"
    facts = documents.read(path, documents.ENVIRONMENT) if path.is_file() else {}
    spells = [facts, *facts.get("resumed", [])]
    settings |= {"code.stepformer": record.get("stepformer"), "train.precision": record.get("precision")}
    settings |= code_settings(record.get("code", {}), [spell["plugins"] for spell in spells if "plugins" in spell])
    return settings | _ran(spells, config["train"].get("device") == "cpu")


def code_settings(code: Mapping[str, Flat], imported: Sequence[Mapping[str, Flat]]) -> dict[str, str]:
    """Rules of a run that are not the package's, the plug-ins they are from, and plug-ins that were imported beside
    them: `imported` has those of every spell of training.
    """
    rules = {name: files for name, files in code.items() if not name.startswith(PLUGIN)}
    own = [{*files.values()} for files in rules.values()]
    named = {name: files for name, files in code.items() if name.startswith(PLUGIN)}
    spells = [{**named, **imported[0]}, *imported[1:]] if imported else [named]
    found = {f"code.{name}": digest(files) for name, files in rules.items()}
    for name in dict.fromkeys(name for spell in spells for name in spell):
        digests = dict.fromkeys(digest(spell[name]) if name in spell else "none" for spell in spells)
        contents = {checksum for spell in spells for checksum in spell.get(name, {}).values()}
        used = any(rule <= contents for rule in own)
        found[f"{'code.' if used else BESIDE}{name}"] = ", then ".join(digests)
    return found


def what_was_read(corpus: Mapping[str, Any]) -> dict[str, Any]:
    """A corpus by its content, as run.json has it: the same text under another name or in another folder is one."""
    hashes = [str(split.get("hash")) for _, split in sorted(corpus.get("splits", {}).items())]
    tokenizer = corpus.get("tokenizer", {}).get("fingerprint")
    return {"data.corpus": " ".join(hashes), "data.tokenizer": tokenizer, "data.dialect": None, "data.count": None}


def _ran(spells: Sequence[Flat], on_cpu: bool) -> dict[str, Any]:
    """What trained a run: code and machine, several if it was resumed on others."""
    found: dict[str, dict[str, None]] = {}
    for spell in spells:
        versions, device = spell.get("versions", {}), spell.get("device", {})
        gpu = None if on_cpu else device.get("gpu")
        values = {
            "code.stepformer": " ".join(filter(None, (versions.get("stepformer"), versions.get("sources")))),
            "machine.torch": versions.get("torch"),
            "machine.python": versions.get("python"),
            "machine.processor": gpu or device.get("cpu"),
            "machine.threads": None if gpu else spell.get("threads"),
            "machine.kernels": spell.get("kernels"),
            "machine.sharing": spell.get("sharing"),
            "machine.ranks": ranks if (ranks := spell.get("ranks", 1)) > 1 else None,
            "machine.variables": " ".join(f"{k}={v}" for k, v in sorted(spell.get("variables", {}).items())),
            "machine.changes": spell.get("changes"),
        }
        for key, value in values.items():
            if value:
                found.setdefault(key, {})[str(value)] = None
    return {key: ", then ".join(values) for key, values in found.items()}


@dataclasses.dataclass(frozen=True)
class Difference:
    """One setting that is not the same in all rows; a row that does not have it has None."""

    key: str
    values: Mapping[str, Any]
    meant: bool

    def permitted(self, words: Iterable[str]) -> bool:
        return bool({self.key, last(self.key)} & {*words})

    def __str__(self) -> str:
        shown = {label: "unset" if value is None else value for label, value in self.values.items()}
        return f"{self.key} ({', '.join(f'{label} {value}' for label, value in shown.items())})"


def differences(rows: Mapping[str, Flat], meant: Iterable[str] = (), *, one_row: bool = False) -> list[Difference]:
    """The settings in which rows differ, those of the architecture first; `meant` are others that a grid goes over.
    With `one_row` the rows are seeds of one, which have all rules in common.
    """
    keys = dict.fromkeys(key for settings in rows.values() for key in settings if key not in NOT_COMPARED)
    permitted = {*meant}
    differing = []
    for key in keys:
        own = {label: found for label, found in rows.items() if last(key) not in _foreign(key, found)}
        values = {label: found.get(key) for label, found in own.items() if one_row or _concerns(key, found)}
        if any(value != next(iter(values.values())) for value in values.values()):
            differing.append(Difference(key, values, is_architecture(key) or bool({key, last(key)} & permitted)))
    return sorted(differing, key=lambda difference: not is_architecture(difference.key))


def _foreign(key: str, settings: Flat) -> set[str]:
    """What only other optimizers than the row's read, which is none of its settings."""
    return foreign(str(settings["optim.name"])) if key.startswith("optim.") and "optim.name" in settings else set()


def _concerns(key: str, settings: Flat) -> bool:
    """Whether a row has a say in a setting: a rule, or how a component computes, is not another one in a row that does
    not have it. A plug-in that was imported beside a row's own rules is missing in one that did without it.
    """
    if key in settings:
        return True
    if key.startswith(BESIDE):
        return f"code.{key.removeprefix(BESIDE)}" not in settings
    return not (key.startswith("code.") or last(key) in HOW)


def is_architecture(key: str) -> bool:
    """Whether a setting makes an architecture: a component, an option of one, or an extra."""
    section, _, name = key.partition(".")
    return section == "model" and name not in (*SIZES, *HOW)


def last(key: str) -> str:
    """The key without its section."""
    return key.partition(".")[2]


def refuse_unmeant(found: Sequence[Difference], rows: Mapping[str, Flat], allowed: Sequence[str] = ()) -> None:
    """A sentence for every difference that nobody asked for; and for a word of --allow that is no setting."""
    known = {name for settings in rows.values() for key in settings for name in (key, last(key))} | LATER
    problems = [
        f"--allow {word}: no row has such a setting.{suggestion(word, known)}" for word in allowed if word not in known
    ]
    problems += [
        f"The rows differ in {difference}: give all of them one value, or permit it: --allow "
        f"{shlex.quote(last(difference.key))} (`allow=` in Python)."
        for difference in found
        if not (difference.meant or difference.key.startswith(LISTED) or difference.permitted(allowed))
    ]
    refused = {difference.key for difference in found if not difference.permitted(allowed)}
    if {f"model.{key}" for key in ("n_layer", "n_head", "d_model", "context")} <= refused:
        why = "A name alone is of size tiny, a file that says no size is small: `size=tiny` is for all rows."
        problems.insert(0, why)
    if problems:
        raise ConfigError(problems)


def fair(
    variants: Mapping[str, RunConfig],
    baseline: str,
    allowed: Sequence[str] = (),
    meant: Iterable[str] = (),
    data: Mapping[str, Flat] | None = None,
) -> dict[str, RunConfig]:
    """The rows of a study under one optimizer: rates that a row leaves unset are its baseline's. What still differs,
    does not belong to an architecture and is not `meant` is refused, unless `allowed` names it. `data` says for each
    row what is read, whatever it is called.
    """
    same = {label: config.with_rates_of(variants[baseline]) for label, config in variants.items()}
    rows = {label: {**flat(config), **(data or {}).get(label, {})} for label, config in same.items()}
    refuse_unmeant(differences(rows, meant), rows, allowed)
    return same
