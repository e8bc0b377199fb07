"""Decoding at fixed shapes: a step that the device takes alone, recorded once as a CUDA graph and replayed per token.

Ordinary decoding asks the device for every token and launches every kernel from Python. Here the cache has a fixed
capacity, positions are tensors, keys beyond a row's position are masked, the token is chosen on the device and fed
back there. So one recording serves all steps; tokens are read some steps behind, and what was decoded beyond a stop
token is dropped. The tokens are those of ordinary decoding: the same sums (another order on a GPU), the same draws.

`refusal` says why a generation takes the ordinary way; `STEPFORMER_KERNELS=off` or `kernels.off()` makes all do so.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stepformer.base.errors import StepformerError
from stepformer.decoding.cache import Cache
from stepformer.decoding.sampling import NOT_FINITE, Sampling
from stepformer.model.backbone import Backbone
from stepformer.model.engines import fused
from stepformer.model.engines import rows as row_steps
from stepformer.model.engines.rows import SHORT, Memory
from stepformer.ops import kernels
from stepformer.ops.adapters import is_adapted
from stepformer.ops.dtypes import matmul_precision
from stepformer.ops.graphs import WARM_UP, Recorder
from stepformer.ops.slots import StateSlot, TokenSlot
from stepformer.rules.coefficients import Coefficient

FEWEST = 16  # new tokens that repay a recording
BEHIND = 4  # steps that the device may be ahead of the reader, where they are recorded one by one
SEVERAL = 8  # short steps that are recorded as one: launching and reading them one by one would take longer
WIDTH = 64  # capacities are multiples of it


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


def refusal(model: Backbone, max_new_tokens: int) -> str | None:
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
    if not kernels.may_replace(*model.modules()):
        return "a hook wants to see every step"
    if any(map(is_adapted, model.modules())):
        return "its adapters may be switched between two texts"
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return "somebody else is recording a CUDA graph"
    return structural(model)


def structural(model: Backbone) -> str | None:
    """Why an architecture cannot be decoded at fixed shapes, whatever it runs on."""
    nowhere = torch.device("meta")
    slots = [block.attn.new_slot(1, 1, nowhere, torch.float32) for block in model.blocks]
    strange = {type(slot).__name__ for slot in slots if type(slot) not in (TokenSlot, StateSlot)}
    return f"what {', '.join(sorted(strange))} remembers may change its shape" if strange else None


def capacity_for(longest: int, max_new_tokens: int, context: int) -> int:
    """How many tokens a fixed cache holds: all that may come, rounded up, and no more than the context."""
    return min(context, WIDTH * -(-(longest + max_new_tokens) // WIDTH))


class Decoder(Memory):
    """A model's decoding step at one batch size and capacity, with the memory that it works on.

    `stretch` decodes from a cache that holds the prompts. The model itself is not kept: only its weights' memory is,
    and `fits` asks whether they are still there. `unfused` says why its step has as many kernels as the model has
    operations; None if it is one of those in `row_steps`.
    """

    def __init__(self, model: Backbone, batch: int, capacity: int, sampling: Sampling, *, record: bool = True) -> None:
        super().__init__(model, batch, capacity, sampling)
        device = self.tokens.device
        self.busy = False  # decoding for somebody
        self.weights = [*model.parameters(), *model.buffers()]
        self.held: list[Tensor] = []  # while it is busy, their memory, wherever the model may go meanwhile
        self.fingerprint = fingerprint(model)
        record = record and device.type == "cuda"
        # a recording knows addresses only, so what a step looks up is kept here
        self.looked_up: Any = None
        self.unfused = row_steps.refusal(model, batch)
        self.several = SEVERAL if self.unfused is None or not record else 1
        self.behind = 0 if not record else BEHIND if self.several == 1 else 2 * self.several
        # of each of so many steps the tokens and whether logits are finite, in rows of whole 16 bytes as kernels like
        # them; `out` is where the next step writes
        self.outs = torch.zeros(self.several, 2 * (batch // 2 + 1), dtype=torch.long, device=device)
        self.out = self.outs[0, : batch + 1]
        self.host = torch.zeros(self.behind + 1, *self.outs.shape, dtype=torch.long, pin_memory=record)
        self.read = [torch.cuda.Event() for _ in self.host] if record else []
        step: Any = partial(fixed_step, model, self)
        if self.unfused is None:
            step = row_steps.RowStep(model, self)
            self.looked_up = step.keeps

        def steps() -> None:
            for row in self.outs:
                self.out = row[: batch + 1]
                step()
            self.out = self.outs[0, : batch + 1]

        with self._constants():
            self.advance: Callable[[], None] = self._recorded(step) if record else step
            self.advance_several = steps if not record else self.advance if self.several == 1 else self._recorded(steps)

    def fits(self, model: Backbone, batch: int, capacity: int, sampling: Sampling) -> bool:
        """Whether this decoder, as it is, decodes that."""
        same = (self.batch, self.sampling) == (batch, sampling) and self.capacity >= capacity
        return same and not self.busy and self.fingerprint == fingerprint(model)

    def _recorded(self, advance: Callable[[], None]) -> Callable[[], None]:
        return Recorder(self.generator if self.sampling.temperature else None).record(advance, WARM_UP)[0]

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
        self._follow()
        pairs = [
            pair
            for mine, theirs in zip(self.cache.slots, cache.slots, strict=True)
            for slot, other in zip(mine, theirs, strict=True)
            for pair in zip(slot.tensors(), other.tensors(), strict=True)
        ]
        torch._foreach_copy_([kept for kept, _ in pairs], [given for _, given in pairs])
        self.positions.copy_(cache.lengths[:, None])
        self.origins.copy_(cache.origins)
        self.lengths.zero_()

    def _follow(self) -> None:
        """Take the learned coefficients as they are now, all of a range at once: there are many, of one number each."""
        alike: dict[str, list[tuple[Coefficient, Tensor, Tensor]]] = {}
        for (bank, key), value in self.coefficients.items():
            if key in bank.pinned:
                value.copy_(bank.pinned[key])
            else:
                spec = bank.specs[key]
                alike.setdefault(spec.range, []).append((spec, value, bank.get_parameter(key).detach()))
        for group in alike.values():
            specs, values, raws = zip(*group, strict=True)
            mapped = specs[0].value(torch.cat([raw.reshape(-1) for raw in raws])).split([raw.numel() for raw in raws])
            torch._foreach_copy_(values, [new.view_as(value) for new, value in zip(mapped, values, strict=True)])
        if self.looked_up is not None:
            self.looked_up.follow()

    def stretch(self, cache: Cache, logits: Tensor, count: int) -> Generator[list[int], None, None]:
        """`count` tokens of every row after the prompts in `cache`, whose last logits (B, 1, V) are given."""
        self._refuse(cache.longest, count)
        self.load(cache)
        self.choose(logits[:, -1])
        yield from self._decoded(count, chosen=True)

    def reads(self, rows: list[list[int]]) -> bool:
        """Whether its own steps read these prompts: short ones of one length."""
        return self.unfused is None and len(rows[0]) <= SHORT and all(len(row) == len(rows[0]) for row in rows)

    def after(self, rows: list[list[int]], count: int) -> Generator[list[int], None, None]:
        """`count` tokens of every row after prompts that it `reads`, without a pass over all of their tokens."""
        length = len(rows[0])
        self._refuse(length, count)
        self._follow()
        self.given[:, :length].copy_(torch.tensor(rows))
        self.lengths.fill_(length)
        self.positions.zero_()
        self.origins.zero_()
        # states begin anew; and keys that are not visible count 0 times what they are, which an earlier text left
        torch._foreach_zero_([t for slots in self.cache.slots for slot in slots for t in slot.tensors()])
        state = self.generator.get_state()
        blocks, single = divmod(length - 1, self.several)
        for _ in range(blocks):
            self.advance_several()
        for _ in range(single):
            self.advance()
        self.generator.set_state(state)  # what these steps drew is not used
        yield from self._decoded(count, chosen=False)

    def _refuse(self, longest: int, count: int) -> None:
        # the first token needs no step of its own, and the last one is not stored: nobody runs ahead of the capacity
        if longest + count - 1 > self.capacity:
            raise StepformerError(f"After {longest} tokens a decoder of {self.capacity} cannot decode {count} more.")

    def _decoded(self, left: int, *, chosen: bool) -> Generator[list[int], None, None]:
        """The next `left` tokens of every row, the first of which may already be `chosen`."""
        waiting: deque[tuple[int, int]] = deque()
        place = ahead = 0
        while left:
            count = 1 if chosen or left < self.several else self.several
            if not chosen:
                (self.advance if count == 1 else self.advance_several)()
            chosen = False
            self.host[place, :count].copy_(self.outs[:count], non_blocking=True)
            if self.read:
                self.read[place].record()
            waiting.append((place, count))
            place, ahead, left = (place + 1) % len(self.host), ahead + count, left - count
            while waiting and (ahead > self.behind or not left):
                ahead -= waiting[0][1]
                yield from self._received(*waiting.popleft())

    def _received(self, place: int, count: int) -> Iterator[list[int]]:
        if self.read:
            self.read[place].synchronize()
        for found in self.host[place, :count].tolist():
            if not found[self.batch]:
                raise StepformerError(NOT_FINITE)
            yield found[: self.batch]


def fixed_step(model: Backbone, own: Memory) -> None:
    """One token per row through the model's own blocks, from the tensors of a decoder back into them."""
    call = model.confined(own.call(), own.tokens, own.origins)
    s = model.start(own.tokens, call.positions)
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


def fingerprint(model: Backbone) -> tuple[object, ...]:
    """What a recording depends on besides the shapes: where the weights lie, and the settings of torch."""
    weights = tuple((t.data_ptr(), t.dtype, t.stride()) for t in (*model.parameters(), *model.buffers()))
    settings = tuple(own for b in model.blocks for part in (b.attn, b.mlp) for own in fused.settings_of(part))
    return (
        weights,
        model.plain_layers,
        row_steps.is_pinned(model),
        model.plan(),  # another object where a rule, a norm or their settings have changed
        settings,
        kernels.switched_on(),
        torch.are_deterministic_algorithms_enabled(),
        matmul_precision(),
        torch.is_inference_mode_enabled(),
    )


_kept: WeakKeyDictionary[Backbone, Decoder] = WeakKeyDictionary()


@contextlib.contextmanager
def decoder_for(model: Backbone, batch: int, capacity: int, sampling: Sampling) -> Iterator[Decoder]:
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
