"""Where documents come from: the embedded tales, local files, and Hugging Face datasets.

A source is read in units (files, shards of a dataset), each always in the same order, so that an interrupted
preparation can leave out the units it has finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import shlex
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stepformer.base import files
from stepformer.base.errors import InputError, StepformerError, StepformerWarning, named, suggestion
from stepformer.data import readers
from stepformer.data.readers import COMPRESSIONS, FORMATS, MARKDOWN, Document, Layout, Split, ending, sentence

TALES_COUNT = 20_000
TALE_BYTES = 1000  # about; for the progress bar
SMALL = 64 * 2**20  # files up to this size are known by their content, larger ones by size and time
PARQUET = "refs/convert/parquet"  # the branch with the Hub's own copy of a dataset, CONFIG/SPLIT/*.parquet
NO_CONNECTION = {"ConnectError", "ConnectTimeout", "ConnectionError"}  # of httpx and requests, whichever the Hub uses
PARTIAL = re.compile(r"(^|/)partial[-/]")  # a split of that copy which is only a beginning


class Dataset(NamedTuple):
    """A dataset of the Hub with a short name, and the text of it that measures a run."""

    repository: str
    config: str | None = None
    revision: str | None = None
    held_out: str | None = "validation"  # the split; None: there is none, so documents by their checksum
    first: int | None = None  # how many of its documents


DATASETS = {
    "tinystories": Dataset("roneneldan/TinyStories"),
    # 80 files plain_text/train-*.parquet, 8,013,769 rows; older revisions have a program
    "openwebtext": Dataset(
        "Skylion007/openwebtext", None, "79d93d786212f7344586290adb811d4ae6a1762c", held_out=None, first=5000
    ),
    "fineweb": Dataset("HuggingFaceFW/fineweb", "sample-10BT", held_out=None, first=5000),
    "wikitext": Dataset("Salesforce/wikitext", "wikitext-103-v1"),
    "lambada": Dataset("EleutherAI/lambada_openai", "default", PARQUET, held_out="test"),
    "c4": Dataset("allenai/c4", "en", first=5000),
}
VALIDATION = ("validation", "valid", "val", "dev")
# Texts that stand beside data and describe it.
ABOUT = ("readme", "license", "licence", "provenance", "notice", "copying")


class Source:
    """Documents in a fixed order. `description` is what its content depends on, as JSON."""

    name: str
    description: dict[str, Any]
    approximate_bytes: int | None = None
    marked = False  # does it say itself which documents are for validation?
    val_fraction = 0.05  # of documents that are not marked, unless told otherwise
    limit: int | None = None  # so many documents of each split, the first ones; they are one unit

    def units(self) -> Sequence[str]:
        raise NotImplementedError

    def documents(self, unit: int) -> Iterator[Document]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Document]:
        for unit in range(len(self.units())):
            yield from self.documents(unit)

    def pin(self, pinned: Mapping[str, Any]) -> dict[str, Any]:
        """Fix what could change under a long job (the revision of a dataset): as `pinned` says, or as it is now."""
        return {}

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()[:16]


class Tales(Source):
    """The generator `stepformer.data.tales`, a thousand stories to a unit."""

    val_fraction = 0.02  # of 7M tokens: as much as a laptop evaluates in seconds

    UNIT = 1000

    def __init__(self, dialect: str | None = None, count: int = TALES_COUNT, seed: int = 0) -> None:
        from stepformer.data import tales

        dialect = tales.DIALECTS[0] if dialect is None else dialect
        if dialect not in tales.DIALECTS:
            raise InputError(
                f"The tales have no dialect '{dialect}'; they have {', '.join(tales.DIALECTS)}."
                f"{suggestion(dialect, tales.DIALECTS)}"
            )
        if count < 1:
            raise InputError(f"The number of tales must be at least 1, not {count}.")
        self.dialect, self.count, self.seed = dialect, count, seed
        settings = ("", f"-{dialect}")[dialect != tales.DIALECTS[0]]
        settings += ("", f"-{count}")[count != TALES_COUNT] + ("", f"-seed{seed}")[seed != 0]
        self.name = f"tales{settings}"
        self.description = {"kind": "tales", "version": tales.VERSION, "dialect": dialect, "count": count, "seed": seed}
        self.approximate_bytes = count * TALE_BYTES

    def units(self) -> Sequence[str]:
        return [f"tales from {start:,}" for start in range(0, self.count, self.UNIT)]

    def documents(self, unit: int) -> Iterator[Document]:
        from stepformer.data import tales

        start = unit * self.UNIT
        count = min(self.UNIT, self.count - start)
        for text in tales.stories(count, dialect=self.dialect, seed=self.seed, start=start):
            if text.strip():
                yield Document(text, None)


class Files(Source):
    """Files, and all usable ones below folders, in the order of their names: as if one folder had them all."""

    def __init__(self, places: Sequence[Path], layout: Layout) -> None:
        self.layout = layout
        self.passed_over = Counter[str]()
        places = sorted({*places})
        self.root = Path(os.path.commonpath([os.path.abspath(p if p.is_dir() else p.parent) for p in places]))
        found = [path for place in places for path in (self._below(place) if place.is_dir() else [place])]
        self.paths = [path for _, path in sorted({_name(path, self.root): path for path in found}.items())]
        first = places[0]
        self.name = first.resolve().name if first.is_dir() else first.name.partition(".")[0] or first.name
        self.name += f"-and-{len(places) - 1}-more" if len(places) > 1 else ""
        self.marked = self.layout.val_field is not None
        self.description = {"kind": "files", "files": [describe_file(p, self.root) for p in self.paths]}
        self.description |= dataclasses.asdict(self.layout)
        self.approximate_bytes = sum(map(readers.approximate_text, self.paths))

    def _below(self, folder: Path) -> list[Path]:
        """The usable files of a folder; others are counted, and settings among them are named."""
        # Markdown has no fields: beside rows that have one it is about them
        paths = usable_files(folder, *(() if self.layout.val_field else (MARKDOWN,)))
        passed_over = _passed_over(folder, paths)
        self.passed_over.update(passed_over)
        if settings := settings_among(paths, self.layout.field):
            rows = f"a .json must have one object to a line, with the text in the field '{self.layout.field}'"
            warnings.warn(f"Not read: {named(settings)}; {rows}.", StepformerWarning, stacklevel=3)
        if not paths:
            known = f"{', '.join((*FORMATS, MARKDOWN))}, plain or with {', '.join(COMPRESSIONS)}"
            first = next((ending for ending in passed_over if ending.startswith(".")), "")
            joined = f"cat {shlex.quote(str(folder))}/*{first} > {shlex.quote(f'{folder.resolve().name}.txt')}"
            how = f"`{joined}`" if any(folder.glob(f"*{first}")) else "into one file"
            there = f" It has {passed_over[first]:,} {first}: if that is text, join it, {how}." if first else ""
            there += " READMEs and licences are not read." * any(n.lower().startswith(ABOUT) for n in passed_over)
            raise InputError(f"There is nothing to read in the folder '{folder}': no file ends in {known}.{there}")
        return [path for path in paths if path not in settings]

    def units(self) -> Sequence[str]:
        return [str(self.root)] if self.limit else [str(path) for path in self.paths]

    def documents(self, unit: int) -> Iterator[Document]:
        paths = self.paths if self.limit else self.paths[unit : unit + 1]
        found = (document for path in paths for document in readers.read_documents(path, self.layout))
        return itertools.islice(found, self.limit)


def _name(path: Path, root: Path) -> str:
    return Path(os.path.relpath(path, root)).as_posix()


def _passed_over(folder: Path, used: Sequence[Path]) -> dict[str, int]:
    """How many files below a folder are not read, by the endings of their names; hidden ones aside."""
    known, found = {*used}, Counter[str]()
    for path in folder.rglob("[!.]*"):
        if path.is_file() and path not in known:
            found[path.name if path.name.lower().startswith(ABOUT) else path.suffix or path.name] += 1
    return dict(found.most_common())


def usable_files(folder: Path, *also: str) -> list[Path]:
    """Every file below a folder whose ending we know, or is in `also`; not hidden ones, nor READMEs and licences."""

    def refuse(error: OSError) -> None:
        raise InputError(f"The folder '{error.filename}' cannot be read: {error.strerror}.")

    found: list[Path] = []
    for base, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(base) / name for name in names if not name.startswith(".")]
        found += [p for p in paths if ending(p) in (*FORMATS, *also) and not p.name.lower().startswith(ABOUT)]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def settings_among(paths: Sequence[Path], field: str) -> list[Path]:
    """The .json files beside others that are one value, not JSON lines; where there are no others they are data."""
    found = [path for path in paths if ending(path) == ".json"]
    return [path for path in found if len(found) < len(paths) and readers.is_one_value(path, field)]


def describe_file(path: Path, root: Path) -> dict[str, Any]:
    try:
        status = path.stat()
        facts: dict[str, Any] = {"name": _name(path, root), "size": status.st_size}
        if status.st_size <= SMALL:
            facts["sha256"] = files.sha256(path)
        else:
            facts["mtime_ns"] = status.st_mtime_ns
    except OSError as error:
        raise InputError(f"'{path}' cannot be read: {error.strerror}.") from None
    return facts


def file_changes(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    """What happened to the files of a source, in words; of a large one, whose content is not known, its time counts."""
    a, b = ({facts["name"]: facts for facts in found} for found in (before, now))
    changed = {name for name in a.keys() & b.keys() if a[name] != b[name]}
    touched = {name for name in changed if {**a[name], "mtime_ns": 0} == {**b[name], "mtime_ns": 0}}
    kinds = {"added": b.keys() - a.keys(), "removed": a.keys() - b.keys(), "changed": changed - touched}
    kinds["of another date"] = touched
    return "; ".join(f"{kind}: {named(sorted(names))}" for kind, names in kinds.items() if names)


class HuggingFace(Source):
    """A dataset of the Hub, or a local folder in its layout, streamed: nothing but its tokens is kept."""

    reached = True  # the Hub, as far as is known: a slow answer is one, so that its client tries as often as it likes

    def __init__(
        self,
        dataset: str,
        config: str | None,
        layout: Layout,
        name: str = "",
        revision: str | None = None,
        split: str | None = None,
    ) -> None:
        self.dataset, self.config, self.layout, self.split = dataset, config, layout, split
        self.asked = self.revision = revision
        self.local = Path(dataset).is_dir()
        self.name = name or "-".join(filter(None, (Path(dataset).name, config)))
        self.description = {"kind": "hf", "dataset": Path(dataset).name if self.local else dataset, "config": config}
        if self.local:
            self.description["files"] = [describe_file(p, Path(dataset)) for p in usable_files(Path(dataset))]
        self.description |= dataclasses.asdict(self.layout)

    def pin(self, pinned: Mapping[str, Any]) -> dict[str, Any]:
        self.revision = pinned.get("revision") or self.asked
        if not self.local:
            try:
                api = readers.need("huggingface_hub").HfApi()
                self.revision = api.dataset_info(self.dataset, revision=self.revision, timeout=10).sha
            except StepformerError:
                raise
            except Exception as error:  # opening the dataset says better what is wrong; with a cached copy nothing is
                self.reached = NO_CONNECTION.isdisjoint(kind.__name__ for kind in type(error).__mro__)
        return {"revision": self.revision} if self.revision else {}

    @property
    def marked(self) -> bool:  # type: ignore[override]
        return self.layout.val_field is not None or any(split == "val" for _, split, _ in self._streams)

    def units(self) -> Sequence[str]:
        return [name for name, _, _ in self._streams]

    def documents(self, unit: int) -> Iterator[Document]:
        return itertools.islice(self._documents(*self._streams[unit]), self.limit)

    def _documents(self, name: str, split: Split | None, stream: Any) -> Iterator[Document]:
        number = 0
        try:
            for number, row in enumerate(self._rows(stream), 1):
                document = self.layout.row(row, f"Row {number:,} of {name} of the dataset '{self.dataset}'")
                if document:
                    yield document if split is None or document.split else document._replace(split=split)
        except StepformerError:
            raise
        except Exception as error:  # the network, a damaged file: whatever it is, the parts done are kept
            raise StepformerError(
                f"Reading {name} of the dataset '{self.dataset}' failed after {number:,} rows "
                f"({sentence(error)[:300]}); the same command continues from there."
            ) from None

    def _rows(self, stream: Any) -> Iterator[Any]:
        """The rows of a stream; of a .txt, which it has line by line, the documents."""
        if not (self.local and stream.info.builder_name == "text"):
            return iter(stream)
        texts = readers.cut_text((f"{row['text']}\n" for row in stream), self.layout.document)
        return ({"text": text} for text in texts)

    @functools.cached_property
    def _streams(self) -> list[tuple[str, Split | None, Any]]:
        """The streams of the dataset: each split, shard by shard; with a limit, in one."""
        splits = self._load()
        wanted = self.split or "train"
        if wanted not in splits:
            raise InputError(
                f"The dataset '{self.dataset}' has no split '{wanted}'; it has {', '.join(map(str, splits))}."
            )
        held_out = next((name for name in VALIDATION if name in splits), None)
        chosen: list[tuple[str, Split | None]] = [(wanted, None)]
        if held_out and self.split is None and self.layout.val_field is None:  # else only one split is read
            chosen = [("train", "train"), (held_out, "val")]
        found = []
        for name, split in chosen:
            count = 1 if self.limit else int(getattr(splits[name], "num_shards", 1))
            for i in range(count):
                stream = splits[name].shard(num_shards=count, index=i) if count > 1 else splits[name]
                found.append((f"{name} {i + 1}/{count}", split, stream))
        return found

    def _load(self) -> Any:
        datasets = readers.need("datasets")
        what = f"The dataset '{self.dataset}'" + (f" with config '{self.config}'" if self.config else "")
        config, folder = self.config, None
        if config and ((Path(self.dataset) / config).is_dir() if self.local else self.asked == PARQUET):
            config, folder = None, config  # only the README of a dataset names configs: without one they are folders
        elif self.local and not (Path(self.dataset) / "README.md").exists():
            config = None  # the folder of the config itself
        try:
            options = {"data_dir": folder, "streaming": True, "revision": self.revision}
            with contextlib.nullcontext() if self.reached else readers.impatient():
                found = datasets.load_dataset(self.dataset, config, **options)
                partial = not self.limit and any(map(PARTIAL.search, self._names(folder)))
        except ConnectionError as error:
            raise StepformerError(f"{what} cannot be reached: {sentence(error)[:300]}.") from None
        except datasets.exceptions.DatasetNotFoundError as error:
            raise InputError(f"{what} does not exist or is not open to you: {sentence(error)[:300]}.") from None
        except Exception as error:  # unknown config, no data files, a folder in another layout
            if "script" in str(error) or "trust_remote_code" in str(error):
                raise InputError(
                    f"{what} is a program, which is not run here: the Hub's own copy of it in parquet may be there "
                    f"(--revision {PARQUET}); else name another copy (hf:OWNER/NAME), or download its files and give "
                    "the folder."
                ) from None
            raise InputError(f"{what} cannot be opened: {sentence(error)[:300]}.") from None
        if partial:
            raise InputError(
                f"{what} is only a beginning here (its folders are called partial-...): take the first documents of it "
                "with --limit, or another revision."
            )
        return found

    def _names(self, folder: str | None) -> list[str]:
        """The files of a folder or of the Hub's own copy; of any other revision nothing is asked."""
        if self.local:
            names = [path.relative_to(self.dataset).as_posix() for path in usable_files(Path(self.dataset))]
        elif self.asked == PARQUET:
            api = readers.need("huggingface_hub").HfApi()
            names = api.list_repo_files(self.dataset, repo_type="dataset", revision=self.revision)
        else:
            names = []
        return [name for name in names if folder is None or name.startswith(f"{folder}/")]
