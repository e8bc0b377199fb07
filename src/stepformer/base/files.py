"""Files that are there whole or not at all.

Everything the package writes goes through here, so that a killed process or a full disk leaves the old file (or none),
never half a new one, and so that the tests can stop a process at each of these calls.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from stepformer.base.errors import InputError, StepformerError

CHECKSUM = "checksum"
_CHECKED = re.compile(rb'(.*), "check": "([0-9a-f]{8})"\}', re.DOTALL)
LARGEST = 64 << 20  # bytes of a JSON file
TEMPORARY = ".tmp-"  # names that begin so are unfinished; whoever finds them may delete them


@contextlib.contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`; when the block ends well it is on disk and takes the name `path`."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                sync(file)
            rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Say in one sentence why something could not be written to `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StepformerError(f"The disk is full: '{path}' could not be written; older files are whole.") from None
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            raise StepformerError(f"'{path}' may not be written.") from None
        raise StepformerError(f"'{path}' could not be written: {error.strerror or error}.") from None


def sync(file: BinaryIO) -> None:
    """Hand a file's bytes to the disk."""
    file.flush()
    os.fsync(file.fileno())


def make_ordinary(path: Path) -> None:
    """Give a finished file the permissions of any new one; safetensors writes files that only their owner may read."""
    probe = path.with_name(f"{TEMPORARY}mode-{os.getpid()}-{path.name}")  # asking for the umask would change it
    try:
        with probe.open("wb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    finally:
        probe.unlink(missing_ok=True)
    path.chmod(mode)


def rename(source: Path, target: Path) -> None:
    """Give a finished file or folder its name, in one step, and hand that to the disk as well."""
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_text(path: Path, text: str) -> None:
    with writing(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any, *, sealed: bool = True) -> None:
    """Write a JSON file; an object gets a checksum of its own content, unless another program reads it too."""
    if sealed and isinstance(value, dict):
        plain = json.loads(json.dumps(value))  # as a reader will see it
        value = {**value, CHECKSUM: checksum_of(plain)}
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def checksum_of(value: dict[str, Any]) -> str:
    """The checksum of an object, its own entry of that name left out."""
    content = {key: part for key, part in value.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_json(path: Path, what: str, *, sealed: bool = True) -> Any:
    """A JSON file, of ours if `sealed`; `what` names it in the sentence when it is missing, damaged or was edited."""
    value = loads(read_text(path, what), f"The {what} '{path}' is damaged")
    return unsealed(value, path, what) if sealed and isinstance(value, dict) else value


def unsealed(value: dict[str, Any], path: Path, what: str) -> dict[str, Any]:
    """An object without its checksum, which must be right if it is there."""
    if CHECKSUM in value and value[CHECKSUM] != checksum_of(value):
        raise InputError(
            f"The {what} '{path}' is not what was written: its checksum does not match. Restore it; if you edited it "
            f"yourself, delete its line '{CHECKSUM}' to vouch for it."
        )
    return {key: part for key, part in value.items() if key != CHECKSUM}


def opened(path: Path, flags: int = os.O_RDONLY, mode: str = "rb") -> BinaryIO:
    """An ordinary file, to read unless told otherwise; a pipe or a device, which may never end, is an OSError."""
    handle = os.open(path, flags | os.O_NONBLOCK, 0o666)  # opening a pipe would wait for its writer
    kind = os.fstat(handle).st_mode
    if stat.S_ISREG(kind):
        return cast(BinaryIO, os.fdopen(handle, mode))
    os.close(handle)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a pipe or a device, not an ordinary file", str(path))


@contextlib.contextmanager
def locked(path: Path, busy: str, named: Path | None = None) -> Iterator[None]:
    """Hold a file that is made if it is not there; `busy` is the sentence if another process holds it."""
    with contextlib.ExitStack() as stack:
        with explained(named or path):
            file = stack.enter_context(opened(path, os.O_RDWR | os.O_CREAT, "r+b"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.stat(path)  # gone if another process has just given up and taken it away
        except OSError:
            raise StepformerError(busy) from None
        yield


@contextlib.contextmanager
def held(folder: Path, lock: str, busy: str) -> Iterator[None]:
    """Hold a folder by a file in it, both made if they are not there; one in which nothing was begun is taken away."""
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / lock, busy, named=folder):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if [entry.name for entry in folder.iterdir()] == [lock]:
                    (folder / lock).unlink()
                    folder.rmdir()


def read_text(path: Path, what: str) -> str:
    """A text file of ours that is small by nature; a larger one is not read."""
    try:
        with opened(path) as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise InputError(f"The {what} '{path}' is damaged: it has more than {LARGEST >> 20} MiB.")
        return content.decode()
    except FileNotFoundError:
        raise InputError(f"There is no {what} '{path}'.") from None
    except OSError as error:
        raise InputError(f"The {what} '{path}' cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"The {what} '{path}' is damaged: it is not text.") from None


def loads(text: str, damaged: str) -> Any:
    """The value of a JSON text; `damaged` begins the sentence if it is none, or holds what no text of ours does."""
    try:
        value = json.loads(text, parse_constant=int)  # which refuses NaN and Infinity
        if "\\u" in text:  # no text has these: lone surrogates, save those that stand for bytes of a path, and zero
            json.dumps(value, ensure_ascii=False).encode(errors="surrogateescape")
            if "\\u0000" in text:
                raise ValueError
    except RecursionError:
        raise InputError(f"{damaged}: it is nested too deeply.") from None
    except ValueError:
        raise InputError(f"{damaged}: it is not valid JSON.") from None
    return value


chained = zlib.crc32  # the check of a line of JSON, from its content and the check of the line before


def checked_line(body: bytes, check: int) -> bytes:
    return body[:-1] + f', "check": "{check:08x}"}}\n'.encode()


def parted(line: bytes) -> tuple[bytes, int | None]:
    """A line without its check, and the check."""
    found = _CHECKED.fullmatch(line)
    return (found[1] + b"}", int(found[2], 16)) if found else (line, None)


def sha256(path: Path, progress: Callable[[int], None] | None = None, also: Any = None) -> str:
    """The checksum of a file, in hex; `also` is a hash of several files that reads this one, too."""
    digest = hashlib.sha256()
    with opened(path) as file:
        while block := file.read(1 << 22):
            digest.update(block)
            if also is not None:
                also.update(block)
            if progress:
                progress(len(block))
    return digest.hexdigest()


def remove_unfinished(folder: Path) -> None:
    """Delete what earlier, killed processes left half-written directly in `folder`."""
    for path in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def clear_left(path: Path) -> None:
    """Delete what killed processes left beside `path` that was to take its name. What they had set aside to make room
    gets the name back if they died before anything else had it. What a living process writes is left alone.
    """
    name = re.compile(rf"{re.escape(TEMPORARY)}(old-)?([0-9]+)-{re.escape(path.name)}")
    found = [(match, left) for left in path.parent.glob(f"{TEMPORARY}*") if (match := name.fullmatch(left.name))]
    dead = {left: bool(match[1]) for match, left in found if not _lives(int(match[2]))}
    for left in sorted(dead, key=dead.__getitem__, reverse=True):  # those set aside first
        if dead[left] and not os.path.lexists(path):
            with explained(path):
                rename(left, path)
        elif left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                left.unlink(missing_ok=True)


def _lives(number: int) -> bool:
    """Is there another process of this number? What has our own was left by one before us."""
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # another user's
    return number != os.getpid()


def identity(folder: Path) -> tuple[int, int] | None:
    """What a folder is, whatever it is called; None if there is none."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
