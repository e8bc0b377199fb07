"""Fault injection: damage one file of a small house of runs, exports and corpora, give a command, judge what it says.

Good answers are a sentence with a status that is not zero, a note, or what the untouched house gives. Bad ones are a
result that differs without a word, a traceback, a command that does not end, and one that takes the machine's memory.
Every case follows from its number: `python tests/support/faults.py 0 2000` prints the counts, `... 17` what happens
in case 17.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from runs import make_corpus, small_run
from stepformer.base import files
from stepformer.cli import main
from stepformer.training import Stopped, train
from stepformer.training.stopping import Watch

SECONDS = 60  # after which a command counts as one that does not end: untouched ones take a second
MEMORY = 1 << 30  # bytes above the untouched command's
BAD = ("silent", "traceback", "hang", "memory")


class House:
    """A corpus, two finished runs, one that was stopped, exports, and a checkpoint of another program."""

    def __init__(self, root: Path) -> None:
        self.root = root
        make_corpus(root / "corpus", count=4)
        small = {"n_layer": 1, "precision": "fp32", "steps": 6, "save_every": 2, "eval_every": 3, "eval_tokens": 64}
        for name, what, seed in (
            ("study/plain-s1", "vanilla", 1),
            ("study/moving-s1", "yurii", 1),
            ("stopped", "yurii", 2),
        ):
            config = small_run(root / "corpus", what, seed=seed, **small)
            label = Path(name).name.rpartition("-")[0] or name
            with contextlib.suppress(Stopped):
                watch = StopAfter(4) if name == "stopped" else None
                train(config, root / name, quiet=True, label=label, watch=watch)
        runs = [{"label": "plain", "seed": 1}, {"label": "moving", "seed": 1}]
        files.write_json(root / "study/study.json", {"format": 1, "runs": runs, "facts": {}})
        with _quiet():
            assert main(["export", str(root / "study/moving-s1"), "--out", str(root / "export")]) == 0
            assert main(["export", str(root / "study/plain-s1"), "--out", str(root / "gpt2"), "--format", "gpt2"]) == 0
        torch.save(nanogpt(), root / "ckpt.pt")


def nanogpt() -> dict[str, Any]:
    """What nanoGPT's trainer saves, of one layer and eight wide."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"wte": (257, 8), "wpe": (16, 8)}
    weights = {f"transformer.{n}.weight": torch.randn(*s, generator=draw) for n, s in shapes.items()}
    layer = {"ln_1": (8,), "attn.c_attn": (24, 8), "attn.c_proj": (8, 8), "ln_2": (8,), "mlp.c_fc": (32, 8)}
    layer["mlp.c_proj"] = (8, 32)
    weights |= {f"transformer.h.0.{n}.weight": torch.randn(*s, generator=draw) for n, s in layer.items()}
    weights["transformer.ln_f.weight"] = torch.ones(8)
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    settings = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 16, "bias": False, "vocab_size": 257}
    return {"model": weights, "model_args": settings, "iter_num": 3, "best_val_loss": 5.0, "config": {}}


class StopAfter(Watch):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.left = step

    def asked(self) -> int:
        self.left -= 1
        return int(signal.SIGTERM) if self.left == 0 else 0


# Commands: the words after `stepformer`, the files that they read, and what they leave behind.


@dataclass(frozen=True)
class Command:
    name: str
    words: tuple[str, ...]
    reads: tuple[str, ...]
    leaves: Callable[[Path], str] = lambda house: ""


def _weights(where: str) -> Callable[[Path], str]:
    """All safetensors and JSON that a command has written, but for ids and times."""

    def found(house: Path) -> str:
        parts = []
        for path in sorted((house / where).rglob("*")):
            if path.suffix == ".safetensors":
                parts.append(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}")
            elif path.name in ("config.json", "config.toml", "report.md", "runs.csv", "comparison.csv"):
                parts.append(path.read_text())
        return "\n".join(parts)

    return found


RUN = ("study/moving-s1/",)
COMMANDS = (
    Command("eval", ("eval", "study/moving-s1"), (*RUN, "corpus/")),
    Command("eval last", ("eval", "study/moving-s1", "--checkpoint", "last"), (*RUN, "corpus/")),
    Command("generate", ("generate", "study/moving-s1", "One", "--tokens", "8", "--temperature", "0"), RUN),
    Command("export", ("export", "study/moving-s1", "--out", "out"), RUN, _weights("out")),
    Command("import export", ("import", "export", "--out", "out"), ("export/",), _weights("out")),
    Command("import gpt2", ("import", "gpt2", "--out", "out"), ("gpt2/",), _weights("out")),
    Command("import pt", ("import", "ckpt.pt", "--out", "out", "--tokenizer", "bytes"), ("ckpt.pt",), _weights("out")),
    Command("resume", ("resume", "stopped", "--quiet"), ("stopped/", "corpus/"), _weights("stopped/checkpoints")),
    Command("resume finished", ("resume", "study/moving-s1", "--quiet"), RUN),
    Command(
        "compare",
        ("compare", "--runs", "study/plain-s1", "study/moving-s1", "--out", "out"),
        ("study/",),
        _weights("out"),
    ),
    Command(
        "warm start",
        ("train", "stopped/config.toml", "init=study/moving-s1", "steps=2", "--out", "out", "--quiet"),
        (*RUN, "corpus/"),
        _weights("out/checkpoints"),
    ),
    Command("diagnose", ("diagnose", "study/moving-s1", "--depth"), (*RUN, "corpus/")),
    Command("report", ("report", "study", "--out", "out", "--no-samples"), ("study/",), _weights("out")),
)


# Mutations: what may happen to a file.

VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        1,
        7,
        10**9,
        2**62,
        10**30,
        0.5,
        -0.5,
        1e300,
        "",
        "x",
        "../x",
        "/etc/hostname",
        "a\0b",
        "\ud800",
    ),
    *([], {}, [[]], {"a": 1}, "9" * 100_000, ["x"] * 1000),
)


def _spots(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield (*path, key)
        yield from _spots(part, (*path, key))


def _changed(value: Any, spot: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    whole = json.loads(json.dumps(value))
    holder = whole
    for key in spot[:-1]:
        holder = holder[key]
    change(holder, spot[-1])
    return whole


def mutate_json(path: Path, draw: random.Random) -> str:
    """Change one thing in a JSON file, sometimes without the checksum that would tell."""
    value = json.loads(path.read_text())
    unsealed = draw.random() < 0.5 and isinstance(value, dict) and value.pop(files.CHECKSUM, None) is not None
    spots = list(_spots(value))
    if not spots:
        return mutate_bytes(path, draw)
    spot = draw.choice(spots)
    kind = draw.choice(("other", "other", "nudge", "delete", "rename", "deep"))
    new = draw.choice(VALUES)

    def change(holder: Any, key: Any) -> None:
        if kind == "delete":
            del holder[key]
        elif kind == "rename" and isinstance(holder, dict):
            holder[f"{key}2"] = holder.pop(key)
        elif kind == "nudge" and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = draw.choice((holder[key] * 2, holder[key] + 1, -holder[key]))
        elif kind == "nudge" and isinstance(holder[key], str) and holder[key]:
            at = draw.randrange(len(holder[key]))
            holder[key] = holder[key][:at] + draw.choice("0af9x") + holder[key][at + 1 :]
        else:
            holder[key] = new

    text = json.dumps(_changed(value, spot, change), indent=2)
    if kind == "deep":
        text = "[" * 100_000 + text
    path.write_text(text)
    return f"{kind} of {'.'.join(map(str, spot))}{', without checksum' if unsealed else ''}"


def mutate_lines(path: Path, draw: random.Random) -> str:
    """Change, lose, double or exchange lines of a metrics file, sometimes without their checks."""
    lines = path.read_text().splitlines(keepends=True)
    unchecked = draw.random() < 0.3
    if unchecked:
        lines = [re.sub(r', "check": "[0-9a-f]{8}"', "", line) for line in lines]
    at, kind = draw.randrange(len(lines)), draw.choice(("lose", "double", "exchange", "digit", "bytes", "cut"))
    if kind == "lose":
        del lines[at]
    elif kind == "double":
        lines.insert(at, lines[at])
    elif kind == "exchange":
        other = draw.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == "digit":
        digits = [m.start() for m in re.finditer(r"\d", lines[at])]
        spot = draw.choice(digits)
        lines[at] = lines[at][:spot] + str((int(lines[at][spot]) + 1 + draw.randrange(8)) % 10) + lines[at][spot + 1 :]
    elif kind == "cut":
        del lines[at:]
    path.write_text("".join(lines))
    if kind == "bytes":
        return mutate_bytes(path, draw)
    return f"{kind} of line {at + 1}{', without checks' if unchecked else ''}"


def mutate_bytes(path: Path, draw: random.Random) -> str:
    """Flip, cut, lengthen, empty or remove any file."""
    content = bytearray(path.read_bytes())
    kind = draw.choice(("flip", "flip", "flip", "cut", "longer", "empty", "gone", "zeros", "folder"))
    if kind == "flip" and content:
        at = draw.randrange(len(content))
        content[at] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del content[draw.randrange(len(content) + 1) :]
    elif kind == "longer":
        content += draw.randbytes(draw.choice((1, 100, 100_000)))
    elif kind == "zeros":
        at = draw.randrange(len(content) + 1)
        content[at : at + 16] = bytes(min(16, len(content) - at))
    elif kind == "empty":
        content.clear()
    path.write_bytes(content)
    if kind in ("gone", "folder"):
        path.unlink()
    if kind == "folder":
        path.mkdir()
    return kind


def mutate_weights(path: Path, draw: random.Random) -> str:
    """Weights that are well formed and wrong: other numbers, another shape, in a manifest that vouches for them."""
    from safetensors.torch import load_file, save_file

    manifest = path.parent / "manifest.json"
    kind = draw.choice(("bytes", "bytes", "nan", "larger", "fewer", "more"))
    if kind == "bytes" or path.name != "model.safetensors" or not manifest.is_file():
        return mutate_bytes(path, draw)
    tensors = load_file(path)
    name = draw.choice(sorted(tensors))
    if kind == "nan":
        tensors[name].view(-1)[draw.randrange(tensors[name].numel())] = float(draw.choice(("nan", "inf")))
    elif kind == "larger":
        tensors[name] = torch.cat([tensors[name], tensors[name]])
    elif kind == "fewer":
        del tensors[name]
    else:
        tensors["blocks.1.extra"] = torch.ones(2)
    save_file(tensors, path)
    told = json.loads(manifest.read_text())
    told["files"][path.name] = {"bytes": path.stat().st_size, "sha256": files.sha256(path)}
    told.pop(files.CHECKSUM, None)
    files.write_json(manifest, told)
    return f"{kind} of {name}, vouched for"


def mutate_zip(path: Path, draw: random.Random) -> str:
    """An archive of torch.save, packed again or damaged."""
    kind = draw.choice(("bytes", "bytes", "deflated", "twice"))
    if kind == "bytes":
        return mutate_bytes(path, draw)
    with zipfile.ZipFile(path) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    method = zipfile.ZIP_DEFLATED if kind == "deflated" else zipfile.ZIP_STORED
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", method) as archive:
        warnings.simplefilter("ignore")
        for name, content in members if kind == "deflated" else [*members, members[-1]]:
            archive.writestr(name, content)
    return kind


def mutation(path: Path) -> Callable[[Path, random.Random], str]:
    kinds = {".json": mutate_json, ".jsonl": mutate_lines, ".safetensors": mutate_weights, ".pt": mutate_zip}
    return kinds.get(path.suffix, mutate_bytes)


# Judging.


@dataclass(frozen=True)
class Answer:
    status: int
    said: str  # on stderr
    result: str
    fault: str = ""


@contextlib.contextmanager
def _quiet() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err


def _no_picture(figure: Any, file: Any, **settings: Any) -> None:
    """Pictures take most of the time and are made of what the tables show."""
    file.write(b"\x89PNG") if hasattr(file, "write") else Path(file).write_bytes(b"\x89PNG")


class _TooLong(BaseException):
    pass


def _alarm(*_: Any) -> None:
    raise _TooLong


def give(command: Command, house: Path) -> Answer:
    """Run a command in a house; what it prints is compared without the house's own path and without times."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    words = [str(house / word) if (house / word).exists() or word == "out" else word for word in command.words[1:]]
    words = [command.words[0], *words]
    words = [f"init={house / word[5:]}" if word.startswith("init=") else word for word in words]
    fault, status = "", -1
    old = signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(SECONDS)
    try:
        with _quiet() as (out, err), mock.patch("matplotlib.figure.Figure.savefig", _no_picture):
            status = main(words)
    except _TooLong:
        fault = "hang"
    except SystemExit as error:
        status = int(error.code or 0) if not isinstance(error.code, str) else 1
    except BaseException:
        fault = "traceback"
        err.write(traceback.format_exc())
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 > MEMORY:
        fault = fault or "memory"
    result = out.getvalue() + (command.leaves(house) if not fault and status == 0 else "")
    said = err.getvalue().replace(str(house), "HOUSE")
    if "Traceback (most recent call last)" in said:
        fault = fault or "traceback"
    return Answer(status, said, plain(result.replace(str(house), "HOUSE")), fault)


def plain(text: str) -> str:
    """Without times and rates of this process, which differ from one call to the next."""
    text = re.sub(r"[\d.,]+ ?(s|ms|min|tok/s|tokens/s)\b|\d{4}-\d\d-\d\d( \d\d:\d\d(:\d\d)?)?", "TIME", text)
    return re.sub(r"\s+", " ", text)  # columns are as wide as what is in them


class Harness:
    """Houses to damage, and what each command says in an untouched one."""

    def __init__(self, root: Path) -> None:
        self.house, self.pristine = House(root / "house").root, root / "pristine"
        shutil.copytree(self.house, self.pristine)
        self.usual = {command.name: give(command, self.fresh()) for command in COMMANDS}
        for name, answer in self.usual.items():
            assert answer.status == 0, (name, answer)
            assert not answer.fault, (name, answer)

    def fresh(self) -> Path:
        """The house as it was, at the place where it was built: runs know where their corpus is."""
        shutil.rmtree(self.house)
        return Path(shutil.copytree(self.pristine, self.house))

    def given(self, name: str) -> Answer:
        return give(next(command for command in COMMANDS if command.name == name), self.house)

    def case(self, number: int) -> tuple[str, str, Answer]:
        """What becomes of case `number`: a class, what was done, and the answer."""
        draw = random.Random(number)
        command, house = COMMANDS[number % len(COMMANDS)], self.fresh()
        found = [p for p in sorted(house.rglob("*")) if p.is_file() and p.name != "run.lock"]
        path = draw.choice([p for p in found if str(p.relative_to(house)).startswith(command.reads)])
        done = f"{command.name}: {path.relative_to(house)}: {mutation(path)(path, draw)}"
        answer = give(command, house)
        usual = self.usual[command.name]
        if answer.fault:
            verdict = answer.fault
        elif answer.status:
            sentences = [line for line in answer.said.splitlines() if line.startswith("stepformer")]
            verdict = "refused" if sentences else "without a sentence"
        elif answer.said != usual.said:
            verdict = "noted"
        else:
            verdict = "same" if answer.result == usual.result else "silent"
        return verdict, done, answer


def count(first: int, last: int) -> tuple[Counter[str], list[str]]:
    """Classes of cases and the stories of bad ones."""
    classes: Counter[str] = Counter()
    bad = []
    with tempfile.TemporaryDirectory() as root:
        harness = Harness(Path(root))
        for number in range(first, last):
            verdict, done, answer = harness.case(number)
            classes[verdict] += 1
            if verdict in (*BAD, "without a sentence"):
                bad.append(f"case {number}: {verdict}: {done}: {answer.said.strip()[-600:]}")
                print(bad[-1], file=sys.stderr, flush=True)
    return classes, bad


if __name__ == "__main__":
    span = [int(word) for word in sys.argv[1:]]
    found, _ = count(span[0], span[1] if len(span) > 1 else span[0] + 1)
    print("  ".join(f"{name}: {number:,}" for name, number in sorted(found.items())))
