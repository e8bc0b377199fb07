"""The runs behind the page: their weights, one caller at a time, newer ones once there are any, and what may be asked
of them.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from stepformer.base.errors import InputError, StepformerError
from stepformer.data.corpus import TokenSplit
from stepformer.decoding.sampling import Generation, stream
from stepformer.pages.serving.inspect import Reading, prediction_view, predictions, read, token_view
from stepformer.pages.serving.watching import Tail, progress
from stepformer.training.checkpoints import Checkpoints
from stepformer.training.loading import LoadedRun, corpus_of, load_run
from stepformer.training.runs import RunFolder
from stepformer.training.text import prompt_ids, readable

WHICH = ("best", "last")
MOST_TOKENS = 4096  # in one request
LIMITS: dict[str, tuple[type | tuple[type, ...], float, float]] = {  # kind, least and most of each number
    "tokens": (int, 1, MOST_TOKENS),
    "temperature": ((int, float), 0, 100),
    "top_k": (int, 1, 1 << 30),
    "top_p": ((int, float), 0, 1),
    "seed": (int, -(2**63), 2**63 - 1),
    "number": (int, 0, 1 << 40),
}


class ServedRun:
    """A run folder and, once it has a checkpoint, its model. Whoever calls the model holds `lock`."""

    def __init__(self, path: Path, which: str = "best", device: str = "auto") -> None:
        self.folder, self.which, self.device = RunFolder(path), which, device
        record, self.config = self.folder.opened()
        self.tokenizer = self.folder.read_tokenizer(record)
        self.lock = threading.Lock()
        self.tail = Tail(self.folder.metrics)
        self.run: LoadedRun | None = None
        self.loaded: tuple[str, int] | None = None
        self._validation: TokenSplit | None = None

    @property
    def name(self) -> str:
        return self.folder.path.resolve().name

    @property
    def context(self) -> int:
        return self.config.model.context

    def newest(self) -> tuple[str, int] | None:
        """Kind ("best" or "last") and step of the checkpoint that `load` would take now."""
        kept = Checkpoints(self.folder.checkpoints)
        for which in ("best", "last") if self.which == "best" else ("last",):  # before the first best, the last
            if names := kept.names("best" if which == "best" else "step"):
                return which, int(names[-1].partition("-")[2])
        return None

    def load(self) -> tuple[str, int]:
        """Take the newest weights; returns their kind and step."""
        newest = self.newest()
        if newest is None:
            raise InputError(f"The run '{self.folder.path}' has no checkpoint yet.")
        try:
            self.run = load_run(self.folder.path, newest[0], self.device)
        except (OSError, SafetensorError) as error:
            raise StepformerError(f"The checkpoint of '{self.folder.path}' cannot be read: {error}.") from None
        self.loaded = (newest[0], self.run.step)
        return self.loaded

    def ready(self) -> LoadedRun:
        if self.run is None:
            raise InputError(f"The run '{self.name}' has no checkpoint yet: there is nothing to ask.")
        return self.run

    def facts(self) -> dict[str, Any]:
        """What the page says about the run."""
        loaded, newest = (
            found and dict(zip(("kind", "step"), found, strict=True)) for found in (self.loaded, self.newest())
        )
        return {
            "name": self.name,
            "title": self.config.title,
            "which": self.which,
            "loaded": loaded,
            "newer": None if newest == loaded else newest,
            "context": self.context,
            "tokenizer": self.tokenizer.name,
            "parameters": self.run and self.run.model.num_parameters(),
        }

    def progress(self) -> dict[str, Any]:
        return {"name": self.name, "title": self.config.title, **progress(self.folder, self.config, self.tail)}

    def text_ids(self, text: str, room: int) -> list[int]:
        """A document that is the text, after the end of another; every token of it has a place that predicts it."""
        ids = [self.tokenizer.eot, *self.tokenizer.encode(text)]
        if len(ids) == 1:
            raise InputError("There is no text: type some, or take a sample.")
        if len(ids) - 1 > room:
            raise InputError(f"The text has {len(ids) - 1:,} tokens, but there is room for {room:,}, the context.")
        return ids

    def read(self, ids: list[int]) -> Reading:
        return read(self.ready().model, ids)

    def sample(self, number: int, room: int) -> str:
        """A document of the validation split, or as much of its beginning as there is room for."""
        if self._validation is None:
            self._validation = corpus_of(self.ready()).split("val")
        return document(self._validation, self.tokenizer, number, room)

    def generate(self, prompt: str, **settings: Any) -> Generator[dict[str, Any], None, None]:
        """Each new token with what the model thought of it, then why the text ended; settings as in `stream`. The first
        one brings a note if only the end of the prompt was read.
        """
        run = self.ready()
        made, seen = Generation([], []), list[Tensor]()
        settings |= {"stop": run.tokenizer.eot, "on_context_end": "slide", "result": made, "look": seen.append}
        ids, room = prompt_ids(run, prompt), run.config.model.context
        said = f"The prompt has {len(ids):,} tokens, but the model's context is {room:,}: its last {room:,} are read."
        note = {"note": said} if len(ids) > room else {}
        for (token,) in stream(run.model, [ids[-room:]], **settings):
            drawn = torch.tensor([token], device=run.device)
            (found,) = predictions(seen.pop(), drawn, run.config.model.real_vocab)
            side = prediction_view(run.tokenizer, found)
            yield {**note, "token": {**token_view(run.tokenizer, int(drawn)), "side": side}}
            note = {}
        yield {"end": made.finish[0], "text": readable(run, made.tokens[0])}


def place(word: str, which: str) -> tuple[Path, str]:
    """Folder and checkpoint of RUN, RUN@best or RUN@last."""
    path, at, kind = word.rpartition("@")
    if at and not Path(word).is_dir():
        if kind not in WHICH:
            raise InputError(f"'{word}' asks for the checkpoint '{kind}': it is RUN@best or RUN@last.")
        return Path(path), kind
    return Path(word), which


def why_apart(runs: list[ServedRun]) -> str:
    """Why two runs cannot be compared token by token; empty if they can."""
    names = [f"{run.tokenizer.name} ({run.tokenizer.fingerprint})" for run in runs]
    if len(set(names)) < 2:
        return ""
    return (
        f"The two runs cannot be compared token by token: '{runs[0].name}' was trained with the tokenizer {names[0]}, "
        f"'{runs[1].name}' with {names[1]}."
    )


def document(split: TokenSplit, tokenizer: Any, number: int, room: int) -> str:
    """The document of a split that begins after a place that `number` decides; places are spread over the split."""
    begin = int(number * 0.6180339887498949 % 1 * len(split))
    span = split.tokens(begin, min(len(split), begin + 50 * room)).tolist()
    if tokenizer.eot in span[:-1]:
        span = span[span.index(tokenizer.eot) + 1 :]
    elif begin + len(span) == len(split):  # inside the last document: the first one, then
        span = split.tokens(0, min(len(split), room + 1)).tolist()
    ids = span[:room]
    if tokenizer.eot in ids:
        ids = ids[: ids.index(tokenizer.eot)]
    while True:
        text = str(tokenizer.decode(ids)).rstrip("\N{REPLACEMENT CHARACTER}")
        if len(tokenizer.encode(text)) <= room:  # cut inside a word, the rest may need more tokens than before
            return text
        ids.pop()


def text_of(body: dict[str, Any], name: str) -> str:
    value = body.get(name, "")
    if not isinstance(value, str):
        raise InputError(f"'{name}' should be text.")
    return value


def number_of(body: dict[str, Any], name: str, most: float | None = None) -> Any:
    """A number of the request, in its limits or from 0 to `most`; None when it is left out."""
    value = body.get(name)
    if value is None:
        return None
    limits: tuple[Any, float, float] = LIMITS[name] if most is None else (int, 0, most)
    kind, least, highest = limits
    if isinstance(value, bool) or not isinstance(value, kind):
        raise InputError(f"'{name}' should be a {'whole ' if kind is int else ''}number.")
    if not least <= value <= highest:
        raise InputError(f"'{name}' should lie between {least:g} and {highest:g}.")
    return value


def settings_of(body: dict[str, Any]) -> dict[str, Any]:
    """The settings of `generation.stream` that a request asks for."""
    known = {"side", "prompt", "tokens", "temperature", "top_k", "top_p", "seed"}
    if unknown := sorted(body.keys() - known):
        raise InputError(f"There is no setting '{unknown[0]}': there are {', '.join(sorted(known))}.")
    temperature = number_of(body, "temperature")
    return {
        "temperature": 0.8 if temperature is None else temperature,
        "max_new_tokens": number_of(body, "tokens") or 200,
        **{name: number_of(body, name) for name in ("top_k", "top_p", "seed")},
    }
