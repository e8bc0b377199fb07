"""Many runs under one plan: finished ones are kept, interrupted ones go on, each GPU gets its own process.

STUDY/study.json             the plan
STUDY/LABEL-sSEED/           one run folder each (stepformer.training.runs)
STUDY/comparison.{md,csv,png}
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stepformer.base import files
from stepformer.base.errors import ConfigError, InputError, StepformerError
from stepformer.base.plugins import package_digest
from stepformer.base.version import __version__
from stepformer.base.words import parse_override
from stepformer.study.comparison import Facts, grid_points
from stepformer.study.differences import differences, last, recorded
from stepformer.training import RunConfig, Stopped, resume, run_config, train
from stepformer.training.corpora import open_corpus
from stepformer.training.parallel import ALONE, choose_device
from stepformer.training.run import corpus_facts
from stepformer.training.runs import RunFolder, as_toml
from stepformer.training.stopping import Watch


@dataclass(frozen=True)
class Planned:
    """One run of a study."""

    label: str
    config: RunConfig
    folder: RunFolder

    @property
    def finished(self) -> bool:
        return self.folder.result.is_file()


@dataclass
class Report:
    """What became of the runs: folders of the finished ones, and a sentence for each that failed."""

    finished: list[Path] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def plan(folder: Path, variants: dict[str, RunConfig], seeds: Sequence[int], **how: Any) -> list[Planned]:
    """Every variant with every seed, seeds outermost, so that an early stop leaves whole pairs; `how` as for plan_runs.

    A folder that already holds other settings under the same label is refused: its runs would not be comparable.
    """
    labelled = []
    for seed, (label, variant) in itertools.product(seeds, variants.items()):
        settings = variant.to_dict()
        settings["train"]["seed"] = seed
        labelled.append((label, RunConfig.from_dict(settings)))
    return plan_runs(folder, labelled, **how)


def plan_runs(
    folder: Path,
    labelled: Sequence[tuple[str, RunConfig]],
    *,
    quiet: bool = False,
    allowed: Sequence[str] = (),
    facts: Facts | None = None,
    here: bool = True,
) -> list[Planned]:
    """The same for configs that have their seeds already, each with its label, in this order; `here` unless another
    machine trains them.
    """
    problems = [f"'{label}' cannot be a folder's name." for label, _ in labelled if label != Path(label).name]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    runs = []
    for label, config in labelled:
        corpus = open_corpus(config.data, ALONE, quiet=quiet)
        config = config.for_vocabulary(corpus.vocab_size)
        run = Planned(label, config, RunFolder(folder / f"{label}-s{config.train.seed}"))
        if run.folder.exists:
            record, trained = run.folder.opened()
            if trained.hash != config.hash:
                raise InputError(
                    f"'{run.folder.path}' was trained with other settings: choose another --out for this comparison."
                )
            if record.get("corpus") and corpus_facts(corpus)["splits"] != record["corpus"].get("splits"):
                raise InputError(
                    f"'{run.folder.path}' was trained on another '{config.data.corpus}': choose another --out."
                )
        runs.append(run)
    _check_one_code(folder, runs, allowed, here)
    listed = [{"label": r.label, "seed": r.config.train.seed, "config": r.config.hash} for r in runs]
    study = {"format": 1, "runs": listed, "facts": dataclasses.asdict(facts or Facts())}
    files.write_json(folder / "study.json", study)
    return runs


def _check_one_code(folder: Path, runs: Sequence[Planned], allowed: Sequence[str], here: bool) -> None:
    """Refuse to go on with a study under other sources of this package, or in another precision."""
    keys = ("code.stepformer", "train.precision") if here else ("code.stepformer",)
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for run in runs:
        row, name = rows.setdefault(run.label, {}), run.folder.path.name
        if run.folder.exists:
            known = recorded(run.folder.path)
            row[name] = {key: known.get(key) for key in keys}
        if not run.finished:
            now = {"code.stepformer": f"{__version__} {package_digest()}"}
            if here:
                now["train.precision"] = run.config.precision_on(choose_device(run.config.train.device))
            row[f"{name} from now on"] = now
    apart = [found for row in rows.values() for found in differences(row, one_row=True)]
    permit = ""
    if not apart:
        firsts = {label: next(iter(row.values())) for label, row in rows.items()}
        # all of them: a row that has no such setting has another one, too
        apart = [found for found in differences(firsts, one_row=True) if not found.permitted(allowed)]
        permit = f", or permit it with --allow {last(apart[0].key)}" if apart else ""
    if apart:
        raise InputError(f"'{folder}' would have runs that differ in {apart[0]}: choose another --out{permit}.")


def carry_out(
    runs: Iterable[Planned], *, jobs: int | None = None, quiet: bool = False, plugins: Sequence[str] = ()
) -> Report:
    """Train what is not finished yet; a run that fails does not keep the others from running."""
    runs = list(runs)
    report = Report()
    missing = [run for run in runs if not run.finished]
    jobs = max(1, torch.cuda.device_count()) if jobs is None else jobs
    if jobs > 1 and len(runs) > 1 and missing:  # also the last one, which then has as many threads as the others
        _in_processes(missing, jobs, report, plugins)
    else:
        with Watch() as watch:
            for run in missing:
                _here(run, report, quiet, plugins, watch)
                if watch.asked() and run is not missing[-1]:  # it came while that run was finishing
                    raise Stopped(watch.asked(), None, run.folder.path.parent)
    report.finished = [run.folder.path for run in runs if run.finished]
    return report


def _here(run: Planned, report: Report, quiet: bool, plugins: Sequence[str], watch: Watch) -> None:
    try:
        if run.folder.exists:
            resume(run.folder.path, quiet=quiet, watch=watch)
        else:
            train(run.config, run.folder.path, quiet=quiet, label=run.label, plugins=plugins, watch=watch)
    except StepformerError as error:
        report.failed[run.folder.path.name] = str(error)


def _in_processes(runs: list[Planned], jobs: int, report: Report, plugins: Sequence[str]) -> None:
    """One process per run, at most `jobs` at a time, GPUs taken in turn."""
    gpus = torch.cuda.device_count()
    waiting, running = list(runs), dict[int, tuple[Planned, subprocess.Popen[bytes]]]()
    with Watch() as watch:
        while waiting or running:
            for slot in range(jobs):
                if slot not in running and waiting and not watch.asked():
                    run = waiting.pop(0)
                    running[slot] = (run, _start(run, slot, jobs, gpus, plugins))
            for slot, (run, process) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[slot]
                if process.returncode not in (0, 128 + (watch.asked() or signal.SIGTERM)):
                    text = (run.folder.path.parent / f"{run.folder.path.name}.log").read_text(errors="replace")
                    last = (text.strip().splitlines() or ["it said nothing"])[-1]
                    report.failed[run.folder.path.name] = f"exit status {process.returncode}: {last}"
            if watch.asked():
                for _, process in running.values():
                    process.send_signal(signal.SIGTERM)  # each saves and ends
                for _, process in running.values():
                    process.wait()
                raise Stopped(watch.asked(), None, runs[0].folder.path.parent)
            time.sleep(0.2)


# -P: what lies in the folder that this was started from is not on the path of the command, nor of its processes
STEPFORMER = (sys.executable, "-P", "-m", "stepformer")


def _start(run: Planned, slot: int, jobs: int, gpus: int, plugins: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    if gpus:
        visible = environment.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(i) for i in range(gpus)]
        environment["CUDA_VISIBLE_DEVICES"] = names[slot % len(names)]
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    command = [*STEPFORMER, *command_of(run, plugins)]
    log = (run.folder.path.parent / f"{run.folder.path.name}.log").open("ab")
    with log:
        # a group of its own: Ctrl-C in the terminal reaches only us, and we pass it on once
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def command_of(run: Planned, plugins: Sequence[str] = ()) -> list[str]:
    """The words after `stepformer` that train or continue a planned run."""
    words = [word for plugin in plugins for word in ("--plugin", plugin)]
    if run.folder.exists:
        return ["resume", str(run.folder.path), "--quiet", *words]
    toml = run.folder.path.parent / f"{run.folder.path.name}.toml"
    files.write_text(toml, as_toml(run.config))
    return ["train", str(toml), "--out", str(run.folder.path), "--label", run.label, "--quiet", *words]


def submit(runs: Iterable[Planned], folder: Path, *, slurm: dict[str, Any], plugins: Sequence[str] = ()) -> list[str]:
    """Hand every unfinished run to Slurm through submitit; returns the job ids.

    A job that reaches its time limit saves and is queued again by submitit, which keeps its jobs as pickles of its own
    in the study's folder.
    """
    try:
        import submitit  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise StepformerError("--slurm needs submitit: pip install 'stepformer[slurm]'.") from None
    slurm = dict(slurm)
    try:
        executor = submitit.AutoExecutor(folder=str(folder / "slurm"), cluster=slurm.pop("cluster", None))
        executor.update_parameters(**slurm)
    except (NameError, ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"submitit refuses the --slurm settings: {error}") from None
    jobs = [
        executor.submit(SlurmRun(str(run.folder.path), command_of(run, plugins))) for run in runs if not run.finished
    ]
    return [str(job.job_id) for job in jobs]


class SlurmRun:
    """A run as a Slurm job: trains, and when its time is over saves and goes on in a new job."""

    def __init__(self, folder: str, words: list[str]) -> None:
        self.folder, self.words = folder, words
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        self._process = subprocess.Popen([*STEPFORMER, *self.words])
        # not wait(): it holds a lock that checkpoint(), called in a signal handler meanwhile, would wait for
        while (status := self._process.poll()) is None:
            time.sleep(0.5)
        if status:
            raise RuntimeError(f"the run '{self.folder}' ended with exit status {status}")
        return status

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Called by submitit in its signal handler when the time is over: let the run save, queue what continues it."""
        import submitit

        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            while self._process.poll() is None:
                time.sleep(0.1)
        begun = RunFolder(Path(self.folder)).exists
        plugins = [word for i, word in enumerate(self.words) if "--plugin" in self.words[max(0, i - 1) : i + 1]]
        words = ["resume", self.folder, "--quiet", *plugins] if begun else self.words
        return submitit.helpers.DelayedSubmission(SlurmRun(self.folder, words))


def grid_axes(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The axes of a grid, each `key=a,b,c`."""
    axes: dict[str, tuple[str, ...]] = {}
    for word in words:
        key, _, text = word.partition("=")
        values = tuple(part for part in text.split(",") if part)
        if not key or not values:
            raise InputError(f"'{word}' is no axis: write key=value,value,...")
        if key in axes:
            raise InputError(f"The axis '{key}' stands twice: write all its values into one.")
        refuse_seed(key)
        axes[key] = values
    return axes


def grid(name: str, words: Sequence[str], axes: Mapping[str, Sequence[str]]) -> dict[str, RunConfig]:
    """Every point of a grid as labelled configs, under the rates of the first; all bad points are reported at once."""
    found, problems = {}, []
    for label, point in grid_points(axes).items():
        chosen = [f"{key}={value}" for key, value in point.items()]
        try:
            found[label or name] = run_config(name, [*words, *chosen])
        except ConfigError as error:
            problems += [f"{' '.join(chosen)}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    first = next(iter(found.values()))
    return {label: config.with_rates_of(first) for label, config in found.items()}


def amount(text: str) -> int:
    """A number of tokens such as 200k, 5M or 1.5B."""
    factors = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
    word = text.strip().lower().replace(",", "").replace("_", "")
    factor = factors.get(word[-1:], 1.0)
    try:
        found = float(word[:-1] if factor > 1 else word) * factor
    except ValueError:
        raise InputError(f"'{text}' is not a number of tokens: write 200k, 5M or 1.5B.") from None
    if not 1 <= found < 1e15:
        raise InputError(f"'{text}' is not a sensible number of tokens.")
    return int(found)


def seeds_of(text: str) -> list[int]:
    """Seeds: `3` means 42, 43, 44; `7,8,11` means those."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InputError(f"'{text}' are no seeds: write how many (3) or which (7,8,11).") from None
    if "," in text and numbers and min(numbers) >= 0:
        return list(dict.fromkeys(numbers))
    if len(numbers) != 1 or not 1 <= numbers[0] <= 1000:
        raise InputError(f"'{text}' are no seeds: write how many (3) or which (7,8,11).")
    return list(range(42, 42 + numbers[0]))


def words_of(items: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names and key=value words, told apart."""
    items = list(items)
    words = [item for item in items if "=" in item]
    for word in words:
        refuse_seed(parse_override(word)[0])
    return [item for item in items if "=" not in item], words


def refuse_seed(key: str) -> None:
    """Seeds belong to the study, which pairs runs by them."""
    if key in ("seed", "train.seed"):
        raise InputError("Give the seeds with --seeds, e.g. --seeds 7,8,11: runs are paired by them.")
