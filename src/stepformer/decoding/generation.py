"""Whole texts from a model, sampled or by beam search."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from stepformer.base.errors import InputError
from stepformer.decoding.beams import beam_search
from stepformer.decoding.sampling import Decodes, Generation, Prompts, stream


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
    """Continue one prompt or several of different length; `decoding.sampling.stream` explains the settings.

    With `beams` nothing is drawn: each prompt gets its best continuation by beam search (`decoding.beams`).
    """
    if beams is not None:
        if temperature != 1.0 or (top_k, top_p, seed) != (None, None, None):
            raise InputError("Beam search draws nothing: temperature, top_k, top_p and seed do not go with beams.")
        return beam_search(
            model,
            prompts,
            beams=beams,
            length_penalty=length_penalty,
            max_new_tokens=max_new_tokens,
            stop=stop,
            on_context_end=on_context_end,
        )
    if length_penalty != 1.0:
        raise InputError(f"length_penalty = {length_penalty} ranks beams: it needs `beams`.")
    result = Generation([], [])
    steps = stream(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop,
        seed=seed,
        on_context_end=on_context_end,
        result=result,
    )
    for _ in steps:
        pass
    return result
