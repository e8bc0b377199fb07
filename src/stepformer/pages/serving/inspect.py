"""What a model thinks of a text, token by token: pure functions behind the page of `stepformer serve`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepformer.base.errors import InputError
from stepformer.data.tokenizers import Tokenizer
from stepformer.decoding.sampling import check_finite
from stepformer.model import Model

ALTERNATIVES = 5
ROWS = 64  # positions whose probabilities are held in fp64 at once


@dataclass(frozen=True)
class Prediction:
    """What a model expected at one place, in fp64, and how the token that stands there fared.

    Probabilities are of the softmax over all logits, as in the loss; ids that only pad the vocabulary take part in it
    but are no alternatives. `rank` 1 is the likeliest token. Log-probability and entropy are in nats.
    """

    logprob: float
    rank: int
    entropy: float
    alternatives: tuple[tuple[int, float], ...]  # ids and their probabilities, likeliest first


@dataclass(frozen=True)
class Reading:
    """A text as a model reads it: a prediction for every token, and the attention's entropy by layer.

    `attention[layer][t]` is the mean over heads, in nats, at the position that predicts token t; None for a layer whose
    attention does not report it.
    """

    predictions: tuple[Prediction, ...]
    attention: tuple[tuple[float, ...] | None, ...]

    @property
    def nats(self) -> float:
        return -math.fsum(prediction.logprob for prediction in self.predictions)


def predictions(
    logits: Tensor, tokens: Tensor, real_vocab: int | None = None, top: int = ALTERNATIVES
) -> Iterator[Prediction]:
    """One prediction for each row of logits (T, V) and the token (T,) that follows it."""
    check_finite(logits)
    for rows, ids in zip(logits.split(ROWS), tokens.split(ROWS), strict=True):
        logp = rows.double().log_softmax(dim=-1)
        own = logp.gather(-1, ids[:, None])
        real = logp[:, :real_vocab]
        values, best = real.topk(min(top, real.shape[-1]), dim=-1)
        ranks = (real > own).sum(dim=-1) + 1
        entropy = -(logp.exp() * logp).sum(dim=-1)
        for i in range(len(rows)):
            likeliest = zip(best[i].tolist(), values[i].exp().tolist(), strict=True)
            yield Prediction(own[i].item(), int(ranks[i]), entropy[i].item(), tuple(likeliest))


@torch.no_grad()
def read(model: Model, tokens: Sequence[int]) -> Reading:
    """How a model reads tokens; the first one (the end of the document before) is given, all others are predicted."""
    if len(tokens) < 2:
        raise InputError("There is no text to read: give at least one token.")
    row = torch.tensor([list(tokens)], device=model.embed.tok_emb.weight.device)
    logits = model(row[:, :-1]).logits[0]
    found = tuple(predictions(logits, row[0, 1:], model.config.real_vocab))
    return Reading(found, attention_entropy(model, row[:, :-1]))


def attention_entropy(model: Model, tokens: Tensor) -> tuple[tuple[float, ...] | None, ...]:
    """The attention's entropy at each position of one row (1, T), by layer: the mean over its calls and heads."""
    layers = (seen.get("entropy") for seen in model.observe(tokens))
    return tuple(tuple(torch.stack(c).double().mean(dim=(0, 1, 2)).tolist()) if c else None for c in layers)


def differences(first: Reading, second: Reading) -> list[float]:
    """By how many nats the first is more certain of each token than the second."""
    return [a.logprob - b.logprob for a, b in zip(first.predictions, second.predictions, strict=True)]


def summary(readings: Sequence[Reading], size: int) -> dict[str, Any]:
    """Loss of each reading of one text of `size` bytes, and of how many tokens each of two is more certain."""
    count = len(readings[0].predictions)
    sides = [
        {"nats": r.nats, "nats_per_token": r.nats / count, "bits_per_byte": r.nats / (size * math.log(2))}
        for r in readings
    ]
    found: dict[str, Any] = {"tokens": count, "bytes": size, "sides": sides}
    if len(readings) == 2:
        apart = differences(*readings)
        surer = [sum(d > 0 for d in apart), sum(d < 0 for d in apart)]
        found |= {"surer": surer, "even": count - sum(surer)}
    return found


def token_view(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    """A token for the eye: its text; bytes that are a part of a character, or not printable, as escapes."""
    if token == tokenizer.eot:
        return {"id": token, "text": "", "special": "end of text"}
    if not 0 <= token < tokenizer.vocab_size:
        return {"id": token, "text": "", "special": f"token {token}"}
    piece = tokenizer.piece(token)
    text = piece.decode("utf-8", "backslashreplace")
    # an ASCII character that cannot be seen is written as the byte that it is
    signs = {c: c.encode("ascii", "backslashreplace").decode() if c > "\x7f" else f"\\x{ord(c):02x}" for c in text}
    text = "".join(c if c.isprintable() or c in "\n\t" else signs[c] for c in text)
    view = {"id": token, "text": text}
    return view if text.encode() == piece else {**view, "escaped": True}


def prediction_view(tokenizer: Tokenizer, prediction: Prediction) -> dict[str, Any]:
    """A prediction as the page gets it."""
    return {
        "logprob": prediction.logprob,
        "probability": math.exp(prediction.logprob),
        **vars(prediction),
        "alternatives": [{**token_view(tokenizer, token), "probability": p} for token, p in prediction.alternatives],
    }


def comparison(tokenizer: Tokenizer, tokens: Sequence[int], readings: Sequence[Reading], size: int) -> dict[str, Any]:
    """Everything that the page shows about a text: its tokens, how each model read them, and the summary."""
    rows = []
    apart = differences(*readings) if len(readings) == 2 else None
    for t, token in enumerate(tokens[1:]):
        sides = [prediction_view(tokenizer, reading.predictions[t]) for reading in readings]
        for side, reading in zip(sides, readings, strict=True):
            side["attention"] = [layer and layer[t] for layer in reading.attention]
        row = {**token_view(tokenizer, token), "sides": sides}
        rows.append(row if apart is None else {**row, "difference": apart[t]})
    return {"tokens": rows, "summary": summary(readings, size)}
