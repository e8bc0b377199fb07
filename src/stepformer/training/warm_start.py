"""Starting from the weights of another run instead of random ones.

A run remembers where its weights came from by that run's id, config hash, step and weights (`init` in run.json).
After its first checkpoint it does not need them any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepformer.base.errors import InputError, command_line
from stepformer.training.checkpoints import check_fits, weights_of
from stepformer.training.config import RunConfig
from stepformer.training.parallel import World
from stepformer.training.runs import RunFolder, checkpoint_of


@dataclass(frozen=True)
class WarmStart:
    """A checkpoint to begin with, and whose it is."""

    checkpoint: Path
    facts: dict[str, Any]


def warm_start(init: str, config: RunConfig, tokenizer: Mapping[str, Any], world: World) -> WarmStart:
    """The best weights of the run in the folder `init`, to train `config` from.

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
        raise InputError(
            f"init = '{folder.path}' has the weights of another architecture: its {differ[0]} is "
            f"{theirs.get(differ[0], 'unset')}, this run's {ours.get(differ[0], 'unset')}"
            + (f" (also different: {', '.join(differ[1:4])})." if differ[1:] else ".")
        )
    checkpoint, step, weights = world.on_main(lambda: _best(folder, world, (record, source)))
    facts = {
        "run": str(folder.path.resolve()),
        "id": record.get("id", ""),
        "config_hash": source.hash,
        "checkpoint": checkpoint.name,
        "step": step,
        "weights": weights,
    }
    return WarmStart(checkpoint, facts)


def _best(folder: RunFolder, world: World, opened: tuple[dict[str, Any], RunConfig]) -> tuple[Path, int, str]:
    checkpoint, state = checkpoint_of(folder, "best", world, opened)
    check_fits(checkpoint, opened[1].model)
    return checkpoint, int(state["step"]), weights_of(checkpoint)


def same_start(
    config: RunConfig, known: Mapping[str, Any], tokenizer: Mapping[str, Any], folder: RunFolder, world: World
) -> WarmStart:
    """The start that run.json tells of, for a run stopped before its first checkpoint; other weights are refused."""
    start = warm_start(str(known["run"]), config, tokenizer, world)
    for key in ("id", "config_hash", "step", "weights"):
        if start.facts[key] != known.get(key, start.facts[key]):
            raise InputError(
                f"'{folder.path}' has no checkpoint yet and began with other weights than '{known['run']}' has now "
                f"({key} {known[key]} then, {start.facts[key]} now): train a new run."
            )
    return start
