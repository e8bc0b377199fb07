"""A run that goes on: longer than it was planned, or in another direction from a step of its stable phase.

The new run has a folder of its own that begins with a checkpoint of the old one and with the metrics up to there;
`parent` in its run.json says which. Up to that step both schedules must be the same to the bit, otherwise its weights
are not what the new settings would have made.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from stepformer.base import documents, files
from stepformer.base.errors import ConfigError, InputError
from stepformer.optim import Schedule
from stepformer.training.checkpoints import MANIFEST, Checkpoints, step_name
from stepformer.training.config import RunConfig
from stepformer.training.corpora import same_corpus
from stepformer.training.metrics import copy_until
from stepformer.training.parallel import ALONE, joined_world
from stepformer.training.run import resume
from stepformer.training.runs import MAY_CHANGE, RunFolder, new_id

OF_THE_SCHEDULE = ("schedule", "decay_start", "floor", "sam", "rho")


def extend(
    path: str | Path,
    out: str | Path,
    *,
    at: int | None = None,
    label: str | None = None,
    quiet: bool = False,
    corpus: str | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Continue a run in the folder `out` under another length or schedule, and return its result.

    `label` names it in tables, instead of the folder's name. It begins after step `at`, or after the last step that the
    run has a checkpoint of and that both schedules agree on. `corpus` says where the run's corpus is, if it was moved.
    """
    folder, target = RunFolder(Path(path)), RunFolder(Path(out))
    record, old = folder.opened()
    new = _changed(old, changes)
    if target.exists:
        if target.config().hash == new.hash:
            return resume(target.path, quiet=quiet, corpus=corpus)
        raise InputError(f"'{target.path}' already holds another run: choose another --out.")
    step = _agreed(folder, old, new, at)
    parent = {"run": str(folder.path.resolve()), "id": record.get("id", ""), "config_hash": old.hash, "step": step}
    facts: dict[str, Any] = {key: record[key] for key in ("corpus", "also", "precision", "init") if key in record}
    facts |= {"label": label or target.path.name, "parent": parent, "id": new_id()}

    def begin() -> None:
        there = same_corpus(record["corpus"], folder, old, ALONE, corpus)  # told before a folder is made
        facts["corpus"] = {**facts["corpus"], "folder": str(there.folder.resolve())}
        _begin(folder, target, record, old, new, facts)

    with joined_world(new.train.device, new.train.collective_timeout) as world:
        world.on_main(begin)
        return resume(target.path, quiet=quiet)


def _changed(old: RunConfig, changes: dict[str, Any]) -> RunConfig:
    settings = old.to_dict()
    settings["optim"]["warmup"] = Schedule(old.optim, old.train.steps).warmup  # a tenth of the old length, say
    allowed = ("steps", *MAY_CHANGE)
    problems = []
    for key, value in changes.items():
        key = key.rpartition(".")[2]
        if key in OF_THE_SCHEDULE:
            settings["optim"][key] = value
        elif key in allowed:
            settings["train"][key] = value
        else:
            problems.append(
                f"A run cannot change '{key}' when it goes on: train a new one. It may change "
                f"{', '.join((*OF_THE_SCHEDULE, *allowed))}."
            )
    try:
        new = RunConfig.from_dict(settings)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return new


def _agreed(folder: RunFolder, old: RunConfig, new: RunConfig, at: int | None) -> int:
    """The step to go on from: the latest checkpoint until which both schedules gave every step the same rate."""
    steps = Checkpoints(folder.checkpoints).steps()
    if not steps:
        raise InputError(f"The run '{folder.path}' has no checkpoint yet.")
    if at is not None and at not in steps:
        raise InputError(f"'{folder.path}' has no checkpoint of step {at}: it has {', '.join(map(str, steps))}.")

    def rates(schedule: Schedule, t: int) -> tuple[float, float, float]:
        return schedule.factor(t), schedule.momentum(t), schedule.config.rho if schedule.perturbs(t) else 0.0

    first, second = Schedule(old.optim, old.train.steps), Schedule(new.optim, new.train.steps)
    same = 0
    while same < max(steps) and rates(first, same) == rates(second, same):
        same += 1
    fitting = [step for step in steps if step <= min(same, new.train.steps) and at in (None, step)]
    if not fitting:
        why = "its cosine fell" if old.optim.schedule == "cosine" else "its rates were others"
        raise InputError(
            f"'{folder.path}' cannot go on like that: up to step {same} both schedules are the same, {why} from there "
            f"on, and its checkpoints are of steps {', '.join(map(str, steps))}. Runs with schedule=wsd keep the one "
            "where their decay begins; those with schedule=constant go on from any. A new run begins with its weights "
            f"by `train ... {shlex.quote(f'init={folder.path}')}`."
        )
    return max(fitting)


def _begin(
    folder: RunFolder, target: RunFolder, record: dict[str, Any], old: RunConfig, new: RunConfig, facts: dict[str, Any]
) -> None:
    """The new folder: checkpoint and metrics of the old one up to the step, then run.json, which makes it a run."""
    step, kept = facts["parent"]["step"], folder.kept(record, old)
    name = step_name(step)
    best = documents.read(folder.checkpoints / name / MANIFEST, documents.CHECKPOINT)["state"]["best"]
    known = [n for n in kept.names("best") if best and n == step_name(best["step"], "best")]  # not if there is a newer
    target.checkpoints.mkdir(parents=True, exist_ok=True)
    for part in (name, *known):
        kept.verified(part)
        temporary = target.checkpoints / f"{files.TEMPORARY}{os.getpid()}-{part}"
        with files.explained(target.path):
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.copytree(folder.checkpoints / part, temporary)
            manifest = documents.read(temporary / MANIFEST, documents.CHECKPOINT)
            manifest["state"] |= {"config": new.to_dict(), "run": facts["id"]}
            if part == name and not known:
                manifest["state"]["best"] = None
            files.write_json(temporary / MANIFEST, manifest)
            shutil.rmtree(target.checkpoints / part, ignore_errors=True)
            files.rename(temporary, target.checkpoints / part)
    copy_until(folder.metrics, target.metrics, step)
    path = folder.path / "environment.json"
    trained = documents.read(path, documents.ENVIRONMENT) if path.is_file() else None  # resuming adds today's to it
    if trained:
        trained["resumed"] = [spell for spell in trained.get("resumed", []) if spell["step"] < step]
    target.create(new, facts, folder.tokenizer, record.get("plugins", []), trained)
