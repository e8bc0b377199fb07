"""Where documents come from: the embedded tales, local files, and Hugging Face datasets.

A source is read in units (files, shards of a dataset), each always in the same order, so that an interrupted
preparation can leave out the units it has finished.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepformer.base import files
from stepformer.base.errors import InputError, StepformerError, suggestion
from stepformer.data import readers
from stepformer.data.readers import COMPRESSIONS, FORMATS, Document, Layout, Split, extensions, sentence

TALES_COUNT = 20_000
TALE_BYTES = 1000  # about; for the progress bar
SMALL = 64 * 2**20  # files up to this size are known by their content, larger ones by size and time
# name: dataset, config
DATASETS = {
    "tinystories": ("roneneldan/TinyStories", None),
    "openwebtext": ("Skylion007/openwebtext", None),
    "fineweb": ("HuggingFaceFW/fineweb", "sample-10BT"),
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
    """A file, or all usable files below a folder in the order of their names."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.layout = layout
        self.root = path if path.is_dir() else path.parent
        self.paths = usable_files(path) if path.is_dir() else [path]
        known = f"{', '.join(FORMATS)}, plain or with {', '.join(COMPRESSIONS)}"
        if path.is_dir() and not self.paths:
            raise InputError(f"There is nothing to read in the folder '{path}': no file ends in {known}.")
        if not path.is_dir() and not extensions(path)[0]:
            raise InputError(f"The file '{path}' cannot be read: its name must end in {known}.")
        self.name = path.resolve().name if path.is_dir() else path.name.partition(".")[0] or path.name
        self.marked = self.layout.val_field is not None
        self.description = {"kind": "files", "files": [describe_file(p, self.root) for p in self.paths]}
        self.description |= dataclasses.asdict(self.layout)
        self.approximate_bytes = sum(map(readers.approximate_text, self.paths))

    def units(self) -> Sequence[str]:
        return [str(path) for path in self.paths]

    def documents(self, unit: int) -> Iterator[Document]:
        return readers.read_documents(self.paths[unit], self.layout)


def usable_files(folder: Path) -> list[Path]:
    """Every file below a folder whose name we know; not hidden ones, nor READMEs and licences."""

    def refuse(error: OSError) -> None:
        raise InputError(f"The folder '{error.filename}' cannot be read: {error.strerror}.")

    found: list[Path] = []
    for base, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(base) / name for name in names if not name.startswith(".")]
        found += [p for p in paths if extensions(p)[0] and not p.name.lower().startswith(ABOUT)]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def describe_file(path: Path, root: Path) -> dict[str, Any]:
    try:
        status = path.stat()
        facts: dict[str, Any] = {"name": path.relative_to(root).as_posix(), "size": status.st_size}
        if status.st_size <= SMALL:
            facts["sha256"] = files.sha256(path)
        else:
            facts["mtime_ns"] = status.st_mtime_ns
    except OSError as error:
        raise InputError(f"'{path}' cannot be read: {error.strerror}.") from None
    return facts


class HuggingFace(Source):
    """A dataset of the Hub, or a local folder in its layout, streamed: nothing but its tokens is kept."""

    def __init__(self, dataset: str, config: str | None, layout: Layout, name: str = "") -> None:
        self.dataset, self.config, self.layout = dataset, config, layout
        self.revision: str | None = None
        self.local = Path(dataset).is_dir()
        self.name = name or "-".join(filter(None, (Path(dataset).name, config)))
        self.description = {"kind": "hf", "dataset": Path(dataset).name if self.local else dataset, "config": config}
        if self.local:
            self.description["files"] = [describe_file(p, Path(dataset)) for p in usable_files(Path(dataset))]
        self.description |= dataclasses.asdict(self.layout)

    def pin(self, pinned: Mapping[str, Any]) -> dict[str, Any]:
        self.revision = pinned.get("revision")
        if self.revision is None and not self.local:
            try:
                self.revision = readers.need("huggingface_hub").HfApi().dataset_info(self.dataset, timeout=10).sha
            except StepformerError:
                raise
            except Exception:  # opening the dataset says better what is wrong; with a cached copy nothing is
                self.revision = None
        return {"revision": self.revision} if self.revision else {}

    @property
    def marked(self) -> bool:  # type: ignore[override]
        return self.layout.val_field is not None or any(split == "val" for _, split, _ in self._streams)

    def units(self) -> Sequence[str]:
        return [name for name, _, _ in self._streams]

    def documents(self, unit: int) -> Iterator[Document]:
        name, split, stream = self._streams[unit]
        number = 0
        try:
            for number, row in enumerate(stream, 1):
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

    @functools.cached_property
    def _streams(self) -> list[tuple[str, Split | None, Any]]:
        """The streams of the dataset: each split, shard by shard."""
        splits = self._load()
        if "train" not in splits:
            raise InputError(
                f"The dataset '{self.dataset}' has no split 'train'; it has {', '.join(map(str, splits))}."
            )
        held_out = next((name for name in VALIDATION if name in splits), None)
        chosen: list[tuple[str, Split | None]] = [("train", None)]
        if held_out and self.layout.val_field is None:  # else the field decides, and only `train` is read
            chosen = [("train", "train"), (held_out, "val")]
        found = []
        for name, split in chosen:
            count = int(getattr(splits[name], "num_shards", 1))
            for i in range(count):
                stream = splits[name].shard(num_shards=count, index=i) if count > 1 else splits[name]
                found.append((f"{name} {i + 1}/{count}", split, stream))
        return found

    def _load(self) -> Any:
        datasets = readers.need("datasets")
        what = f"The dataset '{self.dataset}'" + (f" with config '{self.config}'" if self.config else "")
        try:
            return datasets.load_dataset(self.dataset, self.config, streaming=True, revision=self.revision)
        except ConnectionError as error:
            raise StepformerError(f"{what} cannot be reached: {sentence(error)[:300]}.") from None
        except datasets.exceptions.DatasetNotFoundError as error:
            raise InputError(f"{what} does not exist or is not open to you: {sentence(error)[:300]}.") from None
        except Exception as error:  # unknown config, no data files, a folder in another layout
            if "script" in str(error) or "trust_remote_code" in str(error):
                raise InputError(
                    f"{what} is a program, which is not run here: look for a copy of it in parquet and name that one "
                    "(hf:OWNER/NAME), or download its files and give the folder."
                ) from None
            raise InputError(f"{what} cannot be opened: {sentence(error)[:300]}.") from None


def open_source(
    spec: str,
    *,
    dialect: str | None = None,
    count: int | None = None,
    seed: int | None = None,
    field: str | None = None,
    val_field: str | None = None,
    document: str | None = None,
) -> Source:
    """The source behind a word: `tales`, a short name, `hf:OWNER/NAME[:CONFIG]`, `hf:FOLDER`, or a path."""
    options = {"dialect": dialect, "count": count, "seed": seed, "field": field, "val_field": val_field}
    options["document"] = document
    is_tales, is_hf = spec == "tales", spec in DATASETS or spec.startswith("hf:")
    kind, foreign = ("datasets", "dialect count seed document") if is_hf else ("files", "dialect count seed")
    if is_tales:
        kind, foreign = "the tales", "field val_field document"
    for option in foreign.split():
        if options[option] is not None:
            raise InputError(f"The option '{option}' does not apply to {kind} ('{spec}').")
    if is_tales:
        return Tales(dialect, TALES_COUNT if count is None else count, seed or 0)
    layout = Layout(field or "text", val_field, document or "auto")
    if spec in DATASETS:
        return HuggingFace(*DATASETS[spec], layout, name=spec)
    if spec.startswith("hf:"):
        where = spec.removeprefix("hf:")
        if not where or where.startswith(":"):
            raise InputError("hf: needs a dataset, e.g. hf:roneneldan/TinyStories or hf:OWNER/NAME:CONFIG.")
        if (folder := Path(where).expanduser()).is_dir():
            return HuggingFace(str(folder), None, layout)
        dataset, _, config = where.partition(":")
        return HuggingFace(dataset, config or None, layout)
    path = Path(spec).expanduser()
    if not path.exists():
        words = ("tales", *DATASETS)
        raise InputError(
            f"There is no source '{spec}': it is neither a file or folder nor one of {', '.join(words)}, "
            f"nor hf:OWNER/NAME.{suggestion(spec, words)}"
        )
    return Files(path, layout)
