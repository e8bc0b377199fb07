"""Documents out of files: text, JSON lines and .parquet, each plain or compressed with gzip, xz or zstandard."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import importlib
import io
import json
import logging
import lzma
import shlex
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Literal, NamedTuple, cast
from unittest import mock

from stepformer.base import files
from stepformer.base.errors import InputError, StepformerError, suggestion
from stepformer.data.tokenizers import END_OF_TEXT, valid

Split = Literal["train", "val"]
DOCUMENT_RULES = ("auto", "file", "line", "paragraph")
COMPRESSIONS = {".gz": 3.0, ".xz": 4.0, ".zst": 3.5}  # how much text a byte of such a file holds, roughly
FORMATS = {".txt": 1.0, ".jsonl": 1.0, ".ndjson": 1.0, ".json": 1.0, ".parquet": 2.0}
MARKDOWN = ".md"  # plain text; beside a dataset or tokens it is about them


class Document(NamedTuple):
    text: str
    split: Split | None  # the split its source puts it in; None: the rule of the corpus decides


@dataclass(frozen=True)
class Layout:
    """Where the text is: the field of a row, the field that marks validation rows, how a text is cut."""

    field: str = "text"
    val_field: str | None = None
    document: str = "auto"

    def __post_init__(self) -> None:
        if self.document not in DOCUMENT_RULES:
            raise InputError(
                f"A text is cut into documents by one of {', '.join(DOCUMENT_RULES)}, not '{self.document}'."
                f"{suggestion(self.document, DOCUMENT_RULES)}"
            )

    def row(self, row: Any, where: str) -> Document | None:
        """The document in a row of a table, None if it is empty; `where` begins the sentence if it is wrong."""
        if not isinstance(row, Mapping):
            raise InputError(f'{where} is not an object with fields, such as {{"{self.field}": ...}}.')
        for field in (self.field, self.val_field):
            if field is not None and field not in row:
                named = "a text field" if field == self.field else "a field that marks validation"
                raise InputError(
                    f"{where} has no field '{field}' ({named}); it has {', '.join(map(str, row)) or 'none at all'}."
                    f"{suggestion(field, map(str, row))}"
                    + (" --field NAME says which one holds the text." if field == self.field and row else "")
                )
        text = row[self.field]
        if text is None:
            return None
        if not isinstance(text, str):
            raise InputError(f"The field '{self.field}' holds {type(text).__name__}, not text: {_lower(where)}.")
        split: Split | None = None
        if self.val_field is not None:
            mark = row[self.val_field]
            if mark not in (True, False):  # 0 and 1 are these too
                raise InputError(
                    f"The field '{self.val_field}' must be true or false, not {repr(mark)[:60]}: {_lower(where)}."
                )
            split = "val" if mark else "train"
        return Document(valid(text), split) if text.strip() else None


def _lower(where: str) -> str:
    return where[0].lower() + where[1:]


def packing(path: Path) -> str:
    """The compression of a file by its name, e.g. '.xz'; '' for none."""
    return next((ending for ending in COMPRESSIONS if path.name.lower().endswith(ending)), "")


def ending(path: Path) -> str:
    """The last ending of a file's name, its compression aside: '.md' of 'Notes.MD.gz'."""
    return Path(path.name.lower().removesuffix(packing(path))).suffix


def extensions(path: Path) -> tuple[str, str]:
    """The format and compression of a file by its name, e.g. ('.jsonl', '.xz'); ('', '') if it is none of ours: then a
    file that was named itself is read as text, and one in a folder is passed over.
    """
    return (ending(path), packing(path)) if ending(path) in FORMATS else ("", "")


def approximate_text(path: Path) -> int:
    """About how many bytes of text a file holds."""
    return int(path.stat().st_size * FORMATS.get(extensions(path)[0], 1.0) * COMPRESSIONS.get(packing(path), 1.0))


def need(module: str, extra: str = "data") -> ModuleType:
    """Import a module of an extra, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = (error.name or module).partition(".")[0]
        raise StepformerError(
            f"The package '{package}' is needed for this and is not installed: pip install 'stepformer[{extra}]'."
        ) from None


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """The Hub's client gives up after one more try, and does not log each: without a network five take half a minute.

    No setting of it says how often it tries, so that the default of its functions is another one meanwhile.
    """
    log = logging.getLogger("huggingface_hub")
    client = importlib.import_module("huggingface_hub.utils")
    asking = [getattr(client, name, None) for name in ("http_backoff", "http_stream_backoff")]
    defaults = [getattr(ask, "__kwdefaults__", None) or {} for ask in asking]
    with contextlib.ExitStack() as stack:
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)
        for values in defaults:
            if "max_retries" in values:
                stack.enter_context(mock.patch.dict(values, max_retries=1))
        yield


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever can go wrong while reading a file into one sentence that names it."""
    try:
        yield
    except (InputError, StepformerError):
        raise
    except UnicodeDecodeError as error:
        wide = error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        how = shlex.join(["iconv", "-f", "UTF-16" if wide else "LATIN1", "-t", "UTF-8", str(path)])
        text = wide or b"\0" not in error.object
        advice = (
            f"another encoding is converted by `{how} > NEW.txt`, which then takes its place"
            if text
            else "leave out what is no text"
        )
        raise InputError(f"'{path}' is not UTF-8 text ({error.reason}); {advice}.") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError) as error:  # pyarrow.ArrowInvalid is a ValueError
        # gzip's and pyarrow's have no error number where the content is at fault
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"'{path}' cannot be read: {error.strerror}.") from None
        raise InputError(f"'{path}' is damaged: {sentence(error)}.") from None


def sentence(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def opened(path: Path) -> BinaryIO:
    """The unpacked bytes of a file. A truncated one raises instead of ending early."""
    packed, file = packing(path), files.opened(path)
    if not packed:
        return file
    file.close()
    if packed != ".zst":
        return cast(BinaryIO, (gzip if packed == ".gz" else lzma).open(path, "rb"))
    arrow = need("pyarrow")  # zstandard's own reader takes a truncated file for a short one
    return cast(BinaryIO, io.BufferedReader(arrow.input_stream(str(path), compression="zstd")))


def read_documents(path: Path, layout: Layout) -> Iterator[Document]:
    """The documents of a file, in order, without empty ones."""
    form = extensions(path)[0]
    with reading(path):
        if form in (".txt", ""):
            yield from read_text(path, layout)
            return
        for where, row in read_table(path, layout) if form == ".parquet" else read_lines(path):
            if document := layout.row(row, where):
                yield document


def read_text(path: Path, layout: Layout) -> Iterator[Document]:
    if layout.val_field is not None:
        raise InputError(f"'{path}' is plain text, which has no field '{layout.val_field}'.")
    with opened(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig") as lines:
        for text in cut_text(lines, layout.document):
            if text.strip():
                yield Document(valid(text), None)


def cut_text(lines: Iterator[str] | io.TextIOWrapper, rule: str) -> Iterator[str]:
    """Documents of a text file. `auto`: what stands between lines with nothing but <|endoftext|>."""
    if rule == "line":
        yield from (line.rstrip("\n") for line in lines)
        return
    held: list[str] = []
    marked = False
    for line in lines:
        ends = (rule == "auto" and line.strip() == END_OF_TEXT) or (rule == "paragraph" and not line.strip())
        if ends:
            yield "".join(held).strip("\n")
            held, marked = [], True
        else:
            held.append(line)
    text = "".join(held)
    yield text.strip("\n") if marked or rule == "paragraph" else text


def read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Where each row stands, and the row: one JSON object to a line."""
    with opened(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"Line {number:,} of '{path}'"
            try:
                yield where, json.loads(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
            except ValueError:  # no JSON, or no UTF-8
                raise InputError(f"{where} is not valid JSON; JSON lines have one object to a line.") from None


def is_one_value(path: Path, field: str) -> bool:
    """Whether a .json file is one value, as settings are, and not JSON lines with the text in a field."""
    with reading(path):
        lines = read_lines(path)
        try:
            _, row = next(lines, ("", {field: "nothing"}))
        except InputError:  # its first line is a part of something
            return True
        return not isinstance(row, Mapping) or (field not in row and next(lines, None) is None)


def read_table(path: Path, layout: Layout) -> Iterator[tuple[str, Any]]:
    """The same of a table in Parquet."""
    parquet, arrow = need("pyarrow.parquet"), need("pyarrow")
    with opened(path) as raw:
        # a packed table must be unpacked into memory: its table of contents is at the end
        table = parquet.ParquetFile(arrow.BufferReader(raw.read()) if extensions(path)[1] else raw)
        layout.row(dict.fromkeys(table.schema_arrow.names), f"'{path}'")  # which says what is missing
        wanted = [name for name in (layout.field, layout.val_field) if name is not None]
        batches = table.iter_batches(batch_size=1024, columns=wanted)
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
            yield f"Row {number:,} of '{path}'", row
