"""Our models as a model of the evaluation harness (lm_eval), in process and without conversion.

What decides a score follows the harness's Hugging Face backend: where a prompt is split into context and continuation,
what an empty context becomes, and that too long a prompt keeps its last context + 1 tokens.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stepformer.base.progress import counting, say
from stepformer.data.tokenizers import Tokenizer
from stepformer.decoding.sampling import Generation, stream
from stepformer.measure import measured
from stepformer.measure.evaluation.scoring import Part, Scorer
from stepformer.measure.evaluation.tasks import need
from stepformer.training.evaluation import autocasting

SEED = 1234  # of texts that are drawn
NEW_TOKENS = 256  # as in the harness, where a task does not say


@dataclass(frozen=True)
class Generating:
    """How a task wants text made: the keys of the harness's `generation_kwargs` that mean something here."""

    until: tuple[str, ...] = ()
    tokens: int = NEW_TOKENS
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Generating:
        """From a request. Greedy unless it asks for draws, by `do_sample` or by a temperature alone."""
        until = settings.get("until") or ()
        until = (until,) if isinstance(until, str) else tuple(word for word in until if word)
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        tokens = next((int(settings[name]) for name in names if settings.get(name) is not None), NEW_TOKENS)
        temperature = float(settings.get("temperature") or 0.0)
        drawn = settings.get("do_sample", temperature > 0)
        temperature = (temperature or 1.0) if drawn else 0.0
        return cls(until, tokens, temperature, settings.get("top_k") or None, settings.get("top_p") or None)

    def key(self, prompt: str) -> str:
        return hashlib.sha256(json.dumps([prompt, asdict(self)]).encode()).hexdigest()[:24]

    def cut(self, text: str) -> str:
        """The text before the first stop string."""
        for word in self.until:
            text = text.partition(word)[0]
        return text


@functools.cache
def adapter() -> Any:
    """The class; it is made on demand, because its base is the harness's."""
    base: Any = need("lm_eval.api.model").TemplateLM
    rolling_windows = need("lm_eval.utils").get_rolling_token_windows

    class StepformerLM(base):
        """A model, its tokenizer, and a journal that keeps what was scored."""

        def __init__(
            self, scorer: Scorer, vocabulary: Tokenizer, journal: measured.Journal | None = None, *, quiet: bool = True
        ) -> None:
            super().__init__()
            self.scorer, self.vocabulary, self.quiet, self.title = scorer, vocabulary, quiet, "scoring"
            self.journal = journal or measured.Journal()
            self.kept = self.journal.pieces
            self.cut = 0  # prompts that lost tokens on the left

        eot_token_id = property(lambda self: self.vocabulary.eot)
        max_length = property(lambda self: self.scorer.model.config.context)
        tokenizer_name = property(lambda self: self.vocabulary.fingerprint)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return self.vocabulary.encode(string)

        def asked_for(self, names: Iterable[str]) -> None:
            asked = set(names)
            earlier = len((asked & self.kept.keys()) - self.journal.used)
            text = f"{self.title} continues: {earlier:,} of {len(asked):,} requests were kept"
            say(text, quiet=self.quiet or not earlier)
            self.journal.used |= asked

        def keep(self, name: str, value: Any) -> None:
            self.journal.get(name, lambda: value)

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
            found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)  # the bar is ours
            return found

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
        ) -> list[tuple[float, bool]]:
            return self.add_up([self.parts(context, continuation) for _, context, continuation in requests])

        def parts(self, context: list[int], continuation: list[int]) -> list[Part]:
            """One row, cut on the left; none for an empty continuation.

            A continuation longer than the model's context stops the Hugging Face backend; here it is scored in windows.
            """
            room = self.max_length
            context = context or [self.eot_token_id]  # a prompt of blanks: they have gone to the continuation
            self.cut += len(context) + len(continuation) > room + 1
            if len(continuation) > room:
                return self.rolling(context[-1], continuation)
            return [Part((context + continuation)[-room - 1 :], len(continuation))] if continuation else []

        def rolling(self, prefix: int, tokens: list[int]) -> list[Part]:
            """Rows that score every token once, as the harness cuts them."""
            cut = rolling_windows(tokens, prefix, self.max_length, 1)
            return [Part([*inputs, predicted[-1]], len(predicted)) for inputs, predicted in cut]

        def add_up(self, requests: Sequence[Sequence[Part]]) -> list[tuple[float, bool]]:
            """Each request's log-likelihood, the sum over its parts, and whether greedy decoding would say it."""
            names = [[part.key() for part in parts] for parts in requests]
            rows = {part.key(): part for parts in requests for part in parts}
            self.asked_for(rows)
            todo = {name: part for name, part in rows.items() if name not in self.kept}
            order, waiting = list(todo), list(todo.values())
            with counting(self.title, len(rows), quiet=self.quiet) as count:
                count(len(rows) - len(todo))
                for batch in self.scorer.batches(waiting):
                    for i, found in zip(batch, self.scorer.score([waiting[i] for i in batch]), strict=True):
                        self.keep(order[i], [float(found.log_probabilities.sum()), bool(found.greedy.all())])
                    count(len(batch))
            values = [[self.kept[name] for name in keys] for keys in names]
            return [(math.fsum(v for v, _ in parts), all(greedy for _, greedy in parts)) for parts in values]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
            texts = [self.tok_encode(request.args[0]) for request in requests]
            return [value for value, _ in self.add_up([self.rolling(self.eot_token_id, text) for text in texts])]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
            """Requests with the same settings in batches, the longest first; drawn texts are not kept."""
            asked = [(str(request.args[0]), Generating.read(request.args[1])) for request in requests]
            made: dict[int, str] = {}
            with counting(self.title, len(asked), quiet=self.quiet) as count:
                for settings in dict.fromkeys(settings for _, settings in asked):
                    same = {i: settings.key(text) for i, (text, other) in enumerate(asked) if other == settings}
                    self.asked_for(same.values())
                    greedy = not settings.temperature
                    made |= {i: self.kept[name] for i, name in same.items() if greedy and name in self.kept}
                    waiting = sorted((i for i in same if i not in made), key=lambda i: -len(asked[i][0]))
                    count(len(same) - len(waiting))
                    for begin in range(0, len(waiting), self.scorer.micro_batch):
                        batch = waiting[begin : begin + self.scorer.micro_batch]
                        texts = self.continuations([asked[i][0] for i in batch], settings, SEED + begin)
                        for i, text in zip(batch, texts, strict=True):
                            made[i] = text
                            if greedy:
                                self.keep(same[i], text)
                        count(len(batch))
            return [made[i] for i in range(len(asked))]

        def continuations(self, prompts: Sequence[str], settings: Generating, seed: int) -> list[str]:
            """Text after each prompt up to a stop string, end of text, or the number of tokens asked for."""
            model, eot = self.scorer.model, self.eot_token_id
            new = settings.tokens if settings.tokens < self.max_length else max(1, self.max_length // 2)
            rows = [self.tok_encode(prompt)[new - self.max_length :] or [eot] for prompt in prompts]
            made, texts = Generation([], []), [""] * len(rows)
            with autocasting(model.embed.tok_emb.weight.device, self.scorer.autocast):
                drawn: dict[str, Any] = {key: getattr(settings, key) for key in ("temperature", "top_k", "top_p")}
                for _ in stream(model, rows, max_new_tokens=new, **drawn, stop=eot, seed=seed, result=made):
                    texts = [self.vocabulary.decode([t for t in row if t != eot]) for row in made.tokens]
                    rest = zip(texts, made.finish, strict=True)
                    if all(why == "stop" or settings.cut(text) != text for text, why in rest):
                        break
            return [settings.cut(text) for text in texts]

    return StepformerLM
