"""Many runs under one plan: finished ones are kept, interrupted ones go on, each GPU gets its own process.

STUDY/study.json             the plan
STUDY/LABEL-sSEED/           one run folder each (stepformer.training.runs)
STUDY/comparison.{md,csv,png}
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stepformer.base import files
from stepformer.base.errors import ConfigError, InputError, StepformerError
from stepformer.base.plugins import is_ours, package_digest
from stepformer.base.progress import counting, say
from stepformer.base.version import __version__
from stepformer.base.words import parse_override, refuse_parted
from stepformer.study.comparison import Facts
from stepformer.study.differences import differences, flat, last, recorded
from stepformer.study.grids import grid_points
from stepformer.training import RunConfig, Stopped, resume, run_config, train
from stepformer.training.corpora import corpus_facts, open_corpus
from stepformer.training.parallel import ALONE, choose_device
from stepformer.training.runs import SHARING, RunFolder, as_toml
from stepformer.training.stopping import Watch


@dataclass(frozen=True)
class Planned:
    """One run of a study."""

    label: str
    config: RunConfig
    folder: RunFolder

    @property
    def name(self) -> str:
        return self.folder.path.name

    @property
    def finished(self) -> bool:
        return self.folder.result.is_file()

    def beside(self, ending: str) -> Path:
        """A file that has the name of its folder."""
        return self.folder.path.with_name(f"{self.name}.{ending}")


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
    dry: bool = False,
    open_keys: Collection[str] = (),
) -> list[Planned]:
    """The same for configs with their seeds, each with its label, in this order; `here`, or on another machine; with
    `dry` nothing is written, and `open_keys` are still to be chosen.
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
            (record, then), trained = run.folder.opened(), f"'{run.folder.path}' was trained"
            if then.hash != config.hash:
                found = differences({"then": flat(then), "now": flat(config)}, one_row=True)
                apart = [each for each in found if each.key.rpartition(".")[2] not in open_keys]
                named = f", {', '.join(map(str, apart[:3]))}" * bool(apart)
                if apart or not open_keys:
                    raise InputError(f"{trained} with other settings{named}: choose another --out for this comparison.")
            if record.get("corpus") and corpus_facts(corpus)["splits"] != record["corpus"].get("splits"):
                raise InputError(f"{trained} on another '{config.data.corpus}': choose another --out.")
        runs.append(run)
    _check_one_code(folder, runs, allowed, here)
    if dry:
        return runs
    listed = [{"label": r.label, "seed": r.config.train.seed, "config": r.config.hash} for r in runs]
    told = dataclasses.asdict(facts or Facts())
    files.write_json(folder / "study.json", {"format": 1, "runs": listed, "facts": told})
    return runs


def _check_one_code(folder: Path, runs: Sequence[Planned], allowed: Sequence[str], here: bool) -> None:
    """Refuse to go on with a study under other sources of this package, or in another precision."""
    keys = ("code.stepformer", "train.precision") if here else ("code.stepformer",)
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for run in runs:
        row = rows.setdefault(run.label, {})
        if run.folder.exists:
            known = recorded(run.folder.path)
            row[run.name] = {key: known.get(key) for key in keys}
        if not run.finished:
            now = {"code.stepformer": f"{__version__} {package_digest()}"}
            if here:
                now["train.precision"] = run.config.precision_on(choose_device(run.config.train.device))
            row[f"{run.name} from now on"] = now
    would = f"'{folder}' would have runs that differ in"
    if within := [found for row in rows.values() for found in differences(row, one_row=True)]:
        raise InputError(f"{would} {within[0]}: choose another --out.")
    # `one_row`, although they are several: a row that has no such setting has another one, too
    for found in differences({label: next(iter(row.values())) for label, row in rows.items()}, one_row=True):
        if not found.permitted(allowed):
            raise InputError(f"{would} {found}: choose another --out, or permit it with --allow {last(found.key)}.")


def carry_out(
    runs: Sequence[Planned],
    *,
    jobs: int | None = None,
    quiet: bool = False,
    plugins: Sequence[str] = (),
    after: Callable[[Planned], object] = lambda run: None,
    watch: Watch | None = None,
    called: str = "runs",
) -> tuple[list[Path], dict[str, str]]:
    """Train what is not finished yet, whatever fails; returns what is finished, and a sentence for each that failed.

    `after` is told of each run that has finished here, in this process before the next one begins. `watch` has the time
    limit, which several calls may share; after it nothing is begun. A stop says how many of what is `called` so are
    finished.
    """
    missing, ranks = [run for run in runs if not run.finished], int(os.environ.get("WORLD_SIZE", "1"))
    if jobs is None:  # rules that only this process knows are trained in it
        rules = [rule for run in runs for rule in run.config.model.components().values()]
        known = plugins or all(map(is_ours, rules))
        jobs = max(1, torch.cuda.device_count()) if known and ranks == 1 else 1
    if jobs > 1 and ranks > 1:
        raise InputError(f"Under torchrun its processes train one run together: --jobs {jobs} does not go with it.")
    several = jobs > 1 and len(runs) > 1  # also the last one, which then has as many threads as the others
    try:
        with watch or Watch() as watch:
            if several:
                with counting(called, len(runs), quiet=quiet) as count:
                    count(len(runs) - len(missing))
                    failed = _in_processes(missing, jobs, plugins, watch, after, count)
            else:
                alone = quiet or len(runs) == 1 or int(os.environ.get("RANK", "0")) > 0
                places = {run.name: f"{number} of {len(runs)} {called}" for number, run in enumerate(runs, 1)}
                failed = _here(missing, quiet, plugins, watch, after, {} if alone else places)
    except Stopped as stopped:
        stopped.add_note(f"{sum(run.finished for run in runs)} of {len(runs)} {called} are finished, the rest is saved")
        raise
    finished = {run.name: run.folder.path for run in runs if run.finished}  # perhaps by another process meanwhile
    return [*finished.values()], {name: why for name, why in failed.items() if name not in finished}


def _here(
    runs: Sequence[Planned],
    quiet: bool,
    plugins: Sequence[str],
    watch: Watch,
    after: Callable[[Planned], object],
    places: Mapping[str, str],
) -> dict[str, str]:
    """One after the other, with its place among all before each; returns why those that failed did."""
    failed = {}
    for run in runs:
        if watch.asked():  # perhaps while the one before was finishing
            raise Stopped(watch.asked(), None, run.folder.path.parent)
        say(f"{run.name}: {places.get(run.name, '')}", quiet=not places)
        try:
            if run.folder.exists:
                resume(run.folder.path, quiet=quiet, watch=watch)
            else:
                train(run.config, run.folder.path, quiet=quiet, label=run.label, plugins=plugins, watch=watch)
            after(run)
        except StepformerError as error:
            failed[run.name] = str(error)
    return failed


def _in_processes(
    runs: Sequence[Planned],
    jobs: int,
    plugins: Sequence[str],
    watch: Watch,
    after: Callable[[Planned], object],
    count: Callable[[int], None],
) -> dict[str, str]:
    """The same with a process for each run, at most `jobs` at a time, GPUs taken in turn; `count` is told of each."""
    failed = {}
    waiting, running = list(runs), dict[int, tuple[Planned, subprocess.Popen[bytes]]]()
    while waiting or running:
        for slot in range(jobs):
            if slot not in running and waiting and not watch.asked():
                run = waiting.pop(0)
                running[slot] = (run, _start(run, slot, jobs, plugins))
        for slot, (run, process) in [(slot, pair) for slot, pair in running.items() if pair[1].poll() is not None]:
            del running[slot]
            count(1)
            if process.returncode not in (0, 128 + (watch.asked() or signal.SIGTERM)):
                text = run.beside("log").read_text(errors="replace")
                last = (text.strip().splitlines() or ["it said nothing"])[-1]
                failed[run.name] = f"exit status {process.returncode}: {last}"
            elif run.finished:
                after(run)
        if watch.asked() and (waiting or running):
            for _, process in running.values():
                process.send_signal(signal.SIGTERM)  # each saves and ends
            for _, process in running.values():
                process.wait()
            raise Stopped(watch.asked(), None, runs[0].folder.path.parent)
        time.sleep(0.2)
    return failed


# -P: what lies in the folder that this was started from is not on the path of the command, nor of its processes
STEPFORMER = (sys.executable, "-P", "-m", "stepformer")


def _start(run: Planned, slot: int, jobs: int, plugins: Sequence[str]) -> subprocess.Popen[bytes]:
    environment, gpus = dict(os.environ), torch.cuda.device_count()
    if jobs > max(1, gpus):
        environment[SHARING] = str(-(-jobs // max(1, gpus)))
    if gpus:
        visible = environment.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(i) for i in range(gpus)]
        environment["CUDA_VISIBLE_DEVICES"] = names[slot % len(names)]
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    command = [*STEPFORMER, *command_of(run, plugins)]
    with run.beside("log").open("ab") as log:
        # a group of its own: Ctrl-C in the terminal reaches only us, and we pass it on once
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def command_of(run: Planned, plugins: Sequence[str] = ()) -> list[str]:
    """The words after `stepformer` that train or continue a planned run."""
    words = [word for plugin in plugins for word in ("--plugin", plugin)]
    if run.folder.exists:
        return ["resume", str(run.folder.path), "--quiet", *words]
    files.write_text(run.beside("toml"), as_toml(run.config))
    return ["train", str(run.beside("toml")), "--out", str(run.folder.path), "--label", run.label, "--quiet", *words]


def submit(runs: Iterable[Planned], folder: Path, *, slurm: dict[str, Any], plugins: Sequence[str] = ()) -> list[str]:
    """Hand every unfinished run to Slurm through submitit; returns the job ids. A job that reaches its time limit saves
    and is queued again by submitit, which keeps its jobs as pickles of its own in the study's folder.
    """
    try:
        import submitit  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise StepformerError("--slurm needs submitit: pip install 'stepformer[slurm]'.") from None
    try:
        executor = submitit.AutoExecutor(folder=str(folder / "slurm"), cluster=slurm.pop("cluster", None))
        executor.update_parameters(**slurm)
    except (NameError, ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"submitit refuses the --slurm settings: {error}") from None
    left = [SlurmRun(str(run.folder.path), command_of(run, plugins)) for run in runs if not run.finished]
    return [str(job.job_id) for job in map(executor.submit, left)]


@dataclass
class SlurmRun:
    """A run as a Slurm job: trains, and when its time is over saves and goes on in a new job."""

    folder: str
    words: list[str]
    _process: subprocess.Popen[bytes] | None = None

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
    word = text.strip().lower().replace(",", "").replace("_", "")
    factor = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}.get(word[-1:], 1.0)
    try:
        found = float(word[:-1] if factor > 1 else word) * factor
    except ValueError:
        raise InputError(f"'{text}' is not a number of tokens: write 200k, 5M or 1.5B.") from None
    if not 1 <= found < 1e15:
        raise InputError(f"'{text}' is not a sensible number of tokens.")
    return int(found)


def steps_for(config: RunConfig, budget: int | str | None, option: str) -> int:
    """As many steps of a run as a budget of tokens is enough for."""
    steps = round(amount(str(budget)) / config.step_tokens)
    if steps < 1:
        raise InputError(f"{option} {budget} is less than half a step of {config.step_tokens:,} tokens.")
    return steps


def rounded(config: RunConfig, budget: int | str | None, option: str) -> str:
    """What became of a budget that is no whole number of steps, in a sentence."""
    steps, each = config.train.steps, config.step_tokens
    if budget is None or amount(str(budget)) == steps * each:
        return ""
    return f"{option} {budget} is rounded to {steps:,} steps of {each:,} tokens, {steps * each:,} in all"


def seeds_of(given: str | int | Sequence[int]) -> list[int]:
    """Seeds: `3` means 42, 43, 44; `7,8,11` means those."""
    if not isinstance(given, str | int):
        given = ",".join(map(str, given)) + ","
    text = str(given)
    numbers = list[int]()
    with contextlib.suppress(ValueError):
        numbers = [int(part) for part in text.split(",") if part.strip()]
    if twice := [seed for seed in numbers if numbers.count(seed) > 1]:
        raise InputError(f"The seed {twice[0]} stands twice in '{text.rstrip(',')}': a run of it is made once.")
    if "," in text and numbers and min(numbers) >= 0:
        return numbers
    if "," not in text and numbers and 1 <= numbers[0] <= 1000:
        return list(range(42, 42 + numbers[0]))
    raise InputError(f"'{text}' are no seeds: write how many (3) or which (7,8,11).")


OWN_FILE = "a row with settings of its own is a TOML file, named as NAME.toml, and the file's name is the row's."


def words_of(items: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names and key=value words, told apart."""
    refuse_parted(items)
    if whole := next((item for item in items if "=" in item and " " in item.partition("=")[0]), None):
        raise InputError(f"'{whole}' is no setting: {OWN_FILE}")
    words = [item for item in items if "=" in item]
    refuse_seed(*(parse_override(word)[0] for word in words))
    return [item for item in items if "=" not in item], words


def refuse_seed(*keys: str) -> None:
    """Seeds belong to the study, which pairs runs by them."""
    if {"seed", "train.seed"} & {*keys}:
        raise InputError("Give the seeds with --seeds, e.g. --seeds 7,8,11: runs are paired by them.")
