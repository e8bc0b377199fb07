"""The decoding step of gradient descent and the velocity methods with softmax attention, in five kernels a layer.

The model's own blocks would launch every operation of a step by itself, and for one token the launches are what takes
time. Here the splittings run as they are, over turns that remember what a kick, a norm and a drift do to the streams
until an oracle is asked; the first product of that oracle then does it (ops/rows.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stepformer.decoding.sampling import Sampling, probabilities
from stepformer.model.backbone import Backbone
from stepformer.model.engines.oracles import MLPS
from stepformer.ops import kernels
from stepformer.ops.scores import rotate
from stepformer.ops.slots import TokenSlot
from stepformer.oracles.softmax import QK_NORM_EPS, SoftmaxAttention
from stepformer.rules.coefficients import CoefficientBank
from stepformer.rules.first_order import GradientDescent, HeavyBall, Nesterov, TripleMomentum
from stepformer.rules.splittings import Splitting

MOST_ROWS = 4  # beyond, products of matrices are faster than rows of products with vectors
WIDEST = 2048
SHORT = 32  # prompts up to so many tokens are read by such steps: a pass of all of them at once has more launches
TEMPLATES = (GradientDescent, HeavyBall, Nesterov, TripleMomentum)


def refusal(model: Backbone, batch: int) -> str | None:
    """Why the model's own blocks take the steps; None if the kernels of this file do."""
    if not kernels.usable(*model.parameters()):
        return "kernels cannot take these weights"
    if batch > MOST_ROWS:
        return f"there are more than {MOST_ROWS} rows"
    if len({p.dtype for p in model.parameters()}) > 1:
        return "the weights have several dtypes"
    return structural(model)


def defers(splitting: Splitting) -> bool:
    """Whether this very class says `deferrable`: a subclass may do something else with the state."""
    return bool(type(splitting).__dict__.get("deferrable", False))


def structural(model: Backbone) -> str | None:
    """Why these kernels do not know an architecture, whatever it runs on."""
    config, block = model.config, model.blocks[0]
    if type(block.template) not in TEMPLATES or not defers(block.splitting):
        return f"template '{config.template}' under '{config.splitting}' has no such step"
    if type(block.attn) is not SoftmaxAttention or type(block.mlp) not in MLPS:
        return f"attention '{config.attention}' with MLP '{config.mlp}' has no such step"
    strange = [part.name for part in model.parts if part.cap is None]
    if strange:
        return f"{' and '.join(strange)} {'has' if len(strange) == 1 else 'have'} no such step"
    head = config.head_dim
    if head & (head - 1) or not 16 <= config.d_model <= WIDEST:
        return f"heads of width {head} in a model of width {config.d_model} do not fit the kernels"
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
            if isinstance(bank, CoefficientBank)
            for key in bank.specs
        }

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


@dataclass(frozen=True)
class Number:
    """A learned coefficient times a factor; without a bank the factor alone."""

    factor: float = 1.0
    bank: CoefficientBank | None = None
    key: str = ""

    def times(self, factor: float) -> Number:
        return replace(self, factor=self.factor * factor)


NONE = Number(0.0)
Four = tuple[Number, Number, Number, Number]  # a, b, c, m of row_kernels.py


class Numbers:
    """The four numbers of every point of a step, in order, as one tensor that follows the learned coefficients."""

    def __init__(self, planned: list[Four], coefficients: dict[Any, Tensor], device: torch.device) -> None:
        used = dict.fromkeys((n.bank, n.key) for four in planned for n in four if n.bank is not None)
        self.sources = [coefficients[each] for each in used]
        places = {each: i + 1 for i, each in enumerate(used)}  # before them a one
        index = [[places[n.bank, n.key] if n.bank is not None else 0 for n in four] for four in planned]
        self.index = torch.tensor(index, device=device)
        self.factors = torch.tensor([[n.factor for n in four] for four in planned], device=device)
        self.one = torch.ones(1, device=device)
        self.values = torch.empty_like(self.factors)
        self.refresh()

    def refresh(self) -> None:
        known = torch.cat([self.one, *(source.float() for source in self.sources)])
        torch.mul(self.factors, known[self.index], out=self.values)


@dataclass
class Update:
    """What happens to the streams when somebody looks: w = a v + b g, v' = LN_v(w), x' = x + c v'."""

    g: Tensor | None
    a: Number
    b: Number
    velocity: bool
    c: Number = NONE
    norm: nn.LayerNorm | None = None


@dataclass
class Streams:
    """x and v (B, d), and the update they still wait for; `RowStep.point` applies it in place."""

    x: Tensor | None
    v: Tensor | None
    waiting: Update | None = None


class RowTurn:
    """A turn as a splitting sees it (`rules.splittings.Substep`); a `plain` one adds the answer to x."""

    def __init__(self, step: RowStep, layer: int, turn: str, plain: bool = False) -> None:
        self.step, self.layer, self.block = step, layer, step.model.blocks[layer]
        bank, norms = self.block.coefficients, self.block.norm_keys
        self.oracles = (turn,) if plain else self.block.splitting.oracles[turn]
        self.velocity = not plain and self.block.template.has_velocity()
        self.keys = {} if plain else bank.keys_of[turn]
        self.constants = {} if plain else bank.constants.get(turn, {})
        self.norm: Any = None if plain or turn not in norms else self.block.aux_norms[norms[turn]]

    def number(self, name: str) -> Number:
        """A coefficient of this turn, a constant, or 1."""
        if name in self.keys:
            return Number(1.0, self.block.coefficients, self.keys[name])
        return Number(self.constants.get(name, 1.0))

    def ask(self, s: Streams, scale: float = 1.0) -> Tensor | None:
        answers = [self.step.ask(self, oracle, s) for oracle in self.oracles]
        found = [answer for answer in answers if answer is not None]
        return sum(found[1:], found[0]) if found else None

    def kick(self, s: Streams, g: Tensor | None, scale: float = 1.0) -> Streams:
        self.step.settle(s)
        kept, gain = (self.number("beta"), self.number("gamma")) if self.velocity else (NONE, self.number("step"))
        return Streams(s.x, s.v, Update(g, kept, gain.times(scale), self.velocity))

    def normalise(self, s: Streams) -> Streams:
        return self._waiting(s, norm=self.norm)

    def drift(self, s: Streams, scale: float = 1.0) -> Streams:
        return self.follow(s, "nu")

    def follow(self, s: Streams, name: str) -> Streams:
        return self._waiting(s, c=self.number(name))

    def _waiting(self, s: Streams, **more: Any) -> Streams:
        assert s.waiting is not None
        return Streams(s.x, s.v, replace(s.waiting, **more))

    def take(self, s: Streams, scale: float = 1.0) -> Streams:
        return self.drift(self.normalise(self.kick(s, self.ask(s, scale), scale)), scale)


class RowStep:
    """One token per row, from the tensors of a decoder back into them, as `steps.fixed_step`."""

    def __init__(self, model: Backbone, decoder: Memory) -> None:
        from stepformer.ops import rows

        self.model, self.decoder, self.fast = model, decoder, rows
        self.cap = next((part.cap for part in model.parts), None)
        device = decoder.positions.device
        attn = model.blocks[0].attn
        self.angles: tuple[Tensor, Tensor] | None = None  # cosines and sines by position
        if attn.rotary:
            first = torch.arange(model.config.head_dim, device=device) < model.config.head_dim // 2
            turned = rotate(first.float().expand(1, 1, decoder.capacity, -1), decoder.keys)[0, 0]
            cosines, sines = turned.chunk(2, dim=-1)
            self.angles = cosines.contiguous(), sines.contiguous()
        self.planned: list[Four] = []
        self.numbers: Numbers | None = None  # while it is None, nothing is launched: the numbers are collected
        self()
        self.numbers = Numbers(self.planned, decoder.coefficients, device)

    def __call__(self) -> None:
        model, own = self.model, self.decoder
        self.points, self.calls = 0, [0] * len(model.blocks)
        s = Streams(None, None) if self.numbers is None else self.start()
        for i, block in enumerate(model.blocks):
            if i in model.plain_layers:
                for oracle in ("attn", "mlp"):
                    s = RowTurn(self, i, oracle, plain=True).take(s)
            else:
                turns = {turn: RowTurn(self, i, turn) for turn in block.splitting.oracles}
                step: Any = block.splitting.step  # to it, these turns and streams are like any others
                s = step(turns, s)
        u = self.settle(s, model.final_norm)
        if u is None:  # the numbers were collected
            return
        found, best = self.fast.logits(u, model.embed.tok_emb.weight, self.cap, own.real_vocab)
        if own.sampling.temperature == 0:
            self.fast.finish(best, own.tokens, own.positions, own.out)
        else:
            own.positions += 1
            own.choose(found)

    def start(self) -> Streams:
        def of(tables: Any) -> Tensor:
            position = None if tables.pos_emb is None else tables.pos_emb.weight
            own = self.decoder
            return self.fast.embed(own.tokens, own.positions, own.given, own.lengths, tables.tok_emb.weight, position)

        tables, weight, v = self.model.aux_embed, self.model.embed.tok_emb.weight, None
        if "v" in tables:
            v = of(tables["v"])
        elif "v" in self.model.starts:
            v = weight.new_zeros(self.decoder.batch, weight.shape[1], dtype=torch.float32)
        return Streams(of(self.model.embed), v)  # an embedding comes last: what overlaps begins behind it

    def point(self, s: Streams, norm: nn.Module | None, ahead: Number | None = None) -> Any:
        """Where to look next, as the kernels take it; the streams are those after it."""
        waiting = s.waiting or Update(None, NONE, NONE, False)
        if self.numbers is None:
            self.planned.append((waiting.a, waiting.b, waiting.c, ahead or NONE))
            s.waiting = None
            return None
        assert s.x is not None
        found = self.fast.Point(s.x, self.numbers.values[self.points], norm, v=s.v, ahead=ahead is not None)
        self.points += 1
        if s.waiting is not None:
            found.g, found.new_x = waiting.g, torch.empty_like(s.x)
            found.new_v = torch.empty_like(s.x) if waiting.velocity else None
            if waiting.norm is not None:
                found.v_gain, found.v_eps = waiting.norm.weight, waiting.norm.eps
            s.x, s.v, s.waiting = found.new_x, found.new_v if waiting.velocity else s.v, None
        return found

    def settle(self, s: Streams, norm: nn.Module | None = None) -> Tensor | None:
        """Apply what waits, by itself; with a norm also the point x' behind it."""
        if s.waiting is None and norm is None:
            return None
        found = self.point(s, norm)
        return None if found is None else self.fast.point(found)

    def ask(self, turn: RowTurn, oracle: str, s: Streams) -> Tensor | None:
        """An oracle's answer at the point where a turn looks, (B, d)."""
        block = turn.block
        norm = block.attn_norm if oracle == "attn" else block.mlp_norm
        found = self.point(s, norm, turn.number("mu") if "mu" in turn.keys else None)
        if found is None:
            return None
        linear = self.fast.linear
        if oracle == "mlp":
            mlp = block.mlp
            h = linear(found, mlp.up.weight, mlp.up.bias, activation=mlp.name)
            return linear(h, mlp.down.weight, mlp.down.bias)
        attn, slot = block.attn, self.decoder.cache.slots[turn.layer][self.calls[turn.layer]]
        self.calls[turn.layer] += 1
        assert isinstance(slot, TokenSlot)
        assert isinstance(attn, SoftmaxAttention)
        qkv = linear(found, attn.qkv.weight, attn.qkv.bias)
        seen = self.fast.attend(
            qkv,
            slot.stored["k"],
            slot.stored["v"],
            self.decoder.positions,
            self.angles,
            QK_NORM_EPS if attn.qk_norm else None,
        )
        return linear(seen, attn.out.weight, attn.out.bias)
