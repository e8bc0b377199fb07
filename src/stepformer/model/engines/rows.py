"""The decoding step in few kernels: the plan of training (planning.py) for one token of each row.

The model's own blocks would launch every operation of a step by itself, and for one token the launches are what takes
time. Here a pass between two oracles waits until somebody asks for what it computes; the product of an oracle computes
it on the way (ops/rows.py). Attentions have steps of their own (attention_steps.py); any other one, a plug-in's, is
called as it is, and so is an MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from stepformer.decoding.sampling import Sampling, probabilities
from stepformer.extras.documents import Documents
from stepformer.model.backbone import Backbone
from stepformer.model.engines import attention_steps, fused
from stepformer.model.engines.oracles import MLPS
from stepformer.model.engines.planning import EventStep, PassStep, Plan
from stepformer.ops import kernels
from stepformer.ops.mixing import Mixed
from stepformer.ops.slots import StateSlot
from stepformer.oracles.caches import Call
from stepformer.rules.coefficients import ArrayBank, CoefficientBank

MOST_ROWS = 64
SHORT = 32  # prompts up to so many tokens are read by such steps: a pass of all of them at once has more launches


def refusal(model: Backbone, batch: int) -> str | None:
    """Why the model's own blocks take the steps; None if the kernels of this file do."""
    if not kernels.usable(*model.parameters()):
        return "kernels cannot take these weights"
    if batch > MOST_ROWS:
        return f"there are more than {MOST_ROWS} rows"
    if len({p.dtype for p in model.parameters()}) > 1 or not all(p.is_contiguous() for p in model.parameters()):
        return "the weights have several dtypes, or another order in memory"
    if is_pinned(model):
        return "coefficients are pinned"
    why = structural(model)
    if why is None:
        plan: Any = model.plan()
        x = torch.zeros(1, 1, model.config.d_model, device=model.device)
        made = model.remembered(x, dict.fromkeys(model.aux_embed, x))
        for name in (name.removeprefix("memory ") for name, _ in plan.starts if name.startswith("memory ")):
            if name not in made or made[name].shape != x.shape:
                return f"what its extras remember as '{name}' is not one row per token"
    return why


def is_pinned(model: Backbone) -> bool:
    """Whether somebody has put a value in the place of a learned coefficient."""
    return any(bank.pinned for block in model.blocks for bank in block.banks())


def structural(model: Backbone) -> str | None:
    """Why these kernels do not know an architecture, whatever it runs on."""
    plan = model.plan()
    if isinstance(plan, str):
        return plan
    if not plan.mixes:
        return "its extras mix values in a way of their own"
    changing = [part for part in model.parts if part.changes("logits")]
    strange = [part for part in changing if part.cap is None] or changing[1:]
    strange += [part for part in model.parts if part.changes("confine") and type(part) is not Documents]
    if strange:
        return f"{strange[0].name} has no such step"
    if any(isinstance(part, Documents) for part in model.parts) and not all(
        attention_steps.known(block.attn, model.config.context) for block in model.blocks
    ):
        return f"attention '{model.config.attention}' has no such step within documents"
    return None


class Memory:
    """What a step works on, and how it draws the next tokens."""

    out: Tensor  # where it writes them, and whether logits are finite

    def __init__(self, model: Backbone, batch: int, capacity: int, sampling: Sampling) -> None:
        device = model.embed.tok_emb.weight.device
        zeros = partial(torch.zeros, dtype=torch.long, device=device)
        self.batch, self.capacity, self.sampling, self.real_vocab = batch, capacity, sampling, model.config.real_vocab
        self.generator = torch.Generator(device)
        self.cache = model.new_cache(batch, capacity)
        self.tokens, self.positions, self.origins = zeros(batch, 1), zeros(batch, 1), zeros(batch)
        self.keys = torch.arange(capacity, device=device)
        self.given, self.lengths = zeros(batch, SHORT), zeros(batch)  # prompts that steps read
        self.coefficients = {
            (bank, key): bank.value(key).detach().clone()
            for bank in model.modules()
            if isinstance(bank, CoefficientBank) and not isinstance(bank, ArrayBank)
            for key in bank.specs
        }

    def call(self) -> Call:
        """How attentions that are called as they are written see the new tokens."""
        positions = self.positions.clamp(max=self.capacity - 1)  # a step too many writes over the last token
        return Call(positions, (self.keys <= positions[..., None])[:, None], 0, self.capacity, uniform=False)

    def choose(self, logits: Tensor) -> None:
        """Draw the next tokens from logits (B, V), on the device and into the tensors of this memory."""
        ids = draw(logits, self.real_vocab, self.sampling, self.generator)
        self.tokens.copy_(ids[:, None])
        self.out[:-1].copy_(ids)
        # the largest of all sizes is finite only if all are
        self.out[-1].copy_(torch.linalg.vector_norm(logits, math.inf).isfinite())


def draw(logits: Tensor, real_vocab: int | None, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One id per row, (B,): what `generation.sample` draws from the same generator, without asking the device."""
    if sampling.temperature == 0:
        return logits[:, :real_vocab].float().argmax(dim=-1)
    p = probabilities(logits, real_vocab, *sampling)
    # torch.multinomial draws one sample in this way, after looking at the values
    return (p / torch.empty_like(p).exponential_(1, generator=generator)).argmax(dim=-1)


class RowStep:
    """One token per row, from the tensors of a decoder back into them, as `steps.fixed_step`."""

    def __init__(self, model: Backbone, decoder: Memory) -> None:
        from stepformer.ops import rotation, rows

        self.model, self.decoder, self.fast = model, decoder, rows
        plan = model.plan(ready=True)
        assert isinstance(plan, Plan)
        self.plan = plan
        config, device = model.config, decoder.positions.device
        self.dtype = model.embed.tok_emb.weight.dtype
        self.cap = next((part.cap for part in model.parts if part.cap is not None), None)
        self.separator = next((part.separator for part in model.parts if isinstance(part, Documents)), None)
        rotary = model.blocks[0].attn.rotary
        angles = rotation.tables(decoder.capacity, config.head_dim // 2, device) if rotary else None
        self.where = rows.Where(decoder.positions, decoder.origins, self.separator is not None, angles)
        self.starts = {
            name: torch.full((decoder.batch, 1, config.d_model), float(start == "ones"), device=device)
            if start != "identity"
            else torch.eye(config.head_dim, device=device).expand(decoder.batch, 1, -1, -1)
            for name, start in model.starts.items()
            if name not in model.aux_embed and isinstance(start, str) and start != "copy"
        }
        self.made: dict[Any, tuple[Tensor, Callable[[], Tensor]]] = {}  # what is made of the weights, and how
        self.keeps = _Kept(self)

    def of_weights(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that is made of the weights once for all tokens of a text."""
        if key not in self.made:
            with torch.no_grad():
                self.made[key] = make().contiguous(), make
        return self.made[key][0]

    def lines(self) -> list[Tensor]:
        """What passes multiply rows by, from the learned coefficients."""
        numbers = self.plan.numbers
        assert numbers is not None
        if not numbers.key:
            return []
        raws = [getattr(getattr(self.model.blocks[layer], bank), key) for layer, bank, key in self.plan.raws]
        some = raws or [torch.zeros(1, device=self.where.positions.device)]

        def make() -> Tensor:  # from the parameters: nothing here holds the model
            found: Tensor = torch.ops.stepformer.numbers(numbers.key, torch.cat([raw.reshape(-1) for raw in some]))
            return found

        return list(self.of_weights("numbers", make).split(list(numbers.sizes)))

    def __call__(self) -> None:
        own = self.decoder
        u = Walk(self).finish()
        found, best = self.fast.logits(u, self.model.table(), self.cap, own.real_vocab)
        if own.sampling.temperature == 0:
            self.fast.finish(best, own.tokens, own.positions, own.out)
        else:
            own.positions += 1
            own.choose(found)


class _Kept:
    """What a recorded step looks up, without the step and the model: a decoder holds it."""

    def __init__(self, step: RowStep) -> None:
        self.made, self.where, self.starts = step.made, step.where, step.starts

    def follow(self) -> None:
        """Make again what was made of the weights."""
        with torch.no_grad():
            for tensor, make in self.made.values():
                tensor.copy_(make())


class Walk:
    """The steps of a plan for one token of each row: tensors (B, d) in its places, and the pass that waits."""

    def __init__(self, step: RowStep) -> None:
        self.step, self.model, self.decoder, self.fast = step, step.model, step.decoder, step.fast
        self.plan, self.where = step.plan, step.where
        self.lines = step.lines()
        self.places: list[Any] = [None] * self.plan.places
        self.pending: tuple[Any, dict[int, str]] | None = None  # and which place each output has
        self.calls = [0] * len(self.model.blocks)
        self.remembered: dict[str, Tensor] = {}  # by attentions, for deeper ones
        self.fields: Any = None
        self.depth: Any = None
        self.call: Call | None = None  # for attentions without steps of their own
        self.states: list[tuple[StateSlot, list[Tensor]]] = []  # of those, and where they lay before
        self._start()

    @cached_property
    def counts(self) -> Tensor:
        """How many tokens the new one of each row sees, (B, 1)."""
        found = self.where.positions + 1
        return (found - self.where.origins[:, None] if self.where.documents else found).float()

    @property
    def ones(self) -> Tensor:
        return torch.ones(self.decoder.batch, 1, device=self.where.positions.device)

    def _start(self) -> None:
        model, own = self.model, self.decoder

        def of(tables: Any) -> Tensor:
            position = None if tables.pos_emb is None else tables.pos_emb.weight
            return self.fast.embed(
                own.tokens, self.where, own.given, own.lengths, tables.tok_emb.weight, position, own.out[-1:],
                self.step.separator,
            )[:, None]  # fmt: skip

        tabled = {name: of(tables) for name, tables in model.aux_embed.items()}
        streams = tabled | self.step.starts
        x = of(model.embed)  # an embedding comes last: what overlaps begins behind it
        memory = model.remembered(x, tabled)
        for name, at in self.plan.starts:
            kind, _, key = name.partition(" ")
            found = {"x": x} if kind == "x" else streams if kind == "stream" else memory
            self.places[at] = fused.array(model, key) if kind == "array" else found[key or kind]

    def finish(self) -> Tensor:
        """The normalised x after the last layer, (B, d)."""
        before: PassStep | None = None
        for step in self.plan.steps:
            if isinstance(step, PassStep):
                before = step
                continue
            if before is not None:
                self.wait(before, step.drops)
                before = None
            if step.kind == "finish":
                for slot, tensors in self.states:
                    slot.keep(tensors)
                return self.value(step.needs[0]).flatten(0, 1)
            self.event(step)
            self.settle()
            self.pending = None
            for at in step.drops:
                self.places[at] = None
        raise AssertionError("a plan ends with what it finishes")

    # passes

    def wait(self, step: PassStep, dropped: tuple[int, ...]) -> None:
        """A pass comes up; it runs when somebody needs it. `dropped`: what nobody reads after the next event."""
        names = [*(f"r{i}" for i in range(step.program.inputs["row"]))]
        names += [f"s{i}" for i in range(step.program.inputs["stat"])]
        tensors = {name: self.places[at] for name, at in zip(names, step.reads, strict=True)}
        tensors = {name: (t.flatten(0, 1) if name[0] == "r" else t).contiguous() for name, t in tensors.items()}
        tensors |= {f"g{i}": fused.parameter(self.model, *gain) for i, gain in enumerate(step.gains)}
        if step.line >= 0:
            tensors["scalars"] = self.lines[step.line]
        written = dict(zip(step.writes, step.program.names(), strict=True))
        for at, (name, _) in zip(step.lends, step.program.lends, strict=True):
            if name[0] == "o":
                written[at] = name
            else:
                self.places[at] = self.places[step.reads[int(name[1:])]]
        wanted = [name for at, name in written.items() if at not in dropped and at not in step.drops]
        self.pending = self.fast.Pending(step.program, tensors, wanted, self.step.dtype), written
        for at in step.drops:
            self.places[at] = None

    def settle(self, *places: int) -> None:
        """What waits runs, as far as these places and later steps need it."""
        if self.pending is None:
            return
        own, written = self.pending
        outs = own.run(*(written[at] for at in places if at in written))
        self.places = [outs[written[at]][:, None] if written.get(at) in outs else t for at, t in enumerate(self.places)]

    def source(self, at: int) -> Any:
        """What stands in a place, for a product: perhaps the output of the pass that waits."""
        if self.pending is not None and at in self.pending[1]:
            return self.fast.Point(self.pending[0], self.pending[1][at])
        return self.places[at].flatten(0, 1)

    def value(self, at: int) -> Tensor:
        """What stands in a place, (B, 1, d)."""
        self.settle(at)
        found: Tensor = self.places[at]
        return found

    # events

    def event(self, step: EventStep) -> None:
        found: Sequence[Tensor | None]
        if step.kind == "ask":
            found = [self.ask(step, oracle, at) for oracle, at in zip(step.oracles, step.needs, strict=True)]
        elif step.kind in ("fields", "velocity", "force"):
            found = self._field(step)
        elif step.kind == "attend_depth":
            self.settle(*step.needs)
            if self.depth is None:
                self.depth = fused.depth_attention(self.model, self.plan, torch.float32)
            found = [self.depth(step.needs, [self.places[at] for at in step.needs])[0]]
        else:
            self.settle(*step.needs)
            needs = [self.places[at] for at in step.needs]
            found = fused.call_function(step, needs, self.lines, torch.float32)
        for at, tensor in zip(step.gives, found, strict=True):
            self.places[at] = tensor

    def ask(self, step: EventStep, oracle: str, at: int) -> Tensor:
        block = self.model.blocks[step.layer]
        if oracle == "attn":
            return self._attend(step, block.attn, at)
        mlp, linear = block.mlp, self.fast.linear
        if type(mlp) not in MLPS or not attention_steps.has_plain_layers(mlp):
            written: Tensor = mlp(self.value(at).to(self.step.dtype)).float()
            return written
        h = linear(self.source(at), mlp.up.weight, mlp.up.bias, activation=mlp.name)
        found: Tensor = linear(h, mlp.down.weight, mlp.down.bias)
        return found[:, None]

    def slot(self, layer: int) -> Any:
        """The cache of the layer's attention call that comes next."""
        self.calls[layer] += 1
        return self.decoder.cache.slots[layer][self.calls[layer] - 1]

    def _attend(self, step: EventStep, attn: Any, at: int) -> Tensor:
        own = attention_steps.known(attn, self.model.config.context)
        if own is None:
            return self._as_written(step, attn, at)
        mix = None
        if step.mixes and step.mixture is not None:
            earlier = self.places[step.mixture[0]]  # values (B, d), or rows (B, 1, d)
            mix = self.fast.Mix(earlier.flatten(1), self.lines[step.line])
        answer, values = own(self, attn, self.source(at), self.slot(step.layer), mix)
        if step.mixture is not None and not step.mixes:
            self.places[step.mixture[0]] = values
        found: Tensor = answer
        return found[:, None]

    def _field(self, step: EventStep) -> list[Tensor]:
        attn = self.model.blocks[step.layer].attn
        if step.kind == "fields":
            own = attention_steps.known(attn, self.model.config.context)
            if own is not None:
                if self.pending is not None and step.needs[1] in self.pending[1]:
                    self.pending[0].wanted.append(self.pending[1][step.needs[1]])
                momentum = partial(self.value, step.needs[1])
                self.fields = own(self, attn, self.source(step.needs[0]), momentum, self.slot(step.layer))
            else:
                u, y = (self.value(at).to(self.step.dtype) for at in step.needs)
                self.fields = Written(attn.fields(u, y, self._call(step.layer)), y)
            return []
        if step.kind == "velocity":
            own_y = not step.needs
            return list(self.fields.scaled_velocity() if own_y else [self.fields.velocity(self.value(step.needs[0]))])
        return [self.fields.force()]

    # oracles as they are written

    def _call(self, layer: int) -> Call:
        """The call as an attention sees it that is called as it is."""
        if self.call is None:
            self.call = replace(self.decoder.call(), memory=self.remembered)
        slot = self.slot(layer)
        if isinstance(slot, StateSlot):
            self.states.append((slot, slot.tensors()))
        return replace(self.call, slots=[slot], used=0)

    def _as_written(self, step: EventStep, attn: Any, at: int) -> Tensor:
        call = self._call(step.layer)
        if step.mixture is not None:
            call.mixed = Mixed(self.lines[step.line], self.places[step.mixture[0]]) if step.mixes else Mixed()
        answer: Tensor = attn(self.value(at).to(self.step.dtype), call)
        if step.mixture is not None and call.mixed is not None:
            self.places[step.mixture[0]] = call.mixed.earlier
        return answer.float()


class Written:
    """The fields of a Hamiltonian attention as it is written, at a momentum y."""

    def __init__(self, fields: Any, y: Tensor) -> None:
        self.fields, self.y = fields, y

    def scaled_velocity(self) -> tuple[Tensor, Tensor]:
        row = self.fields.velocity(self.y).float()
        return row, torch.ones(row.shape[:-1], device=row.device)

    def velocity(self, y: Tensor) -> Tensor:
        found: Tensor = self.fields.velocity(y.to(self.y.dtype)).float()
        return found

    def force(self) -> Tensor:
        found: Tensor = self.fields.force().float()
        return found
