"""What a report asks the trained models: their coefficients and some text, kept so that it is asked only once."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from stepformer.base.errors import InputError, StepformerError
from stepformer.data.corpus import Corpus
from stepformer.measure.measured import Journal
from stepformer.pages.reports.collect import RunData
from stepformer.training import load_run
from stepformer.training.checkpoints import Checkpoints
from stepformer.training.loading import LoadedRun
from stepformer.training.text import readable

PROMPTS = 3
PROMPT_WORDS = 5
READ_TOKENS = 200_000  # of the validation split, in search of beginnings of documents


@dataclass(frozen=True)
class Drawing:
    """How text is drawn; the same seed for every run and prompt."""

    tokens: int = 120
    temperature: float = 0.8
    seed: int = 0


@dataclass
class Samples:
    """Texts by prompt and run: `texts[prompt][label]`; a run that could not write has a sentence instead."""

    prompts: list[str]
    drawing: Drawing
    texts: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def first_of_each(runs: Iterable[RunData]) -> list[RunData]:
    """One run for every label, the first: text from every seed would fill the page and say little more."""
    found: dict[str, RunData] = {}
    return [found.setdefault(run.label, run) for run in runs if run.label not in found]


def default_prompts(runs: Sequence[RunData]) -> tuple[list[str], list[str]]:
    """The first words of some validation documents of the first run's corpus, and notes.

    They leave most of the smallest context for the text; without the corpus a new document is the only prompt.
    """
    context = min((run.config.model.context for run in runs if run.config), default=16)
    try:
        corpus = Corpus(Path(str(runs[0].facts["corpus"]["folder"])))
        tokenizer, split = corpus.tokenizer, corpus.split("val")
        tokens = split.tokens(0, min(len(split), READ_TOKENS)).tolist()
    except (StepformerError, KeyError, TypeError, OSError):
        return [""], ["The corpus is not where the run found it: text begins with a new document."]
    found: list[str] = []
    for ended, document in itertools.groupby(tokens, lambda token: token == tokenizer.eot):
        words = [] if ended else tokenizer.decode(list(itertools.islice(document, 200))).split()[:PROMPT_WORDS]
        while words and len(tokenizer.encode(" ".join(words))) > max(1, context // 3):
            words.pop()
        if words and " ".join(words) not in found:
            found.append(" ".join(words))
        if len(found) == PROMPTS:
            break
    return found or [""], []


def ask_models(
    runs: Sequence[RunData],
    samples: Samples | None,
    cache: Path,
    *,
    device: str = "auto",
    progress: Callable[[int], None] = lambda amount: None,
) -> None:
    """Fill in coefficients of every run, and texts of the first of each label, from the cache or the checkpoints."""
    journal = Journal(cache / "models.jsonl", {"what": "coefficients and texts of runs"})
    writers = {id(run) for run in first_of_each(runs)}
    for run in runs:
        asked = samples if id(run) in writers else None
        try:
            _ask(run, asked, journal, device)
        except (StepformerError, SafetensorError, OSError) as error:  # a damaged file, or one that is gone by now
            problem = str(error).splitlines()[0]
            run.notes.append(f"Its model could not be asked: {problem}")
            if asked:
                asked.problems[run.label] = problem
        progress(1)


def _ask(run: RunData, samples: Samples | None, journal: Journal, device: str) -> None:
    kept = Checkpoints(run.folder / "checkpoints")
    name = next((names[-1] for kind in ("best", "step") if (names := kept.names(kind))), None)
    if name is None:
        raise InputError("the run has no checkpoint.")
    key = [str(run.facts.get("id") or run.folder.resolve()), name]

    @functools.cache
    def model() -> LoadedRun:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*has no best checkpoint yet")  # that is known here
            return load_run(run.folder, device=device)

    run.coefficients = journal.get(json.dumps([*key, "coefficients"]), lambda: model().model.coefficients())
    if samples is None:
        return
    for prompt in samples.prompts:
        settings = [prompt, *dataclasses.astuple(samples.drawing)]
        text = journal.get(json.dumps([*key, *settings]), functools.partial(_text, model, prompt, samples.drawing))
        samples.texts.setdefault(prompt, {})[run.label] = text


def _text(load: Callable[[], LoadedRun], prompt: str, drawing: Drawing) -> str:
    """What a run writes after a prompt, up to the end of the document."""
    run = load()
    ids = [run.tokenizer.eot, *map(int, run.tokenizer.encode(prompt))]
    if len(ids) > run.config.model.context:
        raise InputError(f"the prompt has {len(ids)} tokens, the context is {run.config.model.context}.")
    settings: dict[str, Any] = {"temperature": drawing.temperature, "seed": drawing.seed}
    settings |= {"max_new_tokens": drawing.tokens, "stop": run.tokenizer.eot, "on_context_end": "slide"}
    return readable(run, run.model.generate([ids], **settings).tokens[0])
