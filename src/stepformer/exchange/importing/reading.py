"""Reading foreign checkpoint files without running anything that is in them."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stepformer.base import documents, files
from stepformer.base.errors import InputError

PREFIXES = re.compile(r"^(?:_orig_mod\.|module\.)+")  # of torch.compile and of DistributedDataParallel
RECORD = "stepformer.json"  # marks an exported folder, and says what run it is


@dataclass
class Found:
    """What a source holds: its weights by name, what stands beside them, and the files it came from."""

    path: Path
    tensors: dict[str, Tensor]
    beside: Mapping[str, Any] = field(default_factory=dict)  # other entries of a .pt file
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json
    facts: Mapping[str, Any] = field(default_factory=dict)  # stepformer.json
    files: dict[str, str] = field(default_factory=dict)  # name -> sha256

    @property
    def where(self) -> str:
        """A folder by its path, a file by its name."""
        return str(self.path) if self.config else self.path.name


def open_source(path: Path) -> Found:
    """A .pt file, or a folder with config.json and weights."""
    if not path.exists():
        raise InputError(f"There is no file or folder '{path}'.")
    try:
        return _folder(path) if path.is_dir() else _file(path)
    except OSError as error:
        raise InputError(f"'{path}' cannot be read: {error.strerror or error}.") from None


def _file(path: Path) -> Found:
    if path.suffix == ".safetensors":
        raise InputError(f"'{path}' holds weights without their config: name the folder with config.json and it.")
    content = read_torch(path)
    checksums = {path.name: files.sha256(path)}
    if not isinstance(content, Mapping):
        raise InputError(f"'{path}' holds a {type(content).__name__}, not a dictionary of weights.")
    weights = content["model"] if isinstance(content.get("model"), Mapping) else content
    beside = {str(k): v for k, v in content.items() if k != "model"} if weights is not content else {}
    return Found(path, _only_tensors(weights, path), beside=beside, files=checksums)


def _folder(path: Path) -> Found:
    if (path / "run.json").is_file():
        raise InputError(f"'{path}' is a run already: use it as it is.")
    if not (path / "config.json").is_file():
        inside = [p for p in (path / "ckpt.pt", path / "best.pt") if p.is_file()]
        hint = f" Did you mean '{inside[0]}'?" if inside else ""
        raise InputError(f"The folder '{path}' has no config.json, so it is no Hugging Face model.{hint}")
    config = files.read_json(path / "config.json", "config", sealed=False)
    if not isinstance(config, dict):
        raise InputError(f"The config.json in '{path}' is damaged: it is not a table.")
    facts = _vouched(path)
    tensors: dict[str, Tensor] = {}
    checksums = {}
    for part in _weight_files(path):
        read = read_safetensors(part) if part.suffix == ".safetensors" else _only_tensors(read_torch(part), part)
        twice = sorted(tensors.keys() & read.keys())
        if twice:
            raise InputError(f"'{twice[0]}' is in two of the weight files of '{path}'.")
        tensors |= read
        checksums[part.name] = files.sha256(part)
        if part.name not in facts.get("files", checksums):
            raise InputError(f"'{part}' was not exported with the rest: '{path / RECORD}' does not list it.")
    return Found(path, tensors, config=config, facts=facts, files=checksums)


def _vouched(path: Path) -> dict[str, Any]:
    """What an export says about itself, once the files that it vouches for are what they were."""
    if not (path / RECORD).exists():
        return {}
    facts = documents.read(path / RECORD, documents.EXPORT)
    for name, content in facts.get("files", {}).items():
        found = files.sha256(path / name) if (path / name).is_file() else "gone"
        if found != content:
            raise InputError(
                f"'{path / name}' is not what was exported (SHA-256 {content[:12]}, now {found[:12]}): export it "
                f"again; if you changed it yourself, delete {RECORD} to vouch for it."
            )
    return facts


def _weight_files(folder: Path) -> list[Path]:
    """The weights of a Hugging Face folder: one file or the shards that an index lists."""
    for single in ("model.safetensors", "pytorch_model.bin"):
        if (folder / single).is_file():
            return [folder / single]
        index = folder / f"{single}.index.json"
        if index.is_file():
            try:
                names = sorted(set(files.read_json(index, "index of weights", sealed=False)["weight_map"].values()))
            except (KeyError, TypeError, AttributeError):
                raise InputError(f"'{index}' is damaged: it has no weight_map.") from None
            for name in names:
                if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
                    raise InputError(f"'{index}' lists '{name}', which is no file in '{folder}'.")
            return [folder / name for name in names]
    raise InputError(f"The folder '{folder}' has no weights: neither model.safetensors nor pytorch_model.bin.")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {PREFIXES.sub("", name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    except SafetensorError as error:
        raise InputError(f"'{path}' is damaged: {error}.") from None


def read_torch(path: Path) -> Any:
    """A PyTorch zip archive of tensors and plain values; whatever would have to be executed is refused."""
    files.opened(path).close()  # a pipe would be waited for
    problem = _damage(path) if zipfile.is_zipfile(path) else "is no PyTorch zip archive, or only the beginning of one"
    if problem is not None:
        raise InputError(f"'{path}' {problem}.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"(?:GLOBAL|Unsupported class) (\S+)", str(error))
        what = f"'{named[1].rstrip('.,:')}'" if named else "objects"
        raise InputError(
            f"'{path}' holds {what} besides tensors and plain values, and reading that would mean running code from "
            "the file: save its state_dict alone and import that."
        ) from None
    except (RuntimeError, EOFError, KeyError, ValueError, AttributeError, IndexError, TypeError, AssertionError):
        raise InputError(f"'{path}' is damaged, or not written by torch.save.") from None


def _damage(path: Path) -> str | None:
    """What is wrong with an archive, as far as torch itself does not look.

    torch.save stores its parts as they are; packed ones would be read as if they were numbers, or be endless.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            for info in members:
                if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                    return f"was packed again ('{info.filename}' is compressed): torch.save does not do that"
            twice = [name for name, count in Counter(info.filename for info in members).items() if count > 1]
            if twice:
                return f"is damaged: it has '{twice[0]}' twice"
            if sum(info.file_size for info in members) > path.stat().st_size:
                return "is damaged: its parts are larger than it is"
            if any(info.CRC for info in members):  # none: torch.serialization.set_crc32_options
                wrong = archive.testzip()
                return wrong and f"is damaged: the checksum of '{wrong}' inside does not match"
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        return f"is damaged: {error}"
    return None


def _only_tensors(weights: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(weights, Mapping) or not weights:
        raise InputError(f"'{path}' holds no weights by name.")
    for name, value in weights.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(f"'{path}' holds no weights by name: '{name}' is a {type(value).__name__}.")
    return {PREFIXES.sub("", name): value for name, value in weights.items()}


def number(value: Any) -> float | None:
    """A loss or a step as files hold it: a number, or a tensor of one."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e9 else None  # nanoGPT begins at 1e9
