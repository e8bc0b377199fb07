"""Decoding at fixed shapes: a step that the device takes alone, recorded once as a CUDA graph and replayed per token.

Ordinary decoding asks the device for every token and launches every kernel from Python. Here the cache has a fixed
capacity, positions are tensors, keys beyond a row's position are masked, the token is chosen on the device and fed
back there. So one recording serves all steps; tokens are read a few steps behind, and what was decoded beyond a stop
token is dropped. The tokens are those of ordinary decoding: the same sums (another order on a GPU), the same draws.

`refusal` says why a generation takes the ordinary way; `STEPFORMER_KERNELS=off` or `kernels.off()` makes all do so.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stepformer import decoding_rows, kernels
from stepformer.decoding_rows import Numbers
from stepformer.errors import StepformerError
from stepformer.generation import NOT_FINITE, probabilities
from stepformer.model import Model
from stepformer.oracles.caches import Cache, Call, StateSlot, TokenSlot, within_documents
from stepformer.schemes.coefficients import CoefficientBank

FEWEST = 16  # new tokens that repay a recording
BEHIND = 4  # steps that the device may be ahead of the reader
WIDTH = 64  # capacities are multiples of it


class Sampling(NamedTuple):
    """How a token is drawn (`generation.stream`)."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None


class _Switch:
    """What `anywhere` changes."""

    anywhere = False


@contextlib.contextmanager
def anywhere() -> Iterator[None]:
    """Inside, fixed steps also run where nothing can be recorded, each one as it comes: for tests on a CPU."""
    before, _Switch.anywhere = _Switch.anywhere, True
    try:
        yield
    finally:
        _Switch.anywhere = before


def refusal(model: Model, max_new_tokens: int) -> str | None:
    """Why tokens of this model are decoded in the ordinary way now; None if its steps can be fixed."""
    weight = model.embed.tok_emb.weight
    if not kernels.switched_on():
        return "kernels are switched off"
    if not weight.is_cuda and not _Switch.anywhere:
        return f"there are no CUDA graphs on '{weight.device.type}'"
    if torch.is_autocast_enabled(weight.device.type):
        return "autocast would cast every weight in every step: decode a model in bf16 (model.to(torch.bfloat16))"
    if max_new_tokens < FEWEST and not _Switch.anywhere:
        return f"fewer than {FEWEST} tokens do not repay a recording"
    if any(type(p) is not nn.Parameter for p in model.parameters()):
        return "the weights are not plain tensors (sharded or quantised)"
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return "a hook wants to see every step"
    nowhere = torch.device("meta")
    slots = [block.attn.new_slot(1, 1, nowhere, weight.dtype) for block in model.blocks]
    strange = {type(slot).__name__ for slot in slots if type(slot) not in (TokenSlot, StateSlot)}
    if strange:
        return f"what {', '.join(sorted(strange))} remembers may change its shape"
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return "somebody else is recording a CUDA graph"
    return None


def capacity_for(longest: int, max_new_tokens: int, context: int) -> int:
    """How many tokens a fixed cache holds: all that may come, rounded up, and no more than the context."""
    return min(context, WIDTH * -(-(longest + max_new_tokens) // WIDTH))


class Decoder:
    """A model's decoding step at one batch size and capacity, with the memory that it works on.

    `stretch` decodes from a cache that holds the prompts. The model itself is not kept: only its weights' memory is,
    and `fits` asks whether they are still there. `unfused` says why its step has as many kernels as the model has
    operations; None if it is one of those in `decoding_rows`.
    """

    def __init__(
        self,
        model: Model,
        batch: int,
        capacity: int,
        sampling: Sampling,
        *,
        record: bool = True,
        compiled: bool = False,
    ) -> None:
        device = model.embed.tok_emb.weight.device
        self.batch, self.capacity, self.sampling, self.real_vocab = batch, capacity, sampling, model.config.real_vocab
        self.generator = torch.Generator(device)
        self.cache = model.new_cache(batch, capacity)
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.origins = torch.zeros(batch, dtype=torch.long, device=device)
        self.keys = torch.arange(capacity, device=device)
        self.out = torch.zeros(batch + 1, dtype=torch.long, device=device)  # the tokens, and whether logits are finite
        self.busy = False  # decoding for somebody
        self.weights = [*model.parameters(), *model.buffers()]
        self.held: list[Tensor] = []  # while it is busy, their memory, wherever the model may go meanwhile
        self.fingerprint = fingerprint(model)
        self.coefficients = {
            (bank, key): bank.value(key).detach().clone()
            for bank in model.modules()
            if isinstance(bank, CoefficientBank)
            for key in bank.specs
        }
        record = record and device.type == "cuda"
        self.behind = BEHIND if record else 0
        self.host = [torch.zeros(batch + 1, dtype=torch.long, pin_memory=record) for _ in range(self.behind + 1)]
        self.read = [torch.cuda.Event() for _ in self.host] if record else []
        # a recording knows addresses only, so what a step looks up is kept here
        self.numbers: Numbers | None = None
        self.angles: tuple[Tensor, Tensor] | None = None
        self.unfused = "it is compiled" if compiled else decoding_rows.refusal(model, batch)
        step: Any = FixedStep(model, self)
        if self.unfused is None:
            step = decoding_rows.RowStep(model, self)
            self.numbers, self.angles = step.numbers, step.angles
        elif compiled:
            kernels.prepare_compiler()
            step = torch.compile(step.__call__, fullgraph=True, dynamic=False)
        with self._constants():
            self.advance: Callable[[], None] = self._recorded(step) if record else step

    def fits(self, model: Model, batch: int, capacity: int, sampling: Sampling) -> bool:
        """Whether this decoder, as it is, decodes that."""
        same = (self.batch, self.sampling) == (batch, sampling) and self.capacity >= capacity
        return same and not self.busy and self.fingerprint == fingerprint(model)

    def _recorded(self, advance: Callable[[], None]) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries and kernels initialise themselves, which may not be recorded
            for _ in range(2):
                advance()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if self.sampling.temperature:
            graph.register_generator_state(self.generator)
        # other threads may go on using the device meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            advance()
        return graph.replay

    @contextlib.contextmanager
    def _constants(self) -> Iterator[None]:
        """The learned coefficients as the numbers they are: mapping each of them in every step would cost a kernel."""
        banks = {bank: bank.pinned for bank, _ in self.coefficients}
        try:
            for (bank, key), value in self.coefficients.items():
                bank.pinned = {**bank.pinned, key: value}
            yield
        finally:
            for bank, pinned in banks.items():
                bank.pinned = pinned

    def load(self, cache: Cache) -> None:
        """Begin where the prompts in another cache of this capacity end, with the weights as they are now."""
        if (cache.batch, cache.capacity) != (self.batch, self.capacity):
            raise StepformerError(
                f"A decoder of {self.batch} rows and {self.capacity} tokens cannot go on from a cache of "
                f"{cache.batch} rows and {cache.capacity} tokens."
            )
        for (bank, key), value in self.coefficients.items():
            value.copy_(bank.value(key))
        if self.numbers is not None:
            self.numbers.refresh()
        for mine, theirs in zip(self.cache.slots, cache.slots, strict=True):
            for slot, other in zip(mine, theirs, strict=True):
                for kept, given in zip(slot.tensors(), other.tensors(), strict=True):
                    kept.copy_(given)
        self.positions.copy_(cache.lengths[:, None])
        self.origins.copy_(cache.origins)

    def choose(self, logits: Tensor) -> None:
        """Draw the next tokens from logits (B, V), on the device and into the tensors of this decoder."""
        ids = draw(logits, self.real_vocab, self.sampling, self.generator)
        self.tokens.copy_(ids[:, None])
        self.out[:-1].copy_(ids)
        # the largest of all sizes is finite only if all are
        self.out[-1].copy_(torch.linalg.vector_norm(logits, math.inf).isfinite())

    def stretch(self, cache: Cache, logits: Tensor, count: int) -> Generator[list[int], None, None]:
        """`count` tokens of every row after the prompts in `cache`, whose last logits (B, 1, V) are given."""
        # the first token needs no step, and the last one is not stored: nobody runs ahead of the capacity
        if cache.longest + count - 1 > self.capacity:
            raise StepformerError(
                f"After {cache.longest} tokens a decoder of {self.capacity} cannot decode {count} more."
            )
        self.load(cache)
        self.choose(logits[:, -1])
        waiting: deque[int] = deque()
        for i in range(count):
            if i:
                self.advance()
            waiting.append(self._send(i % len(self.host)))
            if len(waiting) > self.behind:
                yield self._receive(waiting.popleft())
        while waiting:
            yield self._receive(waiting.popleft())

    def _send(self, place: int) -> int:
        self.host[place].copy_(self.out, non_blocking=True)
        if self.read:
            self.read[place].record()
        return place

    def _receive(self, place: int) -> list[int]:
        if self.read:
            self.read[place].synchronize()
        *ids, finite = self.host[place].tolist()
        if not finite:
            raise StepformerError(NOT_FINITE)
        return ids


class FixedStep:
    """One token per row through the model's own blocks, from the tensors of a decoder back into them."""

    def __init__(self, model: Model, decoder: Decoder) -> None:
        self.model, self.decoder = model, decoder

    def __call__(self) -> None:
        model, own = self.model, self.decoder
        positions = own.positions.clamp(max=own.capacity - 1)  # a step too many writes over the last token
        call = Call(positions, (own.keys <= positions[..., None])[:, None], 0, own.capacity, uniform=False)
        if model.config.document_separator is not None:
            call = within_documents(call, own.tokens == model.config.document_separator, own.origins)
        s = model.start(own.tokens, positions)
        for i, block in enumerate(model.blocks):
            slots = own.cache.slots[i]
            before = [slot.tensors() for slot in slots]
            s = block(s, replace(call, slots=slots), i in model.plain_layers)
            for slot, tensors in zip(slots, before, strict=True):
                if isinstance(slot, StateSlot):
                    slot.keep(tensors)
        if call.origins is not None:
            own.origins.copy_(call.origins[:, -1])
        own.positions += 1
        own.choose(model.head(s.x)[:, -1])


def draw(logits: Tensor, real_vocab: int | None, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One id per row, (B,): what `generation.sample` draws from the same generator, without asking the device."""
    if sampling.temperature == 0:
        return logits[:, :real_vocab].float().argmax(dim=-1)
    p = probabilities(logits, real_vocab, *sampling)
    # torch.multinomial draws one sample in this way, after looking at the values
    return (p / torch.empty_like(p).exponential_(1, generator=generator)).argmax(dim=-1)


def fingerprint(model: Model) -> tuple[object, ...]:
    """What a recording depends on besides the shapes: where the weights lie, and the settings of torch."""
    weights = tuple((t.data_ptr(), t.dtype) for t in (*model.parameters(), *model.buffers()))
    return (
        weights,
        model.plain_layers,
        kernels.switched_on(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_inference_mode_enabled(),
    )


_kept: WeakKeyDictionary[Model, Decoder] = WeakKeyDictionary()


@contextlib.contextmanager
def decoder_for(model: Model, batch: int, capacity: int, sampling: Sampling) -> Iterator[Decoder]:
    """The model's last decoder if it fits and nobody uses it, else a new one. Raises what recording raises."""
    decoder = _kept.get(model)
    if decoder is None or not decoder.fits(model, batch, capacity, sampling):
        decoder = Decoder(model, batch, capacity, sampling)
    decoder.busy, decoder.held = True, [weight.detach() for weight in decoder.weights]
    try:
        yield decoder
    finally:
        decoder.busy, decoder.held = False, []
        if decoder.read:  # recorded: it holds no reference to the model
            _kept[model] = decoder
