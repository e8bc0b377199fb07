"""Text of a run: what its model makes of a prompt."""

from __future__ import annotations

from typing import Any

from stepformer.decoding.sampling import Generation, stream
from stepformer.training.loading import LoadedRun


def prompt_ids(run: LoadedRun, prompt: str) -> list[int]:
    """A new document that begins with the prompt."""
    return [run.tokenizer.eot, *(int(i) for i in run.tokenizer.encode(prompt))]


def readable(run: LoadedRun, tokens: list[int]) -> str:
    """The text of new tokens; a character may be spread over several of them, a last one not whole yet is left out."""
    text: str = run.tokenizer.decode([token for token in tokens if token != run.tokenizer.eot])
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


def continue_text(run: LoadedRun, prompt: str, **settings: Any) -> Any:
    """The prompt, then its continuation in pieces of whole characters, until the document ends."""
    ids = prompt_ids(run, prompt)
    made = Generation([], [])
    shown = ""
    steps = stream(run.model, [ids], stop=run.tokenizer.eot, on_context_end="slide", result=made, **settings)
    for number, _ in enumerate(steps):
        if number == 0 and prompt:  # not before the settings have been found good
            yield prompt
        whole = readable(run, made.tokens[0])
        yield whole[len(shown) :]
        shown = whole
