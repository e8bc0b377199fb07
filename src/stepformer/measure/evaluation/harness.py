"""Downstream tasks of a run, by the evaluation harness: accuracies with standard errors, kept beside the run."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import logging
import math
import numbers
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from stepformer.base.errors import InputError
from stepformer.measure import measured
from stepformer.measure.evaluation.adapter import adapter
from stepformer.measure.evaluation.scoring import about_run, scorer_of
from stepformer.measure.evaluation.tasks import FOUR_CHOICES, LOCAL, OpenedTask, need, open_task
from stepformer.present.tables import Table, of_texts
from stepformer.training.loading import LoadedRun

KIND = "tasks"
# The papers' seeds, which are the harness's defaults: of Python's random, of numpy, torch and the few-shot sampler.
SEEDS = {"random_seed": 0, "numpy_random_seed": 1234, "torch_random_seed": 1234, "fewshot_random_seed": 1234}
BOOTSTRAP = 1000  # draws for metrics whose standard error has no formula, such as perplexity; accuracies have one


def measure_tasks(
    run: LoadedRun,
    tasks: Sequence[str],
    *,
    shots: Sequence[int] | None = None,
    limit: int | None = None,
    data: str | Path | None = None,
    micro_batch: int = 8,
    quiet: bool = False,
) -> dict[str, Any]:
    """Score a run on tasks, each with every number of `shots`, and keep the result in RUN/measured/tasks.json.

    A task may have its own number: `hellaswag:10`. Without either HellaSwag has 10 and ARC 25, as in the papers, and
    other tasks what they define. `limit` takes the first so many items of each task. Results of the same weights that
    were measured before stay in the file; those on more items are not replaced by a trial on fewer, and `not_kept`
    names such trials.
    """
    if not tasks:
        raise InputError("There is no task to measure: name some, e.g. hellaswag,arc_easy.")
    if limit is not None and limit < 1:
        raise InputError(f"limit = {limit} should be at least 1.")
    if any(n < 0 for n in shots or ()):
        raise InputError(f"shots = {min(shots or ())} should be at least 0.")
    asked = dict.fromkeys(pair for word in tasks for pair in with_shots(word, shots))
    harness = need("lm_eval.evaluator")
    settings = {**about_run(run), **SEEDS, "lm_eval": importlib.metadata.version("lm_eval")}
    found: dict[str, Any] = {}
    not_kept: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(settled(quiet))
        # all are opened before the first is scored, so that a typing error does not wait for hours
        opened = [(stack.enter_context(open_task(name, data, quiet=quiet)), n) for name, n in asked]
        for task, n in opened:
            set_shots(task, n)
        journal = measured.journal(run.folder.path, measured.kind_of(KIND, run.model), settings)
        model = adapter()(scorer_of(run, micro_batch), run.tokenizer, journal, quiet=quiet)
        for task, n in opened:
            made = score_task(harness, model, task, n, limit)
            found |= made
            not_kept += [] if save_tasks(run, settings, made) else list(made)
    journal.close_used()
    return {"tasks": found, **({"not_kept": not_kept} if not_kept else {})}


def with_shots(word: str, shots: Sequence[int] | None = None) -> list[tuple[str, int | None]]:
    """A task with each number of examples: its own, `hellaswag:10`, else `shots`, else the papers', else its file's."""
    name, colon, own = word.rpartition(":")
    if not colon or word.endswith((".yaml", ".yml")):
        usual = LOCAL[word].shots if word in LOCAL else None
        return [(word, n) for n in shots] if shots else [(word, usual)]
    if not name or not own.isdecimal():
        raise InputError(f"'{word}' should be a task and its number of shots, as in hellaswag:10.")
    return [(name, int(own))]


def set_shots(task: OpenedTask, shots: int | None) -> None:
    """Let a number that was asked for win over the task's own: the harness would keep a 0 in a task's file."""
    if shots is None:
        return
    for each in task.objects:
        for leaf in each.get_all_tasks() if hasattr(each, "get_all_tasks") else [each]:
            leaf.set_config("num_fewshot", shots)
            if not shots or not hasattr(leaf, "sampler"):
                continue
            known = len(leaf.sampler.df) - (leaf.fewshot_cfg.split == leaf.config.test_split)  # never the item itself
            if known < shots:
                few = f"The task '{leaf.task_name}' has {known:,} examples to show, not {shots:,}"
                raise InputError(f"{few}: ask for fewer (--shots).")


def score_task(harness: Any, model: Any, task: OpenedTask, shots: int | None, limit: int | None) -> dict[str, Any]:
    """The harness's numbers for a task or for every task of a group, by name and shots."""
    model.title, model.cut = task.name if shots is None else f"{task.name} {shots}-shot", 0
    out = harness.simple_evaluate(
        model=model,
        tasks=list(task.objects),
        task_manager=task.manager,
        num_fewshot=shots,
        limit=limit,
        log_samples=False,
        bootstrap_iters=BOOTSTRAP,
        **SEEDS,
    )
    cut = model.cut if len(out["results"]) == 1 else None  # of a group only the sum is known
    found = {}
    for name, values in {**out["results"], **out.get("groups", {})}.items():
        metrics = read_metrics(values)
        if not metrics:  # a group without a number of its own
            continue
        n = out["n-shot"].get(name, shots)
        items = out["n-samples"].get(name, {})
        facts = {"task": name, "shots": n, "items": items.get("effective"), "of": items.get("original")}
        found[name if n is None else f"{name}@{n}"] = {**facts, "cut": cut, "source": task.source, **metrics}
    return found


def read_metrics(values: Mapping[str, Any]) -> dict[str, float | None]:
    """The harness's "acc,none" as acc; where a filter other than none made the text, its name follows in brackets."""
    found: dict[str, float | None] = {}
    for key, value in values.items():
        name, comma, kind = key.partition(",")
        if not comma or not isinstance(value, numbers.Real):  # "N/A", or something of a task's own
            continue
        number = float(value)
        found[name if kind == "none" else f"{name}[{kind}]"] = number if math.isfinite(number) else None
    return found


def save_tasks(run: LoadedRun, settings: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Keep the numbers of a task, beside those of the same weights that are there; not if these are of more items."""
    kind = measured.kind_of(KIND, run.model)
    earlier = measured.load(run.folder.path, kind, own=False)
    kept = earlier["result"]["tasks"] if earlier and earlier["settings"] == settings else {}
    for known, entry in ((kept[name], entry) for name, entry in found.items() if name in kept):
        if known["source"] == entry["source"] and (known["items"] or 0) > (entry["items"] or 0):
            return False
    measured.save(run.folder.path, kind, step=run.step, settings=settings, result={"tasks": {**kept, **found}})
    return True


@contextlib.contextmanager
def settled(quiet: bool) -> Iterator[None]:
    """The harness without its log and chatter, and with no process forked from one that has threads."""
    harness, building = need("lm_eval.evaluator"), need("lm_eval.api.task")
    log, bars = logging.getLogger("lm_eval"), need("datasets.utils.logging")
    with contextlib.ExitStack() as stack:
        stack.callback(log.setLevel, log.level)
        if bars.is_progress_bar_enabled():
            stack.callback(bars.enable_progress_bar)
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if quiet:
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        # None: on terminals only
        bar = functools.partial(building.tqdm, desc="building prompts", disable=None, leave=False)
        stack.enter_context(mock.patch.object(building, "tqdm", bar))
        # these ask the system and git about the machine, for seconds; the run's own record says as much
        for name in ("add_env_info", "get_git_commit_hash"):
            stack.enter_context(mock.patch.object(harness, name, create=True, return_value=None))
        stack.enter_context(mock.patch.dict(os.environ, DISABLE_MULTIPROC="1"))
        log.setLevel(logging.ERROR)
        bars.disable_progress_bar()
        yield


def as_table(result: Mapping[str, Any]) -> Table:
    """A line for every task, accuracies in percent."""
    rows = []
    for entry in result["tasks"].values():
        shots = "" if entry["shots"] is None else str(entry["shots"])
        items = "" if entry["items"] is None else f"{entry['items']:,}"
        accuracies = [with_error(entry, name, 100) for name in ("acc", "acc_norm")]
        other = ", ".join(f"{name} {with_error(entry, name, 1)}" for name in other_metrics(entry))
        rows.append([entry["task"], shots, items, *accuracies, other])
    table = of_texts(("task", "shots", "items", "acc %", "acc_norm %", "other"), rows, words=("other",))
    return table if any(row[5] for row in rows) else table.without([5])


def other_metrics(entry: Mapping[str, Any]) -> list[str]:
    """The names of metrics that are no accuracy and no standard error."""
    numbers = [name for name, value in entry.items() if isinstance(value, float)]
    return [name for name in numbers if "_stderr" not in name and name not in ("acc", "acc_norm")]


def with_error(entry: Mapping[str, Any], name: str, scale: float) -> str:
    """A metric with its standard error, if it has them; accuracies (`scale` 100) in percent."""
    value, error = entry.get(name), entry.get(f"{name}_stderr")
    if value is None:
        return ""
    if scale != 1:
        return f"{scale * value:.4g}" if error is None else f"{scale * value:.2f} ± {scale * error:.2f}"
    # a bootstrap of exponentials that one item dominates says nothing about their error
    if error is not None and "perplexity" in name and error > abs(value):
        return f"{value:.4g} (error unknown)"
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"


def notes(result: Mapping[str, Any]) -> list[str]:
    """What a reader should know: errors, chance, shots from the scored file, prompts that were cut, limits."""
    names = dict.fromkeys(entry["task"] for entry in result["tasks"].values())
    guessed = ", ".join(name for name in names if name in FOUR_CHOICES)
    found = ["± is one standard error" + (f"; chance is 25 % for {guessed}" if guessed else "")]
    for entry in result["tasks"].values():
        title = entry["task"] if entry["shots"] is None else f"{entry['task']} {entry['shots']}-shot"
        if entry["shots"] and entry["source"].get("shots_from"):
            found.append(f"{title}: examples from {entry['source']['shots_from']}")
        if entry["cut"]:
            found.append(f"{title}: {entry['cut']:,} prompts exceed the context and lost their beginning")
        if entry["items"] is not None and entry["items"] != entry["of"]:
            found.append(f"{title}: the first {entry['items']:,} of {entry['of']:,} items")
    if result.get("not_kept"):
        found.append(f"not kept, since there are numbers of more items: {', '.join(result['not_kept'])}")
    return found
