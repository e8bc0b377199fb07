"""Models of others, and ours for others: Hugging Face, checkpoints."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from stepformer.base import files
from stepformer.base.errors import StepformerError


@contextlib.contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into; when the block ends well it is on disk and takes the name `out`."""
    temporary = out.parent / f"{files.TEMPORARY}{os.getpid()}-{out.name}"
    old = out.parent / f"{files.TEMPORARY}old-{os.getpid()}-{out.name}"
    with files.explained(out):
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            yield temporary
            for path in [path for path in temporary.rglob("*") if path.is_file()]:
                with path.open("rb+") as file:
                    files.sync(file)
                files.make_ordinary(path)
            if out.exists():
                files.rename(out, old)
            files.rename(temporary, out)
        except Exception as error:  # a full disk, say: safetensors and tokenizers have errors of their own for it
            if not isinstance(error, SafetensorError) and "(os error " not in str(error):
                raise
            raise StepformerError(f"'{out}' could not be written: {error}.") from None
        finally:
            if old.exists() and not out.exists():
                files.rename(old, out)
            for left in (temporary, old):
                shutil.rmtree(left, ignore_errors=True)
