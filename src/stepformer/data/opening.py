"""The source behind a word of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepformer.base.errors import InputError, named, neighbour, suggestion
from stepformer.data.readers import Layout, extensions
from stepformer.data.sources import DATASETS, TALES_COUNT, Dataset, Files, HuggingFace, Source, Tales, usable_files
from stepformer.data.token_files import TokenFiles, token_files


def open_source(
    spec: str,
    *more: str,
    dialect: str | None = None,
    count: int | None = None,
    seed: int | None = None,
    field: str | None = None,
    val_field: str | None = None,
    document: str | None = None,
    local: str | Path | None = None,
    revision: str | None = None,
    split: str | None = None,
    limit: int | None = None,
) -> Source:
    """The source behind a word: `tales`, a short name, `hf:OWNER/NAME[:CONFIG]`, `hf:FOLDER`, or a path.

    Several files and folders of text, one argument each, are one source, as if one folder had them all. Of a dataset:
    `local` is a folder with its files, laid out as on the Hub, `split` the only split that is read.
    """
    if isinstance(spec, list | tuple):
        raise InputError(f"Files and folders are given one by one: open_source(*{list(spec)!r}).")
    options: dict[str, Any] = {"dialect": dialect, "count": count, "seed": seed, "field": field, "val_field": val_field}
    options |= {"document": document, "local": local, "revision": revision, "split": split, "limit": limit}
    if more:
        _refuse_all_but_text((spec, *more))
    is_tales, is_hf = spec == "tales", spec in DATASETS or spec.startswith("hf:")
    where = spec.removeprefix("hf:")
    if where != spec and where and local is None and Path(where).expanduser().is_dir():
        where, local = "", where
    kind, foreign = "files", "dialect count seed local revision split"
    if is_tales:
        kind, foreign = "the tales", "field val_field document local revision split limit"
    elif is_hf:
        kind, foreign = "datasets", "dialect count seed document"
    if is_hf and local is not None:
        kind, foreign = "local copies of datasets", "dialect count seed revision"
    for option in foreign.split():
        if options[option] is not None:
            raise InputError(f"The option '{option}' does not apply to {kind} ('{spec}').")
    if limit is not None and limit < 1:
        raise InputError(f"The limit of documents must be at least 1, not {limit}.")
    if is_tales:
        return Tales(dialect, TALES_COUNT if count is None else count, seed or 0)
    path = Path(spec).expanduser()
    if not is_hf and _are_tokens(path):
        for option in ("field", "val_field", "document", "limit"):
            if options[option] is not None:
                raise InputError(f"The option '{option}' does not apply to ready-made tokens ('{spec}').")
        return TokenFiles(path)
    layout = Layout(field or "text", val_field, document or "auto")
    source = _dataset(spec, where, layout, local, revision, split) if is_hf else _files((spec, *more), layout, field)
    source.limit = limit
    source.name = "-".join(filter(None, (source.name, split, str(limit or ""))))
    source.description |= {k: v for k, v in options.items() if k in ("revision", "split", "limit") and v is not None}
    return source


def _dataset(
    spec: str, where: str, layout: Layout, local: str | Path | None, revision: str | None, split: str | None
) -> HuggingFace:
    name, known = (spec, DATASETS[spec]) if spec in DATASETS else ("", None)
    if local is not None and not Path(local).expanduser().is_dir():
        raise InputError(f"There is no folder '{local}' with the files of '{spec}'.")
    if known is None:
        repository, _, config = where.partition(":")
        if local is None and not repository:
            raise InputError("hf: needs a dataset, e.g. hf:roneneldan/TinyStories or hf:OWNER/NAME:CONFIG.")
        known = Dataset(repository, config or None)
    if local is not None:
        return HuggingFace(str(Path(local).expanduser()), known.config, layout, name, None, split)
    return HuggingFace(known.repository, known.config, layout, name, revision or known.revision, split)


def _refuse_all_but_text(words: Sequence[str]) -> None:
    """Of several sources every one must be a file or folder of text."""

    def is_name(word: str) -> bool:
        return word in ("tales", *DATASETS) or word.startswith("hf:")

    for word in sorted(words, key=is_name):  # what is not there at all is said first
        if is_name(word) or _are_tokens(_path(word)):
            alone = "prepare it alone" if is_name(word) else "of ready-made tokens name the folder"
            raise InputError(f"Several sources must be files and folders of text, which '{word}' is not: {alone}.")


def _are_tokens(path: Path) -> bool:
    return path.exists() and not (path.is_dir() and usable_files(path)) and bool(token_files(path))


def _path(spec: str) -> Path:
    """The file or folder of this name; a sentence if there is none."""
    path, words = Path(spec).expanduser(), ("tales", *DATASETS)
    if not path.exists():
        option = f" An option is written --{spec.replace('=', ' ')}." if "=" in spec else ""
        made = " `stepformer prepare` makes such a folder of your text." if path.parent.name == "data" else ""
        raise InputError(
            f"There is no source '{spec}': it is neither a file or folder nor one of {', '.join(words)}, "
            f"nor hf:OWNER/NAME.{option or suggestion(spec, words) or neighbour(path) or made}"
        )
    return path


def _files(specs: Sequence[str], layout: Layout, field: str | None) -> Files:
    found = Files([*map(_path, specs)], layout)
    if field is not None and all(extensions(each)[0] in ("", ".txt") for each in found.paths):
        what = f"{named(specs)}, which is read as text: it has no fields"
        raise InputError(f"The option 'field' does not apply to {what}.")
    return found
