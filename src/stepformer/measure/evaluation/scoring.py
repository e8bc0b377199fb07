"""Log-probabilities of given tokens under a model, in batches, without keeping logits that nobody asks for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stepformer.base.errors import InputError, StepformerError
from stepformer.measure import measured
from stepformer.model import Model, check_ids
from stepformer.training.checkpoints import weights_sha256
from stepformer.training.evaluation import autocasting
from stepformer.training.loading import LoadedRun

HEAD_TOKENS = 1024  # tokens whose logits exist at the same time: 200 MB at 50,304 ids


@dataclass(frozen=True)
class Part:
    """A row of tokens, of which the last `count` are scored, each with all before it as context."""

    row: Sequence[int]
    count: int

    def key(self) -> str:
        """Its name in a journal: another row or count has another."""
        return hashlib.sha256(f"{self.count}:{','.join(map(str, self.row))}".encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Score:
    """Log-probabilities (nats, fp64) of the scored tokens of a part, and whether each was the likeliest id."""

    log_probabilities: Tensor
    greedy: Tensor


@dataclass(frozen=True)
class Scorer:
    """Scores rows of at most context + 1 tokens. `micro_batch`: how many rows of full context at once."""

    model: Model
    autocast: torch.dtype | None = None
    micro_batch: int = 8

    def __post_init__(self) -> None:
        if self.micro_batch < 1:
            raise InputError(f"micro_batch = {self.micro_batch} should be at least 1.")

    def batches(self, parts: Sequence[Part]) -> Iterator[list[int]]:
        """Indices of parts that are scored together: the longest first, more of them where they are short."""
        order = sorted(range(len(parts)), key=lambda i: -len(parts[i].row))
        begin = 0
        while begin < len(order):
            width = len(parts[order[begin]].row) - 1
            room = max(1, self.micro_batch * self.model.config.context // max(1, width))
            yield order[begin : begin + room]
            begin += room

    @torch.no_grad()
    def score(self, parts: Sequence[Part]) -> list[Score]:
        """The scores of one batch. Rows are padded on the right, where a causal model does not look."""
        device = self.model.embed.tok_emb.weight.device
        for part in parts:
            if not 1 <= part.count < len(part.row):
                raise InputError(f"A row of {len(part.row)} tokens cannot have {part.count} scored ones.")
        tokens = pad_sequence([torch.tensor(part.row[:-1]) for part in parts], batch_first=True)
        counts = [part.count for part in parts]
        rows = torch.arange(len(parts)).repeat_interleave(torch.tensor(counts)).to(device)
        places = torch.cat([torch.arange(len(p.row) - 1)[-p.count :] for p in parts]).to(device)
        targets = torch.tensor([token for part in parts for token in part.row[-part.count :]])
        check_ids(tokens, self.model.config.vocab_size)
        check_ids(targets, self.model.config.vocab_size, "target")
        targets = targets.to(device)
        with autocasting(device, self.autocast):
            x = final_states(self.model, tokens.to(device))[rows, places]
        found, greedy = [], []
        for some, wanted in zip(x.split(HEAD_TOKENS), targets.split(HEAD_TOKENS), strict=True):
            with autocasting(device, self.autocast):
                logits = self.model.head(some)
            wide = logits if logits.dtype == torch.float64 else logits.float()
            found.append(-F.cross_entropy(wide, wanted, reduction="none").double().cpu())
            greedy.append((wide.argmax(dim=-1) == wanted).cpu())
        values = torch.cat(found)
        if not bool(values.isfinite().all()):
            raise StepformerError("The model gives probabilities that are not finite: nothing can be scored with it.")
        return list(map(Score, values.split(counts), torch.cat(greedy).split(counts)))


def final_states(model: Model, tokens: Tensor) -> Tensor:
    """x after the last layer, before the final norm and the head, (B, T, d)."""
    config = model.config
    if tokens.shape[1] > config.context:
        raise InputError(f"The sequence has {tokens.shape[1]} tokens, but the model's context is {config.context}.")
    call = model.call_of(tokens)
    state = model.start(tokens, call.positions)
    for i, block in enumerate(model.blocks):
        state = block(state, call, i in model.plain_layers)
    return state.x


def scorer_of(run: LoadedRun, micro_batch: int = 8) -> Scorer:
    """How a run is scored: in the precision it was trained in."""
    return Scorer(run.model, run.config.autocast_on(run.device), micro_batch)


def about_run(run: LoadedRun) -> dict[str, object]:
    """What decides a run's scores besides the text: goes into journals and results."""
    return {
        "weights": weights_sha256(dict(run.model.named_parameters())),
        "step": run.step,
        "context": run.model.config.context,
        "precision": run.config.precision_on(run.device),
        **measured.variant_of(run.model),
    }
