"""Commands and programs in fresh processes that start at once: forked from one that has imported torch and us already.

Starting Python with torch takes seconds on a slow machine. What is tested here is a command's work, in a process whose
registries and folders are its own; that the installed program starts at all is tested in test_cli.py.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

_processes = multiprocessing.get_context("forkserver")
# torch's first optimizer imports dynamo, which takes as long as torch itself
_commands = [
    f"stepformer.cli.{name}"
    for name in ("main", "audit", "compare", "evaluate", "report", "runs", "serve", "show", "train")
]
_processes.set_forkserver_preload([*_commands, "rich.progress", "torch._dynamo", "torch.distributed.fsdp"])


class Running:
    """A command that has been started."""

    def __init__(self, target: Any, what: Any, cwd: Path | None, env: dict[str, str] | None) -> None:
        self.what, self._folder = what, tempfile.TemporaryDirectory()
        self._files = [str(Path(self._folder.name, name)) for name in ("out", "err")]
        # not the environment of the server, which may be that of an earlier test
        settings = dict(os.environ if env is None else env)
        self._process = _processes.Process(target=target, args=(what, str(cwd or Path.cwd()), settings, self._files))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def status(self) -> int | None:
        return self._process.exitcode

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        self._process.join(seconds)
        if self._process.exitcode is None:
            self._process.kill()
            raise TimeoutError(f"{self.what} ran for more than {seconds:g} seconds")
        with self._folder:
            out, err = (Path(file).read_text() for file in self._files)
        return subprocess.CompletedProcess(self.what, self._process.exitcode, out, err)


def stepformer(*words: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> Any:
    """What `stepformer WORDS` returns and prints."""
    return start(*words, cwd=cwd, env=env).wait()


def start(*words: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> Running:
    """`stepformer WORDS`, begun."""
    return Running(_command, list(words), cwd, env)


def python(code: str, *, cwd: Path | None = None, env: dict[str, str] | None = None) -> Any:
    """What `python -c CODE` returns and prints."""
    return begin(code, cwd=cwd, env=env).wait()


def begin(code: str, *, cwd: Path | None = None, env: dict[str, str] | None = None) -> Running:
    """`python -c CODE`, begun."""
    return Running(_program, code, cwd, env)


def two_ranks(worker: Any, arguments: tuple[Any, ...], folder: Path) -> None:
    """worker(rank, *arguments) in two processes; if they do not end, what each of them wrote to `folder`/stuck-RANK."""
    processes = mp.start_processes(worker, arguments, nprocs=2, join=False, start_method="forkserver")
    deadline = time.monotonic() + 240
    while not processes.join(timeout=1):
        if time.monotonic() > deadline:
            for process in processes.processes:
                process.kill()
            where = "\n".join(file.read_text() for file in sorted(folder.glob("stuck-*")))
            raise TimeoutError(f"the two processes did not finish within four minutes:\n{where}")


def _enter(cwd: str, env: dict[str, str], files: list[str]) -> None:
    gc.freeze()  # what was imported before stays: collections need not look at it
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.path[:0] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]


def _command(words: list[str], cwd: str, env: dict[str, str], files: list[str]) -> None:
    _enter(cwd, env, files)
    from stepformer.cli import main

    sys.argv = ["stepformer", *words]
    sys.exit(main(words))


def _program(code: str, cwd: str, env: dict[str, str], files: list[str]) -> None:
    _enter(cwd, env, files)
    sys.argv = ["-c"]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
