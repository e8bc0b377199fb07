"""Text from a model: greedy, temperature, top-k and top-p sampling with cached decoding, in batches, as a stream."""

from __future__ import annotations

import contextlib
import math
import operator
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stepformer.base.errors import InputError, StepformerError, StepformerWarning
from stepformer.base.settings import is_number, plain
from stepformer.decoding.cache import Cache
from stepformer.ops import kernels
from stepformer.ops.tables import check_ids

Prompts = Tensor | Sequence[int] | Sequence[Sequence[int]]
Finish = Literal["length", "stop", "context"]
NOT_FINITE = "The model's logits are not finite: no token can be chosen by them."


class Sampling(NamedTuple):
    """How a token is drawn (`stream`)."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None


class Steps(Protocol):
    """Decoding steps that were recorded for a batch of prompts."""

    capacity: int
    generator: torch.Generator

    def reads(self, rows: list[list[int]]) -> bool: ...
    def after(self, rows: list[list[int]], count: int) -> Generator[list[int], None, None]: ...
    def stretch(self, cache: Cache, logits: Tensor, count: int) -> Generator[list[int], None, None]: ...


class Decodes(Protocol):
    """What a model must be for its text to be drawn: `stepformer.Model` is."""

    config: Any
    training: bool

    @property
    def __call__(self) -> Callable[..., Any]: ...
    def eval(self) -> Any: ...
    def train(self, mode: bool = True) -> Any: ...
    @property
    def device(self) -> torch.device: ...
    def new_cache(self, batch: int, capacity: int | None = None) -> Cache: ...
    def recorded_steps(
        self, batch: int, longest: int, max_new_tokens: int, sampling: Sampling
    ) -> tuple[contextlib.AbstractContextManager[Steps] | None, str | None]: ...


@dataclass
class Generation:
    """The new tokens of every prompt, and why each one ended.

    "stop": a stop token (it is the last of `tokens`); "length": `max_new_tokens` reached; "context": the model's
    context is full (see `on_context_end`). `scores`: what beam search ranks by (beams.py), else empty.
    `ordinary`: why `stream` did not decode them by recorded steps (model/engines/steps.py), None if it did.
    """

    tokens: list[list[int]]
    finish: list[Finish]
    scores: list[float] = field(default_factory=list)
    ordinary: str | None = None


@torch.no_grad()
def stream(
    model: Decodes,
    prompts: Prompts,
    *,
    max_new_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | Collection[int] | None = None,
    seed: int | None = None,
    on_context_end: Literal["stop", "slide"] = "stop",
    result: Generation | None = None,
    look: Callable[[Tensor], None] | None = None,
) -> Iterator[list[int | None]]:
    """Continue prompts token by token: yields one id per prompt, None for rows that have ended.

    temperature 0 is greedy; `top_k` keeps the k most likely tokens, `top_p` the smallest set of that probability.
    Ids that only pad the vocabulary are never sampled. `stop` is a token, or several, that end a row. When the
    context is full, "stop" ends the row with finish reason "context", and "slide" goes on with the later half of the
    context re-encoded; of a prompt that is longer than the context it reads the end. Pass a `Generation` as `result`
    to have it filled with the tokens and the finish reasons.
    `look` is shown the logits (B, V) of every step before its tokens are drawn. On CUDA a recorded step decodes
    (model/engines/steps.py) where it can; the tokens are the same, `result` says which way they took.
    """
    max_new_tokens, temperature, top_k, top_p, seed = map(plain, (max_new_tokens, temperature, top_k, top_p, seed))
    rows, stops, sampling = as_rows(prompts), as_stops(stop), Sampling(temperature, top_k, top_p)
    check_settings(model, rows, max_new_tokens, on_context_end, sampling)
    rows = [row[-model.config.context :] for row in rows]
    if seed is not None and not (isinstance(seed, int) and -(2**63) <= seed < 2**63):
        raise InputError(f"seed = {seed!r} should be an integer that fits in 64 bits.")
    result = Generation([], []) if result is None else result
    result.tokens[:] = [[] for _ in rows]
    result.finish[:] = ["length"] * len(rows)
    context, active, made = model.config.context, [True] * len(rows), 0
    with contextlib.ExitStack() as held:
        held.callback(model.train, model.training)
        model.eval()
        decoder: Steps | None = None
        result.ordinary = "somebody looks at the logits of every step"
        if look is None:
            decoder, result.ordinary = recorded(model, rows, max_new_tokens, sampling, held)
        capacity = min(context, max(map(len, rows)) + max_new_tokens) if decoder is None else decoder.capacity
        generator = torch.Generator(model.device) if decoder is None else decoder.generator
        generator.seed() if seed is None else generator.manual_seed(seed)

        def ordinary(cache: Cache, logits: Tensor, count: int) -> Generator[list[int], None, None]:
            """Launches every kernel of every step and waits for the tokens of each."""
            for i in range(count):
                last = logits[:, -1]
                check_finite(last)
                if look is not None:
                    look(last)
                ids = sample(last, model.config.real_vocab, *sampling, generator)
                yield ids.tolist()
                if i + 1 < count:
                    logits = model(ids[:, None], cache=cache).logits

        while True:
            # the logits after a full context still give a token
            count = min(max_new_tokens - made, context - max(map(len, rows)) + 1)
            if decoder is not None and decoder.reads(rows):
                found = decoder.after(rows, count)
            else:
                stretch = ordinary if decoder is None else decoder.stretch  # without a look at stop tokens
                found = stretch(*encode(model, rows, capacity), count)
            with contextlib.closing(found) as steps:
                for ids in steps:
                    step = [token if alive else None for token, alive in zip(ids, active, strict=True)]
                    for b, token in enumerate(step):
                        if token is not None:
                            rows[b].append(token)
                            result.tokens[b].append(token)
                            if token in stops:
                                active[b], result.finish[b] = False, "stop"
                    yield step
                    if not any(active):
                        return
            made += count
            if made == max_new_tokens:
                return
            # Some row fills the context: it slides or ends; rows that have ended shrink to one token, the rest stay.
            for b, row in enumerate(rows):
                if active[b] and len(row) > context:
                    if on_context_end == "slide":
                        rows[b] = row[-max(1, context // 2) :]
                    else:
                        active[b], result.finish[b] = False, "context"
            if not any(active):
                return
            rows = [row if alive else row[:1] for row, alive in zip(rows, active, strict=True)]
            capacity = context


def recorded(
    model: Decodes, rows: list[list[int]], max_new_tokens: int, sampling: Sampling, held: contextlib.ExitStack
) -> tuple[Steps | None, str | None]:
    """Recorded steps of a model, used until `held` is closed; or why there are none."""
    wanted, reason = model.recorded_steps(len(rows), max(map(len, rows)), max_new_tokens, sampling)
    if wanted is None:
        return None, reason
    try:
        return held.enter_context(wanted), None
    except kernels.failures() as error:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a device that is lost says so here, and not as a reason to go on without it
        return None, f"recording its step failed: {error}"


def encode(model: Decodes, rows: list[list[int]], capacity: int) -> tuple[Cache, Tensor]:
    """A fresh cache holding all rows, and the logits after each row's last token."""
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    cache = model.new_cache(len(rows), max(capacity, tokens.shape[1]))
    return cache, model(tokens.to(model.device), cache=cache, lengths=lengths, last_only=True).logits


def sample(
    logits: Tensor,
    real_vocab: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one id per row from logits (B, V); ids from `real_vocab` on are never drawn."""
    if temperature == 0:
        return logits[:, :real_vocab].float().argmax(dim=-1)
    p = probabilities(logits, real_vocab, temperature, top_k, top_p)
    return torch.multinomial(p, 1, generator=generator)[:, 0]


def probabilities(
    logits: Tensor, real_vocab: int | None, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """What `sample` draws from, (B, real_vocab), at a temperature above 0."""
    logits = logits[:, :real_vocab].float()
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # the maximum stays finite at any temperature
    if top_k is not None and top_k < logits.shape[-1]:
        values, kept = logits.topk(top_k, dim=-1)  # exactly k, whatever the ties
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, values)
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        p = ordered.softmax(dim=-1)
        beyond = p.cumsum(dim=-1) - p >= top_p  # the token that crosses top_p still belongs to the set
        logits = logits.scatter(-1, order, ordered.masked_fill(beyond, -torch.inf))
    return logits.softmax(dim=-1)


def as_rows(prompts: Prompts) -> list[list[int]]:
    """Any accepted form of prompts as a list of token lists."""
    given: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    given = [given] if isinstance(given, int) else given
    try:
        given = [given] if len(given) and isinstance(given[0], int | str) else given
        if any(isinstance(t, str) for row in given for t in row):
            raise InputError("Prompts are token ids, not text: encode the text with the model's tokenizer first.")
        rows = [[operator.index(t) for t in row] for row in given]
    except TypeError:
        raise InputError("Prompts are token ids, integers: a row of them, several rows, or a tensor.") from None
    if not rows or any(not row for row in rows):
        raise InputError(
            "Every prompt needs at least one token; begin with the end-of-text token to start from nothing."
        )
    return rows


def as_stops(stop: int | Collection[int] | Tensor | None) -> frozenset[int]:
    """Stop tokens in any form (an id, several, a tensor or array of them) as a set of ints."""
    given: Any = () if stop is None else stop
    given = given.tolist() if hasattr(given, "tolist") else given
    try:
        return frozenset(map(operator.index, given if isinstance(given, Collection) else [given]))
    except TypeError:
        raise InputError(f"stop = {given!r} should be a token id, or several.") from None


def check_finite(logits: Tensor) -> None:
    if not bool(logits.isfinite().all()):
        raise StepformerError(NOT_FINITE)


def check_settings(
    model: Decodes, rows: list[list[int]], max_new_tokens: int, on_context_end: str, sampling: Sampling
) -> None:
    temperature, top_k, top_p = sampling
    context = model.config.context
    check_ids(torch.tensor([t for row in rows for t in row]), model.config.vocab_size)
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InputError(f"max_new_tokens = {max_new_tokens!r} should be an integer, at least 1.")
    if not (is_number(temperature) and 0 <= temperature < math.inf):
        raise InputError(f"temperature = {temperature!r} should be 0 (greedy) or above.")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
        raise InputError(f"top_k = {top_k!r} should be an integer, at least 1.")
    if top_p is not None and not (is_number(top_p) and 0 < top_p <= 1):
        raise InputError(f"top_p = {top_p!r} should lie in (0, 1].")
    if on_context_end not in ("stop", "slide"):
        raise InputError(f"on_context_end = '{on_context_end}' should be 'stop' or 'slide'.")
    if (longest := max(map(len, rows))) > context:
        said = (
            f"{'The' if len(rows) == 1 else 'A'} prompt has {longest:,} tokens, but the model's context is {context:,}"
        )
        if on_context_end == "stop":
            raise InputError(f"{said}.")
        warnings.warn(f"{said}: its last {context:,} are read.", StepformerWarning, stacklevel=3)
