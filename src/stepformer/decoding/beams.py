"""Whole texts from a model: sampled, or by beam search.

That finds the likeliest continuation of every prompt among a few hypotheses, carried side by side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import torch

from stepformer.base.errors import InputError
from stepformer.base.settings import is_number, plain
from stepformer.decoding import sampling
from stepformer.decoding.sampling import Decodes, Finish, Generation, Prompts

MOST = 1024  # beams of a prompt


class Beam(NamedTuple):
    """A continuation of prompt number `prompt` that has not ended, and the sum of its tokens' log-probabilities."""

    prompt: int
    tokens: list[int]
    total: float


@torch.no_grad()
def beam_search(
    model: Decodes,
    prompts: Prompts,
    *,
    beams: int,
    length_penalty: float = 1.0,
    max_new_tokens: int = 100,
    stop: int | Collection[int] | None = None,
    on_context_end: Literal["stop", "slide"] = "stop",
) -> Generation:
    """Continue every prompt by the best of `beams` hypotheses; nothing is random.

    In each step the likeliest extensions of a prompt's beams survive, as many as it has beams. A survivor that ends
    (as in `stream`: a stop token, `max_new_tokens` or the context's end) gives its beam up, so one beam is greedy
    decoding. The one with the best score, log-probability / tokens**length_penalty, is returned: 0 ranks by
    probability, which favours short texts, 1 by the mean over tokens. Ids that only pad the vocabulary do not exist.
    """
    max_new_tokens, beams, length_penalty = map(plain, (max_new_tokens, beams, length_penalty))
    rows = sampling.as_rows(prompts)
    sampling.check_settings(model, rows, max_new_tokens, on_context_end, sampling.Sampling())
    if not isinstance(beams, int) or not 1 <= beams <= MOST:
        raise InputError(f"beams = {beams!r} should be an integer, at least 1 and at most {MOST:,}.")
    if not (is_number(length_penalty) and abs(length_penalty) <= 10):
        raise InputError(f"length_penalty = {length_penalty!r} should lie between -10 and 10.")
    if on_context_end == "slide":
        raise InputError(
            "Beams cannot slide, since scores compare whole texts: use on_context_end = 'stop' with beams."
        )
    stops, context = sampling.as_stops(stop), model.config.context

    def ending(prompt: list[int], tokens: list[int]) -> Finish | None:
        if tokens[-1] in stops:
            return "stop"
        if len(tokens) == max_new_tokens:
            return "length"
        return "context" if len(prompt) + len(tokens) > context else None

    result = Generation([[] for _ in rows], ["length"] * len(rows), [-torch.inf] * len(rows))
    live = [Beam(b, [], 0.0) for b in range(len(rows))]  # beam i is row i of the cache
    widths = [beams] * len(rows)
    with contextlib.ExitStack() as held:
        held.callback(model.train, model.training)
        model.eval()
        cache, logits = sampling.encode(model, rows, min(context, max(map(len, rows)) + max_new_tokens))
        while True:
            sampling.check_finite(logits)
            log_p = logits[:, -1, : model.config.real_vocab].double().log_softmax(dim=-1)
            best = log_p.topk(min(beams, log_p.shape[-1]), dim=-1)
            extensions: list[list[tuple[float, int, int]]] = [[] for _ in rows]
            for i, (values, ids) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
                extensions[live[i].prompt] += [(live[i].total + v, i, t) for v, t in zip(values, ids, strict=True)]
            parents, survivors = [], []
            for b, row in enumerate(rows):
                for total, i, token in sorted(extensions[b], key=lambda e: -e[0])[: widths[b]]:
                    tokens = [*live[i].tokens, token]
                    reason = ending(row, tokens)
                    if reason is None:
                        parents.append(i)
                        survivors.append(Beam(b, tokens, total))
                        continue
                    widths[b] -= 1
                    score = total / len(tokens) ** length_penalty
                    if score > result.scores[b]:
                        result.tokens[b], result.finish[b], result.scores[b] = tokens, reason, score
            if not survivors:
                return result
            live = survivors
            cache.select(torch.tensor(parents, device=logits.device))
            last = torch.tensor([[beam.tokens[-1]] for beam in live], device=logits.device)
            logits = model(last, cache=cache).logits


def generate(
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
    beams: int | None = None,
    length_penalty: float = 1.0,
) -> Generation:
    """Continue one prompt or several of different length.

    Args:
        model: A model; as its method, `model.generate(prompts)`, it is the model itself.
        prompts: Ids of one prompt, or of several.
        max_new_tokens: After so many a row ends.
        temperature: 0 is greedy.
        top_k: Draw from the k most likely tokens.
        top_p: Draw from the smallest set of tokens that has this probability.
        stop: A token, or several, that end a row.
        seed: Of the draws.
        on_context_end: When the context is full: end the row, or go on with its later half encoded again ("slide").
        beams: Draw nothing, and give each prompt its best continuation by a search with so many beams.
        length_penalty: Beams are ranked by their log-probability divided by length to this power.

    Examples:
        >>> import stepformer as sf
        >>> model = sf.build("yurii", size="tiny", seed=0)
        >>> [len(row) for row in model.generate([[72, 101], [84]], max_new_tokens=3, seed=0).tokens]
        [3, 3]
    """
    shared: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": stop, "on_context_end": on_context_end}
    if beams is not None:
        if temperature != 1.0 or (top_k, top_p, seed) != (None, None, None):
            raise InputError("Beam search draws nothing: temperature, top_k, top_p and seed do not go with beams.")
        return beam_search(model, prompts, beams=beams, length_penalty=length_penalty, **shared)
    if length_penalty != 1.0:
        raise InputError(f"length_penalty = {length_penalty} ranks beams: it needs `beams`.")
    drawing: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    result = Generation([], [])
    for _ in sampling.stream(model, prompts, **shared, **drawing, result=result):
        pass
    return result
