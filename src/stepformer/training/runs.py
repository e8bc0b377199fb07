"""A run's folder: what it was asked to do, where it ran, what it measured, its checkpoints.

run.json          config, data and their hashes       tokenizer/    to read and write text without the corpus
config.toml       the same config, to train again     metrics.jsonl every step and evaluation
environment.json  versions, device, git revision      checkpoints/  see stepformer.training.checkpoints
result.json       final numbers, once finished        failed.txt    why it cannot go on, if it cannot
plugins/          copies of rules of your own, as they were, to be read
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import secrets
import shlex
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stepformer.base import documents, files
from stepformer.base import plugins as plugged
from stepformer.base.errors import (
    ChangedRuleError,
    ConfigError,
    InputError,
    StepformerError,
    StepformerWarning,
    command_line,
    neighbour,
)
from stepformer.base.version import __version__
from stepformer.data.tokenizers import Tokenizer, load_tokenizer, of_its_run
from stepformer.ops import kernels
from stepformer.ops.dtypes import matmul_precision
from stepformer.optim.config import without_foreign
from stepformer.training.checkpoints import Checkpoints
from stepformer.training.config import SECTIONS, RunConfig
from stepformer.training.metrics import last_saved

Record = dict[str, Any]
"""What is in run.json, or goes there."""


class RunFolder:
    """Paths and small files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.result = path / "result.json"
        self.failure = path / "failed.txt"
        self.tokenizer = path / "tokenizer"

    @property
    def diverged(self) -> bool:
        """Whether it ended because its numbers did, and would again."""
        return self.failure.is_file() and self.failure.read_text(errors="replace").startswith(DIVERGED)

    @property
    def exists(self) -> bool:
        return (self.path / "run.json").is_file()

    def create(
        self, config: RunConfig, facts: Record, tokenizer: Path, plugins: list[str], trained: Record | None = None
    ) -> None:
        """Write what a new run is; `run.json` last, so that a half-made folder is not a run. `trained` is where its
        first steps were made, if not here.
        """
        files.remove_unfinished(self.path)
        foreign = sorted(p.name for p in self.path.iterdir() if p.name not in _OWN) if self.path.is_dir() else []
        if foreign:
            raise InputError(f"'{self.path}' holds other files ('{foreign[0]}'): choose another --out.")
        record: dict[str, Any] = {"format": documents.RUN.format, "stepformer": __version__, "config": config.to_dict()}
        record |= {"id": new_id(), "tokenizer": load_tokenizer(tokenizer).describe(), **facts}
        record |= {"plugins": plugins, "code": plugged.identity(plugins, config.model.components())}
        where = trained or environment()  # takes long, as the tokenizer does: Ctrl-C meanwhile leaves nothing
        sections = ("model",) if "imported" in facts else ALL  # what nobody chose is not told
        files.write_text(self.path / "config.toml", as_toml(config, sections))
        files.write_json(self.path / "environment.json", where)
        self.tokenizer.mkdir(parents=True, exist_ok=True)
        for source in tokenizer.iterdir():
            with files.writing(self.tokenizer / source.name) as file:
                file.write(source.read_bytes())
        for number, sources in enumerate(plugged.sources_of(plugins, config.model.components())):
            for name, source in sources.items():  # to be read; a run imports its plug-ins from where they are
                copied = self.path / "plugins" / str(number) / f"{name}.txt"
                files.write_text(copied, source.read_text(errors="replace"))
        # who trains with it may open the run
        plugged.trust(file for plugin in plugins for file in plugged.files_at(plugged.place_of(plugin)))
        files.write_json(self.path / "run.json", record)

    def read(self) -> dict[str, Any]:
        """The record of the run; sentences for what is no run, or one of a newer stepformer."""
        if not self.path.is_dir():
            near = neighbour(self.path, "run.json") or neighbour(Path("runs") / self.path.name, "run.json")
            raise InputError(f"There is no run folder '{self.path}'.{near}")
        runs = sorted(str(found.parent) for found in self.path.glob("*/run.json"))
        named = " or ".join([f"'{run}'" for run in runs[:3]] + ["another one"] * (len(runs) > 3))
        if not self.exists and (self.path / "study.json").is_file():
            advice = f"name one of its runs, {named}" if runs else "it has no runs yet"
            raise InputError(f"'{self.path}' is a study, not a run: {advice}.")
        if not self.exists:
            raise InputError(
                f"'{self.path}' is not a run: it has no run.json.{f' Did you mean {named}?' if runs else ''}"
            )
        return documents.read(self.path / "run.json", documents.RUN)

    def config(self) -> RunConfig:
        return RunConfig.from_dict(self.read()["config"])

    def taken(self, config: RunConfig) -> str:
        """What to do about a folder that has a run: continue it if it is this one, else take another."""
        there = flat(self.config().to_dict())
        differ = [key for key, value in flat(config.to_dict()).items() if "." in key and there.get(key) != value]
        names = (self.path.with_name(f"{self.path.name}-{number}") for number in itertools.count(2))
        free = shlex.quote(str(next(name for name in names if not name.exists())))
        other = f"choose another place, for instance {free} (--out on the command line)"
        holds = f"'{self.path}' already holds a run"
        if differ:
            return f"{holds} with another {', '.join(differ[:4])}: {other}."
        if self.result.is_file():
            return f"{holds}, and it is finished: {other}."
        return f"{holds}: continue it with `{command_line('resume', self.path)}`, or {other}."

    def sources(self) -> list[tuple[str, Path]]:
        """The copies of its rules' code, by their place in the folder; what only links to another place is none."""
        found = [path for path in sorted(self.path.glob("plugins/**/*.txt")) if path.is_file()]
        inside = [path for path in found if path.resolve() == self.path.resolve() / path.relative_to(self.path)]
        return [(path.relative_to(self.path).as_posix(), path) for path in inside]

    def opened(self) -> tuple[dict[str, Any], RunConfig]:
        """Record and config, its plug-ins imported; refused if they are not what they were when the run was made."""
        record, what = self.read(), f"The run '{self.path}'"
        plugins, then = record.get("plugins", []), record.get("code", {})
        if plugins and not then:
            warnings.warn(
                f"{what} does not say what its plug-ins were: it is taken for granted that they are the same.",
                StepformerWarning,
                stacklevel=2,
            )
        record["plugins"] = plugged.load_recorded(plugins, then, self.path)
        try:
            config = RunConfig.from_dict(record["config"])
        except ConfigError as error:
            unknown = [rule for rule in then if f"Unknown {rule}." in str(error)]
            if not unknown or not self.sources():
                raise
            raise InputError(
                f"{what} needs a {unknown[0]} of its own, which was not imported: its source lies in "
                f"'{self.sources()[0][1]}'. Read it, copy it to a file without .txt and name that with --plugin, or "
                "import it."
            ) from None
        rules = config.model.components()
        plugged.refuse_changed(then, plugged.identity([], rules), what, rules)
        return record, config

    def read_result(self, record: Mapping[str, Any], config: RunConfig) -> dict[str, Any] | None:
        """The result of a finished run, which must be its own; None of one that is not finished."""
        if not self.result.is_file():
            return None
        result = documents.read(self.result, documents.RESULT)
        if result.get("run", record.get("id")) != record.get("id"):
            raise InputError(f"The result in '{self.path}' is of another run, {result['run']}.")
        if result["config_hash"] != config.hash:
            raise InputError(f"The result in '{self.path}' is of other settings than its run.json has.")
        return result

    def read_tokenizer(self, record: dict[str, Any]) -> Tokenizer:
        """The run's tokenizer, which must be the one that its weights were trained with."""
        known = record.get("tokenizer") or record.get("corpus", {}).get("tokenizer")
        return of_its_run(load_tokenizer(self.tokenizer), known, self.path)

    def kept(self, record: dict[str, Any], config: RunConfig) -> Checkpoints:
        """The run's checkpoints, to be read; those of other runs or settings are not taken for its own."""
        return Checkpoints(self.checkpoints, owner=lambda state: _not_of(state, record, config))

    def last_saved(self) -> int | None:
        """The newest step that a checkpoint was saved of, whether it is there or not."""
        saved = last_saved(self.metrics)
        if self.result.is_file():
            return max(saved or 0, int(documents.read(self.result, documents.RESULT)["steps"]))
        return saved

    def check_code(self) -> None:
        """Refuse a run whose rules have been changed since. One whose rules are not here any more has its results."""
        try:
            self.opened()
        except ChangedRuleError:
            raise
        except (StepformerError, KeyError, TypeError, AttributeError):  # a damaged record is told by who reads it
            pass

    def note_resumed(self, step: int, changes: dict[str, Any]) -> None:
        """Write down from which step on other code, another machine or other pieces trained this run."""
        path = self.path / "environment.json"
        before, now = documents.read(path, documents.ENVIRONMENT) if path.is_file() else {}, environment()
        if step == 0:  # nothing is left of what trained before
            before = now
        spells = [spell for spell in before.get("resumed", []) if spell["step"] < step]
        last = [before, *spells][-1]
        if any((last.get(key) or None) != (now[key] or None) for key in SPELL) or last.get("changes", {}) != changes:
            spells.append({"step": step, **{key: now[key] for key in (*SPELL, "git")}, "changes": changes})
        files.write_json(path, {**before, "resumed": spells} if spells else before)

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Hold the folder: a second process that wants to train in it is told so."""
        busy = f"Another process is training in '{self.path}': wait for it or stop it."
        return files.held(self.path, "run.lock", busy)


_OWN = (
    *("run.lock", "config.toml", "environment.json", "tokenizer", "plugins", "metrics.jsonl", "checkpoints"),
    *("tensorboard", "failed.txt"),
)
MAY_CHANGE = (  # at a resume
    *("micro_batch", "device", "log_every", "save_every", "keep", "parallel", "compile", "collective_timeout"),
)


def new_id() -> str:
    return secrets.token_hex(6)


def _not_of(state: Mapping[str, Any], record: Mapping[str, Any], config: RunConfig) -> str:
    """Why a checkpoint's state is not that of a run, or nothing. It may have been computed in other pieces."""
    if "run" in state and state["run"] != record.get("id", ""):
        return f"it is of the run {state['run']}, and this is {record.get('id', 'one without id')}"
    try:
        theirs = RunConfig.from_dict(state["config"]).to_dict()
    except ConfigError as error:
        return f"its config cannot be read: {error.problems[0].rstrip('.')}"
    ours, theirs = flat(config.to_dict()), flat(theirs)
    for key in dict.fromkeys((*ours, *theirs)):
        accepted = (ours.get(key), record.get("precision") if key == "train.precision" else ours.get(key))
        if theirs.get(key) not in accepted and key.rpartition(".")[2] not in MAY_CHANGE:
            return f"its {key} is {theirs.get(key)}, and that of the run is {ours.get(key)}"
    return ""


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """One key for every setting; defaults of a model are not among them."""
    parts = ((name, part if isinstance(part, dict) else {"": part}) for name, part in config.items())
    return {f"{name}.{key}".rstrip("."): value for name, part in parts for key, value in part.items()}


def checkpoint_of(folder: RunFolder, which: str, opened: tuple[Record, RunConfig] | None = None) -> tuple[Path, Record]:
    """A run's best checkpoint (its last one while it has no best), or its last one, and the state with it; `opened`
    is what `RunFolder.opened` has said already.
    """
    if which not in ("best", "last"):
        raise InputError(f"'{which}' is not 'best' or 'last'.")
    record, config = opened or folder.opened()
    result = folder.read_result(record, config)
    saved = folder.last_saved() or 0  # asked before: a training may write another one meanwhile
    kept, kind = folder.kept(record, config), "best" if which == "best" else "step"
    there = max(kept.steps(kind), default=-1)
    wanted = saved if which == "last" else result["best_step"] if result else there
    if there != wanted if which == "best" else there < wanted and wanted > 0:
        instead = f"and the one there is of step {there}" if there >= 0 else "and it is gone"
        what = f"The {which} checkpoint of '{folder.path}' was that of step {wanted}"
        raise InputError(f"{what}, {instead}: put it back.")
    try:
        found = kept.latest(kind)
    except InputError as error:
        if kind == "step" or not kept.names("step"):
            raise
        raise InputError(
            f"{error} `--checkpoint last` takes the newest whole one of those that training saved."
        ) from None
    if found is None and which == "best" and kept.names("step"):
        said = f"'{folder.path}' has no best checkpoint yet: its last one is used."
        warnings.warn(said, StepformerWarning, stacklevel=3)
        found = kept.latest("step")
    if found is None:
        if which == "last" and kept.names("best"):  # an imported run, say
            raise InputError(f"The run '{folder.path}' has no last checkpoint, only a best one: ask for that.")
        raise InputError(f"The run '{folder.path}' has no checkpoint yet.")
    return found


# Variables that change which kernels compute, and so the last digits of a result.
ARITHMETIC = (
    *("ATEN_CPU_CAPABILITY", "OPENBLAS_CORETYPE", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
    *("DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
)
SHARING = "STEPFORMER_SHARING"  # how many runs of a study share this device (0: it is alone)
DIVERGED = "Diverged: "  # begins failed.txt of a run that would fail again
SPELL = (
    "versions",
    "device",
    "threads",
    "kernels",
    "ranks",
    "sharing",
    "variables",
    "plugins",
)  # what makes it another's


def environment() -> dict[str, Any]:
    """Versions, device and revision, for whoever wonders later."""
    versions = {"python": platform.python_version(), "stepformer": __version__, "torch": torch.__version__}
    versions["sources"] = plugged.package_digest()
    device: dict[str, Any] = {"cpu": cpu_name(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        device |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count(), "cuda": torch.version.cuda}
    return {
        "versions": versions,
        "platform": platform.platform(),
        "device": device,
        "threads": torch.get_num_threads(),
        "kernels": "on" if kernels.switched_on() else "off",
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "sharing": int(os.environ.get(SHARING, "0")),
        "variables": {
            **{name: os.environ[name] for name in ARITHMETIC if name in os.environ},
            "float32_matmul_precision": matmul_precision(),
            "mkldnn": str(torch.backends.mkldnn.enabled),
            **_around(),
        },
        "plugins": plugged.loaded(),
        "command": sys.argv,
        "git": git_revision(),
    }


def _around() -> dict[str, str]:
    """What a program that trains from Python has switched, in so far as it is not as usual."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    names = ("flash", "mem_efficient", "math", "cudnn")
    off = [name for name in names if not getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
    autocast = {f"autocast_{kind}": str(torch.get_autocast_dtype(kind)) for kind in kinds}
    return {**autocast, **{f"{name}_sdp": "False" for name in off}}


def cpu_name() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    found = {key.strip(): value.strip() for key, value in found.items()}
    parts = [found[key] for key in ("CPU implementer", "CPU part", "CPU variant") if key in found]  # of Arm
    return found.get("model name") or " ".join([platform.machine(), *parts]) or platform.processor()


def git_revision() -> dict[str, Any] | None:
    """Commit of the source tree this package runs from, and whether it has changes; None outside a repository."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=True)
            return done.stdout.strip()
        return None

    revision = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no")  # a text of one's own changes nothing
    return None if revision is None else {"revision": revision, "changed": bool(changes)}


ALL = ("model", *SECTIONS)


def as_toml(config: RunConfig, sections: Sequence[str] = ALL) -> str:
    """A config as TOML that `stepformer train FILE` reads; keys that are unset are left out."""

    def value(v: Any) -> str:
        return json.dumps(v, ensure_ascii=False) if isinstance(v, bool | str) else repr(v)

    # where it comes from, so that published figures stay beside it
    text = [f"[recipe]\nname = {value(config.recipe)}\n"] if config.recipe else []
    for section in sections:
        values = config.to_dict()[section]
        values = without_foreign(values) if section == "optim" else values
        text.append(f"[{section}]\n" + "".join(f"{k} = {value(v)}\n" for k, v in values.items() if v is not None))
    return "\n".join(text)
