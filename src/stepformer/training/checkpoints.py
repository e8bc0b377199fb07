"""Checkpoints: a folder of safetensors and JSON that counts only once its manifest is there.

    checkpoints/step-00000100/   all that a run needs to continue: weights, optimizer, state
    checkpoints/best-00000080/   weights of the best evaluation

A folder is written under a temporary name, every file handed to the disk, the manifest with all checksums last, and
then renamed: a process killed at any moment leaves whole checkpoints only. Sharded models are written by all ranks at
once through torch.distributed.checkpoint in safetensors form (its usual metadata is a pickle, which nothing here
reads), and every form can be read on any number of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stepformer.base import documents, files
from stepformer.base.errors import InputError, StepformerError, StepformerWarning
from stepformer.model import Model
from stepformer.model.config import ModelConfig
from stepformer.ops.sharding import is_sharded, like, whole
from stepformer.training.parallel import ALONE, World

MANIFEST = "manifest.json"
Tensors = Mapping[str, Tensor]
Owner = Callable[[Mapping[str, Any]], str]
"""Why a checkpoint's state is not of the run that it lies in, or nothing."""


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(
        self, folder: Path, world: World = ALONE, *, keep: int = 2, stays: int | None = None, owner: Owner | None = None
    ) -> None:
        self.folder, self.world, self.keep = folder, world, keep
        self.stays = stays  # a step whose checkpoint is never superseded
        self.owner = owner or (lambda state: "")
        self.on_disk: Callable[[str], None] = lambda name: None  # told of every checkpoint that is
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(self, name: str, parts: Mapping[str, Tensors], state: Mapping[str, Any]) -> None:
        """Write a checkpoint, on all ranks at once; what goes wrong on the main one is raised on all.

        On CUDA this returns once the tensors are copied; `wait` says when they are on disk.
        """
        self.wait()
        temporary, final = self.folder / f"{files.TEMPORARY}{name}", self.folder / name
        sharded = any(is_sharded(t) for tensors in parts.values() for t in tensors.values())
        if sharded:
            self._save_sharded(temporary, parts)
        if self.world.is_main:
            # in CPU memory, which training will not change; on the CPU the caller waits, so nothing need be copied
            copies = {
                part: {name: t.detach().to("cpu").contiguous() for name, t in tensors.items()}
                for part, tensors in parts.items()
                if not sharded
            }
            self._pending = self._writer.submit(self._finish, temporary, final, copies, state)
        if self.world.device.type != "cuda" or sharded:
            self.wait()

    def wait(self) -> None:
        """Until the last checkpoint is on disk, on every rank; raises what went wrong with it on all of them."""
        self.world.on_main(self.settle)

    def settle(self) -> None:
        """The same for the main rank alone, where the others do not wait."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def abandon(self) -> None:
        """Until what is being written is on disk, for a thread that ends this process."""
        self._writer.shutdown()

    def _save_sharded(self, temporary: Path, parts: Mapping[str, Tensors]) -> None:
        import torch.distributed.checkpoint as dcp

        def begin() -> None:
            with files.explained(temporary):
                self._begin(temporary)
                for part in parts:
                    (temporary / part).mkdir()

        self.world.on_main(begin)
        for part, tensors in parts.items():
            writer = dcp.HuggingFaceStorageWriter(str(temporary / part), save_distributed=True)
            with _explained(temporary):
                dcp.save(dict(tensors), storage_writer=writer)

    def _begin(self, temporary: Path) -> None:
        """An empty folder. That of the run must be there: one that was moved is not made again in its old place."""
        shutil.rmtree(temporary, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)
        temporary.mkdir()

    def _finish(self, temporary: Path, final: Path, parts: Mapping[str, Tensors], state: Mapping[str, Any]) -> None:
        try:
            with _explained(final):
                if parts:
                    self._begin(temporary)
                    for part, tensors in parts.items():
                        save_file(dict(tensors), temporary / f"{part}.safetensors")
                listed = {}
                for path in _weights(temporary):
                    with path.open("rb+") as file:
                        files.sync(file)
                    files.make_ordinary(path)
                    name = str(path.relative_to(temporary))
                    listed[name] = {"bytes": path.stat().st_size, "sha256": files.sha256(path)}
                temporary.stat()  # the folder of the run may have been moved meanwhile
                manifest = {"format": documents.CHECKPOINT.format, "files": listed, "state": dict(state)}
                files.write_json(temporary / MANIFEST, manifest)
                if final.exists():  # a damaged one that a resumed run has passed again
                    self._set_aside(final.name)
                files.rename(temporary, final)
                self.on_disk(final.name)
                self._tidy(final.name)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # what does not fit must not fill the disk either
            raise

    def _tidy(self, newest: str) -> None:
        """Remove what is superseded, but nothing a run could still need, and what killed processes left behind."""
        # the best before the newest stays until a step checkpoint knows of the newest: a kill in between needs it
        of_step = newest.startswith("step")
        doomed = self.names("best")[: -1 if of_step else -2]
        doomed += [n for n in self.names("step")[: -self.keep] if of_step and n != step_name(self.stays or -1)]
        for name in doomed:
            self._set_aside(name)
        files.remove_unfinished(self.folder)

    def _set_aside(self, name: str) -> None:
        """Take a checkpoint's name away before it is deleted: half a folder must not carry it."""
        aside = self.folder / f"{files.TEMPORARY}old-{name}"
        shutil.rmtree(aside, ignore_errors=True)
        files.rename(self.folder / name, aside)

    def names(self, *kinds: str) -> list[str]:
        """Checkpoints of some kinds ("step", "best") that have a manifest, of each the oldest first."""
        found = [sorted(path.parent.name for path in self.folder.glob(f"{kind}-*/{MANIFEST}")) for kind in kinds]
        return [name for names in found for name in names if re.fullmatch(r"(step|best)-\d{8,}", name)]

    def steps(self, kind: str = "step") -> list[int]:
        """Of these checkpoints."""
        return [int(name.partition("-")[2]) for name in self.names(kind)]

    def remove_after(self, step: int) -> None:
        """Forget checkpoints beyond a step: a run that continues from an earlier one writes them again."""
        with files.explained(self.folder):
            for name in self.names("step", "best"):
                if int(name.partition("-")[2]) > step:
                    self._set_aside(name)
        files.remove_unfinished(self.folder)

    def latest(self, kind: str = "step") -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that is undamaged, and its state; None if there is none at all."""
        problems = []
        for name in reversed(self.names(kind)):
            try:
                state = self.verified(name)
            except (InputError, OSError) as error:
                if not (self.folder / name / MANIFEST).is_file():  # an older one in its place would be no remedy
                    raise InputError(f"The checkpoint '{self.folder / name}' was removed while it was read.") from None
                problems.append(str(error))
                continue
            for problem in problems:
                warnings.warn(f"{problem} Going back to '{name}'.", StepformerWarning, stacklevel=2)
            return self.folder / name, state
        if problems:
            raise InputError(" ".join(problems))
        return None

    def faults(self) -> list[str]:
        """What is wrong with the newest ones, which are read first."""
        newest = [names[-1] for names in map(self.names, ("step", "best")) if names]
        return [fault for name in newest if (fault := self._fault(name))]

    def whole_best(self, best: dict[str, Any] | None) -> dict[str, Any] | None:
        """The best evaluation so far, unless its weights are there and damaged: then the best from here on counts."""
        name = "" if best is None else step_name(best["step"], "best")
        if name not in self.names("best") or not (fault := self._fault(name)):
            return best
        warnings.warn(f"{fault} The best evaluation from here on takes its place.", StepformerWarning, stacklevel=2)
        return None

    def _fault(self, name: str) -> str:
        try:
            self.verified(name)
        except (InputError, OSError) as error:
            return str(error)
        return ""

    def check(self, config: ModelConfig) -> None:
        """Refuse a run none of whose checkpoints is its own and of its model; their content is not read yet."""
        problems = []
        for name in reversed(self.names("step")):
            try:
                self.verified(name, content=False)
                check_fits(self.folder / name, config)
                return
            except InputError as error:
                problems.append(str(error))
        if problems:
            raise InputError(" ".join(problems))

    def verified(self, name: str, *, content: bool = True) -> dict[str, Any]:
        """The state of a checkpoint, once it is of this run and its content, unless it is not asked for, is whole."""
        folder = self.folder / name
        state: dict[str, Any]
        state = verify(folder) if content else documents.read(folder / MANIFEST, documents.CHECKPOINT)["state"]
        if fault := self.owner(state):
            raise InputError(f"The checkpoint '{folder}' is not of this run: {fault}.")
        return state


def step_name(step: int, kind: str = "step") -> str:
    return f"{kind}-{step:08d}"


def verify(folder: Path) -> dict[str, Any]:
    """Check a checkpoint's format, files and checksums; returns its state."""
    manifest = documents.read(folder / MANIFEST, documents.CHECKPOINT)
    damaged = f"The checkpoint '{folder}' is damaged:"
    for name, facts in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"{damaged} '{name}' is missing.")
        if (size := path.stat().st_size) != facts["bytes"]:
            raise InputError(f"{damaged} '{name}' has {size:,} bytes, not {facts['bytes']:,}.")
        if files.sha256(path) != facts["sha256"]:
            raise InputError(f"{damaged} the checksum of '{name}' does not match.")
    unlisted = sorted({str(path.relative_to(folder)) for path in _weights(folder)} - manifest["files"].keys())
    if unlisted:
        raise InputError(f"{damaged} '{unlisted[0]}' is not in its manifest.")
    state: dict[str, Any] = manifest["state"]
    told = re.search(r"-(\d+)$", folder.name)
    if told and int(told[1]) != state["step"]:
        raise InputError(f"{damaged} it says that it is of step {state['step']}.")
    return state


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def weights_of(folder: Path) -> str:
    """SHA-256 over the weights of a checkpoint, as its manifest tells them."""
    listed = documents.read(folder / MANIFEST, documents.CHECKPOINT)["files"].items()
    found = sorted((name, facts["sha256"]) for name, facts in listed if name.startswith("model"))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:12]


@torch.no_grad()
def load(folder: Path, part: str, tensors: Tensors) -> None:
    """Fill tensors (whole, or shards of a sharded model) from one part of a checkpoint, by name."""
    single, shards = folder / f"{part}.safetensors", folder / part
    if not single.is_file() and not shards.is_dir():
        raise InputError(f"The checkpoint '{folder}' holds no {part}.")
    if shards.is_dir():
        _check_names(_stored_shapes(shards.glob("*.safetensors")), tensors, f"The checkpoint '{folder}'")
        import torch.distributed.checkpoint as dcp

        reader = dcp.HuggingFaceStorageReader(str(shards))
        dcp.load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())
        return
    with _readable(single) as file:
        _check_names(file.keys(), tensors, f"The checkpoint '{folder}'")
        for name, target in tensors.items():
            stored = file.get_tensor(name)
            if stored.shape != target.shape:
                raise InputError(
                    f"'{name}' has shape {tuple(stored.shape)} in '{folder}', but {tuple(target.shape)} in this model."
                )
            target.copy_(like(stored.to(target.device), target) if is_sharded(target) else stored)


def stored_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of a checkpoint as they lie there: whole, or cut by the ranks that wrote them."""
    for path in filter(lambda path: "model" in (path.stem, path.parent.name), _weights(folder)):
        with _readable(path) as file:
            yield from ((name, file.get_tensor(name)) for name in sorted(file.keys()))


def refuse_nan(tensors: Iterable[tuple[str, Tensor]], what: str) -> None:
    bad = next((name for name, value in tensors if not bool(value.isfinite().all())), None)
    if bad is not None:
        raise InputError(f"{what} has weights that are not finite numbers, the first in '{bad}'.")


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InputError(f"'{path}' is damaged: it cannot be read ({error}).") from None


def check_fits(folder: Path, config: ModelConfig) -> None:
    """Refuse weights that are not those of a model, by names and shapes, before anything is built."""
    single, what = folder / "model.safetensors", f"The checkpoint '{folder}'"
    stored = _stored_shapes([single] if single.is_file() else sorted((folder / "model").glob("*.safetensors")))
    layers = len({name.split(".")[1] for name in stored if name.startswith("blocks.")})
    bare = config.weight_sharing == "oracles" and not layers  # under gainless norms a layer may have nothing of its own
    if layers != config.n_layer and not bare:  # first: a model of a billion layers takes long even without memory
        raise InputError(f"{what} belongs to another model: it has {layers} layers, not {config.n_layer}.")
    wanted = {name: tuple(p.shape) for name, p in Model(config, device="meta").named_parameters()}
    _check_names(stored, wanted, what)
    for name, shape in wanted.items():
        if stored[name] != shape:
            raise InputError(f"{what} belongs to another model: its '{name}' has shape {stored[name]}, not {shape}.")


def _stored_shapes(paths: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Names and shapes in one file, or in those that several ranks have written."""
    stored: dict[str, tuple[int, ...]] = {}
    for path in paths:
        with _readable(path) as file:
            for name in file.keys():  # noqa: SIM118  # it is not a dictionary
                shape = tuple(file.get_slice(name).get_shape())
                rows = stored[name][0] if stored.get(name) else 0  # ranks share a tensor by its rows
                stored[name] = (rows + shape[0], *shape[1:]) if rows and shape else shape
    return stored


def _check_names(stored: Iterable[str], wanted: Mapping[str, Any], where: str) -> None:
    missing, extra = sorted(wanted.keys() - {*stored}), sorted({*stored} - wanted.keys())
    if missing or extra:
        what = f"lacks '{missing[0]}'" if missing else f"has '{extra[0]}', which this model does not"
        raise InputError(f"{where} belongs to another model: it {what}.")


def weights_sha256(tensors: Tensors) -> str:
    """One checksum of all weights, names included, whatever files they are stored in."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = whole(tensors[name].detach()).cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.view(torch.uint8).numpy().tobytes() if value.ndim else value.numpy().tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Sentences for what goes wrong while writing, safetensors' own errors included."""
    try:
        with files.explained(path):
            yield
    except SafetensorError as error:
        if "No space left" in str(error) or "os error 28" in str(error):
            raise StepformerError(f"The disk is full: '{path}' could not be written; older files are whole.") from None
        raise StepformerError(f"'{path}' could not be written: {error}.") from None
    except BaseException as error:
        # of torch.distributed.checkpoint, and no Exception; by its name: to import it would cost commands half a second
        if type(error).__name__ != "CheckpointException":
            raise
        failures = error.failures  # type: ignore[attr-defined]
        raise StepformerError(f"'{path}' could not be written: {next(iter(failures.values()))[0]}.") from None
