"""Tasks of the evaluation harness: some from local files, without a network; all others by their names.

The local ones have the prompts of the harness's own definitions. Their files are read in the layouts in which they go
around, brought into one form, and handed over through a temporary folder, so that nothing stays behind.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepformer.base import files
from stepformer.base.errors import InputError, StepformerError, suggestion
from stepformer.base.progress import say
from stepformer.data import readers
from stepformer.measure.evaluation.texts import each_row, reason

TASK_FILES = Path(__file__).parent / "task_files"
FOUR_CHOICES = ("hellaswag", "arc_easy", "arc_challenge")  # of ARC a few have three or five
Row = dict[str, Any]
need = functools.partial(readers.need, extra="eval")


@dataclass(frozen=True)
class LocalTask:
    """Where a task's files are below the data folder, by split, and how a row becomes a document."""

    splits: Mapping[str, str]
    scored: str
    document: Callable[[Row], Row]
    shots: int  # how many examples the papers show; 0 where they do not say

    def find(self, folder: Path) -> dict[str, Path]:
        """The files that are there, by split; empty without the scored one."""
        endings = ("", ".xz", ".gz")
        paths = {split: [p for e in endings for p in folder.glob(name + e)] for split, name in self.splits.items()}
        found = {split: min(some) for split, some in paths.items() if some}
        return found if self.scored in found else {}


@dataclass(frozen=True)
class OpenedTask:
    """A task, or a group of them, ready for the harness, and what it was made of."""

    name: str
    objects: Sequence[Any]
    manager: Any
    source: dict[str, Any]


def hellaswag(row: Row) -> Row:
    """Activity and context as a query; the marks that WikiHow left in the texts are taken out."""
    query = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return {"query": query, "choices": [clean(ending) for ending in row["endings"]], "gold": int(row["label"])}


def clean(text: str) -> str:
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def arc(row: Row) -> Row:
    """A question with its answers, from the original layout or from one that has the query made."""
    if "question" in row:
        choices, gold = row["choices"]["text"], row["choices"]["label"].index(row["answerKey"])
        query = f"Question: {row['question']}"
    else:
        query, choices, gold = row["query"], row["choices"], int(row["gold"])
    return {"query": f"{query}\nAnswer:", "choices": list(choices), "gold": gold}


def lambada(row: Row) -> Row:
    """A passage without its last word, and that word."""
    if "text" not in row:
        return {key: row[key] for key in ("context", "continuation")}
    context, _, continuation = row["text"].rpartition(" ")
    return {"context": context, "continuation": continuation}


def _arc(level: str) -> LocalTask:
    splits = {split: f"arc/arc_{level}_{split}.jsonl" for split in ("train", "validation", "test")}
    return LocalTask(splits, "test", arc, 25)


LOCAL = {
    "hellaswag": LocalTask(
        {"train": "hellaswag/*train*.jsonl", "validation": "hellaswag/*val*.jsonl"}, "validation", hellaswag, 10
    ),
    "arc_easy": _arc("easy"),
    "arc_challenge": _arc("challenge"),
    "lambada_openai": LocalTask({"test": "lambada/lambada_openai*.jsonl"}, "test", lambada, 0),
}


def data_folder(given: str | Path | None) -> Path | None:
    """Where texts and tasks for evaluation are: as given, else $STEPFORMER_DATA/eval, else nowhere."""
    if given is not None:
        folder = Path(given).expanduser()
        if not folder.is_dir():
            raise InputError(f"There is no data folder '{folder}'.")
        return folder
    home = os.environ.get("STEPFORMER_DATA", "")
    return Path(home) / "eval" if home and (Path(home) / "eval").is_dir() else None


@contextlib.contextmanager
def open_task(name: str, data: str | Path | None = None, *, quiet: bool = False) -> Iterator[OpenedTask]:
    """A task by name or from a YAML file: from the data folder if it has its files, else as the harness defines it."""
    tasks = need("lm_eval.tasks")
    folder = data_folder(data)
    found = LOCAL[name].find(folder) if folder is not None and name in LOCAL else {}
    if found:
        with local_task(name, found, tasks) as task:
            yield task
        return
    if data is not None and name in LOCAL:
        wanted = LOCAL[name].splits[LOCAL[name].scored]
        raise InputError(f"The data folder '{folder}' has nothing for the task '{name}': '{wanted}' is missing.")
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise InputError(f"There is no task file '{name}'.")
        manager = tasks.TaskManager(include_defaults=False)
        yield OpenedTask(name, loaded(manager, name), manager, {"kind": "file", "file": Path(name).name})
        return
    say("reading the harness's list of tasks ...", quiet=quiet)
    manager = all_tasks()
    if name not in manager.all_tasks:
        near = suggestion(name, [*LOCAL, *manager.all_tasks])
        raise InputError(f"The harness has no task '{name}'.{near or ' `lm-eval ls tasks` lists them.'}")
    hint = "; local files can be given with --data DIR" if name in LOCAL else ""
    say(f"reading {name} from the Hugging Face Hub{hint}", quiet=quiet)
    with readers.impatient():
        objects = loaded(manager, name)
    yield OpenedTask(name, objects, manager, {"kind": "harness"})


@functools.cache
def all_tasks() -> Any:
    """The harness's own tasks; it takes seconds to read their 14,000 files."""
    return need("lm_eval.tasks").TaskManager()


def loaded(manager: Any, name: str) -> list[Any]:
    """The task behind a name, or the tasks behind a tag. This is where the harness reaches for the network."""
    try:
        found = manager.load([name])
    except Exception as error:  # of the harness, of datasets, of the hub, of the network
        raise StepformerError(
            f"The harness could not load the task '{name}' ({reason(error)}): without a network its data must be in "
            "the cache of Hugging Face datasets, or, for " + ", ".join(LOCAL) + ", in a folder given with --data."
        ) from None
    groups = found.get("groups", {})
    return [groups[name]] if name in groups else list(found["tasks"].values())


@contextlib.contextmanager
def local_task(name: str, found: Mapping[str, Path], tasks: Any) -> Iterator[OpenedTask]:
    """A task from local files. Shots come from the split the harness would take, or the nearest that is there."""
    task = LOCAL[name]
    with tempfile.TemporaryDirectory(prefix="stepformer-") as made:
        folder = Path(made)
        sizes = {split: convert(path, folder / f"{split}.jsonl", task.document) for split, path in found.items()}
        made_of = {split: str(folder / f"{split}.jsonl") for split in found}
        definition: dict[str, Any] = {
            "include": str(TASK_FILES / f"{name}.yaml"),
            "dataset_kwargs": {"data_files": made_of, "cache_dir": str(folder / "cache")},
            **{f"{'training' if split == 'train' else split}_split": split for split in found},
        }
        shown = next((split for split in ("train", "validation") if split in found), task.scored)
        if shown == task.scored == "test":
            definition["fewshot_split"] = "test"  # told this way, the harness leaves out the item that is asked
        files.write_json(folder / "task.yaml", definition | {"task": name}, sealed=False)  # JSON is YAML
        manager = tasks.TaskManager(include_path=str(folder), include_defaults=False)
        source = {
            "kind": "files",
            "items": sizes[task.scored],
            "scored": {"file": found[task.scored].name, "sha256": files.sha256(found[task.scored])},
            "shots_from": found[shown].name + (", never the item itself" if shown == task.scored else ""),
        }
        if shown != task.scored:
            source["shots_sha256"] = files.sha256(found[shown])
        yield OpenedTask(name, loaded(manager, name), manager, source)


def convert(path: Path, target: Path, document: Callable[[Row], Row]) -> int:
    """Write a file's rows as documents; a row in another layout is named."""
    rows = each_row(path, document, "is not in a layout known for this task ({reason}).")
    documents = [json.dumps(row) for row in rows]
    if not documents:
        raise InputError(f"'{path}' has no rows.")
    files.write_text(target, "\n".join(documents) + "\n")
    return len(documents)
